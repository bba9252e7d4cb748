"""Softmax over the edges of each row. Contract and citations: ``plugin_src/edge_softmax/edge_softmax_args.h``.

``edge_softmax(graph, score [E, H] | None, dst [M, H] | None, src [N, H] | None, slope) -> [E, H]``, edges in the user's order;
``edge_softmax_backward(graph, prob, grad, score, dst, src, slope, sums) -> [E, H], [M, H]``: the gradient of the sum of the three
for each edge and, with ``sums``, for each destination (else ``[0, H]``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import Formula, edges, register, run
from gnnfast.types import split

_ops = torch.ops.gnnfast


@torch.library.register_fake("gnnfast::edge_softmax")
def _(*args: Any) -> Tensor:
    graph, scores = split(args)
    ref = next(t for t in scores if isinstance(t, Tensor))
    return ref.new_empty(graph.num_slots, ref.shape[1])


@torch.library.register_fake("gnnfast::edge_softmax_backward")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    graph, (prob, *_, sums) = split(args)
    return prob.new_empty(prob.shape), prob.new_empty(graph.num_rows if sums else 0, prob.shape[1])


def _keep(ctx: Any, needs: Any, prob: Tensor, score: Any, dst: Any, src: Any, slope: float) -> tuple[Any, ...]:
    ctx.slope = slope
    signs = (None, None, None) if slope == 1 else (score, dst, src)
    return prob, *signs


def _backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    prob, *raw = kept
    to_dst = to_src = None
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        row, per_slot, per_edge = _composed(graph, prob, grad, raw, ctx.slope)
        to_dst = per_slot.new_zeros(graph.num_rows, prob.shape[1]).index_add(0, row, per_slot) if needs[1] else None
    else:
        per_edge, to_dst = run(_ops.edge_softmax_backward.default, *graph, prob, grad, *raw, ctx.slope, needs[1])
    if needs[2]:  # a sum over each column: the features are ones
        ones = per_edge.new_ones(graph.num_rows, prob.shape[1])
        to_src = run(_ops.spmm.default, *graph.transposed, per_edge, None, ones, False)
    return per_edge if needs[0] else None, to_dst if needs[1] else None, to_src, None


def _composed(graph: Any, prob: Tensor, grad: Tensor, raw: list[Tensor | None], slope: float) -> tuple[Tensor, ...]:
    """The same with torch's ops, for a second derivative: the row of each slot, and the gradient by slot and by edge."""
    row, column, ids = edges(graph)
    p, g = prob[ids], grad[ids]
    total = p.new_zeros(graph.num_rows, p.shape[1]).index_add(0, row, p * g)
    found = p * (g - total[row])
    if slope != 1:
        score, dst, src = raw
        with torch.no_grad():
            taken = [t[i] for t, i in ((score, ids), (dst, row), (src, column)) if t is not None]
            factor = torch.full_like(taken[0], slope).masked_fill_(sum(taken[1:], taken[0]) > 0, 1)
        found = found * factor
    return row, found, torch.zeros_like(prob).index_copy(0, ids, found)


EDGE_SOFTMAX = register(Formula(_ops.edge_softmax.default, _keep, _backward))
