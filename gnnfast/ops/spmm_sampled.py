"""Sampled SpMM over CSR (ES-SpMM). Contract and citations: ``plugin_src/spmm_sampled/spmm_sampled_args.h``.

The graph arguments are those of :mod:`gnnfast.ops.spmm`, but for one: in place of the perm of A^T they hold ``slots_t [E]``, which
maps a slot of A^T to the slot of A (``None``: they are equal), for draws are made by the slots of A. They are never swapped;
``transposed`` says over which matrix an op runs. The three operators below are each other's derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import Formula, heads_of, register, run
from gnnfast.types import STRATEGIES, split

_ops = torch.ops.gnnfast
RANDOM = STRATEGIES["random"]


def scale(rowptr: Tensor, width: int, mean: bool, rescale: bool, like: Tensor) -> Tensor:
    """What the sum of a row's draws is multiplied by: ``[M, 1]`` in the dtype of ``like``, but float32 for 16 bits."""
    degree = rowptr.diff()
    draws = degree.clamp(max=width)
    value = (
        1 / draws.clamp(min=1).double() if mean else degree / draws.clamp(min=1).double() if rescale else torch.ones_like(degree)
    )
    return value.to(torch.promote_types(like.dtype, torch.float32)).unsqueeze(1)


# spmm_sampled(graph, order, weight [E] | [E, H] | None, x, width, strategy, seed, mean, rescale, transposed) -> [M, F]; transposed:
# x is [M, F], the result [N, F], unscaled.


@torch.library.register_fake("gnnfast::spmm_sampled")
def _(*args: Any) -> Tensor:
    graph, (_, _, x, *_, transposed) = split(args)
    return x.new_empty((graph.transposed if transposed else graph).num_rows, x.shape[1])


def _keep(ctx: Any, needs: Any, _: Any, order: Any, weight: Any, x: Tensor, *how: Any) -> tuple[Any, ...]:
    *ctx.draw, ctx.mean, ctx.rescale, ctx.transposed = how
    return order, weight, x if needs[1] else None


def _backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    order, weight, x = kept
    width, strategy, _ = ctx.draw
    if strategy != RANDOM:
        raise RuntimeError("gnnfast: spmm_sampled has a gradient for the random strategy alone")
    if not ctx.transposed and (ctx.mean or ctx.rescale):
        grad = (grad * scale(graph.rowptr, width, ctx.mean, ctx.rescale, grad)).to(grad.dtype)
    grad_weight = grad_x = None
    if needs[1]:
        at_rows, at_columns = (x, grad) if ctx.transposed else (grad, x)
        grad_weight = run(_ops.sddmm_sampled.default, *graph, at_rows, at_columns, heads_of(weight), *ctx.draw).view_as(weight)
    if needs[2]:
        grad_x = run(_ops.spmm_sampled.default, *graph, order, weight, grad, *ctx.draw, False, False, not ctx.transposed)
    return None, grad_weight, grad_x, *(None,) * 6


SPMM_SAMPLED = register(Formula(_ops.spmm_sampled.default, _keep, _backward))


# draw(rowptr, rowptr_drawn [M + 1], num_draws, width, strategy) -> [num_draws]: the slot of each draw; for strategies without
# chance.


@torch.library.register_fake("gnnfast::draw")
def _(rowptr: Tensor, rowptr_drawn: Tensor, num_draws: int, *_: Any) -> Tensor:
    return rowptr.new_empty(num_draws)


# sddmm_sampled(graph, a [M, F], b [N, F], heads, width, strategy, seed) -> [E, H]: dot products of the drawn edges, else 0.


@torch.library.register_fake("gnnfast::sddmm_sampled")
def _(*args: Any) -> Tensor:
    graph, (a, _, heads, *_) = split(args)
    return a.new_empty(graph.num_slots, heads)


def _dot_keep(ctx: Any, needs: Any, _: Any, a: Tensor, b: Tensor, heads: int, *draw: Any) -> tuple[Any, ...]:
    ctx.draw = draw
    return a, b


def _dot_backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b = kept
    need_a, need_b = needs[:2]
    grad_a = _ops.spmm_sampled(*graph, None, grad, b, *ctx.draw, False, False, False) if need_a else None
    grad_b = _ops.spmm_sampled(*graph, None, grad, a, *ctx.draw, False, False, True) if need_b else None
    return grad_a, grad_b, *(None,) * 4


register(Formula(_ops.sddmm_sampled.default, _dot_keep, _dot_backward))
