"""Attention as one op against softmax and sum edge by edge, its gradients and dropout, and opcheck."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, many_rows, relative_error

import gnnfast
from gnnfast import Graph
from gnnfast.dispatch import execute

_ops = torch.ops.gnnfast
# Heads and width of one: whole vectors, several slabs, one feature, no power of two.
SHAPES = [(1, 64), (1, 160), (4, 32), (8, 8), (3, 40), (1, 1), (2, 5), (33, 2), (5, 0)]
SLOPE = 0.2


def _inputs(name, heads, width, dtype, device, scale=1.0):
    edge_index, num_src, num_dst = many_rows() if name == "many_rows" else GRAPHS[name]()
    edge_index = edge_index.to(device)
    graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
    made = [torch.randn(n, k, dtype=torch.float64) for n, k in ((num_dst, heads), (num_src, heads), (num_src, heads * width))]
    made[0], made[1] = made[0] * scale, made[1] * scale
    return edge_index, graph, [t.to(dtype).to(device).requires_grad_() for t in made]


def _expected(edge_index, num_dst, dst, src, x, slope, keep=None):
    """``[num_dst, F]``, edge by edge in the dtype of the operands."""
    (j, i), heads = edge_index, dst.shape[1]
    score = torch.nn.functional.leaky_relu(dst[i] + src[j], slope)
    index = i[:, None].expand_as(score)
    most = torch.full_like(dst, -torch.inf).scatter_reduce(0, index, score.detach(), "amax")
    share = (score - most[i]).exp()
    share = share / torch.zeros_like(dst).index_add(0, i, share)[i]
    if keep is not None:
        share = share * keep
    messages = share[:, :, None] * x[j].view(j.numel(), heads, x.shape[1] // heads)
    return x.new_zeros(num_dst, x.shape[1]).index_add(0, i, messages.flatten(1))


def _close(found, expected, tolerance):
    """Or both nothing but rounding: to add to all scores of a row changes nothing."""
    return relative_error(found, expected) < tolerance or (found - expected).norm() < 10 * tolerance * (1 + expected.numel()) ** 0.5


@pytest.mark.parametrize("heads, width", SHAPES)
@pytest.mark.parametrize("name", [*GRAPHS, "many_rows"])
def test_graphs_and_shapes(name, heads, width, device):
    if name == "many_rows" and heads * width > (64 if device.type == "cuda" else 16):
        pytest.skip("narrow features show it as well, in less time")
    edge_index, graph, leaves = _inputs(name, heads, width, torch.float64, device)
    found, expected = (
        execute.fused_attention(graph, leaves[2], *leaves[:2], SLOPE, place="test"),
        _expected(edge_index, graph.num_dst, *leaves, SLOPE),
    )
    assert relative_error(found, expected) < 1e-11
    with torch.no_grad():
        assert torch.equal(found, execute.fused_attention(graph, leaves[2], *leaves[:2], SLOPE, place="test"))
    seed = torch.randn_like(found)
    for f, e in zip(torch.autograd.grad(found, leaves, seed), torch.autograd.grad(expected, leaves, seed)):
        assert _close(f, e, 1e-10)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("slope", [1.0, 0.0, -0.5])
@pytest.mark.parametrize("name", ["hub", "random"])
def test_dtypes_and_slopes(name, slope, dtype, device):
    edge_index, graph, leaves = _inputs(name, 4, 16, dtype, device)
    found = execute.fused_attention(graph, leaves[2], *leaves[:2], slope, place="test")
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = _expected(edge_index, graph.num_dst, *exact, slope)
    assert found.dtype == dtype and relative_error(found, expected) < TOLERANCE[dtype]
    seed = torch.randn_like(found)
    grads = torch.autograd.grad(found, leaves, seed), torch.autograd.grad(expected, exact, seed.double())
    for f, e in zip(*grads):
        assert _close(f, e, 20 * TOLERANCE[dtype])


@pytest.mark.parametrize("dropout", [0.25, 0.6])
@pytest.mark.parametrize("heads, width", [(1, 64), (8, 8), (3, 5), (32, 1)])
def test_dropout(heads, width, dropout, device):
    """What is kept is what attention_keep says, forward, backward and to the second, and comes back with torch's seed."""
    edge_index, graph, leaves = _inputs("random", heads, width, torch.float64, device)
    dst, src, x = leaves

    def run():
        return execute.fused_attention(graph, x, dst, src, SLOPE, dropout, place="test")

    torch.manual_seed(5)
    found = run()
    torch.manual_seed(5)
    seed = torch.empty(1, dtype=torch.int64, device=device).random_()
    kept = _ops.attention_keep(seed, graph.num_edges, heads, dropout).double()
    expected = _expected(edge_index, graph.num_dst, *leaves, SLOPE, kept * (65536 / round((1 - dropout) * 65536)))
    assert relative_error(found, expected) < 1e-11
    grads = [torch.autograd.grad(out.sin().sum(), leaves, create_graph=True) for out in (found, expected)]
    torch.manual_seed(5)
    again = run()
    assert torch.equal(again, found) and not torch.equal(run(), found)
    for p, f, e in zip(torch.autograd.grad(again.sin().sum(), leaves), *grads):
        assert _close(f, e, 1e-10) and _close(p, e, 1e-10)
    seconds = [torch.autograd.grad(sum(g.cos().sum() for g in pair), leaves) for pair in grads]
    assert all(_close(f, e, 1e-9) for f, e in zip(*seconds))
    with gnnfast.override(dropout="framework"):
        torch.manual_seed(5)
        framework = execute.attention(graph, x, dst, src, SLOPE, dropout, place="test")[0]
    torch.manual_seed(5)
    mask = torch.nn.functional.dropout(torch.ones(graph.num_edges, heads, dtype=torch.float64, device=device), dropout)
    assert relative_error(framework, _expected(edge_index, graph.num_dst, *leaves, SLOPE, mask)) < 1e-11


