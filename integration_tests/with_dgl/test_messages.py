"""Message passing without DGL's kernels equals that with them, which run on the CPU: over graphs there, and on a GPU over those that
the bridge puts there."""

from __future__ import annotations

import itertools

import pytest
import torch
from comparison import without
from graphs import GRAPHS, TOLERANCE, relative_error

dgl = pytest.importorskip("dgl")
from gnnfast.dgl import bridge, messages  # noqa: E402

SHAPES = {  # of the features of lhs and rhs: plain, numbers, per head, and broadcast in either, in both and by dimensions
    "equal": ((4,), (4,)),
    "numbers": ((), ()),
    "number_and_row": ((), (3,)),
    "row_and_number": ((3,), (1,)),
    "heads": ((3, 4), (3, 1)),
    "heads_reversed": ((3, 1), (3, 4)),
    "outer": ((1, 4), (3, 1)),
    "more_dimensions": ((4,), (2, 3, 4)),
    "fewer_dimensions": ((2, 3, 4), (4,)),
}
ONE = ("copy_lhs", "copy_rhs")
OPS = ("add", "sub", "mul", "div", *ONE)


@pytest.fixture
def device(device):
    if device.type == "cuda" and bridge.absent():
        pytest.skip(f"there is no bridge: {bridge.absent()}")
    return device


def make(name, idtype=torch.int64):
    (src, dst), num_src, num_dst = GRAPHS[name]()
    if num_src == num_dst:
        return dgl.graph((src, dst), num_nodes=num_src, idtype=idtype)
    return dgl.heterograph({("u", "e", "v"): (src, dst)}, {"u": num_src, "v": num_dst}, idtype=idtype)


def rows(g, target):
    return {"u": g.num_src_nodes(), "v": g.num_dst_nodes(), "e": g.num_edges()}[target]


def operand(g, target, shape, dtype=torch.float64):
    """Away from 0, by which some operators divide."""
    t = torch.rand(rows(g, target), *shape, dtype=dtype) + 0.5
    return torch.where(torch.rand_like(t) < 0.5, t, -t)


def run(f, device, *leaves):
    """A result and the gradients of what it is of, ``None`` left out."""
    own = [None if t is None else t.detach().clone().to(device).requires_grad_() for t in leaves]
    out = f(*own)
    outs = out if isinstance(out, tuple) else (out,)
    outs = [o for o in outs if o is not None and o.requires_grad]
    # Gradients of infinities, of rows without edges, are lost in DGL on node 0.
    scores = [
        (o.masked_fill(o.isinf(), 0) * torch.linspace(-1, 1, o.numel(), device=o.device, dtype=o.dtype).view_as(o)) for o in outs
    ]
    wanted = [t for t in own if t is not None]
    grads = torch.autograd.grad(sum(s.sum() for s in scores), wanted, allow_unused=True) if outs else []
    return [o.detach() for o in outs], list(grads)


def compare(ours, theirs, device, *leaves, tolerance=1e-10):
    """Of which ``ours`` runs on the device."""
    found, expected = run(ours, device, *leaves), without(lambda: run(theirs, "cpu", *leaves))
    for a, b in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        if b is None:  # DGL hands out no gradient where gnnfast may give zeros
            assert a is None or not a.any()
            continue
        assert a.dtype == b.dtype and a.shape == b.shape and a.device.type == torch.device(device).type
        assert relative_error(a.cpu(), b) < tolerance


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
@pytest.mark.parametrize("op", OPS)
def test_gspmm(device, op, reduce, name):
    from dgl.backend.pytorch import sparse

    for idtype, (lhs, rhs) in zip(itertools.cycle((torch.int64, torch.int32)), SHAPES.values()):
        g = make(name, idtype)
        if not g.num_edges() and reduce != "sum":
            continue  # in DGL the backward pass of a maximum over no edges fails
        own = g.to(device)
        x = None if op == "copy_rhs" else operand(g, "u", lhs)
        e = None if op == "copy_lhs" else operand(g, "e", rhs)
        if x is not None and e is not None:
            x, e = dgl.ops.spmm.reshape_lhs_rhs(x, e)
        compare(
            lambda x, e, own=own: messages.gspmm(own._graph, op, reduce, x, e),
            lambda x, e, g=g: sparse.gspmm(g._graph, op, reduce, x, e),
            device,
            x,
            e,
        )


