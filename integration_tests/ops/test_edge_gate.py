"""Sums of products of activations over edges against the same edge by edge, their gradients, and opcheck."""

from __future__ import annotations

import itertools

import pytest
import torch
from graphs import GRAPHS, many_rows, relative_error
from torch.nn import functional

from gnnfast import Graph
from gnnfast.dispatch import gates
from gnnfast.dispatch.gates import Factor
from gnnfast.ops.edge_gate import PARTS, WEIGHT, is_of_sources, role
from gnnfast.types import ACTIVATIONS

FUNCTIONS = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "silu": functional.silu,
    "abs": torch.abs,
}
DEPTH = 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}
# What the factors have, as letters: source, x scale, + shift, edge, attr and matrix; and a weight.
FORMS = {
    "gate of attributes": (("s+a", "sa"), False),
    "attributes alone": (("a",), True),
    "gate": (("s+", "s"), False),
    "gate of edges": (("s+e", "s+e"), False),
    "affine": (("sx+",), False),
    "affine twice": (("sx", "sx+e"), True),
    "weighted difference": (("s+",), True),
    "edges alone": (("e", "s"), False),
    "destinations alone": (("+",), True),
    "all": (("sx+ea", "sx+ea"), True),
}


def by_edges(edge_index, num_dst, factors, weight, reduce):
    src, dst = edge_index.long()
    product = 1 if weight is None else weight.unsqueeze(1)
    for x, scale, shift, edge, attr, matrix, act in factors:
        z = 0 if x is None else x[src] if scale is None else scale[dst] * x[src]
        z = z + (0 if shift is None else shift[dst]) + (0 if edge is None else edge) + (0 if attr is None else attr @ matrix)
        product = FUNCTIONS[act](z) * product
    out = product.new_zeros(num_dst, product.shape[1]).index_add(0, dst, product)
    return out / torch.bincount(dst, minlength=num_dst).clamp(min=1).unsqueeze(1) if reduce == "mean" else out


def made(name, form, acts, width, dtype, device, ids=torch.int64, of=GRAPHS):
    edge_index, num_src, num_dst = of[name]()
    rows = {"s": num_src, "x": num_dst, "+": num_dst, "e": edge_index.shape[1]}
    letters, weighted = FORMS[form]

    def factor(has, act):
        of_rows = [
            2 * torch.randn(rows[c], width, dtype=dtype, device=device).requires_grad_() if c in has else None for c in "sx+e"
        ]
        shapes = ((rows["e"], DEPTH), (DEPTH, width)) if "a" in has else ()
        attr, matrix = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes) if shapes else (None, None)
        return Factor(*of_rows, attr, None if matrix is None else matrix.requires_grad_(), act)

    factors = tuple(map(factor, letters, acts))
    weight = torch.randn(rows["e"], dtype=dtype, device=device).requires_grad_() if weighted else None
    edge_index = edge_index.to(device, ids)
    return edge_index, Graph.from_edge_index(edge_index, (num_src, num_dst)), factors, weight


def leaves(factors, weight):
    return [t for t in (*itertools.chain(*((*f[:4], f.matrix) for f in factors)), weight) if t is not None]


def copied(factors, weight, to):
    """With ``to`` done to those that have gradients, in the order of ``leaves``, and ``attr`` in their dtype."""

    def copy(f):
        *of_rows, matrix = (t if t is None else to(t) for t in (*f[:4], f.matrix))
        return Factor(*of_rows, f.attr if f.attr is None else f.attr.to(matrix.dtype), matrix, f.act)

    return tuple(map(copy, factors)), None if weight is None else to(weight)


