"""Layers over adjacency matrices of torch, in CSR and COO: as PyG computes them, whatever they do with a matrix."""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings

import pytest
import torch
from adjacencies import LAYERS, USERS, WHOLE, F, OfWeights, check, check_edges_are_let_go
from comparison import compare, same, without
from gnnfast.benchmarks import convs
from graphs import GRAPHS
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn
from torch_geometric.index import ptr2index
from torch_geometric.typing import OptPairTensor
from torch_geometric.utils import segment, spmm

import gnnfast
from gnnfast.dispatch import select
from gnnfast.dispatch.select import Small
from gnnfast.pyg import matrices, sparse

NORMALISING = ("GCNConv", "SGConv", "SSGConv", "TAGConv", "APPNP", "LGConv", "GCN2Conv", "MixHopConv", "ARMAConv")
LAYOUTS = {"csr": torch.sparse_csr, "coo": torch.sparse_coo}
IS_NEW = sparse._is_new
# PyG writes the propagate() of a class for the first layer of it in a process: after one of several reductions, which multiplies no
# matrix, none would. This runs before any test.
nn.SAGEConv(1, 1)
MATRICES = [("random", "csr", False), ("random", "csr", True), ("random", "coo", False)]
MATRICES += [(graph, "csr", False) for graph in ("no_edges", "self_loops_and_duplicates")]


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def matrix(name, device="cpu", layout=torch.sparse_csr, dtype=torch.float64, values=()):
    """One with as many rows as columns, and loops as the graph has them."""
    edge_index, num_src, num_dst = GRAPHS[name]()
    n = max(num_src, num_dst)
    generator = torch.Generator().manual_seed(0)
    of_edges = torch.rand(edge_index.shape[1], *values, generator=generator, dtype=dtype) + 0.5
    coo = torch.sparse_coo_tensor(edge_index.flip(0), of_edges, (n, n, *values)).coalesce()
    adj = coo if layout is torch.sparse_coo else torch.sparse_csr_tensor(*_compressed(coo), coo.values(), coo.shape)
    return adj.to(device)


def _compressed(coo):
    rows, cols = coo.indices()
    return torch.cat([torch.zeros(1, dtype=torch.int64), rows.bincount(minlength=coo.shape[0]).cumsum(0)]), cols


