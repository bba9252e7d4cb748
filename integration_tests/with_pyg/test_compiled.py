"""Models under ``torch.compile``: served without graph breaks, the same numbers and gradients as PyG's own."""

from __future__ import annotations

import copy

import pytest
import torch
from compiling import NAMES, F, check, compiled, expected, fresh, graph_of, is_served, step, traced  # noqa: F401
from graphs import GRAPHS, relative_error

import gnnfast
from gnnfast import _native
from gnnfast.dispatch import select
from gnnfast.graph import Graph

pyg = pytest.importorskip("torch_geometric", reason="PyG is not installed")
if not _native.cpu.loaded:
    pytest.skip(_native.cpu.reason, allow_module_level=True)
from torch_geometric import nn  # noqa: E402
from torch_geometric.nn import MessagePassing  # noqa: E402

from gnnfast.ops.edge_gate import WEIGHT, role  # noqa: E402
from gnnfast.pyg.compiled import ops, questions  # noqa: E402
from gnnfast.types import ACTIVATIONS, KINDS  # noqa: E402


class FromFirst(nn.FAConv):
    """Which takes the features of its model, its own here."""

    def forward(self, x, edge_index):
        return super().forward(x, x, edge_index)


class Weighted(MessagePassing):
    """A user's own, with a message and an update of PyG's shapes."""

    def __init__(self, aggr):
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(F, 5)

    def forward(self, x, edge_index, edge_weight):
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight, scale=2.0)

    def message(self, x_j, edge_weight):
        return edge_weight.unsqueeze(-1) * x_j

    def update(self, inputs, scale):
        return inputs * scale


class WithInitial(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, x.detach(), edge_index)


# name -> layer; all of them must be served in full
LAYERS = {
    "GCNConv": lambda: nn.GCNConv(F, 5),
    "GCNConv improved": lambda: nn.GCNConv(F, 5, improved=True),
    "GCNConv no loops": lambda: nn.GCNConv(F, 5, add_self_loops=False),
    "GCNConv not normalised": lambda: nn.GCNConv(F, 5, normalize=False),
    "GCNConv target_to_source": lambda: nn.GCNConv(F, 5, flow="target_to_source"),
    "GCNConv mean": lambda: nn.GCNConv(F, 5, aggr="mean"),
    "SAGEConv": lambda: nn.SAGEConv(F, 5),
    "SAGEConv project": lambda: nn.SAGEConv(F, 5, project=True, normalize=True),
    "SAGEConv max": lambda: nn.SAGEConv(F, 5, aggr="max"),
    "SAGEConv min": lambda: nn.SAGEConv(F, 5, aggr="min"),
    "GraphConv": lambda: nn.GraphConv(F, 5),
    "GraphConv mean": lambda: nn.GraphConv(F, 5, aggr="mean"),
    "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, 5), train_eps=True),
    "SGConv": lambda: nn.SGConv(F, 5, K=2),
    "SSGConv": lambda: nn.SSGConv(F, 5, alpha=0.1, K=2),
    "TAGConv": lambda: nn.TAGConv(F, 5),
    "APPNP": lambda: nn.APPNP(K=3, alpha=0.1),
    "LGConv": lambda: nn.LGConv(),
    "MixHopConv": lambda: nn.MixHopConv(F, 5),
    "ARMAConv": lambda: nn.ARMAConv(F, 5, num_stacks=2, num_layers=2),
    "GCN2Conv": lambda: WithInitial(nn.GCN2Conv(F, 0.1, 0.5, 1)),
    "SimpleConv": lambda: nn.SimpleConv("mean"),
    "GATConv": lambda: nn.GATConv(F, 4, heads=3),
    "GATConv mean of heads": lambda: nn.GATConv(F, 4, heads=3, concat=False, add_self_loops=False, residual=True),
    "GATv2Conv": lambda: nn.GATv2Conv(F, 4, heads=3),
    "GATv2Conv shared": lambda: nn.GATv2Conv(F, 4, heads=3, share_weights=True, bias=False),
    "TransformerConv": lambda: nn.TransformerConv(F, 4, heads=3),
    "SAGEConv several": lambda: nn.SAGEConv(F, 5, aggr=["mean", "max", "std"]),
    "SAGEConv softmax": lambda: nn.SAGEConv(F, 5, aggr=nn.aggr.SoftmaxAggregation(learn=True)),
    "GENConv": lambda: nn.GENConv(F, 5),
    "GENConv learnt": lambda: nn.GENConv(F, F, learn_t=True),
    "GENConv std": lambda: nn.GENConv(F, F, aggr="std"),
    "EdgeConv several": lambda: nn.EdgeConv(torch.nn.Linear(2 * F, 5), aggr=["min", "var"]),
    "target_to_source several": lambda: nn.GCNConv(F, 5, normalize=False, bias=False, aggr=["max", "std"], flow="target_to_source"),
    "PNAConv": lambda: nn.PNAConv(F, 5, ["mean", "max", "std"], ["identity", "attenuation"], torch.tensor([1, 4, 9])),
    "PNAConv towers": lambda: nn.PNAConv(F, 6, ["sum", "min", "var"], ["inverse_linear"], torch.tensor([1, 4, 9]), towers=2),
    "TransformerConv beta": lambda: nn.TransformerConv(F, 4, heads=3, beta=True, concat=False),
}
WEIGHTED = {
    name: LAYERS[name]
    for name in (
        "GCNConv",
        "GCNConv improved",
        "GCNConv no loops",
        "GCNConv not normalised",
        "GCNConv target_to_source",
        "GraphConv",
        "GraphConv mean",
        "SGConv",
        "TAGConv",
        "APPNP",
        "ARMAConv",
    )
} | {f"own {aggr}": (lambda aggr=aggr: Weighted(aggr)) for aggr in ("sum", "mean", "max", "min")}


