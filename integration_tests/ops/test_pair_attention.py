"""Attention with dot products and with GATv2's scores against softmax and sum edge by edge, and opcheck."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, many_rows, relative_error

import gnnfast
from gnnfast import Graph
from gnnfast.dispatch import execute

_ops = torch.ops.gnnfast
# Heads and width of one: whole vectors, a padded head, several slabs, one feature.
SHAPES = [(1, 64), (1, 128), (4, 32), (8, 8), (3, 40), (1, 1), (2, 5), (33, 2), (5, 0)]
SCORES = ["dot", "gatv2", "gatv2 edges"]
SLOPE = {"dot": 0.35, "gatv2": 0.2, "gatv2 edges": 0.3}


def _sizes(graph, score):
    """The rows of the operands: query, key, and value, or att and what edges have; none of att."""
    third = {"dot": [(graph.num_src,)], "gatv2": [()], "gatv2 edges": [(), (graph.num_edges,)]}[score]
    return [(graph.num_dst,), (graph.num_src,), *third]


def _inputs(name, score, heads, width, dtype, device, scale=1.0):
    edge_index, num_src, num_dst = many_rows() if name == "many_rows" else GRAPHS[name]()
    edge_index = edge_index.to(device)
    graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
    made = [torch.randn(*n, heads * width, dtype=torch.float64) for n in _sizes(graph, score)]
    made[0] = made[0] * scale
    return edge_index, graph, [t.to(dtype).to(device).requires_grad_() for t in made]


def _run(graph, score, heads, leaves, dropout=0.0, slope=None):
    slope = SLOPE[score] if slope is None else slope
    if score == "dot":
        return execute.dot_attention(graph, *leaves, heads, slope, dropout, place="test")[0]
    edge = leaves[3] if score == "gatv2 edges" else None
    return execute.gatv2_attention(graph, *leaves[:3], heads, slope, dropout, edge=edge, place="test")


def _expected(edge_index, num_dst, score, heads, leaves, keep=None, slope=None):
    """``[num_dst, F]``, edge by edge in the dtype of the operands."""
    slope = SLOPE[score] if slope is None else slope
    (j, i), (query, key, third, *edge), width = edge_index, leaves, leaves[1].shape[1] // heads
    both = query[i] + key[j] + edge[0] if edge else query[i] + key[j]
    raw = query[i] * key[j] * slope if score == "dot" else torch.nn.functional.leaky_relu(both, slope) * third
    s = raw.view(j.numel(), heads, width).sum(-1)
    index = i[:, None].expand_as(s)
    most = s.new_full((num_dst, heads), -torch.inf).scatter_reduce(0, index, s.detach(), "amax")
    share = (s - most[i]).exp()
    share = share / s.new_zeros(num_dst, heads).index_add(0, i, share)[i]
    if keep is not None:
        share = share * keep
    value = third if score == "dot" else key
    messages = share[:, :, None] * value[j].view(j.numel(), heads, width)
    return key.new_zeros(num_dst, key.shape[1]).index_add(0, i, messages.flatten(1))


def _close(found, expected, tolerance):
    return relative_error(found, expected) < tolerance or (found - expected).norm() < 10 * tolerance * (1 + expected.numel()) ** 0.5


@pytest.mark.parametrize("heads, width", [(1, 47), (3, 41), (1, 121)])
@pytest.mark.parametrize("score", [*SCORES, "additive"])
def test_heads_of_no_whole_vectors(score, heads, width, device, monkeypatch):
    """As of 47 classes: rows are widened for the kernels."""
    if device.type == "cpu":  # where kernels take any width
        monkeypatch.setattr(execute, "held_width", lambda x, heads: width + 3)
    of = "dot" if score == "additive" else score
    edge_index, graph, leaves = _inputs("random", of, heads, width, torch.float32, device)
    gnnfast.clear_report()
    if score == "additive":
        made = (t.detach().view(-1, heads, width).sum(-1).requires_grad_() for t in leaves[:2])
        leaves = [*made, leaves[2]]
        found = execute.attention(graph, leaves[2], *leaves[:2], SLOPE["gatv2"], place="test")[0]
        (j, i), (dst, src, x) = edge_index, [t.double() for t in leaves]
        s = torch.nn.functional.leaky_relu(dst[i] + src[j], SLOPE["gatv2"])
        share = (s - s.max().detach()).exp()
        share = share / share.new_zeros(graph.num_dst, heads).index_add(0, i, share)[i]
        messages = (share[:, :, None] * x[j].view(j.numel(), heads, width)).flatten(1)
        expected = x.new_zeros(graph.num_dst, heads * width).index_add(0, i, messages)
    else:
        found = _run(graph, score, heads, leaves)
        expected = _expected(edge_index, graph.num_dst, score, heads, [t.double() for t in leaves])
    assert relative_error(found, expected) < 1e-5
    kernels = {kernel for _, kernel, _ in gnnfast.report().kernels}
    assert kernels == {"attention"} or (score == "additive" and device.type == "cpu")
    seed = torch.randn_like(found)
    for f, e in zip(torch.autograd.grad(found, leaves, seed), torch.autograd.grad(expected, leaves, seed.double())):
        assert _close(f, e, 1e-4)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads, width", SHAPES)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_and_shapes(name, heads, width, score, device):
    edge_index, graph, leaves = _inputs(name, score, heads, width, torch.float64, device)
    found = _run(graph, score, heads, leaves)
    expected = _expected(edge_index, graph.num_dst, score, heads, leaves)
    fused = device.type == "cpu" or width <= 64  # what a warp holds of float64
    assert fused or score == "dot" or found is None
    if found is None:
        assert not fused
        return
    assert relative_error(found, expected) < 1e-11
    with torch.no_grad():
        again = _run(graph, score, heads, leaves)
        assert torch.equal(found, again) if fused else relative_error(found, again) < 1e-12
    seed = torch.randn_like(found)
    for f, e in zip(torch.autograd.grad(found, leaves, seed), torch.autograd.grad(expected, leaves, seed)):
        assert _close(f, e, 1e-10)


@pytest.mark.parametrize("score", SCORES)
def test_more_rows_than_a_grid(score, device):
    heads, width = (2, 4) if device.type == "cuda" else (1, 2)  # on a CPU there is no grid, and edge by edge takes long
    edge_index, graph, leaves = _inputs("many_rows", score, heads, width, torch.float32, device)
    found, expected = _run(graph, score, heads, leaves), _expected(edge_index, graph.num_dst, score, heads, leaves)
    assert relative_error(found, expected) < 1e-6
    seed = torch.randn_like(found)
    for f, e in zip(torch.autograd.grad(found, leaves, seed), torch.autograd.grad(expected, leaves, seed)):
        assert _close(f, e, 1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads, width", [(4, 16), (1, 128), (2, 40)])
@pytest.mark.parametrize("name", ["hub", "random"])
def test_dtypes(name, heads, width, score, dtype, device):
    edge_index, graph, leaves = _inputs(name, score, heads, width, dtype, device)
    found, exact = _run(graph, score, heads, leaves), [t.detach().double().requires_grad_() for t in leaves]
    if found is None:
        wide = device.type == "cuda" and dtype is torch.float64 and width > 64
        assert wide or (score == "gatv2 edges" and dtype.itemsize == 2)
        return
    expected = _expected(edge_index, graph.num_dst, score, heads, exact)
    assert found.dtype == dtype and relative_error(found, expected) < 2 * TOLERANCE[dtype]
    seed = torch.randn_like(found)
    grads = torch.autograd.grad(found, leaves, seed), torch.autograd.grad(expected, exact, seed.double())
    for f, e in zip(*grads):
        assert _close(f, e, 20 * TOLERANCE[dtype])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads, width", [(1, 64), (8, 8), (3, 5)])
def test_dropout(heads, width, score, device):
    """What is kept is what attention_keep says, forward, backward and to the second, and comes back with torch's seed."""
    edge_index, graph, leaves = _inputs("random", score, heads, width, torch.float64, device)
    torch.manual_seed(5)
    found = _run(graph, score, heads, leaves, 0.4)
    torch.manual_seed(5)
    seed = torch.empty(1, dtype=torch.int64, device=device).random_()
    kept = _ops.attention_keep(seed, graph.num_edges, heads, 0.4).double() * (65536 / round(0.6 * 65536))
    expected = _expected(edge_index, graph.num_dst, score, heads, leaves, kept)
    assert relative_error(found, expected) < 1e-11
    grads = [torch.autograd.grad(out.sin().sum(), leaves, create_graph=True) for out in (found, expected)]
    torch.manual_seed(5)
    again = _run(graph, score, heads, leaves, 0.4)
    assert torch.equal(again, found)
    for p, f, e in zip(torch.autograd.grad(again.sin().sum(), leaves), *grads):
        assert _close(f, e, 1e-10) and _close(p, e, 1e-10)
    seconds = [torch.autograd.grad(sum(g.cos().sum() for g in pair), leaves) for pair in grads]
    assert all(_close(f, e, 1e-9) for f, e in zip(*seconds))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["random", "isolated", "bipartite", "self_loops_and_duplicates"])
