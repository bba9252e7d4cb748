"""Dot products of each head of a row with vectors that all rows share. Contract: ``plugin_src/head_dots/head_dots_args.h``.

``head_dots(x [N, F], a [K, F], heads) -> [K, N, H]``, K is 1 or 2;
``head_dots_backward(x, a, grad [K, N, H], heads, need_x) -> the gradients of x, empty if not needed, and of a``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import Formula, register, run

_ops = torch.ops.gnnfast


@torch.library.register_fake("gnnfast::head_dots")
def _(x: Tensor, a: Tensor, heads: int) -> Tensor:
    return x.new_empty(a.shape[0], x.shape[0], heads)


@torch.library.register_fake("gnnfast::head_dots_backward")
def _(x: Tensor, a: Tensor, grad: Tensor, heads: int, need_x: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0] if need_x else 0, x.shape[1]), a.new_empty(a.shape)


def _keep(ctx: Any, needs: Any, _: Any, x: Tensor, a: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    ctx.heads = heads
    return x, a


def _backward(ctx: Any, _: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    x, a = kept
    to_x, to_a = run(_ops.head_dots_backward.default, x, a, grad, ctx.heads, needs[0])
    return to_x if needs[0] else None, to_a if needs[1] else None, None


HEAD_DOTS = register(Formula(_ops.head_dots.default, _keep, _backward), graph_args=0)


def _backward_keep(ctx: Any, needs: Any, _: Any, x: Tensor, a: Tensor, grad: Tensor, heads: int, need_x: bool) -> tuple[Any, ...]:
    ctx.heads, ctx.need_x = heads, need_x
    return x, a, grad


def _backward_backward(ctx: Any, _: Any, kept: Any, needs: Any, of_x: Tensor, of_a: Tensor) -> tuple[Any, ...]:
    # to_x = sum over k of grad[k] a[k] and to_a[k] = sum over the rows of grad[k] x, of which each is linear in each operand.
    x, a, grad = kept
    heads = ctx.heads

    def by_head(t: Tensor) -> Tensor:
        return t.view(t.shape[0], heads, t.shape[1] // heads)

    wide = grad.unsqueeze(-1)  # [K, N, H, 1]
    to_x = (wide * by_head(of_a).unsqueeze(1)).sum(0).view_as(x) if needs[0] else None
    to_grad = (by_head(x).unsqueeze(0) * by_head(of_a).unsqueeze(1)).sum(-1) if needs[2] else None
    to_a = None
    if ctx.need_x:
        to_a = (wide * by_head(of_x)).sum(1).view_as(a) if needs[1] else None
        if to_grad is not None:
            to_grad = to_grad + (by_head(of_x).unsqueeze(0) * by_head(a).unsqueeze(1)).sum(-1)
    return to_x, to_a, to_grad, None, None


register(Formula(_ops.head_dots_backward.default, _backward_keep, _backward_backward), graph_args=0)
