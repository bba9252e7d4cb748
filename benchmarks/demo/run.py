"""``make demo``: the same training scripts without and with gnnfast, each in its own process, side by side."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
CLOSE = 1e-3  # of losses of the first epochs, relative: different orders of additions


def run(script: str, on: bool, graphs: list[str]) -> Iterator[dict[str, Any]]:
    """The records of one process as they come. Without gnnfast its import stays, switched off."""
    env = os.environ | {"GNNFAST": "1" if on else "0", "DGLBACKEND": "pytorch"}
    command = [sys.executable, "-W", "ignore", str(HERE / script), *graphs]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        errors = process.stderr.read()
    if process.returncode:
        raise SystemExit(f"{script} failed:\n{errors}")


def difference(a: list[float], b: list[float]) -> float:
    """Largest relative difference of the losses of the first three epochs, before rounding has spread."""
    return max(abs(x - y) / abs(x) for x, y in zip(a[:3], b[:3]))


def main() -> None:
    begin, console, records = time.perf_counter(), Console(), []
    import torch

    graphs = ["computers", "large"] if torch.cuda.is_available() else ["computers"]
    scripts = {"PyG": "train_pyg.py", "DGL": "train_dgl.py"}
    if not importlib.util.find_spec("dgl"):
        console.print("DGL is not installed (it has no wheel for this Python); its script is left out.")
        del scripts["DGL"]
    columns = ("model", "graph", "ms / epoch", "", "peak MiB", "", "accuracy")
    for framework, script in scripts.items():
        where = "cpu" if framework == "DGL" or not torch.cuda.is_available() else torch.cuda.get_device_name()
        console.print(f"{framework} on {where}, without gnnfast, then with it ...")
        sides: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for on in (False, True):
            for record in run(script, on, graphs if where != "cpu" else graphs[:1]):
                sides[on].append(record)
                side = "with   " if on else "without"
                numbers = f"{record['epoch_ms']:.1f} ms an epoch, {record['peak_mib']:.0f} MiB, accuracy {record['accuracy']:.3f}"
                console.print(f"  {side} {record['model']} on {record['graph']}: {numbers}", soft_wrap=True)
        table = Table(*columns, title=f"{framework}: without -> with gnnfast", title_justify="left")
        for plain, fast in zip(sides[False], sides[True]):
            records.append({"framework": framework, "without": plain, "with": fast})
            table.add_row(
                plain["model"],
                plain["graph"].split()[0],
                f"{plain['epoch_ms']:.0f} -> {fast['epoch_ms']:.0f}",
                f"{plain['epoch_ms'] / fast['epoch_ms']:.1f}x",
                f"{plain['peak_mib']:.0f} -> {fast['peak_mib']:.0f}",
                f"{plain['peak_mib'] / fast['peak_mib']:.1f}x",
                f"{plain['accuracy']:.2f} -> {fast['accuracy']:.2f}",
            )
        console.print(table)
    console.print("Peaks are those of the process, libraries included.")
    out = os.environ.get("GNNFAST_DEMO_JSON")
    if out:
        Path(out).write_text(json.dumps(records, indent=1) + "\n")
    # DGL's sampler draws others in every run.
    pairs = [(r["without"], r["with"]) for r in records if r["framework"] == "PyG" or "mini" not in r["without"]["model"]]
    worst = max(difference(plain["losses"], fast["losses"]) for plain, fast in pairs)
    agreed = worst < CLOSE
    console.print(f"Largest relative difference of a loss in the first three epochs: {worst:.0e}.")
    console.print(f"{'The losses agree.' if agreed else 'The losses do NOT agree.'} {time.perf_counter() - begin:.0f} s in all.")
    sys.exit(0 if agreed else 1)


if __name__ == "__main__":
    main()
