"""Attention layers with features of edges, also of self loops that are added, against PyG's own."""

from __future__ import annotations

from typing import Optional

import pytest
import torch
from attention_layers import TRANSFORMERS, F, Initial, Pair, same, served
from comparison import both, compare
from graphs import GRAPHS, relative_error

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn

FILLED = {
    "no loops": {"add_self_loops": False},
    "mean": {},
    "number": {"fill_value": 0.5},
    "tensor": {"fill_value": torch.tensor([1.0, -2.0, 3.0])},
    "max": {"fill_value": "max"},
    "dropout": {"dropout": 0.5},
    "mean of heads": {"concat": False, "residual": True},
}


@pytest.mark.parametrize("options", FILLED)
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
@pytest.mark.parametrize("name", ["random", "hub", "self_loops_and_duplicates", "sorted", "one_edge", "no_edges"])
def test_edge_features(name, make, options, device):
    """Also of self loops that are added, where nodes had none, one or several."""
    dtype = torch.float32 if name == "random" else torch.float64
    edge_index, num_src, num_dst = GRAPHS[name]()
    n = max(num_src, num_dst)
    x, attr = (torch.randn(m, k, device=device, dtype=dtype) for m, k in ((n, F), (edge_index.shape[1], 3)))
    layer = make(F, 5, heads=2, edge_dim=3, **FILLED[options]).to(dtype)
    with gnnfast.override(dropout="framework"):  # the same masks
        report = compare(layer, x, edge_index.to(device), attr, tolerance=1e-9 if dtype is torch.float64 else 1e-4)
    kernels = {kernel for place, kernel, _ in report.kernels if place == f"pyg {make.__name__}"}
    if make is nn.GATConv:
        assert kernels >= {"edge softmax"} or (name == "no_edges" and kernels == {"attention"})
    else:
        assert kernels == {"attention"} or options == "dropout"
    assert not report.fallbacks and not any("part" in kernel for _, kernel, _ in report.kernels)


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_edge_features_of_one_column_and_of_pairs(make, loops, device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    edge_index = edge_index.flip(0).to(device)  # more sources than destinations
    if loops:
        edge_index = edge_index[:, (edge_index < num_src).all(0)]
    x = [torch.randn(m, f, device=device, dtype=torch.float64) for m, f in ((num_dst, F), (num_src, 6))]
    attr = torch.randn(edge_index.shape[1], device=device, dtype=torch.float64)
    layer = make((F, 6), 5, heads=2, edge_dim=1, add_self_loops=loops).double()
    assert served(compare(_PairOfEdges(layer), *x, edge_index, attr, tolerance=1e-9), make.__name__)


class _PairOfEdges(Pair):
    def forward(self, a, b, edge_index, attr):
        return self.conv((a, b), edge_index, attr)


@pytest.mark.parametrize("fill", ["mean", "max"])
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_edge_features_twice_and_weights(make, fill, device):
    edge_index, n, _ = GRAPHS["self_loops_and_duplicates"]()
    x, attr = (torch.randn(m, k, device=device, dtype=torch.float64) for m, k in ((n, F), (edge_index.shape[1], 3)))
    layer = make(F, 5, heads=2, edge_dim=3, fill_value=fill).to(device, torch.float64)
    edge_index, leaves, results = edge_index.to(device), [x.requires_grad_(), attr.requires_grad_(), *layer.parameters()], []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        out, (looped, alpha) = layer(x, edge_index, attr, return_attention_weights=True)
        grads = torch.autograd.grad(out.sin().sum() + alpha.square().sum(), leaves, create_graph=True)
        seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, allow_unused=True)
        results.append([looped.double(), out, alpha, *grads, *(g for g in seconds if g is not None)])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-9 or e.norm() < 1e-12 for f, e in zip(*results))


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_edge_features_that_may_be_anything(make, device):
    """A hook, and 16 bits, where rounding in another order shows: PyG's own scores."""
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = torch.randn(n, F, device=device), torch.randn(edge_index.shape[1], 3, device=device)
    edge_index = edge_index.to(device)
    for loops in (True, False):
        layer = make(F, 5, heads=2, edge_dim=3, add_self_loops=loops).to(device)
        layer.lin_edge.register_forward_hook(lambda module, inputs, out: 2 * out)
        compare(layer, x, edge_index, attr, tolerance=1e-4)
        half = make(F, 5, edge_dim=3, add_self_loops=loops).to(device, torch.bfloat16)
        found = half(x.bfloat16(), edge_index, attr.bfloat16())
        gnnfast.disable()
        assert relative_error(found, half(x.bfloat16(), edge_index, attr.bfloat16())) < 1e-2
        gnnfast.enable()
        layer = make(F, 5, heads=2, edge_dim=3, add_self_loops=loops).to(device)
        of_nodes = (layer.lin,) if make is nn.GATConv else (layer.lin_l, layer.lin_r)
        for lin in of_nodes:  # as many loops as then are rows
            lin.register_forward_hook(lambda module, inputs, out: torch.cat([out, out]))
        assert same(lambda layer=layer: layer(x, edge_index, attr))


