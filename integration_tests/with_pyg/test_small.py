"""Small graphs on a CPU: what is left to PyG where they are met first is not to be told from what is served, to the last bit."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from comparison import without
from gnnfast.benchmarks import convs
from graphs import GRAPHS, relative_error
from thresholds import tiny_on_cpu
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn
from torch_geometric.utils import spmm, to_torch_csr_tensor

import gnnfast
from gnnfast.dispatch import select
from gnnfast.lazy import rows
from gnnfast.pyg import listed, small, verdict

F = 6
SIZES = dict(select.SMALL)
SMALL = "too small to gain"

LAYERS = {
    "SAGEConv": lambda: nn.SAGEConv(F, 5),
    "SAGEConv max": lambda: nn.SAGEConv(F, 5, aggr="max"),
    "SAGEConv sum": lambda: nn.SAGEConv(F, 5, aggr="sum"),
    "GraphConv": lambda: nn.GraphConv(F, 5),
    "SimpleConv": lambda: nn.SimpleConv(aggr="min"),
    "TAGConv": lambda: nn.TAGConv(F, 5),
    "GatedGraphConv": lambda: nn.GatedGraphConv(F, 2),
    "LGConv": lambda: nn.LGConv(),
    "WLConvContinuous": lambda: nn.WLConvContinuous(),
    "EGConv": lambda: nn.EGConv(F, 4, num_heads=2),
}


@pytest.fixture(autouse=True)
def small_cpu(small, monkeypatch):
    """As they are where nothing is tested, but that of no graph everything is left, and that gradients of few edges are ours."""
    tiny_on_cpu(monkeypatch, -1)
    monkeypatch.setattr(listed, "FEW_IN_TRAINING", 0)


@pytest.mark.parametrize(("training", "inference"), [(True, False), (False, True), (False, False)])
def test_tiny_graphs_are_always_left(training, inference, monkeypatch):
    edge_index, n, _ = GRAPHS["random"]()
    x, layer, nbytes = torch.randn(n, F), nn.SimpleConv(), edge_index.shape[1] * F * 4
    nn.SimpleConv()(x, edge_index)
    tiny_on_cpu(monkeypatch, nbytes - (not training), nbytes - (not inference))
    for grad, left in ((True, training), (False, inference), (True, training)):
        with torch.set_grad_enabled(grad):
            for _ in range(3):
                found = layer(x, edge_index)
            assert is_left(lambda: layer(x, edge_index)) == left
            assert torch.equal(found, without(lambda: layer(x, edge_index)))


def test_a_layer_in_one_node_is_left(monkeypatch):
    tiny_on_cpu(monkeypatch, 1 << 40)
    edge_index, n, _ = GRAPHS["random"]()
    x, layer = torch.randn(n, F), nn.SAGEConv(F, 5)
    layer(x, edge_index)
    for grad in (False, True, False, True):
        with torch.set_grad_enabled(grad):
            assert is_left(lambda: layer(x, edge_index))


def test_a_maximum_is_no_sum_where_another_layer_of_its_class_is(monkeypatch):
    """What a class was found to be last says nothing of how another layer of it reduces."""
    tiny_on_cpu(monkeypatch, 1 << 40)
    monkeypatch.setitem(select.SMALL, "tiny extrema cpu", select.Small(-1, -1))
    monkeypatch.setitem(select.SMALL, "new extrema cpu", select.Small(-1, -1))
    edge_index, n, _ = GRAPHS["random"]()
    x, sums, maxima = torch.randn(n, F), nn.SimpleConv(aggr="sum"), nn.SimpleConv(aggr="max")
    for layer in (maxima, sums):
        layer(x, edge_index)
    for _ in range(2):
        assert is_left(lambda: sums(x, edge_index)) and not is_left(lambda: maxima(x, edge_index))


LARGEST = 60  # edges of 4 numbers


def test_what_is_known_to_be_few(device, monkeypatch):
    """Of a module decides as the rule does: not where edges are more, features wider, ids of another dtype, a kernel asked for, what
    is saved watched, or algorithms are to be deterministic on a GPU."""
    monkeypatch.setattr(select, "SMALL", dict.fromkeys(select.SMALL, select.Small(LARGEST * 16, LARGEST * 16)))
    monkeypatch.setattr(select, "relative_bandwidth", lambda: 1.0)
    edges, x = torch.randint(9, (2, 4 * LARGEST), device=device), torch.randn(9, 8, device=device)
    few, wide = edges[:, :LARGEST].contiguous(), x.requires_grad_()
    narrow, layer = wide[:, :4].detach().requires_grad_(), nn.SimpleConv()
    layer(narrow, few)
    assert all(is_left(lambda: layer(narrow, few)) for _ in range(3)) and small.bounds[id(layer)].width == 4
    assert not is_left(lambda: layer(narrow, edges)) and is_left(lambda: layer((narrow, narrow), few))
    for _ in range(2):
        assert not is_left(lambda: layer(wide, few)) and is_left(lambda: layer(wide, few[:, : LARGEST // 2]))
        assert is_left(lambda: layer(narrow, few))
    assert is_left(lambda: layer(narrow, few.int())) == (device.type == "cuda")  # torch's own gradients are wrong on a CPU
    with gnnfast.override(kernel="gar"):
        assert not is_left(lambda: layer(narrow, few))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not is_left(lambda: layer(narrow, few))
    assert is_left(lambda: layer(narrow, few))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), torch.no_grad():
        assert is_left(lambda: layer(narrow, few))
    torch.use_deterministic_algorithms(True)
    try:
        assert is_left(lambda: layer(narrow, few)) == (device.type == "cpu")
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_known_to_be_few_is_let_go(monkeypatch):
    tiny_on_cpu(monkeypatch, 1 << 40)
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = nn.SimpleConv(), torch.randn(n, F)
    for _ in range(2):
        layer(x, edge_index)
    key = id(layer)
    assert key in small.bounds
    del layer
    assert key not in small.bounds


def results(layer, x, edge_index, *arguments):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, edge_index, *arguments)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def places(call):
    gnnfast.clear_report()
    call()
    return {(kernel, reason) for _, kernel, reason in gnnfast.report().kernels}


def is_left(call):
    return all(reason == listed.WHY or (kernel == "PyG's own" and reason.startswith(SMALL)) for kernel, reason in places(call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("graph", ["random", "no_edges", "isolated", "self_loops_and_duplicates", "hub"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tiny", [False, True])
def test_no_call_differs_from_another(tiny, name, graph, dtype, monkeypatch):
    """The first call over a graph, later ones, and PyG's."""
    if tiny:
        tiny_on_cpu(monkeypatch, 1 << 40)
    edge_index, *sizes = GRAPHS[graph]()
    x, layer = torch.randn(max(sizes), F, dtype=dtype), LAYERS[name]().to(dtype)
    found = [results(layer, x, edge_index) for _ in range(3)]
    new = results(copy.deepcopy(layer), x, edge_index.clone())
    gnnfast.disable()
    expected = results(layer, x, edge_index)
    gnnfast.enable()
    for given in (*found, new):
        assert len(given) == len(expected)
        for nth, (a, b) in enumerate(zip(given, expected)):
            # Two parts make the gradient of features, which a layer in one node of autograd adds in another order.
            in_one = nth == 1 and isinstance(layer, nn.SAGEConv | nn.GraphConv)
            assert (
                torch.allclose(a, b, *((1e-5, 1e-4) if dtype is torch.float32 else (1e-12, 1e-11))) if in_one else torch.equal(a, b)
            )


