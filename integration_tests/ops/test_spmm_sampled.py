"""Sampled SpMM against a sum over the edges that a draw takes, found apart in Python's integers."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, many_rows, reference_spmm, relative_error
from torch import Tensor

import gnnfast
from gnnfast import Graph
from gnnfast.graph.draws import Draws
from gnnfast.ops.spmm_sampled import RANDOM
from gnnfast.types import STRATEGIES

SHAPES = [(1, 16), (1, 1), (1, 7), (1, 100), (1, 130), (4, 8), (3, 5), (8, 1), (2, 64), (1, 0), (1, 300), (2, 512)]
MASK = 2**64 - 1


# ---- the reference ----------------------------------------------------------------------------------------------------------
def _hash(seed: int, row: int, run: int) -> int:
    z = (seed + ((row << 32 | run) + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return (z ^ z >> 31) >> 32


def positions(strategy: str, seed: int, row: int, nnz: int, width: int) -> list[int]:
    """The positions within its row of the edges that a row of ``nnz`` edges gives."""
    if nnz <= width or strategy == "bucket":
        return list(range(min(nnz, width)))
    if strategy == "fastrand":
        return [i * 577 % nnz for i in range(width)]
    turn = _hash(seed, row, 0xFFFFFFFF) * nnz >> 32
    bounds = [run * nnz // width for run in range(width + 1)]
    runs = zip(range(width), bounds, bounds[1:])
    return [(low + (_hash(seed, row, run) * (high - low) >> 32) + turn) % nnz for run, low, high in runs]


def drawn(edge_index: Tensor, num_dst: int, strategy: str, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The edge ids that a draw takes, one as often as it is drawn, and the degree of each node over its draws ``[num_dst]``."""
    ids, ratio = [], torch.ones(num_dst, dtype=torch.float64)
    of_row: list[list[int]] = [[] for _ in range(num_dst)]
    for edge, row in enumerate(edge_index[1].tolist()):
        of_row[row].append(edge)
    for row, edges in enumerate(of_row):
        taken = positions(strategy, seed, row, len(edges), width)
        ids += [edges[at] for at in taken]
        ratio[row] = len(edges) / max(len(taken), 1)
    return torch.tensor(ids, dtype=torch.int64), ratio


def reference(edge_index, num_dst, x, w, reduce, strategy, width, seed=0, rescale=True):
    ids, ratio = drawn(edge_index.cpu(), num_dst, strategy, width, seed)
    ids = ids.to(x.device)
    out = reference_spmm(edge_index[:, ids], num_dst, x, None if w is None else w[ids], reduce)
    scale = ratio.to(x.device, x.dtype).view(-1, 1, 1)
    return out * scale if rescale and reduce == "sum" else out


def calls(strategy: str) -> int:
    """So many that draws are kept, if the strategy has none of chance, and weights beside them."""
    return 1 if strategy == "random" else 3


def _inputs(name, shape, weight, dtype, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    x = torch.randn(num_src, *shape, dtype=torch.float64).to(dtype)
    w = {None: None, "scalar": torch.randn(edge_index.shape[1]), "head": torch.randn(edge_index.shape[1], shape[0])}[weight]
    graph = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst))
    return edge_index.to(device), graph, x.to(device), None if w is None else w.to(dtype).to(device)


# ---- results ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weight", [None, "scalar", "head"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduce,rescale", [("sum", True), ("sum", False), ("mean", True)])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name, reduce, rescale, strategy, weight, device):
    edge_index, graph, x, w = _inputs(name, (2, 8), weight, torch.float64, device)
    for width in (1, 3, 64, 5000):
        expected = reference(edge_index, graph.num_dst, x, w, reduce, strategy, width, width, rescale)
        for _ in range(calls(strategy)):
            out = gnnfast.spmm_sampled(graph, x, w, reduce, width=width, strategy=strategy, rescale=rescale, seed=width)
            assert relative_error(out, expected) < 1e-10


