"""Layers on a graph that is new, whose normalisation is one operation, and GIN on small graphs: PyG's results, and what users see."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import compare, run
from graphs import relative_error
from thresholds import tiny_on_cpu
from torch.utils.checkpoint import checkpoint

import gnnfast
from gnnfast.cache import cache
from gnnfast.graph import Graph

pyg = pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn  # noqa: E402
from torch_geometric.nn.conv.gcn_conv import gcn_norm  # noqa: E402

F = 8
LAYERS = {
    "GCNConv": lambda: nn.GCNConv(F, 5),
    "GCNConv improved": lambda: nn.GCNConv(F, 5, improved=True),
    "GCNConv no loops": lambda: nn.GCNConv(F, 5, add_self_loops=False),
    "GCNConv not normalised": lambda: nn.GCNConv(F, 5, normalize=False),
    "GCNConv target_to_source": lambda: nn.GCNConv(F, 5, flow="target_to_source"),
    "GCNConv mean": lambda: nn.GCNConv(F, 5, aggr="mean"),
    "GCNConv max": lambda: nn.GCNConv(F, 5, aggr="max"),
    "SGConv": lambda: nn.SGConv(F, 5),
    "SGConv K=3": lambda: nn.SGConv(F, 5, K=3),
    "SSGConv": lambda: nn.SSGConv(F, 5, alpha=0.1, K=2),
    "SSGConv mean": lambda: nn.SSGConv(F, 5, alpha=0.1, K=2, aggr="mean"),
    "TAGConv": lambda: nn.TAGConv(F, 5),
    "APPNP": lambda: nn.APPNP(K=3, alpha=0.1),
    "APPNP dropout": lambda: nn.APPNP(K=3, alpha=0.1, dropout=0.5),
    "LGConv": lambda: nn.LGConv(),
    "MixHopConv": lambda: nn.MixHopConv(F, 5),
}
# name -> (edges, number of nodes)
GRAPHS = {
    "no edges": ([], 3),
    "isolated": ([(0, 5), (5, 2)], 9),  # and ids that end before the nodes
    "all loops": ([(i, i) for i in range(4)], 4),
    "duplicate loops": ([(1, 1), (0, 1), (1, 1), (2, 0), (1, 1), (2, 2)], 4),
    "hub": ([(i, 0) for i in range(1, 300)] + [(0, 7), (0, 0)], 300),
}
WEIGHTS = {"none": None, "positive": [0.5, 2.0, 1.5], "zero": [0.0, 1.0, 0.0], "negative": [-1.0, 0.25, -0.5]}
OF_THE_LAYER = "pyg gcn_norm", "in one operation", "for sums that nobody else sees"


def graph_of(name, device, index=torch.int64):
    edges, nodes = GRAPHS[name]
    return torch.tensor(edges, dtype=index, device=device).view(-1, 2).t().contiguous(), nodes


def weights_of(kind, edge_index):
    """By edge; on a GPU by node, since PyG takes the weight of any of several loops there: torch leaves it open which is written."""
    values = WEIGHTS[kind]
    by = edge_index[1].tolist() if edge_index.is_cuda else range(edge_index.shape[1])
    return None if values is None else torch.tensor([values[e % 3] for e in by], dtype=torch.float64, device=edge_index.device)


class _Weighted(torch.nn.Module):
    """Constant weights, which :func:`compare` would differentiate."""

    def __init__(self, layer, weight):
        super().__init__()
        self.layer, self.weight = layer, weight

    def forward(self, x, edge_index):
        return self.layer(x, edge_index) if self.weight is None else self.layer(x, edge_index, self.weight)


def both(call):
    """What ``call`` returns, or the error that it raises, with gnnfast and without."""

    def result():
        try:
            return call()
        except Exception as error:
            return error

    found = result()
    gnnfast.disable()
    try:
        return found, result()
    finally:
        gnnfast.enable()


def compare_index(layer, x, edge_index, repeats):
    """As PyG's; over int32, of which torch's own scatter has wrong gradients, as PyG's over int64."""
    if edge_index.dtype == torch.int64:
        return compare(layer, x, edge_index, tolerance=1e-12, repeats=repeats)
    found = run(copy.deepcopy(layer), x, edge_index, repeats=repeats)
    gnnfast.disable()
    try:
        expected = run(layer, x, edge_index.long(), repeats=repeats)
    finally:
        gnnfast.enable()
    for f, e in zip(found, expected):
        assert (f is None) == (e is None) and (e is None or relative_error(f, e) < 1e-12 or (f - e).norm() < 1e-14 * e.numel())
    return gnnfast.report()


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_as_pyg(name, graph, kind, index, device):
    edge_index, nodes = graph_of(graph, device, index)
    x = torch.randn(nodes, F, dtype=torch.float64, device=device)
    layer = _Weighted(LAYERS[name]().double(), weights_of(kind, edge_index))
    report = compare_index(layer.to(device), x, edge_index, repeats=2)
    in_one = {"GCNConv not normalised", "GCNConv mean", "GCNConv max", "SSGConv mean", "APPNP dropout"}.isdisjoint([name])
    if index == torch.int64:
        assert (OF_THE_LAYER in report.kernels) == in_one


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_features_that_are_not_finite(kind, value, device):
    edge_index, nodes = graph_of("duplicate loops", device)
    x = torch.randn(nodes, F, dtype=torch.float64, device=device)
    x[1, 0], x[2, 1] = value, value
    layer = nn.SGConv(F, 5).double().to(device)
    layer.lin = torch.nn.Identity()
    weight = weights_of(kind, edge_index)
    found, expected = both(lambda: layer(x, edge_index, weight))
    assert relative_error(found, expected) < 1e-12
    conv = nn.GCNConv(F, 5).double().to(device)
    found, expected = both(lambda: conv(x, edge_index, weight))
    assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype, device):
    edge_index, x = torch.randint(0, 30, (2, 90), device=device), torch.randn(30, F, device=device)
    layer = nn.GCNConv(F, 5).to(device)
    expected = layer(x, edge_index)
    found = copy.deepcopy(layer).to(dtype)(x.to(dtype), edge_index.clone())
    assert found.dtype == dtype and relative_error(found, expected) < {torch.float32: 1e-6, torch.float16: 4e-3}.get(dtype, 3e-2)


