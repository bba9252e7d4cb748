"""Layers of PyG that run as one: linear part, aggregation and bias."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from comparison import close, compare, nodes_behind, without
from graphs import GRAPHS, relative_error
from thresholds import tiny_on_cpu
from torch.nn.utils import prune

import gnnfast
from gnnfast.dispatch import select
from gnnfast.hardware import relative_bandwidth
from gnnfast.pyg import listed
from gnnfast.pyg.small import bounds

pyg = pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("converts_at_once")

F = 8

LAYERS = {
    "plain": lambda: nn.GCNConv(F, 5),
    "cached": lambda: nn.GCNConv(F, 5, cached=True),
    "improved": lambda: nn.GCNConv(F, 5, improved=True),
    "no loops": lambda: nn.GCNConv(F, 5, add_self_loops=False),
    "not normalised": lambda: nn.GCNConv(F, 5, normalize=False),
    "target_to_source": lambda: nn.GCNConv(F, 5, flow="target_to_source"),
    "mean": lambda: nn.GCNConv(F, 5, aggr="mean"),
    "no bias": lambda: nn.GCNConv(F, 5, bias=False),
    "frozen": lambda: nn.GCNConv(F, 5).requires_grad_(False),
    "lazy": lambda: nn.GCNConv(-1, 5),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("weighted", [True, False])
def test_linear_part_and_bias_in_one(name, weighted, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    w = torch.rand(edge_index.shape[1], device=device)
    layer = LAYERS[name]().to(device)
    layer(x, edge_index)  # a lazy one gets its weights

    class Given(torch.nn.Module):
        """Weights that are constant, so that they are found again."""

        def __init__(self):
            super().__init__()
            self.conv = layer

        def forward(self, x):
            return self.conv(x, edge_index, w) if weighted else self.conv(x, edge_index)

    report = compare(Given(), x, repeats=4)
    kernels = {kernel for place, kernel, _ in report.kernels if place == "pyg GCNConv"}
    assert any(kernel.startswith("linear and gar") for kernel in kernels) and not report.fallbacks


@pytest.mark.parametrize("how", ["another dtype", "autotune", "as it is"])
@pytest.mark.parametrize("looped", [True, False])
def test_one_hop_with_weights_goes_on_with_the_users_edges(looped, how, device):
    """Where a layer does not run as one after all, edges that were normalised are not normalised again. With a loop at each node,
    listed first, they are as many as the user's, in another order."""
    edge_index, n, _ = GRAPHS["random"]()
    if looped:
        edge_index = torch.cat([torch.arange(n).repeat(2, 1), edge_index[:, edge_index[0] != edge_index[1]]], 1)
    x, edge_index = torch.randn(n, F, device=device, dtype=torch.float64), edge_index.to(device)
    w = torch.rand(edge_index.shape[1], device=device, dtype=torch.float32 if how == "another dtype" else x.dtype)
    layer = nn.SGConv(F, 5, K=1).to(device).double()
    with gnnfast.override(autotune=how == "autotune"):
        compare(_Weighted(layer, w), x, edge_index, tolerance=1e-6 if how == "another dtype" else 1e-9)


class _Weighted(torch.nn.Module):
    def __init__(self, conv, weight):
        super().__init__()
        self.conv, self.weight = conv, weight

    def forward(self, x, edge_index):
        return self.conv(x, edge_index, self.weight)


def test_bias_that_is_no_parameter(device):
    from torch.nn.utils import prune

    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    conv = nn.GCNConv(F, 5).to(device)
    torch.nn.init.normal_(conv.bias)
    prune.random_unstructured(conv, "bias", 2)  # a product with a mask, made anew before each call
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        out = [conv(x, edge_index) for _ in range(4)][-1]
        results.append([out, *torch.autograd.grad(out.sin().sum(), list(conv.parameters()))])
    gnnfast.enable()
    assert any(kernel.startswith("linear and gar") for _, kernel, _ in gnnfast.report().kernels)
    for found, expected in zip(*results):
        assert relative_error(found, expected) < 1e-5


