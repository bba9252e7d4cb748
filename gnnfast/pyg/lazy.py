"""Rows of edges that do not exist: what ``message()`` gets in place of gathered features, so that what it makes of them is known.

``message()`` runs as it is, on tensors of the shapes, dtypes and devices that it expects, whose operations arrive at
``__torch_function__``. What works row by row is done to the rows of nodes, of which there are fewer; a product with a number per
edge or head is remembered for the kernel that sums such products; a dot product of both ends has a kernel of its own. Anything
else gets the gathered rows, which then exist. Nothing is guessed, and nothing is remembered from one call for another but that
a function has nothing to gain.

Where that cannot be right, :class:`Exists` ends the attempt, and ``message()`` runs again on rows that exist: an operation that
``__torch_function__`` does not see, or one without gradients, such as within an autograd function, which would lose them.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast import _native
from gnnfast.dispatch import edges, execute
from gnnfast.graph import Graph
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.stream import is_capturing
from gnnfast.types import FEATURE_DTYPES

if _native.cpu.loaded:
    from gnnfast.ops.convert import derived

_PLAIN = (Tensor, torch.nn.Parameter)
REORDERED = (torch.float32, torch.float64)  # dtypes whose sums may be added up in another order


class Exists(BaseException):
    """Not an Exception: users' own handlers must not see it."""


class Call:
    """One run of a ``message()``: the ends of its edges, and the rows that do not exist so far."""

    def __init__(self, module: Any, ends: edges.Ends, place: str) -> None:
        self.module, self.ends, self.place, self.edges = module, ends, place, ends.ids[BY_DST].shape[0]
        self.grad_enabled = torch.is_grad_enabled()
        self.gained = False
        self._made: list[weakref.ref[Rows]] = []

    def run(self, function: Callable[[], Any]) -> tuple[Any] | None:
        """What a function returns that uses :meth:`rows`; ``None`` where it must run on rows that exist."""
        restore = _restorer(self.module, self.ends.ids[BY_DST].device)
        try:
            found = (function(),)
        except (Exists, Exception):  # if the user's own, it is raised again
            self.gained = False
            restore()
            found = None
        if not self.gained:
            _give_up(self.module)
        return found

    def aggregate(self, messages: Any, dim: int, reduce: str) -> Tensor | None:
        """The reduction of messages along a dimension, if they do not have to exist for it."""
        kind = kind_of(messages)
        fits = isinstance(kind, (Weighted, Plus)) or (isinstance(kind, Gathered) and kind.side == BY_SRC)
        if not fits or dim not in (0, -messages.dim()):
            return None
        found: Tensor | None = kind.aggregate(reduce, self.module.training)
        self.gained |= found is not None
        return found

    def is_destinations(self, index: Any) -> bool:
        """Whether ids are the destinations of the edges."""
        ids = self.ends.ids[BY_DST]
        return type(index) is Tensor and index.shape == ids.shape and index.data_ptr() == ids.data_ptr() and index.is_contiguous()

    def rows(self, x: Tensor, side: int) -> Tensor:
        """``x`` at one end of each edge."""
        return Rows.made(self, Gathered(self, x, side))

    def add(self, rows: Rows) -> None:
        self._made.append(weakref.ref(rows))

    def settle(self) -> None:
        """Makes all rows that somebody still holds exist, as tensors like any other: before they are written into, or may be."""
        rows, self._made = [r for r in (ref() for ref in self._made) if r is not None], []
        for r in rows:
            r.value()
        for r in rows:
            r.kind = None


