"""Attention over a graph: scores of GAT, GATv2 or dot products, softmax and weighted sum, beside PyG's operations.

gnnfast bench attention --device cuda --graphs arxiv reddit --out benchmarks/results/NAME
gnnfast bench attention --device cpu

Forward runs under no_grad; both is forward and backward with the gradients of scores and features. Memory is the peak above the
inputs and the kept formats. PyG's operations (gather, scatter and softmax of torch_geometric.utils, with gnnfast off) are left out
where their rows per edge would not fit half of the free memory.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.utils import scatter, softmax

import gnnfast
from gnnfast import Graph
from gnnfast.dispatch import execute

from . import graphs, tables, timing

SHAPES = ((1, 64), (1, 128), (4, 32), (8, 8))
GRAPHS = {"cuda": ("arxiv", "reddit"), "cpu": ("amazon-computers", "tolokers")}
SCORES = ("additive", "gatv2", "dot")
SLOPE, TOLERANCE = 0.2, 1e-3


def gnnfast_attention(graph: Graph, score: str, a: Tensor, b: Tensor, x: Tensor, heads: int) -> Tensor:
    """``a [M, ...]`` and ``b [N, ...]`` are the parts of the score at destinations and sources; for GATv2 ``b`` are the features
    too, and ``x`` is the vector ``[F]``."""
    if score == "additive":
        return execute.attention(graph, x, a, b, SLOPE, place="bench")[0]
    if score == "gatv2":
        out = execute.gatv2_attention(graph, a, b, x, heads, SLOPE, place="bench")
        assert out is not None
        return out
    return execute.dot_attention(graph, a, b, x, heads, 1 / math.sqrt(a.shape[1] // heads), place="bench")[0]


def pyg_attention(edge_index: Tensor, score: str, a: Tensor, b: Tensor, x: Tensor, heads: int) -> Tensor:
    src, dst = edge_index
    nodes, width = a.shape[0], (b if score == "gatv2" else x).shape[1] // heads
    values = b if score == "gatv2" else x
    if score == "additive":
        raw = torch.nn.functional.leaky_relu(a[dst] + b[src], SLOPE)
    elif score == "gatv2":
        raw = (torch.nn.functional.leaky_relu(a[dst] + b[src], SLOPE) * x).view(-1, heads, width).sum(-1)
    else:
        raw = (a[dst].view(-1, heads, width) * b[src].view(-1, heads, width)).sum(-1) / math.sqrt(width)
    alpha = softmax(raw, dst, num_nodes=nodes)
    messages = alpha.unsqueeze(-1) * values[src].view(src.numel(), heads, -1)
    return scatter(messages, dst, 0, nodes, "sum").flatten(1)


def measure(name: str, graph: Graph, edge_index: Tensor, score: str, heads: int, width: int, repeats: int | None) -> tables.Row:
    device, nodes, edges = edge_index.device, graph.num_dst, graph.num_edges
    torch.manual_seed(0)
    columns = heads if score == "additive" else heads * width
    shapes = (nodes, columns), (nodes, columns), (heads * width,) if score == "gatv2" else (nodes, heads * width)
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    seed = torch.randn(nodes, heads * width, device=device)
    row: tables.Row = {"graph": name, "edges": edges, "score": score, "heads": heads, "width": width}
    sides: dict[str, Callable[[], Tensor]] = {"gnnfast": lambda: gnnfast_attention(graph, score, *leaves, heads)}
    if _fits(edges * heads * width * 4 * 6, device):
        sides["PyG"] = lambda: pyg_attention(edge_index, score, *leaves, heads)

    def forward(attention: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad():
            return attention()

    def both(attention: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(), leaves, seed)

    def switch(label: str) -> None:
        (gnnfast.enable if label == "gnnfast" else gnnfast.disable)()

    results = {}
    for label, attention in sides.items():
        switch(label)
        for _ in range(6):  # schedules get better with use
            both(attention)
        results[label] = [forward(attention), *both(attention)]
    for found, expected in zip(*results.values()) if len(results) == 2 else ():
        error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
        if not error < TOLERANCE:
            raise SystemExit(f"gnnfast bench attention: results of {row} differ by {error:.2g}")
    results.clear()
    for label, attention in sides.items():
        switch(label)
        row |= timing.sample(functools.partial(forward, attention), device, repeats).columns(f"{label} forward")
        row |= timing.sample(functools.partial(both, attention), device, repeats).columns(f"{label} both")
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            row[f"{label} GiB"] = timing.peak_gib(functools.partial(both, attention), torch.cuda.memory_allocated())
    gnnfast.enable()
    if "PyG" in sides:
        for what in ("forward", "both"):
            row[f"PyG / gnnfast {what}"] = row[f"PyG {what} ms"] / row[f"gnnfast {what} ms"]
    print(", ".join(f"{k} {tables.cell(v)}" for k, v in row.items()), flush=True)
    return row


def _fits(needed: int, device: torch.device) -> bool:
    if device.type == "cuda":
        return needed < torch.cuda.mem_get_info()[0] // 2
    return needed < 4 << 30


def _graph(name: str, device: torch.device) -> tuple[Graph, Tensor]:
    if name in graphs.REAL:
        edge_index, nodes = graphs.real(name)
    else:
        rowptr, col = graphs.community_order(name, device) if name != "reddit" else graphs.random_order(name, device)
        edge_index, nodes = graphs.to_edge_index(rowptr, col), rowptr.numel() - 1
    edge_index = edge_index.to(device)
    return Graph.from_edge_index(edge_index, nodes), edge_index


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("attention", __doc__.splitlines()[0])
    tables.add_device(parser)
    of_device = "; ".join(f"{', '.join(names)} on {device}" for device, names in GRAPHS.items())
    parser.add_argument("--graphs", nargs="+", metavar="NAME", help=f"if not given, {of_device}")
    parser.add_argument("--scores", nargs="*", choices=SCORES, default=SCORES)
    parser.add_argument("--repeats", type=int, help="calls of each; as many as fill 60 ms if not given")
    tables.add_output(parser)
    options = parser.parse_args(arguments)
    device, rows = torch.device(options.device), []
    wanted = options.graphs or GRAPHS[options.device]
    lacking = [reason for name in wanted if (reason := graphs.missing(name, "real" if name in graphs.REAL else "community"))]
    if options.graphs and lacking:
        parser.error(f"--graphs: {lacking[0]}")
    if lacking:
        wanted = graphs.MADE[:1] if device.type == "cpu" else ("arxiv-size", "reddit")
        print(f"without the graphs of the folder that GNNFAST_DATA names: made ones, {', '.join(wanted)}", flush=True)
    for name in wanted:
        graph, edge_index = _graph(name, device)
        for score in options.scores:
            for heads, width in SHAPES:
                rows.append(measure(name, graph, edge_index, score, heads, width, options.repeats))
    tables.write(options, f"Attention over a graph, on {options.device}", rows, device, {})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
