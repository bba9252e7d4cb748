"""Several reductions of messages at once, and what users do with messages and with results."""

from __future__ import annotations

import pytest
import torch
from comparison import compare, same
from graphs import GRAPHS, relative_error
from torch import nn as tnn

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from torch_geometric.nn import aggr
from user_messages import F, Layer, arguments, differences, dots, plain_rows, relu_rows

SEVERAL = [["mean", "min", "max", "std"], ["sum", "var"], "std", ["max", "max", "sum"]]


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("kinds", SEVERAL)
@pytest.mark.parametrize("graph", GRAPHS)
def test_several_reductions(graph, kinds, flow, device):
    """Of plain rows, which are never made, and of rows that exist: each is read once."""
    edge_index, num_src, num_dst = GRAPHS[graph]()
    x = torch.randn(max(num_src, num_dst), F, dtype=torch.float64, device=device)
    attr = torch.rand(edge_index.shape[1], 1, dtype=torch.float64, device=device)
    ways = (plain_rows, "several reductions"), (differences, "gathers and several reductions"), (dots, None)
    for function, kernel in ways:
        report = compare(Layer(function, kinds, flow=flow).double(), x, edge_index.to(device), attr, tolerance=1e-8)
        assert graph == "no_edges" or kernel in {None, *(k for _, k, _ in report.kernels)}
        assert not report.fallbacks


def test_several_reductions_of_fewer_digits_and_of_heads_are_pygs(device):
    edge_index = GRAPHS["random"]()[0].to(device)
    x, attr = torch.randn(30, F, device=device), torch.rand(200, 1, device=device)
    compare(Layer(plain_rows, ["mean", "max"], heads=True), x, edge_index, attr)
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        compare(Layer(plain_rows, ["mean", "max"]).to(dtype), x.to(dtype), edge_index, attr.to(dtype), tolerance=tolerance)
    assert not any("several" in kernel for _, kernel, _ in gnnfast.report().kernels)


def test_several_reductions_that_may_be_sampled(device):
    """Each is asked for by itself, as the setting wants it."""
    edge_index = GRAPHS["hub"]()[0].to(device)
    layer, x = Layer(plain_rows, ["mean", "max"]).to(device).eval(), torch.randn(50, F, device=device)
    with gnnfast.override(sample="fastrand", sample_width=16), torch.no_grad():
        layer(x, edge_index, torch.rand(3000, 1, device=device))
    assert not any("several" in kernel for _, kernel, _ in gnnfast.report().kernels)
    assert any(kernel.startswith("sampled") for _, kernel, _ in gnnfast.report().kernels)


def test_features_of_several_reductions_may_be_written_into(device):
    edge_index = GRAPHS["random"]()[0].to(device)
    leaf = torch.randn(30, F, dtype=torch.float64, device=device, requires_grad=True)
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        x = leaf * 2
        out = nn.SAGEConv(F, F, aggr=["mean", "max", "std"], root_weight=False, bias=False).to(device, torch.float64)
        torch.nn.init.ones_(out.lin_l.weight)
        out = out(x, edge_index)
        x.zero_()
        results.append(torch.autograd.grad(out.sin().sum(), leaf)[0])
    gnnfast.enable()
    assert relative_error(*results) < 1e-9


@pytest.mark.parametrize("where", ["combine", "an aggregation", "a hook", "a hook on PyG's own part", "its forward", "a subclass"])
def test_several_reductions_that_a_user_changes(where, device, monkeypatch):
    edge_index = GRAPHS["random"]()[0].to(device)
    x = torch.randn(30, F, dtype=torch.float64, device=device)
    layer = nn.SAGEConv(F, F, aggr=["mean", "max"]).to(device, torch.float64)
    layer(x, edge_index)
    multiple = layer.aggr_module
    if where == "combine":
        multiple.combine = lambda found: torch.cat(found[::-1], -1)
    elif where == "an aggregation":
        original = nn.MeanAggregation.forward
        monkeypatch.setattr(nn.MeanAggregation, "forward", lambda self, *args, **kwargs: 2 * original(self, *args, **kwargs))
    elif where == "a hook":
        multiple.aggrs[1].register_forward_hook(lambda module, inputs, out: 3 * out)
    elif where == "a hook on PyG's own part":
        multiple.fused_aggr.register_forward_hook(lambda module, inputs, found: [3 * out for out in found])
    elif where == "its forward":
        fused = multiple.fused_aggr.forward
        multiple.fused_aggr.forward = lambda *args, **kwargs: [3 * out for out in fused(*args, **kwargs)]
    else:
        multiple.__class__ = type("Negated", (type(multiple),), {"combine": lambda self, found: -torch.cat(found, -1)})
    compare(layer, x, edge_index, tolerance=1e-9)


def test_messages_that_are_summed_may_be_written_into(device):
    """Several sums and means keep none of them."""
    edge_index = GRAPHS["random"]()[0].to(device)
    x, attr = torch.randn(30, F, dtype=torch.float64, device=device, requires_grad=True), torch.rand(200, 1, device=device)

    def kept_and_written(m, i, j, attr, at):
        messages = (j - i) * 2
        m.kept = [messages]
        return messages

    layer, results = Layer(kept_and_written, ["sum", "mean"]), []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        out = layer(x, edge_index, attr)
        with torch.no_grad():
            layer.kept[0].zero_()
        results.append(torch.autograd.grad(out.sin().sum(), x)[0])
    gnnfast.enable()
    assert relative_error(*results) < 1e-9


@pytest.mark.parametrize("function", [plain_rows, differences, relu_rows])
@pytest.mark.parametrize("kind", ["sum", "mean", "std", ["mean", "max", "std"], "softmax"])  # a maximum may not in PyG either
def test_results_may_be_written_into(kind, function, device):
    x, edge_index, attr = arguments("random", device)
    layer = Layer(function, kind).to(device, torch.float64)
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        leaf = x.clone().requires_grad_()
        out = layer(leaf, edge_index, attr)
        out = tnn.functional.relu(out.mul_(3), inplace=True)
        results.append(torch.autograd.grad(out.sin().sum(), leaf)[0])
    gnnfast.enable()
    assert relative_error(*results) < 1e-9


REASSEMBLED = {
    "replaced": lambda several: several.aggrs.__setitem__(0, aggr.SumAggregation()),
    "in another order": lambda several: setattr(several, "aggrs", torch.nn.ModuleList(list(several.aggrs)[::-1])),
    "a part of one": lambda several: setattr(several.aggrs[1], "var_aggr", aggr.SumAggregation()),
    "none fused": lambda several: setattr(several, "fused_aggr", None),
}


@pytest.mark.parametrize("change", REASSEMBLED)
def test_aggregations_that_are_others_than_when_they_were_put_together(change, device):
    """PyG computes those that were there then."""
    edge_index, nodes, _ = GRAPHS["random"]()
    edge_index, x = edge_index.to(device), torch.randn(nodes, 6, dtype=torch.float64, device=device)
    layer = nn.SimpleConv(["mean", "std", "max"]).double().to(device)
    same(lambda: [layer(x, edge_index)])
    REASSEMBLED[change](layer.aggr_module)
    same(lambda: [layer(x, edge_index)])
