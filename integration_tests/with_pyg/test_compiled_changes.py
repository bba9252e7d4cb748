"""Graphs, weights and models that change after they were compiled: nothing is compiled again, and the numbers are PyG's."""

from __future__ import annotations

import copy

import pytest
import torch
from compiling import F, check, compiled, expected, fresh, graph_of, is_served, step, traced  # noqa: F401
from graphs import relative_error

import gnnfast
from gnnfast import _native

pytest.importorskip("torch_geometric", reason="PyG is not installed")
if not _native.cpu.loaded:
    pytest.skip(_native.cpu.reason, allow_module_level=True)
from compiled_layers import LAYERS, NETS
from torch_geometric import nn
from torch_geometric.nn import aggr
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv max", "GATConv", "APPNP"])
def test_new_graphs_do_not_recompile(name, dynamic, device):
    layer = LAYERS[name]().double().to(device)
    model = compiled(layer, dynamic=dynamic)
    for i in range(5):
        n, edges = 40 + 7 * i, 300 + 31 * i
        x = torch.randn(n, F, dtype=torch.float64, device=device)
        edge_index = torch.randint(0, n, (2, edges), device=device)
        check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    assert traced() <= (2 if dynamic is None else 1) and is_served()


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_edges_changed_in_place(name, backend, device):
    layer = LAYERS[name]().double().to(device)
    x, edge_index, _ = graph_of("random", device)
    model = compiled(layer, backend=backend)
    for i in range(4):
        check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
        edge_index[:, i * 5 : i * 5 + 5] = i
    assert traced() == 1 and is_served()


@pytest.mark.parametrize("name", ["GCNConv", "GraphConv"])
def test_weights_changed_in_place(name, device):
    layer = LAYERS[name]().double().to(device)
    x, edge_index, weight = graph_of("random", device)
    model = compiled(layer, backend="inductor")
    for _ in range(4):
        check(step(model, layer, x, edge_index, weight), expected(layer, x, edge_index, weight))
        check(step(model, layer, x, edge_index, weight), expected(layer, x, edge_index, weight))
        weight.mul_(1.5)[:5].zero_()
    assert traced() == 1 and is_served()


class Computing(torch.nn.Module):
    """Edges and weights that exist within the compiled code only, in buffers that a compiler uses again."""

    def __init__(self, conv):
        super().__init__()
        self.convs = torch.nn.ModuleList([conv, copy.deepcopy(conv)])

    def forward(self, x, edge_index, weight):
        for i, conv in enumerate(self.convs):
            edges = (edge_index + i + 1) % x.shape[0]
            x = conv(x, edges, (weight * (i + 1)).sin() + 2)
            x = conv(x, edge_index, (weight * (i + 2)).cos() + 2)
        return x


@pytest.mark.parametrize("conv", [lambda: nn.GraphConv(F, F), lambda: nn.GCNConv(F, F)])
def test_computed_edges_and_weights(conv, device):
    net = Computing(conv()).double().to(device)
    x, edge_index, weight = graph_of("random", device)
    model = compiled(net, backend="inductor")
    wanted = expected(net, x, edge_index, weight)
    for _ in range(3):
        check(step(model, net, x, edge_index, weight), wanted)
    report = gnnfast.report()
    assert report.kernels and {reason for _, reason in report.fallbacks} == {
        "compiled: edge_index is computed within the compiled code"
    }


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_edges_written_within_the_code(backend, device):
    class Writing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.SAGEConv(F, F)

        def forward(self, x, edge_index):
            x = self.conv(x, edge_index)
            edge_index.copy_(edge_index.flip(0))
            return self.conv(x, edge_index)

    net = Writing().double().to(device)
    x, edge_index, _ = graph_of("random", device)
    model = compiled(net, backend=backend)
    with torch.no_grad():
        for _ in range(4):  # each turns the edges around
            gnnfast.disable()
            wanted = net(x, edge_index.clone())
            gnnfast.enable()
            before = edge_index.clone()
            assert relative_error(model(x, edge_index), wanted) < 1e-9
            assert torch.equal(edge_index, before.flip(0))


