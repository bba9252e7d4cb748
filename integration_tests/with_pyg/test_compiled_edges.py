"""Layers with features of edges under ``torch.compile``: served without graph breaks, the same numbers and gradients as PyG's."""

from __future__ import annotations

import pytest
import torch
from compiling import NAMES, F, check, compiled, expected, fresh, graph_of, is_served, step, traced  # noqa: F401

import gnnfast
from gnnfast import _native

pytest.importorskip("torch_geometric", reason="PyG is not installed")
if not _native.cpu.loaded:
    pytest.skip(_native.cpu.reason, allow_module_level=True)
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

D = 3


class Relu(MessagePassing):
    """A user's own."""

    def forward(self, x, edge_index, added):
        return self.propagate(edge_index, x=x, added=added)

    def message(self, x_j, added):
        return torch.relu(x_j + added)


def pna(**options):
    kinds, scalers = (
        ["mean", "sum", "min", "max", "var", "std"],
        ["identity", "amplification", "attenuation", "linear", "inverse_linear"],
    )
    return nn.PNAConv(F, 6, kinds, scalers, torch.tensor([3, 5, 7, 9]), **options)


# name -> layer, and how wide its features of edges are; all of them must be served in full
LAYERS = {
    "GATConv": (lambda: nn.GATConv(F, 4, heads=3, edge_dim=D), D),
    "GATConv number": (lambda: nn.GATConv(F, 4, heads=3, edge_dim=D, fill_value=2.0, concat=False), D),
    "GATConv no loops": (lambda: nn.GATConv(F, 4, heads=3, edge_dim=1, add_self_loops=False, residual=True), None),
    "GATv2Conv": (lambda: nn.GATv2Conv(F, 4, heads=3, edge_dim=D), D),
    "GATv2Conv number": (lambda: nn.GATv2Conv(F, 4, heads=3, edge_dim=1, fill_value=1, share_weights=True), None),
    "GATv2Conv no loops": (lambda: nn.GATv2Conv(F, 4, heads=3, edge_dim=D, add_self_loops=False, bias=False), D),
    "TransformerConv": (lambda: nn.TransformerConv(F, 4, heads=3, edge_dim=D, beta=True), D),
    "TransformerConv wide": (lambda: nn.TransformerConv(F, 2, heads=3, edge_dim=D, concat=False), D),
    "GINEConv": (lambda: nn.GINEConv(torch.nn.Linear(F, 5), train_eps=True), F),
    "GINEConv edge_dim": (lambda: nn.GINEConv(torch.nn.Linear(F, 5), edge_dim=D), D),
    "own": (Relu, F),
    "GENConv": (lambda: nn.GENConv(F, 5, edge_dim=D, learn_t=True), D),
    "CGConv std": (lambda: nn.CGConv(F, D, aggr="std"), D),
    "PNAConv": (lambda: pna(edge_dim=D), D),
    "PNAConv towers": (lambda: pna(edge_dim=D, towers=2, divide_input=True, pre_layers=1, post_layers=2), D),
}


def edges_of(name, width, device, dtype=torch.float64):
    x, edge_index, _ = graph_of(name, device, dtype)
    g = torch.Generator().manual_seed(1)
    shape = (edge_index.shape[1],) if width is None else (edge_index.shape[1], width)
    return x, edge_index, torch.randn(shape, generator=g, dtype=dtype).to(device)


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, learnt, device):
    """Graphs of all sizes, ugly ones included, by one model; features of edges that are given, and such that get a gradient."""
    make, width = LAYERS[name]
    layer = make().double().to(device)
    graphs = [graph for graph in NAMES if graph != "no_edges"]  # there PyG's GATConv gives its weights for edges no gradient
    inputs = [edges_of(graph, width, device) for graph in graphs]
    for _, _, attr in inputs:
        attr.requires_grad_(learnt)
    wanted = [expected(layer, *i) for i in inputs]
    gnnfast.clear_report()
    model = compiled(layer)
    for given, w in zip(inputs, wanted):
        check(step(model, layer, *given), w)
    assert is_served() and traced()


