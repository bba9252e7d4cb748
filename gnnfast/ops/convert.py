"""COO to CSR, and what of a CSR matrix the CUDA kernels work by. Contracts: ``plugin_src/graph/``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnfast.cache import Held, usable_later
from gnnfast.stream import is_capturing

FACTS = 4  # numbers in the facts of an edge list


def coo_to_csr(row: Tensor, column: Tensor, num_rows: int, num_cols: int, both: bool) -> tuple[Tensor, ...]:
    """Sorts edges on a CPU by row, and with ``both`` also by column, stably.

    Args:
        row: ``[num_edges]``, int32 or int64, any order.
        column: ``[num_edges]``, the same dtype.

    Returns:
        ``rowptr [num_rows + 1]``, ``col [num_edges]`` and ``perm [num_edges]`` (the edge id of each slot; empty where rows came
        sorted), the same three of the transpose (empty without ``both``), all int32, and the facts for :func:`check_facts`,
        which must pass before the others are used.

    Raises:
        ValueError: the graph has 2^31 - 1 nodes or 2^31 - 2^16 edges or more.
    """
    try:
        return torch.ops.gnnfast.coo_to_csr.default(row, column, num_rows, num_cols, both)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise _typed(error) from None


def coo_to_formats(row: Tensor, column: Tensor, num_rows: int, num_cols: int, loops: bool, both: bool) -> tuple[Tensor, ...]:
    """CSR, and with ``both`` its transpose, of edges on a GPU, each with its schedule, without waiting for the device.

    Args:
        row, column: as in :func:`coo_to_csr`.
        loops: each node gets one edge to itself, with the ids from ``num_edges`` on; edges that were loops are left out.

    Returns:
        ``rowptr, col, perm, schedule`` twice, as :class:`gnnfast.graph.formats.Csr` has them (empty the second time without
        ``both``), and on the CPU, ``[8]``, how large each schedule's layout can be.

    Raises:
        ValueError: as there, counting the loops.
    """
    try:
        return torch.ops.gnnfast.coo_to_formats(row, column, num_rows, num_cols, loops, both)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise _typed(error) from None


def coo_facts(row: Tensor, column: Tensor) -> Tensor:
    """The facts of an edge list on a CPU alone."""
    try:
        return torch.ops.gnnfast.coo_facts(row, column)
    except RuntimeError as error:
        raise _typed(error) from None


def check_facts(facts: Sequence[int], num_rows: int, num_cols: int, num_edges: int) -> None:
    """Raises IndexError if an index is out of range; the message names the bound and the value."""
    row_min, row_max, col_min, col_max = facts
    if num_edges:
        for name, low, high, size in (("row", row_min, row_max, num_rows), ("column", col_min, col_max, num_cols)):
            if low < 0 or high >= size:
                raise IndexError(f"{name} index {low if low < 0 else high} is out of range [0, {size})")


MANY_PAGES = 4 << 20  # bytes, kManyPages in plugin_src/common/huge_pages.h


def empty(like: Tensor, rows: int, width: int) -> Tensor:
    """Uninitialised ``[rows, width]`` of the dtype and on the device of ``like``. What torch makes of many megabytes on a CPU takes
    several times as long to be written as this, which lies in huge pages."""
    if like.is_cuda or rows * width * like.element_size() < MANY_PAGES or torch.compiler.is_compiling():
        return like.new_empty(rows, width)
    return torch.ops.gnnfast.empty_rows.default(like.detach(), rows, width)  # type: ignore[no-any-return]


@torch.library.register_fake("gnnfast::empty_rows")
def _(like: Tensor, rows: int, width: int) -> Tensor:
    return like.new_empty(rows, width)


class _OfArray:
    """What is kept of an array ``ref()``, by name, and as whose it counts."""

    __slots__ = ("made", "owner", "ref")

    def __init__(self, array: Tensor) -> None:
        key = id(array)
        self.ref, self.made, self.owner = weakref.ref(array, lambda _: _of_arrays.pop(key, None)), {}, _nobody  # type: ignore[var-annotated]

    @classmethod
    def of(cls, array: Tensor) -> _OfArray:
        found = _of_arrays.get(id(array))
        if found is None or found.ref() is not array:
            found = _of_arrays[id(array)] = cls(array)
        return found


def _nobody() -> Any:
    return None


# By the id of the array, let go with it: a dictionary of tensors takes five times as long to ask.
_of_arrays: dict[int, _OfArray] = {}


def derived(array: Tensor, what: Hashable, make: Callable[[], Any]) -> Any:
    """What ``make`` makes of one of a graph's arrays, with ``nbytes``, kept as long as the array under the name ``what``; ``None``
    if it would be made while a CUDA graph is captured, since it would then have no values before the replay."""
    kept = _OfArray.of(array)
    found = kept.made.get(what)
    if found is None:
        if array.is_cuda and is_capturing():
            return None
        with torch.no_grad(), usable_later():
            found = kept.made[what] = make()
        owner = kept.owner()
        if owner is not None:
            owner.grew(found.nbytes)
    return found


def own(array: Tensor, owner: Held) -> None:
    """Lets what :func:`derived` keeps of an array count as its owner's."""
    _OfArray.of(array).owner = weakref.ref(owner)


