"""One aggregation by a given kernel: what is counted, the graph's arrays, the weights in the order of its slots, and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.graph import Graph
from gnnfast.graph.plan import Tuned
from gnnfast.reporting import ran
from gnnfast.types import EXTREMA, REDUCTIONS, Matrix

if _native.cpu.loaded:
    from gnnfast.ops.spmm import SPMM, SPMM_MAX, call, ties_code
    from gnnfast.ops.spmm_coo import SPMM_COO


def count(graph: Graph, place: str, kernel: str, reason: str, x_bytes: int) -> None:
    """Called once for each aggregation: it counts for the graph, which may be worth a better schedule, and for the report."""
    graph.used(x_bytes)
    ran(place, kernel, reason)


def arguments(
    graph: Graph, weight: Tensor | None, csc: bool, row_bytes: int = 0, tuned: Tuned | None = None, exact: bool = False
) -> tuple[Matrix, Tensor | None, Tensor | None]:
    """The graph arguments of an op and its constant weight, in the slot orders of CSR and CSC where those are kept; else by edge
    ids and ``None``."""
    if weight is not None and not torch.compiler.is_compiling():
        in_slots = graph.slot_weights(weight, csc)
        if in_slots is not None:
            return graph.args(csc, row_bytes, False, tuned, exact), *in_slots
    return graph.args(csc, row_bytes, True, tuned, exact), weight, None


def over_coo(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, needs_grad: bool) -> Tensor:
    coo = graph.coo
    assert coo is not None
    return scatter(coo[1], coo[0], weight, x, graph.num_dst, reduce, needs_grad)


def scatter(
    row: Tensor, column: Tensor | None, weight: Tensor | None, x: Tensor, num_rows: int, reduce: str, needs_grad: bool
) -> Tensor:
    return call(SPMM_COO, needs_grad, (), row, column, weight, x, num_rows, REDUCTIONS[reduce], None)  # type: ignore[no-any-return]


def over_formats(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    ties: str,
    empty: float | None,
    needs_grad: bool,
    weight_grad: bool,
    tuned: Tuned | None,
) -> Tensor:
    row_bytes = x.shape[1] * x.element_size()
    if reduce in EXTREMA:
        args = graph.args(needs_grad and x.requires_grad, row_bytes, tuned=tuned)
        mode = ties_code(ties, x) if needs_grad else 0
        return call(SPMM_MAX, needs_grad, args, weight, x, reduce == "min", mode, empty)  # type: ignore[no-any-return]
    if weight_grad:
        args, weights = graph.args(True, row_bytes, tuned=tuned), [weight, None]
    else:
        args, *weights = arguments(graph, weight, needs_grad, row_bytes, tuned)
    return call(SPMM, needs_grad, args, *weights, x, reduce == "mean", None)  # type: ignore[no-any-return]
