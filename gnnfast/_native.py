"""Loads the two native libraries and remembers why one could not be loaded. Nothing here raises: without a library every call
takes the framework's own path, and ``gnnfast doctor`` shows the reason."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MINIMUM_TORCH = (2, 10)
INSTALL = "pip install --no-build-isolation ."
_SYSTEMS = {"darwin": "macOS", "win32": "Windows"}


@dataclass(frozen=True)
class Library:
    """One native library: its name, where it was looked for, and why it is not in use (empty: it is)."""

    name: str
    path: Path | None
    reason: str

    @property
    def loaded(self) -> bool:
        return not self.reason


def _find(name: str) -> Path | None:
    import gnnfast

    for folder in gnnfast.__path__:
        path = Path(folder) / "lib" / f"lib{name}.so"
        if path.exists():
            return path
    return None


def _load(name: str, advice: str) -> Library:
    if sys.platform != "linux":
        return Library(name, None, f"gnnfast has kernels for Linux, and none for {_SYSTEMS.get(sys.platform, sys.platform)}")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM_TORCH:
        return Library(name, None, f"torch {torch.__version__} is older than 2.10, the oldest that gnnfast supports: upgrade torch")
    path = _find(name)
    if path is None:
        return Library(name, None, f"lib{name}.so is not in the installed package: {advice}")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        cause = error.__cause__ or error
        return Library(name, path, f"{path} cannot be loaded ({cause}): reinstall gnnfast")
    return Library(name, path, "")


_source = Path(__file__).resolve().parents[1]
from_source = (_source / "plugin_src").is_dir()  # a source tree, whose package has libraries only if installed with -e
_elsewhere = f"the source folder {_source} was imported instead; run in another folder, or {INSTALL}"
cpu = _load("gnnfast_cpu", _elsewhere if from_source else "reinstall gnnfast")
if not cpu.loaded:
    cuda = Library("gnnfast_cuda", None, "it needs the CPU library, which is not loaded")
elif torch.version.cuda is None:
    cuda = Library("gnnfast_cuda", None, "this torch is a build without CUDA")
else:
    cuda = _load("gnnfast_cuda", "this gnnfast was built without nvcc; install a wheel with CUDA or build with nvcc on the PATH")


def _find_same_codes() -> tuple[Callable[[Any], int], int | None] | None:
    """The C function of plugin_src/codes/codes_cpu.cpp and the address of what it calls; ``None`` if they cannot be had. At import:
    an audit hook may refuse it later, and the file may be another by then."""
    if not cpu.loaded:
        return None
    try:
        library = ctypes.PyDLL(os.path.realpath(str(cpu.path)))  # by the name that torch has loaded it by
        return library.gnnfast_same_codes, ctypes.cast(ctypes.pythonapi.PyFunction_GetCode, ctypes.c_void_p).value
    except Exception:
        return None


same_codes = _find_same_codes()


def missing(device_type: str) -> str:
    """Why there are no kernels for a device type (``"cpu"``, ``"cuda"``, ...); empty if there are."""
    if device_type == "cpu":
        return cpu.reason
    if device_type == "cuda":
        return cuda.reason
    return f"no kernels for device type {device_type!r}"
