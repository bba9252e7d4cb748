"""Attention layers, forward and backward one op each, and their features of edges."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast.dispatch.passes import serves_attention
from gnnfast.patching import class_of
from gnnfast.pyg import attention as eager
from gnnfast.pyg.coefficients import check_simple
from gnnfast.pyg.compiled import ops
from gnnfast.pyg.compiled.questions import (
    ATTENTION_TIMES,
    PLAIN,
    TOO_SMALL,
    ask,
    check_edges,
    check_operand,
    context,
    deciding,
    is_small,
    left,
    needs_grad,
    of_linear,
)
from gnnfast.pyg.known import replaced_in_attention
from gnnfast.pyg.messages import DOT_ATTENTION
from gnnfast.pyg.products import is_product
from gnnfast.reporting import ran
from gnnfast.types import REORDERED
from gnnfast.unsupported import Unsupported


def make_attention(parts: Any, run: Callable[..., Tensor]) -> Callable[[FunctionType], Callable[..., Any]]:
    """What makes the ``forward(x, edge_index, edge_attr, ..., return_attention_weights)`` that is traced for a layer."""
    may_loop = parts.message is not DOT_ATTENTION  # else an attribute of that name is the user's own

    @functools.cache
    def made(known: Any) -> Callable[..., Any]:
        def question(*things: Any) -> Any:
            return _look_at_attention(known, parts, *things)

        def forward(module: Any, x: Any, edge_index: Any, edge_attr: Any, *rest: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return NotImplemented
            pair = x if isinstance(x, tuple) else (x, x)
            if len(pair) != 2:
                return NotImplemented
            given = all(argument is None for argument in rest)
            of_edges = module.edge_updater, module.edge_update, *of_linear(getattr(module, "lin_edge", None))
            options = module.dropout, module.training, module.heads, getattr(module, "fill_value", None), *deciding(module)
            place = ask(question, module, *pair, edge_index, edge_attr, given, *options, *of_edges)
            if place is None:
                return NotImplemented
            loops = may_loop and getattr(module, "add_self_loops", False)
            form = "given" if not loops else "looped" if edge_attr is None else "listed"
            edges = edge_index, pair[0].shape[0], pair[1].shape[0], True, form, place
            if edge_attr is not None and edge_attr.dim() == 1:
                edge_attr = edge_attr.unsqueeze(1)
            return run(module, x, pair, edge_attr, float(module.dropout if module.training else 0), edges)

        return forward

    return lambda original: made(class_of(original))


def _look_at_attention(
    known: Any, parts: Any, module: Any, x: Any, x_dst: Any, edge_index: Any, edge_attr: Any, given: bool, *_: Any
) -> str | None:
    """The place of the report; ``None`` if PyG's own must run."""
    try:
        reason = context()
        if reason or not given:
            raise Unsupported(reason or "an argument is not served")
        eager.check_layer(known, parts, module)
        check_edges(edge_index)
        like = None if parts.parameter is None else module._parameters.get(parts.parameter)
        for t in (x, x_dst):
            check_operand("x", t, edge_index)
            if t.fake.dim() != 2 or eager.summed_dtype(t.fake) != eager.summed_dtype(x.fake if like is None else like):
                raise Unsupported("features and parameters do not agree")
        if torch.is_autocast_enabled(edge_index.fake.device.type):
            eager.check_autocast(parts, x.fake if like is None else like, edge_attr)
        if edge_attr is not None or (module._modules.get("lin_edge") is not None and parts.message is DOT_ATTENTION):
            _check_features(module, edge_index, edge_attr, x)
        dropout = module.dropout if module.training else 0.0
        rows = x.fake.new_empty(0, dtype=eager.summed_dtype(x.fake))
        if not serves_attention(rows, module.heads, module.out_channels, dropout):
            raise Unsupported("there is no kernel for heads so wide, or the dropout")
    except Unsupported as error:
        left(module, str(error))
        return None
    place, width = f"pyg {known.__name__}", module.heads * module.out_channels
    if not eager.adds_loops(module) and is_small(edge_index, width, x.fake.dtype, ATTENTION_TIMES):
        ran(place, *TOO_SMALL)
        return None
    return place


def _check_features(module: Any, edge_index: Any, edge_attr: Any, x: Any) -> None:
    """Raises Unsupported if the features of edges are not multiplied by a matrix, or loops have features of another kind."""
    lin, width = module._modules.get("lin_edge"), module.heads * module.out_channels
    if lin is None:
        raise Unsupported("edge features of a layer that takes none")
    check_operand("edge_attr", edge_attr, edge_index)
    rows = edge_attr.fake
    if not is_product(lin) or lin.bias is not None or type(lin.weight) not in PLAIN or rows.dtype not in REORDERED:
        raise Unsupported("edge features are no products of float32 or float64")
    if not rows.dtype == lin.weight.dtype == x.fake.dtype or lin.weight.shape != (width, rows.shape[1] if rows.dim() == 2 else 1):
        raise Unsupported("edge features do not fit their linear layer")
    if rows.dim() not in (1, 2) or rows.shape[0] != edge_index.fake.shape[1]:
        raise Unsupported("edge_attr does not fit")
    att = getattr(module, "att_edge", None)
    if att is not None and (type(att) not in PLAIN or att.shape != (1, module.heads, module.out_channels)):
        raise Unsupported("edge features do not fit their linear layer")
    if eager.adds_loops(module) and type(module.fill_value) not in (int, float) and module.fill_value != "mean":
        raise Unsupported("features of self loops that are neither a number nor a mean")


