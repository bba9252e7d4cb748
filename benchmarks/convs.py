"""The layers that benchmarks measure: one or more of every convolution of PyG that needs no library besides torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as pyg
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, SAGEConv, TransformerConv

NODE_TYPES, RELATIONS = 3, 8

LAYERS = {
    "GCNConv": lambda i, o: GCNConv(i, o),
    "SAGEConv": lambda i, o: SAGEConv(i, o),
    "SAGEConv max": lambda i, o: SAGEConv(i, o, aggr="max"),
    "GraphConv": lambda i, o: GraphConv(i, o),
    "GINConv": lambda i, o: GINConv(torch.nn.Linear(i, o)),
    "GATConv": lambda i, o: GATConv(i, o),
    "GATConv 4 heads": lambda i, o: GATConv(i, o // 4, heads=4),
    "GATv2Conv": lambda i, o: GATv2Conv(i, o),
    "TransformerConv": lambda i, o: TransformerConv(i, o),
}


def _uniform(rows: int, width: int, same: torch.Generator) -> Tensor:
    return torch.rand(rows, width, device=same.device, generator=same)


def _position(rows: int, width: int, same: torch.Generator) -> Tensor:
    return torch.randn(rows, 3, device=same.device, generator=same)


def _type_of(types: int) -> Callable[[int, int, torch.Generator], Tensor]:
    return lambda rows, width, same: torch.randint(types, (rows,), device=same.device, generator=same)


# What layers take besides features and edges, by name: what makes a row for each node, or for each edge.
OF_NODES = {"pos": _position, "normal": _position, "node_type": _type_of(NODE_TYPES)}
OF_EDGES = {"edge_attr": _uniform, "edge_type": _type_of(RELATIONS)}


class Given(nn.Module):
    """A layer that takes more than ``x`` and ``edge_index``, made once: ``names`` says what, in order. Of features it takes the
    first ``columns``; edges have ``width``."""

    def __init__(self, conv: nn.Module, names: str, width: int = 0, columns: int | None = None) -> None:
        super().__init__()
        self.conv, self.names, self.width, self.columns = conv, names.split(), width, columns
        self.made: dict[str, Tensor] = {}

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x[:, : self.columns]
        given = {"x": x, "edge_index": edge_index, "layers": x.unsqueeze(1)}
        return self.conv(*(given[name] if name in given else self.argument(name, x, edge_index) for name in self.names))

    def argument(self, name: str, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = x.shape[0] if name in OF_NODES else edge_index.shape[1]
        if name not in self.made or self.made[name].shape[0] < rows:
            same = torch.Generator(x.device).manual_seed(0)  # for each side
            self.made[name] = (OF_NODES | OF_EDGES)[name](rows, self.width, same)
        found = self.made[name]
        return found if found.shape[0] == rows else found[:rows]  # the same one in each call


class OfTypes(nn.Module):
    """A layer of graphs with types of nodes and edges, with one of each."""

    METADATA = (["node"], [("node", "to", "node")])

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv({"node": x}, {self.METADATA[1][0]: edge_index})["node"]


def _mlp(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))


EDGES = "x edge_index edge_attr"
TYPED = "x edge_index edge_type"
PLACED = "x pos edge_index"
DEGREES = torch.bincount(torch.arange(1, 100) // 3)
ALL = LAYERS | {
    "SGConv": lambda i, o: pyg.SGConv(i, o, K=2),
    "TAGConv": lambda i, o: pyg.TAGConv(i, o),
    "APPNP": lambda i, o: pyg.APPNP(3, 0.1),
    "ChebConv": lambda i, o: pyg.ChebConv(i, o, 3),
    "ARMAConv": lambda i, o: pyg.ARMAConv(i, o),
    "GatedGraphConv": lambda i, o: pyg.GatedGraphConv(o, 2),
    "GCN2Conv": lambda i, o: Given(pyg.GCN2Conv(i, 0.1), "x x edge_index"),
    "ClusterGCNConv": lambda i, o: pyg.ClusterGCNConv(i, o),
    "LEConv": lambda i, o: pyg.LEConv(i, o),
    "GINEConv": lambda i, o: Given(pyg.GINEConv(_mlp(i, o)), EDGES, i),
    "GENConv": lambda i, o: pyg.GENConv(i, o),
    "EdgeConv": lambda i, o: pyg.EdgeConv(nn.Linear(2 * i, o)),
    "PNAConv": lambda i, o: pyg.PNAConv(i, o, ["mean", "min", "max", "std"], ["identity", "amplification"], DEGREES),
    "ResGatedGraphConv": lambda i, o: pyg.ResGatedGraphConv(i, o),
    "FiLMConv": lambda i, o: pyg.FiLMConv(i, o),
    "CGConv": lambda i, o: pyg.CGConv(i),
    "GATConv edge features": lambda i, o: Given(GATConv(i, o // 4, heads=4, edge_dim=16), EDGES, 16),
    "GATv2Conv edge features": lambda i, o: Given(GATv2Conv(i, o // 4, heads=4, edge_dim=16), EDGES, 16),
    "TransformerConv edge features": lambda i, o: Given(TransformerConv(i, o // 4, heads=4, edge_dim=16), EDGES, 16),
    "GMMConv": lambda i, o: Given(pyg.GMMConv(i, o, 3, 2), EDGES, 3),
    "FeaStConv": lambda i, o: pyg.FeaStConv(i, o),
    "AGNNConv": lambda i, o: pyg.AGNNConv(),
    "FAConv": lambda i, o: Given(pyg.FAConv(i), "x x edge_index"),
    # Of the pairs without an edge that training needs few: PyG draws them on the host, for 1.2 million edges in two seconds.
    "SuperGATConv": lambda i, o: pyg.SuperGATConv(i, o, edge_sample_ratio=0.01),
    "AntiSymmetricConv": lambda i, o: pyg.AntiSymmetricConv(i),
    "DirGNNConv": lambda i, o: pyg.DirGNNConv(SAGEConv(i, o)),
    "GPSConv": lambda i, o: pyg.GPSConv(i, GCNConv(i, i), heads=4, attn_type="performer"),
    "DNAConv": lambda i, o: Given(pyg.DNAConv(i, 4), "layers edge_index"),
    "EGConv": lambda i, o: pyg.EGConv(i, o),
    "GeneralConv": lambda i, o: pyg.GeneralConv(i, o),
    "GeneralConv attention": lambda i, o: pyg.GeneralConv(i, o, heads=4, attention=True),
    "HANConv": lambda i, o: OfTypes(pyg.HANConv(i, o, OfTypes.METADATA, heads=4)),
    "HGTConv": lambda i, o: OfTypes(pyg.HGTConv(i, o, OfTypes.METADATA, heads=4)),
    "HEATConv": lambda i, o: Given(
        pyg.HEATConv(i, o // 4, NODE_TYPES, RELATIONS, 8, 16, 8, heads=4), "x edge_index node_type edge_type edge_attr", 16
    ),
    "HypergraphConv": lambda i, o: pyg.HypergraphConv(i, o),
    "LGConv": lambda i, o: pyg.LGConv(),
    "MFConv": lambda i, o: pyg.MFConv(i, o),
    "MixHopConv": lambda i, o: pyg.MixHopConv(i, o // 4, [0, 1, 2, 3]),
    "NNConv": lambda i, o: Given(pyg.NNConv(16, 16, nn.Linear(4, 256)), EDGES, 4, columns=16),  # a matrix for each edge
    "PDNConv": lambda i, o: Given(pyg.PDNConv(i, o, 16, 16), EDGES, 16),
    "PNAConv edge features": lambda i, o: Given(
        pyg.PNAConv(i, o, ["mean", "min", "max", "std"], ["identity", "amplification"], DEGREES, edge_dim=16), EDGES, 16
    ),
    "PointNetConv": lambda i, o: Given(pyg.PointNetConv(_mlp(i + 3, o)), PLACED),
    "PointGNNConv": lambda i, o: Given(pyg.PointGNNConv(_mlp(i, 3), _mlp(i + 3, i), _mlp(i, i)), PLACED),
    "PointTransformerConv": lambda i, o: Given(pyg.PointTransformerConv(i, o), PLACED),
    "PPFConv": lambda i, o: Given(pyg.PPFConv(_mlp(i + 4, o)), "x pos normal edge_index"),
    "RGATConv": lambda i, o: Given(pyg.RGATConv(16, 4, RELATIONS, heads=4), TYPED, columns=16),
    "RGCNConv": lambda i, o: Given(pyg.RGCNConv(i, o, RELATIONS), TYPED),
    "RGCNConv blocks": lambda i, o: Given(pyg.RGCNConv(i, o, RELATIONS, num_blocks=4), TYPED),
    "FastRGCNConv": lambda i, o: Given(pyg.FastRGCNConv(16, 16, RELATIONS), TYPED, columns=16),
    "SignedConv": lambda i, o: Given(pyg.SignedConv(i, o // 2, True), "x edge_index edge_index"),
    "SimpleConv": lambda i, o: pyg.SimpleConv(),
    "SSGConv": lambda i, o: pyg.SSGConv(i, o, 0.1, 2),
    "WLConvContinuous": lambda i, o: pyg.WLConvContinuous(),
}


class Own(pyg.MessagePassing):
    """A layer as users write them: sums what ``function`` makes of rows at both ends of edges and of a number for each edge."""

    def __init__(self, function: Callable[..., Tensor], i: int, o: int) -> None:
        super().__init__()
        self.function, self.lin, self.norm = function, nn.Linear(i, o), nn.LayerNorm(o)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), weight=weight)

    def message(self, x_i: Tensor, x_j: Tensor, weight: Tensor) -> Tensor:
        return self.function(self, x_i, x_j, weight)


def _glu(m: Own, i: Tensor, j: Tensor, w: Tensor) -> Tensor:
    values, gate = j.chunk(2, dim=-1)
    return values * gate.sigmoid()


def _keys_and_values(m: Own, i: Tensor, j: Tensor, w: Tensor) -> Tensor:
    half = j.shape[1] // 2
    return j[:, half:] * (i[:, :half] * j[:, :half]).sum(-1, keepdim=True).sigmoid()


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "weight * x_j": lambda m, i, j, w: w * j,
    "weight * x_j[:, :half]": lambda m, i, j, w: w * j[:, : j.shape[1] // 2],
    "gated linear unit": _glu,
    "keys and values": _keys_and_values,
    "x_j.sin()": lambda m, i, j, w: w * j.sin(),
    "layer norm": lambda m, i, j, w: w * m.norm(j),
    "linear, mish": lambda m, i, j, w: w * functional.mish(m.lin(j)),
    "softmax of a row": lambda m, i, j, w: j.softmax(-1),
    "normalised": lambda m, i, j, w: w * functional.normalize(j, dim=-1),
    "one minus a gate": lambda m, i, j, w: w * (1 - j.sigmoid()),
    "(x_i - x_j) ** 2": lambda m, i, j, w: (i - j) ** 2,
    "weight * x_j + x_i": lambda m, i, j, w: w * j + i,
    "x_j and weight, side by side": lambda m, i, j, w: torch.cat([j, w], dim=-1),
}
# Layers of one's own, by what their message() does.
OWN = {f"message: {name}": partial(lambda f, i, o: Given(Own(f, i, o), EDGES, 1), f) for name, f in _FUNCTIONS.items()}
# Those of convolutions that have none here: what they need, or why there is nothing to time.
WITHOUT = {
    "CuGraphGATConv": "pylibcugraphops",
    "CuGraphRGCNConv": "pylibcugraphops",
    "CuGraphSAGEConv": "pylibcugraphops",
    "DynamicEdgeConv": "torch-cluster or pyg-lib, for the nearest neighbours of each call",
    "FusedGATConv": "dgNN",
    "GravNetConv": "torch-cluster or pyg-lib, for the nearest neighbours of each call",
    "HeteroConv": "calls other layers",
    "MeshCNNConv": "nodes of a mesh, with four edges each",
    "MessagePassing": "the base of all",
    "PANConv": "torch-sparse",
    "SplineConv": "torch-spline-conv or pyg-lib",
    "WLConv": "hashes colours, without features or gradients",
    "XConv": "torch-cluster or pyg-lib, for the nearest neighbours of each call",
}


def served(name: str) -> str:
    """As the coverage table says of the class: ``"as a whole"``, ``"fused"`` or ``"in part"``; empty if it calls other layers, or
    is a user's."""
    from gnnfast.pyg import coverage

    return next((row.served for row in coverage.rows() if row.name == name.split()[0]), "")


# What does not take an adjacency matrix of torch's: it needs the list, what edges have, or a dictionary of lists.
NO_MATRIX = {
    "ARMAConv",
    "ChebConv",
    "DirGNNConv",
    "FastRGCNConv",
    "GATConv edge features",
    "GATv2Conv edge features",
    "GINEConv",
    "GMMConv",
    "HEATConv",
    "HypergraphConv",
    "MFConv",
    "NNConv",
    "PNAConv edge features",
    "RGATConv",
    "RGCNConv",
    "RGCNConv blocks",
    "SuperGATConv",
    "TransformerConv edge features",
    "WLConvContinuous",
}
NO_MATRIX_ON_CUDA = {"SAGEConv max"}  # torch's product sums
