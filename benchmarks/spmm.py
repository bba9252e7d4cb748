"""SpMM beside its peers, on the same inputs in one run.

    gnnfast bench spmm                                    the default groups of the device
    gnnfast bench spmm --group forward half --graphs arxiv reddit --out results/NAME
    gnnfast bench spmm --graph my_edges.csv               your own graph
    gnnfast bench spmm --from results/NAME.json           draws table and chart again

Groups of cells are in spmm_cases.json, each a list of cross products. A row is one cell: a graph in one order, F features a node,
dtype, pass, reduction. Times are medians after warm-up, in milliseconds; ratios divide the columns they name. Before a peer is
timed its output is compared with gnnfast's. Passes:

    forward             no gradient
    backward            the gradient of the features alone; its forward pass is not timed
    forward+backward    both, with the gradient of the weight
    conversion          int64 COO to CSR, a new graph each time, wall clock
    schedule NAME       forward with gnnfast.override(schedule=NAME); the first call includes making the graph from CSR

Orders: random (columns in proportion to degree), community (locality that ids do not show), real and given (as the data has it).
COO has the edge order of the data; that of the made graphs is shuffled. What the limit is, limits.py says.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import files, graphs, tables
from .bench import Bench, brief
from .cells import DEFAULT_GROUPS, DTYPES, GROUPS, Case, cases
from .graphs import Sample
from .limits import Machine, measure
from .peers import UnavailableError

Make = Callable[[str, str], Sample]  # from the name of a graph and its order

warnings.filterwarnings("ignore", message=".*[Ss]parse")


# ---- a run -------------------------------------------------------------------------------------------------------------------
def run(wanted: list[Case], make: Make, machine: Machine, repeats: int | None) -> Iterator[list[tables.Row]]:
    """Measures graph by graph, prints each row when it is there, and yields all rows so far after each graph."""
    rows: list[tables.Row] = []
    profiled: list[tuple[Case, tables.Row]] = []
    by_graph: dict[tuple[str, str], list[Case]] = {}
    for case in wanted:
        by_graph.setdefault((case.graph, case.order), []).append(case)
    for key, of_graph in by_graph.items():
        bench = Bench(make(*key), machine, repeats)
        for case in of_graph:
            try:
                row = bench.row(case)
            except UnavailableError as error:
                print(f"{line(case.columns)} left out, {error}", flush=True)
                continue
            except Exception as error:  # one cell that fails must not lose the others
                row = case.columns | {"edges": bench.sample.edges, "failed": brief(error)}
            rows.append(row)
            print(line(row), flush=True)
            if case.profile and bench.device.type == "cuda" and "failed" not in row:
                profiled.append((case, row))
        del bench
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield rows
    for case, row in profiled:  # last: once torch.profiler has run, launches may take longer
        row |= Bench(make(case.graph, case.order), machine, repeats).device_columns(case.cell)
        print(line(row), flush=True)
    yield rows


def line(row: tables.Row) -> str:
    """A row in short."""
    words = [str(row[k]) for k in ("group", "graph", "order", "dtype", "pass", "reduce")] + [f"F={row['F']}"]
    words += ["unweighted"] if row["weighted"] == "no" else []
    words += [f"threads={row['threads']}"] if "threads" in row else []
    numbers = [f"{k} {tables.cell(v)}" for k, v in row.items() if k.endswith((" ms", " us", "kernels")) or " / " in k]
    notes = [f"{k}: {row[k]}" for k in ("note", "failed") if k in row]
    return f"{' '.join(words)}: {', '.join([*numbers, *notes])}"


def measured(wanted: list[Case], make: Make, options: argparse.Namespace) -> dict[str, Any]:
    """The record of a run; with ``--out``, written after each graph."""
    device = torch.device(options.device)
    machine = measure(device, options.l2_bandwidth and options.l2_bandwidth * 1e12)
    bandwidths = {"copy TB/s": machine.copy / 1e12, "L2 TB/s": machine.l2 and machine.l2 / 1e12}
    print(", ".join(f"{k} {tables.cell(v)}" for k, v in bandwidths.items() if v), flush=True)
    record = tables.make_record(f"SpMM on {device.type}", device, [], [])
    record["environment"] |= bandwidths
    for rows in run(wanted, make, machine, options.repeats):
        record |= {"rows": rows, "summary": tables.summarise(rows)}
        if options.out:
            tables.save(record, options.out)
    return record


def draw(record: dict[str, Any], path: str) -> str:
    """The chart of a record."""
    from .plot import chart

    return chart(record, path)


# ---- the command line --------------------------------------------------------------------------------------------------------
def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = tables.make_parser("spmm", __doc__)
    tables.add_device(parser, choices=None)
    parser.add_argument("--group", nargs="+", **tables.named(GROUPS))
    parser.add_argument("--graphs", nargs="+", metavar="NAME", help="in place of the groups' graphs")
    parser.add_argument("--widths", nargs="+", type=int, metavar="F", help="in place of the groups' widths")
    parser.add_argument("--dtypes", nargs="+", **tables.named(DTYPES, "in place of the groups'"))
    parser.add_argument("--orders", nargs="+", **tables.named(graphs.ORDERS, "in place of the groups'"))
    parser.add_argument("--repeats", type=int, metavar="N", help="timed calls for each number; else what fills 60 ms, 5 to 30")
    parser.add_argument("--l2-bandwidth", type=float, metavar="TB/s", help="in place of the measured one")
    tables.add_output(parser, chart=True)
    parser.add_argument("--graph", metavar="FILE", help=f"your own graph in place of the groups': {files.ACCEPTED}")
    parser.add_argument("--from", dest="source", metavar="RESULT.json", help="draw table and chart again, measure nothing")
    options = parser.parse_args(arguments)
    for name, values in (("repeats", [options.repeats]), ("widths", options.widths), ("l2-bandwidth", [options.l2_bandwidth])):
        if any(value is not None and value <= 0 for value in values or ()):
            parser.error(f"--{name} must be above 0, got {' '.join(map(str, values))}")
    if options.graph and (options.graphs or options.orders):
        parser.error("--graph FILE takes the place of --graphs and --orders; give one or the other")
    return parser, options


def plan(options: argparse.Namespace) -> tuple[list[Case], Make]:
    """The cases to measure and how to make their graphs. Raises ValueError where what was asked for cannot be had."""
    device = torch.device(options.device)
    groups = options.group or DEFAULT_GROUPS[device.type]
    replaced = {name: getattr(options, name) for name in ("graphs", "orders", "widths", "dtypes")}
    if options.graph:
        sample = Sample.from_edge_index(Path(options.graph).name, "given", *files.load(options.graph), device)
        return cases(groups, replaced | {"graphs": [sample.name], "orders": ["given"]}), lambda name, order: sample
    wanted = cases(groups, replaced)
    if device.type == "cpu" and not options.graphs and all(graphs.missing(c.graph, c.order) for c in wanted):
        print("without the graphs of the folder that GNNFAST_DATA names: made ones")
        wanted = cases(groups, replaced | {"graphs": list(graphs.MADE), "orders": ["community"]})
    reasons = {(c.graph, c.order): graphs.missing(c.graph, c.order) for c in wanted}
    lacking = [reason for reason in dict.fromkeys(reasons.values()) if reason]
    wanted = [c for c in wanted if not reasons[c.graph, c.order]]
    if lacking and (options.graphs or not wanted):
        raise ValueError("; ".join(lacking) + "; or give your own graph with --graph FILE")
    for reason in lacking:
        print(f"left out: {reason}")
    return wanted, lambda name, order: Sample.make(name, order, device)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a cell failed or results differed."""
    parser, options = parse(arguments)
    out = options.out
    if options.source:
        record, out = _read(parser, options.source), out or options.source.removesuffix(".json")
    else:
        try:
            wanted, make = plan(options)
        except ValueError as error:
            parser.error(str(error))
        with torch.cuda.device(options.device) if options.device != "cpu" else contextlib.nullcontext():
            record = measured(wanted, make, options)
    tables.show(record, options.markdown, rows=False)
    if out:
        tables.save_with_chart(record, out, lambda path: draw(record, path))
    failed = [row for row in record["rows"] if "failed" in row]
    if failed:
        print(f"{len(failed)} of {len(record['rows'])} cells failed:", *map(line, failed), sep="\n")
    return 1 if failed else 0


def _read(parser: argparse.ArgumentParser, source: str) -> dict[str, Any]:
    try:
        record = json.loads(Path(source).read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--from {source}: {error}; accepted is a RESULT.json that --out wrote")
    if not isinstance(record, dict) or tables.RECORD - record.keys():
        parser.error(f"--from {source}: no record of measurements; accepted is a RESULT.json that --out wrote")
    return record


if __name__ == "__main__":
    raise SystemExit(main())
