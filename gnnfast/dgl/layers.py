"""Layers of ``dgl.nn.pytorch`` as a whole: GATConv, GATv2Conv, DotGatConv and AGNNConv by fused attention, GraphConv and SAGEConv
by mean as one node of autograd, with their normalisation as weights of edges that are kept with the graph, and GINConv by sum.
Layers with types of edges are in :mod:`gnnfast.dgl.relational`.

A layer's own parts (dropouts, linear layers, activations) are called as DGL calls them. What lies between them takes a graph's
index and tensors: neither frames nor edge data are made. That pays on a graph that is met first, too, however small: on a CPU, of
50 to 240,000 edges and new in each step, 1.05 to 3.9 times DGL, its conversion included. What is not certain is found out before
the first part runs, and runs as DGL wrote it.

Letters in comments: N sources, M destinations, E edges, H heads, D features a head.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gnnfast.cache import cache
from gnnfast.dgl.backend import unsupported_operands
from gnnfast.dgl.structure import ends, known, starves, structure
from gnnfast.dispatch import execute
from gnnfast.dispatch.bias import biased
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.patching import class_of
from gnnfast.reporting import ran
from gnnfast.unsupported import Unsupported

_DTYPES = (torch.float32, torch.float64)  # which have the digits for another order of operations
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    getattr(torch_module, name)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
    if hasattr(torch_module, name)
)


# Functions that layers call, and where DGL defines them; and methods of graphs.
_CALLED = {"edge_softmax": "dgl.ops.edge_softmax", "expand_as_pair": "dgl.utils.internal"}
_METHODS = ("apply_edges", "update_all", "local_scope", "in_degrees", "out_degrees")
_names = frozenset(_METHODS)


def defined(name: str, where: str) -> Any:
    """DGL's own function, or what nothing equals if somebody has replaced it."""
    found = operator.attrgetter(name)(sys.modules[where])
    return found if found.__module__ == where and found.__qualname__ == name else object()


# ---- what every layer asks -----------------------------------------------------------------------------------------------------
def dispatcher(forward: Callable[..., Any]) -> Callable[[FunctionType], Callable[..., Any]]:
    """What makes a dispatcher of ``forward``, which raises Unsupported before it runs a part of the layer."""

    def make(original: FunctionType) -> Callable[..., Any]:
        functions = original.__globals__
        called = [(name, defined(name, where)) for name, where in _CALLED.items() if name in functions]
        methods = [(name, defined(f"DGLGraph.{name}", "dgl.heterograph")) for name in _METHODS]
        message = getattr(class_of(original), "message", None)

        def dispatch(module: Any, graph: Any, *args: Any) -> Any:
            place = f"dgl {type(module).__name__}"
            try:
                if any(functions.get(name) is not f for name, f in called):
                    raise Unsupported("a function that the layer calls was replaced")
                if any(getattr(type(graph), name, None) is not f for name, f in methods) or not _names.isdisjoint(vars(graph)):
                    raise Unsupported("the graph is of a class of its own, or has methods of its own")
                if getattr(type(module), "message", None) is not message:
                    raise Unsupported("message() is another than the layer's")
                return forward(module, graph, place, *args)
            except Unsupported as error:
                ran(place, "in parts", str(error))  # which say themselves how they ran
                return NotImplemented

        return dispatch

    return make


def _pair(graph: Any, feat: Any) -> tuple[Any, Any]:
    """The features of sources and destinations; those of a block's destinations come first among its sources."""
    if isinstance(feat, tuple):
        if len(feat) != 2:
            raise Unsupported("features are no pair")
        return feat
    if not isinstance(feat, Tensor):
        raise Unsupported(f"features are a {type(feat).__name__}")
    return feat, feat[: graph.number_of_dst_nodes()] if graph.is_block else feat


def _check_frames(graph: Any, feat: Any) -> None:
    """For layers that keep rows of both ends under one name: DGL reads those of destinations twice where there is one frame."""
    if isinstance(feat, tuple) and not graph.is_block and graph.srctypes == graph.dsttypes:
        raise Unsupported("a pair of features for nodes of one type")


