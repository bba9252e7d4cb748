"""Softmax over the edges of each row. Contract and citations: ``plugin_src/edge_softmax/edge_softmax_args.h``.

``edge_softmax(graph, score [E, H] | None, dst [M, H] | None, src [N, H] | None, slope) -> [E, H]``, edges in the user's order;
``edge_softmax_backward(graph, prob, grad, score, dst, src, slope) -> [E, H]``, the gradient of the sum of the three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import GRAPH_ARGS, Formula, edges, register, rows_of, run, swap

_ops = torch.ops.gnnfast


@torch.library.register_fake("gnnfast::edge_softmax")
def _(*args: Any) -> Tensor:
    ref = next(t for t in args[GRAPH_ARGS:] if isinstance(t, Tensor))
    return ref.new_empty(args[1].shape[0], ref.shape[1])


@torch.library.register_fake("gnnfast::edge_softmax_backward")
def _(*args: Any) -> Tensor:
    return args[GRAPH_ARGS].new_empty(args[GRAPH_ARGS].shape)


def _keep(ctx: Any, needs: Any, prob: Tensor, score: Any, dst: Any, src: Any, slope: float) -> tuple[Any, ...]:
    ctx.slope, ctx.num_src = slope, None if src is None else src.shape[0]
    signs = (None, None, None) if slope == 1 else (score, dst, src)
    return prob, *signs


def _backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    prob, *raw = kept
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        per_edge = _composed(graph, prob, grad, raw, ctx.slope)
    else:
        per_edge = run(_ops.edge_softmax_backward.default, *graph, prob, grad, *raw, ctx.slope)
    heads = prob.shape[1]
    to_dst = to_src = None
    if needs[1]:
        # A sum over each row: the features are ones.
        to_dst = run(_ops.spmm.default, *graph, per_edge, None, per_edge.new_ones(_columns(ctx, graph), heads), False)
    if needs[2]:
        to_src = run(_ops.spmm.default, *swap(graph), per_edge, None, per_edge.new_ones(rows_of(graph), heads), False)
    return per_edge if needs[0] else None, to_dst, to_src, None


def _columns(ctx: Any, graph: Any) -> int:
    if ctx.num_src is not None:
        return int(ctx.num_src)
    return int(graph[5].shape[0]) - 1  # of the transpose


def _composed(graph: Any, prob: Tensor, grad: Tensor, raw: list[Tensor | None], slope: float) -> Tensor:
    """The same with torch's ops, slot by slot, for a second derivative."""
    row, column, ids = edges(graph)
    p, g = prob[ids], grad[ids]
    total = p.new_zeros(rows_of(graph), p.shape[1]).index_add(0, row, p * g)
    found = p * (g - total[row])
    if slope != 1:
        score, dst, src = raw
        with torch.no_grad():
            taken = [t[i] for t, i in ((score, ids), (dst, row), (src, column)) if t is not None]
            factor = torch.full_like(taken[0], slope).masked_fill_(sum(taken[1:], taken[0]) > 0, 1)
        found = found * factor
    return torch.zeros_like(prob).index_copy(0, ids, found)


EDGE_SOFTMAX = register(Formula(_ops.edge_softmax.default, _keep, _backward))
