"""Nothing that is kept is stale, and nothing is held by it: defects found from outside, each in the form it was found in."""

from __future__ import annotations

import pytest
import torch
from graphs import relative_error
from promises import EDGES, NODES, F, both, same
from torch.utils.checkpoint import checkpoint

import gnnfast
from gnnfast import features

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import EdgeIndex, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm


def _optimise(optimizer, **options):
    def change(w):
        w.grad = torch.ones_like(w)
        optimizer([w], lr=0.1, **options).step()

    return change


WRITES = {
    "fused Adam": _optimise(torch.optim.Adam, fused=True),
    "fused SGD": _optimise(torch.optim.SGD, fused=True),
    "foreach SGD": _optimise(torch.optim.SGD, foreach=True),
    "data.mul_": lambda w: w.data.mul_(3),
    "data =": lambda w: setattr(w, "data", w.data * 3),
    "init": lambda w: torch.nn.init.uniform_(w.data, 5, 6),
    "no_grad mul_": lambda w: w.detach().mul_(3),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", [lambda: nn.GCNConv(F, 4), lambda: nn.GraphConv(F, 4), lambda: nn.TAGConv(F, 4)])
def test_learned_weights_are_never_kept(make, write, edge_index, x, device):
    conv, w = make().to(device, torch.float64), torch.nn.Parameter(torch.rand(EDGES, device=device, dtype=torch.float64))
    for _ in range(3):
        with torch.no_grad():
            for _ in range(3):
                same(lambda: conv(x, edge_index, w))
        WRITES[write](w)
    w.requires_grad_(False)
    with torch.no_grad():
        for _ in range(3):
            same(lambda: conv(x, edge_index, w))
            w.data.mul_(2)


def test_a_view_of_a_parameter_is_never_kept(edge_index, x, device):
    conv, p = nn.GraphConv(F, 4).to(device, torch.float64), torch.nn.Parameter(torch.rand(2, EDGES, device=device).double())
    with torch.no_grad():
        w = p[0]
        for _ in range(4):
            same(lambda: conv(x, edge_index, w))
            p.data.mul_(3)


def test_a_tensor_that_once_required_a_gradient_is_never_kept(edge_index, x, device):
    conv, w = nn.GraphConv(F, 4).to(device, torch.float64), torch.rand(EDGES, device=device, dtype=torch.float64)
    for _ in range(3):
        w.requires_grad_()
        conv(x, edge_index, w).sum().backward()
        torch.optim.Adam([w], lr=0.1, fused=True).step()
        w.requires_grad_(False)
        for _ in range(3):
            same(lambda: conv(x, edge_index, w))


def test_module_cast(edge_index, x, device):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.w = nn.GraphConv(F, 4), torch.nn.Parameter(torch.rand(EDGES))
            self.register_buffer("constant", torch.rand(EDGES))

        def forward(self, x, edge_index):
            return self.conv(x, edge_index, self.w) + self.conv(x, edge_index, self.constant)

    net = Net().to(device)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.float32):
            net.to(dtype)
            for _ in range(3):
                found, expected = both(lambda dtype=dtype: net(x.to(dtype), edge_index))
                assert found.dtype == dtype and relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("what", ["edge_index", "weight", "x"])
def test_storage_that_is_exchanged_and_reused(what, device):
    """``t.data = new`` leaves the version counter alone, and the allocator hands out the old address again."""
    t = {
        "edge_index": torch.randint(0, NODES, (2, EDGES), device=device),
        "weight": torch.rand(EDGES, device=device, dtype=torch.float64),
        "x": torch.randn(NODES, F, device=device, dtype=torch.float64).relu(),
    }
    conv = nn.GraphConv(F, 4, bias=False).to(device, torch.float64)
    before = features.MIN_WIDTH, features.MIN_ELEMENTS
    features.MIN_WIDTH = features.MIN_ELEMENTS = 1
    try:
        with torch.no_grad(), gnnfast.override(feature_density_threshold=1):
            for step in range(6):
                for _ in range(2):
                    same(lambda: conv(t["x"], t["edge_index"], t["weight"]))
                for _ in range(1 + step % 2):
                    new = t[what].flip(-1).contiguous() if what == "edge_index" else t[what] * 1.5
                    t[what].data = new
                    del new
    finally:
        features.MIN_WIDTH, features.MIN_ELEMENTS = before


