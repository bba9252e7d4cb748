"""Layers over adjacency matrices of torch, in CSR and COO: as PyG computes them, whatever they do with a matrix."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from adjacencies import LAYERS, USERS, WHOLE, F, OfWeights, check, check_edges_are_let_go, compressed, features, matrix, quietly
from comparison import compare, same, without
from gnnfast.benchmarks import convs
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex, nn
from torch_geometric.typing import OptPairTensor
from torch_geometric.utils import spmm

import gnnfast
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
    values, indices = torch.rand(coo._nnz(), dtype=torch.float64, device=device), [t.to(device) for t in compressed(coo.cpu())]
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


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("name", "given"),
    [*itertools.product(("SAGEConv", "GINConv", "GatedGraphConv", *NORMALISING[:-1]), LAYOUTS), ("GraphConv", "EdgeIndex")],
)
def test_a_gpu_multiplies_alike_from_run_to_run(name, given, device, monkeypatch):
    """PyG multiplies with a matrix by torch, whose sums are the same without being asked for it: no atomics, over none that is new."""
    monkeypatch.setattr(sparse, "_is_new", IS_NEW)
    torch.manual_seed(0)
    adj = (torch.rand(1000, 1000, device=device) < 0.005).float()  # where torch's are, as columns are short
    edge_index = EdgeIndex(adj.t().nonzero().t()[:, torch.randperm(int(adj.sum()))], sparse_size=adj.shape).sort_by("col")[0]
    x = torch.randn(1000, F, device=device, requires_grad=True)
    layer = convs.ALL[name](F, F).to(device)

    def passes():
        of = edge_index.clone() if given == "EdgeIndex" else adj.to_sparse(layout=LAYOUTS[given])
        for _ in range(3):
            out = layer(x, of)
            yield from (out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()]))

    first, *others = (quietly(lambda: [*passes()]) for _ in range(10))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))
    assert gnnfast.report().kernels and not gnnfast.report().fallbacks


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
