"""Products and sums with a bias: by torch, but where the gradient of the bias adds up so many rows on a GPU that a node of autograd
in Python is worth it (:mod:`gnnfast.ops.bias`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfast import _native, guards
from gnnfast.hardware import relative_bandwidth
from gnnfast.types import FEATURE_DTYPES

_function_modes = torch._C._len_torch_function_stack
if _native.cpu.loaded:
    from gnnfast.ops.bias import BIASED, LINEARS

# Of rows that torch's sum takes four to five times as long over as a kernel does, from so many bytes on by more than the node keeps
# the host (30 to 60 us beside an H200); wider ones it reads as fast.
FEWEST_BYTES, MOST_WIDTH = 64 << 20, 512
FEWEST_ROWS = FEWEST_BYTES // (MOST_WIDTH * 8)


def linear(x: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``."""
    if bias is None or not _pays(x, bias) or not _fit(x, weight, bias):
        return functional.linear(x, weight, bias)
    return LINEARS(x, weight, bias)[0]  # type: ignore[no-any-return]


def linears(x: Any, *parameters: Any) -> Sequence[Tensor] | None:
    """What linear layers, each a weight and a bias or ``None``, make of the same rows, as one node of autograd. ``None``: torch's
    own are as fast, or nobody but a module knows what they make."""
    weights, biases = parameters[::2], parameters[1::2]
    pays = any(bias is not None and _pays(x, bias) for bias in biases)
    if not pays or any(weight is None for weight in weights) or not _fit(x, *parameters):
        return None
    return LINEARS(x, *parameters)  # type: ignore[no-any-return]


def biased(x: Tensor, bias: Tensor) -> Tensor:
    """``x + bias``."""
    return BIASED(x, bias) if _pays(x, bias) and x.shape[1] == bias.shape[0] else x + bias  # type: ignore[no-any-return]


def _pays(x: Any, bias: Tensor) -> bool:
    """Whether the gradient of a ``bias [F]`` of as many rows as ``x`` has is worth a node of its own."""
    # Where torch traces, to look at a parameter would be part of the trace.
    if type(x) is not Tensor or not x.is_cuda or guards.tracing_state() is not None or torch.compiler.is_dynamo_compiling():
        return False
    if not (bias.requires_grad and torch.is_grad_enabled()):
        return False
    width, least = bias.numel(), FEWEST_BYTES * relative_bandwidth()
    if x.dim() != 2 or bias.dim() != 1 or width > MOST_WIDTH or x.shape[0] * width * bias.element_size() < least:
        return False
    if x.dtype is not bias.dtype or x.dtype not in FEATURE_DTYPES or torch.is_autocast_enabled("cuda"):
        return False
    # A mode sees other functions in torch's backward pass than what it made of those of the forward pass.
    return not (_function_modes() or guards.context() or guards.operand("x", x) or guards.operand("bias", bias))


def _fit(x: Tensor, *parameters: Tensor | None) -> bool:
    return all(t is None or (t.dtype is x.dtype and not guards.operand("parameter", t)) for t in parameters)
