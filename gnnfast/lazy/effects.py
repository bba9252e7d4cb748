"""What can be seen of a function's code of the traces that it leaves: what may run twice, or in parts, leaves none."""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

LIBRARIES = ("torch.", "torch_geometric.", "dgl.")  # whose modules leave nothing behind, but for those that are known to
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL")
# Beside what ends in "_": methods that change what they are called on, or what a backward pass will do.
_METHODS = {"append", "extend", "insert", "pop", "popleft", "appendleft", "update", "setdefault", "register_hook", "retain_grad"}
# By which numbers come from generators that are not torch's own, arguments are written into, or a library function runs the user's
# again; iterators go on.
_NAMES = {"random", "generator", "Generator", "default_rng", "next", "setattr", "out", "inplace", "checkpoint", "apply"}


@functools.lru_cache(maxsize=1024)
def stores(code: CodeType) -> bool:
    """Whether a function assigns to what outlives it."""
    return any(
        i.opname in _STORES or (i.opname == "STORE_DEREF" and i.argval in code.co_freevars) for i in dis.get_instructions(code)
    ) or any(map(stores, _inner(code)))


@functools.lru_cache(maxsize=1024)
def leaves_something(code: CodeType) -> bool:
    """Whether a function writes to what outlives it, or may."""
    return _writes(code) or stores(code) or any(map(leaves_something, _inner(code)))


@functools.lru_cache(maxsize=1024)
def _goes_on(code: CodeType) -> bool:
    """Whether a second run of a function may find something else than the first did: what the first has written into, or has
    assigned to an attribute that it reads."""
    read = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_METHOD")}
    for i in dis.get_instructions(code):
        if i.opname in _STORES and (i.opname != "STORE_ATTR" or i.argval in read):
            return True
        if i.opname == "STORE_DEREF" and i.argval in code.co_freevars:
            return True
    words = {*code.co_names, *(word for const in code.co_consts if type(const) is tuple for word in const if type(word) is str)}
    return _writes(code) or not words.isdisjoint(_NAMES) or any(map(_goes_on, _inner(code)))


def _writes(code: CodeType) -> bool:
    for i in dis.get_instructions(code):
        if i.opname == "STORE_SUBSCR" or i.opname.startswith("INPLACE_") or (i.opname == "BINARY_OP" and i.argrepr.endswith("=")):
            return True
        called = i.argval if i.opname in ("LOAD_METHOD", "LOAD_ATTR") else ""
        if called in _METHODS or (called.endswith("_") and not called.startswith("_")):
            return True
    return False


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (const for const in code.co_consts if isinstance(const, CodeType))


def helpers(cls: type, code: CodeType) -> Iterator[CodeType]:
    """The code of methods of a class that a function names."""
    for name in code.co_names:
        method = getattr(cls, name, None)
        if isinstance(method, FunctionType):
            yield method.__code__


def _cells(function: FunctionType) -> Iterator[Any]:
    """What a function has from around it."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty so far
            yield cell.cell_contents


def is_of_library(thing: Any) -> bool:
    """Whether a class or function is torch's, PyG's or DGL's."""
    return (thing.__module__ or "").startswith(LIBRARIES)


def modules_of(*modules: Any) -> list[Any]:
    """Modules and those within them, whether or not they have a hash, by which torch tells them apart."""
    found: dict[int, Any] = {}
    left = [*modules]
    while left:
        m = left.pop()
        if m is not None and id(m) not in found:
            found[id(m)] = m
            left += m._modules.values()
    return list(found.values())


def _named(function: FunctionType, module: Any) -> Iterator[Any]:
    """What a function, perhaps a method of a module, has names for."""
    names, cls = function.__code__.co_names, type(module)
    yield from (getattr(cls, name, None) for name in names)
    yield from map(function.__globals__.get, names)
    yield from _cells(function)


def modules_run(function: Any, module: nn.Module | None) -> list[Any] | None:
    """The modules that a function may run, perhaps a method of one; ``None`` if something can be seen by which it, or what
    it calls, may make something else of the same arguments when it runs again. What torch, PyG and DGL have written may not."""
    left, seen, named_modules = [function], set(), [module]
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType):
            return None
        if function in seen or is_of_library(function):
            continue
        seen.add(function)
        if _goes_on(function.__code__):
            return None
        named = [*_named(function, module)]
        left += [f for f in named if isinstance(f, FunctionType)]
        named_modules += [m for m in named if isinstance(m, nn.Module)]
    modules = modules_of(*named_modules)
    return modules if all(_forward_may(m) for m in modules if m is not module) else None


def _forward_may(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return False
    forward = getattr(type(module), "forward", None)
    return is_of_library(type(module)) or (isinstance(forward, FunctionType) and not _goes_on(forward.__code__))
