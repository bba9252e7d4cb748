"""SpMM against gather-scatter in float64, its gradients, and opcheck."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, many_rows, reference_spmm, relative_error

import gnnfast
from gnnfast import Graph
from gnnfast.dispatch.execute import aggregate

DTYPES = list(TOLERANCE)
REDUCTIONS = ["sum", "mean", "max", "min"]
# H, D: widths that fill vectors, do not, are odd, exceed one pass of a warp, and none at all
SHAPES = [(1, 16), (1, 1), (1, 2), (3, 3), (1, 7), (2, 10), (1, 13), (1, 100), (1, 130), (4, 8), (3, 5), (8, 1), (2, 64), (1, 0)]
KERNELS = ["gas", "gar"]


def _inputs(name, shape, weight, dtype, device, index_dtype=torch.int64, grad=False):
    edge_index, num_src, num_dst = GRAPHS[name]()
    x = torch.randn(num_src, *shape, dtype=torch.float64).to(dtype)
    w = {None: None, "scalar": torch.randn(edge_index.shape[1]), "head": torch.randn(edge_index.shape[1], shape[0])}[weight]
    w = None if w is None else w.to(dtype).to(device)
    graph = Graph.from_edge_index(edge_index.to(device, index_dtype), (num_src, num_dst))
    return edge_index.to(device), graph, x.to(device), w


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weight", [None, "scalar", "head"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name, reduce, weight, kernel, device):
    edge_index, graph, x, w = _inputs(name, (2, 8), weight, torch.float64, device)
    with gnnfast.override(kernel=kernel):
        out = gnnfast.spmm(graph, x, w, reduce)
    assert relative_error(out, reference_spmm(edge_index, graph.num_dst, x, w, reduce)) < 1e-10
    (kernel_used,) = {k[1] for k in gnnfast.report().kernels}
    assert kernel_used == f"{kernel} {reduce}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce,weight", [("sum", None), ("sum", "scalar"), ("sum", "head"), ("mean", "scalar"), ("max", "head")])
def test_widths_and_dtypes(reduce, weight, dtype, shape, kernel, device):
    edge_index, graph, x, w = _inputs("hub", shape, weight, dtype, device, torch.int32)
    with gnnfast.override(kernel=kernel):
        out = gnnfast.spmm(graph, x, w, reduce)
    assert out.dtype == dtype
    exact = reference_spmm(edge_index, graph.num_dst, x.double(), None if w is None else w.double(), reduce)
    error = relative_error(out, exact)
    framework = relative_error(reference_spmm(edge_index, graph.num_dst, x, w, reduce), exact)
    assert error < TOLERANCE[dtype]
    if dtype in (torch.float16, torch.bfloat16):
        assert error <= framework * 1.05 + 1e-6  # never worse than the framework's own


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("width", [3, 8, 33, 100])
@pytest.mark.parametrize("weight", [None, "scalar"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_cpu_equals_a_sequential_reduction_bit_for_bit(reduce, weight, width, kernel):
    """Of more edges than are picked at a time, and by more threads than one."""
    edge_index = torch.stack([torch.randint(300, (5000,)), torch.randint(200, (5000,))])
    x, w = torch.randn(300, 1, width), torch.randn(5000) if weight else None
    with gnnfast.override(kernel=kernel):
        out = gnnfast.spmm(Graph.from_edge_index(edge_index, (300, 250)), x, w, reduce)  # of which 50 rows have no edge
    assert torch.equal(out, reference_spmm(edge_index, 250, x, w, reduce))


# Heads of whole vectors, of half ones, and rows of more than fit the registers, for each instruction set.
HEADS = [(h, d) for h in (1, 2, 4, 8) for d in (2, 4, 8, 16, 32, 64)] + [(3, 16), (5, 16), (16, 16), (12, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads,width", HEADS)
@pytest.mark.parametrize("name", ["random", "hub", "isolated", "one_edge"])
def test_heads_and_their_gradients(name, heads, width, dtype, device):
    edge_index, graph, x, w = _inputs(name, (heads, width), "head", dtype, device)
    with gnnfast.override(kernel="gar"):
        out = gnnfast.spmm(graph, x, w)
        if device.type == "cpu":
            assert torch.equal(out, reference_spmm(edge_index, graph.num_dst, x, w, "sum"))
        x, w, grad = x.requires_grad_(), w.requires_grad_(), torch.randn_like(out)
        found = torch.autograd.grad(gnnfast.spmm(graph, x, w), (x, w), grad)
        dots = gnnfast.sddmm(graph, grad, x.detach())
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = torch.autograd.grad(reference_spmm(edge_index, graph.num_dst, *wide, "sum"), wide, grad.double())
    for f, e in zip((*found, dots), (*expected, expected[1])):
        assert relative_error(f, e) < TOLERANCE[dtype]


def test_more_rows_than_a_grid(device):
    edge_index, num_src, num_dst = many_rows()
    graph = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst))
    x = torch.randn(num_src, 1, 3, device=device)
    for kernel in KERNELS:
        with gnnfast.override(kernel=kernel):
            out = gnnfast.spmm(graph, x)
        assert relative_error(out, reference_spmm(edge_index.to(device), num_dst, x, None, "sum")) < 1e-6


def test_wide_features(device):
    # More feature blocks than one pass of a warp covers, by far.
    edge_index, graph, x, w = _inputs("random", (1, 4099), "scalar", torch.float32, device)
    assert relative_error(gnnfast.spmm(graph, x, w), reference_spmm(edge_index, 30, x, w, "sum")) < 1e-5


def test_non_contiguous_and_broadcast(device):
    edge_index, graph, _, _ = _inputs("random", (1, 8), None, torch.float32, device)
    wide = torch.randn(30, 64, device=device)
    for x in (
        wide[:, ::3],
        wide[:, 5:21],
        torch.randn(16, 30, device=device).t(),
        torch.randn(1, 16, device=device).expand(30, 16),
    ):
        out = gnnfast.spmm(graph, x)
        assert relative_error(out, reference_spmm(edge_index, 30, x.unsqueeze(1), None, "sum").squeeze(1)) < 1e-6
    w = torch.randn(400, device=device)[::2]
    out = gnnfast.spmm(graph, wide, w)
    assert relative_error(out, reference_spmm(edge_index, 30, wide.unsqueeze(1), w, "sum").squeeze(1)) < 1e-5
    # A slice that starts off a 16-byte boundary.
    flat = torch.randn(30 * 16 + 1, device=device)[1:].view(30, 16)
    assert (
        relative_error(gnnfast.spmm(graph, flat), reference_spmm(edge_index, 30, flat.unsqueeze(1), None, "sum").squeeze(1)) < 1e-6
    )


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_and_infinity_survive(reduce, kernel, device):
    edge_index, graph, x, _ = _inputs("random", (1, 4), None, torch.float32, device)
    x[3, 0, 0], x[4, 0, 1], x[5, 0, 2] = float("nan"), float("inf"), float("-inf")
    w = torch.ones(graph.num_edges, device=device)
    w[::5] = 0.0  # 0 * inf is NaN
    with gnnfast.override(kernel=kernel):
        out = gnnfast.spmm(graph, x, w, reduce)
    expected = reference_spmm(edge_index, 30, x, w, reduce)
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["no_edges", "isolated", "self_loops_and_duplicates", "hub", "bipartite"])
@pytest.mark.parametrize("weight", [None, "scalar", "head"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients(reduce, weight, name, kernel, device):
    edge_index, graph, x, w = _inputs(name, (2, 6), weight, torch.float64, device)
    operands = [t.requires_grad_() for t in (x, w) if t is not None]
    grad = torch.randn(graph.num_dst, 2, 6, dtype=torch.float64, device=device)
    with gnnfast.override(kernel=kernel):
        found = torch.autograd.grad(gnnfast.spmm(graph, x, w, reduce), operands, grad)
    expected = torch.autograd.grad(reference_spmm(edge_index, graph.num_dst, x, w, reduce), operands, grad)
    for f, e in zip(found, expected):
        assert f.shape == e.shape and relative_error(f, e) < 1e-10


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (1, 160)])
def test_many_edges(shape, reduce, device):
    """From 2^17 edges on weights and their gradients are put in order by kernels of their own."""
    edge_index = torch.randint(0, 400, (2, 150_000), device=device)
    x = torch.randn(400, *shape, dtype=torch.float64, device=device, requires_grad=True)
    w = torch.randn(150_000, shape[0], dtype=torch.float64, device=device, requires_grad=True)
    graph, grad = Graph.from_edge_index(edge_index, 400), torch.randn(400, *shape, dtype=torch.float64, device=device)
    expected = reference_spmm(edge_index, 400, x, w, reduce)
    gradients = torch.autograd.grad(expected, (x, w), grad)
    with torch.no_grad(), gnnfast.override(kernel="gar"):
        assert relative_error(gnnfast.spmm(graph, x, w, reduce), expected) < 1e-10
    out = gnnfast.spmm(graph, x, w, reduce)
    assert relative_error(out, expected) < 1e-10
    for f, e in zip(torch.autograd.grad(out, (x, w), grad), gradients):
        assert relative_error(f, e) < 1e-10


@pytest.mark.parametrize("width", [4, 64, 128, 200, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_weight_gradient_widths(kernel, heads, dtype, width, device):
    """Fused where the row fits a warp, two kernels elsewhere; weights alone take SDDMM."""
    edge_index, graph, x, w = _inputs("hub", (heads, width // heads), "head", dtype, device)
    grad = torch.randn(graph.num_dst, heads, width // heads, dtype=torch.float64).to(device, dtype)
    exact = torch.autograd.grad(
        reference_spmm(edge_index, graph.num_dst, xd := x.double().requires_grad_(), wd := w.double().requires_grad_(), "sum"),
        (wd, xd),
        grad.double(),
    )
    for operands in ((w, x), (w,)):
        for t in (w, x):
            t.requires_grad_(any(t is o for o in operands))
        with gnnfast.override(kernel=kernel):
            found = torch.autograd.grad(gnnfast.spmm(graph, x, w), operands, grad)
        for f, e in zip(found, exact):
            assert relative_error(f, e) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_ties(reduce, device):
    """PyG shares the gradient evenly among edges that attain the maximum, DGL gives it to the first."""
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [0, 0, 0, 1]], device=device), (3, 2))
    x = torch.ones(3, 1, device=device, requires_grad=True)
    (even,) = torch.autograd.grad(gnnfast.spmm(graph, x, reduce=reduce).sum(), x)
    (first,) = torch.autograd.grad(gnnfast.spmm(graph, x, reduce=reduce, ties="first").sum(), x)
    if reduce in ("max", "min"):
        assert torch.allclose(even.flatten().cpu(), torch.tensor([4 / 3, 1 / 3, 1 / 3]))
        assert first.flatten().tolist() == [2, 0, 0]
    else:
        assert torch.equal(even, first)


def _to_the_first(edge_index, num_dst, x, w, reduce):
    """The maximum whose gradient goes to the first edge that attains it, as DGL's."""
    messages = x[edge_index[0]] if w is None else x[edge_index[0]] * (w if w.dim() == 2 else w.unsqueeze(1)).unsqueeze(2)
    best = reference_spmm(edge_index, num_dst, x, w, reduce).detach()[edge_index[1]]
    number = torch.arange(messages.shape[0], device=x.device).view(-1, 1, 1).expand_as(messages)
    rows = edge_index[1].view(-1, 1, 1).expand_as(messages)
    attains = torch.where(messages == best, number, messages.shape[0])
    first = attains.new_full((num_dst, *x.shape[1:]), messages.shape[0]).scatter_reduce(0, rows, attains, "amin")
    taken = torch.where(first[edge_index[1]] == number, messages, 0)
    return x.new_zeros(num_dst, *x.shape[1:]).scatter_add(0, rows, taken)


