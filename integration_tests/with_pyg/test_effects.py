"""A user's ``message()`` that leaves traces, keeps its rows, or is written as few are, against PyG with gnnfast off."""

from __future__ import annotations

import copy
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from graphs import relative_error
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gnnfast

pyg = pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn  # noqa: E402
from torch_geometric.utils import scatter  # noqa: E402

pytestmark = pytest.mark.usefixtures("converts_at_once")

N, E, F = 300, 12000, 32


class Layer(nn.MessagePassing):
    def __init__(self, aggr="sum"):
        super().__init__(aggr=aggr)
        self.calls, self.average, self.generator = 0, torch.zeros(()), None
        self.register_buffer("memory", torch.ones(N, F))
        self.kept = None

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)


class Average(Layer):
    def message(self, x_j):
        self.average = 0.9 * self.average + 1
        with torch.no_grad():
            size = x_j.abs().mean()
        return x_j / (size + self.average.to(x_j.device))


class Counts(Layer):
    def message(self, x_j):
        self.calls += 1
        with torch.no_grad():
            size = x_j.abs().max()
        return x_j * 0.5**self.calls / size


class WritesItsArgument(Layer):
    def message(self, x_j, e):
        e.mul_(0.5)
        with torch.no_grad():
            size = x_j.abs().max()
        return x_j * e / size


class OtherGenerators(Layer):
    def message(self, x_j):
        factor = random.random() + float(np.random.rand())
        with torch.no_grad():
            size = x_j.abs().max()
        return x_j * factor / size


def _count(layer):
    layer.calls += 1
    return layer.calls


class CallsAFunctionThatCounts(Layer):
    def message(self, x_j):
        factor = _count(self)
        with torch.no_grad():
            size = x_j.abs().max()
        return x_j * factor / size


class Counter(torch.nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class CallsAModuleThatCounts(Layer):
    def __init__(self):
        super().__init__()
        self.counter = Counter()

    def message(self, x_j):
        with torch.no_grad():
            size = x_j.abs().max()
        return self.counter(x_j) / size


class WritesWhatRowsAreMadeOf(Layer):
    def message(self, x_j, e):
        r = e * 1.0
        m = x_j + r
        functional.relu_(r)
        return functional.relu(m) + r


class WritesWeights(Layer):
    def message(self, x_j, e):
        r = e[:, :4].clone()
        m = x_j.view(-1, 4, F // 4) * r.view(-1, 4, 1)
        r.zero_()
        return m.sum(1)


class WritesMemory(Layer):
    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=self.memory, e=e)

    def message(self, x_j, e):
        self.memory.mul_(0.9)
        return x_j * 2 + e


class WritesTheIndex(Layer):
    def message(self, x_j, index):
        index.fill_(3)
        return x_j * 2


class Checkpointed(Layer):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(2 * F, F), torch.nn.ReLU(), torch.nn.Linear(F, F))

    def message(self, x_i, x_j):
        return checkpoint(self.mlp, torch.cat([x_i, x_j], -1), use_reentrant=False)


class OwnAggregate(Layer):
    def __init__(self):
        super().__init__(aggr=None)

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, dim_size):
        return scatter(inputs, index, 0, dim_size, "sum")


class ReadsATensorOfTheClass(Layer):
    scale = torch.linspace(0.5, 1.5, F, dtype=torch.float64)

    def message(self, x_j):
        return x_j * self.scale.to(x_j.device)


