"""Models under torch.compile, forward and backward: PyG compiled, gnnfast uncompiled, gnnfast compiled, on the same inputs.

gnnfast bench compiled --device cuda --out benchmarks/results/NAME       arxiv-size and reddit-size random graphs
gnnfast bench compiled --device cpu --out benchmarks/results/NAME        a graph of 10,000 nodes and 200,000 edges
gnnfast bench compiled --small ...                                       one of Cora's size, with and without CUDA graphs
"""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import multiprocessing
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GINEConv, SAGEConv, TransformerConv

import gnnfast
from gnnfast.cache import cache
from gnnfast.cli import in_benchmark

from . import graphs, tables, timing


class Two(nn.Module):
    """Two layers 128 -> 256 -> 40, as on ogbn-arxiv."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, *edges: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x, *edges)), *edges)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: Two(GCNConv(128, 256), GCNConv(256, 40)),
    "SAGE": lambda: Two(SAGEConv(128, 256), SAGEConv(256, 40)),
    "SAGE max": lambda: Two(SAGEConv(128, 256, aggr="max"), SAGEConv(256, 40, aggr="max")),
    "GIN": lambda: Two(GINConv(nn.Linear(128, 256)), GINConv(nn.Linear(256, 40))),
    "GAT 8x32": lambda: Two(GATConv(128, 32, heads=8), GATConv(256, 40)),
    "GATv2 8x32": lambda: Two(GATv2Conv(128, 32, heads=8), GATv2Conv(256, 40)),
    "Transformer 8x32": lambda: Two(TransformerConv(128, 32, heads=8), TransformerConv(256, 40)),
}
WIDTH = 16  # of features of edges
ROUNDS = 3
OF_EDGES: dict[str, Callable[[], nn.Module]] = {
    "GINE": lambda: Two(GINEConv(nn.Linear(128, 256), edge_dim=WIDTH), GINEConv(nn.Linear(256, 40), edge_dim=WIDTH)),
    "GAT 8x32, edges": lambda: Two(GATConv(128, 32, heads=8, edge_dim=WIDTH), GATConv(256, 40, edge_dim=WIDTH)),
    "GATv2 8x32, edges": lambda: Two(GATv2Conv(128, 32, heads=8, edge_dim=WIDTH), GATv2Conv(256, 40, edge_dim=WIDTH)),
    "Transformer 8x32, edges": lambda: Two(
        TransformerConv(128, 32, heads=8, edge_dim=WIDTH), TransformerConv(256, 40, edge_dim=WIDTH)
    ),
}
MODELS |= OF_EDGES
WIDE = {"GCNConv 602 -> 128": lambda: GCNConv(602, 128)}


def step(call: Callable[..., Tensor], model: nn.Module, *given: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    call(*given).square().mean().backward()


GRAPHS = {"arxiv-size": (169_343, 2_332_486), "10,000 nodes": (10_000, 200_000), "Cora's size": (2_708, 10_556)}


def inputs(graph: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features and ``edge_index`` of a graph."""
    torch.manual_seed(0)
    if graph == "reddit":
        rowptr, col = graphs.random_order("reddit", device)
        return torch.randn(rowptr.numel() - 1, 602, device=device), graphs.to_edge_index(rowptr, col)
    nodes, edges = GRAPHS[graph]
    return torch.randn(nodes, 128, device=device), torch.randint(0, nodes, (2, edges), device=device)


def switch(side: str) -> None:
    (gnnfast.disable if side.startswith("PyG") else gnnfast.enable)()


def measure(name: str, graph: str, mode: str, device: torch.device, repeats: int) -> tables.Row:
    """The three sides for one model, after a comparison of all gradients. A side that fails is left out, with a note."""
    x, edge_index = given = inputs(graph, device)
    if name in OF_EDGES:
        given = *given, torch.randn(edge_index.shape[1], WIDTH, device=device)
    model = (MODELS | WIDE)[name]().to(device)
    row: tables.Row = {"model": name, "mode": mode, "graph": graph, "nodes": x.shape[0], "edges": edge_index.shape[1]}
    found: dict[str, list[Tensor]] = {}
    steps: dict[str, Callable[[], None]] = {}
    torch._dynamo.reset()
    for side in ("gnnfast", "gnnfast compiled", "PyG compiled"):  # what fails in the last may leave the device unusable
        switch(side)
        cache.clear()
        own = copy.deepcopy(model)
        # What depends on data, as PyG's self loops do, breaks PyG's graph where the compiler is to use CUDA graphs.
        call = torch.compile(own, fullgraph=mode == "default", mode=mode) if side.endswith("compiled") else own
        try:
            step(call, own, *given)
        except Exception as error:  # a compiler that fails must not end the run
            row["note"] = f"{side}: {type(error).__name__}"
            continue
        found[side] = [p.grad.clone() for p in own.parameters() if p.grad is not None]
        least = 1e-6 * max(float(b.norm()) for b in found[side])  # that of a bias of keys is 0 but for rounding
        for a, b in zip(found["gnnfast"], found[side], strict=True):
            error = float((a - b).norm() / b.norm().clamp(min=least))
            if not error < 1e-3:
                raise SystemExit(f"gnnfast bench compiled: gradients of {name} differ by {error:.2g}")
        steps[side] = functools.partial(step, call, own, *given)
    times: dict[str, list[float]] = {side: [] for side in steps}
    for _ in range(ROUNDS):  # in turn, as a host's speed changes within seconds
        for side, run in steps.items():
            switch(side)
            times[side].append(timing.sample(run, x.device, repeats, 8).ms)
    switch("gnnfast")
    for side in steps:
        row |= timing.Sample.of(times[side]).columns(side)
    for side in ("PyG compiled", "gnnfast"):
        if row.get("gnnfast compiled ms") and row.get(f"{side} ms"):
            row[f"{side} / gnnfast compiled"] = row[f"{side} ms"] / row["gnnfast compiled ms"]
    print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()), file=sys.stderr, flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("compiled", __doc__.splitlines()[0])
    tables.add_device(parser)
    parser.add_argument("--models", nargs="*", **tables.named((*MODELS, *WIDE)))
    parser.add_argument("--small", action="store_true", help="a graph of Cora's size")
    tables.add_output(parser)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    graph = "Cora's size" if options.small else "arxiv-size" if cuda else "10,000 nodes"
    modes = ("default", "reduce-overhead") if options.small and cuda else ("default",)
    work = [(name, graph, mode, device, 50 if options.small else 20) for name in MODELS for mode in modes]
    work += [(name, "reddit", "default", device, 10) for name in WIDE if cuda and not options.small]
    # Each in a process of its own, as a compiler's kernel that fails leaves the device unusable to who ran it.
    context, rows = multiprocessing.get_context("spawn"), []
    title = f"Models under torch.compile, forward and backward, on {options.device}"
    for item in work:
        if not options.models or item[0] in options.models:
            with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
                try:
                    rows.append(pool.submit(in_benchmark, "compiled", measure.__name__, *item).result())
                except Exception as error:  # such as a kernel of the compiler's, or the death of the process
                    note = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                    rows.append({"model": item[0], "mode": item[2], "graph": item[1], "note": note})
            if options.out:  # what is there so far
                tables.save(tables.make_record(title, device, rows, {}), options.out)
    tables.write(options, title, rows, device, {})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