class _OwnUpdate(nn.GCNConv):
    def update(self, inputs):
        return 2 * inputs


class _OwnMessage(nn.GCNConv):
    def message(self, x_j, edge_weight):
        return 2 * x_j


class _OwnForward(nn.GCNConv):
    def forward(self, x, edge_index, edge_weight=None):
        return 2 * super().forward(x, edge_index, edge_weight)


class _TwiceLinear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.randn(5, F)), None

    def forward(self, x):
        return 2 * torch.nn.functional.linear(x, self.weight)


def _changed(how):
    conv = nn.GCNConv(F, 5)
    if how == "hook on the linear layer":
        conv.lin.register_forward_hook(lambda module, inputs, out: 2 * out)
    elif how == "hook on the message":
        conv.register_message_forward_hook(lambda module, inputs, out: 2 * out)
    elif how == "bias of the linear layer":
        conv.lin.bias = torch.nn.Parameter(torch.ones(5))
    elif how == "other linear layer":
        conv.lin = _TwiceLinear()
    elif how == "forward of the linear layer":
        linear = conv.lin.forward
        conv.lin.forward = lambda x: 2 * linear(x)
    elif how == "weight normalisation":
        torch.nn.utils.parametrizations.weight_norm(conv.lin)
    elif how == "bias for each node":
        conv.bias = torch.nn.Parameter(torch.randn(30, 5))
    elif how == "bias of two dimensions":
        conv.bias = torch.nn.Parameter(torch.randn(1, 5))
    elif how == "bias of more columns":
        conv = nn.GCNConv(F, 1)
        conv.bias = torch.nn.Parameter(torch.randn(5))
    elif how == "update":
        conv = _OwnUpdate(F, 5)
    elif how == "message":
        conv = _OwnMessage(F, 5)
    elif how == "forward":
        conv = _OwnForward(F, 5)
    return conv


