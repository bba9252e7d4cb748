"""A linear layer, an aggregation and a bias as one node of autograd, against the three one after the other."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, relative_error

import gnnfast
from gnnfast import Graph, features
from gnnfast.dispatch import execute
from gnnfast.ops import layer

N_IN, N_OUT = 6, 3


def _operands(name, device, dtype=torch.float64, weighted=True, biased=True, n_out=N_OUT):
    edge_index, num_src, num_dst = GRAPHS[name]()
    graph = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst))
    x = torch.randn(num_src, N_IN, device=device).to(dtype).requires_grad_()
    lin = torch.randn(n_out, N_IN, device=device).to(dtype).requires_grad_()
    bias = torch.randn(n_out, device=device).to(dtype).requires_grad_() if biased else None
    weight = torch.rand(graph.num_edges, device=device).to(dtype) if weighted else None
    return graph, x, lin, bias, weight


def _in_one(graph, x, lin, bias, weight, reduce="sum"):
    """The formats must be there. Weights are used by edge id the first time, and in slot order then."""
    graph.args(True)
    first, out = (
        execute.linear_layer(graph, execute.Linear(x, lin, bias), weight, reduce, first=True, place="test", owners=(lin, None))
        for _ in range(2)
    )
    assert relative_error(first, out) < TOLERANCE[x.dtype]
    return out


def _apart(graph, x, lin, bias, weight, reduce):
    out = gnnfast.spmm(graph, torch.nn.functional.linear(x, lin), weight, reduce)
    return out if bias is None else out + bias


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("name", GRAPHS)
def test_layer(name, reduce, weighted, biased, device):
    graph, x, lin, bias, weight = _operands(name, device, torch.float64, weighted, biased)
    leaves = [t for t in (x, lin, bias) if t is not None]
    found, expected = (f(graph, x, lin, bias, weight, reduce) for f in (_in_one, _apart))
    assert found.dtype == expected.dtype and relative_error(found, expected) < 1e-12
    seed = torch.randn_like(expected)
    for f, e in zip(torch.autograd.grad(found, leaves, seed), torch.autograd.grad(expected, leaves, seed)):
        assert f.shape == e.shape and relative_error(f, e) < 1e-12
    with torch.no_grad():
        assert torch.equal(_in_one(graph, x, lin, bias, weight, reduce), found)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(dtype, device):
    """The very numbers of the three apart: each is rounded to the dtype."""
    graph, x, lin, bias, weight = _operands("random", device, dtype)
    found, expected = (f(graph, x, lin, bias, weight, "sum") for f in (_in_one, _apart))
    assert torch.equal(found, expected)
    seed = torch.randn_like(expected)
    for f, e in zip(*(torch.autograd.grad(out, (x, lin, bias), seed) for out in (found, expected))):
        assert f.dtype == dtype and relative_error(f, e) < TOLERANCE[dtype]


@pytest.mark.parametrize("needed", range(8))
def test_some_gradients(needed, device):
    graph, x, lin, bias, weight = _operands("random", device)
    leaves = [t for n, t in enumerate((x, lin, bias)) if t.requires_grad_(bool(needed >> n & 1)).requires_grad]
    found, expected = (f(graph, x, lin, bias, weight, "mean") for f in (_in_one, _apart))
    assert found.requires_grad == expected.requires_grad == bool(leaves)
    if leaves:
        for f, e in zip(*(torch.autograd.grad(out.sin().sum(), leaves) for out in (found, expected))):
            assert relative_error(f, e) < 1e-12


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("compressed", [True, False])
def test_gradgradcheck(compressed, weighted, reduce, device):
    graph, x, lin, bias, weight = _operands("self_loops_and_duplicates", device, weighted=weighted)
    if compressed:
        x = x.detach() * (torch.rand_like(x) < 0.5)

    def call(*leaves):
        given = leaves if not compressed else (x, *leaves)
        return _in_one(graph, *given, weight, reduce)

    leaves = (lin, bias) if compressed else (x, lin, bias)
    with pytest.MonkeyPatch.context() as patch:
        if compressed:
            patch.setattr(features, "find", lambda *_: (features.Features.from_dense(x), "test"))
        assert relative_error(call(*leaves), _apart(graph, x, lin, bias, weight, reduce)) < 1e-12
        torch.autograd.gradcheck(call, leaves)
        torch.autograd.gradgradcheck(call, leaves)


def test_only_the_bias_needs_a_gradient(device):
    """Nothing is kept, so that its gradient can be asked for twice, as that of an addition."""
    graph, x, lin, bias, weight = _operands("random", device)
    out = _in_one(graph, x.detach(), lin.detach(), bias, weight)
    for _ in range(2):
        (found,) = torch.autograd.grad(out, bias, torch.ones_like(out))
        assert torch.equal(found, torch.full_like(found, graph.num_dst))


def test_new_weights_each_time(device):
    """They are not copied into slot order."""
    graph, x, lin, bias, _ = _operands("random", device)
    graph.args(True, exact=True)
    before = graph.nbytes
    for _ in range(5):
        weight = torch.rand(graph.num_edges, device=device, dtype=x.dtype)
        found = execute.linear_layer(
            graph, execute.Linear(x, lin, bias), weight, "sum", first=True, place="test", owners=(lin, None)
        )
        expected = _apart(graph, x, lin, bias, weight.clone(), "sum")
        assert relative_error(found, expected) < 1e-12
        seed = torch.randn_like(expected)
        for f, e in zip(*(torch.autograd.grad(out, (x, lin, bias), seed) for out in (found, expected))):
            assert relative_error(f, e) < 1e-12
    assert graph.nbytes == before


def test_what_is_left_to_others(device):
    graph, x, lin, bias, weight = _operands("random", device)

    def call(weight=weight):
        return execute.linear_layer(
            graph, execute.Linear(x, lin, bias), weight, "sum", first=True, place="test", owners=(lin, None)
        )

    for changes in ({"sample": "random"}, {"kernel": "sampled"}, {"autotune": True}):
        with gnnfast.override(**changes):
            assert call() is None
    assert call(weight.clone().requires_grad_()) is None
    with torch.autograd.graph.save_on_cpu():
        assert call() is None
    weight.mul_(2)
    assert relative_error(call(), _apart(graph, x, lin, bias, weight, "sum")) < 1e-12


@pytest.mark.parametrize("kernel", ["gas", "gar"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("root", ["none", "own", "own, wider", "other"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("name", ["random", "no_edges", "self_loops_and_duplicates", "bipartite"])
def test_both_orders(name, reduce, root, first, kernel, device, monkeypatch):
    """Over COO and CSR, with and without a product of the destinations' own features, against float64 operations one by one, up to
    the second derivative."""
    monkeypatch.setattr(layer, "FREED_BYTES", 0)
    edge_index, num_src, num_dst = GRAPHS[name]()
    if root.startswith("own") and num_src != num_dst:
        pytest.skip("the destinations are other nodes")
    n_out = N_IN + 2 if root == "own, wider" else N_OUT
    x, lin, bias, weight = _operands(name, device, n_out=n_out)[1:]
    weight = None if reduce == "mean" else weight
    x_dst = torch.randn(num_dst, 4, device=device, dtype=x.dtype, requires_grad=True) if root == "other" else None
    wide = 4 if root == "other" else N_IN
    r = None if root == "none" else torch.randn(n_out, wide, device=device, dtype=x.dtype, requires_grad=True)
    graph = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst))
    leaves = [t for t in (x, lin, bias, x_dst, r) if t is not None]

    def found():
        with gnnfast.override(kernel=kernel):
            how = dict(first=first, place="test", owners=(lin, None))
            return execute.linear_layer(graph, execute.Linear(x, lin, bias, x_dst, r), weight, reduce, **how)

    def expected():
        src, dst = edge_index.to(device)
        sums = torch.zeros(num_dst, N_IN, device=device, dtype=x.dtype)
        sums = sums.index_add(0, dst, x[src] if weight is None else weight[:, None] * x[src])
        if reduce == "mean":
            sums = sums / dst.bincount(minlength=num_dst).clamp(min=1)[:, None]
        out = torch.nn.functional.linear(sums, lin, bias)
        return out if r is None else out + (x if x_dst is None else x_dst) @ r.t()

    results = [f() for f in (found, expected)]
    assert relative_error(*results) < 1e-12
    firsts = [torch.autograd.grad(out.sin().sum(), leaves, create_graph=True) for out in results]
    for f, e in zip(*firsts):
        assert relative_error(f, e) < 1e-12
    seconds = [torch.autograd.grad(sum(g.cos().sum() for g in grads), leaves) for grads in firsts]
    for f, e in zip(*seconds):
        assert relative_error(f, e) < 1e-11
    with torch.no_grad():
        assert relative_error(found(), results[1]) < 1e-12


KEPT = [(N_OUT, torch.float32, False), (N_IN + 2, torch.float32, True), (N_OUT, torch.bfloat16, True)]


@pytest.mark.parametrize("kernel", ["gas", "gar"])
@pytest.mark.parametrize(("n_out", "dtype", "is_kept"), KEPT)
def test_what_is_kept(n_out, dtype, is_kept, kernel, device, monkeypatch):
    """For features that are their own roots', no large sums if gradients are not wider than these."""

    def sums_are_kept():
        graph, x, lin, bias, _ = _operands("random", device, dtype, n_out=n_out)
        operands = execute.Linear(x, lin, bias, None, torch.randn_like(lin).requires_grad_())
        with gnnfast.override(kernel=kernel):
            out = execute.linear_layer(graph, operands, None, "sum", first=False, place="test", owners=(lin, None))
        of_features = [t.data_ptr() for t in out.grad_fn.saved_tensors if t is not None and t.shape == x.shape]
        assert x.data_ptr() in of_features
        return any(at != x.data_ptr() for at in of_features)

    assert sums_are_kept()
    monkeypatch.setattr(layer, "FREED_BYTES", 0)
    assert sums_are_kept() == is_kept