@pytest.mark.parametrize("name", ["no_edges", "isolated", "self_loops_and_duplicates", "hub", "bipartite"])
@pytest.mark.parametrize("weight", [None, "scalar", "head"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("ties", ["scatter", "first"])
def test_gradients_where_edges_tie(ties, reduce, dtype, weight, name, device):
    """Features of few values, as a ReLU leaves them; "scatter" is PyG's rule: the 0 that torch scatters onto takes a share."""
    edge_index, graph, x, w = _inputs(name, (2, 20), weight, dtype, device)
    x.copy_(torch.randint(-1, 4, x.shape).clamp(min=0) if reduce == "max" else torch.randint(-3, 2, x.shape).clamp(max=0))
    if w is not None:
        w.copy_(torch.randint(1, 3, w.shape))
    operands = [t.requires_grad_() for t in (x, w) if t is not None]
    grad = torch.randint(-8, 9, (graph.num_dst, 2, 20)).to(device, dtype)
    wide = [t.detach().double().requires_grad_() for t in operands]
    reference = reference_spmm if ties == "scatter" else _to_the_first
    expected = reference(edge_index, graph.num_dst, wide[0], wide[1] if w is not None else None, reduce)
    expected = torch.autograd.grad(expected, wide, grad.double())
    for before in (False, True):
        for after in (False, True):
            try:
                torch.use_deterministic_algorithms(before)
                out = aggregate(graph, x.reshape(-1, 40), w, reduce, ties=ties)
                torch.use_deterministic_algorithms(after)
                found = torch.autograd.grad(out, operands, grad.view(-1, 40))
            finally:
                torch.use_deterministic_algorithms(False)
            for f, e in zip(found, expected):
                assert relative_error(f, e) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["random", "hub"])
def test_gradients_of_maxima_that_are_no_numbers(name, device):
    """As torch's: NaN reaches each edge of its row, and so does an infinite gradient as 0 times infinity."""
    edge_index, graph, x, _ = _inputs(name, (1, 8), None, torch.float32, device)
    x[3, 0, 0] = float("nan")
    grad = torch.randn(graph.num_dst, 1, 8, device=device)
    grad[7, 0, 1], grad[5, 0, 2] = float("inf"), float("nan")
    x.requires_grad_()
    (found,) = torch.autograd.grad(aggregate(graph, x.reshape(-1, 8), None, "max", ties="scatter"), x, grad.view(-1, 8))
    (expected,) = torch.autograd.grad(reference_spmm(edge_index, graph.num_dst, x, None, "max"), x, grad)
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
    assert relative_error(found.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)) < 1e-5


