"""Names that users write and kernels know by number: each is listed here once, with its code. And what ops take of a graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

FEATURE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
# Orders round differently, which only these have the digits for.
REORDERED = (torch.float32, torch.float64)

# The codes are those of spmm_coo (plugin_src/spmm_coo/spmm_coo.h).
REDUCTIONS = {"sum": 0, "mean": 1, "max": 2, "min": 3}
LINEAR = ("sum", "mean")
EXTREMA = ("max", "min")

# Those that are made together, and how many of them (plugin_src/multi_reduce/multi_reduce_args.h).
KINDS = REDUCTIONS | {"var": 4, "std": 5}
MOST_KINDS = 16

# Of sums of edges' ends (plugin_src/edge_gate/edge_gate_args.h).
ACTIVATIONS = {"identity": 0, "relu": 1, "sigmoid": 2, "tanh": 3, "softplus": 4, "silu": 5, "abs": 6}

# Who gets the gradient of max and min (plugin_src/spmm/spmm.h). Users may ask for the first two.
TIES = {"first": 1, "even": 2, "scatter": 3}

# How edges are drawn (plugin_src/spmm_sampled/draw.h).
STRATEGIES = {"bucket": 0, "fastrand": 1, "random": 2}


class Matrix(NamedTuple):
    """A sparse matrix A as ops take it, and its transpose, which autograd formulas need: each as :class:`gnnfast.graph.formats.Csr`
    has it. Without a transpose its part is empty."""

    rowptr: Tensor
    col: Tensor
    perm: Tensor | None
    schedule: Tensor | None
    layout: list[int]
    rowptr_t: Tensor | None
    col_t: Tensor | None
    perm_t: Tensor | None
    schedule_t: Tensor | None
    layout_t: list[int]

    @property
    def transposed(self) -> Matrix:
        return Matrix(*self[5:], *self[:5])  # type: ignore[arg-type]

    @property
    def num_rows(self) -> int:
        return self.rowptr.shape[0] - 1

    @property
    def num_slots(self) -> int:
        """As many as there are edge ids."""
        return self.col.shape[0]


def split(args: tuple[Any, ...]) -> tuple[Matrix, tuple[Any, ...]]:
    """The matrix that comes first among an op's arguments, and the others."""
    count = len(Matrix._fields)
    return Matrix(*args[:count]), args[count:]