def test_gradcheck(name, score, device):
    _, graph, leaves = _inputs(name, score, 2, 3, torch.float64, device)

    def run(query, key, third, *edge):
        key = key.sin()
        if score == "dot":
            third = third + key  # one depends on another, as in a layer
        return _run(graph, score, 2, (query, key, third, *edge))

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    # Second derivatives are torch's own sums, which vary from run to run on a GPU.
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True, nondet_tol=1e-10)


@pytest.mark.parametrize("score", SCORES)
def test_some_gradients(score, device):
    for needed in range(16 if score == "gatv2 edges" else 8):
        edge_index, graph, leaves = _inputs("random", score, 2, 8, torch.float64, device)
        leaves = [t.detach().requires_grad_(bool(needed >> i & 1)) for i, t in enumerate(leaves)]
        wanted = [t for t in leaves if t.requires_grad]
        found, expected = _run(graph, score, 2, leaves), _expected(edge_index, graph.num_dst, score, 2, leaves)
        assert found.requires_grad == bool(wanted) and relative_error(found, expected) < 1e-11
        for f, e in zip(*(torch.autograd.grad(out.sin().sum(), wanted) if wanted else () for out in (found, expected))):
            assert _close(f, e, 1e-10)


@pytest.mark.parametrize("score", SCORES)
def test_extreme_scores(score, device):
    edge_index, graph, leaves = _inputs("random", score, 2, 8, torch.float32, device, scale=1e4)
    query, key, *_ = leaves
    some = edge_index[1].bincount(minlength=graph.num_dst) > 0
    if score == "dot":
        ones = torch.ones(graph.num_src, 16, device=device, requires_grad=True)
        found = _run(graph, score, 2, (query, key, ones))
        assert (found[some] - 1).abs().max() < 1e-6 and not found[~some].any()
    found = _run(graph, score, 2, leaves)
    assert found.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), leaves))
    small = [t.detach() / 1e4 if t is query else t.detach().clone() for t in leaves]
    for special in (torch.inf, torch.nan):
        small[0][edge_index[1, 0], 3] = special
        found = _run(graph, score, 2, small)
        expected = _expected(edge_index, graph.num_dst, score, 2, [t.double() for t in small])
        assert torch.equal(found.isnan(), expected.isnan())
        assert relative_error(found.nan_to_num(), expected.nan_to_num()) < 1e-5