def test_what_dropout_keeps(device):
    """Each edge and head alike and none like another: means and correlations within five standard deviations."""
    edges, heads, dropout = 100_000, 16, 0.3
    draws = [_ops.attention_keep(torch.tensor([s], device=device), edges, heads, dropout).double() for s in (1, 2)]
    for kept in draws:
        assert abs(float(kept.mean()) - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
        assert (kept.mean(0) - 0.7).abs().max() < 5 * (0.21 / edges) ** 0.5
    centred = [(kept - 0.7) / 0.21**0.5 for kept in draws]
    bound = 5 / edges**0.5
    assert float((centred[0] * centred[1]).mean(0).abs().max()) < bound
    correlation = centred[0].t() @ centred[0] / edges - torch.eye(heads, device=device)
    assert float(correlation.fill_diagonal_(0).abs().max()) < bound
    assert float((centred[0][1:] * centred[0][:-1]).mean(0).abs().max()) < bound
    cpu = _ops.attention_keep(torch.tensor([1]), edges, heads, dropout)
    assert torch.equal(cpu, draws[0].cpu().bool())


@pytest.mark.parametrize("name", ["random", "isolated", "bipartite", "self_loops_and_duplicates"])
def test_gradcheck(name, device):
    _, graph, leaves = _inputs(name, 2, 3, torch.float64, device)

    def run(dst, src, x):
        x = x.sin()
        src = src + x.view(-1, 2, 3).sum(-1)  # the score depends on x, as in a layer
        return execute.fused_attention(graph, x, dst, src, SLOPE, place="test")

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True, nondet_tol=1e-10)  # atomics
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True, nondet_tol=1e-10)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True), (False, False, False)])
def test_some_gradients(needed, device):
    edge_index, graph, leaves = _inputs("random", 2, 8, torch.float64, device)
    leaves = [t.detach().requires_grad_(need) for t, need in zip(leaves, needed)]
    wanted = [t for t in leaves if t.requires_grad]
    found = execute.fused_attention(graph, leaves[2], *leaves[:2], SLOPE, place="test")
    expected = _expected(edge_index, graph.num_dst, *leaves, SLOPE)
    assert found.requires_grad == bool(wanted) and relative_error(found, expected) < 1e-11
    for f, e in zip(*(torch.autograd.grad(out.sin().sum(), wanted) if wanted else () for out in (found, expected))):
        assert _close(f, e, 1e-10)


def test_backward_twice(device):
    _, graph, leaves = _inputs("hub", 2, 8, torch.float32, device)
    out = execute.fused_attention(graph, leaves[2], *leaves[:2], SLOPE, place="test")
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert all(_close(a, b, 1e-5) for a, b in zip(first, torch.autograd.grad(out.sum(), leaves)))


