"""gnnfast makes existing graph-neural-network code fast: ``import gnnfast`` in PyTorch Geometric or DGL code, and message passing
runs on fused kernels with the same numbers."""

import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

try:
    from gnnfast.config import override, settings, unknown_variables
except ValueError as error:  # a bad value: the command line shows it as a line, a program as the error that it is
    if os.path.basename(sys.argv[0]) in ("gnnfast", "-m"):
        sys.exit(f"gnnfast: {error}")
    raise

from gnnfast import _native
from gnnfast.captured import CaptureError, capture
from gnnfast.graph import Graph
from gnnfast.profiling import Profile, profile
from gnnfast.reporting import FallbackError, clear_report, report
from gnnfast.switch import disable, enable, is_enabled, make_importable

if _native.cpu.loaded:
    from gnnfast import ops  # noqa: F401  registers fake kernels and autograd formulas
from gnnfast.functional import attention, edge_softmax, sddmm, spmm, spmm_sampled, spmm_sparse_features

try:
    __version__ = version("gnnfast")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

__all__ = [
    "CaptureError",
    "FallbackError",
    "Graph",
    "Profile",
    "__version__",
    "attention",
    "capture",
    "clear_report",
    "disable",
    "edge_softmax",
    "enable",
    "is_enabled",
    "override",
    "profile",
    "report",
    "sddmm",
    "spmm",
    "spmm_sampled",
    "spmm_sparse_features",
]

for _name, _hint in unknown_variables().items():  # here, where the warning names the line that imports gnnfast
    warnings.warn(f"gnnfast knows no environment variable {_name}, so it has no effect: {_hint}", stacklevel=2)
make_importable()
if settings().enabled:
    enable()
    if not _native.cpu.loaded:
        warnings.warn(f"gnnfast does nothing here: {_native.cpu.reason}", stacklevel=2)
