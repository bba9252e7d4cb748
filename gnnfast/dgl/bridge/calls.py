"""Calls of DGL's library about what is on a GPU: computed on the host, answers moved to the device. Imported once DGL is.

DGL hands its library arrays that it makes of tensors. Those of tensors on a GPU are made of copies on the host and carry a tag that
says where they belong, as do indices and all other objects that come of a call with such an argument; so tags follow the data
through any function of the library, without a list of them. What is called so is in ``gnnfast.report()``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from dgl import backend, ndarray
from dgl._ffi.function import Function
from dgl._ffi.object import ObjectBase
from dgl._ffi.runtime_ctypes import DGLContext
from dgl.backend import pytorch
from dgl.container import List, Value
from dgl.heterograph_index import HeteroGraphIndex
from dgl.utils.filter import Filter
from torch import Tensor

from gnnfast.dgl.bridge.index import GPU, TAG, CudaIndex, device_of, on_device
from gnnfast.patching import Patches
from gnnfast.reporting import ran

HOST = ndarray.cpu(0)
_SOURCE, _WRITES = "_gnnfast_source", "_gnnfast_writes"
# Functions that write into arrays which DGL does not declare to be for writing.
WRITERS = ("_CAPI_FarthestPointSampler",)
# Sizes and types of graphs, which belong on the host.
_FACTS = frozenset(
    f"_CAPI_DGLHetero{name}"
    for name in (
        "NumVertices",
        "NumEdges",
        "DataType",
        "GetMetaGraph",
        "GetAllowedFormats",
        "GetCreatedFormats",
        "IsMetaGraphUniBipartite",
        "IsPinned",
    )
)
# New indices of the same arrays, which cost nothing worth reporting.
_VIEWS = frozenset(f"_CAPI_DGLHetero{name}" for name in ("GetRelationGraph", "Reverse", "CopyTo", "GetFormatGraph"))
_tensor = sys.modules["dgl.backend.pytorch.tensor"]  # the package has a function of that name


class DeviceArray(ndarray.NDArray):  # type: ignore[misc]
    """An array on the host that DGL takes for one on a device."""

    @property
    def ctx(self) -> Any:
        return DGLContext(GPU, vars(self)[TAG].index or 0)


class Entry:
    """The functions through which DGL's library gets arrays: replaced from the start."""

    def __init__(self, activate: Callable[[], None]) -> None:
        self.active = False
        self.activate = activate

    def replacements(self) -> Iterable[tuple[Any, str, Any]]:
        to_array, for_write, new = _tensor.zerocopy_to_dgl_ndarray, _tensor.zerocopy_to_dgl_ndarray_for_write, ndarray.array

        @functools.wraps(to_array)
        def zerocopy_to_dgl_ndarray(data: Tensor) -> Any:
            if data.is_cpu:
                return to_array(data)
            self.activate()
            host = data.detach().cpu()
            array = moved(to_array(host), data.device)
            vars(array)[_SOURCE] = data, host
            return array

        @functools.wraps(for_write)
        def zerocopy_to_dgl_ndarray_for_write(data: Tensor) -> Any:
            array = for_write(data)  # its checks, and the function above
            if not data.is_cpu:
                vars(array)[_WRITES] = True
            return array

        @functools.wraps(new)
        def array(arr: Any, ctx: Any = HOST) -> Any:
            if ctx.device_type != GPU:
                return new(arr, ctx)
            self.activate()
            return moved(new(arr, HOST), device_of(ctx))

        for holder in (backend, pytorch, _tensor):
            yield holder, "zerocopy_to_dgl_ndarray", zerocopy_to_dgl_ndarray
            yield holder, "zerocopy_to_dgl_ndarray_for_write", zerocopy_to_dgl_ndarray_for_write
        yield ndarray, "array", array


