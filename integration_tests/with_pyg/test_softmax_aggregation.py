"""Softmax aggregation, its temperatures, and which of them are PyG's own."""

from __future__ import annotations

import pytest
import torch
from comparison import compare
from graphs import GRAPHS, relative_error

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric.nn import aggr
from user_messages import F, Layer, arguments, differences, plain_rows, relu_rows

SOFTENED = {
    "softmax": lambda: "softmax",
    "a temperature": lambda: aggr.SoftmaxAggregation(t=-0.3),
    "a temperature learned": lambda: aggr.SoftmaxAggregation(t=0.5, learn=True),
    "temperatures": lambda: aggr.SoftmaxAggregation(learn=True, channels=F),
}


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", SOFTENED)
@pytest.mark.parametrize("graph", GRAPHS)
def test_softmax_aggregation(graph, name, flow, device):
    """Of rows at nodes, of which each is read once, and of rows that exist."""
    edge_index, num_src, num_dst = GRAPHS[graph]()
    x = torch.randn(max(num_src, num_dst), F, dtype=torch.float64, device=device)
    attr = torch.rand(edge_index.shape[1], 1, dtype=torch.float64, device=device)
    for function, kernel in ((relu_rows, "softmax aggregation"), (differences, "gathers and softmax aggregation")):
        layer = Layer(function, SOFTENED[name](), flow=flow).to(device, torch.float64)
        if name == "temperatures":
            torch.nn.init.normal_(layer.aggr_module.t)
        report = compare(layer, x, edge_index.to(device), attr, tolerance=1e-9)
        assert graph != "random" or kernel in {k for _, k, _ in report.kernels}
        assert not report.fallbacks


@pytest.mark.parametrize("name", SOFTENED)
@pytest.mark.parametrize("function", [relu_rows, differences])
def test_second_derivatives_of_softmax_aggregation(function, name, device):
    layer = Layer(function, SOFTENED[name]()).to(device, torch.float64)
    x, edge_index, attr = arguments("random", device)
    x.requires_grad_()
    leaves = [x, *layer.aggr_module.parameters()]
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        grads = torch.autograd.grad(layer(x, edge_index, attr).sin().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    gnnfast.enable()
    assert all(relative_error(*pair) < 1e-9 for pair in zip(*results))


def test_softmax_aggregations_that_are_pygs(device):
    """Half a gradient, heads, hooks, and functions of the user's own; numbers agree."""
    x, edge_index, attr = arguments("random", device)

    class Own(aggr.SoftmaxAggregation):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    hooked = aggr.SoftmaxAggregation()
    hooked.register_forward_hook(lambda module, inputs, out: 3 * out)
    for given, heads in ((aggr.SoftmaxAggregation(semi_grad=True), False), (Own(), False), (hooked, False), ("softmax", True)):
        layer = Layer(relu_rows, given, heads).to(device, torch.float64)
        report = compare(layer, x, edge_index, attr, tolerance=1e-9)
        assert not any("softmax aggregation" in kernel for _, kernel, _ in report.kernels)
    layer = Layer(relu_rows, "softmax").to(device, torch.float64)
    layer.aggr_module.forward = lambda inputs, *args, **kwargs: (
        5 * type(layer.aggr_module).forward(layer.aggr_module, inputs, *args, **kwargs)
    )
    compare(layer, x, edge_index, attr, tolerance=1e-9)
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        layer = Layer(relu_rows, "softmax").to(device, dtype)
        compare(layer, x.to(dtype), edge_index, attr.to(dtype), tolerance=tolerance)


def test_functions_of_softmax_aggregations_that_are_replaced(device, monkeypatch):
    from torch_geometric.nn.aggr import basic

    x, edge_index, attr = arguments("random", device)
    layer = Layer(relu_rows, "softmax").to(device, torch.float64)
    before = layer(x, edge_index, attr)
    known = basic.softmax
    monkeypatch.setattr(basic, "softmax", lambda *args, **kwargs: 2 * known(*args, **kwargs))
    assert relative_error(layer(x, edge_index, attr), 2 * before) < 1e-12


def test_features_of_softmax_aggregation_may_be_written_into(device):
    _, edge_index, attr = arguments("random", device)
    leaf = torch.randn(30, F, dtype=torch.float64, device=device, requires_grad=True)
    layer = Layer(plain_rows, aggr.SoftmaxAggregation(learn=True)).to(device, torch.float64)
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        x = leaf * 2
        out = layer(x, edge_index, attr)
        x.zero_()
        results.append(torch.autograd.grad(out.sin().sum(), [leaf, layer.aggr_module.t]))
    gnnfast.enable()
    assert all(relative_error(*pair) < 1e-9 for pair in zip(*results))


def test_temperature_that_is_written_into_before_the_backward_pass(device):
    """As in PyG, an error of autograd."""
    x, edge_index, attr = arguments("random", device)
    layer = Layer(relu_rows, aggr.SoftmaxAggregation(learn=True)).to(device, torch.float64)
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        out = layer(x.clone().requires_grad_(), edge_index, attr)
        with torch.no_grad():
            layer.aggr_module.t.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    gnnfast.enable()


def test_features_of_nodes_without_edges_do_not_reach_a_temperature(device):
    x, edge_index, attr = arguments("isolated", device)
    edge_index = edge_index.repeat(1, 20)  # more than nodes
    alone = [n for n in range(len(x)) if n not in edge_index[0].tolist()]
    x[alone[0]], x[alone[1]] = torch.inf, torch.nan
    layer = Layer(lambda m, i, j, attr, at: j + 1.0, aggr.SoftmaxAggregation(learn=True)).to(device, torch.float64)
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        leaf = x.clone().requires_grad_()
        out = layer(leaf, edge_index, attr.repeat(20, 1))
        results.append(torch.autograd.grad(out.sin().sum(), [layer.aggr_module.t, leaf]))
    gnnfast.enable()
    assert all(f.isfinite().all() for f in results[0])
    assert all(relative_error(*pair) < 1e-9 for pair in zip(*results))


def test_temperatures_that_pyg_refuses_are_refused(device):
    x, edge_index, attr = arguments("random", device)
    for channels, t in ((12, torch.ones(1)), (F // 2, torch.ones(F)), (F // 2, 1.0), (1, 10**30)):
        aggregation = aggr.SoftmaxAggregation()
        aggregation.channels = channels
        aggregation.t = t.to(device, torch.float64) if isinstance(t, torch.Tensor) else t
        layer, errors = Layer(relu_rows, aggregation).to(device, torch.float64), []
        for on in (True, False):
            (gnnfast.enable if on else gnnfast.disable)()
            with pytest.raises((RuntimeError, AssertionError, OverflowError)) as error:
                layer(x, edge_index, attr)
            errors.append(error.type)
        gnnfast.enable()
        assert errors[0] is errors[1]


def test_temperature_alone_is_learned_and_written_into(device):
    """PyG keeps it for the gradient of features only."""
    x, edge_index, attr = arguments("random", device)
    layer = Layer(plain_rows, aggr.SoftmaxAggregation(learn=True)).to(device, torch.float64)
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        layer.aggr_module.t.data.fill_(0.7)
        out = layer(x, edge_index, attr)
        with torch.no_grad():
            layer.aggr_module.t.add_(1)
        results.append(torch.autograd.grad(out.sin().sum(), layer.aggr_module.t)[0])
    gnnfast.enable()
    assert relative_error(*results) < 1e-9
