"""Rows of edges that do not exist: tensors that know what their elements would be, whose operations arrive at
``__torch_function__``, and the run of a ``message()`` that works on them. What they may be: :mod:`gnnfast.lazy.kinds` and
:mod:`gnnfast.lazy.scores`; what operations make of them: :mod:`gnnfast.lazy.operations`.

Where that cannot be right, ``Exists`` ends the attempt, and ``message()`` runs again on rows that exist: an operation that
``__torch_function__`` does not see, or one without gradients, such as within an autograd function, which would lose them. So what
can be seen to leave traces (:mod:`gnnfast.lazy.effects`) gets rows that exist at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast import _native
from gnnfast.config import settings
from gnnfast.dispatch import edges, execute, gates, several, softened
from gnnfast.dispatch.select import cannot_win, most_small
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.lazy import effects
from gnnfast.lazy.kinds import Exists, Gathered, Pair, Weighted, raised, version_of
from gnnfast.lazy.scores import Kind
from gnnfast.stream import is_capturing

if _native.cpu.loaded:
    from gnnfast.ops.convert import derived
if TYPE_CHECKING:
    from typing_extensions import Self


class Key(NamedTuple):
    """By which what was found out about a function is remembered: what it is ``of``, and its code, if that has several."""

    of: Any
    code: CodeType | None = None


class User(NamedTuple):
    """A user's ``function`` that is given rows, as one of PyG's ``message()``, and the ``module`` it is of, if any. ``may_keep``:
    what it leaves with others is made to exist in the end. ``restored``: an attribute of its last parameter, whose items are as
    before if it runs again."""

    function: Any
    module: torch.nn.Module | None
    key: Key
    may_keep: bool = True
    restored: str = ""


class Call:
    """One run of a ``message()``: the ends of its edges, and the rows that do not exist so far."""

    adds = True  # whether sums are reduced one by one where no kernel takes them as one

    def __init__(self, users: tuple[User, ...], modules: list[Any], ends: edges.Ends, place: str) -> None:
        self.user, self.ends, self.place, self.edges = users[0], ends, place, ends.ids[BY_DST].shape[0]
        self.writes = any(getattr(m, "inplace", False) for m in modules)  # perhaps into what it is given
        self._users, self._modules = users, modules  # the latter may be run
        self.grad_enabled = torch.is_grad_enabled()
        self.gained = self.existed = False
        self.said = False  # that messages exist, in the report
        # Bytes of rows of edges that PyG's operations would have read and written, unless that is known of the layer.
        self.moved: int | None = None if _known(self.user.key).passes else 0
        self.operations: dict[str, None] = {}  # of torch, that ran on rows of edges which had to exist for them, in order
        self._made: list[weakref.ref[Rows]] = []

    @classmethod
    def of(cls, users: tuple[User, ...], ends: edges.Ends, place: str) -> Self | None:
        """What functions get their rows from, if they may not have to exist. What is found out is kept for the first."""
        if _known(users[0].key).hopeless or (torch.is_grad_enabled() and saved_tensors_are_watched()):
            return None  # a forward pass and its repetition must save the same, whatever was found in between
        modules: list[Any] = []
        for user in users:
            run = effects.modules_run(user.function, user.module, user.may_keep, user.restored)
            if run is None:
                return None
            modules += run
        if any(b.numel() > MOST_COPIED for m in modules for b in m._buffers.values() if b is not None):
            return None
        return cls(users, modules, ends, place)

    def run(self, function: Callable[[], Any]) -> tuple[Any] | None:
        """What a function returns that uses :meth:`rows`; ``None`` where it must run on rows that exist."""
        restore, before = _restorer(self._modules, self.ends.ids[BY_DST].device), raised.count
        found = None
        with contextlib.suppress(Exists, Exception):  # if the user's own, it is raised again
            made = (function(),)
            if raised.count == before:  # else the user's code has caught it
                found = made
        raised.count = before  # a run around this one has nothing to do with it
        if found is None:
            self.gained = False
            restore()
        if not self.gained:
            _learn(self.user.key, hopeless=True, operations=tuple(self.operations))
        return found

    def check_kept(self) -> None:
        """Raises Exists where a user's ``message()`` keeps rows with the layer, whose gradients somebody may ask for: what is
        reduced must be made of them."""
        for function, module, *_ in self._users:
            if module is None or effects.is_of_library(function):
                continue
            if any(type(v) is Rows and v.kind is not None for v in module.__dict__.values()):
                raise Exists

    def learn_passes(self, row_bytes: int) -> None:
        """Remembers how often operations have read or written rows of so many bytes at each edge, and whether none had to exist."""
        if self.moved:
            _learn(self.user.key, passes=self.moved / (self.edges * row_bytes), fused=self.gained and not self.existed)

    def count(self, times: int, *values: Any) -> None:
        """Counts rows of edges among values that are read or written so many times."""
        if self.moved is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for t in _flat(values):
                if isinstance(t, Tensor) and t.dim() and t.shape[0] == self.edges:
                    self.moved += times * t.numel() * t.element_size()

    def aggregate(self, messages: Any, dim: int, reduce: str) -> Tensor | None:
        """The reduction of messages along a dimension, if they do not have to exist for it."""
        found = aggregated(messages, dim, reduce, self.user.module is None or self.user.module.training)
        self.gained |= found is not None
        return found

    def aggregate_several(self, messages: Any, dim: int, kinds: tuple[str, ...]) -> Tensor | None:
        """The same of several reductions, side by side."""
        kind = kind_of(messages)
        if not isinstance(kind, Gathered) or kind.side != BY_SRC or dim not in (0, -2) or not several.takes(kind.x):
            return None
        x = kind.x.clone() if self.grad_enabled and kind.x.requires_grad and not kind.own else kind.x
        self.gained = True
        return several.reduce_shifted(self.ends.towards(BY_DST), x, None, kinds, self.place)

    def aggregate_softened(self, messages: Any, dim: int, temperature: softened.Temperature) -> Tensor | None:
        """The same of a sum weighted by the softmax of the messages."""
        kind = kind_of(messages)
        if not isinstance(kind, Gathered) or kind.side != BY_SRC or dim not in (0, -2):
            return None
        self.gained = True
        return softened.reduce_rows(self.ends.towards(BY_DST), kind.kept().contiguous(), temperature, self.place)

    def any_reduction(self, messages: Any) -> bool:
        """Whether there are kernels for each reduction of messages, so that they never have to exist."""
        kind = kind_of(messages)
        return isinstance(kind, Gathered) or (isinstance(kind, Weighted) and not kind.heads_summed)

    # What kinds of rows are made of, and what is made of them.
    def is_fewer(self, x: Tensor) -> bool:
        """Whether there are no more rows of ``x`` than edges."""
        return x.shape[0] <= self.edges

    def gather(self, x: Tensor, side: int) -> Tensor:
        """``x [nodes, ...]`` at one end of each edge."""
        return edges.gather(x, self.ends, side)

    def used(self, side: int) -> Tensor:
        """Which nodes of a side have edges."""
        rowptr = self.ends.towards(side).csr.rowptr

        def make() -> Tensor:
            return rowptr.diff() > 0

        kept = derived(rowptr, "used", make)
        return make() if kept is None else kept

    def saved(self, t: Tensor) -> Tensor:
        """What a backward pass may find as it is now, of what users may write into."""
        return t.clone(memory_format=torch.contiguous_format)

    def written(self, out: Tensor) -> Tensor:
        """What users may write into, of a result that its backward pass wants."""
        return out.clone() if out.requires_grad else out

    def weighted(self, x: Tensor, weight: Tensor | None, reduce: str, training: bool, copies: bool) -> Tensor:
        """The reduction ``[num_dst, F]`` of ``x [num_src, F]``, as :func:`gnnfast.dispatch.execute.aggregate`."""
        how: Any = dict(place=self.place, ties="scatter", training=training, copies=copies)
        return execute.aggregate(self.ends.towards(BY_DST), x, weight, reduce, **how)

    def combine(self, pair: Pair) -> Tensor:
        a, b = pair.a, pair.b
        if not edges.combines(a.x, b.x):
            return getattr(a.now(), pair.how)(b.now())  # type: ignore[no-any-return]
        rows = [k.kept() if pair.how == "mul" else k.x for k in (a, b)]
        lhs, rhs = (t.flatten(1).contiguous() if t.dim() > 1 else t.contiguous().unsqueeze(1) for t in rows)
        return edges.combine(lhs, rhs, self.ends, a.side, pair.how).view(pair.shape)

    def dot(self, a: Tensor, b: Tensor, heads: int) -> Tensor:
        """``<a[dst], b[src]>`` of each edge and head, ``[E, heads]``."""
        return execute.dot(self.ends.towards(BY_DST), a, b, heads, self.place)

    def softmax(self, score: Tensor | None, dst: Tensor | None, src: Tensor | None, slope: float) -> Tensor:
        """Over the edges at each destination, as :func:`gnnfast.dispatch.execute.softmax`."""
        return execute.softmax(self.ends.towards(BY_DST), score, dst, src, slope, place=self.place)

    def drops(self, dropout: float, heads: int) -> bool:
        """Whether the kernel of attention draws the dropout."""
        return execute.fuses(dropout, heads)

    # Sums ``[num_dst, F]`` of ``x [num_src, F]`` as those of the same names there; ``None`` if there is no kernel for them.
    def dot_attention(
        self, a: Tensor, b: Tensor, x: Tensor, heads: int, number: float, dropout: float, training: bool
    ) -> Tensor | None:
        how: Any = dict(place=self.place, training=training)
        return execute.dot_attention(self.ends.towards(BY_DST), a, b, x, heads, number, dropout, **how)[0]

    def attention(self, x: Tensor, dst: Tensor, src: Tensor, slope: float, dropout: float, training: bool) -> Tensor | None:
        how: Any = dict(place=self.place, training=training)
        return execute.attention(self.ends.towards(BY_DST), x, dst, src, slope, dropout, **how)[0]

    def gatv2_attention(self, query: Tensor, key: Tensor, att: Tensor, heads: int, slope: float, dropout: float) -> Tensor | None:
        return execute.gatv2_attention(self.ends.towards(BY_DST), query, key, att, heads, slope, dropout, place=self.place)

    def edge_relu(self, x: Tensor, of_edges: Tensor) -> Tensor:
        return execute.edge_relu(self.ends.towards(BY_DST), x, of_edges, place=self.place)

    def gate(self, factors: tuple[gates.Factor, ...], weight: Tensor | None, reduce: str) -> Tensor:
        return gates.gate(self.ends.towards(BY_DST), factors, weight, reduce, self.place)

    def reduced(self, rows: Tensor, reduce: str) -> Tensor:
        """The reduction of rows of edges that exist."""
        return edges.reduce(rows, self.ends, reduce)

    def degrees(self, dtype: torch.dtype) -> Tensor:
        """In-degrees ``[num_dst, 1]``."""
        return several.degrees(self.ends.towards(BY_DST), dtype)

    def rows(self, x: Tensor, side: int) -> Tensor:
        """``x`` at one end of each edge."""
        rows = Rows.made(self, Gathered(self, x, side))
        self.count(2, rows)
        return rows

    def add(self, rows: Rows) -> None:
        self._made.append(weakref.ref(rows))

    def settle(self) -> None:
        """Makes all rows that somebody still holds exist, as tensors like any other: before they are written into, or may be."""
        rows, self._made = [r for r in (ref() for ref in self._made) if r is not None], []
        for r in rows:
            r.value()
        for r in rows:
            r.settle()


MANY_PASSES = 24.0  # over rows of edges, what few layers exceed
MOST_COPIED = 1 << 18  # elements of a buffer, which is copied in each call lest message() writes into it and runs again


# ---- what message() sees -----------------------------------------------------------------------------------------------------
HANDLERS: dict[Any, Callable[..., Any]] = {}  # what gnnfast.lazy.operations and gnnfast.lazy.views do of torch's operations


def handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes what follows the handler of functions: it returns a kind of rows, or a tuple of them, a tensor that exists, or
    NotImplemented."""

    def add(handler: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return add


NARROW = 8  # elements of a row, as of scores by head, up to which nobody notices that they exist


class Rows(Tensor):
    """A tensor ``[E, ...]`` without elements."""

    kind: Kind | None  # None: they are a tensor like any other by now
    _value: Tensor | None
    _version_made: int | None

    @staticmethod
    def made(call: Call, kind: Kind) -> Rows:
        like = kind.like
        rows: Rows = torch.Tensor._make_wrapper_subclass(Rows, kind.shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        rows.kind, rows._value = kind, None
        call.add(rows)
        return rows

    @property
    def exists(self) -> bool:
        return self._value is not None

    def value(self) -> Tensor:
        """The rows, which exist from now on."""
        if self._value is None:
            assert self.kind is not None
            self.kind.call.existed = True
            with torch.set_grad_enabled(self.kind.call.grad_enabled):
                self._value = self.kind.value()
            self._version_made = version_of(self._value)
        return self._value

    def settle(self) -> None:
        """Makes the rows a tensor like any other."""
        self.value()
        self.kind = None

    def is_written(self) -> bool:
        """Whether somebody has written into the rows, or a view of them, since they exist."""
        if self._value is not None and (self._version_made is None or version_of(self._value) != self._version_made):
            return True
        source = getattr(self.kind, "source", None)
        return source is not None and source.is_written()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        kind = next((r.kind for r in _flat((args, kwargs)) if isinstance(r, Rows) and r.kind is not None), None)
        if kind is None:
            return func(*_existing(args), **_existing(kwargs))
        call = kind.call
        if func == _REQUIRES_GRAD:
            return call.grad_enabled and kind.requires_grad
        if torch.is_grad_enabled() != call.grad_enabled or (call.grad_enabled and saved_tensors_are_watched()):
            raise Exists  # within an autograd function, or torch.utils.checkpoint, whose repetition would find rows that exist
        if writes(func, args, kwargs):
            call.settle()
        handler = HANDLERS.get(func)
        found = NotImplemented if handler is None else handler(*args, **kwargs)
        if found is NotImplemented:
            if math.prod(kind.shape[1:]) > NARROW:
                call.operations[f"{_name_of(func)} on [edges, {', '.join(map(str, kind.shape[1:]))}]"] = None
            found = func(*_existing(args), **_existing(kwargs))
        elif isinstance(found, tuple):
            found = tuple(Rows.made(call, part) for part in found)
        elif not isinstance(found, Tensor):
            found = Rows.made(call, found)
        if call.moved is not None and func not in _VIEWS:
            call.count(1, args, kwargs, found)
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if any(isinstance(r, Rows) and r.kind is not None for r in _flat((args, kwargs))):
            raise Exists  # what has not come through __torch_function__
        return func(*_existing(args), **_existing(kwargs or {}))


def _restorer(modules: list[Any], device: torch.device) -> Callable[[], None]:
    """What makes torch's generators and the buffers of modules what they are now, as if a function had not begun to run."""
    state = torch.get_rng_state()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" and not is_capturing() else None
    buffers = [(m, n, b, version_of(b), b.clone()) for m in modules for n, b in m._buffers.items() if b is not None]

    def restore() -> None:
        torch.set_rng_state(state)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)
        for owner, name, buffer, version, before in buffers:
            owner._buffers[name] = buffer
            # torch's batch_norm writes, and does not say so. While a CUDA graph is captured nobody can look.
            unseen = version is None or (buffer.is_cuda and is_capturing())
            if unseen or version_of(buffer) != version or not torch.equal(buffer, before):
                with torch.no_grad():
                    buffer.copy_(before)

    return restore


def writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation writes into an operand."""
    name = getattr(func, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or name in _WRITES:
        return True
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        return True
    at = _inplace_at(func) if getattr(func, "__module__", "") == functional.__name__ else None
    return at is not None and len(args) > at and bool(args[at])


@functools.cache
def _inplace_at(func: Any) -> int | None:
    """The position of an argument ``inplace``."""
    try:
        return list(inspect.signature(func).parameters).index("inplace")
    except (TypeError, ValueError):
        return None


def _name_of(func: Any) -> str:
    """What users call an operation."""
    name: str = getattr(func, "__name__", "an operation")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name.strip("_")


def _flat(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from _flat(v)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _existing(value: Any) -> Any:
    if isinstance(value, Rows):
        return value.value()
    if type(value) in (tuple, list):
        return type(value)(map(_existing, value))
    return {k: _existing(v) for k, v in value.items()} if type(value) is dict else value


_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_OF_SHAPE = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "is_sparse", "itemsize", "is_sparse_csr", "is_nested")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__, Tensor.is_floating_point}
_OF_SHAPE |= {torch.is_floating_point, torch.numel, torch.is_complex, Tensor.is_complex, Tensor.ndimension, Tensor.get_device}
_OF_BOTH = "reshape flatten unsqueeze squeeze transpose permute unbind split chunk narrow select"
_VIEWS = {getattr(Tensor, name) for name in ("view", "t", "__getitem__", "detach")}
_VIEWS |= {getattr(owner, name) for owner in (Tensor, torch) for name in _OF_BOTH.split()}
_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__set__", "backward", "register_hook"}
_WRITES |= {name.strip("_") for name in _WRITES if name.startswith("__") and name != "__set__"}  # as Python's operators call them


ROWS = {Rows}  # and what stands for them in compiled code


def kind_of(t: Any) -> Any:
    """What rows are; ``None`` for any other tensor, and if somebody has written into them."""
    return t.kind if type(t) in ROWS and t.kind is not None and not t.is_written() else None


def aggregated(messages: Any, dim: int, reduce: str, training: bool) -> Tensor | None:
    """The reduction of messages along a dimension; ``None`` where they must exist for it."""
    kind = kind_of(messages)
    if kind is None or (isinstance(kind, Gathered) and kind.side != BY_SRC) or dim not in (0, -messages.dim()):
        return None
    return kind.aggregate(reduce, training)  # type: ignore[no-any-return]


class Known(NamedTuple):
    """What was found out about a layer, or another user's function, which decides nothing but what is tried: that it makes nothing
    of rows that do not exist, how often the framework's operations read or write the widest rows at each edge, 0 where nobody
    knows, and that no row had to exist; and for the report, which ``operations`` ran on rows of one that is hopeless."""

    of: Any = lambda: None  # a weak reference to it
    hopeless: bool = False
    passes: float = 0.0
    fused: bool = False
    operations: tuple[str, ...] = ()


_NOTHING = Known()
_learned: dict[Any, Known] = {}  # by identity: users' classes may compare, and have no hash, as they like


def _known(key: Key) -> Known:
    found = _learned.get((id(key.of), key.code), _NOTHING)
    return found if found.of() is key.of else _NOTHING


def _learn(key: Key, **what: Any) -> None:
    at, known = (id(key.of), key.code), _known(key)
    if known is _NOTHING:
        known = Known(weakref.ref(key.of, lambda ref: _learned.pop(at) if _learned.get(at, _NOTHING).of is ref else None))
    _learned[at] = known._replace(**what)


def passes(key: Key) -> float:
    """How often a framework's operations read or write the widest rows at each edge; what few layers exceed where nobody knows, or
    what was met before must not decide."""
    known = _known(key).passes
    return MANY_PASSES if not known or (torch.is_grad_enabled() and saved_tensors_are_watched()) else known


def is_fused(key: Key) -> bool:
    """Whether no row of edges had to exist when it was served; ``False`` where what was met before must not decide."""
    return _known(key).fused and not (torch.is_grad_enabled() and saved_tensors_are_watched())


def operations(key: Key, call: Call | None, name: str = "message()") -> str:
    """What a function was seen to run on rows of edges, in words; empty if nothing."""
    seen = _known(key).operations if call is None else call.operations
    return f"{name} runs {', '.join(seen)}" if seen else ""


# Edges up to which rows of 1 KiB on a CPU and of 4 KiB on CUDA have nothing to gain: no closer look is taken.
FEW_ON_CPU, FEW = 1 << 9, 1 << 14


def are_few(num_edges: int, is_cuda: bool) -> bool:
    return num_edges < (FEW if is_cuda else FEW_ON_CPU)


def pays(key: Key, num_edges: int, row_bytes: int, is_cuda: bool) -> bool:
    """Whether rows of so many bytes, the widest, are so many that the framework's own path would take longer."""
    training, current = torch.is_grad_enabled(), settings()
    if not is_cuda:
        return row_bytes > 0 and not cannot_win(num_edges * row_bytes, training, current, "cpu")
    if is_fused(key) and not cannot_win(num_edges * row_bytes, training, current):
        return True  # as where it is known at once what is summed
    row_bytes = math.ceil(row_bytes * passes(key))
    return row_bytes > 0 and not cannot_win(num_edges * row_bytes, training, current, "messages")


def most_left(key: Key, is_cuda: bool) -> float:
    """Bytes of the widest rows at all edges that do not pay under the settings of now, with gradients or without, by what is known
    so far."""
    current = settings()
    if not is_cuda:
        return most_small("cpu", current)
    most = most_small("messages", current) / passes(key)
    return min(most, most_small("cuda", current)) if is_fused(key) else most


def existing(value: Any) -> Any:
    """A tensor, with elements if it had none."""
    return value.value() if type(value) is Rows else value