# ---- the same numbers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, device):
    """Graphs of all sizes, ugly ones included, by one model."""
    layer = LAYERS[name]().double().to(device)
    inputs = [graph_of(graph, device)[:2] for graph in NAMES]
    wanted = [expected(layer, *i) for i in inputs]
    gnnfast.clear_report()
    model = compiled(layer)
    for given, w in zip(inputs, wanted):
        check(step(model, layer, *given), w)
    assert is_served() and traced()


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights(name, learnt, device):
    """Given weights and such that require a gradient."""
    layer = WEIGHTED[name]().double().to(device)
    inputs = [graph_of(graph, device) for graph in NAMES]
    for _, _, weight in inputs:
        weight.requires_grad_(learnt)
    wanted = [expected(layer, *i) for i in inputs]
    gnnfast.clear_report()
    model = compiled(layer)
    for given, w in zip(inputs, wanted):
        check(step(model, layer, *given), w)
    assert is_served() and traced()


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv max", "GATConv", "TransformerConv"])
def test_float32_and_int32(name, device):
    layer = LAYERS[name]().to(device)
    x, edge_index, _ = graph_of("random", device, torch.float32)
    wanted = expected(layer, x, edge_index)
    ids = (torch.int64,) if name == "GATConv" else (torch.int64, torch.int32)  # PyG cannot add int64 loops to int32 edges
    for dtype in ids:
        check(step(compiled(layer), layer, x, edge_index.to(dtype)), wanted, 1e-5)
    assert is_served()


class Net(torch.nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, edge_index, *rest):
        return self.second(torch.relu(self.first(x, edge_index, *rest)), edge_index, *rest)


NETS = {
    "GCN": lambda: Net(nn.GCNConv(F, 16), nn.GCNConv(16, 5)),
    "SAGE": lambda: Net(nn.SAGEConv(F, 16, aggr="max"), nn.SAGEConv(16, 5)),
    "GAT": lambda: Net(nn.GATConv(F, 8, heads=2), nn.TransformerConv(16, 5)),
}


@pytest.mark.parametrize("name", NETS)
def test_inductor(name, device):
    net = NETS[name]().double().to(device)
    inputs = [graph_of(graph, device)[:2] for graph in ("random", "hub", "self_loops_and_duplicates")] * 2
    wanted = [expected(net, *i) for i in inputs]
    gnnfast.clear_report()
    model = compiled(net, backend="inductor")
    for given, w in zip(inputs, wanted):
        check(step(model, net, *given), w)
    assert is_served() and traced()


def test_inductor_with_learnt_weights(device):
    net = Net(nn.GCNConv(F, 16), nn.GraphConv(16, 5)).double().to(device)
    x, edge_index, weight = graph_of("random", device)
    weight.requires_grad_()
    wanted = expected(net, x, edge_index, weight)
    check(step(compiled(net, backend="inductor"), net, x, edge_index, weight), wanted)
    assert is_served()


