"""Attention as kinds of rows that do not exist (:mod:`gnnfast.lazy.kinds`): scores, the softmax of scores over the edges at each
destination, and what that weighs, whose sums are one kernel."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import functional

from gnnfast.dispatch import edges
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.lazy.kinds import Added, Exists, Gate, Gathered, Joined, Pair, Projected, Term, Weighted, version_of


class Scores:
    """A number for each edge and head, of which softmax makes weights; ``[E, H]``, seen in another ``tail`` of dimensions."""

    call: Any
    like: Tensor
    heads: int
    requires_grad: Any

    def __init__(self, tail: tuple[int, ...], source: Any) -> None:
        self.tail, self.source = tail, source

    shape = property(lambda self: (self.call.edges, *self.tail))

    def value(self) -> Tensor:
        return self.source.value().view(self.shape) if self.source is not None else self.made().view(self.shape)  # type: ignore[no-any-return]

    def seen_as(self, tail: tuple[int, ...], source: Any) -> Scores:
        """The same in another shape, and memory, as ``source``."""
        raise NotImplementedError

    def made(self) -> Tensor:
        raise NotImplementedError

    def share(self) -> Tensor:
        """The softmax over the edges at each destination, ``[E, H]``."""
        raise NotImplementedError

    def attend(self, rows: Gathered, dropout: float, training: bool) -> Tensor | None:
        """The sum of ``rows`` of sources that the softmax weighs, after a dropout, ``[num_dst, F]``, in one kernel; ``None`` if
        there is none."""
        raise NotImplementedError

    def aggregate(self, reduce: str, training: bool) -> None:
        return None


class Dots(Scores):
    """``number`` times the dot products ``<a[dst], b[src]>`` per head of rows ``a [num_dst, F]`` and ``b [num_src, F]``, which
    nobody writes into."""

    def __init__(
        self, call: Any, a: Tensor, b: Tensor, heads: int, tail: tuple[int, ...], number: float = 1, source: Any = None
    ) -> None:
        super().__init__(tail, source)
        self.call, self.like, self.a, self.b, self.heads, self.number = call, a, a, b, heads, number

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.a.requires_grad or self.b.requires_grad

    def seen_as(self, tail: tuple[int, ...], source: Any) -> Dots:
        return Dots(self.call, self.a, self.b, self.heads, tail, self.number, source)

    def times(self, number: float) -> Dots:
        return Dots(self.call, self.a, self.b, self.heads, self.tail, self.number * number)

    def made(self) -> Tensor:
        out = self.call.dot(self.a, self.b, self.heads)
        return out if self.number == 1 else out * self.number  # type: ignore[no-any-return]

    def share(self) -> Tensor:
        return self.call.softmax(self.made(), None, None, 1.0)  # type: ignore[no-any-return]

    def attend(self, rows: Gathered, dropout: float, training: bool) -> Tensor | None:
        if math.prod(rows.x.shape[1:]) != self.b.shape[1]:
            return None
        return self.call.dot_attention(self.a, self.b, rows.saved(), self.heads, self.number, dropout, training)  # type: ignore[no-any-return]


class Sums(Scores):
    """The leaky ReLU, of a ``slope`` (1: none), of ``pair``, the sum of a number of both ends, and, if given, of ``edge [E, ...]``
    in the shape of the pair."""

    def __init__(
        self, pair: Pair, slope: float = 1.0, edge: Tensor | None = None, tail: tuple[int, ...] | None = None, source: Any = None
    ) -> None:
        super().__init__(pair.shape[1:] if tail is None else tail, source)
        self.call, self.like, self.heads = pair.call, pair.like, math.prod(pair.shape[1:])
        self.pair, self.slope, self._edge = pair, slope, edge
        self._version = None if edge is None else version_of(edge)

    @staticmethod
    def of(kind: Any) -> Sums | None:
        """What rows are, if they are one."""
        if isinstance(kind, Sums):
            return kind
        if isinstance(kind, Pair):
            return Sums(kind) if kind.how == "add" else None
        term = Term.of(kind) if isinstance(kind, Gate) else None
        if term is None or term.act != "identity" or term.src is None or term.shift is None or term.scale or term.product:
            return None
        return Sums(Pair(term.shift, term.src, "add"), edge=term.edge)

    @property
    def edge(self) -> Tensor | None:
        if self._edge is not None and version_of(self._edge) != self._version:  # somebody has written into it since
            raise Exists
        return self._edge

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.pair.requires_grad or (self._edge is not None and self._edge.requires_grad)

    def seen_as(self, tail: tuple[int, ...], source: Any) -> Sums:
        return Sums(self.pair, self.slope, self.edge, tail, source)

    def made(self) -> Tensor:
        out, edge = self.pair.value(), self.edge
        out = out if edge is None else out + edge
        return out if self.slope == 1 else functional.leaky_relu(out, self.slope)

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Of destinations and sources, ``[nodes, H]``."""
        first, second = self.pair.a.saved().contiguous(), self.pair.b.saved().contiguous()
        return (second, first) if self.pair.a.side == BY_SRC else (first, second)

    def share(self) -> Tensor:
        edge = None if self.edge is None else self.edge.reshape(-1, self.heads)
        return self.call.softmax(edge, *self._ends(), self.slope)  # type: ignore[no-any-return]

    def attend(self, rows: Gathered, dropout: float, training: bool) -> Tensor | None:
        if self.edge is not None:
            return None
        return self.call.attention(rows.saved(), *self._ends(), self.slope, dropout, training)  # type: ignore[no-any-return]