@pytest.mark.parametrize("name", ["no_edges", "isolated", "random", "bipartite"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "dot", *ONE])
def test_gsddmm(device, op, name):
    from dgl.backend.pytorch import sparse

    g = make(name)
    own = g.to(device)
    for (lt, rt), (lhs, rhs) in itertools.product(itertools.product("uve", repeat=2), SHAPES.values()):
        if op == "dot" and (lhs or (1,))[-1] != (rhs or (1,))[-1]:
            continue
        x = None if op == "copy_rhs" else operand(g, lt, lhs)
        y = None if op == "copy_lhs" else operand(g, rt, rhs)
        if x is not None and y is not None:
            x, y = dgl.ops.sddmm.reshape_lhs_rhs(x, y)
        if lt == rt and op not in ("add", "sub", *ONE):  # DGL's gradient of a product of the same end is that of something else
            x, y = (None if t is None else t.detach() for t in (x, y))
            found = messages.gsddmm(own._graph, op, x.to(device), y.to(device), lt, rt)
            assert (
                relative_error(found.cpu(), without(lambda x=x, y=y, lt=lt, rt=rt: sparse.gsddmm(g._graph, op, x, y, lt, rt)))
                < 1e-10
            )
            continue
        compare(
            lambda x, y, lt=lt, rt=rt: messages.gsddmm(own._graph, op, x, y, lt, rt),
            lambda x, y, lt=lt, rt=rt: sparse.gsddmm(g._graph, op, x, y, lt, rt),
            device,
            x,
            y,
        )


@pytest.mark.parametrize("norm_by", ["dst", "src"])
@pytest.mark.parametrize("name", GRAPHS)
def test_edge_softmax(device, name, norm_by):
    from dgl.backend.pytorch import sparse

    g = make(name)
    own = g.to(device)
    for shape in ((), (1,), (3,), (2, 3)):
        s = operand(g, "e", shape)
        compare(
            lambda s: messages.edge_softmax(own._graph, s, messages.ALL, norm_by),
            lambda s: sparse.edge_softmax(g._graph, s, norm_by=norm_by),
            device,
            s,
        )
        some = torch.randperm(g.num_edges())[: g.num_edges() // 2]
        compare(
            lambda s, some=some: messages.edge_softmax(own._graph, s, some.to(device), norm_by),
            lambda s, some=some: sparse.edge_softmax(g._graph, s, some, norm_by),
            device,
            s[: some.numel()],
        )


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_segments(device, op, idtype):
    from dgl.backend.pytorch import sparse

    for lengths in ([3, 0, 1, 4], [0, 0], [5], [0, 2, 0]):
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=idtype)
        for shape in ((), (3,), (2, 3)):
            x = torch.randint(0, 3, (sum(lengths), *shape)).double()  # ties
            compare(
                lambda x, o=offsets: messages.segment_reduce(op, x, o.to(device)),
                lambda x, o=offsets: sparse.segment_reduce(op, x, o.long()),
                device,
                x,
            )


def test_products_of_rows(device):
    from dgl.backend.pytorch import sparse

    a, b, lengths = torch.randn(9, 4).double(), torch.randn(3, 4, 5).double(), torch.tensor([4, 0, 5])
    compare(lambda a, b: messages.segment_mm(a, b, lengths), lambda a, b: sparse.segment_mm(a, b, lengths), device, a, b)
    idx = torch.randint(0, 3, (9,))
    compare(
        lambda a, b: messages.gather_mm(a, b, None, idx.to(device)), lambda a, b: sparse.gather_mm(a, b, None, idx), device, a, b
    )
    own = messages.scatter_add(a.to(device), idx.to(device), 5).cpu()
    assert torch.equal(own, sparse.scatter_add(a, idx, 5))


HETERO = {
    ("a", "x", "b"): ([0, 1, 2, 2], [0, 1, 1, 1]),
    ("a", "y", "b"): ([0, 1, 0], [0, 0, 3]),
    ("b", "z", "a"): ([1, 3], [1, 0]),
    ("b", "zz", "b"): ([1, 3, 3], [1, 0, 0]),
}


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
@pytest.mark.parametrize("op", OPS)
def test_gspmm_of_several_types(device, op, reduce):
    from dgl.backend.pytorch import sparse

    g = dgl.heterograph(HETERO, {"a": 3, "b": 5})
    own = g.to(device)
    lhs = [None if op == "copy_rhs" else torch.randn(n, 2).double() for n in (3, 5)]
    rhs = [None if op == "copy_lhs" else torch.rand(n, 2).double() + 0.5 for n in (4, 3, 2, 3)]
    ours = lambda *t: messages.gspmm_hetero(own._graph, op, reduce, 2, *t)  # noqa: E731
    theirs = lambda *t: sparse.gspmm_hetero(g._graph, op, reduce, 2, *t)  # noqa: E731
    with torch.no_grad():
        found, expected = ours(*(None if t is None else t.to(device) for t in lhs + rhs)), without(lambda: theirs(*lhs, *rhs))
    assert all(relative_error(a.cpu(), b) < 1e-10 for a, b in zip(found, expected, strict=True))
    given = [t.to(device).requires_grad_() for t in lhs + rhs if t is not None]

    def finite(*given):  # DGL's own backward passes fail where types have different relations
        it = iter(given)
        return tuple(o.masked_fill(o.isinf(), 0) for o in ours(*(None if t is None else next(it) for t in lhs + rhs)))

    assert torch.autograd.gradcheck(finite, given, atol=1e-6)


