"""Checks of what users pass, and of what surrounds a call."""

from __future__ import annotations

import contextlib
import functools
import operator
import reprlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.types import INDEX_DTYPES

_SERVED = frozenset(device for device in ("cpu", "cuda") if not _native.missing(device))


# True if hooks get what autograd saves (it returns them). Activation checkpointing compares what a forward pass and its
# repetition save, so that nothing may then depend on what has been used before. No function of Python: each call of a layer asks.
_top = torch._C._autograd._top_saved_tensors_default_hooks
saved_tensors_are_watched: Callable[[], bool] = functools.partial(_top, False)  # type: ignore[assignment]


def check_tensor(name: str, t: Any) -> None:
    """Raises TypeError or ValueError if ``t`` is no tensor with plain memory."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.layout is not torch.strided or t.is_nested:
        kind = "nested" if t.is_nested else str(t.layout)
        raise ValueError(f"{name} must be a dense tensor (torch.strided), got one of layout {kind}; convert it with .to_dense()")
    if torch.autograd.forward_ad._current_level >= 0:
        raise RuntimeError(f"gnnfast has no forward-mode derivatives, and {name} is used under forward-mode AD; use reverse mode")
    if is_emptied(t):
        raise ValueError(f"{name} has shape {list(t.shape)}, but its storage holds {t.untyped_storage().nbytes()} bytes")


def is_emptied(t: Tensor) -> bool:
    """Whether the storage of a plain tensor was made too small for it, as FSDP and offloading do."""
    if torch.compiler.is_compiling() or type(t) not in (Tensor, torch.nn.Parameter) or t.is_meta or t._is_zerotensor():
        return False
    if not t.numel() or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return False
    last = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))
    return t.untyped_storage().nbytes() < (last + 1) * t.element_size()


def check_ids(name: str, ids: Any, dim: int) -> Tensor:
    """Ids as a plain tensor of that many dimensions. Raises TypeError, ValueError or RuntimeError if they are none."""
    check_tensor(name, ids)
    if hasattr(ids, "as_tensor"):  # PyG's EdgeIndex and Index
        ids = ids.as_tensor()
    if type(ids) is not Tensor:
        if type(ids).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise TypeError(f"{name} must be a plain torch.Tensor, got {type(ids).__name__}, which holds its data elsewhere")
        ids = ids.as_subclass(Tensor)
    if ids.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} holds ids and must be int32 or int64, got {ids.dtype}; convert it with .long()")
    if ids.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, got shape {list(ids.shape)}")
    check_device(name, ids)
    return ids


def check_device(name: str, t: Tensor) -> None:
    """Raises RuntimeError if there are no kernels for the device of ``t``."""
    if t.device.type not in _SERVED:
        reason = _native.missing(t.device.type)
        raise RuntimeError(f"gnnfast has no kernels for {t.device}, where {name} is: {reason}")


def check_integer(name: str, value: Any) -> int:
    """An integer of Python, NumPy or torch as one of Python. Raises TypeError if it is none."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # tensors raise them all
            return operator.index(value)
    raise TypeError(f"{name} must be an integer, got {type(value).__name__} {reprlib.repr(value)}")


# Kernels count slots in int32, up to a block's edges ahead.
MOST_NODES, MOST_EDGES = 2**31 - 1, 2**31 - 2**16


def check_count(name: str, value: Any) -> int:
    """A number of nodes or edges. Raises TypeError or ValueError if it is none that kernels can count to."""
    number = check_integer(name, value)
    most, text = (MOST_EDGES, "2^31 - 2^16") if name == "num_edges" else (MOST_NODES, "2^31 - 1")
    if not 0 <= number < most:
        raise ValueError(f"{name} must be at least 0 and below {text}, got {number}")
    return number


def brief(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"
