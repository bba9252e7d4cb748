"""Graphs for benchmarks: the exact degree histograms of 16 benchmark graphs, two sizes that have none, and real graphs.

N is the number of nodes, E the number of edges.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# nodes, edges, sigma of log-normal degrees: graphs of the benchmark for which there is no histogram
LOG_NORMAL = {"reddit": (232_965, 114_615_892, 1.3), "products": (2_449_029, 123_718_280, 1.0)}
# Size and skew (standard deviation of in-degrees over their mean: 1.04) of ogbn-proteins, which that benchmark does not have.
OTHER_SIZES = {
    "proteins": (132_534, 79_122_504, 0.86),
    # Sizes of Planetoid's PubMed, Amazon-Computers and ogbn-arxiv in both directions, for where their files are not.
    "pubmed-size": (19_717, 88_648, 1.0),
    "computers-size": (13_752, 491_722, 1.0),
    "arxiv-size": (169_343, 2_315_598, 1.3),
    "tiny": (300, 2_400, 0.8),
}
# raw files under GNNFAST_DATA
REAL = {
    "cora": "planetoid/ind.cora.graph",
    "citeseer": "planetoid/ind.citeseer.graph",
    "amazon-computers": "npz/amazon_electronics_computers.npz",
    "amazon-photo": "npz/amazon_electronics_photo.npz",
    "coauthor-physics": "npz/ms_academic_phy.npz",
    "tolokers": "npz/tolokers.npz",
}
MADE = ("pubmed-size", "computers-size")  # for CPUs, in place of real graphs that are not there
ORDERS = ("random", "community", "real")


def data_folder() -> Path | None:
    """The folder that GNNFAST_DATA names, if it is there."""
    folder = os.environ.get("GNNFAST_DATA")
    return Path(folder) if folder and Path(folder).is_dir() else None


def _histograms() -> dict[str, np.ndarray]:
    """``[degrees, 2]`` (degree, number of rows) by graph."""
    file = (data_folder() or Path()) / "degree_histograms.npz"
    return dict(np.load(file)) if file.is_file() else {}


def random_order_names() -> list[str]:
    """The benchmark graphs that can be made here: those with histograms need GNNFAST_DATA."""
    return [*sorted(_histograms()), *LOG_NORMAL]


def missing(name: str, order: str) -> str:
    """Why the graph cannot be had in that order; empty if it can."""
    if order != "real" and name in (*random_order_names(), *OTHER_SIZES):
        return ""
    known = ", ".join(REAL if order == "real" else dict.fromkeys([*random_order_names(), *OTHER_SIZES, *REAL]))
    if name not in REAL:
        hint = "" if _histograms() else "; more are in degree_histograms.npz of the folder that GNNFAST_DATA names"
        return f"{name!r} is no graph of order {order!r}; known are {known}{hint}"
    folder = data_folder()
    if folder is None or not (folder / REAL[name]).is_file():
        return f"{name!r} needs {REAL[name]} in the folder that GNNFAST_DATA names"
    return "" if importlib.util.find_spec("torch_geometric") else f"{name!r} is read with torch_geometric, which is not installed"


# ---- made graphs -------------------------------------------------------------------------------------------------------------
def degrees(name: str, generator: torch.Generator) -> Tensor:
    """In-degrees of a benchmark graph ``[N]``, int64, in random order, on the generator's device."""
    device = generator.device
    sizes = LOG_NORMAL | OTHER_SIZES
    if name in sizes:
        nodes, edges, sigma = sizes[name]
        weight = (torch.randn(nodes, generator=generator, device=device, dtype=torch.float64) * sigma).exp()
        degree = (weight * (edges / weight.sum())).round().long().clamp(min=1)
        # Rounding misses the total by a little: spread the difference over the largest rows.
        rest = int(edges - degree.sum())
        top = degree.argsort(descending=True)[: abs(rest)]
        degree[top] += 1 if rest > 0 else -1
        return degree
    reason = missing(name, "random")
    if reason:
        raise ValueError(reason)
    if name in REAL:
        edge_index, nodes = real(name)
        degree = edge_index[1].bincount(minlength=nodes)
    else:
        degree = torch.repeat_interleave(*torch.from_numpy(_histograms()[name]).long().unbind(1))
    return degree.to(device)[torch.randperm(degree.numel(), generator=generator, device=device)]


