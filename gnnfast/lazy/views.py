"""What ``message()`` sees of rows of edges that do not exist: in another shape, or in part. Memory is shared as in PyG: who writes
into what is seen writes into the rows, which exist by then (:meth:`gnnfast.lazy.rows.Call.settle`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnfast.lazy.kinds import Gathered, Weighted
from gnnfast.lazy.rows import HANDLERS, Rows, handles, kind_of
from gnnfast.lazy.scores import Scores, Shares


# ---- in another shape --------------------------------------------------------------------------------------------------------
def _sizes(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers that are given one by one, or in one argument."""
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], (int, torch.SymInt)) else shape


def _tail(kind: Any, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dimensions after the first of rows that are seen in another shape; ``None`` if the first is no longer the edges."""
    if not shape or not all(isinstance(n, (int, torch.SymInt)) for n in shape):
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
    return kind.seen_as(tail, t) if isinstance(kind, (Gathered, Weighted, Scores, Shares)) else NotImplemented


@handles(Tensor.view, Tensor.reshape, torch.reshape)
def _view(t: Any, *shape: Any) -> Any:
    kind = kind_of(t)
    return NotImplemented if kind is None or not shape else _seen_as(t, _tail(kind, _sizes(shape)))


@handles(Tensor.unsqueeze, torch.unsqueeze)
def _unsqueeze(t: Any, dim: int) -> Any:
    kind = kind_of(t)
    if kind is None or not isinstance(dim, int):
        return NotImplemented
    at, tail = dim % (t.dim() + 1), list(kind.shape[1:])
    return _seen_as(t, (*tail[: at - 1], 1, *tail[at - 1 :])) if at else NotImplemented


@handles(Tensor.squeeze, torch.squeeze)
def _squeeze(t: Any, dim: Any = None) -> Any:
    kind = kind_of(t)
    if kind is None or not isinstance(dim, int):
        return NotImplemented
    at, tail = dim % t.dim(), list(kind.shape[1:])
    return _seen_as(t, (*tail[: at - 1], *tail[at:])) if at and tail[at - 1] == 1 else NotImplemented


@handles(Tensor.flatten, torch.flatten)
def _flatten(t: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    kind = kind_of(t)
    if kind is None:
        return NotImplemented
    start, end, tail = start_dim % t.dim(), end_dim % t.dim(), kind.shape[1:]
    return _seen_as(t, (*tail[: start - 1], math.prod(tail[start - 1 : end]), *tail[end:])) if start else NotImplemented


# ---- in part -----------------------------------------------------------------------------------------------------------------
def _leaves_edges(kind: Any, dims: tuple[Any, ...], *others: Any) -> bool:
    """Whether a function of some ``dims`` of rows of nodes, and of other numbers, leaves the dimension of the edges as it is."""
    if not isinstance(kind, Gathered) or not all(type(n) is int for n in (*dims, *others)):
        return False
    return all(dim % len(kind.shape) for dim in dims)


@handles(Tensor.__getitem__)
def _getitem(t: Any, index: Any) -> Any:
    kind, at = kind_of(t), index if type(index) is tuple else (index,)
    if kind is None or not at or not all(map(_is_plain, at)):
        return NotImplemented
    taken = sum(part is not None and part is not ... for part in at)
    if not (at[0] is ... and taken < len(kind.shape)) and not _is_whole(at[0]):
        return NotImplemented
    if isinstance(kind, Gathered):
        return kind.seen(lambda rows: rows[at], t)
    only_adds = all(part is None or part is ... or _is_whole(part) for part in at)
    return _seen_as(t, _with_ones(at, kind.shape)[1:]) if only_adds else NotImplemented


def _is_whole(part: Any) -> bool:
    """Whether a part of an index is ``:``."""
    return type(part) is slice and part == slice(None)


def _with_ones(at: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what an index of ``None``, ``:`` and ``...`` takes."""
    left, found = list(shape), []
    for n, part in enumerate(at):
        if part is None:
            found.append(1)
            continue
        taken = len(left) - sum(later is not None for later in at[n + 1 :]) if part is ... else 1
        found += left[:taken]
        del left[:taken]
    return *found, *left


def _is_plain(part: Any) -> bool:
    """Whether a part of an index takes what it does without a look at any tensor."""
    if type(part) is slice:
        return all(n is None or type(n) is int for n in (part.start, part.stop, part.step))
    return part is None or part is ... or type(part) is int


@handles(Tensor.detach)
def _detach(t: Any) -> Any:
    kind = kind_of(t)
    return kind.seen(Tensor.detach, t) if isinstance(kind, Gathered) else NotImplemented


@handles(Tensor.narrow, torch.narrow)
def _narrow(t: Any, dim: Any, start: Any, length: Any) -> Any:
    kind = kind_of(t)
    if not _leaves_edges(kind, (dim,), start, length):
        return NotImplemented
    return kind.seen(lambda rows: rows.narrow(dim, start, length), t)


@handles(Tensor.select, torch.select)
def _select(t: Any, dim: Any, index: Any) -> Any:
    kind = kind_of(t)
    return kind.seen(lambda rows: rows.select(dim, index), t) if _leaves_edges(kind, (dim,), index) else NotImplemented


@handles(Tensor.transpose, torch.transpose)
def _transpose(t: Any, dim0: Any, dim1: Any) -> Any:
    kind = kind_of(t)
    return kind.seen(lambda rows: rows.transpose(dim0, dim1), t) if _leaves_edges(kind, (dim0, dim1)) else NotImplemented


@handles(Tensor.permute, torch.permute)
def _permute(t: Any, *dims: Any) -> Any:
    kind, order = kind_of(t), _sizes(dims) if dims else ()
    if not order or type(order[0]) is not int or order[0] % t.dim() or not _leaves_edges(kind, order[1:]):
        return NotImplemented
    return kind.seen(lambda rows: rows.permute(order), t)


def _parts(function: Any, at: int) -> Callable[..., Any]:
    """For functions that give several parts, along the dimension that they are told by an argument of that position."""

    def handler(t: Any, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(t)
        dim = kwargs["dim"] if "dim" in kwargs else args[at] if len(args) > at else 0
        if not _leaves_edges(kind, (dim,)) or any(isinstance(a, (Tensor, torch.SymInt)) for a in (*args, *kwargs.values())):
            return NotImplemented

        def part(n: int) -> Gathered:
            found: Gathered = kind.seen(lambda rows: function(rows, *args, **kwargs)[n], t)
            return found

        return tuple(map(part, range(len(function(kind.x, *args, **kwargs)))))

    return handler


for _owner in (Tensor, torch):
    HANDLERS[_owner.split], HANDLERS[_owner.chunk] = _parts(_owner.split, 1), _parts(_owner.chunk, 1)
    HANDLERS[_owner.unbind] = _parts(_owner.unbind, 0)
