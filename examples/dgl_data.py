"""The graphs of these examples: Cora where the folder that GNNFAST_DATA names has its raw files, else a made graph of its size with
planted classes; and a made heterogeneous graph."""

import argparse
import os
import pickle
from pathlib import Path

import dgl
import numpy as np
import torch


def chosen_device(about):
    """What every example takes."""
    parser = argparse.ArgumentParser(description=about)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda"), default=found, help=f"{found} if not given")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    return torch.device(device)


def cora():
    """A graph with self loops and ``feat``, ``label``, ``train_mask`` and ``test_mask`` of its nodes, and the number of classes."""
    folder = Path(os.environ.get("GNNFAST_DATA", "")) / "planetoid"
    return _read(folder) if (folder / "ind.cora.graph").is_file() else made()


def made(nodes=2708, classes=7, edges=5278, words=1433):
    """Nodes of a class are linked four times in five, and have words in common."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, classes, (nodes,), generator=generator)
    src = torch.randint(0, nodes, (edges,), generator=generator)
    order, count = label.argsort(), label.bincount(minlength=classes)
    begin = count.cumsum(0) - count
    same = order[begin[label[src]] + (torch.rand(edges, generator=generator) * count[label[src]]).long()]
    dst = torch.where(torch.rand(edges, generator=generator) < 0.8, same, torch.randint(0, nodes, (edges,), generator=generator))
    share = torch.full((classes, words), 0.01)
    for c in range(classes):
        share[c, c * words // classes : (c + 1) * words // classes] = 0.03
    feat = torch.bernoulli(share[label], generator=generator)
    train = torch.zeros(nodes, dtype=torch.bool)
    for c in range(classes):
        train[(label == c).nonzero()[:20]] = True
    return _graph(src, dst, feat, label, train, ~train), classes


def _read(folder):
    def load(part):
        with open(folder / f"ind.cora.{part}", "rb") as file:
            return pickle.load(file, encoding="latin1")

    neighbours, test = load("graph"), np.loadtxt(folder / "ind.cora.test.index", dtype=int)
    order = np.arange(len(neighbours))
    order[test] = np.sort(test)  # rows of the test part are listed by this index
    feat = np.concatenate([load("allx").toarray(), load("tx").toarray()])[order]
    label = np.concatenate([load("ally"), load("ty")])[order].argmax(1)
    edges = torch.tensor(sorted({(s, d) for s, ends in neighbours.items() for d in ends if s < d}))
    train, tested = (torch.zeros(len(neighbours), dtype=torch.bool) for _ in range(2))
    train[: len(load("y"))], tested[test] = True, True
    return _graph(edges[:, 0], edges[:, 1], torch.from_numpy(feat).float(), torch.from_numpy(label), train, tested), 7


def _graph(src, dst, feat, label, train, test):
    g = dgl.add_self_loop(dgl.to_simple(dgl.to_bidirected(dgl.graph((src, dst), num_nodes=label.numel()))))
    g.ndata["feat"] = feat / feat.sum(1, keepdim=True).clamp(min=1)
    g.ndata["label"], g.ndata["train_mask"], g.ndata["test_mask"] = label, train, test
    return g


def library(papers=2000, authors=800, venues=20, classes=4):
    """Papers of several fields, their authors, who mostly stay in one field, and their venues. Only papers have labels."""
    generator = torch.Generator().manual_seed(0)

    def random(high, count):
        return torch.randint(0, high, (count,), generator=generator)

    field, of_author, of_venue = random(classes, papers), random(classes, authors), torch.arange(venues) % classes

    def partners(fields, wanted):
        """For each of ``wanted`` one of those with that field, or now and then any."""
        order, count = fields.argsort(), fields.bincount(minlength=classes)
        begin = count.cumsum(0) - count
        chosen = order[begin[wanted] + (torch.rand(wanted.numel(), generator=generator) * count[wanted]).long()]
        return torch.where(torch.rand(wanted.numel(), generator=generator) < 0.75, chosen, random(fields.numel(), wanted.numel()))

    paper = torch.arange(papers).repeat(3)
    author, venue = partners(of_author, field[paper]), partners(of_venue, field)
    cited = partners(field, field[paper])
    g = dgl.heterograph(
        {
            ("author", "writes", "paper"): (author, paper),
            ("paper", "written-by", "author"): (paper, author),
            ("paper", "cites", "paper"): (paper, cited),
            ("paper", "appears-in", "venue"): (torch.arange(papers), venue),
            ("venue", "has", "paper"): (venue, torch.arange(papers)),
        },
        {"paper": papers, "author": authors, "venue": venues},
    )
    for kind in g.ntypes:
        g.nodes[kind].data["feat"] = torch.randn(g.num_nodes(kind), 16, generator=generator)
    g.nodes["paper"].data["label"] = field
    g.nodes["paper"].data["train_mask"] = torch.arange(papers) < papers // 2
    return g, classes
