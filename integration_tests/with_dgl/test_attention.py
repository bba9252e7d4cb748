"""DGL's edge_softmax and dot products of edges, and the attention layers made of them, with and without gnnfast."""

from __future__ import annotations

import math

import pytest
import torch
from comparison import compare
from graphs import GRAPHS, relative_error

import gnnfast

dgl = pytest.importorskip("dgl")
from dgl.nn import pytorch as nn  # noqa: E402
from dgl.nn.functional import edge_softmax  # noqa: E402

IDS = [torch.int32, torch.int64]
TIGHT = 1e-9


class Op(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.forward = f


def make(name, idtype=torch.int64):
    (src, dst), num_src, num_dst = GRAPHS[name]()
    return dgl.heterograph({("u", "e", "v"): (src, dst)}, {"u": num_src, "v": num_dst}, idtype=idtype)


def square(name, idtype=torch.int64):
    (src, dst), num_src, num_dst = GRAPHS[name]()
    return dgl.graph((src, dst), num_nodes=max(num_src, num_dst), idtype=idtype)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# ---- edge softmax --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("idtype", IDS)
@pytest.mark.parametrize("by", ["dst", "src"])
@pytest.mark.parametrize("name", GRAPHS)
def test_edge_softmax(name, by, idtype):
    for g in (make(name, idtype), square(name, idtype)):
        for shape in ((), (1,), (3,), (3, 1), (8, 1), (2, 3, 1), (0,)):
            s = randn(g.num_edges(), *shape)
            report = compare(Op(lambda g, s: edge_softmax(g, s, norm_by=by)), g, s, tolerance=TIGHT)
            assert {k[:2] for k in report.kernels} == {("dgl edge_softmax", "edge softmax")} and not report.fallbacks


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_edge_softmax_dtypes(dtype, tolerance):
    g = square("hub")
    compare(Op(dgl.ops.edge_softmax), g, torch.randn(g.num_edges(), 4, 1).to(dtype), tolerance=tolerance)


@pytest.mark.parametrize("by", ["dst", "src"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_edge_softmax_of_what_is_not_finite(value, by):
    g, s = square("random"), randn(200, 2)
    s[::7, 0] = value
    s[g.in_edges(g.edges()[1][0], form="eid")] = -math.inf  # a whole row
    found = edge_softmax(g, s, norm_by=by)
    gnnfast.disable()
    expected = edge_softmax(g, s, norm_by=by)
    gnnfast.enable()
    assert relative_error(found, expected) < TIGHT


def test_edge_softmax_of_views():
    g, base = square("random"), randn(8, 200)
    for view in (base.t(), base[:1].expand(3, 200).t(), base.t()[:, ::2], base.t().unsqueeze(-1)):
        s = view.detach().requires_grad_()
        grad = randn(*view.shape[1:], 200).movedim(-1, 0)
        found = dgl.ops.edge_softmax(g, s), *torch.autograd.grad(dgl.ops.edge_softmax(g, s), s, grad)
        gnnfast.disable()
        t = view.detach().contiguous().requires_grad_()
        expected = dgl.ops.edge_softmax(g, t), *torch.autograd.grad(dgl.ops.edge_softmax(g, t), t, grad.contiguous())
        gnnfast.enable()
        assert all(relative_error(a, b) < TIGHT for a, b in zip(found, expected))


def test_edge_softmax_has_a_second_derivative():
    g = square("self_loops_and_duplicates")
    s = randn(g.num_edges(), 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda s: dgl.ops.edge_softmax(g, s), (s,))


def test_edge_softmax_steps_aside():
    g, s = square("random"), randn(200, 2)
    some = torch.arange(0, 200, 3)
    report = compare(Op(lambda g, s: edge_softmax(g, s, eids=some)), g, s[some], tolerance=TIGHT)
    assert report.fallbacks == {("dgl edge_softmax", "only some edges take part"): 3} and not report.kernels
    with pytest.raises(gnnfast.FallbackError, match="some edges"), gnnfast.override(strict=True):
        edge_softmax(g, s[some], eids=some)
    hetero = dgl.heterograph({("a", "x", "a"): ([0, 1, 2], [1, 1, 0]), ("b", "y", "a"): ([0, 1], [1, 1])})
    scores = {"x": randn(3, 1), "y": randn(2, 1)}
    found = edge_softmax(hetero, scores)  # over all types at once
    gnnfast.disable()
    expected = edge_softmax(hetero, scores)
    gnnfast.enable()
    assert all(torch.equal(found[k], expected[k]) for k in expected)
    assert not compare(Op(lambda g, s: edge_softmax(g["x"], s)), hetero, scores["x"], tolerance=TIGHT).fallbacks  # over one


# ---- dot products --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("idtype", IDS)
@pytest.mark.parametrize("name", GRAPHS)
def test_dot(name, idtype):
    g = make(name, idtype)
    for shape in ((), (1,), (7,), (4, 16), (2, 3, 5), (3, 1)):
        a, b = randn(g.num_src_nodes(), *shape), randn(g.num_dst_nodes(), *shape)
        for op, x, y in ((dgl.ops.u_dot_v, a, b), (dgl.ops.v_dot_u, b, a)):
            report = compare(Op(op), g, x, y, tolerance=TIGHT)
            assert {k[0] for k in report.kernels} == {f"dgl {op.__name__}"} and not report.fallbacks
            with torch.no_grad():
                found = op(make(name, idtype), x, y)  # over COO
                gnnfast.disable()
                assert relative_error(found, op(g, x, y)) < TIGHT
                gnnfast.enable()


def test_dot_of_no_features():
    g, a, b = square("random"), randn(30, 2, 0).requires_grad_(), randn(30, 2, 0)
    out = dgl.ops.u_dot_v(g, a, b)  # DGL asks for contiguous memory, and finds none
    assert torch.equal(out, out.new_zeros(200, 2, 1))
    assert torch.autograd.grad(out.sum(), a)[0].shape == a.shape


@pytest.mark.parametrize("which", [0, 1])
def test_dot_with_one_gradient_keeps_what_dgl_keeps(which):
    g = square("random")

    def run():
        operands = [t.clone() for t in values]
        leaf = operands[which].requires_grad_()
        hidden = [t * 1 for t in operands]
        out = dgl.ops.u_dot_v(g, *hidden)
        hidden[which].relu_()  # its own gradient does not need it
        return torch.autograd.grad(out.sum(), leaf)[0]

    values = randn(30, 2, 4), randn(30, 2, 4)
    found = run()
    gnnfast.disable()
    expected = run()
    gnnfast.enable()
    assert relative_error(found, expected) < TIGHT


def test_dot_of_views_and_its_second_derivative():
    g = square("self_loops_and_duplicates")
    a, b = randn(4, 3).t().requires_grad_(), randn(4, 3).t().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: dgl.ops.u_dot_v(g, a, b), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: dgl.ops.u_dot_v(g, a, b), (a, b))
    gnnfast.disable()
    expected = dgl.ops.u_dot_v(g, a.contiguous(), b.contiguous())
    gnnfast.enable()
    assert relative_error(dgl.ops.u_dot_v(g, a, b), expected) < TIGHT


def test_other_operators_of_edges_are_left_to_dgl():
    g, x, y, e = square("random"), randn(30, 2, 4), randn(30, 2, 4), randn(200, 2, 4)
    for name, left, right in (
        ("u_add_v", x, y),
        ("v_sub_u", x, y),
        ("u_mul_e", x, e),
        ("e_div_v", e, y),
        ("e_dot_v", e, y),
        ("u_dot_v", x, y[:, :1]),
    ):
        report = compare(Op(getattr(dgl.ops, name)), g, left, right, tolerance=TIGHT)
        assert f"dgl {name}" in {place for place, _ in report.fallbacks}
    with pytest.raises(dgl.DGLError):
        dgl.ops.u_dot_v(g, x, y.float())


# ---- layers ----------------------------------------------------------------------------------------------------------------------
LAYERS = {
    "EdgeGATConv": lambda: nn.EdgeGATConv(8, 3, 4, 2, allow_zero_in_degree=True),
    "HGTConv": lambda: nn.HGTConv(8, 4, 2, 1, 1),
}


@pytest.mark.parametrize("idtype", IDS)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layer(layer, name, idtype):
    g = square(name, idtype)
    inputs = [randn(g.num_nodes(), 8)]
    if layer == "EdgeGATConv":
        inputs.append(randn(g.num_edges(), 3))
    if layer == "HGTConv":
        inputs += [torch.zeros(g.num_nodes(), dtype=torch.int64), torch.zeros(g.num_edges(), dtype=torch.int64)]
    module = LAYERS[layer]().double()
    report = compare(module, g, *inputs, tolerance=TIGHT)
    whole = layer == "HGTConv" and g.num_edges() > 0  # in test_relational.py
    assert ("dgl edge_softmax" in {k[0] for k in report.kernels}) != whole
    left = {"EdgeGATConv": {"dgl u_add_v", "dgl u_add_e"}, "HGTConv": {"dgl HGTConv"}}[layer]  # the message() of the latter
    assert {place for place, _ in report.fallbacks} == (set() if whole else left)
