"""Graphs on a GPU for a DGL that was built without CUDA, which is the one on PyPI.

``g.to("cuda")`` then gives a graph whose structure stays in DGL on the host, while features live, and all message passing runs, on
the GPU. All of DGL asks one place for a graph's device, the context of its ``HeteroGraphIndex``; so the graph stays a plain
``DGLGraph``, and three things make it one of a GPU:

- :mod:`.index`: its index says that it is there, and answers what layers ask in every step from copies of the edges on the device;
- :mod:`.calls`: whatever else DGL's library is asked is computed on the host, and what it returns is moved to the device;
- :mod:`gnnfast.dgl.messages`: message passing without the library's kernels.

Until there is a graph on a GPU only the functions are replaced through which one can come into being, and what cannot work is given
a better error: graphs on the CPU pay one look at a tensor's device for each array. A DGL with CUDA of its own is used as it is.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from gnnfast import _native
from gnnfast.config import settings
from gnnfast.patching import Patches

_SPARSE = "dgl.backend.pytorch.sparse"
_HOLDERS = ("dgl.backend", "dgl.backend.pytorch")
# Functions of DGL's backend that have a counterpart in gnnfast.dgl.messages, and the modules of dgl.ops that hold them too.
MESSAGES = {
    "gspmm": ("dgl.ops.spmm", "gspmm_internal"),
    "gspmm_hetero": ("dgl.ops.spmm", "gspmm_internal_hetero"),
    "gsddmm": ("dgl.ops.sddmm", "gsddmm_internal"),
    "gsddmm_hetero": ("dgl.ops.sddmm", "gsddmm_internal_hetero"),
    "edge_softmax": ("dgl.ops.edge_softmax", "edge_softmax_internal"),
    "edge_softmax_hetero": ("dgl.ops.edge_softmax", "edge_softmax_hetero_internal"),
}
# The same for those that take no graph: which of their arguments says where they run.
ROWS = {"segment_reduce": 1, "segment_mm": 0, "gather_mm": 0, "scatter_add": 0}

_lock = threading.RLock()


def absent() -> str:
    """Why there is no bridge; empty if there is one. DGL is imported."""
    if not settings().dgl_bridge:
        return "off: GNNFAST_DGL_BRIDGE=0"
    if torch.version.cuda is None:
        return "this torch is a build without CUDA"
    names = sys.modules["dgl._ffi.function"].list_global_func_names()
    if not {"device_api.cuda", "device_api.gpu"}.isdisjoint(names):
        return "this DGL has CUDA of its own"
    return _native.cuda.reason


def install(patches: Patches) -> None:
    """Lets graphs come into being on a GPU. DGL is imported."""
    from gnnfast.dgl.bridge import calls, index, unavailable

    def activate() -> None:
        """Called when a graph, or what DGL's library is asked, is on a GPU for the first time."""
        if entry.active:
            return
        with _lock:
            if not entry.active:
                calls.install(patches)
                _install_messages(patches)
                entry.active = True

    entry = calls.Entry(activate)
    for holder, name, replacement in (*index.entries(activate), *entry.replacements(), *calls.filters(), *unavailable.entries()):
        patches.set_attribute(holder, name, replacement)
    if index.met:  # before gnnfast was switched off
        activate()


def restore(index: Any, device: str) -> Any:
    """An index as it was pickled. Not in :mod:`.index`, which cannot be imported before DGL and the bridge are there."""
    return index.copy_to(sys.modules["dgl.utils"].to_dgl_context(torch.device(device)))


def _install_messages(patches: Patches) -> None:
    from gnnfast.dgl import messages
    from gnnfast.dgl.bridge.index import CudaIndex

    def by_graph(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        own = getattr(messages, name)
        uncompiled = _disable_dynamo(own)

        @functools.wraps(original)
        def function(gidx: Any, *args: Any, **named: Any) -> Any:
            if type(gidx) is not CudaIndex:
                return original(gidx, *args, **named)
            return (uncompiled if torch.compiler.is_compiling() else own)(gidx, *args, **named)

        return function

    def by_rows(name: str, original: Callable[..., Any], at: int) -> Callable[..., Any]:
        own = getattr(messages, name)

        @functools.wraps(original)
        def function(*args: Any, **named: Any) -> Any:
            return (original if args[at].is_cpu else own)(*args, **named)

        return function

    places = [(name, (*((m, name) for m in (*_HOLDERS, _SPARSE)), held)) for name, held in MESSAGES.items()]
    places += [(name, tuple((m, name) for m in (*_HOLDERS, _SPARSE))) for name in ROWS]
    for name, held in places:
        original = vars(sys.modules[_SPARSE])[name]
        replacement = by_graph(name, original) if name in MESSAGES else by_rows(name, original, ROWS[name])
        for module, attribute in held:
            patches.set_attribute(sys.modules[module], attribute, replacement)

    ops_gspmm, backend_gspmm = sys.modules["dgl.ops.spmm"].gspmm, vars(sys.modules[_SPARSE])["gspmm"]

    @functools.wraps(ops_gspmm)
    def gspmm(g: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
        if reduce_op != "mean" or type(g._graph) is not CudaIndex or g._graph.number_of_etypes() != 1:
            return ops_gspmm(g, op, reduce_op, lhs_data, rhs_data)
        if op not in ("copy_lhs", "copy_rhs"):
            lhs_data, rhs_data = sys.modules["dgl.ops.spmm"].reshape_lhs_rhs(lhs_data, rhs_data)
        return backend_gspmm(g._graph, op, reduce_op, lhs_data, rhs_data)  # DGL makes a mean of a sum and a division

    for module in ("dgl.ops", "dgl.ops.spmm"):
        patches.set_attribute(sys.modules[module], "gspmm", gspmm)
