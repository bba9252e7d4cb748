"""Whole models where the host decides: small graphs, and graphs that are new in every step, with gnnfast on and off in turn.

gnnfast bench host --device cuda --out benchmarks/results/NAME
gnnfast bench host --groups molecules --sizes 32 --models GIN GCN
gnnfast bench host --groups layers --apart             every convolution of PyG alone, on graphs of a few edges
gnnfast bench host --apart --processes 4 --repeats 8   each side in four processes, of which one may be slow for its whole life
gnnfast bench host --apart --processes 4 --repeats 100 --seconds 0.05 --warmup 2   where a machine's speed changes within a second
gnnfast bench host --instructions --device cpu ...     instructions of a step, by valgrind, where times are noise
gnnfast bench host --control ...                       PyG twice: what ratios vary by where nothing differs

Molecules: batches of small graphs of 15 to 34 atoms, 5 layers of 64. Samples: neighbours of seed nodes as a loader draws them
(15, 10, 5 of each node), 3 layers of 256. Full: real graphs (GNNFAST_DATA), 2 layers of 64. Layers: one of 16 on a random graph.
Matrices: the same given as an adjacency matrix, torch's CSR. "new": the edge_index is a new tensor in every step. The same of DGL,
batches and blocks: see host_dgl.py. A step of training is forward, loss, backward and Adam (of layers without Adam, and features
have gradients); inference runs under no_grad. Times are those of many steps, waited for once. Waits and launches are of one step on
CUDA.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GINEConv, PNAConv, SAGEConv, TransformerConv, global_add_pool
from torch_geometric.utils import to_torch_csr_tensor

import gnnfast
from gnnfast.cache import cache

from . import convs, graphs, host_dgl, instructions, processes, tables, timing

FANOUTS = (15, 10, 5)
REAL = ("cora", "citeseer", "amazon-photo", "amazon-computers", "tolokers")
SIZES = {"molecules": (32, 128, 1024), "samples": (128, 1024), "full": REAL}
SIZES |= {"dgl molecules": SIZES["molecules"], "dgl samples": SIZES["samples"], "layers": (200, 600, 2000, 6000, 20000, 60000)}
SIZES["matrices"] = SIZES["layers"]
ALONE = ("layers", "matrices")  # one layer
MODELS: dict[str, tuple[str, ...]] = {
    "dgl molecules": ("GIN", "GraphConv", "SAGE", "GAT", "GATv2"),
    "dgl samples": ("GraphConv", "SAGE", "GIN", "GAT", "GATv2"),
    "molecules": ("GIN", "GINE", "GCN", "SAGE", "GAT", "GATv2", "Transformer", "PNA"),
    "samples": ("SAGE", "GCN", "GAT", "GATv2", "Transformer"),
    "full": ("GCN", "SAGE", "GIN", "GAT", "GATv2", "Transformer"),
    "layers": tuple(convs.ALL),
    "matrices": tuple(name for name in convs.ALL if name not in convs.NO_MATRIX),
}
PASSES = ("training", "inference")
TOLERANCE = 1e-4


class Work(NamedTuple):
    """``x [N, F]``, ``edge_index [2, E]``, ``edge_attr [E, width]``; ``batch [N]`` is the graph of each node where graphs are
    pooled, ``rows`` how many nodes the loss is over where not; ``widths`` are those of the layers."""

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    batch: Tensor | None
    rows: int
    widths: tuple[int, ...]


def molecules(count: int, device: torch.device) -> Work:
    """``count`` trees of 15 to 34 nodes with an edge more in ten, both directions, side by side."""
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(15, 35, (count,), generator=generator)
    first = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    pairs, of_node = [], torch.repeat_interleave(torch.arange(count), sizes)
    for begin, size in zip(first.tolist(), sizes.tolist()):
        parents = [int(torch.randint(max(i - 4, 0), i, (), generator=generator)) for i in range(1, size)]
        pairs += [(begin + p, begin + i) for i, p in enumerate(parents, 1)]
        pairs += [(begin + i, begin + i + 5) for i in range(0, size - 5, 10)]
    half = torch.tensor(pairs).t()
    edge_index = torch.cat([half, half.flip(0)], 1)[:, torch.randperm(2 * half.shape[1], generator=generator)]
    nodes = int(first[-1])
    x, attr = torch.randn(nodes, 64, generator=generator), torch.randn(edge_index.shape[1], 64, generator=generator)
    moved = (t.to(device) for t in (x, edge_index, attr, of_node))
    return Work(*moved, count, (64,) * 6)  # type: ignore[misc]


def samples(seeds: int, device: torch.device) -> Work:
    """Sampled neighbours of ``seeds`` nodes, hop by hop, in a large graph of arxiv's degrees, edges by destination as loaders give
    them."""
    generator = torch.Generator().manual_seed(seeds)
    nodes, first, src, dst = seeds, 0, [], []
    for fanout in FANOUTS:
        frontier = torch.arange(first, nodes)
        degree = torch.empty(frontier.numel()).log_normal_(1.3, 1.2, generator=generator).long().clamp(0, fanout)
        count = int(degree.sum())
        new = torch.rand(count, generator=generator) < 0.75
        ids = torch.randint(0, nodes, (count,), generator=generator)
        ids[new] = nodes + torch.arange(int(new.sum()))
        src.append(ids)
        dst.append(torch.repeat_interleave(frontier, degree))
        first, nodes = nodes, nodes + int(new.sum())
    edge_index = torch.stack([torch.cat(src), torch.cat(dst)]).to(device)
    x = torch.randn(nodes, 100, generator=generator).to(device)
    return Work(x, edge_index, x.new_empty(0), None, seeds, (100, 256, 256, 47))


def full(name: str, device: torch.device) -> Work:
    data = graphs.real_data(name)
    x = data.x.to(device)
    return Work(x, data.edge_index.to(device), x.new_empty(0), None, data.num_nodes, (x.shape[1], 64, 64))


def few(edges: int, device: torch.device) -> Work:
    """A random graph of three edges a node in the mean, for a layer alone."""
    generator = torch.Generator().manual_seed(edges)
    nodes = 3 * edges // 10
    edge_index = torch.randint(nodes, (2, edges), generator=generator).to(device)
    x = torch.randn(nodes, 16, generator=generator).to(device)
    return Work(x, edge_index, x.new_empty(0), None, nodes, (16, 16))


def few_in_matrix(edges: int, device: torch.device) -> Work:
    work = few(edges, device)
    return work._replace(edge_index=to_torch_csr_tensor(work.edge_index, size=(work.rows, work.rows)))


WORK: dict[str, Callable[[Any, torch.device], Work]] = {"molecules": molecules, "samples": samples, "full": full}
WORK |= {"layers": few, "matrices": few_in_matrix}


def conv(name: str, width_in: int, width_out: int, work: Work) -> nn.Module:
    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(width_in, width_out), nn.ReLU(), nn.Linear(width_out, width_out))

    if name == "GIN":
        return GINConv(mlp())
    if name == "GINE":
        return GINEConv(mlp())
    attention = {"GAT": GATConv, "GATv2": GATv2Conv, "Transformer": TransformerConv}
    if name in attention:
        heads = 8 if width_out % 8 == 0 else 1
        return attention[name](width_in, width_out // heads, heads=heads)
    if name == "PNA":
        histogram = work.edge_index[1].bincount(minlength=work.x.shape[0]).bincount()
        return PNAConv(width_in, width_out, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"], histogram)
    return {"GCN": GCNConv, "SAGE": SAGEConv}[name](width_in, width_out)


class Model(nn.Module):
    """Layers with ReLU in between, and a sum over each graph where there are several."""

    def __init__(self, name: str, work: Work) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv(name, *widths, work) for widths in zip(work.widths, work.widths[1:]))
        self.takes_attr, self.graphs = name == "GINE", work.rows
        self.head = nn.Linear(work.widths[-1], 1) if work.batch is not None else None

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor | None) -> Tensor:
        for i, layer in enumerate(self.convs):
            x = x.relu() if i else x
            x = layer(x, edge_index, edge_attr) if self.takes_attr else layer(x, edge_index)
        if self.head is not None:
            return self.head(global_add_pool(x, batch, self.graphs))
        return x[: self.graphs]


def make_step(name: str, work: Work, training: bool, new: bool) -> Callable[[], Tensor]:
    """One step, which returns the model's output."""
    torch.manual_seed(0)
    model = Model(name, work).to(work.x.device).train(training)

    def forward() -> Tensor:
        edge_index = work.edge_index.clone() if new else work.edge_index
        return model(work.x, edge_index, work.edge_attr, work.batch)

    return stepping(model, forward, training)


