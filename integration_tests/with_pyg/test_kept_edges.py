"""What ChebConv and DirGNNConv make of edges in each call, and gnnfast keeps: the same results, and nobody can reach it."""

from __future__ import annotations

import pytest
import torch
from comparison import compare, without
from graphs import GRAPHS, relative_error
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn
from torch_geometric.nn.conv import cheb_conv

import gnnfast

F = 4
NORMALISED = {"sym": {}, "rw": {"normalization": "rw"}, "none": {"normalization": None}}


def graph(name, device):
    edge_index, *sizes = GRAPHS[name]()
    return edge_index.to(device), max(sizes)


def remembered(call):
    gnnfast.clear_report()
    call()
    return any(kernel == "remembered" for _, kernel, _ in gnnfast.report().kernels)


# ---- ChebConv ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", NORMALISED)
@pytest.mark.parametrize("name", GRAPHS)
def test_chebconv(name, kind, weighted, device):
    edge_index, n = graph(name, device)
    layer = nn.ChebConv(F, 5, 4, **NORMALISED[kind]).to(device, torch.float64)
    x = torch.randn(n, F, device=device, dtype=torch.float64)
    weight = torch.rand(edge_index.shape[1], device=device, dtype=torch.float64) if weighted else None
    for lambda_max in (3, 2.5) if name == "no_edges" or kind == "none" else (None, 2.5):
        for _ in range(3):
            compare(layer, x, edge_index, weight, None, lambda_max, tolerance=1e-9)
        given = (x, edge_index, weight, None, lambda_max)  # of weights that no gradient is asked for
        expected = without(lambda given=given: layer(*given))
        for _ in range(3):
            assert relative_error(layer(*given), expected) < 1e-9
        assert remembered(lambda given=given: layer(*given))


def test_chebconv_of_several_graphs(device):
    """Each with its own largest eigenvalue, which PyG looks up by ``batch``."""
    edge_index, n = graph("random", device)
    both = torch.cat([edge_index, edge_index + n], 1)
    batch = torch.arange(2, device=device).repeat_interleave(n)
    layer, x = nn.ChebConv(F, 5, 3).to(device), torch.randn(2 * n, F, device=device)
    for lambda_max in (torch.tensor([1.5, 3.0], device=device), torch.tensor(2.0, device=device), None):
        for _ in range(3):
            compare(layer, x, both, None, batch, lambda_max, tolerance=1e-5)


def test_chebconv_follows_changes(device):
    edge_index, n = graph("random", device)
    layer, x = nn.ChebConv(F, 5, 3).to(device), torch.randn(n, F, device=device)
    weight = torch.rand(edge_index.shape[1], device=device)
    for change in (lambda: None, lambda: edge_index[1, :9].fill_(3), lambda: weight.mul_(weight), lambda: weight.requires_grad_()):
        change()
        for _ in range(3):
            found = layer(x, edge_index, weight)
            assert relative_error(found, without(lambda: layer(x, edge_index, weight))) < 1e-5
    assert not remembered(lambda: layer(x, edge_index, weight))
    layer(x, edge_index, weight).sum().backward()
    assert weight.grad is not None


def test_what_others_get_of_chebconv_is_theirs(device):
    edge_index, n = graph("random", device)
    layer, x = nn.ChebConv(F, 5, 3).to(device), torch.randn(n, F, device=device)
    expected = without(lambda: layer(x, edge_index))
    for _ in range(3):
        assert relative_error(layer(x, edge_index), expected) < 1e-5
    for _ in range(3):
        edges, weight = layer.__norm__(edge_index, n, None, "sym", None, x.dtype)
        edges.zero_(), weight.zero_()
        assert relative_error(layer(x, edge_index), expected) < 1e-5

    class Own(nn.ChebConv):
        def message(self, x_j, norm):
            norm.mul_(0.5)
            return norm.view(-1, 1) * x_j

    own = Own(F, 5, 2).to(device)
    expected = without(lambda: own(x, edge_index))
    for _ in range(4):
        assert relative_error(own(x, edge_index), expected) < 1e-5


def test_a_replaced_laplacian_is_asked(device, monkeypatch):
    edge_index, n = graph("random", device)
    layer, x = nn.ChebConv(F, 5, 3).to(device), torch.randn(n, F, device=device)
    for _ in range(3):
        before = layer(x, edge_index)
    original = cheb_conv.get_laplacian
    monkeypatch.setattr(cheb_conv, "get_laplacian", lambda *args: (lambda e, w: (e, 2 * w - 1))(*original(*args)))
    assert relative_error(layer(x, edge_index), without(lambda: layer(x, edge_index))) < 1e-5
    assert relative_error(layer(x, edge_index), before) > 1e-3


