"""All of DGL's message passing without its kernels: by those of gnnfast where there is one, else by torch's operations and a
reduction of edge features. It serves the graphs that :mod:`gnnfast.dgl.bridge` puts on a GPU, in every dtype that gnnfast has, and
gives what DGL gives on a CPU: NumPy's broadcasting, aligned at the right; the dot product keeps its dimension; rows without edges
hold the neutral element of the reduction, but 0 in a graph without edges; of edges that tie the first by id takes the gradient of a
maximum.

Letters in comments: N sources, M destinations, E edges.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.dgl.structure import known, structure
from gnnfast.dispatch import edges, execute
from gnnfast.dispatch.edges import Ends
from gnnfast.graph import Graph
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.reporting import ran
from gnnfast.types import EXTREMA, FEATURE_DTYPES, TIES

if _native.cpu.loaded:
    from gnnfast.ops.convert import derived
    from gnnfast.ops.spmm import below_autograd
    from gnnfast.ops.spmm import edges as by_slot
    from gnnfast.ops.spmm_plus import first_of

ALL = "__ALL__"
_NEUTRAL = {"max": -math.inf, "min": math.inf}
_COPIES = {"copy_lhs": "copy_u", "copy_rhs": "copy_e"}
_ONE_OPERAND = {"copy_lhs": 0, "copy_rhs": 1}


# ---- places in the report, by the names of dgl.function ------------------------------------------------------------------------
@functools.lru_cache(256)
def spmm_place(op: str, reduce: str) -> str:
    """Where messages ``op`` are reduced: ``"dgl u_mul_e_sum"``."""
    return f"dgl {_COPIES.get(op, f'u_{op}_e')}_{reduce}"


@functools.lru_cache(256)
def sddmm_place(op: str, lhs_target: str, rhs_target: str) -> str:
    """Where messages ``op`` of edges are made: ``"dgl u_dot_v"``."""
    if op in _ONE_OPERAND:
        return f"dgl copy_{(lhs_target, rhs_target)[_ONE_OPERAND[op]]}"
    return f"dgl {lhs_target}_{op}_{rhs_target}"


# ---- what is called in place of the functions of dgl.backend ------------------------------------------------------------------
def _autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under autocast DGL casts every operand to its dtype, and computes without it."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        device = next((t.device.type for t in args if isinstance(t, Tensor)), "cpu")
        if device == "cpu" or not torch.is_autocast_enabled(device):
            return function(*args, **named)
        dtype = torch.get_autocast_dtype(device)
        narrow = (torch.float32, torch.float16, torch.bfloat16)
        cast = [t.to(dtype) if isinstance(t, Tensor) and t.dtype in narrow else t for t in args]
        with torch.autocast(device, enabled=False):
            return function(*cast, **named)

    return call


@_autocast
def gspmm(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any, finite: bool = False) -> Tensor:
    """Messages ``lhs [N, ...] op rhs [E, ...]``, reduced at the destinations by sum, mean, max, min: ``[M, ...]``. With ``finite``
    infinite results are 0, as :func:`gnnfast.dgl.update` wants extrema.

    Raises:
        DGLError: operands do not fit the graph, or one another.
    """
    from gnnfast.dgl.backend import heads_of_weights

    graph = _graph(gidx)
    place = spmm_place(op, reduce_op)
    op, rhs_data = _without_inverse(op, rhs_data)
    _check(graph, op, (lhs_data, "u"), (rhs_data, "e"))
    if op == "copy_rhs":
        return reduce_edges(graph, rhs_data, reduce_op, place, finite)
    weights = heads_of_weights(lhs_data, rhs_data) if op == "mul" else None
    if op == "copy_lhs" or weights is not None:
        weight = None if weights is None else rhs_data.reshape((-1,) if weights == 1 else (graph.num_edges, weights))
        return reduce_products(gidx, graph, lhs_data, weight, reduce_op, place, finite)
    lhs, rhs = _aligned(lhs_data, rhs_data)
    if op == "add" and reduce_op not in EXTREMA:  # no message exists
        of_nodes = execute.aggregate(graph, as_rows(lhs), None, reduce_op, place=place).view(graph.num_dst, *lhs.shape[1:])
        return of_nodes + reduce_edges(graph, rhs, reduce_op, place)
    gathered = _at(graph, lhs, "u")
    return reduce_edges(graph, gathered * rhs if op == "mul" else gathered + rhs, reduce_op, place, finite)


@_autocast
def gsddmm(gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v") -> Tensor:
    """``lhs op rhs`` at each edge, ``[E, ...]``; a target is ``u``, ``v`` or ``e``, where the rows of an operand are.

    Raises:
        DGLError: as :func:`gspmm`.
    """
    graph = _graph(gidx)
    place = sddmm_place(op, lhs_target, rhs_target)
    op, rhs_data = _without_inverse(op, rhs_data)
    operands = (lhs_data, lhs_target), (rhs_data, rhs_target)
    _check(graph, op, *operands)
    if op in _ONE_OPERAND:
        data, target = operands[_ONE_OPERAND[op]]
        return data.clone() if target == "e" else _at(graph, data, target)
    if op == "dot" and {lhs_target, rhs_target} == {"u", "v"} and lhs_data.shape[1:] == rhs_data.shape[1:]:
        src, dst = (lhs_data, rhs_data) if lhs_target == "u" else (rhs_data, lhs_data)
        shape = src.shape[1:-1]
        if src.shape[1:].numel():
            out = execute.dot(graph, as_rows(dst), as_rows(src), shape.numel(), place)
            return out.squeeze(1) if src.dim() == 1 else out.view(graph.num_edges, *shape, 1)
    lhs, rhs = _aligned(lhs_data, rhs_data)
    if op != "dot" and {lhs_target, rhs_target} == {"u", "v"} and lhs.shape[1:] == rhs.shape[1:] and edges.combines(lhs, rhs):
        return pair_of_ends(graph, op, lhs, rhs, lhs_target, place)
    lhs, rhs = _at(graph, lhs, lhs_target), _at(graph, rhs, rhs_target)
    if op == "add":
        return lhs + rhs
    if op == "mul" or lhs.dim() == 1:
        return lhs * rhs
    return (lhs * rhs).sum(-1, keepdim=True)


@_autocast
def edge_softmax(gidx: Any, logits: Tensor, eids: Any = ALL, norm_by: str = "dst") -> Tensor:
    """The softmax of ``logits [E, ...]`` over the edges into each destination, or out of each source; with ``eids``, of these edges
    alone, in their order."""
    graph = _graph(gidx)
    if isinstance(eids, Tensor):
        dst, src = (t.index_select(0, eids.to(t.device)) for t in ends_of(graph).ids)
        graph = Graph.of_ids(src, dst, graph.num_src, graph.num_dst, src.numel())
    _check(graph, "copy_rhs", (None, "u"), (logits, "e"))
    return _softmax(graph if norm_by == "dst" else graph.reverse(), logits)


@_autocast
def segment_reduce(op: str, x: Tensor, offsets: Tensor) -> Tensor:
    """Rows of ``x`` reduced from each of ``offsets [B + 1]`` to the next, by sum, max or min: ``[B, ...]``. Empty segments hold the
    neutral element."""
    segments, rows = offsets.numel() - 1, x.shape[0]
    # No wait for the device: rows behind the last offset would belong to a segment that does not exist, which is an error.
    row = torch.arange(rows, dtype=torch.int32, device=x.device)
    segment = torch.searchsorted(offsets[1:].contiguous(), row.to(offsets.dtype), right=True)
    graph = Graph.of_ids(row, segment.to(torch.int32), rows, segments, rows)
    out = execute.aggregate(
        graph, as_rows(x), None, op, place=f"dgl segment_reduce_{op}", ties="first", empty=_NEUTRAL.get(op, 0.0)
    )
    return out.view(segments, *x.shape[1:])


def segment_mm(a: Tensor, b: Tensor, seglen_a: Tensor) -> Tensor:
    """Rows of ``a`` by segments times the matrices ``b [R, D1, D2]``. Waits for the device if the lengths are there."""
    if b.dim() != 3:
        raise ValueError("segment_mm expects B to be a 3D tensor.")
    return torch.cat([part @ matrix for part, matrix in zip(a.split(seglen_a.tolist()), b)])


def gather_mm(a: Tensor, b: Tensor, idx_a: Tensor | None = None, idx_b: Tensor | None = None) -> Tensor:
    """``a[idx_a[i]] @ b[idx_b[i]]``."""
    if b.dim() != 3:
        raise ValueError(f"Expected dimension of B is 3. Got {b.dim()}")
    a = a if idx_a is None else a.index_select(0, idx_a)
    b = b if idx_b is None else b.index_select(0, idx_b)
    return torch.bmm(a.unsqueeze(1), b).squeeze(1)


@_autocast
def scatter_add(x: Tensor, idx: Tensor, m: int) -> Tensor:
    """Rows of ``x`` added up at ``idx`` in ``[m, ...]`` zeros."""
    return x.new_zeros(m, *x.shape[1:]).index_add(0, idx, x)


# ---- several edge types --------------------------------------------------------------------------------------------------------
def gspmm_hetero(gidx: Any, op: str, reduce_op: str, lhs_len: int, *lhs_and_rhs: Any) -> tuple[Tensor, ...]:
    """:func:`gspmm` over each relation, with features by node and by edge type, reduced over the relations into each node type as
    well. Types that no relation goes into get an empty tensor. Of relations that tie the first takes the gradient."""
    lhs, rhs = lhs_and_rhs[:lhs_len], lhs_and_rhs[lhs_len:]
    found: dict[int, Tensor] = {}
    neutral: dict[int, Tensor] = {}  # of relations without edges: 0, which is no maximum
    for etype, src, dst in _relations(gidx):
        operands = None if op == "copy_rhs" else lhs[src], None if op == "copy_lhs" else rhs[etype]
        if (op != "copy_rhs" and operands[0] is None) or (op != "copy_lhs" and operands[1] is None):
            continue
        relation = gidx.get_relation_graph(etype)
        out = gspmm(relation, op, reduce_op, *operands)
        if reduce_op in EXTREMA and not structure(relation).num_edges:
            neutral.setdefault(dst, out)
        elif dst not in found:
            found[dst] = out
        elif reduce_op in EXTREMA:
            best = found[dst]
            found[dst] = torch.where(out > best if reduce_op == "max" else out < best, out, best)
        else:
            found[dst] = found[dst] + out
    given = next(t for t in lhs_and_rhs if t is not None)
    found = neutral | found
    return tuple(found[t] if t in found else given.new_empty(0) for t in range(gidx.number_of_ntypes()))


def gsddmm_hetero(
    gidx: Any, op: str, lhs_len: int, lhs_target: str = "u", rhs_target: str = "v", *lhs_and_rhs: Any
) -> tuple[Tensor | None, ...]:
    """:func:`gsddmm` over each relation; ``None`` where an operand is."""
    data = lhs_and_rhs[:lhs_len], lhs_and_rhs[lhs_len:]
    used = _ONE_OPERAND.get(op)
    out: list[Tensor | None] = []
    for etype, src, dst in _relations(gidx):
        at = {"u": src, "v": dst, "e": etype}
        operands = [d[at[t]] if used in (None, i) else None for i, (d, t) in enumerate(zip(data, (lhs_target, rhs_target)))]
        missing = any(t is None for i, t in enumerate(operands) if used in (None, i))
        out.append(None if missing else gsddmm(gidx.get_relation_graph(etype), op, *operands, lhs_target, rhs_target))
    return tuple(out)


def edge_softmax_hetero(gidx: Any, eids: Any = ALL, norm_by: str = "dst", *logits: Any) -> tuple[Tensor | None, ...]:
    """The softmax over all edges into each node, or out of it, of whatever type they are."""
    if not isinstance(eids, str):
        raise _error()("edge_softmax of some edges only is for graphs with one edge type")
    out: list[Tensor | None] = [None] * len(logits)
    groups: dict[int, list[int]] = {}
    for etype, src, dst in _relations(gidx):
        if logits[etype] is not None:
            groups.setdefault(dst if norm_by == "dst" else src, []).append(etype)
    for node_type, etypes in groups.items():
        graphs = [_graph(gidx.get_relation_graph(etype)) for etype in etypes]
        nodes = torch.cat([ends_of(graph).ids[BY_DST if norm_by == "dst" else BY_SRC] for graph in graphs])
        together = Graph.of_ids(torch.zeros_like(nodes), nodes, 1, gidx.number_of_nodes(node_type), nodes.numel())
        sizes = [graph.num_edges for graph in graphs]
        for etype, part in zip(etypes, _softmax(together, torch.cat([logits[etype] for etype in etypes])).split(sizes)):
            out[etype] = part
    return tuple(out)


def _relations(gidx: Any) -> list[tuple[int, int, int]]:
    metagraph = gidx.metagraph
    return [(etype, *metagraph.find_edge(etype)) for etype in range(gidx.number_of_etypes())]


# ---- parts ---------------------------------------------------------------------------------------------------------------------
class _FirstExtremum(torch.autograd.Function):
    """The maximum or minimum of rows of edges ``[E, F]`` at their destinations: the first that attains it gets the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Ends, minimum: bool, empty: float | None) -> Tensor:  # type: ignore[override]
        matrix = ends.incidence(BY_DST, rows.shape[1] * rows.element_size())
        matrix = matrix._replace(perm=matrix.col)  # by which the op names the edge
        with below_autograd():
            out, first = torch.ops.gnnfast.spmm_max.default(*matrix, None, rows, minimum, TIES["first"], empty)
        ctx.ends = ends
        ctx.save_for_backward(first)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (first,) = ctx.saved_tensors
        return first_of(grad, first, ctx.ends.ids[BY_DST].numel(), grad.shape[1]), None, None, None


