"""Training runs with and without gnnfast: same seeds, same losses, same parameters."""

from __future__ import annotations

import shutil

import pytest
import torch

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric.datasets import KarateClub, Planetoid
from torch_geometric.nn import GCN, GIN, GraphSAGE


@pytest.fixture(params=["karate", "cora"])
def data(request, tmp_path):
    if request.param == "karate":
        return KarateClub()[0]
    folder = request.getfixturevalue("data_folder") / "planetoid"
    raw = tmp_path / "Cora" / "raw"
    raw.mkdir(parents=True)
    for file in folder.glob("ind.cora.*"):
        shutil.copy(file, raw)
    return Planetoid(str(tmp_path), "Cora")[0]


def train(model_class, data, device):
    torch.manual_seed(3)
    model = model_class(data.num_features, 16, 2, int(data.y.max()) + 1, dropout=0.0).to(device, torch.float64)
    data = data.clone().to(device)
    data.x = data.x.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(50 if data.num_nodes < 100 else 15):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)[data.train_mask]
        loss = torch.nn.functional.cross_entropy(out, data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("model_class", [GCN, GraphSAGE, GIN])
def test_losses_and_parameters(model_class, data, device):
    losses, parameters = train(model_class, data, device)
    report = gnnfast.report()
    assert report.kernels and not report.fallbacks
    gnnfast.disable()
    try:
        expected_losses, expected_parameters = train(model_class, data, device)
    finally:
        gnnfast.enable()
    assert max(abs(a - b) for a, b in zip(losses, expected_losses)) < 1e-4
    assert losses[-1] < losses[0]
    for a, b in zip(parameters, expected_parameters):
        assert torch.allclose(a, b, atol=1e-4)
