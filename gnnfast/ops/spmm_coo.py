"""SpMM over COO (GAS). Contract and citations: ``plugin_src/spmm_coo/spmm_coo.h``.

``spmm_coo(row [E], column [E], weight [E] | [E, H] | None, x [N, F], num_rows, reduce) -> [M, F]``; reduce: 0 sum, 1 mean, 2 max,
3 min. Max and min have no gradient here: the selector converts to CSR for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.gnnfast
REDUCE = {"sum": 0, "mean": 1, "max": 2, "min": 3}


@torch.library.register_fake("gnnfast::spmm_coo")
def _(row: Tensor, column: Tensor, weight: Tensor | None, x: Tensor, num_rows: int, reduce: int) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    row, column, weight, x, _, ctx.reduce = inputs
    ctx.num_sources = x.shape[0]
    ctx.weight_shape = None if weight is None else weight.shape
    needs_weight, needs_x = ctx.needs_input_grad[2:4]
    ctx.save_for_backward(row, column, weight if needs_x else None, x if needs_weight else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    row, column, weight, x = ctx.saved_tensors
    if ctx.reduce >= REDUCE["max"]:
        raise RuntimeError("gnnfast: spmm_coo has no gradient for max and min; use spmm_max over CSR")
    half = ctx.reduce == REDUCE["mean"] and grad.dtype is torch.float16  # too short for the gradients of long rows
    if half:
        grad, weight, x = grad.float(), None if weight is None else weight.float(), None if x is None else x.float()
    if ctx.reduce == REDUCE["mean"]:
        degree = grad.new_zeros(grad.shape[0], dtype=torch.int64).index_add_(0, row.long(), torch.ones_like(row, dtype=torch.int64))
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad = (grad / degree.clamp(min=1).to(wide).unsqueeze(1)).to(grad.dtype)
    grad_weight = grad_x = None
    if ctx.needs_input_grad[2] and ctx.needs_input_grad[3]:
        grad_x, grad_weight = _ops.spmm_coo_backward(column, row, weight, x, grad)
    elif ctx.needs_input_grad[3]:
        grad_x = _ops.spmm_coo(column, row, weight, grad, ctx.num_sources, 0)
    elif ctx.needs_input_grad[2]:
        heads = ctx.weight_shape[1] if len(ctx.weight_shape) == 2 else 1
        grad_weight = _ops.sddmm_coo(row, column, grad, x, heads).view(ctx.weight_shape)
    if half:
        grad_weight, grad_x = (None if t is None else t.half() for t in (grad_weight, grad_x))
    return None, None, grad_weight, grad_x, None, None


torch.library.register_autograd("gnnfast::spmm_coo", _backward, setup_context=_setup)


# spmm_coo_backward(row, column, weight, x [M, F], grad [N, F]) -> [M, F], [E] | [E, H]: both gradients with one gather (fuseGNN,
# Algorithm 2). Row and column are those of the transpose.


@torch.library.register_fake("gnnfast::spmm_coo_backward")
def _(row: Tensor, column: Tensor, weight: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward_backward(ctx: Any, grad_out: Tensor, grad_dot: Tensor) -> tuple[Any, ...]:
    row, column, weight, x, grad = ctx.saved_tensors
    heads = weight.shape[1] if weight.dim() == 2 else 1
    to_weight = to_x = to_grad = None
    if ctx.needs_input_grad[2]:
        to_weight = _ops.sddmm_coo(row, column, grad_out, grad, heads).view_as(weight)
    if ctx.needs_input_grad[3]:
        to_x = _ops.spmm_coo(row, column, grad_dot, grad, x.shape[0], 0)
    if ctx.needs_input_grad[4]:
        to_grad = _ops.spmm_coo(column, row, weight, grad_out, grad.shape[0], 0)
        to_grad = to_grad + _ops.spmm_coo(column, row, grad_dot, x, grad.shape[0], 0)
    return None, None, to_weight, to_x, to_grad


torch.library.register_autograd("gnnfast::spmm_coo_backward", _backward_backward, setup_context=_backward_setup)
