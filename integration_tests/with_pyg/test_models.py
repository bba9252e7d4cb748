"""Whole models: deep ones, reversible ones, transformers, and forces of molecules, with gnnfast and without."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from comparison import compare, same
from torch.nn import Linear, ReLU, Sequential

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from torch_geometric.nn.models import dimenet
from workflows import CLASSES, MODELS, F, N, gradients, graph


@pytest.mark.parametrize(
    "given", [{"jk": "cat", "norm": "layer_norm"}, {"jk": "max", "norm": "graph_norm"}, {"jk": "lstm"}], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_jumping_knowledge(name, given, device):
    data = graph(device)
    compare(MODELS[name](**given).double(), data.x, data.edge_index, tolerance=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_draws_the_same(name, device):
    data, given = graph(device), {"dropout": 0.4} | ({"act": "elu"} if "GAT" in name else {})
    with gnnfast.override(dropout="framework"):
        compare(MODELS[name](**given).double(), data.x, data.edge_index, tolerance=1e-9)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("block", ["res+", "res", "dense", "plain"])
def test_deep_layers(block, checkpointed, device):
    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            width = 2 * F if block == "dense" else F
            self.layers = torch.nn.ModuleList(
                nn.DeepGCNLayer(conv, nn.LayerNorm(F), ReLU(), block, ckpt_grad=checkpointed)
                for conv in (nn.GENConv(F, F, learn_t=True), nn.GraphConv(F, F))
            )
            self.last = nn.SAGEConv(width, CLASSES)

        def forward(self, x, edge_index):
            if block == "dense":
                return self.last(self.layers[0](x, edge_index), edge_index)
            for layer in self.layers:
                x = layer(x, edge_index)
            return self.last(x, edge_index)

    data = graph(device)
    compare(Deep().double(), data.x, data.edge_index, tolerance=1e-9)


def test_reversible_layers(device):
    """What comes in is emptied, and computed again in the backward pass, which empties what came out."""
    data = graph(device)
    model = Sequential(*(nn.GroupAddRev(nn.SAGEConv(F // 2, F // 2), num_groups=2) for _ in range(2))).double()

    def run():
        x = data.x.clone().requires_grad_()
        h = x * 1
        for layer in copy.deepcopy(model).to(device):
            h = layer(h, data.edge_index)
        kept = h.detach().clone()
        return [kept, *torch.autograd.grad(h.square().sum(), x)]

    same(run)


def test_sequential_with_transformers(device):
    data = graph(device)
    layer = functools.partial(nn.GPSConv, F, heads=2)
    model = nn.Sequential(
        "x, edge_index, batch",
        [
            (layer(nn.GINConv(Linear(F, F))), "x, edge_index, batch -> x"),
            (layer(nn.GATConv(F, F), norm="layer_norm"), "x, edge_index, batch -> x"),
            (nn.DirGNNConv(nn.GCNConv(F, CLASSES)), "x, edge_index -> x"),
        ],
    )
    compare(model.double(), data.x, data.edge_index, torch.arange(N, device=device) // 30, tolerance=1e-9)


class Vectors(nn.MessagePassing):
    """As in PaiNN: scalars and vectors of atoms, of which messages are made with distances and directions."""

    def __init__(self, width):
        super().__init__(aggr="sum", node_dim=0)
        self.of_atoms = Sequential(Linear(width, width), torch.nn.SiLU(), Linear(width, 3 * width))
        self.of_distances = Linear(5, 3 * width)
        self.mix = Linear(width, 2 * width, bias=False)

    def forward(self, s, v, edge_index, distance, direction):
        basis = torch.exp(-((distance.view(-1, 1) - torch.linspace(0, 3, 5, device=s.device, dtype=s.dtype)) ** 2))
        ds, dv = self.propagate(edge_index, s=self.of_atoms(s), v=v, filters=self.of_distances(basis), direction=direction)
        s, v = s + ds, v + dv
        first, second = self.mix(v).chunk(2, -1)
        return s + (first * second).sum(1), v

    def message(self, s_j, v_j, filters, direction):
        scalars, gates, further = (s_j * filters).chunk(3, -1)
        vectors = v_j * gates.unsqueeze(1) + further.unsqueeze(1) * direction.unsqueeze(-1)
        return torch.cat([scalars.unsqueeze(1), vectors], 1)

    def update(self, aggregated):
        return aggregated[:, 0], aggregated[:, 1:]


class OfVectors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.last = torch.nn.Embedding(9, F), Linear(F, 1)
        self.layers = torch.nn.ModuleList([Vectors(F), Vectors(F)])

    def forward(self, z, pos, batch):
        edge_index, distance = near(pos, batch)
        direction = (pos[edge_index[0]] - pos[edge_index[1]]) / distance.view(-1, 1)
        s = self.embedding(z)
        v = s.new_zeros(len(z), 3, F)
        for layer in self.layers:
            s, v = layer(s, v, edge_index, distance, direction)
        return nn.global_add_pool(self.last(s), batch)


def near(pos, batch):
    """Pairs of atoms of a molecule that are near each other, for which PyG asks pyg-lib."""
    with torch.no_grad():
        apart = torch.cdist(pos, pos) + 10 * (batch.view(-1, 1) != batch) + 10 * torch.eye(len(pos), device=pos.device)
        edge_index = (apart < 2.0).nonzero().t().contiguous()
    return edge_index, (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)


def triplets(edge_index, num_nodes):
    """Of edges from k to j and from j to i, as DimeNet has them of torch-sparse."""
    src, dst = edge_index
    first, second = (dst.view(-1, 1) == src).nonzero().t()
    kept = src[first] != dst[second]
    first, second = first[kept], second[kept]
    return dst, src, dst[second], src[second], src[first], first, second


FORCES = {
    "SchNet": lambda: nn.SchNet(F, F, 2, 5, 2.0, near),
    "DimeNet++": lambda: nn.DimeNetPlusPlus(F, 1, 2, 4, 4, 4, 3, 4, cutoff=2.0),
    "vectors": OfVectors,
}


@pytest.mark.parametrize("name", FORCES)
def test_forces(name, device, monkeypatch):
    """A loss of forces, which are gradients, has second derivatives."""
    monkeypatch.setattr(dimenet, "radius_graph", lambda pos, r, batch, max_num_neighbors: near(pos, batch)[0])
    monkeypatch.setattr(dimenet, "triplets", triplets)
    g = torch.Generator().manual_seed(1)
    z, pos = torch.randint(1, 9, (36,), generator=g).to(device), torch.randn(36, 3, generator=g, dtype=torch.float64).to(device)
    batch = torch.arange(36, device=device) // 12

    def run():
        torch.manual_seed(0)
        model, places = FORCES[name]().to(device, torch.float64), pos.clone().requires_grad_()
        energy = model(z, places, batch)
        (forces,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return [energy.detach(), *gradients(forces, model, places)]

    assert same(run).kernels or name == "DimeNet++"  # which scatters, and passes no messages
