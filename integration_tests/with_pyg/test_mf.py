"""MFConv, whose nodes are multiplied in order of degree, or by the weights of all degrees."""

from __future__ import annotations

import pytest
import torch
from comparison import compare, same
from graphs import GRAPHS
from torch import nn
from torch_geometric.nn import MFConv
from torch_geometric.nn.conv import mf_conv

import gnnfast
from gnnfast.pyg import mf

F, O = 6, 5  # noqa: E741
SQUARE = ("no_edges", "isolated", "self_loops_and_duplicates", "hub", "random", "sorted")


def _inputs(graph, device, dtype=torch.float64):
    edge_index, *sizes = GRAPHS[graph]()
    return torch.randn(max(sizes), F, device=device, dtype=dtype), edge_index.to(device)


def _layer(x, **options):
    torch.manual_seed(0)
    return MFConv(F, O, **({"max_degree": 4} | options)).to(x)


@pytest.fixture(params=["in order", "by a product"])
def path(request, monkeypatch):
    """Each path on graphs as small as those of tests."""
    most = 0 if request.param == "in order" else 1 << 40
    for name in ("_MOST_BYTES", "_MOST_PRODUCTS"):
        monkeypatch.setattr(mf, name, most)
    return request.param


@pytest.fixture
def taken(monkeypatch):
    """The paths that were taken."""
    names = []
    for function in (mf._in_order, mf._by_product):

        def noted(*args, function=function):
            names.append(function.__name__)
            return function(*args)

        monkeypatch.setattr(mf, function.__name__, noted)
    return names


@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"max_degree": 0}, {"aggr": "mean"}, {"aggr": "max"}], ids=str)
def test_as_pyg(graph, dtype, options, path, taken, device):
    x, edge_index = _inputs(graph, device, dtype)
    tolerance = 1e-10 if dtype is torch.float64 else 2e-5
    report = compare(_layer(x, **options), x, edge_index, tolerance=tolerance)
    assert not report.fallbacks
    for no_gradient in (torch.no_grad, torch.inference_mode):
        with no_gradient():
            same(lambda: [_layer(x, **options)(x, edge_index)], tolerance)
    assert {*taken} == {"_in_order" if path == "in order" else "_by_product"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_round_as_in_pyg(dtype, path, taken, device):
    x, edge_index = _inputs("isolated", device, dtype)
    layer = _layer(x, max_degree=2)
    x = x.mul_(4).round_()  # sums of which are exact in any order
    with torch.no_grad():
        same(lambda: [layer(x, edge_index).double()], 1e-12)
    assert {*taken} == {"_in_order"}


def test_second_derivatives(path, device):
    x, edge_index = _inputs("self_loops_and_duplicates", device)
    layer = _layer(x)
    assert torch.autograd.gradcheck(lambda x: layer(x, edge_index), x.requires_grad_(), nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, edge_index) ** 2, x, nondet_tol=1e-12)


def test_all_weights_have_gradients(path, device):
    """Also those of degrees that no node has: zeros, as in PyG."""
    x, edge_index = _inputs("no_edges", device)
    layer = _layer(x)
    layer(x, edge_index).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert not layer.lins_l[3].weight.grad.any() and layer.lins_r[0].weight.grad.any()


