"""Batches of PyG's loaders, trained on with gnnfast and without."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from comparison import same
from torch.nn import Linear
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from torch_geometric.data import Data, TemporalData
from torch_geometric.loader import DataLoader, LinkNeighborLoader, NeighborLoader, NodeLoader, TemporalDataLoader
from torch_geometric.loader.link_loader import LinkLoader
from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator, LastNeighborLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput
from torch_geometric.utils import negative_sampling
from workflows import CLASSES, MODELS, F, N, fit, graph


class Neighbours(BaseSampler):
    """Draws what NeighborLoader draws, which needs pyg-lib or torch-sparse, in torch alone."""

    def __init__(self, data, most):
        self.src, self.dst = data.edge_index
        self.most = most

    def draw(self, seeds):
        node, frontier, edges, counts = seeds, seeds, [], [len(seeds)]
        for most in self.most:
            edge = torch.isin(self.dst, frontier).nonzero().view(-1)
            edge = edge[torch.randperm(len(edge))]
            dst, order = self.dst[edge].sort(stable=True)
            edge = edge[order][torch.arange(len(edge)) - torch.searchsorted(dst, dst) < most]
            frontier = self.src[edge].unique()
            frontier = frontier[~torch.isin(frontier, node)]
            node = torch.cat([node, frontier])
            edges.append(edge)
            counts.append(len(frontier))
        edge, place = torch.cat(edges), torch.full((N,), -1)
        place[node] = torch.arange(len(node))
        sizes = [len(e) for e in edges]
        rows, columns = place[self.src[edge]], place[self.dst[edge]]
        return SamplerOutput(node, rows, columns, edge, num_sampled_nodes=counts, num_sampled_edges=sizes)

    def sample_from_nodes(self, index, **kwargs):
        out = self.draw(index.node)
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(self, index, neg_sampling=None):
        seeds, places = torch.cat([index.row, index.col]).unique(return_inverse=True)
        out = self.draw(seeds)
        out.metadata = (index.input_id, places.view(2, -1), index.label, index.time)
        return out


def drawn(loader, device):
    """The batches of a loader: the same ones for both sides."""
    batches = [batch.to(device) for batch in loader]
    assert len(batches) > 3
    return batches


def classifies(model, batch, trimmed=True):
    hops = (batch.num_sampled_nodes, batch.num_sampled_edges) if trimmed else (None, None)
    out = model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=hops[0], num_sampled_edges_per_hop=hops[1])
    return cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])


def predicts_links(model, batch):
    ends = model(batch.x, batch.edge_index)[batch.edge_label_index]
    return binary_cross_entropy_with_logits(ends.prod(0).sum(-1), batch.edge_label)


def trains(make, batches, loss_of, device):
    def run():
        torch.manual_seed(0)
        return fit(make().to(device, torch.float64), batches, loss_of)

    assert same(run).kernels


def links(data):
    pairs = torch.cat([data.edge_index[:, ::20], negative_sampling(data.edge_index, N, 45)], 1)
    return {"edge_label_index": pairs, "edge_label": (torch.arange(90) < 45).double(), "batch_size": 20, "shuffle": True}


SEEDS = {"input_nodes": torch.arange(0, N, 2), "batch_size": 13, "shuffle": True}


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_batches_around_nodes(name, trimmed, device):
    data = graph()
    batches = drawn(NodeLoader(data, Neighbours(data, [5, 3]), **SEEDS), device)
    trains(MODELS[name], batches, functools.partial(classifies, trimmed=trimmed), device)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_batches_around_links(name, device):
    data = graph()
    trains(MODELS[name], drawn(LinkLoader(data, Neighbours(data, [5, 3]), **links(data)), device), predicts_links, device)


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
@pytest.mark.parametrize("loader", [NeighborLoader, LinkNeighborLoader], ids=lambda loader: loader.__name__)
def test_batches_of_pygs_own_sampler(loader, device):
    data = graph()
    try:
        batches = drawn(loader(data, [5, 3], **(SEEDS if loader is NeighborLoader else links(data))), device)
    except ImportError as error:
        pytest.skip(str(error))
    trains(MODELS["GraphSAGE"], batches, classifies if loader is NeighborLoader else predicts_links, device)


def molecules():
    g = torch.Generator().manual_seed(9)

    def molecule(n):
        x, edges = torch.randn(n, F, generator=g, dtype=torch.float64), torch.randint(n, (2, 3 * (n - 1)), generator=g)
        return Data(x=x, edge_index=edges, y=torch.randint(CLASSES, (1,), generator=g))

    return [molecule(1 + k % 12) for k in range(40)]  # some are one node, without edges


class Pooled(torch.nn.Module):
    def __init__(self, conv, pool, width):
        super().__init__()
        self.conv, self.pool, self.linear = conv, pool, Linear(width, CLASSES)

    def forward(self, batch):
        return self.linear(self.pool(self.conv(batch.x, batch.edge_index).relu(), batch.edge_index, batch.batch))

    @staticmethod
    def loss(model, batch):
        return cross_entropy(model(batch), batch.y)


class Coarser(torch.nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool, self.conv = pool, nn.GraphConv(16, 16)

    def forward(self, x, edge_index, batch):
        x, edge_index, _, batch, *_ = self.pool(x, edge_index, batch=batch)
        return nn.global_mean_pool(self.conv(x, edge_index), batch)


class Whole(torch.nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, x, edge_index, batch):
        return self.pool(x, batch)


POOLS = {
    "add": lambda: Whole(nn.global_add_pool),
    "mean": lambda: Whole(nn.global_mean_pool),
    "max": lambda: Whole(nn.global_max_pool),
    "softmax": lambda: Whole(nn.SoftmaxAggregation(learn=True)),
    "attention": lambda: Whole(nn.AttentionalAggregation(Linear(16, 1))),
    "set2set": lambda: Whole(nn.Set2Set(16, 2)),
    "sort": lambda: Whole(nn.SortAggregation(2)),
    "top": lambda: Coarser(nn.TopKPooling(16, 0.6)),
    "attention of a graph": lambda: Coarser(nn.SAGPooling(16, 0.6, GNN=nn.GATConv)),
}


@pytest.mark.parametrize("pool", POOLS)
def test_batches_of_small_graphs(pool, device):
    batches = drawn(DataLoader(molecules(), batch_size=7, shuffle=True), device)
    model = Pooled(nn.GINConv(Linear(F, 16)), POOLS[pool](), 32 if pool in ("set2set", "sort") else 16)
    trains(lambda: copy.deepcopy(model), batches, Pooled.loss, device)


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_batches_of_workers(way, device):
    """They are in memory that processes share, and a kernel has run before the processes start."""
    data, model = graph(device), Pooled(nn.GCNConv(F, 16), Whole(nn.global_mean_pool), 16).to(device, torch.float64)
    model.conv(data.x, data.edge_index)
    loader = DataLoader(molecules(), batch_size=10, shuffle=True, num_workers=1, multiprocessing_context=way)
    trains(lambda: copy.deepcopy(model), drawn(loader, device), Pooled.loss, device)


class OfEvents(torch.nn.Module):
    """As in PyG's example of TGN: a memory of events, attention over the last ones, and whether a pair is next."""

    def __init__(self):
        super().__init__()
        message = IdentityMessage(4, F, 5)
        self.memory = nn.TGNMemory(N, 4, F, 5, message, aggregator_module=LastAggregator())
        self.attention, self.linear = nn.TransformerConv(F, 4, heads=2, edge_dim=9), Linear(2 * F, 1)

    def forward(self, ends, nodes, edge_index, t, msg):
        x, updated = self.memory(nodes)
        passed = self.memory.time_enc((updated[edge_index[0]] - t).to(x.dtype))
        x = self.attention(x, edge_index, torch.cat([passed, msg], -1))
        at = torch.searchsorted(nodes, ends)
        return self.linear(x[at].flatten(1)).view(-1)