def install(patches: Patches) -> None:
    """From the first graph on a GPU on."""
    from_array, library_call = _tensor.zerocopy_from_dgl_ndarray, Function.__call__

    @functools.wraps(from_array)
    def zerocopy_from_dgl_ndarray(data: Any) -> Tensor:
        device = vars(data).get(TAG)
        found = from_array(data)
        return found if device is None else found.to(device)

    # Rows of pinned tensors, which the library reads and writes on a GPU alone.
    def select(table: Any, ids: Any) -> Any:
        return backend.zerocopy_to_dgl_ndarray(from_array(table).index_select(0, from_array(ids)))

    def scatter(table: Any, ids: Any, values: Any) -> None:
        from_array(table).index_copy_(0, from_array(ids).long(), from_array(values))

    rows: dict[str, Callable[..., Any]] = {"_CAPI_DGLIndexSelectCPUFromGPU": select, "_CAPI_DGLIndexScatterGPUToCPU": scatter}

    def call(self: Any, *args: Any) -> Any:
        own = vars(self)
        name, device = own.get("__name__", ""), own.get(TAG)
        if device is None:
            # Containers' items keep their own tags.
            if name in _FACTS or not name.startswith("_CAPI_"):
                return library_call(self, *args)
            device = _find_device(args)
            if device is None:
                return library_call(self, *args)
            if name not in _VIEWS:
                ran(f"dgl {name.removeprefix('_CAPI_')}", "on the host", "this DGL has no CUDA")
        served = rows.get(name)
        if served is None:
            result = library_call(self, *(HOST if isinstance(a, DGLContext) and a.device_type == GPU else a for a in args))
        else:
            result = served(*args)
        _write_back(args, name in WRITERS)
        return moved(result, device)

    for holder in (backend, pytorch, _tensor):
        patches.set_attribute(holder, "zerocopy_from_dgl_ndarray", zerocopy_from_dgl_ndarray)
    # The class of all functions of the library, those of modules that are imported later too.
    patches.set_attribute(Function, "__call__", call)


def filters() -> list[tuple[type, str, Callable[..., Any]]]:
    """What is replaced of ``Filter``, from the start: it may be the first of all on a GPU."""
    return [(Filter, name, function) for name, function in vars(_Filter).items() if callable(function)]


class _Filter:
    """What replaces the methods of DGL's ``Filter``, which exists on a GPU alone."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids

    def find_included_indices(self, test: Tensor) -> Tensor:
        return torch.isin(test, self._ids).nonzero().view(-1).to(test.dtype)

    def find_excluded_indices(self, test: Tensor) -> Tensor:
        return torch.isin(test, self._ids, invert=True).nonzero().view(-1).to(test.dtype)


def _find_device(value: Any) -> torch.device | None:
    """Where an argument, or one inside it, belongs; ``None`` if on the host."""
    if isinstance(value, (ndarray.NDArray, ObjectBase)):
        return vars(value).get(TAG)
    if isinstance(value, (list, tuple)):
        return next((device for device in map(_find_device, value) if device is not None), None)
    if isinstance(value, dict):
        return _find_device(list(value.values()))
    if isinstance(value, DGLContext) and value.device_type == GPU:
        return device_of(value)
    return None


def _write_back(value: Any, everything: bool) -> None:
    """Moves what was written into arrays to where they belong."""
    if isinstance(value, ndarray.NDArray):
        own = vars(value)
        if _SOURCE in own and (everything or own.get(_WRITES)):
            target, host = own[_SOURCE]
            target.copy_(host)
    elif isinstance(value, (list, tuple)):
        for v in value:
            _write_back(v, everything)


def moved(result: Any, device: torch.device) -> Any:
    """What the library returned, as one of the device."""
    if isinstance(result, CudaIndex):
        return result
    if isinstance(result, HeteroGraphIndex):
        return on_device(result, device)
    if isinstance(result, Value):
        return moved(result.data, device)
    if isinstance(result, List):
        return [moved(result[i], device) for i in range(len(result))]
    if isinstance(result, (ndarray.NDArray, ObjectBase, Function)):
        vars(result)[TAG] = device
        if type(result) is ndarray.NDArray:
            result.__class__ = DeviceArray
    return result