def make_layer_step(name: str, work: Work, training: bool, new: bool) -> Callable[[], Tensor]:
    """The same of a layer alone: forward and, in training, backward to its features."""
    torch.manual_seed(0)
    layer = convs.ALL[name](*work.widths).to(work.x.device)
    x = work.x.clone().requires_grad_(training)

    def step() -> Tensor:
        with torch.set_grad_enabled(training):
            out: Tensor = layer(x, work.edge_index.clone() if new else work.edge_index)
            if training:
                out.square().mean().backward()
                layer.zero_grad()
                x.grad = None
            return out

    return step


def stepping(model: nn.Module, forward: Callable[[], Tensor], training: bool) -> Callable[[], Tensor]:
    """A step of training or of inference."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def train() -> Tensor:
        optimizer.zero_grad()
        out = forward()
        out.square().mean().backward()
        optimizer.step()
        return out

    def infer() -> Tensor:
        with torch.no_grad():
            return forward()

    return train if training else infer


def block_ms(step: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Milliseconds a step, of as many as fill ``seconds``."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    once = min(timing.wall_ms(step, device) for _ in range(2)) / 1e3
    count = max(int(seconds / once), 2)
    synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    return 1e3 * (time.perf_counter() - begin) / count


def waits(step: Callable[[], Any]) -> int:
    """How often a step waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(w.message) for w in caught)


