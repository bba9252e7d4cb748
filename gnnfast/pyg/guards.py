"""Situations in which the framework's own code must run, whatever is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfast import _native

_PLAIN = (Tensor, torch.nn.Parameter)


def context() -> str:
    """Why no call can be served now (tracing, function transforms, ...); empty if calls can be."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace or ONNX export is recording"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode AD is active"
    return ""


def operand(name: str, t: object) -> str:
    """Why a tensor operand cannot be served; empty if it can be."""
    if type(t) not in _PLAIN:
        return f"{name} is a {type(t).__name__}"
    assert isinstance(t, Tensor)
    if t.layout is not torch.strided:
        return f"{name} has layout {t.layout}"
    missing = _native.missing(t.device.type)
    if missing:
        return f"{name} is on {t.device.type}: {missing}"
    return ""


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be converted."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
