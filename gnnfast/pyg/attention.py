"""Attention without a feature row per edge: GATConv, GATv2Conv and TransformerConv as a whole, and the ``message()`` of the last (a
dot product per edge) where another forward calls it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.cache import Sightings, cache
from gnnfast.config import settings
from gnnfast.dispatch import execute
from gnnfast.dispatch.bias import biased
from gnnfast.dispatch.execute import Narrow, softmax
from gnnfast.dispatch.select import cannot_win
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.guards import tracing_state
from gnnfast.patching import class_of, is_dispatched, left_alone
from gnnfast.pyg import bounded
from gnnfast.pyg.adjacency import graph_of, incidence_of
from gnnfast.pyg.known import option, replaced_in_attention
from gnnfast.pyg.loops import looped_graph, prepare_loops, with_loops, with_self_loops
from gnnfast.pyg.matrices import edges_for, is_matrix
from gnnfast.pyg.messages import DOT_ATTENTION, Message
from gnnfast.pyg.products import is_product, products
from gnnfast.pyg.small import are_few, parts_are_few
from gnnfast.pyg.verdict import check_module
from gnnfast.reporting import ran
from gnnfast.types import FEATURE_DTYPES, INDEX_DTYPES, REORDERED
from gnnfast.unsupported import Unsupported

_hooks = operator.itemgetter("_edge_update_forward_pre_hooks", "_edge_update_forward_hooks")
OVERRIDES = ("propagate", "edge_updater", "edge_update", "edge_collect")


def _make_conv(parts: Parts) -> Callable[[FunctionType], Callable[..., Any]]:
    """A dispatcher for the ``forward(x, edge_index, edge_attr, ..., return_attention_weights)`` of a layer."""

    def make(original: FunctionType) -> Callable[..., Any]:
        known = class_of(original)
        of_pyg = f"pyg {known.__name__}"

        def attention_conv(module: Any, x: Any, edge_index: Any, edge_attr: Any, *rest: Any) -> Any:
            cls = type(module)
            place = of_pyg if cls is known else f"pyg {cls.__name__}"
            if is_matrix(edge_index):
                edge_index = None if rest[-1] is not None else edges_for(module, edge_index, x if type(x) is tuple else (x, x))
                if edge_index is None or edge_attr is not None:
                    return NotImplemented
            elif parts.is_small(module, edge_index, edge_attr):
                ran(place, "PyG's own", "too small to gain")
                few = parts_are_few(edge_index) and not guards.context()
                return left_alone(original, module, x, edge_index, edge_attr, *rest) if few else NotImplemented
            size, weights = rest if parts.takes_size else (None, *rest)
            try:
                pair = x if type(x) is tuple else (x, x)
                _check(known, parts, module, pair, edge_index, edge_attr, size, weights)
                graph, looped = graph_of_layer(module, pair, edge_index, bool(weights) or edge_attr is not None)
                # Made before PyG's own parts run, so that nothing of a layer runs twice.
                if not graph.has(torch.is_grad_enabled()):
                    graph.args(csc=torch.is_grad_enabled())
                given = None if edge_attr is None else _of_edges(parts, module, edge_index, edge_attr, graph)
            except Unsupported as error:
                ran(place, "in parts", str(error))  # which say themselves how they ran
                return NotImplemented
            except (IndexError, ValueError):  # PyG raises its own
                return NotImplemented
            return parts.forward(module, x, pair, graph, looped, given, weights, place)

        return attention_conv

    return make


_sightings = Sightings()


def _is_small(module: Any, edge_index: Any, training: bool | None = None, of_cpu: str = "cpu") -> bool:
    """Whether a layer meets a graph that is so small that several kernels cost more than they save."""
    if type(edge_index) is not Tensor or edge_index.dim() != 2 or tracing_state() is not None:  # a trace would warn
        return False
    is_cuda, training = edge_index.is_cuda, torch.is_grad_enabled() if training is None else training
    if is_cuda and torch.are_deterministic_algorithms_enabled():  # PyG's scatter raises, or is slow
        return False
    nbytes = edge_index.size(1) * module.heads * module.out_channels * 4
    return cannot_win(nbytes, training, settings(), "cuda" if is_cuda else of_cpu)


def is_small_transformer(module: Any, edge_index: Any, edge_attr: Any) -> bool:
    """The same of TransformerConv, whose edge features take kernels of their own. Without them a graph on a CPU is left alone that
    is so small that nobody would notice a gain, but a test that compares the last bits with TorchScript's, which are PyG's."""
    if edge_attr is not None:
        return _is_small(module, edge_index)
    return type(edge_index) is Tensor and not edge_index.is_cuda and _is_small(module, edge_index, of_cpu="attention cpu")


def is_first_and_small(module: Any, edge_index: Any, training: bool | None = None) -> bool:
    """The same of a graph on a GPU that it meets for the first time, which would have to be converted."""
    return edge_index.is_cuda and _is_small(module, edge_index, training) and not _sightings.again(edge_index, id(module))


def _is_small_gat(module: Any, edge_index: Any, edge_attr: Any) -> bool:
    """The same for GATConv: with edge features, where it gains as much in training as without, and on a CPU at every size, and
    without on a CPU, where its parts, each in one operation, are faster over tiny graphs that are new, and nearly as fast over
    others. Whether they are must not decide, as a kernel rounds otherwise: two calls would differ."""
    if edge_attr is not None:
        return _is_small_with_edges(module, edge_index, edge_attr)
    if type(edge_index) is not Tensor or not edge_index.is_cpu or edge_index.dim() != 2:
        return False
    return are_few(edge_index, module.heads * module.out_channels * 4, "tiny attention cpu")


def _is_small_with_edges(module: Any, edge_index: Any, edge_attr: Any) -> bool:
    if edge_attr is None or not isinstance(edge_index, Tensor) or edge_index.is_cpu or saved_tensors_are_watched():
        return False
    return is_first_and_small(module, edge_index, False)


def _is_small_gatv2(module: Any, edge_index: Any, edge_attr: Any) -> bool:
    """The same for GATv2Conv, whose gradients gain over a graph that is new, too."""
    return not torch.is_grad_enabled() and _is_small_with_edges(module, edge_index, edge_attr)


class OfEdges(NamedTuple):
    """What a user gave for each edge, its ends and its features, and in TransformerConv the graph from edges to where they end."""

    edge_index: Tensor
    attr: Tensor
    found: Any = None

    @property
    def columns(self) -> Tensor:
        """The features as ``[E, D]``."""
        return self.attr if self.attr.dim() > 1 else self.attr.unsqueeze(1)


class Parts(NamedTuple):
    """What is peculiar to a layer: what its message is, a parameter of the dtype of the others, those of its linear layers of which
    one row must be there, how it goes on, what raises Unsupported for features of edges that are not served, where nothing is to
    be gained of a graph and such features, whether its ``forward`` takes a ``size``, and whether it returns coefficients after a
    dropout, which kernels draw otherwise."""

    message: Any
    parameter: str | None
    linears: tuple[tuple[str, ...], ...]
    forward: Callable[..., Any]
    check_edges: Callable[..., None]
    is_small: Callable[[Any, Any, Any], bool]
    takes_size: bool = False
    drops_weights: bool = False


def _check(known: Any, parts: Parts, module: Any, pair: Any, edge_index: Any, edge_attr: Any, size: Any, weights: Any) -> None:
    """Raises Unsupported if the layer is not what PyG wrote, or kernels do not take its operands."""
    reason = guards.context()
    if reason or len(pair) != 2 or not (weights is None or weights is True):  # PyG asks some layers for a bool, others for a truth
        raise Unsupported(reason or "an argument is not served")
    check_layer(known, parts, module)
    own = module.__dict__
    like = pair[0] if parts.parameter is None else own["_parameters"].get(parts.parameter)
    check_tensors(pair, like, edge_index)
    if torch.is_autocast_enabled(edge_index.device.type):
        check_autocast(parts, like, edge_attr)
    if size is not None and (type(size) not in (tuple, list) or [*size] != [pair[0].shape[0], pair[1].shape[0]]):
        raise Unsupported("size is not that of the features")
    if weights and parts.drops_weights and dropout_of(module):
        raise Unsupported("the coefficients that are returned are those after dropout")
    edge_layer = own["_modules"].get("lin_edge")
    if edge_attr is not None or (edge_layer is not None and parts.message is DOT_ATTENTION):
        if edge_layer is None:
            raise Unsupported("edge features of a layer that takes none")
        if guards.operand("edge_attr", edge_attr) or edge_attr.shape[:1] != edge_index.shape[1:]:
            raise Unsupported("edge_attr does not fit")
        parts.check_edges(module, pair, edge_attr, like)


def check_autocast(parts: Parts, like: Tensor, edge_attr: Any) -> None:
    """Raises Unsupported where it is not known that PyG's coefficients have more digits than rows under autocast."""
    if edge_attr is not None:
        raise Unsupported("edge features under autocast")
    few_digits = like.is_cpu if parts.parameter is None else like.dtype is not torch.float32
    if few_digits:
        raise Unsupported("coefficients of few digits under autocast")


