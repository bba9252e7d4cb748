"""What rows of edges that do not exist may be, as what they would be made of. Each kind has the ``call`` of a ``message()`` that it
is for (:mod:`gnnfast.lazy.rows`), a ``shape``, a tensor that it is ``like`` in dtype and device, and a ``value()``; most also what
a reduction makes of them, ``aggregate(reduce, training)``, ``None`` where they must exist for it. Kernels are those of the call."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast import _native
from gnnfast.dispatch import edges, gates
from gnnfast.graph.formats import BY_SRC
from gnnfast.types import ACTIVATIONS, FEATURE_DTYPES, LINEAR

if _native.cpu.loaded:
    from gnnfast.ops.edge_gate import FUNCTIONS


class _Raised(threading.local):
    count = 0


raised = _Raised()


class Exists(BaseException):
    """Not an Exception: users' own handlers must not see it. Of those that do, ``raised`` tells."""

    def __init__(self) -> None:
        super().__init__()
        raised.count += 1


class Gathered:
    """Rows ``x [nodes, ...]`` of nodes at one end of each edge. ``source`` are rows of whose memory these are a part, or all, as
    ``seen`` gives it; that of the kinds below are the same in another shape."""

    def __init__(
        self,
        call: Any,
        x: Tensor,
        side: int,
        own: bool = False,
        source: Any = None,
        seen: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> None:
        self.call, self.x, self.side, self.own, self.source, self._seen = call, x, side, own, source, seen
        self.like, self.shape = x, (call.edges, *x.shape[1:])
        self._kept: Tensor | None = None

    @property
    def requires_grad(self) -> bool:
        return self.x.requires_grad

    def value(self) -> Tensor:
        return self.now() if self.source is None else self._seen(self.source.value())

    def now(self) -> Tensor:
        """The rows as they are before anybody writes into them."""
        if self.source is not None and not self.source.is_written() and (self.source.exists or self._is_all()):
            return self._seen(self.source.value())
        return self.call.gather(self.x, self.side)  # type: ignore[no-any-return]

    def _is_all(self) -> bool:
        """Whether no row of the source is larger."""
        return math.prod(self.source.shape[1:]) == math.prod(self.shape[1:])

    def kept(self) -> Tensor:
        """Rows of nodes that a backward pass may find as they are now: users may write into theirs, as a framework allows that
        keeps rows of edges. Those of nodes without edges are 0: what a gradient of 0 is multiplied with must be finite."""
        if self.own or not self.call.grad_enabled:
            return self.x
        if self._kept is None:
            used = self.call.used(self.side)
            self._kept = torch.where(used.view(-1, *(1,) * (self.x.dim() - 1)), self.x, 0)
        return self._kept

    def saved(self) -> Tensor:
        """The same for kernels, which read no rows of nodes without edges: ``[nodes, F]``."""
        x = self.x.reshape(self.x.shape[0], -1)
        return x if self.own or not self.call.grad_enabled else self.call.saved(x)

    def seen_as(self, tail: tuple[int, ...], source: Any) -> Gathered:
        """The same in another shape, and memory, as ``source``."""
        return self.seen(lambda rows: rows.reshape(rows.shape[0], *tail), source)

    def seen(self, function: Callable[[Tensor], Tensor], source: Any) -> Gathered:
        """What a function gives that views rows, however many there are, of those which ``source`` has the memory of."""
        return Gathered(self.call, function(self.x), self.side, self.own, source, function)

    def of(self, x: Tensor) -> Gathered:
        """Other rows of the same nodes, which nobody else has."""
        return Gathered(self.call, x, self.side, True)

    def aggregate(self, reduce: str, training: bool) -> Tensor:
        """The reduction at each destination; of its own row, that row as often as it has edges, or once."""
        if self.side == BY_SRC:
            return _aggregated(self, None, reduce, training, self.x.shape[1:])
        degree = self.call.degrees(self.x.dtype).view(-1, *(1,) * (self.x.dim() - 1))
        return torch.where(degree > 0, self.x * degree if reduce == "sum" else self.x, 0)


def _aggregated(of: Gathered, weight: Tensor | None, reduce: str, training: bool, row: Sequence[int]) -> Tensor:
    x = of.x.reshape(of.x.shape[0], -1)
    return edges.shaped(of.call.weighted(x, weight, reduce, training, not of.own), row)


class Weighted:
    """``weight [E, H]`` times the rows of ``x [num_src, H, ...]``, seen in another ``tail`` of dimensions; with ``heads_summed``,
    the sum over the heads."""

    def __init__(
        self, of: Gathered, weight: Tensor, heads: int, tail: tuple[int, ...], heads_summed: bool = False, source: Any = None
    ) -> None:
        self.rows, self.heads, self.tail, self.heads_summed, self.source = of, heads, tail, heads_summed, source
        self._weight, self._version = weight, version_of(weight)

    call = property(lambda self: self.rows.call)
    like = property(lambda self: self.rows.x)
    shape = property(lambda self: (self.rows.call.edges, *self.tail))

    @property
    def weight(self) -> Tensor:
        if version_of(self._weight) != self._version:  # somebody has written into it since
            raise Exists
        return self._weight

    @property
    def requires_grad(self) -> bool:
        return self.rows.x.requires_grad or self.weight.requires_grad

    def seen_as(self, tail: tuple[int, ...], source: Any) -> Weighted:
        return Weighted(self.rows, self.weight, self.heads, tail, self.heads_summed, source)

    def value(self) -> Tensor:
        if self.source is not None:
            return self.source.value().view(self.shape)  # type: ignore[no-any-return]
        out = self._per_head(self.rows.now()) * self.weight.view(-1, self.heads, 1)
        return (out.sum(1) if self.heads_summed else out).reshape(self.shape)

    def _per_head(self, t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], self.heads, -1)

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        """The reduction at each destination; of a sum over heads, if it is linear."""
        if self.heads_summed and reduce not in LINEAR:
            return None
        weight = self.weight.view(-1) if self.heads == 1 else self.weight
        if not self.heads_summed:
            return _aggregated(self.rows, weight, reduce, training, self.tail)
        out = _aggregated(self.rows, weight, reduce, training, (math.prod(self.rows.x.shape[1:]),))
        return self._per_head(out).sum(1).reshape(-1, *self.tail)


