"""Records of measurements, the summary of their ratios, and both as Markdown and JSON.

A record is ``{"title", "environment", "summary", "rows"}``. Rows with a ``group`` get a table for each group. A summary is a list
of rows too, or a dict of lines. Columns named ``A / B`` are ratios.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from gnnfast.rendering import WIDTH, Table, text

from . import timing

Row = dict[str, Any]
RECORD = {"title", "environment", "summary", "rows"}
LIMIT = "limit / gnnfast"
KINDS = ("group", "pass", "reduce", "dtype", "threads")  # never averaged over
LEVELS = ((), ("order",), ("F",), ("weighted",), ("order", "F"))  # averaged over all else
SLOWER = 0.98
NOISY = 0.1  # a spread of times from which small differences mean nothing
REMARKS = ("note", "failed", "last line", "peak of")  # columns of words that name no row
NAMED = 3  # rows that a warning names
MANY_EDGES = 1_000_000


def make_record(title: str, device: torch.device, rows: list[Row], summary: dict[str, Any] | list[Row]) -> dict[str, Any]:
    return {"title": title, "environment": timing.environment(device), "summary": summary, "rows": rows}


def add_output(parser: argparse.ArgumentParser, chart: bool = False) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--out", metavar="PATH", help=f"write PATH.json, PATH.md{' and PATH.svg' if chart else ''}")
    parser.add_argument("--markdown", action="store_true", help="print Markdown rather than tables for the terminal")


def make_parser(name: str, about: str) -> argparse.ArgumentParser:
    """A benchmark's. ``about`` is a docstring: paragraphs are filled to the width of a terminal, and indented lines stay lines."""
    paragraphs = []
    for paragraph in about.strip().split("\n\n"):
        lines = paragraph.splitlines() if paragraph.startswith(" ") else [" ".join(paragraph.split())]
        paragraphs.append("\n".join(_filled(line) for line in lines))
    return argparse.ArgumentParser(
        prog=f"gnnfast bench {name}",
        description="\n\n".join(paragraphs),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _filled(line: str) -> str:
    deeper = " " * 24 if line.startswith(" ") else ""  # what is beside a word of a list
    return textwrap.fill(line, WIDTH, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False)


def named(choices: Iterable[str], about: str = "") -> dict[str, Any]:
    """The options of an argument that is one or more of many: argparse's own list of choices is wider than a terminal."""
    choices = tuple(choices)
    return {"choices": choices, "metavar": "NAME", "help": f"of {', '.join(choices)}{about and f'; {about}'}"}


def add_device(parser: argparse.ArgumentParser, choices: Sequence[str] | None = ("cpu", "cuda")) -> None:
    """``--device``, of which what torch cannot use ends in a line. Without ``choices`` it may be ``cuda:1``, too."""
    parser.add_argument(
        "--device",
        type=_usable_device,
        choices=choices,
        default="cuda" if torch.cuda.is_available() else "cpu",
        metavar="DEVICE",
        help="cpu or cuda, which is the default where torch has it",
    )


def _usable_device(name: str) -> str:
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdecimal())):
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r}; accepted are cpu and cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no CUDA device")
    if int(index or 0) >= max(torch.cuda.device_count(), 1):
        raise argparse.ArgumentTypeError(f"{name}: torch sees {torch.cuda.device_count()} CUDA devices, the first is cuda:0")
    return name


def write(
    options: argparse.Namespace, title: str, rows: list[Row], device: torch.device, summary: dict[str, Any] | list[Row]
) -> dict[str, Any]:
    """Prints the rows as tables and, with ``--out``, writes them. Returns the record."""
    record = make_record(title, device, rows, summary)
    if options.out:
        save(record, options.out)
    show(record, options.markdown)
    return record


def show(record: dict[str, Any], as_markdown: bool = False, rows: bool = True) -> None:
    """Prints a record, with or without its rows, and a warning where it was measured on a noisy machine."""
    shown = record if rows else record | {"rows": []}
    print(markdown(shown) if as_markdown else terminal(shown), flush=True)
    warning = noise(record["rows"])
    if warning:
        print(text([warning]), flush=True)


