"""Layers that take an adjacency matrix, of PyG's and of users, and how one is compared over it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from comparison import compare, run, same, without
from gnnfast.benchmarks import convs
from graphs import GRAPHS
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

from gnnfast.cache import cache
from gnnfast.pyg.matrices import edges_of

F = 16
LAYERS = [name for name in convs.ALL if name not in convs.NO_MATRIX]
# Which do more than multiply with it, each as a whole.
WHOLE = {
    "GATConv": lambda: nn.GATConv(F, 5, heads=2),
    "GATv2Conv": lambda: nn.GATv2Conv(F, 5, heads=2),
    "TransformerConv": lambda: nn.TransformerConv(F, 5, heads=2),
    "AGNNConv": lambda: nn.AGNNConv(),
}


def matrix(name, device="cpu", layout=torch.sparse_csr, dtype=torch.float64, values=()):
    """One with as many rows as columns, and loops as the graph has them."""
    edge_index, num_src, num_dst = GRAPHS[name]()
    n = max(num_src, num_dst)
    generator = torch.Generator().manual_seed(0)
    of_edges = torch.rand(edge_index.shape[1], *values, generator=generator, dtype=dtype) + 0.5
    coo = torch.sparse_coo_tensor(edge_index.flip(0), of_edges, (n, n, *values)).coalesce()
    adj = coo if layout is torch.sparse_coo else torch.sparse_csr_tensor(*compressed(coo), coo.values(), coo.shape)
    return adj.to(device)


def compressed(coo):
    rows, cols = coo.indices()
    return torch.cat([torch.zeros(1, dtype=torch.int64), rows.bincount(minlength=coo.shape[0]).cumsum(0)]), cols


def features(adj, width=F):
    return torch.randn(adj.shape[1], width, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(adj.device)


def quietly(step):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return step()


def check(layer, x, adj):
    """Or both refuse."""
    try:
        without(lambda: run(copy.deepcopy(layer).to(x.device), x, adj, repeats=1))
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, IndexError, AttributeError, TypeError) as error:
        with pytest.raises(type(error)):
            run(layer.to(x.device), x, adj, repeats=1)
        return
    compare(layer, x, adj, tolerance=1e-8)
    with torch.no_grad():
        layer.eval()
        for _ in range(2):
            same(lambda: [layer(x, adj)], tolerance=1e-8)


def check_edges_are_let_go(make, features, device):
    """With the matrix that ``make()`` gives, with which they are kept."""
    layer = nn.EdgeConv(torch.nn.Linear(2 * F, 5)).double().to(device)
    before, adj = cache.nbytes, make()
    x = features(adj)
    for _ in range(3):
        layer(x, adj)
    assert edges_of(adj) is edges_of(adj) and cache.nbytes > before
    del adj
    assert cache.nbytes == before


class OfWeights(MessagePassing):
    """Of which PyG makes what was not given from the values."""

    def forward(self, x, adj, edge_weight=None):
        return self.propagate(adj, x=x, edge_weight=edge_weight)

    def message(self, x_j, x_i, edge_weight):
        return (x_j + x_i).tanh() * edge_weight.view(-1, 1)


class OfFeatures(MessagePassing):
    def forward(self, x, adj, edge_attr=None):
        return self.propagate(adj, x=x, edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return x_j.sin() if edge_attr is None else x_j.sin() * edge_attr.sum(1, keepdim=True)


class OfTypes(MessagePassing):
    def forward(self, x, adj, edge_type=None):
        return self.propagate(adj, x=x, edge_type=edge_type)

    def message(self, x_j, edge_type):
        return x_j.cos() * (edge_type > 1).view(-1, 1)


class OfEnds(MessagePassing):
    def forward(self, x, adj):
        return self.propagate(adj, x=x)

    def message(self, x_j, edge_index):
        return x_j * edge_index[:1].t()


class OfMatrix(MessagePassing):
    def forward(self, x, adj):
        return self.propagate(adj, x=x)

    def message(self, x_j, adj_t):
        return x_j * adj_t.values().view(-1, 1)


class OfIds(MessagePassing):
    def forward(self, x, adj):
        return self.propagate(adj, x=x)

    def message(self, x_j, x_i, index, ptr, size_i, edge_index_j):
        return x_j * (index + edge_index_j + size_i).view(-1, 1) + x_i


USERS = {
    "weights": OfWeights,
    "features": OfFeatures,
    "types": OfTypes,
    "ends": OfEnds,
    "matrix": OfMatrix,
    "ids": OfIds,
}
