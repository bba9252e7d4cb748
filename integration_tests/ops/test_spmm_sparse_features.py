"""SpMM with sparse features against dense gather-scatter in float64, its gradients, and opcheck."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, many_rows, reference_spmm, relative_error

import gnnfast
from gnnfast import Graph
from gnnfast.cache import cache
from gnnfast.features import Features, multiply

WIDTHS = [0, 1, 7, 64, 130, 2049, 5000]
REDUCTIONS = ["sum", "mean"]


def _features(rows, width, density=0.2, dtype=torch.float64, index_dtype=torch.int64):
    """Rows of many lengths, empty ones among them."""
    share = density * 2 * torch.rand(rows, 1)
    dense = torch.randn(rows, width, dtype=torch.float64) * (torch.rand(rows, width) < share)
    if rows > 3:
        dense[1], dense[2] = 0, torch.randn(width, dtype=torch.float64)
    csr = dense.to(dtype).to_sparse_csr()
    indices = csr.crow_indices().to(index_dtype), csr.col_indices().to(index_dtype)
    return torch.sparse_csr_tensor(*indices, csr.values(), size=csr.shape)


def _inputs(name, width, weighted, device, dtype=torch.float64, index_dtype=torch.int64, density=0.2):
    edge_index, num_src, num_dst = GRAPHS[name]()
    graph = Graph.from_edge_index(edge_index.to(device, index_dtype), (num_src, num_dst))
    x = _features(num_src, width, density, dtype, index_dtype).to(device)
    weight = torch.randn(edge_index.shape[1], dtype=torch.float64).to(dtype).to(device) if weighted else None
    return edge_index.to(device), graph, x, weight


def _reference(edge_index, graph, x, weight, reduce):
    dense = x.to_dense() if x.layout is torch.sparse_csr else x
    return reference_spmm(edge_index, graph.num_dst, dense.unsqueeze(1), weight, reduce).squeeze(1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name, reduce, weighted, device):
    edge_index, graph, x, weight = _inputs(name, 50, weighted, device)
    for _ in range(3):  # from the second time on weights are kept in the order of the slots
        out = gnnfast.spmm_sparse_features(graph, x, weight, reduce)
        assert out.layout is torch.strided and out.shape == (graph.num_dst, 50)
        assert relative_error(out, _reference(edge_index, graph, x, weight, reduce)) < 1e-10
    ((place, kernel, reason),) = gnnfast.report().kernels
    assert (place, kernel) == ("gnnfast.spmm_sparse_features", f"sparse features {reduce}") and "density" in reason


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reduce,weighted", [("sum", False), ("mean", True)])
def test_widths_and_dtypes(reduce, weighted, dtype, width, device):
    edge_index, graph, x, weight = _inputs("hub", width, weighted, device, dtype, torch.int32)
    out = gnnfast.spmm_sparse_features(graph, x, weight, reduce)
    assert out.dtype == dtype
    dense = x.to_dense()
    exact = _reference(edge_index, graph, dense.double(), None if weight is None else weight.double(), reduce)
    error = relative_error(out, exact)
    assert error < TOLERANCE[dtype]
    if dtype in (torch.float16, torch.bfloat16):
        assert error <= relative_error(_reference(edge_index, graph, dense, weight, reduce), exact) * 1.05 + 1e-6


@pytest.mark.parametrize("density", [0.0, 0.003, 0.5, 1.0])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_densities(reduce, density, device):
    edge_index, graph, x, weight = _inputs("random", 300, True, device, density=density)
    assert (
        relative_error(gnnfast.spmm_sparse_features(graph, x, weight, reduce), _reference(edge_index, graph, x, weight, reduce))
        < 1e-10
    )


@pytest.mark.parametrize("width", [40_000, 70_001])
def test_wide(width, device):
    """More columns than a thread's buffer or a warp's slab holds."""
    edge_index, graph, x, weight = _inputs("random", width, True, device, torch.float32, density=0.01)
    assert relative_error(gnnfast.spmm_sparse_features(graph, x, weight), _reference(edge_index, graph, x, weight, "sum")) < 1e-5


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_equals_the_dense_kernel_bit_for_bit_on_the_cpu(reduce):
    _, graph, x, weight = _inputs("random", 133, True, torch.device("cpu"), torch.float32)
    assert torch.equal(gnnfast.spmm_sparse_features(graph, x, weight, reduce), gnnfast.spmm(graph, x.to_dense(), weight, reduce))


def test_same_bits_from_run_to_run(device):
    _, graph, x, weight = _inputs("hub", 500, True, device, torch.float32)
    first = gnnfast.spmm_sparse_features(graph, x, weight)
    assert all(torch.equal(first, gnnfast.spmm_sparse_features(graph, x, weight)) for _ in range(3))


def test_more_rows_than_a_grid(device):
    edge_index, num_src, num_dst = many_rows()
    graph = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst))
    x = _features(num_src, 3, 0.5, torch.float32).to(device)
    assert relative_error(gnnfast.spmm_sparse_features(graph, x), _reference(edge_index.to(device), graph, x, None, "sum")) < 1e-6


def test_unsorted_and_repeated_columns_are_added(device):
    edge_index, num_src, num_dst = GRAPHS["random"]()
    graph = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst))
    rowptr = torch.tensor([0, 3, 3, 7] + [7] * 27)
    col = torch.tensor([4, 1, 4, 0, 0, 0, 2])
    values = torch.randn(7, dtype=torch.float64)
    x = torch.sparse_csr_tensor(rowptr, col, values, size=(30, 6)).to(device).requires_grad_()
    rows = torch.repeat_interleave(rowptr.diff()).to(device)
    dense = torch.zeros(30, 6, dtype=torch.float64, device=device).index_put(
        (rows, col.to(device)), values.to(device), accumulate=True
    )
    out = gnnfast.spmm_sparse_features(graph, x)
    assert relative_error(out, _reference(edge_index.to(device), graph, dense, None, "sum")) < 1e-10
    seed = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, seed)
    by_source = _reference(edge_index.to(device).flip(0), graph, seed, None, "sum")
    assert relative_error(found.values(), by_source[rows, col.to(device)]) < 1e-10


def test_nan_and_infinity_survive(device):
    edge_index, graph, x, _ = _inputs("random", 9, False, device, torch.float32)
    x.values()[3], x.values()[7] = float("nan"), float("inf")
    weight = torch.ones(graph.num_edges, device=device)
    weight[::5] = 0.0  # 0 * inf is NaN
    out, expected = gnnfast.spmm_sparse_features(graph, x, weight), _reference(edge_index, graph, x, weight, "sum")
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())


def test_changes_in_place_are_noticed(device):
    edge_index, graph, x, weight = _inputs("random", 20, True, device)
    for _ in range(3):
        gnnfast.spmm_sparse_features(graph, x, weight)
    x.values().mul_(3)
    weight.add_(1)
    assert relative_error(gnnfast.spmm_sparse_features(graph, x, weight), _reference(edge_index, graph, x, weight, "sum")) < 1e-10
    x.values().zero_()
    assert not gnnfast.spmm_sparse_features(graph, x, weight).any()


def test_the_cache_lets_features_go(device):
    cache.clear()
    _, graph, x, _ = _inputs("random", 20, False, device)
    gnnfast.spmm_sparse_features(graph, x)
    assert len(cache) == 1 and cache.nbytes >= 4 * x.values().numel()  # the columns; values stay the user's
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None and len(cache) == 0


@pytest.mark.parametrize("name", ["no_edges", "isolated", "self_loops_and_duplicates", "hub", "bipartite"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients(reduce, weighted, name, device):
    edge_index, graph, x, weight = _inputs(name, 40, weighted, device)
    dense = x.to_dense().requires_grad_()
    x.requires_grad_()
    operands, leaves = ([x], [dense]) if weight is None else ([x, weight.requires_grad_()], [dense, weight])
    seed = torch.randn(graph.num_dst, 40, dtype=torch.float64, device=device)
    found = torch.autograd.grad(gnnfast.spmm_sparse_features(graph, x, weight, reduce), operands, seed)
    expected = list(torch.autograd.grad(_reference(edge_index, graph, dense, weight, reduce), leaves, seed))
    expected[0] = expected[0][torch.repeat_interleave(x.crow_indices().diff()), x.col_indices()]
    assert found[0].layout is torch.sparse_csr
    assert relative_error(found[0].values(), expected[0]) < 1e-10
    if weight is not None:
        assert relative_error(found[1], expected[1]) < 1e-10
        # Each alone: the other is then a constant, for which other formats are needed.
        for i in range(2):
            (alone,) = torch.autograd.grad(
                gnnfast.spmm_sparse_features(graph, x if i == 0 else x.detach(), weight.detach() if i == 0 else weight, reduce),
                operands[i],
                seed,
            )
            assert relative_error(alone.values() if i == 0 else alone, expected[i]) < 1e-10


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", ["self_loops_and_duplicates", "isolated"])
def test_first_and_second_derivatives(name, reduce, device):
    _, graph, x, weight = _inputs(name, 5, True, device, density=0.4)
    features = Features.from_csr(x)

    def run(values, weight):
        op = torch.ops.gnnfast.spmm_sparse_features
        return op(*graph.args(True, exact=True), weight, features.rowptr, features.col, values, 5, reduce == "mean")

    operands = (x.values().clone().requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(run, operands)
    assert torch.autograd.gradgradcheck(run, operands)


def test_opcheck(device):
    _, graph, x, weight = _inputs("hub", 33, True, device)
    features, args = Features.from_csr(x), graph.args(True, exact=True)
    transposed = (*args[5:], *args[:5])
    matrix = (features.rowptr, features.col)
    values, weight = x.values().clone().requires_grad_(), weight.requires_grad_()
    grad = torch.randn(graph.num_dst, 33, dtype=torch.float64, device=device, requires_grad=True)
    ops = torch.ops.gnnfast
    for mean in (False, True):
        torch.library.opcheck(ops.spmm_sparse_features, (*args, weight, *matrix, values, 33, mean))
    torch.library.opcheck(ops.spmm_sparse_features, (*args, None, *matrix, values, 33, False))
    torch.library.opcheck(ops.spmm_sparse_features_values, (*transposed, weight, *matrix, grad))
    torch.library.opcheck(ops.spmm_sparse_features_edges, (*args, *matrix, values, grad))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 64])
def test_multiply(width, dtype, device):
    x = _features(50, 300, dtype=dtype).to(device)
    features, seed = Features.from_csr(x), torch.randn(50, width, device=device).to(dtype)
    weight = torch.randn(width, 300, device=device).to(dtype).requires_grad_()
    exact = x.to_dense().double() @ weight.double().t()
    out = multiply(features, weight, features.values_of(x))
    (found,) = torch.autograd.grad(out, weight, seed)
    assert relative_error(out, exact) < TOLERANCE[dtype]
    assert relative_error(found, seed.double().t() @ x.to_dense().double()) < TOLERANCE[dtype]
    with torch.no_grad():
        assert relative_error(multiply(features, weight, features.values_of(x)), exact) < TOLERANCE[dtype]
        assert relative_error(multiply(Features.from_dense(x.to_dense()), weight), exact) < TOLERANCE[dtype]
    values = x.values().clone().requires_grad_()
    out = multiply(features, weight, values)
    to_values, again = torch.autograd.grad(out, (values, weight), seed)
    assert relative_error(again, found) < TOLERANCE[dtype]
    expected = seed.double() @ weight.double()
    assert relative_error(to_values, expected[torch.repeat_interleave(x.crow_indices().diff()), x.col_indices()]) < TOLERANCE[dtype]


def test_values_written_behind_the_version_counter(device):
    """The tensor that a matrix was made from shares its memory, but not its version: product and gradient see what is there."""
    x = _features(20, 30).to(device)
    values = x.values().detach().clone()
    x = torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), values, size=x.shape)
    weight = torch.randn(4, 30, dtype=torch.float64, device=device, requires_grad=True)
    for _ in range(3):
        values.mul_(3)
        features = Features.of_csr(x)
        out = multiply(features, weight, features.values_of(x))
        (found,) = torch.autograd.grad(out.sum(), weight)
        assert relative_error(out, x.to_dense() @ weight.t()) < 1e-12
        assert relative_error(found, x.to_dense().sum(0).expand(4, -1)) < 1e-12


def test_gradients_of_multiply(device):
    features = Features.from_dense(_features(7, 9, dtype=torch.float64).to_dense().to(device))
    weight = torch.randn(3, 9, dtype=torch.float64, device=device, requires_grad=True)
    values = features.values.clone().requires_grad_()
    for call, inputs in (
        (lambda w: multiply(features, w), (weight,)),
        (lambda w, v: multiply(features, w, v), (weight, values)),
        (lambda w: multiply(features, w.t().contiguous().t()), (weight,)),
    ):
        torch.autograd.gradcheck(call, inputs)
        torch.autograd.gradgradcheck(call, inputs)


def test_from_dense(device):
    dense = torch.randn(20, 30, device=device).relu()
    dense[3, 4], dense[5] = float("nan"), 0
    features = Features.from_dense(dense)
    assert features.shape == (20, 30) and features.density == dense.count_nonzero().item() / 600
    back = torch.sparse_csr_tensor(features.rowptr, features.col, features.values, size=(20, 30)).to_dense()
    assert torch.equal(back.nan_to_num(99), dense.nan_to_num(99))


def test_bad_input(device):
    _, graph, x, weight = _inputs("bipartite", 8, True, device)  # 17 sources, 41 destinations
    op = gnnfast.spmm_sparse_features
    for bad, message in (
        (x.to_dense(), "x has layout torch.strided; sparse features are taken as torch.sparse_csr .gnnfast.spmm takes dense"),
        (x.to_dense().to_sparse_coo(), r"layout torch.sparse_coo.*x.coalesce\(\).to_sparse_csr\(\)"),
        (x.to_dense().to_sparse_csc(), r"layout torch.sparse_csc.*x.to_sparse_csr\(\)"),
        (x.to(torch.complex64), "x has dtype torch.complex64; accepted are float32"),
        ([1.0], "x must be a torch.sparse_csr tensor, got list"),
    ):
        with pytest.raises(TypeError, match=message):
            op(graph, bad)
    with pytest.raises(TypeError, match=r"graph must be a gnnfast\.Graph, got str"):
        op("graph", x)
    with pytest.raises(ValueError, match=r"x must have shape \[17, F\], got \[30, 8\]"):
        op(graph, _features(30, 8).to(device))
    with pytest.raises(ValueError, match="reduce must be sum or mean"):
        op(graph, x, weight, "max")
    with pytest.raises(ValueError, match=r"weight must have shape \[150\].*got \[150, 2\]; gnnfast.spmm takes weights per head"):
        op(graph, x, weight.unsqueeze(1).expand(-1, 2))
    with pytest.raises(ValueError, match=r"weight must be torch\.float64 on"):
        op(graph, x, weight.float())
    rowptr = torch.tensor([0, 2] + [2] * 16, device=device)
    with pytest.raises(IndexError, match=r"the indices of x: col index 9 is out of range \[0, 5\)"):
        op(graph, torch.sparse_csr_tensor(rowptr, torch.tensor([1, 9], device=device), torch.ones(2, device=device), size=(17, 5)))


def test_the_ops_check_their_arguments(device):
    _, graph, x, weight = _inputs("random", 8, True, device)
    f, args, op = Features.from_csr(x), graph.args(True, exact=True), torch.ops.gnnfast.spmm_sparse_features
    values = x.values()
    for arguments, message in (
        ((weight[:-1], f.rowptr, f.col, values, 8, False), "weight must have size 200"),
        ((weight.float(), f.rowptr, f.col, values, 8, False), "weight must have dtype"),
        ((weight, f.rowptr.long(), f.col, values, 8, False), "xrowptr must have dtype Int"),
        ((weight, f.rowptr, f.col, values[:-1], 8, False), "xval must have size"),
        ((weight, f.rowptr, f.col, values, -1, False), "width must be from 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*args, *arguments)
