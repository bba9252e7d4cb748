"""``update_all`` of built-in functions on a graph of one edge type. DGL makes a graph of the relation and views of its features in
every call, which takes as long as a small aggregation, and looks twice over a maximum for what is infinite."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from gnnfast.dgl.structure import known
from gnnfast.patching import Unknown
from gnnfast.types import EXTREMA

_U, _E = 0, 2  # dgl.function's codes of the source and the edge
_BINARY, _REDUCES = ("add", "sub", "mul", "div"), ("sum", "mean", "max", "min")


def make_update_all(original: Any) -> Any:
    """Replaces ``DGLGraph.update_all``. What is not served, or is to raise, is DGL's."""
    function, heterograph, spmm = (sys.modules[f"dgl.{name}"] for name in ("function", "heterograph", "ops.spmm"))
    graphs, simple = (heterograph.DGLGraph, heterograph.DGLBlock), sys.modules["dgl.function.reducer"].SimpleReduceFunction
    if not _takes_finite(spmm):
        raise Unknown("DGL's operators are not served")

    def operands(message: Any, of_sources: Any, of_edges: Any) -> tuple[str, Any, Any] | None:
        """The operator of a message, and what it takes from the frames."""
        if type(message) is function.CopyMessageFunction:
            if message.target == _U:
                return "copy_lhs", of_sources[message.in_field], None
            return ("copy_rhs", None, of_edges[message.in_field]) if message.target == _E else None
        served = type(message) is function.BinaryMessageFunction and message.binary_op in _BINARY
        if not served or (message.lhs, message.rhs) != (_U, _E):
            return None
        return message.binary_op, of_sources[message.lhs_field], of_edges[message.rhs_field]

    @functools.wraps(original)
    def update_all(self: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None) -> None:
        gidx, taken = self._graph, None
        plain = apply_node_func is None and etype is None and type(self) in graphs and type(reduce_func) is simple
        if plain and known(gidx).single(gidx) and _takes_finite(spmm) and not torch.compiler.is_compiling():
            reduce, nodes = reduce_func.name, self._node_frames
            if reduce in _REDUCES and getattr(message_func, "out_field", None) == reduce_func.msg_field:
                source, target = gidx.metagraph.find_edge(0) if len(nodes) > 1 else (0, 0)
                taken = operands(message_func, nodes[source], self._edge_frames[0])
        if taken is None:
            return original(self, message_func, reduce_func, apply_node_func, etype)  # type: ignore[no-any-return]
        op, lhs, rhs = taken
        if reduce == "mean":
            out = spmm.gspmm(self, op, reduce, lhs, rhs)
        else:
            if op in _BINARY:
                lhs, rhs = spmm.reshape_lhs_rhs(lhs, rhs)
            out = spmm.gspmm_internal(gidx, op, reduce, lhs, rhs, finite=reduce in EXTREMA)
        if out.is_cuda or not gidx.is_pinned():
            nodes[target][reduce_func.out_field] = out
        else:  # which raises
            self._set_n_repr(target, heterograph.ALL, {reduce_func.out_field: out})

    return update_all


def _takes_finite(spmm: Any) -> bool:
    """Whether gspmm is the one of :mod:`gnnfast.dgl.backend`, whatever has been put around it."""
    return getattr(spmm.gspmm_internal, "takes_finite", False) is True
