"""Reversible changes to other libraries. Knows no framework: what is patched, and with what, is data of the adapters.

Functions are patched by exchanging their code object in place, so that every module that imported them by name, every class and
every instance that holds them sees the change, and getting the very same code object back undoes it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

_MISSING = object()

# Before the first statement of a patched function, as Python runs and compilers trace it. TorchScript reads the source as it was.
_ASKED = """\
if {compiling}() is {when}:
    {hook} = {asked}({arguments})
    if {hook} is not NotImplemented:
        return {hook}
"""
_HOOK = "_gnnfast"
_FILE = "<gnnfast "  # what the file names of patched code begin with


class _LeftAlone(threading.local):
    now = False


_left_alone = _LeftAlone()


def left_alone(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Calls a function that nothing is to be gained of as a whole: of those it calls, what is patched as a ``part`` runs as it was,
    without being asked."""
    before, _left_alone.now = _left_alone.now, True
    try:
        return function(*arguments, **named)
    finally:
        _left_alone.now = before


class Unknown(Exception):
    """A function is not the one that is known, so it is left alone."""


class Patches:
    """A list of changes that can be undone, last one first. An interrupt may come between any two lines: how a change is undone is
    noted before it is made and forgotten after, and to undo it twice, or before it was made, does nothing."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._swapped: dict[FunctionType, CodeType] = {}

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """``setattr`` that :meth:`restore` takes back."""
        old = vars(owner).get(name, _MISSING)

        def undo() -> None:
            if old is not _MISSING:
                setattr(owner, name, old)
            elif name in vars(owner):
                delattr(owner, name)

        self._undo.append(undo)
        setattr(owner, name, value)

    def add_dispatch(
        self,
        function: FunctionType,
        source: str,
        dispatch: Callable[..., Any] | None,
        as_dict: bool = False,
        traced: Callable[..., Any] | None = None,
        replace: tuple[str, str, Callable[..., Any]] | None = None,
        part: bool = False,
    ) -> None:
        """Lets ``dispatch`` see every call of ``function`` first; ``NotImplemented`` from it runs the original body.

        Args:
            function: a plain function. Patching it again is a no-op.
            source: its source, or that of its module.
            dispatch: takes the parameters by position; with ``as_dict`` as ``(first, second, last, {name: value, ...})`` where
                the dictionary holds the parameters in between. If not given, only compilers and ``replace`` make a difference.
            traced: what ``torch.compile`` traces in place of ``dispatch``; if not given, the original body.
            replace: ``(text, arguments, callable)``: an expression that stands once in the body, and what computes it instead from
                these arguments, but for a compiler or TorchScript.
            part: ``dispatch`` is not asked within :func:`left_alone`.
        """
        if function in self._swapped and function.__code__ is not self._swapped[function]:
            return
        names = list(inspect.signature(function).parameters)
        if as_dict:
            middle = ", ".join(f"{name!r}: {name}" for name in names[2:-1])
            arguments = f"{names[0]}, {names[1]}, {names[-1]}, {{{middle}}}"
        else:
            arguments = ", ".join(names)
        import torch

        hooks: dict[str, Any] = {}

        def name_of(kind: str, value: Any) -> str:
            name = f"{_HOOK}_{kind}_{function.__qualname__.replace('.', '_')}"  # several functions of a module may be patched
            hooks[name] = value
            return name

        compiling = name_of("compiling", torch.compiler.is_compiling)
        unless = f"NotImplemented if {name_of('left', _left_alone)}.now else " if part else ""
        asked = [(False, unless, "dispatch", dispatch), (True, "", "traced", traced)]
        blocks = [
            _ASKED.format(compiling=compiling, when=when, hook=_HOOK, asked=f"{before}{name_of(kind, hook)}", arguments=arguments)
            for when, before, kind, hook in asked
            if hook is not None
        ]
        block, expression = "el".join(blocks), None
        if replace is not None:
            text, given, instead = replace
            expression = text, f"{text} if {compiling}() else {name_of('replaced', instead)}({given})"
        original, code = function.__code__, _inject(source, function, block, expression)

        def undo() -> None:
            if function.__code__ is code:
                function.__code__ = original
            if function.__code__ is original:  # else it is somebody else's by now
                for name in hooks:
                    function.__globals__.pop(name, None)
            self._swapped.pop(function, None)

        self._undo.append(undo)
        self._swapped[function] = original
        function.__globals__.update(hooks)
        function.__code__ = code

    def original(self, function: FunctionType) -> FunctionType:
        """The function with its original code, callable while the patch is in place."""
        code = self._swapped.get(function, function.__code__)
        copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
        return copy

    def restore(self) -> None:
        """Undoes everything; every attribute and every code object is then the one it was."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


