"""CUDA streams."""

from __future__ import annotations

from collections.abc import Callable

import torch

_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)  # builds without CUDA have none


_current: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
_DEFAULT = 0  # the stream on which most programs run all they do


class Started:
    """What was just started on a device's current stream, for which other streams have to wait before they use it. To remember the
    stream takes a hundredth of what an event does, so there is one only where the stream may be gone by then."""

    __slots__ = ("_event", "_may_use")

    def __init__(self, device: torch.device) -> None:
        stream, self._event = _current(device.index), None
        self._may_use = {stream}
        if stream != _DEFAULT:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self, device: torch.device) -> None:
        """Called with the same device before the current stream uses it."""
        if torch.compiler.is_compiling():
            return
        stream = _current(device.index)
        if stream in self._may_use or is_capturing():
            return
        if self._event is None:
            torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        else:
            torch.cuda.current_stream(device).wait_event(self._event)
        self._may_use.add(stream)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current one. Calls ask this often: without torch's layers above it."""
    return _capturing()  # type: ignore[no-any-return]
