"""What one pass over the edges makes, against the same edge by edge: on a CPU sums, means and extrema of a node's features plus or
minus an edge's, and arrays of many pages; what an end of edges has, or both have."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, relative_error

from gnnfast import Graph
from gnnfast.dispatch import edges, execute
from gnnfast.dispatch.edges import Ends
from gnnfast.graph import ids as graph_ids
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.ops import convert

_ops = torch.ops.gnnfast
REDUCES = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}
SHAPES = [(1, 1), (7, 7), (8, 1), (12, 3), (16, 16), (33, 33), (40, 20), (100, 4), (130, 130)]  # features, and what an edge has


def by_edges(edge_index, num_dst, x, w, reduce, minus, empty=0.0):
    """``w [E, H]`` spread over the features."""
    w = w.repeat_interleave(x.shape[1] // w.shape[1], 1)
    messages = x[edge_index[0]] - w if minus else x[edge_index[0]] + w
    index = edge_index[1].unsqueeze(1).expand_as(messages)
    out = messages.new_full((num_dst, x.shape[1]), empty)
    return out.scatter_reduce(0, index, messages, REDUCES[reduce], include_self=False)


def made(name, width, heads, dtype, ids=torch.int64):
    edge_index, num_src, num_dst = GRAPHS[name]()
    edge_index = edge_index.to(ids)
    x = torch.randn(num_src, width).to(dtype).requires_grad_()
    w = torch.randn(edge_index.shape[1], heads).to(dtype).requires_grad_()
    return edge_index, Graph.from_edge_index(edge_index, (num_src, num_dst)), x, w


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width, heads", SHAPES)
@pytest.mark.parametrize("name", GRAPHS)
def test_plus(name, width, heads, dtype):
    edge_index, graph, x, w = made(name, width, heads, dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    for nth, reduce in enumerate(REDUCES):
        minus = bool((nth + width) % 2)
        out = execute.plus(graph, x, w, reduce, minus, place="test")
        expected = by_edges(edge_index, graph.num_dst, *exact, reduce, minus)
        assert out.dtype is dtype and relative_error(out, expected) < TOLERANCE[dtype]
        with torch.no_grad():
            assert torch.equal(execute.plus(graph, x, w, reduce, minus, place="test"), out)
        if dtype in (torch.float16, torch.bfloat16) and reduce in ("max", "min"):
            continue  # rounding decides who attains it
        grad = torch.randn_like(expected).to(dtype)
        found = torch.autograd.grad(out, (x, w), grad)
        wanted = torch.autograd.grad(expected, exact, grad.double())
        for ours, theirs in zip(found, wanted):
            assert ours.dtype is dtype and relative_error(ours, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["hub", "isolated", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_first_of_several_gets_the_gradient(name, dtype):
    """Of those with few values many tie. Whether a gradient is scattered or gathered depends on the average degree and dtype."""
    edge_index, graph, x, w = made(name, 48, 48, dtype)
    with torch.no_grad():
        x.round_(), w.round_()
    messages = (x[edge_index[0]] + w).detach()
    seed = torch.randn(graph.num_dst, 48).to(dtype)
    to_x, to_w = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(w, dtype=torch.float64)
    for i in range(graph.num_dst):
        mine = (edge_index[1] == i).nonzero().view(-1)
        if mine.numel():
            first = mine[(messages[mine] == messages[mine].amax(0)).int().argmax(0)]
            to_w[first, torch.arange(48)] += seed[i].double()
            to_x.index_put_((edge_index[0][first], torch.arange(48)), seed[i].double(), accumulate=True)
    out = execute.plus(graph, x, w, "max", False, place="test", empty=-math.inf)
    assert torch.equal(out.isinf().all(1), torch.bincount(edge_index[1], minlength=graph.num_dst) == 0)
    found = torch.autograd.grad(out, (x, w), seed)
    assert relative_error(found[0], to_x) < 5 * TOLERANCE[dtype] and relative_error(found[1], to_w) < TOLERANCE[dtype]


@pytest.mark.parametrize("weights", [0, 1, 4, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_extrema_of_products(weights, dtype):
    """The hub's gradient is scattered; it equals that of the edges one by one."""
    edge_index, num_src, num_dst = GRAPHS["hub"]()
    graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
    x = torch.randn(num_src, 48, dtype=dtype, requires_grad=True)
    w = torch.randn(edge_index.shape[1], weights, dtype=dtype, requires_grad=True) if weights else None
    leaves = (x,) if w is None else (x, w)
    messages = x[edge_index[0]] * (1 if w is None else w.repeat_interleave(48 // weights, 1))
    index = edge_index[1].unsqueeze(1).expand_as(messages)
    expected = messages.new_zeros(num_dst, 48).scatter_reduce(0, index, messages, "amax", include_self=False)
    out = execute.aggregate(graph, x, w if weights != 1 else w[:, 0], "max", ties="first")
    seed = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad(out, leaves, seed), torch.autograd.grad(expected, leaves, seed)):
        assert relative_error(ours, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("needs", ["x", "w", "both"])
def test_derivatives(reduce, needs):
    _, graph, x, w = made("self_loops_and_duplicates", 4, 2 if reduce == "mean" else 4, torch.float64)
    leaves = [t.detach().requires_grad_(needs in (name, "both")) for name, t in (("x", x), ("w", w))]
    torch.autograd.gradcheck(lambda *t: execute.plus(graph, *t, reduce, True, place="test"), leaves)
    torch.autograd.gradgradcheck(lambda *t: execute.plus(graph, *t, reduce, True, place="test"), leaves)


def test_ops():
    _, graph, x, w = made("random", 8, 4, torch.float32)
    args = graph.args(csc=True)
    torch.library.opcheck(_ops.spmm_plus.default, (*args, w, x, True, True))
    torch.library.opcheck(_ops.spmm_plus_max.default, (*args, w, x, False, True, True, 0.0))
    ids, a, b = torch.randint(30, (2, 50)), torch.randn(30, 5), torch.randn(30, 5)
    for op in range(3):
        torch.library.opcheck(_ops.combine_ends.default, (*ids, a, b, op))
    arg = torch.tensor([[0, -1, 2], [-1, 4, 4]], dtype=torch.int32)
    torch.library.opcheck(_ops.scatter_first.default, (torch.randn(2, 3), arg, 6, 3))
    with pytest.raises(RuntimeError, match="train=True"):
        _ops.spmm_plus_max(*args, w, x, False, False, False, 0.0)[0].sum().backward()


def test_what_is_refused():
    _, graph, x, w = made("random", 8, 4, torch.float32)
    args = graph.args(csc=False)
    for wrong, match in ((w[:-1], "weight"), (w[:, :3], "heads"), (w.double(), "weight")):
        with pytest.raises(RuntimeError, match=match):
            _ops.spmm_plus(*args, wrong, x, False, False)
    a, ids = torch.randn(4, 3), torch.tensor([0, 1])
    for wrong in (torch.tensor([0, 4]), torch.tensor([-1, 0])):
        with pytest.raises(RuntimeError, match="out of range"):
            _ops.combine_ends(ids, wrong, a, a, 0)
        with pytest.raises(RuntimeError, match="out of range"):
            _ops.combine_ends(wrong, ids, a, a, 0)
    for row, column, x, y, op, match in (
        (ids, ids[:1], a, a, 0, "column"),
        (ids, ids.int(), a, a, 0, "column"),
        (ids.float(), ids.float(), a, a, 0, "int32"),
        (ids, ids, a, a[:, :2], 0, "b"),
        (ids, ids, a.half(), a.half(), 0, "float32"),
        (ids, ids, a, a, 3, "op"),
        (ids, ids, a, a[:0], 0, "no nodes"),
    ):
        with pytest.raises(RuntimeError, match=match):
            _ops.combine_ends(row, column, x, y, op)
    # Edges that do not exist get nothing.
    arg = torch.tensor([[9, -7, 1]], dtype=torch.int32)
    assert torch.equal(_ops.scatter_first(torch.ones(1, 3), arg, 2, 3), torch.tensor([[0.0, 0, 0], [0, 0, 1]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["add", "sub", "mul"])
@pytest.mark.parametrize("name", GRAPHS)
def test_both_ends(name, how, dtype, device):
    if device.type == "cpu" and dtype.itemsize == 2:
        pytest.skip("on a CPU such rows are gathered first")
    edge_index, num_src, num_dst = GRAPHS[name]()
    edge_index = edge_index.to(device)
    graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
    ends = Ends(edge_index[1], edge_index[0], lambda: graph)
    for width in (6, 8, 1):
        x, y = (torch.randn(n, width, dtype=dtype, device=device, requires_grad=True) for n in (num_src, num_dst))
        for side, (lhs, rhs) in ((BY_SRC, (x, y)), (BY_DST, (y, x))):
            mine, other = (edge_index[0], edge_index[1]) if side == BY_SRC else (edge_index[1], edge_index[0])
            out = edges.combine(lhs, rhs, ends, side, how)
            assert torch.equal(out, getattr(torch, how)(lhs[mine], rhs[other]))
            expected, seed = getattr(torch, how)(lhs.double()[mine], rhs.double()[other]), torch.randn_like(out)
            wanted = torch.autograd.grad(expected, (x, y), seed.double())
            for ours, theirs in zip(torch.autograd.grad(out, (x, y), seed), wanted):
                assert relative_error(ours, theirs) < TOLERANCE[dtype]
    if dtype is torch.float64 and name == "random":
        torch.autograd.gradcheck(lambda a, b: edges.combine(a, b, ends, BY_SRC, how), (x, y))
        torch.autograd.gradgradcheck(lambda a, b: edges.combine(a, b, ends, BY_SRC, how), (x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_rows_at_an_end(ids, dtype, device):
    for name, make in GRAPHS.items():
        edge_index, num_src, num_dst = make()
        edge_index = edge_index.to(device, ids)
        graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
        ends = Ends(edge_index[1], edge_index[0], lambda graph=graph: graph)
        for shape in ((), (1,), (3,), (16,), (2, 8), (129,), (0,)):
            x = torch.randn(num_src, *shape, device=device).mul(3).to(dtype)
            found = edges.gather(x, ends, BY_SRC)
            assert torch.equal(found, x[edge_index[0]]), (name, shape)
            strided = torch.stack([x, x], -1)[..., 0]
            assert torch.equal(edges.gather(strided, ends, BY_SRC), found)
            later = x[1:]  # which may begin at any address
            ends_of_later = Ends(edge_index[1], (edge_index[0] - 1).clamp(min=0), lambda: None)
            assert torch.equal(edges.gather(later, ends_of_later, BY_SRC), later[ends_of_later.ids[BY_SRC]])


def test_ids_out_of_range_are_said_on_a_gpu(device):
    if device.type == "cpu":
        pytest.skip("they are an error at once: test_what_is_refused")
    graph_ids.watch(torch.zeros(1, device=device))
    x, bad = torch.ones(4, 8, device=device), torch.tensor([0, 4, -1, 3], device=device)
    for run in (lambda: _ops.gather_ends(bad, x), lambda: _ops.combine_ends(bad, bad, x, x, 0)):
        out = run()
        with pytest.raises(IndexError, match=r"out of range \[0, 4\)"):
            torch.cuda.synchronize()
        assert out[:, 0].tolist() in ([1, 0, 0, 1], [2, 0, 0, 2])
    torch.library.opcheck(_ops.gather_ends.default, (bad.clamp(0, 3), x))


@pytest.mark.parametrize("rows", [3, convert.MANY_PAGES // 64, convert.MANY_PAGES // 64 + 12_345])
def test_arrays_of_many_pages_are_ordinary(rows):
    like = torch.randn(2, dtype=torch.float32, requires_grad=True)
    found = convert.empty(like, rows, 16)
    assert found.shape == (rows, 16) and found.dtype is like.dtype and found.is_contiguous() and not found.requires_grad
    found.copy_(torch.arange(rows * 16.0).view(rows, 16))
    assert torch.equal(found[-1], torch.arange(rows * 16.0 - 16, rows * 16.0))
    assert torch.equal(convert.empty(like, rows, 16).zero_(), torch.zeros(rows, 16))
    x, ids = torch.randn(50, 16, requires_grad=True), torch.randint(50, (rows,))
    ends = Ends(ids, ids, lambda: Graph.from_edge_index(torch.stack([ids, ids]), 50))
    out = edges.gather(x, ends, BY_SRC)
    assert torch.equal(out, x[ids])
    seed = torch.randn_like(out)
    (ours,), (theirs,) = torch.autograd.grad(out, x, seed), torch.autograd.grad(x[ids], x, seed)
    assert relative_error(ours, theirs) < 1e-5
