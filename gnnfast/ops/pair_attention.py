"""Attention with scores of two feature rows as one op: dot products, or GATv2 with ``att``. Contract and citations:
``plugin_src/pair_attention/pair_attention_args.h``.

``pair_attention(graph, query [M, F], key [N, F], value [N, F] | None, att [F] | None, edge [E, F] | None, heads, slope, dropout,
seed [1] int64 | None, train) -> out [M, F], stats``: exactly one of value and att, and edge only with att; stats are for the
backward pass, and empty without ``train``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.attention import kept_scale
from gnnfast.ops.bias import column_sums
from gnnfast.ops.spmm import Formula, edges, register, run
from gnnfast.types import split

_ops = torch.ops.gnnfast


@torch.library.register_fake("gnnfast::pair_attention")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    graph, (_, key, _, _, _, heads, *_, train) = split(args)
    wide = torch.float64 if key.dtype is torch.float64 else torch.float32
    return key.new_empty(graph.num_rows, key.shape[1]), key.new_empty(graph.num_rows if train else 0, heads, 4, dtype=wide)


# pair_attention_backward(graph, query, key, value, att, edge, out, stats, grad [M, F], heads, slope, dropout, seed)
#     -> the gradients of query, key and value, or rows whose sum is that of att, and that of edge, or nothing
@torch.library.register_fake("gnnfast::pair_attention_backward")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, (query, key, _, att, edge, *_) = split(args)
    rows = key.shape[0] if att is None else query.shape[0] + (key.shape[0] if edge is None else 0)
    to_edge = key.new_empty(0, key.shape[1]) if edge is None else edge.new_empty(edge.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), key.new_empty(rows, key.shape[1]), to_edge


def _keep(
    ctx: Any,
    needs: Any,
    output: Any,
    query: Tensor,
    key: Tensor,
    value: Any,
    att: Any,
    edge: Any,
    heads: int,
    slope: float,
    dropout: float,
    seed: Any,
    train: bool,
) -> tuple[Any, ...]:
    ctx.numbers, ctx.train = (heads, slope, dropout), train
    return *output, query, key, value, att, edge, seed


def _backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    out, stats, query, key, value, att, edge, seed = kept
    if not ctx.train:
        raise RuntimeError(
            "gnnfast: pair_attention was called with train=False, which keeps nothing for a gradient; pass train=True"
        )
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return *_composed(graph, (query, key, value, att, edge), needs, grad, ctx.numbers, seed), *(None,) * 5
    given = query, key, value, att, edge, out, stats, grad, *ctx.numbers, seed
    to_query, to_key, third, to_edge = run(_ops.pair_attention_backward.default, *graph, *given)
    to_att = column_sums(third) if att is not None and needs[3] else None
    found = to_query, to_key, third if att is None else None, to_att, to_edge
    return *(t if need else None for t, need in zip(found, needs)), *(None,) * 5


def _composed(graph: Any, leaves: Any, needs: Any, grad: Tensor, numbers: Any, seed: Any) -> list[Tensor | None]:
    """The same edge by edge with torch's ops, for a second derivative."""
    heads, slope, dropout = numbers
    # As inputs of their own: one may have been computed from another.
    query, key, value, att, edge = leaves = [t if t is None else t.view_as(t) for t in leaves]
    row, column, ids = edges(graph)
    q, k = query[row], key[column]
    both = q + k if edge is None else q + k + edge[ids]
    raw = q * k * slope if att is None else torch.nn.functional.leaky_relu(both, slope) * att
    score = raw.view(row.numel(), heads, key.shape[1] // heads).sum(-1)
    index = row[:, None].expand_as(score)
    most = score.new_full((query.shape[0], heads), -torch.inf).scatter_reduce(0, index, score.detach(), "amax")
    share = (score - most[row]).exp()
    share = share / share.new_zeros(query.shape[0], heads).index_add(0, row, share)[row]
    if seed is not None:
        share = share * kept_scale(seed, graph.num_slots, share, dropout)[ids]
    messages = (k if value is None else value[column]).view(row.numel(), heads, key.shape[1] // heads) * share.unsqueeze(-1)
    out = query.new_zeros(query.shape[0], key.shape[1]).index_add(0, row, messages.flatten(1))
    wanted = [t for t, need in zip(leaves, needs) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs[:5]]


PAIR_ATTENTION = register(Formula(_ops.pair_attention.default, _keep, _backward, hides=True))
