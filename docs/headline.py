"""Draws the chart of the README from a committed result, with matplotlib: ``python docs/headline.py``."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULT = HERE.parent / "benchmarks/results/h200-2026-11-25/layers_all.json"
GRAPH = "arxiv"
LAYERS = ("GCNConv", "SAGEConv", "GINConv", "GATConv 4 heads", "GATv2Conv", "TransformerConv")
# A result drawn twice gives the same file; text stays text.
plt.rcParams |= {"svg.hashsalt": "gnnfast", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}


def draw() -> None:
    """Two bars a layer: PyG and gnnfast, with their times."""
    record = json.loads(RESULT.read_text())
    rows = {row["layer"]: row for row in record["rows"] if row["graph"] == GRAPH}
    figure, axis = plt.subplots(figsize=(7.6, 3.2), layout="constrained")
    for side, (name, colour) in enumerate((("PyG", "#b8b8b8"), ("gnnfast", "#0b6e4f"))):
        times = [rows[layer][f"{name} ms"] for layer in LAYERS]
        bars = axis.bar([at + (side - 0.5) * 0.38 for at in range(len(LAYERS))], times, 0.36, color=colour, label=name)
        axis.bar_label(bars, [f"{time:#.3g}" for time in times], padding=2, fontsize=9)
    axis.set_xticks(range(len(LAYERS)), [layer.replace("Conv", "").replace(" 4 heads", ", 4 heads") for layer in LAYERS])
    axis.set_ylabel("ms, less is better")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left")
    device = record["environment"]["device"].removeprefix("NVIDIA ")
    axis.set_title(f"One layer, forward and backward: arxiv-size graph, 128 features, one {device}", loc="left", fontsize=10)
    figure.savefig(HERE / "headline.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw()
