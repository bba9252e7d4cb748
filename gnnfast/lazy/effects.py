"""What can be seen of a function's code of the traces that it leaves: what may run twice, or in parts, leaves none."""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import sys
from collections.abc import Iterator
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

# Whose functions and modules leave nothing behind, but for those that are known to.
LIBRARIES = ("torch.", "torch_geometric.", "dgl.", "torch_scatter.", "torch_sparse.", "torch_cluster.", "einops.", "numpy.")
_LOADS = ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME")
_CALLS = ("PRECALL", "CALL", "CALL_FUNCTION", "CALL_METHOD")
_INPLACE = {name for name, f in vars(functional).items() if isinstance(f, FunctionType) and "inplace" in f.__code__.co_varnames}
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL")
# Beside what ends in "_": methods that change what they are called on, or what a backward pass will do.
_METHODS = {"append", "extend", "insert", "pop", "popleft", "appendleft", "update", "setdefault", "register_hook", "retain_grad"}
# By which numbers come from generators that are not torch's own; iterators go on.
_GENERATORS = {"random", "generator", "Generator", "default_rng", "next"}
# By which, besides, arguments are written into, or a library function runs the user's again.
_NAMES = {*_GENERATORS, "setattr", "out", "inplace", "checkpoint", "apply"}
_NAMES |= {"print", "write", "writelines", "stdout", "stderr", "logging", "warnings"}  # which is seen
_NAMES |= {"type", "to_dlpack", "from_dlpack", "__dlpack__"}  # of a tensor, and its memory, that is not the user's
# What changes containers that have a name; of others, such as are new in each run, these may be methods of tensors.
_OF_CONTAINERS = {"add", "remove", "discard", "clear", "reverse", "sort", "popitem", "extendleft", "rotate"}
# Types of which nothing that runs can be had, for speed; and what of an object's class does not run once it exists.
_INERT = {type(None), int, float, str, bool, complex, bytes, tuple, frozenset, Tensor, nn.Parameter}
_INERT |= {torch.dtype, torch.device, torch.Size}
_CONTAINERS = {list, dict, set, bytearray, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter}
_Cached = type(functools.cache(len))
_CREATION = {"__init__", "__new__", "__module__", "__doc__", "__dict__", "__weakref__", "__init_subclass__", "__del__"}


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
def _goes_on(code: CodeType, restored: str = "") -> bool:
    """Whether a second run of a function may find something else than the first did: what the first has written into, but for what
    is ``restored``, or has assigned to an attribute that it reads."""
    read = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_METHOD")}
    instructions = [*dis.get_instructions(code)]
    for n, i in enumerate(instructions):
        if i.opname in _STORES and (i.opname != "STORE_ATTR" or i.argval in read):
            return True
        if i.opname == "LOAD_CONST" and i.argval is True and _may_write(instructions, n + 1):
            return True
        if i.opname == "STORE_DEREF" and i.argval in code.co_freevars:
            return True
    return _writes(code, restored) or not _words(code).isdisjoint(_NAMES) or any(map(_goes_on, _inner(code)))


def _words(code: CodeType) -> set[str]:
    """Names of what a function looks up, and of arguments that it passes."""
    return {*code.co_names, *(word for const in code.co_consts if type(const) is tuple for word in const if type(word) is str)}


@functools.lru_cache(maxsize=1024)
def draws(code: CodeType) -> bool:
    """Whether a function may draw random numbers that are not of torch's own generators, which can be put back."""
    return not _words(code).isdisjoint(_GENERATORS) or any(map(draws, _inner(code)))


def _may_write(instructions: list[dis.Instruction], at: int) -> bool:
    """Whether a True before an instruction is the last argument by position, and so perhaps ``inplace``, of a function that has
    such, or of one that is not known by its name."""
    if at >= len(instructions) or instructions[at].opname not in _CALLS:
        return False
    depth = instructions[at].arg or 0
    for i in reversed(instructions[:at]):
        if depth <= 0 and i.opname != "PUSH_NULL":
            return i.opname not in _LOADS or i.argval in _INPLACE
        depth -= dis.stack_effect(i.opcode, i.arg, jump=False)
    return True