class Pair:
    """``a + b``, ``a - b`` or ``a * b`` (``how`` is ``"add"``, ``"sub"`` or ``"mul"``) of rows ``[E, ...]`` at different ends."""

    def __init__(self, a: Gathered, b: Gathered, how: str) -> None:
        self.a, self.b, self.how = a, b, how
        self.call, self.like, self.shape = a.call, a.x, a.shape

    @property
    def requires_grad(self) -> bool:
        return self.a.x.requires_grad or self.b.x.requires_grad

    def value(self) -> Tensor:
        return self.call.combine(self)  # type: ignore[no-any-return]

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        """The sum or mean at each destination."""
        gate = Gate.of(self)
        return None if gate is None else gate.aggregate(reduce, training)


class Joined:
    """Rows side by side in their last dimension, of nodes or of edges ``[E, ..., F]``."""

    def __init__(self, call: Any, parts: list[Gathered | Tensor]) -> None:
        self.call, self.parts = call, parts
        self.versions = [version_of(p) for p in parts if isinstance(p, Tensor)]

    @property
    def like(self) -> Tensor:
        return next(p.x for p in self.parts if isinstance(p, Gathered))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.call.edges, *self.parts[0].shape[1:-1], sum(p.shape[-1] for p in self.parts)

    @property
    def requires_grad(self) -> bool:
        return any((p.x if isinstance(p, Gathered) else p).requires_grad for p in self.parts)

    def check(self) -> None:
        if self.versions != [version_of(p) for p in self.parts if isinstance(p, Tensor)]:
            raise Exists

    def value(self) -> Tensor:
        self.check()
        return torch.cat([p.now() if isinstance(p, Gathered) else p for p in self.parts], -1)

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        """The reductions of the parts, side by side."""
        at_dst = any(isinstance(p, Gathered) and p.side != BY_SRC for p in self.parts)
        if not self.call.adds or (at_dst and (reduce not in LINEAR or not gates.takes(self.like))):
            return None
        self.check()
        parts = [p if isinstance(p, Gathered) else Existing(self.call, p) for p in self.parts]
        return torch.cat([p.aggregate(reduce, training) for p in parts], -1)

    def times(self, factor: Tensor) -> Joined:
        """The product with a tensor that is the same for each edge, ``[..., F]``."""
        self.check()
        found: list[Gathered | Tensor] = []
        begin = 0
        for part in self.parts:
            columns = factor[..., begin : begin + part.shape[-1]]
            begin += part.shape[-1]
            found.append(part.of(part.kept() * columns) if isinstance(part, Gathered) else part * columns)
        return Joined(self.call, found)