def _seed(dropout: float, edges: Any) -> Any:
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=edges[0].device) if dropout else None


def _with_loops(module: Any, rows: Tensor, edges: Any) -> Tensor:
    """``rows`` of edges as :class:`gnnfast.pyg.compiled.ops.Edges` lists them."""
    if edges[4] != "listed":
        return rows
    return ops.WITH_LOOPS(rows, None if module.fill_value == "mean" else float(module.fill_value), *edges)  # type: ignore[no-any-return]


def _shares(dropout: float, score: Any, dst: Any, src: Any, slope: float, edges: Any) -> Tensor:
    """The coefficients of edges after dropout, drawn as PyG draws it."""
    share = ops.SOFTMAX(score, dst, src, slope, *edges)
    return torch.nn.functional.dropout(share, dropout) if dropout else share


def run_gat(module: Any, x: Any, pair: Any, edge_attr: Any, dropout: float, edges: Any) -> Tensor:
    res, h_src, _, a_src, a_dst = eager.gat_operands(module, x, pair)
    slope = float(module.negative_slope)
    if edge_attr is None:
        train = needs_grad(h_src, a_src, a_dst)
        out = ops.ATTENTION(h_src, a_dst, a_src, slope, dropout, _seed(dropout, edges), train, *edges)[0]
        return eager.finish(module, out, res, True)
    score = torch.nn.functional.linear(_with_loops(module, edge_attr, edges), eager.edge_score_weight(module))
    share = _shares(dropout, score, a_dst, a_src, slope, edges)
    out = ops.SPMM(h_src, share, False, False, needs_grad(h_src, share), False, *edges)
    return eager.finish(module, out, res, False)


def run_gatv2(module: Any, x: Any, pair: Any, edge_attr: Any, dropout: float, edges: Any) -> Tensor:
    res, left, right = eager.gatv2_operands(module, x, pair)
    att, edge = module.att.view(-1), None if edge_attr is None else module.lin_edge(_with_loops(module, edge_attr, edges))
    train = needs_grad(left, right, att, edge)
    numbers = module.heads, float(module.negative_slope), dropout, _seed(dropout, edges), train
    return eager.finish(module, ops.PAIR_ATTENTION(right, left, None, att, edge, *numbers, *edges)[0], res, True)


def run_transformer(module: Any, x: Any, pair: Any, edge_attr: Any, dropout: float, edges: Any) -> Tensor:
    query, key, value, skip = eager.transformer_operands(module, pair)
    heads, scale = module.heads, 1 / math.sqrt(module.out_channels)
    if edge_attr is None:
        numbers = heads, scale, dropout, _seed(dropout, edges), needs_grad(query, key, value)
        out = ops.PAIR_ATTENTION(query, key, value, None, None, *numbers, *edges)[0]
        return eager.finish_transformer(module, out, pair[1], skip, True)
    incidence = *edges[:4], "incidence", edges[5]
    of_keys = ops.SDDMM(query, key, heads, False, *edges)
    ask, rows, restore = eager.products_of_edges(module, edge_attr)
    score = (of_keys + ops.SDDMM(ask(query), rows, heads, False, *incidence)) * scale
    share = _shares(dropout, score, None, None, 1.0, edges)
    out = ops.SPMM(value, share, False, False, needs_grad(value, share), False, *edges)
    out = out + restore(ops.SPMM(rows, share, False, False, needs_grad(rows, share), False, *incidence))
    return eager.finish_transformer(module, out, pair[1], skip, False)


def make_agnn_conv(original: FunctionType) -> Callable[..., Any]:
    """What is traced for the ``forward(x, edge_index)`` of AGNNConv."""
    return _agnn_conv(class_of(original))


@functools.cache
def _agnn_conv(known: Any) -> Callable[..., Any]:
    def question(*things: Any) -> Any:
        return _look_at_cosines(known, *things)

    def forward(module: Any, x: Any, edge_index: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return NotImplemented
        place = ask(question, module, x, edge_index, module.beta, module.add_self_loops, *deciding(module))
        if place is None:
            return NotImplemented
        form = "looped" if module.add_self_loops else "given"
        unit = torch.nn.functional.normalize(x, p=2.0, dim=-1)
        query, train = module.beta * unit, needs_grad(x, module.beta)
        edges = edge_index, x.shape[0], x.shape[0], True, form, place
        return ops.PAIR_ATTENTION(query, unit, x, None, None, 1, 1.0, 0.0, None, train, *edges)[0]

    return forward


def _look_at_cosines(known: Any, module: Any, x: Any, edge_index: Any, beta: Any, loops: bool, *_: Any) -> str | None:
    """The place of the report; ``None`` if PyG's own must run: its parts are served, or say why not."""
    try:
        check_simple(known, module)
        reason = context() or replaced_in_attention(known)
        check_edges(edge_index)
        for t in (x, beta):
            check_operand("x", t, edge_index)
        if reason or x.fake.dim() != 2 or beta.fake.shape != (1,) or beta.fake.dtype != x.fake.dtype:
            raise Unsupported(reason or "beta does not fit")
        if torch.is_autocast_enabled(x.fake.device.type) or not serves_attention(x.fake, 1, x.fake.shape[1], 0.0):
            raise Unsupported("there is no kernel for heads so wide, or autocast is on")
    except Unsupported:
        return None
    if not loops and is_small(edge_index, x.fake.shape[1], x.fake.dtype, ATTENTION_TIMES):
        return None
    return f"pyg {known.__name__}"
