"""DGL's message passing through its public functions, with gnnfast and without: operators, reductions, broadcasting, dtypes, ids and
kinds of graphs, with the gradients of both operands. On a GPU gnnfast alone computes, and DGL on the CPU is what it must equal."""

from __future__ import annotations

import itertools

import pytest
import torch
from graphs import GRAPHS, relative_error

import gnnfast

dgl = pytest.importorskip("dgl")
import dgl.function as fn  # noqa: E402

from gnnfast.dgl import bridge  # noqa: E402

IDS = [torch.int32, torch.int64]
# Of the features of both operands.
SHAPES = [((4,), (4,)), ((), ()), ((), (3,)), ((3,), (1,)), ((3, 4), (3, 1)), ((3, 1), (3, 4)), ((1, 4), (3, 1)), ((4,), (2, 3, 4))]
SHAPES += [((2, 3, 4), (2, 1, 1)), ((2, 3, 4), (3, 1))]
BINARY = ["add", "sub", "mul", "div"]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 3e-2}


@pytest.fixture
def device(device):
    if device.type == "cuda" and bridge.absent():
        pytest.skip(f"there is no bridge: {bridge.absent()}")
    return device


def ugly(name):
    def make(idtype):
        (src, dst), num_src, num_dst = GRAPHS[name]()
        return dgl.heterograph({("u", "e", "v"): (src, dst)}, {"u": num_src, "v": num_dst}, idtype=idtype)

    return make


def random(idtype, nodes=30, edges=150, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return dgl.graph(torch.randint(0, nodes, (2, edges), generator=generator).unbind(), num_nodes=nodes, idtype=idtype)


def block(idtype):
    g, seeds = random(idtype), torch.arange(9, dtype=idtype)
    return dgl.to_block(dgl.in_subgraph(g, seeds), seeds)


def batched(idtype):
    return dgl.batch([random(idtype, 5, 9), random(idtype, 3, 0, 1), random(idtype, 1, 4, 2), random(idtype, 8, 20, 3)])


KINDS = {
    **{name: ugly(name) for name in ("no_edges", "isolated", "self_loops_and_duplicates", "hub", "bipartite")},
    "block": block,
    "batched": batched,
    "reversed": lambda idtype: dgl.reverse(random(idtype)),
    "csc alone": lambda idtype: random(idtype).formats("csc"),
    "subgraph": lambda idtype: dgl.node_subgraph(random(idtype), torch.arange(0, 30, 2, dtype=idtype)),
    "relation": lambda idtype: dgl.heterograph(
        {("u", "a", "u"): ([0, 1], [1, 1]), ("u", "b", "v"): ([0, 0, 2, 1], [3, 3, 0, 1])}, idtype=idtype
    )["b"],
}


def operand(g, target, shape, dtype):
    """Away from 0, by which some operators divide, and without ties."""
    rows = {"u": g.num_src_nodes(), "v": g.num_dst_nodes(), "e": g.num_edges()}[target]
    t = torch.rand(rows, *shape, dtype=torch.float64) + 0.5
    return torch.where(torch.rand_like(t) < 0.5, t, -t).to(dtype)


def results(f, g, leaves):
    """Twice, by which graphs are known; then the result and the gradients."""
    for _ in range(2):
        own = [t.detach().clone().to(g.device).requires_grad_() for t in leaves]
        out = f(g, *own)
        score = out.masked_fill(out.isinf(), 0)  # gradients of rows without edges are lost in DGL on node 0
        score = score * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
        grads = torch.autograd.grad(score.sum(), own, allow_unused=True)
    return [out.detach(), *grads]


def compare(make, device, cases):
    """Of each ``(function, operands)``."""
    g = make().to(device)
    found = [results(f, g, leaves) for f, leaves in cases]
    gnnfast.disable()
    try:
        g = make()
        expected = [results(f, g, leaves) for f, leaves in cases]
        # 16 bits: DGL itself is wrong by their rounding, which also decides which edge a maximum comes from.
        exact = [results(f, g, [t.double() for t in leaves]) for f, leaves in cases]
    finally:
        gnnfast.enable()
    for (f, leaves), ours, theirs, truth in zip(cases, found, expected, exact, strict=True):
        for a, b, e in zip(ours, theirs, truth, strict=True):
            if b is None:
                assert a is None or not a.any()
                continue
            assert a.dtype == b.dtype and a.shape == b.shape and a.device.type == device.type
            half = a.dtype is torch.bfloat16
            if half and a is not ours[0] and f.__name__.endswith(("max", "min")):
                continue  # of edges that are equal but for rounding, either may have got the gradient
            error = relative_error(a.cpu().double(), e if half else b.double())
            assert error < TOLERANCES[a.dtype] or (half and error < 1.5 * relative_error(b.double(), e)), (f.__name__, leaves)


@pytest.mark.parametrize(("kind", "idtype"), zip(KINDS, itertools.cycle(IDS)))
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_aggregations(reduce, kind, idtype, device):
    make = lambda: KINDS[kind](idtype)  # noqa: E731
    g, cases = make(), []
    if not g.num_edges() and reduce in ("max", "min"):
        return  # in DGL the backward pass of a maximum over no edges fails
    if kind != "csc alone":  # for which DGL has no gradient of the weights
        for (op, (left, right)), dtype in zip(itertools.product(BINARY, SHAPES), itertools.cycle(TOLERANCES)):
            f = getattr(dgl.ops, f"u_{op}_e_{reduce}")
            cases.append((f, [operand(g, "u", left, dtype), operand(g, "e", right, dtype)]))
    for shape, dtype, target in itertools.product([(), (1,), (2, 3)], TOLERANCES, "ue"):
        if (kind, target) != ("csc alone", "e"):
            cases.append((getattr(dgl.ops, f"copy_{target}_{reduce}"), [operand(g, target, shape, dtype)]))
    compare(make, device, cases)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "csc alone"])  # for which DGL has no kernels
