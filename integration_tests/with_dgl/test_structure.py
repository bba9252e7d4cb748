"""What is kept of DGL's graphs: in the one cache, within its budget, never stale; and when a graph is left to DGL."""

from __future__ import annotations

import gc

import numpy
import pytest
import torch
import torch.utils.checkpoint
from comparison import without
from graphs import GRAPHS, relative_error

import gnnfast
from gnnfast.cache import cache, nbytes_of
from gnnfast.dgl.backend import slower_than_dgl
from gnnfast.dgl.structure import FEW_EDGES, structure

dgl = pytest.importorskip("dgl")
import dgl.function as fn  # noqa: E402

N, E = 60, 500


def make(idtype=torch.int64):
    return dgl.graph((torch.randint(0, N, (E,)), torch.randint(0, N, (E,))), num_nodes=N, idtype=idtype)


def trained(g, x):
    x = x.detach().requires_grad_()
    out = dgl.ops.copy_u_sum(g, x)
    return out.detach(), *torch.autograd.grad(out, x, out.detach())


def test_counts_in_the_cache_and_dies_with_the_graph():
    gc.collect()
    entries, held = len(cache), cache.nbytes
    g, x = make(), torch.randn(N, 4)
    for _ in range(3):
        trained(g, x)
    report = gnnfast.report().cache
    assert report["entries"] == len(cache) == entries + 1
    # rowptr, col and perm in int32, by destination and by source
    assert report["bytes"] - held == nbytes_of(structure(g._graph)) == 2 * 4 * (N + 1 + 2 * E)
    assert report["hits"] > 0
    del g
    gc.collect()
    assert len(cache) == entries and cache.nbytes == held


def test_stays_within_the_budget(monkeypatch):
    cache.clear()
    monkeypatch.setattr(cache, "budget", lambda: 20_000)
    evictions = cache.evictions
    graphs, x = [make() for _ in range(6)], torch.randn(N, 4, dtype=torch.float64)
    expected = without(lambda: [trained(g, x) for g in graphs])
    for _ in range(2):
        for g, e in zip(graphs, expected):
            assert all(relative_error(a, b) < 1e-12 for a, b in zip(trained(g, x), e))
            assert cache.nbytes <= 20_000
    assert cache.evictions > evictions


def test_survives_being_let_go_between_forward_and_backward():
    g, x = make(), torch.randn(N, 4, dtype=torch.float64, requires_grad=True)
    out = dgl.ops.edge_softmax(g, dgl.ops.u_dot_v(g, x, x))
    cache.clear()
    (found,) = torch.autograd.grad(out.pow(2).sum(), x)
    (expected,) = without(lambda: torch.autograd.grad(dgl.ops.edge_softmax(g, dgl.ops.u_dot_v(g, x, x)).pow(2).sum(), x))
    assert relative_error(found, expected) < 1e-10


def ids(g, *values):
    return torch.tensor(values, dtype=g.idtype)


CHANGES = {
    "add_edges": lambda g: g.add_edges(ids(g, 0, 1, 5), ids(g, 3, 3, 5)),
    "remove_edges": lambda g: g.remove_edges(ids(g, *range(0, 90, 3))),
    "add_nodes": lambda g: g.add_nodes(4),
    "remove_nodes": lambda g: g.remove_nodes(ids(g, 0, 7)),
    "create_formats_": lambda g: g.create_formats_(),
    "formats": lambda g: g.formats(["coo", "csc"]),
    "int": lambda g: g.int(),
    "reverse": lambda g: g.reverse(),
    "add_self_loop": lambda g: g.add_self_loop(),
    "reorder_graph": lambda g: dgl.reorder_graph(g, "rcmk", "src", store_ids=False),
    "clone": lambda g: g.clone(),
}


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("change", CHANGES)
def test_is_that_of_the_graph_as_it_is_now(change, idtype):
    g = make(idtype)
    for _ in range(2):
        x, w = torch.randn(g.num_nodes(), 4, dtype=torch.float64), torch.rand(g.num_edges(), 1, dtype=torch.float64)

        def run(g=g, x=x, w=w):
            softmax = dgl.ops.edge_softmax(g, w, norm_by="src")
            return [*trained(g, x), dgl.ops.u_mul_e_max(g, x, w), softmax, dgl.ops.u_dot_v(g, x, x)]

        assert all(relative_error(a, b) < 1e-10 for a, b in zip(run(), without(run)))
        g = CHANGES[change](g) or g