def inverse(perm: Tensor) -> Tensor | None:
    """The permutation that undoes ``perm`` (int32), made once; ``None`` as :func:`derived`."""

    def make() -> Tensor:
        out = torch.empty_like(perm)
        out[perm.long()] = torch.arange(perm.numel(), dtype=perm.dtype, device=perm.device)
        return out

    return derived(perm, "inverse", make)


def _typed(error: RuntimeError) -> Exception:
    message = str(error).splitlines()[0] if str(error) else ""
    start = message.find("gnnfast: ")
    return out_of_memory(error) if start < 0 else ValueError(message[start + len("gnnfast: ") :])


def out_of_memory(error: RuntimeError) -> RuntimeError:
    """What torch raises where an array does not fit, which programs look for that then take a smaller batch; other errors as they
    are. Only words cross the boundary of an op."""
    return torch.OutOfMemoryError(str(error)) if "out of memory. Tried to allocate" in str(error) else error


@torch.library.register_fake("gnnfast::coo_to_csr")
def _(row: Tensor, column: Tensor, num_rows: int, num_cols: int, both: bool) -> tuple[Tensor, ...]:
    def side(rows: int, wanted: bool) -> tuple[Tensor, ...]:
        slots = torch.library.get_ctx().new_dynamic_size() if wanted else 0
        sizes = (rows + 1, row.shape[0], slots) if wanted else (0, 0, 0)
        return tuple(row.new_empty(size, dtype=torch.int32) for size in sizes)

    return *side(num_rows, True), *side(num_cols, both), row.new_empty(FACTS, dtype=torch.int64)


@torch.library.register_fake("gnnfast::coo_facts")
def _(row: Tensor, column: Tensor) -> Tensor:
    return row.new_empty(FACTS, dtype=torch.int64)


@torch.library.register_fake("gnnfast::loops_listed")
def _(edge_index: Tensor, num_nodes: int, remove: bool = True) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size() if remove else edge_index.shape[1] + num_nodes
    return edge_index.new_empty(2, size, dtype=torch.int64)


@torch.library.register_fake("gnnfast::coo_to_formats")
def _(row: Tensor, column: Tensor, num_rows: int, num_cols: int, loops: bool, both: bool) -> tuple[Tensor, ...]:
    slots = row.shape[0] + (min(num_rows, num_cols) if loops else 0)

    def side(rows: int, wanted: bool) -> tuple[Tensor, ...]:
        sizes = (rows + 1, slots, slots) if wanted else (0, 0, 0)
        items = torch.library.get_ctx().new_dynamic_size()
        return *(row.new_empty(size, dtype=torch.int32) for size in sizes), row.new_empty(items, 4, dtype=torch.int32)

    return *side(num_rows, True), *side(num_cols, both), row.new_empty(8, dtype=torch.int64, device="cpu")


@torch.library.register_fake("gnnfast::csr_rows")
def _(rowptr: Tensor, num_slots: int) -> Tensor:
    return rowptr.new_empty(num_slots)


@torch.library.register_fake("gnnfast::schedule")
def _(rowptr: Tensor, order: Tensor | None, num_edges: int) -> tuple[Tensor, Tensor]:
    items = torch.library.get_ctx().new_dynamic_size()
    return rowptr.new_empty(items, 4), rowptr.new_empty(4, dtype=torch.int64)


@torch.library.register_fake("gnnfast::cluster")
def _(rowptr: Tensor, col: Tensor, rounds: int, fullest: int) -> tuple[Tensor, Tensor]:
    return rowptr.new_empty(rowptr.shape[0] - 1), rowptr.new_empty(3, dtype=torch.int64)
