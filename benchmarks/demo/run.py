"""``make demo``: unmodified training scripts with and without gnnfast, each in its own process, side by side in one table."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).parent
JOBS = [("node_pyg.py", m) for m in ("GCN", "GraphSAGE", "GIN")] + [("node_dgl.py", m) for m in ("GCN", "GraphSAGE")]
SEEDS = range(2)
MIB = 2**20


def run(script: str, model: str, on: bool, environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """One process. Without gnnfast the scripts' import stays, switched off; DGL still gets what lets it be imported at all."""
    env = os.environ | environment | {"GNNFAST": "1" if on else "0", "GNNFAST_DGL_SHIM": "1", "DGLBACKEND": "pytorch"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / script, model, *arguments], env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{script} {model} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def find_graph(environment: dict[str, str]) -> str:
    """Which graph the scripts will train on."""
    code = "import demo_data; demo_data.load()"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=HERE, env=os.environ | environment, capture_output=True)
    if done.returncode == 0:
        return "Cora"
    environment["GNNFAST_DEMO_GRAPH"] = "karate"
    return "the karate club (Cora's files are not at hand: set GNNFAST_DATA or connect to a network)"


def main() -> None:
    environment = {"GNNFAST_DEMO_ROOT": tempfile.mkdtemp(prefix="gnnfast-demo-")}
    console = Console()
    console.width = max(console.width, 132)
    jobs = [job for job in JOBS if job[0] != "node_dgl.py" or importlib.util.find_spec("dgl")]
    console.print(f"Training on {find_graph(environment)}.")
    if len(jobs) < len(JOBS):
        console.print("DGL is not installed (it has no wheel for this Python); its scripts are left out.")
    columns = ("script", "gnnfast", "test accuracy", "ms / epoch", "peak MiB", "kernels", "fallbacks")
    table = Table(*columns, title="Same scripts, same seeds, without and with gnnfast")
    agreed, records = True, []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(jobs) * (2 * len(SEEDS) + 2))
        for script, model in jobs:
            curves = {}
            for on in (False, True):
                results = []
                for seed in SEEDS:
                    results.append(run(script, model, on, environment, "--seed", str(seed)))
                    progress.advance(task)
                curve = ("--epochs", "50", "--dropout", "0")
                curves[on] = run(script, model, on, environment, *curve)["losses"]
                if not on:  # on CUDA the framework's own sums vary from run to run
                    curves["again"] = run(script, model, on, environment, *curve)["losses"]
                progress.advance(task)
                accuracy = [r["accuracy"] for r in results]
                report = results[-1]["gnnfast"]
                kernels = sorted({k["kernel"] for k in report["kernels"]})
                fallbacks = sorted({f"{f['place']}: {f['reason']}" for f in report["fallbacks"]})
                record = {
                    "script": f"{script} {model}",
                    "gnnfast": on,
                    "accuracy": statistics.mean(accuracy),
                    "deviation": statistics.stdev(accuracy),
                    "epoch_ms": statistics.median(r["epoch_ms"] for r in results),
                    "memory_mib": max(r["memory"] for r in results) / MIB,
                    "device": results[-1]["device"],
                    "kernels": kernels,
                    "fallbacks": fallbacks,
                }
                records.append(record)
                table.add_row(
                    record["script"] if not on else "",
                    "on" if on else "off",
                    f"{record['accuracy']:.3f} ± {record['deviation']:.3f}",
                    f"{record['epoch_ms']:.2f}",
                    f"{record['memory_mib']:.0f}",
                    ", ".join(kernels) or "-",
                    "; ".join(fallbacks) or ("none" if on else "-"),
                    end_section=on,
                )
            difference, own = (max(abs(a - b) for a, b in zip(curves[False], curves[k])) for k in (True, "again"))
            records[-1] |= {"largest_loss_difference": difference, "between_two_runs_without": own}
            agreed &= difference < max(1e-4, 3 * own)
    console.print(table)
    console.print("Largest difference of the loss over 50 epochs with the same seed and no dropout, without against with gnnfast:")
    for record in records[1::2]:
        own = record["between_two_runs_without"]
        console.print(f"  {record['script']}: {record['largest_loss_difference']:.1e} (two runs without gnnfast: {own:.1e})")
    out = os.environ.get("GNNFAST_DEMO_JSON")
    if out:
        Path(out).write_text(json.dumps(records, indent=1) + "\n")
    console.print(
        "[green]The losses agree to 1e-4, or as well as the framework with itself.[/]"
        if agreed
        else "[red]The losses do NOT agree.[/]"
    )
    sys.exit(0 if agreed else 1)


if __name__ == "__main__":
    main()