PAIRS = {
    "both": lambda x, few: ((F, F + 1), (x, x.new_ones(few, F + 1)), None),
    "both with a size": lambda x, few: ((F, F + 1), (x, x.new_ones(few, F + 1)), (x.shape[0], few)),
    "one is missing": lambda x, few: (F, (x, None), (x.shape[0], few)),
    "one is missing, without a size": lambda x, few: (F, (x, None), None),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs(pair, path, taken, device):
    x, edge_index = _inputs("random", device)
    few = x.shape[0] // 2
    width, given, size = PAIRS[pair](x, few)
    layer = MFConv(width, O, max_degree=4).to(x)
    edges = torch.stack([edge_index[0], edge_index[1] % few])
    same(lambda: [layer(given, edges, size)], 1e-10)
    assert taken


CALLS = {
    "the other direction": lambda layer, x, edge_index: _layer(x, flow="target_to_source")(x, edge_index),
    "several reductions": lambda layer, x, edge_index: MFConv(F, O, aggr=["sum"], max_degree=4).to(x)(x, edge_index),
    "not contiguous": lambda layer, x, edge_index: layer(x.t().contiguous().t(), edge_index.t().contiguous().t()),
    "a size": lambda layer, x, edge_index: layer(x, edge_index, (x.shape[0], x.shape[0])),
}


@pytest.mark.parametrize("call", CALLS)
def test_other_calls(call, path, device):
    x, edge_index = _inputs("random", device)

    def run():
        torch.manual_seed(0)
        return [CALLS[call](_layer(x), x, edge_index)]

    same(run, 1e-10)


ERRORS = {
    "a size that does not fit": lambda layer, x, edge_index: layer(x, edge_index, (x.shape[0], x.shape[0] + 1)),
    "features of another width": lambda layer, x, edge_index: layer(x[:, 1:], edge_index),
    "features of another dtype": lambda layer, x, edge_index: layer(x.float(), edge_index),
}


@pytest.mark.parametrize("call", ERRORS)
def test_errors(call, path, device):
    x, edge_index = _inputs("random", device)
    said = []
    for switch in (gnnfast.disable, gnnfast.enable):
        switch()
        with pytest.raises(Exception) as error:
            ERRORS[call](_layer(x), x, edge_index)
        said.append((error.type, str(error.value)))
    assert said[0] == said[1]


def test_an_id_out_of_range(path):
    x, edge_index = _inputs("random", torch.device("cpu"))
    edge_index = edge_index.clone()
    edge_index[1, 3] = x.shape[0]
    for switch in (gnnfast.disable, gnnfast.enable):
        switch()
        with pytest.raises((RuntimeError, IndexError)):
            _layer(x)(x, edge_index)


def test_edges_written_into(path, device):
    x, edge_index = _inputs("random", device)
    layer = _layer(x)
    layer(x, edge_index)
    edge_index[1] = edge_index[1].flip(0) // 2
    same(lambda: [layer(x, edge_index)], 1e-10)
    layer.max_degree = 2  # whose weights are no longer as many
    same(lambda: [layer(x, edge_index)[:0]], 1e-10)


def test_features_written_into_before_the_backward_pass(path, device):
    x, edge_index = _inputs("random", device)
    layer = _layer(x)

    def run():
        layer.zero_grad()
        mine = x.clone()
        out = layer(mine, edge_index)
        mine.zero_()
        out.square().sum().backward()
        return [out, *(p.grad for p in layer.parameters())]

    same(run, 1e-10)


def test_linear_layers_that_are_more(path, taken, device):
    x, edge_index = _inputs("random", device)
    hooked, other, replaced, parametrised = (_layer(x) for _ in range(4))
    seen = []
    hooked.lins_r[1].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].clone()) or 2 * output)
    other.lins_l[2] = nn.Sequential(nn.Linear(F, O), nn.Tanh()).to(x)
    replaced.lins_l[0].forward = lambda x: x[:, :O]
    nn.utils.parametrizations.weight_norm(parametrised.lins_l[1])
    for layer in (hooked, other, replaced, parametrised):
        same(lambda layer=layer: [layer(x, edge_index)], 1e-10)
    assert {*taken} == {"_in_order"} and all(torch.equal(seen[0], rows) for rows in seen)


def test_a_replaced_degree(path, taken, monkeypatch, device):
    x, edge_index = _inputs("random", device)
    of_pyg = mf_conv.degree
    monkeypatch.setattr(mf_conv, "degree", lambda *args, **kwargs: of_pyg(*args, **kwargs) + 1)
    same(lambda: [_layer(x)(x, edge_index)], 1e-10)
    assert not taken


def test_other_classes_and_hooks(path, taken, device):
    x, edge_index = _inputs("random", device)

    class Doubled(MFConv):
        def message(self, x_j):
            return 2 * x_j

    hooked = _layer(x)
    hooked.register_propagate_forward_hook(lambda module, inputs, output: 3 * output)
    for layer in (Doubled(F, O, max_degree=4).to(x), hooked):
        same(lambda layer=layer: [layer(x, edge_index)], 1e-10)
    assert not taken


def test_autocast(path, device):
    x, edge_index = _inputs("random", device, torch.float32)
    for switch in (gnnfast.disable, gnnfast.enable):
        switch()
        with torch.autocast(device.type, torch.bfloat16), pytest.raises(RuntimeError):  # PyG writes 16 bits into 32
            _layer(x)(x, edge_index)


def test_deterministic_algorithms(path, device):
    x, edge_index = _inputs("hub", device, torch.float32)
    layer, found = _layer(x), []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(3):
            mine = x.clone().requires_grad_()
            out = layer(mine, edge_index)
            found.append((out, *torch.autograd.grad(out.square().sum(), (mine, *layer.parameters()))))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_waits_for_a_gpu_once(path):
    x, edge_index = _inputs("random", torch.device("cuda"), torch.float32)
    layer = _layer(x)
    for _ in range(3):
        layer(x, edge_index).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, edge_index).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_captured(path):
    """Which PyG's own cannot be, as it waits."""
    x, edge_index = _inputs("random", torch.device("cuda"), torch.float32)
    layer = _layer(x)
    with torch.no_grad():
        expected = [layer(x, edge_index) for _ in range(3)][-1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, edge_index)
        x.mul_(2)
        graph.replay()
        assert not torch.allclose(out, expected)
        x.div_(2)
        graph.replay()
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
