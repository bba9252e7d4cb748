"""Graphs of several types of nodes and edges, in each of the ways that PyG has for them, with gnnfast and without."""

from __future__ import annotations

import pytest
import torch
from comparison import compare, same

import gnnfast
from gnnfast.cache import cache

pyg = pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn  # noqa: E402
from torch_geometric.data import HeteroData  # noqa: E402
from torch_geometric.loader import RandomNodeLoader  # noqa: E402
from torch_geometric.transforms import ToSparseTensor  # noqa: E402

pytestmark = pytest.mark.usefixtures("converts_at_once")

nn.SAGEConv(1, 1)  # PyG writes a class's code for its first layer: after one of an LSTM none would take a sparse adjacency

NODES = {"paper": 40, "author": 25, "field": 12}
WIDTHS = {"paper": 8, "author": 6, "field": 4}
WRITES, CITES, HAS = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "has", "field")
WRITTEN, OF, KNOWS = ("paper", "written", "author"), ("field", "of", "paper"), ("author", "knows", "author")
EDGES = {WRITES: 150, CITES: 200, HAS: 60, WRITTEN: 150, OF: 60, KNOWS: 0}
SUPPORTED = ["sum", "mean", "min", "max"]


def graph(widths=WIDTHS, dtype=torch.float64, edges=EDGES):
    data, g = HeteroData(), torch.Generator().manual_seed(7)
    for name, n in NODES.items():
        data[name].x = torch.randn(n, widths[name], generator=g, dtype=dtype)
        data[name].y = torch.randint(3, (n,), generator=g)
    for edge, count in edges.items():
        pairs = [torch.randint(NODES[edge[end]], (count,), generator=g) for end in (0, 2)]
        data[edge].edge_index = torch.stack(pairs)
        data[edge].edge_attr = torch.randn(count, 3, generator=g, dtype=dtype)
    return data


class Steps(torch.nn.Module):
    """A model of dictionaries as a module of the features of each type of nodes."""

    def __init__(self, model, edge_index_dict, **given):
        super().__init__()
        self.model, self.edges, self.given = model, lambda: edge_index_dict, given  # torch copies no sparse matrices

    def forward(self, *x):
        out = self.model(dict(zip(NODES, x)), self.edges(), **self.given)
        return torch.cat([t.flatten() for t in out.values() if t is not None])


class Stack(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, edge_index, **given):
        for layer in self.layers:
            x = {name: t.relu() for name, t in layer(x, edge_index, **given).items() if t is not None}
        return x


def check(model, device, data=None, **given):
    data = (graph() if data is None else data).to(device)
    steps = Steps(model.double(), data.edge_index_dict, **given)
    return compare(steps, *(data[name].x for name in NODES), tolerance=1e-9)


def lazily(aggr, width=5):
    """The widths of what comes in are found in the first call."""
    return nn.HeteroConv(
        {
            WRITES: nn.SAGEConv((-1, -1), width),
            CITES: nn.GCNConv(-1, width),
            HAS: nn.GraphConv((-1, -1), width, aggr="max"),
            WRITTEN: nn.GATConv((-1, -1), width, heads=2, concat=False, add_self_loops=False),
            OF: nn.GATv2Conv((-1, -1), width, add_self_loops=False),
            KNOWS: nn.SAGEConv((-1, -1), width, aggr="max"),
        },
        aggr,
    )


@pytest.mark.parametrize("aggr", [*SUPPORTED, "cat", None])
def test_hetero_conv(aggr, device):
    report = check(lazily(aggr), device)
    assert {place.split()[1] for place, *_ in report.kernels} >= {"SAGEConv", "GCNConv", "GraphConv", "GATConv", "GATv2Conv"}


@pytest.mark.parametrize("aggr", ["sum", "cat"])
def test_layers_of_hetero_conv(aggr, device):
    check(Stack(lazily(aggr), lazily(aggr, 3)), device)


def test_hetero_conv_with_edge_features(device):
    def layer(edge):
        return {
            CITES: lambda: nn.GATConv(-1, 5, edge_dim=3),
            WRITES: lambda: nn.TransformerConv((-1, -1), 5, edge_dim=3),
            OF: lambda: nn.NNConv((WIDTHS["field"], WIDTHS["paper"]), 5, torch.nn.Linear(3, 20)),
        }.get(edge, lambda: nn.GeneralConv((-1, -1), 5, 3))()

    data = graph()
    check(nn.HeteroConv({edge: layer(edge) for edge in EDGES}), device, data, edge_attr_dict=data.to(device).edge_attr_dict)


def test_the_same_layer_for_several_types_of_edges(device):
    shared = nn.SAGEConv(8, 8)
    data = graph(dict.fromkeys(NODES, 8))
    check(Stack(*(nn.HeteroConv(dict.fromkeys(EDGES, shared), "mean") for _ in range(2))), device, data)


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_sparse_adjacencies(aggr, device):
    data = graph(dict.fromkeys(NODES, 8), torch.float32, {edge: count for edge, count in EDGES.items() if count})
    for edge in data.edge_types:
        del data[edge].edge_attr
    data = ToSparseTensor(layout=torch.sparse_csr)(data).to(device)
    steps = Steps(nn.HeteroConv({edge: nn.SAGEConv(8, 5, aggr=aggr) for edge in data.edge_types}), data.adj_t_dict)
    assert compare(steps, *(data[name].x for name in NODES)).kernels


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.SAGEConv((-1, -1), 8), nn.GATConv((-1, -1), 4, heads=2, add_self_loops=False)
        self.third, self.linear = nn.GraphConv((-1, -1), 6), nn.Linear(-1, 6)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index).relu()
        return self.third(x, edge_index) + self.linear(x)