SQUARE = [name for name in GRAPHS if len(set(GRAPHS[name]()[1:])) == 1]


def _shifted(name, device, dtype=torch.float64, coo=False, reduce="sum"):
    """``x`` and ``scale``, what adds up over one form of a graph and scales as one node, and the two apart."""
    edge_index, nodes, _ = GRAPHS[name]()
    edge_index = edge_index.to(device)
    graph = Graph.from_edge_index(edge_index, nodes)
    x = torch.randn(nodes, N_IN, device=device).to(dtype).requires_grad_()
    scale = torch.tensor([1.3], device=device).to(dtype).requires_grad_()

    def in_one(x, scale):
        source, target = edge_index
        ends = layer.Coo((target, source), None, nodes, nodes, reduce == "mean")
        a = ends if coo else layer.Formats(graph.args(True), None, None, reduce == "mean")
        return layer.shifted(x.requires_grad or scale.requires_grad, a, x, scale)

    return x, scale, in_one, lambda x, scale: gnnfast.spmm(graph, x, None, reduce) + scale * x


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("coo", [False, True])
@pytest.mark.parametrize("name", SQUARE)
def test_shifted(name, coo, reduce, dtype, device):
    x, scale, in_one, apart = _shifted(name, device, dtype, coo, reduce)
    for needed in range(4):
        leaves = [t for n, t in enumerate((x, scale)) if t.requires_grad_(bool(needed >> n & 1)).requires_grad]
        found, expected = in_one(x, scale), apart(x.double(), scale.double())
        assert found.dtype is dtype and found.requires_grad == bool(leaves)
        assert relative_error(found, expected) < TOLERANCE[dtype]
        if leaves:
            seed = torch.randn_like(found)
            for f, e in zip(torch.autograd.grad(found, leaves, seed), torch.autograd.grad(expected, leaves, seed.double())):
                assert f.shape == e.shape and f.dtype is dtype and relative_error(f, e) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("coo", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_shifted_is_differentiated_twice(reduce, coo, device):
    x, scale, in_one, _ = _shifted("self_loops_and_duplicates", device, coo=coo, reduce=reduce)
    torch.autograd.gradcheck(in_one, (x, scale))
    torch.autograd.gradgradcheck(in_one, (x, scale))
    several = torch.randn(3, *x.shape, device=device, dtype=x.dtype)
    batched = torch.autograd.grad(in_one(x, scale), (x, scale), several, is_grads_batched=True)
    for found, of_each in zip(batched, zip(*(torch.autograd.grad(in_one(x, scale), (x, scale), seed) for seed in several))):
        torch.testing.assert_close(found, torch.stack(of_each))


def test_shifted_keeps_what_is_written_into(device):
    x, scale, in_one, _ = _shifted("random", device, coo=True)
    out, hidden = in_one(x, scale.detach()), x * 1
    seen = in_one(hidden, scale)
    with torch.no_grad():
        x.mul_(2)  # is not kept
        hidden.mul_(2)
    torch.autograd.grad(out.sum(), x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(seen.sum(), scale)
