"""``torch_geometric.utils.spmm``: PyG's fused route for adjacency matrices given as ``torch.sparse`` or ``SparseTensor``."""

from __future__ import annotations

import warnings
import weakref
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native, guards
from gnnfast.cache import cache
from gnnfast.config import settings
from gnnfast.dispatch import select
from gnnfast.dispatch.execute import aggregate, reproducibly
from gnnfast.dispatch.select import most_left
from gnnfast.graph import Graph, ids
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.hardware import relative_bandwidth
from gnnfast.pyg.small import SMALL
from gnnfast.reporting import fell_back, ran
from gnnfast.types import FEATURE_DTYPES

if _native.cpu.loaded:
    from gnnfast.ops.spmm_csr import multiply_csr

_PLACE = "pyg spmm"
_HAS_CUDA = _native.cuda.loaded
_is_grad_enabled = torch.is_grad_enabled
_CSR, _STRIDED, _deterministic = torch.sparse_csr, torch.strided, torch._C._get_deterministic_algorithms
_ADDED = ("sum", "add")
MULTIPLIED = (*_ADDED, "mean")
_REDUCTIONS = (*MULTIPLIED, "max", "min")


def make_spmm(original: FunctionType) -> Any:
    """A dispatcher for ``spmm(src, other, reduce)``."""

    def spmm(src: Any, other: Any, reduce: Any) -> Any:
        if type(src) is Tensor and src.is_cuda and reduce in MULTIPLIED and is_multiplied_as_it_is(src, other):
            return multiply_as_it_is(src, other, reduce, _PLACE)
        if _is_small(src, other):  # as PyG has it, whatever records calls
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


_AS_IT_IS = "over the matrix as it is, no message exists"
NARROW = 16  # features, below which an entry takes as long


def is_multiplied_as_it_is(src: Tensor, other: Any) -> bool:
    """Whether one operation of ours multiplies a matrix on a GPU: torch's takes the host twice as long, a mean as PyG has it four
    times. What that saves is soon spent: ten calls of Python functions take as long. Without a gradient nobody asks which matrix it
    is; with one, a graph pays from a few uses on, which this counts: ask it last."""
    if not _HAS_CUDA or type(other) not in guards.PLAIN or src.layout is not _CSR or other.layout is not _STRIDED:
        return False
    needs_grad = _is_grad_enabled() and other.requires_grad
    if _is_grad_enabled() and src.requires_grad:
        return False
    if src.dtype is not other.dtype or other.dtype not in FEATURE_DTYPES or src.device != other.device:
        return False
    if other.dim() != 2 or src.dim() != 2 or src.shape[1] != other.shape[0]:
        return False
    if guards.context() or guards.function_modes() or torch.is_autocast_enabled("cuda"):
        return False
    nbytes = src._nnz() * max(other.shape[1], NARROW) * other.element_size()
    small = select.SMALL["adjacency cuda"]
    most = (small.training if needs_grad else small.inference) * relative_bandwidth()  # as most_left()
    if nbytes > most or not settings().is_free:
        return False
    if not needs_grad:
        return True
    # Its gradient keeps what an inference tensor does not let be kept.
    return not (saved_tensors_are_watched() or src.is_inference()) and _uses(src) <= FEW_USES


def multiply_as_it_is(src: Tensor, other: Tensor, reduce: str, place: str) -> Tensor:
    """Such a product, by one of the reductions :data:`MULTIPLIED`."""
    mean = reduce == "mean"
    ids.check()
    ids.watch(other)
    ran(place, "gar mean" if mean else "gar sum", _AS_IT_IS)
    return multiply_csr(src.crow_indices(), src.col_indices(), src.values(), other, mean)


ROW_BYTES = 64  # in training on a CPU, however wide rows are


