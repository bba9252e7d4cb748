"""Several reductions with one gather against torch's scatter, their gradients, and opcheck."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, many_rows, relative_error

from gnnfast import Graph
from gnnfast.dispatch import edges, several
from gnnfast.types import KINDS, MOST_KINDS

USUAL = ("mean", "min", "max", "std")
SETS = [USUAL, ("sum",), ("var",), ("max", "sum", "max"), ("std", "var", "min", "sum", "mean", "max"), ("min",)]
WIDE = [torch.float64, torch.float32]


def by_edges(messages, dst, rows, kinds):
    """As PyG's aggregations have it."""
    index = dst.long()[:, None].expand_as(messages)

    def scattered(kind, of=messages):
        how = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}[kind]
        return of.new_zeros(rows, of.shape[1]).scatter_reduce(0, index, of, how, include_self=False)

    def made(kind):
        if kind not in ("var", "std"):
            return scattered(kind)
        variance = scattered("mean", messages * messages) - scattered("mean").square()
        if kind == "var":
            return variance
        root = variance.clamp(min=1e-5).sqrt()
        return root.masked_fill(root <= 1e-5**0.5, 0.0)

    return torch.cat(list(map(made, kinds)), 1)


def fused(graph, x, shift, kinds):
    return several.reduce_shifted(graph, x, shift, kinds, "test")


def of_messages(graph, edge_index, messages, shift, kinds):
    return several.reduce_messages(messages, shift, edges.Ends(edge_index[1], edge_index[0], lambda: graph), kinds)


def made(name, width, dtype, device, ids=torch.int64):
    edge_index, num_src, num_dst = GRAPHS[name]()
    edge_index = edge_index.to(device, ids)
    x = torch.randn(num_src, width, device=device, dtype=dtype).requires_grad_()
    shift = torch.randn(num_dst, width, device=device, dtype=dtype).requires_grad_()
    return edge_index, Graph.from_edge_index(edge_index, (num_src, num_dst)), x, shift


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("kinds", SETS)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name, kinds, messages, ids, device):
    for dtype, width in [*((torch.float64, w) for w in (1, 5, 64, 300)), (torch.float32, 33), (torch.float32, 128)]:
        edge_index, graph, x, shift = made(name, width, dtype, device, ids)
        if messages:
            x = torch.randn(edge_index.shape[1], width, device=device, dtype=dtype, requires_grad=True)
        exact = [t.detach().double().requires_grad_() for t in (x, shift)]
        of_edge = exact[0] if messages else exact[0][edge_index[0].long()]
        expected = by_edges(of_edge + exact[1][edge_index[1].long()], edge_index[1], graph.num_dst, kinds)
        out = of_messages(graph, edge_index, x, shift, kinds) if messages else fused(graph, x, shift, kinds)
        # Variances in float32 cancel, and their roots divide by what is left.
        tolerance = 1e-3 if dtype is torch.float32 and {"var", "std"} & {*kinds} else 10 * TOLERANCE[dtype]
        assert relative_error(out, expected) < tolerance
        grad = torch.randn_like(expected)
        if dtype is torch.float64 or not {"std"} & {*kinds}:
            found = torch.autograd.grad(out, (x, shift), grad.to(dtype))
            for ours, theirs in zip(found, torch.autograd.grad(expected, exact, grad)):
                # The gradient of a shift that cancels is 0 but for rounding.
                assert relative_error(ours, theirs) < max(tolerance, 1e-8) or (ours - theirs).abs().max() < 1e-8
        with torch.no_grad():
            again = of_messages(graph, edge_index, x, shift, kinds) if messages else fused(graph, x, shift, kinds)
            assert torch.equal(again, out)


@pytest.mark.parametrize("messages", [False, True])
def test_ties_share_and_so_does_a_zero(messages, device):
    edge_index, graph, *_ = made("random", 6, torch.float64, device)
    rows = edge_index.shape[1] if messages else 30
    x = torch.randint(-1, 2, (rows, 6), device=device).double().requires_grad_()
    shift = torch.randint(-1, 2, (30, 6), device=device).double().requires_grad_()
    of_edge = x if messages else x[edge_index[0]]
    expected = by_edges(of_edge + shift[edge_index[1]], edge_index[1], 30, ("max", "min"))
    out = of_messages(graph, edge_index, x, shift, ("max", "min")) if messages else fused(graph, x, shift, ("max", "min"))
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad(out, (x, shift), grad), torch.autograd.grad(expected, (x, shift), grad)):
        assert relative_error(ours, theirs) < 1e-12


