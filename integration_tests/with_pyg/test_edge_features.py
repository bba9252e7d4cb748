"""GINEConv, and layers of users whose message is the ReLU of a node's features plus an edge's, against PyG's own path."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from comparison import compare, run
from graphs import GRAPHS, relative_error
from thresholds import tiny_on_cpu
from torch import nn as tnn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn

import gnnfast
from gnnfast.dispatch import gates

WIDTH, EDGE = 12, 3
FUSED = "sum of relu(x_j + edge)"


class Method(nn.MessagePassing):
    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return (x_j + edge_attr).relu()


class Functional(Method):
    """As in the examples of the Open Graph Benchmark."""

    def message(self, x_j, edge_attr):
        return F.relu(x_j + edge_attr)

    def update(self, aggr_out):
        return aggr_out * 2


class OfTorch(Method):
    def message(self, edge_attr, x_j):
        return torch.relu(edge_attr + x_j)


def gine(**options):
    return nn.GINEConv(tnn.Linear(WIDTH, 5), **options)


LAYERS = {
    "GINEConv": (lambda: gine(), WIDTH),
    "GINEConv, edge_dim": (lambda: gine(edge_dim=EDGE, train_eps=True), EDGE),
    "method": (Method, WIDTH),
    "functional": (Functional, WIDTH),
    "of torch": (OfTorch, WIDTH),
    "to sources": (lambda: Method(flow="target_to_source"), WIDTH),
}


def arguments(name, graph, device, dtype=torch.float64, ids=torch.int64):
    edge_index, num_src, num_dst = GRAPHS[graph]()
    x = torch.randn(max(num_src, num_dst), WIDTH, dtype=dtype, device=device)
    return x, edge_index.to(device, ids), torch.randn(edge_index.shape[1], LAYERS[name][1], dtype=dtype, device=device)


def layer_of(name, device, dtype=torch.float64):
    return LAYERS[name][0]().to(device, dtype)


def kinds(report):
    return {kernel for _, kernel, _ in report.kernels}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, graph, device):
    report = compare(layer_of(name, device), *arguments(name, graph, device), tolerance=1e-9)
    assert FUSED in kinds(report) and not report.fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["GINEConv", "GINEConv, edge_dim"])
def test_dtypes(name, dtype, device):
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    report = compare(layer_of(name, device, dtype), *arguments(name, "random", device, dtype), tolerance=tolerance)
    assert FUSED in kinds(report)


def test_int32_ids(device):
    layer = layer_of("GINEConv", device)
    x, edge_index, edge_attr = arguments("GINEConv", "random", device)
    for ours, theirs in zip(run(layer, x, edge_index.int(), edge_attr), run(layer, x, edge_index, edge_attr)):
        assert torch.equal(ours, theirs)


def test_bipartite(device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    sides = [torch.randn(n, WIDTH, dtype=torch.float64, device=device) for n in (num_src, num_dst)]
    edge_attr = torch.randn(edge_index.shape[1], WIDTH, dtype=torch.float64, device=device)
    layer = layer_of("GINEConv", device)

    class Pair(tnn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, left, right, edge_index, edge_attr):
            return self.layer((left, right), edge_index, edge_attr)

    report = compare(Pair(layer), *sides, edge_index.to(device), edge_attr, tolerance=1e-9)
    assert FUSED in kinds(report)


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_other_reductions_are_not_taken_for_sums(aggr, device):
    report = compare(gine(aggr=aggr).double(), *arguments("GINEConv", "random", device), tolerance=1e-9)
    assert FUSED not in kinds(report)


def test_a_function_of_that_name_that_is_another(device, monkeypatch):
    layer, inputs = layer_of("functional", device), arguments("functional", "random", device)
    assert FUSED in kinds(compare(layer, *inputs, tolerance=1e-9))
    monkeypatch.setitem(globals(), "F", type("F", (), {"relu": staticmethod(torch.tanh)}))
    assert FUSED not in kinds(compare(layer, *inputs, tolerance=1e-9))
    monkeypatch.undo()
    monkeypatch.setattr(torch.nn.functional, "relu", lambda t: t.clamp(min=0.5))
    with torch.no_grad():
        x, edge_index, edge_attr = inputs
        messages = (x[edge_index[0]] + edge_attr).clamp(min=0.5)
        expected = torch.zeros_like(x).index_add(0, edge_index[1], messages) * 2
        torch.testing.assert_close(layer(x, edge_index, edge_attr), expected)


def test_shapes_that_broadcast(device):
    x, edge_index, _ = arguments("method", "random", device)
    for shape in ((200, 1), (1, WIDTH), (WIDTH,), ()):
        edge_attr = torch.randn(shape, dtype=torch.float64, device=device)
        report = compare(Method(), x, edge_index, edge_attr, tolerance=1e-9)
        assert FUSED not in kinds(report)


def test_a_linear_layer_that_gives_another_dtype(device):
    class Half(tnn.Module):
        calls = 0

        def forward(self, t):
            Half.calls += 1
            return t.float()

    layer = layer_of("GINEConv, edge_dim", device)
    layer.lin = Half()
    x, edge_index, edge_attr = arguments("GINEConv", "random", device)
    with torch.no_grad():
        found = layer(x, edge_index, edge_attr)
        assert Half.calls == 1
        with gnnfast.override(bounded="off"):
            gnnfast.disable()
            expected = layer(x, edge_index, edge_attr)
            gnnfast.enable()
    torch.testing.assert_close(found, expected)


def test_dimensions_that_do_not_match(device):
    x, edge_index, edge_attr = arguments("GINEConv, edge_dim", "random", device)
    with pytest.raises(ValueError, match="dimensionalities do not match"):
        layer_of("GINEConv", device)(x, edge_index, edge_attr)


def test_operands_may_be_written_into_afterwards(device):
    layer = layer_of("GINEConv", device)
    x, edge_index, edge_attr = arguments("GINEConv", "random", device)

    def grads():
        leaves = [t.clone().requires_grad_() for t in (x, edge_attr)]
        used = [t * 1 for t in leaves]
        out = layer.propagate(edge_index, x=(used[0], used[0]), edge_attr=used[1], size=None)
        for t in used:
            t.zero_()
        return torch.autograd.grad(out.square().sum(), leaves)

    found = grads()
    gnnfast.disable()
    expected = grads()
    gnnfast.enable()
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs)


def test_a_copy_and_second_derivatives(device):
    layer = copy.deepcopy(layer_of("GINEConv, edge_dim", device))
    x, edge_index, edge_attr = arguments("GINEConv, edge_dim", "self_loops_and_duplicates", device)
    torch.autograd.gradgradcheck(lambda x, e: layer(x, edge_index, e), (x.requires_grad_(), edge_attr.requires_grad_()))


@pytest.mark.parametrize("kind", ["GINE", "Transformer", "GIN", "plain"])
def test_small_layers_of_a_class_that_is_met_under_checkpointing(kind, device):
    class Plain(Method):
        def message(self, x_j, edge_attr):
            return (x_j + edge_attr).relu()

    class Transformer(nn.TransformerConv):
        def forward(self, x, edge_index, edge_attr):
            return super().forward(x, edge_index)

    class Gine(nn.GINEConv):
        pass

    class Gin(nn.GINConv):
        def forward(self, x, edge_index, edge_attr):
            return super().forward(x, edge_index)

    made = {
        "GINE": lambda: Gine(tnn.Linear(WIDTH, 5)),
        "Transformer": lambda: Transformer(WIDTH, 5),
        "GIN": lambda: Gin(tnn.Linear(WIDTH, 5)),
        "plain": Plain,
    }
    layer = made[kind]().double().to(device)
    x, edge_index, edge_attr = arguments("GINEConv", "random", device)
    x.requires_grad_()
    (found,) = torch.autograd.grad(checkpoint(layer, x, edge_index, edge_attr, use_reentrant=False).sum(), x)
    gnnfast.disable()
    (expected,) = torch.autograd.grad(layer(x, edge_index, edge_attr).sum(), x)
    gnnfast.enable()
    torch.testing.assert_close(found, expected)


# ---- small graphs --------------------------------------------------------------------------------------------------------------
FEW = "PyG's own"


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", ["GINEConv", "GINEConv, edge_dim"])
def test_small_graphs(name, graph, device, small, monkeypatch):
    tiny_on_cpu(monkeypatch, 1 << 19)
    x, edge_index, edge_attr = arguments(name, graph, device)
    report = compare(layer_of(name, device), x, edge_index, edge_attr, tolerance=1e-9)
    assert kinds(report) == {FEW} and not report.fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small_graphs_of_fewer_digits(dtype, device, small):
    x, edge_index, edge_attr = arguments("GINEConv, edge_dim", "random", device, dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    report = compare(layer_of("GINEConv, edge_dim", device, dtype), x, edge_index, edge_attr, tolerance=tolerance)
    assert kinds(report) == {FEW}


def test_what_small_graphs_do_not_take_is_pygs(device, small):
    """Pairs of features, other widths and dtypes, hooks on the layer of edge features, subclasses, autocast: results, errors and
    the calls of hooks are PyG's."""
    layer, called = layer_of("GINEConv, edge_dim", device, torch.float32), []
    x, edge_index, edge_attr = arguments("GINEConv, edge_dim", "random", device, torch.float32)

    def outcome(*args):
        called.clear()
        try:
            return *layer(*args).detach().double().flatten().tolist(), len(called)
        except Exception as error:
            return type(error), str(error)

    def same(*args):
        found = outcome(*args)
        gnnfast.disable()
        expected = outcome(*args)
        gnnfast.enable()
        return found == pytest.approx(expected, rel=1e-3, abs=1e-4) if isinstance(expected[0], float) else found == expected

    assert same((x, x), edge_index, edge_attr)
    assert same(x, edge_index, edge_attr[:, :2]) and same(x, edge_index, edge_attr[1:]) and same(x, edge_index, edge_attr.double())
    assert same(x, edge_index, None) and same(x[:, :5], edge_index, edge_attr)
    with torch.autocast(device.type, torch.bfloat16):
        assert same(x, edge_index, edge_attr)
    layer.lin.register_forward_hook(lambda *_: called.append(1))
    assert same(x, edge_index, edge_attr) and called == [1]
    layer = nn.GINEConv(tnn.Linear(WIDTH, 5)).to(device)
    assert same(x, edge_index, edge_attr)  # an error: as many edge features are needed
    assert same(x, edge_index, torch.randn(edge_index.shape[1], WIDTH, device=device))