def chung_lu(degree: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """CSR with these row degrees ``[N]`` and columns drawn in proportion to degree: no locality at all.

    Returns:
        ``rowptr [N + 1]`` and ``col [E]``, int32.
    """
    rowptr = _from_zero(degree)
    edges = int(rowptr[-1])
    draws = torch.rand(edges, generator=generator, device=degree.device, dtype=torch.float64) * edges
    col = torch.searchsorted(rowptr[1:], draws.long(), right=True).clamp_(max=degree.numel() - 1)
    return rowptr.int(), _sort_rows(degree, col)


def communities(
    degree: Tensor, generator: torch.Generator, mean_size: int = 1000, inside: float = 0.7
) -> tuple[Tensor, Tensor, Tensor]:
    """CSR with these row degrees ``[N]`` and edges that stay in communities, whose members have arbitrary ids: locality that the
    ids do not show.

    Community sizes follow a power law (density in proportion to ``size ** -3``, from half the mean up). Each edge draws its
    column in proportion to degree, with probability ``inside`` among the members of its row's community, else among all nodes.

    Returns:
        ``rowptr [N + 1]`` and ``col [E]``, int32, and the community of each node ``[N]``, int64.
    """
    nodes, device = degree.numel(), degree.device

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device=device, dtype=torch.float64)

    # Nodes are laid out so that the members of a community are neighbours: member[position] is a node.
    member = torch.randperm(nodes, generator=generator, device=device)
    enough = 2 * nodes // mean_size + 1  # communities: each has at least half the mean
    sizes = (mean_size / 2 * uniform(enough).rsqrt()).clamp_(max=nodes).ceil().long()
    bounds = _from_zero(sizes).clamp_(max=nodes)
    community = torch.searchsorted(bounds[1:], torch.arange(nodes, device=device), right=True)  # by position
    mass = _from_zero(degree[member])  # degrees of all positions before
    label, low, high = (torch.empty_like(member) for _ in range(3))
    label[member], low[member], high[member] = community, mass[bounds[community]], mass[bounds[community + 1]]

    rowptr = _from_zero(degree)
    edges = int(rowptr[-1])
    local = uniform(edges) < inside
    first = torch.repeat_interleave(low, degree, output_size=edges) * local
    count = torch.where(local, torch.repeat_interleave(high - low, degree, output_size=edges), edges)
    draws = first + (uniform(edges) * count).long()
    position = torch.searchsorted(mass[1:], draws, right=True).clamp_(max=nodes - 1)
    return rowptr.int(), _sort_rows(degree, member[position]), label


def _sort_rows(degree: Tensor, col: Tensor) -> Tensor:
    """Columns ascending within each row, as torch's CSR layout demands and data sets have them, int32."""
    nodes = degree.numel()
    row = torch.repeat_interleave(torch.arange(nodes, device=col.device), degree, output_size=col.numel())
    return (row.mul_(nodes).add_(col).sort().values % nodes).int()


def _from_zero(counts: Tensor) -> Tensor:
    """Where each of consecutive parts begins, and the end ``[parts + 1]``, int64."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def random_order(name: str, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A benchmark graph through :func:`chung_lu`: ``rowptr [N + 1]`` and ``col [E]``, int32."""
    generator = torch.Generator(device).manual_seed(seed)
    return chung_lu(degrees(name, generator), generator)


