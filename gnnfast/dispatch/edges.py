"""Between nodes and edges, where messages exist: rows of nodes at the ends of edges; sums, means and extrema of rows of edges at
nodes. The gradient of a gather is a sum, that of a sum a gather, so both are differentiable any number of times. A sum is SpMM with
the incidence matrix, whose column of a slot is the edge itself: each row of messages is read once, and nothing is scattered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native, guards
from gnnfast.graph import Graph
from gnnfast.graph.formats import BY_DST
from gnnfast.types import EXTREMA, FEATURE_DTYPES, Matrix

if _native.cpu.loaded:
    from gnnfast.ops.convert import empty
    from gnnfast.ops.spmm import SPMM, SPMM_MAX, apply_of, below_autograd, call, over_degree


class Ends:
    """The two ends of edges: ``ids [E]`` of their nodes by side (``BY_DST`` and ``BY_SRC`` of :mod:`gnnfast.graph.formats`), as the
    framework has them. ``graph`` is that of the edges, found when it is first asked for."""

    def __init__(self, dst: Tensor, src: Tensor, graph: Callable[[], Graph]) -> None:
        self.ids = dst, src
        self._graph = graph

    def are_destinations(self, index: Any) -> bool:
        """Whether ids are the destinations of the edges."""
        ids = self.ids[BY_DST]
        if guards.operand("index", index) or index.shape != ids.shape:
            return False
        return index.data_ptr() == ids.data_ptr() and index.is_contiguous()

    def towards(self, side: int) -> Graph:
        """The graph with edges that end at the nodes of a side."""
        return self._graph() if side == BY_DST else self._graph().reverse()

    def incidence(self, side: int, row_bytes: int) -> Matrix:
        """The matrix ``[nodes, E]`` of the edges at each node of a side."""
        args = self.towards(side).args(False, row_bytes)
        edges = args.perm
        if edges is None:
            edges = torch.arange(args.num_slots, dtype=torch.int32, device=args.col.device)
        return args._replace(col=edges, perm=None)


def gather(x: Tensor, ends: Ends, side: int) -> Tensor:
    """``x [nodes, ...]`` at one end of each edge: ``[E, ...]``."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _gather(x, ends, side, ends.ids[side])  # type: ignore[no-any-return]
    return _gathered(x, ends.ids[side])