def test_transformer_with_edge_features_and_weights(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = (torch.randn(m, k, device=device, dtype=torch.float64) for m, k in ((n, F), (edge_index.shape[1], 3)))
    edge_index = edge_index.to(device)
    layer = nn.TransformerConv(F, 5, heads=2, edge_dim=3).double()
    layer.lin_edge.register_forward_hook(lambda module, inputs, out: 2 * out)
    report = compare(layer, x, edge_index, attr)
    assert ("gathers and sum", "edge features are added to keys and values") in {(k, why) for _, k, why in report.kernels}
    layer = nn.TransformerConv(F, 5, heads=2).to(device, torch.float64)
    found = layer(x, edge_index, return_attention_weights=True)
    gnnfast.disable()
    expected = layer(x, edge_index, return_attention_weights=True)
    gnnfast.enable()
    assert found[1][0] is edge_index and relative_error(found[1][1], expected[1][1]) < 1e-5
    assert layer._alpha is None


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_small_graphs_that_are_new_are_left_with_edge_features(make, device, small):
    layer, x = make(F, 5, edge_dim=3).to(device).eval(), torch.randn(30, F, device=device)
    edge_index, attr = torch.randint(0, 30, (2, 200), device=device), torch.randn(200, 3, device=device)
    ran = []
    with torch.no_grad():
        for _ in range(3):
            gnnfast.clear_report()
            found = layer(x, edge_index, attr)
            ran.append("PyG's own" in {kernel for _, kernel, _ in gnnfast.report().kernels})
        gnnfast.disable()
        assert relative_error(found, layer(x, edge_index, attr)) < 1e-5
        gnnfast.enable()
    assert ran == [device.type == "cuda", False, False]


@pytest.mark.parametrize("width", [3, 7])  # narrower than a head, and wider
@pytest.mark.parametrize("options", TRANSFORMERS)
@pytest.mark.parametrize("name", GRAPHS)
def test_transformer_of_edge_features(name, options, width, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    sizes = (max(num_src, num_dst), F), (edge_index.shape[1], width)
    x, attr = (torch.randn(size, device=device, dtype=torch.float64) for size in sizes)
    layer = nn.TransformerConv(F, 5, edge_dim=width, **TRANSFORMERS[options]).double()
    report = compare(layer, x, edge_index.to(device), attr, tolerance=1e-9)
    assert {kernel for place, kernel, _ in report.kernels if place == "pyg TransformerConv"} >= {"edge softmax"}
    assert not report.fallbacks and not any("part" in kernel for _, kernel, _ in report.kernels)


@pytest.mark.parametrize("make", [nn.TransformerConv, nn.GATConv, nn.GATv2Conv])
@pytest.mark.parametrize("width", [3, 7])
def test_edge_features_of_32_bits(width, make, device):
    edge_index, n, _ = GRAPHS["random"]()
    leaves = [torch.randn(m, k, device=device, requires_grad=True) for m, k in ((n, F), (edge_index.shape[1], width))]
    layer, edge_index, results = make(F, 5, heads=2, edge_dim=width).to(device), edge_index.to(device), []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        out = layer(leaves[0], edge_index, leaves[1])
        results.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, layer.lin_edge.weight])])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-5 for f, e in zip(*results))


@pytest.mark.parametrize("width", [3, 7])
def test_transformer_of_edge_features_of_pairs_twice(width, device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    x = [torch.randn(m, f, device=device, dtype=torch.float64) for m, f in ((num_src, F), (num_dst, 6))]
    attr = torch.randn(edge_index.shape[1], width, device=device, dtype=torch.float64)
    layer = nn.TransformerConv((F, 6), 5, heads=2, edge_dim=width).to(device, torch.float64)
    compare(_PairOfEdges(layer), *x, edge_index.to(device), attr, tolerance=1e-9)
    edge_index, leaves, results = edge_index.to(device), [*(t.requires_grad_() for t in (*x, attr)), *layer.parameters()], []
    for on in (True, False):
        (gnnfast.enable if on else gnnfast.disable)()
        grads = torch.autograd.grad(layer(tuple(x), edge_index, attr).sin().sum(), leaves, create_graph=True)
        seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, allow_unused=True)
        results.append([*grads, *(g for g in seconds if g is not None)])
    gnnfast.enable()
    assert all(relative_error(f, e) < 1e-8 or e.norm() < 1e-12 for f, e in zip(*results))