def _at(graph: Graph, data: Tensor, target: str) -> Tensor:
    """The rows of an operand at each edge."""
    return data if target == "e" else edges.gather(data, ends_of(graph), BY_SRC if target == "u" else BY_DST)


def reduce_products(
    gidx: Any, graph: Graph, features: Tensor, weight: Tensor | None, reduce: str, place: str, finite: bool
) -> Tensor:
    """``features [N, ...]`` at the sources, times ``weight [E]`` or ``[E, H]``, reduced at the destinations."""
    x = as_rows(features)
    # DGL's gradient of an infinite product is 0 times what is infinite.
    trained = weight is not None and torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
    empty = empty_of(graph, reduce, finite and not trained)
    out = execute.aggregate(graph, x, weight, reduce, place=place, ties="first", empty=empty, owner=known(gidx).shared_key())
    out = out if x is features else out.view(graph.num_dst, *features.shape[1:])
    return without_infinity(out) if finite and trained else out


def reduce_edges(graph: Graph, data: Tensor, reduce: str, place: str, finite: bool = False) -> Tensor:
    """``[E, ...]`` reduced at the destinations."""
    ran(place, f"edges {reduce}", "over CSR, where each row of messages is read once")
    if reduce not in EXTREMA:
        return edges.reduce(data, ends_of(graph), reduce)
    out = _FirstExtremum.apply(as_rows(data), ends_of(graph), reduce == "min", empty_of(graph, reduce, finite))
    return out.view(graph.num_dst, *data.shape[1:])  # type: ignore[no-any-return]


