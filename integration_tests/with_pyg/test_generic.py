"""Classes for which PyG generates no propagate: their source cannot be read, or they have one of their own."""

from __future__ import annotations

import pytest
import torch
from comparison import compare
from graphs import GRAPHS

import gnnfast
from gnnfast.pyg import bounded

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

F = 6
UNREADABLE = """
class Copied(MessagePassing):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


class Weighted(Copied):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, w=w, x=x)  # in another order than message() has them

    def message(self, x_j, w):
        return w.view(-1, 1) * x_j

    def update(self, inputs, x):
        return inputs + x


class Gated(Copied):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, w=w, x=x, table=x.detach().cos())

    def message(self, x_i, x_j, table, w, index, edge_index_j, size_i):
        return torch.sigmoid(x_i + x_j) * table[edge_index_j] * w.view(-1, 1) + index.view(-1, 1) / max(size_i, 1)


class Several(Copied):
    def message(self, x_j, x_i):
        return (x_j - x_i).tanh()


class Reduced(Several):
    def aggregate(self, inputs, index, ptr, dim_size):
        return inputs.new_zeros(dim_size, inputs.shape[1]).index_add(0, index, inputs * (1.0 if ptr is None else 2.0))


class Passed(Copied):
    # PyG passes inspect.Parameter.empty for what is not given, whatever the default.
    def message(self, x_j, scale=None):
        return x_j if scale is None else 3 * x_j
"""
KINDS = ("Copied", "Weighted", "Gated", "Several", "Reduced", "Passed", "own propagate", "own propagate, other order")


class _OwnPropagate(MessagePassing):
    """PyG generates nothing for it, and ``super()`` is what all classes have."""

    def propagate(self, edge_index, size=None, **kwargs):
        return super().propagate(edge_index, size=size, **kwargs).relu()

    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x)


class _Generated(MessagePassing):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_j, w):
        return w.view(-1, 1) * x_j


class _OtherOrder(_Generated):
    """Has a generated ``collect`` from its parent, and calls what takes arguments by name."""

    def forward(self, x, edge_index, w):
        return MessagePassing.propagate(self, edge_index, w=w, x=x)


def make(kind: str, aggr):
    if kind.startswith("own"):
        _Generated()  # so that its collect is there
        return (_OwnPropagate if kind == "own propagate" else _OtherOrder)(aggr=aggr)
    scope = {"MessagePassing": MessagePassing, "torch": torch, "__name__": "__main__"}
    exec(UNREADABLE, scope)
    return scope[kind](aggr=aggr)


def inputs(graph: str, device):
    edge_index, num_src, num_dst = GRAPHS[graph]()
    n = max(num_src, num_dst)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, F, generator=generator, dtype=torch.float64).to(device)
    w = torch.rand(edge_index.shape[1], generator=generator, dtype=torch.float64).to(device)
    return x, edge_index.to(device), w


@pytest.mark.parametrize("graph", ["random", "hub", "no_edges", "isolated", "self_loops_and_duplicates"])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("kind", KINDS)
def test_is_served_alike(kind, aggr, graph, device):
    conv, (x, edge_index, w) = make(kind, aggr).to(device), inputs(graph, device)
    assert not hasattr(type(conv), "collect") or kind == "own propagate, other order"
    compare(conv, x, edge_index, w, tolerance=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_is_reported_as_served(kind, device):
    conv, (x, edge_index, w) = make(kind, "sum").to(device), inputs("random", device)
    conv(x, edge_index, w)
    report = gnnfast.report()
    assert not report.fallbacks and any(place.startswith("pyg ") for place, *_ in report.kernels)


@pytest.mark.parametrize("aggr", [["sum", "max", "std"], "softmax"])
def test_several_reductions(aggr, device):
    conv, (x, edge_index, w) = make("Several", aggr).to(device), inputs("random", device)
    compare(conv, x, edge_index, w, tolerance=1e-9)


def test_in_chunks_of_edges(device, monkeypatch):
    monkeypatch.setattr(bounded, "FEWEST", 37)
    monkeypatch.setattr(bounded, "CHUNK", 1)
    conv, (x, edge_index, w) = make("Several", "sum").to(device), inputs("random", device)
    with gnnfast.override(bounded="on"):
        report = compare(conv, x, edge_index, w, tolerance=1e-9)
    assert any(kernel == "chunks of edges" for _, kernel, _ in report.kernels)


def test_what_was_replaced_is_called(device, monkeypatch):
    x, edge_index, w = inputs("random", device)
    conv = make("Weighted", "sum").to(device)
    before = conv(x, edge_index, w)
    monkeypatch.setattr(type(conv), "message", lambda self, x_j, w: 5 * w.view(-1, 1) * x_j)
    torch.testing.assert_close(conv(x, edge_index, w) - x, 5 * (before - x))
    monkeypatch.setattr(MessagePassing, "_collect", _doubled(MessagePassing._collect))
    torch.testing.assert_close(conv(x, edge_index, w) - x, 10 * (before - x))


@pytest.mark.parametrize("name", ["collect_param_data", "get_params", "get_param_dict", "get_signature"])
@pytest.mark.parametrize("where", ["class", "instance"])
def test_another_inspector_is_asked(name, where, device, monkeypatch):
    x, edge_index, w = inputs("random", device)
    conv, asked = make("Weighted", "sum").to(device), []
    conv(x, edge_index, w)
    original = getattr(conv.inspector, name)

    def replacement(*args, **kwargs):
        asked.append(name)
        return original(*args[where == "class" :], **kwargs)

    monkeypatch.setattr(type(conv.inspector) if where == "class" else conv.inspector, name, replacement)
    conv(x, edge_index, w)
    assert asked and gnnfast.report().fallbacks


def _doubled(collect):
    def collect_doubled(self, *args):
        found = collect(self, *args)
        return found | {"x_j": 2 * found["x_j"]}

    return collect_doubled


def test_a_message_that_takes_other_arguments_than_before(device):
    """The generic path passes what message() took when the instance was made, and so fails."""
    x, edge_index, w = inputs("random", device)
    conv = make("Copied", "sum").to(device)
    type(conv).message = lambda self, x_i: x_i
    with pytest.raises(TypeError, match="x_j"):
        conv(x, edge_index, w)


def test_a_layer_with_hooks_runs_them(device):
    x, edge_index, w = inputs("random", device)
    conv = make("Several", "sum").to(device)
    before = conv(x, edge_index, w)
    conv.register_message_forward_hook(lambda module, given, out: 2 * out)
    torch.testing.assert_close(conv(x, edge_index, w), 2 * before)


def test_explained_layers_are_pygs(device):
    """An explainer has an instance run the generic path, with a mask."""
    x, edge_index, w = inputs("random", device)
    conv = nn.GraphConv(F, F).double().to(device)
    conv.explain = True
    conv._edge_mask, conv._apply_sigmoid = torch.rand_like(w), False
    compare(conv, x, edge_index, tolerance=1e-9)