# ---- features of edges that get no gradient, which a linear layer multiplies ----------------------------------------------------
class Constant(tnn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index, edge_attr):
        return self.conv(x, edge_index, edge_attr.detach())


class Perceptron(nn.MessagePassing):
    def __init__(self, aggr="sum", depth=EDGE):
        super().__init__(aggr=aggr)
        self.mlp = tnn.Sequential(tnn.Linear(2 * WIDTH + depth, 9), tnn.SiLU(), tnn.Linear(9, 4))

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        return self.mlp(torch.cat([x_i, edge_attr, x_j], -1))


MULTIPLIED = {
    "GINEConv": lambda: gine(edge_dim=EDGE),
    "GINEConv without a bias": lambda: without_bias(gine(edge_dim=EDGE)),
    "CGConv": lambda: nn.CGConv(WIDTH, EDGE, aggr="mean"),
    "ResGatedGraphConv": lambda: nn.ResGatedGraphConv(WIDTH, 5, edge_dim=EDGE),
    "perceptron": Perceptron,
}


def without_bias(layer):
    layer.lin.register_parameter("bias", None)
    return layer


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", MULTIPLIED)
def test_products_that_do_not_exist(name, graph, device):
    layer = Constant(MULTIPLIED[name]()).to(device, torch.float64)
    report = compare(layer, *arguments("GINEConv, edge_dim", graph, device), tolerance=1e-9)
    assert not report.fallbacks
    if graph == "random" and device.type == "cpu":
        assert kinds(report) <= {"gates, sum", "gates, mean"}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_products_that_do_not_exist_in_32_bits_and_second_derivatives(name, device):
    x, edge_index, edge_attr = arguments("GINEConv, edge_dim", "random", device, torch.float32)
    layer = Constant(MULTIPLIED[name]()).to(device)
    compare(layer, x, edge_index, edge_attr, tolerance=1e-5)
    layer, x, edge_attr = layer.double(), x.double().requires_grad_(), edge_attr.double()

    def second():
        (grad,) = torch.autograd.grad(layer(x, edge_index, edge_attr).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), [x, *layer.parameters()], allow_unused=True)

    found = second()
    gnnfast.disable()
    expected = second()
    gnnfast.enable()
    for f, e in zip(found, expected):
        assert (f is None) == (e is None) and (e is None or relative_error(f, e) < 1e-9 or e.norm() < 1e-12)


