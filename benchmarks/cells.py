"""What the SpMM benchmark measures: the cells of the cross products in ``spmm_cases.json``."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import graphs

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
GROUPS: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("spmm_cases.json").read_text())
DEFAULT_GROUPS = {"cpu": ["cpu", "threads"], "cuda": [g for g in GROUPS if g not in ("cpu", "threads")]}
# The axes of a cross product and what one that does not name them has; the last six are the fields of a cell.
AXES: dict[str, list[Any]] = {
    "graphs": ["all"],
    "orders": ["random"],
    "widths": [64],
    "dtypes": ["fp32"],
    "passes": ["forward"],
    "reductions": ["sum"],
    "weighted": [True],
    "threads": [None],
}


@dataclass(frozen=True)
class Cell:
    """What is asked of gnnfast."""

    width: int
    dtype: str
    what: str
    reduce: str
    weighted: bool
    threads: int | None

    def references(self) -> Iterator[tuple[str, Cell]]:
        """Other cells that this one is set against."""
        if self.what != "forward":
            yield "forward", replace(self, what="forward")
        if self.reduce != "sum":
            yield "sum", replace(self, reduce="sum")
        if self.threads and self.threads > 1:
            yield "1 thread", replace(self, threads=1)


@dataclass(frozen=True)
class Case:
    """A cell on a graph, its peers, and whether to look at its device time."""

    group: str
    graph: str
    order: str
    cell: Cell
    peers: tuple[str, ...]
    profile: bool

    @property
    def columns(self) -> dict[str, Any]:
        """What names the case in a table."""
        cell = self.cell
        named = {"group": self.group, "graph": self.graph, "order": self.order, "F": cell.width, "dtype": cell.dtype}
        named |= {"pass": cell.what, "reduce": cell.reduce, "weighted": "yes" if cell.weighted else "no"}
        return named | ({"threads": cell.threads} if cell.threads else {})


def cases(groups: list[str], replaced: dict[str, list[Any] | None]) -> list[Case]:
    """All cases of the groups, with whole axes replaced (``{"widths": [48]}``), each once."""
    found: dict[Case, None] = {}
    for group in groups:
        for product in GROUPS[group]:
            axes = {name: replaced.get(name) or product.get(name, default) for name, default in AXES.items()}
            if axes["graphs"] == ["all"]:
                axes["graphs"] = graphs.random_order_names()
            if axes["threads"] == ["all"]:
                axes["threads"] = thread_counts(os.cpu_count() or 1)
            for graph, order, *cell in itertools.product(*axes.values()):
                case = Case(group, graph, order, Cell(*cell), tuple(product.get("peers", ())), product.get("profile", False))
                found[case] = None
    return list(found)


def thread_counts(most: int) -> list[int]:
    """Powers of two below ``most``, and ``most``."""
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]