def summed_dtype(t: Tensor) -> torch.dtype:
    """The dtype in which PyG multiplies rows with coefficients and sums them: under autocast these have more digits than what
    linear layers give."""
    return torch.promote_types(t.dtype, torch.float32) if torch.is_autocast_enabled(t.device.type) else t.dtype


def as_summed(t: Tensor) -> Tensor:
    """Rows in the dtype in which they are summed."""
    return t.to(summed_dtype(t)) if torch.is_autocast_enabled(t.device.type) else t


def check_tensors(pair: Any, like: Any, edge_index: Any) -> None:
    """Raises Unsupported if kernels do not take features, a parameter and edges together."""
    x, x_dst = pair
    reason = guards.operand("x", x) or (x_dst is not x and guards.operand("x", x_dst)) or guards.operand("att", like)
    if reason:
        raise Unsupported(reason)
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided or edge_index.dtype not in INDEX_DTYPES:
        raise Unsupported(f"edge_index is a {type(edge_index).__name__}")
    device, dtypes = edge_index.device, {like.dtype, x.dtype, x_dst.dtype}
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or guards.operand("edge_index", edge_index):
        raise Unsupported(f"edge_index has shape {list(edge_index.shape)}")
    if len(dtypes) > 1:
        dtypes = {summed_dtype(t) for t in (like, *pair)}
    fits = x.device == device == x_dst.device and x.dim() == 2 == x_dst.dim()
    if not fits or len(dtypes) > 1 or not dtypes.issubset(FEATURE_DTYPES):
        raise Unsupported("features, parameters and edge_index do not agree in dtype or device")