PER_SIDE = 2  # cores: of the thread that runs a model, and of the one that runs its backward pass


class Side(NamedTuple):
    """What is measured: DGL or PyG, by which of the :func:`make_workers`."""

    name: str
    worker: str
    in_pyg: bool = False


def sides_of(group: str, cuda: bool, control: bool) -> tuple[Side, Side]:
    """Those of a cell, of which the second is gnnfast's, or as a ``control`` the first again."""
    if control:
        return Side("PyG", "off"), Side("PyG again", "again")
    if group not in host_dgl.WORK:
        return Side("PyG", "off"), Side("gnnfast", "on")
    if cuda:
        return Side("gnnfast in PyG", "on", in_pyg=True), Side("gnnfast in DGL", "on")
    return Side("DGL", "off"), Side("gnnfast", "on")


class Cell(NamedTuple):
    """A model at work: what it is named by in the table."""

    group: str
    size: Any
    model: str
    training: bool
    new: bool


class Here:
    """This process, which switches gnnfast on or off for each thing that it is asked."""

    def __init__(self, device: str, on: bool) -> None:
        self._measured, self._switch = _Measured(torch.device(device)), gnnfast.enable if on else gnnfast.disable

    def ask(self, what: str, *arguments: Any) -> Any:
        self._switch()
        try:
            return getattr(self._measured, what)(*arguments)
        finally:
            gnnfast.enable()


# Of glibc, which else gives memory back or keeps it by what happens to lie above: in steps of one model and side that took 44 ms in
# one process and 66 in another, the first had no page fault and the second 19,000.
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 26)}


