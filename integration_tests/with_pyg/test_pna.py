"""PNAConv as a whole against PyG's own."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import compare
from graphs import GRAPHS, relative_error

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from torch_geometric.nn import aggr

F, D = 8, 3
DEGREES = torch.tensor([0, 3, 5, 7, 2])
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
USUAL = ["mean", "min", "max", "std"]
OPTIONS = {
    "plain": {},
    "towers": {"towers": 2},
    "divided": {"towers": 2, "divide_input": True},
    "edges": {"edge_dim": D},
    "edges and towers": {"edge_dim": D, "towers": 2},
    "edges, divided": {"edge_dim": D, "towers": 4, "divide_input": True},
    "two layers behind": {"post_layers": 2},
    "turned around": {"flow": "target_to_source"},
}


def layer_of(aggregators=USUAL, scalers=SCALERS, **options):
    return nn.PNAConv(F, 4, aggregators, scalers, DEGREES, **options)


def inputs(name, options, device, dtype=torch.float64):
    """Edges and isolated nodes among them: fewer edges than nodes are left to PyG."""
    edge_index, num_src, num_dst = GRAPHS[name]()
    n = max(num_src, num_dst)
    if edge_index.shape[1] < n:
        edge_index = edge_index.repeat(1, 3 * n)
    x, attr = torch.randn(n, F, device=device, dtype=dtype), torch.randn(edge_index.shape[1], D, device=device, dtype=dtype)
    return (x, edge_index.to(device), *((attr,) if "edge_dim" in options else ()))


def kernels(report):
    return {kernel for place, kernel, _ in report.kernels if place == "pyg PNAConv"}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["random", "hub", "self_loops_and_duplicates", "isolated", "sorted", "bipartite"])
def test_graphs_and_options(name, options, device):
    report = compare(layer_of(**OPTIONS[options]).double(), *inputs(name, OPTIONS[options], device), tolerance=1e-9)
    assert kernels(report) == ({"edges reductions"} if "edges" in options else {"several reductions"})
    assert not report.fallbacks and not any(kernel == "in parts" for _, kernel, _ in report.kernels)


@pytest.mark.parametrize("edge_dim", [None, D])
@pytest.mark.parametrize(
    "aggregators", [["sum"], ["mean"], ["max"], ["min"], ["var"], ["std"], ["var", "std", "sum", "std", "max", "max"], "max"]
)
def test_aggregations(aggregators, edge_dim, device):
    options = {} if edge_dim is None else {"edge_dim": edge_dim}
    scalers = "amplification" if aggregators == "max" else ["attenuation", "identity"]
    layer = layer_of(aggregators, scalers, **options).double() if aggregators != "max" else _single(options)
    report = compare(layer, *inputs("random", options, device), tolerance=1e-9)
    assert not any(kernel == "in parts" for _, kernel, _ in report.kernels)


def _single(options):
    """One aggregation that is none of several."""
    layer = layer_of(["max"], ["amplification"], **options).double()
    layer.aggr_module.aggr = aggr.MaxAggregation()
    return layer


@pytest.mark.parametrize("options", ["plain", "divided", "edges"])
def test_float32_and_int32(options, device):
    x, edge_index, *rest = inputs("random", OPTIONS[options], device, torch.float32)
    layer = layer_of(**OPTIONS[options]).to(device)
    compare(layer, x, edge_index, *rest, tolerance=1e-4)
    assert relative_error(layer(x, edge_index.int(), *rest), layer(x, edge_index, *rest)) < 1e-6


@pytest.mark.parametrize("aggregators", [USUAL, ["sum", "var"], ["max"]])
@pytest.mark.parametrize("options", ["plain", "divided", "edges"])
def test_second_derivative(options, aggregators, device):
    x, edge_index, *rest = inputs("random", OPTIONS[options], device)
    layer = layer_of(aggregators, **OPTIONS[options]).to(device, torch.float64)
    leaves = [x.requires_grad_(), *(t.requires_grad_() for t in rest), *layer.parameters()]
    results = []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        grads = torch.autograd.grad(layer(x, edge_index, *rest).sin().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, allow_unused=True))
    gnnfast.enable()
    for f, e in zip(*results):
        assert (f is None) == (e is None) and (e is None or relative_error(f, e) < 1e-8 or e.norm() < 1e-12)


@pytest.mark.parametrize("aggregators", [["max"], ["min"], USUAL])
@pytest.mark.parametrize("second", [True, False])
def test_ties_and_extrema_that_are_zero(aggregators, second, device):
    """Sums of whole numbers, many of them alike and many 0, where the 0 that PyG starts from takes a share."""
    x, edge_index = inputs("random", {}, device)
    layer = layer_of(aggregators, ["identity"]).to(device, torch.float64)
    with torch.no_grad():
        lin = layer.pre_nns[0][0]
        lin.weight.copy_(torch.randint(-1, 2, lin.weight.shape))
        lin.bias.zero_()
    x = torch.randint(-1, 2, x.shape, device=device).double()
    leaves, results = [x.requires_grad_(), *layer.parameters()], []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        out = layer(x, edge_index)
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=second)
        again = torch.autograd.grad(grads[0].square().sum(), x) if second else ()
        results.append([out, *grads, *again])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-10 for f, e in zip(*results))


def test_no_edges_and_no_nodes(device):
    for n in (5, 0):
        x, none = torch.randn(n, F, device=device), torch.empty(2, 0, dtype=torch.int64, device=device)
        compare(layer_of(), x, none, tolerance=1e-5)


@pytest.mark.parametrize("options", ["plain", "towers", "edges"])
def test_features_may_be_written_into(options, device):
    x, edge_index, *rest = inputs("random", OPTIONS[options], device)
    layer, results = layer_of(**OPTIONS[options]).to(device, torch.float64), []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        given = x.clone()
        out = layer(given, edge_index, *rest)
        given.zero_()
        results.append(torch.autograd.grad(out.relu_().square().sum(), list(layer.parameters())))
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-9 for f, e in zip(*results))


class Doubled(nn.PNAConv):
    def message(self, x_i, x_j, edge_attr):
        return 2 * super().message(x_i, x_j, edge_attr)


def _hook(of):
    return lambda layer: of(layer).register_forward_hook(lambda module, inputs, out: 2 * out)


def _on_instance(layer):
    message = layer.message
    layer.message = lambda x_i, x_j, edge_attr: 3 * message(x_i, x_j, edge_attr)


def _parametrised(layer):
    torch.nn.utils.parametrizations.weight_norm(layer.pre_nns[0][0])


CHANGES = {
    "a subclass": lambda layer: setattr(layer, "__class__", Doubled),
    "a method of the instance": _on_instance,
    "a hook on messages": lambda layer: layer.register_message_forward_hook(lambda module, inputs, out: 2 * out),
    "a hook before": _hook(lambda layer: layer.pre_nns[0][0]),
    "a hook on what is before": _hook(lambda layer: layer.pre_nns[0]),
    "a hook behind": _hook(lambda layer: layer.post_nns[0]),
    "a hook on the scaler": _hook(lambda layer: layer.aggr_module),
    "a hook on aggregations": _hook(lambda layer: layer.aggr_module.aggr),
    "a hook on an aggregation": _hook(lambda layer: layer.aggr_module.aggr.aggrs[0]),
    "a hook within an aggregation": _hook(lambda layer: layer.aggr_module.aggr.aggrs[3].var_aggr),
    "another weight": _parametrised,
    "another scaler": lambda layer: setattr(layer, "aggr_module", aggr.MaxAggregation()),
    "another aggregation": lambda layer: layer.aggr_module.aggr.aggrs.__setitem__(0, aggr.MedianAggregation()),
    "half a gradient": lambda layer: setattr(layer.aggr_module.aggr.aggrs[3].var_aggr, "semi_grad", True),
    "another combination": lambda layer: setattr(layer.aggr_module.aggr, "combine", lambda found: torch.cat(found[::-1], -1)),
    "a layer more": lambda layer: layer.pre_nns[0].append(torch.nn.ReLU()),
    "trained degrees": lambda layer: setattr(layer, "aggr_module", layer_of(train_norm=True).aggr_module),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_user_changes_runs(change, device):
    x, edge_index = inputs("random", {}, device)
    layer = layer_of()
    if change == "another scaler":
        layer.post_nns[0][0] = nn.Linear(2 * F, 4)
    layer = layer.to(device, torch.float64)
    if change != "another scaler":
        layer(x, edge_index)
    CHANGES[change](layer)
    layer = layer.to(device, torch.float64)
    found, of_found = _gradients(layer, x, edge_index)
    assert any(kernel == "in parts" for _, kernel, _ in gnnfast.report().kernels)
    gnnfast.disable()
    expected, of_expected = _gradients(layer, x, edge_index)
    gnnfast.enable()
    assert relative_error(found, expected) < 1e-9
    assert all(relative_error(f, e) < 1e-9 for f, e in zip(of_found, of_expected))


def _gradients(layer, x, edge_index):
    out = layer(x, edge_index)
    return out, torch.autograd.grad(out.square().sum(), [p for p in layer.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("torch_geometric.nn.aggr.scaler", "degree"),
        ("torch_geometric.nn.aggr.base", "scatter"),
        ("torch_geometric.nn.aggr.StdAggregation", "forward"),
        ("torch_geometric.nn.aggr.MultiAggregation", "combine"),
        ("torch_geometric.nn.PNAConv", "message"),
        ("torch.nn.Sequential", "forward"),
    ],
)
def test_a_replaced_function_runs(where, name, device, monkeypatch):
    import pydoc

    owner = pydoc.locate(where)
    x, edge_index = inputs("random", {}, device)
    layer = layer_of().to(device, torch.float64)
    before, original = layer(x, edge_index), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: 2 * original(*args, **kwargs))
    found = layer(x, edge_index)
    gnnfast.disable()
    expected = layer(x, edge_index)
    gnnfast.enable()
    assert relative_error(found, expected) < 1e-9 and relative_error(found, before) > 1e-3


def test_what_is_not_served_says_so(device):
    x, edge_index = inputs("random", {}, device)
    layer = layer_of().to(device)
    for dtype in (torch.float16, torch.bfloat16):
        copy.deepcopy(layer).to(dtype)(x.to(dtype), edge_index)
    with torch.autocast(device.type, torch.bfloat16):
        assert layer(x.float(), edge_index).shape == (30, 4)
    with gnnfast.override(sample="fastrand"), torch.no_grad():
        layer(x.float(), edge_index)
    reasons = {why for place, kernel, why in gnnfast.report().kernels if (place, kernel) == ("pyg PNAConv", "in parts")}
    assert reasons == {"sums in another order need 32 bits", "an option is not served"}


def test_errors_are_those_of_pyg(device):
    if device.type == "cuda":
        pytest.skip("PyG itself ends in a device-side assertion on CUDA")
    x, edge_index = inputs("random", {}, device)
    x, layer = x.float(), layer_of()

    def outcome(*args):
        try:
            return layer(*args)
        except Exception as error:
            return type(error), str(error)

    wrong = edge_index.clone()
    wrong[1, 0] = 30
    for args in ((x[:, :5], edge_index), (x, wrong), (x, edge_index, torch.randn(200, D)), (x.double(), edge_index), (x, None)):
        found = outcome(*args)
        gnnfast.disable()
        expected = outcome(*args)
        gnnfast.enable()
        assert isinstance(expected, tuple) and found == expected


def test_small_calls_are_served(device, small):
    """PyG's operations are so many that kernels always win."""
    report = compare(layer_of(), *inputs("random", {}, device, torch.float32), tolerance=1e-4)
    assert kernels(report) == {"several reductions"}


