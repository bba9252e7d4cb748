"""DGL's message-passing operators one by one, on DGL's kernels and on gnnfast's, in turn in one process, over real graphs.

gnnfast bench operators --out benchmarks/results/NAME
gnnfast bench operators --graphs cora --operators u_add_e_max edge_softmax

``gspmm`` as dgl.ops has it (u_add_e_sum is a sum of the source's features plus the edge's), ``gsddmm`` (u_add_v is a row per edge)
and edge_softmax. Forward runs under no_grad; both is forward and backward with the gradients of all operands. Features of edges are
as wide as those of nodes, ``w1`` marks one value per edge and ``h4`` one for each of four heads. On a CPU, where DGL has kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gnnfast

from . import graphs, peers, tables, timing

GRAPHS = ("amazon-computers", "coauthor-physics", "tolokers")
WIDTHS = (16, 64)
HEADS = 4
TOLERANCE = 1e-4
# Of edges with the same maximum the gradient goes to the first, and in DGL's kernels for float32 (libxsmm) to the last.
TOLERANCE_OF_TIES = 1e-2
_MESSAGES = ("copy_u", "copy_e", "u_add_e", "u_sub_e", "u_mul_e", "u_div_e", "u_mul_e_w1", "u_mul_e_h4", "u_add_e_h4")
_EDGES = ("u_add_v", "u_sub_v", "u_mul_v", "u_div_v", "u_dot_v")
OPERATORS = (*(f"{m}_{r}" for m in _MESSAGES for r in ("sum", "mean", "max", "min")), *_EDGES, "edge_softmax")


def call(operator: str, g: Any, width: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A function of DGL and its operands."""
    import dgl

    u, v, e = (torch.rand(n, width) + 0.5 for n in (g.num_nodes(), g.num_nodes(), g.num_edges()))
    if operator == "edge_softmax":
        return lambda s: dgl.ops.edge_softmax(g, s), [torch.randn(g.num_edges(), HEADS, 1)]
    if operator in _EDGES:
        return lambda a, b: getattr(dgl.ops, operator)(g, a, b), [u, v]
    message, reduction = operator.rsplit("_", 1)
    if message.startswith("copy"):
        return lambda a: getattr(dgl.ops, operator)(g, a), [u if message == "copy_u" else e]
    if message.endswith("_w1"):
        e = e[:, :1].contiguous()
    if message.endswith("_h4"):
        u, e = u.view(-1, HEADS, width // HEADS), e[:, :HEADS].contiguous().unsqueeze(-1)
    name = f"{'_'.join(message.split('_')[:3])}_{reduction}"
    return lambda a, b: getattr(dgl.ops, name)(g, a, b), [u, e]


def measure(name: str, g: Any, operator: str, width: int, repeats: int | None) -> tables.Row:
    torch.manual_seed(0)
    function, operands = call(operator, g, width)
    leaves = [t.requires_grad_() for t in operands]
    with torch.no_grad():
        out = function(*leaves)
        # DGL gives the gradients of maxima over no edges to node 0.
        seed = torch.where(out.isinf(), 0, torch.rand_like(out))

    def forward() -> Any:
        with torch.no_grad():
            return function(*leaves)

    def both() -> Any:
        return torch.autograd.grad(function(*leaves), leaves, seed)

    row: tables.Row = {"graph": name, "edges": g.num_edges(), "operator": operator, "F": width}
    cpu, results = torch.device("cpu"), {}

    def switch(label: str) -> None:
        (gnnfast.enable if label == "gnnfast" else gnnfast.disable)()

    for label in ("gnnfast", "DGL"):
        switch(label)
        results[label] = [t.nan_to_num() for t in (forward(), *both())]  # maxima of nodes without edges are infinite
    for what, run in (("forward", forward), ("both", both)):
        for label, found in timing.in_turn(dict.fromkeys(results, run), switch, cpu, repeats).items():
            row |= found.columns(f"{label} {what}")
    switch("gnnfast")
    extremum = operator.endswith(("_max", "_min"))
    for i, (found, expected) in enumerate(zip(results["gnnfast"], results["DGL"])):
        error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
        if not error < (TOLERANCE_OF_TIES if extremum and i else TOLERANCE):
            raise SystemExit(f"gnnfast bench operators: results of {row} differ by {error:.2g}")
    for what in ("forward", "both"):
        row[f"DGL / gnnfast {what}"] = row[f"DGL {what} ms"] / row[f"gnnfast {what} ms"]
    print(", ".join(f"{k} {tables.cell(v)}" for k, v in row.items() if "spread" not in k), flush=True)
    return row


def summary(rows: list[tables.Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what in ("forward", "both"):
        ratios = [row[f"DGL / gnnfast {what}"] for row in rows]
        found[f"geometric mean, {what}"] = timing.geometric_mean(ratios)
        found[f"least, {what}"] = min(ratios)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("operators", __doc__.splitlines()[0])
    parser.add_argument("--graphs", nargs="*", choices=[*graphs.REAL, *graphs.MADE], metavar="GRAPH", help=f"{GRAPHS} if not given")
    parser.add_argument("--operators", nargs="*", choices=OPERATORS, metavar="OPERATOR", default=OPERATORS)
    parser.add_argument("--widths", nargs="*", type=int, default=WIDTHS, help="features, multiples of four")
    parser.add_argument("--repeats", type=int, help="calls of each; as many as fill 60 ms if not given")
    tables.add_output(parser)
    options = parser.parse_args(arguments)
    dgl = peers.import_dgl("operators")
    wanted = options.graphs or GRAPHS
    if not options.graphs and any(graphs.missing(name, "real") for name in wanted):
        wanted = graphs.MADE[:1]
        print(f"without the graphs of the folder that GNNFAST_DATA names: a made one, {wanted[0]}", flush=True)
    rows, cpu = [], torch.device("cpu")
    for name in wanted:
        edge_index, nodes = graphs.real(name) if name in graphs.REAL else graphs.made(name, cpu)
        g = dgl.graph((edge_index[0], edge_index[1]), num_nodes=nodes)
        for width in options.widths:
            for operator in options.operators:
                rows.append(measure(name, g, operator, width, options.repeats))
    tables.write(options, "DGL's operators, on a CPU", rows, cpu, summary(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
