"""What is promised of a call: with gnnfast it gives what it gives without, or the same error."""

from __future__ import annotations

import torch
from graphs import relative_error

import gnnfast

NODES, EDGES, F = 30, 120, 8


def both(call):
    """What a call gives with gnnfast and without; an error as its type and text."""

    def run():
        try:
            return call()
        except Exception as error:
            return type(error), str(error)

    found = run()
    gnnfast.disable()
    try:
        return found, run()
    finally:
        gnnfast.enable()


def same(call):
    found, expected = both(call)
    if not isinstance(expected, torch.Tensor):
        assert found == expected
    else:
        assert relative_error(found, expected) < 1e-10