@pytest.mark.parametrize("name", NETS)
def test_reduce_overhead(name, device):
    """The compiler's CUDA graphs hold none of the ops, which look at the tensors of each call."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs are of CUDA alone")
    net = NETS[name]().double().to(device)
    inputs = [graph_of(graph, device)[:2] for graph in ("random", "hub")] * 4
    wanted = [expected(net, *i) for i in inputs]
    gnnfast.clear_report()
    model = compiled(net, backend="inductor", mode="reduce-overhead")
    for given, w in zip(inputs, wanted):
        torch.compiler.cudagraph_mark_step_begin()
        check(step(model, net, *given), w)
    inputs[0][1].copy_(inputs[0][1].flip(1))
    inputs[0][1][1] = inputs[0][1][1].roll(1)
    check(step(model, net, *inputs[0]), expected(net, *inputs[0]))
    assert is_served()


def test_training_steps(device):
    x, edge_index, _ = graph_of("random", device)
    y = torch.randint(0, 5, (x.shape[0],), device=device)
    losses = []
    for on in (False, True):
        torch.manual_seed(0)
        net = NETS["GCN"]().double().to(device)
        if not on:
            gnnfast.disable()
        model = compiled(net) if on else net
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x, edge_index), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        gnnfast.enable()
    assert losses[:5] == pytest.approx(losses[5:], rel=1e-9) and losses[4] < losses[0]
    assert is_served() and traced() == 1


def test_dropout_of_attention(device):
    """Coefficients are left out in training, others in each call, and the gradient is that of those that are kept."""
    x, edge_index, _ = graph_of("hub", device)
    layer = nn.TransformerConv(F, 4, heads=2, dropout=0.5, root_weight=False).double().to(device)
    model = compiled(layer)
    torch.nn.init.zeros_(layer.lin_value.weight)
    torch.nn.init.ones_(layer.lin_value.bias)  # the result is the share of coefficients that is kept, doubled
    results = [step(model, layer, x, edge_index, seed=seed) for seed in range(40)]
    outs = torch.stack([r[0] for r in results])
    has_edges = torch.zeros(x.shape[0], dtype=torch.bool, device=device).index_fill(0, edge_index[1], True)
    assert (outs[0] != outs[1]).any()
    assert float(outs[:, has_edges].mean()) == pytest.approx(1, abs=0.05)
    for out, to_x, *_ in results[:3]:
        assert to_x.isfinite().all() and (out.detach() >= 0).all()
    bias_grads = [dict(zip(["out", "x", *(n for n, _ in layer.named_parameters())], r))["lin_value.bias"] for r in results[:3]]
    for (out, *_), grad in zip(results, bias_grads):  # out is linear in the bias, of ones
        assert torch.allclose(grad.sum(), (out * out.cos()).sum(), rtol=1e-9)
    layer.eval()
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    assert is_served()


# ---- graphs and models that change -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv max", "GATConv", "APPNP"])
def test_new_graphs_do_not_recompile(name, dynamic, device):
    layer = LAYERS[name]().double().to(device)
    model = compiled(layer, dynamic=dynamic)
    for i in range(5):
        n, edges = 40 + 7 * i, 300 + 31 * i
        x = torch.randn(n, F, dtype=torch.float64, device=device)
        edge_index = torch.randint(0, n, (2, edges), device=device)
        check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    assert traced() <= (2 if dynamic is None else 1) and is_served()


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_edges_changed_in_place(name, backend, device):
    layer = LAYERS[name]().double().to(device)
    x, edge_index, _ = graph_of("random", device)
    model = compiled(layer, backend=backend)
    for i in range(4):
        check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
        edge_index[:, i * 5 : i * 5 + 5] = i
    assert traced() == 1 and is_served()


@pytest.mark.parametrize("name", ["GCNConv", "GraphConv"])
def test_weights_changed_in_place(name, device):
    layer = LAYERS[name]().double().to(device)
    x, edge_index, weight = graph_of("random", device)
    model = compiled(layer, backend="inductor")
    for _ in range(4):
        check(step(model, layer, x, edge_index, weight), expected(layer, x, edge_index, weight))
        check(step(model, layer, x, edge_index, weight), expected(layer, x, edge_index, weight))
        weight.mul_(1.5)[:5].zero_()
    assert traced() == 1 and is_served()


class Computing(torch.nn.Module):
    """Edges and weights that exist within the compiled code only, in buffers that a compiler uses again."""

    def __init__(self, conv):
        super().__init__()
        self.convs = torch.nn.ModuleList([conv, copy.deepcopy(conv)])

    def forward(self, x, edge_index, weight):
        for i, conv in enumerate(self.convs):
            edges = (edge_index + i + 1) % x.shape[0]
            x = conv(x, edges, (weight * (i + 1)).sin() + 2)
            x = conv(x, edge_index, (weight * (i + 2)).cos() + 2)
        return x


@pytest.mark.parametrize("conv", [lambda: nn.GraphConv(F, F), lambda: nn.GCNConv(F, F)])
def test_computed_edges_and_weights(conv, device):
    net = Computing(conv()).double().to(device)
    x, edge_index, weight = graph_of("random", device)
    model = compiled(net, backend="inductor")
    wanted = expected(net, x, edge_index, weight)
    for _ in range(3):
        check(step(model, net, x, edge_index, weight), wanted)
    report = gnnfast.report()
    assert report.kernels and {reason for _, reason in report.fallbacks} == {
        "compiled: edge_index is computed within the compiled code"
    }


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_edges_written_within_the_code(backend, device):
    class Writing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.SAGEConv(F, F)

        def forward(self, x, edge_index):
            x = self.conv(x, edge_index)
            edge_index.copy_(edge_index.flip(0))
            return self.conv(x, edge_index)

    net = Writing().double().to(device)
    x, edge_index, _ = graph_of("random", device)
    model = compiled(net, backend=backend)
    with torch.no_grad():
        for _ in range(4):  # each turns the edges around
            gnnfast.disable()
            wanted = net(x, edge_index.clone())
            gnnfast.enable()
            before = edge_index.clone()
            assert relative_error(model(x, edge_index), wanted) < 1e-9
            assert torch.equal(edge_index, before.flip(0))


def test_checkpointed_parts(device):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.GCNConv(F, F), nn.SAGEConv(F, F)

        def forward(self, x, edge_index):
            x = torch.utils.checkpoint.checkpoint(self.first, x, edge_index, use_reentrant=False)
            moved = (edge_index + 1) % x.shape[0]
            return torch.utils.checkpoint.checkpoint(self.second, x, moved, use_reentrant=False)

    net = Net().double().to(device)
    x, edge_index, _ = graph_of("random", device)
    model = compiled(net)
    for _ in range(2):
        check(step(model, net, x, edge_index), expected(net, x, edge_index))


def test_options_and_modes_change(device):
    x, edge_index, _ = graph_of("self_loops_and_duplicates", device)
    layer = nn.GCNConv(F, 5).double().to(device)
    model = compiled(layer)
    for change in ({}, {"add_self_loops": False}, {"improved": True}, {"normalize": False}, {"training": False}):
        vars(layer).update(change)
        check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    with torch.no_grad():
        found = model(x, edge_index)
        assert not found.requires_grad and relative_error(found, layer(x, edge_index)) < 1e-9
    with torch.inference_mode():
        assert relative_error(model(x, edge_index), found) < 1e-9
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))


@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GATConv"])
def test_parts_change(name, device):
    """What is put into a layer after it was compiled runs."""
    x, edge_index, _ = graph_of("random", device)
    layer = LAYERS[name]().double().to(device)
    model = compiled(layer)
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    layer.message = {
        "SAGEConv": lambda x_j: x_j * 2,
        "GCNConv": lambda x_j, edge_weight: edge_weight.view(-1, 1) * x_j * 2,
        "GATConv": lambda x_j, alpha: alpha.unsqueeze(-1) * x_j * 2,
    }[name]
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    del layer.message
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))
    layer.aggr_module = nn.MaxAggregation()
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))


def test_cached_normalisation(device):
    """PyG keeps what the first call computed, whatever edges come later."""
    x, edge_index, _ = graph_of("random", device)
    layer, other = (nn.GCNConv(F, 5, cached=True).double().to(device) for _ in range(2))
    other.load_state_dict(layer.state_dict())
    model = compiled(layer)
    for edges in (edge_index, edge_index, edge_index.flip(0)):
        with torch.no_grad():
            found = model(x, edges)
            gnnfast.disable()
            wanted = other(x, edges)
            gnnfast.enable()
        assert relative_error(found, wanted) < 1e-9
    assert gnnfast.report().kernels


def test_switched_off_and_on(device):
    """Compiled code keeps its numbers; what is compiled while gnnfast is off holds none of its ops."""
    x, edge_index, _ = graph_of("random", device)
    net = NETS["GCN"]().double().to(device)
    model, wanted = compiled(net), expected(net, x, edge_index)
    check(step(model, net, x, edge_index), wanted)
    graphs = traced()
    gnnfast.disable()
    try:
        check(step(model, net, x, edge_index), wanted)
        torch._dynamo.reset()
        gnnfast.clear_report()
        check(step(compiled(net), net, x, edge_index), wanted)
        assert not gnnfast.report().kernels
    finally:
        gnnfast.enable()
    torch._dynamo.reset()
    check(step(compiled(net), net, x, edge_index), wanted)
    assert graphs and is_served()


# ---- arguments of all kinds --------------------------------------------------------------------------------------------------
def test_bipartite(device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    edge_index, x = edge_index.to(device), torch.randn(num_src, F, dtype=torch.float64, device=device)
    x_dst = torch.randn(num_dst, 6, dtype=torch.float64, device=device)
    layers = (
        nn.SAGEConv((F, 6), 5),
        nn.SAGEConv((F, 6), 5, aggr="max"),
        nn.GraphConv((F, 6), 5),
        nn.GATConv((F, 6), 4, add_self_loops=False),
    )
    for layer in layers:
        layer = layer.double().to(device)

        class Pair(torch.nn.Module):
            def __init__(self, conv):
                super().__init__()
                self.conv = conv

            def forward(self, x, edge_index, x_dst):
                return self.conv((x, x_dst), edge_index)

        net = Pair(layer)
        gnnfast.clear_report()
        check(step(compiled(net), net, x, edge_index, x_dst), expected(net, x, edge_index, x_dst))
        assert is_served()
    layer = nn.SAGEConv((F, 6), 5, root_weight=False).double().to(device)
    model = compiled(lambda x, edge_index: layer((x, None), edge_index, size=(num_src, num_dst)))
    out = model(x, edge_index)
    gnnfast.disable()
    wanted = layer((x, None), edge_index, size=(num_src, num_dst))
    gnnfast.enable()
    assert relative_error(out, wanted) < 1e-9


def test_wide_to_narrow(device):
    """Where the product comes first, against PyG's order, as it does uncompiled."""
    n, edges = 3000, 200_000
    x = torch.randn(n, 64, dtype=torch.float64, device=device)
    edge_index = torch.randint(0, n, (2, edges), device=device)
    for layer in (nn.SAGEConv(64, 4), nn.GraphConv(64, 4), nn.SGConv(64, 4, K=2)):
        layer = layer.double().to(device)
        wanted = expected(layer, x, edge_index)
        gnnfast.clear_report()
        check(step(compiled(layer), layer, x, edge_index), wanted)
        assert is_served()


