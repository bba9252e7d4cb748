"""Products and sums with a bias, whose gradient is the sum of the columns of what comes back. Torch adds these up on a GPU at a
tenth of its bandwidth where rows are many. Contract of the op: ``plugin_src/head_dots/head_dots_args.h``.

``column_sums(x [N, F]) -> [F]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast.ops.spmm import Formula, apply_of, call, register
from gnnfast.types import FEATURE_DTYPES

_ops = torch.ops.gnnfast
FEWEST_BYTES = 4 << 20  # of which torch's sum takes longer


@torch.library.register_fake("gnnfast::column_sums")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1])


def _keep(ctx: Any, needs: Any, _: Any, x: Tensor) -> tuple[()]:
    ctx.rows = x.shape[0]
    return ()


def _backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Tensor]:
    return (grad.expand(ctx.rows, -1),)


_COLUMN_SUMS = register(Formula(_ops.column_sums.default, _keep, _backward), graph_args=0)


def column_sums(x: Tensor) -> Tensor:
    """``x.sum(0)`` of ``x [N, F]``, which can be differentiated. Always deterministic."""
    if x.is_cuda and x.numel() * x.element_size() >= FEWEST_BYTES and x.dtype in FEATURE_DTYPES:
        return call(_COLUMN_SUMS, torch.is_grad_enabled() and x.requires_grad, (), x)  # type: ignore[no-any-return]
    return x.sum(0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad = grad.contiguous()  # that of a sum is not, and products and sums would each copy it
        to_x = grad.mm(weight) if need_x else None
        return to_x, grad.t().mm(x) if need_weight else None, column_sums(grad) if need_bias else None


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        need_x, need_bias = ctx.needs_input_grad
        return grad if need_x else None, column_sums(grad) if need_bias else None


LINEAR, BIASED = apply_of(_Linear), apply_of(_Biased)
