"""GATConv, GATv2Conv and TransformerConv against PyG's own."""

from __future__ import annotations

import copy

import pytest
import torch
from attention_layers import TRANSFORMERS, F, Pair, same, served
from comparison import compare
from graphs import GRAPHS, relative_error

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn

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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", [n for n in GRAPHS if n not in ("isolated", "bipartite", "no_edges", "one_edge", "hub")])
def test_graphs_and_options(name, options, training, device):
    edge_index, n, _ = GRAPHS[name]()
    layer = nn.GATConv(F, 5, **OPTIONS[options]).to(device, torch.float64).train(training)
    with gnnfast.override(dropout="framework"):  # the same masks
        report = compare(layer, torch.randn(n, F, device=device, dtype=torch.float64), edge_index.to(device), tolerance=1e-9)
    assert served(report) and not report.fallbacks


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("loops", [True, False])
def test_bipartite(name, loops, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    if loops and num_src != num_dst:
        edge_index = edge_index[:, (edge_index < min(num_src, num_dst)).all(0)]
    x = (torch.randn(m, f, device=device, dtype=torch.float64) for m, f in ((num_src, F), (num_dst, 6)))
    layer = nn.GATConv((F, 6), 5, heads=2, add_self_loops=loops).to(device, torch.float64)

    assert served(compare(Pair(layer), *x, edge_index.to(device), tolerance=1e-9))


def test_weights_are_the_users_own(device):
    """In the edge order that PyG has, in tensors that nobody else holds."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATConv(F, 5, heads=2).to(device)
    found = [layer(x, edge_index, return_attention_weights=True) for _ in range(2)][1]
    assert served(gnnfast.report())
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

    report = compare(Pair(layer), *x, edge_index.to(device), tolerance=1e-9)
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
        assert same(lambda size=size: layer(x, edge_index, size=size))


def test_coefficients_after_dropout(device):
    """GATv2Conv returns those that it has dropped, and sums the same."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATv2Conv(F, 5, dropout=0.5, bias=False).to(device)
    out, (looped, alpha) = layer(x, edge_index, return_attention_weights=True)
    messages = layer.lin_l(x)[looped[0]] * alpha
    assert 0.2 < (alpha == 0).float().mean() < 0.8
    assert relative_error(out, torch.zeros_like(out).index_add(0, looped[1], messages)) < 1e-5


def test_inference_tensors(device):
    edge_index, n, _ = GRAPHS["random"]()
    layers = [nn.GATConv(F, 4).to(device), nn.TransformerConv(F, 4).to(device), nn.GATv2Conv(F, 4).to(device)]
    with torch.inference_mode():
        x, edge_index = torch.randn(n, F, device=device), edge_index.to(device).clone()
        for layer in layers:
            for _ in range(3):
                assert same(lambda layer=layer: layer(x, edge_index))


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


def test_a_dropout_that_is_none(device):
    edge_index, n, _ = GRAPHS["random"]()
    for make in (nn.GATConv, nn.GATv2Conv, nn.TransformerConv):
        layer = make(F, 5).to(device).eval()
        layer.dropout = 2.0
        with pytest.raises(ValueError, match="dropout probability"):
            layer(torch.randn(n, F, device=device), edge_index.to(device))