def features(adj, width=F):
    return torch.randn(adj.shape[1], width, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(adj.device)


def quietly(step):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return step()


@pytest.mark.parametrize(("graph", "layout", "few"), MATRICES, indirect=["layout"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, graph, few, layout, device, request):
    if few:
        request.getfixturevalue("small")
    torch.set_default_dtype(torch.float64)  # PyG makes values of it where it makes a matrix
    try:
        adj = matrix(graph, device, layout)
        torch.manual_seed(0)
        layer = convs.ALL[name](F, F)
        quietly(lambda: check(layer, features(adj), adj))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("make", [nn.GCNConv, nn.SGConv])
def test_loops_are_added_to_those_that_are_there(make, improved, layout, device):
    adj = matrix("self_loops_and_duplicates", device, layout)
    options = {"improved": improved} if make is nn.GCNConv else {"K": 2}
    report = quietly(lambda: compare(make(F, 5, **options).double(), features(adj), adj, tolerance=1e-9))
    assert any(place == "pyg gcn_norm" for place, *_ in report.kernels)


@pytest.mark.parametrize("name", WHOLE)
def test_layers_are_served_over_the_edges(name, layout, device):
    adj = matrix("random", device, layout)
    report = quietly(lambda: compare(WHOLE[name]().double(), features(adj), adj, tolerance=1e-9))
    assert {place for place, *_ in report.kernels} == {f"pyg {name}"} and not report.fallbacks


@pytest.mark.parametrize("name", WHOLE)
def test_elements_that_are_the_same(name, device):
    """Of which PyG makes one where it adds loops."""
    rowptr, col = torch.tensor([0, 3, 4, 4], device=device), torch.tensor([1, 1, 2, 0], device=device)
    adj = torch.sparse_csr_tensor(rowptr, col, torch.ones(4, device=device, dtype=torch.float64), (3, 3))
    compare(WHOLE[name]().double(), features(adj), adj, tolerance=1e-9)


@pytest.mark.parametrize("name", ["GCNConv", *WHOLE])
def test_values_are_read_in_each_call(name, device):
    """Nothing tells who writes into the tensor that they are."""
    coo = matrix("random", device, torch.sparse_coo)
    values, indices = torch.rand(coo._nnz(), dtype=torch.float64, device=device), [t.to(device) for t in _compressed(coo.cpu())]
    adj = torch.sparse_csr_tensor(*indices, values, coo.shape)
    layer, x = (WHOLE | {"GCNConv": lambda: nn.GCNConv(F, 5)})[name]().double().to(device), features(coo)
    for _ in range(3):
        same(lambda: [layer(x, adj)])
        values[::2] *= 3
        adj.values()[0] += 1


@pytest.mark.parametrize("name", ["GCNConv", "EdgeConv", *WHOLE])
def test_indices_that_change(name, layout, device):
    adj = matrix("random", device, layout)
    makes = WHOLE | {"GCNConv": lambda: nn.GCNConv(F, 5), "EdgeConv": lambda: nn.EdgeConv(torch.nn.Linear(2 * F, 5))}
    layer, x = makes[name]().double().to(device), features(adj)
    for _ in range(3):
        quietly(lambda: same(lambda: [layer(x, adj)]))
    cols = adj.col_indices() if layout is torch.sparse_csr else adj.indices()[1]
    rows = torch.arange(30, device=device).repeat_interleave(adj.crow_indices().diff()) if layout is torch.sparse_csr else None
    first = rows.bincount().argmax() if rows is not None else adj.indices()[0].bincount().argmax()
    of_row = (rows if rows is not None else adj.indices()[0]) == first
    cols[of_row] = torch.arange(int(of_row.sum()), device=device)
    for _ in range(3):
        quietly(lambda: same(lambda: [layer(x, adj)]))


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("values", [(), (3,)])
@pytest.mark.parametrize("name", USERS)
def test_users_layers(name, values, few, layout, device, request):
    if few:
        request.getfixturevalue("small")
    if values and layout is torch.sparse_csr and name != "features":
        pytest.skip("PyG takes the values of a matrix for features of edges alone")
    adj = matrix("random", device, layout, values=values)
    quietly(lambda: check(USERS[name](), features(adj), adj))


def test_given_weights_come_first(device):
    adj = matrix("random", device)
    weight = torch.rand(adj._nnz(), dtype=torch.float64, device=device)
    compare(OfWeights(), features(adj), adj, weight, tolerance=1e-9)
    compare(nn.LEConv(F, 5).double(), features(adj), adj, weight, tolerance=1e-9)


class Watched:
    """What the hooks of message passing are given."""

    def __init__(self, layer):
        self.seen = []
        for kind in ("propagate", "message_and_aggregate", "message"):
            getattr(layer, f"register_{kind}_forward_pre_hook")(self._note(kind))
            getattr(layer, f"register_{kind}_forward_hook")(self._note(f"{kind} after"))

    def _note(self, kind):
        def hook(_, inputs, *rest):
            first = inputs[0]
            self.seen.append((kind, first.layout if isinstance(first, torch.Tensor) else sorted(first)))

        return hook


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("make", [nn.SAGEConv, nn.GCNConv, nn.GraphConv, nn.GATConv, nn.LEConv])
def test_hooks(make, few, request):
    if few:
        request.getfixturevalue("small")
    adj = matrix("random")
    layer = make(F, 5).double()
    watched = Watched(layer)
    same(lambda: [layer(features(adj), adj)])
    count = len(watched.seen) // 2
    assert count and watched.seen[:count] == watched.seen[count:]


class Updated(nn.SAGEConv):
    def update(self, out: torch.Tensor, x: OptPairTensor) -> torch.Tensor:
        return out + x[1].sum()


class Checked(nn.SAGEConv):
    def _check_input(self, edge_index, size):
        self.checked = True
        return super()._check_input(edge_index, size)


class Multiplied(nn.SAGEConv):
    def message_and_aggregate(self, adj_t, x):
        return super().message_and_aggregate(adj_t, x) * 2


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("make", [Updated, Checked, Multiplied])
def test_functions_of_subclasses(make, few, device, request):
    if few:
        request.getfixturevalue("small")
    adj = matrix("random", device)
    layer = make(F, F).double()
    compare(layer, features(adj), adj, tolerance=1e-9)
    assert make is not Checked or layer.checked


@pytest.mark.parametrize("few", [False, True])
def test_functions_of_instances(few, request):
    if few:
        request.getfixturevalue("small")
    adj, layer = matrix("random"), nn.SAGEConv(F, 5).double()
    x = features(adj)
    before = layer(x, adj)
    layer.message_and_aggregate = lambda adj_t, x: torch.zeros_like(x[0])
    same(lambda: [layer(x, adj)])
    assert not torch.equal(layer(x, adj), before)
    del layer.message_and_aggregate
    layer.update = lambda out: out * 2
    same(lambda: [layer(x, adj)])


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("make", [nn.SAGEConv, nn.GraphConv, nn.GCNConv, nn.SimpleConv])
def test_replaced_products(make, few, aggr, device, request, monkeypatch):
    """Another ``spmm`` in a layer's module, or another code of what calls it: before a layer was called, and after."""
    if few:
        request.getfixturevalue("small")
    adj = matrix("random", device)
    x = features(adj)
    layer = (
        make(*(() if make is nn.SimpleConv else (F, 5)), aggr="sum" if adj.is_cuda and aggr == "max" else aggr).double().to(device)
    )

    def step():
        with torch.no_grad():
            return [layer(x, adj)]

    module, multiplies = sys.modules[make.__module__], make.message_and_aggregate
    if make is nn.GCNConv:
        with monkeypatch.context() as patch:
            patch.setattr(module, "gcn_norm", lambda adj, weight, *_: (adj * 2, weight))
            same(step)
    of_pyg = module.spmm
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(module, "spmm", lambda *args, **kwargs: 2 * of_pyg(*args, **kwargs))
            same(step)
        same(step)
        with monkeypatch.context() as patch:
            patch.setattr(multiplies, "__code__", _nothing.__code__ if make is not nn.GraphConv else _nothing_of_edges.__code__)
            same(step)
        same(step)


class PerDegree(nn.MessagePassing):
    def forward(self, x, adj):
        return self.propagate(adj, x=x)

    def message(self, x_j: torch.Tensor, index: torch.Tensor, ptr: torch.Tensor | None) -> torch.Tensor:
        return x_j if ptr is None else x_j / ptr.diff()[index].view(-1, 1)


class InSegments(nn.MessagePassing):
    def forward(self, x, adj):
        return self.propagate(adj, x=x)

    def message(self, x_j):
        return x_j.exp()

    def aggregate(self, inputs, index, ptr, dim_size):
        return inputs.sum() if ptr is None else torch.segment_reduce(inputs, "sum", offsets=ptr)


class Pointed(nn.aggr.Aggregation):
    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        return self.reduce(x, index, None, dim_size, dim) * (1 if ptr is None else 2)


class Exponential(nn.MessagePassing):
    def forward(self, x, adj):
        return self.propagate(adj, x=x)

    def message(self, x_j):
        return x_j.exp()


POINTED = {"message": PerDegree, "aggregate": InSegments, "aggregation": lambda: Exponential(aggr=Pointed())}
POINTED["part"] = lambda: Exponential(aggr=nn.aggr.MultiAggregation([Pointed(), nn.aggr.SumAggregation()]))


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", POINTED)
def test_pointers_of_a_matrix(name, few, layout, device, request):
    """PyG gives those of CSR to who asks for them."""
    if few:
        request.getfixturevalue("small")
    adj, layer = matrix("random", device, layout), POINTED[name]()
    x = features(adj)
    for _ in range(4):
        same(lambda: [layer(x, adj)], 1e-10)


@pytest.mark.parametrize("name", ["GCNConv", "LGConv", "TAGConv"])
def test_nodes_along_another_dimension(name, device):
    """Which PyG's product does not ask for."""
    adj = matrix("random", device)
    options = {"normalize": False} if name != "TAGConv" else {"normalize": False, "K": 2}
    layer = getattr(nn, name)(*(() if name == "LGConv" else (F, 5)), node_dim=-1, **options).double().to(device)
    check(layer, features(adj), adj)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", [*NORMALISING, "ClusterGCNConv", "SAGEConv", "GINConv"])
def test_another_reduction(name, few, device, request):
    """Of a matrix PyG takes the name of the reduction, whatever module a layer has for lists of edges."""
    if few:
        request.getfixturevalue("small")
    adj = matrix("random", device)
    x = features(adj)
    for aggr in ("mean", "sum") if adj.is_cuda else ("mean", "max", "sum"):
        layer = convs.ALL[name](F, F).double().to(device)
        layer.aggr = aggr
        check(layer, x, adj)
    layer = convs.ALL[name](F, F).double().to(device)
    layer.aggr_module = nn.aggr.MeanAggregation()
    check(layer, x, adj)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), [("GCNConv", {"normalize": False}), ("APPNP", {"dropout": 0.5}), ("GCNConv", {"improved": True})]
)
def test_options_that_change(name, options, few, device, request):
    if few:
        request.getfixturevalue("small")
    adj, layer = matrix("random", device), convs.ALL[name](F, F).double().to(device)
    x = features(adj)
    check(layer, x, adj)
    vars(layer).update(options)
    check(layer, x, adj)


