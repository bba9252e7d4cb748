"""Nothing stale, nothing aliased, nothing overlooked: defects found from outside, each in the form it was found in."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from comparison import compare
from graphs import relative_error

import gnnfast
from gnnfast import features
from gnnfast.cache import cache
from gnnfast.patching import code_of

pytest.importorskip("torch_geometric", reason="PyG is not installed")
import torch_geometric.transforms as T
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex, nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing, aggr
from torch_geometric.nn.conv.gcn_conv import gcn_norm

NODES, EDGES, F = 30, 120, 8


@pytest.fixture
def edge_index(device):
    return torch.randint(0, NODES, (2, EDGES), device=device)


@pytest.fixture
def x(device):
    return torch.randn(NODES, F, device=device, dtype=torch.float64)


def both(call):
    """What a call gives with gnnfast and without; an error as its type and text."""

    def run():
        try:
            return call()
        except Exception as error:
            return type(error), str(error)

    found = run()
    gnnfast.disable()
    try:
        return found, run()
    finally:
        gnnfast.enable()


def same(call):
    found, expected = both(call)
    if not isinstance(expected, torch.Tensor):
        assert found == expected
    else:
        assert relative_error(found, expected) < 1e-10


class Plain(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


class Weighted(MessagePassing):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, edge_weight=w)

    def message(self, x_j, edge_weight):
        return edge_weight.view(-1, 1) * x_j


# ---- stale values --------------------------------------------------------------------------------------------------------------
def _optimise(optimizer, **options):
    def change(w):
        w.grad = torch.ones_like(w)
        optimizer([w], lr=0.1, **options).step()

    return change


WRITES = {
    "fused Adam": _optimise(torch.optim.Adam, fused=True),
    "fused SGD": _optimise(torch.optim.SGD, fused=True),
    "foreach SGD": _optimise(torch.optim.SGD, foreach=True),
    "data.mul_": lambda w: w.data.mul_(3),
    "data =": lambda w: setattr(w, "data", w.data * 3),
    "init": lambda w: torch.nn.init.uniform_(w.data, 5, 6),
    "no_grad mul_": lambda w: w.detach().mul_(3),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", [lambda: nn.GCNConv(F, 4), lambda: nn.GraphConv(F, 4), lambda: nn.TAGConv(F, 4)])
def test_learned_weights_are_never_kept(make, write, edge_index, x, device):
    conv, w = make().to(device, torch.float64), torch.nn.Parameter(torch.rand(EDGES, device=device, dtype=torch.float64))
    for _ in range(3):
        with torch.no_grad():
            for _ in range(3):
                same(lambda: conv(x, edge_index, w))
        WRITES[write](w)
    w.requires_grad_(False)
    with torch.no_grad():
        for _ in range(3):
            same(lambda: conv(x, edge_index, w))
            w.data.mul_(2)


def test_a_view_of_a_parameter_is_never_kept(edge_index, x, device):
    conv, p = nn.GraphConv(F, 4).to(device, torch.float64), torch.nn.Parameter(torch.rand(2, EDGES, device=device).double())
    with torch.no_grad():
        w = p[0]
        for _ in range(4):
            same(lambda: conv(x, edge_index, w))
            p.data.mul_(3)


def test_a_tensor_that_once_required_a_gradient_is_never_kept(edge_index, x, device):
    conv, w = nn.GraphConv(F, 4).to(device, torch.float64), torch.rand(EDGES, device=device, dtype=torch.float64)
    for _ in range(3):
        w.requires_grad_()
        conv(x, edge_index, w).sum().backward()
        torch.optim.Adam([w], lr=0.1, fused=True).step()
        w.requires_grad_(False)
        for _ in range(3):
            same(lambda: conv(x, edge_index, w))


def test_module_cast(edge_index, x, device):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.w = nn.GraphConv(F, 4), torch.nn.Parameter(torch.rand(EDGES))
            self.register_buffer("constant", torch.rand(EDGES))

        def forward(self, x, edge_index):
            return self.conv(x, edge_index, self.w) + self.conv(x, edge_index, self.constant)

    net = Net().to(device)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.float32):
            net.to(dtype)
            for _ in range(3):
                found, expected = both(lambda dtype=dtype: net(x.to(dtype), edge_index))
                assert found.dtype == dtype and relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("what", ["edge_index", "weight", "x"])
def test_storage_that_is_exchanged_and_reused(what, device):
    """``t.data = new`` leaves the version counter alone, and the allocator hands out the old address again."""
    t = {
        "edge_index": torch.randint(0, NODES, (2, EDGES), device=device),
        "weight": torch.rand(EDGES, device=device, dtype=torch.float64),
        "x": torch.randn(NODES, F, device=device, dtype=torch.float64).relu(),
    }
    conv = nn.GraphConv(F, 4, bias=False).to(device, torch.float64)
    before = features.MIN_WIDTH, features.MIN_ELEMENTS
    features.MIN_WIDTH = features.MIN_ELEMENTS = 1
    try:
        with torch.no_grad(), gnnfast.override(feature_density_threshold=1):
            for step in range(6):
                for _ in range(2):
                    same(lambda: conv(t["x"], t["edge_index"], t["weight"]))
                for _ in range(1 + step % 2):
                    new = t[what].flip(-1).contiguous() if what == "edge_index" else t[what] * 1.5
                    t[what].data = new
                    del new
    finally:
        features.MIN_WIDTH, features.MIN_ELEMENTS = before


@pytest.mark.parametrize("through", ["base", "as_tensor", "wrapper"])
def test_edge_index_class_changed_in_place(through, x, device):
    base = torch.randint(0, NODES, (2, EDGES), device=device)
    edges, conv = EdgeIndex(base, sparse_size=(NODES, NODES)), nn.GraphConv(F, 4).to(device, torch.float64)
    for _ in range(3):
        same(lambda: conv(x, edges))
        new = torch.randint(0, NODES, (2, EDGES), device=device)
        {"base": base, "as_tensor": edges.as_tensor(), "wrapper": edges}[through].copy_(new)
    assert not gnnfast.report().fallbacks


def test_values_of_sparse_matrices_and_features(device):
    adj = torch.randn(NODES, NODES, device=device, dtype=torch.float64).relu().to_sparse_csr()
    x = torch.randn(NODES, F, device=device, dtype=torch.float64)
    conv = nn.GraphConv(F, 4).to(device, torch.float64)
    for _ in range(3):
        with torch.no_grad():
            same(lambda: conv(x, adj))
        adj.values().mul_(2)
    # Entries stored twice are merged: a copy of the values that nobody sees go stale.
    rowptr, col = torch.tensor([0, 3, 3, 4], device=device), torch.tensor([1, 1, 0, 2], device=device)
    sparse = torch.sparse_csr_tensor(rowptr, col, torch.ones(4, device=device).double(), size=(3, 3))
    graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]], device=device), 3)
    for _ in range(3):
        found = gnnfast.spmm_sparse_features(graph, sparse)
        assert torch.equal(found, gnnfast.spmm(graph, sparse.to_dense()))
        sparse.values().mul_(3)


# ---- aliases -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weighted", [False, True])
def test_results_of_gcn_norm_are_the_users(weighted, edge_index, device):
    w = torch.rand(EDGES, device=device) if weighted else None
    data = Data(edge_index=edge_index, edge_weight=w, num_nodes=NODES)
    first, second = T.GCNNorm()(copy.copy(data)), T.GCNNorm()(copy.copy(data))
    expected = second.edge_weight.clone()
    first.edge_weight.mul_(3)
    first.edge_index.zero_()
    assert torch.equal(second.edge_weight, expected) and second.edge_index.any()
    gcn_norm(edge_index, w, NODES)[1].requires_grad_()
    index, weight = gcn_norm(edge_index, w, NODES)
    assert not weight.requires_grad and torch.equal(weight, expected) and torch.equal(index, second.edge_index)


def test_default_dtype_is_looked_at(edge_index):
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert gcn_norm(edge_index, None, NODES)[1].dtype == dtype
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("make", [lambda: nn.GCNConv(F, 4, cached=True), lambda: nn.APPNP(2, 0.1, cached=True)])
def test_cached_layers_own_what_they_cache(make, edge_index, x, device):
    layers = [make().to(device, torch.float64) for _ in range(2)]
    cache.clear()
    for layer in layers:
        layer(x, edge_index)
    expected = layers[1](x, edge_index)
    layers[0]._cached_edge_index[1].zero_()
    layers[0]._cached_edge_index[0].zero_()
    assert relative_error(layers[1](x, edge_index), expected) < 1e-12
    assert relative_error(layers[1](x, edge_index), both(lambda: layers[1](x, edge_index))[1]) < 1e-10


def test_user_code_within_a_layer_gets_copies(edge_index, x, device):
    """A subclass that keeps what it is given, and hooks, see tensors of their own."""

    class Keeps(nn.GCNConv):
        def message(self, x_j, edge_weight):
            self.kept = edge_weight
            return edge_weight.view(-1, 1) * x_j

    conv, plain = Keeps(F, 4).to(device, torch.float64), nn.GCNConv(F, 4).to(device, torch.float64)
    expected = plain(x, edge_index)
    conv(x, edge_index)
    conv.kept.zero_()

    def write(module, inputs):
        inputs[0]["edge_weight"].mul_(2)

    handle = plain.register_message_forward_pre_hook(write)
    plain(x, edge_index)
    handle.remove()
    assert relative_error(plain(x, edge_index), expected) < 1e-12


def test_an_update_that_writes_into_the_weights(edge_index, x):
    """update() sees the normalised weights: such a layer gets its own."""
    from torch_geometric.typing import OptTensor

    class Doubles(nn.LGConv):
        def update(self, inputs: torch.Tensor, edge_weight: OptTensor) -> torch.Tensor:
            if edge_weight is not None:
                edge_weight.mul_(2)
            return inputs

    layer = Doubles()
    for _ in range(3):
        same(lambda: layer(x, edge_index))


def test_hooks_within_a_layer_that_does_not_normalise(edge_index, x, device):
    def norm():
        return gcn_norm(edge_index, None, NODES, False, True, "source_to_target", x.dtype)

    layer, expected = nn.TAGConv(F, 4, K=1, normalize=False).to(device, torch.float64), norm()[1].clone()

    def write(module, inputs, out):
        norm()[1].mul_(2)

    layer.lins[0].register_forward_hook(write)
    layer(x, edge_index)
    assert relative_error(norm()[1], expected) < 1e-12


def test_a_number_of_nodes_that_changes(edge_index):
    nodes = torch.tensor(NODES)
    assert gcn_norm(edge_index, None, nodes)[0].max() == NODES - 1
    nodes.fill_(NODES + 5)
    assert gcn_norm(edge_index, None, nodes)[0].max() == NODES + 4


def test_parameters_can_be_swapped(edge_index, x, device):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.w = nn.GraphConv(F, 4), torch.nn.Parameter(torch.rand(EDGES))

        def forward(self, x):
            return self.conv(x, edge_index, self.w)

    net = Net().to(device, torch.float64)
    with torch.no_grad():
        net(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert net(x.float()).dtype == torch.float32


def test_classes_are_let_go(edge_index, x, device):
    import gc
    import weakref

    def use():
        class Own(nn.GraphConv):
            pass

        Own(F, 4).to(device, torch.float64)(x, edge_index)
        return weakref.ref(Own)

    gone = [use() for _ in range(3)]
    gc.collect()
    assert not any(ref() for ref in gone)


# ---- recognition ---------------------------------------------------------------------------------------------------------------
def test_a_message_replaced_in_place(edge_index, x):
    class Edited(Plain):
        def message(self, x_j):
            return x_j

    def message(self, x_j):
        return 2 * x_j

    layer = Edited()
    for _ in range(3):
        same(lambda: layer(x, edge_index))
    Edited.message.__code__ = message.__code__  # what IPython's autoreload does
    same(lambda: layer(x, edge_index))


class Gathers(Plain):
    def _index_select(self, src, index):
        return 3 * super()._index_select(src, index)


class Lifts(Plain):
    def _lift(self, src, edge_index, dim):
        return 3 * super()._lift(src, edge_index, dim)


class Checks(Plain):
    def _check_input(self, edge_index, size):
        raise ValueError("mine")


class Sizes(Plain):
    def _set_size(self, size, dim, src):
        raise ValueError("mine too")


class Cached(Plain):
    @functools.lru_cache(None)  # noqa: B019
    def message(self, x_j):
        return x_j


class Static(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, y=x)

    def message(self, x_j):
        return x_j

    @staticmethod
    def update(inputs, y, z=1.0):
        return inputs * 2 + y * z


@pytest.mark.parametrize("kind", [Gathers, Lifts, Checks, Sizes, Cached, Static])
def test_parts_replaced_in_a_subclass(kind, edge_index, x):
    same(lambda: kind()(x, edge_index))
    assert gnnfast.report().fallbacks


def _times_3(function):
    def other(*args, **kwargs):
        out = function(*args, **kwargs)
        return 3 * out if isinstance(out, torch.Tensor) and out.is_floating_point() else out

    return other


REPLACED = {
    "MessagePassing.aggregate": (MessagePassing, "aggregate"),
    "MessagePassing._index_select": (MessagePassing, "_index_select"),
    "MessagePassing._index_select_safe": (MessagePassing, "_index_select_safe"),
    "MessagePassing.update": (MessagePassing, "update"),
    "SumAggregation.forward": (aggr.SumAggregation, "forward"),
    "Aggregation.reduce": (aggr.Aggregation, "reduce"),
    "Aggregation.__call__": (aggr.Aggregation, "__call__"),
    "scatter by name": (aggr.base, "scatter"),
    "torch.Tensor.scatter_add_": (torch.Tensor, "scatter_add_"),
    "Plain.collect": (Plain, "collect"),
}


@pytest.mark.parametrize("how", ["function", "code", "wrapped"])
@pytest.mark.parametrize("where", REPLACED)
def test_parts_replaced_by_somebody(where, how, edge_index, x, monkeypatch):
    owner, name = REPLACED[where]
    layer = Plain()
    for _ in range(2):
        same(lambda: layer(x, edge_index))
    gnnfast.clear_report()
    old = getattr(owner, name)
    if how == "function":
        monkeypatch.setattr(owner, name, _times_3(old))
    elif how == "wrapped":
        import wrapt

        monkeypatch.setattr(owner, name, wrapt.FunctionWrapper(old, lambda f, instance, args, kwargs: _times_3(f)(*args, **kwargs)))
    elif hasattr(old, "__code__") and old.__code__.co_freevars == ():
        copied = type(old)(old.__code__, old.__globals__, old.__name__, old.__defaults__)
        copied.__kwdefaults__ = old.__kwdefaults__
        old.__globals__["_gnnfast_test_old"], old.__globals__["_gnnfast_test_times_3"] = copied, _times_3
        replacement = eval("lambda *a, **k: _gnnfast_test_times_3(_gnnfast_test_old)(*a, **k)").__code__
        code = code_of(old)
        old.__code__ = replacement
    else:
        pytest.skip("no function of Python's, or one with a closure")
    try:
        same(lambda: layer(x, edge_index))
        found = gnnfast.report()  # if any, PyG's own functions run between gathers and reductions of gnnfast
        assert found.fallbacks or found.kernels
        assert not found.kernels or any(kernel.startswith("gathers") for _, kernel, _ in found.kernels)
    finally:
        if how == "code":
            old.__code__ = code
            del old.__globals__["_gnnfast_test_old"], old.__globals__["_gnnfast_test_times_3"]
    monkeypatch.undo()
    gnnfast.clear_report()
    same(lambda: layer(x, edge_index))
    assert gnnfast.report().kernels and not gnnfast.report().fallbacks


@pytest.mark.parametrize("name", ["scatter", "add_remaining_self_loops", "maybe_num_nodes"])
def test_parts_of_gcn_norm_replaced(name, edge_index, x, device, monkeypatch):
    import sys

    conv = nn.GCNConv(F, 4).to(device, torch.float64)
    same(lambda: conv(x, edge_index))
    module = sys.modules["torch_geometric.nn.conv.gcn_conv"]
    monkeypatch.setattr(module, name, _times_3(getattr(module, name)))
    same(lambda: conv(x, edge_index))


def test_parts_further_down_of_gcn_norm_replaced(monkeypatch):
    import sys

    edge_index = torch.randint(0, NODES, (2, EDGES))  # on a GPU the ids that this makes wrong end the process's CUDA context
    gcn_norm(edge_index, None, NODES)
    monkeypatch.setattr(sys.modules["torch_geometric.utils.loop"], "maybe_num_nodes", lambda index, n=None: NODES + 2)
    found, expected = both(lambda: gcn_norm(edge_index, None, NODES)[0].double())
    assert type(found) is type(expected) and (isinstance(found, tuple) or torch.equal(found, expected))


@pytest.mark.parametrize("where", ["class __call__", "class _call_impl", "instance _call_impl", "Module _call_impl"])
def test_calls_of_linear_parts_replaced(where, edge_index, x, device, monkeypatch):
    conv = nn.GCNConv(F, 4).to(device, torch.float64)
    for _ in range(3):
        same(lambda: conv(x, edge_index))
    place, name = where.split()
    owner = {"class": type(conv.lin), "instance": conv.lin, "Module": torch.nn.Module}[place]
    old = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: 1.5 * old(*args, **kwargs))
    same(lambda: conv(x, edge_index))


def test_an_aggregation_that_is_exchanged(edge_index, x):
    layer = Plain(aggr="sum")
    for other in (aggr.MeanAggregation(), aggr.MaxAggregation(), aggr.SumAggregation(), aggr.StdAggregation()):
        layer.aggr_module = other
        same(lambda: layer(x, edge_index))


def test_dispatch_modes_see_the_frameworks_ops(edge_index, x):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    layer = Plain()
    layer(x, edge_index)
    with Counts() as mode:
        mode.names = []
        layer(x, edge_index)
    assert any("scatter_add" in name for name in mode.names)


@pytest.mark.parametrize("make", [nn.GCNConv, nn.SAGEConv, nn.GraphConv, nn.TAGConv, nn.SGConv])
def test_transforms_of_torch_func(make, edge_index, x, device):
    conv, batch = make(F, 4).to(device, torch.float64), torch.stack([x, 2 * x])
    conv(x, edge_index)
    same(lambda: torch.vmap(lambda x: conv(x, edge_index))(batch))
    same(lambda: torch.func.grad(lambda x: conv(x, edge_index).square().sum())(x))
    same(lambda: torch.func.jvp(lambda x: conv(x, edge_index), (x,), (x,))[1])


# ---- in-place use after the call -----------------------------------------------------------------------------------------------
def test_what_a_transform_left_in_a_cached_layer(edge_index, x, device):
    """It has no storage any more, and PyG can still compute with it."""

    def run():
        torch.manual_seed(0)
        layer = nn.GCNConv(F, F, cached=True).to(device, torch.float64)
        torch.func.grad(lambda t: layer(t, edge_index).sum())(x)
        return layer(x, edge_index).detach()

    same(run)


def test_softmax_of_a_graph_that_is_met_under_checkpointing(device):
    """The first pass meets a graph that its repetition knows: both save the same."""
    edge_index, x = torch.randint(0, NODES, (2, EDGES), device=device), torch.randn(NODES, F, device=device, dtype=torch.float64)
    layer = nn.HypergraphConv(F, F, use_attention=True).to(device, torch.float64)

    def run():
        leaf = x.clone().requires_grad_()
        edges = edge_index.clone()
        for _ in range(2):
            out = checkpoint(lambda t: layer(t, edges, hyperedge_attr=t, num_edges=NODES), leaf, use_reentrant=False)
            gradient = torch.autograd.grad(out.pow(2).sum(), leaf)[0]
        return gradient

    same(run)


# name -> a layer, and whether it takes weights
AFTER = {
    "weighted": lambda: (Weighted(), True),
    "max": lambda: (Plain(aggr="max"), False),
    "weighted min": lambda: (Weighted(aggr="min"), True),
    "GraphConv max": lambda: (nn.GraphConv(F, F, aggr="max"), True),
    "SGConv": lambda: (nn.SGConv(F, 1), False),
    "SAGEConv alone": lambda: (nn.SAGEConv(F, 1, root_weight=False), False),
}


@pytest.mark.parametrize("kernel", ["gas", "gar"])
@pytest.mark.parametrize("change", ["relu_", "add_"])
@pytest.mark.parametrize("name", AFTER)
def test_features_written_after_the_call(name, change, kernel, edge_index, x, device, monkeypatch):
    monkeypatch.setattr("gnnfast.dispatch.select.FEWEST_SAVED", {"cpu": -1, "cuda": -1})  # layers multiply first
    (layer, weighted), w = AFTER[name](), torch.rand(EDGES, device=device, dtype=torch.float64, requires_grad=True)
    layer, leaf = layer.to(device, torch.float64), x.clone().requires_grad_()

    def run():
        with gnnfast.override(kernel=kernel):
            h = leaf * 1
            out = layer(h, edge_index, *([w] if weighted else [])).expand(-1, F)
            h.relu_() if change == "relu_" else h.add_(out)
            grads = torch.autograd.grad((out * out.detach()).sum() + h.sum(), (leaf, w), allow_unused=True)
            return torch.cat([g.flatten() for g in grads if g is not None])

    same(run)


@pytest.mark.parametrize("kernel", ["gas", "gar"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_weights_written_after_the_call(reduce, kernel, edge_index, x, device):
    """Where the features require no gradient PyG keeps no weights."""
    layer, leaf = Weighted(aggr=reduce), torch.rand(EDGES, device=device, dtype=torch.float64, requires_grad=True)

    def run():
        with gnnfast.override(kernel=kernel):
            w = leaf * 1
            out = layer(x, edge_index, w)
            w.mul_(2)
            return torch.autograd.grad(out.sum(), leaf)[0]

    same(run)


def test_emptied_features_are_left_to_pyg(edge_index, x):
    layer = Plain()
    layer(x, edge_index)
    x.untyped_storage().resize_(0)
    with gnnfast.override(strict=True), pytest.raises(gnnfast.FallbackError, match="the storage of x was emptied"):
        layer(x, edge_index)


# ---- edges of the numbers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["max", "min"])
def test_second_derivative_of_a_maximum_over_no_edges(kind, device):
    conv = nn.GraphConv(4, 2, aggr=kind).to(device)
    x, w = torch.randn(3, 4, device=device, requires_grad=True), torch.zeros(0, device=device, requires_grad=True)
    edges = torch.zeros(2, 0, dtype=torch.long, device=device)

    def run():
        first = torch.autograd.grad(conv(x, edges, w).pow(2).sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, w), allow_unused=True)[1]

    found, expected = both(run)
    assert found.shape == expected.shape == (0,)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_of_a_maximum_that_is_zero(weighted, kind, edge_index, x, device):
    """PyG's is torch's scatter_reduce: the 0 that it starts from takes a share where the result is 0, as after a ReLU."""
    leaf, w = x.relu().requires_grad_(), torch.rand(EDGES, device=device, dtype=torch.float64, requires_grad=True)
    layer = Weighted(aggr=kind) if weighted else Plain(aggr=kind)

    def run():
        out = layer(leaf, edge_index, w) if weighted else layer(leaf, edge_index)
        grads = torch.autograd.grad((out + out.square()).sum(), (leaf, w) if weighted else (leaf,), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaf)
        return torch.cat([g.flatten() for g in (*grads, *second)])

    same(run)
    # gnnfast.spmm shares evenly among the edges that attain it, as mathematics has it.
    graph = gnnfast.Graph.from_edge_index(torch.tensor([[0, 1], [2, 2]], device=device), 3)
    zeros = torch.zeros(3, 1, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(gnnfast.spmm(graph, zeros, reduce="max").sum(), zeros)
    assert grad.flatten().tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["x", "weight", "upstream"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_values_that_are_not_finite(reduce, where, value, edge_index, x, device):
    leaf, w = x.clone().requires_grad_(), torch.rand(EDGES, device=device, dtype=torch.float64)
    seed = torch.ones_like(x)
    {"x": leaf.data, "weight": w.view(-1, 1), "upstream": seed}[where][0, 0] = value
    w.requires_grad_()
    layer = Weighted(aggr=reduce)

    def run():
        out = layer(leaf, edge_index, w)
        return torch.cat([out.flatten(), *(g.flatten() for g in torch.autograd.grad(out, (leaf, w), seed))])

    same(run)


@pytest.mark.parametrize("make", [lambda: nn.GraphConv(F, 4, bias=False), lambda: nn.GCNConv(F, 4), lambda: nn.SAGEConv(F, 4)])
def test_compressed_features_and_infinite_gradients(make, edge_index, device, monkeypatch):
    """Gradients of weights are not finite where PyG's are, though zeros that are not stored meet no infinity."""
    monkeypatch.setattr(features, "MIN_WIDTH", 1)
    monkeypatch.setattr(features, "MIN_ELEMENTS", 1)
    x = torch.zeros(NODES, F, device=device, dtype=torch.float64)
    x[::3, 1], x[::4, 2] = 1.0, 2.0
    layer = make().to(device, torch.float64)
    w = torch.rand(EDGES, device=device, dtype=torch.float64, requires_grad=True)
    seed = torch.ones(NODES, 4, device=device, dtype=torch.float64)
    seed[7, 2], seed[11, 1] = float("inf"), float("nan")
    learned = isinstance(layer, nn.GraphConv)

    def run():
        with gnnfast.override(feature_density_threshold=1):
            for _ in range(3):
                out = layer(x, edge_index, w) if learned else layer(x, edge_index)
                leaves = [*layer.parameters(), *([w] if learned else [])]
                grads = torch.autograd.grad(out, leaves, seed)
        return torch.cat([g.flatten() for g in grads]).isfinite().double()

    same(run)
    assert any("sparse" in kernel for _, kernel, _ in gnnfast.report().kernels)


