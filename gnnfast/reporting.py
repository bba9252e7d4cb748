"""What ran where, and why anything fell back: counters that the adapters feed and :func:`report` shows."""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gnnfast import words
from gnnfast.config import settings
from gnnfast.rendering import Table, as_html, percent, text

_log = logging.getLogger("gnnfast")


class FallbackError(RuntimeError):
    """Raised instead of a fallback when ``GNNFAST_STRICT=1``."""


FEW_NEW = 3  # calls on new graphs that are no more than a start
FEW_ALONE = 3  # functions left alone for one reason that are named one by one
DENSE = "dense: not used again after it was measured"


class Note(NamedTuple):
    """One answer to "why is my model not faster?": so many of a layer's calls, why, and what to do (empty: nothing)."""

    layer: str
    calls: int
    of: int
    why: str
    advice: str


@dataclass
class Report:
    """Counts since the last :func:`clear_report`.

    Attributes:
        kernels: calls by (place, kernel, reason), where a place is such as ``"pyg GCNConv"``.
        fallbacks: calls that took the framework's own path, by (place, reason).
        patches: what is patched, by framework; an entry that was left alone says why.
        schedules: locality schedules made: the graph, the share of edges whose source is near in id order and by clusters, the
            device time it took in milliseconds, and whether it is used.
        sampled: edges of the graphs of all sampled calls, and ``draws``, how many of them were taken.
        features: constant input features that were measured: shape, dtype, density, and what became of them.
        cache: entries, bytes (of these, of schedules), hits, misses and evictions of the graph cache.
        off: why gnnfast does nothing now, in a sentence; empty while it is on.
    """

    kernels: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)
    patches: dict[str, dict[str, str]] = field(default_factory=dict)
    schedules: list[dict[str, Any]] = field(default_factory=list)
    features: list[dict[str, Any]] = field(default_factory=list)
    sampled: Counter[str] = field(default_factory=Counter)
    cache: dict[str, int] = field(default_factory=dict)
    off: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        return {
            "kernels": [dict(zip(("place", "kernel", "reason"), k), calls=n) for k, n in sorted(self.kernels.items())],
            "fallbacks": [dict(zip(("place", "reason"), k), calls=n) for k, n in sorted(self.fallbacks.items())],
            "notes": [note._asdict() for note in self.notes()],
            "patches": self.patches,
            "schedules": self.schedules,
            "sampled": dict(self.sampled),
            "features": self.features,
            "cache": self.cache,
            "off": self.off,
        }

    def calls(self) -> dict[str, Counter[str]]:
        """Calls by layer and by kernel in words, without what is counted beside an aggregation."""
        found: dict[str, Counter[str]] = {}
        for (place, kernel, _), calls in sorted(self.kernels.items()):
            if kernel not in words.PARTS:
                found.setdefault(place, Counter())[words.kernel(kernel)] += calls
        for (place, _), calls in sorted(self.fallbacks.items()):
            found.setdefault(place, Counter())[f"{words.place(place)[1]}'s own operations"] += calls
        return found

    def notes(self) -> list[Note]:
        """Why layers are not faster, the most calls first."""
        of = {place: sum(kernels.values()) for place, kernels in self.calls().items()}
        found = [
            Note(place, calls, of[place], f"left to {words.place(place)[1]}: {reason}", words.advice(reason))
            for (place, reason), calls in self.fallbacks.items()
        ]
        for (place, kernel, reason), calls in self.kernels.items():
            own = words.own_code(kernel)
            if own:
                why = f"served in part, {own}: {reason}" if reason else f"served in part, {own}"
                found.append(Note(place, calls, of[place], why, words.advice(reason)))
        small, converted, scattered = (self._by_place(reason) for reason in (words.SMALL, words.CONVERTED, words.SCATTERED))
        for place, calls in small.items():
            advice = "larger batches; gnnfast.capture for a step on a fixed graph on a GPU"
            found.append(
                Note(place, calls, of[place], "too small to gain: starting kernels takes longer than running them", advice)
            )
        for place, calls in converted.items():
            if calls >= FEW_NEW and 2 * calls >= of[place]:
                advice = "where the graph is the same, keep one edge_index tensor instead of making it again"
                found.append(Note(place, calls, of[place], "the graph was new and was converted for one call", advice))
        for place, calls in scattered.items():
            if calls >= FEW_NEW and 2 * calls >= of[place]:
                found.append(Note(place, calls, of[place], "the graph was new, and converting it would have cost more", ""))
        return sorted(found, key=lambda note: (-note.calls, note))

    def _by_place(self, reason: Any) -> Counter[str]:
        found: Counter[str] = Counter()
        for (place, kernel, why), calls in self.kernels.items():
            if kernel not in words.PARTS and reason.search(why):
                found[place] += calls
        return found

    def headline(self) -> str:
        """The whole in a sentence."""
        total = sum(sum(kernels.values()) for kernels in self.calls().values())
        if not total:
            return self.off or "gnnfast: no message passing was seen since the report began"
        left = sum(calls for (_, reason), calls in self.fallbacks.items() if not words.SMALL.search(reason))
        small = sum(self.fallbacks.values()) - left + sum(self._by_place(words.SMALL).values())
        part = sum(calls for (_, kernel, _), calls in self.kernels.items() if words.own_code(kernel))
        parts = [f"{percent(total - left - small - part, total)} on gnnfast's kernels"]
        parts += [f"{percent(part, total)} in part (message())"] if part else []
        parts += [f"{percent(small, total)} too small to gain"] if small else []
        parts += [f"{percent(left, total)} left to the framework"] if left else []
        return f"gnnfast: {total:,} calls, {', '.join(parts)}" + (f"; now {self.off}" if self.off else "")

    def _lines(self) -> list[str]:
        """What is no table, in sentences."""
        found = []
        for made in self.schedules:
            found.append(
                f"Locality schedule of {made['graph']}: {made['near_before']:.0%} -> {made['near_after']:.0%} of the edges near, "
                f"{made['milliseconds']:.1f} ms in the background; {'in use' if made['used'] else 'not used: id order is as good'}"
            )
        if self.sampled:
            rate = self.sampled["draws"] / max(self.sampled["edges"], 1)
            found.append(f"Sampling: {rate:.1%} of the edges of all sampled calls were taken; their results are approximate")
        for reason in sorted({why.partition("not sampled: ")[2] for _, _, why in self.kernels} - {""}):
            found.append(f"Not sampled: {reason}")
        found += self._features()
        if self.cache:
            kept, looked = self.cache["bytes"], self.cache["hits"] + self.cache["misses"]
            line = f"Graph cache: {self.cache['entries']:,} entries, {kept / 2**20:,.1f} MiB"
            line += f", {percent(self.cache['hits'], looked)} of {looked:,} look-ups found" if looked else ""
            dropped = self.cache["evictions"]
            found.append(line + (f", {dropped:,} dropped for want of room (GNNFAST_CACHE_MB)" if dropped else ""))
        for framework, patches in self.patches.items():
            alone = {name: state for name, state in patches.items() if state != "patched"}
            found.append(
                f"{words.FRAMEWORKS.get(framework, framework)}: {len(patches) - len(alone)} of {len(patches)} functions patched"
            )
            for state in dict.fromkeys(alone.values()):
                names = [name for name in alone if alone[name] == state]
                if self.off and state.partition(": ")[2] in self.off:
                    continue  # the headline says it
                if len(names) > FEW_ALONE:
                    names = [f"{len(names)} functions, {names[0]} among them,"]
                found += [f"  {name} {state}" for name in names]
        return found

    def _features(self) -> list[str]:
        """A line for features of one width of which the same became: mini-batches are measured one by one."""
        alike: dict[Any, list[dict[str, Any]]] = {}
        for made in self.features:
            state = re.sub(r"density [\d.]+%, ", "density ", made["state"])
            alike.setdefault((tuple(made["shape"][1:]), made["dtype"], state), []).append(made)
        found = []
        for (width, dtype, state), group in alike.items():
            least, most = (f"{end(made['density'] for made in group):.2%}" for end in (min, max))
            if len(group) == 1:
                what, state = f"{group[0]['shape']} {dtype}", group[0]["state"]
            else:
                what = f"[*, {', '.join(map(str, width))}] {dtype}, {len(group):,} tensors"
            found.append(f"Features {what}: {least if least == most else f'{least} to {most}'} are not zero, {state}")
        return found

    def _tables(self) -> list[Table]:
        ran = [(f"{n:,}", words.label(place), how) for place, kernels in self.calls().items() for how, n in kernels.most_common()]
        why = []
        for note in self.notes():
            reason = f"{note.why}\n-> {note.advice}" if note.advice else note.why
            why.append((f"{note.calls:,}", percent(note.calls, note.of), words.label(note.layer), reason))
        return [
            Table("What ran", ("calls", "layer", "how"), ran, ("calls",)),
            Table("Why not faster", ("calls", "share", "layer", "reason"), why, ("calls", "share")),
        ]

    def __str__(self) -> str:
        return text([self.headline()], self._tables(), self._lines())

    def _repr_html_(self) -> str:
        """For notebooks."""
        return as_html([self.headline()], self._tables(), self._lines())

    __repr__ = __str__


