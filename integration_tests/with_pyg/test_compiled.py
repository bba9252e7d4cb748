"""Models under ``torch.compile``: served without graph breaks, the same numbers and gradients as PyG's own."""

from __future__ import annotations

import pytest
import torch
from compiling import NAMES, F, check, compiled, expected, fresh, graph_of, is_served, step, traced  # noqa: F401

import gnnfast
from gnnfast import _native

pytest.importorskip("torch_geometric", reason="PyG is not installed")
if not _native.cpu.loaded:
    pytest.skip(_native.cpu.reason, allow_module_level=True)
from compiled_layers import LAYERS, NETS, Net, Weighted
from torch_geometric import nn

WEIGHTED = {
    name: LAYERS[name]
    for name in (
        "GCNConv",
        "GCNConv improved",
        "GCNConv no loops",
        "GCNConv not normalised",
        "GCNConv target_to_source",
        "GraphConv",
        "GraphConv mean",
        "SGConv",
        "TAGConv",
        "APPNP",
        "ARMAConv",
    )
} | {f"own {aggr}": (lambda aggr=aggr: Weighted(aggr)) for aggr in ("sum", "mean", "max", "min")}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, device):
    """Graphs of all sizes, ugly ones included, by one model."""
    layer = LAYERS[name]().double().to(device)
    inputs = [graph_of(graph, device)[:2] for graph in NAMES]
    wanted = [expected(layer, *i) for i in inputs]
    gnnfast.clear_report()
    model = compiled(layer)
    for given, w in zip(inputs, wanted):
        check(step(model, layer, *given), w)
    assert is_served() and traced()


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights(name, learnt, device):
    """Given weights and such that require a gradient."""
    layer = WEIGHTED[name]().double().to(device)
    inputs = [graph_of(graph, device) for graph in NAMES]
    for _, _, weight in inputs:
        weight.requires_grad_(learnt)
    wanted = [expected(layer, *i) for i in inputs]
    gnnfast.clear_report()
    model = compiled(layer)
    for given, w in zip(inputs, wanted):
        check(step(model, layer, *given), w)
    assert is_served() and traced()


@pytest.mark.parametrize("make", [nn.SAGEConv, nn.GraphConv])
def test_a_list_as_a_pair(make, device):
    layer = make(F, 5).double().to(device)
    x, edge_index, _ = graph_of("random", device)
    wanted = layer([x, x], edge_index)
    torch.testing.assert_close(compiled(layer)([x, x], edge_index), wanted)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv max", "GATConv", "TransformerConv"])
def test_float32_and_int32(name, device):
    layer = LAYERS[name]().to(device)
    x, edge_index, _ = graph_of("random", device, torch.float32)
    wanted = expected(layer, x, edge_index)
    ids = (torch.int64,) if name == "GATConv" else (torch.int64, torch.int32)  # PyG cannot add int64 loops to int32 edges
    for dtype in ids:
        check(step(compiled(layer), layer, x, edge_index.to(dtype)), wanted, 1e-5)
    assert is_served()


@pytest.mark.parametrize("name", NETS)
def test_inductor(name, device):
    net = NETS[name]().double().to(device)
    inputs = [graph_of(graph, device)[:2] for graph in ("random", "hub", "self_loops_and_duplicates")] * 2
    wanted = [expected(net, *i) for i in inputs]
    gnnfast.clear_report()
    model = compiled(net, backend="inductor")
    for given, w in zip(inputs, wanted):
        check(step(model, net, *given), w)
    assert is_served() and traced()


def test_inductor_with_learnt_weights(device):
    net = Net(nn.GCNConv(F, 16), nn.GraphConv(16, 5)).double().to(device)
    x, edge_index, weight = graph_of("random", device)
    weight.requires_grad_()
    wanted = expected(net, x, edge_index, weight)
    check(step(compiled(net, backend="inductor"), net, x, edge_index, weight), wanted)
    assert is_served()


@pytest.mark.parametrize("name", NETS)
def test_reduce_overhead(name, device):
    """The compiler's CUDA graphs hold none of the ops, which look at the tensors of each call."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs are of CUDA alone")
    net = NETS[name]().double().to(device)
    inputs = [graph_of(graph, device)[:2] for graph in ("random", "hub")] * 4
    wanted = [expected(net, *i) for i in inputs]
    gnnfast.clear_report()
    model = compiled(net, backend="inductor", mode="reduce-overhead")
    for given, w in zip(inputs, wanted):
        torch.compiler.cudagraph_mark_step_begin()
        check(step(model, net, *given), w)
    inputs[0][1].copy_(inputs[0][1].flip(1))
    inputs[0][1][1] = inputs[0][1][1].roll(1)
    check(step(model, net, *inputs[0]), expected(net, *inputs[0]))
    assert is_served()


def test_training_steps(device):
    x, edge_index, _ = graph_of("random", device)
    y = torch.randint(0, 5, (x.shape[0],), device=device)
    losses = []
    for on in (False, True):
        torch.manual_seed(0)
        net = NETS["GCN"]().double().to(device)
        if not on:
            gnnfast.disable()
        model = compiled(net) if on else net
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x, edge_index), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        gnnfast.enable()
    assert losses[:5] == pytest.approx(losses[5:], rel=1e-9) and losses[4] < losses[0]
    assert is_served() and traced() == 1


def test_dropout_of_attention(device):
    """Coefficients are left out in training, others in each call, and the gradient is that of those that are kept."""
    x, edge_index, _ = graph_of("hub", device)
    layer = nn.TransformerConv(F, 4, heads=2, dropout=0.5, root_weight=False).double().to(device)
    model = compiled(layer)
    torch.nn.init.zeros_(layer.lin_value.weight)
    torch.nn.init.ones_(layer.lin_value.bias)  # the result is the share of coefficients that is kept, doubled
    results = [step(model, layer, x, edge_index, seed=seed) for seed in range(40)]
    outs = torch.stack([r[0] for r in results])
    has_edges = torch.zeros(x.shape[0], dtype=torch.bool, device=device).index_fill(0, edge_index[1], True)
    assert (outs[0] != outs[1]).any()
    assert float(outs[:, has_edges].mean()) == pytest.approx(1, abs=0.05)
    for out, to_x, *_ in results[:3]:
        assert to_x.isfinite().all() and (out.detach() >= 0).all()
    bias_grads = [dict(zip(["out", "x", *(n for n, _ in layer.named_parameters())], r))["lin_value.bias"] for r in results[:3]]
    for (out, *_), grad in zip(results, bias_grads):  # out is linear in the bias, of ones
        assert torch.allclose(grad.sum(), (out * out.cos()).sum(), rtol=1e-9)
    layer.eval()
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    assert is_served()
