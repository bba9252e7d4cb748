"""Softmax over groups of rows that are not sorted, on a CPU with the bits of PyG's. Contract:
``plugin_src/softmax_coo/softmax_coo.h``.

``softmax_coo(src [E, ...], index [E], num_groups) -> [E, ...]``; ``softmax_coo_backward(prob, grad, index, num_groups)``: of the
result and its gradient, that of ``src``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import Formula, register, run

_ops = torch.ops.gnnfast


@torch.library.register_fake("gnnfast::softmax_coo")
def _(src: Tensor, index: Tensor, num_groups: int) -> Tensor:
    return src.new_empty(src.shape)


@torch.library.register_fake("gnnfast::softmax_coo_backward")
def _(prob: Tensor, grad: Tensor, index: Tensor, num_groups: int) -> Tensor:
    return prob.new_empty(prob.shape)


def _keep(ctx: Any, needs: Any, prob: Tensor, src: Tensor, index: Tensor, num_groups: int) -> tuple[Tensor, ...]:
    ctx.num_groups = num_groups
    return prob, index


def _backward(ctx: Any, _: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    prob, index = kept
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return run(_ops.softmax_coo_backward.default, prob, grad, index, ctx.num_groups), None, None
    total = prob.new_zeros(ctx.num_groups, *prob.shape[1:]).index_add(0, index, prob * grad)
    return prob * (grad - total.index_select(0, index)), None, None


SOFTMAX_COO = register(Formula(_ops.softmax_coo.default, _keep, _backward), graph_args=0)
