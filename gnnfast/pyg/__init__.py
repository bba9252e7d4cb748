"""The PyG adapter: recognises what PyG's layers compute and runs it as one aggregation. ``install.py`` lists what is patched,
``propagate.py`` serves message passing, ``norm.py`` remembers graph processing, ``sparse.py`` serves sparse adjacency matrices."""
