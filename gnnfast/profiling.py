"""Where the time of a step goes: gnnfast's kernels, and the rest that they cannot make faster. On torch.profiler.

A time belongs to the outermost operation that a user wrote, so that the random numbers of ``F.dropout`` are dropout; but to gnnfast
where one of its ops is anywhere above. Backward passes are named after autograd's functions.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from gnnfast import reporting, words
from gnnfast.rendering import Table, as_html, number, percent, text

MOST_ROWS = 12  # operations printed
OURS = "gnnfast"
PYTHON = "Python, and what is between operations"
_EVALUATE = "autograd::engine::evaluate_function: "
_MODULE = "nn.Module: "  # what torch.profiler puts before a class and the number of the instance
_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
_FOLDER = os.path.dirname(os.path.abspath(__file__))


class Operation(NamedTuple):
    """Milliseconds of the whole profile that an operation took by itself on the host and on the device, and how often it ran."""

    name: str
    host_ms: float
    device_ms: float
    calls: int


class Layer(NamedTuple):
    """The same of a module of the user's, forward and backward: ``name`` is its class, and which of them it was."""

    name: str
    host_ms: float
    device_ms: float
    calls: int


class Site(NamedTuple):
    """Calls of a layer from one line of the user's program. ``kernel`` is empty where the framework's own path ran."""

    layer: str
    site: str
    kernel: str
    reason: str
    calls: int