MAXIMA = lambda: nn.SAGEConv(F, 5, aggr="max")  # noqa: E731  # which the layer asks of, and then its propagate()


@pytest.mark.parametrize("make", [LAYERS["SAGEConv"], LAYERS["SimpleConv"], LAYERS["GraphConv"], MAXIMA])
def test_graphs_are_served_from_the_second_call_on(make):
    edge_index, n, _ = GRAPHS["random"]()
    x, layer = torch.randn(n, F), make()
    layer(x, edge_index.clone())  # what the class computes is found out
    for _ in range(3):
        assert is_left(lambda: layer(x, edge_index.clone()))
    edges = edge_index.clone()
    assert is_left(lambda: layer(x, edges))
    assert not is_left(lambda: layer(x, edges))
    for _ in range(2):
        for _ in range(small.NEW_IN_A_ROW):  # a layer that meets graphs again is served on each
            assert not is_left(lambda: layer(x, edge_index.clone()))
        assert not is_left(lambda: layer(x, edges))
    for _ in range(small.NEW_IN_A_ROW):
        layer(x, edge_index.clone())
    assert is_left(lambda: layer(x, edge_index.clone())) and not is_left(lambda: layer(x, edges))  # until all are new for long
    assert is_left(lambda: make()(x, edge_index))