@pytest.mark.parametrize("weight", [None, "scalar", "head"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_widths_and_dtypes(dtype, shape, weight, device):
    edge_index, graph, x, w = _inputs("hub", shape, weight, dtype, device)
    # one staging of a warp, several, and rows that four warps share
    for strategy, width in (("random", 20), ("fastrand", 100), ("bucket", 129), ("random", 1000), ("fastrand", 2899)):
        exact = reference(edge_index, 40, x.double(), None if w is None else w.double(), "sum", strategy, width, 7)
        for _ in range(calls(strategy)):
            out = gnnfast.spmm_sampled(graph, x, w, width=width, strategy=strategy, seed=7)
            assert out.dtype == dtype and out.shape == (40, *shape)
            assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("nnz", [577, 1154, 578])
def test_fastrand_where_577_divides_the_degree_repeats_edges(nnz, device):
    src = torch.arange(nnz, device=device)
    graph = Graph.from_edge_index(torch.stack([src, torch.zeros_like(src)]), (nnz, 1))
    x = torch.eye(nnz, device=device, dtype=torch.float64)
    counts = gnnfast.spmm_sampled(graph, x, width=100, strategy="fastrand", rescale=False)[0]
    assert counts.sum() == 100
    different = {577: 1, 1154: 2, 578: 100}[nnz]
    assert (counts > 0).sum() == different and counts.max() == 100 // different


@pytest.mark.parametrize("width", [1, 7, 16, 33])
def test_random_takes_every_edge_with_the_same_probability_and_none_twice(width, device):
    src = torch.arange(50, device=device)
    graph = Graph.from_edge_index(torch.stack([src, torch.zeros_like(src)]), (50, 1))
    x, rounds = torch.eye(50, device=device), 4000
    counts = torch.zeros(50, device=device)
    for seed in range(rounds):
        taken = gnnfast.spmm_sampled(graph, x, width=width, seed=seed, rescale=False)[0]
        assert taken.sum() == width and taken.max() == 1
        counts += taken
    p = width / 50
    assert ((counts / rounds - p).abs() < 5 * (p * (1 - p) / rounds) ** 0.5).all()


def test_more_rows_than_a_grid(device):
    edge_index, num_src, num_dst = many_rows()
    graph = Graph.from_edge_index(edge_index.repeat(1, 2).to(device), (num_src, num_dst))  # each edge twice
    x = torch.randn(num_src, 1, 3, device=device)
    for strategy in ("random", "bucket", "bucket"):
        assert torch.equal(gnnfast.spmm_sampled(graph, x, width=1, strategy=strategy), gnnfast.spmm(graph, x))


# ---- draws that are kept ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["bucket", "fastrand"])
def test_draws_are_kept_and_follow_graph_and_weights(strategy, device):
    edge_index, graph, x, w = _inputs("hub", (1, 16), "scalar", torch.float64, device)

    def check(graph, x, w, edge_index, num_dst):
        out = gnnfast.spmm_sampled(graph, x, w, width=8, strategy=strategy)
        assert relative_error(out, reference(edge_index, num_dst, x, w, "sum", strategy, 8)) < 1e-10

    for change in (False, True):
        if change:
            w.mul_(2)  # in place: weights kept by slots must not be used again
        for _ in range(3):
            check(graph, x, w, edge_index, 40)
    assert any("draws kept" in reason for _, _, reason in gnnfast.report().kernels)
    assert not len(graph.edges.values)  # the drawn ones alone are kept
    kept = graph.draws.get(graph, strategy, 8)
    for _ in range(3):
        check(graph, x, torch.rand_like(w), edge_index, 40)  # other weights each time
    assert graph.draws.get(graph, strategy, 8) is kept
    reverse, y = graph.reverse(), torch.randn(40, 1, 16, device=device, dtype=torch.float64)
    for _ in range(3):
        check(reverse, y, w, edge_index.flip(0), 50)


def test_kept_draws_are_counted(device):
    _, graph, x, _ = _inputs("hub", (1, 4), None, torch.float32, device)
    sizes = []
    for _ in range(3):
        gnnfast.spmm_sampled(graph, x, width=8, strategy="bucket")
        sizes.append(graph.nbytes)
    _, draws = graph.draws.sizes(graph, 8)
    # col and perm of each draw; rowptr and scale of each row; on CUDA a schedule
    assert sizes[1] - sizes[0] >= 8 * draws + 12 * 40 and sizes[2] == sizes[1]


def test_draws_of_few_settings_are_kept(device):
    _, graph, x, _ = _inputs("hub", (1, 4), None, torch.float32, device)
    for width in range(10, 30):
        for _ in range(2):
            gnnfast.spmm_sampled(graph, x, width=width, strategy="bucket")
    assert list(graph.draws.drawn) == [(False, 0, width) for width in range(26, 30)]
    in_use = graph.draws.get(graph, "bucket", 26)
    for width in range(30, 33):
        for _ in range(2):
            gnnfast.spmm_sampled(graph, x, width=width, strategy="bucket")
        assert graph.draws.get(graph, "bucket", 26) is in_use  # the least recently used one goes
    gnnfast.spmm_sampled(graph, x, width=10**6, strategy="bucket")
    gnnfast.spmm_sampled(graph, x, width=10**6, strategy="bucket")
    assert graph.draws.get(graph, "bucket", 26) is in_use and "no node has more than 1000000 edges" in str(gnnfast.report().kernels)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])  # from torch's allocations, and from ours
