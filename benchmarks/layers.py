"""Whole PyG layers, forward and backward, with gnnfast on and off in one process on the same inputs.

gnnfast bench layers --device cuda --out benchmarks/results/NAME     reddit-size random graph
gnnfast bench layers --device cpu --out benchmarks/results/NAME      real graphs
gnnfast bench layers --all --out benchmarks/results/NAME             every convolution; on CUDA an arxiv-size graph, and small ones
gnnfast bench layers --all --compiled ...                            beside PyG under torch.compile too
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gnnfast
from gnnfast.cache import cache

from . import graphs, host, peers, processes, tables, timing
from .convs import ALL, LAYERS, OWN, served

EVERY = ALL | OWN
UNTIL_SETTLED = 20  # steps, after which gnnfast has the schedules of a graph that is used again and again
TOLERANCE = 2e-2  # in float32 PyG's own gradients of GatedGraphConv are off by 5e-3 where nodes have thousands of edges


def step(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer(x, edge_index).sum().backward()


def gradients(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> list[Tensor]:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer(x, edge_index).square().mean().backward()  # a sum's gradients cancel out in some layers
    leaves = [*layer.parameters(), x] if x.requires_grad else layer.parameters()
    return [p.grad.clone() for p in leaves if p.grad is not None]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference; what is small beside the others, as a bias may be, counts by their size."""
    largest = max(float(b.norm()) for b in expected)
    return max(float((a - b).norm()) / max(float(b.norm()), 0.05 * largest) for a, b in zip(found, expected, strict=True))


class Graph(NamedTuple):
    """Of ``widths`` features in and out of a layer; ``x_grad``: whether they have gradients, those of a model's first layer do not.
    ``repeats`` calls are timed, as many as fill 60 ms if not given."""

    name: str
    edge_index: Tensor
    nodes: int
    widths: tuple[int, int]
    x_grad: bool
    repeats: int | None = None


def make(name: str, graph: Graph) -> tuple[torch.nn.Module, Tensor]:
    """A layer and its features."""
    device = graph.edge_index.device
    torch.manual_seed(0)
    x = torch.randn(graph.nodes, graph.widths[0], device=device, requires_grad=graph.x_grad)
    return EVERY[name](*graph.widths).to(device), x


def measure(name: str, graph: Graph, *compiled: dict[str, float]) -> dict[str, Any]:
    """The row of a layer; ``compiled`` are its columns under torch.compile."""
    edge_index, (width_in, width_out), repeats = graph.edge_index, graph.widths, graph.repeats
    device = edge_index.device
    made, x = make(name, graph)
    cuda = device.type == "cuda"
    row: dict[str, Any] = {"layer": name, "served": served(name), "graph": graph.name, "edges": edge_index.shape[1]}
    row |= {"in": width_in, "out": width_out, "gradient of x": "yes" if graph.x_grad else "no"}
    results, layers = {}, {}

    def switch(label: str) -> None:
        (gnnfast.enable if label == "gnnfast" else gnnfast.disable)()

    cache.clear()
    for label in ("PyG", "gnnfast"):
        switch(label)
        layer = layers[label] = copy.deepcopy(made)  # SuperGATConv keeps what it made of edges until the next call
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            baseline = torch.cuda.memory_allocated()
            # Everything gnnfast keeps is made inside this call and counted.
            row[f"{label} first call GiB"] = timing.peak_gib(lambda: step(layer, x, edge_index), baseline)
            step(layer, x, edge_index)
            row[f"{label} GiB"] = timing.peak_gib(lambda: step(layer, x, edge_index), baseline)
        results[label] = gradients(layer, x, edge_index)
        for _ in range(UNTIL_SETTLED if cuda else 0):
            step(layer, x, edge_index)
    error = difference(results["gnnfast"], results["PyG"])
    if not error < TOLERANCE:
        raise SystemExit(f"gnnfast bench layers: gradients of {name} on {graph.name} differ by {error:.2g}")
    calls = {label: functools.partial(step, layer, x, edge_index) for label, layer in layers.items()}
    for label, found in timing.in_turn(calls, switch, device, repeats).items():
        row |= found.columns(label)
    switch("gnnfast")
    for columns in compiled:
        row |= columns
    # The floor: what of the layer is not message passing, which no aggregation kernel can speed up.
    row["layer without edges ms"] = timing.median_ms(lambda: step(layer, x, edge_index[:, :0]), device, repeats)
    row["PyG / gnnfast"] = row["PyG ms"] / row["gnnfast ms"]
    if "PyG compiled ms" in row:
        row["PyG compiled / gnnfast"] = row["PyG compiled ms"] / row["gnnfast ms"]
        if "gnnfast compiled ms" in row:
            row["PyG compiled / gnnfast compiled"] = row["PyG compiled ms"] / row["gnnfast compiled ms"]
    sizes = f"{graph.name} {name} {width_in} -> {width_out}"
    print(f"{sizes}: PyG {row['PyG ms']:.3g} ms, gnnfast {row['gnnfast ms']:.3g} ms", file=sys.stderr, flush=True)
    return row


