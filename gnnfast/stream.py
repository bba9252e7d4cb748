"""The current CUDA stream."""

from __future__ import annotations

import torch

_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)  # builds without CUDA have none


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on it. Calls ask this often: without torch's layers above it."""
    return _capturing()  # type: ignore[no-any-return]