@pytest.mark.parametrize("name", GRAPHS)
def test_reverse_and_relations_share_it(name):
    (src, dst), num_src, num_dst = GRAPHS[name]()
    data = {("a", "x", "b"): (src, dst), ("b", "y", "a"): (dst, src)}
    g = dgl.heterograph(data, {"a": num_src, "b": num_dst})
    index = g["x"]._graph
    assert structure(index) is structure(g["x"]._graph) is not structure(g["y"]._graph)
    turned = structure(index.reverse())
    assert turned.edges is structure(index).edges and (turned.num_src, turned.num_dst) == (num_dst, num_src)
    assert structure(index.reverse().reverse()).edges is turned.edges
    x = torch.randn(num_dst, 3, dtype=torch.float64)
    backend = dgl.backend.gspmm
    found = backend(index.reverse(), "copy_lhs", "sum", x, None)
    assert relative_error(found, without(lambda: dgl.backend.gspmm(index.reverse(), "copy_lhs", "sum", x, None))) < 1e-12


def test_products_of_features_train_without_a_new_structure():
    g, x = make(), torch.randn(N, 4, dtype=torch.float64, requires_grad=True)

    def run():
        return torch.autograd.grad(dgl.ops.u_mul_v(g, x, x).pow(2).sum(), x)[0]  # DGL's own, over the reverse in its backward pass

    run()
    misses = cache.misses
    assert relative_error(run(), without(run)) < 1e-12
    assert cache.misses == misses


NEW_HERE, TOO_SMALL = "a small graph that was not met before", "too small to gain"


@pytest.mark.parametrize("grads", [False, True])
def test_small_graphs_are_left_to_dgl_where_it_is_faster(monkeypatch, grads):
    monkeypatch.setattr("gnnfast.dgl.backend.FEW_EDGES", E)
    x, s = torch.randn(N, 6, requires_grad=grads), torch.randn(E, 2, requires_grad=grads)
    w, h = torch.rand(E, 1), torch.rand(E, 2, 1)

    def update_all(g):
        with g.local_scope():
            g.ndata["h"] = x
            g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            return g.ndata["h"]

    # why the first call, and why the second, is left to DGL
    for call, first, second in (
        (update_all, NEW_HERE, ""),
        (lambda g: dgl.ops.copy_u_mean(g, x), "", ""),
        (lambda g: dgl.ops.copy_u_max(g, x), NEW_HERE, ""),
        (lambda g: dgl.ops.u_mul_e_sum(g, x, w), "" if grads else NEW_HERE, ""),
        (lambda g: dgl.ops.u_mul_e_sum(g, x.view(N, 2, 3), h), NEW_HERE, ""),
        (lambda g: dgl.ops.u_dot_v(g, x, x), "" if grads else NEW_HERE, "" if grads else TOO_SMALL),
        (lambda g: dgl.ops.edge_softmax(g, s), NEW_HERE, TOO_SMALL),
    ):

        def run(g, call=call):
            out = call(g)
            leaf = s if out.shape[0] == E and out.shape[1:] == s.shape[1:] else x
            return out.detach(), *(torch.autograd.grad(out, leaf, out.detach()) if grads else ())

        g = make()
        expected = without(lambda g=g, run=run: run(g))
        for reason in (first, second):
            gnnfast.clear_report()
            found, report = run(g), gnnfast.report()
            assert all(relative_error(a, b) < 1e-5 for a, b in zip(found, expected))
            assert {r for _, r in report.fallbacks} == ({reason} if reason else set()) and bool(report.kernels) == (not reason)
            assert not reason or all(map(torch.equal, found, expected))
    gnnfast.clear_report()
    with torch.no_grad():
        dgl.ops.copy_u_sum(make(), x.half())  # DGL has no kernel
    assert not gnnfast.report().fallbacks
    with gnnfast.override(strict=True):
        dgl.ops.copy_u_sum(make(), x)


@pytest.mark.parametrize("converting", [0, 1e9])  # never over COO, and always
def test_extrema_of_nodes_without_edges(converting, monkeypatch):
    """Infinite, whichever format they are made of and however often a graph was used."""
    monkeypatch.setattr("gnnfast.dispatch.select.CONVERT_ON_CPU", converting)
    g, x, weight = dgl.graph((torch.tensor([0, 1, 2]), torch.tensor([1, 1, 0])), num_nodes=4), torch.randn(4, 2), torch.rand(3, 1)
    for name, operands in (("copy_u_max", (x,)), ("copy_u_min", (x,)), ("u_mul_e_max", (x, weight))):
        op = getattr(dgl.ops, name)
        expected = without(lambda op=op, operands=operands: op(g, *operands))
        assert expected.isinf().any()
        for _ in range(3):
            assert torch.equal(op(g, *operands), expected)
        with gnnfast.override(kernel="gas"):
            assert torch.equal(op(g, *operands), expected)


