"""SDDMM, a dot product per edge and head. Contract: ``plugin_src/sddmm/sddmm_args.h``.

``sddmm(graph, a [M, F], b [N, F], heads, weight=None, value=None, arg=None) -> [E, H]`` in the user's edge order; with ``value`` or
``arg`` the sum is restricted to the features at which an edge attained the maximum of its row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import Formula, attained, edges, register, run, spread
from gnnfast.types import split

_ops = torch.ops.gnnfast


@torch.library.register_fake("gnnfast::sddmm")
def _(*args: Any) -> Tensor:
    graph, (a, _, heads, *_) = split(args)
    return a.new_empty(graph.num_slots, heads)


def _keep(ctx: Any, needs: Any, _: Any, a: Tensor, b: Tensor, heads: int, *rest: Any) -> tuple[Any, ...]:
    if rest == (None, None, None):  # each operand is kept for the gradient of the other: else it may be written into
        return a if needs[1] else None, b if needs[0] else None, *rest
    return a, b, *rest


def _backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, weight, value, arg = kept
    need_a, need_b = needs[:2]
    grad_a = grad_b = None
    if value is None and arg is None:
        if need_a:
            grad_a = _ops.spmm(*graph, grad, None, b, False)
        if need_b:
            grad_b = _ops.spmm(*graph.transposed, grad, None, a, False)
    else:  # second derivative of max and min
        row, column, ids = edges(graph)
        per_edge = spread(grad[ids], a.shape[1]) * attained(row, column, ids, weight, b, value, arg)
        if need_a:
            grad_a = torch.zeros_like(a).index_add(0, row, per_edge * b[column])
        if need_b:
            grad_b = torch.zeros_like(b).index_add(0, column, per_edge * a[row])
    return grad_a, grad_b, None, None, None, None


SDDMM = register(Formula(_ops.sddmm.default, _keep, _backward))


# sddmm_coo(row [E], column [E], a [M, F], b [N, F], heads) -> [E, H]


@torch.library.register_fake("gnnfast::sddmm_coo")
def _(row: Tensor, column: Tensor, a: Tensor, b: Tensor, heads: int) -> Tensor:
    return a.new_empty(row.shape[0], heads)


def _coo_keep(ctx: Any, needs: Any, _: Any, row: Tensor, column: Tensor, a: Tensor, b: Tensor, heads: int) -> tuple[Any, ...]:
    ctx.sizes = a.shape[0], b.shape[0]
    return row, column, a if needs[3] else None, b if needs[2] else None


def _coo_backward(ctx: Any, _: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    row, column, a, b = kept
    grad_a = run(_ops.spmm_coo.default, row, column, grad, b, ctx.sizes[0], 0)[0] if needs[2] else None
    grad_b = run(_ops.spmm_coo.default, column, row, grad, a, ctx.sizes[1], 0)[0] if needs[3] else None
    return None, None, grad_a, grad_b, None


# gather_ends(row [E], a [M, F]) -> [E, F]: the rows at one end of each edge, on CUDA alone. combine_ends(row [E], column [E],
# a [M, F], b [N, F], op) -> [E, F]: sums (op 0), differences (1) or products (2) of the rows at both ends.
# :mod:`gnnfast.dispatch.edges` has their gradients.


@torch.library.register_fake("gnnfast::gather_ends")
def _(row: Tensor, a: Tensor) -> Tensor:
    return a.new_empty(row.shape[0], a.shape[1])


@torch.library.register_fake("gnnfast::combine_ends")
def _(row: Tensor, column: Tensor, a: Tensor, b: Tensor, op: int) -> Tensor:
    return a.new_empty(row.shape[0], a.shape[1])


SDDMM_COO = register(Formula(_ops.sddmm_coo.default, _coo_keep, _coo_backward), graph_args=0)
