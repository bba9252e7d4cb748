"""Makes DGL importable where it ships no GraphBolt library for the installed torch (DGL 2.x from PyPI on torch above 2.2).

DGL imports ``dgl.graphbolt`` for a few classes that only graphbolt's own data loaders need. A stub takes its place; whatever is
asked of it raises an ImportError that says why; so does ``import dgl.sparse``. Imports neither torch nor DGL.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types

_NAME = "dgl.graphbolt"


class GraphBoltUnavailable(ImportError):
    """Something of ``dgl.graphbolt`` was asked for, which is a stub."""


class SparseUnavailable(ImportError):
    """``dgl.sparse``, or what is made of it (``g.adj()``), was asked for; DGL ships no library of it for the installed torch."""


class _Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        raise self.__spec__.loader.error(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stub under GraphBolt's name."""

    gnnfast_shim = True  # by which another copy of this module knows it

    def __init__(self, reason):
        self.reason = reason

    def error(self, name):
        return GraphBoltUnavailable(
            f"{_NAME}.{name} is not available: {self.reason}. gnnfast put a stub in its place so that the rest of DGL works on "
            "this torch; use dgl.dataloading, or a pair of torch and DGL for which DGL ships GraphBolt"
        )

    def find_spec(self, name, path=None, target=None):
        if name == _NAME:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name.startswith(_NAME + "."):
            raise self.error(name[len(_NAME) + 1 :])
        if name == "dgl.sparse":
            reason = _missing("Sparse", "dgl_sparse", "dgl_sparse_pytorch")
            if reason:
                raise SparseUnavailable(
                    f"dgl.sparse, which g.adj() needs too, is not available: {reason}. Use g.adj_tensors(), g.adj_external() or "
                    "torch.sparse, or a pair of torch and DGL for which DGL ships it"
                )
        return None

    def create_module(self, spec):
        module = _Stub(spec.name)
        module.__path__ = []  # a package, so that `import dgl.graphbolt.x` reaches the finder
        return module

    def exec_module(self, module):
        finder = self

        class FusedCSCSamplingGraph:
            """DGL asks whether objects are of this class; none is."""

            def __new__(cls, *args, **kwargs):
                raise finder.error("FusedCSCSamplingGraph")

        module.FusedCSCSamplingGraph = FusedCSCSamplingGraph


def reason_needed():
    """Why GraphBolt cannot be loaded, or None if it can, if this DGL has none, or if there is no DGL."""
    spec = importlib.util.find_spec("dgl")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = os.path.join(next(iter(spec.submodule_search_locations)), "graphbolt")
    if not os.path.isdir(folder):
        return None
    missing = _missing("GraphBolt", "graphbolt", "graphbolt_pytorch")
    if missing:
        return missing
    with open(os.path.join(folder, "base.py"), encoding="utf-8") as file:
        wants_torchdata = "torchdata" in file.read()
    try:
        if wants_torchdata and importlib.util.find_spec("torchdata.datapipes") is None:
            raise ImportError
    except ImportError:
        return "torchdata.datapipes, which it needs, is not installed (torchdata 0.10 removed it)"
    return None


def _missing(title, folder, library):
    """Why a library of DGL's for the installed torch cannot be loaded, or None if it is there, or nobody knows."""
    try:
        torch = importlib.metadata.version("torch").split("+")[0]
        dgl = importlib.metadata.version("dgl")
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("dgl")
    file = {"darwin": f"lib{library}_{torch}.dylib", "win32": f"{library}_{torch}.dll"}.get(
        sys.platform, f"lib{library}_{torch}.so"
    )
    if os.path.exists(os.path.join(next(iter(spec.submodule_search_locations)), folder, file)):
        return None
    return f"DGL {dgl} ships no {title} library for torch {torch}"


def installed_reason():
    """Why the stub is in place, or None if it is not."""
    return next((finder.reason for finder in sys.meta_path if getattr(finder, "gnnfast_shim", False)), None)


def install():
    """Installs the finder where it is needed, and has worker processes do the same. Returns the reason, or None."""
    if installed_reason() or "dgl" in sys.modules:
        return installed_reason()
    reason = reason_needed()
    if importlib.util.find_spec("dgl") is not None:
        os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL asks, and writes a file into the home folder
    if reason is None:
        return None
    sys.meta_path.insert(0, Finder(reason))
    os.environ["GNNFAST_DGL_SHIM"] = "1"
    return reason


if __name__ == "_gnnfast_dgl_shim":  # imported by gnnfast.pth in a worker process
    install()
