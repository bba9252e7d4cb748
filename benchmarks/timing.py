"""Timing, memory and the record of where a number was measured."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gnnfast
from gnnfast.cache import cache

FEWEST, MOST, ENOUGH_MS = 5, 30, 60.0


class Sample(NamedTuple):
    """Repeated measurements: the median, and as ``spread`` the middle half of them over it (of few, their range)."""

    ms: float
    spread: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Sample:
        median = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 4 else (min(times), median, max(times))
        return cls(median, (high - low) / median if median else 0.0)

    def columns(self, side: str) -> dict[str, float]:
        """Of a row: ``"SIDE ms"`` and ``"SIDE spread"``."""
        return {f"{side} ms": self.ms, f"{side} spread": self.spread}


def median_ms(
    call: Callable[[], Any], device: torch.device, repeats: int | None = None, warmup: int = 3, wall: bool = False
) -> float:
    """:func:`sample` without its spread."""
    return sample(call, device, repeats, warmup, wall).ms


def sample(
    call: Callable[[], Any], device: torch.device, repeats: int | None = None, warmup: int = 3, wall: bool = False
) -> Sample:
    """Median time of ``call`` in milliseconds: CUDA events on a GPU, wall clock on a CPU or with ``wall``. Without ``repeats``,
    as many calls as fill 60 ms, at least 5 and at most 30."""
    for _ in range(warmup):
        call()
    times = _wall_times if wall or device.type != "cuda" else _event_times
    if repeats is None:
        (once,) = times(call, device, 1)
        repeats = min(max(math.ceil(ENOUGH_MS / max(once, 1e-3)), FEWEST), MOST)
    return Sample.of(times(call, device, repeats))


def in_turn(
    calls: dict[str, Callable[[], Any]],
    switch: Callable[[str], Any],
    device: torch.device,
    repeats: int | None = None,
    rounds: int = 4,
) -> dict[str, Sample]:
    """Two calls in turn, so that what slows a machine down for a while slows both: of each the medians of ``rounds`` samples.
    ``switch`` is told whose turn it is before each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = [*calls]
    for nth in range(2 * rounds):
        name = names[(nth + nth // 2) % 2]
        switch(name)
        learn(calls[name])
        times[name].append(median_ms(calls[name], device, repeats))
    return {name: Sample.of(found) for name, found in times.items()}


LEARNT = 50  # calls, after which Python has learnt again what it knew of functions that were switched


def learn(call: Callable[[], Any]) -> None:
    """As many calls as Python needs, where they are so short that it matters."""
    begin = time.perf_counter()
    for _ in range(LEARNT):
        call()
        if 1e3 * (time.perf_counter() - begin) > ENOUGH_MS:
            return


def _wall_times(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    return [wall_ms(call, device) for _ in range(repeats)]


def _event_times(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    events = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def wall_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock time of one call in milliseconds, the device's work included."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return 1e3 * (time.perf_counter() - begin)


def device_work(call: Callable[[], Any], calls: int = 20, warmup: int = 6) -> tuple[float, float]:
    """What a call runs on the CUDA device, from torch.profiler: microseconds in kernels, copies and fills, and their number."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    work = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not work:
        raise RuntimeError("torch.profiler saw no kernel")
    return sum(e.time_range.elapsed_us() for e in work) / calls, len(work) / calls


def peak_gib(call: Callable[[], Any], baseline: int) -> float:
    """Peak CUDA memory during ``call`` above ``baseline`` bytes, in GiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - baseline) / 2**30


OUT_OF_MEMORY = "out of memory"  # in a row, in place of a number


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on either device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


def clear(device: torch.device) -> None:
    """Gives back what an earlier measurement left."""
    cache.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_rss_gib(call: Callable[[], Any]) -> float | None:
    """Peak resident memory of the process during ``call`` above that before, in GiB; ``None`` where the system does not tell."""
    try:
        _give_back()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status_kib("VmRSS")
        call()
        return max(_status_kib("VmHWM") - before, 0) / 2**20
    except (OSError, StopIteration):
        return None


def _give_back() -> None:
    """Has the C library give back memory that was freed, which would hide the next peak. Where it is not glibc it may be kept."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def geometric_mean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(values)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and date."""
    import importlib.metadata

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "CUDA": torch.version.cuda if device.type == "cuda" else None,
        "gnnfast": gnnfast.__version__,
        "torch": torch.__version__,
        **{p: version(p) for p in ("torch_geometric", "dgl", "numpy")},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{name}, {os.cpu_count()} cores"