def test_one_operation_for_a_graph_and_all_layers(device):
    """And none of those that wait for the device."""
    layers = [nn.GCNConv(F, F).to(device), nn.GCNConv(F, F).to(device), nn.SGConv(F, F, K=2).to(device), nn.APPNP(2, 0.1)]
    x = torch.randn(30, F, device=device)

    def step(edge_index):
        for layer in layers:
            layer(x, edge_index).sum()

    step(torch.randint(0, 30, (2, 90), device=device))
    edge_index = torch.randint(0, 30, (2, 90), device=device)
    with torch.profiler.profile() as profile:
        step(edge_index)
        step(edge_index)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("gnnfast::gcn_norm_listed" if device.type == "cpu" else "gnnfast::gcn_norm_coo") == 1
    assert not {"aten::nonzero", "aten::index", "aten::scatter_add_", "aten::item"} & calls.keys()


@pytest.mark.parametrize("weighted", [True, False])
def test_users_see_pygs_loops(weighted, device):
    edge_index, nodes = graph_of("duplicate loops", device)
    weight = torch.rand(6, device=device) if weighted else None
    x, layer, cached = torch.randn(nodes, F, device=device), nn.GCNConv(F, 5).to(device), nn.GCNConv(F, 5, cached=True).to(device)
    layer(x, edge_index, weight)
    cached(x, edge_index, weight)
    arguments = (edge_index, weight, nodes, False, True, "source_to_target", torch.float32)
    for _ in range(2):
        found, expected = both(lambda: gcn_norm(*arguments))
        for f, c, e in zip(found, cached._cached_edge_index, expected):
            assert torch.equal(f, e) and torch.equal(c, e)
        layer(x, edge_index, weight)


