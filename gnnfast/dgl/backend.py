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
from gnnfast.dgl import messages
from gnnfast.dgl.messages import as_rows, empty_of, pair_of_ends, reduce_edges, reduce_products, sddmm_place, spmm_place
from gnnfast.dgl.structure import FEW_EDGES, known, sized, structure
from gnnfast.dispatch import execute
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.guards import is_batched
from gnnfast.reporting import fell_back, ran
from gnnfast.types import FEATURE_DTYPES

if _native.cpu.loaded:
    from gnnfast.ops.convert import MANY_PAGES, empty

# Of gspmm; DGL divides by multiplying with the inverse.
OPS, REDUCES = ("copy_lhs", "copy_rhs", "mul", "add", "sub"), ("sum", "mean", "max", "min")
_ON_CPU = ("copy_rhs", "add", "sub")  # alone; on a GPU messages.py has them
_DTYPES = (torch.float32, torch.float64)  # others DGL might not have


def make_gspmm(original: Any) -> Any:
    """Replaces ``gspmm(gidx, op, reduce_op, lhs_data, rhs_data)`` of the backend. ``finite`` as in :func:`messages.gspmm`."""

    @functools.wraps(original)
    def gspmm(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any, finite: bool = False) -> Any:
        place = spmm_place(op, reduce_op)
        if op == "div" and isinstance(rhs_data, Tensor):
            op, rhs_data = "mul", inverse(rhs_data)
        operands = (rhs_data,) if op == "copy_rhs" else (lhs_data, rhs_data)
        reason = _slower(gidx, _what(op, reduce_op, lhs_data, rhs_data), *operands) if op in OPS else ""
        reason = reason or _unsupported(gidx, op, reduce_op, lhs_data, rhs_data)
        if reason:
            if _is_unknown_to_dgl(gidx, lhs_data, rhs_data):
                return messages.gspmm(gidx, op, reduce_op, lhs_data, rhs_data, finite)
            fell_back(place, reason)
            out = original(gidx, op, reduce_op, lhs_data, rhs_data)
            return messages.without_infinity(out) if finite else out
        return _gspmm(gidx, op, reduce_op, lhs_data, rhs_data, place, finite)

    gspmm.takes_finite = True  # type: ignore[attr-defined]
    return gspmm


