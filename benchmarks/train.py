"""Training of whole models, full batch and sampled neighbours, in PyG and DGL, with gnnfast off and on in turn.

    gnnfast bench train                              every model on this device; on a CPU in three minutes
    gnnfast bench train --device cuda --out benchmarks/results/NAME
    gnnfast bench train --models GCN GAT --frameworks pyg --batching full

Graphs are made, of the sizes of known ones, with planted classes. Models have two layers with ReLU and dropout between them, and
are trained with Adam. An epoch of "full" is one step on the whole graph, one of "mini" a few steps, whose neighbours are drawn
within the time: for PyG by this benchmark on the device, with replacement, for DGL by DGL; "model" is the same epoch, but for the
drawing. Before anything is timed both sides
train on the same batches from the same seed, and their losses must agree. Memory is the peak of an epoch above what was there
before: on CUDA of torch's allocator, on a CPU of the process (Linux).

DGL's PNAConv, which takes seconds an epoch and no blocks, is trained only where --models names it. A DGL without CUDA runs on a GPU
through gnnfast alone; there it has no side without.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gnnfast

from . import graphs, host, tables, timing
from .sampled import Task, planted

MODELS = ("GCN", "SAGE", "GIN", "GAT", "GATv2", "PNA", "Transformer")
FRAMEWORKS = ("pyg", "dgl")
TOLERANCE = 1e-3  # of the losses of the first steps, relative
CHECKED = 3  # steps that are compared


class Size(NamedTuple):
    """What is trained on a device: graphs by batching, hidden width, neighbours of each hop, seeds a batch and steps an epoch."""

    graphs: dict[str, tuple[str, ...]]
    hidden: int
    fanouts: tuple[int, ...]
    seeds: int
    steps: int
    seconds: float  # of timed epochs on a side of a cell


SIZES = {
    "cpu": Size({"full": ("pubmed-size",), "mini": ("computers-size",)}, 64, (10, 5), 256, 3, 1.0),
    "cuda": Size({"full": ("arxiv-size", "reddit"), "mini": ("reddit",)}, 128, (15, 10), 1024, 10, 1.0),
}
QUICK = Size({"full": ("tiny",), "mini": ("tiny",)}, 16, (4, 3), 32, 2, 0.0)


# ---- batches -----------------------------------------------------------------------------------------------------------------
class Batch(NamedTuple):
    """``graph`` is what the model takes: an edge_index, or DGL's graph or blocks. The loss is over the first ``len(y)`` rows of the
    output, or over ``rows``."""

    graph: Any
    x: Tensor
    y: Tensor
    rows: Tensor | None = None


class Neighbours:
    """Draws neighbours of seeds, hop by hop, on the graph's device, with replacement."""

    def __init__(self, task: Task, fanouts: tuple[int, ...]) -> None:
        nodes = task.y.numel()
        by_dst = task.edge_index[1].argsort()
        self.col = task.edge_index[0, by_dst]
        counts = task.edge_index[1].bincount(minlength=nodes)
        self.degree, self.first = counts, counts.cumsum(0) - counts
        self.fanouts, self.local = fanouts, torch.full((nodes,), -1, device=self.col.device)

    def draw(self, seeds: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The nodes, seeds first, and the edges among them ``[2, E]`` by positions in the nodes."""
        nodes, frontier, src, dst = seeds, seeds, [], []
        self.local[seeds] = torch.arange(seeds.numel(), device=seeds.device)
        for fanout in self.fanouts:
            degree = self.degree[frontier]
            drawn = torch.rand(frontier.numel(), fanout, generator=generator, device=seeds.device)
            at = self.first[frontier, None] + (drawn * degree[:, None]).long()
            wanted = torch.arange(fanout, device=seeds.device) < degree[:, None]
            found = self.col[at[wanted]]
            src.append(found)
            dst.append(self.local[frontier].repeat_interleave(wanted.sum(1)))
            frontier = found[self.local[found] < 0].unique()
            self.local[frontier] = torch.arange(nodes.numel(), nodes.numel() + frontier.numel(), device=seeds.device)
            nodes = torch.cat([nodes, frontier])
        edges = torch.stack([self.local[torch.cat(src)], torch.cat(dst)])
        self.local[nodes] = -1
        return nodes, edges


class Source:
    """Where a framework's batches come from: :meth:`epoch` gives them anew, with a seed."""

    def __init__(self, task: Task, size: Size, batching: str, framework: str) -> None:
        self.task, self.size, self.batching, self.framework = task, size, batching, framework
        self.train = task.train.nonzero().view(-1)
        if framework == "dgl":
            import dgl

            edges = task.edge_index.cpu()
            graph = dgl.add_self_loop(dgl.graph((edges[0], edges[1]), num_nodes=task.y.numel()))
            self.graph = graph.to(task.x.device) if batching == "full" else graph
        elif batching == "mini":
            self.neighbours = Neighbours(task, size.fanouts)

    def epoch(self, seed: int) -> Iterator[Batch]:
        task, device = self.task, self.task.x.device
        if self.batching == "full":
            yield Batch(self.graph if self.framework == "dgl" else task.edge_index, task.x, task.y[self.train], self.train)
            return
        generator = torch.Generator(device).manual_seed(seed)
        order = self.train[torch.randperm(self.train.numel(), generator=generator, device=device)]
        chosen = order[: self.size.steps * self.size.seeds].split(self.size.seeds)
        if self.framework == "dgl":
            import dgl

            sampler = dgl.dataloading.NeighborSampler(list(self.size.fanouts))
            for inputs, outputs, blocks in dgl.dataloading.DataLoader(
                self.graph, torch.cat(chosen).cpu(), sampler, batch_size=self.size.seeds, device=device
            ):
                yield Batch(blocks, task.x[inputs.to(device)], task.y[outputs.to(device)])
        else:
            for seeds in chosen:
                nodes, edges = self.neighbours.draw(seeds, generator)
                yield Batch(edges, task.x[nodes], task.y[seeds])


# ---- models ------------------------------------------------------------------------------------------------------------------
class Model(nn.Module):
    """Two layers with ReLU and dropout in between."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([first, second])

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        parts = graph if isinstance(graph, list) else [graph, graph]
        for nth, (layer, part) in enumerate(zip(self.layers, parts)):
            x = torch.nn.functional.dropout(x.relu(), training=self.training) if nth else x
            x = layer(x, part) if isinstance(part, Tensor) else layer(part, x)
            x = x.flatten(1)  # heads of DGL
        return x


def build(framework: str, name: str, task: Task, hidden: int) -> Model:
    """A model by name, from the current seed."""
    make = _pyg_layer if framework == "pyg" else _dgl_layer
    sizes = (task.x.shape[1], hidden), (hidden, task.classes)
    return Model(*(make(name, i, o, task) for i, o in sizes)).to(task.x.device)


def _pyg_layer(name: str, inputs: int, outputs: int, task: Task) -> nn.Module:
    return host.conv(name, inputs, outputs, SimpleNamespace(edge_index=task.edge_index, x=task.x))  # type: ignore[arg-type]


def _dgl_layer(name: str, inputs: int, outputs: int, task: Task) -> nn.Module:
    import dgl.nn as layers

    heads = 8 if outputs % 8 == 0 else 1
    width = outputs // heads
    return {  # type: ignore[no-any-return]
        "GCN": lambda: layers.GraphConv(inputs, outputs, allow_zero_in_degree=True),
        "SAGE": lambda: layers.SAGEConv(inputs, outputs, "mean"),
        "GIN": lambda: layers.GINConv(nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))),
        "GAT": lambda: layers.GATConv(inputs, width, heads, allow_zero_in_degree=True),
        "GATv2": lambda: layers.GATv2Conv(inputs, width, heads, allow_zero_in_degree=True),
        "PNA": lambda: layers.PNAConv(inputs, outputs, ["mean", "min", "max", "std"], ["identity", "amplification"], 2.5),
        "Transformer": lambda: layers.DotGatConv(inputs, width, heads, allow_zero_in_degree=True),
    }[name]()


class Trainer:
    """One side of a cell."""

    def __init__(self, framework: str, name: str, source: Source) -> None:
        torch.manual_seed(0)
        self.source, self.model = source, build(framework, name, source.task, source.size.hidden)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.005)

    def step(self, batch: Batch) -> Tensor:
        self.model.train()
        self.optimizer.zero_grad()
        out = self.model(batch.graph, batch.x)
        loss = torch.nn.functional.cross_entropy(out[: batch.y.numel()] if batch.rows is None else out[batch.rows], batch.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def epoch(self, seed: int) -> None:
        for batch in self.source.epoch(seed):
            self.step(batch)

    def accuracy(self) -> float:
        task = self.source.task
        (batch,) = self.source.epoch(0)
        self.model.eval()
        with torch.no_grad():
            right = self.model(batch.graph, batch.x).argmax(1) == task.y
        return float(right[task.test].float().mean())


# ---- a cell ------------------------------------------------------------------------------------------------------------------
def measure(framework: str, name: str, graph: str, source: Source, repeats: int | None) -> tables.Row:
    """One cell. A side that runs out of memory says so; ``failed`` says what went wrong otherwise."""
    task, device, label = source.task, source.task.x.device, {"pyg": "PyG", "dgl": "DGL"}[framework]
    row: tables.Row = {"group": f"{label}, {source.batching}", "model": name, "graph": graph}
    row |= {"nodes": task.y.numel(), "edges": task.edge_index.shape[1], "hidden": source.size.hidden}
    switches: dict[str, Callable[[], None]] = {"off": gnnfast.disable, "on": gnnfast.enable}
    if framework == "dgl" and device.type == "cuda" and not _dgl_has_cuda():
        del switches["off"]
        row["note"] = "without gnnfast this DGL has no GPU"
    fixed = [*source.epoch(0)] if source.batching == "mini" else [*source.epoch(0)] * CHECKED
    trainers: dict[str, Trainer] = {}
    losses: dict[str, list[float]] = {}
    for side, switch in switches.items():
        switch()
        try:
            timing.clear(device)
            trainers[side] = Trainer(framework, name, source)
            losses[side] = [float(trainers[side].step(batch)) for batch in fixed[:CHECKED]]
            row[f"{side} GiB"] = _peak_gib(lambda side=side: trainers[side].epoch(1), device)
        except Exception as error:
            trainers.pop(side, None)
            if not timing.is_out_of_memory(error):
                gnnfast.enable()
                return row | {"failed": f"{side}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
            row[f"{side} ms"] = timing.OUT_OF_MEMORY
    gnnfast.enable()
    if len(losses) == 2 and len(trainers) == 2:
        row["loss differs by"] = max(abs(a - b) / abs(a) for a, b in zip(losses["off"], losses["on"]))
        if not row["loss differs by"] < TOLERANCE:
            return row | {"failed": f"losses differ by {row['loss differs by']:.2g}"}
    times: dict[str, list[float]] = {side: [] for side in trainers}
    steps: dict[str, list[float]] = {side: [] for side in trainers}
    count = 2
    while trainers and len(next(iter(times.values()))) < count:
        nth = len(next(iter(times.values())))
        for side, trainer in trainers.items():
            switches[side]()
            times[side].append(timing.wall_ms(lambda trainer=trainer, nth=nth: trainer.epoch(3 + nth), device))
            if source.batching == "mini":  # the same epoch, its batches drawn before
                drawn = [*source.epoch(3 + nth)]
                steps[side].append(timing.wall_ms(lambda trainer=trainer, drawn=drawn: [trainer.step(b) for b in drawn], device))
        slowest = max(t[0] for t in times.values())
        count = repeats or min(max(int(1e3 * source.size.seconds / slowest), 2), 7)
    for side, found in times.items():
        row |= timing.Sample.of(found).columns(side)
        if source.batching == "mini":
            row |= timing.Sample.of(steps[side]).columns(f"{side} model")
        else:
            switches[side]()
            row[f"{side} accuracy"] = trainers[side].accuracy()
    gnnfast.enable()
    if len(times) == 2:
        row["off / on"] = row["off ms"] / row["on ms"]
        if source.batching == "mini":
            row["off / on, model"] = row["off model ms"] / row["on model ms"]
    return row


def _dgl_has_cuda() -> bool:
    import sys

    import dgl  # noqa: F401

    names = sys.modules["dgl._ffi.function"].list_global_func_names()
    return not {"device_api.cuda", "device_api.gpu"}.isdisjoint(names)


def _peak_gib(call: Callable[[], Any], device: torch.device) -> float | None:
    if device.type == "cuda":
        return timing.peak_gib(call, torch.cuda.memory_allocated())
    return timing.peak_rss_gib(call)


def line(row: tables.Row) -> str:
    """A row in short."""
    times = [f"{side} {tables.cell(row[f'{side} ms'])} ms" for side in ("off", "on") if isinstance(row.get(f"{side} ms"), float)]
    times += [f"{side} {timing.OUT_OF_MEMORY}" for side in ("off", "on") if row.get(f"{side} ms") == timing.OUT_OF_MEMORY]
    ratio = [f"{row['off / on']:.2f}x"] if "off / on" in row else []
    ratio += [f"{row['off / on, model']:.2f}x in the model"] if "off / on, model" in row else []
    notes = [f"{k}: {row[k]}" for k in ("note", "failed") if k in row]
    return f"{row['group']} {row['model']} on {row['graph']}: {', '.join([*times, *ratio, *notes])}"


def summary(rows: list[tables.Row]) -> list[tables.Row]:
    """Geometric mean and least ratio by framework, batching and graph."""
    parts: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for ratio, what in (("off / on", ""), ("off / on, model", ", model")):
            if ratio in row:
                parts.setdefault((row["group"] + what, row["graph"]), []).append(row[ratio])
    return [
        {"kind": kind, "graph": graph, "models": len(found), "geometric mean": timing.geometric_mean(found), "least": min(found)}
        for (kind, graph), found in parts.items()
    ]


def run(options: argparse.Namespace, size: Size, device: torch.device) -> Iterator[tables.Row]:
    """Cell by cell, graph by graph."""
    for batching in options.batching:
        for graph in options.graphs or size.graphs[batching]:
            task = planted(graph, device)
            for framework in options.frameworks:
                source = Source(task, size, batching, framework)
                for name in options.models or MODELS:
                    if name == "PNA" and framework == "dgl" and (batching == "mini" or not options.models):
                        continue  # DGL's takes no blocks, and seconds an epoch
                    yield measure(framework, name, graph, source, options.repeats)
                del source
            del task
            timing.clear(device)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a cell failed or losses differed."""
    parser = tables.make_parser("train", __doc__)
    tables.add_device(parser)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, help="those that are installed, if not given")
    parser.add_argument("--models", nargs="+", **tables.named(MODELS))
    parser.add_argument("--batching", nargs="+", choices=("full", "mini"), default=("full", "mini"))
    parser.add_argument("--graphs", nargs="+", metavar="NAME", help="in place of the device's")
    parser.add_argument("--repeats", type=int, metavar="N", help="timed epochs of each side; else what fills a second, 2 to 7")
    parser.add_argument("--quick", action="store_true", help="a tiny graph: whether it works, not how fast")
    tables.add_output(parser, chart=True)
    options = parser.parse_args(arguments)
    if options.frameworks is None:
        options.frameworks = [f for f, module in zip(FRAMEWORKS, ("torch_geometric", "dgl")) if importlib.util.find_spec(module)]
    for name in options.graphs or ():
        reason = graphs.missing(name, "community")
        if reason:
            parser.error(f"--graphs: {reason}")
    device, rows, begin = torch.device(options.device), [], time.perf_counter()
    title = f"Training of whole models, on {device.type}"
    for row in run(options, QUICK if options.quick else SIZES[device.type], device):
        rows.append(row)
        print(f"[{time.perf_counter() - begin:4.0f} s] {line(row)}", flush=True)
        if options.out:  # what is there so far
            tables.save(tables.make_record(title, device, rows, summary(rows)), options.out)
    record = tables.write(options, title, rows, device, summary(rows))
    if options.out:
        tables.save_with_chart(record, options.out, lambda path: draw(record, path))
    return int(any("failed" in row for row in rows))


def draw(record: dict[str, Any], path: str) -> str:
    """The chart of a record."""
    from .plot import bars

    return bars(record, path, "off / on", "times as fast with gnnfast")


if __name__ == "__main__":
    raise SystemExit(main())