class Headed(Layer):
    def message(self, x_j, e):
        return (x_j.view(-1, 4, F // 4) * e[:, :4].view(-1, 4, 1)).sum(1)


LAYERS = {cls.__name__: cls for cls in Layer.__subclasses__()} | {
    f"Headed {aggr}": lambda aggr=aggr: Headed(aggr) for aggr in ("max", "min", ["mean", "max"], "mean")
}


@contextmanager
def without_gnnfast():
    gnnfast.disable()
    try:
        yield
    finally:
        gnnfast.enable()


def _step(make, device, grad):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    layer = make().double().to(device)
    edge_index = torch.randint(N, (2, E), device=device)
    x, e = (torch.randn(n, F, dtype=torch.float64, device=device) for n in (N, E))
    found = []
    for _ in range(3):
        out = layer(x.requires_grad_(grad), edge_index, e)
        found.append(out)
        if out.requires_grad:
            found += torch.autograd.grad(
                out.square().sum(), [t for t in (x, *layer.parameters()) if t.requires_grad], allow_unused=True
            )
    return [t for t in (*found, e, edge_index, layer.memory, layer.average, torch.tensor(layer.calls)) if t is not None]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", LAYERS)
def test_as_in_pyg(name, grad, device):
    if grad and name in ("WritesWhatRowsAreMadeOf", "WritesWeights", "WritesTheIndex"):
        pytest.skip("PyG's gradient fails: what it needs was written into")
    found = _step(LAYERS[name], device, grad)
    assert gnnfast.report().kernels or name in ("OwnAggregate", "WritesTheIndex")
    with without_gnnfast():
        expected = _step(LAYERS[name], device, grad)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert a.shape == b.shape and relative_error(a.double(), b.double()) < 1e-10


@pytest.mark.parametrize("conv", [lambda a: nn.FeaStConv(F, F, heads=3, aggr=a), lambda a: nn.GMMConv(F, F, 2, 3, aggr=a)])
@pytest.mark.parametrize("aggr", ["max", "min", "mean"])
def test_extrema_of_sums_over_heads(conv, aggr, device):
    layer = conv(aggr).double().to(device)
    x, edge_index = torch.randn(N, F, dtype=torch.float64, device=device), torch.randint(N, (2, E), device=device)
    given = (torch.rand(E, 2, dtype=torch.float64, device=device),) if isinstance(layer, nn.GMMConv) else ()
    found = layer(x, edge_index, *given)
    with without_gnnfast():
        assert relative_error(found, layer(x, edge_index, *given)) < 1e-10


class Kept(Layer):
    def message(self, x_j):
        self.kept = x_j * 2
        return self.kept.relu()


class Retained(Layer):
    def message(self, x_j):
        self.kept = x_j * 2
        self.kept.retain_grad()
        return self.kept


class Hooked(Layer):
    def message(self, x_j):
        self.kept = x_j.relu()
        x_j.register_hook(lambda grad: 3 * grad)
        return self.kept


@pytest.mark.parametrize("cls", [Kept, Retained, Hooked])
def test_gradients_of_what_message_keeps(cls, device):
    layer = cls().to(device)
    x, edge_index = torch.randn(N, F, device=device, requires_grad=True), torch.randint(N, (2, E), device=device)

    def gradients(layer):
        out = layer(x, edge_index, None)
        return torch.autograd.grad(out.square().sum(), [layer.kept, x])

    other = copy.deepcopy(layer)
    found = gradients(layer)
    with without_gnnfast():
        expected = gradients(other)
    for a, b in zip(found, expected):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("message", [lambda c, x: c.lin(x + c.p), lambda c, x: c.lin(x / 2), lambda c, x: c.lin(x.sum(1, True))])
def test_nodes_without_edges_may_hold_anything(message, device):
    class Projects(Layer):
        def __init__(self, width):
            super().__init__()
            self.p, self.lin = torch.nn.Parameter(torch.ones(F)), torch.nn.Linear(width, F)

        def message(self, x_j):
            return message(self, x_j)

    layer = Projects(1 if "sum" in message.__code__.co_names else F).to(device)
    edge_index = torch.randint(N - 50, (2, E), device=device)
    x = torch.randn(N, F, device=device)
    x[-50:] = float("nan")
    layer(x.requires_grad_(), edge_index, None)[:-50].square().sum().backward()
    assert layer.lin.weight.grad.isfinite().all() and x.grad.isfinite().all()
