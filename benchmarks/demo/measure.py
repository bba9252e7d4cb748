"""Time, peak memory and accuracy of a training loop."""

import contextlib
import json
import resource
import time
from pathlib import Path

import torch


def reset_peak():
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # the peak of the process is then shown
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib():
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 2**10
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def training(name, graph, epochs, epoch, evaluate):
    """Runs ``epoch()``, which returns a loss, so often, and prints one line of JSON."""
    reset_peak()
    losses, times = [], []
    for _ in range(epochs):
        begin = time.perf_counter()
        losses.append(float(epoch()))
        times.append(time.perf_counter() - begin)
    times = sorted(times[1:] or times)
    record = {"model": name, "graph": graph, "epoch_ms": 1e3 * times[len(times) // 2], "peak_mib": peak_mib()}
    print(json.dumps(record | {"accuracy": float(evaluate()), "losses": losses}), flush=True)
