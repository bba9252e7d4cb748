"""Sums of neighbours' rows, or of messages that exist, weighted for each feature by the softmax of the same rows. Framework-free,
on unchecked operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.dispatch import edges
from gnnfast.dispatch.calls import count
from gnnfast.graph import Graph, ids
from gnnfast.graph.formats import BY_DST

if _native.cpu.loaded:
    from gnnfast.ops.bias import column_sums
    from gnnfast.ops.multi_reduce import differentiable
    from gnnfast.ops.softmax_reduce import SOFTMAX_REDUCE, composed
    from gnnfast.ops.spmm import apply_of, call, run

_ops = torch.ops.gnnfast


class Temperature(NamedTuple):
    """What rows are multiplied by before the softmax: ``scale``, or ``t [F]``, of the dtype of the rows."""

    scale: float = 1.0
    t: Tensor | None = None


def reduce_rows(graph: Graph, x: Tensor, temperature: Temperature, place: str) -> Tensor:
    """The softmax-weighted sum of ``x [num_src, F]``, float32 or float64, over the in-edges of each node: ``[num_dst, F]``, 0 where
    there are none. Differentiable any number of times."""
    needs_grad = _needs_grad(x, temperature)
    args = graph.args(needs_grad, x.shape[1] * x.element_size())
    if graph.is_cuda:
        ids.check()
    count(graph, place, "softmax aggregation", "over CSR, each neighbour is read once", x.nbytes)
    return call(SOFTMAX_REDUCE, needs_grad, args, x, temperature.t, temperature.scale, needs_grad)  # type: ignore[no-any-return]


def reduce_messages(messages: Tensor, temperature: Temperature, ends: edges.Ends) -> Tensor:
    """The same of ``messages [E, F]``."""
    if _needs_grad(messages, temperature):
        return _of_messages(messages, temperature.t, temperature.scale, ends, ends.ids[BY_DST])  # type: ignore[no-any-return]
    return _reduced(messages, temperature.t, temperature.scale, ends, False)[0]  # type: ignore[no-any-return]


def _needs_grad(x: Tensor, temperature: Temperature) -> bool:
    t = temperature.t
    return torch.is_grad_enabled() and (x.requires_grad or (t is not None and t.requires_grad))


def _reduced(messages: Tensor, t: Tensor | None, scale: float, ends: edges.Ends, train: bool) -> Any:
    args = ends.incidence(BY_DST, messages.shape[1] * messages.element_size())
    return run(_ops.softmax_reduce.default, *args, messages, t, scale, train)


class _OfMessages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Tensor, t: Tensor | None, scale: float, ends: edges.Ends, dst: Tensor) -> Tensor:
        out, most, total = _reduced(messages, t, scale, ends, True)
        ctx.scale = scale
        ctx.save_for_backward(messages, t, dst, out, most, total)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        messages, t, dst, out, most, total = ctx.saved_tensors
        needs, scale = ctx.needs_input_grad[:2], ctx.scale
        if torch.is_grad_enabled():
            again = differentiable(lambda m, t: composed(m, dst.long(), grad.shape[0], t, scale), (messages, t), needs, grad)
            return *again, None, None, None
        to_x, to_t = run(_ops.softmax_reduce_edges.default, dst, messages, t, scale, most, grad / total, out, needs[1])
        return to_x if needs[0] else None, column_sums(to_t) if needs[1] else None, None, None, None


if _native.cpu.loaded:
    _of_messages = apply_of(_OfMessages)