def test_nan_and_infinity(device):
    edge_index, graph, x, shift = made("random", 6, torch.float64, device)
    with torch.no_grad():
        x[2], x[5, 0], x[7] = torch.nan, torch.inf, -torch.inf
    expected = by_edges(x[edge_index[0]] + shift[edge_index[1]], edge_index[1], 30, ("max", "min", "sum", "mean"))
    out = fused(graph, x, shift, ("max", "min", "sum", "mean"))
    torch.testing.assert_close(out, expected, equal_nan=True)
    finite = torch.where(expected.isfinite(), torch.randn_like(expected), 0.0)
    for ours, theirs in zip(torch.autograd.grad(out, (x, shift), finite), torch.autograd.grad(expected, (x, shift), finite)):
        torch.testing.assert_close(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize("kinds", [("sum", "mean"), USUAL])
@pytest.mark.parametrize("width", [3, 8])
def test_derivatives(width, kinds, device):
    edge_index, graph, x, shift = made("self_loops_and_duplicates", width, torch.float64, device)
    torch.autograd.gradcheck(lambda *t: fused(graph, *t, kinds), (x, shift))
    torch.autograd.gradgradcheck(lambda *t: fused(graph, *t, kinds), (x, shift))
    messages = torch.randn(edge_index.shape[1], width, device=device, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *t: of_messages(graph, edge_index, *t, kinds), (messages, shift))
    torch.autograd.gradgradcheck(lambda *t: of_messages(graph, edge_index, *t, kinds), (messages, shift))


@pytest.mark.parametrize("needs", [0, 1])
@pytest.mark.parametrize("messages", [False, True])
def test_one_gradient_alone(messages, needs, device):
    edge_index, graph, x, shift = made("random", 6, torch.float64, device)
    x = torch.randn(edge_index.shape[1], 6, device=device, dtype=torch.float64) if messages else x
    given = [t.detach().requires_grad_(nth == needs) for nth, t in enumerate((x, shift))]
    run = (lambda: of_messages(graph, edge_index, *given, USUAL)) if messages else (lambda: fused(graph, *given, USUAL))
    of_edge = given[0] if messages else given[0][edge_index[0]]
    expected = by_edges(of_edge + given[1][edge_index[1]], edge_index[1], 30, USUAL)
    for create_graph in (False, True):
        (ours,) = torch.autograd.grad(run().square().sum(), given[needs], create_graph=create_graph)
        (theirs,) = torch.autograd.grad(expected.square().sum(), given[needs], retain_graph=True)
        assert relative_error(ours, theirs) < 1e-9


def test_rows_that_are_not_contiguous_or_aligned(device):
    _, graph, x, shift = made("random", 16, torch.float32, device)
    expected = fused(graph, x, shift, USUAL)
    shifted = torch.zeros(x.numel() + 1, device=device)[1:].view_as(x).copy_(x.detach())
    assert torch.equal(fused(graph, shifted, shift.detach().t().contiguous().t(), USUAL), expected)


def test_without_a_shift(device):
    _, graph, x, shift = made("random", 8, torch.float64, device)
    args, numbers = graph.args(csc=False), [KINDS[k] for k in USUAL]
    found = torch.ops.gnnfast.multi_reduce(*args, x.detach(), None, numbers, False)[0]
    assert torch.equal(found, fused(graph, x, torch.zeros_like(shift), USUAL))


@pytest.mark.parametrize("kinds", [USUAL, ("sum",), ("max",)])
def test_ops(kinds, device):
    edge_index, graph, x, shift = made("random", 8, torch.float32, device)
    args, numbers, ops = graph.args(csc=True), [KINDS[k] for k in kinds], torch.ops.gnnfast
    # A variance near 0 is no place to compare roots that two compilers made.
    torch.library.opcheck(ops.multi_reduce.default, (*args, x, shift, numbers, True))
    out, kept, ties = (t.detach() for t in ops.multi_reduce(*args, x, shift, numbers, True))
    given = args.rowptr, torch.randn_like(out), out, kept, ties, numbers
    for need_shift in (True, False):
        torch.library.opcheck(ops.multi_reduce_shares.default, (*given, need_shift))
    shares = ops.multi_reduce_shares(*given, True)[0]
    torch.library.opcheck(ops.multi_reduce_backward.default, (*args.transposed, x.detach(), shares, numbers))
    messages = torch.randn(edge_index.shape[1], 8, device=device)
    torch.library.opcheck(ops.multi_reduce_edges.default, (edge_index[1], messages, shares, numbers))


def test_many_rows(device):
    edge_index, num_src, num_dst = many_rows()
    edge_index = edge_index.to(device)
    graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
    x, shift = (torch.randn(n, 2, device=device, requires_grad=True) for n in (num_src, num_dst))
    out = fused(graph, x, shift, ("max", "mean"))
    expected = by_edges(x[edge_index[0]] + shift[edge_index[1]], edge_index[1], num_dst, ("max", "mean"))
    assert relative_error(out, expected) < 1e-6
    grad = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad(out, (x, shift), grad), torch.autograd.grad(expected, (x, shift), grad)):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("width", [0, 4])
def test_no_edges_no_nodes_no_features(width, device):
    for num_src, num_dst in ((3, 4), (0, 4), (3, 0), (0, 0)):
        none = torch.empty(2, 0, dtype=torch.int64, device=device)
        graph = Graph.from_edge_index(none, (num_src, num_dst))
        x, shift = (torch.randn(n, width, device=device, requires_grad=True) for n in (num_src, num_dst))
        out = fused(graph, x, shift, USUAL)
        assert out.shape == (num_dst, 4 * width) and not out.any()
        of_x, of_shift = torch.autograd.grad(out.sum(), (x, shift))
        assert of_x.shape == x.shape and of_shift.shape == shift.shape and not of_x.any() and not of_shift.any()


def test_what_is_refused(device):
    _, graph, x, shift = made("random", 8, torch.float32, device)
    op, args = torch.ops.gnnfast.multi_reduce.default, graph.args(csc=False)
    for wrong, match in (
        ((x.half(), None, [0], False), "float32 and float64"),
        ((x, shift[:-1], [0], False), "shift"),
        ((x, shift.double(), [0], False), "shift"),
        ((x, shift, [6], False), "reduction"),
        ((x, shift, [], False), "reductions"),
        ((x, shift, [0] * (MOST_KINDS + 1), False), "reductions"),
    ):
        with pytest.raises(RuntimeError, match=match):
            op(*args, *wrong)
