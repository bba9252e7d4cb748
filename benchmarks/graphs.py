"""Graphs for benchmarks: the exact degree histograms of 16 benchmark graphs, two sizes that have none, and real graphs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# nodes, edges, sigma of log-normal degrees: graphs of the benchmark for which there is no histogram
LOG_NORMAL = {"reddit": (232_965, 114_615_892, 1.3), "products": (2_449_029, 123_718_280, 1.0)}


def data_folder() -> Path | None:
    """The folder that GNNFAST_DATA names, if it is there."""
    folder = os.environ.get("GNNFAST_DATA")
    return Path(folder) if folder and Path(folder).is_dir() else None


def random_order_names() -> list[str]:
    """Names that :func:`random_order` knows: those with histograms need GNNFAST_DATA."""
    folder = data_folder()
    names = sorted(np.load(folder / "degree_histograms.npz").files) if folder else []
    return [*names, *LOG_NORMAL]


def random_order(name: str, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """CSR with the row degrees of a benchmark graph in random order and columns drawn in proportion to degree (Chung-Lu): no
    locality at all.

    Returns:
        ``rowptr [nodes + 1]`` and ``col [edges]``, int32.
    """
    g = torch.Generator(device).manual_seed(seed)
    if name in LOG_NORMAL:
        nodes, edges, sigma = LOG_NORMAL[name]
        weight = (torch.randn(nodes, generator=g, device=device, dtype=torch.float64) * sigma).exp()
        degree = (weight * (edges / weight.sum())).round().long().clamp(min=1)
        # Rounding misses the total by a little: spread the difference over the largest rows.
        rest = int(edges - degree.sum())
        top = degree.argsort(descending=True)[: abs(rest)]
        degree[top] += 1 if rest > 0 else -1
    else:
        histogram = torch.from_numpy(np.load(data_folder() / "degree_histograms.npz")[name]).long()
        degree = torch.repeat_interleave(histogram[:, 0], histogram[:, 1]).to(device)
        degree = degree[torch.randperm(degree.numel(), generator=g, device=device)]
    rowptr = torch.zeros(degree.numel() + 1, dtype=torch.int64, device=device)
    rowptr[1:] = degree.cumsum(0)
    draws = torch.rand(int(rowptr[-1]), generator=g, device=device, dtype=torch.float64) * float(rowptr[-1])
    col = torch.searchsorted(rowptr[1:], draws.to(torch.int64), right=True).clamp_(max=degree.numel() - 1)
    return rowptr.int(), col.int()


def to_edge_index(rowptr: Tensor, col: Tensor, shuffle: bool = True, seed: int = 0) -> Tensor:
    """``[2, edges]`` int64, as a user's data set has it, in random edge order unless ``shuffle`` is off."""
    rows = torch.arange(rowptr.numel() - 1, device=col.device)
    dst = torch.repeat_interleave(rows, rowptr.diff().long(), output_size=col.numel())
    edge_index = torch.stack([col.long(), dst])
    if shuffle:
        order = torch.randperm(col.numel(), generator=torch.Generator(col.device).manual_seed(seed), device=col.device)
        edge_index = edge_index[:, order]
    return edge_index


REAL = {
    "cora": "Planetoid",
    "amazon-computers": "amazon_electronics_computers.npz",
    "coauthor-physics": "ms_academic_phy.npz",
    "tolokers": "tolokers.npz",
}


def real(name: str) -> tuple[Tensor, int]:
    """``edge_index`` and number of nodes of a real graph, through PyG's own loader from the raw files in GNNFAST_DATA."""
    import tempfile

    from torch_geometric.datasets import Amazon, Coauthor, HeterophilousGraphDataset, Planetoid

    folder = data_folder()
    if folder is None:
        raise FileNotFoundError("GNNFAST_DATA does not name a folder with the real graphs")
    root = Path(tempfile.mkdtemp(prefix="gnnfast-data-"))

    def place(target: str, *files: Path) -> None:
        (root / target).mkdir(parents=True)
        for file in files:
            (root / target / file.name).symlink_to(file.resolve())

    if name == "cora":
        place("Cora/raw", *folder.glob("planetoid/ind.cora.*"))
        data = Planetoid(str(root), "Cora")[0]
    elif name == "amazon-computers":
        place("Computers/raw", folder / "npz" / REAL[name])
        data = Amazon(str(root), "Computers")[0]
    elif name == "coauthor-physics":
        place("Physics/raw", folder / "npz" / REAL[name])
        data = Coauthor(str(root), "Physics")[0]
    else:
        place("tolokers/raw", folder / "npz" / REAL[name])
        data = HeterophilousGraphDataset(str(root), "Tolokers")[0]
    return data.edge_index, data.num_nodes
