"""PyG's functions over few edges in one operation: what users get has, on a CPU, the same bits, and is theirs alone."""

from __future__ import annotations

import pytest
import torch
from comparison import without
from graphs import GRAPHS
from torch_geometric import nn
from torch_geometric.nn import ChebConv, EGConv, TransformerConv
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops, scatter, softmax

import gnnfast
from gnnfast.pyg import listed

EDGES = torch.tensor([[0, 1, 1, 4, 2, 2, 0], [1, 0, 1, 2, 2, 4, 1]])
WEIGHT = torch.tensor([0.5, 2.0, 1.5, 0.0, 3.0, -1.0, 0.25])
CALLS = {
    "remove_self_loops": lambda e: remove_self_loops(e)[0],
    "add_self_loops": lambda e: add_self_loops(e)[0],
    "add_self_loops of 9": lambda e: add_self_loops(e, num_nodes=9)[0],
    "gcn_norm": lambda e: gcn_norm(e),
    "gcn_norm of 9": lambda e: gcn_norm(e, num_nodes=9, flow="target_to_source", dtype=torch.float64),
    "gcn_norm, weights": lambda e: gcn_norm(e, WEIGHT.to(e.device), 5, improved=True),
    "gcn_norm, no loops": lambda e: gcn_norm(e, WEIGHT.to(e.device), 5, add_self_loops=False),
    "softmax": lambda e: softmax(WEIGHT.to(e.device), e[1]),
    "softmax of 9": lambda e: softmax(WEIGHT.to(e.device).view(-1, 1), e[1], num_nodes=9, dim=-2),
    "laplacian": lambda e: getattr(ChebConv(2, 2, 2), "__norm__")(e, 5, None, "sym", dtype=torch.float32),  # noqa: B009
}


@pytest.fixture(autouse=True)
def graphs_are_small(small):
    """As they are where nothing is tested."""


def same_bits(found, expected):
    for f, e in zip(found, expected, strict=True):
        assert f.dtype is e.dtype and torch.equal(f.isnan(), e.isnan()) and torch.equal(f.nan_to_num(7), e.nan_to_num(7))


def same(found, expected):
    """On a GPU sums are those of atomics."""
    if expected[0].is_cpu:
        return same_bits(found, expected)
    for f, e in zip(found, expected, strict=True):
        close = dict(rtol=1e-4, atol=1e-4) if e.dtype is torch.float32 else {}
        torch.testing.assert_close(f, e, equal_nan=True, **close)


def determined(dtype, device):
    if dtype is torch.bfloat16 and device.type == "cuda":
        pytest.skip("the order of atomic additions is not determined, in PyG either")


def tensors(made):
    return [made] if isinstance(made, torch.Tensor) else [t for t in made if t is not None]


def ops_of(step):
    """The operations of gnnfast that a step runs."""
    with torch.profiler.profile() as profile:
        step()
    return {e.name.removeprefix("gnnfast::") for e in profile.events() if e.name.startswith("gnnfast::")}


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_same_bits(name, repeats, device):
    call, given = CALLS[name], EDGES.to(device)
    expected = tensors(without(lambda: call(given.clone())))
    edges = given.clone()
    for _ in range(repeats):
        found = tensors(call(edges))
        same(found, expected)
        for f in found:
            if f is not edges:
                f.zero_()  # is the user's
    assert torch.equal(edges, given)
    ops = ops_of(lambda: call(given.clone()))
    assert ops and ops <= {"loops_listed", "gcn_norm_listed", "softmax_coo", "laplacian_listed"}


@pytest.mark.parametrize("weighted", [False, True])
def test_loops_of_no_node_are_taken_out(weighted, device):
    """As those by which lists are filled up: PyG looks at none of them without weights, and counts from the end with them."""
    edges = torch.tensor([[0, 1, -1, 9, 2], [1, 2, -1, 9, 2]] if not weighted else [[0, 1, -1, 2], [1, 2, -1, 2]], device=device)
    weight = torch.rand(edges.shape[1], device=device) if weighted else None
    same(tensors(gcn_norm(edges, weight, 4)), tensors(without(lambda: gcn_norm(edges, weight, 4))))
    if device.type == "cuda":
        torch.cuda.synchronize()  # which raises what kernels complain of