def test_static_graphs_and_other_dimensions(device):
    x, edge_index, weight = graph_of("random", device)
    x = torch.stack([x, x.sin(), x.cos()])
    for layer in (nn.GCNConv(F, 5), nn.SAGEConv(F, 5), nn.GraphConv(F, 5)):
        layer = layer.double().to(device)
        check(step(compiled(layer), layer, x, edge_index), expected(layer, x, edge_index))
    conv = Weighted("sum")
    conv.node_dim = 0
    conv = conv.double().to(device)
    x, per_head = torch.randn(x.shape[1], 3, F, dtype=torch.float64, device=device), weight[:, None].repeat(1, 3)
    check(step(compiled(conv), conv, x, edge_index, per_head), expected(conv, x, edge_index, per_head))
    assert is_served()


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "TransformerConv", "SGConv"])
def test_autocast(name, device):
    layer = LAYERS[name]().to(device)
    x, edge_index, _ = graph_of("random", device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        wanted = expected(layer, x, edge_index)
        check(step(compiled(layer), layer, x, edge_index), wanted, 2e-2)


def test_twice_differentiable_without_a_compiler_behind(device):
    x, edge_index, weight = graph_of("random", device)
    layer = nn.GraphConv(F, 5, aggr="mean").double().to(device)
    model = compiled(layer, backend="eager")

    def second(function):
        a, w = (t.detach().clone().requires_grad_() for t in (x, weight))
        first = torch.autograd.grad(function(a, edge_index, w).pow(3).sum(), (a, w), create_graph=True)
        return torch.autograd.grad(sum(t.pow(2).sum() for t in first), (a, w))

    found = second(model)
    gnnfast.disable()
    wanted = second(layer)
    gnnfast.enable()
    check(found, wanted)


_LOOPS = "features of self loops that are neither a number nor a mean"


def test_what_steps_aside(device):
    """With the reason, and in one graph all the same."""
    x, edge_index, weight = graph_of("random", device)

    class Own(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            return (x_i - x_j).exp()

    for layer, rest, reason in (
        (Own(), (), "messages of such a message() must exist"),
        (nn.SAGEConv(F, 5, aggr="powermean"), (), "the aggregation is PowerMeanAggregation"),
        (
            nn.SAGEConv(F, 5, aggr=nn.aggr.MultiAggregation(["max", "std"], mode="sum")),
            (),
            "aggregations are combined in another way",
        ),
        (nn.GATConv(F, 5, edge_dim=1, fill_value="max"), (weight[:, None],), _LOOPS),
        (nn.GATConv(F, 5, heads=40, dropout=0.5), (), "there is no kernel for heads so wide, or the dropout"),
    ):
        layer = layer.double().to(device)
        torch._dynamo.reset()
        gnnfast.clear_report()
        model = compiled(layer)
        found = step(model, layer, x, edge_index, *rest)
        reasons = {reason for _, reason in gnnfast.report().fallbacks}
        assert f"compiled: {reason}" in reasons
        if "dropout" not in reason:
            check(found, expected(layer, x, edge_index, *rest))
    with gnnfast.override(strict=True), pytest.raises(Exception, match="GNNFAST_STRICT"):
        compiled(Own().to(device))(x, edge_index)


@pytest.mark.parametrize("name", ["AGNNConv", "FeaStConv", "ClusterGCNConv", "FAConv", "ChebConv", "MFConv"])
def test_layers_that_stop_the_compiler(name, device, monkeypatch):
    """At self loops, or nodes of a degree, of which there are as many as values say: what is made there is known again in the next
    call."""
    layer = {
        "AGNNConv": lambda: nn.AGNNConv(),
        "FeaStConv": lambda: nn.FeaStConv(F, 5, heads=2),
        "ClusterGCNConv": lambda: nn.ClusterGCNConv(F, 5),
        "FAConv": lambda: FromFirst(F),
        "ChebConv": lambda: nn.ChebConv(F, 5, 3),
        "MFConv": lambda: nn.MFConv(F, 5),
    }[name]()
    layer = layer.double().to(device).eval()
    model, inputs = (
        torch.compile(layer, backend="aot_eager"),
        [graph_of(graph, device)[:2] for graph in NAMES if graph != "no_edges"],
    )
    wanted = [expected(layer, *given) for given in inputs]
    for given, w in zip(inputs * 2, wanted * 2):
        check(step(model, layer, *given), w)
    monkeypatch.setattr(Graph, "_convert", None)
    check(step(model, layer, *inputs[0]), wanted[0])
    assert is_served()


def test_layers_that_need_not_stop_the_compiler(device):
    layer, (x, edge_index) = nn.MFConv(F, 5).double().to(device), graph_of("random", device)[:2]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(step(compiled(layer), layer, x, edge_index), expected(layer, x, edge_index))
    assert is_served()


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "SAGEConv max", "GATConv"])
def test_nodes_counted_within_the_code(name, device):
    """How many rows features have only their values tell."""
    layer = LAYERS[name]().double().to(device)

    class Some(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, edge_index):
            kept = x[x[:, 0] > -100]
            torch._check(kept.shape[0] > 1)
            return self.layer(kept, edge_index)

    net = Some()
    x, edge_index, _ = graph_of("random", device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(step(compiled(net), net, x, edge_index), expected(net, x, edge_index))


def test_transforms_within_compiled_code(device):
    x, edge_index, _ = graph_of("random", device)
    layer = nn.SAGEConv(F, 5).double().to(device)
    model = compiled(lambda x: torch.func.grad(lambda x: layer(x, edge_index).pow(2).sum())(x), backend="eager")
    found = model(x)
    leaf = x.clone().requires_grad_()
    gnnfast.disable()
    wanted = torch.autograd.grad(layer(leaf, edge_index).pow(2).sum(), leaf)[0]
    gnnfast.enable()
    assert relative_error(found, wanted) < 1e-9


def test_export_holds_no_ops_of_gnnfast():
    x, edge_index, _ = graph_of("random", "cpu")
    layer = nn.SAGEConv(F, 5).double()
    for strict in (True, False):
        program = torch.export.export(layer, (x, edge_index), strict=strict)
        assert not any("gnnfast" in str(node.target) for node in program.graph.nodes)
        assert relative_error(program.module()(x, edge_index), layer(x, edge_index)) < 1e-9


def test_bad_ids_are_an_error(device):
    if device.type == "cuda":
        pytest.skip("on a GPU a later call finds out, which would fail other tests of this process")
    x, edge_index, _ = graph_of("random", device)
    layer = nn.SAGEConv(F, 5).double()
    model = compiled(layer)
    edge_index[0, 0] = x.shape[0]
    with pytest.raises(IndexError, match="out of range"):
        model(x, edge_index)
    edge_index[0, 0] = 0
    check(step(model, layer, x, edge_index), expected(layer, x, edge_index))


# ---- the ops -----------------------------------------------------------------------------------------------------------------
def _cases(device, graph="random"):
    x, edge_index, weight = graph_of(graph, device)
    n = x.shape[0]
    plain, looped, listed, incidence = (
        (edge_index, n, n, True, form, "test") for form in ("given", "looped", "listed", "incidence")
    )
    x, weight = x.requires_grad_(), weight.requires_grad_()
    scores = [torch.randn(n, 2, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    att, seed = torch.randn(F, dtype=torch.float64, device=device, requires_grad=True), torch.tensor([5], device=device)
    other = torch.randn(n, F, dtype=torch.float64, device=device, requires_grad=True)
    for turned in (False, True):
        yield ops.SPMM, (x, weight, turned, False, True, turned, *plain)
        yield ops.GCN, (x, None, False, False, True, turned, *looped)
    yield ops.SDDMM, (x, other, 2, True, *plain)
    yield ops.SPMM_BACKWARD, (other, x, weight, True, *plain)
    yield ops.EXTREMUM, (x, weight, False, True, *plain)
    yield ops.EXTREMUM, (x.detach(), None, True, False, *plain)
    yield ops.ATTENTION, (x, *scores, 0.2, 0.5, seed, True, *looped)
    yield ops.ATTENTION, (x.detach(), *(s.detach() for s in scores), 0.2, 0.0, None, False, *plain)
    yield ops.PAIR_ATTENTION, (x, other, other, None, None, 2, 0.3, 0.0, None, True, *plain)
    yield ops.PAIR_ATTENTION, (x, other, None, att, None, 2, 0.2, 0.5, seed, True, *looped)
    # Of edges and the loops that are added, of which some rows do not exist.
    rows = torch.randn(edge_index.shape[1] + n, F, dtype=torch.float64, device=device, requires_grad=True)
    most = rows[:, :2].detach().requires_grad_()
    yield ops.PAIR_ATTENTION, (x, other, None, att, rows, 2, 0.2, 0.5, seed, True, *listed)
    yield ops.SPMM, (x, most, False, False, True, False, *listed)
    yield ops.SDDMM, (x, other, 2, False, *listed)
    yield ops.SOFTMAX, (most, *scores, 0.2, *listed)
    own = rows[: edge_index.shape[1]].detach().requires_grad_()
    yield ops.SOFTMAX, (own, None, None, 1.0, *plain)
    yield ops.SPMM, (own, weight, False, False, True, False, *incidence)
    yield ops.SDDMM, (x, own, 2, False, *incidence)
    yield ops.WITH_LOOPS, (own, None, *listed)
    yield ops.WITH_LOOPS, (own, 0.5, *listed)
    kinds = [*KINDS.values()]
    yield ops.REDUCTIONS, (x, other, kinds, True, *plain)
    yield ops.REDUCTIONS, (own, other, kinds[:3], True, *incidence)
    yield ops.REDUCTIONS, (x.detach(), other.detach(), kinds[2:], False, *plain)
    yield ops.REDUCTIONS, (x, None, kinds[:2], True, *plain)
    yield ops.SOFTENED, (x, att, 1.0, True, *plain)
    yield ops.SOFTENED, (own, None, 0.5, True, *incidence)
    yield ops.SOFTENED, (x.detach(), None, 2.0, False, *plain)
    yield ops.DEGREE, plain
    yield ops.RELU, (x, own, True, *plain)
    yield ops.RELU, (x.detach(), own.detach(), False, *plain)
    parts, acts = [x, other, own, own.detach()[:, :1]], [ACTIVATIONS["tanh"], ACTIVATIONS["sigmoid"]]
    roles = [role(0, "src"), role(0, "scale"), role(1, "edge"), WEIGHT]
    yield ops.GATE, (parts, roles, acts, True, True, *plain)
    yield ops.GATE, ([t.detach() for t in parts], roles, acts, False, False, *plain)


def test_ops(device):
    for op, arguments in _cases(device):
        torch.library.opcheck(op, arguments)


def test_ops_of_sums_have_second_derivatives(device):
    for op, arguments in (*_cases(device, "self_loops_and_duplicates"), *_cases(device, "isolated")):
        if op not in (ops.SPMM, ops.GCN, ops.SDDMM, ops.SPMM_BACKWARD):
            continue
        leaves = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
        tail = arguments[len(leaves) :]
        assert torch.autograd.gradcheck(lambda *t, op=op, tail=tail: op(*t, *tail), leaves)
        assert torch.autograd.gradgradcheck(lambda *t, op=op, tail=tail: op(*t, *tail), leaves)


def test_gradients_that_are_not_there_are_an_error(device):
    for op, arguments in _cases(device):
        of = arguments[0][0] if op is ops.GATE else arguments[0]
        if op not in (ops.SPMM, ops.GCN, ops.SDDMM, ops.SPMM_BACKWARD) and of.requires_grad:
            out = op(*arguments)
            out = out if isinstance(out, torch.Tensor) else out[0]
            (grad,) = torch.autograd.grad(out.pow(2).sum(), of, create_graph=True)
            with pytest.raises(RuntimeError, match="second derivative"):
                grad.sum().backward()


# ---- small graphs --------------------------------------------------------------------------------------------------------------
LEFT = ("SAGEConv", "SAGEConv max", "GraphConv", "GINConv", "GCNConv no loops", "GCNConv not normalised", "TransformerConv")
LEFT += ("GATConv mean of heads", "SimpleConv", "GCNConv", "PNAConv")


@pytest.mark.parametrize("name", [*LEFT, "GATConv"])
def test_what_is_small_is_the_compilers(name, device, monkeypatch):
    """As when it was traced: other sizes compile nothing again. Self loops of attention, for which PyG's own waits, are always served."""
    bound = select.Small(2000 * F * 4, 2000 * F * 4)
    monkeypatch.setattr(select, "SMALL", select.SMALL | dict.fromkeys(("compiled", "compiled cpu", "compiled sums cpu"), bound))
    monkeypatch.setattr(questions, "ATOMICS_TIMES", 1)
    monkeypatch.setattr(select, "relative_bandwidth", lambda: 1.0)  # of which the bound is
    layer, x = LAYERS[name]().to(device), torch.randn(30, F, device=device)
    for sizes in ((200, 100, 20_000, 30_000), (20_000, 30_000, 200, 100)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        call = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for edges in sizes:
            edge_index = torch.randint(0, 30, (2, edges), device=device)
            gnnfast.clear_report()
            found = call(x, edge_index)
            served = {kernel for _, kernel, _ in gnnfast.report().kernels} - {"PyG's own"}
            assert bool(served) == (sizes[0] > 2000 or name not in LEFT) and not gnnfast.report().fallbacks
            gnnfast.disable()
            assert relative_error(found, layer(x, edge_index)) < 1e-5
            gnnfast.enable()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["SAGEConv", "GINConv", "SAGEConv max", "TransformerConv"])
def test_small(name, training, device, small):
    """On a CPU the compiler's own code is slower than kernels at every size, but for what it scatters, where that takes no gradient of
    an extremum."""
    layer, x = LAYERS[name]().to(device), torch.randn(30, F, device=device)
    edge_index = torch.randint(0, 30, (2, 200), device=device)
    with torch.set_grad_enabled(training):
        expected = layer(x, edge_index)
        gnnfast.clear_report()
        assert relative_error(torch.compile(layer, backend="aot_eager")(x, edge_index), expected) < 1e-5
    kernels = {kernel for _, kernel, _ in gnnfast.report().kernels}
    scatters = name in ("SAGEConv", "GINConv") or (name == "SAGEConv max" and not training)
    assert (kernels == {"PyG's own"}) == (device.type == "cuda" or scatters)