def _is_edge_product(module: Any, edge_attr: Tensor, like: Tensor) -> bool:
    """Whether a layer multiplies the features of edges ``[E, D]`` with a matrix, and rounding in another order does not show."""
    lin = module.lin_edge
    if not is_product(lin) or lin.bias is not None or guards.operand("weight", lin.weight) or like.dtype not in REORDERED:
        return False
    if edge_attr.dim() != 2 or lin.weight.shape != (module.heads * module.out_channels, edge_attr.shape[1]):
        return False
    return all(t.dtype is like.dtype and t.device == like.device for t in (edge_attr, lin.weight))


def _has_linear_scores(module: Any, edge_attr: Tensor, like: Tensor) -> bool:
    """Whether the scores of edges in GATConv are such a product with its attention."""
    att = module.att_edge
    if guards.operand("att_edge", att) or att.shape != (1, module.heads, module.out_channels) or att.dtype is not like.dtype:
        return False
    return _is_edge_product(module, edge_attr if edge_attr.dim() > 1 else edge_attr.unsqueeze(-1), like)


def _check_linear_scores(module: Any, pair: Any, edge_attr: Tensor, like: Tensor) -> None:
    """Raises Unsupported if self loops get edge features in a layer whose scores are not linear in them."""
    if module.add_self_loops and (pair[0].shape[0] < pair[1].shape[0] or not _has_linear_scores(module, edge_attr, like)):
        raise Unsupported("edge features of self loops that are added, in a layer that is not linear in them")


def _check_edge_rows(module: Any, _: Any, edge_attr: Tensor, like: Tensor) -> None:
    """Raises Unsupported if edge features that are added to keys and values are not products, or nothing is gained."""
    if not _is_edge_product(module, edge_attr, like):
        raise Unsupported("edge features are no products of float32 or float64")
    edges_of, row_bytes, current = edge_attr.shape[0], module.heads * module.out_channels * like.element_size(), settings()
    if current.sample != "off" or current.kernel == "sampled":
        raise Unsupported("an option is not served")
    if bounded.may_not_fit(edges_of, row_bytes, like.device):
        raise Unsupported("rows of edge features may not fit")


