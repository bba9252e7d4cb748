"""The recogniser of message() functions accepts what it must and nothing else."""

from __future__ import annotations

import pytest

from gnnfast.pyg.messages import Message, recognise


def plain(self, x_j):
    """A docstring changes nothing."""
    return x_j


def gcn(self, x_j, edge_weight):
    return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


def swapped(self, norm, h_j):
    return norm.view(-1, 1) * h_j


def early(self, x_j, edge_weight):
    if edge_weight is None:
        return x_j
    return x_j * edge_weight.unsqueeze(1)


def attention(self, x_j, alpha):
    return alpha.unsqueeze(-1) * x_j


def column(self, x_j, w):
    return w[:, None] * x_j


KNOWN = {
    plain: Message("x", None, "plain", False),
    gcn: Message("x", "edge_weight", "view", True),
    swapped: Message("h", "norm", "view", False),
    early: Message("x", "edge_weight", "column", True),
    attention: Message("x", "alpha", "unsqueeze", False),
    column: Message("x", "w", "column", False),
}


@pytest.mark.parametrize("function", KNOWN, ids=lambda f: f.__name__)
def test_known(function):
    assert recognise(function.__code__) == KNOWN[function]


SCALE = 2.0


def _closure():
    factor = 2.0
    return lambda self, x_j: factor * x_j


UNKNOWN = {
    "other operation": lambda self, x_j, w: w.view(-1, 1) + x_j,
    "other shape": lambda self, x_j, w: w.view(1, -1) * x_j,
    "negated condition": lambda self, x_j, w: x_j if w is not None else w.view(-1, 1) * x_j,
    "constant": lambda self, x_j: 2 * x_j,
    "global": lambda self, x_j: SCALE * x_j,
    "closure": _closure(),
    "destination": lambda self, x_i: x_i,
    "both ends": lambda self, x_i, x_j: x_j,
    "weight per source": lambda self, x_j, w_j: w_j.view(-1, 1) * x_j,
    "unused argument": lambda self, x_j, w: x_j,
    "index as weight": lambda self, x_j, index: index.view(-1, 1) * x_j,
    "squared": lambda self, x_j: x_j * x_j,
    "attribute": lambda self, x_j: self.scale * x_j,
    "not gathered": lambda self, x, w: w.view(-1, 1) * x,
    "keyword arguments": lambda self, x_j, **kwargs: x_j,
    "variable arguments": lambda self, *x_j: x_j,
    "the indices themselves": lambda self, edge_index_j: edge_index_j,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name):
    assert recognise(UNKNOWN[name].__code__) is None
