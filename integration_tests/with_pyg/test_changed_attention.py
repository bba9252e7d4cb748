"""Whatever users change of GATConv and GATv2Conv, and parts of them that give something else, runs as in PyG."""

from __future__ import annotations

import pytest
import torch
from attention_layers import F, same
from graphs import GRAPHS, relative_error

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn


def _hook(layer):
    layer.register_edge_update_forward_hook(lambda module, inputs, output: output * 2)


def _override(layer):
    layer.edge_update = lambda alpha_j, alpha_i, edge_attr, index, ptr, dim_size: alpha_j + alpha_i


class Subclass(nn.GATConv):
    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
        return super().edge_update(alpha_j, alpha_i, edge_attr, index, ptr, dim_size) * 3


@pytest.mark.parametrize("change", [_hook, _override, None])
def test_what_a_user_changes_runs(change, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = (Subclass if change is None else nn.GATConv)(F, 5, heads=2).to(device)
    layer(x, edge_index)
    if change:
        change(layer)
    found = layer(x, edge_index)
    gnnfast.disable()
    expected = layer(x, edge_index)
    gnnfast.enable()
    assert relative_error(found, expected) < 1e-5


def test_a_replaced_softmax_runs(device, monkeypatch):
    from torch_geometric.nn.conv import gat_conv

    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATConv(F, 5).to(device)
    before = layer(x, edge_index)
    monkeypatch.setattr(gat_conv, "softmax", lambda src, index, ptr, size: src * 0)
    assert layer(x, edge_index).abs().sum() == layer.bias.abs().sum() * n and before.abs().sum() > 0


def _edge_update(layer):
    layer.edge_update = lambda x_j, x_i, edge_attr, index, ptr, dim_size: (x_i + x_j).sum(-1)


def _of_class(layer):
    class Other(type(layer)):
        def edge_update(self, x_j, x_i, edge_attr, index, ptr, dim_size):
            return (x_i + x_j).sum(-1)

    layer.__class__ = Other


@pytest.mark.parametrize("change", [_edge_update, _of_class])
def test_what_a_user_changes_of_gatv2_runs(change, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATv2Conv(F, 5, heads=2).to(device)
    change(layer)
    found = layer(x, edge_index)
    gnnfast.disable()
    expected = layer(x, edge_index)
    gnnfast.enable()
    assert relative_error(found, expected) < 1e-5


class Updater(nn.GATConv):
    def edge_updater(self, *args, **kwargs):
        return super().edge_updater(*args, **kwargs) * 2


def test_parts_that_give_something_else(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.GATConv((F, F), 4, heads=2).to(device)
    layer.lin_src.register_forward_hook(lambda module, inputs, out: out * 2)
    layer((x, x), edge_index)
    assert same(lambda: layer((x, x), edge_index))
    if device.type == "cpu":  # on a GPU PyG itself ends in a device-side assertion
        layer.lin_src.register_forward_hook(lambda module, inputs, out: out[:3])
        assert same(lambda: layer((x, x), edge_index))
    layer = nn.GATConv(F, 4).to(device)
    layer.att_dst = torch.nn.Parameter(layer.att_dst.detach().double())
    assert same(lambda: layer(x, edge_index))
    for option, value in (("dropout", 1.5), ("negative_slope", "0.2")):
        layer = nn.GATConv(F, 4).to(device)
        setattr(layer, option, value)
        assert same(lambda layer=layer: layer(x, edge_index))
    layer = Updater(F, 4).to(device)
    assert same(lambda: layer(x, edge_index))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_linear_layers_wider_than_the_heads(make, heads, device):
    """PyG cuts what they give into more rows, all of which get loops."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = make(F, F, heads=heads)
    for name in ("lin", "lin_l", "lin_r") if make is nn.GATConv else ("lin_l", "lin_r"):
        if getattr(layer, name, None) is not None:
            setattr(layer, name, torch.nn.Linear(F, 2 * heads * F))
    layer.to(device)
    for _ in range(3):
        found = layer(x, edge_index)
        gnnfast.disable()
        expected = layer(x, edge_index)
        gnnfast.enable()
        assert found.shape == expected.shape and relative_error(found, expected) < 1e-5
