"""What a user changes of a layer after it was made or called: PyG's own code says what it means, and whether anything."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import same, without
from torch.nn.utils import parametrizations, parametrize

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from torch_geometric.nn import aggr

N, E, F = 60, 900, 16
generator = torch.Generator().manual_seed(0)
KEYS = torch.randperm(N * N, generator=generator)[:E]
EDGES, X = torch.stack((KEYS // N, KEYS % N)), torch.randn(N, F, generator=generator, dtype=torch.float64)
WEIGHT, TYPES = torch.rand(E, generator=generator, dtype=torch.float64), torch.randint(0, 4, (E,), generator=generator)
ATTR, WIDE = (torch.randn(E, width, generator=generator, dtype=torch.float64) for width in (5, 40))


@pytest.fixture(autouse=True)
def served():
    """Graphs of this size, too."""
    with gnnfast.override(kernel="gar"):
        yield


def on(device, *tensors):
    return tuple(t.to(device) for t in tensors)


def warm(make, arguments, device):
    torch.manual_seed(0)
    layer = make().double().to(device)
    for _ in range(3):
        layer(*arguments)
    return layer


OWN = {
    "SGConv, one hop": (lambda: nn.SGConv(F, F), ("normalize", "improved", "_cached_edge_index")),
    "SGConv": (lambda: nn.SGConv(4 * F, 4, K=2), ("normalize", "improved")),
    "SSGConv": (lambda: nn.SSGConv(F, F, 0.1), ("normalize", "improved")),
    "MixHopConv": (lambda: nn.MixHopConv(F, F), ("normalize", "improved")),
    "TAGConv": (lambda: nn.TAGConv(F, F), ("add_self_loops", "improved")),
    "LGConv": (lambda: nn.LGConv(), ("add_self_loops", "improved")),
    "APPNP": (lambda: nn.APPNP(3, 0.1), ("improved",)),
    "GCN2Conv": (lambda: nn.GCN2Conv(F, 0.1), ("improved",)),
    "FAConv": (lambda: nn.FAConv(F), ("improved",)),
    "ARMAConv": (lambda: nn.ARMAConv(F, F), ("normalize", "add_self_loops")),
    "TransformerConv": (lambda: nn.TransformerConv(F, F), ("add_self_loops",)),
}
VALUES = {"normalize": False, "improved": True, "add_self_loops": True, "_cached_edge_index": (EDGES[:, :50], WEIGHT[:50])}


# A product with a matrix of three dimensions is none of torch's; FAConv takes weights only where it does not normalise.
GIVEN = [
    (name, matrix) for name in OWN for matrix in (False, True) if (name, matrix) not in (("ARMAConv", True), ("FAConv", False))
]


@pytest.mark.parametrize("of_class", [False, True])
@pytest.mark.parametrize(("name", "matrix"), GIVEN)
def test_options_that_a_layer_has_not_mean_nothing(name, matrix, of_class, device):
    make, options = OWN[name]
    edge_index, weight, x = on(device, EDGES, WEIGHT, X)
    if name == "SGConv":
        x = x.repeat(1, 4)
    given = (torch.sparse_coo_tensor(edge_index, weight, (N, N)).coalesce().to_sparse_csr(),) if matrix else (edge_index, weight)
    given = given[:1] if name == "TransformerConv" else given
    arguments = (x, x, *given) if name in ("GCN2Conv", "FAConv") else (x, *given)
    for option in options:
        layer = warm(make, arguments, device)
        if of_class:
            layer.__class__ = type(type(layer).__name__, (type(layer),), {})
        setattr(layer, option, tuple(t.to(device) for t in VALUES[option]) if type(VALUES[option]) is tuple else VALUES[option])
        for _ in range(2):
            same(lambda: [layer(*arguments).detach()])  # noqa: B023


@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize(
    "make",
    [lambda: nn.GraphConv(F, F), nn.LGConv, nn.SimpleConv, lambda: nn.HypergraphConv(F, F), lambda: nn.TransformerConv(F, F)],
)
def test_aggregations_that_are_attributes(make, where, device, monkeypatch):
    arguments = on(device, X, EDGES)
    layer = warm(make, arguments, device)
    owner = type(layer) if where == "class" else layer
    with monkeypatch.context() as patch:
        if where == "class":
            patch.setattr(owner, "aggr_module", aggr.MaxAggregation(), raising=False)
        else:
            patch.setitem(vars(owner), "aggr_module", aggr.MaxAggregation())
        same(lambda: [layer(*arguments).detach()])
    same(lambda: [layer(*arguments).detach()])


def test_aggregations_of_relations_that_are_attributes(device):
    arguments = on(device, X, EDGES, TYPES)
    layer = warm(lambda: nn.RGCNConv(F, F, 4), arguments, device)
    vars(layer)["aggr_module"] = aggr.MaxAggregation()
    same(lambda: [layer(*arguments).detach()])


class Dropped(torch.nn.Module):
    def forward(self, weight):
        return torch.nn.functional.dropout(weight, 0.5, self.training)


@pytest.mark.parametrize("make", [Dropped, None])
def test_parametrised_matrices_of_types(make, device):
    """PyG asks for them once for each type."""
    types_of_nodes = torch.arange(N, device=device) % 3
    x, edge_index, types, attr = on(device, X, EDGES, TYPES, ATTR)

    def step():
        torch.manual_seed(0)
        layer = nn.HEATConv(F, F, 3, 4, 4, 5, 6).double().to(device)
        if make is None:
            parametrizations.spectral_norm(layer.hetero_lin, "weight")
        else:
            parametrize.register_parametrization(layer.hetero_lin, "weight", make())
        out = layer(x, edge_index, types_of_nodes, types, attr)
        return [out.detach(), torch.rand(3, device=device), *(buffer.double() for buffer in layer.buffers())]

    same(step)


def test_hooks_on_an_activation_see_all_edges(device):
    arguments = on(device, X, EDGES, TYPES)
    layer = warm(lambda: nn.RGATConv(F, F, 4, mod="scaled"), arguments, device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.3, 0.3)
    layer.activation.register_forward_hook(lambda module, given, out: out / (1 + out.mean(0)))
    same(lambda: [layer(*arguments).detach()])


OF_RELATIONS = {
    "RGCNConv": lambda: nn.RGCNConv(F, F, 4),
    "FastRGCNConv": lambda: nn.FastRGCNConv(F, F, 4),
    "RGATConv": lambda: nn.RGATConv(F, F, 4),
}


def _grow(layer):
    layer.weight = torch.nn.Parameter(torch.cat([layer.weight.detach(), torch.ones_like(layer.weight[:2])]))


def _set(name, value):
    return lambda layer: setattr(layer, name, value)


CHANGES = {
    "more matrices": _grow,
    "fewer relations": _set("num_relations", 5),
    "blocks that are none": _set("num_blocks", 2),
    "another width": _set("out_channels", F + 1),
    "no activation": lambda layer: vars(layer)["_modules"].pop("activation", None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OF_RELATIONS)
def test_other_matrices_than_relations(name, change, device):
    arguments = on(device, X, EDGES, TYPES)
    layer = warm(OF_RELATIONS[name], arguments, device)
    CHANGES[change](layer)
    try:
        expected = without(lambda: layer(*arguments))
    except Exception as error:
        with pytest.raises(type(error)):
            layer(*arguments)
    else:
        torch.testing.assert_close(layer(*arguments), expected)


@pytest.mark.parametrize("part", ["edge_encoder", "pre_nns.0.0"])
def test_biases_of_one_element(part, device):
    degrees = torch.bincount(torch.bincount(EDGES[1], minlength=N))
    arguments = on(device, X, EDGES, ATTR)
    layer = warm(lambda: nn.PNAConv(F, F, ["mean", "std"], ["identity"], degrees, edge_dim=5), arguments, device)
    lin = layer.get_submodule(part)
    lin.bias = torch.nn.Parameter(lin.bias.detach()[:1].clone())
    same(lambda: [layer(*arguments).detach()])


@pytest.mark.parametrize("change", [_set("lin", None), lambda layer: setattr(layer.lin, "weight", None)])
def test_a_hypergraph_layer_without_its_product(change, device):
    arguments = on(device, X, EDGES)
    layer = warm(lambda: nn.HypergraphConv(F, F), arguments, device)
    change(layer)
    for run in (without, lambda step: step()):
        with pytest.raises(TypeError):
            run(lambda: layer(*arguments))


class Joined(nn.MessagePassing):
    def __init__(self):
        super().__init__("sum")
        self.lin = torch.nn.Linear(2 * F + 40, F)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        return torch.sigmoid(self.lin(torch.cat([x_i, x_j, edge_attr], -1)))


WRITTEN = {
    "FastRGCNConv": (OF_RELATIONS["FastRGCNConv"], TYPES, False, lambda layer, given: layer.weight),
    "RGATConv": (OF_RELATIONS["RGATConv"], TYPES, False, lambda layer, given: layer.weight),
    "PNAConv": (
        lambda: nn.PNAConv(F, F, ["mean", "std"], ["identity"], torch.ones(40, dtype=torch.int64), edge_dim=5),
        ATTR,
        False,
        lambda layer, given: layer.edge_encoder.bias,
    ),
    "ResGatedGraphConv": (lambda: nn.ResGatedGraphConv(F, F, edge_dim=5), ATTR, True, lambda layer, given: given),
    "ResGatedGraphConv, wide": (lambda: nn.ResGatedGraphConv(F, F, edge_dim=40), WIDE, False, lambda layer, given: given),
    "CGConv": (lambda: nn.CGConv(F, 40), WIDE, False, lambda layer, given: given),
    "a user's": (Joined, WIDE, False, lambda layer, given: given),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_writes_before_the_backward_pass(name, device):
    """Into what PyG has made copies of."""
    make, of_edges, leaf, what = WRITTEN[name]
    edge_index, x = on(device, EDGES, X)
    layer = warm(make, (x, edge_index, of_edges.to(device)), device)

    def step():
        changed, given, features = copy.deepcopy(layer), of_edges.to(device, copy=True), x.clone().requires_grad_()
        if leaf:
            given.requires_grad_()
        out = changed(features, edge_index, given)
        with torch.no_grad():
            what(changed, given).mul_(0.5)
        return [out.detach(), *torch.autograd.grad(out.pow(2).sum(), [features, *changed.parameters()], allow_unused=True)]

    same(step, tolerance=1e-8)


BATCHED = {
    "GINEConv": (lambda: nn.GINEConv(torch.nn.Linear(F, F), edge_dim=5), (ATTR,)),
    "CGConv": (lambda: nn.CGConv(F, 5), (ATTR,)),
    "ResGatedGraphConv": (lambda: nn.ResGatedGraphConv(F, F), ()),
    "FiLMConv": (lambda: nn.FiLMConv(F, F), ()),
    "LEConv": (lambda: nn.LEConv(F, F), ()),
    "EdgeConv": (lambda: nn.EdgeConv(torch.nn.Sequential(torch.nn.Linear(2 * F, F))), ()),
    "EdgeConv, means": (lambda: nn.EdgeConv(torch.nn.Sequential(torch.nn.Linear(2 * F, F), torch.nn.ReLU()), aggr="mean"), ()),
    "NNConv": (lambda: nn.NNConv(F, 4, torch.nn.Linear(5, 4 * F)), (ATTR,)),
    "GENConv": (lambda: nn.GENConv(F, F, aggr="powermean", edge_dim=5), (ATTR,)),
    "GATConv": (lambda: nn.GATConv(F, F), ()),
    "PNAConv": (lambda: nn.PNAConv(F, F, ["mean", "std"], ["identity"], torch.ones(40, dtype=torch.int64)), ()),
    "GraphConv, weights": (lambda: nn.GraphConv(F, F), (WEIGHT,)),
}


@pytest.mark.parametrize("bounded", ["auto", "on"])
@pytest.mark.parametrize("name", BATCHED)
def test_batched_gradients(name, bounded, device):
    """As ``torch.autograd.functional.jacobian(vectorize=True)`` asks for them."""
    make, of_edges = BATCHED[name]
    edge_index, x, *of_edges = on(device, EDGES, X, *of_edges)
    layer, x = warm(make, (x, edge_index, *of_edges), device), x.clone().requires_grad_()

    def step():
        out = layer(x, edge_index, *of_edges)
        grads = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype).to(device)
        leaves = [x, *layer.parameters()]
        found = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, allow_unused=True)
        return [None if t is None else t.contiguous() for t in found]

    with gnnfast.override(bounded=bounded):
        same(step, tolerance=1e-7)


def test_no_values_at_all():
    layer = nn.GINEConv(torch.nn.Linear(F, F), edge_dim=5).to("meta")
    x, edge_index, attr = torch.empty(N, F, device="meta"), EDGES.to("meta"), torch.empty(E, 5, device="meta")
    assert layer(x, edge_index, attr).shape == (N, F)