@pytest.mark.parametrize("other", [None, [1], 1.0])
def test_products_with_what_is_no_tensor_raise_as_in_pyg(other, layout):
    for adj in (matrix("random", layout=layout), torch.eye(3, dtype=torch.float64)):
        with pytest.raises(Exception) as expected:
            without(lambda: quietly(lambda: spmm(adj, other)))  # noqa: B023
        with pytest.raises(expected.type):
            quietly(lambda: spmm(adj, other))  # noqa: B023


def _nothing(self, adj_t, x):
    return 0 * (x[0] if isinstance(x, tuple) else x)


def _nothing_of_edges(self, edge_index, x, edge_weight):
    return 0 * x[0]


@pytest.mark.parametrize("name", sorted(convs.NO_MATRIX))
def test_what_multiplies_with_no_matrix_raises_as_in_pyg(name, layout):
    torch.manual_seed(0)
    quietly(lambda: check(convs.ALL[name](F, F).double(), features(matrix("random")), matrix("random", layout=layout)))


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", [*WHOLE, "SAGEConv", "GCNConv", "LEConv", "PNAConv", "FAConv"])
def test_what_does_not_fit_raises_as_in_pyg(name, few, request):
    if few:
        request.getfixturevalue("small")
    adj, layer = matrix("random"), (convs.ALL[name](F, F) if name not in WHOLE else WHOLE[name]()).double()
    with pytest.raises((RuntimeError, ValueError, AssertionError, IndexError)) as expected:
        without(lambda: layer(features(adj)[:-1], adj))
    for _ in range(2):
        with pytest.raises(expected.type):
            layer(features(adj)[:-1], adj)
    getattr(layer, "conv", layer).flow = "target_to_source"
    with pytest.raises(ValueError, match='"target_to_source" is invalid'):
        layer(features(adj), adj)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (7, 4), (0,), (2, 2, 2)])
