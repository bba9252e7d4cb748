"""What is measured to be too small to gain, or too few: nothing is where the graphs are as small as those of tests."""

from __future__ import annotations

import pytest

from gnnfast.dispatch import select
from gnnfast.dispatch.select import SMALL, Small


def nothing_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of tests would all be left to PyG, or to DGL when met for the first time, or not converted."""
    monkeypatch.setattr("gnnfast.dispatch.select.SMALL", dict.fromkeys(SMALL, Small(-1, -1)))
    monkeypatch.setattr("gnnfast.dispatch.select.CONVERT_ON_CPU", 0)
    monkeypatch.setattr("gnnfast.features.TIMES_ON_CUDA", 1)
    monkeypatch.setattr("gnnfast.lazy.rows.FEW", 0)
    monkeypatch.setattr("gnnfast.lazy.rows.FEW_ON_CPU", 0)
    monkeypatch.setattr("gnnfast.lazy.operations.WIDE", 0)
    for what in ("ops.bias.FEWEST_BYTES", "dispatch.bias.FEWEST_BYTES", "pyg.products.FEWEST_ROWS"):
        monkeypatch.setattr(f"gnnfast.{what}", 0)
    monkeypatch.setattr("gnnfast.pyg.sparse._is_new", lambda src: False)
    monkeypatch.setattr("gnnfast.pyg.matrices.FEW_ENTRIES", -1)
    monkeypatch.setattr("gnnfast.pyg.matrices.FEW_ENTRIES_ON_CPU", -1)
    monkeypatch.setattr("gnnfast.pyg.norm.LISTED_AGAIN", -1)
    monkeypatch.setattr("gnnfast.dgl.backend.FEW_EDGES", -1)
    monkeypatch.setattr("gnnfast.dgl.backend.NARROW", 0)


def tiny_on_cpu(monkeypatch: pytest.MonkeyPatch, training: int, inference: int | None = None) -> None:
    """Bytes of messages up to which what a layer does on a CPU is left, over any graph."""
    for where in ("tiny cpu", "tiny sums cpu", "tiny extrema cpu"):
        monkeypatch.setitem(select.SMALL, where, Small(training, training if inference is None else inference))
