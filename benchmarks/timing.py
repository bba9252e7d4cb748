"""Timing, memory and the record of where a number was measured."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import gnnfast


def median_ms(call: Callable[[], Any], device: torch.device, repeats: int = 15, warmup: int = 3) -> float:
    """Median time of ``call`` in milliseconds: CUDA events on a GPU, wall clock on a CPU."""
    for _ in range(warmup):
        call()
    times = []
    if device.type == "cuda":
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in times)
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def peak_gib(call: Callable[[], Any], baseline: int) -> float:
    """Peak CUDA memory during ``call`` above ``baseline`` bytes, in GiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - baseline) / 2**30


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


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
        "gnnfast": gnnfast.__version__,
        **{p: version(p) for p in ("torch", "torch_geometric", "dgl")},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{name}, {os.cpu_count()} cores"


def write(path: str | None, title: str, rows: list[dict[str, Any]], device: torch.device, summary: dict[str, Any]) -> None:
    """Prints the rows as a table and, with ``path``, writes them as ``path.json`` and ``path.md``."""
    record = {"title": title, "environment": environment(device), "summary": summary, "rows": rows}
    columns = list(dict.fromkeys(k for row in rows for k in row))
    table = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    table += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
    text = [f"# {title}", "", ", ".join(f"{k} {v}" for k, v in record["environment"].items()), "", *table, ""]
    text += [f"- {k}: {_cell(v)}" for k, v in summary.items()]
    print("\n".join(text), flush=True)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{path}.json").write_text(json.dumps(record, indent=1) + "\n")
        Path(f"{path}.md").write_text("\n".join(text) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
