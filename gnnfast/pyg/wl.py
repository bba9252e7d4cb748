"""WLConvContinuous on a GPU: a mean over edges, and half the sum of it and each node's own row."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.config import settings
from gnnfast.dispatch.execute import aggregate
from gnnfast.dispatch.select import cannot_win
from gnnfast.graph import ids
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import listed
from gnnfast.pyg.adjacency import graph_of
from gnnfast.pyg.as_written import sums
from gnnfast.pyg.small import ALONE, SMALL
from gnnfast.pyg.verdict import check_module, keeps_methods
from gnnfast.reporting import ran
from gnnfast.types import REORDERED
from gnnfast.unsupported import Unsupported

_STRIDED, _ops = torch.strided, torch.ops.gnnfast


def make_wl_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``WLConvContinuous.forward(x, edge_index, edge_weight, size)``. On a CPU, where PyG's sums times the inverse
    of a degree have the same bits in each call, and with weights, its parts run."""

    known = class_of(original)

    def wl_conv(module: Any, x: Any, edge_index: Any, edge_weight: Any, size: Any) -> Any:
        if type(x) is not Tensor or not x.is_cuda or edge_weight is not None or size is not None or guards.context():
            return NotImplemented
        if x.layout is not _STRIDED or x.dim() != 2 or x.dtype not in REORDERED or guards.operand("x", x):
            return NotImplemented
        if type(edge_index) is not Tensor or edge_index.layout is not _STRIDED or edge_index.dim() != 2:
            return NotImplemented
        own = module.__dict__
        if not keeps_methods(type(module), known) or "propagate" in own or not is_dispatched(original.__globals__.get("scatter")):
            return NotImplemented
        if own["flow"] != "source_to_target" or own["node_dim"] not in (-2, 0):
            return NotImplemented
        ids.check()
        try:
            verdict = check_module(module)
            feature, weight, _, optional = verdict.message
            if verdict.update is not None or feature != "x" or not (weight is None or optional) or verdict.reduce != "sum":
                return NotImplemented
            if not is_dispatched(type(module).propagate):
                return NotImplemented
            out = _mean(module, x, edge_index, verdict.place)
        except (Unsupported, IndexError, ValueError):  # PyG raises its own
            return NotImplemented
        return (x + out).mul_(0.5)  # in this order: rows of x may lie in memory otherwise, and so do PyG's results

    return wl_conv


def _mean(module: Any, x: Tensor, edge_index: Tensor, place: str) -> Tensor:
    """Over small graphs by few operations: the host takes longer between these than in them. Raises Unsupported if PyG's own must
    run."""
    nodes = x.shape[0]
    small = cannot_win(edge_index.shape[1] * x.shape[1] * x.element_size(), torch.is_grad_enabled(), settings())
    if not small or torch.are_deterministic_algorithms_enabled():
        graph = graph_of(edge_index, nodes, nodes, True)
        if graph.device != x.device:
            raise Unsupported("features and edge_index are on different devices")
        return aggregate(graph, x, None, "mean", place=place, training=module.training, owner=module, copies=True)
    plain = edge_index.shape[0] == 2 and edge_index.dtype is torch.int64 and not guards.operand("edge_index", edge_index)
    if not plain or edge_index.device != x.device:
        raise Unsupported("the edges are not as PyG wants them")
    if listed.pays(edge_index, x):
        out = listed.aggregate(edge_index, True, None, x, nodes, "mean")
        if out is not NotImplemented:
            ran(place, "gas mean", listed.WHY)
            return out  # type: ignore[no-any-return]
    src, dst = edge_index.unbind()
    try:
        out = sums(x.index_select(0, src), dst, nodes) / _ops.degrees.default(dst, nodes, x.dtype).unsqueeze(1)
    except RuntimeError as error:  # PyG raises its own
        raise Unsupported(str(error)) from None
    ran(place, "PyG's own", ALONE[SMALL])
    return out
