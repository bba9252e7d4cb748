"""Forward and backward pass of the ops as calls of their own, for who differentiates elsewhere: a compiler. Framework-free, on
unchecked operands, without gradients; kernels are chosen and counted as :mod:`gnnfast.dispatch.execute` does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.cache import note_variable
from gnnfast.config import settings
from gnnfast.dispatch import execute
from gnnfast.dispatch.calls import count
from gnnfast.dispatch.execute import adjacency, choose, of_width
from gnnfast.graph import Graph, ids
from gnnfast.types import EXTREMA, REDUCTIONS, TIES, Matrix

if _native.cpu.loaded:
    from gnnfast.ops.attention import MOST_DROP_HEADS, held_width, kept_scale
    from gnnfast.ops.bias import column_sums
    from gnnfast.ops.edge_softmax import EDGE_SOFTMAX
    from gnnfast.ops.layer import Coo, Formats
    from gnnfast.ops.multi_reduce import MULTI_REDUCE
    from gnnfast.ops.softmax_reduce import SOFTMAX_REDUCE
    from gnnfast.ops.spmm import ALONE, SPMM, SPMM_MAX, Formula, over_degree, run
    from gnnfast.ops.spmm_coo import SPMM_COO

_ops = torch.ops.gnnfast


def _chosen(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, train: bool, place: str = "") -> Formats | Coo:
    """The adjacency as the selector's kernel takes it; with a ``place``, it is counted there."""
    row_bytes = x.shape[1] * x.element_size()
    choice = choose(graph, x.shape[1], x.element_size(), reduce, train, settings())
    if place:
        if graph.is_cuda:
            ids.check()
        count(graph, place, f"{choice.kernel} {reduce}", choice.reason, x.nbytes)
    return adjacency(graph, choice if place else choice._replace(regret=0.0), weight, reduce, train, row_bytes)


def aggregate(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, train: bool, place: str) -> Tensor:
    """The sum or mean ``[num_dst, F]``; ``train``: its gradient will be asked for."""
    return _chosen(graph, x, weight, reduce, train, place).times(x.contiguous())[0]