@pytest.mark.parametrize("ties", ["even", "first"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weight", [None, "scalar", "head"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradcheck(reduce, weight, kernel, ties, device):
    _, graph, x, w = _inputs("self_loops_and_duplicates", (2, 2), weight, torch.float64, device)
    operands = [t.requires_grad_() for t in (x, w) if t is not None]

    def f(*operands):
        with gnnfast.override(kernel=kernel):
            return gnnfast.spmm(graph, *operands, reduce=reduce, ties=ties)

    fast = device.type == "cuda"
    assert torch.autograd.gradcheck(f, operands, fast_mode=fast)
    assert torch.autograd.gradgradcheck(f, operands, fast_mode=fast)


def test_deterministic_mode_is_deterministic(device):
    edge_index, _, x, w = _inputs("hub", (1, 32), "scalar", torch.float32, device)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(5):
            fresh = Graph.from_edge_index(edge_index, (50, 40))
            xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
            out = gnnfast.spmm(fresh, xs, ws)
            out.sum().backward()
            results.append((out.detach(), xs.grad, ws.grad))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))
    assert {k[1] for k in gnnfast.report().kernels} == {"gar sum"}


def _op_samples(device):
    _, graph, x, w = _inputs("hub", (2, 8), "head", torch.float32, device)
    args, (src, dst) = graph.args(csc=True), graph.coo
    x, g = x.view(50, 16), torch.randn(40, 16, device=device)
    back = (*args[5:], *args[:5])
    ops = torch.ops.gnnfast
    out, _ = ops.spmm_max(*args, w, x, False, 2, 0.0)
    _, first = ops.spmm_max(*args, w, x, False, 1, 0.0)
    degree = torch.randint(0, 5, (40,), dtype=torch.int32, device=device)
    xg, wg, gg = x.clone().requires_grad_(), w.clone().requires_grad_(), g.clone().requires_grad_()
    if device.type == "cuda":
        conversions = [(ops.coo_to_formats, (dst, src, 40, 50, some, some)) for some in (True, False)]
        conversions += [(ops.csr_rows, (args[0], size)) for size in (src.shape[0], 0)]
    else:
        conversions = [(ops.coo_to_csr, (dst, src, 40, 50, some)) for some in (True, False)]
    return [
        *conversions,
        (ops.spmm, (*args, wg, None, xg, True)),
        (ops.spmm, (*args, None, None, xg, False)),
        (ops.spmm, (*args, wg, None, xg, False, torch.rand(40, dtype=torch.float64, device=device))),
        (ops.spmm_backward, (*back, wg, xg, gg, None)),
        (ops.spmm_max, (*args, wg, xg, True, 2, 0.0)),
        (ops.spmm_max, (*args, None, xg, False, 1, None)),
        (ops.spmm_where, (*back, w, x, gg, out, None)),
        (ops.spmm_where, (*back, None, x, gg, None, first)),
        (ops.sddmm, (*args, gg, xg, 2)),
        (ops.sddmm, (*args, g, x, 2, w, out, None)),
        (ops.sddmm_coo, (dst, src, gg, xg, 2)),
        (ops.spmm_coo, (dst, src, wg, xg, 40, 1)),
        (ops.spmm_coo_backward, (src, dst, wg, xg, gg)),
        (ops.spmm_coo, (src, dst, wg, gg, 50, 0, degree)),
        (ops.spmm_coo_backward, (src, dst, wg, xg, gg, degree)),
    ]