def _gathered(x: Tensor, ids: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or type(x) is not Tensor or guards.is_batched(x):
        return x.index_select(0, ids)
    if not x.dim() or x.layout is not torch.strided:
        return x.index_select(0, ids)
    if x.is_cuda:
        if x.dtype not in FEATURE_DTYPES or _native.missing("cuda"):
            return x.index_select(0, ids)
        with below_autograd():
            return shaped(torch.ops.gnnfast.gather_ends.default(ids, _rows(x)[0]), x.shape[1:])
    x = x.contiguous()  # rows that are one, as in the gradient of a sum, take torch several times as long
    if x.dim() != 2:
        return x.index_select(0, ids)
    with below_autograd():
        return torch.index_select(x, 0, ids, out=empty(x, ids.numel(), x.shape[1]))


def combines(*rows: Tensor) -> bool:
    """Whether there is a kernel for :func:`combine` of rows of nodes."""
    dtypes = FEATURE_DTYPES if rows[0].is_cuda else (torch.float32, torch.float64)
    return all(x.dtype is rows[0].dtype and x.dtype in dtypes for x in rows)


def combine(lhs: Tensor, rhs: Tensor, ends: Ends, side: int, how: str) -> Tensor:
    """``lhs [nodes, F]`` at the end of each edge on a side, plus, minus (``how`` is ``"add"`` or ``"sub"``) or times (``"mul"``)
    ``rhs [nodes, F]`` of its dtype at its other end: ``[E, F]``. Nothing else of that size is made."""
    if torch.is_grad_enabled() and (lhs.requires_grad or rhs.requires_grad):
        return _combine(lhs, rhs, ends, side, how)  # type: ignore[no-any-return]
    return _combined(lhs, rhs, ends, side, how)


def _combined(lhs: Tensor, rhs: Tensor, ends: Ends, side: int, how: str) -> Tensor:
    op = ("add", "sub", "mul").index(how)
    with below_autograd():
        return torch.ops.gnnfast.combine_ends.default(ends.ids[side], ends.ids[1 - side], lhs, rhs, op)  # type: ignore[no-any-return]


def reduce(messages: Tensor, ends: Ends, how: str, side: int = BY_DST) -> Tensor:
    """The sum, mean, max or min of ``messages [E, ...]`` at each node: ``[nodes, ...]``; 0 where there are none. Of several edges
    that attain an extremum each gets an even share of the gradient, and so does the 0 that ``torch.scatter_reduce`` starts from."""
    extremum, option = how in EXTREMA, how in ("mean", "min")
    if torch.is_grad_enabled() and messages.requires_grad:
        return (_extremum if extremum else _sum)(messages, ends, side, option, ends.ids[side])  # type: ignore[no-any-return]
    return (_best if extremum else _added)(messages, ends, side, option)


def _rows(messages: Tensor) -> tuple[Tensor, int]:
    """As ``[E, F]``, and the bytes of a row."""
    width = messages.shape[1:].numel()
    return messages.reshape(messages.shape[0], width), width * messages.element_size()


def _added(messages: Tensor, ends: Ends, side: int, mean: bool) -> Tensor:
    rows, row_bytes = _rows(messages)
    return shaped(call(SPMM, False, ends.incidence(side, row_bytes), None, None, rows, mean, None), messages.shape[1:])


def _best(messages: Tensor, ends: Ends, side: int, minimum: bool) -> Tensor:
    rows, row_bytes = _rows(messages)
    return shaped(call(SPMM_MAX, False, ends.incidence(side, row_bytes), None, rows, minimum, 0, 0.0), messages.shape[1:])


def shaped(out: Tensor, row: Sequence[int]) -> Tensor:
    """``[nodes, F]`` with rows of another shape. Autograd must see no view, into which users could not write."""
    if len(row) == 1:
        return out
    return torch.ops.aten._unsafe_view.default(out, [out.shape[0], *row])  # type: ignore[no-any-return]


# Ids are saved although ``ends`` holds them: autograd then says so if somebody has written into them since.
class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Ends, side: int, ids: Tensor) -> Tensor:
        ctx.ends, ctx.side = ends, side
        ctx.save_for_backward(ids)
        return _gathered(x, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        return _sum(grad, ctx.ends, ctx.side, False, ids), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lhs: Tensor, rhs: Tensor, ends: Ends, side: int, how: str) -> Tensor:
        ctx.ends, ctx.side, ctx.how = ends, side, how
        ctx.save_for_backward(*ends.ids, *((lhs, rhs) if how == "mul" else ()))
        return _combined(lhs, rhs, ends, side, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kept, ends, sides = ctx.saved_tensors, ctx.ends, (ctx.side, 1 - ctx.side)
        found: list[Tensor | None] = [None, None]
        for nth, side in enumerate(sides):
            if not ctx.needs_input_grad[nth]:
                continue
            if ctx.how == "mul":
                args = ends.towards(side).args(torch.is_grad_enabled(), grad.shape[1] * grad.element_size())
                found[nth] = call(SPMM, torch.is_grad_enabled(), args, grad.contiguous(), None, kept[3 - nth], False, None)
            else:
                summed = _sum(grad, ends, side, False, kept[side])
                found[nth] = -summed if nth and ctx.how == "sub" else summed
        return *found, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Tensor, ends: Ends, side: int, mean: bool, ids: Tensor) -> Tensor:
        ctx.ends, ctx.side, ctx.mean = ends, side, mean
        ctx.save_for_backward(ids)
        return _added(messages, ends, side, mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        if ctx.mean:
            grad = over_degree(ctx.ends.towards(ctx.side).csr.rowptr, _rows(grad)[0]).view_as(grad)
        return _gather(grad, ctx.ends, ctx.side, ids), None, None, None, None


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Tensor, ends: Ends, side: int, minimum: bool, ids: Tensor) -> Tensor:
        out = _best(messages, ends, side, minimum)
        ctx.ends, ctx.side = ends, side
        ctx.save_for_backward(messages, out, ids)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        messages, out, ids = ctx.saved_tensors
        with torch.no_grad():
            attains = (messages == _gathered(out, ids)).to(messages.dtype)
            shares = _added(attains, ctx.ends, ctx.side, False) + (out == 0)
        return attains * _gather(grad / shares, ctx.ends, ctx.side, ids), None, None, None, None


if _native.cpu.loaded:
    _gather, _combine, _sum, _extremum = map(apply_of, (_Gather, _Combine, _Sum, _Extremum))
