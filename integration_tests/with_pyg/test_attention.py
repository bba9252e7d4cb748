"""Attention layers, softmax and self loops against PyG's own."""

from __future__ import annotations

import copy
import sys
from typing import Optional

import pytest
import torch
from comparison import compare
from graphs import GRAPHS, relative_error

import gnnfast

pyg = pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn  # noqa: E402

F = 8
OPTIONS = {
    "plain": {},
    "heads": {"heads": 4},
    "odd heads": {"heads": 3},
    "mean of heads": {"heads": 4, "concat": False},
    "no loops": {"heads": 2, "add_self_loops": False},
    "slope": {"heads": 2, "negative_slope": 0.7},
    "residual": {"heads": 2, "residual": True},
    "no bias": {"heads": 2, "bias": False},
    "dropout": {"heads": 2, "dropout": 0.6},
    "unused edge features": {"heads": 2, "edge_dim": 3, "add_self_loops": False},
}


class _Pair(torch.nn.Module):
    """Features of sources and destinations as arguments of their own."""

    def __init__(self, layer):
        super().__init__()
        self.conv = layer

    def forward(self, a, b, edge_index):
        return self.conv((a, b), edge_index)


def _served(report, layer="GATConv"):
    return any(place == f"pyg {layer}" and kernel in ("attention", "edge softmax") for place, kernel, _ in report.kernels)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", [n for n in GRAPHS if n not in ("isolated", "bipartite", "no_edges", "one_edge", "hub")])
def test_graphs_and_options(name, options, training, device):
    edge_index, n, _ = GRAPHS[name]()
    layer = nn.GATConv(F, 5, **OPTIONS[options]).to(device, torch.float64).train(training)
    with gnnfast.override(dropout="framework"):  # the same masks
        report = compare(layer, torch.randn(n, F, device=device, dtype=torch.float64), edge_index.to(device), tolerance=1e-9)
    assert _served(report) and not report.fallbacks


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("loops", [True, False])
def test_bipartite(name, loops, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    if loops and num_src != num_dst:
        edge_index = edge_index[:, (edge_index < min(num_src, num_dst)).all(0)]
    x = (torch.randn(m, f, device=device, dtype=torch.float64) for m, f in ((num_src, F), (num_dst, 6)))
    layer = nn.GATConv((F, 6), 5, heads=2, add_self_loops=loops).to(device, torch.float64)

    assert _served(compare(_Pair(layer), *x, edge_index.to(device), tolerance=1e-9))


FILLED = {
    "no loops": {"add_self_loops": False},
    "mean": {},
    "number": {"fill_value": 0.5},
    "tensor": {"fill_value": torch.tensor([1.0, -2.0, 3.0])},
    "max": {"fill_value": "max"},
    "dropout": {"dropout": 0.5},
    "mean of heads": {"concat": False, "residual": True},
}


@pytest.mark.parametrize("options", FILLED)
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
@pytest.mark.parametrize("name", ["random", "hub", "self_loops_and_duplicates", "sorted", "one_edge", "no_edges"])
def test_edge_features(name, make, options, device):
    """Also of self loops that are added, where nodes had none, one or several."""
    dtype = torch.float32 if name == "random" else torch.float64
    edge_index, num_src, num_dst = GRAPHS[name]()
    n = max(num_src, num_dst)
    x, attr = (torch.randn(m, k, device=device, dtype=dtype) for m, k in ((n, F), (edge_index.shape[1], 3)))
    layer = make(F, 5, heads=2, edge_dim=3, **FILLED[options]).to(dtype)
    with gnnfast.override(dropout="framework"):  # the same masks
        report = compare(layer, x, edge_index.to(device), attr, tolerance=1e-9 if dtype is torch.float64 else 1e-4)
    kernels = {kernel for place, kernel, _ in report.kernels if place == f"pyg {make.__name__}"}
    if make is nn.GATConv:
        assert kernels >= {"edge softmax"} or (name == "no_edges" and kernels == {"attention"})
    else:
        assert kernels == {"attention"} or options == "dropout"
    assert not report.fallbacks and not any("part" in kernel for _, kernel, _ in report.kernels)


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_edge_features_of_one_column_and_of_pairs(make, loops, device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    edge_index = edge_index.flip(0).to(device)  # more sources than destinations
    if loops:
        edge_index = edge_index[:, (edge_index < num_src).all(0)]
    x = [torch.randn(m, f, device=device, dtype=torch.float64) for m, f in ((num_dst, F), (num_src, 6))]
    attr = torch.randn(edge_index.shape[1], device=device, dtype=torch.float64)
    layer = make((F, 6), 5, heads=2, edge_dim=1, add_self_loops=loops).double()
    assert _served(compare(_PairOfEdges(layer), *x, edge_index, attr, tolerance=1e-9), make.__name__)


class _PairOfEdges(_Pair):
    def forward(self, a, b, edge_index, attr):
        return self.conv((a, b), edge_index, attr)


@pytest.mark.parametrize("fill", ["mean", "max"])
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_edge_features_twice_and_weights(make, fill, device):
    edge_index, n, _ = GRAPHS["self_loops_and_duplicates"]()
    x, attr = (torch.randn(m, k, device=device, dtype=torch.float64) for m, k in ((n, F), (edge_index.shape[1], 3)))
    layer = make(F, 5, heads=2, edge_dim=3, fill_value=fill).to(device, torch.float64)
    edge_index, leaves, results = edge_index.to(device), [x.requires_grad_(), attr.requires_grad_(), *layer.parameters()], []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        out, (looped, alpha) = layer(x, edge_index, attr, return_attention_weights=True)
        grads = torch.autograd.grad(out.sin().sum() + alpha.square().sum(), leaves, create_graph=True)
        seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, allow_unused=True)
        results.append([looped.double(), out, alpha, *grads, *(g for g in seconds if g is not None)])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-9 or e.norm() < 1e-12 for f, e in zip(*results))


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_edge_features_that_may_be_anything(make, device):
    """A hook, and 16 bits, where rounding in another order shows: PyG's own scores."""
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = torch.randn(n, F, device=device), torch.randn(edge_index.shape[1], 3, device=device)
    edge_index = edge_index.to(device)
    for loops in (True, False):
        layer = make(F, 5, heads=2, edge_dim=3, add_self_loops=loops).to(device)
        layer.lin_edge.register_forward_hook(lambda module, inputs, out: 2 * out)
        compare(layer, x, edge_index, attr, tolerance=1e-4)
        half = make(F, 5, edge_dim=3, add_self_loops=loops).to(device, torch.bfloat16)
        found = half(x.bfloat16(), edge_index, attr.bfloat16())
        gnnfast.disable()
        assert relative_error(found, half(x.bfloat16(), edge_index, attr.bfloat16())) < 1e-2
        gnnfast.enable()
        layer = make(F, 5, heads=2, edge_dim=3, add_self_loops=loops).to(device)
        of_nodes = (layer.lin,) if make is nn.GATConv else (layer.lin_l, layer.lin_r)
        for lin in of_nodes:  # as many loops as then are rows
            lin.register_forward_hook(lambda module, inputs, out: torch.cat([out, out]))
        assert _same(lambda layer=layer: layer(x, edge_index, attr))


