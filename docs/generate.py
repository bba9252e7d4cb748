"""Writes the pages that are made from the code, but coverage of PyG (``gnnfast.pyg.coverage``): ``python docs/generate.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import geometric_mean

from gnnfast.config import CALL_SETTINGS, Settings

HERE = Path(__file__).parent


def settings() -> str:
    """The page of all settings."""
    lines = [
        "# Settings",
        "",
        "Made from `gnnfast/config.py` by `python docs/generate.py`.",
        "",
        "Environment variables are read when gnnfast is imported. A value that a variable does not accept is an error, which says",
        "what it accepts; a name that is none gets a warning with the nearest one. `gnnfast doctor` lists what is set, and what of",
        "it has no effect.",
        "",
        "| variable | what it is | accepts | default |",
        "|---|---|---|---|",
    ]
    for setting in fields(Settings):
        facts = setting.metadata
        default = _default(setting.default, facts["unset"])
        lines.append(f"| `{facts['variable']}` | {facts['about']} | {facts['accepts']} | {default} |")
    named = {setting.name: setting.metadata["variable"] for setting in fields(Settings)}
    lines += [
        "",
        "Some can be changed in Python as well, for a block of code in one thread:",
        "",
        "```python",
        'with gnnfast.override(sample="fastrand", sample_width=64):',
        "    out = model(x, edge_index)",
        "```",
        "",
        "| keyword of `gnnfast.override` | variable |",
        "|---|---|",
        *(f"| `{name}` | `{named[name]}` |" for name in CALL_SETTINGS),
        "",
    ]
    return "\n".join(lines)


def _default(value: object, unset: str) -> str:
    if value is None:
        return unset
    if isinstance(value, bool):
        return f"`{int(value)}`"
    return f"`{','.join(value)}`" if isinstance(value, tuple) else f"`{value}`"


def small_graphs() -> str:
    """The page of small graphs, with its tables."""
    record = json.loads((HERE.parent / "benchmarks/results/h200-2026-11-23/host.json").read_text())
    ratios: dict[str, dict[str, list[float]]] = {}
    for row in record["rows"]:
        ratios.setdefault(row["model"], {}).setdefault(row["pass"], []).append(row["ratio"])
    lines = ["| model | training: mean, least | inference: mean, least |", "|---|---|---|"]
    for model, found in sorted(ratios.items(), key=lambda item: -geometric_mean(item[1]["training"])):
        cells = (f"{geometric_mean(found[what]):.2f}, {min(found[what]):.2f}" for what in ("training", "inference"))
        lines.append(f"| {model} | {' | '.join(cells)} |")
    page = _with_table((HERE / "small_graphs.md").read_text(), "host", lines)
    record = json.loads((HERE.parent / "benchmarks/results/cpu-2core-2026-11-29/host_layers.json").read_text())
    lines = ["| edges | pass | edge_index | mean | least |", "|---|---|---|---|---|"]
    for row in record["summary"]:
        edges, graph = row["kind"].removeprefix("layers, "), {"same": "the same", "new": "new in each step"}[row["graph"]]
        cells = [r for r in record["rows"] if (f"{r['size']} edges", r["pass"], r["graph"]) == (edges, row["pass"], row["graph"])]
        least = min(cells, key=lambda r: r["ratio of fastest"])
        of = f"{row['of fastest']:.2f} | {least['ratio of fastest']:.2f}, {least['model']}"
        lines.append(f"| {int(edges.removesuffix(' edges')):,} | {row['pass']} | {graph} | {of} |")
    return _with_table(page, "host_layers", lines)


KINDS = ("as a whole", "fused", "in part")  # in which coverage says that a class is served


def readme() -> str:
    """The README, with its table of layers: those that the two pages of coverage list."""
    lines = ["| | PyG | DGL |", "|---|---|---|"]
    pages = [(HERE / f"coverage_{framework}.md").read_text() for framework in ("pyg", "dgl")]
    for kind in KINDS:
        served = (", ".join(re.findall(rf"^\| (\w+) \| {kind} \|", page, re.MULTILINE)) for page in pages)
        lines.append(f"| {kind} | {' | '.join(served)} |")
    return _with_table((HERE.parent / "README.md").read_text(), "layers", lines)


def _with_table(page: str, name: str, lines: list[str]) -> str:
    """A page with a table between the comments that name it."""
    begin, end = f"<!-- made: {name} -->\n", "<!-- end -->"
    before, after = page.split(begin)
    return before + begin + "\n".join(lines) + "\n" + end + after.split(end, 1)[1]


PAGES: dict[str, Callable[[], str]] = {"settings.md": settings, "small_graphs.md": small_graphs, "../README.md": readme}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (HERE / page).write_text(make())