def _is_small(src: Any, other: Any) -> bool:
    """Whether torch's product is as fast: on a CPU it needs no other format. Over a matrix that is known there, too, so that no
    call rounds otherwise than another. On small graphs each function that this calls takes a hundredth of a layer: nothing is
    remembered where that takes longer than to ask."""
    if type(src) is not Tensor or not isinstance(other, Tensor):  # PyG raises its own
        return False
    needs_grad = _is_grad_enabled() and other.requires_grad
    if src.is_cpu:
        return is_small_on_cpu(src, other, needs_grad)
    return src.is_cuda and _is_new(src)


def is_small_on_cpu(src: Tensor, other: Tensor, needs_grad: bool) -> bool:
    if src.layout is not _CSR:
        return False
    most = most_left(needs_grad, settings(), "adjacency cpu")
    if needs_grad:
        return src._nnz() * ROW_BYTES <= most
    nbytes = other.numel() * other.element_size()  # as many rows have no more entries, if that is few already
    return nbytes * src.size(0) <= most or nbytes * src._nnz() <= most * src.size(-1)


# By their ids, matrices on a GPU and how often they were used; only decides who multiplies.
_met: dict[int, tuple[weakref.ref[Tensor], int]] = {}
_MOST = 1024
FEW_USES = 4  # in training, up to which a small matrix is multiplied as it is: by the layers of one step


def _uses(src: Tensor) -> int:
    """How often a matrix was used, this time included."""
    found = _met.get(id(src))
    if found is None or found[0]() is not src:
        if len(_met) >= _MOST:
            _met.clear()
        found = weakref.ref(src), 0
    _met[id(src)] = found = found[0], found[1] + 1
    return found[1]


def _is_new(src: Tensor) -> bool:
    """Whether a matrix is one that a GPU meets for the first time and that may be torch's; from now on it is known. Of one that is
    not used again a graph pays only over more than 8 million entries, in training more than 2, where torch's product takes up to a
    third longer; to ask how many there are takes longer."""
    met = _met.get(id(src))
    if met is not None and met[0]() is src:
        return False
    if src.layout is _STRIDED or not settings().is_free or _deterministic():
        return False
    if _is_grad_enabled() and saved_tensors_are_watched():
        return False
    return _uses(src) == 1


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
        cast = _cast_by_autocast(src, other)
        if cast is not None and src.layout is torch.sparse_csc and reduce == "mean":
            return "autocast is on, and PyG divides by degrees of the dtype of the values"
        alike = values.dtype is other.dtype or cast is not None
        if src.dim() != 2 or values.dim() != 1 or not alike or src.device != other.device:
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
    graph, dtype = cache.get((src,), src.layout, make, parts), _cast_by_autocast(src, other)
    values = values.detach()
    if dtype is not None:
        values, other = values.to(dtype), other.to(dtype)
    with reproducibly(other.is_cuda):
        return aggregate(graph, other, values, reduce, place=_PLACE)


def _cast_by_autocast(src: Tensor, other: Tensor) -> torch.dtype | None:
    """What ``torch.autocast`` makes of both operands of torch's product on a GPU, which is all that PyG calls there; ``None``:
    nothing. On a CPU torch multiplies no matrix in 16 bits, so that PyG fails, or its product is another that is not cast."""
    if not src.is_cuda or not torch.is_autocast_enabled("cuda") or torch.float64 in (src.dtype, other.dtype):
        return None
    return torch.get_autocast_dtype("cuda") if src.dtype in FEATURE_DTYPES else None


def _sparse_tensor(src: Any, other: Tensor, reduce: str) -> Tensor:
    rows, cols = src.sparse_sizes()
    # set_value() makes new SparseTensors that share the index tensors, so those are the identity of the structure.
    rowptr, col = src.storage.rowptr(), src.storage.col()
    graph = cache.get((rowptr, col), ("SparseTensor", rows, cols), lambda: Graph.from_csr(rowptr, col, num_src=cols))
    value = src.storage.value()
    if value is not None:
        value = value.to(other.dtype)
    return aggregate(graph, other, value, reduce, place=_PLACE)