# ---- what rows are -----------------------------------------------------------------------------------------------------------
class Gathered:
    """Rows ``x [nodes, ...]`` of nodes at one end of each edge. ``source`` are the same rows in another shape, and memory."""

    def __init__(self, call: Call, x: Tensor, side: int, own: bool = False, source: Rows | None = None) -> None:
        self.call, self.x, self.side, self.own, self.source = call, x, side, own, source

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.call.edges, *self.x.shape[1:])

    @property
    def like(self) -> Tensor:
        return self.x

    @property
    def requires_grad(self) -> bool:
        return self.x.requires_grad

    def value(self) -> Tensor:
        return self.now() if self.source is None else self.source.value().view(self.shape)

    def now(self) -> Tensor:
        """The rows as they are before anybody writes into them."""
        if self.source is not None and not self.source.is_written():
            return self.source.value().view(self.shape)
        return edges.gather(self.x, self.call.ends, self.side)

    def kept(self) -> Tensor:
        """Rows of nodes that a backward pass may find as they are now: users may write into theirs, as a framework allows that
        keeps rows of edges. Those of nodes without edges are 0: what a gradient of 0 is multiplied with must be finite."""
        if self.own or not self.call.grad_enabled:
            return self.x
        used = _used(self.call.ends.towards(self.side))
        return torch.where(used.view(-1, *(1,) * (self.x.dim() - 1)), self.x, 0)

    def of(self, x: Tensor) -> Gathered:
        """Other rows of the same nodes, which nobody else has."""
        return Gathered(self.call, x, self.side, True)

    def aggregate(self, reduce: str, training: bool) -> Tensor:
        """The reduction at each destination of rows at sources."""
        return _aggregated(self, None, reduce, training, self.x.shape[1:])


def _used(graph: Graph) -> Tensor:
    """Which destinations have edges."""
    rowptr = graph.csr.rowptr

    def make() -> Tensor:
        return rowptr.diff() > 0

    kept = derived(rowptr, "used", make)
    return make() if kept is None else kept


def _aggregated(of: Gathered, weight: Tensor | None, reduce: str, training: bool, row: Sequence[int]) -> Tensor:
    how: Any = dict(place=of.call.place, ties="scatter", training=training, copies=not of.own)
    x = of.x.reshape(of.x.shape[0], -1)
    return edges.shaped(execute.aggregate(of.call.ends.towards(BY_DST), x, weight, reduce, **how), row)


class Weighted:
    """``weight [E, H]`` times the rows of ``x [num_src, H, ...]``, seen in another ``tail`` of dimensions; with ``heads_summed``,
    the sum over the heads."""

    def __init__(self, of: Gathered, weight: Tensor, heads: int, tail: tuple[int, ...], heads_summed: bool = False) -> None:
        self.rows, self.weight, self.heads, self.tail, self.heads_summed = of, weight, heads, tail, heads_summed
        self.version = _version(weight)

    call = property(lambda self: self.rows.call)
    like = property(lambda self: self.rows.x)
    shape = property(lambda self: (self.rows.call.edges, *self.tail))

    @property
    def requires_grad(self) -> bool:
        return self.rows.x.requires_grad or self.weight.requires_grad

    def check(self) -> None:
        if _version(self.weight) != self.version:  # somebody has written into it since
            raise Exists

    def value(self) -> Tensor:
        self.check()
        out = self._per_head(self.rows.now()) * self.weight.view(-1, self.heads, 1)
        return (out.sum(1) if self.heads_summed else out).reshape(self.shape)

    def _per_head(self, t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], self.heads, -1)

    def aggregate(self, reduce: str, training: bool) -> Tensor:
        """The reduction at each destination."""
        self.check()
        weight = self.weight.view(-1) if self.heads == 1 else self.weight
        if not self.heads_summed:
            return _aggregated(self.rows, weight, reduce, training, self.tail)
        out = _aggregated(self.rows, weight, reduce, training, (math.prod(self.rows.x.shape[1:]),))
        return self._per_head(out).sum(1).reshape(-1, *self.tail)


class Pair:
    """``a + b``, ``a - b`` or ``a * b`` (``how`` is ``"add"``, ``"sub"`` or ``"mul"``) of rows ``[E, ...]`` at different ends."""

    def __init__(self, a: Gathered, b: Gathered, how: str) -> None:
        self.a, self.b, self.how = a, b, how

    call = property(lambda self: self.a.call)
    like = property(lambda self: self.a.x)
    shape = property(lambda self: self.a.shape)

    @property
    def requires_grad(self) -> bool:
        return self.a.x.requires_grad or self.b.x.requires_grad

    def value(self) -> Tensor:
        if self.a.x.is_cuda:
            return getattr(self.a.now(), self.how)(self.b.now())
        a, b = ((k.kept() if self.how == "mul" else k.x).flatten(1).contiguous() for k in (self.a, self.b))
        return edges.combine(a, b, self.call.ends, self.a.side, self.how).view(self.shape)


