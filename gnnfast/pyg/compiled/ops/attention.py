"""Attention of one score or of pairs, softmax over the edges of each destination, features of loops that are added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.dispatch import execute, passes
from gnnfast.pyg.compiled.ops.define import Edges, define, differentiate, differentiate_once, empty, must_train, of_edges
from gnnfast.pyg.loops import kept_edges, others, with_loops

# edge_index_attention(x [N, F], dst [M, H], src [N, H], slope, dropout, seed, train, edges) -> [M, F], stats
# edge_index_attention_backward(grad, x, dst, src, out, stats, slope, dropout, seed, edges) -> the gradients of x, dst and src


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def _attention(
    x: Tensor, dst: Tensor, src: Tensor, slope: float, dropout: float, seed: Any, train: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    out, stats = passes.attention(edges.graph, x, dst, src, slope, dropout, seed, train, edges.place)
    if not x.is_cuda:  # stats are the coefficients
        stats = edges.padded(stats) if train else empty(x, 0, dst.shape[1])
    return out, stats


def _attention_fake(
    x: Tensor, dst: Tensor, src: Tensor, slope: float, dropout: float, seed: Any, train: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    out, heads = empty(x, dst.shape[0], x.shape[1]), dst.shape[1]
    if not x.is_cuda:
        return out, empty(x, Edges(*rest).rows if train else 0, heads)
    return out, empty(x, dst.shape[0] if train else 0, heads, 4, dtype=_wide(x))


ATTENTION = define(
    "edge_index_attention",
    "Tensor x, Tensor dst, Tensor src, float slope, float dropout, Tensor? seed, bool train",
    "(Tensor, Tensor)",
    _attention,
    _attention_fake,
)


def _attention_backward(
    grad: Tensor, x: Tensor, dst: Tensor, src: Tensor, out: Tensor, stats: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    numbers, edges = arguments[:3], Edges(*arguments[3:])
    graph = edges.graph
    stats = stats if x.is_cuda else of_edges(graph, stats)
    return passes.attention_gradients(graph, x, dst, src, out, stats, grad, *numbers)


ATTENTION_BACKWARD = define(
    "edge_index_attention_backward",
    "Tensor grad, Tensor x, Tensor dst, Tensor src, Tensor out, Tensor stats, float slope, float dropout, Tensor? seed",
    "(Tensor, Tensor, Tensor)",
    _attention_backward,
    lambda grad, x, dst, src, *_: tuple(empty(t, *t.shape) for t in (x, dst, src)),
)


def _attention_keep(
    ctx: Any, output: Any, x: Tensor, dst: Tensor, src: Tensor, slope: float, dropout: float, seed: Any, train: bool, *rest: Any
) -> Any:
    ctx.mark_non_differentiable(output[1])
    return x, dst, src, *output, seed, rest[0]


def _attention_gradient(ctx: Any, *kept: Any) -> tuple[Any, ...]:
    x, dst, src, out, stats, seed, edge_index, grad, _ = kept
    slope, dropout, _, train = ctx.rest[3:7]
    must_train(train, ATTENTION)
    found = ATTENTION_BACKWARD(grad, x, dst, src, out, stats, slope, dropout, seed, edge_index, *ctx.rest[-5:])
    return tuple(t if need else None for t, need in zip(found, ctx.needs))


differentiate(ATTENTION, _attention_keep, _attention_gradient)
differentiate_once(ATTENTION_BACKWARD)


# edge_index_pair_attention(query [M, F], key [N, F], value [N, F] | None, att [F] | None, edge [E, F] | None, heads, number,
#     dropout, seed, train, edges) -> [M, F], stats
# edge_index_pair_attention_backward(grad, query, key, value, att, edge, out, stats, heads, number, dropout, seed, edges)
#     -> the gradients of query, key, value or att, and edge, or nothing


def _pair(
    query: Tensor,
    key: Tensor,
    value: Any,
    att: Any,
    edge: Any,
    heads: int,
    number: float,
    dropout: float,
    seed: Any,
    train: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    graph = edges.graph
    edge = None if edge is None else of_edges(graph, edge)
    return passes.pair_attention(graph, query, key, value, att, edge, heads, number, dropout, seed, train, edges.place)


def _pair_fake(query: Tensor, key: Tensor, value: Any, att: Any, edge: Any, heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    train = rest[3]
    return empty(query, *query.shape), empty(query, query.shape[0] if train else 0, heads, 4, dtype=_wide(query))


PAIR_ATTENTION = define(
    "edge_index_pair_attention",
    "Tensor query, Tensor key, Tensor? value, Tensor? att, Tensor? edge, SymInt heads, float number, float dropout, "
    "Tensor? seed, bool train",
    "(Tensor, Tensor)",
    _pair,
    _pair_fake,
)


def _pair_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Any, att: Any, edge: Any, out: Tensor, stats: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    numbers, edges = arguments[:4], Edges(*arguments[4:])
    graph = edges.graph
    given = None if edge is None else of_edges(graph, edge)
    *found, to_edge = passes.pair_attention_gradients(graph, query, key, value, att, given, out, stats, grad, *numbers)
    return *found, empty(query, 0) if to_edge is None else edges.padded(to_edge)


def _pair_backward_fake(_: Tensor, query: Tensor, key: Tensor, value: Any, att: Any, edge: Any, *__: Any) -> tuple[Tensor, ...]:
    *found, to_edge = (
        empty(query, 0) if t is None else empty(t, *t.shape) for t in (query, key, value if att is None else att, edge)
    )
    return *found, to_edge


PAIR_ATTENTION_BACKWARD = define(
    "edge_index_pair_attention_backward",
    "Tensor grad, Tensor query, Tensor key, Tensor? value, Tensor? att, Tensor? edge, Tensor out, Tensor stats, SymInt heads, "
    "float number, float dropout, Tensor? seed",
    "(Tensor, Tensor, Tensor, Tensor)",
    _pair_backward,
    _pair_backward_fake,
)


def _pair_keep(ctx: Any, output: Any, *inputs: Any) -> Any:
    ctx.mark_non_differentiable(output[1])
    *rows, _, _, _, seed, _ = inputs[:10]
    return *rows, *output, seed, inputs[10]


def _pair_gradient(ctx: Any, *kept: Any) -> tuple[Any, ...]:
    query, key, value, att, edge, out, stats, seed, edge_index, grad, _ = kept
    heads, number, dropout, _, train = ctx.rest[5:10]
    must_train(train, PAIR_ATTENTION)
    numbers = heads, number, dropout, seed
    to_query, to_key, third, to_edge = PAIR_ATTENTION_BACKWARD(
        grad, query, key, value, att, edge, out, stats, *numbers, edge_index, *ctx.rest[-5:]
    )
    found = to_query, to_key, third if att is None else None, third if att is not None else None, to_edge
    return tuple(t if need else None for t, need in zip(found, ctx.needs))


differentiate(PAIR_ATTENTION, _pair_keep, _pair_gradient)
differentiate_once(PAIR_ATTENTION_BACKWARD)


# edge_index_softmax(score [E, H] | None, dst [M, H] | None, src [N, H] | None, slope, edges) -> [E, H]
# edge_index_softmax_backward(grad, share, score, dst, src, slope, edges) -> the gradients of the three, or nothing


def _softmax(score: Any, dst: Any, src: Any, slope: float, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    graph = edges.graph
    score = None if score is None else of_edges(graph, score)
    return edges.padded(execute.softmax(graph, score, dst, src, slope, place=edges.place))


def _softmax_fake(score: Any, dst: Any, src: Any, slope: float, *rest: Any) -> Tensor:
    like = next(t for t in (score, dst, src) if t is not None)
    return empty(like, Edges(*rest).rows, like.shape[1])


SOFTMAX = define("edge_index_softmax", "Tensor? score, Tensor? dst, Tensor? src, float slope", "Tensor", _softmax, _softmax_fake)


def _softmax_backward(grad: Tensor, share: Tensor, score: Any, dst: Any, src: Any, slope: float, *rest: Any) -> tuple[Tensor, ...]:
    edges = Edges(*rest)
    graph = edges.graph
    grad, share = of_edges(graph, grad), of_edges(graph, share)
    given = None if score is None else of_edges(graph, score), dst, src
    to_score, *found = passes.softmax_gradients(graph, share, grad, *given, slope)
    found = [None if to_score is None else edges.padded(to_score), *found]
    return tuple(empty(share, 0) if t is None else t for t in found)


def _softmax_backward_fake(grad: Tensor, share: Tensor, score: Any, dst: Any, src: Any, *_: Any) -> tuple[Tensor, ...]:
    return tuple(empty(share, *((0,) if t is None else t.shape)) for t in (score, dst, src))


SOFTMAX_BACKWARD = define(
    "edge_index_softmax_backward",
    "Tensor grad, Tensor share, Tensor? score, Tensor? dst, Tensor? src, float slope",
    "(Tensor, Tensor, Tensor)",
    _softmax_backward,
    _softmax_backward_fake,
)


def _softmax_keep(ctx: Any, share: Tensor, score: Any, dst: Any, src: Any, slope: float, *rest: Any) -> Any:
    return share, score, dst, src, rest[0]


def _softmax_gradient(ctx: Any, share: Tensor, score: Any, dst: Any, src: Any, edge_index: Tensor, grad: Tensor) -> tuple[Any, ...]:
    found = SOFTMAX_BACKWARD(grad, share, score, dst, src, ctx.rest[3], edge_index, *ctx.rest[-5:])
    return tuple(t if need else None for t, need in zip(found, ctx.needs))


differentiate(SOFTMAX, _softmax_keep, _softmax_gradient)
differentiate_once(SOFTMAX_BACKWARD)


# edge_index_with_loops(rows [E, D], fill, edges) -> [E + N, D]: of the edges that are listed, with those of the loops that are
# added filled with a number, or for None the means of the rows that end there
# edge_index_with_loops_backward(grad [E + N, D], mean, edges) -> [E, D]


def _with_loops(rows: Tensor, fill: float | None, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    graph, looped = edges.looped
    return edges.padded(with_loops(rows, edges.edge_index, graph, looped, "mean" if fill is None else fill))


WITH_LOOPS = define(
    "edge_index_with_loops",
    "Tensor rows, float? fill",
    "Tensor",
    _with_loops,
    lambda rows, _, *rest: empty(rows, Edges(*rest).rows, rows.shape[1]),
)


def _with_loops_backward(grad: Tensor, mean: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    graph, looped = edges.looped
    kept = kept_edges(edges.edge_index, graph)
    to_kept, to_loops = grad[: kept.numel()], grad[kept.numel() : graph.num_edges]
    if mean:
        to_kept = to_kept + (to_loops / others(graph, grad.dtype))[looped[1, : kept.numel()]]
    return grad.new_zeros(edges.edge_index.shape[1], grad.shape[1]).index_copy(0, kept, to_kept)


WITH_LOOPS_BACKWARD = define(
    "edge_index_with_loops_backward",
    "Tensor grad, bool mean",
    "Tensor",
    _with_loops_backward,
    lambda grad, _, edge_index, *__: empty(grad, edge_index.shape[1], grad.shape[1]),
)
differentiate(
    WITH_LOOPS,
    lambda ctx, _, rows, fill, edge_index, *__: (edge_index,),
    lambda ctx, edge_index, grad: (WITH_LOOPS_BACKWARD(grad, ctx.rest[1] is None, edge_index, *ctx.rest[-5:]),),
)
differentiate_once(WITH_LOOPS_BACKWARD)