def pair_of_ends(graph: Graph, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str, place: str) -> Tensor:
    """``lhs op rhs`` of features of one shape at both ends of each edge."""
    side = BY_SRC if lhs_target == "u" else BY_DST
    ran(place, "edges", "one pass over the edges")
    return edges.combine(as_rows(lhs), as_rows(rhs), ends_of(graph), side, op).view(graph.num_edges, *lhs.shape[1:])


def _softmax(graph: Graph, logits: Tensor) -> Tensor:
    return execute.softmax(graph, as_rows(logits), place="dgl edge_softmax").view(logits.shape)


def as_rows(t: Tensor) -> Tensor:
    """As ``[rows, F]``; the same object if it is that already, by which constant features are known."""
    return t if t.dim() == 2 else t.reshape(t.shape[0], t.shape[1:].numel())


def _aligned(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, ...]:
    """With as many dimensions each, of which those that were not there come second."""
    most = max(lhs.dim(), rhs.dim())
    return tuple(t.reshape(t.shape[0], *(1,) * (most - t.dim()), *t.shape[1:]) for t in (lhs, rhs))


def _without_inverse(op: str, rhs: Any) -> tuple[str, Any]:
    """As DGL does it: so the numbers are the same."""
    if op == "sub":
        return "add", -rhs
    return ("mul", 1.0 / rhs) if op == "div" else (op, rhs)


