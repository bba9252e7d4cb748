"""Sums and means of messages that are one or two activations of what the ends of an edge, and the edge, give; no message exists.
Framework-free, on unchecked operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.dispatch.calls import count
from gnnfast.graph import Graph, ids
from gnnfast.guards import is_batched
from gnnfast.types import ACTIVATIONS, Matrix

if _native.cpu.loaded:
    from gnnfast.ops.edge_gate import PARTS, WEIGHT, composed, has_features, is_of_sources, role
    from gnnfast.ops.multi_reduce import differentiable
    from gnnfast.ops.spmm import apply_of, over_degree, run

_ops = torch.ops.gnnfast


class Factor(NamedTuple):
    """``act(scale[dst] * src[src] + shift[dst] + edge + attr @ matrix)`` of each edge, without what is ``None``: ``src [num_src,
    F]``, ``scale`` and ``shift [num_dst, F]``, ``edge [E, F]`` and ``attr [E, D]`` in the user's edge order, the latter without a
    gradient, ``matrix [D, F]``, and a name of :data:`gnnfast.types.ACTIVATIONS`."""

    src: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    edge: Tensor | None = None
    attr: Tensor | None = None
    matrix: Tensor | None = None
    act: str = "identity"


MOST_FACTORS = 2
MOST_DEPTH = 32  # D up to which multiplying in each walk takes less time than writing and reading products


def takes(x: Tensor) -> bool:
    """Whether there are kernels for rows like these."""
    return x.dtype in (torch.float32, torch.float64)


def gate(graph: Graph, factors: tuple[Factor, ...], weight: Tensor | None, reduce: str, place: str) -> Tensor:
    """The sum or mean over the in-edges of each node of the product of one or two ``factors`` and, if given, a ``weight [E]`` in
    the user's edge order: ``[num_dst, F]``, 0 where there are no edges. Differentiable any number of times."""
    parts, roles, acts = operands(factors, weight)
    width = parts[0].shape[1]
    lanes = width if weight is not None else _lanes(graph, factors, width)
    if lanes != width:
        pad = torch.nn.functional.pad
        parts = [pad(t, (0, lanes - width)) if has_features(of) else t for t, of in zip(parts, roles)]
    parts = [t.contiguous() for t in parts]
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in parts)
    args = adjacency(graph, parts, reduce, needs_grad, place)
    out: Tensor = (_gate if needs_grad else gated)(args, roles, acts, reduce == "mean", *parts)
    return out if lanes == width else out[:, :width].contiguous()


def _lanes(graph: Graph, factors: tuple[Factor, ...], width: int) -> int:
    """How wide rows are made: on a CPU each vector of a row walks over its edges, so narrow rows are padded to one, unless those
    of edges would be, too. (The gradient of a weight would be a sum over what is padded.)"""
    if graph.is_cuda or any(factor.edge is not None for factor in factors):
        return width
    return next((lanes for lanes in (4, 8, 16) if 1 < width <= lanes), width)


def operands(factors: tuple[Factor, ...], weight: Tensor | None) -> tuple[list[Tensor], list[int], list[int]]:
    """What kernels take, and their roles; and the activations."""
    factors = tuple(map(_multiplied, factors))
    given = {role(k, part): t for k, f in enumerate(factors) for part in PARTS if (t := getattr(f, part)) is not None}
    if weight is not None:
        given[WEIGHT] = weight.view(-1, 1)
    roles = sorted(given, key=lambda of: has_features(of), reverse=True)  # the first of them says how many
    return [given[of] for of in roles], roles, [ACTIVATIONS[f.act] for f in factors]


def adjacency(graph: Graph, parts: list[Tensor], reduce: str, train: bool, place: str) -> Matrix:
    """The graph as kernels take it; the call is counted."""
    if graph.is_cuda:
        ids.check()
    count(graph, place, f"gates, {reduce}", "over CSR, no message exists", parts[0].nbytes)
    return graph.args(train, parts[0].shape[1] * parts[0].element_size())


def _multiplied(factor: Factor) -> Factor:
    """With the product made on a GPU, where kernels make none."""
    if factor.attr is None or factor.matrix is None or not factor.attr.is_cuda:
        return factor
    product = factor.attr @ factor.matrix
    return factor._replace(edge=product if factor.edge is None else factor.edge + product, attr=None, matrix=None)


def gated(args: Matrix, roles: list[int], acts: list[int], mean: bool, *parts: Tensor) -> Tensor:
    return run(_ops.edge_gate.default, *args, list(parts), roles, acts, mean)  # type: ignore[no-any-return]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, args: Matrix, roles: list[int], acts: list[int], mean: bool, *parts: Tensor) -> Tensor:
        ctx.graph, ctx.how = args, (roles, acts, mean)
        ctx.save_for_backward(*parts)
        with torch.no_grad():
            return gated(args, roles, acts, mean, *parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        parts, needed, graph = ctx.saved_tensors, ctx.needs_input_grad[4:], ctx.graph
        if torch.is_grad_enabled() or is_batched(grad):
            with torch.enable_grad():
                found = differentiable(lambda *parts: composed(graph, parts, *ctx.how), parts, needed, grad)
        else:
            roles, acts, mean = ctx.how
            found = gradients(graph, parts, roles, acts, mean, grad, needed)
        return None, None, None, None, *found


def gradients(
    graph: Matrix, parts: Sequence[Tensor], roles: list[int], acts: list[int], mean: bool, grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Those of the parts that need one."""
    grad = (over_degree(graph.rowptr, grad) if mean else grad).contiguous()
    by_role: dict[int, Tensor] = {}
    for transposed in (False, True):
        needs = [of for of, is_needed in zip(roles, needed) if is_needed and is_of_sources(of) == transposed]
        if needs:
            way = graph.transposed if transposed else graph
            found = run(_ops.edge_gate_backward.default, *way, list(parts), roles, acts, grad, needs, transposed)
            by_role.update(zip(needs, found))
    return [*map(by_role.get, roles)]


if _native.cpu.loaded:
    _gate = apply_of(_Gate)
