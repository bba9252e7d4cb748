"""Nothing is aliased, whatever is written into after a call: defects found from outside, each in the form it was found in."""

from __future__ import annotations

import copy

import pytest
import torch
from graphs import relative_error
from promises import EDGES, NODES, F, both, same

import gnnfast
from gnnfast.cache import cache

pytest.importorskip("torch_geometric", reason="PyG is not installed")
import torch_geometric.transforms as T
from torch_geometric import nn
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from user_messages import Plain, Weighted


@pytest.mark.parametrize("weighted", [False, True])
def test_results_of_gcn_norm_are_the_users(weighted, edge_index, device):
    w = torch.rand(EDGES, device=device) if weighted else None
    data = Data(edge_index=edge_index, edge_weight=w, num_nodes=NODES)
    first, second = T.GCNNorm()(copy.copy(data)), T.GCNNorm()(copy.copy(data))
    expected = second.edge_weight.clone()
    first.edge_weight.mul_(3)
    first.edge_index.zero_()
    assert torch.equal(second.edge_weight, expected) and second.edge_index.any()
    gcn_norm(edge_index, w, NODES)[1].requires_grad_()
    index, weight = gcn_norm(edge_index, w, NODES)
    assert not weight.requires_grad and torch.equal(weight, expected) and torch.equal(index, second.edge_index)


@pytest.mark.parametrize("make", [lambda: nn.GCNConv(F, 4, cached=True), lambda: nn.APPNP(2, 0.1, cached=True)])
def test_cached_layers_own_what_they_cache(make, edge_index, x, device):
    layers = [make().to(device, torch.float64) for _ in range(2)]
    cache.clear()
    for layer in layers:
        layer(x, edge_index)
    expected = layers[1](x, edge_index)
    layers[0]._cached_edge_index[1].zero_()
    layers[0]._cached_edge_index[0].zero_()
    assert relative_error(layers[1](x, edge_index), expected) < 1e-12
    assert relative_error(layers[1](x, edge_index), both(lambda: layers[1](x, edge_index))[1]) < 1e-10


def test_user_code_within_a_layer_gets_copies(edge_index, x, device):
    """A subclass that keeps what it is given, and hooks, see tensors of their own."""

    class Keeps(nn.GCNConv):
        def message(self, x_j, edge_weight):
            self.kept = edge_weight
            return edge_weight.view(-1, 1) * x_j

    conv, plain = Keeps(F, 4).to(device, torch.float64), nn.GCNConv(F, 4).to(device, torch.float64)
    expected = plain(x, edge_index)
    conv(x, edge_index)
    conv.kept.zero_()

    def write(module, inputs):
        inputs[0]["edge_weight"].mul_(2)

    handle = plain.register_message_forward_pre_hook(write)
    plain(x, edge_index)
    handle.remove()
    assert relative_error(plain(x, edge_index), expected) < 1e-12


def test_an_update_that_writes_into_the_weights(edge_index, x):
    """update() sees the normalised weights: such a layer gets its own."""
    from torch_geometric.typing import OptTensor

    class Doubles(nn.LGConv):
        def update(self, inputs: torch.Tensor, edge_weight: OptTensor) -> torch.Tensor:
            if edge_weight is not None:
                edge_weight.mul_(2)
            return inputs

    layer = Doubles()
    for _ in range(3):
        same(lambda: layer(x, edge_index))


def test_hooks_within_a_layer_that_does_not_normalise(edge_index, x, device):
    def norm():
        return gcn_norm(edge_index, None, NODES, False, True, "source_to_target", x.dtype)

    layer, expected = nn.TAGConv(F, 4, K=1, normalize=False).to(device, torch.float64), norm()[1].clone()

    def write(module, inputs, out):
        norm()[1].mul_(2)

    layer.lins[0].register_forward_hook(write)
    layer(x, edge_index)
    assert relative_error(norm()[1], expected) < 1e-12


# name -> a layer, and whether it takes weights
AFTER = {
    "weighted": lambda: (Weighted(), True),
    "max": lambda: (Plain(aggr="max"), False),
    "weighted min": lambda: (Weighted(aggr="min"), True),
    "GraphConv max": lambda: (nn.GraphConv(F, F, aggr="max"), True),
    "SGConv": lambda: (nn.SGConv(F, 1), False),
    "SAGEConv alone": lambda: (nn.SAGEConv(F, 1, root_weight=False), False),
}


@pytest.mark.parametrize("kernel", ["gas", "gar"])
@pytest.mark.parametrize("change", ["relu_", "add_"])
@pytest.mark.parametrize("name", AFTER)
def test_features_written_after_the_call(name, change, kernel, edge_index, x, device, monkeypatch):
    monkeypatch.setattr("gnnfast.dispatch.select.FEWEST_SAVED", {"cpu": -1, "cuda": -1})  # layers multiply first
    (layer, weighted), w = AFTER[name](), torch.rand(EDGES, device=device, dtype=torch.float64, requires_grad=True)
    layer, leaf = layer.to(device, torch.float64), x.clone().requires_grad_()

    def run():
        with gnnfast.override(kernel=kernel):
            h = leaf * 1
            out = layer(h, edge_index, *([w] if weighted else [])).expand(-1, F)
            h.relu_() if change == "relu_" else h.add_(out)
            grads = torch.autograd.grad((out * out.detach()).sum() + h.sum(), (leaf, w), allow_unused=True)
            return torch.cat([g.flatten() for g in grads if g is not None])

    same(run)


@pytest.mark.parametrize("kernel", ["gas", "gar"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_weights_written_after_the_call(reduce, kernel, edge_index, x, device):
    """Where the features require no gradient PyG keeps no weights."""
    layer, leaf = Weighted(aggr=reduce), torch.rand(EDGES, device=device, dtype=torch.float64, requires_grad=True)

    def run():
        with gnnfast.override(kernel=kernel):
            w = leaf * 1
            out = layer(x, edge_index, w)
            w.mul_(2)
            return torch.autograd.grad(out.sum(), leaf)[0]

    same(run)


def test_emptied_features_are_left_to_pyg(edge_index, x):
    layer = Plain()
    layer(x, edge_index)
    x.untyped_storage().resize_(0)
    with gnnfast.override(strict=True), pytest.raises(gnnfast.FallbackError, match="the storage of x was emptied"):
        layer(x, edge_index)
