"""``update_all`` without DGL's views of the graph: infinite maxima become 0 as in DGL, and what it does not serve stays DGL's."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import relative_error

import gnnfast

dgl = pytest.importorskip("dgl")
import dgl.function as fn  # noqa: E402

from gnnfast.dgl import bridge  # noqa: E402

MESSAGES = {
    "copy_u": lambda: fn.copy_u("x", "m"),
    "copy_e": lambda: fn.copy_e("e", "m"),
    **{f"u_{op}_e": lambda op=op: getattr(fn, f"u_{op}_e")("x", "e", "m") for op in ("add", "sub", "mul", "div")},
}


@pytest.fixture
def device(device):
    if device.type == "cuda" and bridge.absent():
        pytest.skip(f"there is no bridge: {bridge.absent()}")
    return device


def features(rows, width, dtype, infinite):
    """No message is NaN, which DGL's maxima skip."""
    t = torch.rand(rows, width, generator=torch.Generator().manual_seed(rows), dtype=dtype) + 0.5
    if infinite:
        t[::5, ::2], t[1::5, 1::2] = math.inf, -math.inf
        t[2::5] *= -1
        t[0], t[8] = 1.01, 1.02  # where DGL has the gradients of rows without edges: at the first edge, which node 8 begins
    return t


def random(nodes=40, edges=130):
    ends = torch.randint(0, nodes - 4, (2, edges), generator=torch.Generator().manual_seed(0))  # the last are isolated
    return dgl.graph(tuple(ends), num_nodes=nodes)


@pytest.mark.parametrize("width", [1, 5, 16])
@pytest.mark.parametrize("train", ["", "x", "e", "xe"])
@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_infinite_extrema_are_those_of_dgl(device, reduce, message, train, width):
    g = random()
    dtype = torch.float64 if train else torch.float32  # of which DGL has other maxima where several edges tie
    x, e = features(40, width, dtype, True), features(130, 1, dtype, False)
    if message == "copy_e":
        e = features(130, width, dtype, True)

    def run(g, x, e):
        x, e = x.clone().requires_grad_("x" in train), e.clone().requires_grad_("e" in train)
        g.ndata["x"], g.edata["e"] = x, e
        g.update_all(MESSAGES[message](), getattr(fn, reduce)("m", "o"))
        out = g.ndata["o"]
        assert list(g.ndata) == ["x", "o"] and list(g.edata) == ["e"]
        if not out.requires_grad:
            return [out]
        seed = torch.linspace(1, 2, out.numel(), dtype=dtype).view_as(out).to(out.device)
        return [out, *torch.autograd.grad(out, [t for t in (x, e) if t.requires_grad], seed, allow_unused=True)]

    found = run(g.to(device), x.to(device), e.to(device))
    gnnfast.disable()
    try:
        expected = run(g.local_var(), x, e)
    finally:
        gnnfast.enable()
    for a, b in zip(found, expected, strict=True):
        if b is None:
            assert a is None or not a.any()
            continue
        a = a.detach().cpu()
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
        assert relative_error(a[a.isfinite()], b.detach()[b.isfinite()]) < 1e-6


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_second_derivatives_pass_by_what_is_infinite(device, reduce):
    g = random().to(device)
    x = torch.randn(40, 3, dtype=torch.float64)
    x[::7] = math.inf if reduce == "max" else -math.inf
    x = x.to(device).requires_grad_()

    def out(x):
        with g.local_scope():
            g.ndata["x"] = x
            g.update_all(fn.copy_u("x", "m"), getattr(fn, reduce)("m", "o"))
            return g.ndata["o"]

    seed = torch.randn(40, 3, dtype=torch.float64, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(out(x), x, seed, create_graph=True)
    assert not first[x.isinf()].any() and first.any()
    (back,) = torch.autograd.grad(first.square().sum(), seed)
    assert torch.equal(back != 0, (out(x) != 0) & (back != 0)) and back.any()


def test_blocks_and_bipartite_graphs(device):
    g = random()
    of_block = dgl.to_block(dgl.in_subgraph(g, torch.arange(9)), torch.arange(9))
    bipartite = dgl.heterograph({("z", "e", "a"): ([0, 1, 2, 2], [0, 0, 1, 3])}, {"a": 5, "m": 2, "z": 3})
    for each in (of_block, bipartite):
        etype, on_device = each.canonical_etypes[0], each.to(device)
        x = torch.randn(each.num_nodes(etype[0]) if each is bipartite else each.num_src_nodes(), 4)
        (on_device.nodes[etype[0]] if each is bipartite else on_device.srcnodes[etype[0]]).data["h"] = x.to(device)
        on_device.update_all(fn.copy_u("h", "m"), fn.max("m", "o"))
        found = (on_device.nodes[etype[2]] if each is bipartite else on_device.dstnodes[etype[2]]).data["o"]
        src, dst = each.edges()
        expected = torch.zeros(found.shape[0], 4).scatter_reduce_(
            0, dst.unsqueeze(1).expand(-1, 4), x[src], "amax", include_self=False
        )
        assert torch.equal(found.cpu(), expected)


def test_what_is_not_served_stays_with_dgl(device):
    g = random().to(device)
    g.ndata["x"], g.edata["e"] = torch.randn(40, 4, device=device), torch.rand(130, 1, device=device)
    with pytest.raises(dgl.DGLError, match="Invalid message"):
        g.update_all(fn.copy_u("x", "m"), fn.sum("other", "o"))
    with pytest.raises(KeyError, match="nothing"):
        g.update_all(fn.copy_u("nothing", "m"), fn.sum("m", "o"))
    g.update_all(fn.copy_u("x", "m"), fn.sum("m", "o"), lambda nodes: {"o": nodes.data["o"] + 1})
    plain = dgl.ops.copy_u_sum(g, g.ndata["x"])
    assert torch.allclose(g.ndata["o"], plain + 1)
    g.update_all(lambda edges: {"m": edges.src["x"]}, fn.sum("m", "p"))
    assert torch.allclose(g.ndata["p"], plain, atol=1e-5)
    g.update_all(fn.u_add_v("x", "x", "m"), fn.sum("m", "q"), etype="_E")
    assert g.ndata["q"].shape == (40, 4)

    class Graph(dgl.DGLGraph):
        def __getitem__(self, key):
            raise RuntimeError("asked for a relation")

    own = g.local_var()
    own.__class__ = Graph
    with pytest.raises(RuntimeError, match="asked for a relation"):
        own.update_all(fn.copy_u("x", "m"), fn.sum("m", "o"))


def test_update_all_reports_the_operator(device):
    g = random().to(device)
    g.ndata["x"] = torch.randn(40, 4, device=device)
    gnnfast.clear_report()
    with gnnfast.override(strict=True):
        g.update_all(fn.copy_u("x", "m"), fn.max("m", "o"))
    assert {place: calls for (place, _, _), calls in gnnfast.report().kernels.items()} == {"dgl copy_u_max": 1}