@pytest.mark.parametrize("name", MULTIPLIED)
def test_users_may_write_into_features_that_were_multiplied(name, device):
    x, edge_index, edge_attr = arguments("GINEConv, edge_dim", "random", device)
    layer = MULTIPLIED[name]().to(device, torch.float64)

    def run():
        given, h = edge_attr.clone(), x.clone()
        out = layer(h, edge_index, given)
        if name not in ("GINEConv", "GINEConv without a bias"):  # whose linear layer keeps theirs in PyG
            given.zero_()
        if name in ("CGConv", "perceptron"):  # and of others one keeps features
            h.zero_()
        return torch.autograd.grad(out.pow(2).sum(), list(layer.parameters()), allow_unused=True)

    found = run()
    gnnfast.disable()
    expected = run()
    gnnfast.enable()
    assert all(e is None or relative_error(f, e) < 1e-9 for f, e in zip(found, expected))


def test_wide_features_of_edges_and_other_layers_are_multiplied_before(device):
    x, edge_index, _ = arguments("GINEConv, edge_dim", "random", device)
    wide = torch.randn(edge_index.shape[1], gates.MOST_DEPTH + 1, dtype=torch.float64, device=device)
    compare(Constant(Perceptron(depth=wide.shape[1])).to(device, torch.float64), x, edge_index, wide, tolerance=1e-9)
    report = compare(Constant(gine(edge_dim=wide.shape[1])).to(device, torch.float64), x, edge_index, wide, tolerance=1e-9)
    assert FUSED in kinds(report)
    layer, seen = gine(edge_dim=EDGE).to(device, torch.float64), []
    layer.lin.register_forward_hook(lambda module, inputs, out: seen.append(out.shape) or 2 * out)
    compare(Constant(layer), *arguments("GINEConv, edge_dim", "random", device), tolerance=1e-9)
    assert seen