def test_changed_edges_are_new():
    edge_index, n, _ = GRAPHS["random"]()
    x, layer = torch.randn(n, F), nn.SimpleConv()
    nn.SimpleConv()(x, edge_index.clone())
    assert is_left(lambda: layer(x, edge_index))
    edge_index[0, 0] = 3
    assert is_left(lambda: layer(x, edge_index))
    assert not is_left(lambda: layer(x, edge_index))


def test_what_is_large_or_asked_for_is_served(monkeypatch):
    edge_index, n, _ = GRAPHS["random"]()
    x, layer = torch.randn(n, F), nn.SimpleConv()
    layer(x, edge_index.clone())
    for changes in ({"kernel": "gar"}, {"sample": "random"}):
        with gnnfast.override(**changes):
            assert not is_left(lambda: layer(x, edge_index.clone()))
    fewest = edge_index.shape[1] * F * 4
    for most, left in ((fewest, True), (fewest - 1, False)):
        monkeypatch.setitem(select.SMALL, "new sums cpu", select.Small(most, most))
        assert is_left(lambda: layer(x, edge_index.clone())) == left


def test_weights_that_are_trained_are_served():
    """Their gradients are sums over features, which kernels add in another order."""
    edge_index, n, _ = GRAPHS["random"]()
    x, layer, weight = torch.randn(n, F), nn.GCNConv(F, 5, normalize=False), torch.rand(edge_index.shape[1])
    layer(x, edge_index.clone(), weight)
    simple = nn.SimpleConv()
    assert is_left(lambda: simple(x, edge_index.clone(), weight))
    assert not is_left(lambda: simple(x, edge_index.clone(), weight.clone().requires_grad_()))


@pytest.mark.parametrize("name", ["SAGEConv", "SimpleConv"])
def test_checkpoints(name):
    """Between the forward pass and its repetition a graph has been met."""
    edge_index, n, _ = GRAPHS["random"]()
    layer = LAYERS[name]()
    layer(torch.randn(n, F), edge_index.clone())
    x = torch.randn(n, F, requires_grad=True)
    checkpoint(layer, x, edge_index, use_reentrant=False).sum().backward()
    found = x.grad.clone()
    x.grad = None
    layer(x, edge_index).sum().backward()
    assert torch.allclose(found, x.grad, atol=1e-5)


def test_traces_do_not_warn():
    edge_index, n, _ = GRAPHS["random"]()
    x, layer = torch.randn(n, F), nn.SAGEConv(F, 5)
    layer(x, edge_index)
    with warnings.catch_warnings():
        gnnfast.disable()
        warnings.simplefilter("always")
        with warnings.catch_warnings(record=True) as expected:
            torch.jit.trace(layer, (x, edge_index), check_trace=False)
        gnnfast.enable()
        with warnings.catch_warnings(record=True) as found:
            traced = torch.jit.trace(layer, (x, edge_index), check_trace=False)
    assert [str(w.message) for w in found] == [str(w.message) for w in expected]
    assert torch.equal(traced(x, edge_index), layer(x, edge_index))


def test_layers_are_let_go():
    from gnnfast.pyg.small import returning

    edge_index, n, _ = GRAPHS["random"]()
    layer, x = nn.SimpleConv(), torch.randn(n, F)
    for _ in range(3):
        layer(x, edge_index)
    key = id(layer)
    assert key in returning
    del layer
    assert key not in returning


def test_weights_that_are_new_in_each_call_are_not_kept():
    """As those that a layer makes in inference: PDNConv."""
    edge_index, n, _ = GRAPHS["random"]()
    attr, x = torch.rand(edge_index.shape[1], 3), torch.randn(n, F)
    layer = nn.PDNConv(F, 5, 3, 4).eval()
    with torch.no_grad():
        layer(x, edge_index, attr)
        before = len(gnnfast.cache.cache)
        found = layer(x, edge_index, attr)
        assert len(gnnfast.cache.cache) == before
        gnnfast.disable()
        assert torch.allclose(found, layer(x, edge_index, attr), atol=1e-6)
        gnnfast.enable()


