"""Graphs for the examples: Cora where GNNFAST_DATA names a folder with its raw files (planetoid/ind.cora.*), else a made graph of
its size, whose labels can be learnt from the neighbours; and made molecules. Nothing is downloaded."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid


def arguments(epochs: int) -> argparse.Namespace:
    """What every example takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=epochs)
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    return given


def citations() -> tuple[Data, int]:
    """A graph with features, labels, ``train_mask`` and ``test_mask``, and the number of classes."""
    folder = Path(os.environ.get("GNNFAST_DATA", ".")) / "planetoid"
    if not (folder / "ind.cora.graph").is_file():
        return _made(nodes=2_708, edges=10_556, features=1_433, classes=7), 7
    with tempfile.TemporaryDirectory() as root:  # PyG writes beside the raw files
        raw = Path(root) / "Cora" / "raw"
        raw.mkdir(parents=True)
        for file in folder.glob("ind.cora.*"):
            shutil.copy(file, raw)
        return Planetoid(root, "Cora")[0], 7


def _made(nodes: int, edges: int, features: int, classes: int) -> Data:
    random = torch.Generator().manual_seed(0)
    y = torch.arange(nodes) % classes
    src, dst = torch.randint(nodes, (2, edges), generator=random)
    alike = torch.rand(edges, generator=random) < 0.8  # most neighbours are of one class
    dst = torch.where(alike, (dst - dst % classes + src % classes) % nodes, dst)
    centre = torch.rand(classes, features, generator=random)
    x = (torch.rand(nodes, features, generator=random) < 0.02 * centre[y]).float()
    train = torch.rand(nodes, generator=random) < 0.1
    edge_index = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
    return Data(x=x, edge_index=edge_index, y=y, train_mask=train, test_mask=~train)


def molecules(count: int) -> list[Data]:
    """Small made molecules: a chain of atoms with rings; the label says whether there are many."""
    random = torch.Generator().manual_seed(0)
    made = []
    for nth in range(count):
        atoms = int(torch.randint(12, 30, (1,), generator=random))
        chain = torch.stack([torch.arange(atoms - 1), torch.arange(1, atoms)])
        begin = torch.randint(0, atoms - 6, (6 if nth % 2 else 2,), generator=random)
        rings = torch.stack([begin, begin + 5])
        edges = torch.cat([chain, rings], 1)
        x = torch.nn.functional.one_hot(torch.randint(0, 8, (atoms,), generator=random), 8).float()
        made.append(Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=torch.tensor([nth % 2])))
    return made
