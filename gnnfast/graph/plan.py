"""How the CUDA kernels work through a graph: which schedule, and when a better one is made."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast.cache import Held, nbytes_of
from gnnfast.config import settings
from gnnfast.graph import locality
from gnnfast.graph.formats import Csr, Exactly, schedule
from gnnfast.reporting import scheduled
from gnnfast.stream import is_capturing
from gnnfast.types import Matrix

# Aggregations from which a schedule of nothing but work is worth making: more than a model makes of a graph that is new in each
# step.
EXACT_USES = 16


class Tuned(NamedTuple):
    """How an aggregation is run: ``gas`` or ``gar``, the kind of schedule as in ``GNNFAST_SCHEDULE``, and the bytes of features
    that a pass over the edges covers (0: the kernel decides)."""

    kernel: str
    schedule: str
    slab: int


# The slab is the same in both: it decides in which order the lanes of a warp add up, and so the last bits of a result.
ID_ORDER, LOCALITY = Tuned("gar", "off", 0), Tuned("gar", "locality", 0)


class Found(NamedTuple):
    """What a locality schedule does: the share of near edges in id order and by clusters, and what it took on the device."""

    near: tuple[float, float]
    milliseconds: float


class Plan(Held):
    """The schedules of a graph, and the arguments of ops that were made with them.

    ``order`` are the rows in an order in which neighbours are near, if one was made; ``locality`` is what became of the search for
    one: ``None`` before, then a job, then :class:`Found` or the reason why there is none. ``cached`` are the most bytes of features
    that were found to fit the cache, for which none is searched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order: Tensor | None = None
        self.locality: locality.Locality | Found | str | None = None
        self.schedules: dict[tuple[int, str], locality.Schedule] = {}
        self.tuned: dict[Hashable, Tuned] = {}
        self.args: dict[Any, Matrix] = {}
        self.exactly: dict[int, Exactly] = {}
        self.cached = -1

    @property
    def used_order(self) -> Tensor | None:
        """:attr:`order`, where it was found to pay."""
        return self.order if isinstance(self.locality, Found) else None

    def settled(self, formats: list[Csr | None], x_bytes: int) -> bool:
        """Whether nothing is to be decided or improved any more for so many bytes of features."""
        first, second = formats
        exact = (first is None or first.exact) and (second is None or second.exact)
        state = self.locality
        return exact and (x_bytes <= self.cached if state is None else type(state) is Found or type(state) is str)

    def improve(self, formats: list[Csr | None], uses: int, x_bytes: int, square: bool, graph: object) -> None:
        """Called before each aggregation on CUDA, after ``uses`` others, while :meth:`settled` says no. Waits for nothing.
        ``graph`` is named in the report."""
        if uses >= min(EXACT_USES, locality.USES):
            self._make_exact(formats, uses)
            self._consider_locality(formats, uses, x_bytes, square, graph)

    def default(self, cuda: bool, row_bytes: int, num_edges: int, num_rows: int) -> Tuned:
        """What the settings ask for. ``auto`` is the locality schedule once there is one, where rows gather enough to outweigh that
        their indices are then read out of order."""
        if not cuda or torch.compiler.is_compiling():
            return ID_ORDER
        kind = settings().schedule
        if kind != "auto":
            return Tuned("gar", kind, 0)
        if isinstance(self.locality, Found) and row_bytes * num_edges >= locality.MIN_GATHERED * num_rows:
            return LOCALITY
        return ID_ORDER

    def with_schedule(self, side: int, csr: Csr, kind: str, square: bool) -> Csr:
        """A format with the schedule of a kind. ``square``: sources and destinations are the same nodes; else there are no
        clusters."""
        num_edges = csr.col.numel()
        if kind == "off" or not num_edges or (kind == "locality" and not square):
            return csr
        found = self.schedules.get((side, kind))
        if found is None:
            with torch.no_grad(), torch.inference_mode(False):
                if kind == "degree":
                    order = locality.by_degree(csr.rowptr)
                else:
                    if self.order is None:
                        job = locality.Locality({side: csr}, num_edges)
                        job.wait()
                        self.set_order(job.order)
                    order = self.order  # type: ignore[assignment]
                items, layout = schedule(csr.rowptr, num_edges, order)
                found = self.schedules[side, kind] = locality.Schedule(items, layout.tolist())
            self.grew(items.nbytes)
        return csr.scheduled(found.items, found.layout)

    def set_order(self, order: Tensor) -> None:
        self.grew(order.nbytes - nbytes_of(self.order))
        self.order = order

    def _make_exact(self, formats: list[Csr | None], uses: int) -> None:
        """Makes formats exact after some uses, and takes the exact ones over once they are there."""
        if uses < EXACT_USES or is_capturing():
            return
        for side, csr in enumerate(formats):
            if csr is None or csr.exact:
                continue
            job = self.exactly.get(side)
            if job is None:
                self.exactly[side] = Exactly(csr)
            elif job.ready():
                exact = formats[side] = job.result()
                del self.exactly[side]
                self.args.clear()
                self.grew(exact.nbytes - csr.nbytes)

    def _consider_locality(self, formats: list[Csr | None], uses: int, x_bytes: int, square: bool, graph: object) -> None:
        """After some uses of a graph that it is expected to help, starts to make a locality schedule for so many bytes of features,
        and takes it over once it is there."""
        state = self.locality
        if uses < locality.USES or isinstance(state, (str, Found)) or settings().schedule != "auto":
            return
        if state is None:
            csr = formats[0] or formats[1]
            if csr is None:
                return
            num_edges = csr.col.numel()
            if not square or not locality.large_enough(csr.rowptr.numel() - 1, num_edges):
                self.locality = "too small, too sparse or bipartite"
            elif not locality.exceeds_cache(x_bytes, csr.col.device):
                self.cached = max(self.cached, x_bytes)
            elif not is_capturing():
                try:
                    made = {side: csr for side, csr in enumerate(formats) if csr is not None}
                    self.locality = locality.Locality(made, num_edges)
                except RuntimeError:  # no memory; the user's call must not fail for it
                    self.locality = "no memory"
            return
        if is_capturing() or not state.ready():
            return
        before, after = state.near
        if not state.pays:
            self.locality = "id order is as good"
        else:
            self.set_order(state.order)
            made_here = {(side, "locality"): found for side, found in state.schedules().items()}
            self.schedules.update(made_here)
            self.locality = Found((before, after), state.milliseconds)
            for key in [key for key in self.args if key[-1].schedule == "locality"]:
                self.args.pop(key, None)  # of an order that was asked for before
            self.grew(sum(found.items.nbytes for found in made_here.values()))
        scheduled(repr(graph), before, after, state.milliseconds, state.pays)

    def follow(self, other: Plan, side: int, csr: Csr) -> None:
        """Takes over the order of another graph's rows."""
        state = self.locality if other.used_order is None else other.locality
        if other.order is None or (self.order is other.order and self.locality is state):
            return
        self.set_order(other.order)
        self.locality = state
        old = self.schedules.pop((side, "locality"), None)
        if old is not None:
            self.grew(-old.items.nbytes)
        self.args.clear()
        self.with_schedule(side, csr, "locality", square=True)

    @property
    def schedule_nbytes(self) -> int:
        """Bytes of the schedules besides the one of each format."""
        return nbytes_of(self.order) + sum(found.items.nbytes for found in list(self.schedules.values()))