def test_extreme_scores(device):
    edge_index, graph, leaves = _inputs("random", 2, 8, torch.float32, device, scale=1e4)
    dst, src, _ = leaves
    ones = torch.ones(graph.num_src, 16, device=device, requires_grad=True)
    found = execute.fused_attention(graph, ones, dst, src, SLOPE, place="test")
    some = edge_index[1].bincount(minlength=graph.num_dst) > 0
    assert (found[some] - 1).abs().max() < 1e-6 and not found[~some].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), (dst, src, ones)))
    masked = src.detach().clone()
    masked[::3] = -torch.inf
    masked[edge_index[0][edge_index[1] == edge_index[1, 0]]] = -torch.inf  # a row of nothing else
    for special in (None, torch.inf, torch.nan):
        if special is not None:
            masked[1] = special
        found = execute.fused_attention(graph, leaves[2], dst, masked, 1.0, place="test")
        expected = _expected(edge_index, graph.num_dst, dst.double(), masked.double(), leaves[2].double(), 1.0)
        assert torch.equal(found.isnan(), expected.isnan())
        assert relative_error(found.nan_to_num(), expected.nan_to_num()) < 1e-5


def test_a_million_edges_in_a_row(device):
    edges = 1_000_003
    edge_index = torch.stack([torch.arange(edges) % 1000, torch.full((edges,), 5)]).to(device)
    graph = Graph.from_edge_index(edge_index, (1000, 7))
    leaves = [torch.randn(n, k, device=device, requires_grad=True) for n, k in ((7, 2), (1000, 2), (1000, 8))]
    found = execute.fused_attention(graph, leaves[2], *leaves[:2], SLOPE, place="test")
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = _expected(edge_index, 7, *exact, SLOPE)
    assert relative_error(found, expected) < 1e-5
    seed = torch.randn_like(found)
    for f, e in zip(torch.autograd.grad(found, leaves, seed), torch.autograd.grad(expected, exact, seed.double())):
        assert _close(f, e, 1e-4)


