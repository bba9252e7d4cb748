"""Instructions that a host executes in a step, as valgrind counts them: the same in each run, however noisy the machine is.

Of work on a device they say nothing, and of a CPU's kernels little: an instruction may add one number or eight.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SOURCE = """
#include <valgrind/callgrind.h>
void count(void) { CALLGRIND_START_INSTRUMENTATION; }
void forget(void) { CALLGRIND_ZERO_STATS; }
void write_down(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""
_FOLDER = "GNNFAST_BENCH_INSTRUCTIONS"  # where a counted process finds the library, and writes
TRANSLATED, COUNTED = 3, 10  # steps


class Missing(RuntimeError):
    """What cannot count here, and why."""


class Counting:
    """A folder with what counts, and how processes are started so that they can: see :class:`~.processes.Apart`."""

    def __init__(self) -> None:
        """Raises Missing."""
        compiler = os.environ.get("CC") or "cc"
        for program in ("valgrind", compiler):
            if shutil.which(program) is None:
                raise Missing(f"there is no {program}: install it, to count instructions")
        self._kept = tempfile.TemporaryDirectory(prefix="gnnfast-instructions-")
        folder = Path(self._kept.name)
        (folder / "count.c").write_text(_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-o", str(_library(folder)), str(folder / "count.c")]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise Missing(f"{compiler} cannot compile what counts instructions: {made.stderr.strip().partition(chr(10))[0]}")
        tool = "--tool=callgrind", "--instr-atstart=no", "-q", f"--callgrind-out-file={folder}/%p"
        self.prefix = ("valgrind", *tool)
        # One thread: others would wait for it in instructions. Hashes that are the same in each process.
        self.variables = {_FOLDER: str(folder), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def of_step(step: Callable[[], Any]) -> int:
    """Instructions of a step, in a process that was started by :class:`Counting`."""
    folder = Path(os.environ[_FOLDER])
    library = ctypes.CDLL(str(_library(folder)))
    gc.collect()
    gc.disable()
    try:
        library.count()
        for _ in range(TRANSLATED):
            step()
        library.forget()
        for _ in range(COUNTED):
            step()
        library.write_down()
    finally:
        gc.enable()
    (written,) = folder.glob(f"{os.getpid()}.*")
    found = re.search(r"^(?:summary|totals): (\d+)", written.read_text(), re.MULTILINE)
    written.unlink()
    assert found is not None
    return int(found[1]) // COUNTED


def _library(folder: Path) -> Path:
    return folder / "libcount.so"