# ---- rows that belong to groups ----------------------------------------------------------------------------------------------------
REDUCTIONS = ["sum", "add", "mean", "max", "amin"]
ROWS = {
    "numbers": lambda n: torch.randn(n),
    "rows": lambda n: torch.randn(n, 16),
    "heads": lambda n: torch.randn(n, 3, 4),
    "not contiguous": lambda n: torch.randn(16, n).t(),
    "not finite": lambda n: torch.tensor([float("inf"), float("nan"), 0.0, -0.0, -float("inf")]).repeat(n, 4)[:, :19].contiguous(),
}


def groups(graph):
    edge_index, _, num_dst = GRAPHS[graph]()
    return edge_index[1].clone(), num_dst


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_scatter(reduce, graph, rows, dtype, device, monkeypatch):
    determined(dtype, device)
    monkeypatch.setattr(listed, "MANY", 1)
    index, num_dst = groups(graph)
    src = ROWS[rows](len(index))
    src = (src.nan_to_num(5, 7, -7) if dtype is torch.int64 else src).to(device, dtype)
    index = index.to(device)
    for dim in (0, -src.dim()):
        for size in (num_dst, num_dst + 3, None):
            arguments = src, index, dim, size, reduce
            same([scatter(*arguments)], [without(lambda: scatter(*arguments))])  # noqa: B023
    served = dtype in (torch.float32, torch.float64) and len(index)
    sums = reduce in ("sum", "add")
    wide = rows != "numbers" or (not sums and len(index) <= listed.FEW_ROWS)
    if served and (not sums if device.type == "cuda" else wide and num_dst <= len(index)):
        assert ops_of(lambda: scatter(src, index, 0, num_dst, reduce)) == {"spmm_coo"}