PROCESSES = 8  # of each side, in which layers are compiled at the same time; they are measured one after the other


class Compiled:
    """Layers under torch.compile, with gnnfast or without, in processes of their own: what is compiled may make a GPU fail, and
    with it all that runs in the process after it (torch 2.11: PyG's GATConv of several heads reads from a misaligned address)."""

    def __init__(self, options: argparse.Namespace, on: bool) -> None:
        self.side, self._on = "gnnfast" if on else "PyG", on
        self._arguments = ("layers", "--device", options.device, "--serve", *(["--all"] if options.all else []))
        self._arguments += ("--graphs", *options.graphs) if options.graphs else ()
        self._processes: list[processes.Apart] = []
        self._of: dict[str, processes.Apart] = {}

    def prepare(self, names: list[str], nth: int) -> None:
        """Compiles layers on the ``nth`` graph, and no others any more."""
        for process in self._processes:
            process.end()
        count = max(min(PROCESSES, (os.cpu_count() or 1) // 2, len(names)), 1)
        self._processes = [self._start() for _ in range(count)]
        self._of = {name: self._processes[i % count] for i, name in enumerate(names)}
        for name, process in self._of.items():
            process.send("prepare", name, nth)
        alone, ended = [], set()
        for name in names:
            try:
                self._of[name].answer()
            except processes.Ended:
                ended.add(self._of[name])
            except RuntimeError as failed:
                if "OutOfMemory" in str(failed):  # which others may have to do with, as with an end
                    alone.append(name)
                else:
                    self._fail(name, failed)
        for name in [*alone, *(name for name in self._of if self._of[name] in ended)]:
            self._of[name] = self._start()
            self._processes.append(self._of[name])
            self._try(name, "prepare", name, nth)

    def columns(self, name: str) -> dict[str, float]:
        """Those of a layer; empty where it could not be compiled, or has other gradients than PyG's uncompiled."""
        return self._try(name, "time", name) or {} if name in self._of else {}

    def _start(self) -> processes.Apart:
        return processes.Apart(*self._arguments, on=self._on)

    def _try(self, name: str, *asked: Any) -> Any:
        try:
            return self._of[name].ask(*asked)
        except RuntimeError as failed:
            self._fail(name, failed)

    def _fail(self, name: str, failed: Exception) -> None:
        print(f"{self.side}, {name} under torch.compile: {failed}", file=sys.stderr)
        del self._of[name]


class _Measured:
    """What a process of :class:`Compiled` does when asked."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._graph = options, None
        self._steps: dict[str, Callable[[], None]] = {}
        torch._dynamo.config.recompile_limit = len(EVERY)  # many layers share a forward of this benchmark

    def prepare(self, name: str, nth: int) -> None:
        device = torch.device(self._options.device)
        self._graph = self._graph or next(itertools.islice(graphs_for(self._options, device), nth, None))
        layer, x = make(name, self._graph)
        call, edge_index = torch.compile(layer), self._graph.edge_index
        with peers.without_gnnfast():
            expected = gradients(layer, x, edge_index)
        try:
            error = difference(gradients(call, x, edge_index), expected)
        except Exception as failed:
            if "CUDA error" in str(failed):  # nothing works in this process any more
                os._exit(1)
            raise
        if not error < TOLERANCE:
            raise ValueError(f"gradients differ by {error:.2g}")
        self._steps[name] = functools.partial(step, call, x, edge_index)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the other processes

    def time(self, name: str) -> dict[str, float]:
        device = torch.device(self._options.device)
        for _ in range(UNTIL_SETTLED if device.type == "cuda" else 0):
            self._steps[name]()
        found = timing.sample(self._steps[name], device, self._graph.repeats)
        return found.columns(f"{'gnnfast' if gnnfast.is_enabled() else 'PyG'} compiled")


def _arxiv(name: str, device: torch.device) -> Graph:
    rowptr, col = graphs.community_order(name, device)
    return Graph(name, graphs.to_edge_index(rowptr, col), rowptr.numel() - 1, (128, 128), True)


def _molecules(name: str, device: torch.device) -> Graph:
    batch = host.molecules(int(name.split()[0]), device)
    return Graph(name, batch.edge_index, batch.x.shape[0], (64, 64), True)


# Those of all convolutions on a GPU.
ON_CUDA: dict[str, Callable[[str, torch.device], Graph]] = {
    "arxiv": _arxiv,
    "pubmed-size": lambda name, device: Graph(name, *graphs.made(name, device), (64, 64), True),
    "128 molecules": _molecules,
}


def graphs_for(options: argparse.Namespace, device: torch.device) -> Iterator[Graph]:
    cuda = device.type == "cuda"
    if cuda and (options.all or options.own) and set(options.graphs or ON_CUDA) <= set(ON_CUDA):
        for name in options.graphs or ON_CUDA:
            yield ON_CUDA[name](name, device)
    elif cuda and options.graphs is None:
        rowptr, col = graphs.random_order("reddit", device)
        edge_index, nodes = graphs.to_edge_index(rowptr, col), rowptr.numel() - 1
        del rowptr, col
        for width in (16, 64, 128):
            yield Graph("reddit", edge_index, nodes, (602, width), False, 3)
    else:
        found = [graph for graph in options.graphs or graphs.REAL if not graphs.missing(graph, "real")]
        if not found:
            print("without the real graphs (GNNFAST_DATA names no folder with them): made ones of such sizes", file=sys.stderr)
        for graph in found or graphs.MADE:
            edge_index, nodes = graphs.real(graph) if found else graphs.made(graph, device)
            for x_grad in (False, True):
                yield Graph(graph, edge_index.to(device), nodes, (64, 64), x_grad, 10 if cuda else 3)


def summarise(rows: list[tables.Row]) -> list[tables.Row]:
    """By graph and by how classes are served: the geometric mean over its layers, and the least."""
    kinds: dict[tuple[str, str], list[tables.Row]] = {}
    for row in rows:
        kinds.setdefault((row["graph"], row["served"]), []).append(row)
    found = []
    for (graph, kind), of_kind in kinds.items():
        line: tables.Row = {"graph": graph, "served": kind, "layers": len(of_kind)}
        for ratio in ("PyG / gnnfast", "PyG compiled / gnnfast", "PyG compiled / gnnfast compiled"):
            if ratios := [(row[ratio], row["layer"]) for row in of_kind if ratio in row]:
                least, layer = min(ratios)
                line |= {ratio: timing.geometric_mean(value for value, _ in ratios), f"least {ratio}": f"{least:.2f}, {layer}"}
        found.append(line)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("layers", __doc__.splitlines()[0])
    tables.add_device(parser)
    parser.add_argument("--layers", nargs="*", **tables.named(EVERY))
    parser.add_argument("--all", action="store_true", help="every convolution of PyG that needs nothing but torch")
    parser.add_argument("--own", action="store_true", help="layers as users write them, by what their message() does")
    about = "the last ones with --all and --own on a GPU; if not given, on a CPU the real ones at hand, on a GPU large ones"
    parser.add_argument("--graphs", nargs="*", **tables.named(dict.fromkeys([*graphs.REAL, *ON_CUDA]), about))
    parser.add_argument("--compiled", action="store_true", help="both sides under torch.compile, too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    tables.add_output(parser)
    options = parser.parse_args(arguments)
    device, rows = torch.device(options.device), []
    if options.serve:
        return processes.serve(_Measured(options))
    names = options.layers or list(OWN if options.own else ALL if options.all else LAYERS if device.type == "cpu" else ["GCNConv"])
    title = f"PyG layers, forward and backward, on {options.device}"
    compiled = [Compiled(options, on) for on in (False, True)] if options.compiled else []
    for nth, graph in enumerate(graphs_for(options, device)):
        # Without parameters a model's first layer has no gradients.
        of_graph = [name for name in names if graph.x_grad or any(True for _ in EVERY[name](*graph.widths).parameters())]
        for side in compiled:
            side.prepare(of_graph, nth)
        for name in of_graph:
            rows.append(measure(name, graph, *(side.columns(name) for side in compiled)))
            if options.out:
                tables.save(tables.make_record(title, device, rows, summarise(rows)), options.out)
    tables.write(options, title, rows, device, summarise(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
