"""What layers keep for the backward pass, and the nodes of autograd that keep it."""

from __future__ import annotations

import pytest
import torch
from comparison import nodes_behind, same
from graphs import GRAPHS

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn

F = 8


@pytest.mark.parametrize("trained", ["all", "root", "neighbours", "bias"])
@pytest.mark.parametrize("make", [nn.SAGEConv, nn.GraphConv])
def test_above_constant_features_nodes_of_autograd_are_torchs(make, trained, device):
    """Of a model's first layer: none is in Python, and nothing else may be kept for a gradient than PyG keeps."""
    torch.manual_seed(0)
    layer = make(F, 5).double().to(device)
    lin, root = (layer.lin_l, layer.lin_r) if make is nn.SAGEConv else (layer.lin_rel, layer.lin_root)
    parts = {"root": [root.weight], "neighbours": [lin.weight], "bias": [lin.bias], "all": [*layer.parameters()]}[trained]
    for parameter in layer.parameters():
        parameter.requires_grad_(any(parameter is part for part in parts))
    edge_index, nodes, _ = GRAPHS["random"]()
    edge_index, x = edge_index.to(device), torch.randn(nodes, F, dtype=torch.float64, device=device)

    def step():
        loss = layer(x, edge_index).pow(3).sum()
        grads = torch.autograd.grad(loss, parts, create_graph=True)
        return [loss.detach(), *grads, *torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), parts, retain_graph=True)]

    for _ in range(2):
        same(step)
        nodes = nodes_behind(layer(x, edge_index))
        assert nodes and all(name.endswith("0") or name == "AccumulateGrad" for name in nodes), nodes
    out = layer(x, edge_index)
    x.add_(1)  # of which PyG keeps what its root multiplies
    if trained in ("all", "root"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    else:
        out.sum().backward()


@pytest.mark.parametrize("what", ["the root", "features", "sparse features"])
@pytest.mark.parametrize("make", [nn.SAGEConv, nn.GraphConv])
def test_what_pyg_does_not_keep_may_be_written_before_the_backward_pass(make, what, device):
    torch.manual_seed(0)
    nodes, edges, width = (30, 200, F) if what == "the root" else (2100, 6000, 130)
    edge_index = torch.randint(0, nodes, (2, edges), device=device)
    given = torch.randn(nodes, width, dtype=torch.float64, device=device)
    if what == "sparse features":
        given *= torch.rand(nodes, width, device=device) < 0.01
    layer = make((width, width) if what != "features" else width, 5).double().to(device)
    root = layer.lin_r if make is nn.SAGEConv else layer.lin_root
    root.weight.requires_grad_(what != "features")

    def step():
        x, weight = given.clone().requires_grad_(what == "the root"), root.weight.detach().clone()
        operands = x if what == "features" else (x, given.clone())
        out = layer(operands, edge_index)
        if what == "sparse features":  # they are compressed once they are known
            for _ in range(4):
                out = layer(operands, edge_index)
        with torch.no_grad():
            (root.weight if what == "the root" else x).mul_(2)
        trained = [x] if what == "the root" else [p for p in layer.parameters() if p.requires_grad]
        found = torch.autograd.grad(out.sin().sum(), trained)
        root.weight.data = weight
        return found

    same(step)
