"""PNAConv, whose statistics are one op over what its layer before makes of nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast.patching import class_of
from gnnfast.pyg import pna
from gnnfast.pyg.compiled import ops
from gnnfast.pyg.compiled.questions import (
    PLAIN,
    STATISTICS_TIMES,
    ask,
    check_edges,
    check_operand,
    context,
    deciding,
    hint,
    is_small,
    leave_small,
    left,
    needs_grad,
    state,
)
from gnnfast.types import KINDS
from gnnfast.unsupported import Unsupported


def make_pna_conv(original: FunctionType) -> Callable[..., Any]:
    """What is traced for the ``forward(x, edge_index, edge_attr)`` of PNAConv."""
    return _pna_conv(class_of(original))


@functools.cache
def _pna_conv(known: Any) -> Callable[..., Any]:
    def question(*things: Any) -> Any:
        return _look_at_pna(known, *things)

    def forward(module: Any, x: Any, edge_index: Any, edge_attr: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return NotImplemented
        options = module.towers, module.divide_input, tuple(module.aggr_module.scaler), *deciding(module)
        plan = ask(question, module, x, edge_index, edge_attr, *options)
        if plan is None:
            return NotImplemented
        kinds, place = plan
        nodes, to_target = x.shape[0], module.flow == "source_to_target"
        edges, of_kinds = (edge_index, nodes, nodes, to_target, "given", place), [KINDS[kind] for kind in kinds]

        def reduce(to_src: Tensor, to_dst: Tensor, of_edges: Any) -> Tensor:
            if of_edges is None:
                return ops.REDUCTIONS(to_src, to_dst, of_kinds, needs_grad(to_src, to_dst), *edges)[0]  # type: ignore[no-any-return]
            messages = of_edges + _gather(to_src, edges)
            at = *edges[:4], "incidence", place
            return ops.REDUCTIONS(messages, to_dst, of_kinds, needs_grad(messages, to_dst), *at)[0]  # type: ignore[no-any-return]

        degree = ops.DEGREE(*edges).to(x.dtype).unsqueeze(1)
        parts = pna.parts_of(module, edge_attr is not None, kinds)
        of_nodes = lambda least: degree if least is None else torch.log(degree.clamp(min=least) + 1)  # noqa: E731
        return pna.forward(module, parts, x, edge_attr, reduce, of_nodes)

    return forward


def _look_at_pna(known: Any, module: Any, x: Any, edge_index: Any, edge_attr: Any, *_: Any) -> tuple[tuple[str, ...], str] | None:
    """The kinds of statistics, and the place of the report; ``None`` if PyG's own must run."""
    try:
        reason = context()
        if reason:
            raise Unsupported(reason)
        parts = pna.check_layer(known, module, edge_attr is not None)
        check_edges(edge_index)
        check_operand("x", x, edge_index)
        if edge_attr is not None:
            check_operand("edge_attr", edge_attr, edge_index)
            pna.check_memory(module, hint(edge_index.fake.shape[1]), x.fake)
        tensors = pna.tensors_of(module, parts)
        if any(type(t) not in PLAIN for t in tensors):
            raise Unsupported("a parameter is no plain tensor")
        pna.check_shapes(module, parts, tensors, x.fake, edge_index.fake, None if edge_attr is None else edge_attr.fake)
    except Unsupported as error:
        left(module, str(error))
        state.said = module
        return None
    times = sum(STATISTICS_TIMES.get(kind, 1) for kind in parts.kinds)
    if is_small(edge_index, module.towers * module.F_in, x.fake.dtype, times):
        leave_small(module)
        return None
    return parts.kinds, f"pyg {known.__name__}"


def _gather(x: Tensor, edges: Any) -> Tensor:
    """``x [N, F]`` at the sources of edges: the edges' incidence with them, transposed, so that the gradient is a sum."""
    edge_index, num_src, num_dst, to_target, _, place = edges
    of_sources = edge_index, num_dst, num_src, not to_target, "incidence", place
    return ops.SPMM(x, None, False, False, needs_grad(x), True, *of_sources)  # type: ignore[no-any-return]
