"""Sums of the ReLU of a node's features plus an edge's. Contract and citation: ``plugin_src/edge_relu/edge_relu_args.h``.

``edge_relu(graph, x [N, F], w [E, F], train) -> out [M, F], kept``: ``w`` in the user's edge order; which messages
were not 0, for the backward pass, a byte for a few features, and empty without ``train``.
``edge_relu_backward(graph of A^T, kept, grad [M, F], need_w) -> the gradients of x and of w``, the latter empty if not needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import Formula, edges, register, run
from gnnfast.types import split

_ops = torch.ops.gnnfast


def kept_unit(x: Tensor) -> int:
    """Features whose bits are in one byte (kept_unit in plugin_src/edge_relu/edge_relu.h)."""
    vector = 16 // x.element_size()
    return vector if x.is_cuda and x.shape[1] % vector == 0 else 1


@torch.library.register_fake("gnnfast::edge_relu")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    graph, (x, w, train) = split(args)
    kept = x.new_empty(w.shape[0] if train else 0, x.shape[1] // kept_unit(x), dtype=torch.uint8)
    return x.new_empty(graph.num_rows, x.shape[1]), kept


@torch.library.register_fake("gnnfast::edge_relu_backward")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    graph, (kept, grad, need_w) = split(args)
    return grad.new_empty(graph.num_rows, grad.shape[1]), grad.new_empty(kept.shape[0] if need_w else 0, grad.shape[1])


def _keep(ctx: Any, needs: Any, output: Any, x: Tensor, w: Tensor, train: bool) -> tuple[Tensor]:
    ctx.train = train
    return (output[1],)


def _backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    if not ctx.train:
        raise RuntimeError("gnnfast: edge_relu was called with train=False, which keeps nothing for a gradient; pass train=True")
    to_x, to_w = run(_ops.edge_relu_backward.default, *graph.transposed, *kept, grad, needs[1])
    return to_x if needs[0] else None, to_w if needs[1] else None, None


EDGE_RELU = register(Formula(_ops.edge_relu.default, _keep, _backward, hides=True))


def _backward_keep(ctx: Any, needs: Any, _: Any, kept: Tensor, grad: Tensor, need_w: bool) -> tuple[Tensor]:
    ctx.need_w, ctx.rows, ctx.unit = need_w, grad.shape[0], kept_unit(grad)
    return (kept,)


def _backward_backward(ctx: Any, graph: Any, kept: Any, needs: Any, of_x: Tensor, of_w: Tensor) -> tuple[Any, ...]:
    # Both gradients are linear in the one that came in. Edge by edge, as it is asked for seldom.
    source, row, ids = edges(graph)  # of the transpose: its rows are the sources
    per_edge = of_x[source] + of_w[ids] if ctx.need_w else of_x[source]
    bits = torch.arange(ctx.unit, dtype=torch.uint8, device=row.device)
    per_edge = per_edge * (kept[0][ids].unsqueeze(-1) >> bits & 1).flatten(1)
    return None, per_edge.new_zeros(ctx.rows, of_x.shape[1]).index_add(0, row, per_edge), None


register(Formula(_ops.edge_relu_backward.default, _backward_keep, _backward_backward))