def test_batches_of_events(device):
    """The graph grows with each batch, and the memory with it."""
    g, count = torch.Generator().manual_seed(6), 160
    events = TemporalData(
        src=torch.randint(40, (count,), generator=g),
        dst=torch.randint(40, N, (count,), generator=g),
        t=torch.arange(count),
        msg=torch.randn(count, 4, generator=g, dtype=torch.float64),
    ).to(device)

    def run():
        torch.manual_seed(0)
        model, last = OfEvents().to(device, torch.float64), LastNeighborLoader(N, 5, device)
        model.memory.reset_state()  # in float64, too

        def predicts(model, batch):
            ends = torch.stack([torch.cat([batch.src, batch.src]), torch.cat([batch.dst, batch.dst.flip(0)])], 1)
            nodes, edge_index, at = last(ends.unique())
            out = model(ends, nodes, edge_index, events.t[at], events.msg[at])
            model.memory.update_state(batch.src, batch.dst, batch.t, batch.msg)
            last.insert(batch.src, batch.dst)
            return binary_cross_entropy_with_logits(out, (torch.arange(len(out), device=device) < len(batch.src)).double())

        return fit(model, TemporalDataLoader(events, batch_size=25), predicts, epochs=1, after=model.memory.detach)

    assert same(run).kernels
