"""The parts of the bridge of a DGL without CUDA to a GPU, with the CPU in place of the GPU; test_bridge_on_gpu.py has the rest."""

from __future__ import annotations

import pytest
import torch
from graphs import relative_error

import gnnfast
from gnnfast.patching import Patches

dgl = pytest.importorskip("dgl")
from dgl_layers import N, hetero, square  # noqa: E402

from gnnfast.dgl import bridge, messages  # noqa: E402
from gnnfast.dgl.bridge import index as bridge_index  # noqa: E402
from gnnfast.dgl.structure import structure  # noqa: E402


@pytest.fixture
def pretended():
    """The bridge, with the CPU as the GPU: DGL takes an index for one of a GPU, whose copies are on the CPU."""
    patches, met = Patches(), bridge_index.met
    bridge_index.met = True  # activates it at once
    bridge.install(patches)
    try:
        yield lambda g: bridge_index.on_device(bridge_index.on_host(g._graph), torch.device("cpu"))
    finally:
        patches.restore()
        bridge_index.met = met


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("formats", ["coo", "csr", "csc", ["coo", "csr", "csc"]])
def test_an_index_answers_as_that_on_the_host(pretended, formats, idtype):
    g = square(idtype).formats(formats)
    index, host = pretended(g), g._graph
    for a, b in zip(index.edges(0, "eid"), square(idtype)._graph.edges(0, "eid"), strict=True):
        assert a.dtype == idtype and torch.equal(a, b)
    v = torch.arange(0, N, 3, dtype=idtype)
    for found, expected in (
        (index.in_degrees(0, v), square(idtype)._graph.in_degrees(0, v)),
        (index.out_degrees(0, v), square(idtype)._graph.out_degrees(0, v)),
    ):
        assert found.dtype == idtype and torch.equal(found, expected)
    for a, b in zip(index.find_edges(0, v), square(idtype)._graph.find_edges(0, v), strict=True):
        assert a.dtype == idtype and torch.equal(a, b)
    assert torch.equal(index.has_nodes(0, torch.tensor([-1, 0, N - 1, N], dtype=idtype)), torch.tensor([0, 1, 1, 0], dtype=idtype))
    assert str(index.ctx) == "gpu(0)" and str(host.ctx) == "cpu(0)"


def test_edges_are_uploaded_once(pretended, monkeypatch):
    uploads = []
    upload = bridge_index._upload
    monkeypatch.setattr(bridge_index, "_upload", lambda *a: uploads.append(a) or upload(*a))
    index = pretended(square())
    src, dst = index.ends()
    for other in (
        index.get_relation_graph(0),
        index.formats("csc"),
        index.asbits(32),
        index.reverse().reverse(),
        index.reverse().asbits(32).reverse(),
    ):
        assert type(other) is bridge_index.CudaIndex and other.ends()[0] is src and other.ends()[1] is dst
    flipped = index.reverse()
    assert flipped.ends()[0] is dst and flipped.ends()[1] is src
    v = torch.arange(N)
    assert torch.equal(flipped.in_degrees(0, v), index.out_degrees(0, v))
    assert structure(index.get_relation_graph(0)) is structure(index) and structure(flipped).edges is structure(index).edges
    index.edges(0, "eid"), messages.gspmm(flipped, "copy_lhs", "sum", torch.randn(N, 2), None)
    assert len(uploads) == 1
    of_types = pretended(hetero())
    for _ in range(2):
        for etype in range(3):
            relation = of_types.get_relation_graph(etype)
            relation.ends(), relation.reverse().ends(), of_types.edges(etype), of_types.in_degrees(etype, torch.arange(3))
    assert len(uploads) == 4
    index.edges(0, "eid")[0].zero_()  # a copy
    assert torch.equal(index.ends()[0].long(), square().edges()[0])


