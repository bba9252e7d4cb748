"""Two result files of one benchmark: what got slower, faster, larger or smaller beyond the noise of both.

    gnnfast bench compare OLD.json NEW.json

Rows are matched by what names them. A time or memory counts as changed where the ratio is further from 1 than both spreads
together (5% each where a file has none: it was written by an older version), and than --least. Changes of what is not gnnfast's
own show that the machine changed, and are no regression. Exits with 1 if there is a regression: something of gnnfast slower or
larger, failed, or out of memory where it was not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gnnfast.rendering import Table, number, text

from . import tables, timing

OURS = ("gnnfast", "on", "with gnnfast", "sampled", "sparse", "captured", "first call")  # how columns of gnnfast begin
MEASURED = (" ms", " us", " GiB", " MiB")
NO_NAMES = ("kernel", "note", "failed", "recommended", "last line", "peak of")  # results that are words
NO_SPREAD = 0.05


class Change(NamedTuple):
    """One measurement in both files. ``beyond`` says that it is more than noise."""

    row: str
    column: str
    old: float
    new: float
    beyond: bool

    @property
    def ratio(self) -> float:
        return self.new / self.old

    @property
    def ours(self) -> bool:
        return self.column.startswith(OURS)


def name_of(row: tables.Row) -> str:
    """What a row is about: everything that was chosen rather than measured."""
    words = []
    for column, value in row.items():
        measured = isinstance(value, float) or column.endswith(("waits", "launches", "kernels", *MEASURED)) or column in NO_NAMES
        if not measured and value is not None:
            words.append(f"{column} {value}" if isinstance(value, int) else str(value))
    return ", ".join(words)


def changes(old: list[tables.Row], new: list[tables.Row], least: float) -> Iterator[Change]:
    """Every time and memory that both have."""
    before = {name_of(row): row for row in old}
    for row in new:
        other = before.get(name_of(row))
        for column, value in row.items() if other else ():
            was = other.get(column)  # type: ignore[union-attr]
            if column.endswith(MEASURED) and isinstance(value, float) and isinstance(was, float) and was > 0 and value > 0:
                noise = 0.0 if column.endswith(("GiB", "MiB")) else _spread(row, column) + _spread(other or {}, column)
                limit = 1 + max(noise, least)
                yield Change(name_of(row), column, was, value, not 1 / limit <= value / was <= limit)


def _spread(row: tables.Row, column: str) -> float:
    value = row.get(f"{column.rpartition(' ')[0].removesuffix(' fastest')} spread")
    return value if isinstance(value, float) else NO_SPREAD


def broken(old: list[tables.Row], new: list[tables.Row]) -> Iterator[str]:
    """Rows that fail now, or whose side with gnnfast has no number where it had one."""
    before = {name_of(row): row for row in old}
    for row in new:
        other = before.get(name_of(row), {})
        if "failed" in row and "failed" not in other:
            yield f"{name_of(row)}: {row['failed']}"
        for column, value in row.items():
            if (
                column.endswith(" ms")
                and column.startswith(OURS)
                and isinstance(value, str)
                and isinstance(other.get(column), float)
            ):
                yield f"{name_of(row)}: {column} was {tables.cell(other[column])}, is {value}"


def read(path: str) -> dict[str, Any]:
    """A record. Raises ValueError if the file has none."""
    try:
        record = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(record, dict) or tables.RECORD - record.keys():
        raise ValueError(f"{path} is no record of measurements; accepted is what --out wrote")
    return record


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if there is a regression, 2 if the files cannot be compared."""
    parser = tables.make_parser("compare", __doc__)
    parser.add_argument("old", metavar="OLD.json")
    parser.add_argument("new", metavar="NEW.json")
    parser.add_argument("--least", type=float, default=0.05, help="the least change that counts (0.05: a twentieth)")
    options = parser.parse_args(arguments)
    try:
        old, new = read(options.old), read(options.new)
    except ValueError as error:
        parser.error(str(error))
    found = list(changes(old["rows"], new["rows"], options.least))
    if not found:
        parser.error("the two have no measurement in common")
    lines = [f"{options.old} -> {options.new}: {len(found)} measurements in common"]
    for key in ("device", "threads", "python", "torch", "torch_geometric", "dgl"):
        a, b = (record["environment"].get(key) for record in (old, new))
        if a != b:
            lines.append(f"{key} differs: {a} -> {b}")
    unmatched = {name_of(row) for row in old["rows"]} ^ {name_of(row) for row in new["rows"]}
    lines += [f"{len(unmatched)} rows are in one file alone"] if unmatched else []
    failures = list(broken(old["rows"], new["rows"]))
    worse = sorted((c for c in found if c.beyond and c.ours and c.ratio > 1), key=lambda c: -c.ratio)
    better = sorted((c for c in found if c.beyond and c.ours and c.ratio < 1), key=lambda c: c.ratio)
    theirs = [c.ratio for c in found if not c.ours and not c.column.endswith(("GiB", "MiB"))]
    if theirs:
        lines.append(
            f"what is not gnnfast's takes {timing.geometric_mean(theirs):.2f} times as long as before, in the geometric mean"
        )
    columns = ("what", "measured", "old", "new", "new / old")
    listed = [
        Table(title, columns, [(c.row, c.column, number(c.old), number(c.new), f"{c.ratio:.2f}") for c in some], columns[2:])
        for title, some in (("Regressions", worse), ("Improvements", better))
    ]
    end = [*(f"failed: {line}" for line in failures), "no regression beyond the noise" if not worse and not failures else ""]
    print(text(lines, listed, filter(None, end)))
    return int(bool(worse or failures))


if __name__ == "__main__":
    raise SystemExit(main())