def _num_edges(edges: Tensor) -> int:
    return edges.shape[1] if edges.layout is torch.strided else edges._nnz()


class _Measured:
    """What is done when asked."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.at, self.work, self.steps = device, None, None, {}

    def make(self, cell: tuple[Any, ...], in_pyg: bool) -> dict[str, Any]:
        """The output of a first step, and the sizes of what it works on."""
        cell = Cell(*cell)
        if self.at != (cell.group, cell.size):
            self.steps.clear()
            self.at, self.work = (cell.group, cell.size), (WORK | host_dgl.WORK)[cell.group](cell.size, self.device)
        name, work = cell.model, self.work
        if cell.group in host_dgl.WORK and not in_pyg:
            step = host_dgl.make_step(name, work, cell.training, cell.new)
        else:
            name, work = (host_dgl.IN_PYG.get(name, name), work.pyg) if in_pyg else (name, work)
            make = make_layer_step if cell.group in ALONE else make_step
            step = make(name, work, cell.training, cell.new)
        self.steps[in_pyg] = step
        edges = self.work.edges if cell.group in host_dgl.WORK else _num_edges(self.work.edge_index)
        return {"output": step().detach().double().cpu(), "nodes": self.work.x.shape[0], "edges": edges}

    def time(self, in_pyg: bool, warmup: int, seconds: float, cores: set[int] | None, learn: bool) -> float:
        """Milliseconds a step, on certain ``cores`` of the host; ``learn``: what it calls has been switched, or never ran."""
        if cores:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cores)
        for _ in range(warmup):
            self.steps[in_pyg]()
        if learn:
            timing.learn(self.steps[in_pyg])
        return block_ms(self.steps[in_pyg], self.device, seconds)

    def count(self, in_pyg: bool) -> tuple[int, float]:
        """The waits and launches of a step on CUDA."""
        return waits(self.steps[in_pyg]), timing.device_work(self.steps[in_pyg], calls=1, warmup=2)[1]

    def instructions(self, in_pyg: bool, warmup: int) -> int:
        for _ in range(warmup):
            self.steps[in_pyg]()
        return instructions.of_step(self.steps[in_pyg])

    def clear(self) -> None:
        self.steps.clear()
        cache.clear()


def free_cores(options: argparse.Namespace) -> list[int]:
    """The cores on which processes apart are measured beside a GPU; none where there is no choice. On a CPU all take part."""
    if not options.apart or options.device == "cpu" or not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def make_workers(options: argparse.Namespace, counting: instructions.Counting | None) -> dict[str, list[Any]]:
    """What measures, by whether gnnfast is on in it: as a control, ``"off"`` and ``"again"``, each in processes of its own."""
    apart = ("host", "--device", options.device, "--serve")
    make: Callable[..., Any]
    if counting is not None:
        make = functools.partial(processes.Apart, *apart, variables=counting.variables, prefix=counting.prefix)
    elif options.apart:
        make = functools.partial(processes.Apart, *apart, variables=KEPT_MEMORY)
    else:
        make = functools.partial(Here, options.device)
    names = ("off", "again") if options.control else ("off", "on")
    return {name: [make(on=name == "on") for _ in range(options.processes)] for name in names}


def measure(cell: Cell, workers: dict[str, list[Any]], options: argparse.Namespace) -> tables.Row:
    sides = sides_of(cell.group, options.device == "cuda", options.control)
    made = []
    for side in sides:
        first, *_ = [worker.ask("make", tuple(cell), side.in_pyg) for worker in workers[side.worker]]
        made.append(first)
    row: tables.Row = {"group": cell.group, "size": cell.size, "model": cell.model}
    row |= {"pass": PASSES[not cell.training], "graph": "new" if cell.new else "same"}
    row |= {what: made[1][what] for what in ("nodes", "edges")}
    first, last = (m["output"] for m in made)
    error = 0.0 if sides[0].in_pyg else float((first - last).norm() / first.norm().clamp(min=1e-30))
    if not error < TOLERANCE:
        raise SystemExit(f"gnnfast bench host: results of {row} differ by {error:.2g}")
    row["sides"] = " / ".join(side.name for side in sides)
    row |= (_counted if options.instructions else _timed)(sides, workers, options)
    for worker in itertools.chain(*workers.values()):
        worker.ask("clear")
    return row


def _counted(sides: tuple[Side, Side], workers: dict[str, list[Any]], options: argparse.Namespace) -> tables.Row:
    row: tables.Row = {}
    asked = [workers[side.worker][0] for side in sides]
    for worker, side in zip(asked, sides):
        worker.send("instructions", side.in_pyg, options.warmup)
    for worker, side in zip(asked, sides):
        row[f"{side.name} instructions"] = worker.answer()
    return row | {"ratio": operator.truediv(*row.values())}


def _timed(sides: tuple[Side, Side], workers: dict[str, list[Any]], options: argparse.Namespace) -> tables.Row:
    row: tables.Row = {}
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    available = free_cores(options)
    for nth in range(options.repeats):
        # One process may be slower than another for as long as it lives, by 5% and more, hence several of each side. Cores of one
        # machine differ for as long as their neighbours are busy, and a process stays on its own: both sides take the same, others
        # in each round.
        cycle, process = divmod(nth, options.processes)
        first = PER_SIDE * (cycle + process)
        cores = {available[(first + k) % len(available)] for k in range(PER_SIDE)} if available else None
        for side in sides if cycle % 2 else sides[::-1]:
            how = options.warmup, options.seconds, cores, not cycle or not options.apart
            times[side.name].append(workers[side.worker][process].ask("time", side.in_pyg, *how))
    for side in sides:
        row |= timing.Sample.of(times[side.name]).columns(side.name) | {f"{side.name} fastest ms": min(times[side.name])}
    row["ratio"] = row[f"{sides[0].name} ms"] / row[f"{sides[1].name} ms"]
    # What others do on a machine slows both sides of a round, or makes Python slower, never faster.
    row["ratio of rounds"] = statistics.median(map(operator.truediv, *(times[side.name] for side in sides)))
    row["ratio of fastest"] = row[f"{sides[0].name} fastest ms"] / row[f"{sides[1].name} fastest ms"]
    if options.device == "cuda" and not options.quick:
        for side in sides:
            row[f"{side.name} waits"], row[f"{side.name} launches"] = workers[side.worker][0].ask("count", side.in_pyg)
    return row


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for group in options.groups:
        for size in SIZES[group]:
            if options.sizes and str(size) not in options.sizes:
                continue
            for name in MODELS[group]:
                if options.models and name not in options.models:
                    continue
                if group == "matrices" and options.device == "cuda" and name in convs.NO_MATRIX_ON_CUDA:
                    continue
                for passes in PASSES:
                    for new in (False, True) if passes in options.passes else ():
                        yield Cell(group, size, name, passes == "training", new)


def summary(rows: list[tables.Row]) -> list[tables.Row]:
    """Geometric means and least ratios by group, model, pass and graph; of layers alone by size, over all of them."""
    parts: dict[tuple[str, ...], list[tables.Row]] = {}
    for row in rows:
        alone = row["group"] in ALONE
        kind = (f"{row['group']}, {row['size']} edges", "each") if alone else (row["group"], row["model"])
        parts.setdefault((*kind, row["pass"], row["graph"]), []).append(row)
    found = []
    for key, members in parts.items():
        ratios = [r["ratio"] for r in members]
        least, of = min((r["ratio"], r["model"]) for r in members)
        row = dict(zip(("kind", "model", "pass", "graph"), key)) | {"ratio": members[0]["sides"], "cells": len(ratios)}
        row |= {"geometric mean": timing.geometric_mean(ratios), "least": least} | ({"least of": of} if key[1] == "each" else {})
        for other in ("rounds", "fastest"):
            ratios = [r[f"ratio of {other}"] for r in members if f"ratio of {other}" in r]
            if not ratios:
                continue
            row |= {f"of {other}": timing.geometric_mean(ratios), f"least of {other}": min(ratios)}
        found.append(row)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("host", __doc__.splitlines()[0])
    tables.add_device(parser)
    groups = (*WORK, *host_dgl.WORK)
    about = "all but layers and matrices if not given"
    parser.add_argument("--groups", nargs="*", default=[g for g in groups if g not in ALONE], **tables.named(groups, about))
    sizes = dict.fromkeys(str(size) for sizes in SIZES.values() for size in sizes)
    parser.add_argument("--sizes", nargs="*", **tables.named(sizes, "all if not given"))
    parser.add_argument("--models", nargs="*", **tables.named(sorted({m for names in MODELS.values() for m in names})))
    parser.add_argument("--passes", nargs="*", default=PASSES, **tables.named(PASSES, "both if not given"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=16, help="steps at least before each measurement")
    parser.add_argument("--apart", action="store_true", help="each side in a process of its own, where nothing is switched")
    parser.add_argument("--processes", type=int, default=1, help="of each side, in turn; with --apart")
    parser.add_argument("--control", action="store_true", help="PyG on both sides: what ratios vary by where nothing differs")
    parser.add_argument("--instructions", action="store_true", help="of a step on a CPU, by valgrind, in place of times")
    parser.add_argument("--seconds", type=float, default=0.15, help="of steps in one measurement")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="without counting waits and launches")
    tables.add_output(parser)
    options = parser.parse_args(arguments)
    device, rows = torch.device(options.device), []
    if options.serve:
        return processes.serve(_Measured(device))
    if host_dgl.missing():
        print(f"gnnfast bench host: {host_dgl.missing()}; without its side")
        options.groups = [g for g in options.groups if g not in host_dgl.WORK]
    if "full" in options.groups and graphs.data_folder() is None:
        print("gnnfast bench host: GNNFAST_DATA does not name a folder with the real graphs; without full batches")
        options.groups = [g for g in options.groups if g != "full"]
    if options.control:
        options.groups = [g for g in options.groups if g not in host_dgl.WORK]
    if options.instructions and options.device != "cpu":
        parser.error("--instructions: of a CPU's work alone: add --device cpu")
    if not 1 <= options.processes <= options.repeats or (options.processes > 1 and (options.instructions or not options.apart)):
        parser.error(f"--processes {options.processes}: 1 to --repeats {options.repeats}, and with --apart, of times")
    wanted = list(cells(options))
    if not wanted:
        parser.error(f"nothing to measure: --groups {' '.join(options.groups)} has none of these --sizes and --models")
    try:
        counting = instructions.Counting() if options.instructions else None
    except instructions.Missing as missing:
        parser.error(f"--instructions: {missing}")
    workers = make_workers(options, counting)
    title = f"Models where the host decides, on {options.device}"
    for cell in wanted:
        try:
            row = measure(cell, workers, options)
        except processes.Ended as ended:
            raise SystemExit(f"gnnfast bench host: {ended}") from None
        rows.append(row)
        if options.out:
            tables.save(tables.make_record(title, device, rows, summary(rows)), options.out)
        sides = row["sides"].split(" / ")
        what = "instructions" if options.instructions else "ms"
        times = ", ".join(f"{side} {row[f'{side} {what}']:.4g} {what}" for side in sides)
        waited = f"; waits {', '.join(str(row[f'{side} waits']) for side in sides)}" if f"{sides[0]} waits" in row else ""
        at = f"{cell.group} {cell.size} {cell.model} {row['pass']} {row['graph']}"
        print(f"{at}: {times}, {row['ratio']:.2f}{waited}", flush=True)
    if counting is not None:
        for worker in itertools.chain(*workers.values()):
            worker.end()  # which would write into a folder that is gone
    tables.write(options, title, rows, device, summary(rows))  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
