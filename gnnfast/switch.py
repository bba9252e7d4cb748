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
from gnnfast.patching import Patches

# The modules after whose import each adapter acts. Adapters themselves are imported only then.
MODULES = {
    "pyg": (
        "torch_geometric.nn.conv.message_passing",
        *(
            f"torch_geometric.nn.conv.{name}"
            for name in (
                "appnp",
                "arma_conv",
                "gcn2_conv",
                "gcn_conv",
                "gin_conv",
                "graph_conv",
                "lg_conv",
                "mixhop_conv",
                "sage_conv",
                "sg_conv",
                "ssg_conv",
                "tag_conv",
            )
        ),
        "torch_geometric.nn.dense.linear",
        "torch_geometric.utils._spmm",
    ),
    "dgl": ("dgl",),
}

_lock = threading.RLock()
_patches: dict[str, Patches] = {}
_enabled = False
_watching = False


def enable() -> None:
    """Patches PyG and DGL (those that ``GNNFAST_BACKENDS`` names), whichever is imported already or will be. Importing gnnfast does
    this unless ``GNNFAST=0``. Does nothing if gnnfast is on."""
    global _enabled, _watching
    with _lock:
        if _enabled:
            return
        _enabled = True
        if "dgl" in settings().backends:
            _gnnfast_dgl_shim.install()
        if not _watching:
            _watching = True
            for backend, modules in MODULES.items():
                for name in modules:  # runs at once for a module that is there already
                    wrapt.register_post_import_hook(functools.partial(_install, backend), name)
        else:
            for backend, modules in MODULES.items():
                for name in modules:
                    if name in sys.modules:
                        _install(backend, sys.modules[name])


def disable() -> None:
    """Takes every change back: each patched attribute and each patched function's code is then the very object it was."""
    global _enabled
    with _lock:
        _enabled = False
        while _patches:
            backend, patches = _patches.popitem()
            patches.restore()
            reporting.unpatched(backend)


def is_enabled() -> bool:
    """Whether gnnfast is on."""
    return _enabled


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
