"""Several reductions at once: of ``x[src] + shift[dst]``, where only those of ``x`` run over edges, as the shift is the same for
all edges of a node, and of messages that exist. Framework-free, on unchecked operands."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.dispatch import edges, execute, passes
from gnnfast.dispatch.calls import count
from gnnfast.graph import Graph
from gnnfast.types import EXTREMA, TIES

if _native.cpu.loaded:
    from gnnfast.ops.convert import derived
    from gnnfast.ops.spmm import apply_of, run

KINDS = ("sum", "mean", "max", "min", "var", "std")
LEAST = 1e-5  # variances of which PyG takes no root

_ops = torch.ops.gnnfast


def reduce_shifted(graph: Graph, x: Tensor, shift: Tensor, kinds: tuple[str, ...], place: str) -> Tensor:
    """The reductions ``kinds``, of :data:`KINDS`, side by side: ``x [num_src, F]``, ``shift [num_dst, F]`` of the same dtype,
    contiguous; returns ``[num_dst, len(kinds) F]``, 0 where a node has no in-edges. Variances are means of squares minus squares of
    means, roots of those up to ``LEAST`` are 0. Of several edges that attain an extremum each gets an even share of the gradient,
    and where it is 0 so does the 0 that ``torch.scatter_reduce`` starts from. Differentiable any number of times."""
    if torch.is_grad_enabled() and (x.requires_grad or shift.requires_grad):
        return _apply(x, shift, graph, kinds, place)  # type: ignore[no-any-return]
    return _forward(graph, x, shift, kinds, place, False)[0]


def degrees(graph: Graph, dtype: torch.dtype) -> Tensor:
    """The number of in-edges of each node, ``[num_dst, 1]``."""
    rowptr = graph.csr.rowptr

    def make() -> Tensor:
        return rowptr.diff().to(dtype).unsqueeze(1)

    kept = derived(rowptr, ("degree", dtype), make)
    return make() if kept is None else kept


def reduce_messages(messages: Tensor, ends: edges.Ends, kinds: tuple[str, ...]) -> Tensor:
    """The same of ``messages [E, F]``."""
    if not set(kinds) <= set(EXTREMA):
        mean = edges.reduce(messages, ends, "mean")

    def made(kind: str) -> Tensor:
        if kind in ("var", "std"):
            variance = edges.reduce(messages * messages, ends, "mean") - mean * mean
            return variance if kind == "var" else deviation(variance)
        return mean if kind == "mean" else edges.reduce(messages, ends, kind)

    return torch.cat(list(map(made, kinds)), 1)


def deviation(variance: Tensor) -> Tensor:
    """The root of a variance, 0 up to ``LEAST``."""
    return torch.nn.functional.threshold(variance.clamp(min=LEAST).sqrt(), math.sqrt(LEAST), 0.0)


def _extremum(graph: Graph, x: Tensor, kind: str, train: bool, place: str) -> tuple[Tensor, Tensor]:
    """The maximum or minimum of ``x``, and how many edges attain it if ``train``."""
    row_bytes = x.shape[1] * x.element_size()
    count(graph, place, f"gar {kind}", "shifted", x.nbytes)
    args = graph.args(train, row_bytes)
    return run(_ops.spmm_max.default, *args, None, x, kind == "min", TIES["even"] if train else 0, 0.0)  # type: ignore[no-any-return]


def _forward(
    graph: Graph, x: Tensor, shift: Tensor, kinds: tuple[str, ...], place: str, train: bool
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The result, and the mean of ``x``, its maximum and minimum and how many edges attain them, as far as they were needed."""
    width = x.shape[1]
    extrema = {kind: _extremum(graph, x, kind, train, place) for kind in EXTREMA if kind in kinds}
    mean = square = None
    if not set(kinds) <= set(EXTREMA):
        mean = passes.aggregate(graph, x, None, "mean", train, place)
    if "var" in kinds or "std" in kinds:
        square = passes.aggregate(graph, x * x, None, "mean", train, place)
    degree = degrees(graph, x.dtype)
    some = degree.clamp(max=1)
    out = x.new_empty(graph.num_dst, len(kinds) * width)
    for i, kind in enumerate(kinds):
        to = out[:, i * width : (i + 1) * width]
        if kind in EXTREMA:
            torch.addcmul(extrema[kind][0], shift, some, out=to)
            continue
        assert mean is not None
        if kind == "mean":
            torch.addcmul(mean, shift, some, out=to)
        elif kind == "sum":
            torch.add(mean, shift, out=to).mul_(degree)
        else:
            assert square is not None
            torch.addcmul(square, mean, mean, value=-1, out=to)
            if kind == "std":
                torch.nn.functional.threshold(to.clamp_(min=LEAST).sqrt_(), math.sqrt(LEAST), 0.0, inplace=True)
    none = (None, None)
    return out, (mean, *extrema.get("max", none), *extrema.get("min", none))


