"""Scripts in processes of their own, as ``python SCRIPT`` runs them, but forked from one that has imported torch and PyG: to import
these takes ten times as long as most of what tests run so."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).parent)


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch_geometric"])  # or the former alone, where the latter is not installed
    return context


def run(command: list[str], cwd: str | Path, env: dict[str, str], quiet: bool = False, timeout: float = 300) -> Any:
    """What ``subprocess.run([sys.executable, *command])`` returns, of ``[SCRIPT, ...]`` or ``["-m", "gnnfast", ...]``; ``quiet`` is
    ``-W ignore``."""
    import torch

    if torch.cuda.is_available():  # a driver does not outlive a fork, and PyG asks whether there is one
        command = [sys.executable, *(["-W", "ignore"] if quiet else []), *command]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        process = _context().Process(target=_run, args=(command, str(cwd), env, quiet, [str(path) for path in outputs]))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(command, timeout)
        texts = [path.read_text() if path.exists() else "" for path in outputs]
        return subprocess.CompletedProcess(command, process.exitcode, *texts)


def _run(command: list[str], cwd: str, env: dict[str, str], quiet: bool, outputs: list[str]) -> None:
    for fd, path in zip((1, 2), outputs):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if quiet:
        warnings.simplefilter("ignore")
    is_module = command[0] == "-m"
    first = cwd if is_module else os.path.dirname(os.path.abspath(command[0]))
    paths = [first, *env.get("PYTHONPATH", "").split(os.pathsep), *(path for path in sys.path if not path.startswith(TESTS))]
    sys.path[:] = filter(None, paths)
    try:
        sys.argv = command[is_module:]
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
        status: Any = 0
    except SystemExit as done:
        status = done.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
