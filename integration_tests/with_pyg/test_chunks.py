"""Message passing in chunks of edges, where messages would not fit: what is computed so, and what only all edges at once give."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import weakref

import numpy as np
import pytest
import torch
from comparison import compare, run, same
from graphs import GRAPHS, relative_error
from torch import nn as tnn

import gnnfast
from gnnfast.pyg import bounded

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from general_layers import EDGE, LAYERS, Difference, F, arguments, kinds, layer_of, mlp
from torch_geometric import nn


@pytest.fixture
def in_chunks(monkeypatch):
    monkeypatch.setattr(bounded, "FEWEST", 37)
    monkeypatch.setattr(bounded, "CHUNK", 1)
    with gnnfast.override(bounded="on"):
        yield


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graph", ["random", "hub", "isolated", "sorted"])
def test_layer_in_chunks(name, graph, device, in_chunks):
    report = compare(layer_of(name, device), *arguments(name, graph, device), tolerance=1e-9)
    served = "chunks of edges" in kinds(report) or "gar sum" in kinds(report)  # no messages are made then
    assert served or GRAPHS[graph]()[0].shape[1] <= 37 or any("not in chunks" in why for _, _, why in report.kernels)
    if name in (
        "GINEConv mean",
        "EdgeConv",
        "EdgeConv mean",
        "EdgeConv min",
        "PNAConv",
        "CGConv",
        "several reductions",
        "heads",
        "of nodes and edges",
    ):
        assert served


def test_many_chunks_are_made(device, in_chunks, monkeypatch):
    sizes = []
    chunks = bounded.Edges.chunks

    def counted(self, most):
        for chunk in chunks(self, most):
            sizes.append(chunk.end - chunk.begin)
            yield chunk

    monkeypatch.setattr(bounded.Edges, "chunks", counted)
    for graph in ("random", "hub", "isolated", "sorted"):
        sizes.clear()
        x, edge_index = arguments("EdgeConv", graph, device)
        with torch.no_grad():
            found = Difference("max")(x, edge_index)
        assert sum(sizes) == edge_index.shape[1]
        with gnnfast.override(bounded="off"), torch.no_grad():
            assert relative_error(found, Difference("max")(x, edge_index)) < 1e-12
        if graph == "random":
            assert len(sizes) > 3 and max(sizes) < 80


def test_dropout_in_chunks_is_the_same_in_both_passes(device, in_chunks):
    """With a message of nothing but dropout, the gradient is its mask."""

    class Drops(Difference):
        def message(self, x_j):
            return tnn.functional.dropout(x_j, 0.5, self.training)

    x, edge_index = arguments("EdgeConv", "random", device)
    x = torch.ones_like(x).requires_grad_()
    out = Drops()(x, edge_index)
    assert kinds(gnnfast.report()) == {"chunks of edges"}
    out.sum().backward()
    assert relative_error(x.grad.sum(), out.detach().sum()) < 1e-12 and (x.grad == 0).any()  # both sum the same mask
    torch.manual_seed(5)
    first = Drops()(x, edge_index)
    torch.manual_seed(5)
    assert torch.equal(first, Drops()(x, edge_index))


class _OfPython(Difference):
    def message(self, x_j):
        return x_j.cumsum(-1) * (3.0 if random.random() < 0.1 else 1.0)


class _OfNumPy(Difference):
    def message(self, x_j):
        return x_j.cumsum(-1) * np.random.rand()


class _OfItsOwn(Difference):
    def __init__(self):
        super().__init__()
        self.drawn = torch.Generator()

    def message(self, x_j):
        return x_j.cumsum(-1) * torch.rand(x_j.shape[0], 1, generator=self.drawn, dtype=x_j.dtype).to(x_j.device)


@pytest.mark.parametrize("make", [_OfPython, _OfNumPy, _OfItsOwn])
def test_random_numbers_of_other_generators_are_drawn_once(make, device, in_chunks):
    x, edge_index = arguments("EdgeConv", "random", device)
    layer = make()

    def step():
        random.seed(3)
        np.random.seed(0)
        if make is _OfItsOwn:
            layer.drawn.manual_seed(0)
        leaf, outs = x.clone().requires_grad_(), []
        for _ in range(5):  # each draws on
            outs.append(layer(leaf, edge_index))
        return [*(out.detach() for out in outs), torch.autograd.grad(sum(outs).pow(2).sum(), leaf)[0]]

    assert "chunks of edges" not in {kernel for _, kernel, _ in same(step).kernels}


def test_what_other_threads_run_is_as_it_was(device, in_chunks, monkeypatch):
    """While messages are looked at without dropout, modules are not changed."""

    class Drops(Difference):
        def __init__(self):
            super().__init__()
            self.drop, self.norm, self.lin = tnn.Dropout(0.9), tnn.BatchNorm1d(F), tnn.Linear(F, F)

        def message(self, x_j):
            return self.drop(self.lin(x_j).sigmoid())

    layer, close, looked = Drops().double().to(device), bounded._close, []

    def watched(*arguments):
        looked.append(all(m.training and not m._forward_pre_hooks for m in layer.modules()))
        return close(*arguments)

    monkeypatch.setattr(bounded, "_close", watched)
    x, edge_index = arguments("EdgeConv", "random", device)
    layer(x, edge_index)
    assert kinds(gnnfast.report()) == {"chunks of edges"} and looked and all(looked)


class _Normalised(Difference):
    def __init__(self):
        super().__init__()
        self.norm = tnn.BatchNorm1d(F)

    def message(self, x_j):
        return self.norm(x_j)


class _Mean(Difference):
    def message(self, x_j):
        return (x_j - x_j.mean(0)).cumsum(-1)


class _Keeps(Difference):
    def message(self, x_j):
        self.kept = x_j * 1
        return self.kept.cumsum(-1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(_Normalised, "BatchNorm1d"), (_Mean, "depends on others"), (_Keeps, "leaves something behind")],
    ids=["batch norm", "mean", "keeps"],
)
def test_what_must_not_be_computed_in_parts(make, reason, device, in_chunks):
    report = compare(make().double(), *arguments("EdgeConv", "random", device), tolerance=1e-9)
    assert any(reason in why for _, _, why in report.kernels) and "chunks of edges" not in kinds(report)


class _Scaled(Difference):
    """Of many sources each has one edge in what is looked at first, and another later."""

    def message(self, x_j, edge_index_j):
        return x_j / torch.bincount(edge_index_j)[edge_index_j].view(-1, 1)


def test_messages_that_count_the_edges_of_sources(device, in_chunks, monkeypatch):
    monkeypatch.setattr(bounded, "PROBE", 32)
    nodes = torch.arange(64, device=device)
    edge_index = torch.stack([nodes.repeat(2), torch.arange(128, device=device) // 8])
    x = torch.randn(64, F, device=device, dtype=torch.float64)
    report = compare(_Scaled(), x, edge_index, tolerance=1e-12)
    assert any("depends on others" in why for _, _, why in report.kernels)


class _Cached(Difference):
    """Holds values of edges that nobody can take apart."""

    def forward(self, x, edge_index):
        self.values = torch.linspace(0, 1, edge_index.shape[1], dtype=x.dtype, device=x.device).view(-1, 1)
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return (x_j * self.values).cumsum(-1)


class _InTraining(Difference):
    def message(self, x_j):
        return x_j.cumsum(-1) - x_j.mean(0) if self.training else x_j.sin()


class _Writes(Difference):
    def forward(self, x, edge_index):
        self.table = torch.full((1, F), 0.5, dtype=x.dtype, device=x.device)
        return self.propagate(edge_index, x=x, table=self.table) * self.table

    def message(self, x_j, table):
        return (x_j * table.add_(1)).cumsum(-1)


class _Spectral(Difference):
    def __init__(self, parametrised):
        super().__init__()
        norm = tnn.utils.parametrizations.spectral_norm if parametrised else tnn.utils.spectral_norm
        self.linear = norm(tnn.Linear(F, F))

    def message(self, x_j):
        return self.linear(x_j).cumsum(-1)


class _Helped(Difference):
    def message(self, x_j):
        return self.keep(x_j.cumsum(-1))

    def keep(self, messages):
        self.kept = messages
        return messages


class _Counter(tnn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x * self.calls


class _Counting(Difference):
    def __init__(self):
        super().__init__()
        self.counter = _Counter()

    def message(self, x_j):
        return self.counter(x_j).cumsum(-1)


class _Tally:
    total = 0

    def add(self, messages):
        self.total += 1
        return messages * self.total


class _Holding(Difference):
    def __init__(self):
        super().__init__()
        self.tally, self.clock = _Tally(), itertools.count(1)

    def __deepcopy__(self, memo):  # Python 3.14 copies no iterators
        return type(self)().double()

    def message(self, x_j):
        return self.tally.add(x_j).cumsum(-1)


class _Iterating(_Holding):
    def message(self, x_j):
        return next(self.clock) * x_j.cumsum(-1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_Cached, "RuntimeError"),
        (_InTraining, "asks whether it is trained"),
        (_Writes, "leaves something behind"),
        (_Helped, "message() leaves something behind"),
        (_Counting, "a module leaves something behind"),
        (_Holding, "message() leaves something behind"),
        (_Iterating, "message() may call a count, which cannot be looked into"),
        (lambda: _Spectral(False), "hooks"),
        (lambda: _Spectral(True), "parametrisation"),
    ],
    ids=[
        "cached",
        "in training",
        "writes",
        "helper",
        "counter",
        "holds",
        "iterates",
        "spectral norm",
        "parametrised spectral norm",
    ],
)
def test_what_only_all_edges_at_once_give(make, reason, device, in_chunks):
    report = compare(make().double(), *arguments("EdgeConv", "random", device), tolerance=1e-9)
    assert any(reason in why for _, _, why in report.kernels) and "chunks of edges" not in kinds(report)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "Median", "LCM", "hooked"])
def test_aggregations_that_look_at_all_nodes(kind, device, in_chunks):
    """Recurrent ones pad to the largest degree; what a hook sees is all messages at once."""
    x, edge_index = arguments("EdgeConv", "sorted", device)
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)].contiguous()
    seen = []
    if kind == "hooked":
        layer = Difference("sum")
        layer.aggr_module.register_forward_hook(lambda module, inputs, out: seen.append(len(inputs[0])))
    else:
        make = getattr(nn.aggr, f"{kind}Aggregation")
        layer = Difference(make() if kind == "Median" else make(F, F))
    report = compare(layer.double(), x, edge_index, tolerance=1e-9)
    assert any("not in chunks" in why for _, _, why in report.kernels) and "chunks of edges" not in kinds(report)
    assert set(seen) <= {edge_index.shape[1]}


def test_what_chunks_are_computed_from_again_must_be_as_it_was(device, in_chunks):
    """A wrong gradient else: nothing of a message is kept that autograd could miss."""
    layer, (x, edge_index) = layer_of("EdgeConv", device), arguments("EdgeConv", "random", device)
    for change in (lambda h: h.add_(1), lambda _: edge_index[:, 0].zero_(), lambda _: layer.nn[0].bias.detach().add_(1)):
        h = x.clone().requires_grad_() * 1
        out = layer(h, edge_index)
        assert "chunks of edges" in kinds(gnnfast.report())
        change(h)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_nothing_is_held_in_a_cycle(device, in_chunks):
    layer, (x, edge_index) = layer_of("EdgeConv", device), arguments("EdgeConv", "random", device)
    gc.collect()
    gc.disable()
    try:
        x = x.clone().requires_grad_()
        out = layer(x, edge_index)
        assert "chunks of edges" in kinds(gnnfast.report())
        out.sum().backward()
        held = weakref.ref(x)
        del x, out
        assert held() is None
    finally:
        gc.enable()


def test_batch_norm_outside_messages_is_no_hindrance(device, in_chunks):
    layer = nn.GINEConv(tnn.Sequential(tnn.Linear(F, F), tnn.BatchNorm1d(F)), edge_dim=EDGE).double()
    report = compare(layer, *arguments("GINEConv mean", "random", device), tolerance=1e-9)
    assert "chunks of edges" in kinds(report)
    assert not any(m._forward_pre_hooks for m in layer.modules())


def test_random_numbers_and_modes_of_the_program_are_untouched(device, in_chunks):
    layer, inputs = layer_of("EdgeConv", device), arguments("EdgeConv", "random", device)
    layer.train()
    torch.manual_seed(1)
    expected = torch.rand(3, device=device)
    torch.manual_seed(1)
    layer(*inputs)
    assert kinds(gnnfast.report()) == {"chunks of edges"}
    assert torch.equal(torch.rand(3, device=device), expected) and all(m.training for m in layer.modules())


def test_memory_does_not_grow_with_the_edges(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("peak memory is measured on a GPU")
    monkeypatch.setattr(bounded, "CHUNK", 64 << 20)
    nodes, width = 20_000, 64
    layer = nn.EdgeConv(mlp(2 * width, width)).cuda()
    peaks = []
    for count in (400_000, 4_000_000):
        edge_index = torch.randint(0, nodes, (2, count), device="cuda")
        x = torch.randn(nodes, width, device="cuda", requires_grad=True)
        with gnnfast.override(bounded="on"):
            layer(x, edge_index).sum().backward()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layer(x, edge_index).sum().backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        del edge_index, x
    messages = 4_000_000 * width * 4
    assert peaks[1] < messages / 2 and peaks[1] < 3 * peaks[0]


def test_a_limit_of_the_process_counts():
    if not torch.cuda.is_available():
        pytest.skip("torch limits the memory of a process on a GPU only")
    device = torch.device("cuda", torch.cuda.current_device())
    unlimited, total = bounded.free_bytes(device), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        limited = bounded.free_bytes(device)
        kept = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        assert 0 < limited <= 0.1 * total < unlimited
        assert bounded.free_bytes(device) <= limited - kept.nbytes
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_taken_where_messages_would_not_fit(device, monkeypatch):
    layer, inputs = layer_of("EdgeConv", device), arguments("EdgeConv", "random", device)
    monkeypatch.setattr(bounded, "FEWEST", 1)
    for free, expected in ((1 << 40, "gathers and max"), (50_000, "chunks of edges")):
        monkeypatch.setattr(bounded, "free_bytes", lambda _, free=free: free)
        gnnfast.clear_report()
        found = run(copy.deepcopy(layer), *inputs)
        assert kinds(gnnfast.report()) == {expected}
        assert all(a is not None for a in found)
    with gnnfast.override(bounded="off"):
        gnnfast.clear_report()
        layer(*inputs)
        assert kinds(gnnfast.report()) == {"gathers and max"}
