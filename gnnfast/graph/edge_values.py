"""Weights of edges in the order of a format's slots."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gnnfast.cache import Held, Seen, Sightings, found_by

KEPT = 4  # weights of a graph
_sightings = Sightings()


class _Entry(NamedTuple):
    seen: Seen
    orders: dict[int, Tensor]  # by side
    nbytes: list[int]


class EdgeValues(Held):
    """Constant weights of a graph in slot order, kept from the second time the same, unchanged tensor is used on."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: OrderedDict[int, _Entry] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return sum(len(entry.orders) for entry in list(self._kept.values()))

    def find(self, weight: Tensor, sides: tuple[int, ...]) -> dict[int, Tensor] | None:
        """The orders of a weight, if all of ``sides`` are there. Takes no lock: each call of a layer comes here."""
        entry = self._kept.get(id(weight))
        if entry is None or not entry.seen.still(weight):
            return None
        if not all(side in entry.orders for side in sides):
            return None
        found_by(entry.seen)
        return entry.orders

    def get(self, weight: Tensor, perms: dict[int, Tensor | None]) -> dict[int, Tensor] | None:
        """The weight by the perm of each side; ``None`` if it is seen for the first time."""
        key = id(weight)
        with self._lock:
            entry = self._kept.get(key)
            if entry is None or not entry.seen.still(weight):
                self._drop(key)
                if not _sightings.again(weight, id(self)):
                    return None
                entry = self._kept[key] = _Entry(Seen(weight, self._dropper(key)), {}, [0])
                while len(self._kept) > KEPT:
                    self._drop(next(iter(self._kept)))
            for side, perm in perms.items():
                if side in entry.orders:
                    continue
                with torch.no_grad(), torch.inference_mode(False):
                    made = entry.orders[side] = weight.detach() if perm is None else weight.detach().index_select(0, perm)
                if perm is not None:
                    entry.nbytes[0] += made.nbytes
                    self.grew(made.nbytes)
            return entry.orders

    def _dropper(self, key: int) -> Callable[[], None]:
        myself = weakref.ref(self)  # the weights must not keep what is derived of them

        def gone() -> None:
            values = myself()
            if values is not None:
                values._drop(key)

        return gone

    def _drop(self, key: int) -> None:
        entry = self._kept.pop(key, None)
        if entry is not None and entry.nbytes[0]:
            self.grew(-entry.nbytes[0])