class Term:
    """``act(scale * src + shift + edge + product)`` of the rows of sources, of destinations twice, of edges ``[E, F]``, and of a
    linear layer's features of edges and weight, without what is ``None``. Nobody else has the ``edge`` if it is ``own``."""

    def __init__(
        self,
        src: Gathered | None = None,
        scale: Gathered | None = None,
        shift: Gathered | None = None,
        edge: Tensor | None = None,
        own: bool = False,
        product: tuple[Tensor, Tensor] | None = None,
        act: str = "identity",
    ) -> None:
        self.src, self.scale, self.shift, self.edge, self.own, self.act = src, scale, shift, edge, own, act
        self.product = product
        self.ends = [kind for kind in (src, scale, shift) if kind is not None]
        self.of_edges = [t for t in (edge, *(product or ())) if t is not None]
        self.versions = [*map(version_of, self.of_edges)]

    @property
    def is_sum_with_edges(self) -> bool:
        """Of rows at sources, as in GINEConv, whose ReLU has a kernel on every device."""
        return self.edge is not None and self.product is None and self.ends == [self.src]

    def activated(self, act: str) -> Term:
        """With an activation, in place of none."""
        self.check()
        return Term(self.src, self.scale, self.shift, self.edge, self.own, self.product, act)

    @staticmethod
    def of(kind: Any) -> Term | None:
        """What rows are, if they are one; nothing is computed but negatives at nodes, of which there must be fewer than edges."""
        if isinstance(kind, Gate):
            return kind.terms[0] if len(kind.terms) == 1 and kind.weight is None and kind.number == 1 else None
        if isinstance(kind, Gathered):
            return Term(kind) if kind.side == BY_SRC else Term(shift=kind)
        if not isinstance(kind, Pair) or not saves(kind.a, kind.b):
            return None
        b = kind.b.of(-kind.b.kept()) if kind.how == "sub" else kind.b
        src, dst = (kind.a, b) if kind.a.side == BY_SRC else (b, kind.a)
        return Term(src, scale=dst) if kind.how == "mul" else Term(src, shift=dst)

    def plus(self, other: Term) -> Term | None:
        """The sum of both, neither of which has an activation."""
        if self.act != "identity" or other.act != "identity" or (self.src and other.src and (self.scale or other.scale)):
            return None
        self.check()
        other.check()
        product = self.product or other.product
        if self.product and other.product:
            if self.product[0] is not other.product[0]:
                return None
            product = self.product[0], self.product[1] + other.product[1]
        if ((self.src and other.src) or (self.shift and other.shift)) and not saves(*self.ends, *other.ends):
            return None

        def total(a: Gathered | None, b: Gathered | None) -> Gathered | None:
            return a.of(a.kept() + b.kept()) if a and b else a or b

        edge, own = (self.edge, self.own) if self.edge is not None else (other.edge, other.own)
        if self.edge is not None and other.edge is not None:
            edge, own = self.edge + other.edge, True
        src, shift = total(self.src, other.src), total(self.shift, other.shift)
        return Term(src, self.scale or other.scale, shift, edge, own, product)

    def shifted(self, by: Tensor) -> Term | None:
        """Plus what is the same for each edge, added at nodes; without an activation."""
        src, shift = self.src, self.shift
        if self.act != "identity":
            return None
        self.check()
        if shift is not None and saves(shift):
            shift = shift.of(shift.kept() + by)
        elif src is not None and self.scale is None and saves(src):
            src = src.of(src.kept() + by)
        else:
            return None
        return Term(src, self.scale, shift, self.edge, self.own, self.product)

    def check(self) -> None:
        if self.versions != [*map(version_of, self.of_edges)]:  # somebody has written into them since
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
        if self.product is not None:
            multiplied = functional.linear(*self.product)
            out = multiplied if out is None else multiplied.add_(out)
        assert out is not None
        return out if self.act == "identity" else FUNCTIONS[ACTIVATIONS[self.act]](out)  # type: ignore[no-any-return]

    def factor(self, call: Any) -> gates.Factor:
        """The operands of a kernel."""
        self.check()
        edge = self.edge
        if edge is not None:
            edge = edge.reshape(edge.shape[0], -1)
            if not self.own and torch.is_grad_enabled():  # a framework that keeps the sum allows users to write into theirs
                edge = call.saved(edge)
        src, scale, shift = (None if kind is None else kind.saved() for kind in (self.src, self.scale, self.shift))
        attr, matrix = self.product or (None, None)
        if attr is not None and matrix is not None:
            attr, matrix = call.saved(attr) if torch.is_grad_enabled() else attr, matrix.t()
        return gates.Factor(src, scale, shift, edge, attr, matrix, self.act)