def _check_added_rows(module: Any, pair: Any, edge_attr: Tensor, like: Tensor) -> None:
    """Raises Unsupported if edge features that are added to what scores are computed of are not products."""
    if not _is_edge_product(module, edge_attr if edge_attr.dim() > 1 else edge_attr.unsqueeze(-1), like):
        raise Unsupported("edge features are no products of float32 or float64")
    if module.add_self_loops and pair[0].shape[0] < pair[1].shape[0]:
        raise Unsupported("edge features of self loops that are added to more destinations than sources")


def check_layer(known: Any, parts: Parts, module: Any) -> None:
    """Raises Unsupported if the layer is not what PyG wrote, or an option is not served."""
    own, cls = module.__dict__, type(module)
    if cls is not known or not own.keys().isdisjoint(OVERRIDES):
        raise Unsupported("a method is another than the layer's")
    verdict = check_module(module)
    if verdict.message != parts.message or verdict.reduce != "sum" or verdict.update is not None:
        raise Unsupported("the layer aggregates something else")
    if any(_hooks(own)) or not is_dispatched(cls.propagate):
        raise Unsupported("hooks are registered on the layer")
    reason = replaced_in_attention(known)
    if reason:
        raise Unsupported(reason)
    if own["node_dim"] != 0 or own["flow"] != "source_to_target":
        raise Unsupported("an option is not served")
    modules = own["_modules"]
    if not any(None not in map(modules.get, names) for names in parts.linears):
        raise Unsupported("linear layers are missing")
    if type(own.get("negative_slope", 0)) not in (int, float):
        raise Unsupported("an option is not served")
    if type(own["dropout"]) not in (int, float) or not 0 <= own["dropout"] <= 1:
        raise Unsupported("an option is not served")


def graph_of_layer(module: Any, pair: tuple[Tensor, Tensor], edge_index: Tensor, weights: bool) -> tuple[Any, Tensor]:
    """The graph of a layer and its ``edge_index``, with self loops where the layer adds them: kept with the user's. Listed as PyG
    lists them only where somebody sees it, as how many edges there then are only a GPU knows."""
    num_src, num_dst = pair[0].shape[0], pair[1].shape[0]
    if not adds_loops(module):
        return graph_of(edge_index, num_src, num_dst, True), edge_index
    current = settings()
    listed = weights or not edge_index.is_cuda or (dropout_of(module) and current.dropout == "framework")
    listed = listed or current.sample != "off" or current.kernel == "sampled"  # whose kernels take no format that leaves edges out
    return looped_graph(edge_index, num_src, num_dst, listed)


def adds_loops(module: Any) -> bool:
    return bool(option(type(module).forward, module, "add_self_loops"))


def _of_edges(parts: Parts, module: Any, edge_index: Tensor, edge_attr: Tensor, graph: Any) -> OfEdges:
    """Edge features and what they are used with. Raises Unsupported."""
    if parts.message is not DOT_ATTENTION:
        if module.add_self_loops:
            prepare_loops(edge_index, graph, module.fill_value)
        return OfEdges(edge_index, edge_attr)
    found = incidence_of(edge_index, graph, True)
    found.args(csc=torch.is_grad_enabled())
    return OfEdges(edge_index, edge_attr, found)


def gat_operands(module: Any, x: Any, pair: Any) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """The residual, the projected features ``[N, H C]`` and ``[M, H C]``, and the scores of both ``[N, H]`` and ``[M, H]``."""
    heads, width = module.heads, module.out_channels
    res = None if getattr(module, "res", None) is None else module.res(pair[1])
    if module.lin is not None:
        h_src = as_summed(module.lin(pair[0]))
        h_dst = h_src if pair[1] is pair[0] and type(x) is not tuple else as_summed(module.lin(pair[1]))
    else:
        h_src, h_dst = as_summed(module.lin_src(pair[0])), as_summed(module.lin_dst(pair[1]))
    att_src, att_dst = module.att_src, module.att_dst
    fits = att_src.shape == att_dst.shape == (1, heads, width) and att_src.dtype is att_dst.dtype
    if not fits or not all(_is_plain(h, (h.shape[0], heads * width), att_src) for h in (h_src, h_dst)):
        a_src = (h_src.view(-1, heads, width) * att_src).sum(dim=-1)
        a_dst = (h_dst.view(-1, heads, width) * att_dst).sum(dim=-1)
    elif h_src is h_dst:
        a_src, a_dst = execute.head_dots(h_src, torch.cat((att_src, att_dst))).unbind()
    else:
        a_src, a_dst = execute.head_dots(h_src, att_src)[0], execute.head_dots(h_dst, att_dst)[0]
    return res, h_src, h_dst, a_src, a_dst