def test_what_no_product_takes_raises_as_in_pyg(shape, few, layout, request):
    if few:
        request.getfixturevalue("small")
    adj = matrix("random", layout=layout)
    for reduce in ("sum", "mean", "max"):
        other = torch.ones(shape, dtype=torch.float64)

        def multiplied():
            return spmm(adj, other, reduce)  # noqa: B023

        with pytest.raises(Exception) as expected:
            without(multiplied)
        with pytest.raises(expected.type):
            multiplied()


def test_explained_layers_are_not_fused():
    adj, layer = matrix("random"), nn.SAGEConv(F, 5).double()
    x = features(adj)
    layer.explain = True
    layer._explain, layer._edge_mask, layer._loop_mask = True, torch.rand(adj._nnz()), torch.ones(adj._nnz(), dtype=torch.bool)
    layer._apply_sigmoid = True
    check(layer, x, adj)


@pytest.mark.parametrize("x", [lambda x: (x,), lambda x: [x, x], lambda x: (x, None), lambda x: (x, x)])
@pytest.mark.parametrize("name", [*WHOLE, "PNAConv"])
def test_features_as_pairs(name, x, layout):
    adj = matrix("random", layout=layout)
    layer = (WHOLE | {"PNAConv": lambda: convs.ALL["PNAConv"](F, F)})[name]().double()
    given = x(features(adj))
    try:
        expected = without(lambda: layer(given, adj))
    except Exception as error:
        with pytest.raises(type(error)):
            layer(given, adj)
    else:
        torch.testing.assert_close(layer(given, adj), expected)


