"""Your own script without and with gnnfast, each run in a process of its own: time, peak memory and the metrics it prints last.

    gnnfast bench --script train.py ARGUMENTS
    gnnfast bench script --repeats 3 --out PATH train.py ARGUMENTS

The script needs no change and no import of gnnfast. Runs alternate, two of each
side if not told otherwise, and medians are shown. A step is from one optimiser
step to the next. Memory is CUDA's peak where the script used it, else that of
the process with its libraries.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace

import torch

from gnnfast import sides
from gnnfast.rendering import text
from gnnfast.sides import OFF, ON, Side

from . import tables, timing


def row(name: str, runs: list[Side], metric: str) -> tables.Row:
    """One side of a record. ``metric`` is the last line that both printed, with its numbers."""
    found: tables.Row = {"script": name, **timing.Sample.of([1e3 * run.seconds for run in runs]).columns("script")}
    steps = [run.step_ms for run in runs if run.step_ms is not None]
    if steps:
        sample = timing.Sample.of(steps)  # between runs; within a run steps may vary more
        within = [(run.step_quartiles[1] - run.step_quartiles[0]) / sample.ms for run in runs if run.step_quartiles]
        found |= timing.Sample(sample.ms, max([sample.spread, *within])).columns("step")
    found |= {"peak MiB": max(run.peak_mib for run in runs), "peak of": runs[-1].peak_of, "last line": metric}
    return found


def middle(runs: list[Side]) -> Side:
    """The runs of a side as one: medians, and the last of what was printed."""
    steps = [run.step_ms for run in runs if run.step_ms is not None]
    quartiles = [run.step_quartiles for run in runs if run.step_quartiles]
    return replace(
        runs[-1],
        seconds=statistics.median(run.seconds for run in runs),
        step_ms=statistics.median(steps) if steps else None,
        step_quartiles=[statistics.median(ends) for ends in zip(*quartiles)],
        peak_mib=max(run.peak_mib for run in runs),
    )


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status of a run of the script that fails."""
    parser = tables.make_parser("script", __doc__)
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="runs of each side (2)")
    tables.add_output(parser)
    parser.add_argument("script", metavar="SCRIPT")
    # Python 3.11 would name it as missing beside SCRIPT.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script").required = False
    options = parser.parse_args(arguments)
    if not os.path.isfile(options.script):
        parser.error(f"there is no file {options.script!r}")
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    runs: dict[str, list[Side]] = {OFF: [], ON: []}
    for nth in range(options.repeats):
        for name in (OFF, ON) if nth % 2 == 0 else (ON, OFF):  # what slows a machine down for a while slows both
            print(
                f"{options.script} {name}{f', run {nth + 1} of {options.repeats}' if options.repeats > 1 else ''} ...", flush=True
            )
            side = sides.run(options.script, options.arguments, name == ON, show=lambda line: print(f"  {line}", flush=True))
            if side.status:
                print(f"gnnfast bench: {options.script} {name} ended with status {side.status}")
                return side.status
            runs[name].append(side)
    off, on = (middle(found) for found in runs.values())
    shared = sides.last_in_common(off.lines, on.lines)
    changed = [(a, b) for a, b in shared if a != b]
    after = [on.report, *sides.no_ratios(on), *(f"printed without: {a}\nprinted with:    {b}" for a, b in changed)]
    if not changed and (off.lines or on.lines):
        same = shared or off.lines == on.lines
        after.append("both printed the same last lines" if same else "the two printed no line that differs in its numbers alone")
    print()
    print(text([options.script], [sides.table(off, on)], after))
    metrics = shared[-1] if shared else [(side.lines or [""])[-1] for side in (off, on)]
    rows = [row(name, found, metric) for (name, found), metric in zip(runs.items(), metrics)]
    warning = tables.noise(rows)
    if warning:
        print(text([warning]))
    elif options.repeats == 1 and not off.step_quartiles:
        print("one run of each side does not tell how much their times vary: --repeats 2 does")
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