def community_order(name: str, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A benchmark graph through :func:`communities`: ``rowptr [N + 1]`` and ``col [E]``, int32."""
    generator = torch.Generator(device).manual_seed(seed)
    return communities(degrees(name, generator), generator)[:2]


def made(name: str, device: torch.device) -> tuple[Tensor, int]:
    """``edge_index [2, E]`` and N of a benchmark graph through :func:`communities`."""
    rowptr, col = community_order(name, device)
    return to_edge_index(rowptr, col), rowptr.numel() - 1


def to_edge_index(rowptr: Tensor, col: Tensor, shuffle: bool = True, seed: int = 0) -> Tensor:
    """``[2, E]`` int64, as a user's data set has it, in random edge order unless ``shuffle`` is off."""
    rows = torch.arange(rowptr.numel() - 1, device=col.device)
    dst = torch.repeat_interleave(rows, rowptr.diff().long(), output_size=col.numel())
    edge_index = torch.stack([col.long(), dst])
    return edge_index[:, _shuffled(col, seed)] if shuffle else edge_index


def _shuffled(col: Tensor, seed: int = 0) -> Tensor:
    return torch.randperm(col.numel(), generator=torch.Generator(col.device).manual_seed(seed), device=col.device)


# ---- real graphs -------------------------------------------------------------------------------------------------------------
def real(name: str) -> tuple[Tensor, int]:
    """``edge_index [2, E]`` and N of a real graph."""
    data = real_data(name)
    return data.edge_index, data.num_nodes


def real_data(name: str) -> Any:
    """A real graph with its node features ``x [N, F]`` and classes ``y [N]``, through PyG's own loader from the raw files in
    GNNFAST_DATA."""
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

    if name in ("cora", "citeseer"):
        place(f"{name.capitalize()}/raw", *folder.glob(f"planetoid/ind.{name}.*"))
        data = Planetoid(str(root), name.capitalize())[0]
    elif name.startswith("amazon-"):
        part = name.removeprefix("amazon-").capitalize()
        place(f"{part}/raw", folder / REAL[name])
        data = Amazon(str(root), part)[0]
    elif name == "coauthor-physics":
        place("Physics/raw", folder / REAL[name])
        data = Coauthor(str(root), "Physics")[0]
    else:
        place("tolokers/raw", folder / REAL[name])
        data = HeterophilousGraphDataset(str(root), "Tolokers")[0]
    return data


@dataclass
class Sample:
    """One graph in the formats that peers take: CSR by destination, ``rowptr [N + 1]`` and ``col [E]``, int32, and :attr:`coo`."""

    name: str
    order: str
    rowptr: Tensor
    col: Tensor
    given: tuple[Tensor, Tensor] | None = None

    @classmethod
    def make(cls, name: str, order: str, device: torch.device) -> Sample:
        """A graph and order for which :func:`missing` finds nothing missing."""
        if order == "real":
            return cls.from_edge_index(name, order, *real(name), device)
        return cls(name, order, *(random_order if order == "random" else community_order)(name, device))

    @classmethod
    def from_edge_index(cls, name: str, order: str, edge_index: Tensor, nodes: int, device: torch.device) -> Sample:
        """From COO ``[2, E]``, whose edge order is kept in :attr:`coo`."""
        edge_index = edge_index.to(device, torch.int64).contiguous()
        by_row = edge_index[1].argsort(stable=True)
        slot = torch.empty_like(by_row)
        slot[by_row] = torch.arange(by_row.numel(), device=device)
        rowptr = _from_zero(edge_index[1].bincount(minlength=nodes))
        return cls(name, order, rowptr.int(), edge_index[0, by_row].int(), (edge_index, slot))

    @cached_property
    def coo(self) -> tuple[Tensor, Tensor]:
        """``edge_index [2, E]`` and the CSR slot of each edge ``[E]``, int64: in the order given, else shuffled."""
        if self.given:
            return self.given
        slot = _shuffled(self.col)
        return to_edge_index(self.rowptr, self.col, shuffle=False)[:, slot], slot

    @property
    def nodes(self) -> int:
        return self.rowptr.numel() - 1

    @property
    def edges(self) -> int:
        return self.col.numel()