@pytest.mark.parametrize("layer", [nn.ChebConv(F, 5, 3), nn.DirGNNConv(nn.SAGEConv(F, 5))])
def test_checkpoints(layer, device):
    edge_index, n = graph("random", device)
    layer, x = layer.to(device), torch.randn(n, F, device=device, requires_grad=True)
    checkpoint(layer, x, edge_index, use_reentrant=False).square().sum().backward()
    found, x.grad = x.grad, None
    without(lambda: layer(x, edge_index).square().sum().backward())
    assert relative_error(found, x.grad) < 1e-5


def test_inference_before_training(device):
    edge_index, n = graph("random", device)
    for layer in (nn.ChebConv(F, 5, 3).to(device), nn.DirGNNConv(nn.SAGEConv(F, 5)).to(device)):
        x = torch.randn(n, F, device=device)
        with torch.inference_mode():
            for _ in range(3):
                layer(x, edge_index)
        x = x.requires_grad_()
        layer(x, edge_index).sum().backward()
        assert torch.isfinite(x.grad).all()


def test_an_own_norm_of_a_module_sees_nothing_kept(device):
    edge_index, n = graph("random", device)
    layer, x = nn.ChebConv(F, 5, 3).to(device), torch.randn(n, F, device=device)
    for _ in range(3):
        layer(x, edge_index)
    original, seen = layer.__norm__, []
    layer.__norm__ = lambda *args, **kwargs: seen.append(original(*args, **kwargs)) or seen[-1]
    expected = without(lambda: layer(x, edge_index))
    for _ in range(3):
        assert relative_error(layer(x, edge_index), expected) < 1e-5
        for t in seen[-1]:
            t.zero_()


# ---- DirGNNConv ----------------------------------------------------------------------------------------------------------------
DIRECTED = {
    "SAGEConv": lambda: nn.SAGEConv(F, 5),
    "SAGEConv max": lambda: nn.SAGEConv(F, 5, aggr="max"),
    "GCNConv": lambda: nn.GCNConv(F, 5),
    "GATConv": lambda: nn.GATConv(F, 5, add_self_loops=False),
    "GCNConv cached": lambda: nn.GCNConv(F, 5, cached=True),
    "ResGatedGraphConv": lambda: nn.ResGatedGraphConv(F, 5),
}


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("kind", DIRECTED)
@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "bipartite"])
def test_dirgnnconv(name, kind, root, device):
    if kind == "GCNConv cached":
        edge_index, n = graph(name, device)
        x = torch.randn(n, F, device=device)
        layer = nn.DirGNNConv(DIRECTED[kind](), root_weight=root).to(device)
        found = [layer(x, edge_index) for _ in range(3)]
        for conv in (layer.conv_in, layer.conv_out):
            conv._cached_edge_index = None
        expected = without(lambda: layer(x, edge_index))
        assert all(relative_error(f, expected) < 1e-5 for f in found)
        return
    edge_index, n = graph(name, device)
    layer = nn.DirGNNConv(DIRECTED[kind](), root_weight=root).to(device, torch.float64)
    x = torch.randn(n, F, device=device, dtype=torch.float64)
    for _ in range(3):
        compare(layer, x, edge_index, tolerance=1e-9)


def test_layers_that_write_into_their_edges(device):
    """Of the user's own, or by a hook: into theirs."""

    class Clearing(nn.SAGEConv):
        def forward(self, x, edge_index):
            out = super().forward(x, edge_index)
            edge_index.zero_()
            return out

    def clear(module, given, out):
        given[1].zero_()

    edge_index, n = graph("random", device)
    x = torch.randn(n, F, device=device)

    def call(layer):
        layer.conv_in = nn.SAGEConv(F, 5).to(device) if type(layer.conv_in) is Clearing else layer.conv_in
        torch.manual_seed(0)
        layer.reset_parameters()
        return layer(x, edge_index)

    for layer in (nn.DirGNNConv(Clearing(F, 5)), nn.DirGNNConv(nn.SAGEConv(F, 5))):
        layer = layer.to(device)
        if type(layer.conv_out) is not Clearing:
            layer.conv_out.register_forward_hook(clear)
        expected = without(lambda layer=layer: call(layer))
        for _ in range(4):
            assert relative_error(call(layer), expected) < 1e-5


@pytest.mark.parametrize("make", [lambda: nn.ChebConv(F, 5, 3), lambda: nn.DirGNNConv(nn.SAGEConv(F, 5))])
def test_other_compilers_take_pygs_code(make, device):
    edge_index, n = graph("random", device)
    layer, x = make().to(device), torch.randn(n, F, device=device)
    expected = without(lambda: layer(x, edge_index))
    for call in (
        torch.jit.script(layer),
        torch.jit.trace(layer, (x, edge_index)),
        torch.compile(layer, backend="eager"),
        torch.export.export(layer, (x, edge_index)).module(),
    ):
        for _ in range(3):
            assert relative_error(call(x, edge_index), expected) < 1e-5
