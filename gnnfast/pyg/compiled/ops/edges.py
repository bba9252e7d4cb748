"""Sums of what is made of the features at both ends of an edge and of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.dispatch import gates, passes
from gnnfast.ops.edge_relu import kept_unit
from gnnfast.pyg.compiled.ops.define import Edges, define, differentiate, differentiate_once, empty, must_train

# ---- relu(x_j + edge) --------------------------------------------------------------------------------------------------------
# edge_index_relu(x [N, F], w [E, F], train, edges) -> the sums of the ReLU of x[src] + w [M, F], and what the backward pass wants
# edge_index_relu_backward(grad [M, F], kept, to_w, edges) -> the gradients of x and of w, the latter empty if not asked for


def _relu(x: Tensor, w: Tensor, train: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    return passes.edge_relu(edges.graph, x, w, train, edges.place)


def _relu_fake(x: Tensor, w: Tensor, train: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    kept = empty(x, w.shape[0] if train else 0, x.shape[1] // kept_unit(x), dtype=torch.uint8)
    return empty(x, Edges(*rest).num_dst, x.shape[1]), kept


RELU = define("edge_index_relu", "Tensor x, Tensor w, bool train", "(Tensor, Tensor)", _relu, _relu_fake)


def _relu_backward(grad: Tensor, kept: Tensor, to_w: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    return passes.edge_relu_gradients(Edges(*rest).graph, kept, grad, to_w)


def _relu_backward_fake(grad: Tensor, kept: Tensor, to_w: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty(grad, Edges(*rest).num_src, grad.shape[1]), empty(grad, kept.shape[0] if to_w else 0, grad.shape[1])


RELU_BACKWARD = define(
    "edge_index_relu_backward", "Tensor grad, Tensor kept, bool to_w", "(Tensor, Tensor)", _relu_backward, _relu_backward_fake
)


def _relu_keep(ctx: Any, output: Any, *inputs: Any) -> Any:
    ctx.mark_non_differentiable(output[1])
    return output[1], inputs[3]


def _relu_gradient(ctx: Any, kept: Tensor, edge_index: Tensor, grad: Tensor, _: Any) -> tuple[Any, ...]:
    must_train(ctx.rest[2], RELU)
    needs = ctx.needs[:2]
    found = RELU_BACKWARD(grad, kept, needs[1], edge_index, *ctx.rest[-5:])
    return tuple(t if need else None for t, need in zip(found, needs))


differentiate(RELU, _relu_keep, _relu_gradient)
differentiate_once(RELU_BACKWARD)


# ---- gates -------------------------------------------------------------------------------------------------------------------
# edge_index_gate(parts, roles, acts, mean, train, edges) -> [M, F]: as :mod:`gnnfast.ops.edge_gate`
# edge_index_gate_backward(grad, parts, roles, acts, mean, needs, edges) -> the gradients of the parts that need one


def _gate(parts: list[Tensor], roles: list[int], acts: list[int], mean: bool, train: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    parts = [t.contiguous() for t in parts]
    args = gates.adjacency(edges.graph, parts, "mean" if mean else "sum", train, edges.place)
    return gates.gated(args, roles, acts, mean, *parts)


def _gate_fake(parts: list[Tensor], roles: list[int], acts: list[int], mean: bool, train: bool, *rest: Any) -> Tensor:
    return empty(parts[0], Edges(*rest).num_dst, parts[0].shape[1])


GATE = define("edge_index_gate", "Tensor[] parts, int[] roles, int[] acts, bool mean, bool train", "Tensor", _gate, _gate_fake)


def _gate_backward(
    grad: Tensor, parts: list[Tensor], roles: list[int], acts: list[int], mean: bool, needs: list[bool], *rest: Any
) -> list[Tensor]:
    parts = [t.contiguous() for t in parts]
    args = Edges(*rest).graph.args(True, parts[0].shape[1] * parts[0].element_size())
    return [t for t in gates.gradients(args, parts, roles, acts, mean, grad, needs) if t is not None]


def _gate_backward_fake(grad: Tensor, parts: list[Tensor], *rest: Any) -> list[Tensor]:
    return [empty(t, *t.shape) for t, need in zip(parts, rest[3]) if need]


GATE_BACKWARD = define(
    "edge_index_gate_backward",
    "Tensor grad, Tensor[] parts, int[] roles, int[] acts, bool mean, bool[] needs",
    "Tensor[]",
    _gate_backward,
    _gate_backward_fake,
)


def _gate_keep(ctx: Any, _: Any, parts: list[Tensor], *rest: Any) -> Any:
    return *parts, rest[4]


def _gate_gradient(ctx: Any, *kept: Any) -> tuple[Any, ...]:
    *parts, edge_index, grad = kept
    roles, acts, mean = ctx.rest[1:4]
    needs = [*ctx.needs[0]]
    found = iter(GATE_BACKWARD(grad, parts, roles, acts, mean, needs, edge_index, *ctx.rest[-5:]))
    return ([next(found) if need else None for need in needs],)


differentiate(GATE, _gate_keep, _gate_gradient)
differentiate_once(GATE_BACKWARD)