def check(edge_index, graph, factors, weight, reduce, tolerance):
    exact, of_weight = copied(factors, weight, lambda t: t.detach().double().requires_grad_())
    out = gates.gate(graph, factors, weight, reduce, "test")
    expected = by_edges(edge_index, graph.num_dst, exact, of_weight, reduce)
    assert out.dtype is leaves(factors, weight)[0].dtype and relative_error(out, expected) < tolerance
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(out, leaves(factors, weight), grad.to(out.dtype))
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves(exact, of_weight), grad)):
        assert ours.shape == theirs.shape and relative_error(ours, theirs) < 10 * tolerance
    with torch.no_grad():
        assert torch.equal(gates.gate(graph, factors, weight, reduce, "test"), out)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name, form, device):
    for nth, (dtype, width) in enumerate(itertools.product(TOLERANCE, (1, 5, 16, 40, 300))):
        acts = list(itertools.islice(itertools.cycle(ACTIVATIONS), nth, nth + 2))
        ids, reduce = (torch.int64, torch.int32)[nth % 2], ("sum", "mean")[nth // 2 % 2]
        check(*made(name, form, acts, width, dtype, device, ids), reduce, TOLERANCE[dtype])


@pytest.mark.parametrize("acts", list(itertools.product(ACTIVATIONS, repeat=2)), ids="-".join)
def test_activations(acts, device):
    for dtype in TOLERANCE:
        check(*made("random", "all", acts, 24, dtype, device), "sum", TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_argument(act, dtype, device):
    """Of an activation and its derivative, edge by edge: tiny, large, negative and of no number."""
    some = torch.cat([10.0 ** torch.arange(-30, 3, 0.25), torch.linspace(0, 30, 977)]).to(dtype)
    of = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    z = torch.cat([some, -some, of]).unsqueeze(1).to(device).requires_grad_()
    ids = torch.arange(len(z), device=device)
    graph = Graph.from_edge_index(torch.stack([ids, ids.flip(0)]), len(z))
    out = gates.gate(graph, (Factor(z, act=act),), None, "sum", "test").flip(0)
    exact = z.detach().double().requires_grad_()
    expected = FUNCTIONS[act](exact)
    (ours,), (theirs,) = torch.autograd.grad(out.sum(), z), torch.autograd.grad(expected.sum(), exact)
    # A derivative may cancel, and torch's own does.
    usual = exact.detach().isfinite()
    epsilon, least = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    for found, wanted in ((out, expected), (ours, theirs)):
        assert ((found - wanted).abs() <= 8 * epsilon * wanted.abs() + 4 * epsilon**2 + least)[usual].all() or (
            found is ours and (found - wanted).abs()[usual].max() <= (4 if dtype is torch.float32 else 16) * epsilon
        )
    torch.testing.assert_close(out[~usual], FUNCTIONS[act](z)[~usual], equal_nan=True)


@pytest.mark.parametrize("form", ["gate", "weighted difference", "all"])
def test_infinite_gradients_where_a_relu_is_flat(form, device):
    """Nothing passes there in torch, whatever it is, as behind a square root of messages that are all 0."""
    edge_index, graph, factors, weight = made("random", form, ("relu", "relu"), 12, torch.float64, device)
    out, expected = gates.gate(graph, factors, weight, "sum", "test"), by_edges(edge_index, graph.num_dst, factors, weight, "sum")
    grad = torch.ones_like(out)
    grad[::2] = torch.inf
    needed = [t for f in factors for t in (f.shift, f.edge) if t is not None]
    for ours, theirs in zip(*(torch.autograd.grad(o, needed, grad) for o in (out, expected))):
        assert theirs.isinf().any() and theirs.isfinite().any()
        torch.testing.assert_close(ours, theirs, equal_nan=True)  # of two factors the other may be 0


def test_features_of_nodes_without_edges_do_not_matter(device):
    edge_index, graph, factors, weight = made("isolated", "all", ("sigmoid", "tanh"), 8, torch.float64, device)
    alone = [set(range(n)) - set(ids.tolist()) for n, ids in zip((graph.num_src, graph.num_dst), edge_index)]
    with torch.no_grad():
        for f in factors:
            f.src[[*alone[0]]] = f.shift[[*alone[1]]] = f.scale[[*alone[1]]] = torch.nan
    out = gates.gate(graph, factors, weight, "sum", "test")
    assert out.isfinite().all()
    assert all(t.isfinite().all() for t in torch.autograd.grad(out.square().sum(), leaves(factors, weight)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_derivatives(reduce, form, device):
    _, graph, factors, weight = made("self_loops_and_duplicates", form, ("sigmoid", "softplus"), 3, torch.float64, device)

    def run(*tensors):
        left = iter(tensors)
        given, of_weight = copied(factors, weight, lambda _: next(left))
        return gates.gate(graph, given, of_weight, reduce, "test")

    torch.autograd.gradcheck(run, leaves(factors, weight))
    torch.autograd.gradgradcheck(run, leaves(factors, weight))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("nth", range(11))
def test_one_gradient_alone(nth, create_graph, device):
    edge_index, graph, factors, weight = made("random", "all", ("silu", "tanh"), 6, torch.float64, device)
    one = leaves(factors, weight)[nth]
    factors, weight = copied(factors, weight, lambda t: t if t is one else t.detach())
    (ours,) = torch.autograd.grad(gates.gate(graph, factors, weight, "mean", "test").square().sum(), one, create_graph=create_graph)
    expected = by_edges(edge_index, graph.num_dst, factors, weight, "mean")
    assert relative_error(ours, torch.autograd.grad(expected.square().sum(), one)[0]) < 1e-10


def test_one_tensor_in_many_places(device):
    edge_index, num_src, num_dst = GRAPHS["random"]()
    edge_index = edge_index.to(device)
    graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
    x = torch.randn(30, 9, dtype=torch.float64, device=device, requires_grad=True)
    factors = Factor(x, x, x, act="sigmoid"), Factor(x, shift=x, act="tanh")
    ours = torch.autograd.grad(gates.gate(graph, factors, None, "sum", "test").square().sum(), x)
    theirs = torch.autograd.grad(by_edges(edge_index, 30, factors, None, "sum").square().sum(), x)
    assert relative_error(*ours, *theirs) < 1e-12


def test_rows_that_are_not_contiguous(device):
    _, graph, factors, weight = made("random", "all", ("relu", "sigmoid"), 16, torch.float32, device)
    expected = gates.gate(graph, factors, weight, "sum", "test")
    factors, weight = copied(factors, weight, lambda t: t.detach().t().contiguous().t() if t.dim() == 2 else t.detach())
    assert torch.equal(gates.gate(graph, factors, weight, "sum", "test"), expected)


def test_many_rows(device):
    made_of = {"many": many_rows}
    check(*made("many", "gate", ("sigmoid", "identity"), 2, torch.float64, device, of=made_of), "mean", 1e-12)


@pytest.mark.parametrize("width", [0, 4])
def test_no_edges_no_nodes_no_features(width, device):
    for num_src, num_dst, edges in ((3, 4, 0), (0, 4, 0), (3, 0, 0), (0, 0, 0), (3, 4, 2)):
        edge_index = torch.zeros(2, edges, dtype=torch.int64, device=device)
        of_rows = [torch.randn(n, width, device=device, requires_grad=True) for n in (num_src, num_dst, num_dst, edges, 2)]
        factors = (Factor(*of_rows[:4], torch.randn(edges, 2, device=device), of_rows[4]), Factor(*of_rows[:4]))
        weight = torch.randn(edges, device=device, requires_grad=True)
        graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
        out = gates.gate(graph, factors, weight, "sum", "test")
        assert relative_error(out, by_edges(edge_index, num_dst, factors, weight, "sum")) < 1e-6
        for t, grad in zip((*of_rows, weight), torch.autograd.grad(out.sum(), (*of_rows, weight))):
            assert grad.shape == t.shape and (edges or not grad.any())


@pytest.mark.parametrize("form", FORMS)
def test_ops(form, device):
    if device.type == "cuda" and any("a" in letters for letters in FORMS[form][0]):
        pytest.skip("kernels of GPUs take products as features of edges")
    _, graph, factors, weight = made("random", form, ("sigmoid", "relu"), 8, torch.float32, device)
    args, ops = graph.args(csc=True), torch.ops.gnnfast
    given = {role(k, part): getattr(f, part) for part in ("matrix", *PARTS[:5]) for k, f in enumerate(factors)}
    given = {of: t.detach() for of, t in given.items() if t is not None}
    if weight is not None:
        given[WEIGHT] = weight.detach().view(-1, 1)
    parts, roles, acts = list(given.values()), list(given), [ACTIVATIONS[f.act] for f in factors]
    torch.library.opcheck(ops.edge_gate.default, (*args, parts, roles, acts, True))
    grad = torch.randn(graph.num_dst, 8, device=device)
    for transposed, way in ((False, args), (True, args.transposed)):
        needs = [of for of in roles if is_of_sources(of) == transposed and of not in (role(0, "attr"), role(1, "attr"))]
        torch.library.opcheck(ops.edge_gate_backward.default, (*way, parts, roles, acts, grad, needs, transposed))


def test_what_is_refused(device):
    _, graph, (f,), _ = made("bipartite", "affine", ("relu",), 8, torch.float32, device)
    x, scale, shift = (t.detach() for t in f[:3])
    args, ops, edges = graph.args(csc=True), torch.ops.gnnfast, torch.zeros(graph.num_edges, 8, device=device)
    for parts, roles, acts, match in (
        ([], [], [0], "must be arrays"),
        ([x], [0, 1], [0], "a role for each"),
        ([x], [0], [], "1 or 2 activations"),
        ([x], [0], [0, 0, 0], "1 or 2 activations"),
        ([x], [0], [7], "activation must be 0 to 6"),
        ([x], [6], [0], "role must be 0 to 5"),
        ([x, scale], [0, 13], [0, 0], "role must be 0 to 11"),
        ([x, edges], [0, 4], [0], "attr without a matrix"),
        ([x, edges], [0, 5], [0], "matrix without one"),
        ([x, edges, edges[:7]], [0, 4, 5], [0], r"parts\[2\]"),
        ([x, scale[1:]], [0, 1], [0], r"parts\[1\]"),
        ([x, shift[:, 1:]], [0, 2], [0], r"parts\[1\]"),
        ([x, edges[1:]], [0, 3], [0], r"parts\[1\]"),
        ([x, edges], [0, WEIGHT], [0], r"parts\[1\]"),
        ([x, shift.double()], [0, 2], [0], r"parts\[1\]"),
        ([x.half()], [0], [0], "float32 and float64"),
        ([shift, scale], [2, 1], [0], "no src"),
    ):
        with pytest.raises(RuntimeError, match=match):
            ops.edge_gate(*args, parts, roles, acts, False)
    matrix = torch.zeros(8, 8, device=device)
    for needs, transposed in (([1], True), ([0], False), ([3], False), ([4], False), ([WEIGHT], False)):
        with pytest.raises(RuntimeError, match="no gradient"):
            way, parts, roles = args.transposed if transposed else args, [x, scale, edges, matrix], [0, 1, 4, 5]
            ops.edge_gate_backward(*way, parts, roles, [0], torch.zeros(graph.num_dst, 8, device=device), needs, transposed)
