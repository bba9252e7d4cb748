"""Records of measurements, the summary of their ratios, and both as Markdown and JSON.

A record is ``{"title", "environment", "summary", "rows"}``. Rows with a ``group`` get a table for each group. A summary is a list
of rows too, or a dict of lines. Columns named ``A / B`` are ratios.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from . import timing

Row = dict[str, Any]
RECORD = {"title", "environment", "summary", "rows"}
LIMIT = "limit / gnnfast"
KINDS = ("group", "pass", "reduce", "dtype", "threads")  # never averaged over
LEVELS = ((), ("order",), ("F",), ("weighted",), ("order", "F"))  # averaged over all else
SLOWER = 0.98
MANY_EDGES = 1_000_000


def make_record(title: str, device: torch.device, rows: list[Row], summary: dict[str, Any] | list[Row]) -> dict[str, Any]:
    return {"title": title, "environment": timing.environment(device), "summary": summary, "rows": rows}


def write(path: str | None, title: str, rows: list[Row], device: torch.device, summary: dict[str, Any]) -> None:
    """Prints the rows as a table and, with ``path``, writes them as ``path.json`` and ``path.md``."""
    record = make_record(title, device, rows, summary)
    print(markdown(record), flush=True)
    if path:
        save(record, path)


def save(record: dict[str, Any], path: str) -> None:
    """Writes ``path.json`` and ``path.md``."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{path}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{path}.md").write_text(markdown(record) + "\n")


def save_with_chart(record: dict[str, Any], path: str, chart: Callable[[str], str]) -> None:
    """:func:`save`, and ``chart(path.svg)``, which returns a line to print; or a line that says why there is no chart."""
    save(record, path)
    try:
        print(chart(f"{path}.svg"))
    except ImportError as error:
        print(f"no chart: {error.name} is not installed; pip install 'gnnfast[bench]'")


def markdown(record: dict[str, Any]) -> str:
    environment = ", ".join(f"{k} {cell(v)}" for k, v in record["environment"].items() if v is not None)
    parts = [f"# {record['title']}", environment]
    groups: dict[str, list[Row]] = {}
    for row in record["rows"]:
        groups.setdefault(row.get("group", ""), []).append({k: v for k, v in row.items() if k != "group"})
    for group, rows in groups.items():
        parts += [f"## {group}"] if group else []
        parts.append(table(rows))
    summary = record["summary"]
    if summary:
        is_table = isinstance(summary, list)
        parts += ["## Summary", table(summary)] if is_table else ["\n".join(f"- {k}: {cell(v)}" for k, v in summary.items())]
    return "\n\n".join(parts)


def table(rows: list[Row]) -> str:
    columns = [c for c in dict.fromkeys(k for row in rows for k in row) if any(row.get(c) is not None for row in rows)]
    lines = [columns, ["---"] * len(columns), *([cell(row.get(c)) for c in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple | list):
        return ", ".join(map(cell, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def summarise(rows: Iterable[Row]) -> list[Row]:
    """Geometric mean, least and greatest of each ratio, over all cells of a kind and by order and by F. The fraction of the
    limit counts graphs of more than a million edges; ratios to a peer count the cells below 0.98 as slower."""
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(row.get(k) for k in KINDS), []).append(row)
    found = []
    for kind, cells in kinds.items():
        for ratio in dict.fromkeys(k for row in cells for k in row if " / " in k):
            having = [r for r in cells if r.get(ratio) and (ratio != LIMIT or r["edges"] > MANY_EDGES)]
            for level in LEVELS:
                if all(len({r[k] for r in having}) > 1 for k in level):
                    found += [dict(zip(KINDS, kind)) | row for row in _averaged(having, ratio, level)]
    return found


def _averaged(rows: list[Row], ratio: str, level: tuple[str, ...]) -> Iterable[Row]:
    parts: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        parts.setdefault(tuple(row[k] for k in level), []).append(row[ratio])
    values_of = {k: {row[k] for row in rows} for k in ("order", "weighted", "F")}
    rest = {k: "all" if len(values) > 1 else values.pop() for k, values in values_of.items() if values}
    for part, values in parts.items():
        row = rest | dict(zip(level, part))
        row |= {"ratio": ratio, "cells": len(values), "geometric mean": timing.geometric_mean(values)}
        row |= {"least": min(values), "greatest": max(values)}
        if ratio.endswith(" / gnnfast") and ratio not in (LIMIT, "1 thread / gnnfast"):
            row[f"below {SLOWER}"] = sum(v < SLOWER for v in values)
        yield row