@pytest.mark.parametrize("sample", range(17))
def test_opcheck(sample, device):
    op, args = _op_samples(device)[sample]
    # Sums by atomics are not the same twice, so the comparison of eager and compiled results is left out for GAS on CUDA.
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not (device.type == "cuda" and "coo" in str(op)) and op is not torch.ops.gnnfast.coo_to_csr:
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op.default, args, test_utils=checks)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("row", "column"), [((0, 3), (0, 1)), ((0, -1), (0, 1)), ((0, 1), (0, 2)), ((0, 1), (-1, 0)), ((3, 1), None)]
)
def test_ids_out_of_range_over_coo_on_a_cpu(row, column, threads):
    """One of many, which several threads share."""
    before, many = torch.get_num_threads(), 5000
    row = torch.tensor(row * many)
    column = None if column is None else torch.tensor(column * many)
    row[1:-1], x = 0, torch.randn(2 if column is not None else 2 * many, 64)
    if column is not None:
        column[1:-1] = 0
    torch.set_num_threads(threads)
    try:
        with pytest.raises(RuntimeError, match="of 10000 edges 1 have an id out of range: rows are below 3"):
            torch.ops.gnnfast.spmm_coo(row, column, None, x, 3, 0)
    finally:
        torch.set_num_threads(before)


