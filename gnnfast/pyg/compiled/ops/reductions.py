"""Maxima and minima, several reductions at once, and sums weighted by a softmax of the features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnfast.cache import note_variable
from gnnfast.dispatch import passes
from gnnfast.ops.multi_reduce import sizes as reduce_sizes
from gnnfast.pyg.compiled.ops.define import Edges, define, differentiate, differentiate_once, empty, must_train

# ---- maximum and minimum -----------------------------------------------------------------------------------------------------
# edge_index_extremum(x [N, F], weight, minimum, train, edges) -> [M, F], aux int32 [M, F], empty without train
# edge_index_extremum_backward(grad, x, weight, out, aux, minimum, to_x, to_weight, edges) -> both gradients, empty if not asked for


def _extremum(x: Tensor, weight: Any, minimum: bool, train: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    weight = None if weight is None else weight.contiguous()
    if weight is not None:
        note_variable(weight)
    return passes.extremum(edges.graph, x, weight, "min" if minimum else "max", train, edges.place)


def _extremum_fake(x: Tensor, weight: Any, minimum: bool, train: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = rest[2]
    return empty(x, rows, x.shape[1]), empty(x, rows if train else 0, x.shape[1], dtype=torch.int32)


EXTREMUM = define(
    "edge_index_extremum", "Tensor x, Tensor? weight, bool minimum, bool train", "(Tensor, Tensor)", _extremum, _extremum_fake
)


def _extremum_backward(
    grad: Tensor, x: Tensor, weight: Any, out: Tensor, aux: Tensor, minimum: bool, to_x: bool, to_weight: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    weight = None if weight is None else weight.contiguous()
    of_weight, of_x = passes.extremum_gradients(edges.graph, x, weight, out, aux, grad, minimum, to_weight, to_x)
    return empty(x, 0) if of_x is None else of_x, empty(x, 0) if of_weight is None else of_weight


def _extremum_backward_fake(
    grad: Tensor, x: Tensor, weight: Any, out: Tensor, aux: Tensor, minimum: bool, to_x: bool, to_weight: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    return empty(x, *(x.shape if to_x else (0,))), empty(x, *(weight.shape if to_weight else (0,)))


EXTREMUM_BACKWARD = define(
    "edge_index_extremum_backward",
    "Tensor grad, Tensor x, Tensor? weight, Tensor out, Tensor aux, bool minimum, bool to_x, bool to_weight",
    "(Tensor, Tensor)",
    _extremum_backward,
    _extremum_backward_fake,
)


def _extremum_keep(ctx: Any, output: Any, x: Tensor, weight: Any, minimum: bool, train: bool, *rest: Any) -> Any:
    ctx.mark_non_differentiable(output[1])
    return x, weight, *output, rest[0]


def _extremum_gradient(
    ctx: Any, x: Tensor, weight: Any, out: Tensor, aux: Tensor, edge_index: Tensor, grad: Tensor, _: Any
) -> tuple[Any, ...]:
    minimum, train = ctx.rest[2:4]
    must_train(train, EXTREMUM)
    needs = ctx.needs[:2]
    found = EXTREMUM_BACKWARD(grad, x, weight, out, aux, minimum, *needs, edge_index, *ctx.rest[-5:])
    return tuple(t if need else None for t, need in zip(found, needs))


differentiate(EXTREMUM, _extremum_keep, _extremum_gradient)
differentiate_once(EXTREMUM_BACKWARD)


# ---- several reductions ------------------------------------------------------------------------------------------------------
# edge_index_reductions(x [N, F], shift [M, F] | None, kinds, train, edges) -> [M, K F], and what the backward pass wants
# edge_index_reductions_backward(grad, x, shift, out, kept, ties, kinds, to_x, to_shift, edges) -> both gradients, empty if not
#     asked for


def _reductions(x: Tensor, shift: Any, kinds: list[int], train: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    edges = Edges(*rest)
    return passes.reductions(edges.graph, x, shift, kinds, train, edges.place)


def _reductions_fake(x: Tensor, shift: Any, kinds: list[int], train: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, width, (kept, ties, _) = Edges(*rest).num_dst, x.shape[1], reduce_sizes(kinds)
    saved = rows if train else 0
    return (
        empty(x, rows, len(kinds) * width),
        empty(x, saved, kept * width),
        empty(x, saved, ties * width, dtype=torch.int32),
    )


REDUCTIONS = define(
    "edge_index_reductions",
    "Tensor x, Tensor? shift, int[] kinds, bool train",
    "(Tensor, Tensor, Tensor)",
    _reductions,
    _reductions_fake,
)


def _several_backward(gradients: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The backward pass of this op and of the next, whose operands are alike."""

    def run(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        *kept, which, to_x, to_other = given[:8]
        found = gradients(Edges(*given[8:]).graph, grad, tuple(kept), which, (to_x, to_other))
        return tuple(empty(grad, 0) if t is None else t for t in found)  # type: ignore[return-value]

    return run


def _several_backward_fake(grad: Tensor, x: Tensor, other: Any, *given: Any) -> tuple[Tensor, Tensor]:
    to_x, to_other = given[4:6]
    return empty(x, *(x.shape if to_x else (0,))), empty(x, *(other.shape if to_other else (0,)))


REDUCTIONS_BACKWARD = define(
    "edge_index_reductions_backward",
    "Tensor grad, Tensor x, Tensor? shift, Tensor out, Tensor kept, Tensor ties, int[] kinds, bool to_x, bool to_shift",
    "(Tensor, Tensor)",
    _several_backward(passes.reductions_gradients),
    _several_backward_fake,
)


# edge_index_softened(x [N, F], t [F] | None, scale, train, edges) -> the sums weighted by the softmax of t x, or of scale x [M, F],
#     and what the backward pass wants
# edge_index_softened_backward(grad, x, t, out, most, total, scale, to_x, to_t, edges) -> both gradients, empty if not asked for


def _softened(x: Tensor, t: Any, scale: float, train: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    edges = Edges(*rest)
    return passes.softened(edges.graph, x, t, scale, train, edges.place)


def _softened_fake(x: Tensor, t: Any, scale: float, train: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = Edges(*rest).num_dst, x.shape[1]
    return empty(x, rows, width), *(empty(x, rows if train else 0, width) for _ in range(2))  # type: ignore[return-value]


SOFTENED = define(
    "edge_index_softened",
    "Tensor x, Tensor? t, float scale, bool train",
    "(Tensor, Tensor, Tensor)",
    _softened,
    _softened_fake,
)


SOFTENED_BACKWARD = define(
    "edge_index_softened_backward",
    "Tensor grad, Tensor x, Tensor? t, Tensor out, Tensor most, Tensor total, float scale, bool to_x, bool to_t",
    "(Tensor, Tensor)",
    _several_backward(passes.softened_gradients),
    _several_backward_fake,
)


def _several_keep(ctx: Any, output: Any, x: Tensor, other: Any, *inputs: Any) -> Any:
    ctx.mark_non_differentiable(*output[1:])
    return x, other, *output, inputs[2]


def _several_gradient(op: Any, backward: Any) -> Callable[..., tuple[Any, ...]]:
    def gradient(ctx: Any, *kept: Any) -> tuple[Any, ...]:
        *rows, edge_index, grad, _, _ = kept
        which, train = ctx.rest[2:4]
        must_train(train, op)
        needs = ctx.needs[:2]
        found = backward(grad, *rows, which, *needs, edge_index, *ctx.rest[-5:])
        return tuple(t if need else None for t, need in zip(found, needs))

    return gradient


for _forward, _backward in ((REDUCTIONS, REDUCTIONS_BACKWARD), (SOFTENED, SOFTENED_BACKWARD)):
    differentiate(_forward, _several_keep, _several_gradient(_forward, _backward))
    differentiate_once(_backward)