def check_graph(module: Any, graph: Any, pair: tuple[Any, Any], starving: bool = False) -> Any:
    """The index of a graph that layers are served on. ``starving``: nodes without in-edges are no error."""
    gidx = graph._graph
    reason = unsupported_operands(gidx, ("features", pair[0], "num_src"), ("features", pair[1], "num_dst"))
    if not reason and (pair[0].dim() != 2 or pair[1].dim() != 2 or pair[0].dtype not in _DTYPES):
        reason = f"features are {pair[0].dtype} of shapes {list(pair[0].shape)} and {list(pair[1].shape)}"
    if not reason and torch.is_autocast_enabled(pair[0].device.type):
        reason = "autocast is on"
    if not reason and not starving and not module._allow_zero_in_degree and starves(graph):
        reason = "a node has no in-edges"  # DGL raises its error
    if reason:
        raise Unsupported(reason)
    return gidx


def is_plain(part: Any, cls: type) -> bool:
    """Whether a part of a layer is what torch wrote, and nobody watches it."""
    own = part.__dict__ if type(part) is cls else {"forward": None}
    return "forward" not in own and not any(own[name] for name in _HOOKS) and not any(_GLOBAL_HOOKS)


def _fits(t: Any, shape: tuple[int, ...], like: Tensor) -> bool:
    """Whether a part gave what it gives."""
    return (
        type(t) is Tensor and t.layout is torch.strided and t.shape == shape and t.dtype is like.dtype and t.device == like.device
    )


def _ops() -> tuple[Any, Any, Any]:
    """DGL's message passing on an index, as it is now: gspmm, gsddmm and edge_softmax."""
    modules = sys.modules
    return (
        modules["dgl.ops.spmm"].gspmm_internal,
        modules["dgl.ops.sddmm"].gsddmm_internal,
        modules["dgl.ops.edge_softmax"].edge_softmax_internal,
    )


def _finish(module: Any, rst: Tensor, fused: bool, h_dst: Tensor, bias: Tensor | None) -> Tensor:
    """What follows attention ``[M, H, D]``; ``fused``: what it is is needed in the backward pass, so that users, who may write into
    theirs, get a copy."""
    if module.res_fc is not None:
        rst, fused = rst + module.res_fc(h_dst).view(h_dst.shape[0], -1, module._out_feats), False
    if bias is not None:
        rst, fused = rst + bias.view(1, module._num_heads, module._out_feats), False
    rst = rst.clone() if fused else rst
    return module.activation(rst) if module.activation else rst  # type: ignore[no-any-return]


# ---- attention -----------------------------------------------------------------------------------------------------------------
def _gat(module: Any, graph: Any, place: str, feat: Any, edge_weight: Any, get_attention: Any) -> Any:
    pair, single = _pair(graph, feat), not isinstance(feat, tuple)
    if edge_weight is not None:
        raise Unsupported("edges have weights")
    gidx = check_graph(module, graph, pair)
    _check_attention(module)
    heads, width = module._num_heads, module._out_feats
    num_src, num_dst = pair[0].shape[0], pair[1].shape[0]
    if single:
        h_src = module.feat_drop(feat)
        ft_src = module.fc(h_src)
        h_dst, ft_dst = (h_src[:num_dst], ft_src[:num_dst]) if graph.is_block else (h_src, ft_src)
    else:
        h_src, h_dst = module.feat_drop(pair[0]), module.feat_drop(pair[1])
        of_both = hasattr(module, "fc_src")
        ft_src, ft_dst = (module.fc_src if of_both else module.fc)(h_src), (module.fc_dst if of_both else module.fc)(h_dst)
    left, right = module.attn_l, module.attn_r
    fits = isinstance(left, Tensor) and isinstance(right, Tensor)
    fits = fits and left.shape == right.shape == (1, heads, width) and left.dtype is right.dtype is pair[0].dtype
    fits = fits and all(_fits(t, (n, heads * width), pair[0]) for t, n in ((ft_src, num_src), (ft_dst, num_dst)))
    if not fits:
        el = (ft_src.view(num_src, heads, width) * left).sum(dim=-1)
        er = (ft_dst.view(num_dst, heads, width) * right).sum(dim=-1)
    elif single:
        el, er = execute.head_dots(ft_src, torch.cat((left, right))).unbind()
        er = er[:num_dst]
    else:
        el, er = execute.head_dots(ft_src, left)[0], execute.head_dots(ft_dst, right)[0]
    if fits:
        known(gidx).calls += 1
        dropout = module.attn_drop.p if module.attn_drop.training else 0.0
        rst, alpha = execute.attention(
            structure(gidx),
            ft_src,
            er,
            el,
            module.leaky_relu.negative_slope,
            dropout,
            place=place,
            training=module.training,
            weights=bool(get_attention),
        )
        rst, a = rst.view(num_dst, heads, width), alpha
        fused = alpha is None
    else:
        gspmm, gsddmm, edge_softmax = _ops()
        e = gsddmm(gidx, "add", el.unsqueeze(-1), er.unsqueeze(-1), "u", "v")
        a = module.attn_drop(edge_softmax(gidx, module.leaky_relu(e)))
        rst, fused = gspmm(gidx, "mul", "sum", ft_src.view(-1, heads, width), a), False
    rst = _finish(module, rst, fused, h_dst, module.bias if module.has_explicit_bias else None)
    return (rst, a.view(-1, heads, 1)) if get_attention and a is not None else rst