def test_opcheck_of_rows_of_edges_on_a_cpu():
    row, x = torch.tensor([0, 2, 2, 0, 3]), torch.randn(5, 6, requires_grad=True)
    torch.library.opcheck(torch.ops.gnnfast.spmm_coo.default, (row, None, None, x, 4, 1))


def test_rows_of_edges_have_no_columns(device):
    row, x, weight = torch.tensor([0, 1], device=device), torch.randn(2, 3, device=device), torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match="without columns"):
        torch.ops.gnnfast.spmm_coo(row, None, weight, x, 2, 0)


def test_opcheck_of_the_gradient_of_maxima():
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    _, graph, x, w = _inputs("hub", (2, 8), "head", torch.float32, torch.device("cuda"))
    args, x = graph.args(csc=True), x.view(50, 16)
    out, aux = torch.ops.gnnfast.spmm_max(*args, w, x, False, 6, 0.0)
    torch.library.opcheck(
        torch.ops.gnnfast.spmm_max_backward.default,
        (*args, w, x, torch.randn_like(out), out, aux, 50),
        test_utils=["test_schema", "test_faketensor"],
    )


@pytest.mark.parametrize("ties", [0, 1, 4])
@pytest.mark.parametrize("width", [1, 3, 8, 24, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("minimum", [False, True])
def test_extrema_without_infinity(minimum, dtype, width, ties, device):
    """The op alone: what is infinite is 0, and no edge attains it."""
    if ties > 3 and device.type == "cpu":
        ties = 1
    graph = _inputs("hub", (1, width), None, dtype, device)[1]
    args, x = graph.args(csc=True), torch.randn(50, width).to(device, dtype)
    x[::2], x[1::8] = math.inf, -math.inf
    out, aux = torch.ops.gnnfast.spmm_max(*args, None, x, minimum, ties, None)
    infinite, kept = torch.ops.gnnfast.spmm_max(*args, None, x, minimum, ties, math.inf if minimum else -math.inf)
    nowhere = infinite.isinf()
    assert nowhere.any() and not nowhere.all() and torch.equal(out, infinite.masked_fill(nowhere, 0))
    if ties:
        assert torch.equal(aux, kept.masked_fill(nowhere, -1 if ties == 1 else 0))
    with pytest.raises(RuntimeError, match="without empty, ties must be 0, or 1 or 4"):
        torch.ops.gnnfast.spmm_max(*args, None, x, minimum, 2, None)


@pytest.mark.parametrize("mean", [False, True])
def test_scaled_rows(mean, device):
    """The op alone: gnnfast.spmm has no such argument."""
    edge_index, graph, x, w = _inputs("hub", (1, 8), "scalar", torch.float64, device)
    scale = torch.rand(40, dtype=torch.float64, device=device)
    x, w = x.requires_grad_(), w.requires_grad_()

    def function(x, w):
        return torch.ops.gnnfast.spmm(*graph.args(csc=True), w, None, x.squeeze(1), mean, scale)

    exact = reference_spmm(edge_index, 40, x, w, "mean" if mean else "sum").squeeze(1)
    assert relative_error(function(x, w), scale.unsqueeze(1) * exact) < 1e-12
    assert torch.autograd.gradcheck(function, (x, w), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, w), fast_mode=True)
    for bad, message in ((scale[1:], "scale must have size 40"), (scale.float(), "scale must have dtype")):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.gnnfast.spmm(*graph.args(csc=True), w, None, x.squeeze(1), mean, bad)


@pytest.mark.parametrize("converted", [False, True])
def test_compile_fullgraph(converted, device):
    _, graph, x, w = _inputs("random", (1, 8), "scalar", torch.float32, device)
    x.requires_grad_(), w.requires_grad_()
    if converted:
        graph.args(csc=True)

    def f(x, w):
        return gnnfast.spmm(graph, x.relu(), w, "sum").square().sum()

    expected = torch.autograd.grad(f(x, w), (x, w))
    found = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(x, w), (x, w))
    for a, b in zip(found, expected):
        assert relative_error(a, b) < 1e-5