def _gat(module: Any, x: Any, pair: tuple[Tensor, Tensor], graph: Any, looped: Tensor, given: Any, weights: Any, place: str) -> Any:
    heads, width = module.heads, module.out_channels
    res, h_src, h_dst, a_src, a_dst = gat_operands(module, x, pair)
    rows, sides, like = (graph.num_src, graph.num_dst), ((h_src, a_src), (h_dst, a_dst)), module.att_src
    fits = all(_is_plain(h, (n, heads * width), like) and _is_plain(a, (n, heads), like) for n, (h, a) in zip(rows, sides))
    alpha = None
    if looped.shape[1] == 0:
        given = None  # PyG then does not use them, so that their weights get no gradient
    if fits and given is not None and _has_linear_scores(module, given.attr, h_src):
        score = _edge_scores(module, given, graph, looped)
        alpha = softmax(graph, score, a_dst, a_src, module.negative_slope, place=place)
        alpha = after_dropout(module, alpha)
        out = execute.aggregate(graph, h_src, alpha, "sum", place=place, training=module.training)
    elif not fits or given is not None:  # what hooks and replaced parts gave, or scores that may be anything: as PyG goes on
        x_pair = h_src.view(-1, heads, width), h_dst.view(-1, heads, width)
        looped, edge_attr = _as_pyg_lists(module, (x_pair[0].shape[0], x_pair[1].shape[0]), looped, given)
        alpha = module.edge_updater(looped, alpha=(a_src, a_dst), edge_attr=edge_attr, size=None)
        out = module.propagate(looped, x=x_pair, alpha=alpha, size=None).view(-1, heads * width)
    else:
        out, alpha = execute.attention(
            graph,
            h_src,
            a_dst,
            a_src,
            module.negative_slope,
            dropout_of(module),
            place=place,
            training=module.training,
            weights=bool(weights),
        )
    out = finish(module, out, res, alpha is None)
    return _with_weights(module, out, looped, alpha) if weights else out


def _with_weights(module: Any, out: Tensor, looped: Tensor, alpha: Tensor | None) -> Any:
    """What a layer returns that is asked for its coefficients ``[E, H]``: users get their own, as the layer needs its in the
    backward pass."""
    assert alpha is not None
    if adds_loops(module):
        copy = looped.clone()
        cache.add_copy(copy, looped)
        looped = copy
    return out, (looped, alpha.clone())


def edge_score_weight(module: Any) -> Tensor:
    """What makes of features of edges their scores in GATConv, ``[H, D]``: the product of its linear layer and its attention."""
    return (module.lin_edge.weight.view(module.heads, module.out_channels, -1) * module.att_edge.view(module.heads, -1, 1)).sum(1)


def _edge_scores(module: Any, given: OfEdges, graph: Any, looped: Tensor) -> Tensor:
    """What the features of edges add to scores, ``[E, H]``, also of the self loops that the layer adds; nothing is as wide as the
    layer."""
    weight = edge_score_weight(module)
    if module.add_self_loops and module.fill_value == "mean":  # the scores of means are means of scores
        keeps = torch.is_grad_enabled() and weight.requires_grad  # the user may write into what PyG has copied
        score = torch.nn.functional.linear(given.columns.clone() if keeps else given.columns, weight)
        return with_loops(score, given.edge_index, graph, looped, "mean")
    return torch.nn.functional.linear(_columns_with_loops(module, given, graph, looped), weight)


