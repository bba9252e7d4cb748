"""A user's script in two processes of its own, with gnnfast off and on: time, peak memory, what it printed, where the time went.

Each process is ``python -m gnnfast.sides RESULT.json PROFILE SCRIPT ARGS``: gnnfast is imported in both, switched off in one.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import gnnfast
from gnnfast.rendering import Table, number

OFF, ON = "without gnnfast", "with gnnfast"
LAST_LINES = 5  # of what a script prints, kept and compared
WARM_STEPS, PROFILED_STEPS = 5, 20  # optimiser steps before the profile begins, and in it


@dataclass
class Side:
    """What one run gave.

    Attributes:
        status: the exit status of the script.
        seconds: of the script, without the start of Python and the import of gnnfast.
        step_ms: median time from one optimiser step to the next, those of the profile and the first left out; ``None`` without.
        peak_mib: CUDA's peak where the script used it, else that of the process's resident memory.
        peak_of: ``"CUDA"`` or ``"process"``.
        lines: the last lines that it printed.
        profile: the rows and the headline of a :class:`gnnfast.Profile`; empty if none was asked for or no optimiser stepped.
        report: what :func:`gnnfast.report` says in a sentence.
    """

    status: int = 1
    seconds: float = 0.0
    step_ms: float | None = None
    steps: int = 0
    peak_mib: float = 0.0
    peak_of: str = "process"
    lines: list[str] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)
    report: str = ""


def run(script: str, arguments: list[str], on: bool, profile: bool = False, show: Callable[[str], None] = print) -> Side:
    """Runs a script once. Each line that it prints goes to ``show``; what it writes to stderr is left alone."""
    with tempfile.TemporaryDirectory(prefix="gnnfast-") as folder:
        result = Path(folder) / "side.json"
        command = [sys.executable, "-m", "gnnfast.sides", str(result), "profile" if profile else "-", script, *arguments]
        package = str(Path(__file__).resolve().parents[1])  # the same gnnfast, installed or not
        paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
        environment = os.environ | {"GNNFAST": str(int(on)), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        last: deque[str] = deque(maxlen=LAST_LINES)
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
    """Time and memory of the two, and their ratios."""
    rows = []
    for what, a, b in (
        ("ms a step, median", off.step_ms, on.step_ms),
        ("seconds in all", off.seconds, on.seconds),
        (f"peak MiB ({on.peak_of})", off.peak_mib, on.peak_mib),
    ):
        if a is not None and b is not None:
            rows.append((what, number(a), number(b), f"{a / b:.2f}x" if b else ""))
    return Table("", ("", "without", "with", "ratio"), rows, ("without", "with", "ratio"))


def changed_numbers(off: list[str], on: list[str]) -> list[tuple[str, str]]:
    """The last lines in which the two runs differ, side by side: the last metrics, as a rule."""
    pairs = zip(off[-LAST_LINES:], on[-LAST_LINES:]) if len(off) == len(on) else ()
    return [
        (a, b) for a, b in pairs if a != b and difflib.SequenceMatcher(None, _NUMBER.sub("", a), _NUMBER.sub("", b)).ratio() > 0.9
    ]


_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)


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


def _measured(result: Path, profile: bool, script: str, arguments: list[str]) -> int:
    from gnnfast.cli import run_script

    steps = _Steps(profile)
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
        side = Side(seconds=time.perf_counter() - begin - steps.away, steps=steps.count, report=gnnfast.report().headline())
        hook.remove()
        steps.close()
        side.step_ms = statistics.median(steps.times) if steps.times else None
        used = torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.max_memory_allocated()
        side.peak_mib, side.peak_of = (used / 2**20, "CUDA") if used else (peak_rss_mib(), "process")
        if steps.profile is not None and steps.profile.operations:
            side.profile = steps.profile.as_dict() | {
                "headline": steps.profile.headline(),
                "columns": steps.profile.columns(),
                "rows": steps.profile.rows(),
            }
        result.write_text(json.dumps(asdict(side)))
    return status


def peak_rss_mib() -> float:
    """The most resident memory that this process had."""
    import resource

    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


if __name__ == "__main__":
    raise SystemExit(_measured(Path(sys.argv[1]), sys.argv[2] == "profile", sys.argv[3], sys.argv[4:]))