@pytest.mark.parametrize("options", ["plain", "edges"])
def test_each_part_trained_alone(options, device):
    """Also where the features of nodes, or of edges, have nothing to learn."""
    x, edge_index, *rest = inputs("random", OPTIONS[options], device)
    layer = layer_of(**OPTIONS[options]).to(device, torch.float64)
    for trained in layer.parameters():
        for p in layer.parameters():
            p.requires_grad_(p is trained)
        results = []
        for on in (True, False):
            (gnnfast.enable if on else gnnfast.disable)()
            (first,) = torch.autograd.grad(layer(x, edge_index, *rest).sin().sum(), trained, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), trained)
            results.append((first, second))
        gnnfast.enable()
        assert all(relative_error(f, e) < 1e-8 or e.norm() < 1e-12 for f, e in zip(*results))


def test_transforms_compile_and_script(device):
    x, edge_index = inputs("random", {}, device, torch.float32)
    layer = layer_of().to(device)
    expected = layer(x, edge_index)
    _, tangent = torch.func.jvp(lambda x: layer(x, edge_index), (x,), (torch.ones_like(x),))
    assert tangent.shape == expected.shape
    assert relative_error(copy.deepcopy(layer)(x, edge_index), expected) < 1e-6
    compiled = torch.compile(layer, backend="aot_eager")
    assert relative_error(compiled(x, edge_index), expected) < 1e-4
