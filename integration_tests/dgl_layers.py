"""A layer of each kind that ``dgl.nn.pytorch.conv`` has, with what it takes, and one step of it."""

from __future__ import annotations

import dgl
import torch
from dgl.nn import pytorch as nn

N, E, F = 60, 400, 8


def distances():
    return torch.rand(E + N, 1) * 4 + 0.1


# name -> (layer, what it takes after the features, as of a graph)
LAYERS = {
    "GraphConv": (lambda: nn.GraphConv(F, 4), lambda g: ()),
    "GraphConv wide": (lambda: nn.GraphConv(F, 16, norm="right"), lambda g: ()),
    "GraphConv weighted": (lambda: nn.GraphConv(F, 4), lambda g: (None, g.edata["w"])),
    "GATConv": (lambda: nn.GATConv(F, 4, 2), lambda g: ()),
    "GATConv residual": (lambda: nn.GATConv(F, 4, 2, residual=True), lambda g: ()),
    "GATv2Conv": (lambda: nn.GATv2Conv(F, 4, 2), lambda g: ()),
    "EGATConv": (lambda: nn.EGATConv(F, 5, 4, 3, 2), lambda g: (edge_features(),)),
    "EdgeGATConv": (lambda: nn.EdgeGATConv(F, 5, 4, 2), lambda g: (edge_features(),)),
    "TAGConv": (lambda: nn.TAGConv(F, 4), lambda g: ()),
    "RelGraphConv basis": (lambda: nn.RelGraphConv(F, 4, 3, "basis", 2), lambda g: (edge_types(),)),
    "RelGraphConv bdd": (lambda: nn.RelGraphConv(F, 4, 3, "bdd", 2), lambda g: (edge_types(),)),
    "RelGraphConv wide": (lambda: nn.RelGraphConv(F, 12, 3), lambda g: (edge_types(),)),
    "SAGEConv mean": (lambda: nn.SAGEConv(F, 4, "mean"), lambda g: ()),
    "SAGEConv gcn": (lambda: nn.SAGEConv(F, 4, "gcn"), lambda g: ()),
    "SAGEConv pool": (lambda: nn.SAGEConv(F, 4, "pool"), lambda g: ()),
    "SAGEConv lstm": (lambda: nn.SAGEConv(F, 4, "lstm"), lambda g: ()),
    "SGConv": (lambda: nn.SGConv(F, 4, 2), lambda g: ()),
    "APPNPConv": (lambda: nn.APPNPConv(2, 0.1), lambda g: ()),
    "GINConv sum": (lambda: nn.GINConv(torch.nn.Linear(F, 4), "sum", learn_eps=True), lambda g: ()),
    "GINConv mean": (lambda: nn.GINConv(torch.nn.Linear(F, 4), "mean"), lambda g: ()),
    "GINConv max": (lambda: nn.GINConv(torch.nn.Linear(F, 4), "max"), lambda g: ()),
    "GINEConv": (lambda: nn.GINEConv(torch.nn.Linear(F, 4)), lambda g: (edge_features(F),)),
    "GatedGraphConv": (lambda: nn.GatedGraphConv(F, F, 2, 3), lambda g: (edge_types(),)),
    "GatedGraphConv one type": (lambda: nn.GatedGraphConv(F, F, 2, 1), lambda g: ()),
    "GatedGCNConv": (lambda: nn.GatedGCNConv(F, 5, 4), lambda g: (edge_features(),)),
    "GMMConv": (lambda: nn.GMMConv(F, 4, 5, 2), lambda g: (edge_features(),)),
    "GMMConv max": (lambda: nn.GMMConv(F, 4, 5, 2, "max"), lambda g: (edge_features(),)),
    "ChebConv": (lambda: nn.ChebConv(F, 4, 2), lambda g: (torch.tensor([2.0]),)),
    "AGNNConv": (lambda: nn.AGNNConv(), lambda g: ()),
    "NNConv sum": (lambda: nn.NNConv(F, 4, torch.nn.Linear(5, F * 4), "sum"), lambda g: (edge_features(),)),
    "NNConv mean": (lambda: nn.NNConv(F, 4, torch.nn.Linear(5, F * 4), "mean"), lambda g: (edge_features(),)),
    "NNConv max": (lambda: nn.NNConv(F, 4, torch.nn.Linear(5, F * 4), "max"), lambda g: (edge_features(),)),
    "EdgeConv": (lambda: nn.EdgeConv(F, 4), lambda g: ()),
    "AtomicConv": (lambda: nn.AtomicConv(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([2.0])), lambda g: (distances(),)),
    "CFConv": (lambda: nn.CFConv(F, 5, 6, 4), lambda g: (edge_features(),)),
    "DotGatConv": (lambda: nn.DotGatConv(F, 4, 2), lambda g: ()),
    "TWIRLSConv": (lambda: nn.TWIRLSConv(F, 4, F, 2, num_mlp_before=1, dropout=0.0), lambda g: ()),
    "TWIRLSConv attention": (lambda: nn.TWIRLSConv(F, 4, F, 4, num_mlp_before=1, dropout=0.0, attention=True), lambda g: ()),
    "GCN2Conv": (lambda: nn.GCN2Conv(F, 1), lambda g: (node_features(),)),
    "HGTConv": (lambda: nn.HGTConv(F, 4, 2, 2, 3, dropout=0.0), lambda g: (torch.arange(N) % 2, edge_types())),
    "GroupRevRes": (lambda: nn.GroupRevRes(nn.GraphConv(F // 2, F // 2), 2), lambda g: ()),
    "EGNNConv": (lambda: nn.EGNNConv(F, F, F, 5), lambda g: (node_features(3), edge_features())),
    "PNAConv": (lambda: nn.PNAConv(F, 4, ["mean", "max", "sum", "min"], ["identity", "amplification"], 2.5), lambda g: ()),
    "DGNConv": (lambda: nn.DGNConv(F, 4, ["dir1-av", "dir1-dx", "sum"], ["identity"], 2.5), lambda g: (None, node_features(2))),
    "EdgeWeightNorm": (lambda: WeightNorm(), lambda g: ()),
}
FLOAT32 = (
    "ChebConv",
    "APPNPConv",
    "AtomicConv",
    "TWIRLSConv",
    "TWIRLSConv attention",
)  # what DGL has for these is of float32 alone


def edge_features(width=5):
    return torch.randn(E + N, width, generator=torch.Generator().manual_seed(5))


def node_features(width=F):
    return torch.randn(N, width, generator=torch.Generator().manual_seed(6))


def edge_types():
    return torch.arange(E + N) % 3


class WeightNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.EdgeWeightNorm("both"), nn.GraphConv(F, 4, norm="none")

    def forward(self, g, x):
        return self.conv(g, x, edge_weight=self.norm(g, g.edata["w"].view(-1).to(x.dtype)))


def with_loops(idtype=torch.int64):
    """A loop at each node in place of those it had: ``E + N`` edges."""
    torch.manual_seed(0)
    src, dst = torch.randint(0, N, (2, E))
    dst = torch.where(src == dst, (dst + 1) % N, dst)
    loops = torch.arange(N)
    g = dgl.graph((torch.cat([src, loops]), torch.cat([dst, loops])), num_nodes=N, idtype=idtype)
    g.edata["w"] = torch.rand(E + N, 1)
    return g


def step(layer, g, x, arguments):
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    out = layer(g, x, *arguments)
    out = torch.cat([t.flatten() for t in out]) if isinstance(out, tuple) else out
    kept = out.detach().clone()  # GroupRevRes empties it in the backward pass
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)).sum().backward()
    return [kept, x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def hetero():
    torch.manual_seed(1)

    def ids(n, edges):
        return torch.randint(0, n, (edges,))

    data = {
        ("u", "f", "u"): (ids(30, 90), ids(30, 90)),
        ("u", "b", "i"): (ids(30, 60), ids(20, 60)),
        ("i", "r", "u"): (ids(20, 50), ids(30, 50)),
    }
    g = dgl.heterograph(data, {"u": 30, "i": 20})
    for t in g.ntypes:
        g.nodes[t].data["h"] = torch.randn(g.num_nodes(t), F)
    return g


def square(idtype=torch.int64, loops=True):
    torch.manual_seed(0)
    g = dgl.graph((torch.randint(0, N, (E,)), torch.randint(0, N, (E,))), num_nodes=N, idtype=idtype)
    if loops:
        g = dgl.add_self_loop(g)
    g.ndata["x"], g.ndata["y"] = torch.randn(N, F), torch.randint(0, 3, (N,))
    g.edata["w"] = torch.rand(g.num_edges(), 1)
    return g