class OneWidth(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.SAGEConv((8, 8), 8), nn.GraphConv((8, 8), 6)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("aggr", SUPPORTED)
def test_to_hetero(aggr, device):
    data = graph()
    assert check(nn.to_hetero(Network(), data.metadata(), aggr), device, data).kernels


@pytest.mark.parametrize("make", [nn.GraphSAGE, nn.GAT, nn.EdgeCNN], ids=lambda make: make.__name__)
def test_models_to_hetero(make, device):
    data = graph(dict.fromkeys(NODES, 8))
    given = {"GAT": {"add_self_loops": False, "heads": 2}}.get(make.__name__, {})
    model = make(8 if make is nn.EdgeCNN else (-1, -1), 8, 2, 3, jk="cat", **given)
    check(nn.to_hetero(model, data.metadata()), device, data)


def test_to_hetero_with_bases(device):
    data = graph(dict.fromkeys(NODES, 8))
    check(nn.to_hetero_with_bases(OneWidth(), data.metadata(), num_bases=3, in_channels={"x": 8}), device, data)


@pytest.mark.parametrize("edges", ["all", "some"])
@pytest.mark.parametrize("make", [nn.HGTConv, nn.HANConv], ids=lambda make: make.__name__)
@pytest.mark.parametrize("lazy", [False, True])
def test_attention_over_all_types(make, lazy, edges, device):
    """A type that no edges lead to has no output, and the model has types of edges that the graph has not."""
    data = graph()
    model = Stack(make(-1 if lazy else WIDTHS, 8, data.metadata(), heads=2), make(8, 4, data.metadata(), heads=2))
    if edges == "some":
        model = make(-1 if lazy else WIDTHS, 8, data.metadata(), heads=2)
        data = graph(edges={edge: count for edge, count in EDGES.items() if edge not in (HAS, OF, KNOWS)})
    check(model, device, data)


def test_edges_side_by_side_are_found_again(device):
    """HGTConv makes one graph of all types in each call."""
    data = graph().to(device)
    layer, first = (nn.HGTConv(WIDTHS, 8, data.metadata(), heads=2).double().to(device) for _ in range(2))
    features = [data[name].x for name in NODES]
    for model in (first, layer):
        steps = Steps(model, data.edge_index_dict).to(device)
        compare(steps, *features, repeats=3, tolerance=1e-9)
    made = len(cache), cache.misses
    for _ in range(3):
        steps(*features)
    assert len(cache) == made[0] and cache.misses <= made[1] + 2 * 3  # a copy, and its graph, which is the one that there was
    data[CITES].edge_index[0, 5:90] = 3
    compare(steps, *features, repeats=3, tolerance=1e-9)


def test_edges_side_by_side_are_the_users_own(device):
    from torch_geometric.utils.hetero import construct_bipartite_edge_index as side_by_side

    data = graph().to(device)
    edges, weights = data.edge_index_dict, {edge: torch.randn(1, 2, device=device, requires_grad=True) for edge in EDGES}
    weights[HAS] = torch.randn(EDGES[HAS], 2, device=device)
    sources, targets = dict(zip(EDGES, range(0, 600, 100))), dict(zip(NODES, range(0, 300, 100)))

    def expected(*arguments):
        gnnfast.disable()
        found = side_by_side(*arguments)
        gnnfast.enable()
        return found

    for change in range(8):
        of_edges = None if change == 5 else weights
        sources[WRITES] = 7 * (change // 3)
        found, right = (call(edges, sources, targets, of_edges, 900) for call in (side_by_side, expected))
        assert torch.equal(found[0], right[0]) and found[0].dtype is right[0].dtype
        found[0].zero_()
        if of_edges is None:
            assert found[1] is None
            continue
        assert torch.equal(found[1], right[1])
        grads = [torch.autograd.grad(t.square().sum(), weights[CITES])[0] for t in (found[1], right[1])]
        torch.testing.assert_close(*grads)
        if change == 6:
            edges[OF][1, :3] = 1
    for wrong in ({**sources, "no such type": 1}, {**sources, WRITES: "1"}):
        with pytest.raises((KeyError, TypeError)):
            side_by_side(edges, wrong, targets)


class Relational(torch.nn.Module):
    def __init__(self, make, relations, **given):
        super().__init__()
        self.first, self.second = make(8, 8, relations, **given), make(8, 4, relations, **given)

    def forward(self, x, edge_index, edge_type):
        return self.second(self.first(x, edge_index, edge_type).relu(), edge_index, edge_type)


@pytest.mark.parametrize("given", [{}, {"num_bases": 2}, {"num_blocks": 2}], ids=str)
@pytest.mark.parametrize("make", [nn.RGCNConv, nn.FastRGCNConv, nn.RGATConv], ids=lambda make: make.__name__)
def test_as_one_graph_with_numbered_types(make, given, device):
    data = graph(dict.fromkeys(NODES, 8)).to_homogeneous().to(device)
    compare(Relational(make, len(EDGES), **given).double(), data.x, data.edge_index, data.edge_type, tolerance=1e-9)


def test_training_on_parts_of_the_graph(device):
    """Each step has new graphs of all types."""
    data = graph()

    def losses():
        torch.manual_seed(2)
        model = Stack(lazily("sum", 8), lazily("sum", 3)).double().to(device)
        loader, found, optimizer = RandomNodeLoader(data, num_parts=4, shuffle=True), [], None
        for _ in range(3):
            for part in loader:
                part = part.to(device)
                out = model(part.x_dict, part.edge_index_dict)
                loss = sum(torch.nn.functional.cross_entropy(out[name], part[name].y) for name in NODES)
                optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)  # lazy parameters have their sizes by now
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
        return [*found, *(p.detach() for p in model.parameters())]

    assert same(losses).kernels