def test_weights_are_the_users_own(device):
    """In the edge order that PyG has, in tensors that nobody else holds."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATConv(F, 5, heads=2).to(device)
    found = [layer(x, edge_index, return_attention_weights=True) for _ in range(2)][1]
    assert _served(gnnfast.report())
    gnnfast.disable()
    expected = layer(x, edge_index, return_attention_weights=True)
    gnnfast.enable()
    assert relative_error(found[0], expected[0]) < 1e-5 and relative_error(found[1][1], expected[1][1]) < 1e-5
    assert torch.equal(found[1][0], expected[1][0])
    found[1][0].zero_()
    again = layer(x, edge_index, return_attention_weights=True)
    assert torch.equal(again[1][0], expected[1][0]) and relative_error(again[0], expected[0]) < 1e-5
    edge_index[:, 0] = torch.tensor([1, 2])  # noticed
    changed = layer(x, edge_index)
    gnnfast.disable()
    expected = layer(x, edge_index)
    gnnfast.enable()
    assert relative_error(changed, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype, device):
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = nn.GATConv(F, 5, heads=2).to(device, dtype), torch.randn(n, F, device=device, dtype=dtype)
    edge_index = edge_index.to(device)
    found, exact = layer(x, edge_index), copy.deepcopy(layer).double()(x.double(), edge_index)
    gnnfast.disable()
    framework = relative_error(layer(x, edge_index), exact)
    gnnfast.enable()
    assert found.dtype == dtype and relative_error(found, exact) <= 1.2 * framework + 1e-12


def test_second_derivative(device):
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = nn.GATConv(F, 5, heads=2).to(device, torch.float64), torch.randn(n, F, device=device, dtype=torch.float64)
    edge_index = edge_index.to(device)
    leaves = [x.requires_grad_(), *layer.parameters()]
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        grads = torch.autograd.grad(layer(x, edge_index).sin().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, allow_unused=True))
    gnnfast.enable()
    for f, e in zip(*results):
        assert (f is None) == (e is None) and (e is None or relative_error(f, e) < 1e-9 or e.norm() < 1e-12)


def _hook(layer):
    layer.register_edge_update_forward_hook(lambda module, inputs, output: output * 2)


def _override(layer):
    layer.edge_update = lambda alpha_j, alpha_i, edge_attr, index, ptr, dim_size: alpha_j + alpha_i


class Subclass(nn.GATConv):
    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
        return super().edge_update(alpha_j, alpha_i, edge_attr, index, ptr, dim_size) * 3


@pytest.mark.parametrize("change", [_hook, _override, None])
def test_what_a_user_changes_runs(change, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = (Subclass if change is None else nn.GATConv)(F, 5, heads=2).to(device)
    layer(x, edge_index)
    if change:
        change(layer)
    found = layer(x, edge_index)
    gnnfast.disable()
    expected = layer(x, edge_index)
    gnnfast.enable()
    assert relative_error(found, expected) < 1e-5


def test_a_replaced_softmax_runs(device, monkeypatch):
    from torch_geometric.nn.conv import gat_conv

    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATConv(F, 5).to(device)
    before = layer(x, edge_index)
    monkeypatch.setattr(gat_conv, "softmax", lambda src, index, ptr, size: src * 0)
    assert layer(x, edge_index).abs().sum() == layer.bias.abs().sum() * n and before.abs().sum() > 0


def test_parts_of_a_layer_run_once(device):
    """Also where the graph turns out to be wrong."""
    edge_index, n, _ = GRAPHS["random"]()
    layer, calls = nn.GATConv(F, 5).to(device), []
    layer.lin.register_forward_hook(lambda *_: calls.append(1))
    layer(torch.randn(n, F, device=device), edge_index.to(device))
    assert len(calls) == 1
    if device.type == "cpu":
        with pytest.raises(IndexError):
            layer(torch.randn(n // 2, F), edge_index)
        assert len(calls) == 2


TRANSFORMERS = {
    "plain": {},
    "heads": {"heads": 3},
    "mean of heads": {"heads": 2, "concat": False},
    "beta": {"heads": 2, "beta": True},
    "no root": {"heads": 2, "root_weight": False},
    "dropout": {"heads": 2, "dropout": 0.5},
}


@pytest.mark.parametrize("options", TRANSFORMERS)
@pytest.mark.parametrize("name", ["random", "hub", "self_loops_and_duplicates", "sorted"])
def test_transformer(name, options, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    n = max(num_src, num_dst)
    layer = nn.TransformerConv(F, 5, **TRANSFORMERS[options]).to(device, torch.float64)
    x = torch.randn(n, F, device=device, dtype=torch.float64)
    with gnnfast.override(dropout="framework"):  # the same masks
        report = compare(layer, x, edge_index.to(device), tolerance=1e-9)
    served = {kernel for place, kernel, _ in report.kernels if place == "pyg TransformerConv"}
    assert served == {"attention"} or ("dropout" in options and {"edge softmax"} < served)
    assert not report.fallbacks


V2 = {
    "plain": {},
    "heads": {"heads": 4},
    "mean of heads": {"heads": 3, "concat": False},
    "no loops": {"heads": 2, "add_self_loops": False},
    "slope": {"heads": 2, "negative_slope": 0.7},
    "shared": {"heads": 2, "share_weights": True},
    "residual": {"heads": 2, "residual": True},
    "nothing after": {"heads": 2, "bias": False},
    "dropout": {"heads": 2, "dropout": 0.6},
    "unused edge features": {"heads": 2, "edge_dim": 3, "add_self_loops": False},
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", V2)
@pytest.mark.parametrize("name", ["random", "self_loops_and_duplicates", "sorted"])
def test_gatv2(name, options, training, device):
    edge_index, n, _ = GRAPHS[name]()
    layer = nn.GATv2Conv(F, 5, **V2[options]).to(device, torch.float64).train(training)
    with gnnfast.override(dropout="framework"):
        report = compare(layer, torch.randn(n, F, device=device, dtype=torch.float64), edge_index.to(device), tolerance=1e-9)
    served = {kernel for place, kernel, _ in report.kernels if place == "pyg GATv2Conv"}
    assert (served == {"attention"}) == (options != "dropout" or not training)


@pytest.mark.parametrize("make", [nn.GATv2Conv, nn.TransformerConv])
@pytest.mark.parametrize("name", GRAPHS)
def test_pairs_of_nodes(name, make, device):
    """Sources and destinations of their own, as in bipartite graphs."""
    edge_index, num_src, num_dst = GRAPHS[name]()
    x = (torch.randn(m, f, device=device, dtype=torch.float64) for m, f in ((num_src, F), (num_dst, 6)))
    options = {"add_self_loops": False} if make is nn.GATv2Conv else {}
    layer = make((F, 6), 5, heads=2, **options).to(device, torch.float64)

    report = compare(_Pair(layer), *x, edge_index.to(device), tolerance=1e-9)
    assert "attention" in {kernel for _, kernel, _ in report.kernels}


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv, nn.TransformerConv])
def test_dropout_of_kernels(make, device):
    """Another draw each time, the same for the same seed, of the right mean; none in evaluation."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = make(F, 5, heads=2, dropout=0.5).to(device)
    torch.manual_seed(3)
    first, second = (layer(x, edge_index) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(layer(x, edge_index), first) and not torch.equal(second, first)
    with torch.no_grad():
        mean = sum(layer(x, edge_index) for _ in range(2000)) / 2000
        layer.eval()
        exact = layer(x, edge_index)
    assert torch.equal(layer(x, edge_index), exact) and relative_error(mean, exact) < 0.05


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv, nn.TransformerConv])
def test_results_may_be_written_into(make, device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index = edge_index.to(device)
    options = {"root_weight": False} if make is nn.TransformerConv else {"bias": False}
    layer, x = make(F, 5, **options).to(device, torch.float64), torch.randn(n, F, device=device, dtype=torch.float64)
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        layer.zero_grad()
        layer(x, edge_index).relu_().square().sum().backward()
        results.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-9 or e.norm() < 1e-12 for f, e in zip(*results))