def test_changes_are_followed(device):
    edge_index, nodes = graph_of("duplicate loops", device)
    weight, x, layer = torch.rand(6, device=device), torch.randn(nodes, F, device=device), nn.GCNConv(F, 5).to(device)
    weight[[2, 4]] = weight[0].clone()  # of loops of one node
    for change in (
        lambda: None,
        lambda: weight.mul_(2),
        lambda: edge_index.copy_(edge_index.flip(0)),
        lambda: weight.requires_grad_(),
    ):
        change()
        found, expected = both(lambda: layer(x, edge_index, weight))
        assert relative_error(found, expected) < 1e-6


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("kind", ["positive", "zero"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_weights_that_require_a_gradient(graph, kind, flow, loops, device):
    edge_index, nodes = graph_of(graph, device)
    x, weight = torch.randn(nodes, F, dtype=torch.float64, device=device), weights_of(kind, edge_index)
    layer = nn.GCNConv(F, 5, improved=True, add_self_loops=loops, flow=flow).double()
    for _ in range(2):
        compare(layer, x, edge_index, weight, tolerance=1e-12)
    for number in (nodes, None):
        check_users_own(edge_index, weight, number, True, loops, flow, torch.float32)


def check_users_own(edge_index, weight, *arguments):
    """``gcn_norm`` as a user calls it, of weights that require a gradient; PyG finds the number of nodes if that is ``None``."""

    def users():
        leaf = weight.clone().requires_grad_()
        edges, normed = gcn_norm(edge_index, leaf, *arguments)
        (first,) = torch.autograd.grad(normed.square().sum(), leaf, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), leaf)[0] if leaf.numel() else first
        return edges, normed, first, second

    found, expected = both(users)
    assert torch.equal(found[0], expected[0])
    for f, e in zip(found[1:], expected[1:]):
        assert relative_error(f.nan_to_num(7.0), e.nan_to_num(7.0)) < 1e-12
    found[0].zero_()  # the user's own
    assert torch.equal(gcn_norm(edge_index, weight.clone().requires_grad_(), *arguments)[0], expected[0])


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("graph", GRAPHS)
def test_weights_that_are_new_in_each_call(graph, loops, device):
    """As a network makes them of edge features. Nothing is kept of weights that are met once, but of the edges."""
    edge_index, nodes = graph_of(graph, device)
    on_gpu, held, ran = device.type == "cuda", [], []
    weights = [torch.rand(edge_index.shape[1], dtype=torch.float64, device=device) for _ in range(3)]
    for weight in (*weights, weights[-1], weights[-1]):
        gnnfast.clear_report()
        found, expected = both(lambda: gcn_norm(edge_index, weight, nodes, False, loops))  # noqa: B023
        assert torch.equal(found[0], expected[0]) and relative_error(found[1], expected[1]) <= (1e-12 if on_gpu else 0)
        ran.append([kernel for place, kernel, _ in gnnfast.report().kernels if place == OF_THE_LAYER[0]])
        held.append(cache.nbytes)
    undetermined = on_gpu and loops and graph == "duplicate loops"  # which of several weights counts there
    first = [] if undetermined else ["in one operation"]
    assert ran == [first, *[["remembered structure"]] * 2, *[["remembered"]] * 2]
    assert held[1] == held[2] <= held[3] == held[4]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("make", [nn.GCNConv, lambda *widths: nn.SGConv(*widths, K=2), nn.LGConv])
def test_layers_over_weights_that_are_new_in_each_call(make, graph, device):
    """The graph is kept with the edges, as every operation lists them."""
    edge_index, nodes = graph_of(graph, device)
    layer = make(F, 5).to(device) if make is not nn.LGConv else make()

    def check(dtype=torch.float64):
        layer.to(dtype)
        weight, x = torch.rand(edge_index.shape[1], dtype=dtype, device=device), torch.randn(nodes, F, dtype=dtype, device=device)
        if graph == "duplicate loops":
            weight.fill_(float(weight[0]))  # which of a node's counts is not determined on a GPU
        x.requires_grad_()

        def both_ways():
            out = layer(x, edge_index, weight)
            return out, *torch.autograd.grad(out.square().sum(), x)

        for f, e in zip(*both(both_ways)):
            assert relative_error(f, e) < (1e-12 if dtype == torch.float64 else 2e-2)

    for _ in range(3):
        check()
    graphs = sum(isinstance(value, Graph) for value in cache.values)
    for dtype in (torch.float64, torch.float16, torch.float64):  # what the halves are normalised by lists loops otherwise
        check(dtype)
    assert sum(isinstance(value, Graph) for value in cache.values) <= graphs + (device.type == "cpu")
    edge_index.copy_(edge_index.flip(0))
    check()


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_negative_source_with_weights_counts_from_the_end(needs_grad):
    """As PyG has it on a CPU, in each call."""
    edge_index = torch.tensor([[-1, 0, 1], [1, 2, 0]])
    for _ in range(3):
        weight = torch.rand(3, requires_grad=needs_grad)
        found, expected = both(lambda: gcn_norm(edge_index, weight, 3))  # noqa: B023
        assert all(map(torch.equal, found, expected))


def test_sparse_scores_are_refused_as_by_pyg():
    scores, index = torch.eye(4).to_sparse(), torch.tensor([0, 0, 1, 1])
    found, expected = both(lambda: pyg.utils.softmax(scores, index, num_nodes=2))
    assert isinstance(expected, Exception) and type(found) is type(expected) and str(found) == str(expected)


def test_weights_that_require_a_gradient_wait_for_nothing(device):
    edge_index, nodes = graph_of("hub", device)
    weight, x, layer = (
        torch.rand(edge_index.shape[1], device=device),
        torch.randn(nodes, F, device=device),
        nn.GCNConv(F, 5).to(device),
    )
    weight.requires_grad_()
    layer(x, edge_index, weight)
    with torch.profiler.profile() as profile:
        layer(x, edge_index, weight).sum().backward()
    calls = {event.key for event in profile.key_averages()}
    assert "aten::index_select" in calls and not {"aten::nonzero", "aten::item"} & calls


def test_inference_then_training(device):
    edge_index, nodes = graph_of("hub", device)
    x, layer = torch.randn(nodes, F, device=device), nn.GCNConv(F, 5).to(device)
    with torch.inference_mode():
        expected = layer(x, edge_index)
    out = layer(x.requires_grad_(), edge_index)
    out.sum().backward()
    assert relative_error(out, expected) < 1e-6 and x.grad is not None


def test_deterministic_algorithms(device):
    """Weights are summed by atomics on CUDA, so PyG's own sums them; numbers of edges are not."""
    edge_index, nodes = graph_of("hub", device)
    x, layer = torch.randn(nodes, F, device=device), nn.GCNConv(F, 5).to(device)
    torch.use_deterministic_algorithms(True)
    try:
        for weight in (None, torch.rand(edge_index.shape[1], device=device)):
            gnnfast.clear_report()
            first = layer(x, edge_index.clone(), weight)
            in_one = OF_THE_LAYER in gnnfast.report().kernels
            assert in_one == (weight is None or device.type == "cpu")
            assert torch.equal(first, layer(x, edge_index.clone(), weight))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bad", [-1, 4])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", ["GCNConv", "SGConv", "APPNP", "GINConv"])
