"""Message passing over several edge types at once, which is DGL's own but where DGL is wrong: it computes nothing at all where the
first type has no edges, and its backward pass of a maximum of products fails. There gnnfast goes over the types one by one."""

from __future__ import annotations

import functools
from typing import Any

from gnnfast.dgl import messages
from gnnfast.reporting import fell_back, ran
from gnnfast.types import EXTREMA

_SEVERAL = "several edge types at once"
_EMPTY = "DGL computes nothing where the first edge type has no edges"


def make_gspmm_hetero(original: Any) -> Any:
    """Replaces ``gspmm_hetero(gidx, op, reduce_op, lhs_len, *lhs_and_rhs)`` of the backend."""

    @functools.wraps(original)
    def gspmm_hetero(gidx: Any, op: str, reduce_op: str, lhs_len: int, *lhs_and_rhs: Any) -> Any:
        reason = _EMPTY if not gidx.number_of_edges(0) else ""
        if reduce_op in EXTREMA and op in ("mul", "div"):
            reason = reason or "the backward pass of DGL's fails"
        place = messages.spmm_place(op, reduce_op)
        if not reason:
            fell_back(place, _SEVERAL)
            return original(gidx, op, reduce_op, lhs_len, *lhs_and_rhs)
        ran(place, "by edge type", reason)
        return messages.gspmm_hetero(gidx, op, reduce_op, lhs_len, *lhs_and_rhs)

    return gspmm_hetero


def make_gsddmm_hetero(original: Any) -> Any:
    """Replaces ``gsddmm_hetero(gidx, op, lhs_len, lhs_target, rhs_target, *lhs_and_rhs)`` of the backend."""

    @functools.wraps(original)
    def gsddmm_hetero(gidx: Any, op: str, lhs_len: int, lhs_target: str = "u", rhs_target: str = "v", *lhs_and_rhs: Any) -> Any:
        place = messages.sddmm_place(op, lhs_target, rhs_target)
        if gidx.number_of_edges(0):
            fell_back(place, _SEVERAL)
            return original(gidx, op, lhs_len, lhs_target, rhs_target, *lhs_and_rhs)
        ran(place, "by edge type", _EMPTY)
        return messages.gsddmm_hetero(gidx, op, lhs_len, lhs_target, rhs_target, *lhs_and_rhs)

    return gsddmm_hetero


def make_edge_softmax_hetero(original: Any) -> Any:
    """Replaces ``edge_softmax_hetero(gidx, eids, norm_by, *logits)`` of the backend."""

    @functools.wraps(original)
    def edge_softmax_hetero(gidx: Any, eids: Any = messages.ALL, norm_by: str = "dst", *logits: Any) -> Any:
        if gidx.number_of_edges(0):
            fell_back("dgl edge_softmax", _SEVERAL)
            return original(gidx, eids, norm_by, *logits)
        ran("dgl edge_softmax", "by edge type", _EMPTY)
        return messages.edge_softmax_hetero(gidx, eids, norm_by, *logits)

    return edge_softmax_hetero