def noise(rows: list[Row]) -> str:
    """A line where times vary so much that small differences mean nothing, of all rows or of some; else empty."""
    spreads = [[v for k, v in row.items() if k.endswith("spread") and isinstance(v, float)] for row in rows]
    typical = statistics.median(flat) if (flat := [value for some in spreads for value in some]) else 0.0
    most = {nth: max(some) for nth, some in enumerate(spreads) if some}
    noisy = sorted((nth for nth, value in most.items() if value > max(NOISY, typical)), key=lambda nth: -most[nth])
    parts = []
    if typical > NOISY:
        parts.append(f"this machine is noisy: half of the times vary by more than {typical:.0%}")
    if noisy:
        named = [f"{_name(rows[nth], rows)} by {most[nth]:.0%}" for nth in noisy[:NAMED]]
        more = f", and {len(noisy) - NAMED} more rows" if len(noisy) > NAMED else ""
        parts.append(f"times vary most in {', '.join(named)}{more}" if parts else f"times vary in {', '.join(named)}{more}")
    return f"warning: {'; '.join(parts)}; differences of that size mean nothing" if parts else ""


def _names(rows: list[Row]) -> list[str]:
    """The columns that name the rows: words and whole numbers."""
    return [c for c in columns_of(rows) if not any(isinstance(row.get(c), float) for row in rows) and c not in REMARKS]


def _name(row: Row, rows: list[Row]) -> str:
    """What tells a row from the others."""
    told = [c for c in _names(rows) if row.get(c) is not None and len({cell(other.get(c)) for other in rows}) > 1]
    return " ".join(cell(row[c]) for c in told) or "the only row"


def terminal(record: dict[str, Any], width: int | None = None) -> str:
    """A record as tables no wider than the terminal: what is the same in all rows stands above, and columns that do not fit follow
    in another table, behind those that name the row."""
    width = width or max(shutil.get_terminal_size((80, 24)).columns, 60)
    environment = ", ".join(f"{k} {cell(v)}" for k, v in record["environment"].items() if v is not None)
    found: list[Table] = []
    for group, rows in grouped(record["rows"]).items():
        found += _fitting(group, rows, width)
    summary = record["summary"]
    lines = [f"{k}: {cell(v)}" for k, v in summary.items()] if isinstance(summary, dict) else []
    if isinstance(summary, list) and summary:
        found += _fitting("summary", summary, width)
    return text([record["title"], environment], found, lines, width)


def _fitting(title: str, rows: list[Row], width: int) -> list[Table]:
    columns = columns_of(rows)
    names = _names(rows)
    same = [c for c in names if len(rows) > 1 and len({row.get(c) for row in rows}) == 1]
    keys = [c for c in names if c not in same]
    columns = [c for c in columns if c not in same]
    need = {
        c: 2 + max(map(len, [*c.split(), *(shown(c, row.get(c)) for row in rows)])) for c in columns
    }  # titles break between words
    head = ", ".join(filter(None, [title, *(f"{c} {shown(c, rows[0].get(c))}" for c in same)]))
    parts: list[list[str]] = [[]]
    for column in (c for c in columns if c not in keys):
        if parts[-1] and sum(need[c] for c in [*keys, *parts[-1], column]) > width:
            parts.append([])
        parts[-1].append(column)
    found = []
    for nth, part in enumerate(parts):
        mine = [*keys, *part]
        # Where the columns that name the rows fill the screen already, cells wrap.
        numbers = [c for c in mine if c not in REMARKS] if sum(need[c] for c in mine) <= width else []
        found.append(Table(head if not nth else "", mine, [[shown(c, row.get(c)) for c in mine] for row in rows], numbers))
    return found


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
    for group, rows in grouped(record["rows"]).items():
        parts += [f"## {group}"] if group else []
        parts.append(table(rows))
    summary = record["summary"]
    if summary:
        is_table = isinstance(summary, list)
        parts += ["## Summary", table(summary)] if is_table else ["\n".join(f"- {k}: {cell(v)}" for k, v in summary.items())]
    return "\n\n".join(parts)


def grouped(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by their group, without it."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("group", ""), []).append({k: v for k, v in row.items() if k != "group"})
    return groups


def columns_of(rows: list[Row]) -> list[str]:
    """The names that some row has a value for, in order."""
    return [c for c in dict.fromkeys(k for row in rows for k in row) if any(row.get(c) is not None for row in rows)]


def table(rows: list[Row]) -> str:
    columns = columns_of(rows)
    lines = [columns, ["---"] * len(columns), *([cell(row.get(c)) for c in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(column: str, value: Any) -> str:
    """A cell for people: spreads as percent."""
    return f"{value:.0%}" if column.endswith("spread") and isinstance(value, float) else cell(value)


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