@pytest.mark.parametrize("deterministic", [True, False])
def test_from_run_to_run(deterministic, device):
    """By default what destinations get on a GPU is summed by atomics."""
    _, graph, leaves = _inputs("hub", 4, 16, torch.float32, device)
    runs = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(3):
            out = execute.fused_attention(graph, leaves[2], *leaves[:2], SLOPE, place="test")
            runs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        for i, (a, b) in enumerate(zip(run, runs[0])):
            assert torch.equal(a, b) or (not deterministic and i == 1 and _close(a, b, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads, width", [(1, 64), (4, 8), (3, 5)])
def test_sums_by_atomics_and_in_order(heads, width, dtype, device):
    _, graph, leaves = _inputs("hub", heads, width, dtype, device)
    dst, src, x = (t.detach() for t in leaves)
    args = graph.args(csc=True)
    out, stats = _ops.attention(*args, dst, src, x, SLOPE, 0.0, None, True)
    given = dst, src, x, out, stats, torch.randn_like(out), SLOPE, 0.0, None
    both = [_ops.attention_backward(*args, *given, atomics) for atomics in (True, False)]
    assert all(a.dtype == dtype and _close(a, b, TOLERANCE[dtype]) for a, b in zip(*both))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("train", [True, False])
def test_opcheck(train, dropout, device):
    _, graph, leaves = _inputs("random", 2, 8, torch.float64, device)
    if not train:
        leaves = [t.detach() for t in leaves]
    seed = torch.tensor([3], device=device) if dropout else None
    torch.library.opcheck(_ops.attention.default, (*graph.args(csc=True), *leaves, SLOPE, dropout, seed, train))
    torch.library.opcheck(_ops.attention_keep.default, (torch.tensor([3], device=device), 7, 2, dropout))


def test_compiled_with_scores_in_another_order(device):
    """What is compiled reckons with the strides that kernels give."""
    _, graph, (dst, src, x) = _inputs("random", 2, 8, torch.float32, device)
    dst, src = (t.detach().t().contiguous().t().requires_grad_() for t in (dst, src))
    _, stats = _ops.attention(*graph.args(csc=True), dst, src, x, SLOPE, 0.0, None, True)
    given = dst.detach(), src.detach(), x.detach(), x.new_zeros(graph.num_dst, 16), stats, x.new_ones(graph.num_dst, 16)
    torch.library.opcheck(_ops.attention_backward.default, (*graph.args(csc=True), *given, SLOPE, 0.0, None, False))


def test_operands_at_any_address(device):
    """A view that begins at no multiple of 16 bytes."""
    edge_index, graph, leaves = _inputs("random", 1, 64, torch.float32, device)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(_expected(edge_index, graph.num_dst, *exact, SLOPE).sin().sum(), exact)
    moved = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view_as(t).requires_grad_() for t in leaves]
    found = execute.fused_attention(graph, moved[2], *moved[:2], SLOPE, place="test")
    for f, e in zip(torch.autograd.grad(found.sin().sum(), moved), expected):
        assert _close(f, e, 1e-4)
    query, key, value = (torch.randn(n * 64 + 1, device=device)[1:].view(n, 64) for n in (graph.num_dst, *[graph.num_src] * 2))
    for out in (
        execute.dot_attention(graph, query, key, value, 1, 0.1, place="test")[0],
        execute.gatv2_attention(graph, query, key, torch.ones(65, device=device)[1:], 1, SLOPE, place="test"),
    ):
        assert out is not None and out.isfinite().all()


def test_arguments_that_do_not_fit(device):
    _, graph, leaves = _inputs("random", 2, 8, torch.float32, device)
    dst, src, x = (t.detach() for t in leaves)
    args, seed = graph.args(csc=True), torch.tensor([3], device=device)
    for given, message in (
        ((dst[1:], src, x, SLOPE, 0.0, None, False), "dst must have size"),
        ((dst, src[1:], x, SLOPE, 0.0, None, False), "src must have size"),
        ((dst, src[:, :1], x, SLOPE, 0.0, None, False), "src must have size 2"),
        ((dst, src, x[:, :15], SLOPE, 0.0, None, False), "2 heads do not divide the 15 features"),
        ((dst.double(), src, x, SLOPE, 0.0, None, False), "dst must have dtype"),
        ((dst, src, x, SLOPE, 0.5, None, False), "dropout needs a seed"),
        ((dst, src, x, SLOPE, 1.5, seed, False), "dropout must be in"),
        ((dst, src, x, SLOPE, 0.5, seed.int(), False), "seed must have dtype"),
        ((dst, src, x, SLOPE, 0.5, seed.repeat(2), False), "seed must have one element"),
    ):
        with pytest.raises(RuntimeError, match=message):
            _ops.attention(*args, *given)


def test_features_that_are_not_finite_stay_where_they_are_used(device):
    """A node without edges that holds NaN has no say, and gets no gradient."""
    edge_index = torch.tensor([[0, 1, 1], [1, 0, 1]], device=device)  # nothing leaves or enters node 2
    graph = Graph.from_edge_index(edge_index, 3)
    torch.manual_seed(0)
    leaves = [torch.randn(3, k, dtype=torch.float64, device=device) for k in (2, 2, 4)]
    for t in leaves:
        t[2] = torch.nan
    for t in leaves:
        t.requires_grad_()
    found = execute.fused_attention(graph, leaves[2], *leaves[:2], SLOPE, place="test")
    grads = torch.autograd.grad(found.square().sum() + (found[2] * torch.nan).sum() * 0, leaves)
    assert found.isfinite().all() and all(g.isfinite().all() and not g[2].any() for g in grads)
    att = torch.randn(4, dtype=torch.float64, device=device, requires_grad=True)
    query, key = (torch.cat([t, t], 1).detach().requires_grad_() for t in leaves[:2])
    found = execute.gatv2_attention(graph, query, key, att, 2, SLOPE, place="test")
    grads = torch.autograd.grad(found.square().sum(), (query, key, att))
    assert found.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_dropout_of_a_captured_graph(device):
    """Each replay draws anew."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a CUDA device")
    _, graph, leaves = _inputs("random", 2, 8, torch.float32, device)
    dst, src, x = (t.detach() for t in leaves)

    def run():
        return execute.fused_attention(graph, x, dst, src, SLOPE, 0.5, place="test")

    run()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = run()
    draws = []
    for _ in range(2):
        captured.replay()
        draws.append(out.clone())
    assert not torch.equal(*draws) and all(t.isfinite().all() for t in draws)
