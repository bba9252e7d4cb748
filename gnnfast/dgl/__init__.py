"""The DGL adapter: ``startup`` makes PyPI's DGL importable on today's torch, ``backend.py`` replaces its SpMM."""
