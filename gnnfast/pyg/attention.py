"""Attention without a feature row per edge: GATConv as a whole, the ``message()`` of TransformerConv (a dot product per edge), and
``torch_geometric.utils.softmax`` over the edges of a graph that is known."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast.cache import Sightings, cache, keep_if_captured
from gnnfast.config import settings
from gnnfast.dispatch.execute import aggregate, dot, softmax
from gnnfast.dispatch.select import cannot_win
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import guards
from gnnfast.pyg.adjacency import graph_of, key_of
from gnnfast.pyg.known import replaced_in_attention, replaced_in_softmax
from gnnfast.pyg.loops import with_self_loops
from gnnfast.pyg.verdict import check_module
from gnnfast.reporting import ran
from gnnfast.types import FEATURE_DTYPES, INDEX_DTYPES
from gnnfast.unsupported import Unsupported

_hooks = operator.itemgetter("_edge_update_forward_pre_hooks", "_edge_update_forward_hooks")
_OVERRIDES = ("propagate", "edge_updater", "edge_update", "edge_collect")


def make_gat_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``GATConv.forward(x, edge_index, edge_attr, size, return_attention_weights)``."""

    known = class_of(original)

    def gat_conv(module: Any, x: Any, edge_index: Any, edge_attr: Any, size: Any, return_attention_weights: Any) -> Any:
        place = f"pyg {type(module).__name__}"
        if is_first_and_small(module, edge_index):
            ran(place, "PyG's own", "too small to gain from a graph that is new")
            return NotImplemented
        try:
            pair = x if type(x) is tuple else (x, x)
            _check(known, module, pair, edge_index, edge_attr, size, return_attention_weights)
            graph, looped = _graph(module, pair, edge_index)
            # Made before PyG's own parts run, so that nothing of a layer runs twice.
            graph.args(csc=torch.is_grad_enabled())
        except Unsupported as error:
            ran(place, "in parts", str(error))  # which say themselves how they ran
            return NotImplemented
        except (IndexError, ValueError):  # PyG raises its own
            return NotImplemented
        return _forward(module, x, pair, graph, looped, edge_attr, return_attention_weights, place)

    return gat_conv


_sightings = Sightings()


def is_first_and_small(module: Any, edge_index: Any) -> bool:
    """Whether a layer meets a graph on a GPU for the first time, and it is so small that to convert it costs what kernels save."""
    if type(edge_index) is not Tensor or not edge_index.is_cuda or edge_index.dim() != 2:
        return False
    if _sightings.again(edge_index, id(module)):
        return False
    row_bytes = module.heads * module.out_channels * 4
    return cannot_win(edge_index.shape[-1], row_bytes, torch.is_grad_enabled(), settings())


def _check(known: Any, module: Any, pair: Any, edge_index: Any, edge_attr: Any, size: Any, weights: Any) -> None:
    """Raises Unsupported if the layer is not what PyG wrote, or kernels do not take its operands."""
    reason = guards.context()
    own, cls = module.__dict__, type(module)
    if reason or len(pair) != 2 or size is not None or weights not in (None, True):
        raise Unsupported(reason or "an argument is not served")
    if cls is not known or not own.keys().isdisjoint(_OVERRIDES):
        raise Unsupported("a method is another than the layer's")
    verdict = check_module(module)
    if verdict.message != ("x", "alpha", "unsqueeze", False) or verdict.reduce != "sum" or verdict.update is not None:
        raise Unsupported("the layer aggregates something else")
    if any(_hooks(own)) or not is_dispatched(cls.propagate):
        raise Unsupported("hooks are registered on the layer")
    reason = replaced_in_attention(known)
    if reason:
        raise Unsupported(reason)
    att = own["_parameters"].get("att_src")
    for name, t in (("x", pair[0]), ("x", pair[1]), ("att_src", att)):
        reason = guards.operand(name, t)
        if reason:
            raise Unsupported(reason)
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided or edge_index.dtype not in INDEX_DTYPES:
        raise Unsupported(f"edge_index is a {type(edge_index).__name__}")
    device, dtype = edge_index.device, att.dtype
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or guards.operand("edge_index", edge_index):
        raise Unsupported(f"edge_index has shape {list(edge_index.shape)}")
    if any(t.device != device or t.dtype != dtype or t.dim() != 2 for t in pair) or dtype not in FEATURE_DTYPES:
        raise Unsupported("features, parameters and edge_index do not agree in dtype or device")
    if own["node_dim"] != 0 or own["flow"] != "source_to_target" or torch.is_autocast_enabled(device.type):
        raise Unsupported("an option is not served")
    modules = own["_modules"]
    if modules.get("lin") is None and None in (modules.get("lin_src"), modules.get("lin_dst")):
        raise Unsupported("linear layers are missing")
    if type(own["negative_slope"]) not in (int, float) or type(own["dropout"]) not in (int, float) or not 0 <= own["dropout"] <= 1:
        raise Unsupported("an option is not served")
    if edge_attr is not None:
        if own["add_self_loops"] or modules.get("lin_edge") is None:
            raise Unsupported("edge features, of self loops that are added or of a layer that takes none")
        if guards.operand("edge_attr", edge_attr) or edge_attr.shape[0] != edge_index.shape[1]:
            raise Unsupported("edge_attr does not fit")


