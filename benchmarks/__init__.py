"""Benchmarks of gnnfast beside its peers: ``gnnfast bench NAME``, or ``python -m benchmarks.NAME`` in a source tree."""

BENCHMARKS = {
    "spmm": "sparse-dense products beside cuSPARSE, MKL, DGL and gather-scatter",
    "layers": "whole PyG layers, forward and backward, with gnnfast on and off",
    "gas_gar": "a graph used once: GAS on COO against conversion and GAR",
}
