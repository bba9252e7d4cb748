"""Rows of edges that do not exist: tensors that know what their elements would be, whose operations arrive at
``__torch_function__``, and the run of a ``message()`` that works on them. What operations make of them: :mod:`gnnfast.pyg.lazy`.

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
from gnnfast.dispatch import edges, execute, gates, several
from gnnfast.graph import Graph
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.stream import is_capturing
from gnnfast.types import ACTIVATIONS, LINEAR

if _native.cpu.loaded:
    from gnnfast.ops.convert import derived
    from gnnfast.ops.edge_gate import FUNCTIONS


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
        fits = not isinstance(kind, (Gathered, Joined)) or (isinstance(kind, Gathered) and kind.side == BY_SRC)
        if kind is None or not fits or dim not in (0, -messages.dim()):
            return None
        found: Tensor | None = kind.aggregate(reduce, self.module.training)
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

    def any_reduction(self, messages: Any) -> bool:
        """Whether there are kernels for each reduction of messages, so that they never have to exist."""
        return isinstance(kind_of(messages), (Gathered, Weighted))

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

    def saved(self) -> Tensor:
        """The same for kernels, which read no rows of nodes without edges: ``[nodes, F]``."""
        x = self.x.reshape(self.x.shape[0], -1)
        return x if self.own or not self.call.grad_enabled else x.clone(memory_format=torch.contiguous_format)

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

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        """The sum or mean at each destination."""
        gate = Gate.of(self)
        return None if gate is None else gate.aggregate(reduce, training)


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
        """The sum or mean at each destination."""
        self.check()
        if reduce != "sum" or not self.relu:
            gate = Gate.of(self)
            return None if gate is None else gate.aggregate(reduce, training)
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


class Term:
    """``act(scale * src + shift + edge)`` of the rows of sources, of destinations twice, and of edges, without what is ``None``.
    Nobody else has the ``edge`` if it is ``own``."""

    def __init__(
        self,
        src: Gathered | None = None,
        scale: Gathered | None = None,
        shift: Gathered | None = None,
        edge: Tensor | None = None,
        own: bool = False,
        act: str = "identity",
    ) -> None:
        self.src, self.scale, self.shift, self.edge, self.own, self.act = src, scale, shift, edge, own, act
        self.version = None if edge is None else _version(edge)

    @property
    def ends(self) -> list[Gathered]:
        return [kind for kind in (self.src, self.scale, self.shift) if kind is not None]

    @staticmethod
    def of(kind: Any) -> Term | None:
        """What rows are, if they are one; nothing is computed but negatives at nodes, of which there must be fewer than edges."""
        if isinstance(kind, Gate):
            return kind.terms[0] if len(kind.terms) == 1 and kind.weight is None else None
        if isinstance(kind, Gathered):
            return Term(kind) if kind.side == BY_SRC else Term(shift=kind)
        if isinstance(kind, Plus):
            return Term(kind.rows, edge=kind.edge_rows, act="relu" if kind.relu else "identity")
        if not isinstance(kind, Pair) or not saves(kind.a, kind.b):
            return None
        b = kind.b.of(-kind.b.kept()) if kind.how == "sub" else kind.b
        src, dst = (kind.a, b) if kind.a.side == BY_SRC else (b, kind.a)
        return Term(src, scale=dst) if kind.how == "mul" else Term(src, shift=dst)

    def plus(self, other: Term) -> Term | None:
        """The sum of both, neither of which has an activation."""
        if self.act != "identity" or other.act != "identity" or (self.src and other.src and (self.scale or other.scale)):
            return None
        if not saves(*self.ends, *other.ends):
            return None

        def total(a: Gathered | None, b: Gathered | None) -> Gathered | None:
            return a.of(a.kept() + b.kept()) if a and b else a or b

        edge, own = (self.edge, self.own) if self.edge is not None else (other.edge, other.own)
        if self.edge is not None and other.edge is not None:
            edge, own = self.edge + other.edge, True
        return Term(total(self.src, other.src), self.scale or other.scale, total(self.shift, other.shift), edge, own)

    def check(self) -> None:
        if self.edge is not None and _version(self.edge) != self.version:  # somebody has written into it since
            raise Exists

    def value(self) -> Tensor:
        self.check()
        src, scale, shift = self.src, self.scale, self.shift
        out, fresh = None, True
        if src is not None and (scale is not None or shift is not None):
            out = Pair(src, scale or shift, "mul" if scale else "add").value()  # type: ignore[arg-type]
            if scale is not None and shift is not None:
                out = out.add_(shift.now())
        elif src is not None or shift is not None:
            one = src or shift
            out, fresh = one.now(), one.source is None  # type: ignore[union-attr]
        if self.edge is not None:
            out = self.edge if out is None else out.add_(self.edge) if fresh else out + self.edge
        assert out is not None
        return out if self.act == "identity" else FUNCTIONS[ACTIVATIONS[self.act]](out)  # type: ignore[no-any-return]

    def factor(self) -> gates.Factor:
        """The operands of a kernel."""
        self.check()
        edge = self.edge
        if edge is not None:
            edge = edge.reshape(edge.shape[0], -1)
            if not self.own and torch.is_grad_enabled():  # a framework that keeps the sum allows users to write into theirs
                edge = edge.clone(memory_format=torch.contiguous_format)
        return gates.Factor(*(None if kind is None else kind.saved() for kind in (self.src, self.scale, self.shift)), edge, self.act)


class Gate:
    """The product of one or two terms and, if given, a ``weight [E]``."""

    def __init__(self, *terms: Term, weight: Tensor | None = None) -> None:
        self.terms, self.weight, self.version = terms, weight, None if weight is None else _version(weight)

    @staticmethod
    def of(kind: Any) -> Gate | None:
        """What rows are, if they are one."""
        if isinstance(kind, Gate):
            return kind
        if isinstance(kind, Weighted):
            is_one = kind.heads == 1 and not kind.heads_summed and kind.tail == tuple(kind.rows.x.shape[1:])
            return Gate(Term(kind.rows), weight=kind.weight.view(-1)) if is_one else None
        term = Term.of(kind)
        return None if term is None else Gate(term)

    def times(self, other: Gate) -> Gate | None:
        """The product of both."""
        terms = *self.terms, *other.terms
        if len(terms) > gates.MOST_FACTORS:
            return None
        self.check()
        other.check()
        weights = [g.weight for g in (self, other) if g.weight is not None]
        return Gate(*terms, weight=math.prod(weights[1:], start=weights[0]) if weights else None)

    @property
    def ends(self) -> list[Gathered]:
        return [kind for term in self.terms for kind in term.ends]

    call = property(lambda self: self.ends[0].call)
    like = property(lambda self: self.ends[0].x)
    shape = property(lambda self: self.ends[0].shape)

    @property
    def requires_grad(self) -> bool:
        of_edges = [self.weight, *(term.edge for term in self.terms)]
        return any(t.requires_grad for t in (*(kind.x for kind in self.ends), *of_edges) if t is not None)

    def check(self) -> None:
        if self.weight is not None and _version(self.weight) != self.version:  # somebody has written into it since
            raise Exists

    def value(self) -> Tensor:
        self.check()
        out = math.prod((term.value() for term in self.terms[1:]), start=self.terms[0].value())
        return out if self.weight is None else out * self.weight.view(-1, *(1,) * (out.dim() - 1))

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        """The reduction at each destination; of an extremum, if it is one of weighted rows."""
        if not gates.takes(self.like) or not saves(*self.ends):
            return None
        self.check()
        if reduce not in LINEAR:
            return self._extremum(reduce, training)
        factors, weight = tuple(term.factor() for term in self.terms), self.weight
        if weight is not None and torch.is_grad_enabled():
            weight = weight.clone()
        out = gates.gate(self.call.ends.towards(BY_DST), factors, weight, reduce, self.call.place)
        return edges.shaped(out, self.shape[1:])

    def _extremum(self, reduce: str, training: bool) -> Tensor | None:
        rows = [n for n, term in enumerate(self.terms) if term.act == "identity" and term.ends == [term.src] and term.edge is None]
        if len(self.terms) == 1 or not rows:
            return None
        src = self.terms[rows[0]].src
        assert src is not None
        weight = self.terms[1 - rows[0]].value().flatten(1)
        weight = weight if self.weight is None else weight * self.weight.unsqueeze(1)
        return Weighted(src, weight, weight.shape[1], self.shape[1:]).aggregate(reduce, training)


class Projected:
    """``functional.linear`` of a sum's messages, which may as well be done to the sum."""

    def __init__(self, of: Gate, weight: Tensor, bias: Tensor | None) -> None:
        self.of, self.weight, self.bias = of, weight, bias
        self.versions = _version(weight), None if bias is None else _version(bias)

    call = property(lambda self: self.of.call)
    like = property(lambda self: self.of.like)
    shape = property(lambda self: (*self.of.shape[:-1], self.weight.shape[0]))

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for t in (self.of, self.weight, self.bias) if t is not None)

    def check(self) -> None:
        if self.versions != (_version(self.weight), None if self.bias is None else _version(self.bias)):
            raise Exists

    def value(self) -> Tensor:
        self.check()
        return functional.linear(self.of.value(), self.weight, self.bias)

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        """The sum or mean at each destination."""
        self.check()
        out = self.of.aggregate(reduce, training)
        if out is None or self.bias is None:
            return None if out is None else functional.linear(out, self.weight)
        degree = several.degrees(self.call.ends.towards(BY_DST), out.dtype)
        times = degree if reduce == "sum" else degree.clamp(max=1)
        return torch.addmm(times * self.bias, out, self.weight.t())