def test_gradients_of_values(layout):
    adj, layer = matrix("random", layout=layout), OfWeights()
    x = features(adj)

    def step():
        given = adj.clone().requires_grad_()
        out = layer(x, given)
        return [out.detach(), torch.autograd.grad(out.sum(), given)[0].to_dense()]

    quietly(lambda: same(step))


@pytest.mark.parametrize("make", [lambda: nn.GCNConv(F, 5), *WHOLE.values(), lambda: nn.EdgeConv(torch.nn.Linear(2 * F, 5))])
def test_checkpoints(make, device):
    layer = make().double().to(device)

    def step():
        adj = matrix("random", device)
        x = features(adj).requires_grad_()
        out = checkpoint(layer, x, adj, use_reentrant=False)
        return [out.detach(), torch.autograd.grad(out.pow(2).sum(), x)[0]]

    same(step)


def test_inference_mode(layout, device):
    adj, layer = matrix("random", device, layout), nn.GATConv(F, 5).double().to(device)
    x = features(adj)
    with torch.inference_mode():
        quietly(lambda: [same(lambda: [layer(x, adj)]) for _ in range(3)])
    quietly(lambda: compare(layer, x, adj, tolerance=1e-9))


def test_dropout_of_the_framework(device):
    adj, layer = matrix("random", device), nn.GATConv(F, 5, dropout=0.5).double().to(device)
    x = features(adj)

    def step():
        torch.manual_seed(0)
        return [layer(x, adj)]

    with gnnfast.override(dropout="framework"):
        same(step)


def test_edges_are_let_go_with_their_matrix(device):
    check_edges_are_let_go(lambda: matrix("random", device), features, device)


def test_a_gpu_meets_a_matrix(device, monkeypatch):
    """Only what is met again is worth a graph."""
    if device.type == "cpu":
        pytest.skip("a CPU makes a graph at once")
    monkeypatch.setattr(sparse, "_is_new", IS_NEW)
    monkeypatch.setattr(matrices, "FEW_ENTRIES", 1000)
    adj, twice = matrix("random", device), []
    x = features(adj).requires_grad_()
    for layer in (nn.SAGEConv(F, 5), nn.EdgeConv(torch.nn.Linear(2 * F, 5))):
        layer.double().to(device)
        for given in (adj, adj, adj.clone()):
            gnnfast.clear_report()
            same(lambda layer=layer, given=given: torch.autograd.grad(layer(x, given).sum(), x))
            twice.append(any(kernel == "PyG's own" for _, kernel, _ in gnnfast.report().kernels))
    assert twice == [True, False, True] * 2
    layer = nn.SAGEConv(F, 5).double().to(device)
    same(lambda: torch.autograd.grad(checkpoint(layer, x, adj.clone(), use_reentrant=False).sum(), x))


