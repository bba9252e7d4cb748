"""Messages of any code under ``torch.compile``: kernels reduce what uncompiled calls reduce without making it, and whatever else a
``message()`` does gives what PyG gives."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from comparison import without
from compiling import check, compiled, expected, fresh, is_served, step, traced  # noqa: F401
from graphs import relative_error

import gnnfast
from gnnfast import _native

pytest.importorskip("torch_geometric", reason="PyG is not installed")
if not _native.cpu.loaded:
    pytest.skip(_native.cpu.reason, allow_module_level=True)
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax
from user_messages import ATTENDS, GATES, MESSAGES, Layer, arguments

# What breaks a graph apart, or what a compiler takes for another thing than it is.
BREAKS = ("scripted", "numpy", "vmap", "caught", "own gradient, caught", "normalised", "dot attention by einsum")
MUST_EXIST = "compiled: messages of such a message() must exist"
SMALL = ["random", "hub", "isolated", "self_loops_and_duplicates"]


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_message(reduce, name, device):
    """By one model for graphs of all sizes, in one piece. Means are sums over degrees: :func:`test_inductor`, where sizes are found
    to change."""
    function, heads, fused = MESSAGES[name]
    layer = Layer(function, reduce, heads).to(device, torch.float64)
    model = torch.compile(layer, backend="aot_eager") if name in BREAKS else compiled(layer, dynamic=True)
    gnnfast.clear_report()
    for graph in SMALL:
        x, *rest = arguments(graph, device)
        found = step(model, layer, x, *rest)
        check(found, expected(layer, x, *rest))
    if fused in (True, ATTENDS) or (fused == GATES and reduce != "max"):
        assert name in BREAKS or is_served()


@pytest.mark.parametrize("name", ["attention", "dots", "joined", "gate", "two gates", "rows", "perceptron", "dot attention"])
def test_inductor(name, device):
    function, heads, _ = MESSAGES[name]
    layer = Layer(function, "mean", heads).to(device, torch.float64)
    model = compiled(layer, backend="inductor")
    for graph in [graph for graph in SMALL if graph != "isolated"] * 2:  # which has fewer edges than nodes
        x, *rest = arguments(graph, device)
        wanted = expected(layer, x, *rest)
        check(step(model, layer, x, *rest), wanted)
        with torch.no_grad():
            assert relative_error(model(x, *rest), wanted[0]) < 1e-9
    assert is_served() and traced() <= 6  # Inductor has a product of its own for few rows


def test_what_message_reads(device):
    """Code is traced again when it is another."""
    layer = Layer(lambda m, i, j, attr, at: torch.nn.functional.leaky_relu(j, m.drop) * attr).to(device, torch.float64)
    model, inputs = compiled(layer), arguments("random", device)
    for layer.drop in (0.5, 0.1):
        check(step(model, layer, *inputs), expected(layer, *inputs))
    assert is_served()


class Updates(MessagePassing):
    """Whose update() asks for what PyG makes."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j

    def update(self, inputs, index, size_i):
        degree = inputs.new_zeros(size_i, 1).index_add(0, index, inputs.new_ones(index.shape[0], 1))
        return inputs + degree


@pytest.mark.parametrize("aggr", ["sum", "max", ["mean", "max"], "softmax"])
def test_update_that_asks_for_what_is_made(aggr, device):
    layer, (x, edge_index, _) = Updates(aggr=aggr).to(device), arguments("random", device)
    check(step(compiled(layer), layer, x, edge_index), expected(layer, x, edge_index))
    assert is_served()


class OwnGat(MessagePassing):
    """As users write it: scores are dot products at nodes, each written another way."""

    def __init__(self, way):
        super().__init__(aggr="add", node_dim=0)
        self.way, self.lin = way, torch.nn.Linear(2, 2)
        self.att = torch.nn.Parameter(torch.rand(2, 1, 2, 4) + 0.5)

    def forward(self, x, edge_index):
        x = x.view(-1, 2, 4).sin()
        first, second = self.att
        if self.way == "linear":
            scores = self.lin(x.sum(-1)), self.lin(x.prod(-1))
        elif self.way == "functions":
            scores = torch.sum(torch.mul(first, x), dim=-1), torch.sum(x.mul(second[0]), -1)
        elif self.way == "kept dimension":
            scores = (x * first).sum(-1, keepdim=True).squeeze(-1), (x * second).sum(-1)
        else:
            scores = (x * first).sum(-1), (second * x).sum(dim=-1)
        if self.way == "written":
            x.mul_(2)
        return self.propagate(edge_index, x=x, scores=scores).flatten(1)

    def message(self, x_j, scores_i, scores_j, index, ptr, size_i):
        share = softmax(torch.nn.functional.leaky_relu(scores_i + scores_j, 0.2), index, ptr, size_i)
        return x_j * share.unsqueeze(-1)


