"""``GNNFAST_AUTOTUNE=1``: the candidates are timed on the user's own first call for a graph and shape, and the fastest is kept, as
``torch.backends.cudnn.benchmark`` does."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from gnnfast.graph import Graph
from gnnfast.graph.plan import Tuned
from gnnfast.stream import is_capturing

REPEATS = 3
SLABS = (128, 256, 512)  # bytes of features that a pass over the edges covers


def candidates(graph: Graph, row_bytes: int, kernels: tuple[str, ...], schedule: str, deterministic: bool) -> list[Tuned]:
    """GAS, and GAR with each schedule that the setting ``schedule`` allows and each slab that differs. Another slab adds up in
    another order: where results must be the same from run to run, the clock must not choose it."""
    schedules = [schedule] if schedule != "auto" else ["off", "degree"] + ["locality"] * (graph.num_src == graph.num_dst)
    slabs = [] if deterministic else [slab for slab in SLABS if slab < row_bytes]
    gar = [Tuned("gar", kind, slab) for kind in schedules for slab in slabs or [0]]
    return [Tuned("gas", "off", 0)] * ("gas" in kernels) + gar * ("gar" in kernels)


def best(graph: Graph, key: Hashable, options: list[Tuned], run: Callable[[Tuned], Any]) -> Tuned | None:
    """The option that ``run`` is fastest with, by CUDA events, found once for each graph and ``key``. ``None`` if it is not known
    yet and cannot be found out, because a CUDA graph is captured."""
    kept = graph.plan.tuned
    found = kept.get(key)
    if found is None:
        with torch.cuda.device(graph.device), torch.no_grad():
            if is_capturing():
                return None
            found = options[0] if len(options) == 1 else min(options, key=lambda option: _milliseconds(lambda: run(option)))
            kept[key] = found
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