@pytest.fixture
def as_they_are(monkeypatch):
    monkeypatch.setitem(select.SMALL, "adjacency cuda", Small(-1, 1 << 20))
    return "pyg spmm", "over the matrix as it is, no message exists"


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("graph", ["random", "no_edges", "hub"])
def test_a_gpu_multiplies_small_matrices_as_they_are(graph, as_they_are, device):
    adj, place_and_why = matrix(graph, device), as_they_are
    x = features(adj)
    as_int32 = torch.sparse_csr_tensor(adj.crow_indices().int(), adj.col_indices().int(), adj.values(), adj.shape)
    with torch.no_grad():
        for given in (adj, as_int32, adj.clone()):
            for reduce in ("sum", "add", "mean"):
                found = same(lambda: [spmm(given, x, reduce)] * 2).kernels  # noqa: B023
                assert found == {(place_and_why[0], f"gar {'mean' if reduce == 'mean' else 'sum'}", place_and_why[1]): 1}
    for name in ("SAGEConv", "GraphConv", "GINConv", "SimpleConv"):
        layer = convs.ALL[name](F, F).double().to(device)
        with torch.inference_mode():
            same(lambda: [layer(x, adj)])  # noqa: B023
        assert gnnfast.report().fallbacks == {} and place_and_why[1] in {why for *_, why in gnnfast.report().kernels}


def _gin(**options):
    return nn.GINConv(torch.nn.Sequential(torch.nn.Linear(F, 5), torch.nn.ReLU()), **options)


PRODUCTS = {
    "SAGE": lambda: nn.SAGEConv(F, 5),
    "SAGE, sums": lambda: nn.SAGEConv(F, 5, aggr="sum", bias=False, normalize=True),
    "SAGE, no root": lambda: nn.SAGEConv(F, 5, root_weight=False),
    "GraphConv": lambda: nn.GraphConv(F, 5),
    "GraphConv, means": lambda: nn.GraphConv(F, 5, aggr="mean", bias=False),
    "GIN": _gin,
    "GIN, eps": lambda: _gin(eps=0.5, train_eps=True),
    "GIN, means": lambda: _gin(aggr="mean"),
}


def _changed_module(make):
    """A change to a layer."""

    def change(layer, patch):
        make(layer)

    return change


def _other_linear(layer):
    for name in ("lin_l", "lin_rel", "nn"):
        if name in layer._modules:
            setattr(layer, name, torch.nn.Sequential(getattr(layer, name), torch.nn.Tanh()))


def _hooked_linear(layer):
    for module in layer.modules():
        if isinstance(module, (nn.Linear, torch.nn.Linear)):
            module.register_forward_hook(lambda module, args, out: 2 * out)


def _linear_with_bias(layer):
    for name in ("lin_r", "lin_root"):
        if name in layer._modules:
            setattr(layer, name, nn.Linear(F, 5).to(next(layer.parameters())))


def _hooked_globally(layer, patch):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 1)
    patch.callback(handle.remove)


def _replaced(where, name, value):
    """A change to what the class of a layer, its module (``where`` is empty) or PyG's class of them all has by that name."""

    def change(layer, patch):
        owner = {"class": type(layer), "module": sys.modules[type(layer).__module__], "base": nn.MessagePassing}[where]
        patch.setattr(owner, name, value(getattr(owner, name)))

    return change


