"""One HTML page of all result files in a folder: charts, summaries and all rows. It needs nothing but itself.

gnnfast bench page benchmarks/results/NAME                 writes benchmarks/results/NAME/index.html
gnnfast bench page results --out report.html
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from . import tables
from .compare import read


def chart_of(path: Path, prefix: str) -> str:
    """The chart beside a result file as part of a page: without the head of a file, its ids made its own."""
    file = path.with_suffix(".svg")
    if not file.is_file():
        return ""
    found = re.search(r"<svg.*</svg>", file.read_text(), re.DOTALL)
    if not found:
        return ""
    drawn = re.sub(r"<metadata>.*?</metadata>", "", found.group(), flags=re.DOTALL)
    drawn = re.sub(r'\bid="', f'id="{prefix}-', drawn)
    return re.sub(r'(url\(#|href="#)', rf"\1{prefix}-", drawn)


def view(record: dict[str, Any], path: str, chart: str) -> dict[str, Any]:
    """A record as the template wants it."""
    summary = record["summary"]
    shown = [_table("summary", summary, True)] if isinstance(summary, list) and summary else []
    groups = tables.grouped(record["rows"])
    shown += [_table(group or "all rows", rows, not shown and len(rows) <= 20) for group, rows in groups.items()]
    return {
        "title": record["title"],
        "path": path,
        "environment": ", ".join(f"{k} {tables.cell(v)}" for k, v in record["environment"].items() if v is not None),
        "warning": tables.noise(record["rows"]),
        "chart": chart,
        "lines": [f"{k}: {tables.cell(v)}" for k, v in summary.items()] if isinstance(summary, dict) else [],
        "tables": shown,
    }


def _table(title: str, rows: list[tables.Row], is_open: bool) -> dict[str, Any]:
    columns = tables.columns_of(rows)
    cells = [[(tables.shown(c, row.get(c)), isinstance(row.get(c), str)) for c in columns] for row in rows]
    return {"title": title, "columns": columns, "rows": cells, "open": is_open}


def page(folder: Path, title: str) -> tuple[str, int]:
    """The page of all records under a folder, and how many there are; other JSON files are left out."""
    import jinja2
    import markupsafe

    views = []
    for path in sorted(folder.rglob("*.json")):
        try:
            record = read(str(path))
        except ValueError:
            continue
        chart = markupsafe.Markup(chart_of(path, f"c{len(views)}"))
        views.append(view(record, str(path.relative_to(folder)), chart))
    template = jinja2.Environment(autoescape=True).from_string(Path(__file__).with_name("page.html").read_text())
    return template.render(title=title, records=views) + "\n", len(views)


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("page", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with the files that --out wrote")
    parser.add_argument("--title", help="of the page; the folder's name, if not given")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="FOLDER/index.html, if not given")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder")
    made, count = page(options.folder, options.title or f"gnnfast benchmarks: {options.folder.resolve().name}")
    if not count:
        parser.error(f"there is no result file in {options.folder}; gnnfast bench NAME --out {options.folder}/NAME writes one")
    out = options.out or options.folder / "index.html"
    out.write_text(made)
    print(f"{out}: {count} result file{'s' if count > 1 else ''}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
