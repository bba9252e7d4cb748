"""Calls in which nothing is to be gained run PyG's operations without what PyG does around them: the same bits, errors and
draws."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import without
from gnnfast.benchmarks import convs
from graphs import GRAPHS, relative_error
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn

import gnnfast
from gnnfast.dispatch import select
from gnnfast.lazy import rows
from gnnfast.pyg import as_written
from gnnfast.pyg import propagate as propagate_module

F = 8


@pytest.fixture(autouse=True)
def everything_is_few(small, monkeypatch):
    most = select.Small(1 << 40, 1 << 40)
    monkeypatch.setattr(select, "SMALL", dict.fromkeys(select.SMALL, most))
    monkeypatch.setattr(rows, "FEW", 1 << 40)
    monkeypatch.setattr(rows, "FEW_ON_CPU", 1 << 40)


@pytest.fixture
def written(monkeypatch):
    """The classes of layers whose calls ran so."""
    found = []

    def counted(module, *arguments):
        out = as_written.as_written(module, *arguments)
        if out is not NotImplemented:
            found.append(type(module).__name__)
        return out

    monkeypatch.setattr(propagate_module, "as_written", counted)
    return found


def results(layer, x, *arguments):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(3)
    out = layer(x, *arguments)
    grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None), torch.rand(1)]


def agrees(layer, x, *arguments, repeats=3, bits=True):
    layer = layer.to(x.device)
    copies = [layer, copy.deepcopy(layer)]
    found = [results(copies[0], x, *arguments) for _ in range(repeats)][-1]
    expected = without(lambda: [results(copies[1], x, *arguments) for _ in range(repeats)][-1])
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        exact = bits and not x.is_cuda  # where atomics add in any order
        assert torch.equal(a, b) if exact else relative_error(a, b) < 1e-4 or (a - b).norm() < 1e-6 * max(1, b.numel())


@pytest.mark.parametrize("graph", ["random", "no_edges", "isolated", "self_loops_and_duplicates", "hub"])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
def test_user_layers(device, written, graph, aggr):
    edge_index, *sizes = GRAPHS[graph]()
    n = max(sizes)

    class Written(nn.MessagePassing):
        def __init__(self):
            super().__init__(aggr=aggr)
            self.lin = torch.nn.Linear(2 * F + 1, 5)

        def forward(self, x, edge_index, attr):
            return self.propagate(edge_index, x=x, attr=attr, scale=2.0)

        def message(self, x_i, x_j, attr, index, size_i):
            assert size_i == n
            return torch.nn.functional.dropout(self.lin(torch.cat([x_i, x_j, attr], -1)), 0.3) + index.view(-1, 1) / size_i

        def update(self, inputs, x, scale):
            return torch.cat([scale * inputs, x], 1)

    x, attr = torch.randn(n, F, device=device), torch.randn(edge_index.shape[1], 1, device=device)
    agrees(Written(), x, edge_index.to(device), attr)
    assert "Written" in written


@pytest.mark.parametrize("graph", ["random", "no_edges", "isolated", "hub"])
@pytest.mark.parametrize("aggr", ["max", "min"])
def test_extrema_in_inference(device, written, graph, aggr):
    """Without a gradient PyG runs the same operation on both devices."""
    edge_index, *sizes = GRAPHS[graph]()
    x, edge_index = torch.randn(max(sizes), F, device=device), edge_index.to(device)
    layer = nn.EdgeConv(torch.nn.Linear(2 * F, 5), aggr=aggr).to(device)
    with torch.no_grad():
        for _ in range(3):
            found = layer(x, edge_index)
        assert written and torch.equal(found, without(lambda: layer(x, edge_index)))


def test_nodes_along_any_dimension(device):
    """ARMAConv's features are ``[K, N, F]``."""
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = nn.ARMAConv(F, 5, num_stacks=2).to(device), torch.randn(n, F, device=device)
    with torch.no_grad():
        layer(x, edge_index.to(device))
        gnnfast.clear_report()
        layer(x, edge_index.to(device))
        expected = without(lambda: layer(x, edge_index.to(device)))
    ran = {kernel for place, kernel, _ in gnnfast.report().kernels if place == "pyg ARMAConv"}
    assert ran == {"gas sum"} and relative_error(layer(x, edge_index.to(device)), expected) < 1e-6


@pytest.mark.parametrize("name", [name for name in convs.ALL if name != "SuperGATConv"])  # which draws by Python's generator
def test_every_layer(device, written, name):
    edge_index, n, _ = GRAPHS["random"]()
    torch.manual_seed(0)
    dtype = torch.float64 if name == "GPSConv" else torch.float32  # whose gradients are next to 0, of rows that it normalises
    layer = convs.ALL[name](16, 16).to(dtype)
    alone = name in WRITTEN
    agrees(layer, torch.randn(n, 16, device=device, dtype=dtype), edge_index.to(device), bits=alone)
    assert written or not alone


WRITTEN = ("CGConv", "LEConv", "NNConv", "SimpleConv")  # all of whose message passing is, as sums


