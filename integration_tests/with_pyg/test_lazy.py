"""Messages whose gathered features do not have to exist: what is made of them, and whatever else users do with them."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from comparison import compare
from graphs import relative_error
from torch import nn as tnn

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax
from user_messages import ATTENDS, GATES, MESSAGES, SUMS, C, Doubled, F, H, Layer, arguments, attends, kept, shares, written_weight

# Where there are no gates, nor sums.
FUSED_ANYWAY = (
    "a weight for each feature",
    "gate",
    "gate with edges",
    "gate of weighted rows",
    "gate of heads alone",
    "side by side",
)


PARTS = "a part", "chunks", "weighted rows and others", "gates and others", "side by side, of both ends"


@pytest.mark.parametrize("graph", ["random", "hub", "isolated", "self_loops_and_duplicates", "no_edges"])
@pytest.mark.parametrize("name", MESSAGES)
def test_message(name, graph, device):
    function, heads, fused = MESSAGES[name]
    for reduce in ("sum", "mean", "max"):
        layer = Layer(function, reduce, heads).to(device, torch.float64)
        report = compare(layer, *arguments(graph, device), tolerance=1e-9)
        assert not report.fallbacks
        kernels = {kernel for _, kernel, _ in report.kernels}
        if fused is None and reduce == "sum":
            assert graph == "no_edges" or "sum of relu(x_j + edge)" in kernels
        elif graph == "random" and fused == GATES and reduce != "max":
            assert f"gates, {reduce}" in kernels
        elif graph == "random" and fused == ATTENDS and reduce == "sum":
            assert "attention" in kernels and "edge softmax" not in kernels
        elif graph == "random" and (fused in (True, ATTENDS) or (fused == SUMS and reduce != "max") or name in FUSED_ANYWAY):
            assert {f"gar {reduce}", f"gas {reduce}", *(["attention"] if device.type == "cuda" or fused == SUMS else [])} & kernels
        elif graph == "random":
            assert f"gathers and {reduce}" in kernels or (fused is None and f"gates, {reduce}" in kernels)


@pytest.mark.parametrize("name", MESSAGES)
def test_what_runs_on_rows_of_edges_is_said(name, device, monkeypatch):
    """Of messages whose sum is a kernel's."""
    monkeypatch.setattr("gnnfast.lazy.rows.NARROW", F - 1)
    function, heads, fused = MESSAGES[name]
    Layer(function, "sum", heads).to(device, torch.float64)(*arguments("random", device))
    reasons = {reason for _, kernel, reason in gnnfast.report().kernels if kernel == "rows of edges"}
    ran = {"mean over edges": "mean", "numpy": "cpu", "sum attention by a linear layer": "getitem"}
    ran["sum attention of a linear layer"] = "leaky_relu"
    if fused:
        assert reasons == ({f"message() runs {ran[name]} on [edges, {F}]"} if name in ran else set())


@pytest.mark.parametrize(
    "name", ["attention", "dots", "joined", "a weight for each feature", "heads summed", "dot attention", "elements", *PARTS]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_dtypes(name, dtype, tolerance, device):
    function, heads, _ = MESSAGES[name]
    compare(Layer(function, "sum", heads).to(device, dtype), *arguments("random", device, dtype), tolerance=tolerance)


@pytest.mark.parametrize(
    "name", ["attention", "dots", "joined", "a weight for each feature", "rows", "dot attention", "within rows", "squares", *PARTS]
)
def test_second_derivatives(name, device):
    function, heads, _ = MESSAGES[name]
    layer = Layer(function, "sum", heads).to(device, torch.float64)
    x, edge_index, attr = arguments("random", device)

    def second():
        leaf = x.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(layer(leaf, edge_index, attr).pow(2).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), [leaf, *layer.parameters()], allow_unused=True)

    found = second()
    gnnfast.disable()
    expected = second()
    gnnfast.enable()
    for f, e in zip(found, expected):
        assert (f is None) == (e is None) and (e is None or relative_error(f, e) < 1e-9)


