"""DGL's layers and message passing with and without gnnfast."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from graphs import GRAPHS, relative_error

import gnnfast
from gnnfast.lazy.rows import FEW_ON_CPU

dgl = pytest.importorskip("dgl")
import dgl.function as fn  # noqa: E402
from dgl.nn import pytorch as nn  # noqa: E402

F = 8
REDUCTIONS = ["sum", "mean", "max", "min"]


def make(name, idtype=torch.int64):
    edge_index, num_src, num_dst = GRAPHS[name]()
    if num_src == num_dst:
        return dgl.graph((edge_index[0], edge_index[1]), num_nodes=num_src, idtype=idtype)
    data = {("u", "e", "v"): (edge_index[0], edge_index[1])}
    return dgl.heterograph(data, {"u": num_src, "v": num_dst}, idtype=idtype)


def gradients(f, *leaves):
    for _ in range(3):
        own = [t.detach().clone().requires_grad_() for t in leaves]
        out = f(*own)
        grad = torch.linspace(-1, 1, out.numel()).view_as(out)
        found = torch.autograd.grad(out, own, grad, allow_unused=True)
    return [out.detach(), *found]


def compare(f, *leaves, tolerance=1e-5, outputs_only=False):
    gnnfast.clear_report()
    found = gradients(f, *leaves)
    report = gnnfast.report()
    gnnfast.disable()
    try:
        expected = gradients(f, *leaves)
    finally:
        gnnfast.enable()
    for a, b in list(zip(found, expected))[: 1 if outputs_only else None]:
        assert (a is None) == (b is None)
        if b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape and relative_error(a, b) < tolerance
    return report


LAYERS = {
    "GraphConv": lambda: nn.GraphConv(F, 5, allow_zero_in_degree=True),
    "GraphConv wide": lambda: nn.GraphConv(F, 16, norm="right", allow_zero_in_degree=True),
    "SAGEConv mean": lambda: nn.SAGEConv(F, 5, "mean"),
    "SAGEConv gcn": lambda: nn.SAGEConv(F, 5, "gcn"),
    "SAGEConv pool": lambda: nn.SAGEConv(F, 5, "pool"),
    "GINConv sum": lambda: nn.GINConv(torch.nn.Linear(F, 5), "sum", learn_eps=True),
    "GINConv mean": lambda: nn.GINConv(torch.nn.Linear(F, 5), "mean"),
    "GINConv max": lambda: nn.GINConv(torch.nn.Linear(F, 5), "max"),
    "TAGConv": lambda: nn.TAGConv(F, 5),
    "SGConv": lambda: nn.SGConv(F, 5, k=2, allow_zero_in_degree=True),
    "APPNPConv": lambda: nn.APPNPConv(3, 0.1),
}


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("graph", ["random", "no_edges", "hub", "self_loops_and_duplicates", "isolated"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, graph, idtype):
    edge_index, num_src, num_dst = GRAPHS[graph]()
    n = max(num_src, num_dst)
    g = dgl.graph((edge_index[0], edge_index[1]), num_nodes=n, idtype=idtype)
    layer, x = LAYERS[name](), torch.randn(n, F)
    # DGL passes the gradient of a maximum over no edges to node 0, for a graph without edges; gnnfast passes it to nobody.
    wrong_in_dgl = graph == "no_edges" and name in ("SAGEConv pool", "GINConv max")
    report = compare(lambda x: layer(g, x), x, outputs_only=wrong_in_dgl)
    assert report.kernels and not report.fallbacks
    if name in ("GraphConv", "SAGEConv mean", "TAGConv", "SGConv"):
        w = torch.rand(edge_index.shape[1])
        report = compare(lambda x, w: layer(g, x, edge_weight=w), x, w)
        # Normalising the weights sums edge features, and multiplies them in a Python function.
        found = {p for p, _ in report.fallbacks if "<lambda>" not in p}
        assert found <= {"dgl copy_e_sum", "dgl copy_e"}


@pytest.mark.parametrize("kernel", ["gas", "gar"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", GRAPHS)
def test_update_all(name, reduce, kernel):
    g = make(name)
    x, w = torch.randn(g.num_src_nodes(), F), torch.rand(g.num_edges(), 1)

    def copy_u(x):
        with g.local_scope():
            g.srcdata["h"] = x
            g.update_all(fn.copy_u("h", "m"), getattr(fn, reduce)("m", "o"))
            return g.dstdata["o"]

    def u_mul_e(x, w):
        with g.local_scope():
            g.srcdata["h"], g.edata["w"] = x, w
            g.update_all(fn.u_mul_e("h", "w", "m"), getattr(fn, reduce)("m", "o"))
            return g.dstdata["o"]

    with gnnfast.override(kernel=kernel):
        for f, leaves in (
            (copy_u, (x,)),
            (u_mul_e, (x, w)),
            (u_mul_e, (x[:, 0], w[:, 0])),
            (u_mul_e, (x, torch.rand(g.num_edges(), F))),
        ):
            if g.num_edges() == 0 and reduce in ("max", "min"):
                gnnfast.disable()
                expected = f(*leaves)
                gnnfast.enable()
                assert torch.equal(f(*leaves), expected)  # DGL's backward pass fails, or gives node 0 a gradient
                continue
            assert not compare(f, *leaves).fallbacks


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_broadcasting(reduce):
    g = make("random")
    op = getattr(dgl.ops, f"u_mul_e_{reduce}")
    for x_shape, w_shape, served in (
        ((2, 4), (2, 1), True),
        ((2, 4), (1, 1), True),
        ((2, 4), (2, 4), True),
        ((2, 4), (1,), True),
        ((2, 3, 4), (2, 3, 1), True),
        ((2, 4), (1, 4), False),
        ((1,), (4,), False),
        ((2, 1), (2, 4), False),
    ):
        x, w = torch.randn(30, *x_shape), torch.randn(200, *w_shape)
        report = compare(lambda x, w: op(g, x, w), x, w)
        assert bool(report.fallbacks) == (not served) and (report.kernels or not served)


def test_rows_without_edges_are_as_in_dgl():
    g = make("isolated")
    x = torch.randn(6, F)
    for reduce, value in (("max", -float("inf")), ("min", float("inf")), ("sum", 0.0), ("mean", 0.0)):
        out = getattr(dgl.ops, f"copy_u_{reduce}")(g, x)
        assert (out[0] == value).all()
        gnnfast.disable()
        assert torch.equal(out, getattr(dgl.ops, f"copy_u_{reduce}")(g, x))
        gnnfast.enable()


def test_other_operators_fall_back():
    g = make("random")
    x, e = torch.randn(30, F), torch.randn(200, 2, 1)
    report = compare(lambda x, e: dgl.ops.u_add_e_sum(g, x, e), x, e)
    assert "dgl u_add_e_sum" in {p for p, _ in report.fallbacks}
    assert compare(lambda x, e: dgl.ops.e_add_v(g, e, x), x, e).fallbacks
    with pytest.raises(gnnfast.FallbackError, match="weights of shape"), gnnfast.override(strict=True):
        dgl.ops.u_add_e_sum(g, x, e)


def test_heterogeneous_graphs():
    data = {
        ("user", "follows", "user"): (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])),
        ("user", "plays", "game"): (torch.tensor([0, 0, 2]), torch.tensor([0, 1, 1])),
    }
    g = dgl.heterograph(data)
    conv = nn.HeteroGraphConv({"follows": nn.SAGEConv(F, 5, "mean"), "plays": nn.SAGEConv((F, F), 5, "mean")})
    x, y = torch.randn(3, F), torch.randn(2, F)

    def f(x, y):
        out = conv(g, {"user": x, "game": y})
        return torch.cat([out["user"], out["game"]])

    report = compare(f, x, y)
    assert report.kernels and not report.fallbacks
    assert "_gnnfast" in g._graph.__dict__  # relations made anew in each call find their structure again


def test_structure_is_made_once():
    from gnnfast.dgl.structure import structure

    g = make("random")
    x = torch.randn(30, F)
    for _ in range(3):
        with g.local_scope():
            g.ndata["h"] = x
            g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
    assert structure(g._graph) is structure(g._graph.get_relation_graph(0)) and structure(g._graph).uses == 3
    copy.deepcopy(g)  # the structure must not be in the way
    assert torch.equal(dgl.ops.copy_u_sum(copy.deepcopy(g), x), dgl.ops.copy_u_sum(g, x))


def test_minibatches_and_restricted_formats():
    g = make("hub_square") if "hub_square" in GRAPHS else make("random")
    sampler = dgl.dataloading.NeighborSampler([3, 3])
    layer, x = nn.SAGEConv(F, F, "mean"), torch.randn(g.num_nodes(), F)
    loader = dgl.dataloading.DataLoader(g, torch.arange(g.num_nodes()), sampler, batch_size=10)
    for _, _, blocks in loader:

        def f(x, blocks=blocks):
            h = x[blocks[0].srcdata[dgl.NID]]
            for block in blocks:
                h = layer(block, (h, h[: block.num_dst_nodes()]))
            return h

        assert not compare(f, x).fallbacks
    for formats in ("coo", "csr", "csc"):
        restricted = g.formats(formats)
        found = dgl.ops.copy_u_sum(restricted, x)
        assert relative_error(found, dgl.ops.copy_u_sum(g, x)) < 1e-6


def test_double_backward():
    g = make("random")
    w = torch.rand(200, 1, dtype=torch.float64)

    def f(x):
        (grad,) = torch.autograd.grad(dgl.ops.u_mul_e_sum(g, x, w).tanh().sum(), x, create_graph=True)
        return grad

    x = torch.randn(30, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(f, (x,))


def test_constant_sparse_features():
    nodes = 700
    g = dgl.graph((torch.randint(0, nodes, (3000,)), torch.randint(0, nodes, (3000,))), num_nodes=nodes)
    x, w = torch.rand(nodes, 512) * (torch.rand(nodes, 512) < 0.01), torch.rand(3000, 1, requires_grad=True)

    def run():
        out = dgl.ops.u_mul_e_sum(g, x, w)
        return out, *torch.autograd.grad(out, w, torch.ones_like(out)), dgl.ops.copy_u_mean(g, x)

    gnnfast.disable()
    expected = run()
    gnnfast.enable()
    for _ in range(3):
        for found, e in zip(run(), expected):
            assert found.shape == e.shape and relative_error(found, e) < 1e-5
    assert {"sparse features sum", "sparse features mean"} <= {kernel for _, kernel, _ in gnnfast.report().kernels}


def test_functions_that_are_not_built_in_are_counted():
    g = make("random")
    e = torch.randn(g.num_edges(), F)
    dgl.nn.GINEConv()(g, torch.randn(g.num_src_nodes(), F), e)
    with g.local_scope():
        g.edata["e"] = e
        g.apply_edges(lambda edges: {"e": edges.data["e"].clone().mul_(2)})
        g.update_all(dgl.function.copy_e("e", "m"), lambda nodes: {"o": nodes.mailbox["m"].std(1)})
    report = gnnfast.report()
    assert not any(place == "dgl GINEConv" for place, _ in report.fallbacks)  # whose relu(x + e) is known as it runs
    (why,) = {reason.partition("> ")[2] for place, reason in report.fallbacks if "edges" in reason and "lambda" in place}
    assert why == "is a Python function, which runs over rows of edges"
    assert any(reason.endswith("which runs degree by degree") for _, reason in report.fallbacks)
    assert all(note.advice for note in report.notes()) and "left to the framework" in report.headline()
    gnnfast.clear_report()
    g.filter_edges(lambda edges: torch.ones(len(edges)).bool())
    assert not gnnfast.report().fallbacks  # no message passing


def test_functions_over_few_edges_are_said_to_be_small(monkeypatch):
    monkeypatch.setattr("gnnfast.lazy.rows.FEW_ON_CPU", FEW_ON_CPU)

    def scaled(nodes, k):
        return {"o": nodes.mailbox["m"].sum(1) * k}

    g = dgl.graph(([0, 1, 2], [1, 2, 0]))
    g.ndata["h"] = torch.randn(3, 4)
    g.update_all(lambda edges: {"m": edges.src["h"]}, functools.partial(scaled, k=2))
    reasons = {place.rpartition(".")[2]: reason for place, reason in gnnfast.report().fallbacks}
    assert reasons.keys() == {"<lambda>", "scaled"}
    assert all(reason.endswith(" is too small to gain") for reason in reasons.values())
    assert "100% too small to gain" in gnnfast.report().headline()


def test_what_is_served_around_a_function_without_operations_needs_no_reason():
    g = make("random")
    g.edata["f"] = torch.randn(g.num_edges(), F)
    g.update_all(lambda edges: {"m": edges.data["f"]}, dgl.function.sum("m", "o"))
    (note,) = gnnfast.report().notes()
    assert note.why == "served in part, message() makes rows of edges"


def test_several_edge_types_at_once_are_counted():
    ids = torch.tensor([0, 1]), torch.tensor([1, 0])
    g = dgl.heterograph({("a", "x", "a"): ids, ("a", "y", "a"): ids})
    g.ndata["h"] = torch.ones(2, F)
    g.update_all(dgl.function.copy_u("h", "m"), dgl.function.sum("m", "o"))
    assert gnnfast.report().fallbacks == {("dgl copy_u_sum", "several edge types at once"): 1}
