"""DGL's message passing and layers with gnnfast beside PyG's with gnnfast, for the same work: what DGL's interface costs.

gnnfast bench bridge --out benchmarks/results/NAME     an arxiv-size and a reddit-size graph on a GPU, through the bridge
gnnfast bench bridge --device cpu

Both sides take the same features and edges: ``g.update_all`` beside a ``MessagePassing`` of the same message, and layers of
``dgl.nn`` beside those of PyG that compute as much. Forward runs under no_grad; both is forward and backward, with gradients of
features, weights of edges and parameters.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from . import graphs, peers, tables, timing

WIDTH = 128
TOLERANCE, UNTIL_SETTLED = 1e-4, 20
MESSAGES, REDUCTIONS = ("copy_u", "u_mul_e"), ("sum", "mean", "max")


class Passing(pyg.MessagePassing):
    """``x_j``, or ``edge_weight * x_j``, summed, averaged or at most."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


def update_all(message: str, reduction: str) -> Callable[[Any, Tensor, Tensor], Tensor]:
    import dgl.function as fn

    reduce = getattr(fn, reduction)("m", "out")

    def call(g: Any, x: Tensor, weight: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["x"], g.edata["w"] = x, weight
            g.update_all(fn.copy_u("x", "m") if message == "copy_u" else fn.u_mul_e("x", "w", "m"), reduce)
            return g.ndata["out"]  # type: ignore[no-any-return]

    return call


def layers() -> dict[str, tuple[nn.Module, nn.Module]]:
    """By name in DGL; PyG's that does as much."""
    from dgl import nn as of_dgl

    loops = {"add_self_loops": False}
    return {
        "GraphConv": (of_dgl.GraphConv(WIDTH, WIDTH, allow_zero_in_degree=True), pyg.GCNConv(WIDTH, WIDTH, **loops)),
        "SAGEConv mean": (of_dgl.SAGEConv(WIDTH, WIDTH, "mean"), pyg.SAGEConv(WIDTH, WIDTH)),
        "SAGEConv pool": (of_dgl.SAGEConv(WIDTH, WIDTH, "pool"), pyg.SAGEConv(WIDTH, WIDTH, "max", project=True)),
        "GINConv sum": (of_dgl.GINConv(nn.Linear(WIDTH, WIDTH), "sum"), pyg.GINConv(nn.Linear(WIDTH, WIDTH))),
        "GATConv": (of_dgl.GATConv(WIDTH, WIDTH, 1, allow_zero_in_degree=True), pyg.GATConv(WIDTH, WIDTH, **loops)),
        "GATConv 8 heads": (of_dgl.GATConv(WIDTH, 16, 8, allow_zero_in_degree=True), pyg.GATConv(WIDTH, 16, 8, **loops)),
        "GATv2Conv 8 heads": (of_dgl.GATv2Conv(WIDTH, 16, 8, allow_zero_in_degree=True), pyg.GATv2Conv(WIDTH, 16, 8, **loops)),
    }


def measure(row: tables.Row, sides: dict[str, Callable[[], Tensor]], leaves: list[Tensor], same: bool) -> tables.Row:
    """The times of two sides, whose results are the ``same`` if no parameters of their own are in them."""

    def forward(call: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad():
            return call()

    def both(call: Callable[[], Tensor], seed: Tensor) -> None:
        for leaf in leaves:
            leaf.grad = None
        call().backward(seed)

    outs = {name: forward(call) for name, call in sides.items()}
    if same:
        found, expected = (torch.where(out.isfinite(), out, 0) for out in outs.values())  # of no edges, maxima are 0 or infinite
        error = float((found - expected).norm() / expected.norm())
        if not error < TOLERANCE:
            raise SystemExit(f"gnnfast bench bridge: results of {row} differ by {error:.2g}")
    steps = {
        "forward": {name: functools.partial(forward, call) for name, call in sides.items()},
        "both": {name: functools.partial(both, call, torch.randn_like(outs[name])) for name, call in sides.items()},
    }
    for what, calls in steps.items():
        for _ in range(UNTIL_SETTLED):
            for call in calls.values():
                call()
        for name, times in timing.in_turn(calls, lambda _: None, leaves[0].device).items():
            row |= times.columns(f"{name} {what}")
        row[f"DGL / PyG {what}"] = row[f"DGL {what} ms"] / row[f"PyG {what} ms"]
    print(", ".join(f"{k} {tables.cell(v)}" for k, v in row.items() if "spread" not in k), file=sys.stderr, flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("bridge", __doc__.splitlines()[0])
    tables.add_device(parser)
    about = "arxiv-size and reddit on a GPU, pubmed-size on a CPU if not given"
    parser.add_argument("--graphs", nargs="*", **tables.named((*graphs.OTHER_SIZES, *graphs.LOG_NORMAL), about))
    tables.add_output(parser)
    options = parser.parse_args(arguments)
    dgl = peers.import_dgl("bridge")
    device, rows = torch.device(options.device), []
    title = f"DGL with gnnfast beside PyG with gnnfast, on {options.device}"
    for name in options.graphs or (("arxiv-size", "reddit") if device.type == "cuda" else graphs.MADE[:1]):
        edge_index, nodes = graphs.made(name, device)
        g = dgl.graph(tuple(edge_index.cpu()), num_nodes=nodes).to(device)
        torch.manual_seed(0)
        x, weight = torch.randn(nodes, WIDTH, device=device), torch.rand(g.num_edges(), 1, device=device)
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        at: tables.Row = {"graph": name, "edges": g.num_edges()}
        for message in MESSAGES:
            for reduction in REDUCTIONS:
                passing, of_dgl = Passing(aggr=reduction), update_all(message, reduction)
                given = () if message == "copy_u" else (weight,)
                sides = {"DGL": lambda: of_dgl(g, x, weight), "PyG": lambda: passing(x, edge_index, *given)}
                rows.append(measure(at | {"work": f"update_all {message} {reduction}"}, sides, leaves, True))
        for layer, (of_dgl, of_pyg) in layers().items():
            of_dgl.to(device), of_pyg.to(device)
            sides = {"DGL": lambda: of_dgl(g, x), "PyG": lambda: of_pyg(x, edge_index)}
            rows.append(measure(at | {"work": layer}, sides, [x, *of_dgl.parameters(), *of_pyg.parameters()], False))
        timing.clear(device)
        if options.out:
            tables.save(tables.make_record(title, device, rows, {}), options.out)
    summary = {f"most, {what}": max(row[f"DGL / PyG {what}"] for row in rows) for what in ("forward", "both")}
    tables.write(options, title, rows, device, summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