@pytest.mark.parametrize("score", SCORES)
def test_a_long_row_and_from_run_to_run(score, device):
    edges = 300_003
    edge_index = torch.stack([torch.arange(edges) % 1000, torch.full((edges,), 5)]).to(device)
    graph = Graph.from_edge_index(edge_index, (1000, 7))
    leaves = [torch.randn(*n, 8, device=device, requires_grad=True) for n in _sizes(graph, score)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found, expected = _run(graph, score, 2, leaves), _expected(edge_index, 7, score, 2, exact)
    assert relative_error(found, expected) < 1e-5
    seed = torch.randn_like(found)
    first = torch.autograd.grad(found, leaves, seed, retain_graph=True)
    for f, e in zip(first, torch.autograd.grad(expected, exact, seed.double())):
        assert _close(f, e, 1e-4)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(found, leaves, seed)))
    assert torch.equal(found, _run(graph, score, 2, leaves))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_opcheck(dropout, score, device):
    _, graph, (query, key, third, *edge) = _inputs("random", score, 2, 8, torch.float64, device)
    seed = torch.tensor([3], device=device) if dropout else None
    operands = (query, key, third, None, None) if score == "dot" else (query, key, None, third, edge[0] if edge else None)
    torch.library.opcheck(_ops.pair_attention.default, (*graph.args(csc=True), *operands, 2, 0.2, dropout, seed, True))