CHANGES = {
    "no product": _changed_module(lambda layer: setattr(layer, "fuse", False)),
    "a hook on propagate": _changed_module(lambda layer: layer.register_propagate_forward_hook(lambda module, args, out: 3 * out)),
    "a hook on the product": _changed_module(
        lambda layer: layer.register_message_and_aggregate_forward_hook(lambda module, args, out: 3 * out)
    ),
    "a method of its own": _changed_module(lambda layer: setattr(layer, "message_and_aggregate", lambda adj, x, *_: 2 * x[0])),
    "an update of its own": _changed_module(lambda layer: setattr(layer, "update", lambda out, *_: 2 * out)),
    "a propagate of its own": _changed_module(
        lambda layer: setattr(layer, "propagate", lambda adj, x, **_: 2 * (x[0] if isinstance(x, tuple) else x))
    ),
    "another linear layer": _changed_module(_other_linear),
    "a hook on linear layers": _changed_module(_hooked_linear),
    "a root with a bias": _changed_module(_linear_with_bias),
    "another reduction": _changed_module(lambda layer: setattr(layer, "aggr", "mean" if layer.aggr != "mean" else "sum")),
    "a hook on all modules": _hooked_globally,
    "another product": _replaced("module", "spmm", lambda spmm: lambda adj, x, reduce: 2 * x),
    "another method of the class": _replaced("class", "message_and_aggregate", lambda _: lambda self, *args: 2 * args[1][0]),
    "another update of all": _replaced("base", "update", lambda _: lambda self, out: 2 * out),
}


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_layers_that_are_products_over_matrices_as_they_are(name, grad, as_they_are, device):
    torch.manual_seed(0)
    layer = PRODUCTS[name]().double().to(device)
    for graph in ("random", "no_edges", "hub", "self_loops_and_duplicates"):
        adj = matrix(graph, device)
        x = features(adj)

        def step():
            out = layer(x, adj)  # noqa: B023
            return [out.detach(), *(torch.autograd.grad(out.pow(2).sum(), list(layer.parameters())) if grad else ())]

        with torch.set_grad_enabled(grad):
            for _ in range(2):
                found = same(step).kernels
        expected = {(f"pyg {type(layer).__name__}", f"gar {'mean' if layer.aggr == 'mean' else 'sum'}", as_they_are[1]): 1}
        assert found == expected


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_of_a_layer_over_a_matrix_as_it_is_is_passed_by(change, name, as_they_are, device, monkeypatch):
    torch.manual_seed(0)
    layer, adj = PRODUCTS[name]().double().to(device), matrix("random", device)
    x = features(adj)
    with torch.no_grad(), contextlib.ExitStack() as undo:
        same(lambda: [layer(x, adj)])
        patch = undo.enter_context(monkeypatch.context())
        patch.callback = undo.callback
        CHANGES[change](layer, patch)
        same(lambda: [layer(x, adj)])


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", PRODUCTS)
def test_what_does_not_fit_a_matrix_as_it_is_raises_as_in_pyg(name, as_they_are, device):
    adj = matrix("random", device)
    x = features(adj)
    wrong = [
        (lambda layer: layer(features(adj, F + 1), adj)),
        (lambda layer: layer.float()(x, adj)),
        (lambda layer: layer.cpu()(x, adj)),
        (
            lambda layer: layer(
                x,
                torch.sparse_csr_tensor(
                    adj.crow_indices()[:-1],
                    adj.col_indices()[: int(adj.crow_indices()[-2])],
                    adj.values()[: int(adj.crow_indices()[-2])],
                    (len(x) - 1, len(x)),
                ),
            )
        ),
    ]
    for step in wrong:
        layer = PRODUCTS[name]().double().to(device)
        with torch.no_grad():
            try:
                expected = without(lambda: step(layer))  # noqa: B023
            except Exception as error:
                with pytest.raises(type(error)):
                    step(layer)
            else:
                torch.testing.assert_close(step(layer), expected)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_rows_of_elements(device):
    for ptr in ([0, 2, 2, 5, 5], [2, 4, 4, 7], [0, 0, 0, 3], [3, 3], [0, 100]):
        of_rows = torch.tensor(ptr, device=device)
        for dtype, size in itertools.product((torch.int64, torch.int32), (None, ptr[-1] - ptr[0])):
            given = of_rows.to(dtype)
            found, expected = ptr2index(given, size), without(lambda: ptr2index(given, size))  # noqa: B023
            assert found.dtype is expected.dtype and torch.equal(found, expected)
    src = torch.randn(7, F, device=device)
    same(lambda: [segment(src, torch.tensor([0, 3, 3, 7], device=device), reduce) for reduce in ("sum", "max")])


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_matrices_as_they_are_in_a_cuda_graph(as_they_are, device):
    adj, layer = matrix("hub", device), nn.SAGEConv(F, 5).double().to(device)
    x = features(adj)
    graph, others = torch.cuda.CUDAGraph(), torch.randn_like(x)
    with torch.no_grad():
        layer(x, adj)
        with torch.cuda.graph(graph):
            out = layer(x, adj)
        x.copy_(others)
        graph.replay()
        torch.testing.assert_close(out, without(lambda: layer(others, adj)))
    assert as_they_are[1] in {why for *_, why in gnnfast.report().kernels}


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_what_a_gpu_does_not_multiply_as_it_is(as_they_are, device, monkeypatch):
    adj = matrix("random", device)
    x = features(adj)

    def is_as_it_is(step):
        return any(why == as_they_are[1] for *_, why in same(step).kernels)

    def product(adj=adj, x=x, reduce="sum"):
        return [spmm(adj, x, reduce)]

    with torch.no_grad():
        assert is_as_it_is(product)
        assert not is_as_it_is(lambda: quietly(lambda: product(matrix("random", device, torch.sparse_coo))))
        with torch.autocast("cuda"):
            assert not is_as_it_is(product)
        with gnnfast.override(kernel="gar"):
            assert not is_as_it_is(product)
        with Counted() as counted:
            assert not is_as_it_is(product) and counted.calls
        with monkeypatch.context() as patch:
            patch.setitem(select.SMALL, "adjacency cuda", Small(-1, 4 * adj._nnz() * max(F, sparse.NARROW)))
            assert not is_as_it_is(product)
        for wrong in ({"x": x[:-1]}, {"x": x[:, 0]}, {"x": x.float()}, {"x": x.cpu()}, {"reduce": "max"}):
            with pytest.raises(Exception) as expected:
                without(lambda: product(**wrong))  # noqa: B023
            with pytest.raises(expected.type):
                product(**wrong)
    leaf = x.clone().requires_grad_()
    assert not is_as_it_is(lambda: torch.autograd.grad(product(x=leaf)[0].sum(), leaf))
    values = adj.clone().requires_grad_()
    assert not is_as_it_is(lambda: [torch.autograd.grad(product(values)[0].sum(), values)[0].to_dense()])
    assert is_as_it_is(product)  # of which nobody needs a gradient


