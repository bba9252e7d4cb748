"""What ran where, and why anything fell back: counters that the adapters feed and :func:`report` shows."""

from __future__ import annotations

import io
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gnnfast.config import settings

_log = logging.getLogger("gnnfast")


class FallbackError(RuntimeError):
    """Raised instead of a fallback when ``GNNFAST_STRICT=1``."""


@dataclass
class Report:
    """Counts since the last :meth:`clear`.

    Attributes:
        kernels: calls by (place, kernel, reason), where a place is such as ``"pyg GCNConv"``.
        fallbacks: calls that took the framework's own path, by (place, reason).
        patches: what is patched, by framework; an entry that was left alone says why.
        schedules: locality schedules made: the graph, the share of edges whose source is near in id order and by clusters, the
            device time it took in milliseconds, and whether it is used.
        sampled: edges of the graphs of all sampled calls, and ``draws``, how many of them were taken.
        features: constant input features that were measured: shape, dtype, density, and what became of them.
        cache: entries, bytes (of these, of schedules), hits, misses and evictions of the graph cache.
    """

    kernels: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)
    patches: dict[str, dict[str, str]] = field(default_factory=dict)
    schedules: list[dict[str, Any]] = field(default_factory=list)
    features: list[dict[str, Any]] = field(default_factory=list)
    sampled: Counter[str] = field(default_factory=Counter)
    cache: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        return {
            "kernels": [dict(zip(("place", "kernel", "reason"), k), calls=n) for k, n in sorted(self.kernels.items())],
            "fallbacks": [dict(zip(("place", "reason"), k), calls=n) for k, n in sorted(self.fallbacks.items())],
            "patches": self.patches,
            "schedules": self.schedules,
            "sampled": dict(self.sampled),
            "features": self.features,
            "cache": self.cache,
        }

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        console = Console(width=120, force_terminal=False, record=True, file=io.StringIO())
        for title, rows, columns in (
            ("Kernels", self.kernels, ("place", "kernel", "reason", "calls")),
            ("Fallbacks to the framework", self.fallbacks, ("place", "reason", "calls")),
        ):
            table = Table(*columns, title=title, title_justify="left")
            for key, calls in sorted(rows.items()):
                table.add_row(*key, str(calls))
            if rows:
                console.print(table)
            else:
                console.print(f"{title}: none")
        for made in self.schedules:
            console.print(
                f"Locality schedule of {made['graph']}: {made['near_before']:.0%} -> {made['near_after']:.0%} of the edges near, "
                f"{made['milliseconds']:.1f} ms in the background; {'in use' if made['used'] else 'not used: id order is as good'}"
            )
        if self.sampled:
            rate = self.sampled["draws"] / max(self.sampled["edges"], 1)
            console.print(f"Sampling: {rate:.1%} of the edges of all sampled calls were taken; their results are approximate")
        for made in self.features:
            console.print(f"Features {made['shape']} {made['dtype']}: density {made['density']:.2%}, {made['state']}")
        console.print("Graph cache: " + ", ".join(f"{name} {value:,}" for name, value in self.cache.items()))
        for framework, patches in self.patches.items():
            console.print(f"{framework}: " + "; ".join(f"{name}: {state}" for name, state in patches.items()))
        return console.export_text()

    __repr__ = __str__


_counts = Report()
_lock = threading.Lock()
_MOST = 1000  # distinct lines kept; classes made in a loop must not grow the report without bound
_LOG = settings().log
_account: Callable[[], dict[str, int]] = dict
# The next number of calls: what Report.kernels and Report.fallbacks show.
_calls: dict[tuple[str, str, str], itertools.count[int]] = {}
_fallbacks: dict[tuple[str, str], itertools.count[int]] = {}


def ran(place: str, kernel: str, reason: str) -> None:
    """Counts a call that a kernel served."""
    _count(_calls, (place, kernel, reason))
    if _LOG == "debug":
        _emit(f"{place}: {kernel} ({reason})")


