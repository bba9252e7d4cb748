"""A user's script in two processes of its own, with gnnfast off and on: time, peak memory, what it printed, where the time went.

gnnfast is imported in both, switched off in one.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import gnnfast
from gnnfast import _native
from gnnfast.rendering import Table, number

OFF, ON = "without gnnfast", "with gnnfast"
KEPT_LINES, LAST_LINES = 500, 5  # of what a script prints: kept, and shown of those that both sides print
WARM_STEPS, PROFILED_STEPS = 5, 20  # optimiser steps before the profile begins, and in it


@dataclass
class Side:
    """What one run gave.

    Attributes:
        status: the exit status of the script.
        seconds: of the script, without the start of Python and the import of gnnfast.
        step_ms: median time from one optimiser step to the next, those of the profile and the first left out; ``None`` without.
        step_quartiles: between which the middle half of these times lies; empty without.
        peak_mib: CUDA's peak where the script used it, else that of the process's resident memory.
        peak_of: ``"CUDA"`` or ``"process"``.
        lines: the last lines that it printed.
        profile: the rows and the headline of a :class:`gnnfast.Profile`; empty if none was asked for or no optimiser stepped.
        report: what :func:`gnnfast.report` says in a sentence.
        unserved: why nothing ran on gnnfast's kernels; empty if something did.
    """

    status: int = 1
    seconds: float = 0.0
    step_ms: float | None = None
    step_quartiles: list[float] = field(default_factory=list)
    steps: int = 0
    peak_mib: float = 0.0
    peak_of: str = "process"
    lines: list[str] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)
    report: str = ""
    unserved: str = ""


def own_process(call: str, *arguments: str, on: bool, flags: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a process that calls ``"MODULE:FUNCTION"`` of the very gnnfast of this one, on or off.
    Not ``python -m``, which would import a source tree without libraries where it is the current folder."""
    package = str(Path(gnnfast.__file__).resolve().parents[1])
    module, _, function = call.partition(":")
    start = f"import sys; sys.path[: sys.path[0] == ''] = [{package!r}]; from {module} import {function}; sys.exit({function}())"
    # Last, where it hides nothing: for processes that this one starts, if gnnfast is not installed.
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    return [sys.executable, *flags, "-c", start, *arguments], os.environ | {"GNNFAST": str(int(on)), "PYTHONPATH": paths}


def run(script: str, arguments: list[str], on: bool, profile: bool = False, show: Callable[[str], None] = print) -> Side:
    """Runs a script once. Each line that it prints goes to ``show``; what it writes to stderr is left alone."""
    with tempfile.TemporaryDirectory(prefix="gnnfast-") as folder:
        result = Path(folder) / "side.json"
        given = [str(result), "profile" if profile else "-", script, *arguments]
        command, environment = own_process("gnnfast.sides:main", *given, on=on)
        environment["PYTHONUNBUFFERED"] = "1"
        last: deque[str] = deque(maxlen=KEPT_LINES)
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                show(line.rstrip("\n"))
                if line.strip():
                    last.append(line.rstrip())
        side = Side(**json.loads(result.read_text())) if result.is_file() else Side()
    side.status = child.returncode
    side.lines = list(last)
    return side


def table(off: Side, on: Side) -> Table:
    """Time and memory of the two, and their ratios where gnnfast did something."""
    rows: list[tuple[str, ...]] = []
    for what, a, b in (
        ("ms a step, median", off.step_ms, on.step_ms),
        ("seconds in all", off.seconds, on.seconds),
        (f"peak MiB ({on.peak_of})", off.peak_mib, on.peak_mib),
    ):
        if a is not None and b is not None:
            rows.append((what, number(a), number(b), f"{a / b:.2f}x" if b and not on.unserved else ""))
    if off.step_quartiles and on.step_quartiles:
        rows.insert(1, ("ms of the middle half", *(" to ".join(map(number, s.step_quartiles)) for s in (off, on)), ""))
    columns = ("", "without", "with", "ratio")[: 3 if on.unserved else 4]
    return Table("", columns, [row[: len(columns)] for row in rows], columns[1:])