def saves(*kinds: Any) -> bool:
    """Whether these are rows of nodes, of which there are fewer than edges."""
    return all(isinstance(kind, Gathered) and kind.x.shape[0] <= kind.call.edges for kind in kinds)


def _version(t: Tensor) -> int | None:
    """By which writes are noticed; ``None`` where torch counts none."""
    return None if t.is_inference() else t._version


Kind = Gathered | Weighted | Pair | Plus | Joined | Gate | Projected


# ---- what message() sees -----------------------------------------------------------------------------------------------------
HANDLERS: dict[Any, Callable[..., Any]] = {}  # what gnnfast.pyg.lazy does of torch's operations


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
        handler = HANDLERS.get(func)
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


# Layers that made nothing of rows that do not exist, by identity: users' classes may compare, and have no hash, as they like.
_hopeless: dict[int, weakref.ref[torch.nn.Module]] = {}


def _give_up(module: torch.nn.Module) -> None:
    key = id(module)
    _hopeless[key] = weakref.ref(module, lambda ref: _hopeless.pop(key) if _hopeless.get(key) is ref else None)


def may_not_exist(module: torch.nn.Module, ends: edges.Ends, place: str) -> Call | None:
    """What the ``message()`` of a layer gets its rows from, if they may not have to exist."""
    found = _hopeless.get(id(module))
    if (found is not None and found() is module) or (torch.is_grad_enabled() and saved_tensors_are_watched()):
        return None  # a forward pass and its repetition must save the same, whatever was found in between
    return Call(module, ends, place)


def existing(value: Any) -> Any:
    """A tensor, with elements if it had none."""
    return value.value() if type(value) is Rows else value
