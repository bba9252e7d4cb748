"""What ran where, and why anything fell back: counters that the adapters feed and :func:`report` shows."""

from __future__ import annotations

import io
import logging
import threading
from collections import Counter
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
        cache: entries, bytes, hits, misses and evictions of the graph cache.
    """

    kernels: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)
    patches: dict[str, dict[str, str]] = field(default_factory=dict)
    cache: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        return {
            "kernels": [dict(zip(("place", "kernel", "reason"), k), calls=n) for k, n in sorted(self.kernels.items())],
            "fallbacks": [dict(zip(("place", "reason"), k), calls=n) for k, n in sorted(self.fallbacks.items())],
            "patches": self.patches,
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
        console.print("Graph cache: " + ", ".join(f"{name} {value:,}" for name, value in self.cache.items()))
        for framework, patches in self.patches.items():
            console.print(f"{framework}: " + "; ".join(f"{name}: {state}" for name, state in patches.items()))
        return console.export_text()

    __repr__ = __str__


_counts = Report()
_lock = threading.Lock()
_MOST = 1000  # distinct lines kept; classes made in a loop must not grow the report without bound


def ran(place: str, kernel: str, reason: str) -> None:
    """Counts a call that a kernel served."""
    key = (place, kernel, reason)
    with _lock:
        if key in _counts.kernels or len(_counts.kernels) < _MOST:
            _counts.kernels[key] += 1
    if settings().log == "debug":
        _emit(f"{place}: {kernel} ({reason})")


def fell_back(place: str, reason: str) -> None:
    """Counts a call that takes the framework's own path.

    Raises:
        FallbackError: ``GNNFAST_STRICT=1`` or ``override(strict=True)``.
    """
    current = settings()
    if current.strict:
        raise FallbackError(f"gnnfast would leave {place} to the framework: {reason} (GNNFAST_STRICT=1 makes this an error)")
    key = (place, reason)
    with _lock:
        new = key not in _counts.fallbacks
        if not new or len(_counts.fallbacks) < _MOST:
            _counts.fallbacks[key] += 1
    if (new and current.log == "info") or current.log == "debug":
        _emit(f"{place} runs on the framework's own path: {reason}")


def patched(framework: str, name: str, state: str) -> None:
    """Remembers what became of one patch."""
    _counts.patches.setdefault(framework, {})[name] = state
    if settings().log != "off":
        _emit(f"{framework} {name}: {state}")


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
    """What ran where, and why anything fell back, since the start or the last :func:`clear_report`. Print it."""
    from gnnfast.graph import cache

    with _lock:
        snapshot = Report(Counter(_counts.kernels), Counter(_counts.fallbacks), {k: dict(v) for k, v in _counts.patches.items()})
    snapshot.cache = {
        "entries": len(cache),
        "bytes": cache.nbytes,
        "hits": cache.hits,
        "misses": cache.misses,
        "evictions": cache.evictions,
    }
    return snapshot


def clear_report() -> None:
    """Sets all counts to zero."""
    with _lock:
        _counts.kernels.clear()
        _counts.fallbacks.clear()
