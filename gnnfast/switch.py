"""On and off: patches the frameworks that are imported, now or later, and undoes it."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from types import ModuleType

import wrapt

from gnnfast import _native, reporting
from gnnfast.config import settings
from gnnfast.dgl.startup import _gnnfast_dgl_shim
from gnnfast.graph.ids import check_when_synchronising
from gnnfast.patching import Patches

BACKENDS = ("pyg", "dgl")

_lock = threading.RLock()
_patches: dict[str, Patches] = {}
_enabled = False
_watching = False


def enable() -> None:
    """Patches PyG and DGL (those that ``GNNFAST_BACKENDS`` names), whichever is imported already or will be. Importing gnnfast does
    this unless ``GNNFAST=0``. Does nothing if gnnfast is on.

    Example:
        >>> gnnfast.enable()
        >>> gnnfast.is_enabled()
        True
    """
    global _enabled, _watching
    with _lock:
        if _enabled:
            return
        _enabled = True
        try:
            if not _watching:
                for backend, name in _modules():  # runs at once for a module that is there already
                    wrapt.register_post_import_hook(functools.partial(_install, backend), name)
                _watching = True
            else:
                for backend, name in _modules():
                    if name in sys.modules:
                        _install(backend, sys.modules[name])
            if _native.cuda.loaded:
                check_when_synchronising(_patches.setdefault("torch", Patches()))
        except BaseException:  # an interrupt: on or off, but not between
            disable()
            raise


def make_importable() -> None:
    """Lets DGL be imported at all on today's torch, whether gnnfast is on or off: who compares needs both."""
    if "dgl" in settings().backends:
        _gnnfast_dgl_shim.install()


def disable() -> None:
    """Takes every change back: each patched attribute and each patched function's code is then the very object it was.

    Example:
        >>> gnnfast.disable()  # the framework alone from here on
        >>> gnnfast.is_enabled()
        False
        >>> gnnfast.enable()
    """
    global _enabled
    with _lock:
        _enabled = False
        for backend in list(_patches):  # forgotten once it is done: an interrupt may come before
            _patches[backend].restore()
            reporting.unpatched(backend)
            del _patches[backend]


def is_enabled() -> bool:
    """Whether gnnfast is on.

    Example:
        >>> gnnfast.is_enabled()
        True
    """
    return _enabled


def _why_off() -> str:
    """What :func:`gnnfast.report` says where gnnfast does nothing; empty while it is on."""
    if not _native.cpu.loaded:
        return f"gnnfast has no kernels here: {_native.cpu.reason}"
    if _enabled:
        return ""
    return f"gnnfast is off: {'gnnfast.disable() was called' if settings().enabled else 'GNNFAST=0'}"


reporting.has_switch(_why_off)


def _modules() -> list[tuple[str, str]]:
    """The modules after whose import each adapter acts: those of its patches."""
    return [(backend, name) for backend in BACKENDS for name in importlib.import_module(f"gnnfast.{backend}.install").MODULES]


def _install(backend: str, module: ModuleType) -> None:
    with _lock:
        if not _enabled or backend not in settings().backends:
            return
        if not _native.cpu.loaded:
            reporting.patched(backend, module.__name__, f"left alone: {_native.cpu.reason}")
            return
        try:
            adapter = importlib.import_module(f"gnnfast.{backend}.install")
            adapter.install(module, _patches.setdefault(backend, Patches()))
        except Exception as error:  # whatever it is, the user's import of the framework must not fail for it
            reporting.patched(backend, module.__name__, f"left alone: {type(error).__name__}: {error}")