class Gate:
    """The product of one or two terms, a ``number`` and, if given, a ``weight [E]``."""

    def __init__(self, *terms: Term, weight: Tensor | None = None, number: float = 1) -> None:
        self.terms, self.weight, self.number = terms, weight, number
        self.version = None if weight is None else version_of(weight)
        self.ends = [kind for term in terms for kind in term.ends]
        if self.ends:  # none of a factor of edges alone, before it is multiplied
            self.call, self.like, self.shape = self.ends[0].call, self.ends[0].x, self.ends[0].shape

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
        for part in (self, other):
            part.check()
        for term in terms:
            term.check()
        weights = [g.weight for g in (self, other) if g.weight is not None]
        weight = math.prod(weights[1:], start=weights[0]) if weights else None
        return Gate(*terms, weight=weight, number=self.number * other.number)

    @property
    def requires_grad(self) -> bool:
        of_edges = [self.weight, *(t for term in self.terms for t in term.of_edges)]
        return any(t.requires_grad for t in (*(kind.x for kind in self.ends), *of_edges) if t is not None)

    def check(self) -> None:
        if self.weight is not None and version_of(self.weight) != self.version:  # somebody has written into it since
            raise Exists

    def value(self) -> Tensor:
        self.check()
        out = math.prod((term.value() for term in self.terms[1:]), start=self.terms[0].value())
        out = out if self.weight is None else out * self.weight.view(-1, *(1,) * (out.dim() - 1))
        return out if self.number == 1 else out * self.number

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        """The reduction at each destination; of an extremum, if it is one of weighted rows."""
        self.check()
        term = self.terms[0]
        is_one = len(self.terms) == 1 and self.weight is None and self.number == 1
        if is_one and reduce == "sum" and term.act == "relu" and term.is_sum_with_edges and self.like.dtype in FEATURE_DTYPES:
            term.check()
            assert term.src is not None and term.edge is not None
            return self.call.edge_relu(term.src.x, term.edge.contiguous())  # type: ignore[no-any-return]
        if not gates.takes(self.like) or not saves(*self.ends):
            return None
        if reduce not in LINEAR:
            return self._extremum(reduce, training)
        factors, weight = tuple(term.factor(self.call) for term in self.terms), self.weight
        if weight is not None and torch.is_grad_enabled():
            weight = self.call.saved(weight)
        out = self.call.gate(factors, weight, reduce)
        return edges.shaped(out if self.number == 1 else out * self.number, self.shape[1:])

    def _extremum(self, reduce: str, training: bool) -> Tensor | None:
        rows = [n for n, term in enumerate(self.terms) if term.act == "identity" and term.ends == [term.src] and not term.of_edges]
        if len(self.terms) == 1 or not rows:
            return None
        src = self.terms[rows[0]].src
        assert src is not None
        weight = self.terms[1 - rows[0]].value().flatten(1)
        weight = weight if self.weight is None else weight * self.weight.unsqueeze(1)
        weight = weight if self.number == 1 else weight * self.number
        return Weighted(src, weight, weight.shape[1], self.shape[1:]).aggregate(reduce, training)


