"""Products and sums with a bias, whose gradient is the sum of the columns of what comes back. Torch adds up many rows of 64 to 256
numbers on a GPU at a tenth to a third of its bandwidth. Contract of the op: ``plugin_src/head_dots/head_dots_args.h``.

``column_sums(x [N, F]) -> [F]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast import guards
from gnnfast.ops.spmm import Formula, apply_of, call, register, run
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
    # A context is one where gradients come in batches, or sizes are not to be asked for.
    if x.is_cuda and not guards.context() and x.numel() * x.element_size() >= FEWEST_BYTES and x.dtype in FEATURE_DTYPES:
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        return call(_COLUMN_SUMS, True, (), x) if needs_grad else run(_ops.column_sums.default, x)  # type: ignore[no-any-return]
    return x.sum(0)


def plus_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b`` of gradients. In place, which saves a copy, if nothing of it is recorded and autocast has not made one of
    them another dtype."""
    plain = not torch.is_grad_enabled() and total.dtype is a.dtype is b.dtype
    return total.addmm_(a, b) if plain else torch.addmm(total, a, b)


class _Linears(torch.autograd.Function):
    """Linear layers of the same rows, each a weight and a bias or ``None``: gradients of the rows are added up as they are made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        weights, biases = operands[::2], operands[1::2]
        need_x, *needs = ctx.needs_input_grad
        ctx.save_for_backward(x if any(needs[::2]) else None, *(weights if need_x else ()))
        return tuple([functional.linear(x, weight, bias) for weight, bias in zip(weights, biases)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        need_x, *needs = ctx.needs_input_grad
        to_x: Tensor | None = None
        others: list[Tensor | None] = []
        for i, grad in enumerate(grads):
            if grad is None:
                others += [None, None]
                continue
            grad = grad.contiguous()  # that of a sum is not, and products and sums would each copy it
            if need_x:
                to_x = grad.mm(weights[i]) if to_x is None else plus_product(to_x, grad, weights[i])
            others += [grad.t().mm(x) if needs[2 * i] else None, column_sums(grad) if needs[2 * i + 1] else None]
        return to_x, *others


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        need_x, need_bias = ctx.needs_input_grad
        return grad if need_x else None, column_sums(grad) if need_bias and grad is not None else None


LINEARS, BIASED = apply_of(_Linears), apply_of(_Biased)