def _gatv2(module: Any, graph: Any, place: str, feat: Any, get_attention: Any) -> Any:
    pair, single = _pair(graph, feat), not isinstance(feat, tuple)
    if get_attention:
        raise Unsupported("coefficients are asked for")
    gidx = check_graph(module, graph, pair)
    _check_attention(module)
    heads, width = module._num_heads, module._out_feats
    num_src, num_dst = pair[0].shape[0], pair[1].shape[0]
    if single:
        h_src = module.feat_drop(feat)
        left = module.fc_src(h_src)
        right = left if module.share_weights else module.fc_dst(h_src)
        h_dst, right = (h_src[:num_dst], right[:num_dst]) if graph.is_block else (h_src, right)
    else:
        h_src, h_dst = module.feat_drop(pair[0]), module.feat_drop(pair[1])
        left, right = module.fc_src(h_src), module.fc_dst(h_dst)
    fits = _fits(left, (num_src, heads * width), pair[0]) and _fits(right, (num_dst, heads * width), pair[0])
    rst = None
    attn = module.attn
    fits = (
        fits
        and isinstance(attn, Tensor)
        and attn.shape == (1, heads, width)
        and attn.dtype is left.dtype
        and attn.device == left.device
    )
    if fits:
        slope, dropout = module.leaky_relu.negative_slope, module.attn_drop.p if module.attn_drop.training else 0.0
        graph_of = structure(gidx)
        rst = execute.gatv2_attention(graph_of, right, left, attn.reshape(-1), heads, slope, dropout, place=place)
    fused = rst is not None
    if rst is not None:
        known(gidx).calls += 1
        rst = rst.view(num_dst, heads, width)
    else:
        gspmm, gsddmm, edge_softmax = _ops()
        left = left.view(-1, heads, width)
        e = module.leaky_relu(gsddmm(gidx, "add", left, right.view(-1, heads, width), "u", "v"))
        a = module.attn_drop(edge_softmax(gidx, (e * module.attn).sum(dim=-1).unsqueeze(dim=2)))
        rst = gspmm(gidx, "mul", "sum", left, a)
    return _finish(module, rst, fused, h_dst, None)


def _check_attention(module: Any) -> None:
    if not is_plain(module.leaky_relu, nn.LeakyReLU) or not is_plain(module.attn_drop, nn.Dropout) or module.attn_drop.inplace:
        raise Unsupported("the leaky ReLU or the dropout of coefficients is another than the layer's")


def _dot_gat(module: Any, graph: Any, place: str, feat: Any, get_attention: Any) -> Any:
    pair = _pair(graph, feat)
    _check_frames(graph, feat)
    gidx = check_graph(module, graph, pair)
    heads, width, num_dst = module._num_heads, module._out_feats, pair[1].shape[0]
    if isinstance(feat, tuple):
        src, dst = module.fc_src(pair[0]), module.fc_dst(pair[1])
    else:
        src = module.fc(feat)
        dst = src[:num_dst] if graph.is_block else src
    if _fits(src, (pair[0].shape[0], heads * width), pair[0]) and _fits(dst, (num_dst, heads * width), pair[0]):
        known(gidx).calls += 1
        graph_of, weights = structure(gidx), bool(get_attention)
        rst, a = execute.dot_attention(
            graph_of, dst, src, src, heads, width**-0.5, place=place, training=module.training, weights=weights
        )
        rst = rst.view(num_dst, heads, width)
        rst = rst.clone() if a is None else rst
    else:
        gspmm, gsddmm, edge_softmax = _ops()
        src = src.view(-1, heads, width)
        a = edge_softmax(gidx, gsddmm(gidx, "dot", src, dst.view(-1, heads, width), "u", "v") / width**0.5)
        rst = gspmm(gidx, "mul", "sum", src, a)
    return (rst, a.view(-1, heads, 1)) if get_attention else rst  # type: ignore[union-attr]


