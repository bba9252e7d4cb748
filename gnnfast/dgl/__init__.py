"""The DGL adapter: ``startup`` makes PyPI's DGL importable on today's torch, ``backend.py`` replaces its kernels where gnnfast
is faster, ``messages.py`` all of them for the graphs that ``bridge`` puts on a GPU."""
