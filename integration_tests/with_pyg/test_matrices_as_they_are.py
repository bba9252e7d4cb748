"""Small matrices in torch's CSR on a GPU, which are multiplied as they are, and layers that are their operations alone."""

from __future__ import annotations

import contextlib
import itertools
import sys

import pytest
import torch
from adjacencies import F, features, matrix, quietly
from comparison import same, without
from gnnfast.benchmarks import convs
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn
from torch_geometric.index import ptr2index
from torch_geometric.utils import segment, spmm

import gnnfast
from gnnfast.dispatch import select
from gnnfast.dispatch.select import Small
from gnnfast.pyg import sparse


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


@pytest.fixture
def in_training(as_they_are, monkeypatch):
    monkeypatch.setitem(select.SMALL, "adjacency cuda", Small(1 << 20, 1 << 20))
    return as_they_are[1]


def _is_as_it_is(step, why):
    return why in {found for *_, found in same(step).kernels}


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", [*PRODUCTS, "SimpleConv"])
def test_layers_in_training_over_matrices_that_are_new(name, in_training, device):
    torch.manual_seed(0)
    layer = (PRODUCTS[name]() if name in PRODUCTS else nn.SimpleConv()).double().to(device)
    for graph in ("random", "no_edges", "hub", "self_loops_and_duplicates"):
        adj = matrix(graph, device)
        x = features(adj).requires_grad_()

        def step(adj=None, x=x, of=adj):
            out = layer(x, of.clone() if adj is None else adj)
            return [out.detach(), *torch.autograd.grad(out.pow(2).sum(), [x, *layer.parameters()])]

        for _ in range(2):
            assert _is_as_it_is(step, in_training)
        uses = [_is_as_it_is(lambda: step(adj), in_training) for _ in range(2 * sparse.FEW_USES)]  # noqa: B023
        assert uses[0] and not uses[-1] and uses == sorted(uses, reverse=True)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("graph", ["random", "no_edges", "hub"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_over_matrices_as_they_are(reduce, graph, in_training, device):
    adj = matrix(graph, device)
    as_int32 = torch.sparse_csr_tensor(adj.crow_indices().int(), adj.col_indices().int(), adj.values(), adj.shape)
    x = features(adj).requires_grad_()
    for given in (adj, as_int32):
        for width in (0, 1, F):
            assert _is_as_it_is(
                lambda: torch.autograd.grad(spmm(given.clone(), x[:, :width], reduce).pow(3).sum(), x),  # noqa: B023
                in_training,
            )
        assert torch.autograd.gradcheck(lambda x: spmm(given.clone(), x, reduce), x)  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda x: spmm(given.clone(), x, reduce), x)  # noqa: B023
    several = torch.randn(3, *x.shape, dtype=x.dtype, device=device)
    out = spmm(adj.clone(), x, reduce)
    batched = torch.autograd.grad(out, x, several, is_grads_batched=True, retain_graph=True)[0]
    torch.testing.assert_close(batched, torch.stack([torch.autograd.grad(out, x, g, retain_graph=True)[0] for g in several]))


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_dtypes_over_matrices_as_they_are(reduce, dtype, in_training, device):
    adj = matrix("random", device)
    x = features(adj)
    with torch.no_grad():
        exact = x.clone()
    results = []
    for of in (torch.float64, dtype):
        leaf = exact.to(dtype).to(of).requires_grad_()
        out = spmm(adj.to(dtype).to(of), leaf, reduce)
        results.append((out, torch.autograd.grad(out.sum(), leaf)[0]))
    assert in_training in {why for *_, why in gnnfast.report().kernels}
    for expected, found in zip(*results):
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), expected, rtol=5 * torch.finfo(dtype).eps, atol=5 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_are_the_same_from_run_to_run(reduce, deterministic, in_training, device):
    # As torch's are without being asked for it. Atomics would add the entries of a column in any order.
    torch.manual_seed(0)
    adj = torch.rand(100, 100, device=device).to_sparse_csr()
    x = torch.randn(100, F, device=device, requires_grad=True)
    torch.use_deterministic_algorithms(deterministic)
    try:
        gnnfast.clear_report()
        first, *others = (torch.autograd.grad(spmm(adj.clone(), x, reduce).sin().sum(), x)[0] for _ in range(30))
        twice = []
        for _ in range(30):
            grad = torch.autograd.grad(spmm(adj.clone(), x, reduce).sin().sum(), x, create_graph=True)[0]
            twice.append(torch.autograd.grad(grad.pow(2).sum(), x)[0])
            others.append(grad.detach())
    finally:
        torch.use_deterministic_algorithms(False)
    assert in_training in {why for *_, why in gnnfast.report().kernels}
    assert all(torch.equal(first, other) for other in others)
    assert all(torch.equal(twice[0], other) for other in twice)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_what_is_not_multiplied_as_it_is_in_training(in_training, device):
    adj = matrix("random", device)
    x = features(adj).requires_grad_()

    def step(adj=None, of=adj):
        return torch.autograd.grad(spmm(of.clone() if adj is None else adj, x, "sum").pow(2).sum(), x)

    assert _is_as_it_is(step, in_training)
    assert not _is_as_it_is(
        lambda: torch.autograd.grad(checkpoint(spmm, adj.clone(), x, "sum", use_reentrant=False).sum(), x), in_training
    )
    with torch.inference_mode():
        of_inference = adj.clone()
    gnnfast.clear_report()
    with contextlib.suppress(RuntimeError):  # torch's own may not keep it
        step(of_inference)
    assert in_training not in {why for *_, why in gnnfast.report().kernels}


class Counted(torch.overrides.TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.sparse.mm
        return function(*args, **(kwargs or {}))
