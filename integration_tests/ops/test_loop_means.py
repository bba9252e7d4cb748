"""Rows of edges with those of the loops that a layer adds, against PyG's functions, and opcheck."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS
from torch_geometric.utils import add_self_loops, remove_self_loops

op, backward = torch.ops.gnnfast.loop_means.default, torch.ops.gnnfast.loop_means_backward.default

SHAPES = {
    "no nodes": lambda: (torch.empty(2, 0, dtype=torch.int64), 0),
    "all loops": lambda: (torch.arange(5).expand(2, 5), 5),
    "transposed": lambda: (GRAPHS["random"]()[0].t().contiguous().t(), 30),
    "several threads": lambda: (torch.randint(0, 300, (2, 200_001), generator=torch.Generator().manual_seed(0)), 300),
}
SHAPES |= {name: lambda make=make: (make()[0], max(make()[1:])) for name, make in GRAPHS.items()}


def kept(edge_index):
    return int((edge_index[0] != edge_index[1]).sum())


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", SHAPES)
def test_like_pyg(name, ids, dtype, width):
    edge_index, nodes = SHAPES[name]()
    rows = torch.randn(edge_index.shape[1], 2 * width, dtype=dtype)[:, ::2].requires_grad_()
    _, expected = add_self_loops(*remove_self_loops(edge_index, rows), fill_value="mean", num_nodes=nodes)
    found = op(edge_index.to(ids), rows, kept(edge_index), nodes)
    assert found.dtype is dtype and torch.allclose(found, expected) and found.shape == expected.shape
    grad = torch.randn_like(expected)
    (to_rows,) = torch.autograd.grad(found, rows, grad)
    (wanted,) = torch.autograd.grad(expected, rows, grad)
    assert to_rows.dtype is dtype and torch.allclose(to_rows, wanted)


def test_gradients_of_gradients():
    edge_index = torch.tensor([[0, 1, 2, 2, 3, 0], [1, 1, 0, 1, 3, 1]])
    rows = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: op(edge_index, r, 4, 5), (rows,))
    assert torch.autograd.gradgradcheck(lambda r: op(edge_index, r, 4, 5), (rows,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(edge_index=torch.zeros(3, 4, dtype=torch.int64)), "edge_index must have size 2 in dimension 0, got shape \\[3, 4\\]"),
        (dict(edge_index=torch.zeros(2, 4)), "edge_index has dtype Float; accepted are int32 and int64"),
        (dict(rows=torch.zeros(3, 2)), "rows must have size 4 in dimension 0, got shape \\[3, 2\\]"),
        (dict(rows=torch.zeros(4)), "rows must have 2 dimensions, got shape \\[4\\]"),
        (dict(rows=torch.zeros(4, 2).half()), "rows must be float32 or float64"),
        (dict(kept=3), "kept must be the number of edges that are no loops, 2, got 3"),
        (dict(num_nodes=-1), "the number of nodes must not be negative, got -1"),
    ],
)
def test_wrong_arguments(change, message):
    given = dict(edge_index=torch.tensor([[0, 1, 2, 0], [0, 0, 2, 1]]), rows=torch.zeros(4, 2), kept=2, num_nodes=3)
    with pytest.raises(RuntimeError, match=message):
        op(*(given | change).values())


def test_nodes_that_no_loop_is_asked_for():
    """Edges that end at others count for no mean."""
    edge_index, rows = torch.tensor([[0, 1, 2], [1, 2, 9]]), torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    found = op(edge_index, rows, 3, 3)
    assert found.flatten().tolist() == [1, 2, 3, 0, 1, 2]
    (grad,) = torch.autograd.grad(found, rows, torch.ones_like(found))
    assert grad.flatten().tolist() == [2, 2, 1]


def test_opcheck():
    edge_index, nodes = SHAPES["random"]()
    rows, of_edges = torch.randn(edge_index.shape[1], 3, requires_grad=True), kept(edge_index)
    torch.library.opcheck(op, (edge_index, rows, of_edges, nodes))
    torch.library.opcheck(backward, (edge_index, torch.randn(of_edges + nodes, 3, requires_grad=True), of_edges, nodes))