def test_the_first_relation_may_have_no_edges(device):
    """Where DGL computes nothing at all."""
    g = dgl.heterograph(HETERO | {("a", "x", "b"): ([], [])}, {"a": 3, "b": 5})
    x = [torch.randn(3, 2).double(), torch.randn(5, 2).double()]
    for reduce in ("sum", "max"):
        out = messages.gspmm_hetero(g.to(device)._graph, "copy_lhs", reduce, 2, *(t.to(device) for t in x), *[None] * 4)[1].cpu()
        each = [getattr(dgl.ops, f"copy_u_{reduce}")(g[t], x[g.get_ntype_id(t[0])]) for t in g.canonical_etypes[1:] if t[2] == "b"]
        expected = sum(each) if reduce == "sum" else torch.maximum(*each)
        assert relative_error(out, expected) < 1e-10
        assert not each or out.isfinite().any()


@pytest.mark.parametrize("targets", ["uv", "ve", "eu"])
@pytest.mark.parametrize("op", ["add", "mul", "dot", *ONE])
def test_gsddmm_of_several_types(device, op, targets):
    from dgl.backend.pytorch import sparse

    g = dgl.heterograph(HETERO, {"a": 3, "b": 5})
    own = g.to(device)
    data = [
        [None if op == other else torch.randn(n, 2).double() for n in ((4, 3, 2, 3) if t == "e" else (3, 5))]
        for t, other in zip(targets, reversed(ONE))
    ]
    counts = len(data[0])
    with torch.no_grad():
        found = messages.gsddmm_hetero(
            own._graph, op, counts, *targets, *(None if t is None else t.to(device) for t in data[0] + data[1])
        )
        expected = without(lambda: sparse.gsddmm_hetero(g._graph, op, counts, *targets, *data[0], *data[1]))
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a.cpu(), b) < 1e-10


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_edge_softmax_of_several_types(device, norm_by):
    from dgl.backend.pytorch import sparse

    g = dgl.heterograph(HETERO, {"a": 3, "b": 5})
    own = g.to(device)
    scores = [torch.randn(n, 2).double() for n in (4, 3, 2, 3)]
    ours = lambda *s: messages.edge_softmax_hetero(own._graph, messages.ALL, norm_by, *s)  # noqa: E731
    with torch.no_grad():
        found, expected = (
            ours(*(s.to(device) for s in scores)),
            without(lambda: sparse.edge_softmax_hetero(g._graph, "__ALL__", norm_by, *scores)),
        )
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a.cpu(), b) < 1e-10
    leaves = [s.to(device).requires_grad_() for s in scores]
    assert torch.autograd.gradcheck(ours, leaves, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(device, dtype):
    from dgl.backend.pytorch import sparse

    g = make("random")
    own, x, e = g.to(device), operand(g, "u", (4,)).to(dtype), operand(g, "e", (4,)).to(dtype)
    for op, reduce in itertools.product(OPS, ("sum", "max")):
        arguments = [None if op == other else t for t, other in ((x, "copy_rhs"), (e, "copy_lhs"))]
        with torch.no_grad():
            found = messages.gspmm(own._graph, op, reduce, *(None if t is None else t.to(device) for t in arguments))
            wide = [None if t is None else t.double() for t in arguments]
            expected = without(lambda op=op, reduce=reduce, wide=wide: sparse.gspmm(g._graph, op, reduce, *wide))
        assert found.dtype == dtype and relative_error(found.cpu(), expected) < TOLERANCE[dtype] * 3


def test_second_derivatives(device):
    g = make("random")
    own = g.to(device)._graph
    x, e, s = (t.to(device).requires_grad_() for t in (operand(g, "u", (2,)), operand(g, "e", (2,)), operand(g, "v", (2,))))
    for f in (
        lambda x, e, s: messages.gspmm(own, "add", "sum", x.tanh(), e.tanh()),
        lambda x, e, s: messages.gsddmm(own, "mul", x, s, "u", "v").tanh(),
        lambda x, e, s: messages.gspmm(own, "copy_rhs", "mean", None, e.tanh()),
    ):
        leaves = [t.detach()[:].requires_grad_() for t in (x, e, s)]
        out = f(*leaves)
        grads = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=True, allow_unused=True)
        loss = sum(t.pow(2).sum() for t in grads if t is not None)
        assert any(t is not None and t.abs().sum() > 0 for t in torch.autograd.grad(loss, leaves, allow_unused=True))
    assert torch.autograd.gradgradcheck(lambda x: messages.gsddmm(own, "mul", x, s.detach(), "u", "v"), (x,))


def test_what_does_not_fit_is_said(device):
    own = make("random").to(device)._graph
    x, e = torch.randn(30, 4, device=device), torch.randn(200, 4, device=device)
    for arguments, message in (
        (("copy_lhs", "sum", x[1:], None), "U_data to have size 30"),
        (("copy_rhs", "sum", None, e[1:]), "E_data to have size 200"),
        (("add", "sum", x, e[:, :3]), "not valid for broadcasting"),
        (("mul", "max", x, e.double()), "same type"),
        (("copy_lhs", "sum", x.long(), None), "int64"),
        (("pow", "sum", x, e), "no operator 'pow'"),
    ):
        with pytest.raises(dgl.DGLError, match=message):
            messages.gspmm(own, *arguments)
