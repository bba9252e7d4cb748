"""The graphs of the demo: Cora and Amazon-Computers where their files are at hand (GNNFAST_DATA), else made ones of their size with
planted classes. Nothing is downloaded."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch_geometric.data import Data

# nodes, edges, features, classes
SIZES = {"cora": (2_708, 10_556, 1_433, 7), "computers": (13_752, 491_722, 767, 10), "large": (200_000, 20_000_000, 128, 40)}
FILES = {"cora": "planetoid/ind.cora.graph", "computers": "npz/amazon_electronics_computers.npz"}


def load(name):
    """A graph with features, labels and masks, its number of classes, and where it is from."""
    folder = Path(os.environ.get("GNNFAST_DATA", "."))
    if name in FILES and (folder / FILES[name]).is_file():
        data, classes, source = real(name, folder), SIZES[name][3], "real"
        data.x = data.x / data.x.sum(1, keepdim=True).clamp(min=1)
    else:
        data, classes, source = made(*SIZES[name]), SIZES[name][3], "made, planted classes"
    if "train_mask" not in data:
        chosen = torch.rand(data.num_nodes, generator=torch.Generator().manual_seed(0))
        data.train_mask, data.test_mask = chosen < 0.1, chosen > 0.5
    return data, classes, source


def real(name, folder):
    from torch_geometric.datasets import Amazon, Planetoid

    root = Path(tempfile.mkdtemp(prefix="gnnfast-demo-"))
    raw = root / name.capitalize() / "raw"
    raw.mkdir(parents=True)
    try:
        for file in folder.glob("planetoid/ind.cora.*") if name == "cora" else [folder / FILES[name]]:
            shutil.copy(file, raw)
        dataset = Planetoid(str(root), "Cora") if name == "cora" else Amazon(str(root), "Computers")
        return dataset[0]
    finally:
        shutil.rmtree(root)


def made(nodes, edges, features, classes):
    """Three of ten edges, and by chance some more, join nodes of one class, whose features lie around its centre."""
    random = torch.Generator().manual_seed(0)
    y = torch.randint(0, classes, (nodes,), generator=random)
    of_class = y.argsort()
    first = torch.cat([torch.zeros(1, dtype=torch.long), y.bincount(minlength=classes).cumsum(0)])
    dst = torch.randint(0, nodes, (edges,), generator=random)
    size = (first[1:] - first[:-1])[y[dst]]
    same = of_class[first[y[dst]] + (torch.rand(edges, generator=random) * size).long()]
    src = torch.where(torch.rand(edges, generator=random) < 0.3, same, torch.randint(0, nodes, (edges,), generator=random))
    centre = torch.randn(classes, features, generator=random)
    x = 0.05 * centre[y] + torch.randn(nodes, features, generator=random)
    return Data(x=x, edge_index=torch.stack([src, dst]), y=y)
