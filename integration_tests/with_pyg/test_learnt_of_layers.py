"""What is learnt of a layer by its calls, and who is left alone for it."""

from __future__ import annotations

import copy

import pytest
import torch
from graphs import GRAPHS, relative_error

import gnnfast
from gnnfast.dispatch import select

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from user_messages import F, Layer, arguments, plain_rows

from gnnfast.lazy import rows

# name -> rows of an edge that PyG's operations read and write: gathers, two each, operations, and three for the sum
MOVED = {"LEConv": 10, "ResGatedGraphConv": 17, "FiLMConv": 17, "CGConv": 24}


@pytest.mark.parametrize("name", MOVED)
def test_how_much_pyg_would_move(name, device):
    layer = {"CGConv": nn.CGConv}.get(name, lambda width: getattr(nn, name)(width, width))(F).to(device)
    x, edge_index = torch.randn(30, F, device=device), GRAPHS["random"]()[0].to(device)
    assert rows.passes(rows.Key(layer)) == rows.MANY_PASSES
    layer(x, edge_index)
    assert rows.passes(rows.Key(layer)) == pytest.approx(MOVED[name], abs=0.5)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # what was met before must not decide
        assert rows.passes(rows.Key(layer)) == rows.MANY_PASSES
    assert rows.passes(rows.Key(copy.deepcopy(layer))) == rows.MANY_PASSES


def test_whether_rows_had_to_exist(device):
    x, edge_index, attr = arguments("random", device)
    for message, fused in (
        (plain_rows, True),
        (lambda m, i, j, *_: (2 * j).relu(), True),
        (lambda m, i, j, *_: j.cumsum(0), False),
    ):
        layer = Layer(message, "max").to(device, torch.float64)
        layer(x, edge_index, attr)
        assert rows.is_fused(rows.Key(layer)) == fused
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert not rows.is_fused(rows.Key(layer))


@pytest.mark.parametrize("sums", ["few", "many"])
def test_who_moves_little_is_left_alone(sums, device, monkeypatch):
    """On a GPU, from the second call on, unless a kernel was all there was and has enough to sum."""
    edge_index, n, _ = GRAPHS["random"]()
    bound = int(20 * edge_index.shape[1] * F * 4)  # rows of float32
    monkeypatch.setitem(select.SMALL, "messages", select.Small(bound, bound))
    if sums == "few":
        monkeypatch.setitem(select.SMALL, "cuda", select.Small(bound, bound))
    layer, x = nn.LEConv(F, F).to(device), torch.randn(n, F, device=device)
    for nth in range(3):
        gnnfast.clear_report()
        found = layer(x, edge_index.to(device))
        assert bool(gnnfast.report().kernels) == (nth == 0 or sums == "many" or device.type == "cpu")
        gnnfast.disable()
        assert relative_error(found, layer(x, edge_index.to(device))) < 1e-5
        gnnfast.enable()
