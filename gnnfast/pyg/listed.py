"""What PyG makes of an ``edge_index``, in one operation each instead of four to twenty: the same tensors, on a CPU with
the same bits, so that nothing but the time tells which ran. For graphs that are new, or so small that nothing is kept of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.dispatch.calls import scatter
from gnnfast.graph import ids
from gnnfast.pyg import known
from gnnfast.pyg.small import PARTS, of_sums
from gnnfast.types import EXTREMA, REORDERED

_ops = torch.ops.gnnfast
_STRIDED = torch.strided


def _takes(edge_index: Any) -> bool:
    if type(edge_index) is not Tensor or edge_index.dtype is not torch.int64 or guards.capturing(edge_index.device):
        return False
    if guards.tracing_state() is not None:  # which would warn of comparisons
        return False
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        return False
    return not (guards.context() or guards.operand("edge_index", edge_index))


def _takes_weight(weight: Any, edge_index: Tensor) -> bool:
    """Whether weights, if any, fit the edges and get no gradient."""
    if weight is None:
        return True
    if guards.operand("weight", weight) or weight.dtype not in REORDERED or weight.device != edge_index.device:
        return False
    return weight.shape == edge_index.shape[1:] and not (torch.is_grad_enabled() and weight.requires_grad)


WHY = "few edges, as they are listed"  # in the report
# Ids of so few edges that a gradient in Python takes longer than the operations of PyG.
FEW_IN_TRAINING = 1 << 10


def pays(edge_index: Any, x: Any) -> bool:
    """Whether :func:`aggregate` of features, or of the first of a pair, is faster than PyG's operations: on a GPU, where it adds by
    atomics, not with a gradient."""
    if type(edge_index) is not Tensor:
        return False
    x = x[0] if type(x) is tuple and x else x
    needs_grad = torch.is_grad_enabled() and (not isinstance(x, Tensor) or x.requires_grad)
    if edge_index.is_cpu:
        return not needs_grad or edge_index.numel() >= FEW_IN_TRAINING
    return not (needs_grad or torch.are_deterministic_algorithms_enabled())


def aggregate(edge_index: Tensor, to_target: bool, weight: Tensor | None, x: Tensor, num_dst: int, reduce: str) -> Any:
    """``x [num_src, F]``, times a ``weight [E]`` or ``[E, H]`` of its dtype, reduced over the edges into ``[num_dst, F]``;
    ``NotImplemented``: PyG's own must run. An extremum and weights get no gradient here."""
    if x.layout is not _STRIDED or not num_dst or of_sums(x, reduce, weight) is PARTS or edge_index.dtype is not torch.int64:
        return NotImplemented
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if needs_grad and reduce in EXTREMA:
        return NotImplemented
    if edge_index.is_cuda:
        ids.watch(edge_index)
    src, dst = edge_index.unbind()
    try:
        return scatter(dst if to_target else src, src if to_target else dst, weight, x, num_dst, reduce, needs_grad)
    except RuntimeError:  # an id is out of range: PyG raises its own
        return NotImplemented


# Where rows are reduced faster than by torch's scatter, on a CPU, where that takes 1 ns for each number of a row of several. Sums:
# so many numbers, in rows so wide. Others: rows so wide, or so few. With a gradient, which is Python: so many numbers. Extrema not
# where a few groups have so many rows, which no threads can share.
MANY, WIDE, FEW_ROWS, MANY_IN_TRAINING = 1 << 13, 8, 1 << 11, 1 << 18
MANY_ROWS, LARGE_GROUPS = 1 << 16, 64
# On a GPU, numbers up to which others than sums are faster than by torch (an H200): means of 77 million in rows of 64 1.1 to 1.2
# times, of 960 million in rows of 16 0.86 to 0.98; maxima of up to 77 million 1.2 to 25.
MOST_ON_GPU = 1 << 27


def _are_wide(numel: int, rows: int, reduce: str, needs_grad: bool) -> bool:
    return numel >= WIDE * rows or not (needs_grad or rows > FEW_ROWS or reduce == "sum")


def _are_spread(rows: int, num_rows: int, reduce: str, needs_grad: bool) -> bool:
    if num_rows > rows and (needs_grad or reduce in EXTREMA):
        return False
    return not (reduce in EXTREMA and rows > MANY_ROWS and rows > LARGE_GROUPS * num_rows)


