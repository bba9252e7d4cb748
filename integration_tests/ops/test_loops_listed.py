"""Edges with their loops replaced, against PyG's functions, and opcheck."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS

op = torch.ops.gnnfast.loops_listed.default

SHAPES = {
    "no nodes": lambda: (torch.empty(2, 0, dtype=torch.int64), 0),
    "all loops": lambda: (torch.arange(5).expand(2, 5), 5),
    "one row in two": lambda: (GRAPHS["random"]()[0].repeat_interleave(2, 0)[::2], 30),
    "transposed": lambda: (GRAPHS["random"]()[0].t().contiguous().t(), 30),
    "several threads": lambda: (torch.randint(0, 300, (2, 200_001), generator=torch.Generator().manual_seed(0)), 300),
}
SHAPES |= {name: lambda make=make: (make()[0], max(make()[1:])) for name, make in GRAPHS.items()}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", SHAPES)
def test_like_pyg(name, dtype):
    from torch_geometric.utils import add_self_loops, remove_self_loops

    edge_index, nodes = SHAPES[name]()
    edge_index = edge_index.to(dtype)
    expected, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=nodes)
    found = op(edge_index, nodes)
    assert found.dtype is torch.int64 and found.is_contiguous() and torch.equal(found, expected.long())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 4, dtype=torch.int64), 4), "edge_index must have size 2 in dimension 0, got shape \\[3, 4\\]"),
        ((torch.zeros(4, dtype=torch.int64), 4), "edge_index must have 2 dimensions, got shape \\[4\\]"),
        ((torch.zeros(2, 4), 4), "edge_index has dtype Float; accepted are int32 and int64"),
        ((torch.zeros(2, 4, dtype=torch.int64), -1), "the number of nodes must not be negative, got -1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        op(*arguments)


def test_opcheck():
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(op, (GRAPHS["random"]()[0], 30), test_utils=checks)
