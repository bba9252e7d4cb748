"""Calls that are left to PyG for their size. On a CPU, where a graph is new and to make one that is found again takes longer than a
kernel saves: PyG's own operations run, or one over the edges as they are listed (:mod:`gnnfast.pyg.listed`). Asked only of calls
whose results have the same bits either way, sums in the order of edges, so that nobody sees in a result which call was the first.
(Where a layer is one node of autograd, the two parts of the gradient of its features are added in an order that differs between COO
and CSR, too.) Where kernels round otherwise (GATConv, RGATConv, PNAConv with edge features) tiny graphs are left that are not new,
too."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gnnfast.cache import Sightings
from gnnfast.config import is_overridden, settings
from gnnfast.dispatch.execute import reproducible
from gnnfast.dispatch.select import most_left
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.guards import tracing_state
from gnnfast.types import LINEAR, REORDERED

_deterministic = torch._C._get_deterministic_algorithms
_met = Sightings()
NEW_IN_A_ROW = 8  # graphs, after which a layer is taken for one again to which each is new


class _Returning:
    """A layer that has met a graph twice, in two passes or several times in one, and ``new`` graphs since; ``asked``: the id of the
    last of them, if it was asked for once. The layer and its ``propagate`` ask both."""

    __slots__ = ("asked", "forget", "new")

    def __init__(self, owner: object) -> None:
        key = id(owner)
        self.forget, self.new, self.asked = weakref.ref(owner, lambda _: returning.pop(key, None)), 0, 0


returning: dict[int, _Returning] = {}  # by the id of the layer


SMALL, NEW_AND_SMALL = "too small to gain", "too small to gain from a graph that is new"
ALONE = {why: f"{why}: its operations alone" for why in (SMALL, NEW_AND_SMALL)}  # where not even PyG's own code calls them

# Where edges are few, over any graph and over one that is new: of what is left to PyG's operations, and of what runs as one
# operation over the edges as they are listed, extrema without a gradient alone (gnnfast.dispatch.select.SMALL).
PARTS, LISTED, LISTED_EXTREMA = (tuple(f"{age} {what}cpu" for age in ("tiny", "new")) for what in ("", "sums ", "extrema "))


def of_sums(x: Tensor, reduce: str | None, weight: Any = None) -> tuple[str, ...]:
    """Which of them a reduction of features on a CPU is, times weights or not (:func:`gnnfast.pyg.listed.aggregate`)."""
    if x.dtype not in REORDERED or reduce is None:
        return PARTS
    if isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled():
        return PARTS  # a sum over features, in another order
    return LISTED if reduce in LINEAR else LISTED_EXTREMA


def are_few(edge_index: Tensor, row_bytes: int, where: str = "new cpu") -> bool:
    """Whether rows of all edges of an ``edge_index [2, E]`` are few bytes. A trace would warn of the comparison, and with int32 ids
    torch sums gradients wrongly."""
    if edge_index.dtype is not torch.int64 or tracing_state() is not None:
        return False
    return edge_index.numel() * row_bytes <= 2 * most_left(torch.is_grad_enabled(), settings(), where)


def is_new_and_few(edge_index: Tensor, row_bytes: int, owner: object, where: str) -> bool:
    """Whether a layer ``owner``, to which each graph was new of late, meets a new one of few bytes. What was met before must not
    decide in checkpointing."""
    return are_few(edge_index, row_bytes, where) and is_new(edge_index, owner)


def is_new(edge_index: Tensor, owner: object) -> bool:
    """The same of one of which it is known that they are few."""
    if torch.is_grad_enabled() and saved_tensors_are_watched():
        return False
    key = id(owner)
    found = returning.get(key)
    if _met.again(edge_index, key):
        if found is None:
            returning[key] = _Returning(owner)
        elif found.asked != id(edge_index):
            found.new = 0
        else:
            found.asked = 0
        return False
    if found is not None:
        found.new += 1
        found.asked = id(edge_index)
        if found.new <= NEW_IN_A_ROW:
            return False
        returning.pop(key, None)
    return True


def is_tiny(x: Any, edge_index: Any, where: str) -> bool:
    """Whether a graph on a CPU is one of which the parts of a layer, each in one operation, are as fast as a kernel for the whole,
    and faster over a new one: they need no format and nothing that is kept."""
    if type(x) is not Tensor or type(edge_index) is not Tensor or not edge_index.is_cpu or x.dim() != 2 or edge_index.dim() != 2:
        return False
    return are_few(edge_index, x.shape[1] * x.element_size(), where)


def is_new_and_tiny(x: Any, edge_index: Any, owner: object, where: str) -> bool:
    """Whether a layer ``owner`` meets such a graph for the first time."""
    return is_tiny(x, edge_index, where) and is_new(edge_index, owner)


# Ids on a CPU of which no part of a layer that is left has anything to gain: a softmax over so many edges is as fast in PyG, and
# beside a GPU, or over more edges, it is not, where another layer has converted the graph.
MOST_ALONE = 1 << 13


def parts_are_few(edge_index: Tensor) -> bool:
    """Whether parts of a layer need not be asked either, once it is left."""
    return edge_index.is_cpu and edge_index.numel() <= MOST_ALONE


class Bound:
    """Up to how many ``ids`` of an ``edge_index``, in inference and in training, rows of ``width`` numbers are too few to gain from
    a kernel, so that nothing else of a module's call is looked at: on small graphs ten lines of Python take a hundredth of a step.
    PyG's own is always right."""

    __slots__ = ("dtype", "feature", "forget", "ids", "on_cuda", "place", "width")

    def __init__(self, module: object, feature: str, x: Tensor, edge_index: Tensor, ids: tuple[int, int]) -> None:
        key = id(module)
        self.ids, self.feature, self.width, self.place = ids, feature, x.shape[1], f"pyg {type(module).__name__}"
        self.dtype, self.on_cuda, self.forget = edge_index.dtype, x.is_cuda, weakref.ref(module, lambda _: bounds.pop(key, None))

    def holds(self, x: Any, edge_index: Any) -> bool:
        """Whether a call is one of these."""
        if type(x) is tuple and x:
            x = x[0]
        return type(x) is Tensor and self.are_few(edge_index) and x.dim() == 2 and x.size(1) == self.width

    def are_few(self, edge_index: Any) -> bool:
        """Whether it has so few. What has been learnt must not decide in checkpointing, and a trace would warn."""
        if type(edge_index) is not Tensor or tracing_state() is not None or is_overridden():
            return False
        training, on_cuda = torch.is_grad_enabled(), self.on_cuda
        return (
            edge_index.numel() <= self.ids[training]
            and edge_index.dtype is self.dtype
            and edge_index.is_cuda is on_cuda
            and not (training and saved_tensors_are_watched())
            and not (on_cuda and (_deterministic() or reproducible.asked))
        )


bounds: dict[int, Bound] = {}  # by the id of the module


def remember(module: object, feature: str, x: Tensor, edge_index: Tensor, ids: tuple[int, int]) -> None:
    """That a call was left, so that others with so few ``ids``, in inference and in training, are found to be as small at once."""
    if x.dim() == 2 and not is_overridden():
        bounds[id(module)] = Bound(module, feature, x, edge_index, ids)


def most_ids(x: Tensor, where: str) -> tuple[int, int]:
    """In inference and in training, the ids of so many edges that rows of ``x`` at each are the most that may be too few to gain
    from a kernel."""
    row_bytes = x.shape[1] * x.element_size() or 1
    inference, training = (2 * int(most_left(training, settings(), where) // row_bytes) for training in (False, True))
    return inference, training