def make_gspmm_mean(original: Any) -> Any:
    """Replaces ``dgl.ops.gspmm(g, op, reduce_op, lhs_data, rhs_data)``, which makes a mean of a sum and a division."""
    reshape_lhs_rhs, in_degrees = sys.modules["dgl.ops.spmm"].reshape_lhs_rhs, sys.modules["dgl.heterograph"].DGLGraph.in_degrees

    @functools.wraps(original)
    def gspmm(g: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
        if reduce_op == "mean" and getattr(type(g), "in_degrees", None) is not in_degrees:  # by which DGL divides
            return original(g, op, reduce_op, lhs_data, rhs_data)
        if reduce_op == "mean" and isinstance(lhs_data, Tensor) and op in OPS:
            lhs, rhs = (lhs_data, rhs_data) if op == "copy_lhs" else reshape_lhs_rhs(lhs_data, rhs_data)
            asked = {"narrow": "narrow", "edges": "edge means"}.get(_what(op, "sum", lhs, rhs))
            slower = asked is not None and _slower(g._graph, asked, lhs, rhs)
            known(g._graph).calls -= asked is not None  # counted below, or by the sum that will be asked for
            if not slower and not _unsupported(g._graph, op, reduce_op, lhs, rhs):
                known(g._graph).calls += 1
                return _gspmm(g._graph, op, reduce_op, lhs, rhs, spmm_place(op, reduce_op))
        elif reduce_op == "mean" and op == "copy_rhs" and isinstance(rhs_data, Tensor):
            if not _slower(g._graph, "edge means", rhs_data) and not _unsupported(g._graph, op, reduce_op, None, rhs_data):
                return _gspmm(g._graph, op, reduce_op, None, rhs_data, spmm_place(op, reduce_op))
            known(g._graph).calls -= 1  # the sum will be asked for, and counts
        return original(g, op, reduce_op, lhs_data, rhs_data)

    return gspmm


def make_gsddmm(original: Any) -> Any:
    """Replaces ``gsddmm(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)`` of the backend: of its operators, those on the
    two ends of an edge. The others, and on a GPU all but the dot product, are left to DGL."""

    @functools.wraps(original)
    def gsddmm(gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v") -> Any:
        place = sddmm_place(op, lhs_target, rhs_target)
        if op in ("add", "sub", "mul", "div"):
            reason = _unsupported_pair(gidx, lhs_data, rhs_data, lhs_target, rhs_target)
            if not reason:
                if op == "div":
                    op, rhs_data = "mul", 1.0 / rhs_data
                return pair_of_ends(structure(gidx), op, lhs_data, rhs_data, lhs_target, place)
        else:
            reason = _unsupported_dot(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)
        if reason:
            if _is_unknown_to_dgl(gidx, lhs_data, rhs_data):
                ran(place, "edges", "DGL has no float16 on a CPU")
                return messages.gsddmm(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)
            fell_back(place, reason)
            return original(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)
        src, dst = (lhs_data, rhs_data) if lhs_target == "u" else (rhs_data, lhs_data)
        shape = src.shape[1:-1]
        a, b = (t if t.dim() == 2 else t.reshape(t.shape[0], t.shape[1:].numel()) for t in (dst, src))
        out = execute.dot(structure(gidx), a, b, shape.numel(), place)
        return out.squeeze(1) if src.dim() == 1 else out.view(out.shape[0], *shape, 1)

    return gsddmm


def _is_unknown_to_dgl(gidx: Any, *operands: Any) -> bool:
    """Whether DGL's kernels on a CPU have no such dtype."""
    tensors = [t for t in operands if isinstance(t, Tensor)]
    return (
        any(t.dtype is torch.float16 for t in tensors) and all(t.device.type == "cpu" for t in tensors) and known(gidx).single(gidx)
    )


def make_edge_softmax(original: Any) -> Any:
    """Replaces ``edge_softmax(gidx, logits, eids, norm_by)`` of the backend."""

    @functools.wraps(original)
    def edge_softmax(gidx: Any, logits: Any, eids: Any = "__ALL__", norm_by: str = "dst") -> Any:
        if not isinstance(eids, str):
            reason = "only some edges take part"
        elif norm_by not in ("dst", "src"):
            reason = f"norm_by is {norm_by!r}"
        else:
            reason = _slower(gidx, "softmax", logits) or unsupported_operands(gidx, ("scores", logits, "num_edges"))
        if reason:
            fell_back("dgl edge_softmax", reason)
            return original(gidx, logits, eids, norm_by)
        graph = structure(gidx)
        score = logits if logits.dim() == 2 else logits.reshape(graph.num_edges, logits.shape[1:].numel())
        out = execute.softmax(graph if norm_by == "dst" else graph.reverse(), score, place="dgl edge_softmax")
        return out.view(logits.shape)

    return edge_softmax


# Beside DGL 2.1 on two cores with AVX-512, float32. The first call on a graph costs gnnfast 0.05 to 0.1 ms and later, if it is used
# again, a conversion; a call on a graph that it has costs less than DGL's but for products and softmaxes of a handful of edges. So
# these are the elements (edges times features), without and with gradients, from which calls are as fast as DGL's: on a graph of
# up to FEW_EDGES that is met first, where means pay at once, and on any that is not.
NEW = {
    "sum": (1 << 62, 1 << 62),  # DGL's fastest
    "product": (1 << 18, 0),  # with a weight an edge; summed, as the next
    "products": (1 << 18, 1 << 17),  # with several
    "narrow": (1 << 62, 1 << 62),  # with a weight for every one or two features
    "max": (1 << 19, 1 << 19),
    "copied max": (1 << 19, 1 << 19),  # where DGL has libxsmm's
    "edges": (1 << 20, 1 << 18),  # reduced, with features of nodes or without: 0.54 to 0.87 below
    "edge means": (1 << 18, 1 << 18),
    "dot": (1 << 19, 0),
    "narrow dot": (1 << 62, 0),  # of fewer than FEW_FEATURES: 0.7 to 0.95
    "softmax": (1 << 16, 1 << 16),
}
KNOWN = {
    "narrow": (1 << 62, 1 << 62),
    "dot": (1 << 17, 0),
    "narrow dot": (1 << 62, 0),
    "softmax": (1 << 13, 1 << 13),
}
FEW_FEATURES = 8
# Features up to which those of a weight are narrow: kernels take them a weight at a time.
NARROW = 2
# Elements from which DGL trains maxima of copied float32 features faster with AVX-512, by libxsmm (1.1 to 1.5x at 8 million); and
# of few features (1.2x at 88,648 edges, 2.1x at 491,722).
MANY_MAXIMA, MANY_NARROW_MAXIMA = 1 << 21, 1 << 16


def slower_than_dgl(what: str, new: bool, training: bool, num_edges: int, width: int) -> str:
    """Why a call is left to DGL, if it is: a pure function of sizes."""
    if what == "narrow" and training:
        return "the gradients of a weight for every one or two features are faster in DGL"
    most = MANY_NARROW_MAXIMA if width < FEW_FEATURES else MANY_MAXIMA
    if what == "copied max" and training and num_edges * width >= most:
        return "DGL's own maxima and minima (libxsmm) are faster to train"
    if num_edges > FEW_EDGES or num_edges * width >= (NEW if new else KNOWN).get(what, (0, 0))[training]:
        return ""
    return "a small graph that was not met before" if new else "too small to gain"


def _what(op: str, reduce_op: str, lhs: Any, rhs: Any) -> str:
    """Under which name the tables above have an aggregation."""
    if reduce_op not in ("sum", "mean"):
        return "copied max" if op == "copy_lhs" and _has_libxsmm(lhs) else "max"
    if op in ("copy_rhs", "add", "sub"):
        return "edges"
    if op == "copy_lhs" or not (isinstance(lhs, Tensor) and isinstance(rhs, Tensor) and lhs.dim() and rhs.dim()):
        return "sum"
    weights, features = rhs.shape[1:].numel(), lhs.shape[1:].numel()
    return "product" if weights == 1 or weights == features else "narrow" if NARROW * weights >= features else "products"


def _has_libxsmm(features: Any) -> bool:
    """Whether DGL's maxima of features are libxsmm's: of float32, on a CPU that has AVX-512."""
    if not isinstance(features, Tensor) or features.dtype is not torch.float32 or features.is_cuda:
        return False
    import dgl

    return torch.backends.cpu.get_cpu_capability() == "AVX512" and bool(getattr(dgl, "is_libxsmm_enabled", bool)())


def _slower(gidx: Any, what: str, *operands: Any) -> str:
    """The same for a call, which is counted: a graph is new in its first, and its reverse in the backward pass of that one. A graph
    of a mini-batch may never be seen again."""
    of = known(gidx)
    of.calls += 1
    if saved_tensors_are_watched():
        return ""
    first, training = operands[0], False
    for t in operands:
        if isinstance(t, Tensor):
            if t.dtype not in _DTYPES:
                return ""
            training = training or t.requires_grad
        elif t is not None:
            return ""
    if not isinstance(first, Tensor) or not first.dim():
        return ""
    current = settings()
    if current.strict or current.kernel != "auto" or current.sample != "off":
        return ""
    rows = max(first.shape[0], 1)
    new = of.calls == 1 + of.flipped
    return slower_than_dgl(what, new, training and torch.is_grad_enabled(), gidx.number_of_edges(0), first.numel() // rows)


def _unsupported(gidx: Any, op: str, reduce_op: str, lhs: Any, rhs: Any) -> str:
    """Why an aggregation is left to DGL, if it is."""
    if op not in OPS or (op in _ON_CPU and isinstance(rhs, Tensor) and rhs.device.type != "cpu"):
        return f"op is {op}"
    if reduce_op not in REDUCES:
        return f"reduce is {reduce_op}"
    if op == "copy_lhs":
        return unsupported_operands(gidx, ("features", lhs, "num_src"))
    if op == "copy_rhs":
        return unsupported_operands(gidx, ("features of edges", rhs, "num_edges"))
    reason = unsupported_operands(gidx, ("features", lhs, "num_src"), ("weights", rhs, "num_edges"))
    if not reason and heads_of_weights(lhs, rhs) is None:
        return f"weights of shape {list(rhs.shape)} against features of shape {list(lhs.shape)}"
    return reason


def _unsupported_dot(gidx: Any, op: str, lhs: Any, rhs: Any, lhs_target: str, rhs_target: str) -> str:
    if op != "dot":
        return f"op is {op}"
    narrow = isinstance(lhs, Tensor) and lhs.dim() > 1 and lhs.shape[-1] < FEW_FEATURES
    slower = _slower(gidx, "narrow dot" if narrow else "dot", lhs, rhs)
    if slower:
        return slower
    rows = {"u": "num_src", "v": "num_dst"}
    if lhs_target == rhs_target or not {lhs_target, rhs_target} <= rows.keys():
        return f"operands are of {lhs_target} and {rhs_target}"
    reason = unsupported_operands(gidx, ("features", lhs, rows[lhs_target]), ("features", rhs, rows[rhs_target]))
    if not reason and (lhs.shape[1:] != rhs.shape[1:] or 0 in lhs.shape[1:-1]):
        return f"features of shapes {list(lhs.shape)} and {list(rhs.shape)}"
    return reason


def _unsupported_pair(gidx: Any, lhs: Any, rhs: Any, lhs_target: str, rhs_target: str) -> str:
    """Why an operator on both ends of edges is left to DGL, if it is."""
    if (lhs_target, rhs_target) not in (("u", "v"), ("v", "u")) or not isinstance(lhs, Tensor) or not isinstance(rhs, Tensor):
        return f"operands are of {lhs_target} and {rhs_target}"
    if lhs.shape[1:] != rhs.shape[1:] or lhs.dtype not in _DTYPES or lhs.device.type != "cpu" or saved_tensors_are_watched():
        shapes = f"{list(lhs.shape)} and {list(rhs.shape)}"
        return f"features of {lhs.dtype} on {lhs.device.type} of shapes {shapes} at both ends, or saved tensors are watched"
    if sized(gidx).num_edges * lhs.shape[1:].numel() * lhs.element_size() < MANY_PAGES:
        return "too small to gain"
    rows = {"u": "num_src", "v": "num_dst"}
    return unsupported_operands(gidx, ("features", lhs, rows[lhs_target]), ("features", rhs, rows[rhs_target]))


def unsupported_operands(gidx: Any, *operands: tuple[str, Any, str]) -> str:
    """Why kernels do not take operands ``(name, tensor, which of the graph's sizes its rows are)``, if they do not."""
    first = operands[0][1]
    for name, t, _ in operands:
        if type(t) not in (Tensor, torch.nn.Parameter) or t.layout is not torch.strided:
            return f"{name} are a {type(t).__name__} of layout {getattr(t, 'layout', None)}"
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
    if not known(gidx).single(gidx):
        return "the graph has several edge types"
    of = sized(gidx)
    if of.too_large:
        return "the graph has too many nodes or edges"
    for name, t, rows in operands:
        if t.shape[0] != getattr(of, rows) or of.device != t.device.type:
            return f"{name} of shape {list(t.shape)} on {t.device} do not fit the graph"
    return ""


class _Inverse(torch.autograd.Function):
    """``1 / t`` and its gradient, of large arrays on a CPU, where torch's operations would take longer for their page faults."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:  # type: ignore[override]
        made = torch.reciprocal(t, out=empty(t, t.shape[0], t.shape[1:].numel()).view(t.shape))
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (made,) = ctx.saved_tensors
        if torch.is_grad_enabled() or is_batched(grad):
            return -grad * made * made
        return torch.mul(grad, made, out=empty(made, made.shape[0], made.shape[1:].numel()).view(made.shape)).mul_(made).neg_()


def inverse(t: Tensor) -> Tensor:
    """``1 / t``, by which DGL divides."""
    large = t.dim() > 1 and t.device.type == "cpu" and t.nbytes >= MANY_PAGES and t.is_floating_point() and t.is_contiguous()
    return _Inverse.apply(t) if large and type(t) in (Tensor, torch.nn.Parameter) else 1.0 / t  # type: ignore[no-any-return]


def heads_of_weights(lhs: Tensor, rhs: Tensor) -> int | None:
    """Number of weights per edge if broadcasting ``rhs`` against ``lhs`` (right-aligned) gives each a run of features, and these
    are some."""
    x, w = tuple(lhs.shape[1:]), tuple(rhs.shape[1:])
    w = (1,) * (len(x) - len(w)) + w
    if len(w) != len(x):
        return None
    split = len(w)
    while split and w[split - 1] == 1:
        split -= 1
    return (math.prod(w[:split]) or None) if w[:split] == x[:split] else None


def _gspmm(gidx: Any, op: str, reduce_op: str, lhs: Any, rhs: Any, place: str, finite: bool = False) -> Tensor:
    graph = structure(gidx)
    if op == "copy_rhs":
        return reduce_edges(graph, rhs, reduce_op, place, finite)
    weight = None
    if op != "copy_lhs":
        heads = heads_of_weights(lhs, rhs)
        assert heads is not None
        weight = rhs.reshape(graph.num_edges) if heads == 1 and op == "mul" else rhs.reshape(graph.num_edges, heads)
    if op not in ("add", "sub"):
        return reduce_products(gidx, graph, lhs, weight, reduce_op, place, finite)
    assert weight is not None
    x, empty = as_rows(lhs), empty_of(graph, reduce_op, finite)
    return execute.plus(graph, x, weight, reduce_op, op == "sub", place=place, empty=empty).view(graph.num_dst, *lhs.shape[1:])
