"""Sums of neighbours' rows, weighted by the softmax of the same rows. Contract and citation:
``plugin_src/softmax_reduce/softmax_reduce_args.h``.

``softmax_reduce(graph, x [N, F], t [F] | None, scale, train) -> out [M, F], most, total``: without ``t`` all temperatures are
``scale``; ``most`` and ``total`` are for the backward pass, and empty without ``train``. ``softmax_reduce_backward(graph of A^T, x,
t, scale, most, share, out, need_t) -> to_x [N, F], to_t [N, F]``, share being the gradient over ``total`` and the sum of ``to_t``
the gradient of t; of messages ``x [E, F]`` that exist it is ``softmax_reduce_edges(index [E], ...)``, index being their rows.
float32 and float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.bias import column_sums
from gnnfast.ops.multi_reduce import differentiable
from gnnfast.ops.spmm import Formula, edges, register, run
from gnnfast.types import Matrix, split

_ops = torch.ops.gnnfast


@torch.library.register_fake("gnnfast::softmax_reduce")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    graph, (x, _, _, train) = split(args)
    rows, width = graph.num_rows, x.shape[1]
    kept = rows if train else 0
    return x.new_empty(rows, width), x.new_empty(kept, width), x.new_empty(kept, width)


@torch.library.register_fake("gnnfast::softmax_reduce_backward")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    graph, (x, *_, need_t) = split(args)
    return x.new_empty(graph.num_rows, x.shape[1]), x.new_empty(graph.num_rows if need_t else 0, x.shape[1])


@torch.library.register_fake("gnnfast::softmax_reduce_edges")
def _(index: Tensor, x: Tensor, t: Any, scale: float, most: Any, share: Any, out: Any, need_t: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0] if need_t else 0, x.shape[1])


def _keep(ctx: Any, needs: Any, output: Any, x: Tensor, t: Tensor | None, scale: float, train: bool) -> tuple[Any, ...]:
    ctx.scale, ctx.train = scale, train
    return x, t, *output


def _backward(ctx: Any, graph: Matrix, saved: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    if not ctx.train:
        raise RuntimeError(
            "gnnfast: softmax_reduce was called with train=False, which keeps nothing for gradients; pass train=True"
        )
    x, t, out, most, total = saved
    if torch.is_grad_enabled():
        row, column, _ = edges(graph)
        again = differentiable(lambda x, t: composed(x[column], row, graph.num_rows, t, ctx.scale), (x, t), needs[:2], grad)
        return *again, None, None
    way = graph.transposed
    to_x, to_t = run(_ops.softmax_reduce_backward.default, *way, x, t, ctx.scale, most, grad / total, out, needs[1])
    return to_x if needs[0] else None, column_sums(to_t) if needs[1] else None, None, None


SOFTMAX_REDUCE = register(Formula(_ops.softmax_reduce.default, _keep, _backward, hides=True))


def composed(messages: Tensor, row: Tensor, num_rows: int, t: Tensor | None, scale: float) -> Tensor:
    """The same of messages ``[E, F]``, by operations that can be differentiated any number of times."""
    scores = messages * (scale if t is None else t)
    zeros = messages.new_zeros(num_rows, messages.shape[1])
    with torch.no_grad():
        most = zeros.scatter_reduce(0, row.unsqueeze(1).expand_as(scores), scores, "amax", include_self=False)
    weights = (scores - most[row]).exp()
    return zeros.index_add(0, row, weights / zeros.index_add(0, row, weights)[row] * messages)
