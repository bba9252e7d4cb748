"""Orders in which neighbours are near. They never change a result: rows are reduced in the order of their edges, whoever reduces
them when."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gnnfast.graph.formats import Csr, schedule

ROUNDS = 6  # of label propagation; three find planted communities, and real ones are less clear
FULLEST = 16384  # rows of a cluster: their sources must fit the L2 cache together
USES = 5  # aggregations over a graph before a locality schedule is made, which costs as much as one to four more
MIN_EDGES, MIN_DEGREE = 200_000, 4.0  # smaller and sparser graphs gather too little twice
MIN_GATHERED = 512  # bytes a row gathers on average, from which locality outweighs that indices are read out of order


class Schedule(NamedTuple):
    """``items [n, 4]`` int32 and the sizes of its sections (``plugin_src/graph/schedule.h``)."""

    items: Tensor
    layout: list[int]


def by_degree(rowptr: Tensor) -> Tensor:
    """The rows, longest first (the order of Accel-GCN, Xie et al., ICCAD 2023)."""
    return rowptr.diff().argsort(descending=True, stable=True).int()


def large_enough(num_rows: int, num_edges: int) -> bool:
    """Whether a graph is large and dense enough for locality to save much."""
    return num_edges >= MIN_EDGES and num_edges >= MIN_DEGREE * num_rows


def exceeds_cache(x_bytes: int, device: torch.device) -> bool:
    """Whether features are so large that gathers miss the L2 cache."""
    return 2 * x_bytes > _l2_bytes(device)


@lru_cache
def _l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


class Locality:
    """Finds communities and makes schedules in which their rows are neighbours, on a stream of its own. Nothing waits for it: ask
    :meth:`ready`, then take the schedules.

    Attributes (once ready):
        near: share of edges whose source is near their destination, in id order and in the order of the clusters.
        milliseconds: what it took on the device.
    """

    def __init__(self, sides: dict[int, Csr], num_edges: int) -> None:
        first = next(iter(sides.values()))
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.Stream(first.rowptr.device)
        stream.wait_stream(torch.cuda.current_stream(first.rowptr.device))
        with torch.no_grad(), torch.inference_mode(False), torch.cuda.stream(stream):
            self._begin.record()
            for csr in sides.values():  # made on another stream, and the graph may be dropped while this one reads
                csr.rowptr.record_stream(stream)
                csr.col.record_stream(stream)
            self.order, facts = torch.ops.gnnfast.cluster(first.rowptr, first.col, ROUNDS, FULLEST)
            built = {side: schedule(csr.rowptr, num_edges, self.order) for side, csr in sides.items()}
            self._items = {side: items for side, (items, _) in built.items()}
            numbers = torch.cat([facts, *(layout for _, layout in built.values())])
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._end.record()

    def ready(self) -> bool:
        """Whether the device is done."""
        return self._end.query()

    def wait(self) -> None:
        """Waits until the device is done."""
        self._end.synchronize()

    @property
    def near(self) -> tuple[float, float]:
        within, close, edges = self._numbers[:3].tolist()
        return close / max(edges, 1), within / max(edges, 1)

    @property
    def milliseconds(self) -> float:
        return self._begin.elapsed_time(self._end)

    @property
    def pays(self) -> bool:
        """Whether clusters hold so many more edges than id order has nearby that the schedules are worth using."""
        before, after = self.near
        return after >= 0.25 and after >= before + 0.1

    def schedules(self) -> dict[int, Schedule]:
        """The schedule of each side."""
        stream = torch.cuda.current_stream(self.order.device)
        stream.wait_event(self._end)
        layouts = self._numbers[3:].view(-1, 4).tolist()
        for items in (self.order, *self._items.values()):
            items.record_stream(stream)
        return {side: Schedule(items, layout) for (side, items), layout in zip(self._items.items(), layouts)}