@pytest.mark.parametrize(
    "name", ["dots", "rows", "a weight for each feature", "joined", "scaled", "dot attention", "within rows", "as it is", *PARTS]
)
def test_features_written_into_afterwards(name, device):
    """PyG keeps gathered copies, so its users may write into theirs."""
    layer = Layer(MESSAGES[name][0]).to(device, torch.float64)
    x, edge_index, attr = arguments("random", device)

    def run():
        leaf = x.clone().requires_grad_()
        h = leaf * 1
        out = layer(h, edge_index, attr)
        h.mul_(2)
        out.add_(h[:, :1])
        return torch.autograd.grad(out.pow(2).sum(), leaf)[0]

    found = run()
    gnnfast.disable()
    expected = run()
    gnnfast.enable()
    assert relative_error(found, expected) < 1e-9


@pytest.mark.parametrize("name", [name for name in MESSAGES if name.startswith(("sum attention", "sums", "narrow", "joined a"))])
def test_narrow_sums(name, device, monkeypatch):
    """Which are no rows of features, as elsewhere."""
    monkeypatch.setattr("gnnfast.lazy.operations.WIDE", F + 1)
    for graph in ("random", "no_edges"):
        test_message(name, graph, device)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_attention_with_heads_summed(reduce, device):
    layer = Layer(lambda *given: attends(*given).view(-1, H, C).sum(1), reduce).to(device, torch.float64)
    report = compare(layer, *arguments("random", device), tolerance=1e-9)
    assert reduce == "max" or f"gar {reduce}" in {kernel for _, kernel, _ in report.kernels}


@pytest.mark.parametrize("dropout", ["kernel", "framework"])
def test_attention_with_dropout(dropout, device):
    """The kernel draws it from a seed of torch's generator, unless it is to be the framework's."""
    layer = Layer(lambda m, i, j, attr, at: j * tnn.functional.dropout(shares(m, i, j, attr, at), 0.5, m.training).sum(1, True))
    fused = Layer(lambda m, i, j, attr, at: j * tnn.functional.dropout(softmax((i * j).sum(-1, True), *at), 0.5, m.training))
    x, edge_index, _ = inputs = arguments("random", device)
    with gnnfast.override(dropout=dropout):
        for model in (layer.to(device, torch.float64), fused.to(device, torch.float64)):
            compare(model.eval(), *inputs, tolerance=1e-9)
            model.train()
            torch.manual_seed(0)
            first = model(*inputs)
            torch.manual_seed(0)
            assert torch.equal(model(*inputs), first) and not torch.equal(model(*inputs), first)
            if dropout == "framework" or model is layer:
                gnnfast.disable()
                torch.manual_seed(0)
                expected = model(*inputs)
                gnnfast.enable()
                assert relative_error(first, expected) < 1e-9
        ones = torch.ones(x.shape[0], F, device=device, dtype=torch.float64)
        sums = torch.stack([fused(ones, edge_index, None) for _ in range(400)])  # of shares that are 0 or twice as large
        with_edges = torch.zeros(x.shape[0], device=device).index_fill_(0, edge_index[1], 1)
        assert relative_error(sums.mean(0)[:, 0], with_edges) < 0.2 and sums.std(0).max() > 0.1


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("graph", ["random", "hub", "isolated", "self_loops_and_duplicates", "no_edges"])
def test_softmax_of_scores_that_exist(graph, given, device):
    """Of as many nodes as there are, or as PyG finds."""
    layer = Layer(lambda m, i, j, attr, at: j * softmax((m.lin(i) * j.cumsum(1)).sum(1, True), *(at if given else at[:1])))
    report = compare(layer.to(device, torch.float64), *arguments(graph, device), tolerance=1e-9)
    assert not report.fallbacks and (graph == "no_edges" or "edge softmax" in {kernel for _, kernel, _ in report.kernels})


@pytest.mark.parametrize("heads", [1, 2, 8, 40])
@pytest.mark.parametrize("graph", ["random", "hub", "isolated", "self_loops_and_duplicates", "no_edges"])
def test_softmax_of_scores_that_could_be_summed(graph, heads, device):
    """For which there are kernels, but none that makes a softmax of them: they exist, and their softmax is one kernel."""
    layer = Layer(lambda m, i, j, attr, at: j * softmax((i - j).repeat(1, 5)[:, :heads].tanh(), *at).sum(1, True))
    whole = Layer(lambda m, i, j, attr, at: j * softmax((i - j).tanh(), *at))
    for each in (layer, whole):
        report = compare(each.to(device, torch.float64), *arguments(graph, device), tolerance=1e-9)
        assert graph == "no_edges" or "edge softmax" in {kernel for _, kernel, _ in report.kernels}


