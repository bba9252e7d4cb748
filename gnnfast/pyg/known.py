"""Which functions are PyG's own.

A served call stands in for all functions of PyG that it skips, so each of them must be the known one, whoever replaced it and
where: in a subclass, in PyG's class, by name in a module, or by exchanging a code object. What was found is remembered by the
functions and their code objects (:func:`remembered`), which a call compares in about a microsecond.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import operator
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, MethodDescriptorType, SimpleNamespace
from typing import Any

import torch

from gnnfast.patching import is_dispatched

_MP, _BASE, _BASIC = "torch_geometric.nn.conv.message_passing", "torch_geometric.nn.aggr.base", "torch_geometric.nn.aggr.basic"
_UTILS = "torch_geometric.utils."
_MOST = 4096  # verdicts of a kind that are remembered

# Fingerprints of the source in the releases it was studied in (2.6.0 to 2.8.1), by module and name.
FUNCTIONS: dict[tuple[str, str], tuple[str, ...]] = {
    (_MP, "MessagePassing._check_input"): ("84c224520db0",),
    (_MP, "MessagePassing._set_size"): ("33db24af6ee2",),
    (_MP, "MessagePassing._index_select"): ("5eb45f0fb864",),
    (_MP, "MessagePassing._index_select_safe"): ("d3b5d03e73ce", "5484a68b5dff"),
    (_MP, "MessagePassing._lift"): ("fc3cd5d14279",),
    (_MP, "MessagePassing.aggregate"): ("26911c9b343c",),
    (_MP, "MessagePassing.update"): ("6c5be3c83c4d",),
    (_BASE, "Aggregation.__call__"): ("f1fdfa386632", "3e9d6b5c3747"),
    (_BASE, "Aggregation.reduce"): ("60b30b07bb48",),
    (_BASIC, "SumAggregation.forward"): ("ae5704af9d43",),
    (_BASIC, "MeanAggregation.forward"): ("ee7d05fb39ca",),
    (_BASIC, "MaxAggregation.forward"): ("d11a3668b201",),
    (_BASIC, "MinAggregation.forward"): ("34c43c7dad33",),
    (_UTILS + "_scatter", "scatter"): ("b1128e34b90a", "7626d94c6de9", "ede961baa469"),
    (_UTILS + "_scatter", "broadcast"): ("addf5e12696c",),
    (_UTILS + "_segment", "segment"): ("96f89d85ea8a",),
    (_UTILS + "sparse", "is_sparse"): ("613a5c6ed0c4",),
    (_UTILS + "sparse", "is_torch_sparse_tensor"): ("e47a6d6c2297", "03c7a9f8fa95"),
    ("torch_geometric._compile", "is_compiling"): ("e2a32301b52f",),
    ("torch_geometric._onnx", "is_in_onnx_export"): ("b0beba298749",),
    (_UTILS + "loop", "add_remaining_self_loops"): ("53072a9e6bf4",),
    (_UTILS + "num_nodes", "maybe_num_nodes"): ("5c5a14a71ece",),
}

# What MessagePassing.propagate runs on a dense edge_index, besides message(), update() and the generated collect().
METHODS = ("_check_input", "_set_size", "_index_select", "_index_select_safe", "_lift", "aggregate")
# Functions that are looked up by name in a module: (module, name there, module and name of the known function).
_BY_NAME = (
    (_MP, "is_sparse", (_UTILS + "sparse", "is_sparse")),
    (_UTILS + "sparse", "is_torch_sparse_tensor", (_UTILS + "sparse", "is_torch_sparse_tensor")),
    (_BASE, "scatter", (_UTILS + "_scatter", "scatter")),
    (_BASE, "segment", (_UTILS + "_segment", "segment")),
    (_UTILS + "_scatter", "broadcast", (_UTILS + "_scatter", "broadcast")),
    (_UTILS + "_scatter", "is_compiling", ("torch_geometric._compile", "is_compiling")),
    (_UTILS + "_scatter", "is_in_onnx_export", ("torch_geometric._onnx", "is_in_onnx_export")),
)
_OF_NORM = (
    ("torch_geometric.nn.conv.gcn_conv", "add_remaining_self_loops", (_UTILS + "loop", "add_remaining_self_loops")),
    ("torch_geometric.nn.conv.gcn_conv", "maybe_num_nodes", (_UTILS + "num_nodes", "maybe_num_nodes")),
    ("torch_geometric.nn.conv.gcn_conv", "scatter", (_UTILS + "_scatter", "scatter")),
)
_OF_TENSOR = ("index_select", "new_zeros", "scatter_add_", "scatter_reduce_")


def remembered(kept: dict[Any, Any], key: Any, found: tuple[Any, ...], judge: Callable[[Any], Any]) -> Any:
    """The verdict on ``key``, as long as ``found``, the functions and code objects that it depends on, are the very same: proxies
    that wrap a function claim to equal it."""
    ids = tuple(map(id, found))
    entry = kept.get(key)
    if entry is None or entry[0] != ids:
        if len(kept) >= _MOST:
            kept.clear()
        entry = kept[key] = ids, judge(key), found  # which are held, so that no other gets the id of one
    return entry[1]


def getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """What gets the functions of those names, and their code objects."""
    return operator.attrgetter(*names, *(f"{name}.__code__" for name in names))


# ---- functions that are looked up by name ------------------------------------------------------------------------------------
class Named:
    """Functions that are looked up by name in modules of PyG, when they are there: ``(module, name there, known function)``."""

    def __init__(self, rows: tuple[tuple[str, str, tuple[str, str]], ...]) -> None:
        self._rows = rows
        names: dict[str, list[str]] = {}
        for module, name, _ in rows:
            names.setdefault(module, []).append(name)
        # Each name twice, as of one name alone an itemgetter makes no tuple.
        self._modules = [(operator.itemgetter(*found, *found), vars(sys.modules[module])) for module, found in names.items()]
        functions = SimpleNamespace(**{f"f{i}": vars(sys.modules[module])[name] for i, (module, name, _) in enumerate(rows)})
        self._functions, self._codes = functions, operator.attrgetter(*(f"f{i}.__code__" for i in range(len(rows))))

    def find(self) -> tuple[Any, ...]:
        """What is found now, to be compared."""
        found = self._codes(self._functions)  # of those that were there at first: others are not the same anyway
        for get, module in self._modules:
            found += get(module)
        return found

    def replaced(self) -> str:
        """The first that is not the known one; empty if there is none."""
        for where, name, function in self._rows:
            if not is_known(vars(sys.modules[where]).get(name), *function):
                return f"{where}.{name}"
        return ""


@functools.cache
def by_propagate() -> Named:
    """Functions that message passing calls by name."""
    return Named(_BY_NAME)


@functools.cache
def _by_norm() -> Named:
    return Named(_OF_NORM)


_norm: dict[Any, Any] = {}


def replaced_in_norm() -> str:
    """A function that ``gcn_norm`` calls by name and that is not PyG's own; empty if there is none."""
    named = _by_norm()
    return remembered(_norm, None, named.find(), lambda _: named.replaced())


