"""Sums of neighbours weighted by the softmax of their own features against PyG's formula edge by edge, gradients, and opcheck."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, many_rows, relative_error

from gnnfast import Graph
from gnnfast.dispatch import edges, softened
from gnnfast.dispatch.softened import Temperature

TEMPERATURES = ["one", "negative", "for each feature"]


def by_edges(messages, dst, rows, temperature):
    """As PyG's SoftmaxAggregation has it."""
    scores = messages * (temperature.scale if temperature.t is None else temperature.t)
    index = dst.long()[:, None].expand_as(scores)
    zeros = scores.new_zeros(rows, scores.shape[1])
    most = zeros.scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
    weights = (scores - most.gather(0, index)).exp()
    weights = weights / zeros.scatter_add(0, index, weights).gather(0, index)
    return zeros.scatter_add(0, index, weights * messages)


def fused(graph, edge_index, x, temperature, messages):
    if messages:
        return softened.reduce_messages(x, temperature, edges.Ends(edge_index[1], edge_index[0], lambda: graph))
    return softened.reduce_rows(graph, x, temperature, "test")


def made(name, width, dtype, device, messages=False, ids=torch.int64, of=GRAPHS):
    edge_index, num_src, num_dst = of[name]()
    edge_index = edge_index.to(device, ids)
    x = 3 * torch.randn(edge_index.shape[1] if messages else num_src, width, device=device, dtype=dtype)
    return edge_index, Graph.from_edge_index(edge_index, (num_src, num_dst)), x.requires_grad_()


def temperature_of(which, x):
    if which != "for each feature":
        return Temperature({"one": 1.0, "negative": -0.7}[which])
    return Temperature(t=torch.randn(x.shape[1], device=x.device, dtype=x.dtype).requires_grad_())


def exactly(x, temperature):
    x = x.detach().double().requires_grad_()
    return x, temperature if temperature.t is None else Temperature(t=temperature.t.detach().double().requires_grad_())


def leaves(x, temperature):
    return [x] if temperature.t is None else [x, temperature.t]


def check(edge_index, graph, x, temperature, messages):
    tolerance = 10 * TOLERANCE[x.dtype]
    exact, of_exact = exactly(x, temperature)
    expected = by_edges(exact if messages else exact[edge_index[0].long()], edge_index[1], graph.num_dst, of_exact)
    out = fused(graph, edge_index, x, temperature, messages)
    assert out.dtype is x.dtype and relative_error(out, expected) < tolerance
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(out, leaves(x, temperature), grad.to(x.dtype))
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves(exact, of_exact), grad)):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < 10 * tolerance or (ours - theirs).norm() < tolerance * grad.norm()
    with torch.no_grad():
        assert torch.equal(fused(graph, edge_index, x, temperature, messages), out)


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("which", TEMPERATURES)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name, which, messages, ids, device):
    for dtype, width in [*((torch.float64, w) for w in (1, 5, 64, 300)), (torch.float32, 33), (torch.float32, 128)]:
        edge_index, graph, x = made(name, width, dtype, device, messages, ids)
        check(edge_index, graph, x, temperature_of(which, x), messages)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("messages", [False, True])
def test_large_scores_neither_overflow_nor_lose_digits(messages, dtype, device):
    edge_index, graph, x = made("hub", 8, dtype, device, messages)
    offset, size = (1e4, 2e3) if dtype is torch.float64 else (100, 40)  # such that what cancels leaves digits to compare
    check(edge_index, graph, (offset + x.detach()).requires_grad_(), Temperature(1.0), messages)
    check(edge_index, graph, (size * torch.randn_like(x.detach())).requires_grad_(), Temperature(-5.0), messages)


@pytest.mark.parametrize("messages", [False, True])
def test_nan_and_infinity(messages, device):
    edge_index, graph, x = made("random", 6, torch.float64, device, messages)
    with torch.no_grad():
        x[2, 1], x[5, 0], x[7] = torch.nan, torch.inf, -torch.inf
    expected = by_edges(x if messages else x[edge_index[0]], edge_index[1], 30, Temperature())
    torch.testing.assert_close(fused(graph, edge_index, x, Temperature(), messages), expected, equal_nan=True)


