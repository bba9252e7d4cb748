"""``torch_geometric.utils.spmm``: PyG's fused route for adjacency matrices given as ``torch.sparse`` or ``SparseTensor``."""

from __future__ import annotations

import warnings
import weakref
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.cache import cache
from gnnfast.config import is_overridden, settings
from gnnfast.dispatch.execute import aggregate
from gnnfast.dispatch.select import most_left
from gnnfast.graph import Graph
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.pyg.small import SMALL
from gnnfast.reporting import fell_back, ran
from gnnfast.types import FEATURE_DTYPES

_PLACE = "pyg spmm"
_is_grad_enabled = torch.is_grad_enabled
_CSR, _deterministic = torch.sparse_csr, torch._C._get_deterministic_algorithms
_ADDED = ("sum", "add")
_REDUCTIONS = (*_ADDED, "mean", "max", "min")


def make_spmm(original: FunctionType) -> Any:
    """A dispatcher for ``spmm(src, other, reduce)``."""

    def spmm(src: Any, other: Any, reduce: Any) -> Any:
        if _is_small(src, other, reduce):  # as PyG has it, whatever records calls
            ran(_PLACE, "PyG's own", SMALL)
            if reduce in _ADDED and src.layout is _CSR:
                return torch.sparse.mm(src, other)
            return torch.sparse.mm(src, other, reduce) if src.is_cpu and reduce in _REDUCTIONS else NotImplemented
        reason = guards.context() or _unsupported(src, other, reduce)
        if not reason:
            reduce = "sum" if reduce == "add" else reduce
            if isinstance(src, Tensor):
                return _torch_sparse(src, other, reduce)
            return _sparse_tensor(src, other, reduce)
        fell_back(_PLACE, reason)
        return NotImplemented

    return spmm


ROW_BYTES = 64  # in training on a CPU, however wide rows are


def _is_small(src: Any, other: Any, reduce: Any) -> bool:
    """Whether torch's product is as fast: on a CPU it needs no other format. Over a matrix that is known there, too, so that no
    call rounds otherwise than another. On small graphs each function that this calls takes a hundredth of a layer: nothing is
    remembered where that takes longer than to ask."""
    if type(src) is not Tensor or not isinstance(other, Tensor):  # PyG raises its own
        return False
    needs_grad = _is_grad_enabled() and other.requires_grad
    if src.is_cpu:
        return is_small_on_cpu(src, other, needs_grad)
    return src.is_cuda and _is_small_on_gpu(src, other, reduce, needs_grad)


def is_small_on_cpu(src: Tensor, other: Tensor, needs_grad: bool) -> bool:
    if src.layout is not _CSR:
        return False
    most = most_left(needs_grad, settings(), "adjacency cpu")
    if needs_grad:
        return src._nnz() * ROW_BYTES <= most
    nbytes = other.numel() * other.element_size()  # as many rows have no more entries, if that is few already
    return nbytes * src.size(0) <= most or nbytes * src._nnz() <= most * src.size(-1)


# By the id of a matrix on a GPU: itself, and up to how many numbers torch may multiply with it, known (not None) from the second
# time on. It only decides who multiplies.
_bounds: dict[int, tuple[weakref.ref[Tensor], float | None]] = {}
_MOST = 1024


def _is_small_on_gpu(src: Tensor, other: Any, reduce: Any, needs_grad: bool) -> bool:
    found = _bounds.get(id(src))
    is_known = found is not None and found[0]() is src
    if not is_known and _is_new(src):
        _remember(src, None)
        return True
    if needs_grad or reduce not in _ADDED or src.layout is not _CSR or _deterministic():
        return False
    most = found[1] if found is not None and is_known and not is_overridden() else None
    if most is None:
        most = most_left(False, settings(), "adjacency cuda") / (src._nnz() * src.element_size() or 1) * src.size(-1)
        if not is_overridden():
            _remember(src, most)
    return other.numel() <= most  # type: ignore[no-any-return]


def _is_new(src: Tensor) -> bool:
    """Whether a matrix that a GPU meets for the first time may be torch's. Of one that is not used again a graph pays only over
    more than 8 million entries, in training more than 2, where torch's product takes up to a third longer; to ask how many there
    are takes longer."""
    if src.layout is torch.strided or not settings().is_free or _deterministic():
        return False
    return not (_is_grad_enabled() and saved_tensors_are_watched())