def test_ids_out_of_range(name, side, bad, device, small):
    if device.type != "cpu":
        pytest.skip("PyG's own leaves the device unusable")
    edge_index = torch.tensor([[0, 1, 2], [1, 1, 3]])
    edge_index[side, 1] = bad
    layer = LAYERS[name]() if name in LAYERS else nn.GINConv(torch.nn.Linear(F, 5))
    found, expected = both(lambda: layer(torch.randn(4, F), edge_index))
    assert isinstance(expected, Exception) and type(found) is type(expected) and str(found) == str(expected)


def test_a_graph_of_two_kinds_of_nodes(device):
    """Is none that could be normalised: PyG's own error."""
    layer, x = nn.GCNConv(F, 5).to(device), torch.randn(3, F, device=device)
    found, expected = both(lambda: layer((x, x), torch.zeros(2, 1, dtype=torch.int64, device=device)))
    assert isinstance(expected, ValueError) and type(found) is ValueError and str(found) == str(expected)


@pytest.mark.parametrize("training", [True, False])
def test_cached_edges_of_small_graphs(training, device, small):
    """With its normalised edges kept a layer is a product and a sum, which on a GPU PyG trains as fast."""
    edge_index, n = graph_of("hub", device)
    x = torch.randn(n, F, device=device)
    layer = nn.GCNConv(F, 5, cached=True).to(device)
    with torch.set_grad_enabled(training):
        first = layer(x, edge_index)
        for _ in range(2):
            gnnfast.clear_report()
            found = layer(x, edge_index)
            kernels = {kernel for _, kernel, _ in gnnfast.report().kernels}
            assert kernels == {"PyG's own"} if training and device.type == "cuda" else "PyG's own" not in kernels
            assert relative_error(found, first) < 1e-5
    gnnfast.disable()
    assert relative_error(found, layer(x, edge_index)) < 1e-5
    gnnfast.enable()


