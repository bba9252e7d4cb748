"""Every number in a table of measurements, in the README and the documentation, is one of a committed result file.

A table whose cells are numbers with their units is one of measurements. The paragraph before or after it names its result files
(``results/NAME/BENCHMARK.md`` or ``.json``), and each number is looked up in those rows of them that the table's row and column
name: as it was measured, or as the geometric mean, the least or the greatest of them, at the precision that the table shows.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
# Not what `make docs` has built there.
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)")
MEASURED = re.compile(r"(?:[\d.,\s()x%+*]|->|ms|us|GiB|MiB|MB|GB|TB/s|to|s\b)+")
FILE = re.compile(r"results/([\w./*-]+?)\.(?:md|json)")
SIDES = ("PyG", "DGL", "gnnfast")

Row = dict[str, Any]


class Cell(NamedTuple):
    """A cell of measurements, and the words of its row and its column that say what was measured."""

    text: str
    row: str
    column: str


class Table(NamedTuple):
    line: int
    around: str
    cells: list[Cell]


def tables(text: str) -> Iterator[Table]:
    """The tables of measurements of a page."""
    blocks = [(m.start(), m.group()) for m in re.finditer(r"(?:^(?!\s*$).*\n?)+", text, re.MULTILINE)]
    for nth, (at, block) in enumerate(blocks):
        lines = block.strip().splitlines()
        if len(lines) < 3 or not all(line.startswith("|") for line in lines):
            continue
        header, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines)
        cells, first = [], ""
        for row in rows:
            first = row[0] or first  # an empty first cell goes on with the last
            measured = [nth > 0 and bool(MEASURED.fullmatch(cell)) and bool(NUMBER.search(cell)) for nth, cell in enumerate(row)]
            # Integers of a column that is no side's say what a row is about: a width, say.
            about = [re.fullmatch(r"\d{1,4}", cell) and not any(side in name for side in SIDES) for cell, name in zip(row, header)]
            words = [first, *(cell for cell, is_one, names in zip(row[1:], measured[1:], about[1:]) if names or not is_one)]
            cells += [Cell(c, " ".join(words), h) for c, h, one, names in zip(row, header, measured, about) if one and not names]
        if cells:
            before, after = (blocks[i][1] if 0 <= i < len(blocks) else "" for i in (nth - 1, nth + 1))
            yield Table(text.count("\n", 0, at) + 1, before if FILE.search(before) else after, cells)


def rows_of(record: dict[str, Any]) -> list[Row]:
    return record["rows"] + (record["summary"] if isinstance(record["summary"], list) else [])


def named(rows: list[Row], words: str) -> list[Row]:
    """The rows that have every value that the words name."""
    words = f"{words} {words.replace('Conv', '')}".casefold()
    values = {str(v).casefold() for row in rows for v in row.values() if isinstance(v, str | int) and not isinstance(v, bool)}
    wanted = {v for v in values if v and re.search(rf"(?<![\w.]){re.escape(v)}(?![\w.])", words)}
    return [row for row in rows if wanted <= {str(v).casefold() for v in row.values()}]


def values(rows: list[Row], column: str) -> Iterator[float]:
    """What a table may show of rows: what was measured, and means and extremes of ratios, in columns of the sides it names."""
    sides = [side for side in SIDES if side in column]
    names = {k for row in rows for k, v in row.items() if isinstance(v, float) and (not sides or any(s in k for s in sides))}
    for name in names:
        measured = [row[name] for row in rows if isinstance(row.get(name), float)]
        yield from measured
        if " / " in name and min(measured) > 0:
            yield statistics.geometric_mean(measured)


def shows(number: str, value: float) -> bool:
    """Whether a number as printed is this value, rounded; a share may stand as percent."""
    digits = number.replace(",", "")
    zeros = len(digits) - len(digits.rstrip("0")) if "." not in digits and len(digits) > 3 else 0
    half = 0.5 * 10.0 ** (zeros if "." not in digits else -len(digits.partition(".")[2])) * 1.0001
    return any(abs(scale * value - float(digits)) <= half for scale in (1, 100))


def unfounded(cells: Iterable[Cell], records: list[list[Row]]) -> list[str]:
    """The numbers that are in none of the records."""
    found = []
    for cell in cells:
        candidates = [v for rows in records for v in values(named(rows, f"{cell.row} {cell.column}"), cell.column)]
        numbers = NUMBER.findall(cell.text)
        found += [f"{n} ({cell.row}; {cell.column})" for n in numbers if not any(shows(n, v) for v in candidates)]
    return found


@pytest.mark.skipif(not PAGES[0].is_file(), reason="the tests run outside of the source tree, which has the pages")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_in_tables_are_measured(page: Path) -> None:
    for table in tables(page.read_text()):
        names = FILE.findall(table.around)
        assert names, f"{page.name}:{table.line}: the paragraph before or after this table names no file under benchmarks/results"
        files = [file for name in names for file in (ROOT / "benchmarks" / "results").glob(f"{name}.json")]
        assert files, f"{page.name}:{table.line}: there is no benchmarks/results/{' or '.join(names)}.json"
        wrong = unfounded(table.cells, [rows_of(json.loads(file.read_text())) for file in files])
        assert not wrong, f"{page.name}:{table.line}: not in {', '.join(names)}: {'; '.join(wrong)}"


PAGE = """
Settings, which are no measurements:

| variable | accepts |
|---|---|
| `A` | `0`, `1` |

As in `results/x/layers.md`:

| layer | out | PyG | gnnfast | |
|---|---|---|---|---|
| GCNConv | 16 | 113 ms | 2.5 ms | 46x |
| | 64 | 247 ms | 7.8 ms | 32x |
"""
ROWS = [
    {"layer": "GCNConv", "out": 16, "PyG ms": 112.6, "gnnfast ms": 2.45, "PyG / gnnfast": 45.9},
    {"layer": "GCNConv", "out": 64, "PyG ms": 247.0, "gnnfast ms": 7.8, "PyG / gnnfast": 31.7},
]


def test_a_wrong_number_is_found() -> None:
    (table,) = tables(PAGE)
    assert FILE.findall(table.around) == ["x/layers"] and len(table.cells) == 6
    assert unfounded(table.cells, [ROWS]) == []
    for right, wrong in (("2.5", "2.6"), ("46x", "47x"), ("247", "113"), ("2.5 ms", "112.6 ms"), ("46x", "32x")):
        (changed,) = tables(PAGE.replace(right, wrong, 1))
        assert len(unfounded(changed.cells, [ROWS])) == 1, (right, wrong)


@pytest.mark.parametrize(
    ("number", "value", "is_shown"),
    [("2.5", 2.451, True), ("2.5", 2.44, False), ("46", 45.9, True), ("46", 46.6, False), ("16,800", 16_793.2, True),
     ("16,800", 16_870.0, False), ("94.9", 0.9489, True), ("0.00", 0.004, True)],
)  # fmt: skip
def test_numbers_are_compared_as_they_are_rounded(number: str, value: float, is_shown: bool) -> None:
    assert shows(number, value) == is_shown
