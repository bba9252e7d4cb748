"""The least time that memory allows an SpMM, to set a measured time against.

It is the largest of

- compulsory bytes / copy bandwidth: every array moves once (the rows of x that some edge gathers, out, rowptr, col, weight);
- gathered bytes (E * F * size of an element) / L2 bandwidth;
- for random order, missed bytes / copy bandwidth. A perfect cache of the L2's size holds the rows of x that are gathered most
  often; it misses each of them once and every gather of another row.

On a CPU the first alone is used; it is no limit for graphs that stay in the caches. A backward pass moves the same bytes over the
transposed graph. With weight gradients it holds row x_j while it gathers gradients of out, so that these serve both products; it
reads x once and writes a value per edge beside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .graphs import Sample
from .timing import median_ms


@dataclass(frozen=True)
class Machine:
    """Bandwidths in bytes per second and the size of the L2 cache in bytes; no L2 on a CPU."""

    copy: float
    l2: float | None = None
    l2_bytes: int = 0


def measure(device: torch.device, l2: float | None = None) -> Machine:
    """Measures the device's bandwidths; ``l2`` in bytes per second, if given, takes the place of its measurement."""
    if device.type != "cuda":
        return Machine(copy_bandwidth(device, 2**28))
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return Machine(copy_bandwidth(device, 2**30), l2 or l2_bandwidth(device), l2_bytes)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes read and written per second by a copy of ``size`` bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / (1e-3 * median_ms(lambda: target.copy_(source), device))


def l2_bandwidth(device: torch.device, table_bytes: int = 2**24) -> float | None:
    """Bytes per second read from a table that stays in the L2 and is many times an L1: blocks of threads that read tiles of it in
    scattered order, 16 bytes a thread. Needs Triton, which a torch with CUDA brings; ``None`` without it."""
    try:
        from .l2 import read_tiles
    except ImportError:
        return None
    call, read_bytes = read_tiles(torch.randn(table_bytes // 4, device=device))
    return read_bytes / (1e-3 * median_ms(call, device))


@dataclass(frozen=True)
class Gathers:
    """What an SpMM gathers: ``served[k]`` counts the edges that the k most used rows of x serve ``[rows of x + 1]``, on the CPU;
    ``used`` counts the rows that some edge uses, ``out_rows`` the rows written."""

    served: Tensor
    used: int
    out_rows: int

    @classmethod
    def count(cls, uses: Tensor, out_rows: int) -> Gathers:
        """From how often each row of x is gathered, int64."""
        served = torch.cat([uses.new_zeros(1), uses.sort(descending=True).values.cumsum(0)])
        return cls(served.cpu(), int((uses > 0).sum()), out_rows)

    def limit_ms(self, machine: Machine, width: int, size: int, weighted: bool, random: bool, gradient: bool = False) -> float:
        """The limit in milliseconds for ``width`` elements a row of ``size`` bytes each; ``gradient`` adds the weight's."""
        row, edges = width * size, int(self.served[-1])
        compulsory = (self.used + self.out_rows) * row + 4 * (self.out_rows + 1) + edges * (4 + size * weighted)
        if gradient:
            compulsory += self.out_rows * row + edges * size
        seconds = [compulsory / machine.copy]
        if machine.l2:
            seconds.append(edges * row / machine.l2)
        if machine.l2 and random:
            kept = min(machine.l2_bytes // row, self.used)
            seconds.append((edges - int(self.served[kept]) + kept) * row / machine.copy)
        return 1e3 * max(seconds)


class Limits:
    """Limits of the passes over one graph."""

    def __init__(self, sample: Sample, machine: Machine) -> None:
        self.machine, self.random = machine, sample.order == "random"
        self.forward = Gathers.count(sample.col.bincount(minlength=sample.nodes), sample.nodes)
        self.backward = Gathers.count(sample.rowptr.diff().long(), sample.nodes)

    def ms(self, what: str, width: int, size: int, weighted: bool) -> float | None:
        """The limit of the pass ``what`` in milliseconds; ``None`` for one that is no aggregation."""
        given = self.machine, width, size, weighted, self.random
        if what == "forward":
            return self.forward.limit_ms(*given)
        if what == "backward":
            return self.backward.limit_ms(*given)
        if what == "forward+backward":
            return self.forward.limit_ms(*given) + self.backward.limit_ms(*given, gradient=weighted)
        return None