@pytest.mark.parametrize(
    "how",
    [
        "hook on the linear layer",
        "hook on the message",
        "bias of the linear layer",
        "other linear layer",
        "forward of the linear layer",
        "weight normalisation",
        "bias for each node",
        "bias of two dimensions",
        "bias of more columns",
        "update",
        "message",
        "forward",
    ],
)
def test_changed_parts_are_run(how, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    conv = _changed(how).to(device)

    def step():
        out = conv(x, edge_index)
        return out, *torch.autograd.grad(out.sin().sum(), list(conv.parameters()))

    gnnfast.disable()
    expected = step()
    gnnfast.enable()
    gnnfast.clear_report()
    for _ in range(4):
        for f, e in zip(step(), expected):
            assert f.shape == e.shape and relative_error(f, e) < 1e-5
    assert not any(kernel.startswith("linear and") for _, kernel, _ in gnnfast.report().kernels)


def test_patches_of_others_are_run(device, monkeypatch):
    """Such as counters and quantisation put into whole classes and modules."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    conv, calls = nn.GCNConv(F, 5).to(device), []
    for _ in range(3):
        expected = conv(x, edge_index)

    def counted(function):
        @functools.wraps(function)
        def call(*arguments):
            calls.append(1)
            return function(*arguments)

        return call

    for owner, name in ((nn.Linear, "forward"), (torch.nn.functional, "linear")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, counted(getattr(owner, name)))
            assert relative_error(conv(x, edge_index), expected) < 1e-5
        assert len(calls) == 1
        calls.clear()


def test_destinations_that_do_not_fit_are_pygs_error():
    edge_index, n, _ = GRAPHS["random"]()
    x = (torch.rand(n, 20_000) < 0.01).float()  # for which the layers multiply first
    for conv in (nn.SAGEConv((20_000, F), 5), nn.SAGEConv((20_000, F), 5, root_weight=False), nn.GraphConv((20_000, F), 5)):
        for _ in range(4):
            conv((x, torch.randn(n, F)), edge_index)
        assert any(kernel.startswith("linear and") for _, kernel, _ in gnnfast.report().kernels)
        outcomes = []
        for on in (True, False):
            (gnnfast.enable if on else gnnfast.disable)()
            with pytest.raises(Exception) as error:
                conv((x, torch.randn(n)), edge_index)
            outcomes.append((error.type, str(error.value)))
        gnnfast.enable()
        assert outcomes[0] == outcomes[1]
        gnnfast.clear_report()


def test_weights_are_followed(device):
    """New weights of edges and changed ones, in training and in inference."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    conv = nn.GCNConv(F, 5, normalize=False).to(device)
    w = torch.rand(edge_index.shape[1], device=device)
    for step in range(6):
        if step == 2:
            w.mul_(3)
        elif step == 4:
            w = torch.rand(edge_index.shape[1], device=device).double().float()
        with torch.set_grad_enabled(step % 2 == 0):
            found = conv(x, edge_index, w)
        gnnfast.disable()
        assert relative_error(found, conv(x, edge_index, w)) < 1e-5
        gnnfast.enable()


def test_layers_that_change_after_a_call(device):
    """What was found out about a layer is looked at again."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    ones = torch.nn.Parameter(torch.ones(5, device=device))
    cases = [
        (lambda: nn.GCNConv(F, 5), lambda layer: setattr(layer.lin, "bias", ones)),
        (lambda: nn.GraphConv(F, 5), lambda layer: setattr(layer, "root_weight", False)),
        (lambda: nn.GraphConv(F, 5), lambda layer: setattr(layer, "lin_root", None)),
        (lambda: nn.SAGEConv(F, 5, root_weight=False), lambda layer: setattr(layer, "root_weight", True)),
        (lambda: nn.SGConv(F, 5, K=2, cached=True), lambda layer: setattr(layer, "cached", False)),
    ]
    for make, change in cases:
        layer, results = make().to(device), []
        layer(x, edge_index)
        change(layer)
        for on in (True, False):
            (gnnfast.enable if on else gnnfast.disable)()
            try:
                results.append(layer(x * 2, edge_index).detach())
            except (TypeError, AttributeError) as error:
                results.append(type(error))
        gnnfast.enable()
        found, expected = results
        assert found == expected if isinstance(expected, type) else relative_error(found, expected) < 1e-5


def test_layers_die_with_their_last_user(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    for make in (
        lambda: nn.GCNConv(F, 5),
        lambda: nn.SAGEConv(F, 5),
        lambda: nn.GINConv(torch.nn.Linear(F, 5)),
        lambda: nn.GATConv(F, 5),
    ):
        layer = make().to(device)
        for _ in range(3):
            layer(x, edge_index)
        gone = weakref.ref(layer)
        del layer
        gc.collect()  # PyG's own modules are in cycles
        assert gone() is None


@pytest.mark.parametrize("kernel", ["gas", "gar"])
def test_what_pyg_does_not_keep_may_be_written_into(kernel, device):
    """Aggregation first keeps nothing of the graph where the features need no gradient."""
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    weight = torch.rand(edge_index.shape[1], device=device)
    layer = nn.GraphConv(F, 40).to(device)
    with gnnfast.override(kernel=kernel):
        for _ in range(3):
            out = layer(x, edge_index, weight)
        weight.mul_(2)
        out.sum().backward()
        ids = edge_index.clone()
        out = layer(x, ids)
        ids.zero_()
        out.sum().backward()


def test_a_replaced_gcn_norm_sees_nothing_shared(device, monkeypatch):
    from torch_geometric.nn.conv import gcn_conv

    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    original, layer = gcn_conv.gcn_norm, nn.GCNConv(F, 5).to(device)

    def doubled(*args, **kwargs):
        ids, weight = original(*args, **kwargs)
        weight.mul_(2)
        return ids, weight

    monkeypatch.setattr(gcn_conv, "gcn_norm", doubled)
    outs = [layer(x, edge_index) for _ in range(4)]
    assert all(relative_error(out, outs[0]) < 1e-6 for out in outs[1:])


def test_gcn_norm_runs_as_often_as_in_pyg(device, monkeypatch):
    from torch_geometric.nn.conv import sg_conv

    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    weight = torch.rand(edge_index.shape[1], device=device, requires_grad=True)
    original, calls = sg_conv.gcn_norm, []
    monkeypatch.setattr(sg_conv, "gcn_norm", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    nn.SGConv(F, 5, K=1).to(device)(x, edge_index, weight)
    assert len(calls) == 1


# ---- small graphs in training on a GPU -----------------------------------------------------------------------------------------
SMALL = {
    "SAGEConv": (lambda: nn.SAGEConv(F, 5), False),
    "SAGEConv, sum": (lambda: nn.SAGEConv(F, 5, aggr="sum", bias=False), False),
    "SAGEConv, no root": (lambda: nn.SAGEConv(F, 5, root_weight=False), False),
    "SAGEConv, unit length": (lambda: nn.SAGEConv(F, 5, normalize=True), False),
    "GraphConv": (lambda: nn.GraphConv(F, 5), False),
    "GraphConv, weighted": (lambda: nn.GraphConv(F, 5), True),
    "GraphConv, weighted mean": (lambda: nn.GraphConv(F, 5, aggr="mean"), True),
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", SMALL)
def test_small_graphs(name, graph, device, small):
    make, weighted = SMALL[name]
    edge_index, num_src, num_dst = GRAPHS[graph]()
    edge_index = edge_index.to(device)
    x = torch.randn(max(num_src, num_dst), F, device=device, dtype=torch.float64)
    weight = (torch.rand(edge_index.shape[1], device=device, dtype=torch.float64),) if weighted else ()
    report = compare(make().double(), x, edge_index, *weight, tolerance=1e-9)
    assert device.type == "cpu" or "PyG's own" in {kernel for _, kernel, _ in report.kernels}


def test_graphs_that_are_not_so_small_are_served_when_met_again(device, small, monkeypatch):
    """In training on a GPU. On a CPU the layer is served from then on."""
    tiny_on_cpu(monkeypatch, -1)
    monkeypatch.setattr("gnnfast.pyg.layers.FEW_BYTES", 0)
    edge_index, n, _ = GRAPHS["random"]()
    layer, x = nn.SAGEConv(F, 5).to(device), torch.randn(n, F, device=device, requires_grad=True)
    edge_index = edge_index.to(device)
    layer(x, edge_index.clone())  # what the class computes is found out
    new = device.type == "cuda"
    for given, left in ((edge_index, True), (edge_index, False), (edge_index.clone(), new), (edge_index, False)):
        gnnfast.clear_report()
        found = layer(x, given)
        kernels = {kernel for _, kernel, _ in gnnfast.report().kernels}
        assert (kernels == {"PyG's own"}) == left
        gnnfast.disable()
        assert relative_error(found, layer(x, given)) < 1e-5
        gnnfast.enable()


def test_sums_of_small_graphs_are_left_alone_in_training(device, small, monkeypatch):
    """On a GPU, and where no gradient passes through the messages, of twice as many. On a CPU these alone, of graphs that are
    new."""
    tiny_on_cpu(monkeypatch, -1)
    monkeypatch.setattr("gnnfast.pyg.layers.FEW_BYTES", 0)
    edge_index, n, _ = GRAPHS["random"]()
    edge_index, x = edge_index.to(device), torch.randn(n, F, device=device)
    sums, means = (cls(F, 5).to(device) for cls in (nn.GraphConv, nn.SAGEConv))

    def is_left(layer, x, edge_index):
        gnnfast.clear_report()
        layer(x, edge_index)
        ran = gnnfast.report().kernels
        return {kernel for _, kernel, why in ran if why != listed.WHY} <= {"PyG's own"}  # or in one operation, where no gradient is

    on_gpu, leaf, new = device.type == "cuda", x.clone().requires_grad_(), edge_index.clone
    for layer in (sums, means):
        layer(x, new())  # what the class computes is found out
        assert is_left(layer, leaf, new()) and is_left(layer, x, new())
    assert is_left(sums, x, edge_index) and is_left(sums, x, edge_index) == on_gpu
    of_messages = edge_index.shape[1] * F * 4
    most = 1 + round(0.75 * of_messages / relative_bandwidth())
    monkeypatch.setitem(select.SMALL, "cuda", select.SMALL["cuda"]._replace(training=most))
    bounds.clear()
    assert is_left(sums, x, edge_index) == on_gpu and not is_left(sums, leaf, edge_index)


def test_small_bipartite_graphs(device, small):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    given = [torch.randn(n, width, device=device, dtype=torch.float64) for n, width in ((num_src, F), (num_dst, 3))]
    layer, results = nn.SAGEConv((F, 3), 5).to(device, torch.float64), []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        leaves = [*(t.clone().requires_grad_() for t in given), *layer.parameters()]
        out = layer((leaves[0], leaves[1]), edge_index.to(device))
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-9 for f, e in zip(*results))


def test_small_layers_are_differentiated_twice_and_leave_operands_alone(device, small):
    edge_index = GRAPHS["random"]()[0].to(device)
    x = torch.randn(30, F, device=device, dtype=torch.float64, requires_grad=True)
    layer, weight = nn.GraphConv(F, 3, aggr="mean").to(device, torch.float64), torch.rand(200, device=device, dtype=torch.float64)
    before = x.detach().clone(), weight.clone(), edge_index.clone()
    torch.autograd.gradgradcheck(lambda x, w: layer(x, edge_index, w), (x, weight.requires_grad_()))
    assert all(map(torch.equal, before, (x, weight, edge_index)))


def test_small_graphs_that_change(device, small):
    edge_index = GRAPHS["random"]()[0].to(device)
    x, layer = torch.randn(30, F, device=device, dtype=torch.float64), nn.SAGEConv(F, 5).to(device, torch.float64)
    for _ in range(3):
        found = layer(x, edge_index)
        gnnfast.disable()
        assert relative_error(found, layer(x, edge_index)) < 1e-12
        gnnfast.enable()
        edge_index[1, :50] = torch.randint(0, 30, (50,), device=device)


# ---- where a linear layer has its parameters ---------------------------------------------------------------------------------------
class OwnWeight(nn.Linear):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        return found * 2 if name == "weight" else found


def _as_attribute(lin):
    weight = lin.weight.detach() * 2
    del lin.weight
    lin.weight = weight


PARAMETRISED = {
    "weight norm": lambda lin: torch.nn.utils.parametrizations.weight_norm(lin),
    "pruned": lambda lin: prune.random_unstructured(lin, "weight", 0.5),
    "pruned bias": lambda lin: prune.random_unstructured(lin, "bias", 0.5),
    "an attribute": _as_attribute,
    "its own weight": lambda lin: lin.__dict__.update(weight=lin.weight.detach() * 2),
    "a class of its own": lambda lin: setattr(lin, "__class__", OwnWeight),
    "no bias": lambda lin: lin.register_parameter("bias", None),
    "nothing": lambda lin: None,
}


@pytest.mark.parametrize("name", PARAMETRISED)
def test_parameters_are_found_where_torch_finds_them(name):
    lin, x = nn.Linear(F, 3), torch.randn(5, F)
    with torch.no_grad():
        plain = lin(x)
        PARAMETRISED[name](lin)
        expected = without(lambda: lin(x))
        assert torch.equal(lin(x), expected) and torch.equal(plain, expected) == (name == "nothing")


def test_parameters_of_a_functional_call():
    lin, x = nn.Linear(F, 3), torch.randn(5, F)
    given = {name: p.detach() + 1 for name, p in lin.named_parameters()}
    expected = torch.nn.functional.linear(x, given["weight"], given["bias"])
    assert torch.equal(torch.func.functional_call(lin, given, x), expected)
    loss = lambda given: torch.func.functional_call(lin, given, x).square().sum()  # noqa: E731
    found, wanted = torch.func.grad(loss)(given), without(lambda: torch.func.grad(loss)(given))
    assert all(torch.equal(found[name], wanted[name]) for name in given)


BIASED = {
    "GCN": lambda: nn.GCNConv(F, 6),
    "SAGE": lambda: nn.SAGEConv(F, 6),
    "GAT": lambda: nn.GATConv(F, 3, heads=2),
    "GATv2": lambda: nn.GATv2Conv(F, 3, heads=2),
    "Transformer": lambda: nn.TransformerConv(F, 3, heads=2),
    "GIN": lambda: nn.GINConv(torch.nn.Sequential(torch.nn.Linear(F, 7), torch.nn.ReLU(), nn.Linear(7, 6))),
    "PNA": lambda: nn.PNAConv(F, 6, ["mean", "max", "std"], ["identity", "amplification"], torch.arange(9)),
    "ResGated": lambda: nn.ResGatedGraphConv(F, 6),
    "Hypergraph": lambda: nn.HypergraphConv(F, 6),
    "Linear": lambda: nn.Linear(F, 6),
}


@pytest.mark.parametrize("name", BIASED)
def test_bias_of_many_rows(name, device):
    if device.type != "cuda":
        pytest.skip("only on a GPU does torch take long to add up columns")
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device, dtype=torch.float64), edge_index.to(device)
    layer = BIASED[name]().to(device).double()
    given = (x,) if name == "Linear" else (x, edge_index)
    assert nodes_behind(layer(*given)) & {"_LinearsBackward", "_BiasedBackward", "LayerBackward"}
    compare(layer, *given, tolerance=1e-9)

    def second(layer):
        inputs = x.clone().requires_grad_()
        grad = torch.autograd.grad(layer(inputs, *given[1:]).pow(3).sum(), inputs, create_graph=True)[0]
        return torch.autograd.grad(grad.pow(2).sum(), [inputs, *layer.parameters()], allow_unused=True)

    found, expected = second(layer), without(lambda: second(layer))
    close([f for f, e in zip(found, expected, strict=True) if e is not None], [e for e in expected if e is not None])


def test_who_watches_a_linear_layer_within_gin(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    inner = torch.nn.Linear(F, 6)
    layer = nn.GINConv(torch.nn.Sequential(inner, torch.nn.ReLU())).to(device)
    layer(x, edge_index)
    seen = []
    handle = inner.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    layer(x, edge_index)
    handle.remove()
    assert seen == [(n, 6)]
    inner.forward = lambda given: given[:, :6]
    torch.testing.assert_close(layer(x, edge_index), without(lambda: layer(x, edge_index)))


def test_what_is_within_gin_need_be_no_module(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index = torch.randn(n, F, device=device), edge_index.to(device)
    inner = torch.nn.Linear(F, 6).to(device)
    flat = torch.nn.Sequential(inner, torch.nn.Flatten(0), torch.nn.ReLU())
    for within in (torch.relu, lambda t: inner(t).sum(), flat):
        layer = nn.GINConv(within).to(device)
        torch.testing.assert_close(layer(x, edge_index), without(functools.partial(layer, x, edge_index)))


def test_a_layer_within_gin_that_is_compiled(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, edge_index, calls = torch.randn(n, F, device=device), edge_index.to(device), []
    inner = torch.nn.Linear(F, 6).to(device)
    inner._compiled_call_impl = lambda given: calls.append(given.shape) or inner._call_impl(given)  # as compile() leaves it
    for within in (inner, torch.nn.Sequential(inner)):
        calls.clear()
        nn.GINConv(within).to(device)(x, edge_index)
        assert calls == [(n, F)]
