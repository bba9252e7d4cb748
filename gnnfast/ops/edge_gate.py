"""Sums of products of activations over edges. Contract and citations: ``plugin_src/edge_gate/edge_gate_args.h``.

``edge_gate(graph, parts, roles, acts, mean) -> out [M, F]``: ``acts`` are the activations of one or two factors, numbers of
:data:`gnnfast.types.ACTIVATIONS`; ``roles[n]``, made by :func:`role`, says what of which factor ``parts[n]`` is, or that it is
the :data:`WEIGHT`; the first of them has F features. ``edge_gate_backward(graph, parts, roles, acts, grad [M, F], needs,
transposed)`` gives the gradients of the parts with the roles ``needs``, those of sources over the graph of A^T (``transposed``),
the others over that of A. float32 and float64; ``attr`` and ``matrix`` on a CPU only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast.ops.spmm import edges
from gnnfast.types import ACTIVATIONS, Matrix, split

PARTS = ("src", "scale", "shift", "edge", "attr", "matrix")  # [N, F], [M, F], [M, F], [E, F], [E, D] and [D, F]
WEIGHT = 2 * len(PARTS)  # the role of a weight [E, 1]
_FUNCTIONS: dict[str, Any] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "silu": functional.silu,
    "abs": torch.abs,
}
FUNCTIONS = {number: _FUNCTIONS[name] for name, number in ACTIVATIONS.items()}


def role(factor: int, part: str) -> int:
    return len(PARTS) * factor + PARTS.index(part)


def is_of_sources(of: int) -> bool:
    """Whether a role is that of rows of sources, whose gradients are made over the transpose."""
    return of != WEIGHT and of % len(PARTS) == 0


def has_features(of: int) -> bool:
    """Whether a role is that of an array ``[.., F]``."""
    return of != WEIGHT and of % len(PARTS) != PARTS.index("attr")


@torch.library.register_fake("gnnfast::edge_gate")
def _(*args: Any) -> Tensor:
    graph, (parts, *_) = split(args)
    return parts[0].new_empty(graph.num_rows, parts[0].shape[1])  # type: ignore[no-any-return]


@torch.library.register_fake("gnnfast::edge_gate_backward")
def _(*args: Any) -> list[Tensor]:
    _, (parts, roles, _, _, needs, _) = split(args)
    return [parts[roles.index(of)].new_empty(parts[roles.index(of)].shape) for of in needs]


def composed(graph: Matrix, parts: Sequence[Tensor], roles: Sequence[int], acts: Sequence[int], mean: bool) -> Tensor:
    """The same, by operations that can be differentiated any number of times."""
    row, column, ids = edges(graph)
    given = dict(zip(roles, parts))

    def at_edges(factor: int, part: str) -> Tensor | None:
        rows = given.get(role(factor, part))
        return None if rows is None else rows[{"src": column, "edge": ids, "attr": ids}.get(part, row)]

    product: Any = given[WEIGHT][ids] if WEIGHT in given else 1
    for factor, act in enumerate(acts):
        src, scale, shift, edge, attr = (at_edges(factor, part) for part in PARTS[:-1])
        z: Any = 0 if src is None else src if scale is None else scale * src
        for term in (shift, edge, None if attr is None else attr @ given[role(factor, "matrix")]):
            z = z if term is None else z + term
        product = FUNCTIONS[act](z) * product
    out = product.new_zeros(graph.num_rows, product.shape[1]).index_add(0, row, product)
    return out / graph.rowptr.diff().clamp(min=1).unsqueeze(1).to(out.dtype) if mean else out  # type: ignore[no-any-return]