def empty_of(graph: Graph, reduce: str, finite: bool) -> float | None:
    """What rows without edges hold: the neutral element, but 0 in a graph without edges; ``None`` if nothing infinite is."""
    if reduce not in EXTREMA or not graph.num_edges:
        return 0.0
    return None if finite else _NEUTRAL[reduce]


def without_infinity(out: Tensor) -> Tensor:
    return sys.modules["dgl.backend"].replace_inf_with_zero(out)  # type: ignore[no-any-return]


def ends_of(graph: Graph) -> Ends:
    """The ends of the edges, in the order of their ids."""
    coo = graph.coo
    if coo is None:  # of a graph on a CPU that came compressed
        args = graph.args(False)

        def make() -> Tensor:
            dst, src, ids = by_slot(args)
            made = torch.empty(2, ids.numel(), dtype=torch.int32)
            made[0, ids], made[1, ids] = src.int(), dst.int()
            return made

        kept = derived(args.rowptr, ("ends by id", args.perm is None), make)
        assert kept is not None
        coo = kept[0], kept[1]
    return Ends(coo[1], coo[0], lambda: graph)


# ---- checks --------------------------------------------------------------------------------------------------------------------
def _error() -> type[Exception]:
    return sys.modules["dgl"].DGLError  # type: ignore[no-any-return]


