"""Situations in which the framework's own code must run, whatever is computed. Each call of a layer asks several times."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from gnnfast import _native
from gnnfast.stream import is_capturing

PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_CPU, _CUDA = not _native.missing("cpu"), not _native.missing("cuda")
tracing_state, _transforms = torch._C._get_tracing_state, torch._C._functorch.peek_interpreter_stack
_function_modes, _function_mode = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
# Whether a gradient stands for several, as in torch.autograd.grad(..., is_grads_batched=True): some of torch's functions, and ops
# that give several tensors, take none such.
is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)
_dispatch_modes, _forward_ad = torch._C._len_torch_dispatch_stack, torch.autograd.forward_ad


def context() -> str:
    """Why no call can be served now (tracing, function transforms, ...); empty if calls can be."""
    if tracing_state() is not None:
        return "torch.jit.trace or ONNX export is recording"
    if _transforms() is not None:
        return "a torch.func transform is active"
    if _forward_ad._current_level >= 0:
        return "forward-mode AD is active"
    if _dispatch_modes():
        return "a TorchDispatchMode is active"
    return ""


def function_modes() -> bool:
    """Whether a mode sees what torch's functions are called with, but one of ``torch.device`` or ``set_default_device``, which
    changes where tensors are made."""
    count = _function_modes()
    return count > 0 and any(type(_function_mode(i)) is not DeviceContext for i in range(count))


def has_kernels(t: Tensor) -> bool:
    """Whether the library for the device of a tensor is there."""
    return (_CPU and t.is_cpu) or (_CUDA and t.is_cuda)


def operand(name: str, t: object) -> str:
    """Why a tensor operand cannot be served; empty if it can be."""
    if type(t) not in PLAIN:
        return f"{name} is a {type(t).__name__}"
    assert isinstance(t, Tensor)
    if t.layout is not _STRIDED:
        return f"{name} has layout {t.layout}"
    if (_CUDA and t.is_cuda) or (_CPU and t.is_cpu):  # has_kernels(), of which layers ask four times
        try:
            return f"the storage of {name} was emptied" if t.data_ptr() == 0 and t.numel() else ""
        except RuntimeError:  # one that a torch.func transform has left behind, as in a layer that caches
            return f"{name} has no storage"
    return f"{name} is on {t.device.type}: {_native.missing(t.device.type)}"


def is_size(size: object) -> bool:
    """Whether a ``size`` that a layer was given is a pair of numbers, or nothing; PyG reads a tensor, too."""
    return size is None or (isinstance(size, (tuple, list)) and len(size) == 2 and not any(isinstance(n, Tensor) for n in size))


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be converted."""
    return device.type == "cuda" and is_capturing()
