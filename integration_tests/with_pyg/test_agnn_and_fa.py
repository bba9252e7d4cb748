"""AGNNConv and FAConv against PyG's own."""

from __future__ import annotations

import copy

import pytest
import torch
from attention_layers import F, Initial, same
from comparison import compare
from graphs import GRAPHS, relative_error

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"requires_grad": False}, {"add_self_loops": False}])
@pytest.mark.parametrize("name", GRAPHS)
def test_agnn(name, options, dtype, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    layer = nn.AGNNConv(**options)
    layer.beta.data.fill_(1.7)
    x = torch.randn(max(num_src, num_dst), F, device=device, dtype=dtype)
    report = compare(layer.to(dtype), x, edge_index.to(device), tolerance=1e-9 if dtype is torch.float64 else 1e-4)
    assert {kernel for place, kernel, _ in report.kernels if place == "pyg AGNNConv"} == {"attention"} and not report.fallbacks


def test_agnn_of_wide_features(device):
    """Wider than kernels hold on a GPU: products, softmax and sums, each by its own."""
    edge_index, n, _ = GRAPHS["random"]()
    compare(nn.AGNNConv().double(), torch.randn(n, 300, device=device, dtype=torch.float64), edge_index.to(device), tolerance=1e-9)


class _FA(torch.nn.Module):
    """FAConv with other first features."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, x_0, edge_index, *weight):
        return self.conv(x, x_0, edge_index, *weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.5}, {"cached": True}, {"add_self_loops": False}, {"eps": 0.0}, {"normalize": False}], ids=str
)
@pytest.mark.parametrize("name", ["random", "hub", "self_loops_and_duplicates", "no_edges", "isolated"])
def test_fa(name, options, training, dtype, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    layer = _FA(nn.FAConv(F, **options)).to(device, dtype).train(training)
    x, x_0 = (torch.randn(max(num_src, num_dst), F, device=device, dtype=dtype) for _ in range(2))
    weight = () if options != {"normalize": False} else (torch.rand(edge_index.shape[1], device=device, dtype=dtype),)
    report = compare(layer, x, x_0, edge_index.to(device), *weight, tolerance=1e-9 if dtype is torch.float64 else 1e-4)
    assert not report.fallbacks and not any("part" in kernel for _, kernel, _ in report.kernels)
    assert {kernel for place, kernel, _ in report.kernels if place == "pyg FAConv"} <= {"gas sum", "gar sum"}


@pytest.mark.parametrize("make", [nn.AGNNConv, lambda: Initial(nn.FAConv(F, dropout=0.0))], ids=["AGNNConv", "FAConv"])
def test_simple_attention_twice_and_written_into(make, device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, layer = edge_index.to(device), make().to(device, torch.float64)
    x, results = torch.randn(n, F, device=device, dtype=torch.float64), []
    leaves = [x.requires_grad_(), *layer.parameters()]
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        grads = torch.autograd.grad(layer(x, edge_index).sin().sum(), leaves, create_graph=True)
        seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
        after = torch.autograd.grad(layer(x, edge_index).relu_().square().sum(), leaves)
        results.append([*grads, *seconds, *after])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-9 or e.norm() < 1e-12 for f, e in zip(*results))


def test_features_of_agnn_may_be_written_into(device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, layer = edge_index.to(device), nn.AGNNConv().to(device)

    def run():
        x = torch.linspace(-1, 1, n * F, device=device).view(n, F)
        out = layer(x, edge_index)
        x += out.detach()
        return torch.autograd.grad(out.square().sum(), layer.beta)[0]

    assert same(run)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [nn.AGNNConv, lambda: Initial(nn.FAConv(F))], ids=["AGNNConv", "FAConv"])
def test_simple_attention_of_16_bits(make, dtype, device):
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = make().to(device, dtype), torch.randn(n, F, device=device, dtype=dtype)
    edge_index = edge_index.to(device)
    found, exact = layer(x, edge_index), copy.deepcopy(layer).double()(x.double(), edge_index)
    gnnfast.disable()
    framework = relative_error(layer(x, edge_index), exact)
    gnnfast.enable()
    assert found.dtype == dtype and relative_error(found, exact) <= 1.2 * framework + 1e-12


class OtherAGNN(nn.AGNNConv):
    def message(self, x_j, x_norm_i, x_norm_j, index, ptr, size_i):
        return 2 * super().message(x_j, x_norm_i, x_norm_j, index, ptr, size_i)


def _propagates(layer):
    propagate = layer.propagate
    layer.propagate = lambda *args, **kwargs: 3 * propagate(*args, **kwargs)


CHANGES = {
    "subclass": lambda layer: setattr(layer, "__class__", OtherAGNN),
    "hook": lambda layer: layer.register_message_forward_hook(lambda module, inputs, out: 2 * out),
    "aggregation": lambda layer: layer.aggr_module.register_forward_hook(lambda module, inputs, out: 2 * out),
    "method": _propagates,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_user_changes_of_agnn_and_fa_runs(change, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    for layer, args in ((nn.AGNNConv().to(device), (x, edge_index)), (nn.FAConv(F).to(device), (x, x, edge_index))):
        if change == "subclass" and isinstance(layer, nn.FAConv):
            continue
        layer(*args)
        CHANGES[change](layer)
        assert same(lambda layer=layer, args=args: layer(*args))
    assert any(kernel == "in parts" for _, kernel, _ in gnnfast.report().kernels)


def test_weights_of_fa_and_what_is_wrong_with_them(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    layer = nn.FAConv(F).to(device)
    assert same(lambda: layer(x, x, edge_index, return_attention_weights=True)[1][1])
    assert same(lambda: layer(x, x, edge_index, torch.rand(200, device=device)))
    assert same(lambda: nn.FAConv(F, normalize=False).to(device)(x, x, edge_index))
