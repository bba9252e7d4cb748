"""``GNNFAST_AUTOTUNE=1``: the candidates are timed on the user's own first call for a graph and shape, and the fastest is kept, as
``torch.backends.cudnn.benchmark`` does."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from gnnfast.graph import Graph, Tuned

REPEATS = 3
SLABS = (128, 256, 512)  # bytes of features that a pass over the edges covers


def candidates(graph: Graph, row_bytes: int, has_coo: bool) -> list[Tuned]:
    """GAS where there is COO, and GAR with each schedule and slab that differs."""
    schedules = ["off", "degree"] + ["locality"] * (graph.num_src == graph.num_dst and graph.num_edges > 0)
    slabs = [slab for slab in SLABS if slab < row_bytes] or [0]
    return [Tuned("gas", "off", 0)] * has_coo + [Tuned("gar", s, slab) for s in schedules for slab in slabs]


def best(graph: Graph, key: Hashable, options: list[Tuned], run: Callable[[Tuned], Any]) -> Tuned:
    """The option that ``run`` is fastest with, by CUDA events, found once for each graph and ``key``."""
    kept: dict[Hashable, Tuned] = graph._shared.setdefault("tuned", {})
    found = kept.get(key)
    if found is None:
        with torch.no_grad():
            found = kept[key] = min(options, key=lambda option: _milliseconds(lambda: run(option)))
    return found


def _milliseconds(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)
