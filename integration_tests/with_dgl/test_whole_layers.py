"""DGL's layers that gnnfast computes as a whole, with and without gnnfast, and the check of in-degrees."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import comparison
import pytest
import torch
from graphs import GRAPHS, relative_error

import gnnfast
from gnnfast import _native

dgl = pytest.importorskip("dgl")
from dgl.nn import pytorch as nn  # noqa: E402

from gnnfast.dgl.install import LAYERS as PATCHED  # noqa: E402

IDS = [torch.int32, torch.int64]
TIGHT = 1e-9
F = 8


def square(name, idtype=torch.int64, device="cpu"):
    (src, dst), num_src, num_dst = GRAPHS[name]()
    return dgl.graph((src, dst), num_nodes=max(num_src, num_dst), idtype=idtype).to(device)


def bipartite(name, idtype=torch.int64, device="cpu"):
    (src, dst), num_src, num_dst = GRAPHS[name]()
    return dgl.heterograph({("u", "e", "v"): (src, dst)}, {"u": num_src, "v": num_dst}, idtype=idtype).to(device)


def block(idtype=torch.int64, device="cpu"):
    g, seeds = square("random", idtype), torch.arange(9, dtype=idtype)
    return dgl.to_block(dgl.in_subgraph(g, seeds), seeds).to(device)


def randn(*shape, device="cpu"):
    return torch.randn(*shape, dtype=torch.float64, device=device)


def norm(width):
    """Without weights, the gradient of the sum of its squares is 0, and digits are rounding alone."""
    made = torch.nn.LayerNorm(width)
    torch.nn.init.uniform_(made.weight)
    return made


def gat(cls, *args, **kwargs):
    return lambda: cls(F, *args, allow_zero_in_degree=True, **kwargs)


LAYERS = {
    "GATConv": gat(nn.GATConv, 4, 2),
    "GATConv residual": gat(nn.GATConv, 4, 2, residual=True),
    "GATConv identity residual": gat(nn.GATConv, 4, 2, residual=True, bias=False),
    "GATConv one head": gat(nn.GATConv, 5, 1, activation=torch.tanh, negative_slope=0.3),
    "GATConv bare": gat(nn.GATConv, 4, 2, bias=False),
    "GATConv in place": gat(nn.GATConv, 4, 2, bias=False, activation=torch.nn.ReLU(inplace=True)),
    "GATv2Conv": gat(nn.GATv2Conv, 4, 2),
    "GATv2Conv shared": gat(nn.GATv2Conv, 4, 2, share_weights=True, residual=True),
    "GATv2Conv in place": gat(nn.GATv2Conv, 3, 3, bias=False, activation=torch.nn.ReLU(inplace=True)),
    "DotGatConv": gat(nn.DotGatConv, 4, 2),
    "AGNNConv": lambda: nn.AGNNConv(0.7, allow_zero_in_degree=True),
    "AGNNConv fixed": lambda: nn.AGNNConv(learn_beta=False, allow_zero_in_degree=True),
    "SAGEConv": lambda: nn.SAGEConv(F, 5, "mean"),
    "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, 5), "sum", 0.3, learn_eps=True, activation=torch.relu),
    "GINConv bare": lambda: nn.GINConv(),
    "SAGEConv wide": lambda: nn.SAGEConv(F, 16, "mean", bias=False, activation=torch.relu, norm=norm(16)),
    **{
        f"GraphConv {norm} {width}": gat(nn.GraphConv, width, norm=norm, bias=width == 5, activation=torch.nn.ReLU(inplace=True))
        for norm in ("both", "left", "right", "none")
        for width in (5, 16)
    },
    "GraphConv without weight": gat(nn.GraphConv, F, weight=False, bias=False),
}
ATTENTION = [name for name in LAYERS if name.startswith(("GAT", "DotGat", "AGNN"))]


def compare(layer, g, *inputs, **kwargs):
    """With gnnfast equals DGL on the CPU, which is all that PyPI's has."""
    if g.device.type == "cpu":
        return comparison.compare(layer, g, *inputs, **kwargs)
    tolerance, host = kwargs.pop("tolerance"), g.cpu()
    gnnfast.clear_report()
    found = comparison.run(copy.deepcopy(layer).to(g.device), g, *inputs, **kwargs)
    report = gnnfast.report()
    gnnfast.disable()
    try:
        cpu = [t.cpu() if isinstance(t, torch.Tensor) else t for t in inputs]
        expected = comparison.run(layer.cpu(), host, *cpu, **kwargs)
    finally:
        gnnfast.enable()
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            assert relative_error(a.cpu(), b) < tolerance or (a.cpu() - b).norm() < 1e-13 * max(b.numel(), float(b.norm()))
    return report


