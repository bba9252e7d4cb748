"""Recognises ``message()`` functions by their bytecode.

A user's or PyG's ``message`` counts as known only if its instructions are those of one of the reference functions below, compiled
by the same interpreter, with arguments renamed by position. So nothing is guessed: a message that does anything else, however
little, is not known.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch


class Message(NamedTuple):
    """``weight * feature_j`` or ``feature_j``, or, if ``form`` is one of :data:`RELU_FORMS`, ``relu(feature_j + weight)``.

    ``feature``: name of the node features without ``_j``. ``weight``: name of the edge values, or ``None``. ``form``: how the code
    shapes the weight before it multiplies: ``"view"`` (``[E, 1]`` of any shape), ``"unsqueeze"`` (one more dimension at the end),
    ``"column"`` (``[E, 1]`` of one dimension) or ``"plain"``. ``optional``: whether the weight may be ``None``.
    """

    feature: str
    weight: str | None
    form: str
    optional: bool


# The message of TransformerConv, which is known by its source (gnnfast.pyg.known) and served by gnnfast.pyg.attention.
DOT_ATTENTION = Message("key", "query", "dot", False)
# That of GINEConv, known likewise: a ReLU after its linear layer for the edges.
GINE = Message("x", "edge_attr", "relu of a linear layer", False)
# How the code writes a ReLU; the function itself is asked for in each call, as the name may mean another one by then.
RELU_FORMS: dict[str, tuple[str, ModuleType] | None] = {
    "({s}).relu()": None,
    "F.relu({s})": ("F", torch.nn.functional),
    "torch.relu({s})": ("torch", torch),
    GINE.form: None,
}
_RELUS = {module: module.relu for module in (torch, torch.nn.functional)}


def means_relu(form: str, message: FunctionType) -> bool:
    """Whether what ``message`` calls is torch's ReLU."""
    named = RELU_FORMS[form]
    if named is None:
        return True
    name, module = named
    return message.__globals__.get(name) is module and module.relu is _RELUS[module]


_FORMS = {
    "w.view(-1, 1)": "view",
    "w.reshape(-1, 1)": "view",
    "w.unsqueeze(-1)": "unsqueeze",
    "w.unsqueeze(1)": "column",
    "w[:, None]": "column",
    "w": "plain",
}
_BODIES = {
    "return {p}": False,
    "return x if w is None else {p}": True,
    "return {p} if w is not None else x": True,
    "if w is None:\n  return x\n return {p}": True,
    "if w is None:\n  return x\n else:\n  return {p}": True,
    "if w is not None:\n  return {p}\n return x": True,
    "if w is not None:\n  return {p}\n else:\n  return x": True,
}

# Arguments that collect() makes.
SPECIAL = ("edge_index", "adj_t", "index", "ptr", "size", "dim_size")

_Instructions = tuple[tuple[str, Any], ...]


@functools.lru_cache(maxsize=512)
def _instructions(code: CodeType) -> _Instructions:
    position = {name: i for i, name in enumerate(code.co_varnames)}

    def operand(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(operand, value))
        return position.get(value, value) if isinstance(value, str) else repr(value)

    found: list[tuple[str, Any]] = []
    start: int | None = None
    for i in dis.get_instructions(code):
        if i.opname in ("RESUME", "NOP", "CACHE", "COPY_FREE_VARS", "EXTENDED_ARG"):
            continue
        start = i.offset if start is None else start
        if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs:
            found.append((i.opname, i.argval - start))
        elif i.opcode in dis.haslocal:
            found.append((i.opname, operand(i.argval)))
        elif i.opcode in dis.hasname:
            found.append((i.opname, ("name", i.argval)))
        else:
            found.append((i.opname, repr(i.argval)))
    return tuple(found)


_Reference = tuple[CodeType, tuple[int, int | None, str, bool]]


@functools.cache
def _references(names: tuple[str, ...], body: str | None) -> list[_Reference]:
    """The reference functions with a weight that look up these names, products in a ``body`` or, with ``None``, ReLUs of sums:
    code, and position of x, position of w, form, optional. A few of some hundred, whose compilation takes longer than all else that
    is asked of a class."""
    if body is None:
        expressions = [(form.format(s=total), form) for form in RELU_FORMS if form != GINE.form for total in ("x + w", "w + x")]
    else:
        expressions = [(product, form) for w, form in _FORMS.items() for product in (f"{w} * x", f"x * {w}")]
    body, optional = body or "return {p}", body is not None and _BODIES[body]
    return _compiled(
        [
            (arguments, body.format(p=expression), arguments.split(", ").index("w") + 1, form, optional)
            for arguments in ("x, w", "w, x")
            for expression, form in expressions
            if _names_in(expression) == names
        ]
    )


@functools.cache
def _unweighted() -> list[_Reference]:
    """That without a weight."""
    return _compiled([("x", "return x", None, "plain", False)])


_NAME = re.compile(r"\b(?!(?:x|w|None)\b)[A-Za-z]\w*")


def _names_in(expression: str) -> tuple[str, ...]:
    """What an expression of the arguments ``x`` and ``w`` looks up by name."""
    return tuple(_NAME.findall(expression))


def _compiled(functions: Sequence[tuple[str, str, int | None, str, bool]]) -> list[_Reference]:
    found: list[_Reference] = []
    # Names that a file imports are compiled in another way.
    imported = any(name in body for name in ("torch", "F.") for _, body, *_ in functions)
    for imports in ("", "import torch\nimport torch.nn.functional as F\n")[: 1 + imported]:
        scope: dict[str, Any] = {}
        exec(imports + "\n".join(f"def f{i}(self, {of[0]}):\n {of[1]}" for i, of in enumerate(functions)), scope)
        for i, (arguments, _, w, form, optional) in enumerate(functions):
            at = ["self", *arguments.split(", ")].index("x")
            found.append((scope[f"f{i}"].__code__, (at, w, form, optional)))
    return found


# By how many bytes code may differ in length whose instructions are the same: to list them takes ten times as long as to compile
# them.
_PADDING = 16


def recognise(code: CodeType) -> Message | None:
    """The message that the code of a method ``message(self, ...)`` computes, or ``None`` if it is not a known one."""
    plain = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
    if code.co_flags & plain or code.co_freevars or code.co_cellvars or code.co_kwonlyargcount or code.co_argcount > 3:
        return None
    instructions, size = _instructions(code), len(code.co_code)
    weighted = (of for body in (*_BODIES, None) for of in _references(code.co_names, body))
    references = weighted if code.co_argcount == 3 else _unweighted()
    near = ((reference, what) for reference, what in references if abs(len(reference.co_code) - size) <= _PADDING)
    found = next((what for reference, what in near if _instructions(reference) == instructions), None)
    if found is None:
        return None
    x, w, form, optional = found
    feature, weight = code.co_varnames[x], None if w is None else code.co_varnames[w]
    if form in RELU_FORMS and weight is not None and weight.endswith("_j"):  # a sum does not tell one from the other
        feature, weight = weight, feature
    if not feature.endswith("_j") or feature == "edge_index_j" or feature == "size_j":
        return None
    if weight is not None and (weight.endswith(("_i", "_j")) or weight in SPECIAL):
        return None
    if code.co_argcount == 3 and weight is None:
        return None
    return Message(feature[:-2], weight, form, optional)
