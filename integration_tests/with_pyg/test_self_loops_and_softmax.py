"""Self loops and softmax that are known again, and attention on graphs with loops of their own, against PyG's own."""

from __future__ import annotations

import sys

import pytest
import torch
from attention_layers import F, same
from comparison import compare
from graphs import GRAPHS, relative_error

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn


@pytest.mark.parametrize("make", [nn.GATv2Conv, nn.SuperGATConv, nn.AGNNConv, nn.GATConv])
def test_self_loops_and_softmax_are_found_again(make, device, converts_at_once):
    edge_index, n, _ = GRAPHS["random"]()
    layer = (make() if make is nn.AGNNConv else make(F, 5, heads=2)).to(device, torch.float64).eval()
    report = compare(layer, torch.randn(n, F, device=device, dtype=torch.float64), edge_index.to(device), repeats=5, tolerance=1e-9)
    assert make in (nn.SuperGATConv, nn.AGNNConv) or {"attention", "edge softmax"} & {kernel for _, kernel, _ in report.kernels}


def test_self_loops_follow_changes_and_are_the_users_own(device):
    from torch_geometric.utils import add_self_loops, remove_self_loops

    edge_index = GRAPHS["self_loops_and_duplicates"]()[0].to(device)

    def both(edge_index):
        rest, none = remove_self_loops(edge_index)
        assert none is None
        return rest, add_self_loops(rest, num_nodes=5)[0], add_self_loops(edge_index)[0]

    def expected():
        gnnfast.disable()
        found = both(edge_index)
        gnnfast.enable()
        return found

    for _ in range(4):
        found = both(edge_index)
        assert all(torch.equal(f, e) and f.dtype == e.dtype for f, e in zip(found, expected()))
        for f in found:
            f.zero_()
    edge_index[0, 0] = 2
    assert all(torch.equal(f, e) for f, e in zip(both(edge_index), expected()))
    weighted = [remove_self_loops(edge_index, torch.arange(7.0, device=device)) for _ in range(3)][-1]
    assert weighted[1].shape[0] == weighted[0].shape[1]


@pytest.mark.parametrize("shape", [(200,), (200, 3)])
def test_softmax_of_a_known_graph(shape, device):
    from torch_geometric.utils import softmax

    edge_index, n, _ = GRAPHS["random"]()
    edge_index, src = edge_index.to(device), torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
    nn.GATConv(F, 5, add_self_loops=False).to(device)(torch.randn(n, F, device=device), edge_index)
    gnnfast.clear_report()
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        out = softmax(src, edge_index[1], num_nodes=n)
        results.append([out, *torch.autograd.grad(out.sin().sum(), src)])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-12 for f, e in zip(*results))
    assert ("pyg softmax", "edge softmax", "over CSR") in gnnfast.report().kernels
    gnnfast.clear_report()
    softmax(src, edge_index[0], num_nodes=n), softmax(src, edge_index[1].clone(), num_nodes=n)
    softmax(src, edge_index[1], num_nodes=n + 1), softmax(src, edge_index[1])
    assert {kernel for _, kernel, _ in gnnfast.report().kernels} == {"in one operation"}


def test_results_of_softmax_may_be_written_into(device):
    from torch_geometric.utils import softmax

    edge_index, n, _ = GRAPHS["random"]()
    edge_index = edge_index.to(device)
    nn.GATConv(F, 5, add_self_loops=False).to(device)(torch.randn(n, F, device=device), edge_index)
    src = torch.randn(edge_index.shape[1], device=device, requires_grad=True)

    def run():
        out = softmax(src, edge_index[1], num_nodes=n)
        out.mul_(src.detach())
        return torch.autograd.grad(out.sum(), src)[0]

    assert same(run)


def test_replaced_parts_of_softmax_and_loops(device, monkeypatch):
    from torch_geometric.utils import add_self_loops, loop, softmax

    edge_index, n, _ = GRAPHS["random"]()
    edge_index = edge_index.to(device)
    nn.GATConv(F, 5, add_self_loops=False).to(device)(torch.randn(n, F, device=device), edge_index)
    src = torch.randn(edge_index.shape[1], device=device)
    module = sys.modules["torch_geometric.utils._softmax"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "scatter", lambda t, index, dim, dim_size, reduce: t.new_full((dim_size,), 2.0))
        assert same(lambda: softmax(src, edge_index[1], num_nodes=n))
    for _ in range(3):
        add_self_loops(edge_index)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "maybe_num_nodes", lambda *_, **__: 3)
        assert add_self_loops(edge_index)[0].shape[1] == edge_index.shape[1] + 3
    assert add_self_loops(edge_index)[0].shape[1] == edge_index.shape[1] + n


@pytest.mark.parametrize("schedule", ["auto", "degree"])
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_graphs_with_loops_after_many_uses(make, schedule, device):
    """On a GPU the schedule becomes exact, but the loops that nodes had stay left out: in second derivatives too."""
    edge_index, n, _ = GRAPHS["self_loops_and_duplicates"]()
    x, edge_index = torch.randn(n, F, device=device, dtype=torch.float64, requires_grad=True), edge_index.to(device)
    layer = make(F, 5, heads=2).to(device, torch.float64)
    results = []
    with gnnfast.override(schedule=schedule):
        for _ in range(20):
            layer(x, edge_index)
            if device.type == "cuda":
                torch.cuda.synchronize()
        for on in (True, False):
            (gnnfast.enable if on else gnnfast.disable)()
            out = layer(x, edge_index)
            (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
            results.append((out, grad, *torch.autograd.grad(grad.square().sum(), x)))
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-9 for f, e in zip(*results))


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_dropout_and_weights_of_graphs_with_loops(make, device):
    """Weights are listed, and framework dropout is drawn, as PyG lists edges; the mean over kernels' draws is that without."""
    edge_index, n, _ = GRAPHS["self_loops_and_duplicates"]()
    x, edge_index = torch.randn(n, F, device=device, dtype=torch.float64), edge_index.to(device)
    layer = make(F, 5, heads=2, dropout=0.5).to(device, torch.float64)
    with gnnfast.override(dropout="framework"):
        compare(layer, x, edge_index, tolerance=1e-9)
    with torch.no_grad():
        mean = sum(layer(x, edge_index) for _ in range(2000)) / 2000
        exact = layer.eval()(x, edge_index)
    assert relative_error(mean, exact) < 0.05
    found = layer(x, edge_index, return_attention_weights=True)
    gnnfast.disable()
    expected = layer(x, edge_index, return_attention_weights=True)
    gnnfast.enable()
    assert torch.equal(found[1][0], expected[1][0]) and relative_error(found[1][1], expected[1][1]) < 1e-12


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_linear_layers_that_give_more_rows(make, device):
    """PyG adds loops to as many nodes as there are rows after them."""
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = make(F, 5, heads=2).to(device), torch.randn(n, F, device=device)
    for lin in (layer.lin,) if make is nn.GATConv else (layer.lin_l, layer.lin_r):
        lin.register_forward_hook(lambda module, args, out: torch.cat([out, out]))
    found = layer(x, edge_index.to(device))
    gnnfast.disable()
    expected = layer(x, edge_index.to(device))
    gnnfast.enable()
    assert found.shape == expected.shape and relative_error(found, expected) < 1e-5