def _remember(src: Tensor, most: float | None) -> None:
    if len(_bounds) >= _MOST:
        _bounds.clear()
    _bounds[id(src)] = weakref.ref(src), most


def _unsupported(src: Any, other: Any, reduce: Any) -> str:
    if reduce not in _REDUCTIONS:
        return f"reduce is {reduce!r}"
    reason = guards.operand("other", other)
    if reason:
        return reason
    if other.dim() != 2 or other.dtype not in FEATURE_DTYPES:
        return f"other is {other.dtype} of shape {list(other.shape)}"
    extremum = reduce in ("max", "min")
    if extremum and torch.is_grad_enabled() and other.requires_grad:
        return "the gradient of max and min over a sparse matrix"
    if guards.capturing(other.device):
        return "a CUDA graph is being captured"
    if isinstance(src, Tensor):
        if type(src) is not Tensor or src.layout not in (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo):
            return f"src is a {type(src).__name__} of layout {src.layout}"
        values = src._values() if src.layout is torch.sparse_coo else src.values()
        if src.requires_grad:
            return "the sparse matrix requires a gradient"
        if src.is_cuda and extremum:
            return "PyG does not support max and min over a sparse matrix on CUDA"
        if src.dim() != 2 or values.dim() != 1 or values.dtype != other.dtype or src.device != other.device:
            return f"a sparse matrix of {src.dtype}, {src.dim()} dimensions, on {src.device}"
        if src.layout is torch.sparse_coo and not src.is_coalesced():
            return "the sparse matrix is not coalesced"
        if src.is_inference():
            return "the sparse matrix is an inference tensor"
        rows, cols = src.shape
    elif type(src).__name__ == "SparseTensor":
        value = src.storage.value()
        if value is not None and (value.dim() != 1 or value.requires_grad):
            return "values of the SparseTensor have more than one dimension or require a gradient"
        if src.device() != other.device:
            return "the SparseTensor is on another device"
        if src.nnz() == 0:
            return "the SparseTensor has no entries"
        if value is not None and value.dtype != other.dtype and other.is_cuda:
            return f"values of the SparseTensor are {value.dtype}, features {other.dtype}"
        rows, cols = src.sparse_sizes()
    else:
        return f"src is a {type(src).__name__}"
    if cols != other.shape[0]:
        return f"sizes {rows} x {cols} and {list(other.shape)} do not fit"
    return ""


def _torch_sparse(src: Tensor, other: Tensor, reduce: str) -> Tensor:
    coo, csc = src.layout is torch.sparse_coo, src.layout is torch.sparse_csc
    if coo or (csc and not other.requires_grad):
        warnings.warn(
            f"Converting sparse tensor to CSR format (got '{src.layout}'); gnnfast keeps the result while the tensor lives. A "
            f"tensor in CSR format needs no conversion.",
            stacklevel=4,
        )
    rows, cols = src.shape
    parts: tuple[Tensor, ...]
    if coo:
        indices, values = src._indices(), src._values()
        parts, make = (indices,), lambda: Graph.from_coo(indices[1].clone(), indices[0].clone(), cols, rows)
    elif csc:  # compressed by column, and columns are sources
        ptr, idx, values = src.ccol_indices(), src.row_indices(), src.values()
        parts, make = (ptr, idx), lambda: Graph.from_csc(ptr, idx, num_dst=rows)
    else:
        ptr, idx, values = src.crow_indices(), src.col_indices(), src.values()
        parts, make = (ptr, idx), lambda: Graph.from_csr(ptr, idx, num_src=cols)
    graph = cache.get((src,), src.layout, make, parts)
    return aggregate(graph, other, values.detach(), reduce, place=_PLACE)


def _sparse_tensor(src: Any, other: Tensor, reduce: str) -> Tensor:
    rows, cols = src.sparse_sizes()
    # set_value() makes new SparseTensors that share the index tensors, so those are the identity of the structure.
    rowptr, col = src.storage.rowptr(), src.storage.col()
    graph = cache.get((rowptr, col), ("SparseTensor", rows, cols), lambda: Graph.from_csr(rowptr, col, num_src=cols))
    value = src.storage.value()
    if value is not None:
        value = value.to(other.dtype)
    return aggregate(graph, other, value, reduce, place=_PLACE)
