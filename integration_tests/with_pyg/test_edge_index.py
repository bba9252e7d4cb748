"""PyG's ``EdgeIndex``, and layers that multiply with one."""

from __future__ import annotations

import pytest
import torch
from comparison import compare, same, without
from graphs import GRAPHS

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import EdgeIndex, nn

F = 8
nn.GraphConv(1, 1)  # PyG writes a class's code for its first layer, which after one of several aggregations multiplies nothing


def test_edge_index_class(device):
    edge_index, n, _ = GRAPHS["random"]()
    x = torch.randn(n, F, device=device)
    for order in (None, "row", "col"):
        data = edge_index if order is None else edge_index[:, edge_index[{"row": 0, "col": 1}[order]].argsort(stable=True)]
        typed = EdgeIndex(data.to(device), sparse_size=(n, n), sort_order=order)
        for layer in (nn.SAGEConv(F, 5), nn.GCNConv(F, 5), nn.GraphConv(F, 5)):
            report = compare(layer, x, typed)
            assert report.kernels and not report.fallbacks
        for layer in (nn.SAGEConv, nn.GraphConv):  # the latter's product with edges by column does not ask for the flow
            compare(layer(F, 5, flow="target_to_source"), x, typed)


class Doubled(nn.GraphConv):
    def message_and_aggregate(self, edge_index, x, edge_weight):
        return 2 * super().message_and_aggregate(edge_index, x, edge_weight)


class Multiplied(nn.MessagePassing):
    SUPPORTS_FUSED_EDGE_INDEX = True

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j

    def message_and_aggregate(self, edge_index, x):
        return 3 * edge_index.matmul(x, reduce=self.aggr, transpose=True)


def _reduced_by(aggr):
    layer = nn.GraphConv(F, 5)
    layer.aggr = aggr  # of which PyG's product is, not of the module that reduces messages
    return layer


def _of_instance():
    layer = nn.GraphConv(F, 5)
    layer.message_and_aggregate = lambda edge_index, x, edge_weight: 0 * x[0]
    return layer


PRODUCTS = {
    "subclass": lambda: Doubled(F, 5),
    "user's": lambda: Multiplied("sum"),
    "of an instance": _of_instance,
    "mean": lambda: _reduced_by("mean"),
    "max": lambda: _reduced_by("max"),
    "sum": lambda: _reduced_by("sum"),
}


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_an_edge_index(name, few, device, request):
    """What ``message_and_aggregate()`` does with one that is sorted by column is what PyG runs, whatever messages would sum up to."""
    if few:
        request.getfixturevalue("small")
    edge_index, n, _ = GRAPHS["sorted"]()
    typed = EdgeIndex(edge_index.to(device), sparse_size=(n, n), sort_order="col")
    x, layer = torch.randn(n, F, device=device), PRODUCTS[name]().to(device)
    for no_gradient in (torch.no_grad, torch.enable_grad):
        with no_gradient():
            report = same(lambda: [layer(x, typed)], 1e-5)
    assert name == "sum" or few or report.fallbacks


class Fused(nn.SAGEConv):
    SUPPORTS_FUSED_EDGE_INDEX = True


def test_products_that_pyg_does_not_make_of_an_edge_index(device):
    edge_index, n, _ = GRAPHS["sorted"]()
    typed = EdgeIndex(edge_index.to(device), sparse_size=(n, n), sort_order="col")
    layer, x = Fused(F, 5).to(device), torch.randn(n, F, device=device)
    for call in (lambda: without(lambda: layer(x, typed)), lambda: layer(x, typed)):
        with pytest.raises(ValueError, match="sorted by rows"):
            call()