@pytest.mark.parametrize("way", ["methods", "functions", "linear", "kept dimension", "written"])
def test_dot_products_at_nodes(way, device):
    """By their own op, of features as they were before somebody wrote into them, as may be where there are no gradients."""
    layer, counts = OwnGat(way).to(device, torch.float64), []

    def backend(graph, inputs):
        used = [n for n in graph.graph.nodes if n.op == "call_function" and "head_dots" in str(n.target) and n.users]
        counts.append(len(used))
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    model = torch.compile(layer, backend=backend, fullgraph=True)
    for name in SMALL[:2] * 2:
        x, edge_index, _ = arguments(name, device)
        if way == "written":
            with torch.no_grad():
                assert relative_error(model(x, edge_index), without(lambda given=(x, edge_index): layer(*given))) < 1e-9
        else:
            check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    assert is_served() and {*counts} == ({2} if way in ("methods", "functions", "written") else {0}), counts


def test_products_at_nodes_of_messages_that_exist(device):
    """A perceptron whose largest messages are asked for: its first layer is multiplied at nodes."""
    layer = Layer(lambda m, i, j, attr, at: m.pair(torch.cat([i, j, attr], -1)).relu().sin(), "max").to(device, torch.float64)
    seen = []

    def backend(graph, inputs):
        seen.extend(n for n in graph.graph.nodes if n.target is torch.nn.functional.linear and len(n.users))
        return graph

    model, inputs = torch.compile(layer, backend=backend, fullgraph=True), arguments("hub", device)
    check(step(model, layer, *inputs), expected(layer, *inputs))
    rows = [n.meta["example_value"].shape[0] for n in seen]
    assert sorted(rows) == [50, 50, 3000], "the last one of the features of edges, which are one column"


class Generic(MessagePassing):
    """For which PyG generates no propagate(): what message() asks for has no types, and aggregate() has other ones."""

    def __init__(self, edges_weigh, **kwargs):
        super().__init__(node_dim=0, **kwargs)
        self.edges_weigh = edges_weigh

    def forward(self, x, edge_index, attr):
        by_head = x.view(x.shape[0], 2, -1)
        return self.propagate(edge_index, q=by_head.tanh(), v=by_head, attr=attr).flatten(1)

    def message(self, q_i, q_j, v_j, attr, index, ptr, size_i):
        if self.edges_weigh:
            return v_j * attr.view(-1, 1, 1)
        return v_j * softmax((q_i * q_j).sum(-1), index, ptr, size_i).unsqueeze(-1)


@pytest.mark.parametrize("edges_weigh", [False, True])
@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_classes_without_a_propagate_of_their_own(edges_weigh, aggr, device):
    layer = Generic(edges_weigh, aggr=aggr).to(device)
    assert "_orig_propagate" in Generic.__dict__ and not hasattr(Generic, "collect")
    model = compiled(layer)
    for graph in SMALL:
        x, *rest = arguments(graph, device)
        check(step(model, layer, x, *rest), expected(layer, x, *rest))
    assert is_served()


def test_classes_of_no_file(device, monkeypatch):
    """Of which PyG finds no source. (Of a module with a file Python 3.13 takes the first line for it, and PyG breaks.)"""
    module = types.ModuleType("of_no_file")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    space = vars(module) | {"MessagePassing": MessagePassing}
    exec("class Plain(MessagePassing):\n    def forward(self, x, e): return self.propagate(e, x=x)", space)
    layer, (x, edge_index, _) = space["Plain"]().to(device), arguments("random", device)
    check(step(compiled(layer), layer, x, edge_index), expected(layer, x, edge_index))
    assert is_served()
