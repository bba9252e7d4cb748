"""Peak memory of layers, forward and backward, with gnnfast off and on, and the largest graph that fits.

    gnnfast bench memory                          peaks of each layer; on CUDA also the largest graph that fits
    gnnfast bench memory --device cuda --limit 16 --out benchmarks/results/NAME
    gnnfast bench memory --device cuda --layers "EdgeConv MLP" --graph reddit --width 64

Peaks are above what was there before the first call, which is counted with everything that gnnfast makes and keeps in it. On CUDA
they are those of torch's allocator; on a CPU those of the resident memory of a process for each side (Linux). For the largest graph
edges are doubled, 20 a node, until a step does not fit --limit GiB. Both sides must have the same gradients.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any, NamedTuple

import torch
from torch import nn
from torch_geometric.nn import EdgeConv

import gnnfast
from gnnfast.sides import own_process

from . import convs, graphs, layers, tables, timing

LAYERS = ("GCNConv", "SAGEConv", "GINConv", "GATConv", "GATv2Conv", "TransformerConv", "PNAConv")
ALL = convs.ALL | {"EdgeConv MLP": lambda i, o: EdgeConv(nn.Sequential(nn.Linear(2 * i, o), nn.ReLU(), nn.Linear(o, o)))}
GRAPHS = {"cpu": "computers-size", "cuda": "arxiv-size"}
AVERAGE_DEGREE, FIRST_EDGES, MOST_EDGES = 20, 1 << 20, 1 << 31
SIDES = ("off", "on")


class Found(NamedTuple):
    """The peak of one layer and side in GiB, or why there is none, and the norms of its gradients."""

    peak: float | str | None
    norms: list[float]


class Prepared:
    """A layer with features that need a gradient, on a graph."""

    def __init__(self, name: str, width: int, edge_index: torch.Tensor, nodes: int) -> None:
        torch.manual_seed(0)
        self.edge_index = edge_index
        self.layer = ALL[name](width, width).to(edge_index.device)
        self.x = torch.randn(nodes, width, device=edge_index.device, requires_grad=True)

    def step(self) -> None:
        """Forward and backward."""
        layers.step(self.layer, self.x, self.edge_index)

    def found(self, peak: float | None) -> Found:
        """With what the two sides are compared by."""
        return Found(peak, [float(g.norm()) for g in layers.gradients(self.layer, self.x, self.edge_index)])


# ---- CPU: a process for each number ------------------------------------------------------------------------------------------
def in_child(name: str, width: int, graph: str, side: str) -> Found:
    """What one layer and side took."""
    given = ("bench", "memory", "--device", "cpu", "--child", name, "--graph", graph, "--width", str(width))
    command, environment = own_process("gnnfast.cli:main", *given, on=side == "on", flags=("-W", "ignore"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return Found(timing.OUT_OF_MEMORY if done.returncode == -9 else (done.stderr.strip().splitlines() or ["failed"])[-1], [])
    return Found(*json.loads(done.stdout.splitlines()[-1]))


def child(name: str, width: int, graph: str) -> Found:
    """What :func:`in_child` asks for, in that process."""
    made = Prepared(name, width, *graphs.made(graph, torch.device("cpu")))
    try:
        return made.found(timing.peak_rss_gib(made.step))
    except Exception as error:
        if timing.is_out_of_memory(error):
            return Found(timing.OUT_OF_MEMORY, [])
        raise


# ---- CUDA --------------------------------------------------------------------------------------------------------------------
def on_device(name: str, width: int, edge_index: torch.Tensor, nodes: int, side: str) -> Found:
    """The same above the graph, features and parameters."""
    (gnnfast.enable if side == "on" else gnnfast.disable)()
    try:
        timing.clear(edge_index.device)
        made = Prepared(name, width, edge_index, nodes)
        return made.found(timing.peak_gib(made.step, torch.cuda.memory_allocated()))
    except torch.OutOfMemoryError:
        return Found(timing.OUT_OF_MEMORY, [])
    finally:
        gnnfast.enable()


def largest(name: str, width: int, device: torch.device, side: str, limit_gib: float) -> int:
    """The most edges, of doublings, of which a step fits the limit; 0 if none does."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(limit_gib * 2**30 / total, 1.0), device.index)
    fits, edges = 0, FIRST_EDGES
    (gnnfast.enable if side == "on" else gnnfast.disable)()
    try:
        while edges < MOST_EDGES:
            timing.clear(device)
            nodes = edges // AVERAGE_DEGREE
            edge_index = torch.randint(0, nodes, (2, edges), device=device)
            made = Prepared(name, width, edge_index, nodes)
            made.step()
            torch.cuda.synchronize()
            fits, edges = edges, 2 * edges
            del edge_index, made
    except torch.OutOfMemoryError:
        pass
    finally:
        gnnfast.enable()
        torch.cuda.set_per_process_memory_fraction(1.0, device.index)
        timing.clear(device)
    return fits