def test_edges_that_change_and_what_is_not_served_of_them(device):
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = torch.randn(n, F, device=device), torch.randn(edge_index.shape[1], 3, device=device)
    edge_index = edge_index.to(device)
    for layer in (make(F, 5, edge_dim=3).to(device) for make in (nn.TransformerConv, nn.GATConv, nn.GATv2Conv)):
        for _ in range(2):
            for _ in range(3):
                assert same(lambda layer=layer: layer(x, edge_index, attr))
            edge_index[:, :20] = edge_index[:, :20].flip(1).roll(1, 0)
        assert same(lambda layer=layer: layer(x, edge_index, attr, return_attention_weights=True)[1][1])
        if device.type == "cpu":  # on a GPU PyG itself may end in a device-side assertion
            assert same(lambda layer=layer: layer(x, edge_index, attr[:-1]))
            assert same(lambda layer=layer: layer(x, edge_index))
            assert same(lambda layer=layer: layer(x, edge_index, attr[:, :2]))


@pytest.mark.parametrize("make", ["AGNNConv", "FAConv", "TransformerConv", "GATConv", "GATv2Conv"])
def test_compiled_layers_are_pygs_own(make, device):
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = torch.randn(n, F, device=device), torch.randn(edge_index.shape[1], 3, device=device)
    edge_index = edge_index.to(device)
    layer = {
        "AGNNConv": nn.AGNNConv,
        "FAConv": lambda: Initial(nn.FAConv(F)),
        "TransformerConv": lambda: nn.TransformerConv(F, 5, edge_dim=3),
        "GATConv": lambda: nn.GATConv(F, 5, edge_dim=3),
        "GATv2Conv": lambda: nn.GATv2Conv(F, 5, edge_dim=3),
    }[make]().to(device)
    args = (x, edge_index) if make in ("AGNNConv", "FAConv") else (x, edge_index, attr)
    compiled = torch.compile(layer, backend="aot_eager")
    assert relative_error(compiled(*args), layer(*args)) < 1e-4


def test_edge_features_evaluated_and_then_trained(device):
    """What is kept of a graph that was met under inference_mode is good for training."""
    x, attr = torch.randn(30, F, device=device), torch.randn(200, 3, device=device)
    for make in (nn.TransformerConv, nn.GATConv, nn.GATv2Conv):
        edge_index, layer = GRAPHS["random"]()[0].to(device), make(F, 5, edge_dim=3).to(device)
        with torch.inference_mode():
            expected = layer(x, edge_index, attr)
            assert relative_error(layer(x, edge_index.clone(), attr), expected) < 1e-5
        out = layer(x, edge_index, attr)
        out.sum().backward()
        assert relative_error(out, expected) < 1e-5 and layer.lin_edge.weight.grad is not None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [nn.TransformerConv, nn.GATConv, nn.GATv2Conv])
def test_small_graphs_with_edge_features(make, training, device, small):
    """TransformerConv's are PyG's own; GATConv's and GATv2Conv's on a GPU where they are new and gradients gain nothing; and the
    numbers are PyG's in any case."""
    edge_index, n, _ = GRAPHS["random"]()
    x, attr = (torch.randn(m, k, device=device, dtype=torch.float64) for m, k in ((n, F), (edge_index.shape[1], 3)))
    layer, edge_index = make(F, 5, heads=2, edge_dim=3).to(device, torch.float64), edge_index.to(device)
    new_to_gpu = int(device.type == "cuda")
    alone = {nn.TransformerConv: 3, nn.GATConv: new_to_gpu, nn.GATv2Conv: new_to_gpu * (not training)}[make]
    with torch.set_grad_enabled(training):
        layer(x, edge_index.clone(), attr)  # calls are left alone of a class that was served before
        for nth in range(3):
            gnnfast.clear_report()
            found = layer(x, edge_index, attr)
            kernels = {kernel for place, kernel, _ in gnnfast.report().kernels if place == f"pyg {make.__name__}"}
            assert ("PyG's own" in kernels) == (nth < alone)  # and in inference one operation that sums rows with coefficients
            gnnfast.disable()
            assert relative_error(found, layer(x, edge_index, attr)) < 1e-11
            gnnfast.enable()


