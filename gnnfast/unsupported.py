"""How gnnfast says no, everywhere."""

from __future__ import annotations


class Unsupported(RuntimeError):
    """Why a call is left to the framework, in words that ``gnnfast.report()`` shows. Adapters catch it at their boundary."""


CAPTURING = "a CUDA graph is being captured and these features are not compressed yet; run twice before capturing"