class Plus:
    """Rows at sources plus rows of edges ``[E, F]``, or, if ``relu``, its ReLU."""

    def __init__(self, of: Gathered, edge_rows: Tensor, relu: bool = False) -> None:
        self.rows, self.edge_rows, self.relu, self.version = of, edge_rows, relu, _version(edge_rows)

    call = property(lambda self: self.rows.call)
    like = property(lambda self: self.rows.x)
    shape = property(lambda self: self.rows.shape)

    @property
    def requires_grad(self) -> bool:
        return self.rows.x.requires_grad or self.edge_rows.requires_grad

    def check(self) -> None:
        if _version(self.edge_rows) != self.version:  # somebody has written into them since
            raise Exists

    def value(self) -> Tensor:
        self.check()
        out = self.rows.now() + self.edge_rows
        return out.relu() if self.relu else out

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        """The sum at each destination, of whose messages there is a kernel for a ReLU."""
        self.check()
        if reduce != "sum" or not self.relu:
            return None
        graph = self.call.ends.towards(BY_DST)
        return execute.edge_relu(graph, self.rows.x, self.edge_rows.contiguous(), place=self.call.place)


class Joined:
    """Rows side by side, of nodes or of edges ``[E, F]``."""

    def __init__(self, call: Call, parts: list[Gathered | Tensor]) -> None:
        self.call, self.parts = call, parts
        self.versions = [_version(p) for p in parts if isinstance(p, Tensor)]

    @property
    def like(self) -> Tensor:
        return next(p.x for p in self.parts if isinstance(p, Gathered))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.call.edges, sum(p.shape[1] for p in self.parts)

    @property
    def requires_grad(self) -> bool:
        return any((p.x if isinstance(p, Gathered) else p).requires_grad for p in self.parts)

    def check(self) -> None:
        if self.versions != [_version(p) for p in self.parts if isinstance(p, Tensor)]:
            raise Exists

    def value(self) -> Tensor:
        self.check()
        return torch.cat([p.now() if isinstance(p, Gathered) else p for p in self.parts], 1)


def _version(t: Tensor) -> int | None:
    """By which writes are noticed; ``None`` where torch counts none."""
    return None if t.is_inference() else t._version


Kind = Gathered | Weighted | Pair | Plus | Joined


