"""Measures what the selector decides by, and how well it decides.

    gnnfast bench calibrate --out benchmarks/results/NAME [--write gnnfast/dispatch/calibration.json]

Seen once: GAS on COO against conversion and GAR, everything made in the call, over random graphs of growing size and average
degree. The costs that gnnfast.dispatch.select compares are fitted to these times (non-negative least squares of relative errors).

Seen again: on the graphs of the SpMM benchmark, what gnnfast does by itself against every candidate that GNNFAST_AUTOTUNE=1 tries.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

import gnnfast
from gnnfast import Graph
from gnnfast.dispatch import autotune
from gnnfast.dispatch import select as selector
from gnnfast.graph.plan import Tuned

from . import graphs, tables, timing

NODES = (2_000, 20_000, 200_000, 1_000_000)
DEGREES = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = (16, 64, 256)
DTYPES = {"2": torch.bfloat16, "4": torch.float32}
LONGEST = 2e9  # elements of messages that a cell may have
CLOSE = 1.1  # a choice this many times slower than the best still counts as right


def seen_once(device: torch.device) -> list[tables.Row]:
    """A forward pass over a graph that is used once, by GAS and by conversion and GAR, and by GAR alone; the host's time counts."""
    rows = []
    for nodes in NODES:
        for degree in DEGREES:
            edge_index = torch.randint(0, nodes, (2, nodes * degree), device=device)
            for dtype in DTYPES.values():
                for width in WIDTHS:
                    if nodes * degree * width > LONGEST:
                        continue
                    x = torch.randn(nodes, width, device=device).to(dtype)
                    row: tables.Row = {"nodes": nodes, "average degree": degree, "F": width, "itemsize": dtype.itemsize}
                    for kernel, column in (("gas", "GAS ms"), ("gar", "convert + GAR ms")):
                        with gnnfast.override(kernel=kernel, schedule="off"):
                            once = lambda: gnnfast.spmm(Graph.from_edge_index(edge_index, nodes), x)  # noqa: E731
                            row[column] = timing.median_ms(once, device, 7, wall=True)
                    with gnnfast.override(kernel="gar", schedule="off"):
                        graph = Graph.from_edge_index(edge_index, nodes)
                        row["GAR ms"] = timing.median_ms(lambda: gnnfast.spmm(graph, x), device, 7, wall=True)
                    rows.append(row | {"GAS / (convert + GAR)": row["GAS ms"] / row["convert + GAR ms"]})
    return rows


def fit(rows: list[tables.Row]) -> dict[str, Any]:
    """The coefficients of :class:`gnnfast.dispatch.select.Costs` for each itemsize."""
    found: dict[str, Any] = {}
    for size in DTYPES:
        cells = [row for row in rows if row["itemsize"] == int(size)]
        values = np.array([_terms(row) for row in cells])
        found[size] = {}
        for name, column in (("gas", "GAS ms"), ("convert_gar", "convert + GAR ms"), ("gar", "GAR ms")):
            milliseconds = np.array([row[column] for row in cells])
            coefficients, _ = nnls(values / milliseconds[:, None], np.ones(len(cells)))
            found[size][name] = [float(f"{c:.4g}") for c in coefficients]
    return found


def judge(rows: list[tables.Row], costs: dict[str, Any]) -> None:
    """Adds to each row what the costs choose and how much slower than the best that is."""
    for row in rows:
        measured = selector.Costs(**costs[str(row["itemsize"])])
        gas = measured.of("gas", _terms(row)) < measured.of("convert_gar", _terms(row))
        chosen = row["GAS ms" if gas else "convert + GAR ms"]
        row |= {"chosen": "gas" if gas else "gar", "chosen / best": chosen / min(row["GAS ms"], row["convert + GAR ms"])}


def seen_again(device: torch.device, widths: tuple[int, ...] = (16, 64, 128)) -> list[tables.Row]:
    """What gnnfast does by itself on a graph in repeated use, against all candidates."""
    rows = []
    for name in graphs.random_order_names():
        for order in ("random", "community"):
            sample = graphs.Sample.make(name, order, device)
            graph, weight = Graph.from_csr(sample.rowptr, sample.col), torch.rand(sample.edges, device=device)
            for width in widths:
                row = {"graph": name, "order": order, "F": width, "edges": sample.edges}
                rows.append(row | against_candidates(graph, torch.randn(sample.nodes, width, device=device), weight))
            del sample, graph, weight
    return rows


