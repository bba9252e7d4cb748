"""Runs before DGL is imported. ``gnnfast.pth`` and ``_gnnfast_dgl_shim.py`` are also installed at the top of site-packages, so that
worker processes started by ``spawn``, which import DGL anew, get the shim too."""
