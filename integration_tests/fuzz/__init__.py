"""Random programs over PyG's and DGL's layers, each run with gnnfast and without: outputs, gradients and errors must be the same.

A case is a seed. It makes a few small graphs (the ugly ones included), features and edge weights of every kind (constant, leaf,
parameter), a layer with random options and a sequence of uses: train, evaluate, write into inputs in every way torch allows, step an
optimiser, cast, copy, change graphs, reach for what is remembered, replace parts of PyG. ``python -m fuzz --help`` (in the folder of the tests) runs many.
"""