@torch.no_grad()
def against_candidates(graph: Graph, x: Tensor, weight: Tensor) -> tables.Row:
    """The time of gnnfast's own choice and of each candidate, one call a graph and shape."""

    def call() -> Tensor:
        return gnnfast.spmm(graph, x, weight)

    for _ in range(8):  # a locality schedule is made on the way
        call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for _ in range(2):  # the first of many timings of a small graph is often the slowest: each counts by its better one
        ours = min(timing.median_ms(call, x.device), times.get("gnnfast", float("inf")))
        times["gnnfast"] = ours
        for option in autotune.candidates(graph, x.shape[1] * x.element_size(), ("gar",), "auto", deterministic=False):
            name = f"{option.schedule} {option.slab or 'auto'}"
            with forced(option):
                times[name] = min(timing.median_ms(call, x.device), times.get(name, float("inf")))
    del times["gnnfast"]
    best = min(times, key=lambda option: times[option])
    row = {"gnnfast ms": ours, "best ms": times[best], "best": best, "chosen / best": ours / times[best]}
    return row | {f"{option} ms": ms for option, ms in times.items()}


@contextlib.contextmanager
def forced(option: Tuned) -> Iterator[None]:
    """Every aggregation runs as ``option`` says, through the same calls as without."""
    default = Graph._default
    Graph._default = lambda self, row_bytes: option  # type: ignore[method-assign]
    try:
        yield
    finally:
        Graph._default = default  # type: ignore[method-assign]


def _terms(row: tables.Row) -> tuple[float, ...]:
    return selector.terms(row["nodes"], row["nodes"], row["nodes"] * row["average degree"], row["F"], row["itemsize"])


def _summary(group: str, rows: list[tables.Row]) -> tables.Row:
    ratios = [row["chosen / best"] for row in rows]
    right = sum(ratio <= CLOSE for ratio in ratios) / len(ratios)
    worst, mean = max(ratios), timing.geometric_mean(ratios)
    return {"group": group, "cells": len(ratios), "within 10% of the best": right, "worst": worst, "geometric mean": mean}


def chart(rows: list[tables.Row], path: str) -> str:
    """Draws GAS against conversion and GAR over the average degree, a panel for each number of nodes (float32)."""
    from .plot import plt

    figure, axes = plt.subplots(1, len(NODES), figsize=(3 * len(NODES), 3.2), sharey=True, layout="constrained")
    for axis, nodes in zip(axes, NODES):
        for width in WIDTHS:
            cells = [row for row in rows if (row["nodes"], row["F"], row["itemsize"]) == (nodes, width, 4)]
            degrees, ratios = zip(*((r["average degree"], r["GAS / (convert + GAR)"]) for r in cells))
            axis.plot(degrees, ratios, "o-", ms=3, label=f"F = {width}")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="average degree", title=f"{nodes:,} nodes")
    axes[0].set_ylabel("GAS / (conversion and GAR)")
    axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return f"chart: {path}"


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("calibrate", __doc__)
    tables.add_output(parser, chart=True)
    parser.add_argument("--write", metavar="FILE", help="write the fitted costs, in the form of gnnfast/dispatch/calibration.json")
    parser.add_argument("--from", dest="source", metavar="RESULT.json", help="draw the chart again, measure nothing")
    options = parser.parse_args(arguments)
    if options.source:
        rows = [row for row in json.loads(Path(options.source).read_text())["rows"] if row["group"] == "seen once"]
        print(chart(rows, options.source.removesuffix(".json") + ".svg"))
        return 0
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device, and on a CPU the selector has nothing to decide")
    device = torch.device("cuda")
    once = seen_once(device)
    costs = fit(once)
    judge(once, costs)
    again = seen_again(device)
    rows = [{"group": "seen once"} | row for row in once] + [{"group": "seen again"} | row for row in again]
    summary = [_summary("seen once", once), _summary("seen again", again)]
    record = tables.make_record("The selector's calibration", device, rows, summary)
    print(tables.table(summary), flush=True)
    if options.write:
        kept = json.loads(Path(options.write).read_text()) if Path(options.write).is_file() else {}
        table = kept | {"device": record["environment"]["device"], "date": record["environment"]["date"], "costs": costs}
        Path(options.write).write_text(json.dumps(table, indent=1) + "\n")
    if options.out:
        tables.save_with_chart(record, options.out, lambda path: chart(once, path))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
