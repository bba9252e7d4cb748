"""gnnfast makes existing graph-neural-network code fast: ``import gnnfast`` in PyTorch Geometric or DGL code, and message passing
runs on fused kernels with the same numbers."""

from importlib.metadata import PackageNotFoundError, version

from gnnfast import _native
from gnnfast.captured import CaptureError, capture
from gnnfast.config import override, settings
from gnnfast.graph import Graph
from gnnfast.reporting import FallbackError, clear_report, report
from gnnfast.switch import disable, enable, is_enabled

if _native.cpu.loaded:
    from gnnfast import ops  # noqa: F401  registers fake kernels and autograd formulas
from gnnfast.functional import sddmm, spmm, spmm_sampled, spmm_sparse_features

try:
    __version__ = version("gnnfast")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

__all__ = [
    "CaptureError",
    "FallbackError",
    "Graph",
    "__version__",
    "capture",
    "clear_report",
    "disable",
    "enable",
    "is_enabled",
    "override",
    "report",
    "sddmm",
    "spmm",
    "spmm_sampled",
    "spmm_sparse_features",
]

if settings().enabled:
    enable()
