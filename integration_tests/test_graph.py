"""Graph: formats, permutations, validation, the cache."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from graphs import GRAPHS

import gnnfast
from gnnfast import Graph
from gnnfast.cache import Cache, Sightings, cache


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", GRAPHS)
def test_formats(name, index_dtype, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    graph = Graph.from_edge_index(edge_index.to(device, index_dtype), (num_src, num_dst))
    graph.args(csc=True, exact=True)
    for csr, row, column, rows in (
        (graph.csr, edge_index[1], edge_index[0], num_dst),
        (graph.csc, edge_index[0], edge_index[1], num_src),
    ):
        order = row.argsort(stable=True)
        count = torch.bincount(row, minlength=rows)
        assert csr.rowptr.dtype == csr.col.dtype == torch.int32
        assert csr.rowptr.tolist() == [0, *count.cumsum(0).tolist()]
        assert csr.col.tolist() == column[order].tolist()
        perm = torch.arange(row.numel()) if csr.perm is None else csr.perm.cpu()
        assert perm.tolist() == order.tolist()
        if (row.diff() >= 0).all():
            assert csr.perm is None  # sorted input is noticed
    assert graph.reverse().csr is graph.csc


def test_from_compressed(device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    whole = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst))
    for graph in (
        Graph.from_csr(whole.csr.rowptr, whole.csr.col.long(), num_src, perm=whole.csr.perm.long()),
        Graph.from_csc(whole.csc.rowptr, whole.csc.col, num_dst, perm=whole.csc.perm),
    ):
        assert (graph.num_src, graph.num_dst, graph.num_edges) == (num_src, num_dst, 150)
        for found, expected in ((graph.csr, whole.csr), (graph.csc, whole.csc)):
            assert torch.equal(found.rowptr, expected.rowptr)
            pairs = {tuple(p) for p in torch.stack([found.col, found.perm]).t().tolist()}
            assert pairs == {tuple(p) for p in torch.stack([expected.col, expected.perm]).t().tolist()}


@pytest.mark.parametrize(
    "made_on, used_on", [("default", "other"), ("other", "default"), ("other", "third"), ("default", "default")]
)
def test_formats_are_used_on_other_streams(made_on, used_on, device):
    if device.type != "cuda":
        pytest.skip("only a GPU has streams")
    streams = {"default": torch.cuda.default_stream(), "other": torch.cuda.Stream(), "third": torch.cuda.Stream()}
    num_nodes, x = 100_000, torch.rand(100_000, 8, device=device)
    for seed in range(5):
        edge_index = torch.randint(num_nodes, (2, 3_000_000), generator=torch.Generator().manual_seed(seed)).to(device)
        expected = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        torch.cuda.synchronize()
        graph = Graph.from_edge_index(edge_index, num_nodes)
        with torch.cuda.stream(streams[made_on]):
            graph.args(csc=True)
        with torch.cuda.stream(streams[used_on]):
            outs = [gnnfast.spmm(graph, x), gnnfast.spmm(graph.reverse().reverse(), x)]
        torch.cuda.synchronize()
        for out in outs:
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", ["hub", "no_edges", "isolated", "random"])
def test_schedule_covers_every_slot_once(name, ordered, device):
    if device.type != "cuda":
        pytest.skip("only CUDA kernels have a schedule")
    edge_index, num_src, num_dst = GRAPHS[name]()
    csr = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst)).csr
    order = torch.randperm(num_dst, device=device, dtype=torch.int32) if ordered else None
    items, layout = torch.ops.gnnfast.schedule(csr.rowptr, order, csr.col.numel())
    used, pieces, for_block, for_warp = layout.tolist()
    items, slots, rowptr = items[:used].tolist(), [], csr.rowptr.tolist()
    limits = [8192] * for_block + [1024] * for_warp + [32] * (used - for_block - for_warp)
    for i, ((row, begin, end, count), limit) in enumerate(zip(items, limits)):
        assert rowptr[row] <= begin <= end <= rowptr[row + 1] and end - begin <= limit
        slots += range(begin, end)
        assert (count != 0) == (i < pieces)
        if count > 0:
            assert [s[0] for s in items[i : i + count]] == [row] * count
    assert sorted(slots) == list(range(csr.col.numel()))
    assert sorted({s[0] for s in items}) == list(range(num_dst))


@pytest.mark.parametrize(
    "edges,message",
    [
        ([[0, 5], [0, 1]], r"index 5 .*is out of range \[0, 3\)"),
        ([[0, -1], [0, 1]], r"index -1 .*is out of range \[0, 3\)"),
        ([[0, 1], [0, 4]], r"index 4 .*is out of range \[0, 4\)"),
        ([[0, 1], [-2, 1]], r"index -2 .*is out of range \[0, 4\)"),
    ],
)
@pytest.mark.parametrize("use", ["csr", "spmm", "sddmm", "max"])
def test_out_of_range(edges, message, use, device):
    """Named at once on a CPU; on a GPU when the user waits for it, or calls again after it is done."""
    graph = Graph.from_edge_index(torch.tensor(edges, device=device), (3, 4))
    x, y = torch.ones(3, 2, device=device, requires_grad=True), torch.ones(4, 2, device=device)
    calls = {
        "csr": lambda: graph.csr,
        "spmm": lambda: gnnfast.spmm(graph, x),
        "sddmm": lambda: gnnfast.sddmm(graph, y, x),
        "max": lambda: gnnfast.spmm(graph, x, reduce="max").sum().backward(),
    }
    with pytest.raises(IndexError, match=message):
        calls[use]()
        torch.cuda.synchronize()
    if device.type == "cuda":
        torch.cuda.synchronize()  # said once
        out = gnnfast.spmm(graph, x)  # in range are the others
        assert out.sum() == 2 * ((graph.coo[0] >= 0) & (graph.coo[0] < 3) & (graph.coo[1] >= 0) & (graph.coo[1] < 4)).sum()
        if not graph.has(csc=True):  # else the edge is left out for good
            with pytest.raises(IndexError, match=message):
                gnnfast.spmm(graph, x)


@pytest.mark.parametrize(
    "make,error,message",
    [
        (lambda: Graph.from_edge_index(torch.rand(2, 3)), TypeError, "must be int32 or int64, got torch.float32"),
        (lambda: Graph.from_edge_index(torch.zeros(3, 2, dtype=torch.long)), ValueError, r"shape \[2, num_edges\], got \[3, 2\]"),
        (lambda: Graph.from_edge_index([[0], [1]]), TypeError, "must be a torch.Tensor, got list"),
        (lambda: Graph.from_edge_index(torch.zeros(2, 3, dtype=torch.long), -1), ValueError, "at least 0 and below .*, got -1"),
        (lambda: Graph.from_edge_index(torch.zeros(2, 3, dtype=torch.long), 2**31), ValueError, "below 2\\^31 - 1, got 2147483648"),
        (
            lambda: Graph.from_csr(torch.tensor([0, 2, 1, 3]), torch.tensor([0, 1, 2])),
            ValueError,
            "must ascend from 0 to num_edges = 3",
        ),
        (
            lambda: Graph.from_csr(torch.tensor([0, 1, 4]), torch.tensor([0, 1, 2])),
            ValueError,
            "must ascend from 0 to num_edges = 3",
        ),
        (
            lambda: Graph.from_csr(torch.tensor([0, 1, 3]), torch.tensor([0, 1, 2])),
            IndexError,
            r"col index 2 is out of range \[0, 2\)",
        ),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_cache_follows_identity_version_and_lifetime():
    store, built = Cache(), []
    t = torch.zeros(2, 3)

    def build():
        built.append(1)
        return Graph.from_edge_index(torch.zeros(2, 3, dtype=torch.long), 1)

    first = store.get((t,), "k", build)
    assert store.get((t,), "k", build) is first and len(built) == 1
    assert store.get((t.clone(),), "k", build) is not first
    t.add_(1)
    second = store.get((t,), "k", build)
    assert second is not first and store.get((t,), "k", build) is second
    dead = weakref.ref(second)
    del second, first, t
    gc.collect()
    assert dead() is None and len(store) == 0


def test_user_tensor_is_not_kept_alive():
    from gnnfast.pyg.propagate import graph_of

    edge_index = torch.randint(0, 9, (2, 20))
    graph = weakref.ref(graph_of(edge_index, 9, 9, True))
    assert graph() is not None and graph().csr is graph().csr
    tensor = weakref.ref(edge_index)
    del edge_index
    gc.collect()
    assert tensor() is None and graph() is None


def test_cache_is_bounded(monkeypatch):
    store = Cache()
    monkeypatch.setattr(store, "budget", lambda: 3000)
    keys = [torch.zeros(1) for _ in range(20)]
    for key in keys:
        store.get((key,), "k", lambda: torch.zeros(256))
        assert store.nbytes <= 3000
    assert store.evictions == 18 and len(store) == 2


def test_what_is_met_again_is_not_forgotten():
    """Though more tensors than are remembered are met once in between, in parts."""
    sightings = Sightings()
    t, others = torch.zeros(2), [torch.zeros(1) for _ in range(4 * Sightings.MOST)]
    assert not sightings.again(t)
    for other in others:
        assert not sightings.again(other)
        assert sightings.again(t)
    assert not sightings.again(others[0])  # forgotten since
    t.add_(1)
    assert not sightings.again(t) and sightings.again(t)
    assert len(sightings._met) + len(sightings._older) <= 2 * Sightings.MOST


def test_cache_threads():
    tensors = [torch.randint(0, 50, (2, 500)) for _ in range(8)]
    results: list[Graph] = []

    def work():
        for _ in range(50):
            for t in tensors:
                g = cache.get((t,), "threads", lambda t=t: Graph.from_edge_index(t, 50))
                assert g.csr.rowptr[-1] == 500
                results.append(g)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 4 * 50 * 8


def test_formats_made_in_inference_mode_serve_training(device):
    graph = Graph.from_edge_index(torch.randint(0, 9, (2, 40), device=device), 9)
    with torch.inference_mode():
        gnnfast.spmm(graph, torch.randn(9, 4, device=device), torch.rand(40, device=device))
        graph.csr, graph.csc  # noqa: B018
    x = torch.randn(9, 4, device=device, requires_grad=True)
    gnnfast.spmm(graph, x).sum().backward()
    assert x.grad is not None


# ---- the cache's account -----------------------------------------------------------------------------------------------------
def _use(number, device):
    """A graph, its reverse, weights in slot order, draws and what kernels derive of it."""
    ids = [torch.randint(0, 40, (2, 150 + number), device=device) for _ in range(3)]
    for edge_index in ids:
        graph = cache.get((edge_index,), "test", lambda: Graph.from_edge_index(edge_index, 40))  # noqa: B023
        x, w = torch.randn(40, 4, device=device, requires_grad=True), torch.rand(graph.num_edges, device=device)
        for reduce in ("sum", "mean", "max"):
            for _ in range(3):
                gnnfast.spmm(graph, x, w, reduce).sum().backward()
                gnnfast.spmm(graph.reverse(), x, w, reduce).sum().backward()
        for _ in range(3):
            gnnfast.spmm_sampled(graph, x.detach(), w, width=2, strategy="fastrand")
        w.mul_(2)
    return ids


def test_the_account_is_that_of_the_values(device):
    cache.clear()
    kept = [_use(number, device) for number in range(4)]
    assert len(cache) == 12 and cache.nbytes == sum(value.nbytes for value in cache.values) > 0
    first = cache.values[0]
    arrays = [t for csr in first.edges.formats for t in csr if isinstance(t, torch.Tensor)]
    assert first.nbytes >= sum(t.nbytes for t in arrays)
    del kept, first, arrays
    gc.collect()
    assert len(cache) == 0 and cache.nbytes == 0


def test_a_value_under_two_keys_counts_once(device):
    own, edge_index = Cache(), torch.randint(0, 9, (2, 30), device=device)
    copy = edge_index.clone()
    graph = Graph.from_edge_index(edge_index, 9)
    own.get((edge_index,), 0, lambda: graph)
    assert own.get((copy,), 0, lambda: graph) is graph
    graph.args(csc=True, exact=True)
    assert own.nbytes == graph.nbytes > 0
    edge_index = None
    gc.collect()
    assert len(own) == 1 and own.nbytes == graph.nbytes
    own.clear()
    assert own.nbytes == 0
    graph.draws.sizes(graph, 3)  # grows no more for the cache
    assert own.nbytes == 0


def test_growing_looks_at_no_other_value(device, monkeypatch):
    own = Cache()
    held = [torch.randint(0, 9, (2, 30), device=device) for _ in range(200)]
    for edge_index in held:
        own.get((edge_index,), 0, lambda: Graph.from_edge_index(edge_index, 9))  # noqa: B023
    monkeypatch.setattr(Cache, "values", property(lambda self: pytest.fail("all values were looked at")))
    own.find((held[5],), 0).args(csc=True)
    assert own.nbytes > 0


def test_a_graph_dies_with_its_last_user(device):
    """Not when cycles are collected: the collector does not know how much memory a GPU has."""
    gc.collect()
    gc.disable()
    try:
        x, w = torch.randn(9, 4, device=device, requires_grad=True), torch.rand(30, device=device)
        graph = Graph.from_edge_index(torch.randint(0, 9, (2, 30), device=device), 9)
        with gnnfast.override(kernel="gar"):
            for _ in range(3):
                gnnfast.spmm(graph, x, w).sum().backward()
                gnnfast.spmm_sampled(graph, x.detach(), w, width=2, strategy="fastrand")
        arrays = [weakref.ref(t) for t in (graph.csr.rowptr, graph.csc.col, graph.draws.get(graph, "fastrand", 2)[1])]
        del graph
        assert not any(array() is not None for array in arrays)
    finally:
        gc.enable()


def test_choices_are_those_of_a_direction(device):
    graph = Graph.from_edge_index(torch.stack([torch.arange(100), torch.arange(100) % 10]).to(device), (100, 10))
    x, y = torch.randn(100, 4, device=device), torch.randn(10, 4, device=device)
    gnnfast.clear_report()
    with gnnfast.override(degree_threshold=2.0):
        gnnfast.spmm(graph.reverse(), y)
        gnnfast.spmm(graph, x)
    kernels = {kernel for _, kernel, _ in gnnfast.report().kernels}
    assert kernels == ({"gar sum", "gas sum"} if device.type == "cuda" else {"gar sum"})
