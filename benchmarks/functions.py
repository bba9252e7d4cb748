"""Python functions in DGL's ``update_all`` and ``apply_edges``, and layers of DGL made of such, with gnnfast and as DGL runs them.

gnnfast bench functions --device cpu
gnnfast bench functions --out benchmarks/results/NAME     an arxiv-size graph on a GPU, through the bridge

Forward and backward, with gradients of features and parameters. On a CPU the other side is DGL without gnnfast. On a GPU DGL from
PyPI has no kernels: there it is DGL's code over gnnfast's bridge, which gathers rows for each edge, and runs functions of mailboxes
for each degree. "memory" is the peak of a step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnnfast
from gnnfast.unsupported import Unsupported

from . import graphs, peers, tables, timing

TOLERANCE = 2e-2  # in float32 an activation of what is nearly 0 may go either way
UNTIL_SETTLED = 6
SLOW_MS = 300.0
TYPES, NODE_TYPES = 8, 3


class Functions(nn.Module):
    """What users write: of edges, and of mailboxes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin, self.pair = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.att, self.last = nn.Linear(2 * width, 1), nn.Linear(width, 1)
        layers, statistics = peers.import_dgl("functions").nn.pytorch, ["mean", "max", "min", "sum"]
        scalers = ["identity", "amplification"]
        self.layers = nn.ModuleDict(
            {
                "RelGraphConv": layers.RelGraphConv(width, width, TYPES),
                "RelGraphConv, bases": layers.RelGraphConv(width, width, TYPES, "basis", 4),
                "RelGraphConv, blocks": layers.RelGraphConv(width, width, TYPES, "bdd", 4),
                "HGTConv": layers.HGTConv(width, width // 4, 4, NODE_TYPES, TYPES, dropout=0.0),
                "PNAConv": layers.PNAConv(width, width, statistics, scalers, 2.5),
                "DGNConv": layers.DGNConv(width, width, ["dir1-av", "dir1-dx", "mean"], scalers, 2.5),
            }
        )

    def copied(self, edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["x"]}

    def weighted(self, edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["x"] * edges.data["w"]}

    def linear(self, edges: Any) -> dict[str, Tensor]:
        return {"m": F.relu(self.lin(edges.src["x"]))}

    def joined(self, edges: Any) -> dict[str, Tensor]:
        return {"m": F.relu(self.pair(torch.cat([edges.src["x"], edges.dst["x"]], 1)))}

    def gated(self, edges: Any) -> dict[str, Tensor]:
        return {"m": torch.sigmoid(edges.src["x"] + edges.dst["x"]) * edges.src["x"]}

    def scored(self, edges: Any) -> dict[str, Tensor]:
        return {"e": F.leaky_relu(self.att(torch.cat([edges.src["x"], edges.dst["x"]], 1)))}

    def predicted(self, edges: Any) -> dict[str, Tensor]:
        return {"e": self.last(F.relu(self.pair(torch.cat([edges.src["x"], edges.dst["x"]], 1))))}

    def products(self, edges: Any) -> dict[str, Tensor]:
        return {"e": (edges.src["x"] * edges.dst["x"]).sum(-1, keepdim=True)}

    def stored(self, edges: Any) -> dict[str, Tensor]:
        edges.data["e"] = edges.data["w"] + edges.src["x"] + edges.dst["x"]
        return {"m": edges.src["x"], "e": edges.data["e"]}

    def passed(self, edges: Any) -> dict[str, Tensor]:
        return {"m": edges.src["x"], "e": edges.data["e"]}

    def sums(self, nodes: Any) -> dict[str, Tensor]:
        return {"out": nodes.mailbox["m"].sum(1)}

    def maxima(self, nodes: Any) -> dict[str, Tensor]:
        return {"out": torch.max(nodes.mailbox["m"], dim=1)[0]}

    def sage(self, nodes: Any) -> dict[str, Tensor]:
        mean = nodes.mailbox["m"].mean(1)
        return {"out": F.relu(self.pair(torch.cat([nodes.data["x"], mean], 1)))}

    def attention(self, nodes: Any) -> dict[str, Tensor]:
        alpha = F.softmax(nodes.mailbox["e"], dim=1)
        return {"out": torch.sum(alpha * nodes.mailbox["m"], dim=1)}

    def gates(self, nodes: Any) -> dict[str, Tensor]:
        sigma = torch.sigmoid(nodes.mailbox["e"])
        share = torch.sum(sigma * nodes.mailbox["m"], dim=1) / (torch.sum(sigma, dim=1) + 1e-6)
        return {"out": nodes.data["x"] + share}

    def length(self, nodes: Any) -> dict[str, Tensor]:
        return {"out": nodes.mailbox["m"].sum(1) / nodes.mailbox["m"].shape[1]}


def works(f: Functions) -> dict[str, Callable[[Any], Tensor]]:
    """By name: what is made of a graph with ``x`` at nodes and ``w`` at edges."""
    import dgl.function as fn

    def update(message: Any, reduce: Any, first: Any = None) -> Callable[[Any], Tensor]:
        def call(g: Any) -> Tensor:
            if first is not None:
                g.apply_edges(first)
            g.update_all(message, reduce)
            return g.ndata["out"]  # type: ignore[no-any-return]

        return call

    def edges(function: Any) -> Callable[[Any], Tensor]:
        def call(g: Any) -> Tensor:
            g.apply_edges(function)
            return g.edata["e"]  # type: ignore[no-any-return]

        return call

    total, mean, most = (getattr(fn, name)("m", "out") for name in ("sum", "mean", "max"))
    copied = fn.copy_u("x", "m")
    return {
        "src, sum": update(f.copied, total),
        "src * weight, mean": update(f.weighted, mean),
        "relu(linear(src)), sum": update(f.linear, total),
        "relu(linear(src)), max": update(f.linear, most),
        "relu(linear(cat)), sum": update(f.joined, total),
        "gate, mean": update(f.gated, mean),
        "edges: leaky_relu(linear(cat))": edges(f.scored),
        "edges: perceptron of cat": edges(f.predicted),
        "edges: dot product": edges(f.products),
        "mailbox: sum": update(copied, f.sums),
        "mailbox: max": update(copied, f.maxima),
        "mailbox: SAGE": update(copied, f.sage),
        "mailbox: attention": update(f.passed, f.attention, f.scored),
        "mailbox: gates, edges written": update(f.stored, f.gates),
        "mailbox: sum / length": update(copied, f.length),
        **{name: functools.partial(_layer, layer) for name, layer in f.layers.items()},
    }


def _layer(layer: Any, g: Any) -> Tensor:
    """What a layer of DGL makes of a graph, whose types are kept with it as a user keeps them."""
    given = {
        "RelGraphConv": {"etypes": g.edata["etype"]},
        "HGTConv": {"ntype": g.ndata["ntype"], "etype": g.edata["etype"]},
        "DGNConv": {"eig_vec": g.ndata["eig"]},
    }.get(type(layer).__name__, {})
    return layer(g, g.ndata["x"], **given)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _as_dgl(device: torch.device) -> Iterator[None]:
    """Functions run as DGL runs them: without gnnfast, or on a GPU, where nothing would run without it, as on small graphs."""
    if device.type == "cuda":
        left = Unsupported("as DGL runs it")
        with mock.patch("gnnfast.lazy.rows.FEW", 1 << 60), mock.patch("gnnfast.dgl.relational._check_layer", side_effect=left):
            yield
        return
    gnnfast.disable()
    try:
        yield
    finally:
        gnnfast.enable()


def step(work: Callable[[Any], Tensor], g: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Forward and backward: what comes out, and all gradients."""
    for leaf in leaves:
        leaf.grad = None
    with g.local_scope():
        g.ndata["x"], g.edata["w"] = leaves[:2]
        out = work(g)
    out.square().mean().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def measure(row: tables.Row, work: Callable[[Any], Tensor], g: Any, leaves: list[Tensor]) -> tables.Row:
    device = leaves[0].device
    with contextlib.ExitStack() as stack:

        def switch(side: str) -> None:
            stack.close()
            if side == "DGL":
                stack.enter_context(_as_dgl(device))

        call = functools.partial(step, work, g, leaves)
        found = {}
        for side in ("DGL", "gnnfast"):
            switch(side)
            found[side] = [t.clone() for t in call()]
            for _ in range(UNTIL_SETTLED if side == "gnnfast" else 0):
                call()
            if device.type == "cuda":
                row[f"{side} GiB"] = timing.peak_gib(call, torch.cuda.memory_allocated())
        largest = max(float(b.norm()) for b in found["DGL"][1:])  # beside which the gradient of a bias before a norm is noise
        for a, b in zip(found["gnnfast"], found["DGL"], strict=True):
            error = float((a - b).norm() / max(float(b.norm()), 1e-2 * largest))
            if not error < TOLERANCE:
                raise SystemExit(f"gnnfast bench functions: results of {row} differ by {error:.2g}")
        switch("DGL")
        slow = timing.median_ms(call, device, 1) > SLOW_MS
        how = {"repeats": 2, "rounds": 2} if slow else {}
        for side, times in timing.in_turn(dict.fromkeys(found, call), switch, device, **how).items():
            row |= times.columns(side)
    row["DGL / gnnfast"] = row["DGL ms"] / row["gnnfast ms"]
    print(", ".join(f"{k} {tables.cell(v)}" for k, v in row.items() if "spread" not in k), file=sys.stderr, flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("functions", __doc__.splitlines()[0])
    tables.add_device(parser)
    about = "arxiv-size on a GPU, pubmed-size on a CPU if not given"
    parser.add_argument("--graphs", nargs="*", **tables.named((*graphs.OTHER_SIZES, *graphs.LOG_NORMAL), about))
    parser.add_argument("--width", type=int, help="features of a node; 128 on a GPU, 64 on a CPU if not given")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="rows whose names begin so, as mailbox or HGTConv; all if not given"
    )
    tables.add_output(parser)
    options = parser.parse_args(arguments)
    dgl = peers.import_dgl("functions")
    device, rows = torch.device(options.device), []
    cuda = device.type == "cuda"
    width = options.width or (128 if cuda else 64)
    title = f"Python functions in DGL, forward and backward, on {options.device}"
    for name in options.graphs or (("arxiv-size",) if cuda else graphs.MADE[:1]):
        edge_index, nodes = graphs.made(name, device)
        g = dgl.graph(tuple(edge_index.cpu()), num_nodes=nodes).to(device)
        torch.manual_seed(0)
        g.edata["etype"] = torch.randint(TYPES, (g.num_edges(),)).to(device)
        g.ndata["ntype"] = torch.randint(NODE_TYPES, (nodes,)).to(device)
        g.ndata["eig"] = torch.randn(nodes, 1).to(device)
        functions = Functions(width).to(device)
        x, weight = torch.randn(nodes, width, device=device), torch.rand(g.num_edges(), 1, device=device)
        leaves = [x.requires_grad_(), weight, *functions.parameters()]
        at: tables.Row = {"graph": name, "edges": g.num_edges(), "features": width}
        chosen = {w: call for w, call in works(functions).items() if not options.only or w.startswith(tuple(options.only))}
        if not chosen:
            parser.error(f"--only {' '.join(options.only)} begins none of: {'; '.join(works(functions))}")
        for work, call in chosen.items():
            rows.append(measure(at | {"function": work}, call, g, leaves))
            if options.out:
                tables.save(tables.make_record(title, device, rows, {}), options.out)
        timing.clear(device)
    ratios = [row["DGL / gnnfast"] for row in rows]
    tables.write(options, title, rows, device, {"DGL / gnnfast": timing.geometric_mean(ratios), "least": min(ratios)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
