"""SpMM over COO (GAS). Contract and citations: ``plugin_src/spmm_coo/spmm_coo.h``.

``spmm_coo(row [E], column [E] | None, weight [E] | [E, H] | None, x [N, F], num_rows, reduce, x_degree [N] | None) -> [M, F],
degree``; without columns ``x [E, F]`` has a row for each edge;
reduce as in :data:`gnnfast.types.REDUCTIONS`; with ``x_degree`` (int32), row j of x counts as ``x[j] / max(x_degree[j], 1)``;
``degree [M]`` (int32) is that of a mean, else empty. Max and min have no gradient here: the selector converts to CSR for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import Formula, heads_of, register, run
from gnnfast.types import EXTREMA, REDUCTIONS

_ops = torch.ops.gnnfast
_SUM, _MEAN, _EXTREMA = REDUCTIONS["sum"], REDUCTIONS["mean"], tuple(REDUCTIONS[r] for r in EXTREMA)


@torch.library.register_fake("gnnfast::spmm_coo")
def _(row: Tensor, column: Any, weight: Any, x: Tensor, num_rows: int, reduce: int, x_degree: Any = None) -> tuple[Tensor, Tensor]:
    return x.new_empty(num_rows, x.shape[1]), x.new_empty(num_rows if reduce == _MEAN else 0, dtype=torch.int32)


def _over(degree: Tensor | None, t: Tensor) -> Tensor:
    """Rows over their degrees."""
    return (
        t if degree is None else (t / degree.clamp(min=1).to(torch.promote_types(t.dtype, torch.float32)).unsqueeze(1)).to(t.dtype)
    )


def _keep(
    ctx: Any,
    needs: Any,
    output: Any,
    row: Tensor,
    column: Tensor | None,
    weight: Any,
    x: Tensor,
    num_rows: int,
    reduce: int,
    x_degree: Any,
) -> tuple[Any, ...]:
    ctx.reduce, ctx.num_cols, ctx.weight_shape = reduce, x.shape[0], None if weight is None else weight.shape
    degree = output[1] if reduce == _MEAN else None
    return row, column, weight if needs[3] else None, x if needs[2] else None, degree, x_degree


def _backward(ctx: Any, _: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    row, column, weight, x, degree, x_degree = kept
    if ctx.reduce in _EXTREMA:
        raise RuntimeError("gnnfast: spmm_coo has no gradient for max and min; use spmm_max over CSR")
    if column is None:
        grad_x = _over(x_degree, _over(degree, grad).index_select(0, row)) if needs[3] else None
        return None, None, None, grad_x, None, None, None
    grad_weight = grad_x = None
    x = x if x is None else _over(x_degree, x)
    if needs[2] and needs[3]:
        grad_x, grad_weight = run(_ops.spmm_coo_backward.default, column, row, weight, x, grad, degree)
    elif needs[3]:
        grad_x = run(_ops.spmm_coo.default, column, row, weight, grad, ctx.num_cols, _SUM, degree)[0]
    elif needs[2]:
        assert x is not None
        half = degree is not None and grad.dtype is torch.float16  # too short for the gradients of long rows
        a, b = (grad.float(), x.float()) if half else (grad, x)
        heads = ctx.weight_shape[1] if len(ctx.weight_shape) == 2 else 1
        grad_weight = run(_ops.sddmm_coo.default, row, column, _over(degree, a), b, heads).view(ctx.weight_shape).to(grad.dtype)
    if grad_x is not None:
        grad_x = _over(x_degree, grad_x)
    return None, None, grad_weight, grad_x, None, None, None


SPMM_COO = register(Formula(_ops.spmm_coo.default, _keep, _backward, hides=True), graph_args=0)


# spmm_coo_backward(row, column, weight, x [M, F], grad [N, F], degree [N] | None) -> [M, F], [E] | [E, H]: both gradients with one
# gather (fuseGNN, Algorithm 2). Row and column are those of the transpose.


@torch.library.register_fake("gnnfast::spmm_coo_backward")
def _(row: Tensor, column: Tensor, weight: Tensor, x: Tensor, grad: Tensor, degree: Any = None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _backward_keep(ctx: Any, needs: Any, _: Any, *inputs: Any) -> tuple[Any, ...]:
    return inputs


def _backward_backward(ctx: Any, _: Any, kept: Any, needs: Any, grad_out: Tensor, grad_dot: Tensor) -> tuple[Any, ...]:
    # out = A^T(w) g' and dot = <x, g'> per edge, with g' = g / degree, are linear in each of w, x and g.
    row, column, weight, x, grad, degree = kept
    to_weight = to_x = to_grad = None
    if needs[2]:
        to_weight = _ops.sddmm_coo(row, column, grad_out, _over(degree, grad), heads_of(weight)).view_as(weight)
    if needs[3]:
        to_x = _ops.spmm_coo(row, column, grad_dot, grad, x.shape[0], _SUM, degree)[0]
    if needs[4]:
        to_grad = _ops.spmm_coo(column, row, weight, grad_out, grad.shape[0], _SUM)[0]
        to_grad = _over(degree, to_grad + _ops.spmm_coo(column, row, grad_dot, x, grad.shape[0], _SUM)[0])
    return None, None, to_weight, to_x, to_grad, None


register(Formula(_ops.spmm_coo_backward.default, _backward_keep, _backward_backward), graph_args=0)
