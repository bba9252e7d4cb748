"""RGATConv against PyG's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from comparison import both, compare, same
from graphs import GRAPHS, relative_error

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn

from gnnfast.cache import cache
from gnnfast.pyg import relational_attention

F, OUT, R, D = 8, 6, 5, 3
SOME_GRAPHS = ["one_edge", "random", "hub", "self_loops_and_duplicates", "isolated", "sorted"]
MODES = {f"{mode.split('-')[0]} {how.split('-')[0]}": {"attention_mode": mode, "attention_mechanism": how}
         for mode, how in itertools.product(("additive-self-attention", "multiplicative-self-attention"), ("across-relation", "within-relation"))}  # fmt: skip
OPTIONS = {
    "plain": {},
    "bases": {"num_bases": 2},
    "blocks": {"num_blocks": 4},
    "mean of heads": {"concat": False},
    "no bias": {"bias": False},
    "slope": {"negative_slope": -0.5},
    **{mod: {"mod": mod} for mod in ("additive", "scaled", "f-additive", "f-scaled")},
}


@pytest.fixture(params=["rows there are", "all rows"])
def rows(request, monkeypatch):
    most = 0 if request.param == "rows there are" else 1 << 20
    monkeypatch.setattr(relational_attention, "ALL_ROWS", most)
    monkeypatch.setattr(relational_attention, "ALL_ROWS_BYTES", most)
    return request.param


def made(name, device, dtype=torch.float64):
    """Edges with types of which one has none."""
    edge_index, num_src, num_dst = GRAPHS[name]()
    types = torch.randint(R - 1, (edge_index.shape[1],))
    x, attr = torch.randn(max(num_src, num_dst), F, dtype=dtype), torch.randn(edge_index.shape[1], D, dtype=dtype)
    return x.to(device), edge_index.to(device), types.to(device), attr.to(device)


class Given(torch.nn.Module):
    """Features come first, then what has a gradient too."""

    def __init__(self, **options):
        super().__init__()
        self.conv, self.takes = nn.RGATConv(F, OUT, R, heads=2, **options), options.get("edge_dim")
        torch.nn.init.normal_(self.conv.l2)  # which PyG leaves uninitialized

    def forward(self, x, attr, edge_index, types):
        return self.conv(x, edge_index, types, attr if self.takes else None)


def served(report):
    names = {kernel for place, kernel, _ in report.kernels if place.endswith("RGATConv")}
    return bool(names) and "in parts" not in names


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_options(mode, options, rows, device):
    for name in ("random", "isolated"):
        x, edge_index, types, attr = made(name, device)
        for edge_dim in (None, D):
            layer = Given(**MODES[mode], **OPTIONS[options], edge_dim=edge_dim).double()
            assert served(compare(layer, x, attr, edge_index, types, tolerance=1e-9))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SOME_GRAPHS)
def test_graphs(name, mode, rows, device):
    x, edge_index, types, attr = made(name, device)
    assert served(compare(Given(**MODES[mode]).double(), x, attr, edge_index, types, tolerance=1e-9))


def test_float32(rows, device):
    x, edge_index, types, attr = made("hub", device, torch.float32)
    layer = Given(edge_dim=D).to(device)
    found, expected, report = both(lambda: layer(x, attr, edge_index, types))
    assert served(report) and relative_error(found, expected) < 1e-5


def test_ids32(rows, device):
    x, edge_index, types, _ = made("random", device)
    layer = nn.RGATConv(F, OUT, R).double().to(device)

    def step(edges):
        given = x.clone().requires_grad_()
        out = layer(given, edges, types)
        return [out, *torch.autograd.grad(out.square().sum(), [given, layer.weight, layer.q, layer.k])]

    found, expected = step(edge_index.int()), step(edge_index)
    assert served(gnnfast.report()) and all(relative_error(f, e) < 1e-12 for f, e in zip(found, expected))


@pytest.mark.parametrize("attr", ["a number", "a column", "a row"])
def test_features_of_edges(attr, device):
    x, edge_index, types, _ = made("random", device)
    shape = {"a number": (types.numel(),), "a column": (types.numel(), 1), "a row": (types.numel(), 4)}[attr]
    of_edges = torch.randn(shape, dtype=torch.float64, device=device)
    layer = nn.RGATConv(F, OUT, R, edge_dim=4 if attr == "a row" else 1).double().to(device)
    layer.lin_edge.register_forward_hook(lambda module, given, out: out * 2)
    found, expected, report = both(lambda: layer(x, edge_index, types, of_edges, (len(x), len(x))))
    assert served(report) and relative_error(found, expected) < 1e-9


@pytest.mark.parametrize("asked", [True, False])
def test_coefficients(asked, device):
    x, edge_index, types, _ = made("self_loops_and_duplicates", device)
    layer = nn.RGATConv(F, OUT, R, heads=3, mod="f-additive").double().to(device)
    found, expected, report = both(lambda: layer(x, edge_index, types, return_attention_weights=asked))
    assert served(report) and found[1][0] is edge_index and relative_error(found[0], expected[0]) < 1e-9
    assert found[1][1].shape == expected[1][1].shape and relative_error(found[1][1], expected[1][1]) < 1e-9
    assert layer._alpha is None


def test_dropout(rows, device):
    """Of the same coefficients as PyG's."""
    x, edge_index, types, _ = made("random", device)
    layer = nn.RGATConv(F, OUT, R, heads=2, dropout=0.4).double().to(device)

    def step():
        torch.manual_seed(3)
        layer.zero_grad()
        layer(x, edge_index, types).square().sum().backward()
        return [
            layer.weight.grad.clone(),
            layer.q.grad.clone(),
            layer.eval()(x, edge_index, types),
            layer.train()(x, edge_index, types),
        ]

    assert served(same(step))