_counts = Report()
_lock = threading.Lock()
_MOST = 1000  # distinct lines kept; classes made in a loop must not grow the report without bound
_LOG = settings().log
_account: Callable[[], dict[str, int]] = dict
_why_off: Callable[[], str] = str
# The next number of calls: what Report.kernels and Report.fallbacks show.
_calls: dict[tuple[str, str, str], itertools.count[int]] = {}
_fallbacks: dict[tuple[str, str], itertools.count[int]] = {}


def _log_call(place: str, kernel: str, reason: str) -> None:
    if kernel:  # fallbacks are logged with "info" too
        _emit(f"{place}: {kernel} ({reason})")


# Called with place, kernel (empty: the framework's own path) and reason of each call: a profile's, and the log's.
_watchers: list[Callable[[str, str, str], None]] = [_log_call] if _LOG == "debug" else []


def watch(watcher: Callable[[str, str, str], None]) -> None:
    """Has ``watcher(place, kernel, reason)`` told of each call until :func:`unwatch`; ``kernel`` is empty for a fallback."""
    _watchers.append(watcher)


def unwatch(watcher: Callable[[str, str, str], None]) -> None:
    """Ends :func:`watch`."""
    _watchers.remove(watcher)


def ran(place: str, kernel: str, reason: str) -> None:
    """Counts a call that a kernel served."""
    key = place, kernel, reason
    calls = _calls.get(key)
    if calls is None:
        _count(_calls, key)
    else:
        next(calls)
    if _watchers:
        for watcher in _watchers:
            watcher(place, kernel, reason)


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
    made = {"shape": shape, "dtype": dtype, "density": density, "state": DENSE}
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
    if _watchers:
        for watcher in _watchers:
            watcher(place, "", reason)
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


def has_switch(why_off: Callable[[], str]) -> None:
    """Takes what tells why gnnfast does nothing, which lies above this module."""
    global _why_off
    _why_off = why_off


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
    """What ran where, why the rest is not faster, and what would make it so, since the start or the last :func:`clear_report`.

    Print it (80 columns, no colours), leave it last in a notebook's cell, or take ``as_dict()``. Counts alone: shares of time are
    what :func:`gnnfast.profile` measures.

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
    snapshot.cache, snapshot.off = _account(), _why_off()
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