def test_no_memory_for_draws(error, device, monkeypatch):
    edge_index, graph, x, _ = _inputs("hub", (1, 8), None, torch.float64, device)
    asked = []

    def no_memory(*_):
        asked.append(None)
        raise error("out of memory")

    monkeypatch.setattr(Draws, "_draw", no_memory)
    expected = reference(edge_index, 40, x, None, "sum", "fastrand", 8)
    for _ in range(4):
        assert relative_error(gnnfast.spmm_sampled(graph, x, width=8, strategy="fastrand"), expected) < 1e-10
    assert len(asked) == 1  # not again in every call


def test_deterministic_mode_gives_the_same_bits_in_every_call(device):
    """Two CUDA kernels add in different orders, so that draws must not be kept there."""
    _, graph, x, w = _inputs("hub", (1, 64), "scalar", torch.float32, device)
    torch.use_deterministic_algorithms(True)
    try:
        results = [gnnfast.spmm_sampled(graph, x, w, width=100, strategy="fastrand") for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_kept_draws_in_inference_mode_serve_later_calls(device):
    edge_index, graph, x, _ = _inputs("hub", (1, 8), None, torch.float64, device)
    expected = reference(edge_index, 40, x, None, "sum", "fastrand", 8)
    for _ in range(2):
        with torch.inference_mode():
            gnnfast.spmm_sampled(graph, x, width=8, strategy="fastrand")
    out = gnnfast.spmm_sampled(graph, x, width=8, strategy="fastrand")
    assert relative_error(out, expected) < 1e-10 and not out.is_inference()
    drawn, scale = graph.draws.get(graph, "fastrand", 8)
    assert not any(t.is_inference() for t in (drawn.csr.rowptr, drawn.csr.col, drawn.csr.perm, scale))


def test_non_contiguous_and_misaligned(device):
    edge_index, graph, _, _ = _inputs("random", (1, 8), None, torch.float32, device)
    wide = torch.randn(30, 64, device=device)
    flat = torch.randn(30 * 16 + 1, device=device)[1:].view(30, 16)  # off a 16-byte boundary
    for x in (wide[:, ::3], torch.randn(16, 30, device=device).t(), torch.randn(1, 16, device=device).expand(30, 16), flat):
        out = gnnfast.spmm_sampled(graph, x, width=3, strategy="fastrand")
        expected = reference(edge_index, 30, x.unsqueeze(1).double(), None, "sum", "fastrand", 3).squeeze(1)
        assert relative_error(out, expected) < 1e-6


def test_nan_outside_a_draw_stays_outside(device):
    edge_index, graph, x, _ = _inputs("hub", (1, 20), None, torch.float32, device)
    ids, _ = drawn(edge_index.cpu(), 40, "bucket", 2)
    outside = torch.ones(50, dtype=torch.bool)
    outside[edge_index[0].cpu()[ids]] = False
    x[outside.to(device)] = float("nan")
    assert gnnfast.spmm_sampled(graph, x, width=2, strategy="bucket").isfinite().all() and outside.any()


# ---- gradients --------------------------------------------------------------------------------------------------------------
def _operands(x, w):
    return tuple(t.requires_grad_() for t in (x, w) if t is not None)


@pytest.mark.parametrize("weight", [None, "scalar", "head"])
@pytest.mark.parametrize("reduce,rescale", [("sum", True), ("sum", False), ("mean", True)])
@pytest.mark.parametrize("name", GRAPHS)
def test_gradients_are_those_of_the_same_draw(name, reduce, rescale, weight, device):
    for how in ("coo", "csr", "csc", "reversed"):
        edge_index, graph, x, w = _inputs(name, (2, 6), weight, torch.float64, device)
        if how == "csr":
            csr = graph.csr
            graph = Graph.from_csr(csr.rowptr, csr.col, graph.num_src, csr.perm)
        elif how == "csc":
            csc = graph.csc
            graph = Graph.from_csc(csc.rowptr, csc.col, graph.num_dst, csc.perm)
        elif how == "reversed":
            graph = Graph.from_edge_index(edge_index.flip(0), (graph.num_dst, graph.num_src)).reverse()
        # A graph from CSC has the edges of a row in the order of their sources.
        order = edge_index[0].argsort(stable=True) if how == "csc" else torch.arange(graph.num_edges, device=device)
        operands = _operands(x, w)
        out = gnnfast.spmm_sampled(graph, x, w, reduce, width=3, rescale=rescale, seed=11)
        expected = reference(
            edge_index[:, order], graph.num_dst, x, None if w is None else w[order], reduce, "random", 3, 11, rescale
        )
        assert relative_error(out, expected) < 1e-10
        along = torch.randn_like(out)
        found = torch.autograd.grad(out, operands, along, allow_unused=True)
        for a, b in zip(found, torch.autograd.grad(expected, operands, along, allow_unused=True)):
            b = torch.zeros_like(a) if b is None else b
            assert relative_error(a, b) < 1e-10


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_widths_and_dtypes(dtype, shape, device):
    # The transposed graph has a row that is cut into pieces: all edges of one source.
    edge_index, num_src, num_dst = GRAPHS["hub"]()
    edge_index = edge_index.flip(0)
    graph = Graph.from_edge_index(edge_index.to(device), (num_dst, num_src))
    x, w = torch.randn(num_dst, *shape).to(device, dtype), torch.rand(3000).to(device, dtype)
    operands = _operands(x, w)
    out = gnnfast.spmm_sampled(graph, x, w, width=40, seed=5)
    doubles = tuple(t.detach().double().requires_grad_() for t in operands)
    expected = reference(edge_index.to(device), num_src, *doubles, "sum", "random", 40, 5)
    along = torch.randn(out.shape, device=device).to(dtype)
    for a, b in zip(torch.autograd.grad(out, operands, along), torch.autograd.grad(expected, doubles, along.double())):
        assert a.dtype == dtype and relative_error(a, b) < TOLERANCE[dtype] * 2


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weight", [None, "scalar", "head"])
def test_gradcheck(weight, reduce, device):
    _, graph, x, w = _inputs("random", (2, 2), weight, torch.float64, device)
    operands = _operands(x, w)

    def function(x, w=None):
        return gnnfast.spmm_sampled(graph, x, w, reduce, width=3, seed=1)

    assert torch.autograd.gradcheck(function, operands)
    assert torch.autograd.gradgradcheck(function, operands)


# ---- the op -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("weight", [None, "scalar", "head"])
def test_opcheck(weight, transposed, device):
    _, graph, x, w = _inputs("bipartite", (2, 4), weight, torch.float32, device)
    x = torch.randn(graph.num_dst if transposed else graph.num_src, 8, device=device)
    _operands(x, w)
    args = (*graph.draws.args(graph, csc=True), None, w, x, 2, RANDOM, 9, False, not transposed, transposed)
    torch.library.opcheck(torch.ops.gnnfast.spmm_sampled.default, args)
    if not transposed:
        a = torch.randn(graph.num_dst, 8, device=device, requires_grad=True)
        heads = 1 if w is None or w.dim() == 1 else 2
        torch.library.opcheck(
            torch.ops.gnnfast.sddmm_sampled.default, (*graph.draws.args(graph, csc=True), a, x, heads, 2, RANDOM, 9)
        )


def test_opcheck_draw(device):
    _, graph, _, _ = _inputs("bipartite", (1, 1), None, torch.float32, device)
    draws = graph.csr.rowptr.diff().clamp(max=2)
    rowptr = torch.cat([draws.new_zeros(1), draws.cumsum(0, dtype=torch.int32)])
    torch.library.opcheck(torch.ops.gnnfast.draw.default, (graph.csr.rowptr, rowptr, int(draws.sum()), 2, 1))


def test_the_same_bits_every_time(device):
    _, graph, x, w = _inputs("hub", (1, 64), "scalar", torch.float32, device)
    x.requires_grad_()

    def both():
        out = gnnfast.spmm_sampled(graph, x, w, width=500, seed=1)
        return out, *torch.autograd.grad(out, x, out)

    first = both()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, both()))


