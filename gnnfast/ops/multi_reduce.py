"""Several reductions of the same rows with one gather. Contract and citation: ``plugin_src/multi_reduce/multi_reduce_args.h``.

``multi_reduce(graph, x [N, F], shift [M, F] | None, kinds, train) -> out [M, K F], kept, ties``: the reductions ``kinds``, numbers
of :data:`gnnfast.types.KINDS`, of ``x[column] + shift[row]`` side by side; ``kept`` and ``ties`` are for the backward pass, and
empty without ``train``. ``multi_reduce_shares(rowptr, grad, out, kept, ties, kinds, need_shift) -> shares, gradient of shift`` is
what each row gives its edges, and ``multi_reduce_backward(graph of A^T, x, shares, kinds) -> [N, F]`` the gradient of x; of
messages ``x [E, F]`` that exist it is ``multi_reduce_edges(index [E], x, shares, kinds)``, index being their rows. float32 and
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import EVEN, SPMM, SPMM_MAX, Formula, call, register, run
from gnnfast.types import EXTREMA, KINDS, Matrix, split

_ops = torch.ops.gnnfast
_NAMES = {number: name for name, number in KINDS.items()}
LEAST = 1e-5  # variances of which PyG takes no root


def sizes(kinds: list[int]) -> tuple[int, int, int]:
    """Rows of ``kept``, ``ties`` and ``shares`` for a node (reduce_layout in plugin_src/multi_reduce/multi_reduce.h)."""
    names = {_NAMES[kind] for kind in kinds}
    squares, extrema = bool(names & {"var", "std"}), len(names & set(EXTREMA))
    return squares + extrema, extrema, bool(names - set(EXTREMA)) + squares + 2 * extrema


@torch.library.register_fake("gnnfast::multi_reduce")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    graph, (x, _, kinds, train) = split(args)
    kept, ties, _ = sizes(kinds)
    rows, width = graph.num_rows, x.shape[1]
    saved = rows if train else 0
    return (
        x.new_empty(rows, len(kinds) * width),
        x.new_empty(saved, kept * width),
        x.new_empty(saved, ties * width, dtype=torch.int32),
    )


@torch.library.register_fake("gnnfast::multi_reduce_shares")
def _(rowptr: Tensor, grad: Tensor, out: Any, kept: Any, ties: Any, kinds: list[int], need_shift: bool) -> tuple[Tensor, Tensor]:
    rows, width = grad.shape[0], grad.shape[1] // len(kinds)
    return grad.new_empty(rows, sizes(kinds)[2] * width), grad.new_empty(rows if need_shift else 0, width)


@torch.library.register_fake("gnnfast::multi_reduce_backward")
def _(*args: Any) -> Tensor:
    graph, (x, *_) = split(args)
    return x.new_empty(graph.num_rows, x.shape[1])


@torch.library.register_fake("gnnfast::multi_reduce_edges")
def _(index: Tensor, x: Tensor, shares: Tensor, kinds: list[int]) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, needs: Any, output: Any, x: Tensor, shift: Any, kinds: list[int], train: bool) -> tuple[Any, ...]:
    ctx.kinds, ctx.train = kinds, train
    return x, shift, *output


def _backward(ctx: Any, graph: Matrix, saved: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    if not ctx.train:
        raise RuntimeError("gnnfast: multi_reduce was called with train=False, which keeps nothing for a gradient; pass train=True")
    x, shift, out, kept, ties = saved
    if torch.is_grad_enabled():
        again = differentiable(lambda x, shift: composed(graph, x, shift, ctx.kinds), (x, shift), needs[:2], grad)
        return *again, None, None
    shares, to_shift = run(_ops.multi_reduce_shares.default, graph.rowptr, grad, out, kept, ties, ctx.kinds, needs[1])
    to_x = run(_ops.multi_reduce_backward.default, *graph.transposed, x, shares, ctx.kinds) if needs[0] else None
    return to_x, to_shift if needs[1] else None, None, None


def differentiable(
    composed: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of ``composed(*tensors)`` for those of them that are needed, such that they can be differentiated."""
    # As inputs of their own: one may have been computed from the other.
    given = [t.view_as(t) if needed and t is not None else t for t, needed in zip(tensors, needs)]
    leaves = [t for t, needed in zip(given, needs) if needed and t is not None]
    found = iter(torch.autograd.grad(composed(*given), leaves, grad, create_graph=True, allow_unused=True))
    return [next(found) if needed and t is not None else None for t, needed in zip(given, needs)]


MULTI_REDUCE = register(Formula(_ops.multi_reduce.default, _keep, _backward, hides=True))


def composed(graph: Matrix, x: Tensor, shift: Tensor | None, kinds: list[int]) -> Tensor:
    """The same, by operations that can be differentiated once more."""
    degree = graph.rowptr.diff().to(x.dtype).unsqueeze(1)
    moved: Any = 0 if shift is None else shift * degree.clamp(max=1)

    def mean_of(t: Tensor) -> Tensor:
        return call(SPMM, True, graph, None, None, t, True, None)  # type: ignore[no-any-return]

    def made(kind: str) -> Tensor:
        if kind in EXTREMA:
            best = call(SPMM_MAX, True, graph, None, x, kind == "min", EVEN, 0.0) + moved
            with torch.no_grad():
                ties = run(_ops.spmm_max.default, *graph, None, x, kind == "min", EVEN, 0.0)[1]
                share = ties / (ties + (best == 0)).to(x.dtype)
            return best.detach() + share * (best - best.detach())
        mean = mean_of(x)
        if kind in ("mean", "sum"):
            return (mean + moved) * (degree if kind == "sum" else 1)
        variance = mean_of(x * x) - mean * mean
        return variance if kind == "var" else deviation(variance)

    return torch.cat([made(_NAMES[kind]) for kind in kinds], 1)


def deviation(variance: Tensor) -> Tensor:
    """The root of a variance, 0 up to ``LEAST``."""
    return torch.nn.functional.threshold(variance.clamp(min=LEAST).sqrt(), math.sqrt(LEAST), 0.0)