# ---- what message() sees -----------------------------------------------------------------------------------------------------
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

    def value(self) -> Tensor:
        """The rows, which exist from now on."""
        if self._value is None:
            assert self.kind is not None
            with torch.set_grad_enabled(self.kind.call.grad_enabled):
                self._value = self.kind.value()
            self._version_made = _version(self._value)
        return self._value

    def is_written(self) -> bool:
        """Whether somebody has written into the rows, or a view of them, since they exist."""
        if self._value is not None and (self._version_made is None or _version(self._value) != self._version_made):
            return True
        source = self.kind.source if isinstance(self.kind, Gathered) else None
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
        if func is _REQUIRES_GRAD:
            return call.grad_enabled and kind.requires_grad
        if torch.is_grad_enabled() != call.grad_enabled:
            raise Exists
        if _writes(func, args, kwargs):
            call.settle()
        handler = _HANDLERS.get(func)
        if handler is not None:
            found = handler(*args, **kwargs)
            if found is not NotImplemented:
                if isinstance(found, Tensor):
                    return found
                return Rows.made(call, found)
        return func(*_existing(args), **_existing(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if any(isinstance(r, Rows) and r.kind is not None for r in _flat((args, kwargs))):
            raise Exists  # what has not come through __torch_function__
        return func(*_existing(args), **_existing(kwargs or {}))


def _modules(module: Any) -> list[Any]:
    """A module and those within it, whether or not they have a hash, by which torch tells them apart."""
    found: dict[int, Any] = {}
    left = [module]
    while left:
        m = left.pop()
        if m is not None and id(m) not in found:
            found[id(m)] = m
            left += m._modules.values()
    return list(found.values())


def _restorer(module: torch.nn.Module, device: torch.device) -> Callable[[], None]:
    """What makes torch's generators and the buffers of a layer what they are now, as if a function had not begun to run."""
    state = torch.get_rng_state()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" and not is_capturing() else None
    buffers = [(m, n, b, _version(b), b.clone()) for m in _modules(module) for n, b in m._buffers.items() if b is not None]

    def restore() -> None:
        torch.set_rng_state(state)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)
        for owner, name, buffer, version, before in buffers:
            owner._buffers[name] = buffer
            if version is None or _version(buffer) != version:
                with torch.no_grad():
                    buffer.copy_(before)

    return restore


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation writes into an operand."""
    name = getattr(func, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or name in _WRITES or "out" in kwargs or kwargs.get("inplace"):
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
_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__set__", "backward", "register_hook"}


def kind_of(t: Any) -> Any:
    """What rows are; ``None`` for any other tensor, and if somebody has written into them."""
    return t.kind if type(t) is Rows and t.kind is not None and not t.is_written() else None


# ---- operations --------------------------------------------------------------------------------------------------------------
_HANDLERS: dict[Any, Callable[..., Any]] = {}


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(handler: Callable[..., Any]) -> Callable[..., Any]:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return add


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape


def _tail(kind: Any, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dimensions after the first of rows that are seen in another shape; ``None`` if the first is no longer the edges."""
    if not shape or not all(isinstance(n, int) for n in shape):
        return None
    row, tail = math.prod(kind.shape[1:]), list(shape[1:])
    if shape[0] not in (-1, kind.call.edges):
        return None
    if -1 in tail:
        rest = -math.prod(tail)
        if shape[0] == -1 or tail.count(-1) > 1 or rest == 0 or row % rest:
            return None
        tail[tail.index(-1)] = row // rest
    return tuple(tail) if math.prod(tail) == row and row else None


def _seen_as(t: Rows, tail: tuple[int, ...] | None) -> Any:
    kind = t.kind
    if tail is None:
        return NotImplemented
    if isinstance(kind, Gathered):
        return Gathered(kind.call, kind.x.reshape(kind.x.shape[0], *tail), kind.side, kind.own, t)
    if isinstance(kind, Weighted):
        return Weighted(kind.rows, kind.weight, kind.heads, tail, kind.heads_summed)
    return NotImplemented


@_handles(Tensor.view, Tensor.reshape, torch.reshape)
def _view(t: Any, *shape: Any) -> Any:
    kind = kind_of(t)
    return NotImplemented if kind is None or not shape else _seen_as(t, _tail(kind, _sizes(shape)))


@_handles(Tensor.unsqueeze, torch.unsqueeze)
def _unsqueeze(t: Any, dim: int) -> Any:
    kind = kind_of(t)
    if kind is None or not isinstance(dim, int):
        return NotImplemented
    at, tail = dim % (t.dim() + 1), list(kind.shape[1:])
    return _seen_as(t, (*tail[: at - 1], 1, *tail[at - 1 :])) if at else NotImplemented


@_handles(Tensor.flatten, torch.flatten)
def _flatten(t: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    kind = kind_of(t)
    if kind is None:
        return NotImplemented
    start, end, tail = start_dim % t.dim(), end_dim % t.dim(), kind.shape[1:]
    return _seen_as(t, (*tail[: start - 1], math.prod(tail[start - 1 : end]), *tail[end:])) if start else NotImplemented


def _saves(kind: Any) -> bool:
    """Whether there are fewer nodes than edges."""
    return isinstance(kind, Gathered) and kind.x.shape[0] <= kind.call.edges


def _by_row(function: Any) -> Callable[..., Any]:
    """For functions of each element, whose gradient is finite wherever the function is: nodes without edges must not matter."""

    def handler(t: Any, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(t)
        if not _saves(kind) or any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
            return NotImplemented
        return kind.of(function(kind.kept(), *args, **kwargs))

    return handler


for _function in (
    *(getattr(where, name) for name in ("sigmoid", "tanh", "abs", "neg") for where in (torch, Tensor)),
    *(functional.leaky_relu, functional.elu, functional.silu, functional.gelu, functional.softplus),
    Tensor.__neg__,
):
    _HANDLERS[_function] = _by_row(_function)


_relu_by_row = _by_row(torch.relu)


@_handles(functional.relu, torch.relu, Tensor.relu)
def _relu(t: Any, inplace: bool = False) -> Any:
    kind = kind_of(t)
    return Plus(kind.rows, kind.edge_rows, True) if isinstance(kind, Plus) else _relu_by_row(t)


@_handles(functional.linear)
def _linear(t: Any, weight: Any, bias: Any = None) -> Any:
    kind = kind_of(t)
    if kind is None or type(weight) not in _PLAIN or type(bias) not in (*_PLAIN, type(None)) or weight.dim() != 2:
        return NotImplemented
    if kind.like.dtype not in REORDERED or weight.dtype is not kind.like.dtype or torch.is_autocast_enabled(weight.device.type):
        return NotImplemented
    if isinstance(kind, Joined) and weight.shape[1] == kind.shape[1]:
        return _linear_of_parts(kind, weight, bias)
    return kind.of(functional.linear(kind.kept(), weight, bias)) if _saves(kind) else NotImplemented


def _linear_of_parts(joined: Joined, weight: Tensor, bias: Tensor | None) -> Any:
    """The sum of a product for each part, of which those at nodes are small."""
    joined.check()
    total: Tensor | None = None
    begin = 0
    by_side: dict[int, Tensor] = {}
    for part in joined.parts:
        columns = weight[:, begin : begin + part.shape[1]]
        begin += part.shape[1]
        if isinstance(part, Gathered):
            product = functional.linear(part.kept(), columns)
            by_side[part.side] = product if part.side not in by_side else by_side[part.side] + product
        else:
            product = functional.linear(part, columns)
            total = product if total is None else total + product
    if bias is not None:
        side = next(iter(by_side))
        by_side[side] = by_side[side] + bias
    joined.call.gained = True
    both = joined_ends(joined.call, by_side)
    return both if total is None else total.add_(both)


def joined_ends(call: Call, by_side: dict[int, Tensor]) -> Tensor:
    """The sum of rows ``[nodes, F]`` at the ends of each edge, ``[E, F]``."""
    if len(by_side) == 1:
        ((side, x),) = by_side.items()
        return edges.gather(x, call.ends, side)
    dst, src = by_side[BY_DST], by_side[BY_SRC]
    if not dst.is_cuda:
        return edges.combine(dst, src, call.ends, BY_DST, "add")
    return edges.gather(dst, call.ends, BY_DST) + edges.gather(src, call.ends, BY_SRC)


@_handles(torch.cat, torch.concat)
def _cat(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    if kwargs or not isinstance(tensors, (tuple, list)) or dim not in (1, -1):
        return NotImplemented
    parts: list[Any] = []
    for t in tensors:
        kind = kind_of(t)
        part = (t.clone() if t.is_inference() else t) if kind is None and type(t) is Tensor else kind
        if not isinstance(part, (Gathered, Tensor)) or t.dim() != 2:
            return NotImplemented
        if isinstance(part, Gathered) and not _saves(part):
            return NotImplemented
        parts.append(part)
    gathered = [p for p in parts if isinstance(p, Gathered)]
    if not gathered or any(p.dtype is not gathered[0].x.dtype for p in tensors):
        return NotImplemented
    call = gathered[0].call
    return Joined(call, parts) if all(t.shape[0] == call.edges for t in tensors) else NotImplemented


@_handles(Tensor.matmul, torch.matmul, Tensor.mm, torch.mm, Tensor.__matmul__)
def _matmul(t: Any, weight: Any) -> Any:
    kind = kind_of(t)
    if not _saves(kind) or type(weight) not in _PLAIN or weight.dim() != 2 or kind.x.dtype not in REORDERED:
        return NotImplemented
    return NotImplemented if torch.is_autocast_enabled(weight.device.type) else kind.of(kind.kept().matmul(weight))


@_handles(Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__)
def _mul(a: Any, b: Any) -> Any:
    kind, other = kind_of(a), b
    if kind is None:
        kind, other = kind_of(b), a
    if kind is None:
        return NotImplemented
    of_other = kind_of(other)
    if isinstance(kind, Gathered) and isinstance(of_other, Gathered):
        narrow = [math.prod(k.shape[1:]) < math.prod(big.shape[1:]) for k, big in ((kind, of_other), (of_other, kind))]
        if narrow[0]:
            kind, of_other = of_other, kind
        if any(narrow):
            return _weighted(kind, of_other.value())
        return _pair(kind, of_other, "mul")
    if _is_number(other) or _is_of_all(other, kind):
        return kind.of(kind.kept() * other) if _saves(kind) else NotImplemented
    return _weighted(kind, other)


def _pair(a: Any, b: Any, how: str) -> Any:
    """Rows at one end are computed there; at different ends, narrow ones may as well exist."""
    if a.shape != b.shape or a.x.dtype is not b.x.dtype:
        return NotImplemented
    if a.side == b.side:
        return a.of(getattr(a.kept(), how)(b.kept())) if _saves(a) else NotImplemented
    if math.prod(a.shape[1:]) < WIDE:
        return NotImplemented
    a.call.gained |= not a.x.is_cuda
    return Pair(a, b, how)


WIDE = 8


@_handles(Tensor.add, torch.add, Tensor.__add__)
def _add(a: Any, b: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _added(a, b, "add")


@_handles(Tensor.sub, torch.sub, Tensor.__sub__)
def _sub(a: Any, b: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _added(a, b, "sub")


def _added(a: Any, b: Any, how: str) -> Any:
    kinds = kind_of(a), kind_of(b)
    if isinstance(kinds[0], Gathered) and isinstance(kinds[1], Gathered):
        return _pair(*kinds, how)
    if kinds[0] is not None and _saves(kinds[0]) and (_is_number(b) or _is_of_all(b, kinds[0])):
        return kinds[0].of(getattr(kinds[0].x, how)(b))
    if how == "add":
        for kind, other in zip(kinds, (b, a)):
            if _is_of_edges(other, kind):
                return Plus(kind, other)
    if how == "add" and kinds[1] is not None and _saves(kinds[1]) and (_is_number(a) or _is_of_all(a, kinds[1])):
        return kinds[1].of(kinds[1].x.add(a))
    return NotImplemented


@_handles(Tensor.div, torch.div, Tensor.true_divide, Tensor.__truediv__)
def _div(a: Any, b: Any, **kwargs: Any) -> Any:
    kind = kind_of(a)
    if kwargs or kind is None or not _saves(kind) or not _is_number(b):
        return NotImplemented
    return kind.of(kind.x / b)


def _is_of_edges(t: Any, kind: Any) -> bool:
    """Whether a tensor has a row for each edge, as rows at sources have."""
    return (
        type(t) is Tensor
        and isinstance(kind, Gathered)
        and kind.side == BY_SRC
        and kind.x.dim() == 2
        and kind.x.dtype in FEATURE_DTYPES
        and t.layout is torch.strided
        and tuple(t.shape) == kind.shape
        and t.dtype is kind.x.dtype
        and t.device == kind.x.device
        and not t.is_inference()
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_of_all(t: Any, kind: Any) -> bool:
    """Whether a tensor is the same for each edge, and a product with it as large as the rows."""
    if type(t) not in _PLAIN or t.dtype is not kind.like.dtype or t.device != kind.like.device:
        return False
    shape, rows = tuple(t.shape), kind.shape
    if len(shape) > len(rows) or (len(shape) == len(rows) and shape[0] != 1):
        return False
    return all(n in (1, m) for n, m in zip(shape[::-1], rows[::-1]))


def _weighted(kind: Any, weight: Any) -> Any:
    """Rows times a number for each edge, or for each edge and head."""
    before = kind if isinstance(kind, Weighted) and not kind.heads_summed else None
    of = kind if before is None else before.rows
    if type(weight) is not Tensor or not isinstance(of, Gathered) or of.side != BY_SRC or weight.dtype is not of.x.dtype:
        return NotImplemented
    shape, rows = tuple(weight.shape), kind.shape
    if weight.device != of.x.device or len(shape) != len(rows) or shape[0] != rows[0] or len(rows) < 2:
        return NotImplemented
    heads = math.prod(shape[1:]) if shape == rows else shape[1] if len(shape) > 2 else 1
    if shape != rows and (heads not in (1, rows[1]) or any(n != 1 for n in shape[2:]) or (len(shape) == 2 and shape[1] != 1)):
        return NotImplemented
    if of.x.dtype not in FEATURE_DTYPES or not math.prod(rows[1:]):
        return NotImplemented
    if weight.is_inference():  # in which writes are not noticed
        if shape == rows:
            return NotImplemented
        weight = weight.clone()
    weight = weight.reshape(-1, heads)
    if before is not None:
        if before.heads not in (1, heads) and heads != 1:
            return NotImplemented
        before.check()
        weight, heads = before.weight * weight, max(before.heads, heads)
    of.call.gained = True
    return Weighted(of, weight, heads, rows[1:])


@_handles(Tensor.sum, torch.sum)
def _sum(t: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    kind = kind_of(t)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if kind is None or not isinstance(dim, int) or kwargs or not dim % t.dim():
        return NotImplemented
    dim %= t.dim()
    if isinstance(kind, Gathered):
        return kind.of(kind.x.sum(dim, keepdim)) if _saves(kind) else NotImplemented
    if isinstance(kind, Pair) and kind.how == "mul" and dim == t.dim() - 1 and kind.a.x.dtype in FEATURE_DTYPES:
        return _dot(kind, keepdim)
    if not isinstance(kind, Weighted) or kind.heads_summed or keepdim:
        return NotImplemented
    if kind.heads == 1 and _saves(kind.rows):
        x = kind.rows.x.reshape(-1, *kind.tail).sum(dim)
        return Weighted(kind.rows.of(x), kind.weight, 1, x.shape[1:])
    if dim == 1 and len(kind.tail) == 2 and kind.tail[0] == kind.heads:
        return Weighted(kind.rows, kind.weight, kind.heads, kind.tail[1:], True)
    return NotImplemented


def _dot(kind: Pair, keepdim: bool) -> Any:
    heads = math.prod(kind.shape[1:-1])
    if not math.prod(kind.shape[1:]):
        return NotImplemented
    a, b = (k.kept().reshape(k.x.shape[0], -1).contiguous() for k in sorted((kind.a, kind.b), key=lambda k: k.side != BY_DST))
    kind.call.gained = True
    out = execute.dot(kind.call.ends.towards(BY_DST), a, b, heads, kind.call.place).view(kind.shape[:-1])
    return out.unsqueeze(-1) if keepdim else out


def softmax(src: Any, index: Any, num_nodes: Any, dim: Any) -> Any:
    """PyG's ``softmax`` over the edges at each destination of rows at sources, of which each element is a head. On a GPU PyG's
    operations are faster where heads are many: 16.8 ms in place of 20.8 for GENConv with 128 on an arxiv-size graph."""
    kind = kind_of(src)
    if not isinstance(kind, Gathered) or kind.side != BY_SRC or dim not in (0, -src.dim()) or not kind.call.is_destinations(index):
        return NotImplemented
    graph, row = kind.call.ends.towards(BY_DST), kind.x.shape[1:]
    if num_nodes != graph.num_dst or kind.x.dtype not in FEATURE_DTYPES or not row.numel() or kind.x.is_cuda:
        return NotImplemented
    kind.call.gained = True
    found = execute.softmax(graph, None, None, kind.kept().reshape(-1, row.numel()), place=kind.call.place)
    return edges.shaped(found.clone() if found.requires_grad else found, row)  # users may write into theirs


# ---- a run -------------------------------------------------------------------------------------------------------------------
# Layers that made nothing of rows that do not exist, by identity: users' classes may compare, and have no hash, as they like.
_hopeless: dict[int, weakref.ref[torch.nn.Module]] = {}


def _give_up(module: torch.nn.Module) -> None:
    key = id(module)
    _hopeless[key] = weakref.ref(module, lambda ref: _hopeless.pop(key) if _hopeless.get(key) is ref else None)


def of(module: torch.nn.Module, ends: edges.Ends, place: str) -> Call | None:
    """What the ``message()`` of a layer gets its rows from, if they may not have to exist."""
    found = _hopeless.get(id(module))
    if (found is not None and found() is module) or (torch.is_grad_enabled() and saved_tensors_are_watched()):
        return None  # a forward pass and its repetition must save the same, whatever was found in between
    return Call(module, ends, place)


def existing(value: Any) -> Any:
    """A tensor, with elements if it had none."""
    return value.value() if type(value) is Rows else value