def transposed(graph: Graph, grad: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """The gradient ``[num_src, F]`` of a sum or mean for its features."""
    a, grad = _chosen(graph, grad, weight, reduce, True), grad.contiguous()
    kept: Any = a.kept()
    return a.transpose_times(kept, a.degree() if isinstance(a, Coo) else None, grad)


def both_gradients(graph: Graph, x: Tensor, weight: Tensor, grad: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """The gradients of a sum or mean for features and weights."""
    x, grad = x.contiguous(), grad.contiguous()
    note_variable(weight)
    a = _chosen(graph, x, weight, reduce, True)
    if isinstance(a, Coo):
        ctx = SimpleNamespace(reduce=REDUCTIONS[reduce], num_cols=graph.num_src, weight_shape=weight.shape)
        kept = *a.coo, weight, x, a.degree(), None
        _, _, to_weight, to_x, *_ = SPMM_COO.backward(ctx, (), kept, (False, False, True, True), grad)
    else:
        ctx = SimpleNamespace(mean=reduce == "mean", weight_shape=weight.shape)
        to_weight, _, to_x, *_ = SPMM.backward(ctx, a.graph, (weight, None, x, None), (True, False, True), grad)
    assert to_x is not None and to_weight is not None
    return to_x, to_weight


def dot(graph: Graph, a: Tensor, b: Tensor, heads: int, reduce: str, place: str) -> Tensor:
    """``<a[dst], b[src]>`` of each edge and head, ``[E, heads]``: for a mean, over the degrees of the destinations."""
    a, b = a.contiguous(), b.contiguous()
    if reduce != "mean":
        return execute.dot(graph, a, b, heads, place)
    half = a.dtype is torch.float16  # too short for the gradients of long rows
    wide, other = (a.float(), b.float()) if half else (a, b)
    return execute.dot(graph, over_degree(graph.csr.rowptr, wide), other, heads, place).to(a.dtype)


def extremum(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, train: bool, place: str) -> tuple[Tensor, Tensor]:
    """The maximum or minimum ``[num_dst, F]``, and what the backward pass wants if ``train``. Ties as ``torch.scatter_reduce``."""
    assert reduce in EXTREMA
    x = x.contiguous()
    if not train:
        out = execute.aggregate(graph, x, weight, reduce, place=place)
        return out, x.new_empty(0, x.shape[1], dtype=torch.int32)
    if graph.is_cuda:
        ids.check()
    choice = choose(graph, x.shape[1], x.element_size(), reduce, True, settings())
    count(graph, place, f"gar {reduce}", choice.reason, x.nbytes)
    args = graph.args(True, x.shape[1] * x.element_size())
    out, aux = run(_ops.spmm_max.default, *args, weight, x, reduce == "min", _ties(x), 0.0)
    return out, aux


def _ties(x: Tensor) -> int:
    """The same forward and backward, whatever happens in between."""
    return TIES["scatter"] + ALONE if x.is_cuda else TIES["scatter"]


def extremum_gradients(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    out: Tensor,
    aux: Tensor,
    grad: Tensor,
    minimum: bool,
    to_weight: bool,
    to_x: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weights and features, as far as they are asked for."""
    args, ctx = graph.args(True, x.shape[1] * x.element_size()), SimpleNamespace(ties=_ties(x), minimum=minimum)
    kept = weight, x.contiguous(), out.contiguous(), aux.contiguous()
    found = SPMM_MAX.backward(ctx, args, kept, (to_weight, to_x), grad.contiguous())
    return found[0], found[1]


# ---- attention ---------------------------------------------------------------------------------------------------------------
def attention(
    graph: Graph, x: Tensor, dst: Tensor, src: Tensor, slope: float, dropout: float, seed: Tensor | None, train: bool, place: str
) -> tuple[Tensor, Tensor]:
    """``x [num_src, F]`` weighted by the softmax of the leaky ReLU of ``dst [num_dst, H]`` plus ``src [num_src, H]`` after the
    dropout of ``seed``, ``[num_dst, F]``; and what the backward pass wants: on a CPU the coefficients ``[E, H]``, which cost less
    to keep there than to compute twice."""
    args = _args(graph, x, train, place)
    dst, src = dst.contiguous(), src.contiguous()
    if not graph.is_cuda:
        share = run(_ops.edge_softmax.default, *args, None, dst, src, slope)
        kept = share if seed is None else share * kept_scale(seed, graph.num_edges, share, dropout)
        return run(_ops.spmm.default, *args, kept, None, x.contiguous(), False), share
    (x,), narrowed = _held(x, dst.shape[1], x)
    out, stats = run(_ops.attention.default, *args, dst, src, x, slope, dropout, seed, train)
    return narrowed(out), stats


def attention_gradients(
    graph: Graph,
    x: Tensor,
    dst: Tensor,
    src: Tensor,
    out: Tensor,
    stats: Tensor,
    grad: Tensor,
    slope: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``x``, ``dst`` and ``src``."""
    args = _args(graph, x, True)
    dst, src = dst.contiguous(), src.contiguous()
    if not graph.is_cuda:
        scale = None if seed is None else kept_scale(seed, graph.num_edges, stats, dropout)
        kept = stats if scale is None else stats * scale
        to_x, to_share = run(_ops.spmm_backward.default, *args.transposed, kept, x.contiguous(), grad.contiguous(), None)
        to_share, ctx = to_share if scale is None else to_share * scale, SimpleNamespace(slope=slope)
        signs = (None, None, None) if slope == 1 else (None, dst, src)
        _, to_dst, to_src, _ = EDGE_SOFTMAX.backward(ctx, args, (stats, *signs), (False, True, True), to_share)
        assert to_dst is not None and to_src is not None
        return to_x, to_dst, to_src
    (x, out, grad), narrowed = _held(x, dst.shape[1], x, out, grad)
    atomics = not torch.are_deterministic_algorithms_enabled()
    given = dst, src, x, out, stats, grad, slope, dropout, seed, atomics
    to_dst, to_src, to_x = run(_ops.attention_backward.default, *args, *given)
    return narrowed(to_x), to_dst, to_src


def pair_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    att: Tensor | None,
    edge: Tensor | None,
    heads: int,
    number: float,
    dropout: float,
    seed: Tensor | None,
    train: bool,
    place: str,
) -> tuple[Tensor, Tensor]:
    """``value [num_src, F]`` weighted by the softmax of ``number`` times ``<query[dst], key[src]>`` per head, or, with ``att [F]``,
    ``key`` by that of ``<att, leaky_relu(query[dst] + key[src] + edge)>`` of slope ``number``, with ``edge [E, F]`` if given;
    otherwise as :func:`attention`."""
    args = _args(graph, key, train, place)
    (query, key, value, att, edge), narrowed = _held(key, heads, query, key, value, att, edge)
    out, stats = run(_ops.pair_attention.default, *args, query, key, value, att, edge, heads, number, dropout, seed, train)
    return narrowed(out), stats


def pair_attention_gradients(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    att: Tensor | None,
    edge: Tensor | None,
    out: Tensor,
    stats: Tensor,
    grad: Tensor,
    heads: int,
    number: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of ``query``, ``key``, ``value`` or ``att``, and ``edge``."""
    args = _args(graph, key, True)
    (query, key, value, att, edge, out, grad), narrowed = _held(key, heads, query, key, value, att, edge, out, grad)
    given = query, key, value, att, edge, out, stats, grad, heads, number, dropout, seed
    to_query, to_key, third, to_edge = run(_ops.pair_attention_backward.default, *args, *given)
    third = third if att is None else column_sums(third)
    return narrowed(to_query), narrowed(to_key), narrowed(third), None if edge is None else narrowed(to_edge)


def softmax_gradients(
    graph: Graph, share: Tensor, grad: Tensor, score: Tensor | None, dst: Tensor | None, src: Tensor | None, slope: float
) -> tuple[Tensor | None, ...]:
    """The gradients of what :func:`gnnfast.dispatch.execute.softmax` made ``share`` of, as far as it was given."""
    scores = [None if t is None else t.contiguous() for t in (score, dst, src)]
    kept, needs = (None, None, None) if slope == 1 else scores, tuple(t is not None for t in scores)
    args = graph.args(csc=src is not None)
    return EDGE_SOFTMAX.backward(SimpleNamespace(slope=slope), args, (share, *kept), needs, grad)[:3]


def edge_relu(graph: Graph, x: Tensor, of_edges: Tensor, train: bool, place: str) -> tuple[Tensor, Tensor]:
    """The sums of ``relu(x[src] + of_edges)``, ``[num_dst, F]``, and what the backward pass wants if ``train``."""
    if graph.is_cuda:
        ids.check()
    count(graph, place, "sum of relu(x_j + edge)", "over CSR, no message is kept", x.nbytes)
    args = graph.args(train, x.shape[1] * x.element_size())
    return run(_ops.edge_relu.default, *args, x.contiguous(), of_edges.contiguous(), train)  # type: ignore[no-any-return]


def edge_relu_gradients(graph: Graph, kept: Tensor, grad: Tensor, of_edges: bool) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and, if they are asked for, ``of_edges``."""
    args = graph.args(True, grad.shape[1] * grad.element_size()).transposed
    return run(_ops.edge_relu_backward.default, *args, kept, grad.contiguous(), of_edges)  # type: ignore[no-any-return]


def reductions(
    graph: Graph, x: Tensor, shift: Tensor | None, kinds: list[int], train: bool, place: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The reductions ``kinds`` of ``x[src] + shift[dst]`` side by side, as :func:`gnnfast.dispatch.several.reduce_shifted`, and
    what the backward pass wants if ``train``."""
    if graph.is_cuda:
        ids.check()
    count(graph, place, "several reductions", "over CSR, each neighbour is read once", x.nbytes)
    args, shift = graph.args(train, x.shape[1] * x.element_size()), None if shift is None else shift.contiguous()
    return run(_ops.multi_reduce.default, *args, x.contiguous(), shift, kinds, train)  # type: ignore[no-any-return]


def softened(graph: Graph, x: Tensor, t: Tensor | None, scale: float, train: bool, place: str) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax-weighted sums of ``x``, as :func:`gnnfast.dispatch.softened.reduce_rows`, and what the backward pass wants if
    ``train``."""
    if graph.is_cuda:
        ids.check()
    count(graph, place, "softmax aggregation", "over CSR, each neighbour is read once", x.nbytes)
    args, t = graph.args(train, x.shape[1] * x.element_size()), None if t is None else t.contiguous()
    return run(_ops.softmax_reduce.default, *args, x.contiguous(), t, scale, train)  # type: ignore[no-any-return]


def reductions_gradients(
    graph: Graph, grad: Tensor, kept: tuple[Tensor | None, ...], kinds: list[int], needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of ``x`` and ``shift``, as far as ``needs`` asks for them; ``kept`` are these two and the results."""
    return _gradients(MULTI_REDUCE, SimpleNamespace(kinds=kinds, train=True), graph, grad, kept, needs)


def softened_gradients(
    graph: Graph, grad: Tensor, kept: tuple[Tensor | None, ...], scale: float, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The same of ``x`` and ``t``."""
    return _gradients(SOFTMAX_REDUCE, SimpleNamespace(scale=scale, train=True), graph, grad, kept, needs)


def _gradients(
    formula: Formula, ctx: Any, graph: Graph, grad: Tensor, kept: tuple[Tensor | None, ...], needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    x, *rest = (None if t is None else t.contiguous() for t in kept)
    assert x is not None
    args = graph.args(True, x.shape[1] * x.element_size())
    return formula.backward(ctx, args, (x, *rest), needs, grad.contiguous())[:2]  # type: ignore[return-value]


def serves_attention(like: Tensor, heads: int, features: int, dropout: float) -> bool:
    """Whether there is a kernel for rows such as ``like`` with so many features a head, and the dropout that is asked for."""
    if dropout and (dropout >= 1 or settings().dropout == "framework" or heads > MOST_DROP_HEADS):
        return False
    return held_width(like.new_empty(0, heads * features), heads) is not None


def _args(graph: Graph, x: Tensor, train: bool, place: str = "") -> Matrix:
    if place:
        if graph.is_cuda:
            ids.check()
        count(graph, place, "attention", "over CSR, nothing per edge is kept", x.nbytes)
    return graph.args(train, x.shape[1] * x.element_size())


def _held(like: Tensor, heads: int, *rows: Tensor | None) -> tuple[tuple[Tensor, ...], execute.Narrow]:
    """Rows as wide as kernels take them, and what makes results as narrow as they were."""
    width = held_width(like, heads)
    assert width is not None
    given = [None if t is None else t.contiguous() for t in rows]
    wide, narrowed = of_width(width, heads, *(t for t in given if t is not None))
    found = iter(wide)
    return tuple(None if t is None else next(found) for t in given), narrowed  # type: ignore[misc]
