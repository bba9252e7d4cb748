"""Options of attention layers, modules that call them, and whether they were served."""

from __future__ import annotations

import torch
from graphs import relative_error

import gnnfast

F = 8


class Pair(torch.nn.Module):
    """Features of sources and destinations as arguments of their own."""

    def __init__(self, layer):
        super().__init__()
        self.conv = layer

    def forward(self, a, b, edge_index):
        return self.conv((a, b), edge_index)


def served(report, layer="GATConv"):
    return any(place == f"pyg {layer}" and kernel in ("attention", "edge softmax") for place, kernel, _ in report.kernels)


TRANSFORMERS = {
    "plain": {},
    "heads": {"heads": 3},
    "mean of heads": {"heads": 2, "concat": False},
    "beta": {"heads": 2, "beta": True},
    "no root": {"heads": 2, "root_weight": False},
    "dropout": {"heads": 2, "dropout": 0.5},
}


def same(run):
    """Whether a function returns or raises the same with gnnfast and without."""
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        try:
            results.append(run())
        except Exception as error:
            results.append(type(error))
    gnnfast.enable()
    found, expected = results
    return found == expected if isinstance(expected, type) else relative_error(found, expected) < 1e-5


class Initial(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, x.detach(), edge_index)
