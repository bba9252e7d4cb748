"""Sentences and tables as plain text of 80 columns, without colours, and as HTML."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WIDTH = 80  # columns: of a terminal as it comes, and of a mail


class Table(NamedTuple):
    """``rows`` are strings; columns named in ``numbers`` stand to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()


def text(before: Iterable[str], tables: Iterable[Table] = (), after: Iterable[str] = (), width: int = WIDTH) -> str:
    """Lines, tables and lines again, wrapped at ``width``."""
    from rich import table as rich_table
    from rich.console import Console

    out = io.StringIO()
    console = Console(width=width, color_system=None, file=out, highlight=False, markup=False, emoji=False)
    for line in before:
        console.print(line)
    for title, columns, rows, numbers in tables:
        if not rows:
            continue
        natural = [max(map(len, [name, *(row[nth] for row in rows)])) for nth, name in enumerate(columns)]
        tight = sum(natural) + 2 * (len(columns) - 1) > width
        drawn = rich_table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for nth, name in enumerate(columns):
            if name in numbers:  # never broken; its title is, between words, where there is little room
                least = max(map(len, [*name.split(), *(row[nth] for row in rows)]))
                drawn.add_column(name, justify="right", width=least if tight else None, overflow="fold")
            else:
                drawn.add_column(name, overflow="fold")
        for row in rows:
            drawn.add_row(*row)
        console.print(f"\n{title}" if title else "")
        console.print(drawn)
    after = list(after)
    if after:
        console.print()
    for line in after:
        console.print(line)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def as_html(before: Iterable[str], tables: Iterable[Table] = (), after: Iterable[str] = ()) -> str:
    """The same for a notebook. Everything is escaped."""
    parts = [f"<p><b>{_escaped(line)}</b></p>" for line in before]
    for title, columns, rows, _ in tables:
        if rows:
            head = "".join(f"<th style='text-align:left'>{_escaped(name)}</th>" for name in columns)
            body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
            parts.append(f"<p>{_escaped(title)}</p><table style='text-align:left'><tr>{head}</tr>{body}</table>")
    return "".join([*parts, *(f"<p>{_escaped(line)}</p>" for line in after)])


def percent(part: float, whole: float) -> str:
    """A share; never 0% or 100% of what is not none or all."""
    share = 100 * part / whole if whole else 0.0
    return f"{min(max(round(share), 1), 99)}%" if 0 < part < whole else f"{round(share)}%"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _escaped(value: str) -> str:
    return html.escape(value).replace("\n", "<br>")