def test_any_width_is_accepted(device):
    _, graph, x, _ = _inputs("hub", (1, 8), None, torch.float32, device)
    assert relative_error(gnnfast.spmm_sampled(graph, x, width=2**70), gnnfast.spmm(graph, x)) < 1e-6


def test_draws_follow_torchs_generator(device):
    _, graph, x, _ = _inputs("hub", (1, 8), None, torch.float32, device)
    torch.manual_seed(1)
    first, second = (gnnfast.spmm_sampled(graph, x, width=10) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, gnnfast.spmm_sampled(graph, x, width=10))
    assert not torch.equal(first, second)


def test_compiles_with_a_seed(device):
    _, graph, x, w = _inputs("hub", (1, 8), "scalar", torch.float32, device)
    x.requires_grad_()
    args = graph.draws.args(graph, csc=True)

    def function(x, w):
        return torch.ops.gnnfast.spmm_sampled(*args, None, w, x.squeeze(1), 10, RANDOM, 3, False, True, False).relu()

    expected = function(x, w)
    out = torch.compile(function, fullgraph=True)(x, w)
    assert relative_error(out, expected) < 1e-6
    (a,), (b,) = (torch.autograd.grad(t.sum(), x) for t in (out, expected))
    assert relative_error(a, b) < 1e-6


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"width": 0}, ValueError, "width must be an integer of at least 1, got 0"),
        ({"width": -3}, ValueError, "got -3"),
        ({"width": 2.5}, TypeError, "width must be an integer, got float 2.5"),
        ({"width": True}, TypeError, "got bool True"),
        ({"seed": 1.5}, TypeError, "seed must be an integer, got float 1.5"),
        ({"seed": 2**64}, ValueError, "seed must be an integer of 64 bits"),
        ({"strategy": "first"}, ValueError, "strategy must be one of bucket, fastrand, random, got 'first'"),
        ({"reduce": "max"}, ValueError, "reduce must be one of sum, mean, got 'max'"),
        ({"strategy": "bucket", "grad": True}, ValueError, "'bucket' has no gradient; use 'random'"),
        ({"strategy": "fastrand", "grad": True}, ValueError, "'fastrand' has no gradient; use 'random'"),
        ({"weight": torch.ones(3)}, ValueError, "weight must have shape"),
    ],
)
def test_bad_input(change, error, message, device):
    _, graph, x, _ = _inputs("random", (1, 8), None, torch.float32, device)
    given = {"width": 4} | change
    x.requires_grad_(given.pop("grad", False))
    with pytest.raises(error, match=message):
        gnnfast.spmm_sampled(graph, x, **given)
