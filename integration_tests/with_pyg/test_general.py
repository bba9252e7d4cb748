"""Message passing that no kernel does as a whole: any message(), gathered and reduced by gnnfast, at once and in chunks of edges."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest
import torch
from comparison import compare, run
from graphs import GRAPHS, relative_error
from torch import nn as tnn

import gnnfast
from gnnfast.dispatch import select
from gnnfast.pyg import bounded, general

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

F, EDGE = 8, 3


def mlp(width_in: int, width_out: int = F) -> tnn.Module:
    return tnn.Sequential(tnn.Linear(width_in, width_out), tnn.Tanh(), tnn.Linear(width_out, width_out))


def degrees() -> torch.Tensor:
    return torch.tensor([1, 2, 3, 4, 5])


# name -> layer, and whether it takes edge features
LAYERS = {
    "GINEConv mean": (lambda: nn.GINEConv(mlp(F), edge_dim=EDGE, aggr="mean"), True),
    "EdgeConv": (lambda: nn.EdgeConv(mlp(2 * F)), False),
    "EdgeConv mean": (lambda: nn.EdgeConv(mlp(2 * F), aggr="mean"), False),
    "EdgeConv min": (lambda: nn.EdgeConv(mlp(2 * F), aggr="min"), False),
    "PNAConv": (
        lambda: nn.PNAConv(F, F, ["mean", "min", "max", "std"], ["identity", "amplification"], degrees(), pre_layers=2),
        False,
    ),
    "PNAConv with edges": (lambda: nn.PNAConv(F, F, ["mean", "sum"], ["attenuation"], degrees(), edge_dim=EDGE), True),
    "CGConv": (lambda: nn.CGConv(F, EDGE), True),
    "ResGatedGraphConv": (lambda: nn.ResGatedGraphConv(F, F, edge_dim=EDGE), True),
    "GENConv": (lambda: nn.GENConv(F, F, norm="layer", edge_dim=EDGE), True),
    "FiLMConv": (lambda: nn.FiLMConv(F, F), False),
    "GMMConv": (lambda: nn.GMMConv(F, F, EDGE, 2), True),
    "NNConv": (lambda: nn.NNConv(F, 4, tnn.Linear(EDGE, F * 4)), True),
    "LEConv": (lambda: nn.LEConv(F, F), False),
    "AGNNConv": (lambda: nn.AGNNConv(add_self_loops=False, flow="target_to_source"), False),
    "FeaStConv": (lambda: nn.FeaStConv(F, F, heads=2), False),
    "FAConv": (lambda: _WithInitial(nn.FAConv(F, flow="target_to_source")), False),
    "SuperGATConv": (lambda: nn.SuperGATConv(F, F, heads=2), False),
    "GeneralConv": (lambda: nn.GeneralConv(F, F, in_edge_channels=EDGE), True),
    "several reductions": (lambda: _Difference(["sum", "max", "std"]), False),
    "own update": (lambda: _Updated("max"), False),
    "heads": (lambda: _Heads(), False),
    "of nodes and edges": (lambda: _Both(), False),
}

# Whose messages do not exist on a CPU where there are more edges than nodes.
GATES = ("CGConv", "ResGatedGraphConv", "FiLMConv", "LEConv", "GINEConv mean", "EdgeConv mean")
LARGE = 100


class _WithInitial(tnn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, x, edge_index)


class _Difference(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return (x_i - x_j).cumsum(-1) * x_j


class _Updated(_Difference):
    def update(self, inputs, x):
        return inputs + x


class _Heads(_Difference):
    def __init__(self):
        super().__init__(node_dim=0)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x.view(x.shape[0], 2, -1)).flatten(1)


class _Both(_Difference):
    """Takes ids, sizes, values of nodes that it gathers itself, and values of edges."""

    def forward(self, x, edge_index):
        per_edge = torch.linspace(0, 1, edge_index.shape[1], dtype=x.dtype, device=x.device)
        return self.propagate(edge_index, x=x, table=x.detach().cos(), per_edge=per_edge)

    def message(self, x_j, table, per_edge, edge_index_j, index, size_i):
        return x_j * table[edge_index_j] * per_edge.view(-1, 1) + index.view(-1, 1) / max(size_i, 1)


def arguments(name, graph, device, dtype=torch.float64):
    edge_index, num_src, num_dst = GRAPHS[graph]()
    n = max(num_src, num_dst)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, F, generator=generator, dtype=dtype).to(device)
    edge_index = edge_index.to(device)
    attr = torch.rand(edge_index.shape[1], EDGE, generator=generator, dtype=dtype).to(device)
    return (x, edge_index, attr) if LAYERS[name][1] else (x, edge_index)


def layer_of(name, device, dtype=torch.float64):
    torch.manual_seed(0)
    return LAYERS[name][0]().to(device, dtype)


def kinds(report):
    return {kernel for _, kernel, _ in report.kernels}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graph", ["random", "hub", "no_edges", "isolated", "self_loops_and_duplicates", "sorted"])
def test_layer(name, graph, device):
    report = compare(layer_of(name, device), *arguments(name, graph, device), tolerance=1e-9)
    gates = name in GATES and GRAPHS[graph]()[0].shape[1] >= LARGE
    assert any(kind.startswith("gates" if gates else ("gathers", "edges", "gar", "gas", "gates")) for kind in kinds(report))


@pytest.mark.parametrize("name", ["EdgeConv", "GINEConv mean", "_mean", "several reductions"])
def test_dtypes(name, device):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)):
        layer = _Difference("mean") if name == "_mean" else layer_of(name, device, dtype)
        compare(layer, *arguments(name if name in LAYERS else "EdgeConv", "random", device, dtype), tolerance=tolerance)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_flow_and_ids(flow, ids, device):
    x, edge_index = arguments("EdgeConv", "random", device)
    for aggr in ("sum", "mean", "max"):
        layer = _Difference(aggr, flow=flow)
        assert not compare(layer, x, edge_index, tolerance=1e-9).fallbacks
        expected = run(layer, x, edge_index)  # not PyG's with int32: torch's index_add is wrong for strided gradients there
        gnnfast.clear_report()
        for f, e in zip(run(layer, x, edge_index.to(ids)), expected):
            assert relative_error(f, e) < 1e-12
        assert kinds(gnnfast.report()) == {f"gar {aggr}"}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
def test_results_may_be_written_into(aggr, heads, device):
    """At once, and where nothing was recorded and later is. An extremum is what its gradient is computed from, as in PyG."""
    x, edge_index = arguments("EdgeConv", "random", device)
    x = (x if heads == 1 else x.view(-1, heads, F // heads)).requires_grad_()
    layer = _Difference(aggr, node_dim=0)

    def written():
        with torch.no_grad():
            before = layer(x, edge_index)
        before += x.sum()
        out = layer(x, edge_index)
        out.relu_().add_(before)
        try:
            return out.detach(), torch.autograd.grad(out.sum(), x)[0]
        except RuntimeError as error:
            return out.detach(), torch.tensor(float("modified by an inplace operation" in str(error)))

    gnnfast.clear_report()
    found = written()
    assert kinds(gnnfast.report())
    gnnfast.disable()
    try:
        expected = written()
    finally:
        gnnfast.enable()
    assert all(f.shape == e.shape and relative_error(f, e) < 1e-12 for f, e in zip(found, expected))


def test_bipartite(device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    edge_index = edge_index.to(device)
    source, target = (torch.randn(n, F, device=device, dtype=torch.float64) for n in (num_src, num_dst))

    class Pair(tnn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.EdgeConv(mlp(2 * F))

        def forward(self, a, b):
            return self.conv((a, b), edge_index)

    assert kinds(compare(Pair().double(), source, target, tolerance=1e-9)) == {"gathers and max"}


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
def test_second_derivatives(aggr, device):
    x, edge_index = arguments("EdgeConv", "random", device)
    layer = nn.EdgeConv(mlp(2 * F), aggr=aggr).to(device, torch.float64)

    def second():
        leaf = x.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(layer(leaf, edge_index).pow(2).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), [leaf, *layer.parameters()], allow_unused=True)

    found = second()
    gnnfast.disable()
    expected = second()
    gnnfast.enable()
    for f, e in zip(found, expected):
        assert (f is None) == (e is None) and (e is None or relative_error(f, e) < 1e-9)


def test_extremum_shares_its_gradient_as_scatter_does(device):
    """Messages that tie with each other, and with the 0 that torch's scatter starts from."""
    edge_index = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 0, 1, 1, 2]], device=device)
    x = torch.tensor([[1.0, 0.0], [1.0, -1.0], [0.5, 0.0], [1.0, 0.0]], device=device, dtype=torch.float64)

    class Tied(_Difference):
        def message(self, x_j):
            return torch.stack([x_j.abs() * x_j.sign()]).sum(0)

    for aggr in ("max", "min"):
        report = compare(Tied(aggr), x, edge_index, tolerance=1e-12)
        assert kinds(report) == {f"gathers and {aggr}"}


