"""Layers whose messages no kernel makes as a whole, and what they are called with."""

from __future__ import annotations

import torch
from graphs import GRAPHS
from torch import nn as tnn
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

F, EDGE = 8, 3


def mlp(width_in: int, width_out: int = F) -> tnn.Module:
    return tnn.Sequential(tnn.Linear(width_in, width_out), tnn.Tanh(), tnn.Linear(width_out, width_out))


def degrees() -> torch.Tensor:
    return torch.tensor([1, 2, 3, 4, 5])


# name -> layer, and whether it takes edge features
LAYERS = {
    "GINEConv mean": (lambda: nn.GINEConv(mlp(F), edge_dim=EDGE, aggr="mean"), True),
    "EdgeConv": (lambda: nn.EdgeConv(mlp(2 * F)), False),
    "EdgeConv mean": (lambda: nn.EdgeConv(mlp(2 * F), aggr="mean"), False),
    "EdgeConv min": (lambda: nn.EdgeConv(mlp(2 * F), aggr="min"), False),
    "PNAConv": (
        lambda: nn.PNAConv(F, F, ["mean", "min", "max", "std"], ["identity", "amplification"], degrees(), pre_layers=2),
        False,
    ),
    "PNAConv with edges": (lambda: nn.PNAConv(F, F, ["mean", "sum"], ["attenuation"], degrees(), edge_dim=EDGE), True),
    "CGConv": (lambda: nn.CGConv(F, EDGE), True),
    "ResGatedGraphConv": (lambda: nn.ResGatedGraphConv(F, F, edge_dim=EDGE), True),
    "GENConv": (lambda: nn.GENConv(F, F, norm="layer", edge_dim=EDGE), True),
    "FiLMConv": (lambda: nn.FiLMConv(F, F), False),
    "GMMConv": (lambda: nn.GMMConv(F, F, EDGE, 2), True),
    "NNConv": (lambda: nn.NNConv(F, 4, tnn.Linear(EDGE, F * 4)), True),
    "LEConv": (lambda: nn.LEConv(F, F), False),
    "AGNNConv": (lambda: nn.AGNNConv(add_self_loops=False, flow="target_to_source"), False),
    "FeaStConv": (lambda: nn.FeaStConv(F, F, heads=2), False),
    "FAConv": (lambda: _WithInitial(nn.FAConv(F, flow="target_to_source")), False),
    "SuperGATConv": (lambda: nn.SuperGATConv(F, F, heads=2), False),
    "GeneralConv": (lambda: nn.GeneralConv(F, F, in_edge_channels=EDGE), True),
    "several reductions": (lambda: Difference(["sum", "max", "std"]), False),
    "own update": (lambda: _Updated("max"), False),
    "heads": (lambda: _Heads(), False),
    "of nodes and edges": (lambda: _Both(), False),
}


class _WithInitial(tnn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, x, edge_index)


class Difference(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return (x_i - x_j).cumsum(-1) * x_j


class _Updated(Difference):
    def update(self, inputs, x):
        return inputs + x


class _Heads(Difference):
    def __init__(self):
        super().__init__(node_dim=0)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x.view(x.shape[0], 2, -1)).flatten(1)


class _Both(Difference):
    """Takes ids, sizes, values of nodes that it gathers itself, and values of edges."""

    def forward(self, x, edge_index):
        per_edge = torch.linspace(0, 1, edge_index.shape[1], dtype=x.dtype, device=x.device)
        return self.propagate(edge_index, x=x, table=x.detach().cos(), per_edge=per_edge)

    def message(self, x_j, table, per_edge, edge_index_j, index, size_i):
        return x_j * table[edge_index_j] * per_edge.view(-1, 1) + index.view(-1, 1) / max(size_i, 1)


def arguments(name, graph, device, dtype=torch.float64):
    edge_index, num_src, num_dst = GRAPHS[graph]()
    n = max(num_src, num_dst)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, F, generator=generator, dtype=dtype).to(device)
    edge_index = edge_index.to(device)
    attr = torch.rand(edge_index.shape[1], EDGE, generator=generator, dtype=dtype).to(device)
    return (x, edge_index, attr) if LAYERS[name][1] else (x, edge_index)


def layer_of(name, device, dtype=torch.float64):
    torch.manual_seed(0)
    return LAYERS[name][0]().to(device, dtype)


def kinds(report):
    return {kernel for _, kernel, _ in report.kernels}
