"""The peers of gnnfast's SpMM: each makes its own format from a graph once and returns the call to be timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import gnnfast

from .graphs import Sample

Call = Callable[..., Tensor]
MOST_MESSAGE_BYTES = 32e9
SCATTER = {"mean": "mean", "max": "amax", "min": "amin"}  # what scatter_reduce calls them


class UnavailableError(Exception):
    """The peer cannot run here; the message says why."""


def import_dgl(suite: str) -> Any:
    """DGL, for a suite that is about it."""
    try:
        import dgl
    except ImportError as error:
        raise SystemExit(f"gnnfast bench {suite}: it is about DGL, which cannot be imported here: {error}") from None
    return dgl


@contextmanager
def without_gnnfast() -> Iterator[None]:
    """So that frameworks run their own kernels."""
    was_on = gnnfast.is_enabled()
    gnnfast.disable()
    try:
        yield
    finally:
        if was_on:
            gnnfast.enable()


def cusparse(sample: Sample, x: Tensor, weight: Tensor | None, reduce: str) -> Call:
    """``torch.sparse_csr_tensor @ x`` on CUDA."""
    _only_sums(reduce)
    if not x.is_cuda:
        raise UnavailableError("needs a CUDA device")
    return _csr(sample, sample.rowptr, sample.col, x, weight)


def cusparse_fp32(sample: Sample, x: Tensor, weight: Tensor | None, reduce: str) -> Call:
    """The same on x and weight as float32."""
    return cusparse(sample, x.float(), None if weight is None else weight.float(), reduce)


def mkl(sample: Sample, x: Tensor, weight: Tensor | None, reduce: str) -> Call:
    """``torch.sparse_csr_tensor @ x`` on a CPU."""
    _only_sums(reduce)
    if x.is_cuda:
        raise UnavailableError("needs the CPU")
    return _csr(sample, sample.rowptr.long(), sample.col.long(), x, weight)


def _only_sums(reduce: str) -> None:
    if reduce != "sum":
        raise UnavailableError("is timed for sums alone")


def _csr(sample: Sample, rowptr: Tensor, col: Tensor, x: Tensor, weight: Tensor | None) -> Call:
    values = x.new_ones(sample.edges) if weight is None else weight
    matrix = torch.sparse_csr_tensor(rowptr, col, values, (sample.nodes, sample.nodes))
    return lambda: matrix @ x


def dgl(sample: Sample, x: Tensor, weight: Tensor | None, reduce: str) -> Call:
    """``u_mul_e_sum``, or ``copy_u_sum`` without weights, on CSC by destination."""
    _only_sums(reduce)
    try:
        import dgl
    except ImportError as error:
        raise UnavailableError(f"not installed: {error}") from error
    (src, dst), slot = sample.coo
    graph = dgl.graph((src, dst), num_nodes=sample.nodes).formats("csc")
    if weight is None:
        return lambda: dgl.ops.copy_u_sum(graph, x)
    by_edge = weight[slot].view(-1, 1)
    return lambda: dgl.ops.u_mul_e_sum(graph, x, by_edge)


def gather_scatter(sample: Sample, x: Tensor, weight: Tensor | None, reduce: str, function: Call | None = None) -> Call:
    """Index_select, multiply, scatter on COO, as PyG does it without extensions."""
    size = sample.edges * x.shape[1] * x.element_size()
    if size >= MOST_MESSAGE_BYTES:
        raise UnavailableError(f"messages would take {size / 1e9:.0f} GB")
    (src, dst), slot = sample.coo
    by_edge = None if weight is None else weight[slot].view(-1, 1)
    return lambda: (function or _gather_scatter)(src, dst, by_edge, x, reduce)


def _gather_scatter(src: Tensor, dst: Tensor, weight: Tensor | None, x: Tensor, reduce: str) -> Tensor:
    messages = x.index_select(0, src)
    if weight is not None:
        messages = weight * messages
    index, out = dst.view(-1, 1).expand_as(messages), x.new_zeros(x.shape)
    if reduce == "sum":
        return out.scatter_add_(0, index, messages)
    return out.scatter_reduce_(0, index, messages, SCATTER[reduce], include_self=False)


def compiled(sample: Sample, x: Tensor, weight: Tensor | None, reduce: str) -> Call:
    """``torch.compile`` of the same function."""
    return gather_scatter(sample, x, weight, reduce, _compiled())


@functools.cache
def _compiled() -> Call:
    return torch.compile(_gather_scatter)


PEERS: dict[str, Callable[[Sample, Tensor, Tensor | None, str], Call]] = {
    "cuSPARSE": cusparse,
    "cuSPARSE fp32": cusparse_fp32,
    "MKL": mkl,
    "DGL": dgl,
    "PyG": gather_scatter,
    "torch.compile": compiled,
}
