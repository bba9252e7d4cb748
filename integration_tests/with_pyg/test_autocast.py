"""Attention layers under autocast: fused, in the dtypes and with the numbers of PyG's."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, relative_error

import gnnfast
from gnnfast import _native

pytest.importorskip("torch_geometric", reason="PyG is not installed")
if not _native.cpu.loaded:
    pytest.skip(_native.cpu.reason, allow_module_level=True)
from torch_geometric import nn

F = 8


@pytest.mark.parametrize("first", ["features", "a linear layer's"])
@pytest.mark.parametrize("name", ["GATConv", "GATConv, residual", "GATv2Conv", "TransformerConv", "TransformerConv, beta"])
def test_layers(name, first, device):
    """Coefficients have more digits than what linear layers give, and so have results; PyG's gradients of rows at edges are rounded
    one by one, so only they may be off."""
    make = {
        "GATConv": lambda: nn.GATConv(F, 4, heads=3),
        "GATConv, residual": lambda: nn.GATConv(F, 4, heads=3, residual=True, add_self_loops=False),
        "GATv2Conv": lambda: nn.GATv2Conv(F, 4, heads=3),
        "TransformerConv": lambda: nn.TransformerConv(F, 4, heads=3),
        "TransformerConv, beta": lambda: nn.TransformerConv(F, 4, heads=3, beta=True, concat=False),
    }[name]
    edge_index, n, _ = GRAPHS["random"]()
    layer, before, edge_index = make().to(device), torch.nn.Linear(F, F).to(device), edge_index.to(device)
    x, results = torch.randn(n, F, device=device), []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        gnnfast.clear_report()
        leaf = x.clone().requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            out = layer(leaf if first == "features" else before(leaf), edge_index)
            loss = out.sin().sum()
        served = any("attention" in kernel or kernel == "edge softmax" for _, kernel, _ in gnnfast.report().kernels)
        assert served == (on and (device.type == "cuda" or "Transformer" not in name))
        results.append([out, *torch.autograd.grad(loss, (leaf, *layer.parameters()))])
    gnnfast.enable()
    largest = max(float(e.norm()) for e in results[1][1:])  # that of keys' biases is 0 but for rounding
    for f, e in zip(*results):
        assert f.dtype == e.dtype and (f - e).norm() < 3e-2 * max(float(e.norm()), 0.05 * largest)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 16), (16, 64)])
@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_a_backward_pass_under_autocast(aggr, inputs, outputs, device):
    edge_index, n, _ = GRAPHS["random"]()
    layer, x, results = nn.SAGEConv(inputs, outputs, aggr=aggr).to(device), torch.randn(n, inputs, device=device), []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        leaf = x.clone().requires_grad_()
        out = layer(leaf, edge_index.to(device))
        with torch.autocast(device.type, torch.bfloat16):
            results.append(torch.autograd.grad(out.sin().sum(), (leaf, *layer.parameters())))
    gnnfast.enable()
    assert all(f.dtype == e.dtype and relative_error(f, e) < 3e-2 for f, e in zip(*results))


@pytest.mark.parametrize("make", [nn.TransformerConv, nn.GATConv, nn.GATv2Conv])
def test_few_digits_or_edge_features_are_pygs(make, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = torch.randn(n, F, device=device), torch.randn(edge_index.shape[1], 3, device=device)
    for layer, args in (
        (make(F, 5, edge_dim=3), (x, edge_index.to(device), attr)),
        (make(F, 5).bfloat16(), (x.bfloat16(), edge_index.to(device))),
    ):
        layer, results = layer.to(device), []
        for on in (True, False):
            (gnnfast.enable if on else gnnfast.disable)()
            with torch.autocast(device.type, torch.bfloat16):
                results.append(layer(*args))
        gnnfast.enable()
        assert results[0].dtype == results[1].dtype and relative_error(*(r.float() for r in results)) < 2e-2


@pytest.mark.parametrize("width", [96, 160, 256])
def test_wide_heads_compiled(width, device):
    """Rows of half precision, for which wider heads have kernels, are widened."""
    before, layer = torch.nn.Linear(F, F).to(device), nn.GATv2Conv(F, width).to(device)
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        torch._dynamo.reset()
        call = torch.compile(layer, backend="aot_eager") if on else layer
        with torch.autocast(device.type, torch.bfloat16):
            results.append(call(before(x), edge_index))
    gnnfast.enable()
    assert results[0].dtype == results[1].dtype and relative_error(*results) < 2e-2
