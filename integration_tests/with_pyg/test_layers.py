"""PyG's layers with and without gnnfast: same outputs, same gradients, and the kernel that ran."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from comparison import compare, without
from graphs import GRAPHS, relative_error

import gnnfast

pyg = pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn  # noqa: E402
from torch_geometric.nn import MessagePassing  # noqa: E402

F = 8

# PyG writes a class's code for its first layer: after one of several aggregations no SAGEConv would take a sparse adjacency.
for _layer in (nn.SAGEConv, nn.GraphConv):
    _layer(1, 1)

# name -> layer; all of them must be served by gnnfast in full
LAYERS = {
    "GCNConv": lambda: nn.GCNConv(F, 5),
    "GCNConv cached": lambda: nn.GCNConv(F, 5, cached=True),
    "GCNConv improved": lambda: nn.GCNConv(F, 5, improved=True),
    "GCNConv no loops": lambda: nn.GCNConv(F, 5, add_self_loops=False),
    "GCNConv not normalised": lambda: nn.GCNConv(F, 5, normalize=False),
    "GCNConv target_to_source": lambda: nn.GCNConv(F, 5, flow="target_to_source"),
    "SAGEConv": lambda: nn.SAGEConv(F, 5),
    "SAGEConv max": lambda: nn.SAGEConv(F, 5, aggr="max"),
    "SAGEConv min": lambda: nn.SAGEConv(F, 5, aggr="min"),
    "SAGEConv project": lambda: nn.SAGEConv(F, 5, project=True),
    "GraphConv": lambda: nn.GraphConv(F, 5),
    "GraphConv mean": lambda: nn.GraphConv(F, 5, aggr="mean"),
    "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, 5), train_eps=True),
    "SAGEConv target_to_source": lambda: nn.SAGEConv(F, 5, flow="target_to_source"),
    "SAGEConv max target_to_source": lambda: nn.SAGEConv(F, 5, aggr="max", flow="target_to_source"),
    "GINConv target_to_source": lambda: nn.GINConv(torch.nn.Linear(F, 5), flow="target_to_source"),
    "DirGNNConv": lambda: nn.DirGNNConv(nn.SAGEConv(F, 5)),
    "SGConv": lambda: nn.SGConv(F, 5, K=2),
    "SSGConv": lambda: nn.SSGConv(F, 5, alpha=0.1, K=2),
    "TAGConv": lambda: nn.TAGConv(F, 5),
    "APPNP": lambda: nn.APPNP(K=3, alpha=0.1),
    "LGConv": lambda: nn.LGConv(),
    "GatedGraphConv": lambda: nn.GatedGraphConv(F, 2),
    "SimpleConv": lambda: nn.SimpleConv("mean"),
    "MixHopConv": lambda: nn.MixHopConv(F, 5),
    "ARMAConv": lambda: nn.ARMAConv(F, 5, num_stacks=2, num_layers=2),
    "GCN2Conv": lambda: _WithInitial(nn.GCN2Conv(F, 0.1, 0.5, 1)),
    "ChebConv": lambda: nn.ChebConv(F, 5, K=3),
    "ClusterGCNConv": lambda: nn.ClusterGCNConv(F, 5),
    "MFConv": lambda: nn.MFConv(F, 5),
    "WLConvContinuous": lambda: nn.WLConvContinuous(),
}
WEIGHTED = [
    "GCNConv",
    "GCNConv no loops",
    "GCNConv not normalised",
    "GraphConv",
    "SGConv",
    "TAGConv",
    "APPNP",
    "LGConv",
    "GatedGraphConv",
    "ARMAConv",
]


class _WithInitial(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, x.detach(), edge_index)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graph", ["random", "no_edges", "hub_square", "self_loops_and_duplicates"])
def test_layer(name, graph, device):
    if graph == "hub_square":
        edge_index, n, _ = GRAPHS["hub"]()
    else:
        edge_index, n, _ = GRAPHS[graph]()
        n = max(n, 5) if graph == "no_edges" else n
    # PyG's float32 sums on CUDA are atomic and vary in the last bits, which deep layers amplify.
    dtype = torch.float64 if device.type == "cuda" else torch.float32
    x = torch.randn(n, F, device=device, dtype=dtype)
    report = compare(LAYERS[name]().to(dtype), x, edge_index.to(device))
    assert report.kernels and not report.fallbacks, report.fallbacks


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_layer(name, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, w = torch.randn(n, F, device=device), torch.rand(edge_index.shape[1], device=device)
    edge_index = edge_index.to(device)
    report = compare(LAYERS[name](), x, edge_index, w)  # gradients of the weights too
    assert report.kernels and not report.fallbacks, report.fallbacks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype, device):
    edge_index, n, _ = GRAPHS["random"]()
    x = torch.randn(n, F, device=device, dtype=dtype)
    for layer in (nn.SAGEConv(F, 5), nn.SimpleConv("max"), nn.GraphConv(F, 5)):
        tolerance = {torch.float64: 1e-10}.get(dtype, 2e-2)
        assert not compare(layer.to(dtype), x, edge_index.to(device), tolerance=tolerance).fallbacks
    # 16-bit features with float32 weights: the result has the promoted type
    w = torch.rand(edge_index.shape[1], device=device)
    compare(nn.SimpleConv("sum"), x, edge_index.to(device), w, tolerance=2e-2)


def test_integer_features_fall_back(device):
    edge_index, n, _ = GRAPHS["random"]()
    x = torch.randint(0, 9, (n, F), device=device)
    layer = nn.SimpleConv("sum")
    found = layer(x, edge_index.to(device))
    assert {r for _, r in gnnfast.report().fallbacks} == {"features are torch.int64"}
    gnnfast.disable()
    expected = layer(x, edge_index.to(device))
    gnnfast.enable()
    assert found.dtype == torch.int64 and torch.equal(found, expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_layouts(index_dtype, device):
    edge_index, n, _ = GRAPHS["random"]()
    pairs = edge_index.to(device, index_dtype).t().contiguous().t()  # columns side by side: rows of edge_index are strided
    wide = torch.randn(n, 4 * F, device=device)
    for x in (
        wide[:, ::4],
        wide[:, 3 : 3 + F],
        torch.randn(F, n, device=device).t(),
        torch.randn(1, F, device=device).expand(n, F),
    ):
        assert not compare(nn.SAGEConv(F, 5), x, pairs).fallbacks


def test_bipartite_and_size(device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    edge_index = edge_index.to(device)
    source, target = torch.randn(num_src, F, device=device), torch.randn(num_dst, F, device=device)

    class Both(torch.nn.Module):
        def __init__(self, conv, call):
            super().__init__()
            self.conv, self.call = conv, call

        def forward(self, a, b):
            return self.call(self.conv, a, b)

    for conv in (nn.SAGEConv((F, F), 5), nn.GraphConv((F, F), 5), nn.SAGEConv((F, F), 5, aggr="max")):
        for call in (
            lambda c, a, b: c((a, b), edge_index),
            lambda c, a, b: c((a, b), edge_index, size=(num_src, num_dst)),
        ):
            assert not compare(Both(conv, call), source, target).fallbacks
    conv = nn.SAGEConv((F, F), 5, root_weight=False)
    assert not compare(Both(conv, lambda c, a, b: c((a, None), edge_index, size=(num_src, num_dst))), source, target).fallbacks
    assert not compare(Both(conv, lambda c, a, b: c((a, None), edge_index % num_src)), source, target).fallbacks


class Scale(MessagePassing):
    """A user's own layer."""

    def __init__(self, aggr="sum", **kwargs):
        super().__init__(aggr=aggr, **kwargs)

    def forward(self, x, edge_index, norm=None):
        return self.propagate(edge_index, x=x, norm=norm)

    def message(self, x_j, norm):
        return x_j * norm.unsqueeze(-1)


