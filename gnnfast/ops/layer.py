"""A layer that is linear up to its bias, ``A (X W^T) + b``, as one node of autograd: on small graphs the nodes of its parts take
longer than their kernels, and the sum without the bias need not exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import GRAPH_ARGS, SPMM, Formula
from gnnfast.ops.spmm_sparse_features import PRODUCT

_ops = torch.ops.gnnfast

# layer(graph, weight, weight_t, mean, product | None, x [N, F], lin_weight [O, F], bias [O] | None) -> [M, O]. Weights of the edges
# are constant, and as in SPMM; `product` is what PRODUCT takes before its weight, if x is to be used compressed.


def _layer(*args: Any) -> Tensor:
    *graph, weight, weight_t, mean, product, x, lin_weight, bias = args
    hidden = torch.nn.functional.linear(x, lin_weight) if product is None else PRODUCT.op(*product, lin_weight)
    out: Tensor = _ops.spmm.default(*graph, weight, weight_t, hidden, mean)
    return out if bias is None else out.add_(bias)


def _keep(ctx: Any, needs: Any, _: Any, weight: Any, weight_t: Any, mean: bool, product: Any, *operands: Any) -> tuple[Any, ...]:
    ctx.mean, ctx.product = mean, product
    x, lin_weight, _ = operands
    return weight, weight_t, x if needs[5] else None, lin_weight if needs[4] else None


def _backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    weight, weight_t, x, lin_weight = kept
    need_x, need_lin_weight, need_bias = needs[4:]
    to_x = to_lin_weight = None
    to_bias = grad.sum(0) if need_bias else None
    if need_x or need_lin_weight:
        hidden = SPMM.backward(ctx, graph, (weight, weight_t, None, None), (False, False, True), grad)[2]
        assert hidden is not None
        if need_x:
            to_x = hidden.mm(lin_weight)
        if need_lin_weight and ctx.product is None:
            to_lin_weight = hidden.t().mm(x)
        elif need_lin_weight:
            to_lin_weight = PRODUCT.backward(ctx, ctx.product[:GRAPH_ARGS], ctx.product[GRAPH_ARGS:], needs, hidden)[2]
    return None, None, None, None, to_x, to_lin_weight, to_bias


LAYER = Formula(_layer, _keep, _backward)
