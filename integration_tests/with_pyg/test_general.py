"""Message passing that no kernel does as a whole: any message(), gathered and reduced by gnnfast."""

from __future__ import annotations

import pytest
import torch
from comparison import both, compare, run, same, without
from graphs import GRAPHS, relative_error
from torch import nn as tnn

import gnnfast
from gnnfast.dispatch import select
from gnnfast.pyg import general

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from general_layers import LAYERS, Difference, F, arguments, kinds, layer_of, mlp
from torch_geometric import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

# Whose messages do not exist on a CPU where there are more edges than nodes.
GATES = ("CGConv", "ResGatedGraphConv", "FiLMConv", "LEConv", "GINEConv mean", "EdgeConv mean")
LARGE = 100


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graph", ["random", "hub", "no_edges", "isolated", "self_loops_and_duplicates", "sorted"])
def test_layer(name, graph, device):
    report = compare(layer_of(name, device), *arguments(name, graph, device), tolerance=1e-9)
    gates = name in GATES and GRAPHS[graph]()[0].shape[1] >= LARGE
    assert any(kind.startswith("gates" if gates else ("gathers", "edges", "gar", "gas", "gates")) for kind in kinds(report))


@pytest.mark.parametrize("name", ["EdgeConv", "GINEConv mean", "_mean", "several reductions"])
def test_dtypes(name, device):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)):
        layer = Difference("mean") if name == "_mean" else layer_of(name, device, dtype)
        compare(layer, *arguments(name if name in LAYERS else "EdgeConv", "random", device, dtype), tolerance=tolerance)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_flow_and_ids(flow, ids, device):
    x, edge_index = arguments("EdgeConv", "random", device)
    for aggr in ("sum", "mean", "max"):
        layer = Difference(aggr, flow=flow)
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
    layer = Difference(aggr, node_dim=0)

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

    class Tied(Difference):
        def message(self, x_j):
            return torch.stack([x_j.abs() * x_j.sign()]).sum(0)

    for aggr in ("max", "min"):
        report = compare(Tied(aggr), x, edge_index, tolerance=1e-12)
        assert kinds(report) == {f"gathers and {aggr}"}


def test_errors_are_pygs(device):
    if device.type == "cuda":
        pytest.skip("an id out of range ends a process in PyG's own index_select")
    x, edge_index = arguments("EdgeConv", "random", device)
    layer, wrong = Difference(), edge_index.clone()
    wrong[0, 0] = 99
    with pytest.raises(IndexError, match="larger than 29"):
        layer(x, wrong)

    class Fails(Difference):
        def message(self, x_j):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Fails()(x, edge_index)


def test_a_dimension_that_messages_do_not_have_is_an_error(device):
    class Flat(Difference):
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
    class Later(Difference):
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
    out = Difference()(x.requires_grad_(), edge_index)
    edge_index[:, 0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_ids_written_into_by_an_aggregation(device):
    class Reversed(Difference):
        def aggregate(self, inputs, index, dim_size=None):
            index.copy_(index.flip(0))
            return scatter(inputs, index, 0, dim_size, "sum")

    x, edge_index = arguments("EdgeConv", "random", device)
    found, expected, _ = both(lambda: Reversed()(x, edge_index.clone()))
    assert relative_error(found, expected) < 1e-12


def test_replaced_functions_are_called(device, monkeypatch):
    x, edge_index = arguments("EdgeConv", "random", device)
    layer = Difference()
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


def test_softmax_aggregation_pays_earlier(monkeypatch):
    """Its operations read and write messages several times as often as others."""
    edge_index, x = torch.zeros(2, 1000, dtype=torch.int64), torch.zeros(10, 16)
    monkeypatch.setitem(select.SMALL, "cpu", select.Small(2 * 1000 * 16 * 4, 2 * 1000 * 16 * 4))
    assert general.pays(nn.GENConv(16, 16), edge_index, {"x": x})
    assert not general.pays(nn.GENConv(16, 16, aggr="max"), edge_index, {"x": x})
    assert general.pays(nn.GENConv(16, 16, aggr="max"), edge_index, {"x": torch.zeros(10, 48)})


AGAINST_THE_FLOW = [(nn.WLConvContinuous, None), (nn.SimpleConv, "mean"), (nn.SimpleConv, "std")]
AGAINST_THE_FLOW += [(make, aggr) for make in (nn.SAGEConv, nn.GraphConv) for aggr in ("mean", ["mean", "max", "std"], "softmax")]


@pytest.mark.parametrize("sizes", [(30, 20), (20, 30), (30, None), (None, 20)])
@pytest.mark.parametrize(("make", "aggr"), AGAINST_THE_FLOW)
def test_sources_without_destinations_against_the_flow(make, aggr, sizes, device):
    """PyG gathers the first of the pair, however many the others are."""
    n = sizes[0] or 30
    edge_index = torch.stack([torch.randint(0, n, (300,)), torch.randint(0, min(n, 20), (300,))]).to(device)
    widths, options = (8, 8) if make in (nn.SAGEConv, nn.GraphConv) else (), {} if aggr is None else {"aggr": aggr}
    layer = make(*widths, flow="target_to_source", **options).double().to(device)

    def step():
        x = torch.randn(n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device).requires_grad_()
        out = layer((x, None), edge_index, size=sizes)
        return [out.detach(), torch.autograd.grad(out.pow(2).sum(), x)[0]]

    try:
        without(step)
    except Exception as error:
        with pytest.raises(type(error)):
            step()
    else:
        same(step, 1e-9)
