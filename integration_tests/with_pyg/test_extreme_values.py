"""Ties, zeros, values that are not finite and long rows: defects found from outside, each in the form it was found in."""

from __future__ import annotations

import pytest
import torch
from graphs import relative_error
from promises import EDGES, NODES, F, both, same

import gnnfast
from gnnfast import features

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from user_messages import Plain, Weighted


@pytest.mark.parametrize("kind", ["max", "min"])
def test_second_derivative_of_a_maximum_over_no_edges(kind, device):
    conv = nn.GraphConv(4, 2, aggr=kind).to(device)
    x, w = torch.randn(3, 4, device=device, requires_grad=True), torch.zeros(0, device=device, requires_grad=True)
    edges = torch.zeros(2, 0, dtype=torch.long, device=device)

    def run():
        first = torch.autograd.grad(conv(x, edges, w).pow(2).sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, w), allow_unused=True)[1]

    found, expected = both(run)
    assert found.shape == expected.shape == (0,)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_of_a_maximum_that_is_zero(weighted, kind, edge_index, x, device):
    """PyG's is torch's scatter_reduce: the 0 that it starts from takes a share where the result is 0, as after a ReLU."""
    leaf, w = x.relu().requires_grad_(), torch.rand(EDGES, device=device, dtype=torch.float64, requires_grad=True)
    layer = Weighted(aggr=kind) if weighted else Plain(aggr=kind)

    def run():
        out = layer(leaf, edge_index, w) if weighted else layer(leaf, edge_index)
        grads = torch.autograd.grad((out + out.square()).sum(), (leaf, w) if weighted else (leaf,), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaf)
        return torch.cat([g.flatten() for g in (*grads, *second)])

    same(run)
    # gnnfast.spmm shares evenly among the edges that attain it, as mathematics has it.
    graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1], [2, 2]], device=device), 3)
    zeros = torch.zeros(3, 1, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(gnnfast.spmm(graph, zeros, reduce="max").sum(), zeros)
    assert grad.flatten().tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["x", "weight", "upstream"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_values_that_are_not_finite(reduce, where, value, edge_index, x, device):
    leaf, w = x.clone().requires_grad_(), torch.rand(EDGES, device=device, dtype=torch.float64)
    seed = torch.ones_like(x)
    {"x": leaf.data, "weight": w.view(-1, 1), "upstream": seed}[where][0, 0] = value
    w.requires_grad_()
    layer = Weighted(aggr=reduce)

    def run():
        out = layer(leaf, edge_index, w)
        return torch.cat([out.flatten(), *(g.flatten() for g in torch.autograd.grad(out, (leaf, w), seed))])

    same(run)


@pytest.mark.parametrize("make", [lambda: nn.GraphConv(F, 4, bias=False), lambda: nn.GCNConv(F, 4), lambda: nn.SAGEConv(F, 4)])
def test_compressed_features_and_infinite_gradients(make, edge_index, device, monkeypatch):
    """Gradients of weights are not finite where PyG's are, though zeros that are not stored meet no infinity."""
    monkeypatch.setattr(features, "MIN_WIDTH", 1)
    monkeypatch.setattr(features, "MIN_ELEMENTS", 1)
    x = torch.zeros(NODES, F, device=device, dtype=torch.float64)
    x[::3, 1], x[::4, 2] = 1.0, 2.0
    layer = make().to(device, torch.float64)
    w = torch.rand(EDGES, device=device, dtype=torch.float64, requires_grad=True)
    seed = torch.ones(NODES, 4, device=device, dtype=torch.float64)
    seed[7, 2], seed[11, 1] = float("inf"), float("nan")
    learned = isinstance(layer, nn.GraphConv)

    def run():
        with gnnfast.override(feature_density_threshold=1):
            for _ in range(3):
                out = layer(x, edge_index, w) if learned else layer(x, edge_index)
                leaves = [*layer.parameters(), *([w] if learned else [])]
                grads = torch.autograd.grad(out, leaves, seed)
        return torch.cat([g.flatten() for g in grads]).isfinite().double()

    same(run)
    assert any("sparse" in kernel for _, kernel, _ in gnnfast.report().kernels)


@pytest.mark.parametrize("kernel", ["gas", "gar"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradient_of_a_16_bit_mean_over_a_long_row(dtype, kernel, device):
    edges = 70_000  # more than float16 can hold
    src = torch.arange(edges, device=device) % 7
    edge_index = torch.stack([src, torch.zeros_like(src)])
    leaf = torch.randn(7, F, device=device).to(dtype).requires_grad_()
    w = torch.rand(edges, device=device).to(dtype).requires_grad_()
    for layer, leaves in (
        (lambda: Plain(aggr="mean")(leaf, edge_index), (leaf,)),
        (lambda: Weighted(aggr="mean")(leaf, edge_index, w), (leaf, w)),
    ):
        with gnnfast.override(kernel=kernel):
            found = torch.autograd.grad(layer().sum(), leaves)
        wide = [t.detach().double().requires_grad_() for t in (leaf, w)]
        gnnfast.disable()
        try:
            out = (
                Plain(aggr="mean")(wide[0], edge_index) if len(leaves) == 1 else Weighted(aggr="mean")(wide[0], edge_index, wide[1])
            )
            expected = torch.autograd.grad(out.sum(), wide[: len(leaves)])
        finally:
            gnnfast.enable()
        for f, e in zip(found, expected):
            assert f.dtype == dtype and relative_error(f, e) < (2e-3 if dtype is torch.float16 else 1e-2)


def test_mean_of_more_edges_than_a_float_counts(device):
    edges = 2**24 + 2**21
    row = torch.zeros(edges, dtype=torch.int32, device=device)
    out, _ = torch.ops.gnnfast.spmm_coo(row, row, None, torch.ones(1, 1, dtype=torch.float64, device=device), 1, 1)
    assert out.item() == 1


@pytest.mark.parametrize("form", ["of both ends", "of an edge"])
def test_a_square_root_of_a_sum_of_relus_that_are_all_zero(form, edge_index, x, device):
    """Its gradient is infinite there, and none of it passes a ReLU that is flat."""

    class Rooted(nn.MessagePassing):
        def forward(self, x, edge_index, attr):
            return self.propagate(edge_index, x=x, attr=attr).sqrt()

        def message(self, x_i, x_j, attr):
            return (x_j + (x_i if form == "of both ends" else attr)).relu()

    leaf, attr = x.clone(), torch.randn(EDGES, F, device=device, dtype=x.dtype)
    leaf[:, 0] -= 100
    leaf.requires_grad_()
    found, expected = both(lambda: torch.autograd.grad(Rooted(aggr="sum")(leaf, edge_index, attr).sum(), leaf)[0])
    assert not expected.isnan().any() and relative_error(found, expected) < 1e-9