def _count(counts: dict[Any, itertools.count[int]], key: tuple[str, ...]) -> bool:
    """Counts without a lock: no other thread can come between ``next``. Returns whether it is the first time."""
    calls = counts.get(key)
    if calls is not None:
        next(calls)
        return False
    if len(counts) < _MOST:
        next(counts.setdefault(key, itertools.count(1)))
    return True


def _numbers(counts: dict[Any, itertools.count[int]]) -> Counter[Any]:
    return Counter({key: int(repr(calls)[len("count(") : -1]) - 1 for key, calls in list(counts.items())})


def sampled(edges: int, draws: int) -> None:
    """Counts the edges of a sampled call and how many it takes."""
    with _lock:
        _counts.sampled.update(edges=edges, draws=draws)


def scheduled(graph: str, near_before: float, near_after: float, milliseconds: float, used: bool) -> None:
    """Remembers what a locality schedule cost and what it does."""
    made = {"graph": graph, "near_before": near_before, "near_after": near_after, "milliseconds": milliseconds, "used": used}
    with _lock:
        if len(_counts.schedules) < _MOST:
            _counts.schedules.append(made)
    if settings().log != "off":
        _emit(f"locality schedule of {graph}: {near_before:.0%} -> {near_after:.0%} near, {milliseconds:.1f} ms, used: {used}")


def measured(shape: list[int], dtype: str, density: float) -> dict[str, Any]:
    """Remembers the density of constant features. Returns the entry, whose ``state`` its maker keeps."""
    made = {"shape": shape, "dtype": dtype, "density": density, "state": "dense"}
    with _lock:
        if len(_counts.features) < _MOST:
            _counts.features.append(made)
    if settings().log != "off":
        _emit(f"features {shape} {dtype}: density {density:.2%}")
    return made


def fell_back(place: str, reason: str) -> None:
    """Counts a call that takes the framework's own path.

    Raises:
        FallbackError: ``GNNFAST_STRICT=1`` or ``override(strict=True)``.
    """
    current = settings()
    if current.strict:
        raise FallbackError(f"gnnfast would leave {place} to the framework: {reason} (GNNFAST_STRICT=1 makes this an error)")
    new = _count(_fallbacks, (place, reason))
    if _LOG != "off" and (new or _LOG == "debug"):
        _emit(f"{place} runs on the framework's own path: {reason}")


def patched(framework: str, name: str, state: str) -> None:
    """Remembers what became of one patch."""
    _counts.patches.setdefault(framework, {})[name] = state
    if settings().log != "off":
        _emit(f"{framework} {name}: {state}")


def has_account(account: Callable[[], dict[str, int]]) -> None:
    """Takes what tells the state of the graph cache, which lies above this module."""
    global _account
    _account = account


def unpatched(framework: str) -> None:
    """Forgets the patches of a framework."""
    _counts.patches.pop(framework, None)


def _emit(message: str) -> None:
    if not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("gnnfast: %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.DEBUG)
    _log.info(message)


def report() -> Report:
    """What ran where, and why anything fell back, since the start or the last :func:`clear_report`. Print it.

    Example:
        >>> graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> _ = gnnfast.spmm(graph, torch.ones(2, 4))
        >>> [(place, calls) for (place, kernel, reason), calls in gnnfast.report().kernels.items()]
        [('gnnfast.spmm', 1)]
    """
    with _lock:
        patches = {k: dict(v) for k, v in _counts.patches.items()}
        features = [dict(made) for made in _counts.features]
        snapshot = Report(_numbers(_calls), _numbers(_fallbacks), patches, list(_counts.schedules), features)
        snapshot.sampled.update(_counts.sampled)
    snapshot.cache = _account()
    return snapshot


def clear_report() -> None:
    """Sets all counts to zero.

    Example:
        >>> gnnfast.clear_report()
        >>> gnnfast.report().kernels
        Counter()
    """
    with _lock:
        _calls.clear()
        _fallbacks.clear()
        _counts.schedules.clear()
        _counts.sampled.clear()
        _counts.features.clear()