def _agnn(module: Any, graph: Any, place: str, feat: Any) -> Any:
    pair = _pair(graph, feat)
    _check_frames(graph, feat)
    gidx = check_graph(module, graph, pair)
    beta = module.beta
    if pair[0].shape[1] != pair[1].shape[1] or not isinstance(beta, Tensor) or not _fits(beta.detach(), (1,), pair[0]):
        raise Unsupported("features of sources and destinations differ")
    known(gidx).calls += 1
    key = torch.nn.functional.normalize(pair[0], p=2, dim=-1)
    query = key if pair[1] is pair[0] else torch.nn.functional.normalize(pair[1], p=2, dim=-1)
    rst, a = execute.dot_attention(
        structure(gidx), module.beta * query, key, pair[0], 1, 1.0, place=place, training=module.training
    )
    return rst.clone() if a is None else rst


# ---- layers that are linear up to their bias -----------------------------------------------------------------------------------
def _graph_conv(module: Any, graph: Any, place: str, feat: Any, weight: Any, edge_weight: Any) -> Any:
    pair = _pair(graph, feat)
    if edge_weight is not None:
        raise Unsupported("edges have weights")
    if weight is not None and module.weight is not None:
        raise Unsupported("a weight is passed to a layer that has one")  # DGL raises its error
    x, norm, bias = pair[0], module._norm, module.bias
    if norm not in _NORMS:
        raise Unsupported("the normalisation is none of DGL's")
    weight = module.weight if weight is None else weight
    gidx = check_graph(module, graph, pair)
    for t, shape in ((weight, (x.shape[1], None)), (bias, (None,))):
        if t is not None and (
            not isinstance(t, Tensor)
            or t.dim() != len(shape)
            or t.dtype is not x.dtype
            or t.device != x.device
            or shape[0] not in (None, t.shape[0])
        ):
            raise Unsupported("parameters and features do not agree")
    if weight is not None and bias is not None and bias.shape[0] != weight.shape[1]:
        raise Unsupported("parameters and features do not agree")
    first = module._in_feats > module._out_feats
    # A mean is what normalisation by the in-degree gives; others are weights of edges.
    reduce, of_edges = ("mean", None) if norm == "right" else ("sum", _edge_weights(gidx, norm, x.dtype))
    whole, out = structure(gidx), None
    if weight is not None:
        operands = execute.Linear(x, weight.t(), bias)
        copies = norm in ("left", "both")  # DGL keeps the scaled features
        out = execute.linear_layer(
            whole, operands, of_edges, reduce, first=first, place=place, owners=(module, None), copies=copies
        )
    if out is None:
        over = torch.matmul(x, weight) if weight is not None and first else x
        out = execute.aggregate(whole, over, of_edges, reduce, place=place, training=module.training, owner=module)
        out = torch.matmul(out, weight) if weight is not None and not first else out
        out = out if bias is None else biased(out, bias)
    known(gidx).calls += 1
    return out if module._activation is None else module._activation(out)


_NORMS = ("none", "right", "left", "both")


def _inverse(degrees: Tensor, norm: str, dtype: torch.dtype) -> Tensor:
    degrees = degrees.to(dtype).clamp(min=1)
    return degrees.pow(-0.5) if norm == "both" else 1.0 / degrees


