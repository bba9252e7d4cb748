"""Several reductions at once: of ``x[src] + shift[dst]``, where only those of ``x`` run over edges, as the shift is the same for
all edges of a node, and of messages that exist. Framework-free, on unchecked operands."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.dispatch import edges
from gnnfast.dispatch.calls import count
from gnnfast.graph import Graph, ids
from gnnfast.graph.formats import BY_DST
from gnnfast.types import KINDS

if _native.cpu.loaded:
    from gnnfast.ops.convert import derived
    from gnnfast.ops.multi_reduce import MULTI_REDUCE, deviation, differentiable
    from gnnfast.ops.spmm import apply_of, call, run

_ops = torch.ops.gnnfast


def takes(x: Tensor) -> bool:
    """Whether there are kernels for rows like these."""
    return x.dim() == 2 and x.dtype in (torch.float32, torch.float64)


def reduce_shifted(graph: Graph, x: Tensor, shift: Tensor | None, kinds: tuple[str, ...], place: str) -> Tensor:
    """The reductions ``kinds``, of :data:`gnnfast.types.KINDS`, side by side: ``x [num_src, F]``, float32 or float64, ``shift
    [num_dst, F]`` of the same dtype or ``None``; returns ``[num_dst, len(kinds) F]``, 0 where a node has no in-edges. Variances are
    means of squares minus squares of means, roots of those up to ``LEAST`` are 0. Of several edges that attain an extremum each
    gets an even share of the gradient, and where it is 0 so does the 0 that ``torch.scatter_reduce`` starts from. Differentiable
    any number of times."""
    needs_grad = _needs_grad(x, shift)
    args = graph.args(needs_grad, x.shape[1] * x.element_size())
    if graph.is_cuda:
        ids.check()
    count(graph, place, "several reductions", "over CSR, each neighbour is read once", x.nbytes)
    return call(MULTI_REDUCE, needs_grad, args, x, shift, [KINDS[kind] for kind in kinds], needs_grad)  # type: ignore[no-any-return]


def _needs_grad(x: Tensor, shift: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (shift is not None and shift.requires_grad))


def reduce_messages(messages: Tensor, shift: Tensor | None, ends: edges.Ends, kinds: tuple[str, ...]) -> Tensor:
    """The same of ``messages [E, F]`` plus ``shift [num_dst, F]``."""
    if _needs_grad(messages, shift):
        return _of_messages(messages, shift, ends, kinds, ends.ids[BY_DST])  # type: ignore[no-any-return]
    return _reduced(messages, shift, ends, kinds, False)[0]


def _reduced(messages: Tensor, shift: Tensor | None, ends: edges.Ends, kinds: tuple[str, ...], train: bool) -> Any:
    args = ends.incidence(BY_DST, messages.shape[1] * messages.element_size())
    return run(_ops.multi_reduce.default, *args, messages, shift, [KINDS[kind] for kind in kinds], train)


class _OfMessages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Tensor, shift: Tensor | None, ends: edges.Ends, kinds: tuple[str, ...], dst: Tensor) -> Tensor:
        out, *kept = _reduced(messages, shift, ends, kinds, True)
        ctx.ends, ctx.kinds = ends, kinds
        ctx.save_for_backward(messages, shift, dst, out, *kept)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        messages, shift, dst, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            given = (messages, shift), ctx.needs_input_grad[:2], grad
            return *differentiable(lambda m, s: _composed(m, s, ctx.ends, ctx.kinds), *given), None, None, None
        numbers, rowptr = [KINDS[kind] for kind in ctx.kinds], ctx.ends.towards(BY_DST).csr.rowptr
        shares, to_shift = run(_ops.multi_reduce_shares.default, rowptr, grad, *kept, numbers, ctx.needs_input_grad[1])
        to_messages = run(_ops.multi_reduce_edges.default, dst, messages, shares, numbers)
        return to_messages, to_shift if ctx.needs_input_grad[1] else None, None, None, None


def _composed(messages: Tensor, shift: Tensor | None, ends: edges.Ends, kinds: tuple[str, ...]) -> Tensor:
    """The same, by operations that can be differentiated once more."""
    messages = messages if shift is None else messages + edges.gather(shift, ends, BY_DST)

    def made(kind: str) -> Tensor:
        if kind not in ("var", "std"):
            return edges.reduce(messages, ends, kind)
        mean = edges.reduce(messages, ends, "mean")
        variance = edges.reduce(messages * messages, ends, "mean") - mean * mean
        return variance if kind == "var" else deviation(variance)

    return torch.cat(list(map(made, kinds)), 1)


def degrees(graph: Graph, dtype: torch.dtype) -> Tensor:
    """The number of in-edges of each node, ``[num_dst, 1]``."""
    rowptr = graph.csr.rowptr
    return _derived(rowptr, ("degree", dtype), lambda: rowptr.diff().to(dtype).unsqueeze(1))


def log_degrees(graph: Graph, dtype: torch.dtype, least: int = 0) -> Tensor:
    """The logarithm of one more than that, or than ``least``."""
    of_nodes = degrees(graph, dtype)
    return _derived(
        graph.csr.rowptr, ("log degree", dtype, least), lambda: ((of_nodes.clamp(min=least) if least else of_nodes) + 1).log_()
    )


def _derived(rowptr: Tensor, what: Hashable, make: Callable[[], Tensor]) -> Tensor:
    kept = derived(rowptr, what, make)
    return make() if kept is None else kept


if _native.cpu.loaded:
    _of_messages = apply_of(_OfMessages)
