"""PyG's functions of edge lists and of groups, called as users call them, with gnnfast on and off in turn.

gnnfast bench lists --device cuda --out benchmarks/results/NAME
gnnfast bench lists --edges 2000 --functions softmax

Of a random graph of seven edges a node, which is a new tensor in each call, so that nothing is found again. Groups are its
destinations: as they are, sorted, half of all edges at one of them ("hub"), or all at one. Without gradients, but for "softmax,
both", which is forward and backward. "limit" is what the bytes take that must move once, at the speed of a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import ChebConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops, scatter, softmax

import gnnfast

from . import limits, tables, timing

EDGES = {"cpu": (2_000, 200_000), "cuda": (2_000, 1_200_000, 60_000_000)}
GROUPS = ("random", "sorted", "hub", "one")
TOLERANCE = 1e-3  # of gradients of groups of a million rows, in float32
MOST_NUMBERS = 1 << 30  # in all rows, of which autograd holds several copies


class Lists(NamedTuple):
    """``edge_index [2, E]``, ``weight [E]``, and the ``groups [E]`` of ``rows [E, W]``, of which there are ``nodes``."""

    edge_index: Tensor
    weight: Tensor
    groups: Tensor
    rows: Tensor
    nodes: int


class Function(NamedTuple):
    """A function of lists, and the bytes that must move for each edge: ``fixed`` and ``of_row`` for each number of its row."""

    call: Callable[[Lists], Any]
    fixed: int
    of_row: int = 0


_CHEB = ChebConv(1, 1, 2)


def _laplacian(given: Lists) -> Any:
    return getattr(_CHEB, "__norm__")(given.edge_index.detach(), given.nodes, None, "sym", dtype=torch.float32)  # noqa: B009


def _softmax_both(given: Lists) -> Any:
    rows = given.rows.detach().requires_grad_()
    out = softmax(rows, given.groups.detach(), num_nodes=given.nodes)
    return out.detach(), *torch.autograd.grad(out, rows, given.rows)


# An id has 8 bytes, a number 4; what is written is read once less.
OF_EDGES = {
    "loops removed and added": Function(
        lambda g: add_self_loops(remove_self_loops(g.edge_index.detach())[0], num_nodes=g.nodes)[0], 32
    ),
    "gcn_norm": Function(lambda g: gcn_norm(g.edge_index.detach(), None, g.nodes), 36),
    "gcn_norm, weights": Function(lambda g: gcn_norm(g.edge_index.detach(), g.weight.detach(), g.nodes), 40),
    "ChebConv's Laplacian": Function(_laplacian, 36),
}
OF_GROUPS = {
    "softmax": Function(lambda g: softmax(g.rows, g.groups.detach(), num_nodes=g.nodes), 8, 8),
    "softmax, both": Function(_softmax_both, 16, 20),
    "scatter mean": Function(lambda g: scatter(g.rows, g.groups.detach(), 0, g.nodes, "mean"), 8, 4),
    "scatter max": Function(lambda g: scatter(g.rows, g.groups.detach(), 0, g.nodes, "max"), 8, 4),
}


def make(edges: int, width: int, how: str, device: torch.device) -> Lists:
    same = torch.Generator(device).manual_seed(edges)
    nodes = max(edges // 7, 1)
    edge_index = torch.randint(nodes, (2, edges), device=device, generator=same)
    groups = edge_index[1].clone()
    if how == "sorted":
        groups = groups.sort().values
    elif how == "hub":
        groups[torch.rand(edges, device=device, generator=same) < 0.5] = nodes // 2
    elif how == "one":
        groups.zero_()
    weight = torch.rand(edges, device=device, generator=same)
    return Lists(edge_index, weight, groups, torch.randn(edges, width, device=device, generator=same), nodes)


def measure(name: str, function: Function, how: str, given: Lists, machine: limits.Machine) -> tables.Row:
    device, (edges, width) = given.rows.device, given.rows.shape

    def switch(side: str) -> None:
        (gnnfast.enable if side == "gnnfast" else gnnfast.disable)()

    def call() -> Any:
        with torch.set_grad_enabled(function is OF_GROUPS["softmax, both"]):
            return function.call(given)

    found = {}
    for side in ("PyG", "gnnfast"):
        switch(side)
        made = call()
        found[side] = [made] if isinstance(made, Tensor) else [t for t in made if t is not None]
    for ours, theirs in zip(found["gnnfast"], found["PyG"], strict=True):
        error = float((ours - theirs).double().norm() / theirs.double().norm().clamp(min=1e-30)) if theirs.numel() else 0.0
        if ours.shape != theirs.shape or not error < TOLERANCE:
            raise SystemExit(f"gnnfast bench lists: results of {name} over {edges} edges, {how}, differ by {error:.2g}")
    del found, made
    of_edges = name in OF_EDGES
    row: tables.Row = {"function": name, "edges": edges, "groups": None if of_edges else how, "width": None if of_edges else width}
    for side, times in timing.in_turn(dict.fromkeys(("PyG", "gnnfast"), call), switch, device).items():
        row |= times.columns(side)
    switch("gnnfast")
    row["PyG / gnnfast"] = row["PyG ms"] / row["gnnfast ms"]
    row["limit ms"] = 1e3 * edges * (function.fixed + function.of_row * width) / machine.copy
    row[tables.LIMIT] = row["limit ms"] / row["gnnfast ms"]
    print(", ".join(f"{k} {tables.cell(v)}" for k, v in row.items() if v is not None and "spread" not in k), flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("lists", __doc__)
    tables.add_device(parser)
    parser.add_argument("--edges", nargs="*", type=int, help="2,000 and 200,000 on a CPU, to 60 million on a GPU if not given")
    parser.add_argument("--widths", nargs="*", type=int, default=(1, 4, 64), help="numbers of a row")
    parser.add_argument("--functions", nargs="*", **tables.named((*OF_EDGES, *OF_GROUPS), "all if not given"))
    tables.add_output(parser)
    options, rows = parser.parse_args(arguments), []
    device = torch.device(options.device)
    title, machine = (
        f"Functions of edge lists and of groups, on {device.type}",
        limits.Machine(limits.copy_bandwidth(device, 2**28)),
    )
    wanted = options.functions or (*OF_EDGES, *OF_GROUPS)
    cells = [
        (edges, width, how, {name: f for name, f in functions.items() if name in wanted})
        for edges in options.edges or EDGES[device.type]
        for functions, widths, kinds in ((OF_EDGES, (1,), GROUPS[:1]), (OF_GROUPS, options.widths, GROUPS))
        for width in widths
        for how in kinds
        if edges * width <= MOST_NUMBERS
    ]
    for edges, width, how, functions in cells:
        given = make(edges, width, how, device)
        rows += [measure(name, function, how, given, machine) for name, function in functions.items()]
        del given
        timing.clear(device)
        if options.out and rows:
            tables.save(tables.make_record(title, device, rows, summary(rows)), options.out)
    tables.write(options, title, rows, device, summary(rows))
    return 0


def summary(rows: list[tables.Row]) -> list[tables.Row]:
    """Geometric means and least ratios by function and number of edges."""
    kinds: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        kinds.setdefault((row["function"], row["edges"]), []).append(row["PyG / gnnfast"])
    return [
        {"function": name, "edges": edges, "cells": len(found), "PyG / gnnfast": timing.geometric_mean(found), "least": min(found)}
        for (name, edges), found in kinds.items()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
