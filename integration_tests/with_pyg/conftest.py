"""Fixtures: a small random graph, and features of its nodes."""

from __future__ import annotations

import pytest
import torch
from promises import EDGES, NODES, F


@pytest.fixture
def edge_index(device):
    return torch.randint(0, NODES, (2, EDGES), device=device)


@pytest.fixture
def x(device):
    return torch.randn(NODES, F, device=device, dtype=torch.float64)