class Calling(torch.nn.Module):
    """What TorchScript runs is PyG's."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: Optional[torch.Tensor] = None) -> torch.Tensor:  # noqa: UP045 (TorchScript)
        return self.conv(x, edge_index, edge_attr)


@pytest.mark.parametrize("edge_dim", [None, 3])
def test_next_to_no_edges_are_as_torchscript_has_them(edge_dim, small):
    """Also those of the first call of a class, by another forward than the layer's too."""
    x, edge_index = torch.randn(4, F), torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
    rest = () if edge_dim is None else (torch.randn(4, edge_dim),)

    class Own(nn.TransformerConv):
        def forward(self, x, edge_index, edge_attr=None):
            return super().forward(x, edge_index, edge_attr) * 1.0

    torch.manual_seed(0)
    conv = nn.TransformerConv(F, 32, heads=2, beta=True, edge_dim=edge_dim)
    own = Own(F, 32, heads=2, beta=True, edge_dim=edge_dim)
    own.load_state_dict(conv.state_dict())
    script = torch.jit.script(Calling(conv))
    for _ in range(2):
        expected = script(x, edge_index, *rest)
        assert torch.equal(conv(x, edge_index, *rest), expected) and torch.equal(own(x, edge_index, *rest), expected)
    more = torch.randint(0, 4, (2, 400))
    gnnfast.clear_report()
    conv(x, more, *(t[:1].expand(400, -1) for t in rest))
    kernels = {kernel for _, kernel, _ in gnnfast.report().kernels} - {"in one operation"}  # a softmax of the same bits
    assert (kernels == {"PyG's own"}) == (edge_dim is not None)


WRITTEN = [(make, what) for make in (nn.GATConv, nn.GATv2Conv) for what in ("edge_attr", "edge_index")]


@pytest.mark.parametrize("make, what", [*WRITTEN, (nn.TransformerConv, "parameters")])
def test_what_is_written_into_before_the_backward_pass(make, what, device):
    """PyG keeps copies of edges and their features, to which it adds loops, and no weights of features without a gradient."""
    edge_index, _, nodes = GRAPHS["random"]()
    layer = make(F, 5, heads=2, edge_dim=3).to(device).double()
    x, attr = (torch.randn(rows, k, device=device, dtype=torch.float64) for rows, k in ((nodes, F), (edge_index.shape[1], 3)))

    def gradients():
        given, columns = edge_index.to(device), attr.clone()
        out = layer(x, given, columns)
        written = {"edge_attr": [columns], "edge_index": [given], "parameters": [*layer.parameters()]}[what]
        kept = [t.detach().clone() for t in written]
        with torch.no_grad():
            for t in written:
                t.zero_()
        out.square().sum().backward()
        with torch.no_grad():
            for t, values in zip(written, kept):
                t.copy_(values)
        found = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        return found

    found, expected, report = both(gradients)
    assert report.kernels and not report.fallbacks
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fill", ["mean", 0.5])
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv])
def test_edges_made_in_inference_mode(make, fill, device):
    edge_index, _, nodes = GRAPHS["random"]()
    with torch.inference_mode():
        edge_index = edge_index.to(device).clone()
    x, attr = torch.randn(nodes, F, device=device), torch.randn(edge_index.shape[1], 3, device=device)
    conv = make(F, 5, heads=2, edge_dim=3, fill_value=fill).to(device)

    class OverEdges(torch.nn.Module):
        """Of which copies have these very edges."""

        def __init__(self):
            super().__init__()
            self.conv = conv

        def forward(self, x, attr):
            return self.conv(x, edge_index, attr)

    compare(OverEdges(), x, attr)


@pytest.mark.parametrize("asked", [1, torch.tensor(True)])
@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv, nn.TransformerConv])
def test_a_truth_that_is_no_bool_asks_for_coefficients_as_in_pyg(make, asked, device):
    edge_index, _, nodes = GRAPHS["random"]()
    layer, x = make(F, 5, heads=2).to(device).eval(), torch.randn(nodes, F, device=device)
    found, expected, _ = both(lambda: layer(x, edge_index.to(device), return_attention_weights=asked))
    assert type(found) is type(expected) and isinstance(found, tuple) == (make is not nn.TransformerConv)
