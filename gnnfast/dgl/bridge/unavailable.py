"""What a DGL without CUDA cannot do for a GPU, with or without the bridge. Imported once DGL is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dgl.base import DGLError
from dgl.heterograph_index import HeteroGraphIndex

try:
    from dgl.cuda import GPUCache
except ImportError:  # DGL 1.1
    GPUCache = None

# (class, method, what it is for, what to do instead)
UNAVAILABLE = (
    (
        HeteroGraphIndex,
        "pin_memory_",
        "reading a graph from pinned memory (use_uva=True, pin_memory_())",
        "sample on the CPU with use_uva=False and device='cuda', which prefetches features",
    ),
    (GPUCache, "__init__", "the GPU's cache of features (gpu_cache=)", "leave gpu_cache out, or move the features to the GPU"),
)


def entries() -> Iterable[tuple[Any, str, Any]]:
    """The replacements, which raise a DGLError that says so."""
    for owner, name, purpose, instead in UNAVAILABLE:
        if owner is not None:
            yield (
                owner,
                name,
                _raising(f"This DGL was built without CUDA, which {purpose} needs: {instead}, or use a build with it"),
            )


def _raising(message: str) -> Any:
    def unavailable(*args: Any, **named: Any) -> Any:
        raise DGLError(message)

    return unavailable