class Scaled:
    """Sums, as rows of features, times ``by``, which is the same for each edge."""

    def __init__(self, of: Sums, by: Tensor) -> None:
        self.of, self.by, self.call, self.like, self.shape = of, by, of.call, of.like, of.shape
        self.version = version_of(by)

    requires_grad = property(lambda self: self.of.requires_grad or self.by.requires_grad)

    def check(self) -> None:
        if version_of(self.by) != self.version:
            raise Exists

    def value(self) -> Tensor:
        self.check()
        return self.of.value() * self.by

    def aggregate(self, reduce: str, training: bool) -> None:
        return None


class Bends(Scores):
    """GATv2's: the sum of each head's features of ``Scaled``, of which nobody has seen the rows."""

    def __init__(self, of: Scaled, tail: tuple[int, ...], source: Any = None) -> None:
        super().__init__(tail, source)
        self.of, self.call, self.like, self.heads = of, of.call, of.like, math.prod(of.shape[1:-1])

    requires_grad = property(lambda self: self.of.requires_grad)

    def seen_as(self, tail: tuple[int, ...], source: Any) -> Bends:
        return Bends(self.of, tail, source)

    def made(self) -> Tensor:
        return self.of.value().sum(-1)

    def share(self) -> Tensor:
        return self.call.softmax(self.made().view(-1, self.heads), None, None, 1.0)  # type: ignore[no-any-return]

    def attend(self, rows: Gathered, dropout: float, training: bool) -> Tensor | None:
        self.of.check()
        sums, by = self.of.of, self.of.by
        dst, src = sorted((sums.pair.a, sums.pair.b), key=lambda kind: kind.side == BY_SRC)
        if sums.edge is not None or rows.x is not src.x:
            return None
        att = by.expand(1, *self.of.shape[1:]).reshape(-1)
        return self.call.gatv2_attention(dst.saved().contiguous(), rows.saved().contiguous(), att, self.heads, sums.slope, dropout)  # type: ignore[no-any-return]


class Shares:
    """The softmax of scores over the edges at each destination, after a dropout."""

    def __init__(self, of: Scores, tail: tuple[int, ...], dropout: float = 0.0, source: Any = None) -> None:
        self.of, self.tail, self.dropout, self.source = of, tail, dropout, source

    call = property(lambda self: self.of.call)
    like = property(lambda self: self.of.like)
    shape = property(lambda self: (self.of.call.edges, *self.tail))
    requires_grad = property(lambda self: self.of.requires_grad)

    def seen_as(self, tail: tuple[int, ...], source: Any) -> Shares:
        return Shares(self.of, tail, self.dropout, source)

    def value(self) -> Tensor:
        if self.source is not None:
            return self.source.value().view(self.shape)  # type: ignore[no-any-return]
        share = self.of.share()
        return (functional.dropout(share, self.dropout) if self.dropout else share).view(self.shape)

    def aggregate(self, reduce: str, training: bool) -> None:
        return None


class Attended(Weighted):
    """Rows of sources weighted by shares, which have a kernel that makes none of them for their sum."""

    def __init__(self, of: Gathered, shares: Shares, tail: tuple[int, ...], source: Any = None) -> None:
        self.rows, self.shares, self.heads, self.tail, self.heads_summed = of, shares, shares.of.heads, tail, False
        self.source = source
        self._made: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        if self._made is None:
            self._made = self.shares.value().view(-1, self.heads)
        return self._made

    @property
    def requires_grad(self) -> bool:
        return self.rows.x.requires_grad or self.shares.requires_grad

    def seen_as(self, tail: tuple[int, ...], source: Any) -> Attended:
        return Attended(self.rows, self.shares, tail, source)

    def aggregate(self, reduce: str, training: bool) -> Tensor | None:
        if reduce == "sum" and self._made is None:
            out = self.shares.of.attend(self.rows, self.shares.dropout, training)
            if out is not None:
                return edges.shaped(self.call.written(out), self.tail)
        return super().aggregate(reduce, training)


def total_of(joined: Joined) -> Sums | None:
    """The sum of the last dimension, where both ends are among the parts."""
    joined.check()
    ends: dict[int, Gathered] = {}
    edge: Tensor | None = None
    for part in joined.parts:
        if isinstance(part, Gathered):
            summed, other = part.of(part.kept().sum(-1)), ends.get(part.side)
            ends[part.side] = summed if other is None else summed.of(other.x + summed.x)
        else:
            edge = part.sum(-1) if edge is None else edge + part.sum(-1)
    return Sums(Pair(ends[BY_DST], ends[BY_SRC], "add"), edge=edge) if len(ends) == 2 else None


Kind = Gathered | Weighted | Pair | Joined | Gate | Projected | Added | Scores | Shares | Scaled
