"""Attention with additive scores as one op. Contract and citations: ``plugin_src/attention/attention_args.h``.

``attention(graph, dst [M, H], src [N, H], x [N, F], slope, dropout, seed [1] int64 | None, train) -> out [M, F], stats``: the
last for the backward pass, and empty without ``train``. ``attention_keep(seed, E, H, dropout) -> [E, H] bool``: what the dropout
of ``seed`` keeps, edges in the user's order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.edge_softmax import EDGE_SOFTMAX
from gnnfast.ops.spmm import SPMM, Formula, call, register, run
from gnnfast.types import split

_ops = torch.ops.gnnfast
MOST_DROP_HEADS = 32  # kMostDropHeads in plugin_src/attention/random.h


@torch.library.register_fake("gnnfast::attention")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    graph, (dst, _, x, *_, train) = split(args)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    return x.new_empty(graph.num_rows, x.shape[1]), x.new_empty(graph.num_rows if train else 0, dst.shape[1], 4, dtype=wide)


# attention_backward(graph, dst, src, x, out, stats, grad [M, F], slope, dropout, seed, atomics) -> the gradients of dst, src and x
@torch.library.register_fake("gnnfast::attention_backward")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, (dst, src, x, *_) = split(args)
    return dst.new_empty(dst.shape), src.new_empty(src.shape), x.new_empty(x.shape)


@torch.library.register_fake("gnnfast::attention_keep")
def _(seed: Tensor, num_edges: int, heads: int, dropout: float) -> Tensor:
    return seed.new_empty(num_edges, heads, dtype=torch.bool)


def _keep(
    ctx: Any, needs: Any, output: Any, dst: Tensor, src: Tensor, x: Tensor, slope: float, dropout: float, seed: Any, train: bool
) -> tuple[Any, ...]:
    ctx.slope, ctx.dropout, ctx.train = slope, dropout, train
    return *output, dst, src, x, seed


def _backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    out, stats, dst, src, x, seed = kept
    if not ctx.train:
        raise RuntimeError("gnnfast: attention was called with train=False, which keeps nothing for a gradient; pass train=True")
    if torch.compiler.is_compiling() or (
        not torch.is_grad_enabled() and held_width(x, src.shape[1]) == x.shape[1] // max(src.shape[1], 1)
    ):
        atomics = not torch.are_deterministic_algorithms_enabled()
        given = dst, src, x, out, stats, grad, ctx.slope, ctx.dropout, seed, atomics
        found = run(_ops.attention_backward.default, *graph, *given)
    else:
        with torch.enable_grad():
            found = _composed(graph, (dst, src, x), needs, grad, ctx.slope, ctx.dropout, seed)
        if not torch.is_grad_enabled():
            found = [None if t is None else t.detach() for t in found]
    return *(t if need else None for t, need in zip(found, needs)), None, None, None, None


def held_width(x: Tensor, heads: int) -> int | None:
    """The least number of features a head, from those that it has on, that a warp holds (most_pair_features in
    plugin_src/pair_attention): more where these are no whole vectors. ``None`` if there is none."""
    features, vector = x.shape[1] // max(heads, 1), 16 // x.element_size()
    if not x.is_cuda or features <= 32:
        return features
    whole = -(-features // vector) * vector
    return whole if whole <= 32 * vector else None


def _composed(graph: Any, leaves: Any, needs: Any, grad: Tensor, slope: float, dropout: float, seed: Any) -> list[Any]:
    """The same by ops that can be differentiated once more, and take heads of any width."""
    # As inputs of their own: scores may have been computed from x.
    dst, src, x = leaves = [t.view_as(t) for t in leaves]
    prob = call(EDGE_SOFTMAX, True, graph, None, dst, src, slope)
    if seed is not None:
        prob = prob * kept_scale(seed, prob.shape[0], prob, dropout)
    out = call(SPMM, True, graph, prob, None, x, False, None)
    wanted = [t for t, need in zip(leaves, needs) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs[:3]]


def kept_scale(seed: Tensor, num_edges: int, like: Tensor, dropout: float) -> Tensor:
    """What coefficients ``[E, H]`` are multiplied by where ``seed`` draws the dropout: 0, or what makes up for that. ``like`` has
    as many heads, and their dtype."""
    with torch.no_grad():
        kept = max(int((1 - dropout) * 65536 + 0.5), 1)
        return _ops.attention_keep(seed, num_edges, like.shape[1], dropout).to(like.dtype) * (65536 / kept)


ATTENTION = register(Formula(_ops.attention.default, _keep, _backward, hides=True))
