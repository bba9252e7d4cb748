"""Layers over ``torch_sparse.SparseTensor``: as PyG computes them, over the edges that it lists where they do not multiply with it."""

from __future__ import annotations

import pytest
import torch
from adjacencies import LAYERS, USERS, WHOLE, F, OfIds, OfWeights, check, check_edges_are_let_go
from comparison import compare, same
from gnnfast.benchmarks import convs
from graphs import GRAPHS
from torch_geometric import nn

import gnnfast
from gnnfast.pyg import matrices

torch_sparse = pytest.importorskip("torch_sparse", reason="torch-sparse is not installed")

VALUES = {"values": (), "none": None}


def sparse_tensor(name, device="cpu", values=()):
    """As it lists the edges of the graph, with those that are there twice; ``values``: the shape of each."""
    edge_index, num_src, num_dst = GRAPHS[name]()
    n, generator = max(num_src, num_dst), torch.Generator().manual_seed(0)
    value = None if values is None else torch.rand(edge_index.shape[1], *values, generator=generator, dtype=torch.float64) + 0.5
    return torch_sparse.SparseTensor(row=edge_index[1], col=edge_index[0], value=value, sparse_sizes=(n, n)).to(device)


def features(adj):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(adj.size(1), F, generator=generator, dtype=torch.float64).to(adj.device())


@pytest.fixture
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("graph", ["random", "no_edges", "self_loops_and_duplicates"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("in_double")
def test_layers(name, graph, values, few, device, request):
    if few:
        request.getfixturevalue("small")
    if (name, graph) == ("LGConv", "no_edges"):
        pytest.skip("torch-sparse's product with no entries has no gradient, of which this layer has no other")
    adj = sparse_tensor(graph, device, VALUES[values])
    torch.manual_seed(0)
    check(convs.ALL[name](F, F), features(adj), adj)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("make", [nn.GCNConv, nn.SGConv])
@pytest.mark.usefixtures("in_double")
def test_loops_take_the_place_of_those_that_are_there(make, improved, values, device):
    adj = sparse_tensor("self_loops_and_duplicates", device, VALUES[values])
    options = {"improved": improved} if make is nn.GCNConv else {"K": 2}
    report = compare(make(F, 5, **options), features(adj), adj, tolerance=1e-9)
    assert any(place == "pyg gcn_norm" for place, *_ in report.kernels)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.usefixtures("in_double")
def test_layers_are_served_over_the_edges(name, values, device):
    adj = sparse_tensor("random", device, VALUES[values])
    report = compare(WHOLE[name](), features(adj), adj, tolerance=1e-9)
    assert {place for place, *_ in report.kernels} == {f"pyg {name}"} and not report.fallbacks


@pytest.mark.parametrize("values", [(), (3,), None])
@pytest.mark.parametrize("name", [*USERS, "pointers"])
@pytest.mark.usefixtures("in_double")
def test_users_layers(name, values, device):
    layer = OfPointers() if name == "pointers" else USERS[name]()
    adj = sparse_tensor("random", device, values)
    check(layer, features(adj), adj)


class OfPointers(OfIds):
    """What PyG gives of a SparseTensor alone."""

    def message(self, x_j, ptr):
        return x_j * ptr.diff().repeat_interleave(ptr.diff()).view(-1, 1)


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv, nn.TransformerConv])
@pytest.mark.usefixtures("in_double")
def test_values_as_features_of_edges(make, device):
    adj = sparse_tensor("random", device, (3,))
    options = {} if make is nn.TransformerConv else {"add_self_loops": False}
    check(make(F, 5, edge_dim=3, **options), features(adj), adj)


@pytest.mark.usefixtures("in_double")
def test_other_values_share_the_edges(device):
    adj = sparse_tensor("random", device)
    layers, x = [OfWeights(), nn.GCNConv(F, 5).to(device)], features(adj)
    for factor in (1, 2, 3):
        for layer in layers:
            changed = adj.set_value(adj.storage.value() * factor, layout="coo")
            same(lambda layer=layer, changed=changed: [layer(x, changed)])
    assert matrices.edges_of(adj) is matrices.edges_of(changed)
    adj.storage.value().mul_(3)
    same(lambda: [layer(x, adj) for layer in layers])


@pytest.mark.parametrize("name", ["GCNConv", *WHOLE])
@pytest.mark.usefixtures("in_double")
def test_indices_that_change(name, device):
    adj = sparse_tensor("random", device)
    layer, x = (WHOLE | {"GCNConv": lambda: nn.GCNConv(F, 5)})[name]().to(device), features(adj)
    for _ in range(3):
        same(lambda: [layer(x, adj)])
    row, col, _ = adj.coo()
    of_row = row == row.bincount().argmax()
    col[of_row] = torch.arange(int(of_row.sum()), device=device)
    for _ in range(3):
        same(lambda: [layer(x, adj)])


@pytest.mark.parametrize("make", [lambda: nn.GCNConv(F, 5), *WHOLE.values()])
@pytest.mark.usefixtures("in_double")
def test_gradients_of_values(make, device):
    adj, layer = sparse_tensor("random", device), make().to(device)
    x = features(adj)

    def step():
        value = adj.storage.value().clone().requires_grad_()
        out = layer(x, adj.set_value(value, layout="coo"))
        return [out.detach(), *torch.autograd.grad(out.pow(2).sum(), [*layer.parameters(), value], allow_unused=True)]

    same(lambda: [t for t in step() if t is not None])


def test_edges_are_let_go_with_their_matrix(device):
    check_edges_are_let_go(lambda: sparse_tensor("random", device), features, device)


@pytest.mark.usefixtures("in_double")
def test_bipartite(device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    adj = torch_sparse.SparseTensor(row=edge_index[1], col=edge_index[0], sparse_sizes=(num_dst, num_src)).to(device)
    pair = tuple(torch.randn(n, F, device=device) for n in (num_src, num_dst))
    for make in (nn.GATConv, nn.GATv2Conv, nn.TransformerConv):
        options = {} if make is nn.TransformerConv else {"add_self_loops": False}
        layer = make((F, F), 5, **options).to(device)
        for _ in range(3):
            same(lambda layer=layer: [layer(pair, adj)])
    assert not gnnfast.report().fallbacks
