"""DGL's generalised SpMM (``gspmm``) as one aggregation.

The structure of a graph is kept in the dictionary of its ``HeteroGraphIndex`` (which is neither hashable nor comparable, and
immutable) and dies with it. ``g.update_all`` makes a new index for its relation in every call, so those share the dictionary.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.dispatch.execute import aggregate
from gnnfast.graph import Graph
from gnnfast.reporting import fell_back
from gnnfast.types import FEATURE_DTYPES

_KEPT = "_gnnfast"


def make_gspmm(original: Any) -> Any:
    """Replaces ``gspmm(gidx, op, reduce_op, lhs_data, rhs_data)`` of the backend."""

    @functools.wraps(original)
    def gspmm(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
        reason = _unsupported(gidx, op, reduce_op, lhs_data, rhs_data)
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
        if reduce_op == "mean" and isinstance(lhs_data, Tensor) and op in ("copy_lhs", "mul"):
            lhs, rhs = (lhs_data, rhs_data) if op == "copy_lhs" else reshape_lhs_rhs(lhs_data, rhs_data)
            if not _unsupported(g._graph, op, reduce_op, lhs, rhs):
                return _gspmm(g._graph, op, reduce_op, lhs, rhs)
        return original(g, op, reduce_op, lhs_data, rhs_data)

    return gspmm


def make_get_relation_graph(original: Any) -> Any:
    """Replaces ``HeteroGraphIndex.get_relation_graph``: the result shares the kept structure."""

    @functools.wraps(original)
    def get_relation_graph(self: Any, etype: int) -> Any:
        relation = original(self, etype)
        kept = self.__dict__.setdefault(_KEPT, {})
        relation.__dict__[_KEPT] = kept if self.number_of_etypes() == 1 else kept.setdefault(int(etype), {})
        return relation

    return get_relation_graph


def _unsupported(gidx: Any, op: str, reduce_op: str, lhs: Any, rhs: Any) -> str:
    if op not in ("copy_lhs", "mul"):
        return f"op is {op}"
    if reduce_op not in ("sum", "mean", "max", "min"):
        return f"reduce is {reduce_op}"
    operands = (("features", lhs),) if op == "copy_lhs" else (("features", lhs), ("weights", rhs))
    for name, t in operands:
        if type(t) not in (Tensor, torch.nn.Parameter):
            return f"{name} are a {type(t).__name__}"
        missing = _native.missing(t.device.type)
        if missing:
            return f"{name} are on {t.device.type}: {missing}"
        if t.dtype not in FEATURE_DTYPES or t.dtype != lhs.dtype or t.device != lhs.device:
            return f"{name} are {t.dtype} on {t.device}"
        if t.dim() == 0:
            return f"{name} have no dimension"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "a torch.func transform or forward-mode AD is active"
    if gidx.number_of_etypes() != 1:
        return "the graph has several edge types"
    source, _ = gidx.metagraph.find_edge(0)
    if lhs.shape[0] != gidx.number_of_nodes(source) or str(gidx.ctx)[:3] != lhs.device.type[:3]:
        return "features do not fit the graph"
    if op == "mul" and (rhs.shape[0] != gidx.number_of_edges(0) or _heads(lhs, rhs) is None):
        return f"weights of shape {list(rhs.shape)} against features of shape {list(lhs.shape)}"
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
    out = aggregate(graph, x, weight, reduce_op, place=f"dgl {op}.{reduce_op}", ties="first", empty=empty, owner=graph)
    return out.view(graph.num_dst, *shape)


def structure(gidx: Any) -> Graph:
    """The graph of an index with one edge type, made once and kept with it."""
    kept = gidx.__dict__.setdefault(_KEPT, {})
    graph = kept.get("graph")
    if graph is None:
        source, target = gidx.metagraph.find_edge(0)
        num_src, num_dst = gidx.number_of_nodes(source), gidx.number_of_nodes(target)
        created = gidx.formats()["created"]
        if "csc" not in created and "coo" in created:
            src, dst, _ = gidx.edges(0, "eid")
            graph = Graph.from_coo(src, dst, num_src, num_dst)
        else:
            by_dst = "csc" in created
            _, _, indptr, indices, ids = gidx.adjacency_matrix_tensors(0, by_dst, "csr")
            perm = ids if ids.numel() else None  # empty: slots are edge ids
            graph = Graph.from_csr(indptr, indices, num_src, perm) if by_dst else Graph.from_csc(indptr, indices, num_dst, perm)
        kept["graph"] = graph
    return graph