def _columns_with_loops(module: Any, given: OfEdges, graph: Any, looped: Tensor) -> Tensor:
    """The features of edges ``[E, D]``, also of the self loops that the layer adds."""
    if not module.add_self_loops:
        return given.columns
    return with_loops(given.columns, given.edge_index, graph, looped, module.fill_value)


def gatv2_operands(module: Any, x: Any, pair: Any) -> tuple[Tensor | None, Tensor, Tensor]:
    """The residual, and the projected features of sources ``[N, H C]`` and destinations ``[M, H C]``."""
    res = None if getattr(module, "res", None) is None else module.res(pair[1])
    lin_l, lin_r = module._modules["lin_l"], module._modules["lin_r"]
    if type(x) is tuple or module.share_weights:
        left = as_summed(lin_l(pair[0]))
        return res, left, as_summed(lin_r(pair[1])) if type(x) is tuple else left
    left, right = products(pair[0], (lin_l, lin_r))
    return res, as_summed(left), as_summed(right)


def transformer_operands(module: Any, pair: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The queries of destinations ``[M, H C]``, and the keys and values of sources ``[N, H C]``; and what of destinations is added
    to the sum, which is made with these where it is of the same features."""
    if pair[0] is not pair[1]:
        query, key, value = module.lin_query(pair[1]), module.lin_key(pair[0]), module.lin_value(pair[0])
        return as_summed(query), as_summed(key), as_summed(value), None
    modules = module._modules
    lins = modules["lin_query"], modules["lin_key"], modules["lin_value"], *((modules["lin_skip"],) if module.root_weight else ())
    query, key, value, *skip = products(pair[0], lins)
    return as_summed(query), as_summed(key), as_summed(value), skip[0] if skip else None


def _gatv2(
    module: Any, x: Any, pair: tuple[Tensor, Tensor], graph: Any, looped: Tensor, given: Any, weights: Any, place: str
) -> Any:
    heads, width = module.heads, module.out_channels
    res, left, right = gatv2_operands(module, x, pair)
    shape, att = heads * width, module._parameters["att"]
    fits = _is_plain(left, (graph.num_src, shape), att) and _is_plain(right, (graph.num_dst, shape), att)
    out: Tensor | None = None
    how: Any = dict(dropout=dropout_of(module), place=place)
    if fits and att.shape == (1, heads, width):
        edge = None if given is None else module.lin_edge(_columns_with_loops(module, given, graph, looped))
        out = execute.gatv2_attention(graph, right, left, att.view(-1), heads, module.negative_slope, edge=edge, **how)
    fused, alpha = out is not None, None
    if out is None or weights:
        both = left.view(-1, heads, width), right.view(-1, heads, width)
        looped, edge_attr = _as_pyg_lists(module, (both[0].shape[0], both[1].shape[0]), looped, given)
        alpha = module.edge_updater(looped, x=both, edge_attr=edge_attr)
        # Not of these where there is a kernel: a layer's output must not depend on whether coefficients are asked for.
        out = module.propagate(looped, x=both, alpha=alpha).view(-1, shape) if out is None else out
    out = finish(module, out, res, fused)
    return _with_weights(module, out, looped, alpha) if weights else out


def _transformer(
    module: Any, x: Any, pair: tuple[Tensor, Tensor], graph: Any, looped: Tensor, given: Any, weights: Any, place: str
) -> Any:
    heads, width = module.heads, module.out_channels
    query, key, value, skip = transformer_operands(module, pair)
    shape, rows = heads * width, (graph.num_dst, graph.num_src, graph.num_src)
    alpha = None
    like = pair[0] if pair[0].dtype is query.dtype else query  # under autocast
    fits = all(_is_plain(t, (n, shape), like) for n, t in zip(rows, (query, key, value)))
    if fits and given is not None:
        (out, alpha), fused = _of_edges_too(module, query, key, value, graph, given, place), False
    elif fits:
        scale = 1 / math.sqrt(width)
        out, alpha = execute.dot_attention(
            graph, query, key, value, heads, scale, dropout_of(module), place=place, training=module.training
        )
        fused = alpha is None
        if fused and weights:
            alpha = execute.coefficients(graph, query, key, heads, scale, place)
    else:
        parts = {"query": query, "key": key, "value": value}
        edge_attr = None if given is None else given.attr
        out = module.propagate(looped, **{name: t.view(-1, heads, width) for name, t in parts.items()}, edge_attr=edge_attr)
        alpha, module._alpha, fused = module._alpha, None, False
    out = finish_transformer(module, out, pair[1], skip, fused)
    return _with_weights(module, out, looped, alpha) if weights else out


def _of_edges_too(
    module: Any, query: Tensor, key: Tensor, value: Tensor, graph: Any, given: OfEdges, place: str
) -> tuple[Tensor, Tensor]:
    """Attention whose edges have features that are added to keys and values: scores and sums of edges' own, beside those of nodes.
    Narrow features are not multiplied: queries are, and their sums. And the coefficients before dropout."""
    heads, of_edges = module.heads, given.found
    ask, rows, restore = products_of_edges(module, given.attr)
    score = execute.dot(graph, query, key, heads, place) + execute.dot(of_edges, ask(query), rows, heads, place)
    alpha = softmax(graph, score / math.sqrt(module.out_channels), place=place)
    dropped = after_dropout(module, alpha)
    how: Any = dict(place=place, training=module.training)
    of_rows = restore(execute.aggregate(of_edges, rows, dropped, "sum", **how))
    return execute.aggregate(graph, value, dropped, "sum", **how) + of_rows, alpha


def products_of_edges(module: Any, attr: Tensor) -> tuple[Narrow, Tensor, Narrow]:
    """Features of edges ``[E, D]`` as rows for each head, with what makes of queries those that ask for such rows, and of sums of
    such rows those of what the linear layer would make of them."""
    heads, width, lin = module.heads, module.out_channels, module.lin_edge
    if attr.shape[1] > width:
        return lambda query: query, lin(attr), lambda out: out
    weight = lin.weight.view(heads, width, -1)  # [H, C, D]
    if weight.is_cpu and torch.is_grad_enabled():
        weight = weight.clone()  # PyG does not keep it for the gradients of features: it may be changed before these are asked for
    return (
        lambda query: _by_heads(query, weight).contiguous(),
        attr.repeat(1, heads),
        lambda out: _by_heads(out, weight.transpose(1, 2)),
    )


def _by_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Each head of ``x [N, H A]`` times its matrix of ``[H, A, B]``: ``[N, H B]``."""
    heads, width, _ = weight.shape
    if x.is_cuda:  # a batch of H products is not split along N, where the matrices' gradients are sums over N
        return x @ torch.block_diag(*weight.unbind())
    return torch.einsum("nha,hab->nhb", x.view(-1, heads, width), weight).flatten(1)


def finish_transformer(module: Any, out: Tensor, x_dst: Tensor, skip: Tensor | None, fused: bool) -> Tensor:
    """As :func:`finish`, for TransformerConv; ``skip`` as of :func:`transformer_operands`."""
    out = _of_heads(module, out, fused and not module.root_weight)
    if module.root_weight:
        x_dst = module.lin_skip(x_dst) if skip is None else skip
        if module.lin_beta is None:
            return out + x_dst
        beta = module.lin_beta(torch.cat([out, x_dst, out - x_dst], dim=-1)).sigmoid()
        out = beta * x_dst + (1 - beta) * out
    return out


def _as_pyg_lists(module: Any, rows: tuple[int, int], looped: Tensor, given: OfEdges | None) -> tuple[Tensor, Tensor | None]:
    """The edges, and their features if there are some, for parts of a layer that are run as PyG runs them: it adds loops to as many
    nodes as it then has ``rows``."""
    if not module.add_self_loops:
        return looped, None if given is None else given.attr
    if given is None:
        return with_self_loops(looped, min(rows)), None
    from torch_geometric.utils import add_self_loops, remove_self_loops

    return add_self_loops(*remove_self_loops(given.edge_index, given.attr), fill_value=module.fill_value, num_nodes=min(rows))  # type: ignore[no-any-return]


def dropout_of(module: Any) -> float:
    return getattr(module, "dropout", 0.0) if module.training else 0.0


def after_dropout(module: Any, alpha: Tensor) -> Tensor:
    """Coefficients after dropout, drawn as PyG draws it."""
    dropout = dropout_of(module)
    return torch.nn.functional.dropout(alpha, p=dropout, training=True) if dropout else alpha


def _of_heads(module: Any, out: Tensor, last: bool) -> Tensor:
    """Heads side by side or their mean. If this is the ``last`` that is done, users get a copy: they may write into theirs before
    the backward pass, which needs it."""
    if not module.concat:
        return out.view(-1, module.heads, module.out_channels).mean(dim=1)
    out = out.view(-1, module.heads * module.out_channels)
    return out.clone() if last else out


def finish(module: Any, out: Tensor, res: Tensor | None, fused: bool) -> Tensor:
    """What a layer does with the rows of heads; ``fused``: what they are is needed in the backward pass."""
    bias = module.bias
    out = _of_heads(module, out, fused and res is None and bias is None)
    if res is not None:
        out = out + res
    return out if bias is None else biased(out, bias)


def _is_plain(t: Any, shape: tuple[int, int], like: Tensor) -> bool:
    return (
        type(t) is Tensor and t.layout is torch.strided and t.shape == shape and t.dtype is like.dtype and t.device == like.device
    )


_ALPHA = Message("x", "alpha", "unsqueeze", False)
GAT = Parts(_ALPHA, "att_src", (("lin",), ("lin_src", "lin_dst")), _gat, _check_linear_scores, _is_small_gat, takes_size=True)
GATV2 = Parts(_ALPHA, "att", (("lin_l", "lin_r"),), _gatv2, _check_added_rows, _is_small_gatv2, drops_weights=True)
TRANSFORMER = Parts(
    DOT_ATTENTION, None, (("lin_query", "lin_key", "lin_value", "lin_skip"),), _transformer, _check_edge_rows, is_small_transformer
)
make_gat_conv, make_gatv2_conv, make_transformer_conv = map(_make_conv, (GAT, GATV2, TRANSFORMER))


# ---- TransformerConv ---------------------------------------------------------------------------------------------------------
def dot_attention(module: Any, edge_index: Tensor, size: Any, kwargs: dict[str, Any], place: str) -> Tensor:
    """What ``propagate`` of TransformerConv returns, ``[num_dst, H, C]``: the values of the in-neighbours, weighted by the softmax
    of ``<query_i, key_j> / sqrt(C)`` (Shi et al., IJCAI 2021). Raises Unsupported."""
    query, key, value = (kwargs.get(name) for name in ("query", "key", "value"))
    heads, width = module.heads, module.out_channels
    if type(edge_index) is not Tensor or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise Unsupported(f"edge_index is a {type(edge_index).__name__}")
    if kwargs.get("edge_attr") is not None or module.lin_edge is not None or size is not None:
        raise Unsupported("edge features are added to keys and values")
    for name, t in (("query", query), ("key", key), ("value", value)):
        reason = guards.operand(name, t)
        if reason:
            raise Unsupported(reason)
        if t.shape[1:] != (heads, width) or t.dtype != query.dtype or t.dtype not in FEATURE_DTYPES:  # type: ignore[union-attr]
            raise Unsupported(f"{name} is {t.dtype} of shape {list(t.shape)}")  # type: ignore[union-attr]
    assert query is not None and key is not None and value is not None
    own = module.__dict__
    if own["node_dim"] != 0 or own["flow"] != "source_to_target" or value.shape[0] != key.shape[0]:
        raise Unsupported("an option is not served")
    if type(own["dropout"]) not in (int, float) or not 0 <= own["dropout"] <= 1:
        raise Unsupported("an option is not served")
    reason = replaced_in_attention(type(module))
    if reason or torch.is_autocast_enabled(query.device.type) or edge_index.device != query.device:
        raise Unsupported(reason or "features and edge_index do not agree in dtype or device")
    try:
        graph = graph_of(edge_index, key.shape[0], query.shape[0], True)
        graph.args(csc=torch.is_grad_enabled())
        q, k, v = (t.reshape(t.shape[0], heads * width) for t in (query, key, value))
        scale, training = 1 / math.sqrt(width), module.training
        out, alpha = execute.dot_attention(
            graph, q, k, v, heads, scale, dropout_of(module), place=place, training=training, weights=True
        )
    except (IndexError, ValueError) as error:  # PyG raises its own
        raise Unsupported(f"invalid input: {error}") from None
    module._alpha = alpha
    return out.view(graph.num_dst, heads, width)