def test_checkpointed_parts(device):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.GCNConv(F, F), nn.SAGEConv(F, F)

        def forward(self, x, edge_index):
            x = torch.utils.checkpoint.checkpoint(self.first, x, edge_index, use_reentrant=False)
            moved = (edge_index + 1) % x.shape[0]
            return torch.utils.checkpoint.checkpoint(self.second, x, moved, use_reentrant=False)

    net = Net().double().to(device)
    x, edge_index, _ = graph_of("random", device)
    model = compiled(net)
    for _ in range(2):
        check(step(model, net, x, edge_index), expected(net, x, edge_index))


def test_options_and_modes_change(device):
    x, edge_index, _ = graph_of("self_loops_and_duplicates", device)
    layer = nn.GCNConv(F, 5).double().to(device)
    model = compiled(layer)
    for change in ({}, {"add_self_loops": False}, {"improved": True}, {"normalize": False}, {"training": False}):
        vars(layer).update(change)
        check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    with torch.no_grad():
        found = model(x, edge_index)
        assert not found.requires_grad and relative_error(found, layer(x, edge_index)) < 1e-9
    with torch.inference_mode():
        assert relative_error(model(x, edge_index), found) < 1e-9
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))


@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GATConv"])
def test_parts_change(name, device):
    """What is put into a layer after it was compiled runs."""
    x, edge_index, _ = graph_of("random", device)
    layer = LAYERS[name]().double().to(device)
    model = compiled(layer)
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    layer.message = {
        "SAGEConv": lambda x_j: x_j * 2,
        "GCNConv": lambda x_j, edge_weight: edge_weight.view(-1, 1) * x_j * 2,
        "GATConv": lambda x_j, alpha: alpha.unsqueeze(-1) * x_j * 2,
    }[name]
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    del layer.message
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    layer.aggr_module = nn.MaxAggregation()
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))


def test_cached_normalisation(device):
    """PyG keeps what the first call computed, whatever edges come later."""
    x, edge_index, _ = graph_of("random", device)
    layer, other = (nn.GCNConv(F, 5, cached=True).double().to(device) for _ in range(2))
    other.load_state_dict(layer.state_dict())
    model = compiled(layer)
    for edges in (edge_index, edge_index, edge_index.flip(0)):
        with torch.no_grad():
            found = model(x, edges)
            gnnfast.disable()
            wanted = other(x, edges)
            gnnfast.enable()
        assert relative_error(found, wanted) < 1e-9
    assert gnnfast.report().kernels


def test_switched_off_and_on(device):
    """Compiled code keeps its numbers; what is compiled while gnnfast is off holds none of its ops."""
    x, edge_index, _ = graph_of("random", device)
    net = NETS["GCN"]().double().to(device)
    model, wanted = compiled(net), expected(net, x, edge_index)
    check(step(model, net, x, edge_index), wanted)
    graphs = traced()
    gnnfast.disable()
    try:
        check(step(model, net, x, edge_index), wanted)
        torch._dynamo.reset()
        gnnfast.clear_report()
        check(step(compiled(net), net, x, edge_index), wanted)
        assert not gnnfast.report().kernels
    finally:
        gnnfast.enable()
    torch._dynamo.reset()
    check(step(compiled(net), net, x, edge_index), wanted)
    assert graphs and is_served()


class Writing(nn.MessagePassing):
    """Writes into what it has made of rows of one end, by ``write``."""

    def __init__(self, aggr, write):
        super().__init__(aggr=aggr)
        self.lin, self.write = torch.nn.Linear(F, F), write

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        y = self.lin(x_j)
        self.write(y)
        return y


WRITES = {
    "rows": lambda y: y[:10].zero_(),
    "an index": lambda y: y.__setitem__(slice(0, 10), 0),
    "relu_": lambda y: y.relu_(),
    "relu in place": lambda y: torch.nn.functional.relu(y, inplace=True),
    "masked": lambda y: y.masked_fill_(y.detach() < 0, 0.5),
}


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_message_writes_is_kept(write, aggr, device):
    layer = Writing(aggr, WRITES[write]).double().to(device)
    x, edge_index, _ = graph_of("random", device)
    with gnnfast.override(kernel="gar"):
        check(step(compiled(layer), layer, x, edge_index), expected(layer, x, edge_index))