def scatter_rows(src: Any, index: Any, dim: Any, num_rows: Any, reduce: str | None) -> Any:
    """``src [E, ...]`` reduced along dimension 0 into the rows ``[num_rows, ...]`` that ``index [E]`` names, as PyG's ``scatter``
    does it; ``NotImplemented``: PyG's own must run."""
    if type(src) not in guards.PLAIN or reduce is None or guards.tracing_state() is not None:  # which would warn of comparisons
        return NotImplemented
    needs_grad, on_cuda, numel = src.requires_grad and torch.is_grad_enabled(), src.is_cuda, src.numel()
    if on_cuda:
        # A sum on a GPU is two operations of torch's, each as long for the host as one of ours.
        if needs_grad or reduce == "sum" or torch.are_deterministic_algorithms_enabled():
            return NotImplemented
        if numel > MOST_ON_GPU:
            return NotImplemented
    elif numel < (MANY_IN_TRAINING if needs_grad else MANY if reduce == "sum" else 1):
        return NotImplemented
    rows, dims = src.shape[0] if src.shape else 0, src.dim()
    if not on_cuda and not _are_wide(numel, rows, reduce, needs_grad):
        return NotImplemented
    if type(index) is not Tensor or type(dim) is not int or not rows:
        return NotImplemented
    if dim not in (0, -dims) or index.dtype is not torch.int64 or index.dim() != 1 or index.shape[0] != rows:
        return NotImplemented
    if src.dtype not in REORDERED or (needs_grad and reduce in EXTREMA) or guards.context() or known.replaced_in_tensor():
        return NotImplemented
    if guards.operand("src", src) or guards.operand("index", index):
        return NotImplemented
    if num_rows is None:
        num_rows = int(index.max()) + 1
    if type(num_rows) is not int or num_rows <= 0:
        return NotImplemented
    if on_cuda:
        ids.watch(index)
    elif not _are_spread(rows, num_rows, reduce, needs_grad):
        return NotImplemented
    try:
        out = scatter(index, None, None, src if dims == 2 else src.reshape(rows, -1), num_rows, reduce, needs_grad)
    except RuntimeError:  # an id is out of range: PyG raises its own
        return NotImplemented
    return out if dims == 2 else out.view(num_rows, *src.shape[1:])


def _number_of_nodes(edge_index: Tensor) -> int:
    return int(edge_index.max()) + 1 if edge_index.numel() else 0


def loops(edge_index: Any, num_nodes: int | None, remove: bool) -> Any:
    """The edges, without their self loops if these are to be removed, and then a loop at each of ``num_nodes`` nodes (``None``: of
    those that there are); ``NotImplemented``: PyG's own must run."""
    if not _takes(edge_index):
        return NotImplemented
    num_nodes = _number_of_nodes(edge_index) if num_nodes is None else num_nodes
    return _ops.loops_listed.default(edge_index, num_nodes, remove) if num_nodes >= 0 else NotImplemented


def gcn_norm(
    edge_index: Any, edge_weight: Any, num_nodes: int | None, improved: bool, add_self_loops: bool, flow: str, dtype: Any
) -> Any:
    """What ``gcn_norm`` returns; ``NotImplemented``: PyG's own must run."""
    if not _takes(edge_index) or not _takes_weight(edge_weight, edge_index) or flow not in ("source_to_target", "target_to_source"):
        return NotImplemented
    if edge_weight is not None:
        dtype = edge_weight.dtype
    elif dtype is None:
        dtype = torch.get_default_dtype()
    if num_nodes is None:
        num_nodes = _number_of_nodes(edge_index)
    if dtype not in REORDERED or type(num_nodes) is not int:
        return NotImplemented
    if edge_index.is_cuda:
        if edge_weight is not None and torch.are_deterministic_algorithms_enabled():
            return NotImplemented
        ids.watch(edge_index)
    # PyG weighs loops by `improved` only where edges have weights.
    fill = (2.0 if improved and edge_weight is not None else 1.0) if add_self_loops else None
    try:
        made, weight = _ops.gcn_norm_listed.default(edge_index, edge_weight, num_nodes, fill, flow == "source_to_target", dtype)
    except RuntimeError:  # an id is out of range: PyG raises its own, or counts from the end; on a GPU, which loop counts is open
        return NotImplemented
    return made if add_self_loops else edge_index, weight


_NORMALISATIONS = {None: 0, "sym": 1, "rw": 2}


def laplacian(edge_index: Any, num_nodes: Any, edge_weight: Any, normalization: Any, lambda_max: Any, dtype: Any) -> Any:
    """What ``ChebConv.__norm__`` returns where ``lambda_max`` is a number or ``None``; ``NotImplemented``: PyG's own must run."""
    if dtype not in REORDERED or type(num_nodes) is not int or type(lambda_max) not in (int, float, type(None)):
        return NotImplemented
    if type(normalization) not in (str, type(None)) or normalization not in _NORMALISATIONS or not _takes(edge_index):
        return NotImplemented
    if not _takes_weight(edge_weight, edge_index) or (edge_weight is not None and edge_weight.dtype is not dtype):
        return NotImplemented
    if edge_index.is_cuda:
        if edge_weight is not None and torch.are_deterministic_algorithms_enabled():
            return NotImplemented
        ids.watch(edge_index)
    arguments = num_nodes, _NORMALISATIONS[normalization], None if lambda_max is None else float(lambda_max), dtype
    try:
        return _ops.laplacian_listed.default(edge_index, edge_weight, *arguments)
    except RuntimeError:
        return NotImplemented
