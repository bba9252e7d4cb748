"""Compressed formats of a graph, and their conversion from one another."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.graph import ids

if _native.cpu.loaded:
    from gnnfast.ops.convert import check_facts, coo_to_csr, coo_to_formats

BY_DST, BY_SRC = 0, 1  # the side whose nodes are the rows of a format


class Csr(NamedTuple):
    """One compressed format, int32: by destination (CSR) or by source (CSC).

    ``rowptr [rows + 1]``; ``col [num_edges]``; ``perm [num_edges]`` maps a slot to the user's edge id (``None``: they are equal);
    ``schedule [items, 4]`` lists the work of the CUDA kernels and ``layout`` the sizes of its sections (see
    ``plugin_src/graph/schedule.h``; ``None`` and empty on CPU). ``exact``: the host knows the sizes, not only how large they can
    be. ``leaves_out``: the slots of some edge ids lie behind those of all rows, for as long as the format exists.
    """

    rowptr: Tensor
    col: Tensor
    perm: Tensor | None
    schedule: Tensor | None
    layout: list[int]
    exact: bool = True
    leaves_out: bool = False

    def scheduled(self, items: Tensor, layout: list[int]) -> Csr:
        """The same with another schedule, an exact one."""
        # As of a schedule whose sizes only the device knows: what is written by edge id is then zero where nobody writes.
        return self._replace(schedule=items, layout=[*layout, 0, 1] if self.leaves_out else layout, exact=True)

    @property
    def args(self) -> tuple[Any, ...]:
        """As the ops take them."""
        return self[:5]

    @property
    def nbytes(self) -> int:
        optional = (0 if self.perm is None else self.perm.nbytes) + (0 if self.schedule is None else self.schedule.nbytes)
        return self.rowptr.nbytes + self.col.nbytes + optional


NO_CSR: tuple[Any, ...] = (None, None, None, None, [])


def from_arrays(rowptr: Tensor, col: Tensor, perm: Tensor | None) -> Csr:
    """A format that is known to be right. Waits for the device."""
    if not rowptr.is_cuda:
        return Csr(rowptr, col, perm, None, [])
    items, layout = schedule(rowptr, col.numel())
    return Csr(rowptr, col, perm, items, layout.tolist())


def from_coo(row: Tensor, column: Tensor, num_rows: int, num_cols: int, both: bool = False) -> tuple[Csr, ...]:
    """From edges in any order, and with ``both`` the transpose. Raises IndexError if an id is out of range: at once on a CPU, later
    on CUDA (:mod:`.ids`), where nothing waits: whether the edges came sorted is then not known, and of the schedule only how long
    it can be."""
    if row.is_cuda:
        return on_cuda(row, column, num_rows, num_cols, both=both)
    *arrays, facts = coo_to_csr(row, column, num_rows, num_cols, both)
    check_facts(facts.tolist(), num_rows, num_cols, row.numel())

    def side(rowptr: Tensor, col: Tensor, perm: Tensor) -> Csr:
        return Csr(rowptr, col, perm if perm.numel() else None, None, [])

    return (side(*arrays[:3]), side(*arrays[3:])) if both else (side(*arrays[:3]),)


def on_cuda(row: Tensor, column: Tensor, num_rows: int, num_cols: int, loops: bool = False, both: bool = False) -> tuple[Csr, ...]:
    """The same on CUDA, with loops in place of those that are there, and with ``both`` the transpose."""
    ids.watch(row)
    *arrays, sizes = coo_to_formats(row, column, num_rows, num_cols, loops, both)
    known = sizes.tolist()

    def side(first: int, rows: int) -> Csr:
        (rowptr, col, perm, items), layout = arrays[first : first + 4], known[first : first + 4]
        return Csr(rowptr, col, perm, items, [*layout, 0, 1] if rows else layout, exact=not rows, leaves_out=loops)

    return (side(0, num_rows), side(4, num_cols)) if both else (side(0, num_rows),)


class Exactly:
    """Makes a format exact: a schedule of nothing but work, and no perm if that changes nothing. Nothing waits for it: ask
    :meth:`ready`, then take :meth:`result`."""

    def __init__(self, csr: Csr) -> None:
        self.csr, perm = csr, csr.perm
        with torch.no_grad(), torch.inference_mode(False):
            self._items, layout = schedule(csr.rowptr, csr.col.numel())
            ids_in_order = torch.ones(1, dtype=torch.bool, device=layout.device)
            if perm is not None and perm.numel() > 1:
                ids_in_order = (perm.diff() == 1).all()
            numbers = torch.cat([layout, ids_in_order.long().view(1)])
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._end = torch.cuda.Event()
            self._end.record()

    def ready(self) -> bool:
        """Whether the device is done."""
        return self._end.query()

    def result(self) -> Csr:
        """The exact format. Waits for the device if it is not done."""
        self._end.synchronize()
        *layout, in_order = self._numbers.tolist()
        return self.csr._replace(perm=None if in_order else self.csr.perm).scheduled(self._items, layout)


def transposed(csr: Csr, num_cols: int) -> Csr:
    """The format by the other side."""
    num_rows, num_edges = csr.rowptr.numel() - 1, csr.col.numel()
    rows = torch.arange(num_rows, dtype=torch.int32, device=csr.col.device)
    (other,) = from_coo(csr.col, torch.repeat_interleave(rows, csr.rowptr.diff(), output_size=num_edges), num_cols, num_rows)
    if csr.perm is None:
        return other
    return other._replace(perm=csr.perm if other.perm is None else csr.perm[other.perm])


def schedule(rowptr: Tensor, num_edges: int, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The work items of a CSR matrix with its rows in ``order`` (int32; id order if not given), and the layout on the device, which
    the last of the items holds too."""
    return torch.ops.gnnfast.schedule(rowptr, order, num_edges)  # type: ignore[no-any-return]


def int32(t: Tensor) -> Tensor:
    """A copy, which the caller of the constructor cannot change."""
    return t.detach().to(torch.int32, copy=True).contiguous()