def _writes(code: CodeType, restored: str = "") -> bool:
    instructions = [*dis.get_instructions(code)]
    for n, i in enumerate(instructions):
        if i.opname == "STORE_SUBSCR" and not (restored and _is_item_of(restored, code, instructions[:n])):
            return True
        if i.opname.startswith("INPLACE_") or (i.opname == "BINARY_OP" and i.argrepr.endswith("=")):
            return True
        called = i.argval if i.opname in ("LOAD_METHOD", "LOAD_ATTR") else ""
        if called in _METHODS or (called.endswith("_") and not called.startswith("_")):
            return True
    return False


def _is_item_of(name: str, code: CodeType, before: list[dis.Instruction]) -> bool:
    """Whether what is assigned to after some instructions is an item, of a constant key, of an attribute of a function's last
    parameter."""
    parameter = code.co_varnames[code.co_argcount - 1 : code.co_argcount]
    if len(before) < 3 or any(i.opname == "STORE_FAST" and i.argval in parameter for i in before):
        return False
    of, attribute, key = before[-3:]
    if any(i.is_jump_target for i in before[-3:]):  # of one thing or another
        return False
    loaded = of.argval[-1:] if type(of.argval) is tuple else (of.argval,)  # several at once, in newer Pythons
    return of.opname.startswith("LOAD_FAST") and loaded == parameter and attribute.argval == name and key.opname == "LOAD_CONST"


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (const for const in code.co_consts if isinstance(const, CodeType))


def _cells(function: FunctionType) -> Iterator[Any]:
    """What a function has from around it, and of what it was made."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty so far
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def is_of_library(thing: Any) -> bool:
    """Whether a class or function is torch's, PyG's or DGL's, or of another library that is known."""
    # functools.wraps() gives a function the __module__ of another.
    return _is_library(thing.__globals__.get("__name__") if type(thing) is FunctionType else thing.__module__)


@functools.lru_cache(maxsize=4096)
def _is_library(module: str | None) -> bool:
    return f"{module}.".startswith(LIBRARIES)


def modules_of(*modules: Any) -> list[Any]:
    """Modules and those within them, whether or not they have a hash, by which torch tells them apart."""
    found: dict[int, Any] = {}
    left = [*modules]
    while left:
        m = left.pop()
        key = id(m)
        if m is not None and key not in found:
            found[key] = m
            left += m._modules.values()
    return list(found.values())


def modules_run(function: Any, module: nn.Module | None, may_keep: bool = True, restored: str = "") -> list[Any] | None:
    """The modules that a function may run, perhaps a method of one; ``None`` if something can be seen by which it, or what
    it calls, may make something else of the same arguments when it runs again, or, without ``may_keep``, leaves something with
    others. What torch, PyG and DGL have written may not. Items of the attribute ``restored`` of its last parameter are as before
    when it runs again."""
    reach = Reach(function, module)
    own = function.__code__ if restored and not function.__defaults__ else None  # the last parameter is what it is given
    for code in (*reach.codes, *reach.forwards):
        if reach.unseen or _goes_on(code, restored if code is own else "") or (not may_keep and stores(code)):
            return None
    if torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    others = [m for m in reach.modules if m is not module]
    return None if any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in others) else reach.modules