@pytest.mark.parametrize("degree", [1, 6, 40, 3000])
@pytest.mark.parametrize("t", [1.0, 2.0])
@pytest.mark.parametrize("width", [3, 8])
def test_masks_of_the_least_number(width, t, degree, device):
    """Which minus infinity times the temperature may be; the others decide, wherever in the row they are."""
    x = torch.full((degree + 2, width), torch.finfo(torch.float32).min, device=device)
    for place in (0, degree // 2, degree):
        given = x.clone()
        given[place : place + 2] = torch.tensor([[1.0], [2.0]], device=device)
        edge_index = torch.stack([torch.arange(degree + 2), torch.zeros(degree + 2, dtype=torch.int64)]).to(device)
        graph = Graph.from_edge_index(edge_index, (degree + 2, 1))
        expected = by_edges(given, edge_index[1], 1, Temperature(t))
        assert expected.isfinite().all()
        for messages in (False, True):
            torch.testing.assert_close(fused(graph, edge_index, given, Temperature(t), messages), expected)


@pytest.mark.parametrize("which", TEMPERATURES)
@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("width", [3, 8])
def test_derivatives(width, messages, which, device):
    edge_index, graph, x = made("self_loops_and_duplicates", width, torch.float64, device, messages)
    temperature = temperature_of(which, x)

    def run(x, *t):
        return fused(graph, edge_index, x, Temperature(t=t[0]) if t else temperature, messages)

    torch.autograd.gradcheck(run, leaves(x, temperature))
    torch.autograd.gradgradcheck(run, leaves(x, temperature))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("nth", [0, 1])
@pytest.mark.parametrize("messages", [False, True])
def test_one_gradient_alone(messages, nth, create_graph, device):
    edge_index, graph, x = made("random", 6, torch.float64, device, messages)
    t = torch.randn(6, device=device, dtype=torch.float64)
    x, t = x.detach().requires_grad_(nth == 0), t.requires_grad_(nth == 1)
    out = fused(graph, edge_index, x, Temperature(t=t), messages)
    expected = by_edges(x if messages else x[edge_index[0]], edge_index[1], 30, Temperature(t=t))
    (ours,) = torch.autograd.grad(out.square().sum(), [(x, t)[nth]], create_graph=create_graph)
    (theirs,) = torch.autograd.grad(expected.square().sum(), [(x, t)[nth]])
    assert relative_error(ours, theirs) < 1e-9


def test_rows_that_are_not_contiguous_or_aligned(device):
    edge_index, graph, x = made("random", 16, torch.float32, device)
    t = torch.randn(17, device=device)
    expected = fused(graph, edge_index, x.detach(), Temperature(t=t[1:].clone()), False)
    shifted = torch.zeros(x.numel() + 1, device=device)[1:].view_as(x).copy_(x.detach())
    assert torch.equal(fused(graph, edge_index, shifted, Temperature(t=t[1:]), False), expected)
    assert torch.equal(fused(graph, edge_index, x.detach().t().contiguous().t(), Temperature(t=t[1:]), False), expected)
    one = fused(graph, edge_index, x.detach(), Temperature(t=torch.tensor([0.5], device=device).expand(16)), False)
    assert torch.equal(one, fused(graph, edge_index, x.detach(), Temperature(0.5), False))


@pytest.mark.parametrize("messages", [False, True])
def test_many_rows(messages, device):
    check(*made("many", 2, torch.float64, device, messages, of={"many": many_rows}), Temperature(), messages)


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("width", [0, 4])
def test_no_edges_no_nodes_no_features(width, messages, device):
    for num_src, num_dst, count in ((3, 4, 0), (0, 4, 0), (3, 0, 0), (0, 0, 0), (3, 4, 2)):
        edge_index = torch.zeros(2, count, dtype=torch.int64, device=device)
        x = torch.randn(count if messages else num_src, width, device=device, requires_grad=True)
        graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
        temperature = temperature_of("for each feature", x)
        out = fused(graph, edge_index, x, temperature, messages)
        expected = by_edges(x if messages else x[edge_index[0]], edge_index[1], num_dst, temperature)
        torch.testing.assert_close(out, expected)
        for ours, theirs in zip(*(torch.autograd.grad(o.sum(), leaves(x, temperature)) for o in (out, expected))):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("learned", [False, True])
def test_ops(learned, device):
    edge_index, graph, x = made("random", 8, torch.float32, device)
    ops, args, x = torch.ops.gnnfast, graph.args(csc=True), x.detach()
    t = torch.randn(8, device=device) if learned else None
    torch.library.opcheck(ops.softmax_reduce.default, (*args, x, t, 0.5, False))
    given = [x.clone().requires_grad_(), t if t is None else t.clone().requires_grad_()]
    torch.library.opcheck(ops.softmax_reduce.default, (*args, *given, 0.5, True))
    out, most, total = ops.softmax_reduce(*args, x, t, 0.5, True)
    rest = t, 0.5, most, torch.randn_like(out) / total, out, learned
    torch.library.opcheck(ops.softmax_reduce_backward.default, (*args.transposed, x, *rest))
    torch.library.opcheck(ops.softmax_reduce_edges.default, (edge_index[1], x[edge_index[0]], *rest))


def test_what_is_refused(device):
    edge_index, graph, x = made("bipartite", 8, torch.float32, device)
    ops, args, x = torch.ops.gnnfast, graph.args(csc=True), x.detach()
    t = torch.ones(8, device=device)
    for given, match in (
        ((x.half(), None), "float32 and float64"),
        ((x[:, 0], None), "x must have 2 dimensions"),
        ((x, t[1:]), "t must have size 8"),
        ((x, t.double()), "t must have dtype"),
        ((x, t.view(1, 8)), "t must have 1 dimension"),
    ):
        with pytest.raises(RuntimeError, match=match):
            ops.softmax_reduce(*args, *given, 1.0, False)
    out, most, total = ops.softmax_reduce(*args, x, None, 1.0, True)
    for kept, match in (
        ((most, total[1:], out), "share"),
        ((most, total, out.double()), "out"),
        ((most[:, 1:], total, out), "most"),
    ):
        with pytest.raises(RuntimeError, match=match):
            ops.softmax_reduce_backward(*args.transposed, x, None, 1.0, *kept, False)
    with pytest.raises(RuntimeError, match="x must have size"):
        ops.softmax_reduce_edges(edge_index[1], x[:1], None, 1.0, most, total, out, False)
    with pytest.raises(RuntimeError, match="train=False"):
        leaf = x.clone().requires_grad_()
        ops.softmax_reduce(*args, leaf, None, 1.0, False)[0].sum().backward()
