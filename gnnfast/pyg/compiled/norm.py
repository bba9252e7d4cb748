"""``gcn_norm``, whose weights need not exist where a layer only passes them on, and functions at which the compiler stops."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg.compiled import ops
from gnnfast.pyg.compiled.questions import (
    LOOPED_TIMES,
    USUAL_WIDTH,
    Traced,
    ask,
    caller,
    check_edges,
    check_operand,
    context,
    hint,
    is_constant,
    is_small,
    leave_small,
    needs_grad,
    real,
    state,
)
from gnnfast.pyg.norm import keeps_to_itself
from gnnfast.types import FEATURE_DTYPES, LINEAR
from gnnfast.unsupported import Unsupported


class Normalised(NamedTuple):
    """What a layer that only passes it on to ``propagate`` gets for the weights of ``gcn_norm``: how to make them."""

    weight: Tensor | None
    constant: bool
    improved: bool
    loops: bool
    dtype: torch.dtype
    original: Any


def _uncompiled(original: FunctionType) -> Callable[..., Any]:
    """A function, or method, as it is where nothing is compiled. The compiler stops at it."""
    of = operator.attrgetter(original.__qualname__)

    @torch.compiler.disable
    def run(*arguments: Any) -> Any:
        return of(sys.modules[original.__module__])(*arguments)

    return run


def _is_in_pieces() -> bool:
    """Whether the compiler, which may stop, has stopped at a function of PyG that asks, and now traces it alone, or what follows
    where it stopped in a layer."""
    if not _may_stop():
        return False
    asks, root = caller(2), state.frame
    while root.parent is not None:
        root = root.parent
    in_layer = "torch_geometric" in root.f_code.co_filename and root.f_code.co_name.startswith("torch_dynamo_resume_in_forward")
    return asks is None or asks is root or in_layer


def make_stopping(original: FunctionType) -> Callable[..., Any]:
    """What is traced for functions that add or remove self loops, ChebConv's, which calls them, and MFConv, which looks for the
    nodes of each degree. How many there are then only values tell, which stops the compiler, but for those who let it go on. Where
    it has stopped, they run uncompiled, by which edges are known again, and MFConv does not run in a dozen pieces."""
    uncompiled = _uncompiled(original)

    def stopping(*arguments: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() or torch._dynamo.config.capture_dynamic_output_shape_ops:
            return NotImplemented
        if not ask(_is_in_pieces):
            return NotImplemented
        return uncompiled(*arguments)

    return stopping


def make_apart(original: FunctionType) -> Callable[..., Any]:
    """What is traced for RGCNConv, at which the compiler stops, and FastRGCNConv and RGATConv, of which it makes a matrix for each
    edge: they run uncompiled, unless it must not stop."""
    uncompiled = _uncompiled(original)

    def apart(*arguments: Any) -> Any:
        return uncompiled(*arguments) if torch.compiler.is_dynamo_compiling() and ask(_may_stop) else NotImplemented

    return apart


def _may_stop() -> bool:
    frame = state.frame
    return not (frame.one_graph or getattr(frame, "error_on_graph_break", False))


_norms: dict[CodeType, Callable[..., Any]] = {}


def make_gcn_norm(original: FunctionType) -> Callable[..., Any]:
    """What is traced for ``gcn_norm``."""
    uncompiled = _uncompiled(original)

    def gcn_norm(
        edge_index: Any, edge_weight: Any, num_nodes: Any, improved: Any, add_self_loops: Any, flow: Any, dtype: Any
    ) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return NotImplemented
        constant = ask(_only_propagates, edge_index, edge_weight, dtype, add_self_loops)
        if constant is None and ask(_is_in_pieces):
            return uncompiled(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype)
        if constant is None:
            return NotImplemented
        return edge_index, Normalised(edge_weight, constant, improved, add_self_loops, dtype, original)

    return _norms.setdefault(original.__code__, gcn_norm)  # the same, so that nothing is traced again when gnnfast was off


def _only_propagates(edge_index: Any, weight: Any, dtype: Any, loops: bool) -> bool | None:
    """Whether the weights are constant, if it is a layer of PyG that asks, which lets nobody see what it gets; else ``None``."""
    asks = caller(3)  # of PyG's function, which called the one that is traced in its place
    if asks is None:
        return None
    module: Any = real(asks.symbolic_locals["self"]) if "self" in asks.symbolic_locals else None
    forward: Any = getattr(type(module), "forward", None)
    if not is_dispatched(forward) or asks.f_code is not forward.__code__ or class_of(forward) is not type(module):
        return None
    reduce = "" if context() else keeps_to_itself(module, type(module))
    if reduce not in LINEAR or (module.training and module.__dict__.get("dropout")) or dtype not in FEATURE_DTYPES:
        return None  # APPNP leaves edges out
    try:
        check_edges(edge_index)
        constant = weight is None or check_weight(weight, edge_index, dtype)
    except Unsupported:
        return None
    widths = [own for name in ("in_channels", "out_channels") if type(own := getattr(module, name, None)) is int]
    x = real(asks.symbolic_locals["x"]) if "x" in asks.symbolic_locals and not widths else None
    if isinstance(x, Traced) and x.fake.dim() == 2:
        widths.append(hint(x.fake.shape[1]))
    if is_small(edge_index, max(widths, default=USUAL_WIDTH), dtype, LOOPED_TIMES if loops else 1):
        if loops:
            leave_small(module)
        return None
    return constant if constant or reduce == "sum" else None


def check_weight(weight: Any, edge_index: Any, dtype: torch.dtype) -> bool:
    """Whether weights that are to be normalised are constant. Raises Unsupported."""
    check_operand("edge_weight", weight, edge_index)
    if weight.fake.dim() != 1 or weight.fake.dtype != dtype or weight.fake.shape != edge_index.fake.shape[1:]:
        raise Unsupported("edge_weight does not fit")
    return is_constant(weight)


def aggregate_normalised(normed: Normalised, x: Tensor, edge_index: Tensor, to_target: bool, mean: bool, place: str) -> Tensor:
    """One aggregation over the edges as ``gcn_norm`` makes them."""
    nodes, weight = x.shape[0], normed.weight
    if weight is None or normed.constant:
        edges = edge_index, nodes, nodes, to_target, "looped" if normed.loops else "given", place
        return ops.GCN(x, weight, normed.improved, mean, needs_grad(x), False, *edges)  # type: ignore[no-any-return]
    # D^-1/2 (A + L) D^-1/2 x, with L the loops, which has one row a node whatever the edges are.
    row, col = edge_index[0].long(), edge_index[1].long()
    among, of_loops = weight, None
    if normed.loops:
        own = row == col
        among = torch.where(own, 0.0, weight)
        at = torch.where(own, row, nodes)  # the others are written to a row that is cut off
        of_loops = weight.new_full((nodes + 1,), 2.0 if normed.improved else 1.0).scatter(0, at, weight)[:nodes]
    degree = weight.new_zeros(nodes).scatter_add(0, col if to_target else row, among)
    degree = degree if of_loops is None else degree + of_loops
    root = degree.pow(-0.5)
    root = root.masked_fill(root == math.inf, 0.0).unsqueeze(1)
    edges = edge_index, nodes, nodes, to_target, "given", place
    out = ops.SPMM(root * x, among, False, False, needs_grad(x, among), False, *edges)
    out = out if of_loops is None else out + of_loops.unsqueeze(1) * (root * x)
    return root * out  # type: ignore[no-any-return]