def twice(step, *leaves):
    """A result with its first and second derivatives."""
    out = step()
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.pow(3).sum() for g in first), leaves)
    return [out.detach(), *(g.detach() for g in first), *second]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("graph", ["random", "hub", "self_loops_and_duplicates"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_gradients_of_scatter(reduce, graph, dtype, monkeypatch):
    monkeypatch.setattr(listed, "MANY_IN_TRAINING", 1)
    index, num_dst = groups(graph)
    src = torch.randn(len(index), 16, dtype=dtype, requires_grad=True)
    step = lambda: scatter(src, index, 0, num_dst, reduce)  # noqa: E731
    same_bits(twice(step, src), without(lambda: twice(step, src)))
    assert ("spmm_coo" in ops_of(step)) == (reduce != "max")


def test_what_scatter_keeps(monkeypatch):
    """Neither values nor the result, which may be written into, as in PyG, but the groups."""
    monkeypatch.setattr(listed, "MANY_IN_TRAINING", 1)
    for step in (lambda call: call(), without):
        index, src = torch.tensor([0, 2, 2, 1]), torch.randn(4, 8, requires_grad=True)
        doubled = src * 2
        out = step(lambda: scatter(doubled, index, 0, 3))  # noqa: B023
        doubled.data.zero_(), out.data.zero_()
        out.sum().backward()
        assert torch.equal(src.grad, torch.full((4, 8), 2.0))
        out = step(lambda: scatter(src * 2, index, 0, 3))  # noqa: B023
        index[0] = 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("index", [[0, 3, 1], [0, -1, 1]])
@pytest.mark.parametrize("grad", [True, False])
def test_groups_that_do_not_exist(index, grad, monkeypatch):
    monkeypatch.setattr(listed, "MANY_IN_TRAINING", 1)
    src, raised = torch.randn(3, 8, requires_grad=grad), []
    for step in (lambda call: call(), without):
        with pytest.raises(RuntimeError) as caught:
            step(lambda: scatter(src, torch.tensor(index), 0, 3))
        raised.append(str(caught.value))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("pool", [nn.global_add_pool, nn.global_mean_pool, nn.global_max_pool])
def test_readouts(pool, device):
    x, batch = torch.randn(700, 16, device=device), torch.arange(700, device=device) // 7
    with torch.no_grad():
        same([pool(x, batch)], [without(lambda: pool(x, batch))])
        of_torch = device.type == "cuda" and pool is nn.global_add_pool
        assert ops_of(lambda: pool(x, batch)) == (set() if of_torch else {"spmm_coo"})
    if device.type == "cuda":
        x.requires_grad_()
        assert not ops_of(lambda: pool(x, batch))


@pytest.mark.parametrize("name", ["softmax", "scatter"])
def test_deterministic_algorithms(name, device):
    """Sums by atomics are not."""
    x, index = torch.randn(50, 3, device=device), torch.arange(50, device=device) % 7
    step = (lambda: softmax(x, index)) if name == "softmax" else (lambda: scatter(x, index, reduce="max"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        same([step()], [without(step)])
        assert bool(ops_of(step)) == (device.type == "cpu")
    finally:
        torch.use_deterministic_algorithms(False)


def test_scatter_replaced_by_somebody(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "scatter_add_", lambda self, *arguments: self + 7)
    assert torch.equal(scatter(torch.ones(3, 8), torch.tensor([0, 1, 1]), 0, 2), torch.full((2, 8), 7.0))


# ---- sums over edges as they are listed ----------------------------------------------------------------------------------------------
class Weighted(nn.MessagePassing):
    def forward(self, x, edge_index, weight, size=None):
        return self.propagate(edge_index, x=x, weight=weight, size=size)

    def message(self, x_j, weight):
        return weight.view(-1, 1) * x_j


SUMS = {
    "sum": lambda: nn.SimpleConv(),
    "mean": lambda: nn.SimpleConv(aggr="mean"),
    "max": lambda: nn.SimpleConv(aggr="max"),
    "to sources": lambda: Weighted(flow="target_to_source"),
    "weights": Weighted,
}


@pytest.fixture
def gradients_are_ours(monkeypatch):
    monkeypatch.setattr(listed, "FEW_IN_TRAINING", 0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("graph", ["no_edges", "one_edge", "self_loops_and_duplicates", "hub", "random"])
@pytest.mark.parametrize("name", SUMS)
def test_sums(name, graph, dtype, grad, device, gradients_are_ours):
    determined(dtype, device)
    edge_index, *sizes = GRAPHS[graph]()
    x, edge_index, layer = torch.randn(max(sizes), 8).to(device, dtype).requires_grad_(grad), edge_index.to(device), SUMS[name]()
    weight = (torch.rand(edge_index.shape[1]).to(device, dtype),) if isinstance(layer, Weighted) else ()
    layer(x.detach().float(), edge_index.clone(), *(w.float() for w in weight))  # what the class computes is found out

    def step():
        with torch.set_grad_enabled(grad):
            return layer(x, edge_index, *weight)

    run = (lambda: twice(step, x)) if grad else (lambda: [step()])
    same(run(), without(run))
    served = not grad if device.type == "cuda" else not (grad and name == "max")
    if served or device.type == "cpu":  # on a GPU gradients of maxima are those of a graph that is converted
        assert ("spmm_coo" in ops_of(step)) == (served and dtype is not torch.bfloat16)


def test_sums_over_pairs_and_sizes(gradients_are_ours):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    layer, weight = Weighted(), torch.rand(edge_index.shape[1])
    src, dst = torch.randn(num_src, 8, requires_grad=True), torch.randn(num_dst, 3)
    for given in (((src, dst), edge_index, weight), ((src, None), edge_index, weight, (num_src, num_dst + 2))):
        layer(*given)
        run = lambda: twice(lambda: layer(*given), src)  # noqa: B023, E731
        same_bits(run(), without(run))
        assert ops_of(lambda: layer(*given)) == {"spmm_coo"}  # noqa: B023


@pytest.mark.parametrize("ids", [[[0, 1, 7], [1, 1, 0]], [[0, 1, 2], [1, 1, 7]], [[0, -1, 2], [1, 1, 0]]])
def test_ids_that_do_not_exist(ids):
    layer, x, raised = nn.SimpleConv(), torch.randn(3, 8), []
    layer(x, torch.tensor([[0, 1], [1, 2]]))
    with torch.no_grad():
        for step in (lambda call: call(), without):
            with pytest.raises((IndexError, RuntimeError, ValueError)) as caught:
                step(lambda: layer(x, torch.tensor(ids)))
            raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


def test_what_sums_keep(gradients_are_ours):
    """Not the features, but edges and weights, as in PyG."""
    layer = Weighted()
    for kept in ("x", "weight", "edge_index"):
        x, weight, edge_index = torch.randn(3, 8, requires_grad=True), torch.rand(4), torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]])
        layer(x, edge_index.clone(), weight)
        hidden = x * 1
        out = layer(hidden, edge_index, weight)
        {"x": hidden.detach(), "weight": weight, "edge_index": edge_index}[kept].zero_()
        if kept == "x":
            out.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


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

    assert torch.equal(step(), without(step)) and ops_of(step) == {"loops_listed"}
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
    """And nobody sees in a sum which call was the first; of attention, whose kernels round otherwise, each is left."""
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
    if name in ATTENTION:
        assert own == [{"PyG's own" if name == "GATConv" else "in parts"}] * 4