@pytest.mark.parametrize("name", LAYERS)
def test_no_edges(name, device):
    make, width = LAYERS[name]
    layer = make().double().to(device)
    given = edges_of("no_edges", width, device)
    with torch.no_grad():
        found = compiled(layer)(*given)
        gnnfast.disable()
        assert torch.allclose(found, layer(*given), rtol=1e-12)
        gnnfast.enable()


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv", "GINEConv edge_dim", "PNAConv"])
def test_inductor(name, device):
    """And in float32 where no sums are so large that the loss of :func:`step`, a cosine, tells one rounding from another."""
    make, width = LAYERS[name]
    dtype, tolerance = (torch.float64, 1e-9) if name.startswith(("GINE", "PNA")) else (torch.float32, 1e-5)
    layer = make().to(device, dtype)
    inputs = [edges_of(graph, width, device, dtype) for graph in ("random", "hub", "self_loops_and_duplicates")] * 2
    wanted = [expected(layer, *i) for i in inputs]
    model = compiled(layer, backend="inductor")
    for given, w in zip(inputs, wanted):
        check(step(model, layer, *given), w, tolerance)
        with torch.no_grad():
            assert (model(*given) - w[0]).norm() < tolerance * w[0].norm()
    assert is_served() and traced() <= 4


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_dropout(name, device):
    """Other coefficients in each call, the same ones for the same seed."""
    make, width = LAYERS[name]
    layer = make().double().to(device)
    layer.dropout = 0.5
    given = edges_of("hub", width, device)
    model = compiled(layer)
    first, second, again = (step(model, layer, *given, seed=seed) for seed in (0, 1, 0))
    assert (first[0] != second[0]).any()
    check(again, first)
    layer.eval()
    check(step(model, layer, *given), expected(layer, *given))
    assert is_served()


def test_edges_changed_in_place(device):
    layer = nn.GATConv(F, 4, edge_dim=D).double().to(device)
    x, edge_index, attr = edges_of("random", D, device)
    model = compiled(layer)
    for i in range(4):
        check(step(model, layer, x, edge_index, attr), expected(layer, x, edge_index, attr))
        edge_index[:, i * 5 : i * 5 + 5] = i
        attr[i] += 1
    assert traced() == 1 and is_served()


def test_bipartite(device):
    x, edge_index, attr = edges_of("random", D, device)
    x_dst = torch.randn(x.shape[0] + 7, 6, dtype=x.dtype, device=device)
    for layer in (
        nn.GATConv((F, 6), 4, edge_dim=D, add_self_loops=False),
        nn.GATv2Conv((F, 6), 4, edge_dim=D, add_self_loops=False),
        nn.TransformerConv((F, 6), 4, edge_dim=D),
        nn.GINEConv(torch.nn.Linear(F, 5), edge_dim=D),
    ):

        class Pair(torch.nn.Module):
            def __init__(self, conv):
                super().__init__()
                self.conv = conv

            def forward(self, x, edge_index, x_dst, attr):
                return self.conv((x, x_dst), edge_index, attr)

        net = Pair(layer.double().to(device))
        if isinstance(layer, nn.GINEConv):
            x_dst = torch.randn(x.shape[0] + 7, F, dtype=x.dtype, device=device)
        gnnfast.clear_report()
        check(step(compiled(net), net, x, edge_index, x_dst, attr), expected(net, x, edge_index, x_dst, attr))
        assert is_served()


def test_both_directions_of_one_graph(device):
    """Where edges end and where they begin are two incidences of one edge_index."""
    x, edge_index, attr = edges_of("random", D, device)
    for flow in ("source_to_target", "target_to_source"):
        layer = pna(edge_dim=D, flow=flow).double().to(device)
        torch._dynamo.reset()
        check(step(compiled(layer), layer, x, edge_index, attr), expected(layer, x, edge_index, attr))
    assert is_served()


def test_what_steps_aside(device):
    """With the reason, and in one graph all the same."""
    x, edge_index, attr = edges_of("random", D, device)
    hooked = nn.GATv2Conv(F, 4, edge_dim=D)
    hooked.lin_edge.register_forward_hook(lambda module, inputs, out: out * 2)
    deep = nn.GINEConv(torch.nn.Linear(F, 5), edge_dim=D)
    deep.lin = torch.nn.Sequential(torch.nn.Linear(D, F), torch.nn.ReLU())
    for layer, reason in (
        (nn.GATConv(F, 5, edge_dim=D, fill_value="max"), "features of self loops that are neither a number nor a mean"),
        (hooked, "edge features are no products of float32 or float64"),
        (deep, "what is added is made by more than a linear layer"),
        (pna(edge_dim=D, pre_layers=2), "messages are not linear"),
    ):
        layer = layer.double().to(device)
        torch._dynamo.reset()
        gnnfast.clear_report()
        check(step(compiled(layer), layer, x, edge_index, attr), expected(layer, x, edge_index, attr))
        assert any(f"compiled: {reason}" in found for _, found in gnnfast.report().fallbacks)