@pytest.mark.parametrize("through", ["base", "as_tensor", "wrapper"])
def test_edge_index_class_changed_in_place(through, x, device):
    base = torch.randint(0, NODES, (2, EDGES), device=device)
    edges, conv = EdgeIndex(base, sparse_size=(NODES, NODES)), nn.GraphConv(F, 4).to(device, torch.float64)
    for _ in range(3):
        same(lambda: conv(x, edges))
        new = torch.randint(0, NODES, (2, EDGES), device=device)
        {"base": base, "as_tensor": edges.as_tensor(), "wrapper": edges}[through].copy_(new)
    assert not gnnfast.report().fallbacks


def test_values_of_sparse_matrices_and_features(device):
    adj = torch.randn(NODES, NODES, device=device, dtype=torch.float64).relu().to_sparse_csr()
    x = torch.randn(NODES, F, device=device, dtype=torch.float64)
    conv = nn.GraphConv(F, 4).to(device, torch.float64)
    for _ in range(3):
        with torch.no_grad():
            same(lambda: conv(x, adj))
        adj.values().mul_(2)
    # Entries stored twice are merged: a copy of the values that nobody sees go stale.
    rowptr, col = torch.tensor([0, 3, 3, 4], device=device), torch.tensor([1, 1, 0, 2], device=device)
    sparse = torch.sparse_csr_tensor(rowptr, col, torch.ones(4, device=device).double(), size=(3, 3))
    graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]], device=device), 3)
    for _ in range(3):
        found = gnnfast.spmm_sparse_features(graph, sparse)
        assert torch.equal(found, gnnfast.spmm(graph, sparse.to_dense()))
        sparse.values().mul_(3)


def test_default_dtype_is_looked_at(edge_index):
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert gcn_norm(edge_index, None, NODES)[1].dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_a_number_of_nodes_that_changes(edge_index):
    nodes = torch.tensor(NODES)
    assert gcn_norm(edge_index, None, nodes)[0].max() == NODES - 1
    nodes.fill_(NODES + 5)
    assert gcn_norm(edge_index, None, nodes)[0].max() == NODES + 4


def test_parameters_can_be_swapped(edge_index, x, device):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.w = nn.GraphConv(F, 4), torch.nn.Parameter(torch.rand(EDGES))

        def forward(self, x):
            return self.conv(x, edge_index, self.w)

    net = Net().to(device, torch.float64)
    with torch.no_grad():
        net(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert net(x.float()).dtype == torch.float32


def test_classes_are_let_go(edge_index, x, device):
    import gc
    import weakref

    def use():
        class Own(nn.GraphConv):
            pass

        Own(F, 4).to(device, torch.float64)(x, edge_index)
        return weakref.ref(Own)

    gone = [use() for _ in range(3)]
    gc.collect()
    assert not any(ref() for ref in gone)


def test_what_a_transform_left_in_a_cached_layer(edge_index, x, device):
    """It has no storage any more, and PyG can still compute with it."""

    def run():
        torch.manual_seed(0)
        layer = nn.GCNConv(F, F, cached=True).to(device, torch.float64)
        torch.func.grad(lambda t: layer(t, edge_index).sum())(x)
        return layer(x, edge_index).detach()

    same(run)


def test_softmax_of_a_graph_that_is_met_under_checkpointing(device):
    """The first pass meets a graph that its repetition knows: both save the same."""
    edge_index, x = torch.randint(0, NODES, (2, EDGES), device=device), torch.randn(NODES, F, device=device, dtype=torch.float64)
    layer = nn.HypergraphConv(F, F, use_attention=True).to(device, torch.float64)

    def run():
        leaf = x.clone().requires_grad_()
        edges = edge_index.clone()
        for _ in range(2):
            out = checkpoint(lambda t: layer(t, edges, hyperedge_attr=t, num_edges=NODES), leaf, use_reentrant=False)
            gradient = torch.autograd.grad(out.pow(2).sum(), leaf)[0]
        return gradient

    same(run)
