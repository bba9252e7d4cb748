"""Layers and models of PyG's that are served in full under ``torch.compile``."""

from __future__ import annotations

import torch
from compiling import F
from torch_geometric import nn
from torch_geometric.nn import MessagePassing


class Weighted(MessagePassing):
    """A user's own, with a message and an update of PyG's shapes."""

    def __init__(self, aggr):
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(F, 5)

    def forward(self, x, edge_index, edge_weight):
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight, scale=2.0)

    def message(self, x_j, edge_weight):
        return edge_weight.unsqueeze(-1) * x_j

    def update(self, inputs, scale):
        return inputs * scale


class WithInitial(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, x.detach(), edge_index)


# name -> layer; all of them must be served in full
LAYERS = {
    "GCNConv": lambda: nn.GCNConv(F, 5),
    "GCNConv improved": lambda: nn.GCNConv(F, 5, improved=True),
    "GCNConv no loops": lambda: nn.GCNConv(F, 5, add_self_loops=False),
    "GCNConv not normalised": lambda: nn.GCNConv(F, 5, normalize=False),
    "GCNConv target_to_source": lambda: nn.GCNConv(F, 5, flow="target_to_source"),
    "GCNConv mean": lambda: nn.GCNConv(F, 5, aggr="mean"),
    "SAGEConv": lambda: nn.SAGEConv(F, 5),
    "SAGEConv project": lambda: nn.SAGEConv(F, 5, project=True, normalize=True),
    "SAGEConv max": lambda: nn.SAGEConv(F, 5, aggr="max"),
    "SAGEConv min": lambda: nn.SAGEConv(F, 5, aggr="min"),
    "SAGEConv target_to_source": lambda: nn.SAGEConv(F, 5, flow="target_to_source"),
    "SAGEConv max target_to_source": lambda: nn.SAGEConv(F, 5, aggr="max", flow="target_to_source"),
    "DirGNNConv": lambda: nn.DirGNNConv(nn.SAGEConv(F, 5)),
    "GraphConv": lambda: nn.GraphConv(F, 5),
    "GraphConv mean": lambda: nn.GraphConv(F, 5, aggr="mean"),
    "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, 5), train_eps=True),
    "SGConv": lambda: nn.SGConv(F, 5, K=2),
    "SSGConv": lambda: nn.SSGConv(F, 5, alpha=0.1, K=2),
    "TAGConv": lambda: nn.TAGConv(F, 5),
    "APPNP": lambda: nn.APPNP(K=3, alpha=0.1),
    "LGConv": lambda: nn.LGConv(),
    "MixHopConv": lambda: nn.MixHopConv(F, 5),
    "ARMAConv": lambda: nn.ARMAConv(F, 5, num_stacks=2, num_layers=2),
    "GCN2Conv": lambda: WithInitial(nn.GCN2Conv(F, 0.1, 0.5, 1)),
    "SimpleConv": lambda: nn.SimpleConv("mean"),
    "GATConv": lambda: nn.GATConv(F, 4, heads=3),
    "GATConv mean of heads": lambda: nn.GATConv(F, 4, heads=3, concat=False, add_self_loops=False, residual=True),
    "GATv2Conv": lambda: nn.GATv2Conv(F, 4, heads=3),
    "GATv2Conv shared": lambda: nn.GATv2Conv(F, 4, heads=3, share_weights=True, bias=False),
    "TransformerConv": lambda: nn.TransformerConv(F, 4, heads=3),
    "SAGEConv several": lambda: nn.SAGEConv(F, 5, aggr=["mean", "max", "std"]),
    "SAGEConv softmax": lambda: nn.SAGEConv(F, 5, aggr=nn.aggr.SoftmaxAggregation(learn=True)),
    "GENConv": lambda: nn.GENConv(F, 5),
    "GENConv learnt": lambda: nn.GENConv(F, F, learn_t=True),
    "GENConv std": lambda: nn.GENConv(F, F, aggr="std"),
    "EdgeConv several": lambda: nn.EdgeConv(torch.nn.Linear(2 * F, 5), aggr=["min", "var"]),
    "target_to_source several": lambda: nn.GCNConv(F, 5, normalize=False, bias=False, aggr=["max", "std"], flow="target_to_source"),
    "PNAConv": lambda: nn.PNAConv(F, 5, ["mean", "max", "std"], ["identity", "attenuation"], torch.tensor([1, 4, 9])),
    "PNAConv towers": lambda: nn.PNAConv(F, 6, ["sum", "min", "var"], ["inverse_linear"], torch.tensor([1, 4, 9]), towers=2),
    "TransformerConv beta": lambda: nn.TransformerConv(F, 4, heads=3, beta=True, concat=False),
}


class Net(torch.nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, edge_index, *rest):
        return self.second(torch.relu(self.first(x, edge_index, *rest)), edge_index, *rest)


NETS = {
    "GCN": lambda: Net(nn.GCNConv(F, 16), nn.GCNConv(16, 5)),
    "SAGE": lambda: Net(nn.SAGEConv(F, 16, aggr="max"), nn.SAGEConv(16, 5)),
    "GAT": lambda: Net(nn.GATConv(F, 8, heads=2), nn.TransformerConv(16, 5)),
}