def _graph(gidx: Any) -> Graph:
    of = known(gidx)
    if not of.single(gidx):
        raise _error()("We only support message passing over one edge type at a time here: take g[etype]")
    graph = structure(gidx)
    if of.too_large:
        raise _error()(f"{graph} has more nodes or edges than gnnfast's kernels can count to; split it, or use a CUDA build of DGL")
    return graph


def _check(graph: Graph, op: str, *operands: tuple[Any, str]) -> None:
    """Raises DGLError if operands ``(tensor, target)`` do not fit the graph or one another."""
    if op in _ONE_OPERAND:
        operands = (operands[_ONE_OPERAND[op]],)
    elif op not in ("add", "mul", "dot"):
        raise _error()(f"There is no operator {op!r} in message passing")
    rows = {"u": graph.num_src, "v": graph.num_dst, "e": graph.num_edges}
    first = operands[0][0]
    for t, target in operands:
        if not isinstance(t, Tensor) or t.dim() == 0 or t.dtype not in FEATURE_DTYPES:
            what = f"{t.dtype} of shape {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise _error()(f"Features must be tensors of float16, bfloat16, float32 or float64 with a row each, got {what}")
        if t.shape[0] != rows[target]:
            raise _error()(f"Expect {target.upper()}_data to have size {rows[target]} on the first dimension, but got {t.shape[0]}")
        if t.device != graph.device:
            raise _error()(f"Features are on {t.device} but the graph is on {graph.device}; move one of them with .to()")
        if t.dtype != first.dtype:
            raise _error()(f"Features of {first.dtype} and {t.dtype} meet; please convert them to the same type")
    if len(operands) == 2:
        shapes = (tuple(t.shape[1:]) if t.dim() > 1 else (1,) for t, _ in operands)
        sys.modules["dgl._sparse_ops"].infer_broadcast_shape(op, *shapes)
