"""Whole PyG layers, forward and backward, with gnnfast on and off in one process on the same inputs.

gnnfast bench layers --device cuda --out benchmarks/results/NAME     reddit-size random graph
gnnfast bench layers --device cpu --out benchmarks/results/NAME      real graphs
gnnfast bench layers --all --out benchmarks/results/NAME             messages of every kind; on CUDA an arxiv-size graph
gnnfast bench layers --all --compiled ...                            beside PyG under torch.compile too
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, SAGEConv, TransformerConv

import gnnfast
from gnnfast.cache import cache

from . import graphs, tables, timing

LAYERS = {
    "GCNConv": lambda i, o: GCNConv(i, o),
    "SAGEConv": lambda i, o: SAGEConv(i, o),
    "SAGEConv max": lambda i, o: SAGEConv(i, o, aggr="max"),
    "GraphConv": lambda i, o: GraphConv(i, o),
    "GINConv": lambda i, o: GINConv(torch.nn.Linear(i, o)),
    "GATConv": lambda i, o: GATConv(i, o),
    "GATConv 4 heads": lambda i, o: GATConv(i, o // 4, heads=4),
    "GATv2Conv": lambda i, o: GATv2Conv(i, o),
    "TransformerConv": lambda i, o: TransformerConv(i, o),
}

UNTIL_SETTLED = 20  # steps, after which gnnfast has the schedules of a graph that is used again and again
TOLERANCE = 2e-2  # in float32 PyG's own gradients of GatedGraphConv are off by 5e-3 where nodes have thousands of edges


class WithEdges(nn.Module):
    """A layer that takes edge features, with some of ``width``."""

    def __init__(self, conv: nn.Module, width: int) -> None:
        super().__init__()
        self.conv, self.width, self.attr = conv, width, torch.empty(0)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.attr.shape[0] < edge_index.shape[1]:
            same = torch.Generator(x.device).manual_seed(0)  # for each side
            self.attr = torch.rand(edge_index.shape[1], self.width, device=x.device, generator=same)
        return self.conv(x, edge_index, self.attr[: edge_index.shape[1]])


class WithInitial(nn.Module):
    """A layer that takes the features of the first layer too."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, x, edge_index)


def _mlp(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))