class Reach:
    """What a function, perhaps a method of an object, may run: the ``codes`` of whatever it has a name for, of whatever those have
    names for, and so on; its ``modules``, and the ``forwards``, all code that these may run; ``unseen`` is something among it that
    cannot be looked into."""

    def __init__(self, function: Any, owner: Any) -> None:
        self.codes: list[CodeType] = []
        self.forwards: list[CodeType] = []
        self.modules: list[Any] = []
        self.unseen = ""
        self._seen: dict[int, Any] = {}
        self._names: set[str] = set()
        self._left: list[tuple[Any, Any]] = []
        self._follow(function, owner, self.codes)
        self._follow_all(self.codes)
        for m in modules_of(owner) if isinstance(owner, nn.Module) else ():
            self._add_module(m)
        for m in self.modules:  # others may be found
            if m is not owner and not is_of_library(type(m)):
                for name in ("forward", *self._names):
                    self._add(getattr(type(m), name, None), m, ())
                self._follow_all(self.forwards)

    def _follow_all(self, codes: list[CodeType]) -> None:
        while self._left and not self.unseen:
            self._follow(*self._left.pop(), codes)

    def _follow(self, function: Any, owner: Any, codes: list[CodeType]) -> None:
        if type(function) is not FunctionType:
            self.unseen = getattr(function, "__name__", type(function).__name__)
        elif self._is_new(function) and not is_of_library(function):
            code, kind, own, known = function.__code__, type(owner), getattr(owner, "__dict__", {}), function.__globals__
            names = code.co_names
            codes.append(code)
            self._names.update(names)
            named = [thing for n in names for thing in (getattr(kind, n, None), own.get(n), known.get(n)) if thing is not None]
            for thing in (*named, *_cells(function)):
                self._add(thing, owner, names)

    def _add(self, thing: Any, owner: Any, names: tuple[str, ...]) -> None:
        """Follows a thing that a function has a name for, as a method of ``owner`` if it is one; ``names`` are all it has."""
        kind = type(thing)
        if kind in _INERT or thing is owner:
            return
        if kind is torch.Generator:
            self.unseen = "a Generator"
            return
        if kind in _CONTAINERS:
            if not _OF_CONTAINERS.isdisjoint(names):
                self.unseen = f"a {kind.__name__}"
            return
        if kind is FunctionType:
            self._left.append((thing, owner))
        elif isinstance(thing, nn.Module):
            for m in modules_of(thing):
                self._add_module(m)
        elif kind is MethodType:
            self._left.append((thing.__func__, thing.__self__))
        elif kind is property:
            self._left.append((thing.fget, owner))
        elif kind in (staticmethod, classmethod):
            self._add(thing.__func__, owner, names)
        elif isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self._add(part, owner, names)
        elif isinstance(thing, _Cached):
            self._add(thing.__wrapped__, owner, names)
        elif kind is BuiltinMethodType:
            if not isinstance(thing.__self__, (type, ModuleType, type(None))):
                self.unseen = thing.__name__
        elif kind is ModuleType:
            if not _is_known(thing.__name__) and self._is_new(thing):
                self._add_named(vars(thing), names, None, names)
        elif isinstance(thing, type):
            if not _is_known(thing.__module__) and self._is_new(thing):
                self._add_named(vars(thing), (*names, "__init__", "__new__"), thing, names)
        elif hasattr(kind, "__next__"):
            self.unseen = f"a {kind.__name__}"
        elif not is_of_library(kind) and kind.__module__ != "builtins" and self._is_new(thing):
            self._add_object(thing, names)

    def _add_object(self, thing: Any, names: tuple[str, ...]) -> None:
        for cls in type(thing).__mro__[:-1]:
            if _is_known(cls.__module__):
                if any(callable(vars(cls).get(name)) for name in names):
                    self.unseen = f"a {cls.__name__}"
            else:  # operators may run as well, as does a call
                runs = (n for n, f in vars(cls).items() if n[:2] == "__" and callable(f) and n not in _CREATION)
                self._add_named(vars(cls), (*names, *runs), thing, names)
        self._add_named(getattr(thing, "__dict__", {}), names, thing, names)

    def _add_named(self, values: Any, wanted: tuple[str, ...], owner: Any, names: tuple[str, ...]) -> None:
        for name in wanted:
            self._add(values.get(name), owner, names)

    def _add_module(self, module: Any) -> None:
        if self._is_new(module):
            self.modules.append(module)

    def _is_new(self, thing: Any) -> bool:
        count = len(self._seen)
        self._seen.setdefault(id(thing), thing)
        return len(self._seen) > count


def _is_known(module: str) -> bool:
    """Whether a Python module, by its name, is of torch, PyG, DGL, another library that is known, or Python's own."""
    return _is_library(module) or module.partition(".")[0] in sys.stdlib_module_names
