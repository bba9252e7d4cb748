"""``torch_geometric.utils.softmax`` over the edges of a graph that is known, and over any groups."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native, guards
from gnnfast.cache import cache
from gnnfast.config import settings
from gnnfast.dispatch.execute import softmax
from gnnfast.dispatch.select import cannot_win
from gnnfast.graph import Graph, ids
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.graph.formats import BY_DST
from gnnfast.guards import tracing_state
from gnnfast.lazy import operations
from gnnfast.lazy.kinds import version_of
from gnnfast.lazy.rows import Rows
from gnnfast.pyg.adjacency import key_of, running
from gnnfast.pyg.known import replaced_in_softmax
from gnnfast.reporting import ran
from gnnfast.types import FEATURE_DTYPES, REORDERED
from gnnfast.unsupported import Unsupported

if _native.cpu.loaded:
    from gnnfast.ops.softmax_coo import SOFTMAX_COO
    from gnnfast.ops.spmm import call


def _graph_of_messages(index: Any, num_nodes: Any) -> Graph | None:
    """The graph of the edges whose ``message()`` runs, if ``index`` are its destinations; PyG finds the number of nodes itself."""
    if running.messages is None:
        return None
    ends, version = running.messages
    if not ends.are_destinations(index) or version_of(index) != version:
        return None
    graph: Graph = ends.towards(BY_DST)
    return graph if num_nodes in (None, graph.num_dst) else None


def _graph_of_base(index: Any, num_nodes: Any) -> Graph | None:
    """The kept graph of an ``edge_index`` of as many sources as destinations, of which ``index`` is the row of destinations."""
    base = getattr(index, "_base", None)
    if base is None or type(num_nodes) is not int or type(base) is not Tensor:
        return None
    kept = cache.origin(base)  # first, as most calls end here
    graph: Graph | None = cache.find((base if kept is None else kept,), key_of(num_nodes, num_nodes, True))
    if graph is None or base.dim() != 2 or not base.is_contiguous():
        return None
    edges = index.numel()
    is_row = base.shape == (2, edges) and index.shape == (edges,) and index.stride() == (1,)
    return graph if is_row and index.storage_offset() == base.storage_offset() + edges else None


def _over_graph(graph: Graph, src: Tensor) -> Any:
    if guards.context() or guards.operand("src", src) or src.dim() not in (1, 2) or src.dtype not in FEATURE_DTYPES:
        return NotImplemented
    if src.shape[0] != graph.num_edges or torch.is_autocast_enabled(src.device.type) or replaced_in_softmax():
        return NotImplemented
    if torch.is_grad_enabled() and saved_tensors_are_watched():
        return NotImplemented  # the graph may be known by now only in the repetition of a forward pass
    try:
        out = softmax(graph, src if src.dim() == 2 else src[:, None], place="pyg softmax")
    except (Unsupported, IndexError, ValueError):
        return NotImplemented
    return out if src.dim() == 2 else out.squeeze(1)


def _over_groups(src: Tensor, index: Any, num_nodes: Any) -> Any:
    """On a CPU the bits of PyG's. On one thread and on two, 200 to 200,000 rows of 1 to 16: 1.9 to 14 times as fast, with gradients
    too."""
    if type(index) is not Tensor or index.dtype is not torch.int64 or src.dtype not in REORDERED:
        return NotImplemented
    if guards.context() or guards.operand("src", src) or guards.operand("index", index) or replaced_in_softmax():
        return NotImplemented
    if num_nodes is None:
        num_nodes = int(index.max()) + 1 if index.numel() else 0
    if type(num_nodes) is not int:
        return NotImplemented
    if index.is_cuda:
        ids.watch(index)
    try:
        out = call(SOFTMAX_COO, torch.is_grad_enabled() and src.requires_grad, (), src, index, num_nodes)
    except RuntimeError:  # shapes or devices do not fit, or an id is out of range: PyG raises its own
        return NotImplemented
    ran("pyg softmax", "in one operation", "over groups as they are listed")
    return out


def make_softmax(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``softmax(src, index, ptr, num_nodes, dim)``: over the graph where ``index`` is the row of destinations of
    an ``edge_index`` whose graph is kept, else over the rows as they are listed."""

    def softmax_of(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> Any:
        if type(src) is Rows:
            found = NotImplemented if replaced_in_softmax() else operations.softmax(src, index, num_nodes, dim)
            if found is not NotImplemented:
                return found
            src = src.value()
        if ptr is not None or type(src) is not Tensor or dim not in (0, -src.dim()) or tracing_state() is not None:
            return NotImplemented
        out, on_cpu = NotImplemented, src.is_cpu
        if not on_cpu or not cannot_win(src.numel() * src.element_size(), torch.is_grad_enabled(), settings(), "softmax cpu"):
            graph = _graph_of_messages(index, num_nodes) or _graph_of_base(index, num_nodes)
            if graph is not None and graph.has(False) and src.device == index.device:
                out = _over_graph(graph, src)
        if out is NotImplemented and (on_cpu or not torch.are_deterministic_algorithms_enabled()):
            out = _over_groups(src, index, num_nodes)
        # Users may write into theirs before the backward pass.
        return out.clone() if out is not NotImplemented and out.requires_grad else out

    return softmax_of