def test_what_is_left_to_dgl_depends_on_sizes(monkeypatch):
    monkeypatch.setattr("gnnfast.dgl.backend.FEW_EDGES", FEW_EDGES)
    for what, new, training, edges, width, left in (
        ("sum", True, True, 262_144, 1000, True),  # DGL's own is fast
        ("sum", True, True, 262_145, 1, False),
        ("sum", False, False, 10, 1, False),
        ("dot", True, False, 8192, 63, True),
        ("dot", True, False, 8192, 64, False),
        ("dot", False, False, 8192, 16, False),
        ("product", True, False, 4096, 64, False),
        ("product", True, True, 10, 1, False),
        ("products", True, True, 1024, 127, True),
        ("narrow", False, True, 10_000_000, 16, True),
        ("narrow", False, False, 10_000_000, 16, False),
        ("softmax", False, True, 8191, 1, True),
        ("softmax", False, True, 1024, 8, False),
        ("max", False, True, 16_000, 64, False),
        ("max", True, False, 8191, 64, True),
        ("max", False, True, 10_000_000, 64, False),
        ("copied max", False, True, 131_072, 16, True),  # libxsmm
        ("copied max", False, True, 88_648, 4, True),
        ("copied max", False, True, 88_648, 8, False),
        ("narrow dot", False, False, 88_648, 4, True),
        ("narrow dot", False, True, 88_648, 4, False),
        ("copied max", False, True, 131_071, 16, False),
        ("copied max", False, False, 10_000_000, 64, False),
        ("copied max", True, False, 8191, 64, True),
        ("max", True, False, 8192, 64, False),
    ):
        assert bool(slower_than_dgl(what, new, training, edges, width)) == left, (what, new, training, edges, width)


def test_what_dgl_trains_faster_is_left_to_it_on_any_graph(monkeypatch):
    monkeypatch.setattr("gnnfast.dgl.backend.NARROW", 2)
    x, g = torch.randn(N, 4, requires_grad=True), make()
    for op in (
        lambda x: dgl.ops.u_mul_e_sum(g, x.view(N, 2, 2), torch.ones(E, 2, 1)),
        lambda x: dgl.ops.u_mul_e_mean(g, x.view(N, 2, 2), torch.ones(E, 2, 1)),
    ):
        gnnfast.clear_report()
        out = op(x)
        assert not gnnfast.report().kernels
        out.sum().backward()
        with torch.no_grad():
            op(x)
        assert gnnfast.report().kernels


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_save_the_same_again(reentrant, monkeypatch):
    monkeypatch.setattr("gnnfast.dgl.backend.FEW_EDGES", E)
    x, s = torch.randn(N, 4, dtype=torch.float64), torch.randn(E, 1, dtype=torch.float64)

    def layer(g, x, s):
        return dgl.ops.u_mul_e_mean(g, x, dgl.ops.edge_softmax(g, s) * dgl.ops.u_dot_v(g, x, x))

    def run(g):
        leaves = [t.clone().requires_grad_() for t in (x, s)]
        out = torch.utils.checkpoint.checkpoint(layer, g, *leaves, use_reentrant=reentrant)
        return torch.autograd.backward(out.pow(2).sum()), *(leaf.grad for leaf in leaves)

    g = make()
    found, expected = run(g), without(lambda: run(g))
    assert all(relative_error(a, b) < 1e-10 for a, b in zip(found[1:], expected[1:]))


def test_arrays_of_one_number_are_numbers():
    """numpy 2.4 and later refuse int() of such, which DGL takes of ids and of positions."""
    networkx = pytest.importorskip("networkx", reason="DGL makes graphs of networkx's with networkx alone")
    of_networkx = networkx.DiGraph()
    of_networkx.add_nodes_from([0, 1], bipartite=0)
    of_networkx.add_nodes_from([2, 3], bipartite=1)
    of_networkx.add_edge(1, 2, id=numpy.array([1]))
    of_networkx.add_edge(0, 3, id=numpy.array([0]))
    g = dgl.bipartite_from_networkx(of_networkx, utype="u", etype="e", vtype="v", edge_id_attr_name="id")
    assert [ids.tolist() for ids in g.edges(order="eid")] == [[0, 1], [1, 0]]
    with pytest.raises(dgl.DGLError, match="non-negative"):
        of_networkx.edges[1, 2]["id"] = numpy.array([-1])
        dgl.bipartite_from_networkx(of_networkx, utype="u", etype="e", vtype="v", edge_id_attr_name="id")

    class Model(torch.nn.Module):
        def forward(self, graph, feat):
            with graph.local_scope():
                graph.ndata["h"] = dgl.ops.copy_u_sum(graph, feat)
                return dgl.mean_nodes(graph, "h")

    explainer = dgl.nn.SubgraphX(Model(), num_hops=1, num_rollouts=2, shapley_steps=2)
    found = explainer.explain_graph(dgl.add_self_loop(dgl.rand_graph(8, 20)), torch.randn(8, 3), target_class=0)
    assert len(found) and found.max() < 8
