"""Layers on sparse features, dense and as torch.sparse_csr, and layers in another order, against PyG with gnnfast off."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from graphs import relative_error

import gnnfast
from gnnfast import features
from gnnfast.cache import cache
from gnnfast.dispatch import select as selector

pyg = pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("converts_at_once")

NODES, EDGES, WIDTH, OUT = 700, 3000, 512, 16

# name -> layer, and what serves constant sparse features
LAYERS = {
    "SAGEConv": (lambda: nn.SAGEConv(WIDTH, OUT), {"linear first", "sparse product"}),
    "SAGEConv sum": (lambda: nn.SAGEConv(WIDTH, OUT, aggr="sum"), {"linear first", "sparse product"}),
    "SAGEConv normalize": (lambda: nn.SAGEConv(WIDTH, OUT, normalize=True, bias=False), {"linear first", "sparse product"}),
    "SAGEConv no root": (lambda: nn.SAGEConv(WIDTH, OUT, root_weight=False), {"linear first", "sparse product"}),
    "SAGEConv to sources": (lambda: nn.SAGEConv(WIDTH, OUT, flow="target_to_source"), {"linear first", "sparse product"}),
    "SAGEConv max": (lambda: nn.SAGEConv(WIDTH, OUT, aggr="max"), {"gar max", "sparse product"}),
    "SAGEConv project": (lambda: nn.SAGEConv(WIDTH, OUT, project=True), {"gar mean", "sparse product"}),
    "GraphConv": (lambda: nn.GraphConv(WIDTH, OUT), {"linear first", "sparse product"}),
    "GraphConv mean": (lambda: nn.GraphConv(WIDTH, OUT, aggr="mean", bias=False), {"linear first", "sparse product"}),
    "SGConv": (lambda: nn.SGConv(WIDTH, OUT, K=2), {"linear first", "sparse product"}),
    "SGConv cached": (lambda: nn.SGConv(WIDTH, OUT, cached=True), set()),
    "GCNConv": (lambda: nn.GCNConv(WIDTH, OUT), {"sparse product"}),
    "GATConv": (lambda: nn.GATConv(WIDTH, OUT, heads=2), {"sparse product"}),
    "GATv2Conv": (lambda: nn.GATv2Conv(WIDTH, OUT), {"sparse product"}),
    "GINConv": (lambda: nn.GINConv(torch.nn.Linear(WIDTH, OUT)), {"sparse features sum"}),
    "APPNP": (lambda: nn.APPNP(K=2, alpha=0.1), {"sparse features sum"}),
    "SimpleConv": (lambda: nn.SimpleConv("mean"), {"sparse features mean"}),
}
CSR = [n for n in LAYERS if n not in ("SAGEConv max", "SAGEConv project", "SGConv cached", "APPNP")]


@pytest.fixture(autouse=True)
def small_features_are_compressed(monkeypatch):
    """And layers reordered, whatever was measured to pay on this device."""
    monkeypatch.setitem(selector.FEWEST_SAVED, "cuda", selector.FEWEST_SAVED["cpu"])
    with gnnfast.override(feature_density_threshold=0.3):
        yield


@pytest.fixture
def edge_index(device):
    return torch.randint(0, NODES, (2, EDGES), device=device)


@pytest.fixture
def x(device):
    return _sparse(NODES, device)


def _sparse(nodes, device, dtype=torch.float32, density=0.01):
    return (torch.rand(nodes, WIDTH, device=device, dtype=dtype) + 0.5) * (torch.rand(nodes, WIDTH, device=device) < density)


def _run(layer, *inputs, seed=None):
    """Output, and gradients of the parameters and of a weight."""
    out = layer(*inputs)
    leaves = [p for p in layer.parameters() if p.requires_grad] + [
        t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    torch.manual_seed(1)
    return [out, *(torch.autograd.grad(out, leaves, torch.randn_like(out)) if leaves else ())]


def _pyg(layer, *inputs):
    layer = copy.deepcopy(layer)
    gnnfast.disable()
    try:
        return _run(layer, *inputs)
    finally:
        gnnfast.enable()


def _close(found, expected, tolerance=1e-5):
    assert len(found) == len(expected)
    for f, e in zip(found, expected):
        assert f.shape == e.shape and f.dtype == e.dtype and f.requires_grad == e.requires_grad
        assert relative_error(f, e) < tolerance


def _kernels():
    return {kernel for _, kernel, _ in gnnfast.report().kernels}


def _sparse_kernels():
    return {k for k in _kernels() if k.startswith("sparse")}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_constant_sparse_features(name, device, edge_index, x):
    make, expected_kernels = LAYERS[name]
    layer = make().to(device)
    expected = _pyg(layer, x, edge_index)
    for _ in range(4):
        _close(_run(layer, x, edge_index), expected)
    assert expected_kernels <= _kernels()
    if expected_kernels:
        (entry,) = gnnfast.report().features
        assert entry["shape"] == [NODES, WIDTH] and entry["state"] == "compressed" and 0.005 < entry["density"] < 0.015
        assert any("density" in reason for _, kernel, reason in gnnfast.report().kernels if kernel.startswith("sparse"))
        assert "compressed" in str(gnnfast.report())
    assert not gnnfast.report().fallbacks or name in ("GATConv", "GATv2Conv")


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv", "SGConv", "GCNConv"])
def test_double_precision(name, device, edge_index):
    layer, x = LAYERS[name][0]().to(device, torch.float64), _sparse(NODES, device, torch.float64)
    expected = _pyg(layer, x, edge_index)
    for _ in range(3):
        _close(_run(layer, x, edge_index), expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["SAGEConv", "GINConv"])
def test_short_types_keep_the_order(name, dtype, device, edge_index):
    layer, x = LAYERS[name][0]().to(device, dtype), _sparse(NODES, device, dtype)
    exact = _pyg(copy.deepcopy(layer).double(), x.double(), edge_index)
    theirs = _pyg(layer, x, edge_index)
    with gnnfast.override(feature_density_threshold=0.5):
        for _ in range(3):
            ours = _run(layer, x, edge_index)
    assert "linear first" not in _kernels() and _sparse_kernels()
    for o, t, e in zip(ours, theirs, exact):
        assert relative_error(o, e) <= 1.1 * relative_error(t, e) + 1e-3


@pytest.mark.parametrize("name", ["GraphConv", "SGConv", "GCNConv"])
def test_edge_weights_and_their_gradients(name, device, edge_index, x):
    layer, weight = LAYERS[name][0]().to(device), torch.rand(EDGES, device=device, requires_grad=True)
    expected = _pyg(layer, x, edge_index, weight)
    for _ in range(3):
        _close(_run(layer, x, edge_index, weight), expected)


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
@pytest.mark.parametrize("with_dst", [True, False])
def test_bipartite(name, with_dst, device):
    x_src, x_dst = _sparse(NODES, device), _sparse(600, device) if with_dst else None
    edge_index = torch.stack([torch.randint(0, NODES, (EDGES,)), torch.randint(0, 600, (EDGES,))]).to(device)
    layer = LAYERS[name][0]().to(device)
    size = (NODES, 600)
    inputs = ((x_src, x_dst), edge_index, size) if name == "SAGEConv" else ((x_src, x_dst), edge_index, None, size)
    out = layer(*inputs)
    gnnfast.disable()
    expected = layer(*inputs)
    gnnfast.enable()
    assert relative_error(out, expected) < 1e-5 and "linear first" in _kernels()


def test_gradient_of_the_input_in_the_other_order(device, edge_index):
    x = torch.randn(NODES, 64, device=device, requires_grad=True)
    for make in (lambda: nn.SAGEConv(64, 8), lambda: nn.GraphConv(64, 8), lambda: nn.SGConv(64, 8, K=2)):
        layer = make().to(device)
        gnnfast.clear_report()
        expected = _pyg(layer, x, edge_index)
        _close(_run(layer, x, edge_index), expected)
        assert "linear first" in _kernels()


def test_devices_without_kernels_are_left_to_pyg():
    edge_index, x = torch.zeros(2, 30, dtype=torch.long, device="meta"), torch.randn(10, 8, device="meta")
    for make in (lambda: nn.SAGEConv(8, 4), lambda: nn.GraphConv(8, 4)):
        assert make().to("meta")(x, edge_index).shape == (10, 4)


def test_wider_outputs_keep_the_order(device, edge_index):
    layer = nn.SAGEConv(64, 128).to(device)
    layer(torch.randn(NODES, 64, device=device, requires_grad=True), edge_index)
    assert "linear first" not in _kernels() and len(_kernels()) == 1


def test_changes_in_place_are_noticed(device, edge_index, x):
    for name in ("SAGEConv", "GCNConv", "GINConv"):
        layer = LAYERS[name][0]().to(device)
        for _ in range(3):
            layer(x, edge_index)
        assert _sparse_kernels()
        for change in (lambda: x.mul_(2), lambda: x[3].fill_(1.0), lambda: x.add_(0.1)):
            change()
            for _ in range(3):
                _close(_run(layer, x, edge_index), _pyg(layer, x, edge_index))
        x.copy_(_sparse(NODES, device))


def test_dense_features_stay_dense(device, edge_index):
    x = torch.randn(NODES, WIDTH, device=device)
    for name in ("GINConv", "GCNConv"):
        layer = LAYERS[name][0]().to(device)
        for _ in range(3):
            layer(x, edge_index)
    assert not _sparse_kernels()
    (entry,) = gnnfast.report().features
    assert entry["density"] == 1.0 and entry["state"].startswith("dense: density 100.00%, not below")


def test_what_is_no_constant_input_is_never_measured(device, edge_index, x):
    first, second = nn.SAGEConv(WIDTH, 512).to(device), nn.SAGEConv(512, 512).to(device)
    dense = torch.randn(NODES, WIDTH, device=device)
    with torch.no_grad():  # activations have no grad_fn here
        for _ in range(4):
            second(first(dense, edge_index).relu(), edge_index)
    assert [e["density"] for e in gnnfast.report().features] == [1.0]
    gnnfast.clear_report()
    gcn = nn.GCNConv(WIDTH, OUT).to(device)
    with torch.inference_mode():
        gcn(x.clone(), edge_index)
        copied = x.clone()
        gcn(copied, edge_index), gcn(copied, edge_index), gcn(copied, edge_index)
    leaf = x.clone().requires_grad_()
    gcn(leaf, edge_index), gcn(leaf, edge_index)
    narrow = torch.zeros(NODES * 8, 100, device=device)
    lin = nn.Linear(100, 4).to(device)
    lin(narrow), lin(narrow)
    assert not gnnfast.report().features and not _sparse_kernels()


@pytest.mark.parametrize("name", LAYERS)
def test_features_that_are_new_in_each_step_are_never_measured(name, device, edge_index, x):
    layer = LAYERS[name][0]().to(device)
    for _ in range(3):  # perhaps at the same address
        layer(x * 1.0, edge_index)
    assert not gnnfast.report().features and not _sparse_kernels()


def test_settings(device, edge_index, x):
    layer = nn.GCNConv(WIDTH, OUT).to(device)
    with gnnfast.override(feature_density_threshold=0):
        layer(x, edge_index), layer(x, edge_index), layer(x, edge_index)
    assert not gnnfast.report().features
    with gnnfast.override(feature_density_threshold=0.001):
        layer(x, edge_index), layer(x, edge_index)
    assert gnnfast.report().features and not _sparse_kernels()
    with gnnfast.override(feature_density_threshold=1):
        layer(x, edge_index)
    assert ("pyg GCNConv", "sparse product") in {k[:2] for k in gnnfast.report().kernels}
    with pytest.raises(ValueError, match="feature_density_threshold accepts a number from 0 to 1"):
        gnnfast.override(feature_density_threshold=2).__enter__()


def test_a_copy_that_exceeds_the_budget_is_not_made(device, edge_index, monkeypatch):
    x = _sparse(NODES, device)
    monkeypatch.setattr(type(cache), "budget", lambda self: 1000)
    layer = nn.GCNConv(WIDTH, OUT).to(device)
    for _ in range(3):
        layer(x, edge_index)
    assert not _sparse_kernels() and all("GNNFAST_CACHE_MB" in e["state"] for e in gnnfast.report().features)


def test_the_copy_dies_with_the_features(device, edge_index):
    cache.clear()
    x = _sparse(NODES, device)
    layer = nn.GINConv(torch.nn.Linear(WIDTH, OUT)).to(device)
    for _ in range(3):
        layer(x, edge_index)
    before = cache.nbytes
    del x
    gc.collect()
    assert cache.nbytes < before and not any(isinstance(e[2], features.Measured) for e in cache._entries.values())


class _Message(nn.SAGEConv):
    def message(self, x_j):
        return 2 * x_j


class _Update(nn.SAGEConv):
    def update(self, inputs):
        return inputs + 1


class _Forward(nn.SAGEConv):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * 2


class _OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


def _with(change):
    layer = nn.SAGEConv(WIDTH, OUT)
    change(layer)
    return layer


STEP_ASIDE = {
    "message": lambda: _Message(WIDTH, OUT),
    "update": lambda: _Update(WIDTH, OUT),
    "forward": lambda: _Forward(WIDTH, OUT),
    "lin subclass": lambda: _with(lambda m: setattr(m, "lin_l", _OwnLinear(WIDTH, OUT))),
    "lin hook": lambda: _with(lambda m: m.lin_l.register_forward_hook(lambda mod, i, out: out * 3)),
    "lin pre-hook": lambda: _with(lambda m: m.lin_l.register_forward_pre_hook(lambda mod, i: (i[0] * 3,))),
    "propagate hook": lambda: _with(lambda m: m.register_propagate_forward_hook(lambda mod, i, out: out * 3)),
    "message hook": lambda: _with(lambda m: m.register_message_forward_hook(lambda mod, i, out: out * 3)),
    "aggregate hook": lambda: _with(lambda m: m.register_aggregate_forward_hook(lambda mod, i, out: out * 3)),
    "aggregation hook": lambda: _with(lambda m: m.aggr_module.register_forward_hook(lambda mod, i, out: out * 3)),
    "instance message": lambda: _with(lambda m: setattr(m, "message", lambda x_j: x_j * 2)),
    "parametrized": lambda: _with(lambda m: torch.nn.utils.parametrizations.weight_norm(m.lin_l)),
    "several aggregations": lambda: nn.SAGEConv(WIDTH, OUT, aggr=["mean", "max"]),
    "max": lambda: nn.SAGEConv(WIDTH, OUT, aggr="max"),
}


@pytest.mark.parametrize("name", STEP_ASIDE)
def test_steps_aside(name, device, edge_index, x):
    layer = STEP_ASIDE[name]().to(device)
    gnnfast.disable()
    expected = layer(x, edge_index)
    gnnfast.enable()
    for _ in range(3):
        assert relative_error(layer(x, edge_index), expected) < 1e-5
    assert "linear first" not in _kernels()


def test_hooks_of_the_other_linear_run(device, edge_index, x):
    layer = nn.SAGEConv(WIDTH, OUT).to(device)
    layer.lin_r.register_forward_hook(lambda mod, i, out: out * 3)
    found = _run(layer, x, edge_index)
    gnnfast.disable()
    expected = _run(layer, x, edge_index)  # of the layer itself: copies of PyG 2.6's Linear lose their hooks
    gnnfast.enable()
    _close(found, expected)
    assert "linear first" in _kernels()


def test_explainers_see_the_features(device, edge_index, x):
    layer = nn.GraphConv(WIDTH, OUT).to(device)
    seen = []
    layer.explain = True
    layer.explain_message = lambda inputs, dim_size: seen.append(inputs.shape) or inputs
    layer(x, edge_index), layer(x, edge_index)
    assert seen == [(EDGES, WIDTH)] * 2


def test_uninitialised_layers(device, edge_index, x):
    layer = nn.SAGEConv(-1, OUT).to(device)
    for _ in range(3):
        layer(x, edge_index)
    _close(_run(layer, x, edge_index), _pyg(layer, x, edge_index))


def test_autocast_keeps_its_dtypes(device, edge_index, x):
    layer = nn.SAGEConv(WIDTH, OUT).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        dtypes = {layer(x, edge_index).dtype for _ in range(3)}
        gnnfast.disable()
        assert dtypes == {layer(x, edge_index).dtype}
        gnnfast.enable()


def test_compiled(device, edge_index, x):
    layer = nn.SAGEConv(WIDTH, OUT).to(device)
    expected = _pyg(layer, x, edge_index)[0]
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for _ in range(3):
        assert relative_error(compiled(x, edge_index), expected) < 1e-5


def test_scripted(edge_index, x):
    device = edge_index.device
    for layer in (nn.GCNConv(WIDTH, OUT), nn.Linear(WIDTH, OUT), nn.SGConv(WIDTH, OUT)):
        layer = layer.to(device)
        inputs = (x,) if isinstance(layer, nn.Linear) else (x, edge_index)
        assert relative_error(torch.jit.script(layer)(*inputs), layer(*inputs)) < 1e-5


def test_bad_edge_index_raises_what_pyg_raises(edge_index, x):
    layer = nn.SAGEConv(WIDTH, OUT).to(x.device)
    bad = edge_index.cpu().clone()
    bad[0, 3] = NODES + 5
    for t in (bad, bad.float(), bad[:1]):
        with pytest.raises(Exception) as ours:
            layer(x.cpu(), t) if x.device.type == "cpu" else layer.cpu()(x.cpu(), t)
        gnnfast.disable()
        with pytest.raises(Exception) as theirs:
            layer(x.cpu(), t)
        gnnfast.enable()
        assert type(ours.value) is type(theirs.value) and str(ours.value) == str(theirs.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("csr", [False, True])
def test_cuda_graph_capture(csr):
    device = torch.device("cuda")
    edge_index, x = torch.randint(0, NODES, (2, EDGES), device=device), _sparse(NODES, device)
    layer = nn.SAGEConv(WIDTH, OUT).to(device)  # PyG's GCNConv waits for the device and cannot be captured
    given = x.to_sparse_csr() if csr else x
    expected = _pyg(layer, x, edge_index)[0]

    def step():
        for p in layer.parameters():
            p.grad = None
        out = layer(given, edge_index)
        out.square().sum().backward()
        return out

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    gnnfast.clear_report()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = step()
    assert bool(_sparse_kernels()) == csr
    out.detach().zero_()
    if not csr:  # replays follow dense features, which are static inputs then
        x.copy_(_sparse(NODES, device))
        expected = _pyg(layer, x, edge_index)[0]
    captured.replay()
    assert relative_error(out, expected) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_a_capture_measures_nothing():
    device = torch.device("cuda")
    x, layer = _sparse(NODES, device), nn.Linear(WIDTH, OUT).to(device)
    with torch.no_grad():
        expected = layer(x)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = layer(x)
        captured.replay()
        assert relative_error(out, expected) < 1e-6
    assert not gnnfast.report().features and not _sparse_kernels()


def test_sampling_asked_for_is_not_replaced(device, edge_index, x):
    layer = nn.GINConv(torch.nn.Linear(WIDTH, OUT)).to(device).eval()
    with torch.no_grad(), gnnfast.override(sample="bucket", sample_width=2):
        outputs = [layer(x, edge_index) for _ in range(4)]
    assert all(torch.equal(outputs[0], out) for out in outputs) and not _sparse_kernels()


# ---- features given as torch.sparse_csr ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CSR)
def test_layers_on_sparse_csr(name, device, edge_index, x):
    layer = LAYERS[name][0]().to(device)
    expected = _pyg(layer, x, edge_index)
    csr = x.to_sparse_csr()
    for _ in range(2):
        _close(_run(layer, csr, edge_index), expected)
    assert _sparse_kernels() and all("torch.sparse_csr" in r for _, k, r in gnnfast.report().kernels if k in _sparse_kernels())
    assert not gnnfast.report().features


def test_gradient_of_sparse_csr_values(device, edge_index):
    x = _sparse(NODES, device, torch.float64)
    layer, dense, csr = nn.SAGEConv(WIDTH, OUT).to(device).double(), x.clone().requires_grad_(), x.to_sparse_csr().requires_grad_()
    expected = _pyg(layer, dense, edge_index)[-1]
    layer(csr, edge_index)
    (found,) = torch.autograd.grad(
        layer(csr, edge_index), csr, (torch.manual_seed(1), torch.randn(NODES, OUT, device=device).double())[1]
    )
    torch.manual_seed(1)
    seed = torch.randn_like(layer(dense, edge_index))
    (found,) = torch.autograd.grad(layer(csr, edge_index), csr, seed)
    assert relative_error(found.values(), expected[x != 0]) < 1e-10


def test_other_layouts_are_left_to_pyg_with_a_reason(device, edge_index, x):
    layer = nn.GCNConv(WIDTH, OUT).to(device)
    with gnnfast.override(strict=True), pytest.raises(gnnfast.FallbackError, match=r"layout torch.sparse_coo.*sparse_csr"):
        layer(x.to_sparse_coo(), edge_index)
    with pytest.raises(gnnfast.FallbackError, match="max of features of layout"), gnnfast.override(strict=True):
        nn.SAGEConv(WIDTH, OUT, aggr="max").to(device)(x.to_sparse_csr(), edge_index)


def test_disable_restores_the_methods():
    from torch_geometric.nn import dense

    methods = [nn.GINConv.forward, nn.SAGEConv.forward, nn.GraphConv.forward, nn.SGConv.forward, dense.Linear.forward]
    patched = [m.__code__ for m in methods]
    gnnfast.disable()
    try:
        assert all(m.__code__.co_filename.endswith(".py") for m in methods)
        # Not those of the compiler, which notes what it has imported, in other tests.
        assert not any(name.startswith("_gnnfast") for m in methods for name in m.__globals__)
    finally:
        gnnfast.enable()
    assert all(m.__code__.co_filename.startswith("<gnnfast") for m in methods) and patched


# ---- layers that must be left alone ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [lambda i: nn.SAGEConv(i, OUT), lambda i: nn.GraphConv(i, OUT), lambda i: nn.SGConv(i, OUT)])
@pytest.mark.parametrize("width", [8, WIDTH])
def test_lazy_layers(make, width, device):
    edge_index, x = torch.randint(0, 100, (2, 500), device=device), torch.randn(100, width, device=device)
    layer = make(-1).to(device)
    _close(_run(layer, x, edge_index), _pyg(layer, x, edge_index))


def test_an_overridden_propagate_sees_what_the_layer_was_given(device, edge_index):
    class Relu(nn.SAGEConv):
        def propagate(self, edge_index, size=None, **kwargs):
            return super().propagate(edge_index, size=size, **kwargs).relu()

    x = torch.randn(NODES, WIDTH, device=device, requires_grad=True)
    layer = Relu(WIDTH, OUT).to(device)
    _close(_run(layer, x, edge_index), _pyg(layer, x, edge_index))
    layer = nn.SAGEConv(WIDTH, OUT).to(device)
    expected = torch.nn.functional.linear(layer.propagate(edge_index, x=(x, x)).relu(), layer.lin_l.weight, layer.lin_l.bias)
    generated = layer.propagate
    layer.propagate = lambda *args, **kwargs: generated(*args, **kwargs).relu()
    assert relative_error(layer(x, edge_index), expected + layer.lin_r(x)) < 1e-5


@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GINConv"])
def test_activation_checkpointing(name, device, edge_index, x):
    """What a forward pass saves must not depend on what was used before."""
    from torch.utils.checkpoint import checkpoint

    first, second = (LAYERS[name][0]().to(device) for _ in range(2))
    expected = _pyg(first, x, edge_index)[0], _pyg(second, x, edge_index)[0]
    for _ in range(4):
        outputs = [checkpoint(layer, x, edge_index, use_reentrant=False) for layer in (first, second)]
        assert all(relative_error(out, e) < 1e-5 for out, e in zip(outputs, expected))
        sum(out.sum() for out in outputs).backward()


def test_wider_edge_weights_fail_as_in_pyg(device, edge_index):
    x = torch.randn(NODES, WIDTH, device=device, requires_grad=True)
    for layer in (nn.GraphConv(WIDTH, OUT).to(device), nn.SGConv(WIDTH, OUT).to(device)):
        with pytest.raises(RuntimeError, match="dtype"):
            layer(x, edge_index, torch.rand(EDGES, device=device, dtype=torch.float64))


def test_16_bit_linear_rounds_once(device):
    x, layer = _sparse(NODES, device).bfloat16(), nn.Linear(WIDTH, 64).to(device).bfloat16()
    for _ in range(4):
        out = layer(x)
    assert torch.equal(out, torch.nn.functional.linear(x, layer.weight, layer.bias)) and not _sparse_kernels()