DEGREES = torch.bincount(torch.arange(1, 100) // 3)
ALL = LAYERS | {
    "SGConv": lambda i, o: pyg.SGConv(i, o, K=2),
    "TAGConv": lambda i, o: pyg.TAGConv(i, o),
    "APPNP": lambda i, o: pyg.APPNP(3, 0.1),
    "ChebConv": lambda i, o: pyg.ChebConv(i, o, 3),
    "ARMAConv": lambda i, o: pyg.ARMAConv(i, o),
    "GatedGraphConv": lambda i, o: pyg.GatedGraphConv(o, 2),
    "GCN2Conv": lambda i, o: WithInitial(pyg.GCN2Conv(i, 0.1)),
    "ClusterGCNConv": lambda i, o: pyg.ClusterGCNConv(i, o),
    "LEConv": lambda i, o: pyg.LEConv(i, o),
    "GINEConv": lambda i, o: WithEdges(pyg.GINEConv(_mlp(i, o)), i),
    "GENConv": lambda i, o: pyg.GENConv(i, o),
    "EdgeConv": lambda i, o: pyg.EdgeConv(nn.Linear(2 * i, o)),
    "PNAConv": lambda i, o: pyg.PNAConv(i, o, ["mean", "min", "max", "std"], ["identity", "amplification"], DEGREES),
    "ResGatedGraphConv": lambda i, o: pyg.ResGatedGraphConv(i, o),
    "FiLMConv": lambda i, o: pyg.FiLMConv(i, o),
    "CGConv": lambda i, o: pyg.CGConv(i),
    "GATConv edge features": lambda i, o: WithEdges(GATConv(i, o // 4, heads=4, edge_dim=16), 16),
    "GATv2Conv edge features": lambda i, o: WithEdges(GATv2Conv(i, o // 4, heads=4, edge_dim=16), 16),
    "TransformerConv edge features": lambda i, o: WithEdges(TransformerConv(i, o // 4, heads=4, edge_dim=16), 16),
    "GMMConv": lambda i, o: WithEdges(pyg.GMMConv(i, o, 3, 2), 3),
    "FeaStConv": lambda i, o: pyg.FeaStConv(i, o),
    "AGNNConv": lambda i, o: pyg.AGNNConv(),
    "FAConv": lambda i, o: WithInitial(pyg.FAConv(i)),
    "SuperGATConv": lambda i, o: pyg.SuperGATConv(i, o),
}


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


def measure(
    name: str,
    graph: str,
    edge_index: Tensor,
    nodes: int,
    width_in: int,
    width_out: int,
    x_grad: bool,
    repeats: int,
    compiled: bool = False,
) -> dict[str, Any]:
    device = edge_index.device
    torch.manual_seed(0)
    x = torch.randn(nodes, width_in, device=device, requires_grad=x_grad)
    made = ALL[name](width_in, width_out).to(device)
    cuda = device.type == "cuda"
    row: dict[str, Any] = {"layer": name, "graph": graph, "edges": edge_index.shape[1], "in": width_in, "out": width_out}
    row["gradient of x"] = "yes" if x_grad else "no"
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
        raise SystemExit(f"gnnfast bench layers: gradients of {name} on {graph} differ by {error:.2g}")
    calls = {label: functools.partial(step, layer, x, edge_index) for label, layer in layers.items()}
    for label, found in timing.in_turn(calls, switch, device, repeats).items():
        row |= found.columns(label)
    switch("PyG")
    if compiled:
        row |= _compiled(layers["PyG"], x, edge_index, repeats, results["PyG"])
    switch("gnnfast")
    # The floor: what of the layer is not message passing, which no aggregation kernel can speed up.
    row["layer without edges ms"] = timing.median_ms(lambda: step(layer, x, edge_index[:, :0]), device, repeats)
    row["PyG / gnnfast"] = row["PyG ms"] / row["gnnfast ms"]
    sizes = f"{graph} {name} {width_in} -> {width_out}"
    print(f"{sizes}: PyG {row['PyG ms']:.3g} ms, gnnfast {row['gnnfast ms']:.3g} ms", file=sys.stderr, flush=True)
    return row


def _compiled(layer: torch.nn.Module, x: Tensor, edge_index: Tensor, repeats: int, expected: list[Tensor]) -> dict[str, Any]:
    """The columns of PyG's own layer under torch.compile; empty where that fails, or has other gradients than ``expected``."""
    torch._dynamo.reset()
    call = torch.compile(layer)
    try:
        error = difference(gradients(call, x, edge_index), expected)
        if not error < TOLERANCE:
            raise ValueError(f"gradients differ by {error:.2g}")
        return timing.sample(lambda: step(call, x, edge_index), edge_index.device, repeats).columns("PyG compiled")
    except Exception as failed:
        print(f"torch.compile: {type(failed).__name__}: {str(failed).partition(chr(10))[0]}", file=sys.stderr)
        return {}


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("layers", __doc__.splitlines()[0])
    tables.add_device(parser)
    parser.add_argument("--layers", nargs="*", **tables.named(ALL))
    parser.add_argument("--all", action="store_true", help="layers of every kind of message")
    about = "real ones; if not given, on a CPU those at hand, on a GPU large ones"
    parser.add_argument("--graphs", nargs="*", **tables.named(graphs.REAL, about))
    parser.add_argument("--compiled", action="store_true", help="PyG under torch.compile, too")
    tables.add_output(parser)
    options = parser.parse_args(arguments)
    device, rows = torch.device(options.device), []
    names = options.layers or list(ALL if options.all else LAYERS if device.type == "cpu" else ["GCNConv"])
    if device.type == "cuda" and options.all and options.graphs is None:
        rowptr, col = graphs.community_order("arxiv", device)
        edge_index, nodes = graphs.to_edge_index(rowptr, col), rowptr.numel() - 1
        for name in names:
            rows.append(measure(name, "arxiv", edge_index, nodes, 128, 128, True, 4, options.compiled))
    elif device.type == "cuda" and options.graphs is None:
        rowptr, col = graphs.random_order("reddit", device)
        edge_index = graphs.to_edge_index(rowptr, col)
        nodes = rowptr.numel() - 1
        del rowptr, col
        for name in names:
            for width in (16, 64, 128):
                rows.append(measure(name, "reddit", edge_index, nodes, 602, width, False, 3, options.compiled))
    else:
        found = [graph for graph in options.graphs or graphs.REAL if not graphs.missing(graph, "real")]
        if not found:
            print("without the real graphs (GNNFAST_DATA names no folder with them): made ones of such sizes", file=sys.stderr)
        for graph in found or graphs.MADE:
            edge_index, nodes = graphs.real(graph) if found else graphs.made(graph, device)
            edge_index = edge_index.to(device)
            for name in names:
                # A model's first layer, and the others; without parameters a first one has no gradients.
                for x_grad in (False, True) if any(True for _ in ALL[name](1, 1).parameters()) else (True,):
                    rows.append(
                        measure(
                            name, graph, edge_index, nodes, 64, 64, x_grad, 10 if device.type == "cuda" else 3, options.compiled
                        )
                    )
    for row in rows:
        if "PyG compiled ms" in row:
            row["PyG compiled / gnnfast"] = row["PyG compiled ms"] / row["gnnfast ms"]
    mean = [{"layers": len(rows), "geometric mean": timing.geometric_mean(r["PyG / gnnfast"] for r in rows)}]
    tables.write(options, f"PyG layers, forward and backward, on {options.device}", rows, device, mean)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