class Profile:
    """What :func:`gnnfast.profile` gives. Filled when the ``with`` block ends.

    Attributes:
        wall_ms: the time of the block.
        steps: optimiser steps in it; 0 if there were none.
        operations: the largest first, of all threads.
        sites: calls of layers by the line that called them.
        layers: what each layer took, and each module outside layers, the largest first; empty if not asked for, or where torch's
            profiler records no calls of modules.

    Example:
        >>> with gnnfast.profile() as p:
        ...     _ = torch.ones(8, 8).sum()
        >>> p.steps
        0
    """

    def __init__(self, layers: bool = False) -> None:
        self.wall_ms = 0.0
        self.steps = 0
        self.operations: list[Operation] = []
        self.sites: list[Site] = []
        self.layers: list[Layer] = []
        self._with_layers = layers
        self._counts: Counter[tuple[str, str, str, str]] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> Profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self._profiler = torch.profiler.profile(activities=activities, with_stack=self._with_layers)
        self._profiler.__enter__()
        reporting.watch(self._called)
        self._begin = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall_ms = 1e3 * (time.perf_counter() - self._begin)
        reporting.unwatch(self._called)
        self._profiler.__exit__(kind, error, frames)
        profiler, self._profiler = self._profiler, None  # type: ignore[assignment]
        if kind is None:
            events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CPU]  # which account for kernels
            self._read([e for e in events if not _is_frame(e)])
            if self._with_layers:
                self._read_layers(events)
        with self._lock:
            self.sites = [Site(*key, calls=calls) for key, calls in sorted(self._counts.items())]

    def _called(self, place: str, kernel: str, reason: str) -> None:
        key = place, _user_line(), kernel, reason
        with self._lock:
            self._counts[key] += 1

    def _read(self, events: Any) -> None:
        host, device, calls, spans = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str](), []
        for event in events:
            self.steps += event.name.startswith("Optimizer.step#")
            path = _path(event)
            name = _name(path)
            device[name] += event.self_device_time_total / 1e3
            calls[name] += len(path) == 1 or _name(path[:-1]) != name
            if name != PYTHON:
                host[name] += event.self_cpu_time_total / 1e3
                spans.append((event.time_range.start, event.time_range.end))
        host[PYTHON] = max(self.wall_ms - _covered_ms(spans), 0.0)
        rows = [Operation(name, host[name], device[name], calls[name]) for name in host]
        self.operations = sorted(rows, key=lambda row: -max(row.host_ms, row.device_ms))

    def _read_layers(self, events: Any) -> None:
        known = {place.partition(" ")[2] for place, *_ in self._counts}
        owner, of_node = dict[int, str](), dict[int, str]()  # by event, and by autograd's number of what it did
        host, device, calls = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str]()
        # A backward pass has threads of its own, and its nodes the numbers of what they are the derivatives of.
        for event in sorted(events, key=lambda e: (e.name.startswith(_EVALUATE), e.time_range.start)):
            modules = [e.name.removeprefix(_MODULE) for e in _frames(event) if e.name.startswith(_MODULE)]
            if not modules:
                continue
            name = next((m for m in modules if m.rpartition("_")[0] in known), modules[-1])
            owner[id(event)] = name
            calls[name] += event.name == _MODULE + name
            if event.sequence_nr >= 0:
                of_node[event.sequence_nr] = name
        for event in events:
            name = owner.get(id(event)) or next(
                (of_node[e.sequence_nr] for e in _frames(event) if e.name.startswith(_EVALUATE) and e.sequence_nr in of_node), ""
            )
            if name:
                host[name] += event.self_cpu_time_total / 1e3
                device[name] += event.self_device_time_total / 1e3
        rows = [Layer(name.replace("_", " "), host[name], device[name], calls[name]) for name in host]
        self.layers = sorted(rows, key=lambda row: -max(row.host_ms, row.device_ms))

    @property
    def device_ms(self) -> float:
        """Milliseconds that the device worked."""
        return sum(row.device_ms for row in self.operations)

    def as_dict(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        return {
            "wall_ms": self.wall_ms,
            "device_ms": self.device_ms,
            "steps": self.steps,
            "operations": [row._asdict() for row in self.operations],
            "layers": [row._asdict() for row in self.layers],
            "sites": [site._asdict() for site in self.sites],
        }

    def headline(self) -> str:
        """The whole in a sentence: how much of the time is gnnfast's, and what is most of the rest."""
        on_device = self.device_ms > self.wall_ms / 2
        of = self.device_ms if on_device else self.wall_ms
        times = {row.name: row.device_ms if on_device else row.host_ms for row in self.operations}
        unit = max(self.steps, 1)
        ours = sum(ms for name, ms in times.items() if name.startswith(OURS))
        whole = f"{number(of / unit)} ms{' a step' if self.steps else ''}{' on the device' if on_device else ''}"
        rest = max(((ms, name) for name, ms in times.items() if not name.startswith(OURS) and name != PYTHON), default=None)
        most = "" if rest is None else f"{number(rest[0] / unit)} ms are {rest[1]}"
        if not ours:
            return f"of {whole}, {most or 'none are operations of torch'}"
        line = f"{number(ours / unit)} of {whole} are gnnfast's kernels ({percent(ours, of)})"
        return f"{line}; of the rest, {most}" if most else line

    def rows(self, most: int = MOST_ROWS) -> list[tuple[str, ...]]:
        """The largest operations, a step's share each: host ms, its percentage, device ms and its percentage, name."""
        return self._shares(self.operations[:most])

    def _shares(self, rows: Sequence[Operation | Layer]) -> list[tuple[str, ...]]:
        unit, device = max(self.steps, 1), self.device_ms
        found = []
        for row in rows:
            cells = [number(row.host_ms / unit), percent(row.host_ms, self.wall_ms)]
            cells += [number(row.device_ms / unit), percent(row.device_ms, device)] if device else []
            found.append((*cells, row.name))
        return found

    def columns(self) -> tuple[str, ...]:
        """What :meth:`rows` has."""
        return "host ms", "share", *(("device ms", "share") if self.device_ms else ()), "operation"

    def tables(self) -> list[Table]:
        """Operations, and calls of layers by line."""
        calls = [
            (f"{s.calls:,}", words.label(s.layer), s.site, words.kernel(s.kernel) if s.kernel else f"left alone: {s.reason}")
            for s in self.sites
            if s.kernel not in words.PARTS
        ]
        layers = Table("Layers", (*self.columns()[:-1], "layer"), self._shares(self.layers[:MOST_ROWS]), self.columns()[:-1])
        return [
            Table("", self.columns(), self.rows(), self.columns()[:-1]),
            *([layers] if self.layers else []),
            Table("Calls by line", ("calls", "layer", "line", "how"), calls, ("calls",)),
        ]

    def _lines(self) -> list[str]:
        missing = self._with_layers and self.operations and not self.layers
        return [self.headline(), *(["no layers: this torch's profiler records no calls of modules here"] if missing else [])]

    def __str__(self) -> str:
        return text(self._lines(), self.tables())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks."""
        return as_html(self._lines(), self.tables())


def profile(layers: bool = False) -> Profile:
    """Measures where the time of what runs in a ``with`` block goes, with torch.profiler::

        with gnnfast.profile() as p:
            for _ in range(10):
                train_step()
        print(p)

    Give it a few steps that are warm: the profiler costs some microseconds an operation, and keeps all of them until the block
    ends. Profiles do not nest. An error in the block passes through.

    With ``layers`` it also tells what each layer of the model took, forward and backward. Every call of Python is then recorded,
    which takes the host some time itself.

    Example:
        >>> with gnnfast.profile() as p:
        ...     _ = torch.ones(8, 8) @ torch.ones(8, 8)
        >>> p.wall_ms > 0
        True
    """
    return Profile(layers)


def _covered_ms(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans of microseconds, in milliseconds."""
    covered, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return covered / 1e3


def _is_frame(event: Any) -> bool:
    """Whether an event is a call in Python, not an operation."""
    return event.name.startswith((_MODULE, "<")) or ".py(" in event.name


def _frames(event: Any) -> list[Any]:
    """The event and what it ran in, outermost first."""
    found = [event]
    while found[-1].cpu_parent is not None:
        found.append(found[-1].cpu_parent)
    return found[::-1]


def _path(event: Any) -> list[Any]:
    """The same without calls in Python."""
    return [e for e in _frames(event) if not _is_frame(e)]


def _name(path: list[Any]) -> str:
    """What a user calls the work of the last event of a path."""
    for event in path:
        if event.name.startswith("gnnfast::"):
            return f"{OURS}: {event.name.removeprefix('gnnfast::')}"
    backward = ""
    for event in path:
        name = event.name
        if name.startswith("Optimizer."):
            return f"optimiser ({name.partition('#')[2].partition('.')[0]})"
        if name.startswith("enumerate(DataLoader)"):
            return "DataLoader"
        if name.startswith(_EVALUATE):
            backward = name.removeprefix(_EVALUATE).rpartition("::")[2]
            if backward[-1:].isdigit() or backward == "AccumulateGrad":  # of torch's own, which users see as grad_fn
                return f"{backward.rstrip('0123456789')}"
        elif name in _WAITS:
            return "waiting for the device"
        elif "::" in name and not name.startswith("autograd::"):
            return name.partition("::")[2] + (" (in backward)" if backward else "")
        elif name.startswith("cu"):
            return "CUDA runtime"
    return PYTHON


def _user_line() -> str:
    """The innermost line outside gnnfast, torch and the frameworks."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith(("<", _FOLDER)) or "site-packages" in name or "_propagate_" in name):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
