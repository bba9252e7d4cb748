"""Calls on a CPU whose graph is new and whose messages are so few that to make a graph that is found again takes longer than a
kernel saves: PyG's own operations run. Asked only of calls whose results have the same bits either way, sums in the order of edges,
so that nobody sees in a result which call was the first. (Where a layer is one node of autograd, the two parts of the gradient of
its features are added in an order that differs between COO and CSR, too.)"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.cache import Sightings
from gnnfast.config import settings
from gnnfast.dispatch.select import cannot_win
from gnnfast.graph.checks import saved_tensors_are_watched

_met = Sightings()
# Layers that have met a graph twice, by their id: in two passes, or several times in one.
returning: dict[int, weakref.ref[object]] = {}


def are_few(edge_index: Tensor, row_bytes: int, where: str = "new cpu") -> bool:
    """Whether rows of all edges of an ``edge_index [2, E]`` are few bytes. A trace would warn of the comparison, and with int32 ids
    torch sums gradients wrongly."""
    if edge_index.dtype is not torch.int64 or guards.context():
        return False
    return cannot_win(edge_index.size(1) * row_bytes, torch.is_grad_enabled(), settings(), where)


def is_new_and_few(edge_index: Tensor, row_bytes: int, owner: object) -> bool:
    """Whether a layer ``owner``, to which so far each graph was new, meets a new one of few bytes. What was met before must not
    decide in checkpointing."""
    key = id(owner)
    if key in returning or not are_few(edge_index, row_bytes) or (torch.is_grad_enabled() and saved_tensors_are_watched()):
        return False
    if not _met.again(edge_index, key):
        return True
    returning[key] = weakref.ref(owner, lambda _: returning.pop(key, None))
    return False
