"""What ``gnnfast doctor`` finds: what is installed, compiled and patched, and what to do about what is not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

import torch

import gnnfast
from gnnfast import _native
from gnnfast.config import settings, unknown_variables, without_effect

OK, PROBLEM, UNUSED = "ok", "problem", "not in use"


class Finding(NamedTuple):
    """``state`` is ``"ok"``, ``"problem"`` (something that should work does not) or ``"not in use"``."""

    what: str
    state: str
    note: str


def findings() -> list[Finding]:
    """The state of the installation. Imports the frameworks that are installed."""
    return [*_library(), *_framework("torch_geometric", "pyg"), *_framework("dgl", "dgl"), *_settings()]


def _library() -> Iterator[Finding]:
    yield Finding("python", OK, platform.python_version())
    yield Finding("torch", OK, f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")
    on = gnnfast.is_enabled()
    yield Finding("gnnfast", OK if on else UNUSED, gnnfast.__version__ + ("" if on else ", off: GNNFAST=0 or disable()"))
    cpu, cuda, has_device = _native.cpu, _native.cuda, torch.cuda.is_available()
    yield Finding("CPU kernels", OK if cpu.loaded else PROBLEM, str(cpu.path) if cpu.loaded else cpu.reason)
    absent = PROBLEM if has_device else UNUSED
    yield Finding("CUDA kernels", OK if cuda.loaded else absent, str(cuda.path) if cuda.loaded else cuda.reason)
    yield Finding(
        "CUDA device", OK if has_device else UNUSED, torch.cuda.get_device_name() if has_device else "none that torch can use"
    )


def _settings() -> Iterator[Finding]:
    for text in without_effect(settings()):
        yield Finding(text.split()[0].split("=")[0], UNUSED, text)
    for name, hint in unknown_variables().items():
        yield Finding(name, PROBLEM, f"there is no such setting: {hint}")
    for setting in fields(settings()):
        variable = setting.metadata["variable"]
        if variable in os.environ:
            yield Finding(variable, OK, f"{os.environ[variable]} (accepts {setting.metadata['accepts']})")


def _framework(name: str, backend: str) -> Iterator[Finding]:
    if importlib.util.find_spec(name) is None:
        yield Finding(name, UNUSED, "not installed")
        return
    version = importlib.metadata.version(name)
    if backend not in settings().backends:
        yield Finding(name, UNUSED, f"{version}, not named in GNNFAST_BACKENDS")
        return
    try:
        importlib.import_module(name + ".nn" if backend == "pyg" else name)
    except Exception as error:
        yield Finding(name, PROBLEM, f"{version} cannot be imported: {type(error).__name__}: {error}")
        return
    patches = gnnfast.report().patches.get(backend, {})
    alone = [f"{what} {state}" for what, state in patches.items() if state.startswith("left alone")]
    if alone:
        yield Finding(name, PROBLEM, f"{version}; {'; '.join(alone)}")
    elif patches:
        yield Finding(name, OK, f"{version}; patched: {', '.join(patches)}")
    else:
        yield Finding(name, UNUSED, f"{version}; not patched: gnnfast is off")
    if backend == "dgl":
        from gnnfast.dgl import bridge
        from gnnfast.dgl.startup import _gnnfast_dgl_shim

        absent = bridge.absent()
        yield Finding("DGL's graphs on a GPU", UNUSED if absent else OK, absent or "their structure stays in DGL on the host")
        reason = _gnnfast_dgl_shim.installed_reason()
        if reason:
            yield Finding("dgl.graphbolt", UNUSED, f"replaced by a stub: {reason}")
