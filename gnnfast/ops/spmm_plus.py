"""SpMM whose weights are added to features, or subtracted, in place of multiplied, on a CPU. Contract:
``plugin_src/spmm/spmm_args.h``.

``spmm_plus(graph, weight [E, H], x [N, F], minus, mean) -> [M, F]``: sums or means of ``x[source] + weight``, or ``- weight``.
``spmm_plus_max(graph, weight, x, minus, minimum, train, empty) -> out [M, F], arg int32 [M, F]``: maxima or minima; ``arg`` is the
first edge that attains it, by the user's id, and empty without ``train``. Rows without edges hold ``empty``; with ``None`` they and
what is infinite hold 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.guards import is_batched
from gnnfast.ops.convert import derived, empty
from gnnfast.ops.spmm import Formula, edges, over_degree, register, run, wide_means
from gnnfast.types import Matrix, split

_ops = torch.ops.gnnfast


@torch.library.register_fake("gnnfast::spmm_plus")
def _(*args: Any) -> Tensor:
    graph, (_, x, *_) = split(args)
    return x.new_empty(graph.num_rows, x.shape[1])


@torch.library.register_fake("gnnfast::spmm_plus_max")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    graph, (_, x, _, _, train, _) = split(args)
    rows = graph.num_rows
    return x.new_empty(rows, x.shape[1]), x.new_empty(rows if train else 0, x.shape[1], dtype=torch.int32)


def _row_by_id(graph: Matrix) -> Tensor:
    def make() -> Tensor:
        row, _, ids = edges(graph)
        return torch.empty_like(row).scatter_(0, ids, row).to(torch.int32)

    kept = derived(graph.rowptr, ("row by id", graph.perm is None), make) if type(graph.rowptr) is Tensor else None
    return make() if kept is None else kept


def _per_head(of_rows: Tensor, heads: int) -> Tensor:
    """``[R, F]`` summed over the features of each head."""
    return of_rows if heads == of_rows.shape[1] else of_rows.unflatten(1, (heads, of_rows.shape[1] // heads)).sum(-1)


def _keep(ctx: Any, needs: Any, _: Any, weight: Tensor, x: Tensor, minus: bool, mean: bool) -> tuple[()]:
    ctx.shape, ctx.minus, ctx.mean = weight.shape, minus, mean
    return ()


@wide_means
def _backward(ctx: Any, graph: Matrix, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    to_weight = to_x = None
    if ctx.mean:
        grad = over_degree(graph.rowptr, grad)
    if needs[1]:
        to_x = run(_ops.spmm.default, *graph.transposed, None, None, grad, False)
    if needs[0]:
        of_rows, row = _per_head(-grad if ctx.minus else grad, ctx.shape[1]), _row_by_id(graph)
        if torch.is_grad_enabled() or is_batched(of_rows):
            to_weight = of_rows.index_select(0, row)
        else:
            to_weight = torch.index_select(of_rows, 0, row, out=empty(grad, *ctx.shape))
    return to_weight, to_x, None, None


SPMM_PLUS = register(Formula(_ops.spmm_plus.default, _keep, _backward))


def _max_keep(
    ctx: Any, needs: Any, output: Any, weight: Tensor, x: Tensor, minus: bool, minimum: bool, train: bool, empty: Any
) -> tuple[Tensor]:
    ctx.shape, ctx.minus, ctx.train = weight.shape, minus, train
    return (output[1],)


def _max_backward(ctx: Any, graph: Matrix, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    if not ctx.train:
        raise RuntimeError(
            "gnnfast: spmm_plus_max was called with train=False, which keeps nothing for a gradient; pass train=True"
        )
    (arg,) = kept
    to_weight = to_x = None
    if needs[1]:
        to_x = run(_ops.spmm_where.default, *graph.transposed, None, None, grad, None, arg)
    if needs[0]:
        to_weight = first_of(-grad if ctx.minus else grad, arg, *ctx.shape)
    return to_weight, to_x, None, None, None, None


def first_of(grad: Tensor, arg: Tensor, num_edges: int, heads: int) -> Tensor:
    """``grad [M, F]`` at the edges that ``arg`` names, ``[E, H]``, summed over the features of a head; 0 elsewhere."""
    if not num_edges or not heads:
        return grad.new_zeros(num_edges, heads)
    if grad.is_cpu and not torch.is_grad_enabled() and grad.dtype in (torch.float32, torch.float64):
        return run(_ops.scatter_first.default, grad, arg, num_edges, heads)  # type: ignore[no-any-return]
    head = torch.arange(grad.shape[1], device=grad.device) // (grad.shape[1] // heads)
    at = (arg.clamp(min=0).long() * heads + head).flatten()
    share = grad.masked_fill(arg < 0, 0).flatten()
    return grad.new_zeros(num_edges * heads).index_add(0, at, share).view(num_edges, heads)


@torch.library.register_fake("gnnfast::scatter_first")
def _(grad: Tensor, arg: Tensor, num_edges: int, heads: int) -> Tensor:
    return grad.new_empty(num_edges, heads)


SPMM_PLUS_MAX = register(Formula(_ops.spmm_plus_max.default, _max_keep, _max_backward, hides=True))