def test_errors_are_pygs(device):
    if device.type == "cuda":
        pytest.skip("an id out of range ends a process in PyG's own index_select")
    x, edge_index = arguments("EdgeConv", "random", device)
    layer, wrong = _Difference(), edge_index.clone()
    wrong[0, 0] = 99
    with pytest.raises(IndexError, match="larger than 29"):
        layer(x, wrong)

    class Fails(_Difference):
        def message(self, x_j):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Fails()(x, edge_index)


def test_a_dimension_that_messages_do_not_have_is_an_error(device):
    class Flat(_Difference):
        def message(self, x_j):
            return x_j.sum(1)

    x, edge_index = arguments("EdgeConv", "random", device)
    for aggr in ("sum", "max", ["sum", "max"]):
        with pytest.raises(ValueError, match="invalid dimension"):
            Flat(aggr)(x, edge_index)


def test_bipartite_without_edges(device):
    class Both(MessagePassing):
        def forward(self, a, b):
            return self.propagate(torch.empty(2, 0, dtype=torch.int64, device=a.device), x=(a, b))

        def message(self, x_i, x_j):
            return x_i.cumsum(-1) * x_j

    source, target = (torch.randn(n, F, device=device, dtype=torch.float64) for n in (9, 4))
    compare(Both(), source, target)
    with gnnfast.override(bounded="on"):
        compare(Both(), source, target)