def _graph(module: Any, pair: tuple[Tensor, Tensor], edge_index: Tensor) -> tuple[Any, Tensor]:
    """The graph of a layer and its ``edge_index``, with self loops where the layer adds them: kept with the user's."""
    num_src, num_dst = pair[0].shape[0], pair[1].shape[0]
    looped = edge_index
    if module.add_self_loops:
        nodes = min(num_src, num_dst)
        key = "self loops", nodes
        if guards.capturing(edge_index.device):
            looped = cache.find((edge_index,), key)
            if looped is None:
                raise Unsupported("a CUDA graph is being captured, and the self loops are not known; run once before")
            keep_if_captured(looped)
        else:
            looped = cache.get((edge_index,), key, lambda: with_self_loops(edge_index, nodes))
    return graph_of(looped, num_src, num_dst, True), looped


def _forward(
    module: Any, x: Any, pair: tuple[Tensor, Tensor], graph: Any, looped: Tensor, edge_attr: Any, weights: Any, place: str
) -> Any:
    heads, width = module.heads, module.out_channels
    res = None if getattr(module, "res", None) is None else module.res(pair[1])
    if module.lin is not None:
        h_src = module.lin(pair[0])
        h_dst = h_src if pair[1] is pair[0] and type(x) is not tuple else module.lin(pair[1])
    else:
        h_src, h_dst = module.lin_src(pair[0]), module.lin_dst(pair[1])
    a_src = (h_src.view(-1, heads, width) * module.att_src).sum(dim=-1)
    a_dst = (h_dst.view(-1, heads, width) * module.att_dst).sum(dim=-1)
    rows, sides = (graph.num_src, graph.num_dst), ((h_src, a_src), (h_dst, a_dst))
    fits = all(_is_plain(h, (n, heads * width), pair[0]) and _is_plain(a, (n, heads), pair[0]) for n, (h, a) in zip(rows, sides))
    if not fits or edge_attr is not None:  # scores of edges, or what hooks and replaced parts gave: as PyG goes on
        given = looped.clone() if module.add_self_loops else looped
        alpha = module.edge_updater(given, alpha=(a_src, a_dst), edge_attr=edge_attr, size=None)
        x_pair = h_src.view(-1, heads, width), h_dst.view(-1, heads, width)
        out = module.propagate(given, x=x_pair, alpha=alpha, size=None).view(-1, heads * width)
    else:
        alpha = softmax(graph, None, a_dst, a_src, module.negative_slope, place=place)
        if module.training and module.dropout > 0:  # the very mask that PyG draws: alpha is in the same order
            alpha = torch.nn.functional.dropout(alpha, p=module.dropout, training=True)
        out = aggregate(graph, h_src, alpha, "sum", place=place, training=module.training)
    if not module.concat:
        out = out.view(-1, heads, width).mean(dim=1)
    if res is not None:
        out = out + res
    if module.bias is not None:
        out = out + module.bias
    if weights:
        if module.add_self_loops:
            copy = looped.clone()
            cache.add_copy(copy, looped)
            looped = copy
        return out, (looped, alpha.clone())  # theirs alone: the layer keeps its own for the backward pass
    return out


def _is_plain(t: Any, shape: tuple[int, int], like: Tensor) -> bool:
    return type(t) is Tensor and t.shape == shape and t.dtype is like.dtype and t.device == like.device


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
    reason = replaced_in_attention(type(module))
    if reason or torch.is_autocast_enabled(query.device.type) or edge_index.device != query.device:
        raise Unsupported(reason or "features and edge_index do not agree in dtype or device")
    try:
        graph = graph_of(edge_index, key.shape[0], query.shape[0], True)
        graph.args(csc=torch.is_grad_enabled())
        q, k, v = (t.reshape(t.shape[0], heads * width) for t in (query, key, value))
        alpha = softmax(graph, dot(graph, q, k, heads, place) / math.sqrt(width), place=place)
    except (IndexError, ValueError) as error:  # PyG raises its own
        raise Unsupported(f"invalid input: {error}") from None
    module._alpha = alpha
    if module.training and module.dropout > 0:
        alpha = torch.nn.functional.dropout(alpha, p=module.dropout, training=True)
    return aggregate(graph, v, alpha, "sum", place=place, training=module.training).view(graph.num_dst, heads, width)


# ---- softmax -----------------------------------------------------------------------------------------------------------------
def make_softmax(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``softmax(src, index, ptr, num_nodes, dim)``: served where ``index`` is the row of destinations of an
    ``edge_index`` whose graph is kept."""

    def softmax_of(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> Any:
        base = getattr(index, "_base", None)
        if replaced_in_softmax():
            return NotImplemented
        if base is None or ptr is not None or dim != 0 or type(num_nodes) is not int or type(base) is not Tensor:
            return NotImplemented
        if guards.context() or guards.operand("src", src) or src.dim() not in (1, 2) or src.dtype not in FEATURE_DTYPES:
            return NotImplemented
        edges = index.numel()
        if (
            base.dim() != 2
            or base.shape != (2, edges)
            or index.shape != (edges,)
            or not base.is_contiguous()
            or src.shape[0] != edges
        ):
            return NotImplemented
        if index.storage_offset() != base.storage_offset() + edges or index.stride() != (1,) or src.device != base.device:
            return NotImplemented
        kept = cache.origin(base)
        graph = cache.find((base if kept is None else kept,), key_of(num_nodes, num_nodes, True))
        if graph is None or not graph.has(False) or torch.is_autocast_enabled(src.device.type):
            return NotImplemented
        try:
            out = softmax(graph, src if src.dim() == 2 else src[:, None], place="pyg softmax")
        except (Unsupported, IndexError, ValueError):
            return NotImplemented
        out = out if src.dim() == 2 else out.squeeze(1)
        return out.clone() if out.requires_grad else out  # users may write into theirs before the backward pass

    return softmax_of