def test_softmax_of_other_edges(device):
    """A message() that turns its edges around, or calls another layer, gets what it asks for."""
    inner = Layer(lambda m, i, j, attr, at: j * softmax(i.exp().sum(1, True), at[0])).to(device, torch.float64)
    x, edge_index, attr = arguments("random", device)

    def others(m, i, j, attr, at):
        return j.exp() * softmax(j.cos(), edge_index[0], num_nodes=at[2]) + inner(x, edge_index.flip(0), None)[at[0]]

    compare(Layer(others).to(device, torch.float64), x, edge_index, attr, tolerance=1e-9)


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_features_of_edges_written_into_afterwards(reduce, device):
    """PyG keeps messages, not what they were made of."""
    layer = Layer(lambda m, i, j, attr, at: torch.cat([j * m.att.view(F), attr], -1), reduce).to(device, torch.float64)
    x, edge_index, attr = arguments("random", device)

    def run():
        of_edges = attr.clone().requires_grad_() * 1
        out = layer(x, edge_index, of_edges)
        of_edges.detach().mul_(2)
        return torch.autograd.grad(out.pow(2).sum(), [layer.att, of_edges])

    found = run()
    gnnfast.disable()
    expected = run()
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-9 for f, e in zip(found, expected))


def test_what_is_kept_is_as_it_was(device):
    """Rows that a user's function gave to somebody are those of the call."""
    layer = Layer(kept).to(device, torch.float64)
    x, edge_index, attr = arguments("random", device)
    expected = x[edge_index[0]]
    layer(x, edge_index, attr)
    x.zero_()
    rows, seen, product = layer.kept
    assert torch.equal(rows + 0, expected) and torch.equal(seen + 0, expected.view(-1, H, C))
    with torch.no_grad():
        assert torch.equal(product + 0, expected * attr)
    for t in layer.kept:
        assert t.is_contiguous() and not t.requires_grad and t.sum().isfinite() and len(repr(t)) > 20
    layer.kept[0].add_(1)
    assert torch.equal(layer.kept[0] + 0, expected + 1)


def test_weight_that_is_written_into_afterwards(device):
    layer = Layer(written_weight).to(device, torch.float64)
    x, edge_index, attr = arguments("random", device)
    with torch.no_grad():
        found = layer(x, edge_index, attr)
        gnnfast.disable()
        expected = layer(x, edge_index, attr)
        gnnfast.enable()
    assert relative_error(found, expected) < 1e-12


def test_errors_of_the_message_are_its_own(device):
    calls = []

    def fails(m, i, j, attr, at):
        calls.append(type(j))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Layer(fails).to(device, torch.float64)(*arguments("random", device))
    assert calls[-1] is torch.Tensor


def test_state_after_a_second_run(device):
    """A function that cannot run without rows draws and counts as in PyG, although it had begun before."""

    def draws(m, i, j, attr, at):
        return m.norm(i) * Doubled.apply(j) * torch.rand_like(attr)

    def layer():
        made = Layer(draws).to(device, torch.float64)
        made.norm = tnn.BatchNorm1d(F).to(device, torch.float64)
        return made

    compare(layer(), *arguments("random", device), tolerance=1e-9)
    found, expected = layer(), layer()
    found(*arguments("random", device))
    gnnfast.disable()
    expected(*arguments("random", device))
    gnnfast.enable()
    assert int(found.norm.num_batches_tracked) == 1
    assert relative_error(found.norm.running_mean, expected.norm.running_mean) < 1e-12


class _Tally:
    """Not a module."""

    def __init__(self):
        self.total = 0

    def __call__(self, x):
        return self.add(x)

    def add(self, x):
        self.total += 1
        return x * self.total


def _added(tally, x):
    return tally.add(x)


@pytest.mark.parametrize(
    "seen_by",
    [
        lambda tally: tally,
        lambda tally: tally.add,
        lambda tally: functools.partial(_added, tally),
        lambda tally: functools.partial(_Tally.add, tally),
        lambda tally: lambda x: tally.add(x),
        lambda tally: functools.wraps(torch.sin)(lambda x: tally.add(x)),
        lambda tally: SimpleNamespace(__call__=tally.add).__call__,
    ],
    ids=["object", "method", "partial", "partial of a method", "function", "decorated", "of another object"],
)
def test_what_a_layer_holds_runs_once(seen_by, device):
    """Functions and objects that are neither methods of the layer nor modules are looked into as well."""

    def layer(tally):
        made = Layer(lambda m, i, j, attr, at: m.doubled(m.held(j))).to(device, torch.float64)  # which has no gradient of rows
        made.held, made.doubled = seen_by(tally), Doubled.apply
        return made

    found, expected = _Tally(), _Tally()
    args = arguments("random", device)
    out = layer(found)(*args)
    gnnfast.disable()
    assert relative_error(out, layer(expected)(*args)) < 1e-12
    gnnfast.enable()
    assert found.total == expected.total == 1