class _Shifted(torch.autograd.Function):
    """By hand, as each operation that autograd puts between the kernels reads and writes all rows of nodes once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, graph: Graph, kinds: tuple[str, ...], place: str) -> Tensor:
        out, kept = _forward(graph, x, shift, kinds, place, True)
        ctx.graph, ctx.kinds, ctx.place = graph, kinds, place
        ctx.save_for_backward(x, shift, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, shift, out, mean, *extrema = ctx.saved_tensors
        graph, kinds, width = ctx.graph, ctx.kinds, x.shape[1]
        if torch.is_grad_enabled():
            leaves = x.view_as(x), shift.view_as(shift)  # as inputs of their own: one may have been computed from the other
            again = composed(graph, *leaves, kinds, ctx.place)
            return *torch.autograd.grad(again, leaves, grad, create_graph=True, allow_unused=True), None, None, None
        degree = degrees(graph, x.dtype)
        to_x: Tensor | None = None
        to_mean: Tensor | None = None
        to_variance: Tensor | None = None  # twice that
        to_shift = torch.zeros_like(shift)
        for i, kind in enumerate(kinds):
            columns = slice(i * width, (i + 1) * width)
            g, of = grad[:, columns], out[:, columns]
            if kind in EXTREMA:
                best, ties = extrema[:2] if kind == "max" else extrema[2:]
                shares = g / (ties + (of == 0))
                to_shift.addcmul_(shares, ties)
                args = graph.args(True, width * x.element_size())
                to_x = _sum(to_x, run(_ops.spmm_where.default, *args.transposed, None, x, shares, best, None))
            elif kind in ("mean", "sum"):
                g = g * degree if kind == "sum" else g
                to_shift += g
                to_mean = _sum(to_mean, g)
            else:
                g = g * 2 if kind == "var" else (g / of).masked_fill_((of > 0).logical_not_(), 0.0)
                to_variance = _sum(to_variance, g)
        if to_variance is not None:
            to_mean = -mean * to_variance if to_mean is None else torch.addcmul(to_mean, mean, to_variance, value=-1)
            to_x = _sum(to_x, passes.transposed(graph, to_variance, None, "mean").mul_(x))
        if to_mean is not None:
            to_x = _sum(to_x, passes.transposed(graph, to_mean, None, "mean"))
        return to_x, to_shift.mul_(degree.clamp(max=1)), None, None, None


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def composed(graph: Graph, x: Tensor, shift: Tensor, kinds: tuple[str, ...], place: str) -> Tensor:
    """As :func:`reduce_shifted`, by operations that can be differentiated once more."""
    degree = degrees(graph, x.dtype)
    some = degree.clamp(max=1)

    def mean_of(t: Tensor) -> Tensor:
        return execute.aggregate(graph, t, None, "mean", place=place)

    def made(kind: str) -> Tensor:
        if kind in EXTREMA:
            best = execute.aggregate(graph, x, None, kind, place=place) + shift * some
            with torch.no_grad():
                ties = _extremum(graph, x, kind, True, place)[1]
                share = ties / (ties + (best == 0)).to(x.dtype)
            return best.detach() + share * (best - best.detach())
        mean = mean_of(x)
        if kind in ("mean", "sum"):
            return (mean + shift * some) * (degree if kind == "sum" else 1)
        variance = mean_of(x * x) - mean * mean
        return variance if kind == "var" else deviation(variance)

    return torch.cat(list(map(made, kinds)), 1)


if _native.cpu.loaded:
    _apply = apply_of(_Shifted)