@pytest.mark.parametrize("what", ["edge_index", "types"])
def test_what_was_written_into_is_seen(what, rows, device):
    x, edge_index, types, _ = made("random", device)
    layer = nn.RGATConv(F, OUT, R).double().to(device)
    layer(x, edge_index, types)
    if what == "types":
        types.copy_((types + 1) % R)
    else:
        edge_index.copy_(edge_index.flip(1))
    found, expected, report = both(lambda: layer(x, edge_index, types))
    assert served(report) and relative_error(found, expected) < 1e-9


def test_features_may_be_written_into(rows, device):
    x, edge_index, types, _ = made("random", device)
    layer = nn.RGATConv(F, OUT, R).double().to(device)

    def step():
        layer.zero_grad()
        given = x.clone()
        out = layer(given, edge_index, types)
        given.zero_()
        out.square().sum().backward()
        return [out, *(p.grad.clone() for p in (layer.weight, layer.q, layer.k))]

    assert served(same(step))


def test_edges_are_kept_with_their_types(rows, device):
    x, edge_index, types, _ = made("self_loops_and_duplicates", device)
    layer = nn.RGATConv(F, OUT, R).double().to(device)
    cache.clear()
    for _ in range(3):
        layer(x, edge_index, types).sum().backward()
    assert cache.misses and len(cache) == 1 and cache.nbytes >= 2 * edge_index.nbytes
    del types
    assert len(cache) == 0 and cache.nbytes == 0


@pytest.mark.parametrize("what", ["a type", "a source", "a destination"])
def test_ids_out_of_range(what):
    """PyG says what it says. (On a GPU that leaves the device unusable.)"""
    x, edge_index, types, _ = made("self_loops_and_duplicates", torch.device("cpu"))
    edge_index, types = edge_index.clone(), types.clone()
    wrong = types if what == "a type" else edge_index[0 if what == "a source" else 1]
    wrong[0] = max(len(x), R) + 3
    layer = nn.RGATConv(F, OUT, R).double()

    def failed():
        with pytest.raises((IndexError, RuntimeError, ValueError)) as raised:
            layer(x, edge_index, types)
        return str(raised.value)

    found, expected, _ = both(failed)
    assert found == expected


class Doubled(nn.RGATConv):
    def message(self, x_i, x_j, edge_type, edge_attr, index, ptr, size_i):
        return 2 * super().message(x_i, x_j, edge_type, edge_attr, index, ptr, size_i)


def test_other_layers_are_left_alone(device, monkeypatch):
    x, edge_index, types, _ = made("random", device)
    layers = {
        "subclass": Doubled(F, OUT, R),
        "turned around": nn.RGATConv(F, OUT, R, flow="target_to_source"),
        "several": nn.RGATConv(F, OUT, R, attention_mode="multiplicative-self-attention", dim=2),
        "mean": nn.RGATConv(F, OUT, R, aggr="mean"),
        "activation": nn.RGATConv(F, OUT, R, mod="scaled"),
        "hooked": nn.RGATConv(F, OUT, R),
    }
    layers["activation"].activation = torch.nn.Softmax(dim=0)
    torch.nn.init.normal_(layers["activation"].l2)
    layers["hooked"].register_message_forward_hook(lambda module, inputs, output: output * 3)
    for layer in layers.values():
        assert not served(compare(layer.double(), x, edge_index, types, tolerance=1e-9))
    pair = nn.RGATConv(F, OUT, R).double().to(device)
    found, expected, report = both(lambda: pair((x, x), edge_index, types))
    assert not served(report) and relative_error(found, expected) < 1e-9
    from torch_geometric.nn.conv import rgat_conv

    monkeypatch.setattr(rgat_conv, "softmax", lambda alpha, *_: alpha.sigmoid())
    assert not served(compare(nn.RGATConv(F, OUT, R).double(), x, edge_index, types, tolerance=1e-9))


@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode, rows, device):
    x, edge_index, types, attr = made("isolated", device)
    layer = Given(**MODES[mode], edge_dim=D).double().to(device)
    step = lambda x, attr: layer(x, attr, edge_index, types)  # noqa: E731
    inputs = x.requires_grad_(), attr.requires_grad_()
    assert torch.autograd.gradcheck(step, inputs) and torch.autograd.gradgradcheck(step, inputs)
    gnnfast.clear_report()
    step(*inputs)
    assert served(gnnfast.report())


def test_compiled(device):
    """Between the compiler's pieces; PyG's own where there must be one."""
    x, edge_index, types, _ = made("self_loops_and_duplicates", device, torch.float32)
    layer = nn.RGATConv(F, OUT, R).to(device)
    expected = layer(x, edge_index, types)
    torch._dynamo.reset()
    gnnfast.clear_report()
    model = torch.compile(lambda *given: layer(*given).tanh())
    for _ in range(2):
        out = model(x, edge_index, types)
    assert relative_error(out, expected.tanh()) < 1e-5 and served(gnnfast.report())
    out = torch.compile(layer, fullgraph=True)(x, edge_index, types)
    assert relative_error(out, expected) < 1e-5
