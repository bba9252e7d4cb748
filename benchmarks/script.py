"""Your own script without and with gnnfast, each run in a process of its own: time, peak memory and the metrics it prints last.

    gnnfast bench --script train.py ARGUMENTS
    gnnfast bench script --repeats 3 --out PATH train.py ARGUMENTS

The script needs no change and no import of gnnfast. Runs alternate, and medians are shown. A step is from one optimiser step to the
next. Memory is CUDA's peak where the script used it, else that of the process with its libraries.
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch

from gnnfast import sides
from gnnfast.rendering import text
from gnnfast.sides import OFF, ON, Side

from . import tables, timing


def row(name: str, runs: list[Side]) -> tables.Row:
    """One side of a record."""
    found: tables.Row = {"script": name, **timing.Sample.of([1e3 * run.seconds for run in runs]).columns("script")}
    steps = [run.step_ms for run in runs if run.step_ms is not None]
    if steps:
        found |= timing.Sample.of(steps).columns("step")
    found |= {"peak MiB": max(run.peak_mib for run in runs), "peak of": runs[-1].peak_of, "last line": (runs[-1].lines or [""])[-1]}
    return found


def middle(runs: list[Side]) -> Side:
    """The runs of a side as one: medians, and the last of what was printed."""
    steps = [run.step_ms for run in runs if run.step_ms is not None]
    last = runs[-1]
    return Side(
        0,
        statistics.median(run.seconds for run in runs),
        statistics.median(steps) if steps else None,
        last.steps,
        max(run.peak_mib for run in runs),
        last.peak_of,
        last.lines,
        report=last.report,
    )


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status of a run of the script that fails."""
    parser = argparse.ArgumentParser(
        prog="gnnfast bench script", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each side (1)")
    tables.add_output(parser)
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    if not os.path.isfile(options.script):
        parser.error(f"there is no file {options.script!r}")
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    runs: dict[str, list[Side]] = {OFF: [], ON: []}
    for nth in range(options.repeats):
        for name in runs:
            print(
                f"{options.script} {name}{f', run {nth + 1} of {options.repeats}' if options.repeats > 1 else ''} ...", flush=True
            )
            side = sides.run(options.script, options.arguments, name == ON, show=lambda line: print(f"  {line}", flush=True))
            if side.status:
                print(f"gnnfast bench: {options.script} {name} ended with status {side.status}")
                return side.status
            runs[name].append(side)
    off, on = (middle(found) for found in runs.values())
    after = [on.report]
    changed = sides.changed_numbers(off.lines, on.lines)
    after += [f"printed without: {a}\nprinted with:    {b}" for a, b in changed]
    if not changed and off.lines:
        same = off.lines == on.lines
        after.append("both printed the same last lines" if same else "the last lines of the two differ in more than numbers")
    print()
    print(text([options.script], [sides.table(off, on)], after))
    rows = [row(name, found) for name, found in runs.items()]
    warning = tables.noise(rows)
    if warning:
        print(warning)
    if options.out or options.markdown:
        device = torch.device("cuda" if on.peak_of == "CUDA" else "cpu")
        record = tables.make_record(f"{os.path.basename(options.script)} without and with gnnfast", device, rows, {})
        if options.markdown:
            print(tables.markdown(record))
        if options.out:
            tables.save(record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
