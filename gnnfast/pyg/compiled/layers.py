"""Layers that are linear up to their bias: normalised within the op that aggregates, the product first where that is cheaper."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from gnnfast.dispatch.select import Layer, linear_first
from gnnfast.patching import class_of
from gnnfast.pyg.compiled.norm import Normalised, aggregate_normalised, check_weight
from gnnfast.pyg.compiled.questions import (
    LOOPED_TIMES,
    Traced,
    ask,
    check_edges,
    check_operand,
    context,
    deciding,
    hint,
    is_small,
    of_linear,
)
from gnnfast.pyg.layers import Form, parts_of
from gnnfast.types import REORDERED
from gnnfast.unsupported import Unsupported


def make_layer(form: Form) -> Callable[[FunctionType], Callable[..., Any]]:
    """What makes the ``forward(x, edge_index, ...)`` that is traced for a layer: as PyG's, but normalised within the op that
    aggregates, and with the product first where that is cheaper."""

    @functools.cache
    def made(known: Any, weighted: bool) -> Callable[..., Any]:
        def question(*things: Any) -> Any:
            return _look(form, known, weighted, *things)

        def forward(module: Any, x: Any, edge_index: Any, *rest: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return NotImplemented
            pair = isinstance(x, (tuple, list))
            if pair and len(x) != 2:
                return NotImplemented
            x_src, x_dst = x if pair else (x, x)
            weight = rest[0] if weighted else None
            size = rest[-1] if form.root else None
            plan = ask(question, module, x_src, x_dst, pair, edge_index, weight, *_options(form, module))
            if plan is None:
                return NotImplemented
            first, constant, hops, mean, place = plan
            lin, out = getattr(module, form.lin), x_src
            if form.first:
                out = torch.nn.functional.linear(out, lin.weight)
                out = out.to(torch.promote_types(out.dtype, x_src.dtype))  # as autocast leaves it, and weights do not
            elif first:
                out = torch.nn.functional.linear(out, lin.weight)
            if form.normalised:
                normed = Normalised(weight, constant, form.first and module.improved, module.add_self_loops, out.dtype, None)
                for _ in range(hops):
                    out = aggregate_normalised(normed, out, edge_index, module.flow == "source_to_target", mean, place)
            elif weighted:
                out = module.propagate(edge_index, x=(out, x_dst), edge_weight=weight, size=size)
            else:
                out = module.propagate(edge_index, x=(out, x_dst), size=size)
            if not first:
                return torch.nn.functional.linear(out, lin.weight, lin.bias)
            bias = module.bias if form.bias else lin.bias
            out = out if bias is None else out + bias
            if form.root and x_dst is not None and (not form.has_root or getattr(module, form.has_root)):
                out = out + getattr(module, form.root)(x_dst)
            return torch.nn.functional.normalize(out, p=2.0, dim=-1) if form.unit and getattr(module, form.unit) else out

        return forward

    return lambda original: made(class_of(original), "edge_weight" in inspect.signature(original).parameters)


def _options(form: Form, module: Any) -> tuple[Any, ...]:
    """The options that decide, so that code is traced again when they are others."""
    names = (*form.refused, *((form.hops,) if form.hops else ()), *(("add_self_loops",) if form.normalised else ()))
    names += ("normalize", "cached", "improved") if form.normalised and form.first else ()
    linears = of_linear(getattr(module, form.lin)) + (of_linear(getattr(module, form.root, None)) if form.root else ())
    kept = [getattr(module, name, None) is None for name in ("_cached_edge_index", "_cached_x") if form.normalised]
    return *deciding(module), *[getattr(module, name) for name in names], *linears, *kept


def _look(
    form: Form, known: Any, weighted: bool, module: Any, x: Any, x_dst: Any, pair: bool, edge_index: Any, weight: Any, *_: Any
) -> Any:
    """Whether the product comes first, whether weights are constant, how many hops, whether they are means, and the place of the
    report; ``None`` if PyG's own forward is as good: what it calls is served, or says why not."""
    parts = None if context() else parts_of(form, known, module, weighted)
    own = module.__dict__
    if parts is None or (form.root and not parts.to_target) or (pair and not form.root):
        return None
    if form.first and own.get("_cached_edge_index") is not None:  # which PyG takes whatever else is asked for
        return None
    if own.get("cached") or not own.get("normalize" if form.normalised else "", True):
        return None
    try:
        check_edges(edge_index)
        check_operand("x", x, edge_index)
        if x_dst is not None:
            check_operand("x", x_dst, edge_index)
        constant = weight is None or not form.normalised or check_weight(weight, edge_index, x.fake.dtype)
    except Unsupported:
        return None
    of_lin, autocast = parts.lin.weight, torch.is_autocast_enabled(x.fake.device.type)
    if x.fake.dim() != 2 or x.fake.dtype != of_lin.dtype or not (constant or parts.reduce == "sum"):
        return None
    first = form.first
    passes = LOOPED_TIMES if form.normalised and own.get("add_self_loops") else 1
    if is_small(edge_index, of_lin.shape[0] if first else x.fake.shape[1], x.fake.dtype, passes, passes == 1):
        return None
    if not first and x.fake.dtype in REORDERED and not autocast:
        grad, rows = torch.is_grad_enabled(), x_dst if isinstance(x_dst, Traced) else x
        num_src, num_dst, edges = (hint(size) for size in (x.fake.shape[0], rows.fake.shape[0], edge_index.fake.shape[1]))
        sizes = num_src, num_dst, edges, of_lin.shape[1], of_lin.shape[0], parts.hops
        first = linear_first(Layer(x.fake.device.type, *sizes, grad and x.fake.requires_grad, grad and of_lin.requires_grad))
    if not first and not form.normalised:
        return None
    return first, constant, parts.hops, parts.reduce == "mean", parts.verdict.place
