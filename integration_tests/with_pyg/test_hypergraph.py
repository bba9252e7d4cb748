"""HypergraphConv: as a whole without attention, on a CPU with PyG's bits; in parts with it."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import close, same, without
from graphs import GRAPHS
from torch import nn
from torch_geometric.nn import HypergraphConv
from torch_geometric.nn.conv import hypergraph_conv

WIDE, NARROW = 16, 8


def hypergraph(name, device):
    """Nodes and hyperedges of which one is the member of the other, and weights of hyperedges."""
    edge_index, nodes, hyperedges = GRAPHS[name]()
    weight = torch.rand(hyperedges, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight[::3] = 0  # a node that is in no others gets nothing
    return edge_index.to(device), nodes, hyperedges, weight.to(device)


def results(layer, x, *arguments, repeats=3, **options):
    """Output, first and second derivatives of the last of several calls, and what inference gives."""
    leaves = [t for t in (*layer.parameters(), x, *arguments) if isinstance(t, torch.Tensor) and t.requires_grad]
    for _ in range(repeats):
        out = layer(x, *arguments, **options)
        first = torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    with torch.no_grad():
        return [out, *first, *second, layer(x, *arguments, **options)]


def conv(device, dtype=torch.float64, **options):
    return HypergraphConv(WIDE, NARROW, **options).to(device, dtype)


@pytest.mark.parametrize("weighted", ["no weights", "weights", "weights with a gradient"])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
def test_same(name, sized, weighted, device):
    edge_index, nodes, hyperedges, weight = hypergraph(name, device)
    weight = None if weighted == "no weights" else weight.requires_grad_(weighted.endswith("gradient"))
    if weight is None and sized:
        hyperedges += 2  # empty ones
    x = torch.randn(nodes, WIDE, dtype=torch.float64, device=device, requires_grad=True)
    layer = conv(device, bias=name != "hub")
    report = same(lambda: results(layer, x, edge_index, weight, num_edges=hyperedges if sized else None))
    assert name == "no_edges" or "in parts" not in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("graph", ["the same", "new"])
@pytest.mark.parametrize("edges", [50, 600, 3000, 12000])
def test_bits(edges, graph, weighted, dtype, small):
    """However few edges there are, and whether or not they were met before."""
    edge_index = torch.stack([torch.randint(100, (edges,)), torch.randint(70, (edges,))])
    weight = torch.rand(70, dtype=dtype) if weighted else None
    x, layer = torch.randn(100, WIDE, dtype=dtype, requires_grad=True), conv("cpu", dtype)
    expected = without(lambda: results(layer, x, edge_index, weight, num_edges=70))
    for _ in range(3):
        given = edge_index.clone() if graph == "new" else edge_index
        for found, e in zip(results(layer, x, given, weight, num_edges=70), expected, strict=True):
            assert torch.equal(found, e)


@pytest.mark.parametrize("mode", ["node", "edge"])
def test_attention(mode, device):
    edge_index, nodes, hyperedges, weight = hypergraph("bipartite", device)
    x, attr = (torch.randn(n, WIDE, dtype=torch.float64, device=device, requires_grad=True) for n in (nodes, hyperedges))
    layer = conv(device, use_attention=True, attention_mode=mode, heads=2)
    same(lambda: results(layer, x, edge_index, weight, attr))


def test_few_digits(device):
    edge_index, nodes, hyperedges, weight = hypergraph("random", device)
    for dtype in (torch.float16, torch.bfloat16):
        x, layer = torch.randn(nodes, WIDE, dtype=dtype, device=device, requires_grad=True), conv(device, dtype)
        same(lambda: results(layer, x, edge_index, weight.to(dtype), num_edges=hyperedges), 0.05)  # noqa: B023


def test_autocast(device):
    edge_index, nodes, *_ = hypergraph("random", device)
    x, layer = torch.randn(nodes, WIDE, device=device, requires_grad=True), conv(device, torch.float32)

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            return results(layer, x, edge_index)

    same(step, 0.02)


def test_what_changes_is_seen(device):
    edge_index, nodes, hyperedges, weight = hypergraph("random", device)
    x, layer = torch.randn(nodes, WIDE, dtype=torch.float64, device=device), conv(device)

    def step():
        return [layer(x, edge_index, weight, num_edges=hyperedges).detach()]

    def change_edges():
        edge_index[1].copy_(edge_index[1].flip(0))

    for change in (lambda: None, change_edges, lambda: weight.mul_(2).add_(1), lambda: layer.lin.weight.data.mul_(2)):
        change()
        for _ in range(3):
            same(step)


def test_what_layers_share():
    """Over one edge_index, with other weights, sizes and dtypes."""
    edge_index, nodes, hyperedges, weight = hypergraph("random", "cpu")
    for dtype in (torch.float32, torch.float64):
        layer, x = conv("cpu", dtype), torch.randn(nodes + 3, WIDE, dtype=dtype)
        for rows in (nodes, nodes + 3):
            for count in (hyperedges, hyperedges + 1):
                for of_edges in (None, weight.to(dtype), torch.cat([weight, weight]).to(dtype)[: count + 5]):
                    same(lambda: [layer(x[:rows], edge_index, of_edges, num_edges=count).detach()], 1e-5)  # noqa: B023


@pytest.mark.parametrize(
    "wrong",
    [
        lambda i, w: (i, w[:3], None),
        lambda i, w: (i, w, 3),
        lambda i, w: (i - 1, w, None),
        lambda i, w: (i + 1000, w, None),
        lambda i, w: (i[:1], w, None),
        lambda i, w: (i, w, "9"),
        lambda i, w: (i.int(), w, None),
        lambda i, w: (i, w.float(), None),
        lambda i, w: (i, w.view(-1, 1), None),
    ],
)
def test_errors_are_those_of_pyg(wrong):
    edge_index, nodes, _, weight = hypergraph("random", "cpu")
    index, weights, count = wrong(edge_index, weight)
    x, layer = torch.randn(nodes, WIDE, dtype=torch.float64), conv("cpu")

    def step():
        try:
            return layer(x, index, weights, num_edges=count)
        except Exception as error:
            return type(error), str(error)

    for _ in range(2):
        found, expected = step(), without(step)
        assert type(found) is type(expected)
        close([found], [expected]) if isinstance(found, torch.Tensor) else None
        assert isinstance(found, torch.Tensor) or found == expected


class Doubled(HypergraphConv):
    def message(self, x_j, norm_i, alpha):
        return 2 * super().message(x_j, norm_i, alpha)


def of_class(layer, monkeypatch):
    made = Doubled(WIDE, NARROW).double()
    made.load_state_dict(layer.state_dict())
    return made


def with_hook(layer, monkeypatch):
    layer.register_message_forward_hook(lambda module, inputs, out: 3 * out)
    return layer


def with_hook_on_product(layer, monkeypatch):
    layer.lin.register_forward_hook(lambda module, inputs, out: out + 1)
    return layer


def with_other_product(layer, monkeypatch):
    layer.lin = nn.Sequential(nn.Linear(WIDE, NARROW), nn.Tanh()).double()
    return layer


def with_other_scatter(layer, monkeypatch):
    scatter = hypergraph_conv.scatter
    monkeypatch.setattr(hypergraph_conv, "scatter", lambda *args, **kwargs: scatter(*args, **kwargs) + 1)
    return layer


def with_heads(layer, monkeypatch):
    layer.heads, layer.out_channels, layer.concat = 2, NARROW // 2, False
    layer.bias = None
    return layer


def with_aggregation(layer, monkeypatch):
    return HypergraphConv(WIDE, NARROW, aggr="max").double()


CHANGED = [of_class, with_hook, with_hook_on_product, with_other_product, with_other_scatter, with_heads, with_aggregation]


@pytest.mark.parametrize("change", CHANGED)
def test_changed_layers(change, monkeypatch):
    edge_index, nodes, *_ = hypergraph("random", "cpu")
    x, layer = torch.randn(nodes, WIDE, dtype=torch.float64, requires_grad=True), conv("cpu")
    plain = layer(x, edge_index).detach()
    layer = change(copy.deepcopy(layer), monkeypatch)
    same(lambda: [layer(x, edge_index)])
    changed = layer(x, edge_index).detach()
    assert changed.shape != plain.shape or not torch.allclose(changed, plain)


def test_lazy_layer():
    edge_index, nodes, *_ = hypergraph("random", "cpu")
    layer = HypergraphConv(-1, NARROW)
    x = torch.randn(nodes, WIDE)
    assert layer(x, edge_index).shape == (nodes, NARROW) and layer.lin.weight.shape == (NARROW, WIDE)
    same(lambda: [layer(x, edge_index)], 1e-6)
