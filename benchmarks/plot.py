"""The chart of a record of the SpMM benchmark: how many times faster than the best peer, by graph and F."""

from __future__ import annotations

import textwrap
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .timing import OUT_OF_MEMORY

# A record drawn twice gives the same file; text stays text.
plt.rcParams |= {"svg.hashsalt": "gnnfast", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
PEER = ("best peer / gnnfast", "cuSPARSE / gnnfast", "MKL / gnnfast")


def chart(record: dict[str, Any], path: str) -> str:
    """Draws the first group that has ratios to a peer, a panel for each order (and dtype, and with and without weights). Returns
    a line that says what became of it."""
    rows = [row | {"ratio": ratio} for row in record["rows"] if (ratio := _ratio(row))]
    if not rows:
        return "no chart: no row has a ratio to a peer"
    rows = [row for row in rows if row["group"] == rows[0]["group"]]
    panels: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["order"], row["dtype"], row["weighted"]), []).append(row)
    names = [n for n, _ in sorted({(r["graph"], r["edges"]) for r in rows}, key=lambda pair: pair[1])]
    size = max(7.0, 0.6 * len(names) + 2), 2.2 * len(panels) + 1.3
    figure, axes = plt.subplots(len(panels), 1, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained")
    ratios = [row["ratio"] for row in rows]
    axes[0, 0].set_yscale("log", base=2)
    axes[0, 0].set_ylim(min(0.8, min(ratios) / 1.2), max(1.25, max(ratios) * 1.2))
    widths = sorted({row["F"] for row in rows})
    for axis, (key, cells) in zip(axes[:, 0], panels.items()):
        _panel(axis, cells, names, widths)
        order, dtype, weighted = key
        axis.set_title(f"{order} order, {dtype}, {'weighted' if weighted == 'yes' else 'unweighted'}", loc="left", fontsize=9)
    axes[-1, 0].set_xticks(range(len(names)), names, rotation=35, ha="right")
    peer = next(name for name in PEER if name in rows[0]).removesuffix(" / gnnfast")
    figure.supylabel(f"time of {peer} / time of gnnfast", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(widths), frameon=False)
    _title(figure, record)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return f"chart: {path}"


def _title(figure: Figure, record: dict[str, Any]) -> None:
    """What was measured and on what, in as many lines as that takes."""
    title = f"{record['title']}, {record['environment'].get('device', '')}"
    figure.suptitle(textwrap.fill(title, int(12 * figure.get_figwidth())), x=0.01, ha="left", fontsize=10)


def _ratio(row: dict[str, Any]) -> float | None:
    return next((row[name] for name in PEER if row.get(name)), None)


def _panel(axis: Axes, rows: list[dict[str, Any]], names: list[str], widths: list[int]) -> None:
    """A dot for each cell: graphs side by side, their widths next to one another from light to dark."""
    colours = plt.get_cmap("viridis_r")
    for nth, width in enumerate(widths):
        cells = [row for row in rows if row["F"] == width]
        shift = (nth - (len(widths) - 1) / 2) * 0.6 / len(widths)
        colour = colours(0.1 + 0.9 * nth / max(len(widths) - 1, 1))
        at = [names.index(row["graph"]) + shift for row in cells]
        ratios = [row["ratio"] for row in cells]
        axis.vlines(at, 1, ratios, color=colour, linewidth=1)
        axis.scatter(at, ratios, s=16, color=colour, label=f"F = {width}", zorder=3)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(axis="y", linewidth=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _words(row: dict[str, Any], ratio: float | None) -> str:
    """What a bar says; where one side did not fit there is none, but the words."""
    if ratio:
        return f"{ratio:.2g}x"
    sides = {column.split()[0] for column, value in row.items() if value == OUT_OF_MEMORY}
    return " and ".join(f"{OUT_OF_MEMORY} {'with' if side == 'on' else 'without'} gnnfast" for side in sorted(sides))


def bars(record: dict[str, Any], path: str, ratio: str, label: str) -> str:
    """Draws a ratio of each row as a bar, or that a side ran out of memory, a panel for each group and graph. Returns a line that
    says what became of it."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        if row.get(ratio) or OUT_OF_MEMORY in row.values():
            panels.setdefault(f"{row.get('group', '')}, {row['graph']}", []).append(row)
    if not panels:
        return f"no chart: no row has {ratio}"
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    most = max(map(len, panels.values()))
    size = 3.8 * columns, (0.3 * most + 0.8) * lines + 0.6
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, (title, rows) in zip(axes.flat, panels.items()):
        names, values = [row["model"] for row in rows][::-1], [row.get(ratio) or 0.0 for row in rows][::-1]
        drawn = axis.barh(names, values, color=["#31688e" if v >= 1 else "#d1495b" for v in values], height=0.65)
        for text in axis.bar_label(drawn, [_words(row, row.get(ratio)) for row in rows][::-1], padding=3, fontsize=8):
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # over the line at 1
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlim(0, 1.18 * max(*values, 1.0))
        axis.set_title(title, loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel(label, fontsize=9)
    _title(figure, record)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return f"chart: {path}"
