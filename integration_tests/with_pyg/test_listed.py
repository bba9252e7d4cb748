"""PyG's functions over few edges on a CPU in one operation: what users get has the same bits, and is theirs alone."""

from __future__ import annotations

import pytest
import torch
from comparison import without
from torch_geometric import nn
from torch_geometric.nn import ChebConv, EGConv, TransformerConv
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops, softmax

import gnnfast

EDGES = torch.tensor([[0, 1, 1, 4, 2, 2, 0], [1, 0, 1, 2, 2, 4, 1]])
WEIGHT = torch.tensor([0.5, 2.0, 1.5, 0.0, 3.0, -1.0, 0.25])
CALLS = {
    "remove_self_loops": lambda e: remove_self_loops(e)[0],
    "add_self_loops": lambda e: add_self_loops(e)[0],
    "add_self_loops of 9": lambda e: add_self_loops(e, num_nodes=9)[0],
    "gcn_norm": lambda e: gcn_norm(e),
    "gcn_norm of 9": lambda e: gcn_norm(e, num_nodes=9, flow="target_to_source", dtype=torch.float64),
    "gcn_norm, weights": lambda e: gcn_norm(e, WEIGHT, 5, improved=True),
    "gcn_norm, no loops": lambda e: gcn_norm(e, WEIGHT, 5, add_self_loops=False),
    "softmax": lambda e: softmax(WEIGHT, e[1]),
    "softmax of 9": lambda e: softmax(WEIGHT.view(-1, 1), e[1], num_nodes=9, dim=-2),
    "laplacian": lambda e: getattr(ChebConv(2, 2, 2), "__norm__")(e, 5, None, "sym", dtype=torch.float32),  # noqa: B009
}


@pytest.fixture(autouse=True)
def graphs_are_small(small):
    """As they are where nothing is tested."""


def same_bits(found, expected):
    for f, e in zip(found, expected, strict=True):
        assert f.dtype is e.dtype and torch.equal(f.isnan(), e.isnan()) and torch.equal(f.nan_to_num(7), e.nan_to_num(7))


def tensors(made):
    return [made] if isinstance(made, torch.Tensor) else [t for t in made if t is not None]


def ops_of(step):
    """The operations of gnnfast that a step runs."""
    with torch.profiler.profile() as profile:
        step()
    return {e.name.removeprefix("gnnfast::") for e in profile.events() if e.name.startswith("gnnfast::")}


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_same_bits(name, repeats):
    call = CALLS[name]
    expected = tensors(without(lambda: call(EDGES.clone())))
    edges = EDGES.clone()
    for _ in range(repeats):
        found = tensors(call(edges))
        same_bits(found, expected)
        for f in found:
            if f is not edges:
                f.zero_()  # is the user's
    assert torch.equal(edges, EDGES)
    assert ops_of(lambda: call(EDGES.clone())) <= {"loops_listed", "gcn_norm_listed", "softmax_coo", "laplacian_listed"}
    assert ops_of(lambda: call(EDGES.clone()))


def test_without_loops_the_edges_stay_the_users():
    assert gcn_norm(EDGES, add_self_loops=False)[0] is EDGES


@pytest.mark.parametrize("name", CALLS)
def test_wrong_ids_raise_the_frameworks_errors(name):
    edges = EDGES.clone()
    edges[1, 3] = -7
    for make in (CALLS[name], lambda e: CALLS[name](e.to(torch.int32))):
        try:
            expected = without(lambda make=make: make(edges))
        except Exception as error:
            with pytest.raises(type(error)) as raised:
                make(edges)
            assert str(raised.value) == str(error)
        else:
            same_bits(tensors(make(edges)), tensors(expected))


@pytest.mark.parametrize("name", [n for n in CALLS if "softmax" not in n])
def test_what_is_not_served(name):
    """A transform of torch.func, and a function that somebody has replaced."""
    assert not ops_of(lambda: torch.func.vmap(lambda _: CALLS[name](EDGES))(torch.zeros(2)) if "of 9" in name else None)
    from torch_geometric.utils import laplacian, loop

    kept = {m: m.maybe_num_nodes for m in (gcn_conv, laplacian, loop)}
    try:
        for module, function in kept.items():
            module.maybe_num_nodes = lambda *args, function=function: function(*args)
        assert not ops_of(lambda: CALLS[name](EDGES.clone()))
    finally:
        for module, function in kept.items():
            module.maybe_num_nodes = function


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("name", ["remove_self_loops", "add_self_loops", "gcn_norm"])
def test_sparse_matrices(name, layout):
    matrix = torch.sparse_coo_tensor(EDGES, WEIGHT, (5, 5)).coalesce().to_sparse(layout=layout)
    for f, e in zip(tensors(CALLS[name](matrix)), tensors(without(lambda: CALLS[name](matrix))), strict=True):
        assert f.layout is e.layout
        same_bits([f.to_dense()], [e.to_dense()])