def test_arguments_that_came_later_than_what_pyg_generated(device, monkeypatch):
    class Later(_Difference):
        pass

    x, edge_index = arguments("EdgeConv", "random", device)
    layer = Later()
    layer(x, edge_index)
    monkeypatch.setattr(Later, "message", lambda self, x_i, x_j, scale=2.0: (x_i - x_j) * scale)
    report = compare(layer, x, edge_index, tolerance=1e-12)
    assert any("other arguments" in why for _, why in report.fallbacks)


def test_an_argument_named_aggr(device):
    class Named(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x, aggr=3.0)

        def message(self, x_j, aggr=1.0):
            return x_j.cumsum(-1) * aggr

    assert kinds(compare(Named(), *arguments("EdgeConv", "random", device), tolerance=1e-12)) == {"gathers and sum"}


def test_ids_written_into_before_the_backward_pass(device):
    x, edge_index = arguments("EdgeConv", "random", device)
    out = _Difference()(x.requires_grad_(), edge_index)
    edge_index[:, 0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_replaced_functions_are_called(device, monkeypatch):
    x, edge_index = arguments("EdgeConv", "random", device)
    layer = _Difference()
    expected = layer(x, edge_index)
    old = MessagePassing._index_select
    gnnfast.clear_report()
    with monkeypatch.context() as patched:
        patched.setattr(MessagePassing, "_index_select", lambda self, src, index: 2 * old(self, src, index))
        assert not torch.equal(layer(x, edge_index), expected) and gnnfast.report().fallbacks
    gnnfast.clear_report()
    assert torch.equal(layer(x, edge_index), expected) and not gnnfast.report().fallbacks
    handle = layer.register_message_forward_hook(lambda module, inputs, out: 2 * out)
    assert relative_error(layer(x, edge_index), 2 * expected) < 1e-12
    handle.remove()


# ---- in chunks ---------------------------------------------------------------------------------------------------------------
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
            found = _Difference("max")(x, edge_index)
        assert sum(sizes) == edge_index.shape[1]
        with gnnfast.override(bounded="off"), torch.no_grad():
            assert relative_error(found, _Difference("max")(x, edge_index)) < 1e-12
        if graph == "random":
            assert len(sizes) > 3 and max(sizes) < 80


def test_dropout_in_chunks_is_the_same_in_both_passes(device, in_chunks):
    """With a message of nothing but dropout, the gradient is its mask."""

    class Drops(_Difference):
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


class _Normalised(_Difference):
    def __init__(self):
        super().__init__()
        self.norm = tnn.BatchNorm1d(F)

    def message(self, x_j):
        return self.norm(x_j)


class _Mean(_Difference):
    def message(self, x_j):
        return (x_j - x_j.mean(0)).cumsum(-1)


class _Keeps(_Difference):
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


class _Scaled(_Difference):
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


class _Cached(_Difference):
    """Holds values of edges that nobody can take apart."""

    def forward(self, x, edge_index):
        self.values = torch.linspace(0, 1, edge_index.shape[1], dtype=x.dtype, device=x.device).view(-1, 1)
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return (x_j * self.values).cumsum(-1)


class _InTraining(_Difference):
    def message(self, x_j):
        return x_j.cumsum(-1) - x_j.mean(0) if self.training else x_j.sin()


class _Writes(_Difference):
    def forward(self, x, edge_index):
        self.table = torch.full((1, F), 0.5, dtype=x.dtype, device=x.device)
        return self.propagate(edge_index, x=x, table=self.table) * self.table

    def message(self, x_j, table):
        return (x_j * table.add_(1)).cumsum(-1)


class _Spectral(_Difference):
    def __init__(self, parametrised):
        super().__init__()
        norm = tnn.utils.parametrizations.spectral_norm if parametrised else tnn.utils.spectral_norm
        self.linear = norm(tnn.Linear(F, F))

    def message(self, x_j):
        return self.linear(x_j).cumsum(-1)


class _Helped(_Difference):
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


class _Counting(_Difference):
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


class _Holding(_Difference):
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
        layer = _Difference("sum")
        layer.aggr_module.register_forward_hook(lambda module, inputs, out: seen.append(len(inputs[0])))
    else:
        make = getattr(nn.aggr, f"{kind}Aggregation")
        layer = _Difference(make() if kind == "Median" else make(F, F))
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


def test_softmax_aggregation_pays_earlier(monkeypatch):
    """Its operations read and write messages several times as often as others."""
    edge_index, x = torch.zeros(2, 1000, dtype=torch.int64), torch.zeros(10, 16)
    monkeypatch.setitem(select.SMALL, "cpu", select.Small(2 * 1000 * 16 * 4, 2 * 1000 * 16 * 4))
    assert general.pays(nn.GENConv(16, 16), edge_index, {"x": x})
    assert not general.pays(nn.GENConv(16, 16, aggr="max"), edge_index, {"x": x})
    assert general.pays(nn.GENConv(16, 16, aggr="max"), edge_index, {"x": torch.zeros(10, 48)})
