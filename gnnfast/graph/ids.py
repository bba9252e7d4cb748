"""Ids of edges on a GPU that are out of range: found by the kernels, which leave the edge out, and raised here as soon as the host
can know without waiting for the device (``plugin_src/common/ids.cuh``)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from gnnfast.patching import Patches

_found: ctypes.Array[ctypes.c_longlong] | None = None


def watch(ids: Tensor) -> None:
    """Called with the ids of a new graph on a GPU, before a kernel sees them."""
    global _found
    if _found is None:
        address = torch.ops.gnnfast.id_complaints(ids)
        _found = (ctypes.c_longlong * 2).from_address(address) if address else None


def check() -> None:
    """Raises IndexError if a kernel has met an id out of range since the last time."""
    if _found is not None and _found[1]:
        value, bound = _found[0], _found[1] // 2
        _found[1] = 0
        raise IndexError(
            f"index {value} of an edge is out of range [0, {bound}). An earlier call on a GPU met it, left the edge out and did "
            "not wait to say so: check the edge_index against the number of nodes (num_nodes, or the rows of x)"
        )


def check_when_synchronising(patches: Patches) -> None:
    """Lets ``torch.cuda.synchronize`` raise what :func:`check` does."""
    original = torch.cuda.synchronize

    @functools.wraps(original)
    def synchronize(*arguments: Any, **named: Any) -> None:
        original(*arguments, **named)
        check()

    patches.set_attribute(torch.cuda, "synchronize", synchronize)
