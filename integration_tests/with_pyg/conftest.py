"""Fixtures: a small random graph, and features of its nodes."""

from __future__ import annotations

import pytest
import torch
from promises import EDGES, NODES, F

nn = pytest.importorskip("torch_geometric.nn", reason="PyG is not installed")
# PyG's propagate() of a class is written for the first layer of it in a process: after one of several reductions, which multiplies no
# matrix, none would.
nn.SAGEConv(1, 1)


@pytest.fixture
def edge_index(device):
    return torch.randint(0, NODES, (2, EDGES), device=device)


@pytest.fixture
def x(device):
    return torch.randn(NODES, F, device=device, dtype=torch.float64)
