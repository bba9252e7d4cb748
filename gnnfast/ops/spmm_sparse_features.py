"""SpMM with sparse features. Contract: ``plugin_src/spmm_sparse_features/sparse_features_args.h``.

With features X ``[N, width]`` in CSR (``xrowptr, xcol, xval``; no row holds a column twice), the three ops are the derivatives of
one form T that is linear in the weights, in the values of X and in G ``[M, width]``; so each one's gradients are the other two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.ops.spmm import _NO_GRAPH_GRADS, GRAPH_ARGS, Formula, _rows, mean_degree, needs, register, save, saved, swap

_ops = torch.ops.gnnfast

# spmm_sparse_features(graph, weight [E] | None, xrowptr, xcol, xval, width, mean) -> dT/dG [M, width]


@torch.library.register_fake("gnnfast::spmm_sparse_features")
def _(*args: Any) -> Tensor:
    return args[GRAPH_ARGS + 3].new_empty(_rows(args), args[GRAPH_ARGS + 4])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *graph, weight, xrowptr, xcol, xval, _, ctx.mean = inputs
    save(ctx, tuple(graph), weight, xrowptr, xcol, xval)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    graph, (weight, xrowptr, xcol, xval) = saved(ctx)
    need_weight, _, _, need_values = needs(ctx)[:4]
    if ctx.mean:
        grad = grad / mean_degree(graph[0], grad)
    to_weight = _ops.spmm_sparse_features_edges(*graph, xrowptr, xcol, xval, grad) if need_weight else None
    to_values = _ops.spmm_sparse_features_values(*swap(graph), weight, xrowptr, xcol, grad) if need_values else None
    return (*_NO_GRAPH_GRADS, to_weight, None, None, to_values, None, None)


SPARSE_FEATURES = register(Formula(_ops.spmm_sparse_features.default, _setup, _backward))


# spmm_sparse_features_values(graph of A^T, weight, xrowptr, xcol, grad [M, width]) -> dT/dX [stored]


@torch.library.register_fake("gnnfast::spmm_sparse_features_values")
def _(*args: Any) -> Tensor:
    xcol, grad = args[GRAPH_ARGS + 2 :]
    return grad.new_empty(xcol.shape[0])


def _values_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *graph, weight, xrowptr, xcol, grad = inputs
    ctx.width = grad.shape[1]
    save(ctx, tuple(graph), weight, xrowptr, xcol, grad)


def _values_backward(ctx: Any, values: Tensor) -> tuple[Any, ...]:
    transposed, (weight, xrowptr, xcol, grad) = saved(ctx)
    graph = swap(transposed)
    need_weight, _, _, need_grad = needs(ctx)
    to_weight = _ops.spmm_sparse_features_edges(*graph, xrowptr, xcol, values, grad) if need_weight else None
    to_grad = _ops.spmm_sparse_features(*graph, weight, xrowptr, xcol, values, ctx.width, False) if need_grad else None
    return (*_NO_GRAPH_GRADS, to_weight, None, None, to_grad)


torch.library.register_autograd("gnnfast::spmm_sparse_features_values", _values_backward, setup_context=_values_setup)


# spmm_sparse_features_edges(graph, xrowptr, xcol, xval, grad [M, width]) -> dT/dw [E]


@torch.library.register_fake("gnnfast::spmm_sparse_features_edges")
def _(*args: Any) -> Tensor:
    return args[-1].new_empty(args[1].shape[0])


def _edges_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *graph, xrowptr, xcol, xval, grad = inputs
    ctx.width = grad.shape[1]
    save(ctx, tuple(graph), xrowptr, xcol, xval, grad)


def _edges_backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:
    graph, (xrowptr, xcol, xval, grad) = saved(ctx)
    _, _, need_values, need_grad = needs(ctx)
    to_values = _ops.spmm_sparse_features_values(*swap(graph), weight, xrowptr, xcol, grad) if need_values else None
    to_grad = _ops.spmm_sparse_features(*graph, weight, xrowptr, xcol, xval, ctx.width, False) if need_grad else None
    return (*_NO_GRAPH_GRADS, None, None, to_values, to_grad)


torch.library.register_autograd("gnnfast::spmm_sparse_features_edges", _edges_backward, setup_context=_edges_setup)
