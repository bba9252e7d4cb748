"""A graph in the formats kernels want, and what is remembered with it: :mod:`.formats` (COO, CSR, CSC), :mod:`.plan` (how CUDA
kernels work through them), :mod:`.edge_values` (weights in slot order), :mod:`.draws` (of sampling), :mod:`.ids` (bad ones, on a
GPU)."""

from gnnfast.graph.graph import Graph

__all__ = ["Graph"]