def test_weights_with_gradients():
    weight = WEIGHT.abs().requires_grad_()

    def step():
        made = gcn_norm(EDGES.clone(), weight, 5)[1]
        return torch.autograd.grad(made.pow(2).sum(), weight)[0]

    assert torch.equal(step(), without(step)) and not ops_of(step)
    with torch.no_grad():
        assert ops_of(lambda: gcn_norm(EDGES.clone(), weight, 5)) == {"gcn_norm_listed"}


def test_users_may_write_into_a_softmax():
    src = torch.randn(7, requires_grad=True)

    def step():
        found = softmax(src.clone(), EDGES[1], num_nodes=5)
        out = (found * 1).pow(2).sum()
        found.detach().zero_()
        found.mul_(2)
        return torch.autograd.grad(out, src)[0]

    torch.testing.assert_close(step(), without(step))


def test_second_derivatives_of_a_softmax():
    src = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)

    def step():
        (first,) = torch.autograd.grad(softmax(src, EDGES[1]).pow(2).sum(), src, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), src)[0]

    torch.testing.assert_close(step(), without(step))


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda: EGConv(8, 8, num_heads=2, num_bases=2), "gcn_norm_listed"),
        (lambda: ChebConv(8, 8, 3), "laplacian_listed"),
        (lambda: TransformerConv(8, 8, edge_dim=1), "softmax_coo"),
    ],
)
def test_layers_over_new_graphs(make, op):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(5, 8)
    given = (WEIGHT.view(-1, 1),) if op == "softmax_coo" else ()
    with torch.no_grad():
        expected = without(lambda: layer(x, EDGES, *given))
        assert torch.equal(layer(x, EDGES.clone(), *given), expected)
        assert op in ops_of(lambda: layer(x, EDGES.clone(), *given))
    gnnfast.clear_report()


NORMALISING = {
    "APPNP": lambda: nn.APPNP(3, 0.1),
    "ARMAConv": lambda: nn.ARMAConv(8, 4, num_stacks=2, num_layers=2),
    "FAConv": lambda: nn.FAConv(8),
    "GCN2Conv": lambda: nn.GCN2Conv(8, 0.1, 0.5, 1),
    "LGConv": lambda: nn.LGConv(),
    "MixHopConv": lambda: nn.MixHopConv(8, 4),
    "SGConv": lambda: nn.SGConv(8, 4, K=2),
    "SSGConv": lambda: nn.SSGConv(8, 4, 0.5, 2),
    "TAGConv": lambda: nn.TAGConv(8, 4),
}
ATTENTION = {"GATConv": lambda: nn.GATConv(8, 4, heads=2), "RGATConv": lambda: nn.RGATConv(8, 4, 2, heads=2)}


@pytest.mark.parametrize("name", NORMALISING | ATTENTION)
def test_a_tiny_graph_is_left_when_it_is_new(name):
    """And nobody sees in a sum which call was the first."""
    torch.manual_seed(0)
    layer, x, edge_index = (NORMALISING | ATTENTION)[name]().eval(), torch.randn(30, 8), torch.randint(0, 30, (2, 200))
    given = {"FAConv": (x, edge_index), "GCN2Conv": (x, edge_index), "RGATConv": (edge_index, torch.randint(0, 2, (200,)))}
    given = given.get(name, (edge_index,))
    with torch.no_grad():
        layer(x, *(t.clone() for t in given))  # what the class computes is found out
        expected, own, edges = without(lambda: layer(x, *given)), [], [*given]
        for at, t in enumerate(edges):
            if t is edge_index:
                edges[at] = edge_index.clone()
        for _ in range(4):
            gnnfast.clear_report()
            found = layer(x, *edges)
            torch.testing.assert_close(found, expected)
            assert name in ATTENTION or torch.equal(found, expected)
            own.append({kernel for place, kernel, _ in gnnfast.report().kernels if place == f"pyg {name}"})
    if name == "GATConv":
        assert own[0] == {"PyG's own"} and "PyG's own" not in own[1] | own[3]
    if name == "RGATConv":
        assert own[0] == {"in parts"} and "in parts" not in own[1] | own[3]
