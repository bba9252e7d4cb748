"""DGL's side of ``gnnfast bench host``: batches of molecules and sampled blocks, in DGL with gnnfast on and off in turn.

PyPI's DGL has no CUDA: there DGL with gnnfast stands beside PyG with gnnfast, for the same graphs. "new": the graphs are new
objects in every step, made of edges as a loader makes them, which both sides pay.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import host
from .bench import threads

# How models of PyG are called that compute as much.
IN_PYG = {"GraphConv": "GCN"}


class Work(NamedTuple):
    """``make()`` gives the graph of each layer; ``x [N, F]``; ``sizes [B]`` are those of the graphs that are pooled, or ``None``;
    ``pyg`` is the same for PyG."""

    make: Callable[[], list[Any]]
    x: Tensor
    sizes: Tensor | None
    widths: tuple[int, ...]
    edges: int
    pyg: host.Work


def missing() -> str:
    """Why there is no such side; empty if there is one."""
    return "" if importlib.util.find_spec("dgl") else "DGL is not installed"


def molecules(count: int, device: torch.device) -> Work:
    import dgl

    work = host.molecules(count, device)
    assert work.batch is not None
    sizes = work.batch.bincount(minlength=count)
    src, dst = work.edge_index.cpu()

    def make() -> list[Any]:
        g = dgl.graph((src.clone(), dst.clone()), num_nodes=work.x.shape[0])
        g.set_batch_num_nodes(sizes.cpu())
        g.set_batch_num_edges(torch.ones(count, dtype=torch.int64))  # which nobody reads
        return [g.to(device)] * (len(work.widths) - 1)

    return Work(make, work.x, sizes, work.widths, src.numel(), work)


def samples(seeds: int, device: torch.device) -> Work:
    import dgl

    generator = torch.Generator().manual_seed(seeds)
    nodes = 60_000
    degree = torch.empty(nodes).log_normal_(2.0, 1.2, generator=generator).long().clamp(1, 1000)
    dst = torch.repeat_interleave(torch.arange(nodes), degree)
    g = dgl.graph((torch.randint(0, nodes, (dst.numel(),), generator=generator), dst), num_nodes=nodes)
    dgl.seed(seeds)
    with threads(1):  # each thread of DGL draws from a generator of its own, and which takes which seed is a matter of luck
        _, _, blocks = dgl.dataloading.NeighborSampler(list(host.FANOUTS)).sample(g, torch.arange(seeds))
    parts = [(b.edges(), b.num_src_nodes(), b.num_dst_nodes()) for b in blocks]

    def make() -> list[Any]:
        return [dgl.create_block((s.clone(), d.clone()), n, m).to(device) for (s, d), n, m in parts]

    x = torch.randn(parts[0][1], 100, generator=generator).to(device)
    # In PyG one graph of all hops, of which each layer computes all rows: more than blocks have.
    edge_index = torch.cat([torch.stack(e) for e, _, _ in parts], 1).unique(dim=1).to(device)
    widths = (100, 256, 256, 47)
    pyg = host.Work(x, edge_index, x.new_empty(0), None, seeds, widths)
    return Work(make, x, None, widths, sum(e[0].numel() for e, _, _ in parts), pyg)


WORK = {"dgl molecules": molecules, "dgl samples": samples}


def conv(name: str, width_in: int, width_out: int) -> nn.Module:
    from dgl.nn import GATConv, GATv2Conv, GINConv, GraphConv, SAGEConv

    if name == "GIN":
        return GINConv(nn.Sequential(nn.Linear(width_in, width_out), nn.ReLU(), nn.Linear(width_out, width_out)), "sum")
    if name == "GraphConv":
        return GraphConv(width_in, width_out, allow_zero_in_degree=True)
    if name == "SAGE":
        return SAGEConv(width_in, width_out, "mean")
    heads = 8 if width_out % 8 == 0 else 1
    return {"GAT": GATConv, "GATv2": GATv2Conv}[name](width_in, width_out // heads, heads, allow_zero_in_degree=True)


class Model(nn.Module):
    """Layers with ReLU in between, and a sum over each graph where there are several."""

    def __init__(self, name: str, work: Work) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv(name, *widths) for widths in zip(work.widths, work.widths[1:]))
        self.head = nn.Linear(work.widths[-1], 1) if work.sizes is not None else None

    def forward(self, graphs: list[Any], x: Tensor) -> Tensor:
        from dgl.ops import segment_reduce

        for i, (layer, g) in enumerate(zip(self.convs, graphs)):
            x = layer(g, x.relu() if i else x).flatten(1)
        return x if self.head is None else self.head(segment_reduce(graphs[0].batch_num_nodes(), x))


def make_step(name: str, work: Work, training: bool, new: bool) -> Callable[[], Tensor]:
    """One step, which returns the model's output."""
    torch.manual_seed(0)
    model = Model(name, work).to(work.x.device).train(training)
    kept = work.make()
    return host.stepping(model, lambda: model(work.make() if new else kept, work.x), training)
