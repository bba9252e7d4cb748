"""Sums of relu(node + edge) against the same edge by edge, their gradients, and opcheck."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, many_rows, relative_error

from gnnfast import Graph
from gnnfast.dispatch import execute


def by_edges(edge_index, num_dst, x, w):
    messages = (x[edge_index[0]] + w).relu()
    return messages.new_zeros(num_dst, x.shape[1]).index_add(0, edge_index[1], messages)


def fused(graph, x, w):
    return execute.edge_relu(graph, x, w, place="test")


def made(name, width, dtype, device, ids=torch.int64):
    edge_index, num_src, num_dst = GRAPHS[name]()
    edge_index = edge_index.to(device, ids)
    x = torch.randn(num_src, width, device=device).to(dtype).requires_grad_()
    w = torch.randn(edge_index.shape[1], width, device=device).to(dtype).requires_grad_()
    return edge_index, Graph.from_edge_index(edge_index, (num_src, num_dst)), x, w


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 4, 7, 8, 33, 64, 100, 300])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name, width, dtype, device):
    edge_index, graph, x, w = made(name, width, dtype, device)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    out, expected = fused(graph, x, w), by_edges(edge_index, graph.num_dst, *exact)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    grad = torch.randn_like(expected).to(dtype)
    found = torch.autograd.grad(out, (x, w), grad)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for ours, theirs in zip(found, wanted):
        assert ours.dtype is dtype
        assert relative_error(ours, theirs) < TOLERANCE[dtype]
    with torch.no_grad():
        assert torch.equal(fused(graph, x, w), out)


@pytest.mark.parametrize("needs", ["x", "w"])
def test_one_gradient_alone(needs, device):
    edge_index, graph, x, w = made("random", 12, torch.float64, device, torch.int32)
    x, w = (t.detach().requires_grad_(name == needs) for name, t in (("x", x), ("w", w)))
    (ours,) = torch.autograd.grad(fused(graph, x, w).square().sum(), x if needs == "x" else w)
    (theirs,) = torch.autograd.grad(by_edges(edge_index, 30, x, w).square().sum(), x if needs == "x" else w)
    assert relative_error(ours, theirs) < 1e-12


def test_zeros_get_no_gradient_and_nan_passes(device):
    edge_index, graph, x, w = made("random", 6, torch.float32, device)
    with torch.no_grad():
        w[::3] = -x[edge_index[0, ::3]]  # exactly 0
        w[1::7] = torch.nan
        x[2] = torch.inf
    out, expected = fused(graph, x, w), by_edges(edge_index, 30, x, w)
    torch.testing.assert_close(out, expected, equal_nan=True)
    grad = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad(out, (x, w), grad), torch.autograd.grad(expected, (x, w), grad)):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_operands_may_be_written_into_before_the_backward_pass(device):
    edge_index, graph, x, w = made("random", 6, torch.float64, device)
    a, b = x * 1, w * 1
    out = fused(graph, a, b)
    a.zero_(), b.zero_()
    expected = by_edges(edge_index, 30, x, w)
    for ours, theirs in zip(torch.autograd.grad(out.sum(), (x, w)), torch.autograd.grad(expected.sum(), (x, w))):
        assert relative_error(ours, theirs) < 1e-12


def test_rows_that_are_not_contiguous_or_aligned(device):
    edge_index, graph, x, w = made("random", 16, torch.float32, device)
    expected = by_edges(edge_index, 30, x, w)
    shifted = torch.zeros(w.numel() + 1, device=device)[1:].view_as(w).copy_(w.detach())
    turned = x.detach().t().contiguous().t()
    assert relative_error(fused(graph, turned, shifted), expected) < 1e-6


@pytest.mark.parametrize("width", [3, 8])
def test_derivatives(width, device):
    _, graph, x, w = made("self_loops_and_duplicates", width, torch.float64, device)
    torch.autograd.gradcheck(lambda *t: fused(graph, *t), (x, w))
    torch.autograd.gradgradcheck(lambda *t: fused(graph, *t), (x, w))


def test_op(device):
    _, graph, x, w = made("random", 8, torch.float32, device)
    args = graph.args(csc=True)
    torch.library.opcheck(torch.ops.gnnfast.edge_relu.default, (*args, x, w, True))
    kept = torch.ops.gnnfast.edge_relu(*args, x, w, True)[1].detach()
    grad = torch.randn(30, 8, device=device, requires_grad=True)
    for need_w in (True, False):
        torch.library.opcheck(torch.ops.gnnfast.edge_relu_backward.default, (*args.transposed, kept, grad, need_w))


def test_many_rows(device):
    edge_index, num_src, num_dst = many_rows()
    edge_index = edge_index.to(device)
    graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
    x, w = torch.randn(num_src, 2, device=device), torch.randn(edge_index.shape[1], 2, device=device)
    assert relative_error(fused(graph, x, w), by_edges(edge_index, num_dst, x, w)) < 1e-6


def test_what_is_refused(device):
    _, graph, x, w = made("random", 8, torch.float32, device)
    op, args = torch.ops.gnnfast.edge_relu.default, graph.args(csc=False)
    with pytest.raises(RuntimeError, match="w"):
        op(*args, x, w[:-1], False)
    with pytest.raises(RuntimeError, match="w"):
        op(*args, x, w[:, :-1], False)
    with pytest.raises(RuntimeError, match="w"):
        op(*args, x, w.double(), False)