@pytest.mark.parametrize("num_edges", [200, 3000])
@pytest.mark.parametrize("name", [name for name in convs.ALL if name != "SuperGATConv"])  # which draws by Python's generator
def test_the_first_steps_of_a_class_may_be_checkpointed(name, num_edges, device, monkeypatch):
    """Between the first forward pass and its repetition it is found out what the class computes."""
    for known in (verdict._verdicts, verdict._steps, verdict._refusals, verdict.served):
        known.clear()
    for where in SIZES:
        monkeypatch.setitem(select.SMALL, where, SIZES[where])
    monkeypatch.setattr(rows, "FEW_ON_CPU", 512)
    torch.manual_seed(0)
    edge_index, x = torch.randint(70, (2, num_edges)).to(device), torch.randn(70, 16).to(device)
    layer = convs.ALL[name](16, 16).to(device)
    copies = [layer, copy.deepcopy(layer)]

    def steps(layer):
        leaf = x.clone().requires_grad_()
        for _ in range(3):
            checkpoint(layer, leaf, edge_index, use_reentrant=False).square().sum().backward()
        return leaf.grad

    most = 0.1 if device.type == "cuda" else 1e-4  # GPSConv's gradients are next to 0: PyG's own differ by 0.03 in each run
    assert relative_error(steps(copies[0]), without(lambda: steps(copies[1]))) < most


# ---- parts of a layer that is left -----------------------------------------------------------------------------------------------
class Attending(nn.MessagePassing):
    """What no kernel computes, and calls what is patched."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, function=torch.abs)

    def message(self, x_i, x_j, index, size_i, function):
        if x_j.sum() == 0:
            raise ZeroDivisionError
        return spmm(torch.eye(len(index)).to_sparse_csr(), function(x_i - x_j)) * x_j


def watched(monkeypatch):
    """What the dispatcher of spmm is asked from now on is appended to; until gnnfast is switched off."""
    calls, name = [], "_gnnfast_dispatch_spmm"
    right = spmm.__globals__[name]
    monkeypatch.setitem(spmm.__globals__, name, lambda *arguments: (calls.append(1), right(*arguments))[1])
    return calls


def one_product():
    spmm(torch.eye(3).to_sparse_csr(), torch.ones(3, 1))


def test_parts_of_a_layer_that_is_left_are_not_asked(monkeypatch):
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = Attending(), torch.randn(n, F)
    for _ in range(2):
        layer(x, edge_index)
    expected, asked = without(lambda: layer(x, edge_index)), watched(monkeypatch)
    assert torch.equal(layer(x, edge_index), expected) and not asked
    one_product()
    assert len(asked) == 1
    monkeypatch.setattr(small, "MOST_ALONE", edge_index.numel() - 1)
    assert torch.equal(layer(x, edge_index), expected) and len(asked) > 1


def test_parts_are_asked_again_after_an_error(monkeypatch):
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = Attending(), torch.randn(n, F)
    for _ in range(2):
        layer(x, edge_index)
    asked = watched(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        layer(x * 0, edge_index)
    assert not asked
    one_product()
    assert asked


@pytest.mark.parametrize("left", [True, False])
def test_what_is_missing_is_missed_by_pyg(left, monkeypatch):
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = nn.SimpleConv(), torch.randn(n, F)
    tiny_on_cpu(monkeypatch, 1 << 20 if left else -1)
    for _ in range(3):
        layer(x, edge_index)
    monkeypatch.delattr("torch_geometric.nn.aggr.base.scatter")
    with pytest.raises(NameError, match="scatter"):
        layer(x, edge_index)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("make", [nn.SAGEConv, nn.GraphConv])
def test_small_matrices_are_multiplied_by_torch(make, reduce, monkeypatch):
    """Adjacency matrices in CSR, which its product takes as they are, have the same bits, over a new one and over one that is known."""
    edge_index, n, _ = GRAPHS["random"]()
    x, layer = torch.randn(n, F), make(F, 5, aggr=reduce)
    matrix, entries = to_torch_csr_tensor(edge_index, size=(n, n)), edge_index.shape[1]
    for grad in (True, False):
        for most, left in ((-1, False), (entries * (64 if grad else 4 * F), True)):
            monkeypatch.setitem(select.SMALL, "adjacency cpu", select.Small(most, most))
            with torch.set_grad_enabled(grad):
                found = [
                    results(layer, x, adjacency) if grad else [layer(x, adjacency)]
                    for adjacency in (matrix, matrix.clone(), matrix)
                ]
                expected = without(lambda grad=grad: results(layer, x, matrix) if grad else [layer(x, matrix)])
                kernels = {(kernel, reason) for place, kernel, reason in _kernels(lambda: layer(x, matrix)) if place == "pyg spmm"}
            assert len(kernels) == 1 and (kernels == {("PyG's own", SMALL)}) == left
            for tensors in found:
                assert all(
                    torch.equal(a, b) if left else relative_error(a, b) < 1e-5 for a, b in zip(tensors, expected, strict=True)
                )


def _kernels(call):
    gnnfast.clear_report()
    call()
    return gnnfast.report().kernels
