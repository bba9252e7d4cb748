"""Models under torch.compile, forward and backward: PyG compiled, gnnfast uncompiled, gnnfast compiled, on the same inputs.

gnnfast bench compiled --device cuda --out benchmarks/results/NAME       arxiv-size and reddit-size random graphs
gnnfast bench compiled --device cpu --out benchmarks/results/NAME        a graph of 10,000 nodes and 200,000 edges
gnnfast bench compiled --small ...                                       one of Cora's size, with and without CUDA graphs
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, TransformerConv

import gnnfast
from gnnfast.cache import cache

from . import graphs, tables, timing


class Two(nn.Module):
    """Two layers 128 -> 256 -> 40, as on ogbn-arxiv."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x, edge_index)), edge_index)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: Two(GCNConv(128, 256), GCNConv(256, 40)),
    "SAGE": lambda: Two(SAGEConv(128, 256), SAGEConv(256, 40)),
    "SAGE max": lambda: Two(SAGEConv(128, 256, aggr="max"), SAGEConv(256, 40, aggr="max")),
    "GIN": lambda: Two(GINConv(nn.Linear(128, 256)), GINConv(nn.Linear(256, 40))),
    "GAT 8x32": lambda: Two(GATConv(128, 32, heads=8), GATConv(256, 40)),
    "GATv2 8x32": lambda: Two(GATv2Conv(128, 32, heads=8), GATv2Conv(256, 40)),
    "Transformer 8x32": lambda: Two(TransformerConv(128, 32, heads=8), TransformerConv(256, 40)),
}
WIDE = {"GCNConv 602 -> 128": lambda: GCNConv(602, 128)}


def step(call: Callable[..., Tensor], model: nn.Module, x: Tensor, edge_index: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    call(x, edge_index).square().mean().backward()


def measure(
    name: str, model: nn.Module, graph: str, x: Tensor, edge_index: Tensor, repeats: int, mode: str = "default"
) -> tables.Row:
    """The three sides for one model, after a comparison of all gradients. A side that fails is left out, with a note."""
    row: tables.Row = {"model": name, "mode": mode, "graph": graph, "nodes": x.shape[0], "edges": edge_index.shape[1]}
    found: dict[str, list[Tensor]] = {}
    for side in ("PyG compiled", "gnnfast", "gnnfast compiled"):
        (gnnfast.disable if side.startswith("PyG") else gnnfast.enable)()
        torch._dynamo.reset()
        cache.clear()
        own = copy.deepcopy(model)
        # What depends on data, as PyG's self loops do, breaks PyG's graph where the compiler is to use CUDA graphs.
        call = torch.compile(own, fullgraph=mode == "default", mode=mode) if side.endswith("compiled") else own
        try:
            step(call, own, x, edge_index)
            found[side] = [p.grad.clone() for p in own.parameters() if p.grad is not None]
            timed = timing.sample(lambda call=call, own=own: step(call, own, x, edge_index), x.device, repeats, 8)
            row |= timed.columns(side)
        except Exception as error:  # a compiler that fails must not end the run
            row["note"] = f"{side}: {type(error).__name__}"
        gnnfast.enable()
    ours = row.get("gnnfast compiled ms")
    for side in ("PyG compiled", "gnnfast"):
        if ours and f"{side} ms" in row:
            row[f"{side} / gnnfast compiled"] = row[f"{side} ms"] / ours
            for a, b in zip(found[side], found["gnnfast compiled"], strict=True):
                error = float((a - b).norm() / b.norm().clamp(min=1e-12))
                assert error < 1e-3, f"gradients differ by {error}"
    print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()), file=sys.stderr, flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gnnfast bench compiled", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="*", choices=(*MODELS, *WIDE), default=None)
    parser.add_argument("--small", action="store_true", help="a graph of Cora's size")
    tables.add_output(parser)
    options = parser.parse_args(arguments)
    device, rows = torch.device(options.device), []
    cuda = device.type == "cuda"
    torch.manual_seed(0)
    graph, nodes, edges = ("arxiv-size", 169_343, 2_332_486) if cuda else ("10,000 nodes", 10_000, 200_000)
    if options.small:
        graph, nodes, edges = "Cora's size", 2_708, 10_556
    x, edge_index = torch.randn(nodes, 128, device=device), torch.randint(0, nodes, (2, edges), device=device)
    wanted = options.models or (*MODELS, *(WIDE if cuda and not options.small else ()))
    for name in wanted:
        for mode in ("default", "reduce-overhead") if options.small and cuda else ("default",):
            if name in MODELS:
                rows.append(measure(name, MODELS[name]().to(device), graph, x, edge_index, 50 if options.small else 20, mode))
    del x, edge_index
    for name in wanted:
        if name in WIDE:
            rowptr, col = graphs.random_order("reddit", device)
            edge_index = graphs.to_edge_index(rowptr, col)
            x = torch.randn(rowptr.numel() - 1, 602, device=device)
            rows.append(measure(name, WIDE[name]().to(device), "reddit", x, edge_index, 10))
    tables.write(options, f"Models under torch.compile, forward and backward, on {options.device}", rows, device, {})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
