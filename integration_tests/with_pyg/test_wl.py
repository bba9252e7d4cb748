"""WLConvContinuous, which on a GPU is a mean and a few operations."""

from __future__ import annotations

import contextlib

import pytest
import torch
from comparison import compare, same
from graphs import GRAPHS
from torch_geometric.nn import WLConvContinuous
from torch_geometric.nn.conv import wl_conv_continuous

import gnnfast

F = 6
SQUARE = ("no_edges", "isolated", "self_loops_and_duplicates", "hub", "random", "sorted")


def _inputs(graph, device, dtype=torch.float64):
    edge_index, *sizes = GRAPHS[graph]()
    return torch.randn(max(sizes), F, device=device, dtype=dtype), edge_index.to(device)


@pytest.fixture(params=["kernels", "small"])
def path(request):
    """Kernels for each graph, and what runs where graphs are as small as those of tests."""
    if request.param == "small":
        request.getfixturevalue("small")
    return request.param


@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_pyg(graph, dtype, path, device):
    x, edge_index = _inputs(graph, device, dtype)
    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    report = compare(WLConvContinuous(), x, edge_index, tolerance=tolerance)
    assert report.kernels and not report.fallbacks
    for no_gradient in (torch.no_grad, torch.inference_mode):
        with no_gradient():
            same(lambda: [WLConvContinuous()(x, edge_index)], tolerance)


def test_by_what(path, device):
    x, edge_index = _inputs("random", device)
    layer, by = WLConvContinuous(), {}
    for training in (True, False):
        gnnfast.clear_report()
        with contextlib.nullcontext() if training else torch.no_grad():
            layer(x.clone().requires_grad_(), edge_index)
        by[training] = {key[1] for key in gnnfast.report().kernels}
    if device.type == "cuda" and path == "kernels":
        assert all(found & {"gar mean", "gas mean"} for found in by.values())
    elif device.type == "cuda":
        assert by == {True: {"PyG's own"}, False: {"gas mean"}}
    else:
        assert not any("gas mean" in found or "gar mean" in found for found in by.values())


def test_second_derivatives(path, device):
    x, edge_index = _inputs("self_loops_and_duplicates", device)
    layer = WLConvContinuous()
    assert torch.autograd.gradcheck(lambda x: layer(x, edge_index), x.requires_grad_(), nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, edge_index) ** 2, x, nondet_tol=1e-12)


def test_features_stay_as_they_are(path, device):
    x, edge_index = _inputs("random", device)
    before, layer = x.clone(), WLConvContinuous()
    for training in (True, False):
        with torch.set_grad_enabled(training):
            layer(x, edge_index)
    assert torch.equal(x, before)


def _paired(layer, x, edge_index):
    return layer((x, x[:20]), edge_index % 20)


CALLS = {
    "weights": lambda layer, x, edge_index: layer(x, edge_index, x.new_ones(edge_index.shape[1]) / 3),
    "a pair": _paired,
    "a pair of which one is missing": lambda layer, x, edge_index: layer((x, None), edge_index),
    "a size": lambda layer, x, edge_index: layer(x, edge_index, None, (x.shape[0], x.shape[0])),
    "the other direction": lambda layer, x, edge_index: WLConvContinuous(flow="target_to_source")(x, edge_index),
    "not contiguous": lambda layer, x, edge_index: layer(x.t().contiguous().t(), edge_index.t().contiguous().t()),
    "half": lambda layer, x, edge_index: layer(x.half(), edge_index).double(),
    "no features": lambda layer, x, edge_index: layer(x[:, :0], edge_index),
}


@pytest.mark.parametrize("call", CALLS)
def test_other_calls(call, path, device):
    x, edge_index = _inputs("random", device)
    same(lambda: [CALLS[call](WLConvContinuous(), x, edge_index)], 2e-3 if call == "half" else 1e-10)


def test_hooks_and_other_classes(path, device):
    x, edge_index = _inputs("random", device)

    class Doubled(WLConvContinuous):
        def message(self, x_j, edge_weight):
            return 2 * x_j

    hooked = WLConvContinuous()
    hooked.register_message_forward_hook(lambda module, inputs, output: 3 * output)
    for layer in (Doubled(), hooked):
        same(lambda layer=layer: [layer(x, edge_index)], 1e-10)


def test_a_replaced_scatter(path, monkeypatch, device):
    x, edge_index = _inputs("random", device)
    of_pyg = wl_conv_continuous.scatter
    monkeypatch.setattr(wl_conv_continuous, "scatter", lambda *args, **kwargs: 2 * of_pyg(*args, **kwargs))
    same(lambda: [WLConvContinuous()(x, edge_index)], 1e-10)


def test_deterministic_algorithms(path, device):
    x, edge_index = _inputs("hub", device, torch.float32)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, *others = [WLConvContinuous()(x, edge_index) for _ in range(3)]
        assert all(torch.equal(first, other) for other in others)
    finally:
        torch.use_deterministic_algorithms(False)