@pytest.mark.parametrize("kernel", ["gas", "gar"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradient_of_a_16_bit_mean_over_a_long_row(dtype, kernel, device):
    edges = 70_000  # more than float16 can hold
    src = torch.arange(edges, device=device) % 7
    edge_index = torch.stack([src, torch.zeros_like(src)])
    leaf = torch.randn(7, F, device=device).to(dtype).requires_grad_()
    w = torch.rand(edges, device=device).to(dtype).requires_grad_()
    for layer, leaves in (
        (lambda: Plain(aggr="mean")(leaf, edge_index), (leaf,)),
        (lambda: Weighted(aggr="mean")(leaf, edge_index, w), (leaf, w)),
    ):
        with gnnfast.override(kernel=kernel):
            found = torch.autograd.grad(layer().sum(), leaves)
        wide = [t.detach().double().requires_grad_() for t in (leaf, w)]
        gnnfast.disable()
        try:
            out = (
                Plain(aggr="mean")(wide[0], edge_index) if len(leaves) == 1 else Weighted(aggr="mean")(wide[0], edge_index, wide[1])
            )
            expected = torch.autograd.grad(out.sum(), wide[: len(leaves)])
        finally:
            gnnfast.enable()
        for f, e in zip(found, expected):
            assert f.dtype == dtype and relative_error(f, e) < (2e-3 if dtype is torch.float16 else 1e-2)


def test_mean_of_more_edges_than_a_float_counts(device):
    edges = 2**24 + 2**21
    row = torch.zeros(edges, dtype=torch.int32, device=device)
    out, _ = torch.ops.gnnfast.spmm_coo(row, row, None, torch.ones(1, 1, dtype=torch.float64, device=device), 1, 1)
    assert out.item() == 1


def test_layers_are_still_served(edge_index, x, device):
    """The checks above let what is PyG's own through."""
    for layer in (nn.GCNConv(F, 4), nn.SAGEConv(F, 4, aggr="max"), nn.GINConv(torch.nn.Linear(F, 4)), nn.APPNP(2, 0.1)):
        report = compare(layer.to(device), x.float(), edge_index)
        assert report.kernels and not report.fallbacks