class Doubled(nn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return x_i - 2 * x_j


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_flows_and_dtypes(device, written, flow, dtype):
    edge_index, n, _ = GRAPHS["random"]()
    x, layer = torch.randint(0, 9, (n, F), device=device).to(dtype), Doubled(flow=flow)
    for _ in range(3):
        found = layer(x, edge_index.to(device))
    assert torch.equal(found, without(lambda: layer(x, edge_index.to(device)))) and found.dtype == dtype
    assert written


def test_pairs_and_sizes(device, written):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    edge_index, layer = edge_index.to(device), nn.LEConv((F, 3), 5).to(device)
    src, dst = torch.randn(num_src, F, device=device), torch.randn(num_dst, 3, device=device)

    def step():
        for _ in range(3):
            out = layer((src, dst), edge_index)
        return out

    assert torch.allclose(step(), without(step), atol=1e-5) and written
    graph, src = nn.GraphConv((F, 3), 5).to(device), src.requires_grad_()

    def sized():
        for _ in range(3):
            out = graph((src, dst), edge_index, size=(num_src, num_dst))
        return out

    assert torch.allclose(sized(), without(sized), atol=1e-5) and "GraphConv" in written


class Made(nn.MessagePassing):
    """Asks for nothing but what PyG makes, of which ``size`` is one list for both functions."""

    def __init__(self, device):
        super().__init__()
        self.table = torch.randn(30, F, device=device)

    def forward(self, edge_index):
        return self.propagate(edge_index, size=(30, 30))

    def message(self, edge_index_j, size):
        size.append(7)
        return self.table[edge_index_j]

    def update(self, inputs, size):
        return inputs * len(size)


def test_arguments_that_pyg_makes(device, written):
    layer, edge_index = Made(device), GRAPHS["random"]()[0].to(device)
    for _ in range(3):
        found = layer(edge_index)
    assert written and torch.allclose(found, without(lambda: layer(edge_index)), atol=1e-5)


@pytest.mark.parametrize("x", ["two sizes", "too few nodes", "no features"])
def test_errors_are_those_of_pyg(x):
    class Summed(nn.MessagePassing):
        def forward(self, x, edge_index, size=None):
            return self.propagate(edge_index, x=x, size=size)

        def message(self, x_i, x_j):
            return x_i - 2 * x_j

    edge_index, n, _ = GRAPHS["random"]()
    layer = Summed()
    layer(torch.randn(n, F), edge_index)
    given = {
        "two sizes": (torch.randn(n, F), edge_index, (n, n + 1)),
        "too few nodes": (torch.randn(n // 2, F), edge_index),
        "no features": (None, edge_index),
    }[x]

    def message():
        with pytest.raises(Exception) as error:
            layer(*given)
        return type(error.value), str(error.value)

    assert message() == without(message)


def test_what_a_message_raises_is_raised_once():
    calls = []

    class Raising(nn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j, x_i):
            calls.append(1)
            if len(calls) > 2:
                raise IndexError("my own")
            return x_j * x_i

    edge_index, n, _ = GRAPHS["random"]()
    layer, x = Raising(), torch.randn(n, F)
    layer(x, edge_index)
    layer(x, edge_index)
    with pytest.raises(IndexError, match="my own"):
        layer(x, edge_index)
    assert len(calls) == 3


@pytest.mark.parametrize("size", [5, (4.0, 4.0), (True, True)])
def test_sizes_that_are_none(size):
    layer, x, edge_index = Doubled(), torch.randn(1, F), torch.zeros(2, 3, dtype=torch.int64)
    for _ in range(2):
        layer(x, edge_index)

    def found():
        try:
            return layer.propagate(edge_index, x=x, size=size).tolist()
        except Exception as error:
            return type(error), str(error)

    assert found() == without(found)


def test_a_message_may_change_the_aggregation(written):
    class Changing(nn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            self.aggr_module = nn.MaxAggregation()
            return x_i * x_j

    edge_index, n, _ = GRAPHS["random"]()
    layer, x = Changing(aggr="sum"), torch.randn(n, F)
    for _ in range(2):
        layer.aggr_module = nn.SumAggregation()
        found = layer(x, edge_index)
    assert written and torch.equal(found, without(lambda: layer(x, edge_index)))


def test_whoever_looks_is_seen(written, monkeypatch):
    """Hooks, and functions that were replaced."""
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = nn.LEConv(F, 5), torch.randn(n, F)
    for _ in range(2):
        layer(x, edge_index)
    assert written
    written.clear()
    seen = []
    handle = layer.register_message_forward_hook(lambda *_: seen.append(1))
    layer(x, edge_index)
    assert seen and not written
    handle.remove()
    layer(x, edge_index)
    assert written
    written.clear()
    monkeypatch.setattr(nn.MessagePassing, "aggregate", lambda self, inputs, index, ptr, dim_size: inputs.new_ones(dim_size, 5))
    assert not written and torch.equal(layer(x, edge_index), layer.lin3(x) + 1)


def test_a_layer_is_let_go_and_can_be_saved(tmp_path):
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = nn.LEConv(F, 5), torch.randn(n, F)
    layer(x, edge_index)
    key = id(layer)
    assert key in propagate_module._quiet
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert torch.equal(loaded(x, edge_index), layer(x, edge_index))
    del layer
    assert key not in propagate_module._quiet


def test_a_layer_that_is_left_is_looked_at_again(device, monkeypatch):
    """Where a graph is larger, or settings are others."""
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, layer, x = edge_index.to(device), nn.LEConv(F, F).to(device), torch.randn(n, F, device=device)
    most = edge_index.shape[1] * F * 4 * (rows.MANY_PASSES if device.type == "cuda" else 1)
    monkeypatch.setattr(select, "SMALL", dict.fromkeys(select.SMALL, select.Small(2 * most, 2 * most)))
    monkeypatch.setattr(select, "relative_bandwidth", lambda: 1.0)
    for name in ("FEW", "FEW_ON_CPU"):
        monkeypatch.setattr(rows, name, 0)

    def left():
        gnnfast.clear_report()
        layer(x, edge_index)
        return bool(gnnfast.report().fallbacks)

    assert left() and id(layer) in propagate_module._quiet and left()
    with gnnfast.override(kernel="gar"):
        assert not left()
    assert left() and id(layer) in propagate_module._quiet
    edge_index, few = edge_index.repeat(1, 200), edge_index
    assert not left()
    edge_index = few
    assert left()


def test_a_layer_that_is_left_is_looked_at_with_wider_features(device, monkeypatch):
    class Distances(nn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            return (x_j - x_i).abs()

    edge_index, n, _ = GRAPHS["random"]()
    edge_index, layer = edge_index.to(device), Distances()
    most = edge_index.shape[1] * F * 4 * (rows.MANY_PASSES if device.type == "cuda" else 1)
    monkeypatch.setattr(select, "SMALL", dict.fromkeys(select.SMALL, select.Small(most, most)))
    monkeypatch.setattr(select, "relative_bandwidth", lambda: 1.0)
    for name in ("FEW", "FEW_ON_CPU"):
        monkeypatch.setattr(rows, name, 0)

    def left(width):
        gnnfast.clear_report()
        layer(torch.randn(n, width, device=device), edge_index)
        return bool(gnnfast.report().fallbacks)

    assert left(1) and id(layer) in propagate_module._quiet and left(F)
    assert not left(8 * F)
    assert left(1)


def test_strict_says_so():
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = nn.LEConv(F, 5), torch.randn(n, F)
    layer(x, edge_index)
    with gnnfast.override(strict=True), pytest.raises(gnnfast.FallbackError, match="LEConv"):
        layer(x, edge_index)


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_checkpoints(device, aggr):
    """Between the forward pass and its repetition it is found out that no kernel is known."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)

    def step():
        leaf, layer = x.clone().requires_grad_(), Doubled(aggr=aggr)
        checkpoint(layer, leaf, edge_index, use_reentrant=False).square().sum().backward()
        return leaf.grad

    assert torch.allclose(step(), without(step), atol=1e-4)


def test_second_derivatives(written):
    edge_index, n, _ = GRAPHS["random"]()
    x, layer = torch.randn(n, F, dtype=torch.float64), nn.LEConv(F, 3).double()
    for _ in range(2):
        layer(x, edge_index)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, edge_index), x.requires_grad_()) and written


KEEPERS = {
    "SAGE": lambda: nn.SAGEConv(F, F),
    "Graph": lambda: nn.GraphConv(F, F),
    "GIN": lambda: nn.GINConv(torch.nn.Linear(F, F)),
    "LE": lambda: nn.LEConv(F, F),
    "LG": lambda: nn.LGConv(),
    "ResGated": lambda: nn.ResGatedGraphConv(F, F),
    "Hypergraph": lambda: nn.HypergraphConv(F, F),
}


def kept_bytes(out):
    """Bytes of what the nodes of autograd behind a tensor keep, each storage once."""
    found, behind, storages = set(), [out.grad_fn], {}
    while behind:
        node = behind.pop()
        if node is None or node in found:
            continue
        found.add(node)
        behind += [before for before, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved") and not name.startswith("_saved_tensors")]
        for value in (*(getattr(node, name) for name in names), *getattr(node, "saved_tensors", ())):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", KEEPERS)
def test_no_more_is_kept_for_the_backward_pass_than_by_pyg(name, device):
    n, edges = 30, 4000  # so that a row for each edge shows
    edge_index = torch.randint(0, n, (2, edges), generator=torch.Generator().manual_seed(5)).to(device)
    x, layer = torch.randn(n, F, device=device, requires_grad=True), KEEPERS[name]().to(device)
    layer(x, edge_index)
    found = kept_bytes(layer(x, edge_index))
    assert found <= without(lambda: kept_bytes(layer(x, edge_index))) + 16 * edges  # what sums divide by
