"""Schedules change the order of work and no bit of a result; autotuning keeps what is fastest."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS

import gnnfast
from gnnfast import Graph
from gnnfast.graph import locality
from gnnfast.graph.formats import BY_DST
from gnnfast.graph.plan import EXACT_USES

CUDA = torch.device("cuda")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA kernels have a schedule")


def _communities(nodes=60_000, size=500, degree=12):
    """Every edge stays in one of ``nodes / size`` groups, whose members have arbitrary ids."""
    generator = torch.Generator().manual_seed(0)
    member = torch.randperm(nodes, generator=generator)
    dst = torch.arange(nodes).repeat_interleave(degree)
    src = dst // size * size + torch.randint(0, size, dst.shape, generator=generator)
    return torch.stack([member[src], member[dst]]), nodes


def _run(graph, x, weight, reduce):
    out = gnnfast.spmm(graph, x, weight, reduce)
    return out, *torch.autograd.grad(out, [x, weight], torch.ones_like(out))


@needs_cuda
@pytest.mark.parametrize("kind", ["degree", "locality"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", ["hub", "random", "no_edges", "isolated", "communities"])
def test_same_bits(name, reduce, kind):
    if name == "communities":
        edge_index, num_src = _communities(3000, 100)
        num_dst = num_src
    else:
        edge_index, num_src, num_dst = GRAPHS[name]()
    x = torch.randn(num_src, 24, device=CUDA, requires_grad=True)
    weight = torch.randn(edge_index.shape[1], device=CUDA, requires_grad=True)
    graph = Graph.from_edge_index(edge_index.to(CUDA), (num_src, num_dst))
    with gnnfast.override(kernel="gar", schedule="off"):
        expected = _run(graph, x, weight, reduce)
    with gnnfast.override(kernel="gar", schedule=kind):
        found = _run(graph, x, weight, reduce)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@needs_cuda
@pytest.mark.parametrize("width", [32, 128])
def test_locality_is_found_in_repeated_use(width, monkeypatch):
    monkeypatch.setattr(locality, "exceeds_cache", lambda *_: True)
    edge_index, nodes = _communities()
    graph = Graph.from_edge_index(edge_index.to(CUDA), nodes)
    x = torch.randn(nodes, width, device=CUDA)
    with gnnfast.override(kernel="gar"):
        first = gnnfast.spmm(graph, x)
    graph.make_exact()
    before = graph.nbytes
    for _ in range(locality.USES + 2):
        assert torch.equal(gnnfast.spmm(graph, x), first)
        torch.cuda.synchronize()
    (made,) = gnnfast.report().schedules
    assert made["used"] and made["near_after"] > made["near_before"] + 0.3 and made["milliseconds"] > 0
    assert graph.nbytes - before >= 16 * nodes  # what is kept is counted
    assert "Locality schedule of Graph(" in str(gnnfast.report())
    x.requires_grad_()
    gnnfast.spmm(graph, x).sum().backward()  # CSC is made now and follows the same order
    assert torch.equal(x.grad, torch.bincount(edge_index[0], minlength=nodes).to(CUDA).float().view(-1, 1).expand(-1, width))


@needs_cuda
def test_kept_draws_follow_the_schedule(monkeypatch):
    monkeypatch.setattr(locality, "exceeds_cache", lambda *_: True)
    edge_index, nodes = _communities()
    graph, x = Graph.from_edge_index(edge_index.to(CUDA), nodes), torch.randn(nodes, 128, device=CUDA)

    def call():
        return gnnfast.spmm_sampled(graph, x, width=4, strategy="fastrand")

    call()  # in the kernel, which adds in another order
    first = call()
    for _ in range(locality.USES + 2):
        assert torch.equal(call(), first)
        torch.cuda.synchronize()
    (made,) = gnnfast.report().schedules
    drawn, _ = graph.draws.get(graph, "fastrand", 4)
    assert made["used"] and drawn.order is graph.order and (BY_DST, "locality") in drawn.plan.schedules
    assert graph.schedule_nbytes >= 16 * nodes + drawn.csr.schedule.nbytes
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = call()
    captured.replay()
    assert torch.equal(out, first)


@needs_cuda
def test_no_communities_no_schedule(monkeypatch):
    monkeypatch.setattr(locality, "exceeds_cache", lambda *_: True)
    graph = Graph.from_edge_index(torch.randint(0, 100_000, (2, 1_000_000), device=CUDA), 100_000)
    x = torch.randn(100_000, 8, device=CUDA)
    with gnnfast.override(kernel="gar"):
        gnnfast.spmm(graph, x)
    for _ in range(locality.USES + 3):
        gnnfast.spmm(graph, x)
        torch.cuda.synchronize()
    (made,) = gnnfast.report().schedules
    assert not made["used"] and graph.schedule_nbytes == 0


@needs_cuda
def test_a_graph_that_stays_coo_has_no_schedule(monkeypatch):
    monkeypatch.setattr(locality, "exceeds_cache", lambda *_: True)
    edge_index, nodes = _communities()
    graph, x = Graph.from_edge_index(edge_index.to(CUDA), nodes), torch.randn(nodes, 8, device=CUDA)
    with gnnfast.override(kernel="gas"):
        for _ in range(locality.USES + 3):
            gnnfast.spmm(graph, x)
    assert gnnfast.report().schedules == [] and graph.nbytes == 0


@needs_cuda
def test_capture_while_a_schedule_is_made(monkeypatch):
    """Neither starting nor taking over a schedule disturbs the capture of a CUDA graph, and the replay computes the same."""
    monkeypatch.setattr(locality, "exceeds_cache", lambda *_: True)
    edge_index, nodes = _communities()
    graph, x = Graph.from_edge_index(edge_index.to(CUDA), nodes), torch.randn(nodes, 32, device=CUDA)
    with gnnfast.override(kernel="gar"):
        expected = gnnfast.spmm(graph, x)
    for uses in (locality.USES - 1, 1, 3):
        for _ in range(uses):
            gnnfast.spmm(graph, x)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = gnnfast.spmm(graph, x)
        captured.replay()
        assert torch.equal(out, expected)


def test_what_a_capture_reads_is_kept(monkeypatch):
    """The arrays themselves: the graph goes on to better ones."""
    from gnnfast import cache

    graph = Graph.from_edge_index(torch.randint(0, 9, (2, 40)), 9)
    graph.args(csc=True)
    monkeypatch.setattr(cache, "is_capturing", lambda: True)
    monkeypatch.setattr(cache, "_captured", {})
    graph.is_cuda = True
    args, coo = graph.args(csc=True), graph.coo
    assert any(kept is args for kept in cache._captured.values())
    assert any(kept is graph.edges.coo for kept in cache._captured.values()) and coo is not None


@needs_cuda
def test_replays_after_the_schedule_has_become_exact():
    edge_index, nodes = _communities()
    graph, x = Graph.from_edge_index(edge_index.to(CUDA), nodes), torch.randn(nodes, 32, device=CUDA)
    with gnnfast.override(kernel="gar"):
        expected = gnnfast.spmm(graph, x)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = gnnfast.spmm(graph, x)
        assert not graph.csr.exact
        for _ in range(EXACT_USES + 3):
            gnnfast.spmm(graph, x)
            torch.cuda.synchronize()
    assert graph.csr.exact
    taken = [torch.full((1 << 20,), -7, dtype=torch.int32, device=CUDA) for _ in range(50)]  # memory that was let go
    captured.replay()
    assert torch.equal(out, expected) and taken


@needs_cuda
def test_capture_of_weight_gradients():
    """A capture makes nothing that is kept: the eager step after it must not read what only a replay writes."""
    edge_index, nodes = _communities(20_000)  # more edges than MANY_EDGES
    x = torch.randn(nodes, 16, device=CUDA, requires_grad=True)
    weight = torch.randn(edge_index.shape[1], device=CUDA, requires_grad=True)
    graph = Graph.from_edge_index(edge_index.to(CUDA), nodes)
    graph.args(csc=True)  # the formats, and nothing else, exist before the capture
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        in_capture = _run(graph, x, weight, "sum")
    eager = _run(graph, x, weight, "sum")
    captured.replay()
    assert all(torch.equal(a, b) for a, b in zip(in_capture, eager))
    expected = (x.detach()[edge_index[0].to(CUDA)]).sum(1)  # the gradient of the sum of all outputs
    torch.testing.assert_close(eager[2], expected, rtol=1e-4, atol=1e-4)


@needs_cuda
@pytest.mark.parametrize("kind", ["off", "degree", "locality"])
def test_no_nodes(kind):
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.long, device=CUDA), 0)
    with gnnfast.override(kernel="gar", schedule=kind):
        assert gnnfast.spmm(graph, torch.empty(0, 4, device=CUDA)).shape == (0, 4)


@needs_cuda
def test_small_graphs_are_left_alone():
    graph = Graph.from_edge_index(torch.randint(0, 100, (2, 1000), device=CUDA), 100)
    x = torch.randn(100, 8, device=CUDA)
    for _ in range(locality.USES + 3):
        gnnfast.spmm(graph, x)
    assert gnnfast.report().schedules == []


@needs_cuda
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["hub", "random", "no_edges"])
def test_autotune(name, grad):
    edge_index, num_src, num_dst = GRAPHS[name]()
    x = torch.randn(num_src, 256, device=CUDA, dtype=torch.float64, requires_grad=grad)
    graph = Graph.from_edge_index(edge_index.to(CUDA), (num_src, num_dst))
    expected = gnnfast.spmm(graph, x)
    with gnnfast.override(autotune=True):
        torch.testing.assert_close(gnnfast.spmm(graph, x), expected)
        tuned = dict(graph.plan.tuned)
        assert len(tuned) == 1
        gnnfast.spmm(graph, x)
    assert graph.plan.tuned == tuned
    assert any("fastest of those timed" in reason for _, _, reason in gnnfast.report().kernels)


@needs_cuda
def test_autotune_within_other_settings():
    edge_index, nodes = _communities(3000, 100)
    graph, x = Graph.from_edge_index(edge_index.to(CUDA), nodes), torch.randn(nodes, 256, device=CUDA)
    weight = torch.randn(edge_index.shape[1], 4, device=CUDA)
    torch.use_deterministic_algorithms(True)
    try:
        with gnnfast.override(schedule="degree", autotune=True):
            gnnfast.spmm(graph, x.view(nodes, 4, 64), weight)
            gnnfast.spmm(graph, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(graph.plan.tuned) == 2
    assert set(graph.plan.tuned.values()) == {("gar", "degree", 0)}


def test_settings_mean_nothing_on_a_cpu():
    graph, x = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2), torch.ones(2, 3)
    with gnnfast.override(schedule="locality", autotune=True):
        assert torch.equal(gnnfast.spmm(graph, x), x)