def class_of(method: FunctionType) -> Any:
    """The class that a method was defined in, at the top level of a module."""
    return method.__globals__[method.__qualname__.split(".")[0]]


def code_of(function: FunctionType) -> CodeType:
    """The code of a function, without the dispatch that may have been added to it."""
    before = _injected.get(function)
    return before[0] if before is not None and before[1] is function.__code__ else function.__code__


def is_dispatched(function: Any) -> bool:
    """Whether the code of a function is one to which a dispatch has been added."""
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith(_FILE)


def find_function(source: str, name: str, line: int = 0) -> ast.FunctionDef:
    """The definition of a function at the top level of ``source``, within an ``if`` there or not, or of a method ``Class.method``:
    of several the one that begins at the ``line``, else the last."""
    body: list[ast.stmt] = ast.parse(source).body
    *classes, function = name.split(".")
    for cls in classes:
        body = [statement for n in body if isinstance(n, ast.ClassDef) and n.name == cls for statement in n.body]
    found = [n for n in _statements(body) if isinstance(n, ast.FunctionDef) and n.name == function]
    if not found:
        raise Unknown(f"{name} is not defined there")
    return next((n for n in found if _begin(n) == line), found[-1])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield from _statements([*statement.body, *statement.orelse]) if isinstance(statement, ast.If) else (statement,)


def _begin(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


@functools.lru_cache(maxsize=256)
def fingerprint(source: str, name: str, line: int = 0) -> str:
    """A short hash of a function's source lines, without indentation and blank lines; ``line`` as in :func:`find_function`."""
    node = find_function(source, name, line)
    lines = (text.strip() for text in source.splitlines()[node.lineno - 1 : node.end_lineno])
    return hashlib.sha256("\n".join(text for text in lines if text).encode()).hexdigest()[:12]


# The code that a function got when it was patched before, and the one that it had: switching off and on need not compile again.
_injected: weakref.WeakKeyDictionary[FunctionType, tuple[CodeType, CodeType]] = weakref.WeakKeyDictionary()


def _inject(source: str, function: FunctionType, block: str, expression: tuple[str, str] | None = None) -> CodeType:
    before = _injected.get(function)
    if before is not None:
        if before[0] is not function.__code__:
            raise Unknown(f"the code of {function.__qualname__} was replaced")
        return before[1]
    code = _compile(source, function, block, expression)
    _injected[function] = function.__code__, code
    return code


def _compile(source: str, function: FunctionType, block: str, expression: tuple[str, str] | None) -> CodeType:
    """The code of a function with a block before its first statement, and an expression in place of another. Its lines keep their
    numbers, by which TorchScript knows the overloads of a method, and are shown as they were."""
    node: ast.stmt = find_function(source, function.__qualname__, function.__code__.co_firstlineno)
    if expression is not None:
        replace = _Replace(*expression)
        node = replace.visit(node)
        if replace.found != 1:
            raise Unknown(f"{expression[0]} does not stand once in {function.__qualname__}")
    assert isinstance(node, ast.FunctionDef)
    added, at = ast.parse(block).body, int(ast.get_docstring(node) is not None and len(node.body) > 1)
    for statement in added:
        for inner in ast.walk(statement):
            ast.copy_location(inner, node.body[at])
    node.body[at:at] = added
    file = f"{_FILE}{function.__module__}.{function.__qualname__}>"
    begin = _begin(node)
    text = ["\n"] * (begin - 1) + source.splitlines(keepends=True)[begin - 1 : node.end_lineno]
    linecache.cache[file] = (sum(map(len, text)), None, text, file)
    defining = compile(ast.Module([node], []), file, "exec", dont_inherit=True)
    code = next(code for code in defining.co_consts if isinstance(code, CodeType) and code.co_name == function.__name__)
    if code.co_freevars != function.__code__.co_freevars:
        raise Unknown(f"{function.__name__} closes over other names than its source shows")
    return code


class _Replace(ast.NodeTransformer):
    """Puts an expression in place of another, and counts how often."""

    def __init__(self, text: str, instead: str) -> None:
        self.wanted, self.instead, self.found = ast.dump(ast.parse(text, mode="eval").body), instead, 0

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.expr) or ast.dump(node) != self.wanted:
            return self.generic_visit(node)
        self.found += 1
        new = ast.parse(self.instead, mode="eval").body
        for inner in ast.walk(new):
            ast.copy_location(inner, node)
        return new
