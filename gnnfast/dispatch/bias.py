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

if _native.cpu.loaded:
    from gnnfast.ops.bias import BIASED, LINEARS

# Of rows that torch's sum takes four to five times as long over as a kernel does, from so many bytes on of all biases of a node by
# more than that keeps the host (30 to 60 us beside an H200); wider ones it reads as fast.
FEWEST_BYTES, MOST_WIDTH = 64 << 20, 512
FEWEST_ROWS = FEWEST_BYTES // (MOST_WIDTH * 8)


def linear(x: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``."""
    if bias is None or not _pays(x, bias) or not _fit(x, weight, bias):
        return functional.linear(x, weight, bias)
    return LINEARS(x, weight, bias)[0]  # type: ignore[no-any-return]


def linears(x: Any, *parameters: Any) -> Sequence[Tensor]:
    """What linear layers, each a weight and a bias or ``None``, make of the same rows: where it is worth it, as one node of
    autograd."""
    weights, biases = parameters[::2], parameters[1::2]
    given = [bias for bias in biases if bias is not None]
    if given and _pays(x, *given) and _fit(x, *parameters):
        return LINEARS(x, *parameters)  # type: ignore[no-any-return]
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases)]


def biased(x: Tensor, bias: Tensor) -> Tensor:
    """``x + bias``."""
    return BIASED(x, bias) if _pays(x, bias) and x.shape[1] == bias.shape[0] else x + bias  # type: ignore[no-any-return]


def are_many(x: Tensor, width: int) -> bool:
    """Whether as many rows as ``x`` has, of ``width`` of its numbers, are so many bytes."""
    return x.shape[0] * width * x.element_size() >= FEWEST_BYTES * relative_bandwidth()


def _pays(x: Any, *biases: Tensor) -> bool:
    """Whether the gradients of ``biases [F]`` of as many rows as ``x`` has are worth a node of their own."""
    # Where torch traces, to look at a parameter would be part of the trace.
    if type(x) is not Tensor or not x.is_cuda or guards.tracing_state() is not None or torch.compiler.is_dynamo_compiling():
        return False
    if x.dim() != 2 or x.dtype not in FEATURE_DTYPES or not torch.is_grad_enabled():
        return False
    width = 0
    for bias in biases:
        width += bias.numel() if bias.requires_grad and bias.dim() == 1 and bias.shape[0] <= MOST_WIDTH else 0
    if not width or not are_many(x, width):
        return False
    if any(bias.dtype is not x.dtype or guards.operand("bias", bias) for bias in biases) or guards.operand("x", x):
        return False
    # A mode sees other functions in torch's backward pass than what it made of those of the forward pass.
    return not (torch.is_autocast_enabled("cuda") or guards.function_modes() or guards.context())


def _fit(x: Tensor, *parameters: Tensor | None) -> bool:
    return all(t is None or (t.dtype is x.dtype and not guards.operand("parameter", t)) for t in parameters)