def test_arguments_that_do_not_fit(device):
    _, graph, leaves = _inputs("random", "dot", 2, 8, torch.float32, device)
    q, k, v = (t.detach() for t in leaves)
    args, att, edge = graph.args(csc=True), torch.ones(16, device=device), torch.ones(graph.num_edges, 16, device=device)
    for given, message in (
        ((q[1:], k, v, None, None, 2), "query must have size"),
        ((q, k, v[1:], None, None, 2), "value must have size"),
        ((q, k, v, att, None, 2), "exactly one of att and value"),
        ((q, k, None, None, None, 2), "exactly one of att and value"),
        ((q, k, v, None, None, 3), "3 heads do not divide the 16 features"),
        ((q, k, None, att[1:], None, 2), "att must be contiguous"),
        ((q, k, None, att.double(), None, 2), "att must have dtype"),
        ((q[:, 1:], k, v, None, None, 2), "query must have size 16"),
        ((q, k, v, None, edge, 2), "edge goes with att"),
        ((q, k, None, att, edge[1:], 2), "edge must have size"),
        ((q.half(), k.half(), None, att.half(), edge.half(), 2), "edge goes with att, in float32 and float64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            _ops.pair_attention(*args, *given, 0.2, 0.0, None, False)


def test_what_asks_for_coefficients_gets_them(device):
    _, graph, leaves = _inputs("random", "dot", 2, 8, torch.float64, device)
    out, alpha = execute.dot_attention(graph, *leaves, 2, 0.35, place="test", weights=True)
    assert alpha.shape == (graph.num_edges, 2) and relative_error(out, _run(graph, "dot", 2, leaves)) < 1e-12
    with gnnfast.override(dropout="framework"):
        torch.manual_seed(1)
        first = _run(graph, "dot", 2, leaves, 0.5)
    torch.manual_seed(1)
    kept = torch.nn.functional.dropout(alpha, 0.5)
    assert relative_error(first, execute.aggregate(graph, leaves[2], kept, "sum")) < 1e-12


@pytest.mark.parametrize("name", ["random", "bipartite", "no_edges", "isolated"])
@pytest.mark.parametrize("width", [8, 1, 0])
def test_public(name, width, device):
    """gnnfast.attention is what execute does, in the shapes that it documents."""
    heads, dtype = 3, torch.float64
    for score in SCORES:
        edge_index, graph, leaves = _inputs(name, score, heads, width, dtype, device)
        shaped = [t.view(-1, heads, width) if t.dim() == 2 and width else t.view(*t.shape[:-1], heads, width) for t in leaves]
        if score == "dot":
            found = gnnfast.attention(graph, *shaped, scale=SLOPE["dot"])
            if width:
                default = gnnfast.attention(graph, shaped[0] * width**0.5 * SLOPE["dot"], *shaped[1:])
                assert relative_error(default, found) < 1e-12
        else:
            edge = shaped[3] if score == "gatv2 edges" else None
            found = gnnfast.attention(graph, *shaped[:2], score="gatv2", att=shaped[2], edge=edge, slope=SLOPE[score])
            parts = gnnfast.functional._gatv2_in_parts(graph, *shaped[:3], edge, SLOPE[score], 0.0)
            assert relative_error(parts.view_as(found), found) < 1e-12
        assert found.shape == (graph.num_dst, heads, width)
        expected = _expected(edge_index, graph.num_dst, score, heads, leaves)
        assert relative_error(found.flatten(1), expected) < 1e-11
    edge_index, graph, (_, _, value) = _inputs(name, "dot", heads, width, dtype, device)
    dst, src = (torch.randn(n, heads, dtype=dtype, device=device) for n in (graph.num_dst, graph.num_src))
    found = gnnfast.attention(graph, dst, src, value.view(graph.num_src, heads, width), score="additive", slope=0.3)
    alpha = execute.softmax(graph, None, dst, src, 0.3, place="test")
    assert relative_error(found.flatten(1), execute.aggregate(graph, value, alpha, "sum")) < 1e-11


def test_public_arguments(device):
    _, graph, leaves = _inputs("random", "dot", 2, 4, torch.float32, device)
    dst, src, value = (t.detach().view(-1, 2, 4) for t in leaves)
    for arguments, named, message in (
        ((dst, src), {}, "value must be given with score 'dot'"),
        ((dst, src, value), {"score": "gatv2", "att": value[0]}, "value must not be given"),
        ((dst, src), {"score": "gatv2"}, "att must be given"),
        ((dst, src, value), {"att": value[0]}, "att must not be given"),
        ((dst, src, value), {"edge": value}, "edge must not be given with score 'dot'"),
        ((dst, src), {"score": "gatv2", "att": value[0], "edge": value[1:]}, "edge must be torch.float32 of shape"),
        ((dst, src, value), {"score": "cosine"}, "score must be one of dot, additive, gatv2"),
        ((dst, src, value), {"dropout": 1.5}, r"dropout must be in \[0, 1\]"),
        ((dst[:, :1], src, value), {}, "dst must be torch.float32 of shape"),
        ((dst, src, value), {"score": "additive"}, "dst must be torch.float32 of shape"),
        ((dst, src, value[:, 0]), {}, "value must have shape"),
        ((dst, src.double(), value), {}, "src must be torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            gnnfast.attention(graph, *arguments, **named)
    with pytest.raises(TypeError, match="scale must be a number"):
        gnnfast.attention(graph, dst, src, value, scale="large")
    assert not gnnfast.attention(graph, dst, src, value, dropout=1.0).any()
