"""Rows of edges with those of the loops that a layer adds, which are means, on a CPU. Contract:
``plugin_src/loop_means/loop_means.h``.

``loop_means(edge_index [2, E], rows [E, D], kept, num_nodes) -> [kept + num_nodes, D]``, where ``kept`` edges are no loops;
``loop_means_backward(edge_index, grad [kept + num_nodes, D], kept, num_nodes) -> [E, D]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import Formula, register, run

_ops = torch.ops.gnnfast


@torch.library.register_fake("gnnfast::loop_means")
def _(edge_index: Tensor, rows: Tensor, kept: int, num_nodes: int) -> Tensor:
    return rows.new_empty(kept + num_nodes, rows.shape[1])


@torch.library.register_fake("gnnfast::loop_means_backward")
def _(edge_index: Tensor, grad: Tensor, kept: int, num_nodes: int) -> Tensor:
    return grad.new_empty(edge_index.shape[1], grad.shape[1])


def _keep(ctx: Any, needs: Any, _: Any, edge_index: Tensor, of_edges: Tensor, kept: int, num_nodes: int) -> tuple[Tensor]:
    ctx.sizes = kept, num_nodes
    return (edge_index,)


def _backward(ctx: Any, _: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    return None, run(_ops.loop_means_backward.default, *kept, grad, *ctx.sizes) if needs[1] else None, None, None


def _backward_backward(ctx: Any, _: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    return None, run(_ops.loop_means.default, *kept, grad, *ctx.sizes) if needs[1] else None, None, None


LOOP_MEANS = register(Formula(_ops.loop_means.default, _keep, _backward), graph_args=0)
register(Formula(_ops.loop_means_backward.default, _keep, _backward_backward), graph_args=0)
