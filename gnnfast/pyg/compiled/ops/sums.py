"""Sums and means, dot products at the ends of edges, GCN, degrees."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from gnnfast.cache import note_variable
from gnnfast.dispatch import passes
from gnnfast.pyg.adjacency import graph_of
from gnnfast.pyg.compiled.ops.define import Edges, define, differentiate, empty, of_edges
from gnnfast.pyg.norm import normalised, sharing

# ---- sum and mean ------------------------------------------------------------------------------------------------------------
# A is the adjacency with its weights [E] | [E, H] | None, over the degrees for a mean. Three ops, each linear in each of its
# floating-point operands, so that they are the derivatives of one another.
#   edge_index_spmm(x [N, F], weight, mean, constant, train, turned, edges) -> A x [M, F]; turned: A^T x, of x [M, F]
#   edge_index_sddmm(a [M, F], b [N, F], heads, mean, edges) -> <a[dst], b[src]> [E, heads]; a over the degrees for a mean
#   edge_index_spmm_backward(grad [M, F], x [N, F], weight, mean, edges) -> A^T grad, and sddmm(grad, x) in the shape of the weight


def _spmm(x: Tensor, weight: Any, mean: bool, constant: bool, train: bool, turned: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    graph = edges.graph
    if weight is not None:
        weight = of_edges(graph, weight)
        if not constant:
            note_variable(weight)
    reduce = "mean" if mean else "sum"
    if turned:
        return passes.transposed(graph, x, weight, reduce)
    return passes.aggregate(graph, x, weight, reduce, train, edges.place)


def _spmm_fake(x: Tensor, weight: Any, mean: bool, constant: bool, train: bool, turned: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    return empty(x, edges.sources if turned else edges.num_dst, x.shape[1])


SPMM = define(
    "edge_index_spmm", "Tensor x, Tensor? weight, bool mean, bool constant, bool train, bool turned", "Tensor", _spmm, _spmm_fake
)


def _sddmm(a: Tensor, b: Tensor, heads: int, mean: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    return edges.padded(passes.dot(edges.graph, a, b, heads, "mean" if mean else "sum", edges.place))


def _sddmm_fake(a: Tensor, b: Tensor, heads: int, mean: bool, *rest: Any) -> Tensor:
    return empty(a, Edges(*rest).rows, heads)


SDDMM = define("edge_index_sddmm", "Tensor a, Tensor b, SymInt heads, bool mean", "Tensor", _sddmm, _sddmm_fake)


def _spmm_backward(grad: Tensor, x: Tensor, weight: Tensor, mean: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    edges = Edges(*rest)
    graph = edges.graph
    to_x, to_weight = passes.both_gradients(graph, x, of_edges(graph, weight), grad, "mean" if mean else "sum")
    return to_x, edges.padded(to_weight)


def _spmm_backward_fake(grad: Tensor, x: Tensor, weight: Tensor, mean: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty(x, *x.shape), empty(weight, *weight.shape)


SPMM_BACKWARD = define(
    "edge_index_spmm_backward",
    "Tensor grad, Tensor x, Tensor weight, bool mean",
    "(Tensor, Tensor)",
    _spmm_backward,
    _spmm_backward_fake,
)


def _times(ctx: Any, edge_index: Tensor, weight: Any, mean: bool, x: Tensor, turned: bool) -> Tensor:
    """A x or A^T x over the edges of ``ctx``, by weights that need not be constant."""
    return SPMM(x, weight, mean, False, True, turned, edge_index, *ctx.rest[-5:])  # type: ignore[no-any-return]


def _dot(ctx: Any, edge_index: Tensor, ends: tuple[Tensor, Tensor], mean: bool, like: Tensor) -> Tensor:
    heads = like.shape[1] if like.dim() == 2 else 1
    return SDDMM(*ends, heads, mean, edge_index, *ctx.rest[-5:]).view(like.shape)  # type: ignore[no-any-return]


def _spmm_keep(ctx: Any, _: Any, x: Tensor, weight: Any, mean: bool, constant: bool, train: bool, turned: bool, *rest: Any) -> Any:
    return x if ctx.needs[1] else None, weight, rest[0]


def _spmm_gradient(ctx: Any, x: Any, weight: Any, edge_index: Tensor, grad: Tensor) -> tuple[Any, ...]:
    mean, constant, _, turned = ctx.rest[2:6]
    if ctx.needs[0] and ctx.needs[1] and not turned:
        return SPMM_BACKWARD(grad, x, weight, mean, edge_index, *ctx.rest[-5:])  # type: ignore[no-any-return]
    to_x = to_weight = None
    if ctx.needs[0]:
        to_x = SPMM(grad, weight, mean, constant, True, not turned, edge_index, *ctx.rest[-5:])
    if ctx.needs[1]:
        to_weight = _dot(ctx, edge_index, (x, grad) if turned else (grad, x), mean, weight)
    return to_x, to_weight


def _sddmm_keep(ctx: Any, _: Any, a: Tensor, b: Tensor, heads: int, mean: bool, *rest: Any) -> Any:
    return a, b, rest[0]


def _sddmm_gradient(ctx: Any, a: Tensor, b: Tensor, edge_index: Tensor, grad: Tensor) -> tuple[Any, ...]:
    mean = ctx.rest[3]
    return tuple(
        _times(ctx, edge_index, grad, mean, other, turned) if ctx.needs[turned] else None
        for turned, other in ((False, b), (True, a))
    )


def _spmm_backward_keep(ctx: Any, _: Any, grad: Tensor, x: Tensor, weight: Tensor, mean: bool, *rest: Any) -> Any:
    return grad, x, weight, rest[0]


def _spmm_backward_gradient(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, edge_index: Tensor, of_x: Tensor, of_weight: Tensor
) -> tuple[Any, ...]:
    mean = ctx.rest[3]
    to_grad = _times(ctx, edge_index, weight, mean, of_x, False) + _times(ctx, edge_index, of_weight, mean, x, False)
    return to_grad, _times(ctx, edge_index, of_weight, mean, grad, True), _dot(ctx, edge_index, (grad, of_x), mean, weight)


differentiate(SPMM, _spmm_keep, _spmm_gradient)
differentiate(SDDMM, _sddmm_keep, _sddmm_gradient)
differentiate(SPMM_BACKWARD, _spmm_backward_keep, _spmm_backward_gradient)


# ---- GCN ---------------------------------------------------------------------------------------------------------------------
# edge_index_gcn(x [N, F], weight [E] | None, improved, mean, train, turned, edges) -> [N, F]: edges and constant weights as
# gcn_norm makes them. The weight gets no gradient.


def _gcn(x: Tensor, weight: Any, improved: bool, mean: bool, train: bool, turned: bool, *rest: Any) -> Tensor:
    edges = Edges(*rest)
    flow = "source_to_target" if edges.to_target else "target_to_source"
    arguments = edges.edge_index, weight, edges.num_src, improved, edges.form == "looped", flow, x.dtype
    made = None if mean else normalised(*arguments)
    if made is None:
        gcn_norm = sys.modules["torch_geometric.nn.conv.gcn_conv"].gcn_norm
        made = *sharing(edges.edge_index, False, gcn_norm, *arguments), None
    normed, weight, graph = made
    if graph is None:
        graph = graph_of(normed, edges.num_src, edges.num_dst, edges.to_target)
    reduce = "mean" if mean else "sum"
    if turned:
        return passes.transposed(graph, x, weight, reduce)
    return passes.aggregate(graph, x, weight, reduce, train, edges.place)


GCN = define(
    "edge_index_gcn",
    "Tensor x, Tensor? weight, bool improved, bool mean, bool train, bool turned",
    "Tensor",
    _gcn,
    lambda x, *_: empty(x, *x.shape),
)


def _gcn_keep(ctx: Any, _: Any, x: Tensor, weight: Any, *rest: Any) -> Any:
    return weight, rest[4]


def _gcn_gradient(ctx: Any, weight: Any, edge_index: Tensor, grad: Tensor) -> tuple[Any, ...]:
    improved, mean, _, turned = ctx.rest[2:6]
    return (GCN(grad, weight, improved, mean, True, not turned, edge_index, *ctx.rest[-5:]),)


differentiate(GCN, _gcn_keep, _gcn_gradient)


# edge_index_degree(edges) -> int32 [M]
DEGREE = define(
    "edge_index_degree",
    "",
    "Tensor",
    lambda *rest: Edges(*rest).graph.csr.rowptr.diff(),
    lambda *rest: empty(rest[0], Edges(*rest).num_dst, dtype=torch.int32),
)