def test_cached_edges_under_checkpointing(device, small):
    """The repetition of the first forward pass finds edges that are kept, and must save the same."""
    edge_index, n = graph_of("hub", device)
    x = torch.randn(n, F, device=device, requires_grad=True)
    layer = nn.GCNConv(F, 5, cached=True).to(device)
    checkpoint(layer, x, edge_index, use_reentrant=False).sin().sum().backward()
    found = x.grad.clone()
    gnnfast.disable()
    (expected,) = torch.autograd.grad(layer(x, edge_index).sin().sum(), x)
    gnnfast.enable()
    assert relative_error(found, expected) < 1e-5


# ---- GIN on small graphs -------------------------------------------------------------------------------------------------------
def gin(**options):
    mlp = torch.nn.Sequential(torch.nn.Linear(F, F), torch.nn.ReLU(), torch.nn.Linear(F, 5))
    return nn.GINConv(mlp, eps=0.25, **options).double()


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("options", [{}, {"train_eps": True}, {"aggr": "mean"}, {"aggr": "max"}, {"flow": "target_to_source"}])
@pytest.mark.parametrize("graph", GRAPHS)
def test_small_gin_as_pyg(graph, options, index, device, small):
    edge_index, nodes = graph_of(graph, device, index)
    x, layer = torch.randn(nodes, F, dtype=torch.float64, device=device), gin(**options)
    for repeats in (1, 3):
        compare_index(layer.to(device), x, edge_index.clone(), repeats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_gin_rounds_as_pyg(dtype, device, small):
    if device.type != "cpu":
        pytest.skip("the order of atomic additions is not determined, in PyG either")
    edge_index, nodes = graph_of("hub", device)
    x, layer = torch.randn(nodes, F, dtype=dtype, device=device), gin(train_eps=True).to(dtype)
    found, expected = both(lambda: layer(x, edge_index.clone()))
    assert torch.equal(found, expected)


def test_small_gin_leaves_its_operands_alone(device, small):
    edge_index, nodes = graph_of("hub", device)
    x, layer = torch.randn(nodes, F, dtype=torch.float64, device=device), gin().to(device)
    before = x.clone(), edge_index.clone()
    layer(x, edge_index)
    layer(x, edge_index)
    assert torch.equal(x, before[0]) and torch.equal(edge_index, before[1])


def test_small_gin_is_served_by_kernels_again(device, small, monkeypatch):
    """On a CPU, from the second time on that a layer meets a graph; on a GPU they would not win, nor on a tiny one."""
    tiny_on_cpu(monkeypatch, -1)
    edge_index, nodes = graph_of("hub", device)
    x, layer = torch.randn(nodes, F, dtype=torch.float64, device=device, requires_grad=True), gin().to(device)
    kernels = []
    for _ in range(2):
        gnnfast.clear_report()
        layer(x, edge_index)
        kernels.append({k[1] for k in gnnfast.report().kernels if k[0] == "pyg GINConv"})
    assert kernels[0] == {"PyG's own"} and (kernels[1] == {"PyG's own"}) == (device.type == "cuda")


def test_small_gin_under_checkpointing(device, small):
    """The forward pass and its repetition save the same."""
    edge_index, nodes = graph_of("hub", device)
    x, layer = torch.randn(nodes, F, dtype=torch.float64, device=device, requires_grad=True), gin(train_eps=True).to(device)
    expected = torch.autograd.grad(layer(x, edge_index).sum(), x)
    found = torch.autograd.grad(checkpoint(layer, x, edge_index, use_reentrant=False).sum(), x)
    assert relative_error(*found, *expected) < 1e-12


def test_small_gin_twice_differentiated(device, small):
    edge_index, nodes = graph_of("duplicate loops", device)
    x, layer = torch.randn(nodes, F, dtype=torch.float64, device=device, requires_grad=True), nn.GINConv(torch.nn.Tanh()).double()
    layer = layer.to(device)
    torch.autograd.gradgradcheck(lambda t: layer(t, edge_index.clone()), x)


def test_errors_of_a_users_network_pass_through(device, small):
    """It is called once, and PyG's own path does not try again."""
    calls = []

    class Failing(torch.nn.Module):
        def forward(self, x):
            calls.append(x)
            raise IndexError("mine")

    edge_index, nodes = graph_of("hub", device)
    with pytest.raises(IndexError, match="mine"):
        nn.GINConv(Failing()).to(device)(torch.randn(nodes, F, device=device), edge_index)
    assert len(calls) == 1