# ---- a run -------------------------------------------------------------------------------------------------------------------
def measure(name: str, width: int, graph: str, given: tuple[torch.Tensor, int] | None, limit_gib: float) -> tables.Row:
    """A layer. ``given`` is the graph on CUDA."""
    row: tables.Row = {"layer": name, "graph": graph, "width": width}
    norms = []
    for side in SIDES:
        found = in_child(name, width, graph, side) if given is None else on_device(name, width, *given, side)
        row[f"{side} GiB"] = found.peak
        norms.append(torch.tensor(found.norms))
    off, on = norms
    if len(off) and len(on):  # both fit
        error = float((off - on).abs().max() / off.max()) if off.shape == on.shape else float("inf")
        if not error < layers.TOLERANCE:
            row["failed"] = f"gradients differ by {error:.2g}"
            print(f"{name}: {row['failed']}", flush=True)
            return row
    if all(isinstance(row[f"{side} GiB"], float) for side in SIDES):
        row["off / on"] = row["off GiB"] / max(row["on GiB"], 1e-6)
    if given is not None:
        for side in SIDES:
            row[f"{side} most edges"] = largest(name, width, given[0].device, side, limit_gib)
    words = [f"{side} {tables.cell(row[f'{side} GiB'])} GiB" for side in SIDES]
    words += [f"{side} up to {row[f'{side} most edges']:,} edges" for side in SIDES if f"{side} most edges" in row]
    print(f"{name}: {', '.join(words)}", flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a side failed otherwise than by want of memory, or the two differ."""
    parser = tables.make_parser("memory", __doc__)
    tables.add_device(parser)
    parser.add_argument("--layers", nargs="+", default=LAYERS, **tables.named(ALL))
    about = "for the peaks, in place of the device's"
    parser.add_argument("--graph", **tables.named((*graphs.OTHER_SIZES, *graphs.LOG_NORMAL), about))
    parser.add_argument("--width", type=int, default=128, metavar="F", help="features of a node, into a layer and out of it (128)")
    parser.add_argument("--limit", type=float, default=16.0, metavar="GiB", help="for the largest graph that fits (16)")
    parser.add_argument("--child", choices=tuple(ALL), help=argparse.SUPPRESS)
    tables.add_output(parser, chart=True)
    options = parser.parse_args(arguments)
    if not options.limit > 0:
        parser.error(f"--limit must be above 0 GiB, got {options.limit:g}")
    graph = options.graph or GRAPHS[options.device]
    if options.child:
        print(json.dumps(child(options.child, options.width, graph)))
        return 0
    device = torch.device(options.device)
    given = graphs.made(graph, device) if device.type == "cuda" else None
    rows = [measure(name, options.width, graph, given, options.limit) for name in options.layers]
    title = f"Memory of PyG layers, forward and backward, on {device.type}"
    if given is not None:
        title += f"; the largest graph of {AVERAGE_DEGREE} edges a node within {options.limit:g} GiB"
    record = tables.write(options, title, rows, device, {})
    if options.out:
        tables.save_with_chart(record, options.out, lambda path: draw(record, path))
    return int(
        any("failed" in row for row in rows)
        or any(isinstance(row[f"{side} GiB"], str) and row[f"{side} GiB"] != timing.OUT_OF_MEMORY for row in rows for side in SIDES)
    )


def draw(record: dict[str, Any], path: str) -> str:
    """The chart of a record."""
    from .plot import bars

    rows = [row | {"model": row["layer"], "group": "peak memory"} for row in record["rows"]]
    return bars(record | {"rows": rows}, path, "off / on", "memory without gnnfast / with")


if __name__ == "__main__":
    raise SystemExit(main())
