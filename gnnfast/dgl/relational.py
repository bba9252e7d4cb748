"""Layers of ``dgl.nn.pytorch`` with types of edges as a whole: RelGraphConv (Schlichtkrull et al., ESWC 2018) and HGTConv (Hu et
al., WWW 2020).

DGL multiplies what each edge carries by the matrix of its type, in RelGraphConv with blocks by a matrix that it copies for each
edge, in HGTConv once for each head. Here a row for each node and type of edges there is carries it
(:mod:`gnnfast.dispatch.relations`), and is multiplied once.

Letters in comments: N sources, M destinations, E edges, R types of edges, H heads, D features a head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.dgl.layers import check_graph, defined, dispatcher, is_plain
from gnnfast.dgl.structure import ends, sized
from gnnfast.dispatch.bias import biased
from gnnfast.dispatch.execute import aggregate, dot_attention
from gnnfast.dispatch.relations import (
    Kept,
    Relations,
    Rows,
    check_bounds,
    filled,
    has_all_rows,
    kept_with_edges,
    listed,
    multiplied,
)
from gnnfast.graph import Graph
from gnnfast.graph.checks import MOST_NODES
from gnnfast.types import INDEX_DTYPES
from gnnfast.unsupported import Unsupported


def _check_layer(module: Any, feat: Any, *typed: Any) -> None:
    """Raises Unsupported if a part of a layer is another than DGL's, or dtypes differ."""
    linear = sys.modules[_LINEAR].TypedLinear
    if "message" in module.__dict__:
        raise Unsupported("message() is another than the layer's")
    if not isinstance(feat, Tensor) or feat.layout is not torch.strided or any(not is_plain(part, linear) for part in typed):
        raise Unsupported("features are no tensor, or a linear layer is another than the layer's")
    if any(p.dtype is not feat.dtype or p.device != feat.device for p in module._parameters.values() if p is not None):
        raise Unsupported("parameters and features do not agree")
    if any(getattr(linear, name, None) is not function for name, function in _typed.items()):
        raise Unsupported("a method of typed linear layers was replaced")
    if any(part.W.dtype is not feat.dtype or part.W.device != feat.device for part in typed):
        raise Unsupported("parameters and features do not agree")


def _check_types(name: str, types: Any, count: int, like: Tensor) -> None:
    reason = guards.operand(name, types)
    if reason or types.dtype not in INDEX_DTYPES or types.shape != (count,) or types.device != like.device:
        raise Unsupported(reason or f"{name} are {types.dtype} of shape {list(types.shape)}")


def _rel_graph_conv(module: Any, graph: Any, place: str, feat: Any, etypes: Any, norm: Any, presorted: Any) -> Any:
    linear = module.linear_r
    _check_layer(module, feat, linear)
    gidx = check_graph(module, graph, (feat, feat[: graph.num_dst_nodes()]), starving=True)
    of = sized(gidx)
    _check_types("etypes", etypes, of.num_edges, feat)
    norm = graph.edata["norm"] if norm is None and "norm" in graph.edata else norm
    if norm is not None and (guards.operand("norm", norm) or norm.dtype is not feat.dtype or norm.device != feat.device):
        raise Unsupported("the norm is not of the features' dtype")
    if norm is not None and norm.shape != (of.num_edges, 1):
        raise Unsupported(f"the norm has shape {list(norm.shape)}")
    relations, width = linear.num_types, linear.in_size
    if feat.shape[1] != width or not of.num_edges or relations * max(of.num_src, of.num_dst) >= MOST_NODES:
        raise Unsupported("features do not fit the weights, there are no edges, or too many nodes and types")
    blocks = linear.regularizer == "bdd"
    of_blocks = (relations, linear.num_bases, linear.submat_in, linear.submat_out) if blocks else ()
    shape = torch.Size(of_blocks or (relations, width, linear.out_size))
    weight = linear.get_weight()
    if weight.shape != ((relations, shape[1:].numel()) if blocks else shape):
        raise Unsupported("typed weights are not as they were made")
    rows = relations * of.num_dst
    all_rows = rows <= 4 * of.num_edges and has_all_rows(linear.W.view(shape) if blocks else linear.W, rows, width)

    def make() -> Relations:
        src, dst = (ids.long() for ids in ends(gidx))
        check_bounds([(etypes, relations)])
        return Relations.of(src, dst, etypes.long(), of.num_src, of.num_dst, relations, all_rows)

    found: Relations = kept_with_edges((of.shared_key(), etypes), ("dgl relations", of.flipped, relations, all_rows), make)
    of.calls += 1
    module.presorted = presorted
    how: Any = dict(place=place, training=module.training)
    out = aggregate(found.into, feat, norm, "sum", copies=True, **how)
    out = found.multiplied(out, filled(weight.view(shape)), **how)
    if module.layer_norm:
        out = module.layer_norm_weight(out)
    if module.bias:
        out = biased(out, module.h_bias)
    if module.self_loop:
        out = out + feat[: of.num_dst] @ module.loop_weight
    if module.activation:
        out = module.activation(out)
    return module.dropout(out)