class Heads(Scale):
    def __init__(self):
        super().__init__(node_dim=0)


class Update(Scale):
    def forward(self, x, edge_index, norm=None):
        return self.propagate(edge_index, x=x, norm=norm, bias=3.0)

    def update(self, out, bias):
        return out + bias


class Unknown(Scale):
    def message(self, x_j, norm):
        return (x_j * norm.unsqueeze(-1)).relu()


class OwnAggregate(Scale):
    def aggregate(self, inputs, index, dim_size=None):
        return super().aggregate(inputs, index, dim_size=dim_size) * 2


def test_user_layers(device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, w = edge_index.to(device), torch.rand(edge_index.shape[1], device=device)
    x = torch.randn(n, F, device=device)
    for layer in (Scale(), Scale("mean"), Scale("max"), Update()):
        assert not compare(layer, x, edge_index, w).fallbacks
    heads = torch.rand(edge_index.shape[1], 2, device=device)
    assert not compare(Heads(), x.view(n, 2, 4), edge_index, heads).fallbacks
    assert not compare(Scale(node_dim=-2), x.view(1, n, F).repeat(3, 1, 1), edge_index, w).fallbacks  # static graph
    for layer, reason in (
        (Unknown(), "message() is not x_j or weight * x_j"),
        (OwnAggregate(), "aggregate() is overridden"),
        (Scale("std"), "the aggregation is StdAggregation"),
        (Scale(["mean", "max"]), "the aggregation is MultiAggregation"),
        (Scale("softmax"), "the aggregation is SoftmaxAggregation"),
    ):
        report = compare(layer, x, edge_index, w)
        assert reason in {r for _, _, r in report.kernels} and not report.fallbacks
        assert any(kernel.startswith("gathers") for _, kernel, _ in report.kernels)


def test_broadcast_weights(device):
    edge_index, n, _ = GRAPHS["random"]()
    x = torch.randn(n, F, device=device)
    compare(nn.SimpleConv("sum"), x, edge_index.to(device), torch.rand(1, device=device))


def test_hooks_explainers_and_instance_changes_fall_back(device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, x = edge_index.to(device), torch.randn(n, F, device=device)
    conv = nn.GraphConv(F, 5).to(device)
    expected = conv(x, edge_index)
    seen = []
    handle = conv.register_message_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    assert torch.allclose(conv(x, edge_index), expected, atol=1e-5) and seen == [(200, F)]
    handle.remove()
    handle = conv.aggr_module.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    conv(x, edge_index)
    assert len(seen) == 2
    handle.remove()
    handle = conv.aggr_module.register_full_backward_pre_hook(lambda module, grad: seen.append(grad))
    conv(x.clone().requires_grad_(), edge_index).sum().backward()
    assert len(seen) == 3
    handle.remove()
    conv.explain = True
    conv._edge_mask, conv._apply_sigmoid, conv._loop_mask = torch.zeros(200, device=device), False, None
    assert torch.allclose(conv(x, edge_index), conv.lin_root(x) + conv.lin_rel.bias, atol=1e-5)
    conv.explain = None
    conv.message = lambda x_j, edge_weight: 2 * x_j
    assert not torch.allclose(conv(x, edge_index), expected)
    del conv.message
    gnnfast.clear_report()
    assert torch.allclose(conv(x, edge_index), expected, atol=1e-5)
    assert gnnfast.report().kernels and not gnnfast.report().fallbacks


def test_errors_are_those_of_pyg(device):
    if device.type == "cuda":
        pytest.skip("PyG itself ends in a device-side assertion on CUDA")
    conv = nn.SAGEConv(F, 5)
    x = torch.randn(4, F)
    cases = [
        (x, torch.tensor([[0, 4], [0, 1]])),
        (x, torch.tensor([[0, -1], [0, 1]])),
        (x, torch.tensor([[0, 1], [0, 4]])),
        (x, torch.tensor([[0, 1], [0, -1]])),
        (x, torch.tensor([[0.0, 1.0], [0.0, 1.0]])),
        (x, torch.zeros(3, 2, dtype=torch.long)),
        (x, [[0], [1]]),
        ((x, None), torch.tensor([[0, 1], [0, 1]])),
        (torch.randn(4, F + 1), torch.tensor([[0, 1], [0, 1]])),
    ]

    def outcome(x, edge_index):
        try:
            return conv(x, edge_index)
        except Exception as error:
            return type(error), str(error)

    for x, edge_index in cases:
        found = outcome(x, edge_index)
        gnnfast.disable()
        expected = outcome(x, edge_index)
        gnnfast.enable()
        if isinstance(expected, torch.Tensor):
            assert torch.equal(found, expected)
        else:
            assert found == expected


def test_wrong_device_mix_is_pygs_error():
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    with pytest.raises(RuntimeError, match="device"):
        nn.SAGEConv(F, 5).cuda()(torch.randn(4, F, device="cuda"), torch.tensor([[0], [1]]))


def test_sparse_adjacency(device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index = torch.unique(edge_index, dim=1).to(device)
    w = torch.rand(edge_index.shape[1], device=device)
    x = torch.randn(n, F, device=device)
    coo = torch.sparse_coo_tensor(edge_index.flip(0), w, (n, n)).coalesce()
    for adjacency in (coo.to_sparse_csr(), coo.to_sparse_csc(), coo):
        for layer in (nn.GCNConv(F, 5), nn.SAGEConv(F, 5), nn.GINConv(torch.nn.Linear(F, 5)), nn.GraphConv(F, 5)):
            if adjacency.layout is torch.sparse_csc and isinstance(layer, nn.GCNConv):
                continue  # PyG's gcn_norm refuses CSC
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = compare(layer, x, adjacency)
            places = {"pyg gcn_norm", "pyg GCNConv"} if isinstance(layer, nn.GCNConv) else {"pyg spmm"}
            assert {k[0] for k in report.kernels} == places and not report.fallbacks
    from torch_geometric.utils import spmm

    csr = coo.to_sparse_csr()
    for reduce in ("sum", "mean", "max", "min"):
        if device.type == "cuda" and reduce in ("max", "min"):
            with pytest.raises(NotImplementedError):
                spmm(csr, x, reduce)
            continue
        found = spmm(csr, x, reduce)
        gnnfast.disable()
        assert relative_error(found, spmm(csr, x, reduce)) < 1e-6
        gnnfast.enable()
    twice = torch.sparse_coo_tensor(torch.cat([edge_index.flip(0)] * 2, 1), torch.cat([w, w]), (n, n))
    gnnfast.clear_report()
    spmm(twice, x)
    assert {r for _, r in gnnfast.report().fallbacks} == {"the sparse matrix is not coalesced"}
    # values may change in place
    found = spmm(csr, x)
    csr.values().mul_(2)
    assert relative_error(spmm(csr, x), 2 * found) < 1e-6
    with pytest.warns(UserWarning, match="Converting sparse tensor to CSR format"):
        spmm(coo, x)


def test_sparse_tensor(device):
    torch_sparse = pytest.importorskip("torch_sparse", reason="torch-sparse is not installed")
    edge_index, n, _ = GRAPHS["random"]()
    edge_index = torch.unique(edge_index, dim=1).to(device)
    x = torch.randn(n, F, device=device)
    for value in (None, torch.rand(edge_index.shape[1], device=device)):
        adjacency = torch_sparse.SparseTensor(row=edge_index[1], col=edge_index[0], value=value, sparse_sizes=(n, n))
        for layer in (nn.GCNConv(F, 5), nn.SAGEConv(F, 5), nn.SAGEConv(F, 5, aggr="max"), nn.GraphConv(F, 5)):
            report = compare(layer, x, adjacency)
            if getattr(layer, "aggr", "") != "max":
                assert report.kernels and not report.fallbacks


def test_transforms_and_tracing_fall_back():
    edge_index, n, _ = GRAPHS["random"]()
    x = torch.randn(n, F)
    conv = nn.SAGEConv(F, 5)
    expected = conv(x, edge_index)
    batched = torch.func.vmap(lambda x: conv(x, edge_index))(x.unsqueeze(0))
    assert torch.allclose(batched[0], expected, atol=1e-5)
    _, tangent = torch.func.jvp(lambda x: conv(x, edge_index), (x,), (torch.ones_like(x),))
    assert tangent.shape == expected.shape
    traced = torch.jit.trace(conv, (x, edge_index))
    assert torch.allclose(traced(x, edge_index), expected, atol=1e-5)
    reasons = {r for _, r in gnnfast.report().fallbacks}
    assert reasons == {"a torch.func transform is active", "torch.jit.trace or ONNX export is recording"}


def test_script_compile_and_pickle():
    edge_index, n, _ = GRAPHS["random"]()
    x = torch.randn(n, F)
    for conv in (nn.SAGEConv(F, 5), nn.GCNConv(F, 5)):
        expected = conv(x, edge_index)
        assert torch.allclose(torch.jit.script(conv)(x, edge_index), expected, atol=1e-5)
        compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(x, edge_index), expected, atol=1e-5)
        assert torch.equal(copy.deepcopy(conv)(x, edge_index), expected)


def test_gcn_norm_is_remembered_and_follows_changes(device):
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    from gnnfast.pyg.propagate import graph_of

    edge_index, n, _ = GRAPHS["random"]()
    edge_index = edge_index.to(device)
    first, again = gcn_norm(edge_index, None, n), gcn_norm(edge_index, None, n)
    assert not any(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in zip(first, again))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert ("pyg gcn_norm", "remembered", "computed once per graph") in gnnfast.report().kernels
    assert graph_of(first[0], n, n, True) is graph_of(again[0], n, n, True)  # copies are one graph ...
    again[0][0, 0] = 7
    assert graph_of(first[0], n, n, True) is not graph_of(again[0], n, n, True)  # ... until one is changed
    again[1].mul_(2)
    assert torch.equal(gcn_norm(edge_index, None, n)[1], first[1])
    edge_index[:, 0] = 0
    changed = gcn_norm(edge_index, None, n)
    gnnfast.disable()
    expected = gcn_norm(edge_index, None, n)
    gnnfast.enable()
    assert torch.equal(changed[0], expected[0]) and relative_error(changed[1], expected[1]) < 1e-6
    w = torch.rand(edge_index.shape[1], device=device, requires_grad=True)
    a, b = gcn_norm(edge_index, w, n), gcn_norm(edge_index, w, n)
    assert a[0] is not b[0] and graph_of(a[0], n, n, True) is graph_of(b[0], n, n, True)
    assert a[1] is not b[1] and b[1].requires_grad


@pytest.mark.parametrize("name", ["GCNConv", "SGConv", "SSGConv", "TAGConv", "APPNP", "LGConv", "MixHopConv", "ARMAConv"])
def test_normalised_weights_are_shared_within_a_layer(name, device, converts_at_once):
    """In the layer they are the same tensors in every pass, so that they are kept in slot order."""
    from gnnfast.cache import cache

    cache.clear()
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, x = edge_index.to(device), torch.randn(n, F, device=device, requires_grad=True)
    conv = LAYERS[name]().to(device)
    for _ in range(3):
        conv(x, edge_index).sum().backward()
    (graph,) = [g for g in cache.values if isinstance(g, gnnfast.Graph)]
    assert len(graph.edges.values) == 2  # by destination and by source


def test_edge_index_changed_in_place(device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, x = edge_index.to(device), torch.randn(n, F, device=device)
    conv = nn.SAGEConv(F, 5).to(device)
    for _ in range(3):
        conv(x, edge_index)
    edge_index[0, :50] = 0
    found = conv(x, edge_index)
    gnnfast.disable()
    assert relative_error(found, conv(x, edge_index)) < 1e-5
    gnnfast.enable()


def test_inference_mode_then_training(device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, x = edge_index.to(device), torch.randn(n, F, device=device)
    conv = nn.GCNConv(F, 5).to(device)
    with torch.inference_mode():
        expected = conv(x, edge_index)
        inside = edge_index.clone()  # an inference tensor has no version to follow
        assert relative_error(conv(x, inside), expected) < 1e-5
    out = conv(x, edge_index)
    out.sum().backward()
    assert relative_error(out, expected) < 1e-5


def test_autocast_and_checkpoint(device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, x = edge_index.to(device), torch.randn(n, F, device=device)
    for conv in (nn.GCNConv(F, 5).to(device), nn.SAGEConv(F, 5).to(device)):
        results = []
        for on in (True, False):
            (gnnfast.enable if on else gnnfast.disable)()
            with torch.autocast(device.type, torch.bfloat16):
                results.append(conv(x, edge_index))
        gnnfast.enable()
        assert results[0].dtype == results[1].dtype and relative_error(*results) < 2e-2
    leaf = x.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(conv, leaf, edge_index, use_reentrant=False).sum().backward()
    assert leaf.grad is not None


def test_double_backward_through_a_layer(device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index = edge_index.to(device)
    conv = nn.GCNConv(F, 5).to(device).double()

    def penalty():
        x = torch.linspace(-1, 1, n * F, device=device, dtype=torch.float64).view(n, F).requires_grad_()
        (g,) = torch.autograd.grad(conv(x, edge_index).tanh().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(g.pow(2).sum(), x)
        return second

    found = penalty()
    gnnfast.disable()
    expected = penalty()
    gnnfast.enable()
    assert relative_error(found, expected) < 1e-10


class _Calls(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.conv(x, edge_index)


@pytest.mark.parametrize("name", ["TransformerConv", "GCNConv", "EdgeConv"])
def test_scripted_layers_keep_their_overloads(name):
    """TorchScript knows the overloads of a method by the line that it is on."""
    edge_index, n, _ = GRAPHS["random"]()
    x = torch.randn(n, F)
    conv = {"TransformerConv": lambda: nn.TransformerConv(F, 5), "GCNConv": lambda: nn.GCNConv(F, 5)}.get(
        name, lambda: nn.EdgeConv(torch.nn.Linear(2 * F, 5))
    )()
    scripted = torch.jit.script(_Calls(conv))
    assert torch.allclose(scripted(x, edge_index), conv(x, edge_index), atol=1e-5)


SIZED = {
    "SAGEConv": lambda: nn.SAGEConv(F, 5),
    "SAGEConv max": lambda: nn.SAGEConv(F, 5, aggr="max"),
    "GraphConv": lambda: nn.GraphConv(F, 5),
    "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, 5)),
    "MFConv": lambda: nn.MFConv(F, 5),
    "GATConv": lambda: nn.GATConv(F, 5),
}


def _sizes_of(what, n, num_edges):
    return {
        "a tensor": torch.tensor([n, n]),
        "tensors": (torch.tensor(n), torch.tensor(n)),
        "a list": [n, n],
        "torch.Size": torch.Size([n, n]),
        "another": (n, n + 1),
        "weights": torch.rand(num_edges),  # as if they were the third argument
        "three": (n, n, n),
    }[what]


@pytest.mark.parametrize("what", ["a tensor", "tensors", "a list", "torch.Size", "another", "weights", "three"])
@pytest.mark.parametrize("name", SIZED)
def test_sizes_of_any_type(name, what, device):
    """What PyG takes as a ``size`` is taken, and what it refuses is refused by it."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index, layer = torch.randn(n, F, device=device), edge_index.to(device), SIZED[name]().to(device)
    size = _sizes_of(what, n, edge_index.shape[1])

    def call(grad):
        try:
            with torch.set_grad_enabled(grad):
                return layer(x, edge_index, size=size)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    for grad in (True, False):
        found, expected = call(grad), without(lambda grad=grad: call(grad))
        if isinstance(expected, str):
            assert found == expected
        else:
            assert relative_error(found, expected) < 1e-5