def _edge_weights(gidx: Any, norm: str, dtype: torch.dtype) -> Tensor | None:
    """What normalisation makes of the edges, ``[E]``, kept with the graph: nobody else sees it."""
    if norm == "none":
        return None
    of = known(gidx)

    def build() -> Tensor:
        with torch.no_grad(), torch.inference_mode(False):
            src, dst = ends(gidx)
            made = _inverse(_degrees(src, of.num_src), norm, dtype).index_select(0, src)
            return made * _inverse(_degrees(dst, of.num_dst), norm, dtype).index_select(0, dst) if norm == "both" else made

    return cache.get((of.shared_key(),), ("dgl norm", norm, dtype, of.flipped), build)  # type: ignore[no-any-return]


def _degrees(ids: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=ids.device).index_add_(0, ids, ids.new_ones(ids.numel(), dtype=torch.int32))


def _sage(module: Any, graph: Any, place: str, feat: Any, edge_weight: Any) -> Any:
    if edge_weight is not None or module._aggre_type != "mean":
        raise Unsupported("edges have weights" if edge_weight is not None else f"aggregates by {module._aggre_type}")
    pair = _pair(graph, feat)
    gidx = check_graph(module, graph, pair, starving=True)
    neigh, own = module.fc_neigh, module.fc_self
    if not is_plain(neigh, nn.Linear) or not is_plain(own, nn.Linear) or neigh.bias is not None:
        raise Unsupported("a linear layer is another than the layer's")
    width = module._out_feats
    shapes: list[tuple[Any, Any]] = [(lin.weight, (width, x.shape[1])) for lin, x in zip((neigh, own), pair)]
    shapes += [] if own.bias is None else [(own.bias, (width,))]
    for t, shape in shapes:
        if not isinstance(t, Tensor) or t.shape != shape or t.dtype is not pair[0].dtype or t.device != pair[0].device:
            raise Unsupported("parameters and features do not agree")
    if not is_plain(module.feat_drop, nn.Dropout):
        raise Unsupported("the dropout is another than the layer's")
    if saved_tensors_are_watched():
        raise Unsupported("saved tensors are watched")
    first = module._in_src_feats > module._out_feats
    known(gidx).calls += 1
    h_src = module.feat_drop(pair[0])
    if isinstance(feat, tuple):
        h_dst = module.feat_drop(pair[1])
    else:
        h_dst = h_src[: pair[1].shape[0]] if graph.is_block else h_src
    whole, out = structure(gidx), None
    operands = execute.Linear(h_src, neigh.weight, own.bias, None if h_dst is h_src else h_dst, own.weight)
    out = execute.linear_layer(whole, operands, None, "mean", first=first, place=place, owners=(neigh if first else module, own))
    if out is None:
        over = neigh(h_src) if first else h_src
        over = execute.aggregate(whole, over, None, "mean", place=place, training=module.training, owner=module)
        out = own(h_dst) + (over if first else neigh(over))
    out = out if module.activation is None else module.activation(out)
    return out if module.norm is None else module.norm(out)


def _gin(module: Any, graph: Any, place: str, feat: Any, edge_weight: Any) -> Any:
    if edge_weight is not None or module._aggregator_type != "sum":
        raise Unsupported("edges have weights" if edge_weight is not None else f"aggregates by {module._aggregator_type}")
    pair = _pair(graph, feat)
    gidx = check_graph(module, graph, pair, starving=True)
    eps = module.eps
    if pair[0].shape[1] != pair[1].shape[1] or not isinstance(eps, Tensor) or eps.numel() != 1 or eps.dim() > 1:
        raise Unsupported("features of sources and destinations differ, or eps is no tensor of one number")
    out, own = _ops()[0](gidx, "copy_lhs", "sum", pair[0], None), 1 + eps
    if own.dtype is out.dtype and pair[1].is_contiguous():  # in one pass over the rows; nobody else holds a sum
        out = out.addcmul_(pair[1], own)
    else:
        out = own * pair[1] + out
    out = out if module.apply_func is None else module.apply_func(out)
    return out if module.activation is None else module.activation(out)


make_gat, make_gatv2, make_dot_gat, make_agnn = dispatcher(_gat), dispatcher(_gatv2), dispatcher(_dot_gat), dispatcher(_agnn)
make_graph_conv, make_sage, make_gin = dispatcher(_graph_conv), dispatcher(_sage), dispatcher(_gin)


def make_checked(original: FunctionType) -> Callable[..., Any]:
    """For a layer of which only the check of in-degrees is replaced."""
    return lambda *args: NotImplemented