def no_ratios(on: Side) -> list[str]:
    """The line that says why :func:`table` has no ratios; none if it has them."""
    return [f"no ratios: {on.unserved}"] if on.unserved else []


def last_in_common(off: list[str], on: list[str]) -> list[tuple[str, str]]:
    """The last lines that both runs printed, but for their numbers, side by side: the last metrics, as a rule. What one side alone
    prints, as a report of gnnfast, is passed over."""
    # From the end: where one side printed more lines of a kind, its last are those of the other's last.
    a, b = ([(_NUMBER.sub("#", line), line) for line in reversed(lines) if _NUMBER.search(line)] for lines in (off, on))
    same = difflib.SequenceMatcher(None, [alike for alike, _ in a], [alike for alike, _ in b], autojunk=False)
    pairs = [(a[i + k][1], b[j + k][1]) for i, j, size in same.get_matching_blocks() for k in range(size)]
    return pairs[:LAST_LINES][::-1]


_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:nan|inf)\b)", re.IGNORECASE)


# ---- in the process of a side ------------------------------------------------------------------------------------------------
class _Steps:
    """Told of each step of an optimiser: the times between them, and a profile of a few."""

    def __init__(self, profile: bool) -> None:
        self.wanted, self.count, self.times = profile, 0, list[float]()
        self.last, self.away = time.perf_counter(), 0.0  # seconds that the profiler took between steps
        self.profile: gnnfast.Profile | None = None
        self.running = False

    def stepped(self, *_: Any) -> None:
        now = time.perf_counter()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        if self.count > 1 and not self.running:
            self.times.append(1e3 * (now - self.last))
        self.count += 1
        if self.wanted and self.count == WARM_STEPS:
            self.profile, self.running = gnnfast.profile().__enter__(), True
        elif self.count == WARM_STEPS + PROFILED_STEPS:
            self.close()
        self.last = time.perf_counter()
        self.away += self.last - now

    def close(self) -> None:
        if self.running:
            assert self.profile is not None
            self.running = False
            self.profile.__exit__(None, None, None)


def main() -> int:
    """Runs ``RESULT.json PROFILE SCRIPT ARGS``, and writes what the side gave."""
    from gnnfast.cli import run_script

    result, profile, script, *arguments = sys.argv[1:]
    steps = _Steps(profile == "profile")
    hook = register_optimizer_step_post_hook(steps.stepped)
    status = 1
    begin = time.perf_counter()
    try:
        status = run_script(script, arguments, False)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    finally:
        report = gnnfast.report()
        side = Side(seconds=time.perf_counter() - begin - steps.away, steps=steps.count, report=report.headline())
        hook.remove()
        steps.close()
        side.step_ms = statistics.median(steps.times) if steps.times else None
        if len(steps.times) > 1:
            low, _, high = statistics.quantiles(steps.times, n=4, method="inclusive")
            side.step_quartiles = [low, high]
        used = torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.max_memory_allocated()
        side.peak_mib, side.peak_of = (used / 2**20, "CUDA") if used else (peak_rss_mib(), "process")
        if steps.profile is not None and steps.profile.operations:
            side.profile = steps.profile.as_dict() | {
                "headline": steps.profile.headline(),
                "columns": steps.profile.columns(),
                "rows": steps.profile.rows(),
            }
        side.unserved = "" if report.kernels else _why_unserved(bool(report.fallbacks), bool(used))
        Path(result).write_text(json.dumps(asdict(side)))
    return status


def _why_unserved(left: bool, cuda: bool) -> str:
    """Why no call was counted on gnnfast's kernels. ``left``: some were left to the framework."""
    missing = _native.missing("cuda" if cuda else "cpu")
    if missing or left:
        return missing or "all message passing was left to the framework"
    if not gnnfast.is_enabled():
        return "the script switched gnnfast off"
    return "gnnfast saw no message passing in the script's process; it does not see other processes that this starts"


def peak_rss_mib() -> float:
    """The most resident memory that this process had."""
    import resource

    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
