"""Whole PyG layers, forward and backward, with gnnfast on and off in one process on the same inputs.

gnnfast bench layers --device cuda --out benchmarks/results/NAME     reddit-size random graph
gnnfast bench layers --device cpu --out benchmarks/results/NAME      real graphs
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import Any

import torch
from torch import Tensor
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


def step(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer(x, edge_index).sum().backward()


def gradients(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> list[Tensor]:
    step(layer, x, edge_index)
    return [p.grad.clone() for p in layer.parameters()]


def measure(
    name: str, graph: str, edge_index: Tensor, nodes: int, width_in: int, width_out: int, x_grad: bool, repeats: int
) -> dict[str, Any]:
    device = edge_index.device
    torch.manual_seed(0)
    x = torch.randn(nodes, width_in, device=device, requires_grad=x_grad)
    layer = LAYERS[name](width_in, width_out).to(device)
    cuda = device.type == "cuda"
    row: dict[str, Any] = {"layer": name, "graph": graph, "edges": edge_index.shape[1], "in": width_in, "out": width_out}
    row["gradient of x"] = "yes" if x_grad else "no"
    results = {}
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        label = "gnnfast" if on else "PyG"
        if not on:
            cache.clear()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            baseline = torch.cuda.memory_allocated()
            # Everything gnnfast keeps is made inside this call and counted.
            row[f"{label} first call GiB"] = timing.peak_gib(lambda: step(layer, x, edge_index), baseline)
            step(layer, x, edge_index)
            row[f"{label} GiB"] = timing.peak_gib(lambda: step(layer, x, edge_index), baseline)
        results[on] = gradients(layer, x, edge_index)
        row[f"{label} ms"] = timing.median_ms(lambda: step(layer, x, edge_index), device, repeats)
    gnnfast.enable()
    # The floor: what of the layer is not message passing, which no aggregation kernel can speed up.
    row["layer without edges ms"] = timing.median_ms(lambda: step(layer, x, edge_index[:, :0]), device, repeats)
    for a, b in zip(results[True], results[False]):
        error = float((a - b).norm() / b.norm())
        assert error < 1e-3, f"gradients differ by {error}"
    row["PyG / gnnfast"] = row["PyG ms"] / row["gnnfast ms"]
    sizes = f"{graph} {name} {width_in} -> {width_out}"
    print(f"{sizes}: PyG {row['PyG ms']:.3g} ms, gnnfast {row['gnnfast ms']:.3g} ms", file=sys.stderr, flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gnnfast bench layers", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", nargs="*", choices=tuple(LAYERS), default=None)
    parser.add_argument("--out", help="write OUT.json and OUT.md")
    options = parser.parse_args(arguments)
    device, rows = torch.device(options.device), []
    if device.type == "cuda":
        rowptr, col = graphs.random_order("reddit", device)
        edge_index = graphs.to_edge_index(rowptr, col)
        nodes = rowptr.numel() - 1
        del rowptr, col
        for name in options.layers or ["GCNConv"]:
            for width in (16, 64, 128):
                rows.append(measure(name, "reddit", edge_index, nodes, 602, width, False, 10))
    else:
        for graph in graphs.REAL:
            edge_index, nodes = graphs.real(graph)
            for name in options.layers or LAYERS:
                for x_grad in (False, True):  # a model's first layer, and the others
                    rows.append(measure(name, graph, edge_index, nodes, 64, 64, x_grad, 15))
    tables.write(options.out, f"PyG layers, forward and backward, on {options.device}", rows, device, {})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
