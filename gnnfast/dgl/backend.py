"""DGL's message passing (``gspmm``, ``gsddmm`` and ``edge_softmax`` of its backend), each as one op over a graph's structure."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.config import settings
from gnnfast.dgl.structure import known, sized, structure
from gnnfast.dispatch import execute
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.reporting import fell_back
from gnnfast.types import FEATURE_DTYPES

_OPS = ("copy_lhs", "mul")  # of gspmm


def make_gspmm(original: Any) -> Any:
    """Replaces ``gspmm(gidx, op, reduce_op, lhs_data, rhs_data)`` of the backend."""

    @functools.wraps(original)
    def gspmm(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
        reason = _too_early(gidx, lhs_data, rhs_data) if op in _OPS else ""
        reason = reason or _unsupported(gidx, op, reduce_op, lhs_data, rhs_data)
        known(gidx).met = True
        if reason:
            fell_back(f"dgl {op}.{reduce_op}", reason)
            return original(gidx, op, reduce_op, lhs_data, rhs_data)
        return _gspmm(gidx, op, reduce_op, lhs_data, rhs_data)

    return gspmm


def make_gspmm_mean(original: Any) -> Any:
    """Replaces ``dgl.ops.gspmm(g, op, reduce_op, lhs_data, rhs_data)``, which makes a mean of a sum and a division."""
    reshape_lhs_rhs = sys.modules["dgl.ops.spmm"].reshape_lhs_rhs

    @functools.wraps(original)
    def gspmm(g: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
        if reduce_op == "mean" and isinstance(lhs_data, Tensor) and op in _OPS:
            lhs, rhs = (lhs_data, rhs_data) if op == "copy_lhs" else reshape_lhs_rhs(lhs_data, rhs_data)
            if not (_too_early(g._graph, lhs, rhs) or _unsupported(g._graph, op, reduce_op, lhs, rhs)):
                known(g._graph).met = True
                return _gspmm(g._graph, op, reduce_op, lhs, rhs)
        return original(g, op, reduce_op, lhs_data, rhs_data)

    return gspmm


def make_gsddmm(original: Any) -> Any:
    """Replaces ``gsddmm(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)`` of the backend: of its operators, the dot product
    of the two ends of an edge. The others write a feature row per edge, which DGL does as fast as memory allows."""

    @functools.wraps(original)
    def gsddmm(gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v") -> Any:
        reason = _unsupported_dot(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)
        if reason:
            fell_back(f"dgl sddmm {op}", reason)
            return original(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)
        src, dst = (lhs_data, rhs_data) if lhs_target == "u" else (rhs_data, lhs_data)
        shape = src.shape[1:-1]
        a, b = (t if t.dim() == 2 else t.reshape(t.shape[0], t.shape[1:].numel()) for t in (dst, src))
        out = execute.dot(structure(gidx), a, b, shape.numel(), "dgl sddmm dot")
        return out.squeeze(1) if src.dim() == 1 else out.view(out.shape[0], *shape, 1)

    return gsddmm


def make_edge_softmax(original: Any) -> Any:
    """Replaces ``edge_softmax(gidx, logits, eids, norm_by)`` of the backend."""

    @functools.wraps(original)
    def edge_softmax(gidx: Any, logits: Any, eids: Any = "__ALL__", norm_by: str = "dst") -> Any:
        if not isinstance(eids, str):
            reason = "only some edges take part"
        elif norm_by not in ("dst", "src"):
            reason = f"norm_by is {norm_by!r}"
        else:
            reason = _too_early(gidx) or _unsupported_operands(gidx, ("scores", logits, "num_edges"))
        known(gidx).met = True
        if reason:
            fell_back("dgl edge_softmax", reason)
            return original(gidx, logits, eids, norm_by)
        graph = structure(gidx)
        score = logits if logits.dim() == 2 else logits.reshape(graph.num_edges, logits.shape[1:].numel())
        out = execute.softmax(graph if norm_by == "dst" else graph.reverse(), score, place="dgl edge_softmax")
        return out.view(logits.shape)

    return edge_softmax


# Edges up to which DGL is done with a graph before gnnfast has it in its own form (two CPU cores).
FEW_EDGES = 1 << 18


def _too_early(gidx: Any, *operands: Any) -> str:
    """Why a graph is left to DGL this time: it is small and may never be seen again, as one of a mini-batch. Whoever trains sees it
    again, in the backward pass, which costs DGL more."""
    of = known(gidx)
    if of.met or of.num_etypes != 1 or gidx.number_of_edges(0) > FEW_EDGES or saved_tensors_are_watched():
        return ""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in operands):
        return ""
    if any(isinstance(t, Tensor) and t.dtype not in (torch.float32, torch.float64) for t in operands):
        return ""  # DGL might not have it
    current = settings()
    if current.strict or current.kernel != "auto" or current.sample != "off":
        return ""
    return "a small graph that was not met before"


def _unsupported(gidx: Any, op: str, reduce_op: str, lhs: Any, rhs: Any) -> str:
    """Why an aggregation is left to DGL, if it is."""
    if op not in _OPS:
        return f"op is {op}"
    if reduce_op not in ("sum", "mean", "max", "min"):
        return f"reduce is {reduce_op}"
    if op == "copy_lhs":
        return _unsupported_operands(gidx, ("features", lhs, "num_src"))
    reason = _unsupported_operands(gidx, ("features", lhs, "num_src"), ("weights", rhs, "num_edges"))
    if not reason and _heads(lhs, rhs) is None:
        return f"weights of shape {list(rhs.shape)} against features of shape {list(lhs.shape)}"
    return reason


def _unsupported_dot(gidx: Any, op: str, lhs: Any, rhs: Any, lhs_target: str, rhs_target: str) -> str:
    if op != "dot":
        return f"op is {op}"
    early = _too_early(gidx, lhs, rhs)
    known(gidx).met = True
    if early:
        return early
    rows = {"u": "num_src", "v": "num_dst"}
    if lhs_target == rhs_target or not {lhs_target, rhs_target} <= rows.keys():
        return f"operands are of {lhs_target} and {rhs_target}"
    reason = _unsupported_operands(gidx, ("features", lhs, rows[lhs_target]), ("features", rhs, rows[rhs_target]))
    if not reason and (lhs.shape[1:] != rhs.shape[1:] or 0 in lhs.shape[1:-1]):
        return f"features of shapes {list(lhs.shape)} and {list(rhs.shape)}"
    return reason


def _unsupported_operands(gidx: Any, *operands: tuple[str, Any, str]) -> str:
    """The same for operands ``(name, tensor, which of the graph's sizes its rows are)``."""
    first = operands[0][1]
    for name, t, _ in operands:
        if type(t) not in (Tensor, torch.nn.Parameter):
            return f"{name} are a {type(t).__name__}"
        missing = _native.missing(t.device.type)
        if missing:
            return f"{name} are on {t.device.type}: {missing}"
        if t.dtype not in FEATURE_DTYPES or t.dtype != first.dtype or t.device != first.device:
            return f"{name} are {t.dtype} on {t.device}"
        if t.dim() == 0:
            return f"{name} have no dimension"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "a torch.func transform or forward-mode AD is active"
    if known(gidx).num_etypes != 1:
        return "the graph has several edge types"
    of = sized(gidx)
    if of.too_large:
        return "the graph has too many nodes or edges"
    for name, t, rows in operands:
        if t.shape[0] != getattr(of, rows) or of.device != t.device.type[:3]:
            return f"{name} of shape {list(t.shape)} on {t.device} do not fit the graph"
    return ""


def _heads(lhs: Tensor, rhs: Tensor) -> int | None:
    """Number of weights per edge if broadcasting ``rhs`` against ``lhs`` (right-aligned) gives each a run of features."""
    x, w = tuple(lhs.shape[1:]), tuple(rhs.shape[1:])
    w = (1,) * (len(x) - len(w)) + w
    if len(w) != len(x):
        return None
    split = len(w)
    while split and w[split - 1] == 1:
        split -= 1
    return math.prod(w[:split]) if w[:split] == x[:split] else None


def _gspmm(gidx: Any, op: str, reduce_op: str, lhs: Tensor, rhs: Any) -> Tensor:
    graph = structure(gidx)
    shape = lhs.shape[1:]
    x = lhs if lhs.dim() == 2 else lhs.reshape(lhs.shape[0], shape.numel())  # the same object: constant features are known by it
    weight = None
    if op == "mul":
        heads = _heads(lhs, rhs)
        assert heads is not None
        weight = rhs.reshape(graph.num_edges) if heads == 1 else rhs.reshape(graph.num_edges, heads)
    # Rows without edges hold the reduction's neutral element, which update_all() turns into 0, but a graph without edges holds 0.
    empty = {"max": -math.inf, "min": math.inf}.get(reduce_op, 0.0) if graph.num_edges else 0.0
    out = execute.aggregate(
        graph, x, weight, reduce_op, place=f"dgl {op}.{reduce_op}", ties="first", empty=empty, owner=known(gidx).key
    )
    return out.view(graph.num_dst, *shape)