def test_arguments_written_into_are_written_into_once(device):
    """By a module within a message() that could not run on rows that do not exist."""

    def layer():
        made = Layer(lambda m, i, j, attr, at: m.act(attr) * m.doubled(j)).to(device, torch.float64)
        made.act, made.doubled = tnn.LeakyReLU(0.5, inplace=True), Doubled.apply
        return made

    x, edge_index, _ = arguments("random", device)
    found, expected = (torch.full((edge_index.shape[1], 1), -4.0, dtype=torch.float64, device=device) for _ in range(2))
    out = layer()(x, edge_index, found)
    gnnfast.disable()
    assert relative_error(out, layer()(x, edge_index, expected)) < 1e-12
    gnnfast.enable()
    assert torch.equal(found, expected) and float(found[0]) == -2


def test_layers_without_a_hash(device):
    class Equal(Layer):
        def __eq__(self, other):
            return True

        __hash__ = None

    x, edge_index, attr = arguments("random", device)
    for name in ("dots", "own gradient"):
        layers = [cls(MESSAGES[name][0]).to(device, torch.float64) for cls in (Layer, Equal)]
        for _ in range(2):
            outs = [layer(x, edge_index, attr) for layer in layers]
        assert torch.equal(*outs)  # neither has used its parameters


def test_hooks_within_a_message(device):
    layer = Layer(MESSAGES["rows"][0]).to(device, torch.float64)
    seen = []
    layer.lin.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0], out)) or out * 2)
    x, edge_index, attr = arguments("random", device)
    compare(layer, x, edge_index, attr, tolerance=1e-9)
    layer(x, edge_index, attr)
    assert torch.equal(seen[-1][0] + 0, x[edge_index[0]])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("SuperGATConv MX", lambda: nn.SuperGATConv(F, C, H).eval()),
        ("SuperGATConv SD", lambda: nn.SuperGATConv(F, C, H, attention_type="SD").eval()),
        ("FeaStConv", lambda: nn.FeaStConv(F, C, H)),
        ("ResGatedGraphConv", lambda: nn.ResGatedGraphConv(F, F)),
        ("HypergraphConv", lambda: nn.HypergraphConv(F, F)),
        ("GeneralConv", lambda: nn.GeneralConv(F, F, attention=True, heads=H)),
        ("LEConv", lambda: nn.LEConv(F, F)),
        ("FiLMConv", lambda: nn.FiLMConv(F, F)),
        ("CGConv", lambda: nn.CGConv(F)),
        ("EdgeConv", lambda: nn.EdgeConv(tnn.Linear(2 * F, F))),
    ],
)
def test_layers_of_pyg(name, make, device):
    torch.manual_seed(0)
    x, edge_index, _ = arguments("self_loops_and_duplicates", device)
    report = compare(make().to(device, torch.float64), x, edge_index, tolerance=1e-9)
    gates = name in ("ResGatedGraphConv", "LEConv", "FiLMConv", "CGConv")
    fused = name.split()[0] in ("SuperGATConv", "FeaStConv", "ResGatedGraphConv", "HypergraphConv", "GeneralConv")
    kernels = {kernel for _, kernel, _ in report.kernels}
    assert gates == bool(kernels & {"gates, sum", "gates, mean"})
    assert (fused and not gates) == bool(kernels & {"gar sum", "gas sum", "gar mean", "gas mean"})


@pytest.mark.parametrize("kind", ["add", "softmax", "std"])
@pytest.mark.parametrize("made", [lambda j: (j, 2 * j), lambda j: [j], lambda j: {"j": j}, lambda j: None])
def test_messages_that_are_no_tensors(made, kind, device):
    class Own(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            self.seen = x_j
            return made(x_j)

        def aggregate(self, inputs, index, dim_size):
            return self.seen.new_zeros(dim_size, F).index_add(0, index, self.seen)

    x, edge_index, _ = arguments("random", device)
    compare(Own(kind).to(device), x, edge_index, tolerance=1e-9)