class _Typed(Kept):
    """Nodes in the order of their types: ``into`` it and ``back``; ``None`` if they are in that order."""

    def __init__(self, types: Tensor, number: int) -> None:
        check_bounds([(types, number)])
        self.counts: tuple[int, ...] = tuple(torch.bincount(types, minlength=number).tolist())
        self.into: Graph | None = None
        self.back: Graph | None = None
        if bool((types.diff() < 0).any()):
            order, nodes = types.argsort(stable=True), torch.arange(types.numel(), device=types.device)
            self.into, self.back = (listed(a, b, types.numel(), types.numel()) for a, b in ((order, nodes), (nodes, order)))
        super().__init__(self.into, self.back)

    def product(self, x: Tensor, weight: Tensor, place: str) -> Tensor:
        """``x [N, F]`` times the matrices ``[T, F, O]`` of their nodes' types."""
        if self.into is None or self.back is None:
            return multiplied(x, weight, self.counts)
        out = multiplied(aggregate(self.into, x, None, "sum", place=place), weight, self.counts)
        return aggregate(self.back, out, None, "sum", place=place)


class _Attended(Kept):
    """Edges from the ``rows`` of their types and sources ``onto`` nodes."""

    def __init__(self, src: Tensor, dst: Tensor, types: Tensor, num_src: int, num_dst: int, relations: int, all_rows: bool) -> None:
        check_bounds([(types, relations)])
        self.rows = Rows.of(src, types, num_src, relations, all_rows)
        self.onto = listed(self.rows.edge, dst, self.rows.number, num_dst)
        super().__init__(self.rows.of_nodes, self.onto)


def _hgt(module: Any, graph: Any, place: str, x: Any, ntype: Any, etype: Any, presorted: Any) -> Any:
    heads = module.num_heads
    of_nodes = module.linear_k, module.linear_q, module.linear_v, module.linear_a
    of_edges = [*module.relation_att, *module.relation_msg]
    _check_layer(module, x, *of_nodes, *of_edges)
    gidx = check_graph(module, graph, (x, x[: graph.num_dst_nodes()] if graph.is_block else x), starving=True)
    of = sized(gidx)
    _check_types("ntype", ntype, of.num_src, x)
    _check_types("etype", etype, of.num_edges, x)
    types, relations = module.linear_k.num_types, of_edges[0].num_types
    if x.shape[1] != module.in_size or not of.num_edges or relations * of.num_src >= MOST_NODES or len(of_edges) != 2 * heads:
        raise Unsupported("features do not fit the weights, there are no edges, or too many nodes and types")
    key, num_rows = of.shared_key(), relations * of.num_src
    weights = [part.get_weight() for part in of_nodes]
    if any(part.num_types != types or part.regularizer == "bdd" for part in of_nodes) or any(
        part.num_types != relations or part.regularizer == "bdd" for part in of_edges
    ):
        raise Unsupported("typed linear layers are of other types, or of blocks")
    # [R, H, D, D]; what scores of a type are multiplied by is part of its matrices.
    priors = torch.stack([*module.relation_pri], 1).view(relations, heads, 1, 1)
    att, msg = (torch.stack([part.get_weight() for part in parts], 1) for parts in (module.relation_att, module.relation_msg))
    all_rows = num_rows <= 4 * of.num_edges and has_all_rows(msg, num_rows, weights[0].shape[2])

    def attend() -> _Attended:
        src, dst = (ids.long() for ids in ends(gidx))
        return _Attended(src, dst, etype.long(), of.num_src, of.num_dst, relations, all_rows)

    attended: _Attended = kept_with_edges((key, etype), ("dgl attended", of.flipped, relations, all_rows), attend)
    x_dst, is_part = (x[: of.num_dst], True) if graph.is_block else (x, False)
    sources: _Typed = kept_with_edges((ntype,), ("dgl types", types), lambda: _Typed(ntype.long(), types))
    targets = sources
    if is_part:
        parts = lambda: _Typed(ntype[: of.num_dst].long(), types)  # noqa: E731
        targets = kept_with_edges((ntype,), ("dgl types", types, of.num_dst), parts)
    of.calls += 1
    module.presorted = presorted
    if is_part:
        k, v = sources.product(x, torch.cat([weights[0], weights[2]], 2), place).chunk(2, 1)
        q = targets.product(x_dst, weights[1], place)
    else:
        k, q, v = sources.product(x, torch.cat(weights[:3], 2), place).chunk(3, 1)
    keys, values = (attended.rows.product(t, filled(w), place) for t, w in ((k, att * priors), (v, msg)))
    how: Any = dict(place=place, training=module.training)
    h, _ = dot_attention(attended.onto, q, keys, values, heads, 1 / module.sqrt_d, **how)
    h = module.drop(targets.product(h, weights[3], place))
    alpha = torch.sigmoid(module.skip[ntype[: of.num_dst] if is_part else ntype]).unsqueeze(-1)
    own = x_dst @ module.residual_w if x_dst.shape != h.shape else x_dst
    h = h * alpha + own * (1 - alpha)
    return module.norm(h) if module.use_norm else h


def _with_typed(make: Callable[[FunctionType], Callable[..., Any]]) -> Callable[[FunctionType], Callable[..., Any]]:
    """The same, noting DGL's own functions of typed linear layers."""

    def noting(original: FunctionType) -> Callable[..., Any]:
        _typed.update({name: defined(f"TypedLinear.{name}", _LINEAR) for name in ("forward", "get_weight")})
        return make(original)

    return noting


_LINEAR = "dgl.nn.pytorch.linear"
_typed: dict[str, Any] = {}
make_rel_graph_conv, make_hgt = _with_typed(dispatcher(_rel_graph_conv)), _with_typed(dispatcher(_hgt))
