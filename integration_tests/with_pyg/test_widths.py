"""Rows of every width: on a CPU what does not fill a vector is in one that overlaps others, or padded, on a GPU in narrower ones."""

from __future__ import annotations

import pytest
import torch
from comparison import compare
from graphs import GRAPHS
from torch import nn
from torch_geometric.nn import CGConv, FiLMConv, GENConv, GINEConv, LEConv, MessagePassing, PNAConv, ResGatedGraphConv

DEPTH = 5
WIDTHS = [*range(1, 20), 23, 31, 33, 36, 47]


class Gated(MessagePassing):
    """Gates times a weight of each edge, whose gradient is a sum over all features."""

    def __init__(self, width, edge_attr=None):
        super().__init__(aggr="add")
        self.weight = nn.Parameter(torch.rand(500))
        self.edge_attr = edge_attr
        self.lin = nn.Linear(2 * width + DEPTH, width)

    def forward(self, x, edge_index, edge_attr=None):
        edge_attr = self.edge_attr if edge_attr is None else edge_attr
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, weight=self.weight[: edge_index.shape[1]])

    def message(self, x_i, x_j, edge_attr, weight):
        return weight.view(-1, 1) * torch.sigmoid(self.lin(torch.cat([x_i, x_j, edge_attr], dim=-1)))


class Extremum(MessagePassing):
    def __init__(self, width):
        super().__init__(aggr="max")

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


LAYERS = {
    "CGConv": lambda f: CGConv(f, DEPTH),
    "CGConv without edges": lambda f: CGConv(f),
    "ResGatedGraphConv": lambda f: ResGatedGraphConv(f, f, edge_dim=DEPTH),
    "FiLMConv": lambda f: FiLMConv(f, f),
    "LEConv": lambda f: LEConv(f, f),
    "GINEConv": lambda f: GINEConv(nn.Linear(f, 3), edge_dim=DEPTH),
    "GENConv": lambda f: GENConv(f, f, edge_dim=DEPTH, num_layers=1, learn_t=True),
    "PNAConv": lambda f: PNAConv(f, f, ["mean", "max", "min", "std"], ["identity"], torch.tensor([0, 3, 2, 1])),
    "max": Extremum,
    "gates and weights": Gated,
}
WITHOUT_EDGES = {"CGConv without edges", "FiLMConv", "LEConv", "PNAConv"}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", LAYERS)
def test_every_width(name, width, device):
    edge_index, n, _ = GRAPHS["random"]()
    edge_index = edge_index[:, :500].to(device)
    layer = LAYERS[name](width).double()
    x = torch.randn(n, width, dtype=torch.float64, device=device, requires_grad=True)
    attr = torch.randn(edge_index.shape[1], DEPTH, dtype=torch.float64, device=device)
    compare(layer, x, edge_index, *(() if name in WITHOUT_EDGES else (attr,)), tolerance=1e-9)


@pytest.mark.parametrize("width", [3, 7, 9, 17])
def test_values_that_are_not_finite_stay_where_they_are(width, device):
    """An infinite feature of an edge, without a gradient, opens a gate, which is a number."""
    edge_index, n, _ = GRAPHS["random"]()
    edge_index = edge_index[:, :500].to(device)
    x = torch.randn(n, width, dtype=torch.float64, device=device, requires_grad=True)
    attr = torch.randn(edge_index.shape[1], DEPTH, dtype=torch.float64, device=device)
    attr[7, 0] = torch.inf
    compare(Gated(width, attr).double(), x, edge_index, tolerance=1e-9)