def test_cuda_graph_capture(converts_at_once):
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    _, graph, x, w = _inputs("hub", (1, 64), "scalar", torch.float32, torch.device("cuda"))
    for _ in range(3):
        expected = gnnfast.spmm(graph, x, w)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = gnnfast.spmm(graph, x, w)
    out.zero_()
    captured.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_static_weights_are_kept_in_slot_order(device):
    edge_index, graph, x, w = _inputs("hub", (1, 16), "scalar", torch.float32, device)
    x.requires_grad_()
    for change in (False, True):
        if change:
            w.mul_(2)  # the kept copies must not be used again
        for _ in range(4):
            out = gnnfast.spmm(graph, x, w)
            (grad,) = torch.autograd.grad(out.sum(), x)
            expected = reference_spmm(edge_index, 40, x, w, "sum")
            assert relative_error(out, expected) < 1e-5
            assert relative_error(grad, torch.autograd.grad(expected.sum(), x)[0]) < 1e-5
    reverse = graph.reverse()
    y = torch.randn(40, 1, 16, device=device)
    for _ in range(3):
        assert relative_error(gnnfast.spmm(reverse, y, w), reference_spmm(edge_index.flip(0), 50, y, w, "sum")) < 1e-5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(16,), (1,), (3, 5), (8, 1), (2, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sddmm(dtype, shape, kernel, device):
    edge_index, graph, _, _ = _inputs("bipartite", (1, 1), None, dtype, device)
    a, b = torch.randn(41, *shape, device=device).to(dtype), torch.randn(17, *shape, device=device).to(dtype)
    with gnnfast.override(kernel=kernel):
        out = gnnfast.sddmm(graph, a, b)
    exact = (a.double()[edge_index[1]] * b.double()[edge_index[0]]).sum(-1)
    assert out.shape == exact.shape and relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", KERNELS)
def test_sddmm_gradcheck(kernel, device):
    _, graph, _, _ = _inputs("self_loops_and_duplicates", (1, 1), None, torch.float64, device)
    a, b = (torch.randn(3, 2, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))

    def f(a, b):
        with gnnfast.override(kernel=kernel):
            return gnnfast.sddmm(graph, a, b)

    assert torch.autograd.gradcheck(f, (a, b)) and torch.autograd.gradgradcheck(f, (a, b))
