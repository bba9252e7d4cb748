"""Graphs of a DGL without CUDA on a GPU: everything gives what it gives on the CPU, and lives on the GPU.

``pytest integration_tests/with_dgl/test_bridge_on_gpu.py integration_tests/with_dgl/test_messages.py``."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from graphs import relative_error

import gnnfast
from gnnfast.cache import cache

dgl = pytest.importorskip("dgl")
import dgl.function as fn  # noqa: E402
from dgl.nn import pytorch as nn  # noqa: E402
from dgl_layers import LAYERS, F, N, hetero, node_features, square, step, with_loops  # noqa: E402

from gnnfast.dgl import bridge  # noqa: E402


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if bridge.absent():
        pytest.skip(f"there is no bridge: {bridge.absent()}")
    return torch.device("cuda", torch.cuda.current_device())


def same(a, b, tolerance=1e-4):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert relative_error(a.cpu(), b.cpu()) < tolerance


def on(device, *tensors):
    assert [t.device for t in tensors] == [device] * len(tensors)


def test_moving(gpu):
    g0 = square()
    g = g0.to(gpu)
    assert type(g) is dgl.DGLGraph and g.device == gpu and g0.device.type == "cpu" and g.to(gpu) is g
    assert g0.to(gpu.type).device.type == gpu.type
    on(gpu, g.ndata["x"], g.edata["w"])
    assert g.cpu().device.type == "cpu" and g.cpu().ndata["x"].device.type == "cpu"
    same(dgl.ops.copy_u_sum(g.cpu(), g0.ndata["x"]), dgl.ops.copy_u_sum(g0, g0.ndata["x"]))
    for made in (
        g.int(),
        g.long(),
        g.formats("csc"),
        g.local_var(),
        g.clone(),
        dgl.reverse(g),
        g.reverse(copy_ndata=True),
        g.to(gpu),
    ):
        assert made.device == gpu
    assert g.int().idtype == torch.int32 and g.int().edges()[0].dtype == torch.int32
    g.create_formats_()
    with g.local_scope():
        g.ndata["z"] = torch.ones(N, device=gpu)
    assert "z" not in g.ndata
    with pytest.raises(dgl.DGLError, match="device"):
        g.ndata["z"] = torch.zeros(N)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_queries(gpu, idtype):
    g0 = square(idtype)
    g = g0.to(gpu)

    def ids(*values):
        return torch.tensor(values, dtype=idtype)

    for query in (
        lambda g, _: g.nodes(),
        lambda g, _: g.edges()[0],
        lambda g, _: torch.stack(g.edges(form="all")),
        lambda g, _: torch.stack(g.all_edges(form="all", order="srcdst")),
        lambda g, _: g.in_degrees(),
        lambda g, _: g.out_degrees(),
        lambda g, to: g.in_degrees(to(ids(1, 2))),
        lambda g, to: torch.stack(g.find_edges(to(ids(1, 2)))),
        lambda g, to: torch.stack(g.in_edges(to(ids(1, 4)), form="all")),
        lambda g, to: torch.stack(g.out_edges(to(ids(1, 4)))),
        lambda g, to: g.has_nodes(to(ids(1, N + 1))),
        lambda g, to: g.has_edges_between(to(ids(3, 4)), to(ids(3, 5))),
        lambda g, to: g.edge_ids(to(ids(3)), to(ids(3))),
        lambda g, _: g.successors(1),
        lambda g, _: g.predecessors(1),
        lambda g, _: torch.cat(g.adj_tensors("csr")),
        lambda g, _: torch.cat(g.adj_tensors("csc")),
        lambda g, _: torch.stack(g.adj_tensors("coo")),
    ):
        found, expected = query(g, lambda t: t.to(gpu)), query(g0, lambda t: t)
        on(gpu, found)
        assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected)
    assert (g.num_nodes(), g.num_edges(), g.in_degrees(3)) == (g0.num_nodes(), g0.num_edges(), g0.in_degrees(3))
    assert (g.adj_external(scipy_fmt="csr") != g0.adj_external(scipy_fmt="csr")).nnz == 0


def passed(g, dtype=torch.float32):
    """Messages and reductions of all kinds, of functions of DGL and of users."""
    x, w = g.ndata["x"].to(dtype), g.edata["w"].to(dtype)
    with g.local_scope():
        g.ndata["x"], g.edata["w"] = x, w
        for name in ("sum", "mean", "max", "min"):
            g.update_all(fn.copy_u("x", "m"), getattr(fn, name)("m", f"cu_{name}"))
            g.update_all(fn.copy_e("w", "m"), getattr(fn, name)("m", f"ce_{name}"))
            for op in ("add", "sub", "mul", "div"):
                for a, fa in (("u", "x"), ("e", "w"), ("v", "x")):
                    for b, fb in (("u", "x"), ("e", "w"), ("v", "x")):
                        if a != b:
                            g.update_all(getattr(fn, f"{a}_{op}_{b}")(fa, fb, "m"), getattr(fn, name)("m", f"{a}_{op}_{b}_{name}"))
        g.update_all(lambda e: {"m": e.src["x"] * e.data["w"]}, lambda n: {"o3": n.mailbox["m"].sum(1)})
        g.apply_edges(fn.u_dot_v("x", "x", "d"))
        g.apply_edges(lambda e: {"q": e.src["x"] + e.dst["x"]})
        g.edata["s"] = dgl.nn.functional.edge_softmax(g, g.edata["d"])
        g.apply_nodes(lambda n: {"z": n.data["x"] * 2})
        g.send_and_recv(torch.arange(5, device=g.device), fn.copy_u("x", "m"), fn.sum("m", "sr"))
        g.pull(torch.arange(5, device=g.device), fn.copy_u("x", "m"), fn.max("m", "pl"))
        return dict(g.ndata), dict(g.edata)


@pytest.mark.parametrize("loops", [True, False])
def test_message_passing(gpu, loops):
    g0 = square(loops=loops)
    g0.ndata["x"] = g0.ndata["x"].abs() + 0.5  # some divide by it
    g0.edata["w"] += 0.5
    gnnfast.disable()
    expected = passed(g0)
    gnnfast.enable()
    gnnfast.clear_report()
    found = passed(g0.to(gpu))
    assert all("a Python function" in reason for _, reason in gnnfast.report().fallbacks)
    for a, b in zip(found, expected):
        assert a.keys() == b.keys()
        for key in a:
            on(gpu, a[key])
            same(a[key], b[key])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(gpu, dtype):
    g = square().to(gpu)
    x = g.ndata["x"].to(dtype).requires_grad_()
    w = g.edata["w"]
    for op in (
        lambda x: dgl.ops.copy_u_sum(g, x),
        lambda x: dgl.ops.u_add_e_max(g, x, w.to(x.dtype)),
        lambda x: dgl.ops.u_dot_v(g, x, x),
        lambda x: dgl.ops.edge_softmax(g, dgl.ops.u_add_v(g, x, x)),
    ):
        out = op(x)
        (grad,) = torch.autograd.grad(out.float().tanh().sum(), x)
        assert out.dtype == grad.dtype == dtype and relative_error(out, op(x.float())) < 2e-2
    layer = nn.GATConv(F, 4, 2, bias=False).to(gpu)
    with torch.autocast(gpu.type, dtype=dtype):
        out, summed = layer(g, g.ndata["x"]), dgl.ops.copy_u_sum(g, g.ndata["x"])
    assert out.dtype == summed.dtype == dtype and relative_error(out, layer(g, g.ndata["x"])) < 2e-2


def test_several_types(gpu):
    g0 = hetero()
    g = g0.to(gpu)

    def run(g):
        h = {t: g.nodes[t].data["h"] for t in g.ntypes}
        with g.local_scope():
            g.multi_update_all({e: (fn.copy_u("h", "m"), fn.sum("m", "o")) for e in g.canonical_etypes}, "sum")
            g.update_all(fn.copy_u("h", "m"), fn.max("m", "o2"))
            g["f"].update_all(fn.copy_u("h", "m"), fn.mean("m", "o3"))
            g.apply_edges(fn.u_add_v("h", "h", "s"))
            soft = dgl.nn.functional.edge_softmax(g, {e: g.edges[e].data["s"] for e in g.canonical_etypes})
            out = [g.nodes[t].data[k] for t in g.ntypes for k in ("o", "o2")] + [g.nodes["u"].data["o3"], *soft.values()]
        torch.manual_seed(2)
        conv = nn.HeteroGraphConv({e: nn.SAGEConv(F, 4, "mean") for e in g.etypes}).to(g.device)
        linear = nn.HeteroLinear(dict.fromkeys(g.ntypes, 4), 3).to(g.device)  # an R-GCN
        found = linear(conv(g, h))
        sum(t.pow(2).sum() for t in found.values()).backward()
        return out + [t.detach() for t in found.values()] + [p.grad for p in conv.parameters()]

    found = run(g)
    for a, b in zip(found, run(g0), strict=True):
        on(gpu, a)
        same(a, b)
    on(gpu, g["f"].in_degrees(), g["b"].nodes["i"].data["h"], g[("u", "f", "u")].edges()[0])
    together = dgl.to_homogeneous(g, ndata=["h"])
    on(gpu, together.ndata["h"], together.ndata[dgl.NTYPE], together.edges()[0])
    again = dgl.to_heterogeneous(together, g.ntypes, g.etypes)
    assert again.device == gpu and again.num_edges("b") == g.num_edges("b")
    assert dgl.edge_type_subgraph(g, ["f"]).device == gpu


def test_flattened(gpu):
    g0 = dgl.heterograph({("u", "a", "v"): ([0, 1], [1, 2]), ("u", "b", "v"): ([2, 0], [0, 0])})
    g = g0.to(gpu)
    for h in (g0, g):
        h.nodes["u"].data["h"] = torch.arange(3.0, device=h.device)
    found, expected = g["u", :, "v"], g0["u", :, "v"]
    assert found.device == gpu
    on(gpu, found.edata[dgl.ETYPE], found.edges()[0], found.srcdata["h"])
    assert torch.equal(found.edata[dgl.EID].cpu(), expected.edata[dgl.EID])
    same(dgl.ops.copy_u_sum(found, found.srcdata["h"]), dgl.ops.copy_u_sum(expected, expected.srcdata["h"]))


def test_batches_and_readout(gpu):
    graphs = [dgl.rand_graph(n, 9) for n in (5, 3, 7)]
    for g in graphs:
        g.ndata["x"], g.edata["x"] = torch.randn(g.num_nodes(), 3), torch.randn(9, 2)
    b0 = dgl.batch(graphs)
    for b in (dgl.batch([g.to(gpu) for g in graphs]), b0.to(gpu)):
        assert b.device == gpu
        on(gpu, b.batch_num_nodes(), b.batch_num_edges())
        for readout in (dgl.sum_nodes, dgl.mean_nodes, dgl.max_nodes, dgl.softmax_nodes, dgl.sum_edges, dgl.mean_edges):
            on(gpu, readout(b, "x"))
            same(readout(b, "x"), readout(b0, "x"))
        same(dgl.topk_nodes(b, "x", 2, sortby=0)[0], dgl.topk_nodes(b0, "x", 2, sortby=0)[0])
        same(dgl.broadcast_nodes(b, torch.ones(3, 2, device=gpu)), dgl.broadcast_nodes(b0, torch.ones(3, 2)))
        parts = dgl.unbatch(b)
        assert [p.num_nodes() for p in parts] == [5, 3, 7] and parts[0].device == gpu
        assert torch.equal(parts[2].edges()[0].cpu(), graphs[2].edges()[0])
        assert dgl.slice_batch(b, 1).device == gpu
    x = torch.randn(15, F)
    for make in (
        nn.SumPooling,
        nn.AvgPooling,
        nn.MaxPooling,
        lambda: nn.SortPooling(2),
        lambda: nn.GlobalAttentionPooling(torch.nn.Linear(F, 1)),
        lambda: nn.WeightAndSum(F),
        lambda: nn.Set2Set(F, 2, 1),
    ):
        layer = make()
        expected = layer(b0, x)
        found = layer.to(gpu)(b0.to(gpu), x.to(gpu))
        same(found.detach(), expected.detach())


def sampled(gpu, g, indices, workers):
    sampler = dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["x"], prefetch_labels=["y"])
    layers = [nn.SAGEConv(F, F, "mean").to(gpu), nn.GATConv(F, 4, 2, allow_zero_in_degree=True).to(gpu)]
    host = [copy.deepcopy(layer).cpu() for layer in layers]
    loader = dgl.dataloading.DataLoader(g, indices, sampler, batch_size=16, shuffle=True, num_workers=workers, device=gpu)
    count = 0
    for inputs, outputs, blocks in loader:
        x = blocks[0].srcdata["x"]
        on(
            gpu,
            inputs,
            outputs,
            x,
            blocks[-1].dstdata["y"],
            blocks[0].edges()[0],
            blocks[0].srcdata[dgl.NID],
            blocks[0].edata[dgl.EID],
        )
        assert all(b.device == gpu for b in blocks)
        assert torch.equal(x, g.ndata["x"].to(gpu)[inputs]) and torch.equal(blocks[-1].dstdata["y"], g.ndata["y"].to(gpu)[outputs])

        def model(layers, blocks, x):
            h = layers[0](blocks[0], x)
            out = layers[1](blocks[1], (h, h[: blocks[1].num_dst_nodes()]))
            return out, *torch.autograd.grad(out.pow(2).sum(), layers[0].parameters())

        for a, b in zip(model(layers, blocks, x), model(host, [b.to("cpu") for b in blocks], x.cpu()), strict=True):
            same(a, b)
        count += len(outputs)
    assert count == len(indices)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader(gpu, workers):
    sampled(gpu, square(loops=False), torch.arange(N), workers)


def test_loader_of_a_graph_on_the_gpu(gpu):
    sampled(gpu, square().to(gpu), torch.arange(N, device=gpu), 0)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_loader_of_edges(gpu, on_gpu):
    loading = dgl.dataloading
    sampler = loading.as_edge_prediction_sampler(
        loading.NeighborSampler([2]), exclude="self", negative_sampler=loading.negative_sampler.Uniform(2)
    )
    g, indices = (square().to(gpu), torch.arange(100, device=gpu)) if on_gpu else (square(), torch.arange(100))
    for inputs, positive, negative, blocks in loading.DataLoader(g, indices, sampler, batch_size=32, device=gpu):
        on(gpu, inputs, positive.edges()[0], negative.edges()[0], blocks[0].edges()[0])


def test_loader_of_graphs(gpu):
    data = [(dgl.rand_graph(5, 9), torch.tensor(i % 2)) for i in range(8)]
    for b, _ in dgl.dataloading.GraphDataLoader(data, batch_size=4):
        b = b.to(gpu)
        on(gpu, b.nodes(), b.edges()[0], b.batch_num_nodes())


def test_samples_and_subgraphs_of_a_graph_on_the_gpu(gpu):
    g0 = square()
    g, seeds = g0.to(gpu), torch.tensor([1, 2, 3], device=gpu)
    sample = dgl.sampling.sample_neighbors(g, seeds, 3)
    block = dgl.to_block(sample, seeds)
    on(gpu, sample.edata[dgl.EID], sample.ndata["x"], block.srcdata["x"], block.srcdata[dgl.NID], block.edata[dgl.EID])
    assert torch.equal(block.srcdata["x"].cpu(), g0.ndata["x"][block.srcdata[dgl.NID].cpu()])
    walks = dgl.sampling.random_walk(g, seeds, length=3)[0]
    on(gpu, walks)
    for take in (
        lambda g, s: dgl.node_subgraph(g, s),
        lambda g, s: dgl.edge_subgraph(g, s),
        lambda g, s: dgl.in_subgraph(g, s),
        lambda g, s: dgl.out_subgraph(g, s),
        lambda g, s: dgl.khop_in_subgraph(g, s, 2)[0],
    ):
        found, expected = take(g, seeds), take(g0, seeds.cpu())
        on(gpu, found.edges()[0], found.edata[dgl.EID])
        assert torch.equal(torch.stack(found.edges()).cpu(), torch.stack(expected.edges()))
        same(dgl.ops.copy_u_sum(found, found.ndata["x"]), dgl.ops.copy_u_sum(expected, expected.ndata["x"]))


def changed(g):
    def ids(*values):
        return torch.tensor(values, dtype=g.idtype, device=g.device)

    return {
        "add_self_loop": lambda: dgl.add_self_loop(g),
        "remove_self_loop": lambda: dgl.remove_self_loop(g),
        "add_reverse_edges": lambda: dgl.add_reverse_edges(g),
        "reverse": lambda: dgl.reverse(g, copy_edata=True),
        "line_graph": lambda: dgl.line_graph(g),
        "khop_graph": lambda: dgl.khop_graph(g, 2),
        "compact": lambda: dgl.compact_graphs(g),
        "add_edges": lambda: dgl.add_edges(g, ids(0, 1), ids(5, 5)),
        "remove_edges": lambda: dgl.remove_edges(g, ids(0, 7)),
        "add_nodes": lambda: dgl.add_nodes(g, 2),
        "remove_nodes": lambda: dgl.remove_nodes(g, ids(0, 7)),
        "reorder": lambda: dgl.reorder_graph(g, "custom", "src", permute_config={"nodes_perm": ids(*range(N - 1, -1, -1))}),
        "formats": lambda: g.formats(["coo", "csr"]),
        "int": lambda: g.int(),
        "clone": lambda: g.clone(),
    }


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("change", changed(square()))
def test_changes(gpu, change, idtype):
    g0 = square(idtype)
    g = g0.to(gpu)
    dgl.ops.copy_u_sum(g, g.ndata["x"]), g.in_degrees()  # what is kept of it must not be what is found
    found, expected = changed(g)[change](), changed(g0)[change]()
    assert found.device == gpu
    on(gpu, found.edges()[0], found.in_degrees())
    assert found.idtype == expected.idtype and torch.equal(torch.stack(found.edges()).cpu(), torch.stack(expected.edges()))
    assert torch.equal(found.in_degrees().cpu(), expected.in_degrees())
    x, s = torch.randn(found.num_nodes(), 3), torch.randn(found.num_edges(), 2)
    same(dgl.ops.copy_u_max(found, x.to(gpu)), dgl.ops.copy_u_max(expected, x))
    same(dgl.ops.edge_softmax(found, s.to(gpu)), dgl.ops.edge_softmax(expected, s))


def test_in_place_changes(gpu):
    g0 = square()
    g = g0.to(gpu)
    x = torch.randn(N, 3)
    for h in (g0, g):
        for change in (
            lambda h: h.add_edges(torch.tensor([0, 1], device=h.device), torch.tensor([3, 3], device=h.device)),
            lambda h: h.remove_edges(torch.tensor([4], device=h.device)),
            lambda h: h.add_nodes(1),
        ):
            dgl.ops.copy_u_sum(h, torch.randn(h.num_nodes(), 3, device=h.device))
            change(h)
    x = torch.randn(N + 1, 3)
    same(dgl.ops.copy_u_sum(g, x.to(gpu)), dgl.ops.copy_u_sum(g0, x))


def test_made_on_the_gpu(gpu):
    u = torch.tensor([0, 1, 2], device=gpu)
    for g in (
        dgl.graph((u, u)),
        dgl.graph(([0], [1]), device=gpu),
        dgl.rand_graph(5, 9, device=gpu),
        dgl.heterograph({("a", "b", "c"): (u, u)}),
        dgl.create_block((u, u), 3, 3),
        dgl.knn_graph(torch.randn(20, 3, device=gpu), 3),
        dgl.radius_graph(torch.randn(20, 3, device=gpu), 1.0),
    ):
        assert g.device == gpu
        on(gpu, g.edges()[0], g.in_degrees())
    indptr, indices = torch.tensor([0, 2, 2, 3], device=gpu), torch.tensor([1, 2, 0], device=gpu)
    ids = torch.tensor([2, 0, 1], device=gpu)
    for kind in ("csr", "csc"):
        g, g0 = dgl.graph((kind, (indptr, indices, ids))), dgl.graph((kind, (indptr.cpu(), indices.cpu(), ids.cpu())))
        assert torch.equal(torch.stack(g.edges()).cpu(), torch.stack(g0.edges()))
        same(dgl.ops.copy_e_sum(g, torch.arange(3.0, device=gpu)), dgl.ops.copy_e_sum(g0, torch.arange(3.0)))


def test_copies_and_pickles(gpu, tmp_path, run_python):
    g0 = square()
    g = g0.to(gpu)
    for other in (pickle.loads(pickle.dumps(g)), copy.deepcopy(g), copy.copy(g)):
        assert other.device == gpu
        same(dgl.ops.copy_u_sum(other, other.ndata["x"]), dgl.ops.copy_u_sum(g0, g0.ndata["x"]))
    torch.save(g, tmp_path / "graph")
    assert torch.load(tmp_path / "graph", weights_only=False).device == gpu
    if gpu.type == "cuda":
        script = f"import gnnfast, torch\nprint(torch.load({str(tmp_path / 'graph')!r}, weights_only=False).in_degrees().device)"
        assert str(gpu) in run_python(script)
    with pytest.raises(dgl.DGLError, match=r"cpu\(\)"):
        g.shared_memory("gnnfast_test")
    with pytest.raises(dgl.DGLError, match="use_uva=False"):
        g0.pin_memory_()


def test_walks_and_explainers(gpu):
    g = square().to(gpu)
    assert sum(len(front) for front in dgl.bfs_nodes_generator(g, 0)) > 1
    g.prop_nodes([[0], [1]], fn.copy_u("x", "m"), fn.sum("m", "z"))
    dgl.lap_pe(g, 3), dgl.laplacian_lambda_max(g)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.GraphConv(F, 3)

        def forward(self, graph, feat, eweight=None):
            return self.conv(graph, feat, edge_weight=eweight)

    nn.GNNExplainer(Model().to(gpu), 1, num_epochs=2, log=False).explain_node(0, g, g.ndata["x"])


def test_geometry_writes_where_it_should(gpu):
    from dgl.geometry import farthest_point_sampler

    points = torch.randn(2, 30, 3)
    found = farthest_point_sampler(points.to(gpu), 5, 0)
    on(gpu, found)
    assert torch.equal(found.cpu(), farthest_point_sampler(points, 5, 0))
    for k in (dgl.knn_graph, lambda x, k: dgl.knn_graph(x, k, algorithm="kd-tree")):
        assert torch.equal(torch.stack(k(points[0].to(gpu), 3).edges()).cpu(), torch.stack(k(points[0], 3).edges()))


def test_products_of_adjacencies(gpu):
    g0 = dgl.to_simple(square().local_var())
    g0.edata["w"] = torch.rand(g0.num_edges())
    g = g0.to(gpu)
    for combine in (lambda g: dgl.adj_product_graph(g, g, "w"), lambda g: dgl.adj_sum_graph([g, g], "w")):
        found, expected = combine(g), combine(g0)
        on(gpu, found.edata["w"], found.edges()[0])
        same(found.edata["w"], expected.edata["w"])


def test_saved_graphs_come_back_on_the_host(gpu, tmp_path):
    g = square().to(gpu)
    dgl.save_graphs(str(tmp_path / "graphs"), [g])
    (back,), _ = dgl.load_graphs(str(tmp_path / "graphs"))
    assert back.device.type == "cpu" and torch.equal(back.ndata["x"], g.ndata["x"].cpu())


@pytest.mark.parametrize("name", ["GraphConv", "GATConv", "SAGEConv pool"])
def test_compiled(gpu, name):
    g, x = with_loops().to(gpu), node_features().to(gpu)
    layer = LAYERS[name][0]().to(gpu)
    expected = step(layer, g, x, ())
    compiled = torch.compile(layer, backend="eager")
    for a, b in zip([compiled(g, x).detach(), *step(compiled, g, x, ())[1:]], expected):
        assert relative_error(a.flatten(), b.flatten()) < 1e-4


def test_pinned_features(gpu):
    from dgl.utils import gather_pinned_tensor_rows, scatter_pinned_tensor_rows

    g, ids = square(), torch.tensor([4, 1, 4])
    if gpu.type == "cuda":
        g.ndata["x"] = g.ndata["x"].pin_memory()
    part = dgl.node_subgraph(g, ids[:2]).to(gpu)  # its features are taken from the pinned ones where they go
    on(gpu, part.ndata["x"])
    assert torch.equal(part.ndata["x"].cpu(), g.ndata["x"][ids[:2]])
    table = g.ndata["x"].clone()
    found = gather_pinned_tensor_rows(table, ids.to(gpu))
    on(gpu, found)
    assert torch.equal(found.cpu(), table[ids])
    scatter_pinned_tensor_rows(table, ids[:2].to(gpu), torch.zeros(2, F, device=gpu))
    assert not table[ids].any() and table[0].any()


def test_filter(gpu):
    ids = dgl.utils.Filter(torch.tensor([3, 2, 9], device=gpu))
    test = torch.tensor([0, 2, 8, 9], device=gpu)
    assert ids.find_included_indices(test).tolist() == [1, 3] and ids.find_excluded_indices(test).tolist() == [0, 2]


def test_off_and_on(gpu):
    before = copy.copy(vars(dgl.backend))
    g = square().to(gpu)
    expected = dgl.ops.copy_u_sum(g, g.ndata["x"])
    gnnfast.disable()
    try:
        assert "__call__" not in vars(dgl._ffi.function.Function)
        with pytest.raises(dgl.DGLError, match="not enabled"):
            square().to(gpu)
        assert g.cpu().device.type == "cpu"
    finally:
        gnnfast.enable()
    assert "__call__" in vars(dgl._ffi.function.Function)  # there are graphs on a GPU
    assert relative_error(dgl.ops.copy_u_sum(g, g.ndata["x"]), expected) < 1e-5 and g.int().device == gpu
    assert before.keys() == vars(dgl.backend).keys()


def test_steps_do_not_wait(gpu):
    """After the first, but for DGL's own check for nodes without edges."""
    if gpu.type != "cuda":
        pytest.skip("nothing waits for what is no GPU")
    g = with_loops().to(gpu)
    layers = [
        nn.SAGEConv(F, 4, "mean").to(gpu),
        nn.GATConv(F, 4, 2, allow_zero_in_degree=True).to(gpu),
        nn.GINConv(None, "max").to(gpu),
        nn.EdgeConv(F, 4, allow_zero_in_degree=True).to(gpu),
    ]
    x = torch.randn(N, F, device=gpu, requires_grad=True)

    def run():
        for layer in layers:
            layer(g, x).sum().backward()

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_threads(gpu):
    g0 = square()
    x = g0.ndata["x"]
    expected, found = dgl.ops.copy_u_sum(g0, x), []

    def run():
        with torch.cuda.stream(torch.cuda.Stream()) if gpu.type == "cuda" else torch.no_grad():
            g = g0.to(gpu)
            found.append(dgl.ops.copy_u_sum(g, x.to(gpu)).cpu())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4
    for out in found:
        same(out, expected)


def test_what_is_kept_dies_with_the_graph(gpu):
    import gc

    gc.collect()
    entries = len(cache)
    g = square().to(gpu)
    nn.GATConv(F, 4, 2).to(gpu)(g, g.ndata["x"]).sum().backward()
    assert len(cache) > entries
    del g
    gc.collect()
    assert len(cache) == entries