_of_torch = operator.attrgetter(*(f"Tensor.{name}" for name in _OF_TENSOR), "nn.Module.__call__")


def methods_of_torch() -> tuple[Any, ...]:
    """The methods of torch that message passing calls, to be compared."""
    return _of_torch(torch)


def replaced_in_torch() -> str:
    """The first of them that is not torch's own; empty if there is none."""
    for name in _OF_TENSOR:
        if type(getattr(torch.Tensor, name)) is not MethodDescriptorType:
            return f"torch.Tensor.{name}"
    return "" if _is_as_written(torch.nn.Module.__call__, "torch.nn.modules.module") else "torch.nn.Module.__call__"


# ---- aggregations ------------------------------------------------------------------------------------------------------------
_AGGREGATION = ("__call__", "forward", "reduce")
of_aggregation = getter(_AGGREGATION)


def replaced_in_aggregation(kind: type) -> str:
    """A method of one of PyG's basic aggregations that is not its own; empty if there is none."""
    for name in _AGGREGATION:
        where, cls = (_BASIC, kind.__name__) if name == "forward" else (_BASE, "Aggregation")
        if not is_known(inspect.getattr_static(kind, name), where, f"{cls}.{name}"):
            return f"{kind.__name__}.{name}"
    return ""


# ---- linear layers ------------------------------------------------------------------------------------------------------------
_linears: dict[Any, Any] = {}


def is_linear(forward: Any, module: str) -> bool:
    """Whether the ``forward`` of a linear layer is that of its module."""
    if type(forward) is not FunctionType:
        return False
    return remembered(_linears, forward, (forward.__code__,), lambda f: is_dispatched(f) or _is_as_written(f, module))


# ---- functions that PyG generates ----------------------------------------------------------------------------------------------
_generated: weakref.WeakKeyDictionary[FunctionType, CodeType] = weakref.WeakKeyDictionary()


def add_generated(function: Any) -> None:
    """Takes a function for known that PyG has just generated from a known template: its file may not be there for long."""
    if not is_generated(function) and _is_as_written(function, getattr(function, "__module__", "")):
        _generated[function] = function.__code__


def is_generated(function: Any) -> bool:
    """Whether a function is one that PyG generated, unchanged."""
    return type(function) is FunctionType and _generated.get(function) is function.__code__


# ---- one function ------------------------------------------------------------------------------------------------------------
def is_known_method(cls: type, name: str) -> bool:
    """Whether a class has a method of message passing from PyG."""
    return is_known(inspect.getattr_static(cls, name, None), _MP, f"MessagePassing.{name}")


def is_known(function: Any, module: str, name: str) -> bool:
    """Whether a function is the one of that name in :data:`FUNCTIONS`, as PyG's source has it."""
    wrapper = getattr(function, "__wrapped__", None)
    if wrapper is not None:  # by a decorator of PyG
        if not _is_as_written(function, "torch_geometric.experimental"):
            return False
        function = wrapper
    if not _is_as_written(function, module):
        return False
    return fingerprint_of(function.__code__) in FUNCTIONS.get((module, name), ())


def _is_as_written(function: Any, module: str) -> bool:
    """Whether a function belongs to a module and has the code that its file compiles to."""
    if type(function) is not FunctionType or function.__globals__ is not getattr(sys.modules.get(module), "__dict__", None):
        return False
    return function.__code__ in codes_of(function.__globals__["__file__"])


@functools.lru_cache(maxsize=64)
def codes_of(path: str) -> frozenset[CodeType]:
    """The code objects of all functions that a file defines."""
    found: set[CodeType] = set()

    def walk(code: CodeType) -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType) and inner not in found:
                found.add(inner)
                walk(inner)

    with contextlib.suppress(OSError, SyntaxError):  # nothing is known then
        walk(compile(Path(path).read_text(), path, "exec", dont_inherit=True))
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def fingerprint_of(code: CodeType) -> str:
    """A short hash of the source lines of a function, without indentation and blank lines."""
    lines = Path(code.co_filename).read_text().splitlines(keepends=True)[code.co_firstlineno - 1 :]
    stripped = (line.strip() for line in inspect.getblock(lines))
    return hashlib.sha256("\n".join(line for line in stripped if line).encode()).hexdigest()[:12]