@pytest.mark.parametrize("op", [*BINARY, "dot"])
def test_edges(op, kind, device):
    for idtype in IDS:
        make = lambda idtype=idtype: KINDS[kind](idtype)  # noqa: E731
        g, cases = make(), []
        ends = itertools.product(itertools.permutations("uve", 2), SHAPES)
        for ((a, b), (left, right)), dtype in zip(ends, itertools.cycle(TOLERANCES)):
            if op != "dot" or (left or (1,))[-1] == (right or (1,))[-1]:
                cases.append((getattr(dgl.ops, f"{a}_{op}_{b}"), [operand(g, a, left, dtype), operand(g, b, right, dtype)]))
        compare(make, device, cases)


@pytest.mark.parametrize("idtype", IDS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("csc alone", "no_edges")])  # whose maxima fail in DGL
def test_update_all(kind, idtype, device):
    """Also of messages that DGL fuses with nothing, which have a ``v`` in them or are the other way round."""
    make = lambda: KINDS[kind](idtype)  # noqa: E731
    g, cases = make(), []
    for message, reduce in itertools.product(
        ("u_mul_e", "e_mul_u", "v_sub_e", "u_add_v", "copy_u", "copy_e"), ("sum", "mean", "max")
    ):
        ends = [t for t in message.split("_") if t in ("u", "v", "e")]

        def f(g, *data, message=message, reduce=reduce, ends=ends):
            with g.local_scope():
                for end, t in zip(ends, data):
                    {"u": g.srcdata, "v": g.dstdata, "e": g.edata}[end][f"x{end}"] = t
                g.update_all(getattr(fn, message)(*(f"x{end}" for end in ends), "m"), getattr(fn, reduce)("m", "out"))
                return g.dstdata["out"]

        cases.append((f, [operand(g, end, (3,), torch.float64) for end in ends]))
    compare(make, device, cases)


# ---- several edge types at once ------------------------------------------------------------------------------------------------
TYPES = {
    ("a", "x", "b"): ([], []),
    ("a", "y", "b"): ([0, 1, 0], [0, 0, 3]),
    ("b", "z", "a"): ([1, 3], [1, 0]),
}


