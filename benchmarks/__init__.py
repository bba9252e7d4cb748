"""Benchmarks of gnnfast beside its peers: ``gnnfast bench NAME``, or ``python -m benchmarks.NAME`` in a source tree."""

BENCHMARKS = {
    "spmm": "sparse-dense products beside cuSPARSE, MKL, DGL and gather-scatter",
    "attention": "scores, softmax and weighted sums over a graph, beside the same with PyG's operations",
    "operators": "DGL's operators one by one, on DGL's kernels and gnnfast's (CPU)",
    "bridge": "DGL with gnnfast beside PyG with gnnfast, for the same work",
    "functions": "Python functions in DGL's update_all and apply_edges, with gnnfast and as DGL runs them",
    "train": "whole models in PyG and DGL, full batch and sampled neighbours: time an epoch, memory, losses, accuracy",
    "layers": "whole PyG layers, forward and backward, with gnnfast on and off",
    "memory": "peak memory of layers, and the largest graph that fits (CUDA)",
    "compiled": "models under torch.compile: PyG compiled, gnnfast uncompiled and compiled",
    "host": "whole models on small graphs and graphs new in each step, with gnnfast on and off",
    "conversion": "an edge_index that is new in the formats kernels need, beside PyG and DGL",
    "lists": "PyG's functions of edge lists and of groups (gcn_norm, softmax, scatter, ...), with gnnfast on and off",
    "sampled": "accuracy and time of sampled inference, of your own model (--script) or of known ones",
    "sparse_features": "aggregations, products, layers and training on sparse node features, by density, beside dense ones and PyG",
    "calibrate": "what the selector decides by: GAS against conversion and GAR, and schedules",
}
TOOLS = {
    "script": "your own script without and with gnnfast (the same as --script SCRIPT)",
    "compare": "two result files: what got slower beyond the noise of both",
    "page": "one HTML page of all result files in a folder",
}