def test_what_comes_of_an_index_on_a_device_is_there_too(pretended):
    index = pretended(square())
    nodes = torch.arange(10)
    for other in (index.node_subgraph([nodes]).graph, index.edge_subgraph([nodes], True).graph, index.asbits(32), index.reverse()):
        assert type(other) is bridge_index.CudaIndex and other.device == torch.device("cpu")
    assert torch.equal(index.in_edges(0, nodes)[0], square()._graph.in_edges(0, nodes)[0])
    assert torch.equal(index.node_subgraph([nodes]).induced_edges[0], square()._graph.node_subgraph([nodes]).induced_edges[0])
    assert ("dgl DGLHeteroInEdges_2", "on the host") in {k[:2] for k in gnnfast.report().kernels}
    back = index.copy_to(dgl.ndarray.cpu())
    assert type(back) is type(square()._graph) and type(index) is bridge_index.CudaIndex
    restore, (plain, device) = index.__reduce__()
    assert type(plain) is type(back) and restore is bridge.restore and device == "cpu"
    del index, other, back


def test_message_passing_goes_by_the_graph(pretended):
    g = square()
    index, x = pretended(g), g.ndata["x"]
    gnnfast.clear_report()
    found = dgl.backend.gspmm(index, "add", "max", x, g.edata["w"])
    assert {k[0] for k in gnnfast.report().kernels} >= {"dgl u_add_e_max"} and not gnnfast.report().fallbacks
    assert not any("x_j + edge" in kernel for _, kernel, _ in gnnfast.report().kernels)
    assert relative_error(found, dgl.backend.gspmm(g._graph, "add", "max", x, g.edata["w"])) < 1e-6
    assert any("x_j + edge" in kernel for _, kernel, _ in gnnfast.report().kernels)  # of the graph on the CPU


# Replaced before a graph has been on a GPU. Nothing here is what a graph on the CPU meets often: a ``Filter`` exists on a GPU alone.
ARRAYS = {"array", "zerocopy_to_dgl_ndarray", "zerocopy_to_dgl_ndarray_for_write"}
ENTRIES = ARRAYS | {"copy_to", "pin_memory_", "__init__", "find_included_indices", "find_excluded_indices"}


def test_everything_is_put_back():
    gnnfast.disable()  # graphs on a GPU may have been met
    before = attributes()
    patches, met = Patches(), bridge_index.met
    try:
        bridge_index.met = False
        bridge.install(patches)
        entered = attributes()
        changed = {name for (_, name), _ in before.items() ^ entered.items()}
        assert changed == ENTRIES
        assert "__call__" not in vars(dgl._ffi.function.Function)
        bridge_index.met = True
        bridge.install(patches)
        assert "__call__" in vars(dgl._ffi.function.Function)
    finally:
        patches.restore()
        bridge_index.met = met
        found = attributes()
        gnnfast.enable()
    assert found == before


def attributes():
    import sys

    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "dgl" and m is not None]
    owners = [*modules, dgl.heterograph_index.HeteroGraphIndex, dgl._ffi.function.Function, dgl.utils.filter.Filter]
    return {(id(o), name): id(value) for o in owners for name, value in vars(o).items() if callable(value)}


def test_why_there_is_none(monkeypatch):
    from dataclasses import replace

    from gnnfast.config import from_environment, settings

    assert from_environment({"GNNFAST_DGL_BRIDGE": "0"}).dgl_bridge is False
    with pytest.raises(ValueError, match="GNNFAST_DGL_BRIDGE"):
        from_environment({"GNNFAST_DGL_BRIDGE": "yes"})
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in bridge.absent()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(dgl._ffi.function, "list_global_func_names", lambda: ["device_api.cpu", "device_api.cuda"])
    assert "of its own" in bridge.absent()
    off = replace(settings(), dgl_bridge=False)
    monkeypatch.setattr(bridge, "settings", lambda: off)
    assert "GNNFAST_DGL_BRIDGE=0" in bridge.absent()


def test_pinning_says_what_to_do_instead(pretended):
    with pytest.raises(dgl.DGLError, match="use_uva=False"):
        square().pin_memory_()
    with pytest.raises(dgl.DGLError, match="leave gpu_cache out"):
        dgl.cuda.GPUCache(4, 4)