def _edge_update(layer):
    layer.edge_update = lambda x_j, x_i, edge_attr, index, ptr, dim_size: (x_i + x_j).sum(-1)


def _of_class(layer):
    class Other(type(layer)):
        def edge_update(self, x_j, x_i, edge_attr, index, ptr, dim_size):
            return (x_i + x_j).sum(-1)

    layer.__class__ = Other


@pytest.mark.parametrize("change", [_edge_update, _of_class])
def test_what_a_user_changes_of_gatv2_runs(change, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATv2Conv(F, 5, heads=2).to(device)
    change(layer)
    found = layer(x, edge_index)
    gnnfast.disable()
    expected = layer(x, edge_index)
    gnnfast.enable()
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("graph", ["random", "hub", "self_loops_and_duplicates"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (nn.GATConv, {}),
        (nn.GATConv, {"edge_dim": 3}),
        (nn.GATv2Conv, {"residual": True}),
        (nn.GATv2Conv, {"share_weights": True, "concat": False}),
        (nn.GATv2Conv, {"edge_dim": 3}),
        (nn.TransformerConv, {"beta": True}),
        (nn.TransformerConv, {"edge_dim": 3}),
    ],
)
def test_what_else_is_asked_for_changes_no_output(make, options, dtype, graph, device):
    """Coefficients beside the output, and a ``size`` that says what features do: to the bit, as in PyG."""
    edge_index, num_src, num_dst = GRAPHS[graph]()
    n = max(num_src, num_dst)
    edge_index, x = edge_index.to(device), torch.randn(n, F, device=device, dtype=dtype)
    attr = (torch.randn(edge_index.shape[1], 3, device=device, dtype=dtype),) if "edge_dim" in options else ()
    layer = make(F, 5, heads=2, **options).to(device, dtype)
    out = layer(x, edge_index, *attr)
    found, (looped, alpha) = layer(x, edge_index, *attr, return_attention_weights=True)
    # GATConv sums the coefficients that it returns, for which a GPU has another kernel.
    assert torch.equal(found, out) or (make is nn.GATConv and device.type == "cuda" and relative_error(found, out) < 1e-5)
    if make is nn.GATConv:
        assert torch.equal(layer(x, edge_index, *attr, size=(n, n)), out)
    gnnfast.disable()
    expected, (listed, coefficients) = layer(x, edge_index, *attr, return_attention_weights=True)
    gnnfast.enable()
    leaves = [x.requires_grad_(), *layer.parameters()]

    def gradients():
        both = layer(x, edge_index, *attr, return_attention_weights=True)
        return torch.autograd.grad(both[0].sin().sum() + both[1][1].square().sum(), leaves, allow_unused=True)

    ours = gradients()
    gnnfast.disable()
    theirs = gradients()
    gnnfast.enable()
    tolerance = 1e-4 if dtype is torch.float32 else 1e-9
    pairs = [(found, expected), (alpha, coefficients), (looped, listed), *zip(ours, theirs)]
    scale = max(float(e.abs().max()) for _, e in pairs[3:] if e is not None)
    for f, e in pairs:  # some gradients are 0 but for rounding
        assert e is None or relative_error(f, e) < tolerance or float((f - e).abs().max()) < tolerance * scale


def test_sizes_that_are_not_those_of_the_features(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATConv(F, 5).to(device)
    for size in ((n, n + 1), (n - 1, n), (n, n, n)):
        assert _same(lambda size=size: layer(x, edge_index, size=size))


def test_coefficients_after_dropout(device):
    """GATv2Conv returns those that it has dropped, and sums the same."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATv2Conv(F, 5, dropout=0.5, bias=False).to(device)
    out, (looped, alpha) = layer(x, edge_index, return_attention_weights=True)
    messages = layer.lin_l(x)[looped[0]] * alpha
    assert 0.2 < (alpha == 0).float().mean() < 0.8
    assert relative_error(out, torch.zeros_like(out).index_add(0, looped[1], messages)) < 1e-5


def test_transformer_with_edge_features_and_weights(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = (torch.randn(m, k, device=device, dtype=torch.float64) for m, k in ((n, F), (edge_index.shape[1], 3)))
    edge_index = edge_index.to(device)
    layer = nn.TransformerConv(F, 5, heads=2, edge_dim=3).double()
    layer.lin_edge.register_forward_hook(lambda module, inputs, out: 2 * out)
    report = compare(layer, x, edge_index, attr)
    assert ("gathers and sum", "edge features are added to keys and values") in {(k, why) for _, k, why in report.kernels}
    layer = nn.TransformerConv(F, 5, heads=2).to(device, torch.float64)
    found = layer(x, edge_index, return_attention_weights=True)
    gnnfast.disable()
    expected = layer(x, edge_index, return_attention_weights=True)
    gnnfast.enable()
    assert found[1][0] is edge_index and relative_error(found[1][1], expected[1][1]) < 1e-5
    assert layer._alpha is None


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
    others = {"in one operation"} if device.type == "cpu" else set()
    assert {kernel for _, kernel, _ in gnnfast.report().kernels} == others


def _same(run):
    """Whether a function returns or raises the same with gnnfast and without."""
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        try:
            results.append(run())
        except Exception as error:
            results.append(type(error))
    gnnfast.enable()
    found, expected = results
    return found == expected if isinstance(expected, type) else relative_error(found, expected) < 1e-5


class Updater(nn.GATConv):
    def edge_updater(self, *args, **kwargs):
        return super().edge_updater(*args, **kwargs) * 2


def test_parts_that_give_something_else(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATConv((F, F), 4, heads=2).to(device)
    layer.lin_src.register_forward_hook(lambda module, inputs, out: out * 2)
    layer((x, x), edge_index)
    assert _same(lambda: layer((x, x), edge_index))
    if device.type == "cpu":  # on a GPU PyG itself ends in a device-side assertion
        layer.lin_src.register_forward_hook(lambda module, inputs, out: out[:3])
        assert _same(lambda: layer((x, x), edge_index))
    layer = nn.GATConv(F, 4).to(device)
    layer.att_dst = torch.nn.Parameter(layer.att_dst.detach().double())
    assert _same(lambda: layer(x, edge_index))
    for option, value in (("dropout", 1.5), ("negative_slope", "0.2")):
        layer = nn.GATConv(F, 4).to(device)
        setattr(layer, option, value)
        assert _same(lambda layer=layer: layer(x, edge_index))
    layer = Updater(F, 4).to(device)
    assert _same(lambda: layer(x, edge_index))


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

    assert _same(run)


def test_replaced_parts_of_softmax_and_loops(device, monkeypatch):
    from torch_geometric.utils import add_self_loops, loop, softmax

    edge_index, n, _ = GRAPHS["random"]()
    edge_index = edge_index.to(device)
    nn.GATConv(F, 5, add_self_loops=False).to(device)(torch.randn(n, F, device=device), edge_index)
    src = torch.randn(edge_index.shape[1], device=device)
    module = sys.modules["torch_geometric.utils._softmax"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "scatter", lambda t, index, dim, dim_size, reduce: t.new_full((dim_size,), 2.0))
        assert _same(lambda: softmax(src, edge_index[1], num_nodes=n))
    for _ in range(3):
        add_self_loops(edge_index)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "maybe_num_nodes", lambda *_, **__: 3)
        assert add_self_loops(edge_index)[0].shape[1] == edge_index.shape[1] + 3
    assert add_self_loops(edge_index)[0].shape[1] == edge_index.shape[1] + n


def test_inference_tensors(device):
    edge_index, n, _ = GRAPHS["random"]()
    layers = [nn.GATConv(F, 4).to(device), nn.TransformerConv(F, 4).to(device), nn.GATv2Conv(F, 4).to(device)]
    with torch.inference_mode():
        x, edge_index = torch.randn(n, F, device=device), edge_index.to(device).clone()
        for layer in layers:
            for _ in range(3):
                assert _same(lambda layer=layer: layer(x, edge_index))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv, nn.TransformerConv])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_that_are_new(name, make, loops, training, device):
    """Also where nodes have loops of their own. On a GPU neither a graph nor its loops make the host wait."""
    edge_index, num_src, num_dst = GRAPHS[name]()
    n = max(num_src, num_dst)
    options = {} if make is nn.TransformerConv else {"add_self_loops": loops}
    layer = make(F, 5, heads=3, **options).to(device, torch.float64).train(training)
    x = torch.randn(n, F, device=device, dtype=torch.float64)
    edge_index = edge_index.to(device)
    compare(layer, x, edge_index, tolerance=1e-9)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x, edge_index.clone()).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


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


@pytest.mark.parametrize("size", [1.0, 100.0, 1000.0])
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv, nn.TransformerConv])
def test_gradients_beside_a_row_of_large_features(make, size, device):
    """Coefficients are then near one, and gradients differences of what is large."""
    worst = {True: 0.0, False: 0.0}
    for seed in range(20):  # of one, either's error may be ten times the other's
        torch.manual_seed(seed)
        edge_index = torch.randint(0, 30, (2, 150), device=device)
        layer, x = make(F, 4, heads=3).to(device), torch.randn(30, F, device=device)
        x[3] *= size
        exact, weights = copy.deepcopy(layer).double(), torch.linspace(0.5, 1.5, 360, device=device).view(30, 12)

        def gradients(layer, x, weights=weights, edge_index=edge_index):
            x = x.clone().requires_grad_()
            return torch.autograd.grad((layer(x, edge_index) * weights.to(x.dtype)).sum(), [x, *layer.parameters()])

        gnnfast.disable()
        expected, results = gradients(exact, x.double()), {False: gradients(layer, x)}
        gnnfast.enable()
        results[True] = gradients(layer, x)
        for on, found in results.items():
            errors = [float((f - e).abs().max() / e.abs().max()) for f, e in zip(found, expected) if e.abs().max() > 1e-9]
            worst[on] = max(worst[on], *errors)
    assert worst[True] < 10 * worst[False] + 1e-6


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv, nn.TransformerConv])
def test_graphs_without_nodes(make, device):
    layer = make(F, 5, heads=3).to(device)
    assert layer(torch.randn(0, F, device=device), torch.empty(2, 0, dtype=torch.int64, device=device)).shape == (0, 15)


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


def test_a_dropout_that_is_none(device):
    edge_index, n, _ = GRAPHS["random"]()
    for make in (nn.GATConv, nn.GATv2Conv, nn.TransformerConv):
        layer = make(F, 5).to(device).eval()
        layer.dropout = 2.0
        with pytest.raises(ValueError, match="dropout probability"):
            layer(torch.randn(n, F, device=device), edge_index.to(device))


# ---- AGNNConv and FAConv -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"requires_grad": False}, {"add_self_loops": False}])
@pytest.mark.parametrize("name", GRAPHS)
def test_agnn(name, options, dtype, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    layer = nn.AGNNConv(**options)
    layer.beta.data.fill_(1.7)
    x = torch.randn(max(num_src, num_dst), F, device=device, dtype=dtype)
    report = compare(layer.to(dtype), x, edge_index.to(device), tolerance=1e-9 if dtype is torch.float64 else 1e-4)
    assert {kernel for place, kernel, _ in report.kernels if place == "pyg AGNNConv"} == {"attention"} and not report.fallbacks


def test_agnn_of_wide_features(device):
    """Wider than kernels hold on a GPU: products, softmax and sums, each by its own."""
    edge_index, n, _ = GRAPHS["random"]()
    compare(nn.AGNNConv().double(), torch.randn(n, 300, device=device, dtype=torch.float64), edge_index.to(device), tolerance=1e-9)


class _FA(torch.nn.Module):
    """FAConv with other first features."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, x_0, edge_index, *weight):
        return self.conv(x, x_0, edge_index, *weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.5}, {"cached": True}, {"add_self_loops": False}, {"eps": 0.0}, {"normalize": False}], ids=str
)
@pytest.mark.parametrize("name", ["random", "hub", "self_loops_and_duplicates", "no_edges", "isolated"])
def test_fa(name, options, training, dtype, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    layer = _FA(nn.FAConv(F, **options)).to(device, dtype).train(training)
    x, x_0 = (torch.randn(max(num_src, num_dst), F, device=device, dtype=dtype) for _ in range(2))
    weight = () if options != {"normalize": False} else (torch.rand(edge_index.shape[1], device=device, dtype=dtype),)
    report = compare(layer, x, x_0, edge_index.to(device), *weight, tolerance=1e-9 if dtype is torch.float64 else 1e-4)
    assert not report.fallbacks and not any("part" in kernel for _, kernel, _ in report.kernels)
    assert {kernel for place, kernel, _ in report.kernels if place == "pyg FAConv"} <= {"gas sum", "gar sum"}


@pytest.mark.parametrize("make", [nn.AGNNConv, lambda: _Initial(nn.FAConv(F, dropout=0.0))], ids=["AGNNConv", "FAConv"])
def test_simple_attention_twice_and_written_into(make, device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, layer = edge_index.to(device), make().to(device, torch.float64)
    x, results = torch.randn(n, F, device=device, dtype=torch.float64), []
    leaves = [x.requires_grad_(), *layer.parameters()]
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        grads = torch.autograd.grad(layer(x, edge_index).sin().sum(), leaves, create_graph=True)
        seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
        after = torch.autograd.grad(layer(x, edge_index).relu_().square().sum(), leaves)
        results.append([*grads, *seconds, *after])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-9 or e.norm() < 1e-12 for f, e in zip(*results))


def test_features_of_agnn_may_be_written_into(device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, layer = edge_index.to(device), nn.AGNNConv().to(device)

    def run():
        x = torch.linspace(-1, 1, n * F, device=device).view(n, F)
        out = layer(x, edge_index)
        x += out.detach()
        return torch.autograd.grad(out.square().sum(), layer.beta)[0]

    assert _same(run)


class _Initial(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, x.detach(), edge_index)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [nn.AGNNConv, lambda: _Initial(nn.FAConv(F))], ids=["AGNNConv", "FAConv"])
def test_simple_attention_of_16_bits(make, dtype, device):
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = make().to(device, dtype), torch.randn(n, F, device=device, dtype=dtype)
    edge_index = edge_index.to(device)
    found, exact = layer(x, edge_index), copy.deepcopy(layer).double()(x.double(), edge_index)
    gnnfast.disable()
    framework = relative_error(layer(x, edge_index), exact)
    gnnfast.enable()
    assert found.dtype == dtype and relative_error(found, exact) <= 1.2 * framework + 1e-12


class OtherAGNN(nn.AGNNConv):
    def message(self, x_j, x_norm_i, x_norm_j, index, ptr, size_i):
        return 2 * super().message(x_j, x_norm_i, x_norm_j, index, ptr, size_i)


def _propagates(layer):
    propagate = layer.propagate
    layer.propagate = lambda *args, **kwargs: 3 * propagate(*args, **kwargs)


CHANGES = {
    "subclass": lambda layer: setattr(layer, "__class__", OtherAGNN),
    "hook": lambda layer: layer.register_message_forward_hook(lambda module, inputs, out: 2 * out),
    "aggregation": lambda layer: layer.aggr_module.register_forward_hook(lambda module, inputs, out: 2 * out),
    "method": _propagates,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_user_changes_of_agnn_and_fa_runs(change, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    for layer, args in ((nn.AGNNConv().to(device), (x, edge_index)), (nn.FAConv(F).to(device), (x, x, edge_index))):
        if change == "subclass" and isinstance(layer, nn.FAConv):
            continue
        layer(*args)
        CHANGES[change](layer)
        assert _same(lambda layer=layer, args=args: layer(*args))
    assert any(kernel == "in parts" for _, kernel, _ in gnnfast.report().kernels)


def test_weights_of_fa_and_what_is_wrong_with_them(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.FAConv(F).to(device)
    assert _same(lambda: layer(x, x, edge_index, return_attention_weights=True)[1][1])
    assert _same(lambda: layer(x, x, edge_index, torch.rand(200, device=device)))
    assert _same(lambda: nn.FAConv(F, normalize=False).to(device)(x, x, edge_index))


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_small_graphs_that_are_new_are_left_with_edge_features(make, device, small):
    layer, x = make(F, 5, edge_dim=3).to(device).eval(), torch.randn(30, F, device=device)
    edge_index, attr = torch.randint(0, 30, (2, 200), device=device), torch.randn(200, 3, device=device)
    ran = []
    with torch.no_grad():
        for _ in range(3):
            gnnfast.clear_report()
            found = layer(x, edge_index, attr)
            ran.append("PyG's own" in {kernel for _, kernel, _ in gnnfast.report().kernels})
        gnnfast.disable()
        assert relative_error(found, layer(x, edge_index, attr)) < 1e-5
        gnnfast.enable()
    assert ran == [device.type == "cuda", False, False]


# ---- TransformerConv with edge features ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [3, 7])  # narrower than a head, and wider
@pytest.mark.parametrize("options", TRANSFORMERS)
@pytest.mark.parametrize("name", GRAPHS)
def test_transformer_of_edge_features(name, options, width, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    sizes = (max(num_src, num_dst), F), (edge_index.shape[1], width)
    x, attr = (torch.randn(size, device=device, dtype=torch.float64) for size in sizes)
    layer = nn.TransformerConv(F, 5, edge_dim=width, **TRANSFORMERS[options]).double()
    report = compare(layer, x, edge_index.to(device), attr, tolerance=1e-9)
    assert {kernel for place, kernel, _ in report.kernels if place == "pyg TransformerConv"} >= {"edge softmax"}
    assert not report.fallbacks and not any("part" in kernel for _, kernel, _ in report.kernels)


@pytest.mark.parametrize("make", [nn.TransformerConv, nn.GATConv, nn.GATv2Conv])
@pytest.mark.parametrize("width", [3, 7])
def test_edge_features_of_32_bits(width, make, device):
    edge_index, n, _ = GRAPHS["random"]()
    leaves = [torch.randn(m, k, device=device, requires_grad=True) for m, k in ((n, F), (edge_index.shape[1], width))]
    layer, edge_index, results = make(F, 5, heads=2, edge_dim=width).to(device), edge_index.to(device), []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        out = layer(leaves[0], edge_index, leaves[1])
        results.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, layer.lin_edge.weight])])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-5 for f, e in zip(*results))