def served(report, layer):
    """Whether as a whole; GINConv is one aggregation, which is reported as such."""
    if layer.startswith("GINConv"):
        return "in parts" not in {kernel for _, kernel, _ in report.kernels}
    return ("dgl", layer.split()[0]) in {tuple(place.split()) for place, kernel, _ in report.kernels if kernel != "in parts"}


@pytest.mark.parametrize(("name", "idtype"), zip(GRAPHS, itertools.cycle(IDS)))
@pytest.mark.parametrize("layer", LAYERS)
def test_layer(layer, name, idtype, device):
    g = square(name, idtype, device)
    report = compare(LAYERS[layer]().double(), g, randn(g.num_nodes(), F, device=device), tolerance=TIGHT)
    assert served(report, layer) and not report.fallbacks
    assert "in parts" not in {kernel for _, kernel, _ in report.kernels}


@pytest.mark.parametrize("layer", LAYERS)
def test_float32_and_strided_features(layer, device):
    g = square("hub", device=device)
    x = torch.randn(F, g.num_nodes(), device=device).t()
    report = compare(LAYERS[layer](), g, x, tolerance=5e-5)
    assert served(report, layer)


class Pair(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, g, x, y, *args):
        return self.layer(g, (x, y), *args)


PAIRS = {
    "GATConv": lambda: nn.GATConv((F, 6), 4, 2, residual=True, allow_zero_in_degree=True),
    "GATConv of one size": lambda: nn.GATConv(F, 4, 2, allow_zero_in_degree=True),
    "GATv2Conv": lambda: nn.GATv2Conv((F, 6), 4, 2, residual=True, allow_zero_in_degree=True),
    "DotGatConv": lambda: nn.DotGatConv((F, 6), 4, 2, allow_zero_in_degree=True),
    "AGNNConv of one size": lambda: nn.AGNNConv(allow_zero_in_degree=True),
    "SAGEConv": lambda: nn.SAGEConv((F, 6), 5, "mean"),
    "GraphConv": lambda: nn.GraphConv(F, 5, allow_zero_in_degree=True),
}


@pytest.mark.parametrize("idtype", IDS)
@pytest.mark.parametrize("layer", PAIRS)
def test_pairs(layer, idtype, device):
    for name in GRAPHS:
        g = bipartite(name, idtype, device)
        x, y = randn(g.num_nodes("u"), F, device=device), randn(g.num_nodes("v"), F if "one size" in layer else 6, device=device)
        report = compare(Pair(PAIRS[layer]().double()), g, x, y, tolerance=TIGHT)
        assert served(report, layer) and not report.fallbacks, name


@pytest.mark.parametrize("layer", PAIRS)
def test_pairs_for_nodes_of_one_type(layer, device):
    """As HeteroGraphConv passes them; what both ends write under one name in DGL's frames is the destinations'."""
    layer, g = PAIRS[layer]().double(), square("random", device=device)
    width = 6 if getattr(layer, "_in_dst_feats", F) == 6 else F
    x, y = randn(g.num_nodes(), F, device=device), randn(g.num_nodes(), width, device=device)
    compare(Pair(layer), g, x, y, tolerance=TIGHT)


@pytest.mark.parametrize("formats", [["csr", "csc"], ["coo"], ["csr", "csc", "coo"]], ids="-".join)
@pytest.mark.parametrize("layer", [name for name in LAYERS if name not in ATTENTION])  # for which DGL asks the others
def test_graphs_with_some_formats(layer, formats):
    for name in ("random", "hub"):
        g = square(name).formats(formats)
        compare(LAYERS[layer]().double(), g, randn(g.num_nodes(), F), tolerance=TIGHT)


