"""Edge softmax against torch.softmax row by row, its gradients, and opcheck."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, many_rows, relative_error

import gnnfast
from gnnfast import Graph
from gnnfast.dispatch import execute

HEADS = [1, 3, 8, 12, 33, 64]
PARTS = ["score", "dst", "src", "dst src", "score dst src"]


def _reference(edge_index, num_dst, score):
    """In the dtype of the scores, a row at a time."""
    out = torch.zeros_like(score)
    for row in range(num_dst):
        mine = edge_index[1] == row
        out[mine] = torch.softmax(score[mine], 0)
    return out


def _inputs(name, heads, dtype, device, parts="score dst src"):
    edge_index, num_src, num_dst = GRAPHS[name]()
    graph = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst))
    sizes = {"score": edge_index.shape[1], "dst": num_dst, "src": num_src}
    made = {
        k: torch.randn(n, heads, dtype=torch.float64).to(dtype).to(device) if k in parts.split() else None for k, n in sizes.items()
    }
    return edge_index.to(device), graph, made


def _same(a, b):
    """Or both nothing but rounding: to add to all scores of a row changes nothing."""
    return relative_error(a, b) < 1e-10 or (a - b).norm() < 1e-12 * (1 + b.numel())


def _raw(edge_index, parts):
    """The sum of the parts for each edge."""
    at = {"score": slice(None), "dst": edge_index[1], "src": edge_index[0]}
    taken = [t[at[k]] for k, t in parts.items() if t is not None]
    return sum(taken[1:], taken[0])


@pytest.mark.parametrize("by", ["dst", "src"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name, heads, by, device):
    edge_index, graph, parts = _inputs(name, heads, torch.float64, device, "score")
    found = gnnfast.edge_softmax(graph, parts["score"], by=by)
    turned = edge_index if by == "dst" else edge_index.flip(0)
    assert relative_error(found, _reference(turned, graph.num_dst if by == "dst" else graph.num_src, parts["score"])) < 1e-12
    assert relative_error(gnnfast.edge_softmax(graph, parts["score"][:, 0], by=by), found[:, 0]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_at_any_address(dtype, device):
    """Contiguous ones that do not begin where a load of several heads may."""
    _, graph, made = _inputs("hub", 8, dtype, device)
    moved = {}
    for name, t in made.items():
        moved[name] = t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
        assert moved[name].data_ptr() % 8 and moved[name].is_contiguous()
    found, expected = (execute.softmax(graph, *parts.values(), 0.2, place="test") for parts in (moved, made))
    assert torch.equal(found, expected) or relative_error(found, expected) < TOLERANCE[dtype]
    moved["score"].requires_grad_()
    made["score"].requires_grad_()
    upstream = torch.randn_like(found)
    grads = [
        torch.autograd.grad(execute.softmax(graph, *parts.values(), 0.2, place="test"), parts["score"], upstream)[0]
        for parts in (moved, made)
    ]
    assert relative_error(*grads) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [1, 4, 20, 64])
def test_rows_of_all_lengths(heads, device):
    """Those that a few lanes take, a warp, a block, and several blocks of other kernels."""
    lengths = torch.tensor([0, 1, 31, 32, 33, 100, 0, 1023, 1024, 1025, 2049, 3500, 7])
    dst = torch.arange(lengths.numel()).repeat_interleave(lengths)
    dst = dst[torch.randperm(dst.numel(), generator=torch.Generator().manual_seed(0))].to(device)
    edge_index = torch.stack([torch.arange(dst.numel(), device=device) % 50, dst])
    graph = Graph.from_edge_index(edge_index, (50, lengths.numel()))
    score = torch.randn(dst.numel(), heads, dtype=torch.float64, device=device, requires_grad=True)
    of_dst = torch.randn(lengths.numel(), heads, dtype=torch.float64, device=device, requires_grad=True)
    upstream = torch.randn_like(score)

    found = execute.softmax(graph, score, of_dst, None, 0.2, place="test")
    expected = torch.nn.functional.leaky_relu(score + of_dst[dst], 0.2)
    expected = _reference(edge_index, lengths.numel(), expected)
    assert relative_error(found, expected) < 1e-12
    grads = torch.autograd.grad(found, (score, of_dst), upstream)
    for a, b in zip(grads, torch.autograd.grad(expected, (score, of_dst), upstream), strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("slope", [1.0, 0.2, 0.0])
def test_parts_and_dtypes(slope, parts, dtype, device):
    for name in ("hub", "random"):
        edge_index, graph, made = _inputs(name, 3, dtype, device, parts)
        found = execute.softmax(graph, *made.values(), slope, place="test")
        exact = _raw(edge_index, {k: None if t is None else t.double() for k, t in made.items()})
        expected = _reference(edge_index, graph.num_dst, torch.nn.functional.leaky_relu(exact, slope))
        assert found.dtype == dtype and relative_error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("slope", [1.0, 0.2])
@pytest.mark.parametrize("name", ["random", "no_edges", "isolated", "bipartite", "self_loops_and_duplicates"])
def test_gradients_to_the_second(name, slope, parts, device):
    edge_index, graph, made = _inputs(name, 2, torch.float64, device, parts)
    leaves = [t.requires_grad_() for t in made.values() if t is not None]
    found = execute.softmax(graph, *made.values(), slope, place="test")
    expected = _reference(edge_index, graph.num_dst, torch.nn.functional.leaky_relu(_raw(edge_index, made), slope))
    firsts = [torch.autograd.grad(out.sin().sum(), leaves, create_graph=True, allow_unused=True) for out in (found, expected)]
    plain = torch.autograd.grad(execute.softmax(graph, *made.values(), slope, place="test").sin().sum(), leaves)
    for f, p, e in zip(firsts[0], plain, firsts[1]):
        e = torch.zeros_like(f) if e is None else e
        assert _same(f, e) and _same(p, e)
    if edge_index.numel() and not (slope == 1 and "dst" in parts):  # a part of the whole row has no gradient
        seconds = [torch.autograd.grad(sum(g.cos().sum() for g in grads), leaves) for grads in firsts]
        assert all(_same(f, e) for f, e in zip(*seconds))


def test_extreme_scores(device):
    edge_index, graph, made = _inputs("random", 1, torch.float32, device, "score")
    score = made["score"]
    found = gnnfast.edge_softmax(graph, score * 1e4)
    assert found.isfinite().all()
    sums = torch.zeros(graph.num_dst, 1, device=device).index_add(0, edge_index[1], found)
    some = edge_index[1].bincount(minlength=graph.num_dst) > 0
    assert (sums[some] - 1).abs().max() < 1e-6
    masked = score.clone()
    masked[::3] = -torch.inf
    masked[edge_index[1] == edge_index[1, 0]] = -torch.inf  # a row of nothing else
    masked[1], masked[2] = torch.inf, torch.nan
    assert relative_error(gnnfast.edge_softmax(graph, masked), _reference(edge_index, graph.num_dst, masked)) < 1e-6


def test_a_million_edges_in_a_row(device):
    edges = 1_000_003
    edge_index = torch.stack([torch.arange(edges) % 1000, torch.full((edges,), 5)]).to(device)
    graph, score = Graph.from_edge_index(edge_index, (1000, 7)), torch.randn(edges, 2, device=device, requires_grad=True)
    found, expected = gnnfast.edge_softmax(graph, score), torch.softmax(score.double(), 0)
    assert relative_error(found, expected) < 1e-5
    seed = torch.randn_like(found)
    grads = [torch.autograd.grad(out, score, seed.to(out.dtype))[0] for out in (found, expected)]
    assert relative_error(*grads) < 1e-4


def test_more_rows_than_a_grid(device):
    edge_index, num_src, num_dst = many_rows()
    graph = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst))
    score = torch.randn(edge_index.shape[1], 1, device=device)
    assert torch.equal(gnnfast.edge_softmax(graph, score), torch.ones_like(score))


def test_strided_scores_and_no_heads(device):
    _edge_index, graph, made = _inputs("random", 4, torch.float64, device, "score")
    strided = made["score"].t().contiguous().t()
    assert torch.equal(gnnfast.edge_softmax(graph, strided), gnnfast.edge_softmax(graph, made["score"]))
    assert gnnfast.edge_softmax(graph, made["score"][:, :0]).shape == (graph.num_edges, 0)


def test_from_run_to_run(device):
    _, graph, made = _inputs("hub", 3, torch.float32, device)
    leaves = [t.requires_grad_() for t in made.values()]
    runs = []
    for _ in range(3):
        out = execute.softmax(graph, *made.values(), 0.2, place="test")
        runs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


@pytest.mark.parametrize("parts", PARTS)
def test_opcheck(parts, device):
    _, graph, made = _inputs("random", 2, torch.float64, device, parts)
    leaves = [t.requires_grad_() if t is not None else None for t in made.values()]
    torch.library.opcheck(torch.ops.gnnfast.edge_softmax.default, (*graph.args(csc=True), *leaves, 0.2))


def test_compiled(device):
    _, graph, made = _inputs("random", 2, torch.float64, device, "score")
    gnnfast.edge_softmax(graph, made["score"])  # converts
    compiled = torch.compile(lambda s: gnnfast.edge_softmax(graph, s).sin(), fullgraph=True, backend="aot_eager")
    score = made["score"].requires_grad_()
    found, expected = compiled(score), gnnfast.edge_softmax(graph, score).sin()
    assert relative_error(found, expected) < 1e-12
    grads = [torch.autograd.grad(out.sum(), score)[0] for out in (found, expected)]
    assert relative_error(*grads) < 1e-12
