"""A graph, and models of two layers, that whole ways of working with PyG are tried with."""

from __future__ import annotations

import functools

import torch
from torch_geometric import nn
from torch_geometric.data import Data

N, E, F, CLASSES = 120, 900, 8, 3


def graph(device="cpu", dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    return Data(
        x=torch.randn(N, F, generator=g, dtype=dtype),
        edge_index=torch.randint(N, (2, E), generator=g),
        y=torch.randint(CLASSES, (N,), generator=g),
    ).to(device)


DEGREES = torch.bincount(torch.arange(40) % 12)
# name -> a model of two layers, that takes what else is given
MODELS = {
    "GCN": functools.partial(nn.GCN, F, 16, 2, CLASSES),
    "GraphSAGE": functools.partial(nn.GraphSAGE, F, 16, 2, CLASSES),
    "GIN": functools.partial(nn.GIN, F, 16, 2, CLASSES),
    "GAT": functools.partial(nn.GAT, F, 16, 2, CLASSES, heads=2),
    "GAT, v2": functools.partial(nn.GAT, F, 16, 2, CLASSES, heads=2, v2=True),
    "PNA": functools.partial(
        nn.PNA, F, 16, 2, CLASSES, aggregators=["mean", "max", "std"], scalers=["identity", "amplification"], deg=DEGREES
    ),
    "EdgeCNN": functools.partial(nn.EdgeCNN, F, 16, 2, CLASSES),
}


def state(model):
    """Parameters and buffers of a model."""
    return [t.detach().clone() for t in model.state_dict().values() if t.is_floating_point()]


def gradients(out, model, *leaves):
    """A result with the gradients of all that led to it."""
    given = [*leaves, *model.parameters()]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given, allow_unused=True)]


def fit(model, batches, loss_of, epochs=2, after=lambda: None):
    """The losses of some epochs and the model after them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            after()
            losses.append(loss.detach())
    return [*losses, *state(model)]
