"""SpMM with sparse features. Contract: ``plugin_src/spmm_sparse_features/sparse_features_args.h``.

With features X ``[N, width]`` in CSR (``xrowptr, xcol, xval``; no row holds a column twice), the three ops are the derivatives of
one form T that is linear in the weights, in the values of X and in G ``[M, width]``; so each one's gradients are the other two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import Formula, over_degree, register, run, swap_weights, wide_means
from gnnfast.types import split

_ops = torch.ops.gnnfast

# spmm_sparse_features(graph, weight [E] | None, xrowptr, xcol, xval, width, mean) -> dT/dG [M, width]


@torch.library.register_fake("gnnfast::spmm_sparse_features")
def _(*args: Any) -> Tensor:
    graph, (_, _, _, xval, width, _) = split(args)
    return xval.new_empty(graph.num_rows, width)


def _keep(ctx: Any, needs: Any, _: Any, weight: Any, *features: Any) -> tuple[Any, ...]:
    *arrays, _, ctx.mean = features
    return weight, *arrays


def _not_finite(grad: Tensor, dim: int) -> Tensor:
    """0, or NaN where ``grad`` is not finite: what zeros that are not stored would make of it."""
    return grad.sum(dim, dtype=torch.promote_types(grad.dtype, torch.float32)).mul(0).to(grad.dtype)


@wide_means
def _backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    weight, xrowptr, xcol, xval = kept
    need_weight, _, _, need_values = needs[:4]
    if ctx.mean:
        grad = over_degree(graph.rowptr, grad)
    to_weight = None
    if need_weight:
        to_weight = _ops.spmm_sparse_features_edges(*graph, xrowptr, xcol, xval, grad)
        ones = grad.new_ones(xrowptr.shape[0] - 1, 1)
        to_weight = to_weight + _ops.sddmm(*graph, _not_finite(grad, 1).unsqueeze(1), ones, 1).squeeze(1)
    to_values = _ops.spmm_sparse_features_values(*graph.transposed, weight, xrowptr, xcol, grad) if need_values else None
    return to_weight, None, None, to_values, None, None


SPARSE_FEATURES = register(Formula(_ops.spmm_sparse_features.default, _keep, _backward))


# spmm_sparse_features_values(graph of A^T, weight, xrowptr, xcol, grad [M, width]) -> dT/dX [stored]


@torch.library.register_fake("gnnfast::spmm_sparse_features_values")
def _(*args: Any) -> Tensor:
    _, (_, _, xcol, grad) = split(args)
    return grad.new_empty(xcol.shape[0])


def _keep_all(ctx: Any, needs: Any, _: Any, *inputs: Any) -> tuple[Any, ...]:
    ctx.width = inputs[-1].shape[1]
    return inputs


def _values_backward(ctx: Any, transposed: Any, kept: Any, needs: Any, values: Tensor) -> tuple[Any, ...]:
    weight, xrowptr, xcol, grad = kept
    graph = transposed.transposed
    need_weight, _, _, need_grad = needs
    to_weight = _ops.spmm_sparse_features_edges(*graph, xrowptr, xcol, values, grad) if need_weight else None
    to_grad = _ops.spmm_sparse_features(*graph, weight, xrowptr, xcol, values, ctx.width, False) if need_grad else None
    return to_weight, None, None, to_grad


register(Formula(_ops.spmm_sparse_features_values.default, _keep_all, _values_backward))


# spmm_sparse_features_edges(graph, xrowptr, xcol, xval, grad [M, width]) -> dT/dw [E]


@torch.library.register_fake("gnnfast::spmm_sparse_features_edges")
def _(*args: Any) -> Tensor:
    graph, (*_, grad) = split(args)
    return grad.new_empty(graph.num_slots)


def _edges_backward(ctx: Any, graph: Any, kept: Any, needs: Any, weight: Tensor) -> tuple[Any, ...]:
    xrowptr, xcol, xval, grad = kept
    _, _, need_values, need_grad = needs
    to_values = _ops.spmm_sparse_features_values(*graph.transposed, weight, xrowptr, xcol, grad) if need_values else None
    to_grad = _ops.spmm_sparse_features(*graph, weight, xrowptr, xcol, xval, ctx.width, False) if need_grad else None
    return None, None, to_values, to_grad


register(Formula(_ops.spmm_sparse_features_edges.default, _keep_all, _edges_backward))


# ---- products -------------------------------------------------------------------------------------------------------------------
# product(graph, values, values_t | None, weight [O, F]) -> X weight^T [N, O] for constant X, whose entries are the edges of a graph
# from its columns to its rows, with values as the weights of SPMM. One formula, as on small graphs each further node that autograd
# keeps for the transposition takes longer than the copy.


def _product(*args: Any) -> Tensor:
    *graph, values, values_t, weight = args
    return _ops.spmm.default(*graph, values, values_t, weight.t().contiguous(), False)


def _product_keep(ctx: Any, needs: Any, _: Any, values: Tensor, values_t: Any, weight: Tensor) -> tuple[Any, ...]:
    return values, values_t


def _product_backward(ctx: Any, graph: Any, kept: Any, needs: Any, grad: Tensor) -> tuple[Any, ...]:
    values, values_t = kept
    out = run(_ops.spmm.default, *graph.transposed, *swap_weights(values, values_t), grad, False)
    return None, None, out.t().contiguous().add_(_not_finite(grad, 0).unsqueeze(1))


PRODUCT = Formula(_product, _product_keep, _product_backward)
