"""Named graphs for tests, the ugly ones included, and the meaning of each op in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _random(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> tuple[Tensor, int, int]:
    g = torch.Generator().manual_seed(seed)
    edges = torch.stack(
        [torch.randint(0, num_src, (num_edges,), generator=g), torch.randint(0, num_dst, (num_edges,), generator=g)]
    )
    return edges, num_src, num_dst


def _hub() -> tuple[Tensor, int, int]:
    """One destination with all edges of many, more than a piece of the CUDA schedule holds, and a few others."""
    g = torch.Generator().manual_seed(1)
    src = torch.randint(0, 50, (3000,), generator=g)
    dst = torch.cat([torch.full((2900,), 7), torch.randint(0, 40, (100,), generator=g)])
    return torch.stack([src, dst[torch.randperm(3000, generator=g)]]), 50, 40


# name -> (edge_index [2, E] int64, num_src, num_dst)
GRAPHS: dict[str, Callable[[], tuple[Tensor, int, int]]] = {
    "no_edges": lambda: (torch.empty(2, 0, dtype=torch.int64), 4, 5),
    "one_edge": lambda: (torch.tensor([[1], [2]]), 3, 4),
    "isolated": lambda: (torch.tensor([[0, 0, 5], [9, 3, 9]]), 6, 12),
    "self_loops_and_duplicates": lambda: (torch.tensor([[0, 1, 1, 1, 2, 0, 0], [0, 1, 2, 2, 2, 0, 1]]), 3, 3),
    "hub": _hub,
    "random": lambda: _random(30, 30, 200),
    "bipartite": lambda: _random(17, 41, 150, seed=2),
    "sorted": lambda: (lambda e: (e[:, e[1].argsort(stable=True)].contiguous(), 30, 30))(_random(30, 30, 200)[0]),
}


def many_rows() -> tuple[Tensor, int, int]:
    """More rows than a CUDA grid's y dimension or 2^20 blocks would hold, nearly all of them empty."""
    rows = 3_000_001
    dst = torch.arange(0, rows, 7)
    return torch.stack([dst % 11, dst]), 11, rows


def reference_spmm(edge_index: Tensor, num_dst: int, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """Gather, multiply, scatter. ``x [N, H, D]``, ``weight [E, H]`` or ``[E]``."""
    messages = x[edge_index[0]]
    if weight is not None:
        messages = messages * weight.reshape(weight.shape[0], weight.shape[1] if weight.dim() == 2 else 1, 1)
    index = edge_index[1].view(-1, 1, 1).expand_as(messages)
    out = x.new_zeros(num_dst, *x.shape[1:])
    if reduce == "sum":
        return out.scatter_add(0, index, messages)
    if reduce == "mean":
        degree = torch.bincount(edge_index[1], minlength=num_dst).clamp(min=1).to(x.dtype)
        return out.scatter_add(0, index, messages) / degree.view(-1, 1, 1)
    return out.scatter_reduce(0, index, messages, "amax" if reduce == "max" else "amin", include_self=False)


def relative_error(a: Tensor, b: Tensor) -> float:
    """``|a - b| / |b|``, and infinity where one has a NaN or infinity that the other has not."""
    a, b = a.detach().double(), b.detach().double()
    if not torch.equal(a.isfinite(), b.isfinite()) or not torch.equal(a[~a.isfinite()].isnan(), b[~b.isfinite()].isnan()):
        return float("inf")
    finite = b.isfinite()
    if not finite.any():
        return 0.0
    return float((a - b)[finite].norm() / b[finite].norm().clamp(min=1e-30)) if b[finite].norm() > 0 else float(a[finite].norm())


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