class Projected:
    """``functional.linear`` of a sum's messages, which may as well be done to the sum."""

    def __init__(self, of: Gate, weight: Tensor, bias: Tensor | None) -> None:
        self.of, self.weight, self.bias = of, weight, bias
        self.versions = version_of(weight), None if bias is None else version_of(bias)

    call = property(lambda self: self.of.call)
    like = property(lambda self: self.of.like)
    shape = property(lambda self: (*self.of.shape[:-1], self.weight.shape[0]))

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for t in (self.of, self.weight, self.bias) if t is not None)

    def check(self) -> None:
        if self.versions != (version_of(self.weight), None if self.bias is None else version_of(self.bias)):
            raise Exists

    def value(self) -> Tensor:
        self.check()
        return functional.linear(self.of.value(), self.weight, self.bias)

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        """The sum or mean at each destination."""
        self.check()
        out = self.of.aggregate(reduce, training) if reduce in LINEAR else None
        if out is None or self.bias is None:
            return None if out is None else functional.linear(out, self.weight)
        degree = self.call.degrees(out.dtype)
        times = degree if reduce == "sum" else degree.clamp(max=1)
        return torch.addmm(times * self.bias, out, self.weight.t())


class Existing:
    """Rows of edges that exist."""

    def __init__(self, call: Any, rows: Tensor) -> None:
        self.call, self.like, self.shape, self.requires_grad = call, rows, tuple(rows.shape), rows.requires_grad
        self.version = version_of(rows)

    def value(self) -> Tensor:
        if version_of(self.like) != self.version:  # somebody has written into them since
            raise Exists
        return self.like

    def aggregate(self, reduce: str, training: bool) -> Tensor:
        """The reduction at each destination. Extrema keep rows for their gradients, which users may write into."""
        rows = self.value()
        if reduce not in LINEAR and self.call.grad_enabled:
            rows = self.call.saved(rows)
        return self.call.reduced(rows, reduce)  # type: ignore[no-any-return]


class Added:
    """The sum of several, which are reduced one by one."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.call, self.like, self.shape = parts[0].call, parts[0].like, parts[0].shape

    @property
    def requires_grad(self) -> bool:
        return any(part.requires_grad for part in self.parts)

    def value(self) -> Tensor:
        return sum((part.value() for part in self.parts[1:]), start=self.parts[0].value())

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        """The sum or mean at each destination."""
        total = None
        for part in self.parts if reduce in LINEAR else ():
            found = part.aggregate(reduce, training)
            if found is None:
                return None
            total = found if total is None else total + found
        return total


def saves(*kinds: Any) -> bool:
    """Whether these are rows of nodes, of which there are fewer than edges."""
    return all(isinstance(kind, Gathered) and kind.call.is_fewer(kind.x) for kind in kinds)


def version_of(t: Tensor) -> int | None:
    """By which writes are noticed; ``None`` where torch counts none."""
    return None if t.is_inference() else t._version