@pytest.mark.parametrize("width", [3, 7])
def test_transformer_of_edge_features_of_pairs_twice(width, device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    x = [torch.randn(m, f, device=device, dtype=torch.float64) for m, f in ((num_src, F), (num_dst, 6))]
    attr = torch.randn(edge_index.shape[1], width, device=device, dtype=torch.float64)
    layer = nn.TransformerConv((F, 6), 5, heads=2, edge_dim=width).to(device, torch.float64)
    compare(_PairOfEdges(layer), *x, edge_index.to(device), attr, tolerance=1e-9)
    edge_index, leaves, results = edge_index.to(device), [*(t.requires_grad_() for t in (*x, attr)), *layer.parameters()], []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        grads = torch.autograd.grad(layer(tuple(x), edge_index, attr).sin().sum(), leaves, create_graph=True)
        seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, allow_unused=True)
        results.append([*grads, *(g for g in seconds if g is not None)])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-8 or e.norm() < 1e-12 for f, e in zip(*results))


def test_edges_that_change_and_what_is_not_served_of_them(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = torch.randn(n, F, device=device), torch.randn(edge_index.shape[1], 3, device=device)
    edge_index = edge_index.to(device)
    for layer in (make(F, 5, edge_dim=3).to(device) for make in (nn.TransformerConv, nn.GATConv, nn.GATv2Conv)):
        for _ in range(2):
            for _ in range(3):
                assert _same(lambda layer=layer: layer(x, edge_index, attr))
            edge_index[:, :20] = edge_index[:, :20].flip(1).roll(1, 0)
        assert _same(lambda layer=layer: layer(x, edge_index, attr, return_attention_weights=True)[1][1])
        if device.type == "cpu":  # on a GPU PyG itself may end in a device-side assertion
            assert _same(lambda layer=layer: layer(x, edge_index, attr[:-1]))
            assert _same(lambda layer=layer: layer(x, edge_index))
            assert _same(lambda layer=layer: layer(x, edge_index, attr[:, :2]))


@pytest.mark.parametrize("make", ["AGNNConv", "FAConv", "TransformerConv", "GATConv", "GATv2Conv"])
def test_compiled_layers_are_pygs_own(make, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = torch.randn(n, F, device=device), torch.randn(edge_index.shape[1], 3, device=device)
    edge_index = edge_index.to(device)
    layer = {
        "AGNNConv": nn.AGNNConv,
        "FAConv": lambda: _Initial(nn.FAConv(F)),
        "TransformerConv": lambda: nn.TransformerConv(F, 5, edge_dim=3),
        "GATConv": lambda: nn.GATConv(F, 5, edge_dim=3),
        "GATv2Conv": lambda: nn.GATv2Conv(F, 5, edge_dim=3),
    }[make]().to(device)
    args = (x, edge_index) if make in ("AGNNConv", "FAConv") else (x, edge_index, attr)
    compiled = torch.compile(layer, backend="aot_eager")
    assert relative_error(compiled(*args), layer(*args)) < 1e-4


def test_edge_features_evaluated_and_then_trained(device):
    """What is kept of a graph that was met under inference_mode is good for training."""
    x, attr = torch.randn(30, F, device=device), torch.randn(200, 3, device=device)
    for make in (nn.TransformerConv, nn.GATConv, nn.GATv2Conv):
        edge_index, layer = GRAPHS["random"]()[0].to(device), make(F, 5, edge_dim=3).to(device)
        with torch.inference_mode():
            expected = layer(x, edge_index, attr)
            assert relative_error(layer(x, edge_index.clone(), attr), expected) < 1e-5
        out = layer(x, edge_index, attr)
        out.sum().backward()
        assert relative_error(out, expected) < 1e-5 and layer.lin_edge.weight.grad is not None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [nn.TransformerConv, nn.GATConv, nn.GATv2Conv])
def test_small_graphs_with_edge_features(make, training, device, small):
    """TransformerConv's are PyG's own; GATConv's and GATv2Conv's on a GPU where they are new and gradients gain nothing; and the
    numbers are PyG's in any case."""
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = (torch.randn(m, k, device=device, dtype=torch.float64) for m, k in ((n, F), (edge_index.shape[1], 3)))
    layer, edge_index = make(F, 5, heads=2, edge_dim=3).to(device, torch.float64), edge_index.to(device)
    new_to_gpu = int(device.type == "cuda")
    alone = {nn.TransformerConv: 3, nn.GATConv: new_to_gpu, nn.GATv2Conv: new_to_gpu * (not training)}[make]
    with torch.set_grad_enabled(training):
        layer(x, edge_index.clone(), attr)  # calls are left alone of a class that was served before
        for nth in range(3):
            gnnfast.clear_report()
            found = layer(x, edge_index, attr)
            kernels = {kernel for place, kernel, _ in gnnfast.report().kernels if place == f"pyg {make.__name__}"}
            assert (kernels == {"PyG's own"}) == (nth < alone)
            gnnfast.disable()
            assert relative_error(found, layer(x, edge_index, attr)) < 1e-11
            gnnfast.enable()


class Calling(torch.nn.Module):
    """What TorchScript runs is PyG's."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: Optional[torch.Tensor] = None) -> torch.Tensor:  # noqa: UP045 (TorchScript)
        return self.conv(x, edge_index, edge_attr)


@pytest.mark.parametrize("edge_dim", [None, 3])
def test_next_to_no_edges_are_as_torchscript_has_them(edge_dim, small):
    """Also those of the first call of a class, by another forward than the layer's too."""
    x, edge_index = torch.randn(4, F), torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
    rest = () if edge_dim is None else (torch.randn(4, edge_dim),)

    class Own(nn.TransformerConv):
        def forward(self, x, edge_index, edge_attr=None):
            return super().forward(x, edge_index, edge_attr) * 1.0

    torch.manual_seed(0)
    conv = nn.TransformerConv(F, 32, heads=2, beta=True, edge_dim=edge_dim)
    own = Own(F, 32, heads=2, beta=True, edge_dim=edge_dim)
    own.load_state_dict(conv.state_dict())
    script = torch.jit.script(Calling(conv))
    for _ in range(2):
        expected = script(x, edge_index, *rest)
        assert torch.equal(conv(x, edge_index, *rest), expected) and torch.equal(own(x, edge_index, *rest), expected)
    more = torch.randint(0, 4, (2, 400))
    gnnfast.clear_report()
    conv(x, more, *(t[:1].expand(400, -1) for t in rest))
    kernels = {kernel for _, kernel, _ in gnnfast.report().kernels} - {"in one operation"}  # a softmax of the same bits
    assert (kernels == {"PyG's own"}) == (edge_dim is not None)
