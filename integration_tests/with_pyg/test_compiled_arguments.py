"""Arguments, modes and layers of all kinds under ``torch.compile``, and what steps aside there."""

from __future__ import annotations

import pytest
import torch
from compiling import NAMES, F, check, compiled, expected, fresh, graph_of, is_served, step  # noqa: F401
from graphs import GRAPHS, relative_error

import gnnfast
from gnnfast import _native
from gnnfast.graph import Graph

pytest.importorskip("torch_geometric", reason="PyG is not installed")
if not _native.cpu.loaded:
    pytest.skip(_native.cpu.reason, allow_module_level=True)
from compiled_layers import LAYERS, Weighted
from torch_geometric import nn
from torch_geometric.nn import MessagePassing


class FromFirst(nn.FAConv):
    """Which takes the features of its model, its own here."""

    def forward(self, x, edge_index):
        return super().forward(x, x, edge_index)


def test_bipartite(device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    edge_index, x = edge_index.to(device), torch.randn(num_src, F, dtype=torch.float64, device=device)
    x_dst = torch.randn(num_dst, 6, dtype=torch.float64, device=device)
    layers = (
        nn.SAGEConv((F, 6), 5),
        nn.SAGEConv((F, 6), 5, aggr="max"),
        nn.GraphConv((F, 6), 5),
        nn.GATConv((F, 6), 4, add_self_loops=False),
    )
    for layer in layers:
        layer = layer.double().to(device)

        class Pair(torch.nn.Module):
            def __init__(self, conv):
                super().__init__()
                self.conv = conv

            def forward(self, x, edge_index, x_dst):
                return self.conv((x, x_dst), edge_index)

        net = Pair(layer)
        gnnfast.clear_report()
        check(step(compiled(net), net, x, edge_index, x_dst), expected(net, x, edge_index, x_dst))
        assert is_served()
    layer = nn.SAGEConv((F, 6), 5, root_weight=False).double().to(device)
    model = compiled(lambda x, edge_index: layer((x, None), edge_index, size=(num_src, num_dst)))
    out = model(x, edge_index)
    gnnfast.disable()
    wanted = layer((x, None), edge_index, size=(num_src, num_dst))
    gnnfast.enable()
    assert relative_error(out, wanted) < 1e-9


def test_wide_to_narrow(device):
    """Where the product comes first, against PyG's order, as it does uncompiled."""
    n, edges = 3000, 200_000
    x = torch.randn(n, 64, dtype=torch.float64, device=device)
    edge_index = torch.randint(0, n, (2, edges), device=device)
    for layer in (nn.SAGEConv(64, 4), nn.GraphConv(64, 4), nn.SGConv(64, 4, K=2)):
        layer = layer.double().to(device)
        wanted = expected(layer, x, edge_index)
        gnnfast.clear_report()
        check(step(compiled(layer), layer, x, edge_index), wanted)
        assert is_served()


def test_static_graphs_and_other_dimensions(device):
    x, edge_index, weight = graph_of("random", device)
    x = torch.stack([x, x.sin(), x.cos()])
    for layer in (nn.GCNConv(F, 5), nn.SAGEConv(F, 5), nn.GraphConv(F, 5)):
        layer = layer.double().to(device)
        check(step(compiled(layer), layer, x, edge_index), expected(layer, x, edge_index))
    conv = Weighted("sum")
    conv.node_dim = 0
    conv = conv.double().to(device)
    x, per_head = torch.randn(x.shape[1], 3, F, dtype=torch.float64, device=device), weight[:, None].repeat(1, 3)
    check(step(compiled(conv), conv, x, edge_index, per_head), expected(conv, x, edge_index, per_head))
    assert is_served()


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "TransformerConv", "SGConv"])
def test_autocast(name, device):
    layer = LAYERS[name]().to(device)
    x, edge_index, _ = graph_of("random", device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        wanted = expected(layer, x, edge_index)
        check(step(compiled(layer), layer, x, edge_index), wanted, 2e-2)


def test_twice_differentiable_without_a_compiler_behind(device):
    x, edge_index, weight = graph_of("random", device)
    layer = nn.GraphConv(F, 5, aggr="mean").double().to(device)
    model = compiled(layer, backend="eager")

    def second(function):
        a, w = (t.detach().clone().requires_grad_() for t in (x, weight))
        first = torch.autograd.grad(function(a, edge_index, w).pow(3).sum(), (a, w), create_graph=True)
        return torch.autograd.grad(sum(t.pow(2).sum() for t in first), (a, w))

    found = second(model)
    gnnfast.disable()
    wanted = second(layer)
    gnnfast.enable()
    check(found, wanted)


_LOOPS = "features of self loops that are neither a number nor a mean"


def test_what_steps_aside(device):
    """With the reason, and in one graph all the same."""
    x, edge_index, weight = graph_of("random", device)

    class Own(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            return (x_i - x_j).exp()

    for layer, rest, reason in (
        (Own(), (), "messages of such a message() must exist"),
        (nn.SAGEConv(F, 5, aggr="powermean"), (), "the aggregation is PowerMeanAggregation"),
        (
            nn.SAGEConv(F, 5, aggr=nn.aggr.MultiAggregation(["max", "std"], mode="sum")),
            (),
            "aggregations are combined in another way",
        ),
        (nn.GATConv(F, 5, edge_dim=1, fill_value="max"), (weight[:, None],), _LOOPS),
        (nn.GATConv(F, 5, heads=40, dropout=0.5), (), "there is no kernel for heads so wide, or the dropout"),
    ):
        layer = layer.double().to(device)
        torch._dynamo.reset()
        gnnfast.clear_report()
        model = compiled(layer)
        found = step(model, layer, x, edge_index, *rest)
        reasons = {reason for _, reason in gnnfast.report().fallbacks}
        assert f"compiled: {reason}" in reasons
        if "dropout" not in reason:
            check(found, expected(layer, x, edge_index, *rest))
    with gnnfast.override(strict=True), pytest.raises(Exception, match="GNNFAST_STRICT"):
        compiled(Own().to(device))(x, edge_index)


@pytest.mark.parametrize("name", ["AGNNConv", "FeaStConv", "ClusterGCNConv", "FAConv", "ChebConv", "MFConv"])
def test_layers_that_stop_the_compiler(name, device, monkeypatch):
    """At self loops, or nodes of a degree, of which there are as many as values say: what is made there is known again in the next
    call."""
    layer = {
        "AGNNConv": lambda: nn.AGNNConv(),
        "FeaStConv": lambda: nn.FeaStConv(F, 5, heads=2),
        "ClusterGCNConv": lambda: nn.ClusterGCNConv(F, 5),
        "FAConv": lambda: FromFirst(F),
        "ChebConv": lambda: nn.ChebConv(F, 5, 3),
        "MFConv": lambda: nn.MFConv(F, 5),
    }[name]()
    layer = layer.double().to(device).eval()
    model, inputs = (
        torch.compile(layer, backend="aot_eager"),
        [graph_of(graph, device)[:2] for graph in NAMES if graph != "no_edges"],
    )
    wanted = [expected(layer, *given) for given in inputs]
    for given, w in zip(inputs * 2, wanted * 2):
        check(step(model, layer, *given), w)
    monkeypatch.setattr(Graph, "_convert", None)
    check(step(model, layer, *inputs[0]), wanted[0])
    assert is_served()


def test_layers_that_need_not_stop_the_compiler(device):
    layer, (x, edge_index) = nn.MFConv(F, 5).double().to(device), graph_of("random", device)[:2]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(step(compiled(layer), layer, x, edge_index), expected(layer, x, edge_index))
    assert is_served()


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "SAGEConv max", "GATConv"])
def test_nodes_counted_within_the_code(name, device):
    """How many rows features have only their values tell."""
    layer = LAYERS[name]().double().to(device)

    class Some(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, edge_index):
            kept = x[x[:, 0] > -100]
            torch._check(kept.shape[0] > 1)
            return self.layer(kept, edge_index)

    net = Some()
    x, edge_index, _ = graph_of("random", device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(step(compiled(net), net, x, edge_index), expected(net, x, edge_index))


def test_transforms_within_compiled_code(device):
    x, edge_index, _ = graph_of("random", device)
    layer = nn.SAGEConv(F, 5).double().to(device)
    model = compiled(lambda x: torch.func.grad(lambda x: layer(x, edge_index).pow(2).sum())(x), backend="eager")
    found = model(x)
    leaf = x.clone().requires_grad_()
    gnnfast.disable()
    wanted = torch.autograd.grad(layer(leaf, edge_index).pow(2).sum(), leaf)[0]
    gnnfast.enable()
    assert relative_error(found, wanted) < 1e-9


def test_export_holds_no_ops_of_gnnfast():
    x, edge_index, _ = graph_of("random", "cpu")
    layer = nn.SAGEConv(F, 5).double()
    for strict in (True, False):
        program = torch.export.export(layer, (x, edge_index), strict=strict)
        assert not any("gnnfast" in str(node.target) for node in program.graph.nodes)
        assert relative_error(program.module()(x, edge_index), layer(x, edge_index)) < 1e-9


def test_bad_ids_are_an_error(device):
    if device.type == "cuda":
        pytest.skip("on a GPU a later call finds out, which would fail other tests of this process")
    x, edge_index, _ = graph_of("random", device)
    layer = nn.SAGEConv(F, 5).double()
    model = compiled(layer)
    edge_index[0, 0] = x.shape[0]
    with pytest.raises(IndexError, match="out of range"):
        model(x, edge_index)
    edge_index[0, 0] = 0
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