def test_parameters_of_another_dtype():
    """DGL makes some of float32 whatever the default is."""
    torch.set_default_dtype(torch.float64)
    try:
        layer = nn.GATv2Conv(F, 4, 2, allow_zero_in_degree=True)
    finally:
        torch.set_default_dtype(torch.float32)
    g = square("random")
    compare(layer, g, randn(g.num_nodes(), F), tolerance=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_blocks(layer, device):
    g = block(device=device)
    x = randn(g.num_src_nodes(), F, device=device)
    report = compare(LAYERS[layer]().double(), g, x, tolerance=TIGHT)
    assert served(report, layer) and not report.fallbacks
    if layer not in ("AGNNConv", "AGNNConv fixed", "DotGatConv", "GATv2Conv shared"):  # which give pairs other weights, or none
        compare(Pair(LAYERS[layer]().double()), g, x, x[: g.num_dst_nodes()].clone(), tolerance=TIGHT)


@pytest.mark.parametrize("layer", LAYERS)
def test_graphs_that_are_met_first(layer, monkeypatch):
    """And may be those of a mini-batch are served as any other."""
    monkeypatch.setattr("gnnfast.dgl.backend.FEW_EDGES", 1 << 18)
    for make in (lambda: square("random"), lambda: square("isolated"), lambda: square("no_edges"), block):
        g = make()
        report = compare(LAYERS[layer]().double(), g, randn(g.num_src_nodes(), F), tolerance=TIGHT, repeats=1)
        assert served(report, layer)


@pytest.mark.parametrize("layer", ["GATConv", "GATv2Conv"])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_as_the_framework_draws_it(layer, training, device):
    if training and device.type == "cuda":
        pytest.skip("DGL itself is on the CPU, whose random numbers are others")
    g = square("random", device=device)
    module = {"GATConv": nn.GATConv, "GATv2Conv": nn.GATv2Conv}[layer](
        F, 4, 3, feat_drop=0.2, attn_drop=0.4, residual=True, allow_zero_in_degree=True
    )
    module = module.double().train(training)
    with gnnfast.override(dropout="framework"):
        compare(module, g, randn(30, F, device=device), tolerance=TIGHT)
        compare(Pair(module), g, randn(30, F, device=device), randn(30, F, device=device), tolerance=TIGHT)


def test_dropout_in_the_kernel_leaves_out_its_share(device):
    g = dgl.graph((torch.randint(0, 400, (20000,)), torch.randint(0, 400, (20000,))), num_nodes=400).to(device)
    module = nn.GATv2Conv(F, 4, 2, attn_drop=0.5, allow_zero_in_degree=True).double().to(device)
    x = randn(400, F, device=device)
    torch.manual_seed(1)
    first = module(g, x)
    torch.manual_seed(1)
    assert torch.equal(module(g, x), first) and not torch.equal(module(g, x), first)
    mean = torch.stack([module(g, x).detach() for _ in range(200)]).mean(0)
    assert relative_error(mean, module.eval()(g, x).detach()) < 0.05


@pytest.mark.parametrize("layer", ["GATConv", "DotGatConv", "GATv2Conv"])
def test_coefficients(layer, device):
    g = square("self_loops_and_duplicates", device=device)
    module = gat(getattr(nn, layer), 4, 2)().double()

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = module

        def forward(self, g, x):
            out, a = self.layer(g, x, get_attention=True)
            assert a.shape == (g.num_edges(), 2, 1) and not g.edata
            return torch.cat([out.flatten(), (a * torch.arange(7.0, device=a.device).view(7, 1, 1)).flatten()])

    report = compare(Both(), g, randn(3, F, device=device), tolerance=TIGHT)
    assert served(report, layer) == (layer != "GATv2Conv")


def in_parts(report):
    return {reason for _, kernel, reason in report.kernels if kernel == "in parts"}


def test_what_is_not_served_as_a_whole(monkeypatch):
    g, x = square("random"), randn(30, F)
    w = torch.rand(g.num_edges(), dtype=torch.float64)
    conv, gatv1 = LAYERS["GraphConv both 5"]().double(), LAYERS["GATConv"]().double()
    for layer, args, reason in (
        (gatv1, (x, w), "edges have weights"),
        (gatv1, (randn(30, 3, F),), "of shapes [30, 3, 8]"),
        (conv, (x, None, w), "edges have weights"),
        (conv, (randn(30, 3, F),), "of shapes [30, 3, 8]"),
        (nn.GraphConv(F, 4, weight=False, allow_zero_in_degree=True, bias=False), (x, randn(F, 4)), ""),
        (nn.SAGEConv(F, 4, "pool").double(), (x,), "aggregates by pool"),
    ):
        report = compare(layer, g, *args, tolerance=TIGHT)
        assert any(reason in r for r in in_parts(report)) == bool(reason)
    seen = []
    gatv1.attn_drop.register_forward_hook(lambda m, i, o: seen.append(o.shape))
    assert any("another than" in r for r in in_parts(compare(gatv1, g, x, tolerance=TIGHT))) and seen

    class Leaky(torch.nn.LeakyReLU):
        def forward(self, x):
            return super().forward(x) + 1 - x.abs()

    gatv1 = LAYERS["GATConv"]().double()
    gatv1.leaky_relu = Leaky()
    assert in_parts(compare(gatv1, g, x, tolerance=TIGHT))
    monkeypatch.setattr("dgl.nn.pytorch.conv.gatconv.edge_softmax", lambda g, e: dgl.ops.edge_softmax(g, 2 * e))
    assert any("was replaced" in r for r in in_parts(compare(LAYERS["GATConv"]().double(), g, x, tolerance=TIGHT)))


def test_hooks_and_subclasses_are_heard():
    g, x = square("random"), randn(30, F)

    class Doubled(nn.GATConv):
        def forward(self, graph, feat):
            return 2 * super().forward(graph, feat)

    assert served(compare(Doubled(F, 4, 2, allow_zero_in_degree=True).double(), g, x, tolerance=TIGHT), "Doubled")
    for name in ("GATConv", "GATv2Conv", "GraphConv both 16", "SAGEConv"):
        layer = LAYERS[name]().double()
        for part in list(layer.children()):
            part.register_forward_hook(lambda m, i, o: o * 1.5)
        layer.register_forward_hook(lambda m, i, o: o + 1)
        compare(layer, g, x, tolerance=TIGHT)


class Doubling(dgl.DGLGraph):
    def out_degrees(self, *args, **kwargs):
        return 2 * super().out_degrees(*args, **kwargs)


def _own_sum(graph):
    update_all = graph.update_all
    graph.update_all = lambda *args, **kwargs: update_all(dgl.function.copy_u("h", "m"), dgl.function.max("m", "h"))


def _own_degrees(graph):
    in_degrees = graph.in_degrees
    graph.in_degrees = lambda *args, **kwargs: 4 * in_degrees(*args, **kwargs)


@pytest.mark.parametrize("change", [lambda graph: setattr(graph, "__class__", Doubling), _own_sum, _own_degrees])
def test_methods_of_graphs_are_heard(change):
    g, x = square("random"), randn(30, F)
    layer = nn.GraphConv(F, 5, allow_zero_in_degree=True).double()
    expected = layer(g, x)
    change(g)
    assert not torch.equal(layer(g, x), expected)
    comparison.same(lambda: [layer(g, x)], 1e-10)


def test_messages_of_relational_layers_are_heard(monkeypatch):
    g, x = square("random"), randn(30, F)
    types = torch.arange(g.num_edges()) % 3
    calls = {
        nn.RelGraphConv: (nn.RelGraphConv(F, 4, 3).double(), (types,)),
        nn.HGTConv: (nn.HGTConv(F, 2, 2, 2, 3).double(), (torch.arange(30) % 2, types)),
    }
    for kind, (layer, given) in calls.items():
        message = kind.message
        monkeypatch.setattr(kind, "message", lambda self, edges, of=message: {k: 2 * v for k, v in of(self, edges).items()})
        comparison.same(lambda layer=layer, given=given: [layer.eval()(g, x, *given)], 1e-10)
        monkeypatch.undo()


class Wide(torch.nn.Linear):
    """What a part gives may be another shape than the layer's."""

    def forward(self, x):
        return super().forward(x).repeat(1, 2)


@pytest.mark.parametrize("layer", ["GATConv", "GATv2Conv", "DotGatConv"])
def test_a_part_of_another_shape_raises_as_in_dgl(layer):
    g, x, module = square("random"), randn(30, F), gat(getattr(nn, layer), 4, 2)().double()
    setattr(module, "fc_src" if layer == "GATv2Conv" else "fc", Wide(F, 8).double())
    errors = []
    for switch in (gnnfast.disable, gnnfast.enable):
        switch()
        with pytest.raises((dgl.DGLError, RuntimeError)) as raised:
            module(g, x)
        errors.append(type(raised.value))
    assert errors[0] is errors[1]


def test_errors_are_dgls():
    g, x = square("random"), randn(30, F)
    for layer, args in (
        (nn.GraphConv(F, 5, allow_zero_in_degree=True).double(), (x, randn(F, 5))),
        (nn.GraphConv(F, 5, allow_zero_in_degree=True).double(), (x[:7],)),
        (nn.GATConv(F, 5, 1, allow_zero_in_degree=True).double(), (x[:7],)),
        (nn.GATConv(F, 5, 1, allow_zero_in_degree=True).double(), (x.float(),)),
        (nn.SAGEConv(F, 5, "mean").double(), (x.float(),)),
    ):
        errors = []
        for switch in (gnnfast.disable, gnnfast.enable):
            switch()
            with pytest.raises(Exception) as raised:
                layer(g, *args)
            errors.append((type(raised.value), str(raised.value)))
        assert errors[0] == errors[1]


def test_users_may_write_into_what_dgl_does_not_keep():
    g = square("random")
    for name in LAYERS:
        layer = LAYERS[name]().double()
        values = randn(30, F)

        def run(layer=layer, values=values):
            hidden = values.clone().requires_grad_() * 1
            out = layer(g, hidden)
            try:
                if layer.__class__ is nn.GraphConv and layer._norm in ("left", "both"):
                    hidden.zero_()
                out.mul_(2)
                out.square().sum().backward()
            except RuntimeError:
                return None
            return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

        for _ in range(2):
            layer.zero_grad()
            found = run()
        gnnfast.disable()
        layer.zero_grad()
        expected = run()
        gnnfast.enable()
        assert (found is None) <= (expected is None), name
        if found is not None and expected is not None:
            assert all(relative_error(a, b) < TIGHT for a, b in zip(found, expected)), name


def test_second_derivatives():
    g, x = square("self_loops_and_duplicates"), randn(3, F).requires_grad_()
    for name in ("GATConv", "GATv2Conv", "GraphConv both 5", "GraphConv right 16", "SAGEConv"):
        layer = LAYERS[name]().double()
        layer.activation = layer._activation = None
        assert torch.autograd.gradgradcheck(lambda x, layer=layer: layer(g, x), (x,), atol=1e-4), name


def test_compiled_and_saved_tensor_hooks():
    g, x = square("random"), randn(30, F).requires_grad_()
    for name in ("GATConv", "GraphConv both 5"):
        layer = LAYERS[name]().double()
        expected = layer(g, x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            found = layer(g, x)
        assert relative_error(found.detach(), expected.detach()) < TIGHT
        grads = [torch.autograd.grad(o.square().sum(), x)[0] for o in (found, expected)]
        assert relative_error(*grads) < TIGHT


# ---- in-degrees ----------------------------------------------------------------------------------------------------------------
CHECKED = {
    "AGNNConv": (lambda: nn.AGNNConv(), ()),
    "DotGatConv": (lambda: nn.DotGatConv(F, 4, 2), ()),
    "EdgeConv": (lambda: nn.EdgeConv(F, 4), ()),
    "EdgeGATConv": (lambda: nn.EdgeGATConv(F, 3, 4, 2), (3,)),
    "EGATConv": (lambda: nn.EGATConv(F, 3, 4, 4, 2), (3,)),
    "GATConv": (lambda: nn.GATConv(F, 4, 2), ()),
    "GATv2Conv": (lambda: nn.GATv2Conv(F, 4, 2), ()),
    "GCN2Conv": (lambda: nn.GCN2Conv(F, 1), ()),
    "GMMConv": (lambda: nn.GMMConv(F, 4, 3, 2, "mean"), (3,)),
    "GraphConv": (lambda: nn.GraphConv(F, 4), ()),
    "SGConv": (lambda: nn.SGConv(F, 4), ()),
}


def test_every_check_is_there():
    assert {layer.name for layer in PATCHED if layer.asks} == set(CHECKED)


@pytest.mark.parametrize("layer", CHECKED)
def test_the_check_of_in_degrees_is_made_once_and_raises(layer, device, monkeypatch):
    module, widths = CHECKED[layer][0]().to(device), CHECKED[layer][1]
    counted = []
    in_degrees = dgl.DGLGraph.in_degrees

    def run(g):
        edges = [torch.randn(g.num_edges(), w, device=device) for w in widths]
        x = torch.randn(g.num_nodes(), F, device=device)
        return module(g, x, x, *edges) if layer == "GCN2Conv" else module(g, x, *edges)

    starving = square("isolated", device=device)
    fed = dgl.add_self_loop(starving)
    for _ in range(2):
        with pytest.raises(dgl.DGLError, match="0-in-degree"):
            run(starving)
        run(fed)
    with monkeypatch.context() as patch:
        patch.setattr(dgl.DGLGraph, "in_degrees", lambda *a, **k: counted.append(1) or in_degrees(*a, **k))
        run(fed)
    # These normalise by them, and a mean is DGL's where somebody has replaced what it divides by.
    assert len(counted) == (layer in ("GCN2Conv", "GMMConv", "GraphConv", "SGConv"))
    assert fed._graph._gnnfast.starves is False and starving._graph._gnnfast.starves is True
    gnnfast.disable()
    try:
        with pytest.raises(dgl.DGLError, match="0-in-degree"):
            run(starving)
    finally:
        gnnfast.enable()


def test_verdicts_follow_the_graph():
    conv, x = nn.GraphConv(F, 4), torch.randn(4, F)
    g = dgl.graph(([0, 1, 2], [1, 2, 3]), num_nodes=4)
    with pytest.raises(dgl.DGLError):
        conv(g, x)
    g.add_edges([3], [0])
    conv(g, x)
    with pytest.raises(dgl.DGLError):
        conv(dgl.remove_edges(g, [0]), x)
    g.remove_edges([1])
    with pytest.raises(dgl.DGLError):
        conv(g, x)
    star = dgl.graph(([0, 0, 0, 0], [0, 1, 2, 3]))
    conv(star, x)
    with pytest.raises(dgl.DGLError):
        conv(dgl.reverse(star), x)
    flipped = dgl.graph(([0], [0]))
    flipped._graph = star._graph.reverse()
    flipped._node_frames[0] = star._node_frames[0]
    with pytest.raises(dgl.DGLError):
        conv(flipped, x)
    types = dgl.heterograph({("u", "a", "u"): ([0, 1], [1, 0]), ("u", "b", "u"): ([0], [1])})
    conv(types["a"], x[:2])
    for _ in range(2):
        with pytest.raises(dgl.DGLError):
            conv(types["b"], x[:2])
        conv(types["a"], x[:2])


# ---- what is kept --------------------------------------------------------------------------------------------------------------
def test_normalisation_is_kept_with_the_graph_and_dies_with_it(device):
    from gnnfast.cache import cache

    cache.clear()
    g = dgl.add_self_loop(square("random", device=device))
    first, second = (nn.GraphConv(F, width).to(device) for width in (5, 16))
    x = torch.randn(30, F, device=device)
    for _ in range(3):
        first(g, x), second(g, x)
    entries = len(cache)
    first(g, x).sum().backward()
    assert len(cache) == entries and cache.nbytes
    key = weakref.ref(g._graph._gnnfast.shared.key)
    del g
    gc.collect()
    assert key() is None and len(cache) == 0


def test_sparse_constant_features_are_compressed():
    nodes = 700
    g = dgl.add_self_loop(dgl.graph((torch.randint(0, nodes, (3000,)), torch.randint(0, nodes, (3000,))), num_nodes=nodes))
    x = torch.rand(nodes, 512) * (torch.rand(nodes, 512) < 0.01)

    class Constant(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GraphConv(512, 16)

        def forward(self, g):
            return self.layer(g, x)

    layer = Constant()

    def run():
        layer.zero_grad()
        out = layer(g)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in layer.parameters())]

    gnnfast.disable()
    expected = run()
    gnnfast.enable()
    for _ in range(4):
        assert all(relative_error(a, b) < 1e-5 for a, b in zip(run(), expected))
    assert "sparse product" in {kernel for _, kernel, _ in gnnfast.report().kernels}


@pytest.mark.skipif(bool(_native.missing("cuda")) or not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("layer", ATTENTION)
def test_a_graph_on_a_gpu_that_is_known_makes_nobody_wait(layer):
    g, module = dgl.add_self_loop(square("random", device="cuda")), LAYERS[layer]().cuda()
    module._allow_zero_in_degree = False
    x = torch.randn(30, F, device="cuda", requires_grad=True)
    for _ in range(3):
        module(g, x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(g, x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