class Counted(torch.overrides.TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.sparse.mm
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "csc"])
def test_autocast(reduce, autocast, layout, device):
    """On a GPU torch's product is one that is cast, whatever its operands are but float64. It has no gradient there."""
    dtypes = torch.float32, torch.float16, torch.bfloat16, torch.float64
    for of_matrix, of_features in itertools.product(dtypes, dtypes):
        adj = matrix("random", device, LAYOUTS["coo" if layout == "coo" else "csr"])
        adj = (adj.to_sparse_csc() if layout == "csc" else adj).to(of_matrix)
        x = features(adj).to(of_features).requires_grad_()

        def step():
            with torch.autocast("cuda", dtype=autocast):
                return spmm(adj, x, reduce)  # noqa: B023

        if (of_matrix is torch.float64) != (of_features is torch.float64):
            for run in (without, lambda step: step()):
                with pytest.raises(RuntimeError):
                    run(lambda: quietly(step))
            continue
        report = quietly(lambda: same(lambda: [step().detach()], 1e-9 if of_matrix is torch.float64 else 0.02))  # noqa: B023
        left = layout == "csc" and reduce == "mean" and of_matrix is not torch.float64
        assert bool(report.fallbacks) is left and bool(report.kernels) is not left
        if left:
            continue
        gradient = torch.autograd.grad(quietly(step).sum(), x)[0]
        assert gradient.dtype is of_features and gradient.isfinite().all()


@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GraphConv", "GINConv", "LGConv", "TAGConv", "GATConv", "LEConv"])
def test_layers_under_autocast(name, layout, device):
    adj = matrix("random", device, layout, torch.float32)
    layers, x = [convs.ALL[name](F, F).to(device)], features(adj).float()
    if name in ("GCNConv", "TAGConv", "GATConv"):
        layers.append(getattr(nn, name)(F, F, bias=False).to(device))

    def step():
        with torch.autocast(device.type, dtype=torch.bfloat16), torch.no_grad():
            return [layer(x, adj) for layer in layers]

    for _ in range(3):
        try:
            without(lambda: quietly(step))
        except RuntimeError:  # a CPU has no product in 16 bits
            quietly(step)
        else:
            quietly(lambda: same(step, 0.05))