def of_types(device):
    g = dgl.heterograph(TYPES, {"a": 3, "b": 5}).to(device)
    for i, kind in enumerate(g.ntypes):
        generator = torch.Generator().manual_seed(i)
        g.nodes[kind].data["h"] = torch.randn(g.num_nodes(kind), 2, generator=generator).double().to(device).requires_grad_()
    return g


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_the_first_edge_type_may_have_no_edges(reduce, device):
    """Where DGL leaves zeros in all nodes, or fails."""
    g = of_types(device)
    g.update_all(fn.copy_u("h", "m"), getattr(fn, reduce)("m", "out"))
    alone = getattr(dgl.ops, f"copy_u_{reduce}")
    for etype, kind, source in (("y", "b", "a"), ("z", "a", "b")):
        expected = alone(g[etype], g.nodes[source].data["h"])
        expected = expected.masked_fill(expected.isinf(), 0)
        assert expected.any() and torch.equal(g.nodes[kind].data["out"], expected)
    leaf = g.nodes["a"].data["h"]
    (grad,) = torch.autograd.grad(g.nodes["b"].data["out"].sum(), leaf)
    (expected,) = torch.autograd.grad(alone(g["y"], leaf).nan_to_num(0, 0, 0).sum(), leaf)
    assert torch.equal(grad, expected)
    g.apply_edges(fn.copy_u("h", "m"))
    assert torch.equal(g.edges["y"].data["m"], g.nodes["a"].data["h"][[0, 1, 0]])
    logits = {t: torch.randn(g.num_edges(t), 1, device=device) for t in g.canonical_etypes}
    for t, p in dgl.nn.functional.edge_softmax(g, logits).items():
        assert p.shape == logits[t].shape and (not p.numel() or relative_error(p, dgl.ops.edge_softmax(g[t], logits[t])) < 1e-6)


def test_maxima_of_products_of_several_edge_types_have_gradients(device):
    g = of_types(device)
    for t in g.canonical_etypes:
        g.edges[t].data["w"] = torch.rand(g.num_edges(t), 2, dtype=torch.float64, device=device).requires_grad_()
    g.update_all(fn.u_mul_e("h", "w", "m"), fn.max("m", "out"))
    leaves = [g.nodes["a"].data["h"], g.edges["y"].data["w"]]
    found = torch.autograd.grad(g.nodes["b"].data["out"].square().sum(), leaves)
    out = dgl.ops.u_mul_e_max(g["y"], *leaves)
    expected = torch.autograd.grad(out.masked_fill(out.isinf(), 0).square().sum(), leaves)
    assert all(relative_error(a, b) < 1e-10 for a, b in zip(found, expected))


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_operands_without_features_are_dgls(op, reduce):
    """On a graph without edges; with some DGL has its own error."""
    results = {}
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        g = dgl.graph(([], []), num_nodes=4)
        results[on] = [getattr(dgl.ops, f"u_{op}_e_{reduce}")(g, torch.zeros(4, 0), torch.zeros(0, 0)).shape for _ in range(3)]
    gnnfast.enable()
    assert results[True] == results[False]


@pytest.mark.parametrize("targets", ["ue", "ev", "uv", "vu", "ve"])
@pytest.mark.parametrize("op", [*BINARY, "dot"])
def test_float16_on_a_cpu(op, targets):
    """For which DGL has no kernels."""
    for shapes in (((4,), (4,)), ((3, 4), (3, 1))):
        if op == "dot" and shapes[0] != shapes[1]:
            continue
        g = random(torch.int64)
        rows = {"u": g.num_nodes(), "v": g.num_nodes(), "e": g.num_edges()}
        narrow = [(torch.rand(rows[t], *shape) + 0.5).half().requires_grad_() for t, shape in zip(targets, shapes)]
        wide = [t.detach().float().requires_grad_() for t in narrow]
        calls = [getattr(dgl.ops, f"{targets[0]}_{op}_{targets[1]}")]
        if targets == "ue" and op != "dot":
            calls += [getattr(dgl.ops, f"u_{op}_e_{reduce}") for reduce in ("sum", "mean", "max", "min")]
        for call in calls:
            found, expected = call(g, *narrow), call(g, *wide)
            found, expected = found.nan_to_num(posinf=0, neginf=0), expected.nan_to_num(posinf=0, neginf=0)
            gradients = [torch.autograd.grad(t.sum(), given) for t, given in ((found, narrow), (expected, wide))]
            assert found.dtype is torch.float16
            if call.__name__.endswith(("max", "min")):
                gradients = [(), ()]  # rounded, other messages may be the largest
            for a, b in zip((found, *gradients[0]), (expected, *gradients[1])):
                assert relative_error(a.float(), b) < 5e-3