def _twice(part):
    def change(layer):
        part(layer).forward = lambda *args, **kwargs: 2 * type(part(layer)).forward(part(layer), *args, **kwargs)

    return change


def _with_bias(name):
    def change(layer):
        lin = getattr(layer, name)
        lin.bias = torch.nn.Parameter(torch.ones_like(lin.weight[:, 0]))

    return change


def _filled(layer):
    layer._cached_edge_index = layer.given


class Scaled(torch.nn.Module):
    """A linear layer that has no bias by that name."""

    def __init__(self, lin):
        super().__init__()
        self.inner = lin

    def forward(self, x):
        return 3 * self.inner(x)


def _scaled(name):
    return lambda layer: setattr(layer, name, Scaled(getattr(layer, name)))


CHANGED = {
    "GCNConv, another product": (lambda: nn.GCNConv(F, 5), _scaled("lin")),
    "SAGEConv, another product": (lambda: nn.SAGEConv(F, 5), _scaled("lin_l")),
    "GCNConv, bias": (lambda: nn.GCNConv(F, 5), _with_bias("lin")),
    "GCNConv, product": (lambda: nn.GCNConv(F, 5), _twice(lambda layer: layer.lin)),
    "GCNConv, kept edges": (lambda: nn.GCNConv(F, 5), _filled),
    "SGConv, product": (lambda: nn.SGConv(F, 5), _twice(lambda layer: layer.lin)),
    "SAGEConv, aggregation": (lambda: nn.SAGEConv(F, 5), _twice(lambda layer: layer.aggr_module)),
    "AGNNConv, aggregation": (nn.AGNNConv, _twice(lambda layer: layer.aggr_module)),
    "TransformerConv, aggregation": (lambda: nn.TransformerConv(F, 5), _twice(lambda layer: layer.aggr_module)),
    "TransformerConv, loops": (lambda: nn.TransformerConv(F, 5), lambda layer: setattr(layer, "add_self_loops", True)),
    "GATv2Conv, scores": (
        lambda: nn.GATv2Conv(F, 5),
        lambda layer: setattr(layer, "edge_updater", lambda *args, **kwargs: 3 * type(layer).edge_updater(layer, *args, **kwargs)),
    ),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", CHANGED)
def test_parts_that_change_after_a_layer_was_compiled(name, before, device):
    make, change = CHANGED[name]
    layer = make().double().to(device)
    x, edge_index, weight = graph_of("random", device)
    vars(layer)["given"] = edge_index[:, ::2].contiguous(), weight[::2].contiguous()
    with gnnfast.override(kernel="gar"):
        if before:
            change(layer)
        model = compiled(layer)
        check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
        if not before:
            change(layer)
        check(step(model, layer, x, edge_index), expected(layer, x, edge_index))


DEGREES = torch.tensor([2, 5, 4, 3, 1])


def _pna(kinds):
    return nn.PNAConv(F, 5, kinds, ["identity", "amplification"], DEGREES)


# Pairs of layers that share what is compiled, as long as nothing that decides is another.
OF_ONE_CLASS = {
    "kinds": (lambda: nn.SimpleConv(["mean", "max"]), lambda: nn.SimpleConv(["min", "sum"])),
    "number": (lambda: nn.SimpleConv(["mean", "max"]), lambda: nn.SimpleConv(["mean", "max", "std"])),
    "softmax": (lambda: nn.SimpleConv(["mean", "max"]), lambda: nn.SimpleConv(["mean", "softmax"])),
    "mode": (lambda: nn.SimpleConv(aggr.MultiAggregation(["mean", "max"])), lambda: nn.SimpleConv(_of_sums())),
    "PNAConv": (lambda: _pna(["mean", "max"]), lambda: _pna(["max", "mean"])),
    "variance": tuple(lambda semi=semi: nn.SimpleConv(aggr.VarAggregation(semi)) for semi in (False, True)),
    "deviation": tuple(lambda semi=semi: nn.SimpleConv(aggr.StdAggregation(semi)) for semi in (False, True)),
    "part": tuple(lambda semi=semi: nn.SimpleConv(["mean", aggr.VarAggregation(semi)]) for semi in (False, True)),
    "weights": tuple(lambda semi=semi: nn.SimpleConv(aggr.SoftmaxAggregation(semi_grad=semi)) for semi in (False, True)),
    "GINEConv": tuple(lambda width=width: nn.GINEConv(torch.nn.Linear(F, 5), edge_dim=width) for width in (None, F)),
}


def _of_sums():
    return aggr.MultiAggregation(["mean", "max"], mode="sum")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", OF_ONE_CLASS)
def test_layers_of_one_class_with_other_parts(name, order, device):
    layers = [make().double().to(device) for make in OF_ONE_CLASS[name][::order]]
    x, edge_index, _ = graph_of("random", device)
    of_edges = (torch.randn(edge_index.shape[1], F, dtype=x.dtype, device=device),) if name == "GINEConv" else ()
    models = [torch.compile(layer, backend="aot_eager") for layer in layers]
    with gnnfast.override(kernel="gar"):
        for _ in range(2):
            for model, layer in zip(models, layers):
                check(step(model, layer, x, edge_index, *of_edges), expected(layer, x, edge_index, *of_edges))
    assert gnnfast.report().kernels


def _set(path, name, value):
    return lambda layer: setattr(layer.get_submodule(path), name, value())


WITHIN = {
    "PNAConv, kinds": (lambda: _pna(["mean", "max"]), _set("aggr_module", "aggr", lambda: aggr.MultiAggregation(["min", "sum"]))),
    "PNAConv, a kind": (
        lambda: _pna(["mean", "max"]),
        lambda layer: layer.aggr_module.aggr.aggrs.__setitem__(0, aggr.SumAggregation()),
    ),
    "deviation, its variance": (
        lambda: nn.SimpleConv(aggr.StdAggregation()),
        _set("aggr_module", "var_aggr", lambda: aggr.SumAggregation()),
    ),
    "deviation, forward": (lambda: nn.SimpleConv("std"), _twice(lambda layer: layer.aggr_module.var_aggr)),
    "several, a kind": (
        lambda: nn.SimpleConv(["mean", "max"]),
        lambda layer: layer.aggr_module.aggrs.__setitem__(0, aggr.SumAggregation()),
    ),
    "several, semi_grad": (lambda: nn.SimpleConv(["mean", "var"]), _set("aggr_module.aggrs.1", "semi_grad", lambda: True)),
    "GINEConv, a product": (
        lambda: nn.GINEConv(torch.nn.Linear(F, 5)),
        lambda layer: setattr(layer, "lin", torch.nn.Linear(F, F).to(next(layer.parameters()))),
    ),
}


@pytest.mark.parametrize("name", WITHIN)
def test_what_is_within_an_aggregation_changes(name, device):
    make, change = WITHIN[name]
    layer = make().double().to(device)
    x, edge_index, _ = graph_of("random", device)
    of_edges = (torch.randn(edge_index.shape[1], F, dtype=x.dtype, device=device),) if "GINE" in name else ()
    model = torch.compile(layer, backend="aot_eager")
    with gnnfast.override(kernel="gar"):
        check(step(model, layer, x, edge_index, *of_edges), expected(layer, x, edge_index, *of_edges))
        assert gnnfast.report().kernels
        change(layer)
        check(step(model, layer, x, edge_index, *of_edges), expected(layer, x, edge_index, *of_edges))


def test_what_stops_a_compiler_is_traced_where_it_must_not_stop(device):
    x, edge_index, _ = graph_of("random", device)
    for function, arguments in ((add_self_loops, ()), (remove_self_loops, ()), (gcn_norm, (None, x.shape[0]))):
        found, wanted = compiled(function)(edge_index, *arguments), function(edge_index, *arguments)
        assert torch.equal(found[0], wanted[0])
    layer = nn.MFConv(F, 5).double().to(device)
    check(step(compiled(layer), layer, x, edge_index), expected(layer, x, edge_index))
