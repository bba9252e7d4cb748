"""Plain calls of layers, of which little is asked, and those that run as PyG's operations alone: each way in which a call can be
unlike the one before, and no longer plain."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import weakref
from unittest import mock

import pytest
import torch
from comparison import close, without
from graphs import GRAPHS

import gnnfast
from gnnfast.dispatch.select import SMALL, Small
from gnnfast.graph import ids
from gnnfast.pyg import layers

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn

F = 8
LAYERS = {
    "SAGEConv": lambda: nn.SAGEConv(F, F),
    "SAGEConv, length 1": lambda: nn.SAGEConv(F, F, normalize=True),
    "SAGEConv, sum": lambda: nn.SAGEConv(F, F, aggr="sum"),
    "SAGEConv, max": lambda: nn.SAGEConv(F, F, aggr="max"),
    "SAGEConv, no root": lambda: nn.SAGEConv(F, F, root_weight=False),
    "SAGEConv, no bias": lambda: nn.SAGEConv(F, F, bias=False),
    "GraphConv": lambda: nn.GraphConv(F, F),
    "GraphConv, mean": lambda: nn.GraphConv(F, F, aggr="mean"),
    "GraphConv, min": lambda: nn.GraphConv(F, F, aggr="min"),
    "SAGEConv, to sources": lambda: nn.SAGEConv(F, F, flow="target_to_source"),
    "GraphConv, to sources": lambda: nn.GraphConv(F, F, flow="target_to_source"),
    "SAGEConv, both ways": lambda: nn.DirGNNConv(nn.SAGEConv(F, F)),
}


made_new = {"now": True}  # whether each call is over an ``edge_index`` of its own


@pytest.fixture(autouse=True, params=["new graphs", "the same graph", "as listed", "left"])
def over_new_graphs(request, monkeypatch, device):
    """Made in each call, or once; on a CPU, too, as on a GPU, where there are no graphs of what is met for the first time; and left
    to PyG's operations for their size."""
    monkeypatch.setitem(made_new, "now", request.param != "the same graph")
    if request.param == "left":
        monkeypatch.setattr("gnnfast.dispatch.select.SMALL", SMALL)
    if request.param == "as listed":
        if device.type == "cuda":
            pytest.skip("a GPU has new graphs as they are listed anyway")
        monkeypatch.setattr(layers, "ends_of_new", _ends_on_cpu)
        monkeypatch.setattr(ids, "watch", lambda _: None)


def _ends_on_cpu(edge_index, to_target):
    src, dst = edge_index.unbind()
    return (dst, src) if to_target else (src, dst)


def step(layer, x, edge_index, *rest):
    """What a call gives, and all gradients."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, edge_index.clone() if made_new["now"] else edge_index, *rest)
    out.pow(2).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def steps(layer, x, edge_index, *rest):
    """The last of several."""
    for _ in range(3):
        step(layer, x, edge_index)
    return step(layer, x, edge_index, *rest)


def check(layer, x, edge_index):
    other = copy.deepcopy(layer)
    # With int32 ids torch sums gradients wrongly on a CPU.
    close(steps(layer, x, edge_index), without(lambda: steps(other, x, edge_index.long())), 1e-9)


def given(name, device):
    edge_index, num_src, num_dst = GRAPHS[name]()
    n = max(num_src, num_dst)
    return torch.randn(n, F, device=device, dtype=torch.float64), edge_index.to(device)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_new_graphs(name, graph, device):
    x, edge_index = given(graph, device)
    layer = LAYERS[name]().to(device).double()
    check(layer, x, edge_index)
    check(layer, x, edge_index.int())
    check(layer, x.t().contiguous().t(), edge_index.t().contiguous().t())


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
def test_only_some_parameters_are_trained(name, device):
    x, edge_index = given("random", device)
    layer = LAYERS[name]().to(device).double()
    for trained in range(8):
        for of, parameter in enumerate(layer.parameters()):
            parameter.requires_grad_(bool(trained >> of & 1))
        for needs_grad in (False, True):

            def last(needs_grad=needs_grad):
                found = []
                for _ in range(3):
                    leaf = x.clone().requires_grad_(needs_grad)
                    out = layer(leaf, edge_index.clone() if made_new["now"] else edge_index)
                    wanted = [t for t in (leaf, *layer.parameters()) if t.requires_grad]
                    found = [out.detach(), *(torch.autograd.grad(out.pow(2).sum(), wanted) if wanted else ())]
                return found

            close(last(), without(last))


class _Tripling(torch.nn.Parameter):
    """What linear layers multiply with it is three times as much."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        return out * 3 if function is torch.nn.functional.linear else out


def _changed(what):
    """What a layer and its arguments are like in the call that is unlike the one before."""

    def change(layer, x, edge_index):
        lins = [m for m in layer.children() if isinstance(m, nn.Linear)]
        rest = ()
        if what == "float32":
            layer, x = layer.float(), x.float()
        elif what == "no bias":
            lins[0].bias = None
        elif what == "another weight":
            lins[0].weight = torch.nn.Parameter(lins[0].weight.detach() + 1)
        elif what == "another shape":
            for lin in lins:
                lin.weight.data = torch.cat([lin.weight.data] * 2)
            lins[0].bias.data = torch.cat([lins[0].bias.data] * 2)
        elif what == "a bias of the root":
            lins[1].bias = torch.nn.Parameter(torch.ones_like(lins[0].bias))
        elif what == "a weight that is no parameter":
            weight = lins[0].weight.detach()
            del lins[0].weight
            lins[0].weight = weight * 2
        elif what == "a weight in the module's own dictionary":
            lins[0].__dict__["weight"] = lins[0].weight.detach() * 2
        elif what == "a weight of another class":
            weight = lins[0].weight.detach()
            torch.utils.swap_tensors(lins[0].weight, _Tripling(weight))
        elif what == "a hook":
            lins[0].register_forward_hook(lambda module, given, out: out * 2)
        elif what == "a hook of the root":
            lins[1].register_forward_hook(lambda module, given, out: out * 2)
        elif what == "a hook of message passing":
            layer.register_message_forward_hook(lambda module, given, out: out * 2)
        elif what == "another root":
            setattr(
                layer, next(n for n, m in layer.named_children() if m is lins[1]), torch.nn.Sequential(lins[1], torch.nn.Tanh())
            )
        elif what == "another reduction":
            layer.aggr_module = nn.aggr.MaxAggregation()
        elif what == "another flow":
            layer.flow = "target_to_source"
        elif what == "no root":
            layer.root_weight = False
        elif what == "message()":
            layer.message = lambda x_j: x_j * 2
        elif what == "a pair":
            x = (x, x * 2)
        elif what == "a size":
            rest = ((len(x), len(x)),)
        elif what == "weights":
            rest = (torch.linspace(-1, 1, edge_index.shape[1], dtype=x.dtype, device=x.device),)
        elif what == "three dimensions":
            x = torch.stack([x, x * 2])
        return layer, x, edge_index, rest

    return change


CHANGES = [
    *("a weight in the module's own dictionary", "a weight of another class"),
    *("float32", "no bias", "another weight", "another shape", "a bias of the root", "a weight that is no parameter", "a hook"),
    *(
        "a hook of the root",
        "a hook of message passing",
        "another root",
        "another reduction",
        "another flow",
        "message()",
        "a pair",
    ),
    *("no root", "a size", "weights", "three dimensions"),
]


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
@pytest.mark.parametrize("what", CHANGES)
def test_one_that_is_unlike_the_last(what, name, device):
    if (what, name) in (("no root", "GraphConv"), ("weights", "SAGEConv")):
        pytest.skip("the layer has no such option")
    if what == "message()" and name == "GraphConv":
        pytest.skip("its message takes weights")
    x, edge_index = given("random", device)
    layer = LAYERS[name]().to(device).double()

    def run(layer):
        steps(layer, x, edge_index)
        layer.zero_grad()
        changed, features, edges, rest = _changed(what)(layer, x, edge_index)
        if what == "a size" and name == "GraphConv":
            rest = (None, *rest)
        out = changed(features, edges.clone() if made_new["now"] else edges, *rest)
        out.pow(2).sum().backward()
        return [out.detach(), *(p.grad for p in changed.parameters())]

    copies = [layer, copy.deepcopy(layer)]
    tolerance = 1e-5 if what == "float32" else 1e-9
    close(run(copies.pop()), without(lambda: run(copies.pop())), tolerance)


def test_a_root_that_the_layer_itself_does_not_say(device):
    """As an option of its class it is not looked for, as one that is gone PyG complains."""

    class Own(nn.SAGEConv):
        root_weight = property(lambda self: self.own_root, lambda self, value: setattr(self, "own_root", value))

    x, edge_index = given("random", device)
    check(Own(F, F).to(device).double(), x, edge_index)
    layer = LAYERS["SAGEConv"]().to(device).double()
    steps(layer, x, edge_index)
    del layer.root_weight
    with pytest.raises(AttributeError, match="root_weight"):
        steps(layer, x, edge_index)


@pytest.mark.parametrize("aggr", ["mean", "max"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_pairs_without_a_root(flow, aggr, device):
    """The destinations are only counted, whether they need gradients or not."""
    layer = nn.SAGEConv(F, F, root_weight=False, flow=flow, aggr=aggr).to(device).double()
    for graph in ("random", "bipartite"):
        edge_index, *nodes = GRAPHS[graph]()
        if graph == "bipartite" and flow == "target_to_source":
            edge_index = edge_index.clamp(max=min(nodes) - 1)  # PyG's messages are of the first of a pair, by ids of the second
        edge_index, pair = edge_index.to(device), [torch.randn(n, F, device=device, dtype=torch.float64) for n in nodes]
        for needs in ((True, True), (False, True), (True, False)):

            def run(needs=needs, edge_index=edge_index, pair=pair):
                found = []
                for _ in range(3):
                    leaves = [x.clone().requires_grad_(need) for x, need in zip(pair, needs)]
                    out = layer(tuple(leaves), edge_index)
                    wanted = [x for x in (*leaves, *layer.parameters()) if x.requires_grad]
                    grads = torch.autograd.grad(out.pow(2).sum(), wanted, allow_unused=True)
                    found = [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads))]
                return found

            close(run(), without(run), 1e-9)


def test_ids_beyond_the_first_of_a_pair_are_an_error_of_pyg(device):
    if device.type == "cuda":
        pytest.skip("on a GPU PyG's own ends in a device-side assertion")
    layer = nn.SAGEConv(F, F, root_weight=False, flow="target_to_source")
    pair, edge_index = (torch.randn(5, F), torch.randn(7, F)), torch.tensor([[0, 1, 2, 3] * 500, [1, 2, 3, 6] * 500])
    for _ in range(2):
        with pytest.raises(IndexError, match="larger than 4"):
            layer(pair, edge_index)


def test_edges_that_are_written_into(device):
    x, edge_index = given("random", device)
    layer = LAYERS["SAGEConv"]().to(device).double()
    steps(layer, x, edge_index)
    mine = edge_index.clone()
    layer(x, mine)
    mine.copy_(mine.flip(0))
    torch.testing.assert_close(layer(x, mine), without(lambda: layer(x, mine)))


@pytest.mark.parametrize("error", ["fewer columns", "another device"])
def test_what_does_not_fit_is_an_error_of_pyg(error, device):
    x, edge_index = given("random", device)
    layer = LAYERS["SAGEConv"]().to(device).double()
    steps(layer, x, edge_index)
    wrong = x[:, 1:] if error == "fewer columns" else x.to("meta")
    with pytest.raises(Exception) as expected:
        without(lambda: layer(wrong, edge_index.clone()))
    with pytest.raises(type(expected.value)) as found:
        layer(wrong, edge_index.clone())
    assert str(found.value) == str(expected.value)


def test_second_derivatives_and_checkpoints(device):
    x, edge_index = given("random", device)
    layer = LAYERS["SAGEConv"]().to(device).double()
    steps(layer, x, edge_index)
    new = edge_index.clone()

    def second():
        leaf = x.clone().requires_grad_()
        grad = torch.autograd.grad(layer(leaf, new).pow(3).sum(), leaf, create_graph=True)[0]
        return torch.autograd.grad(grad.pow(2).sum(), [leaf, *(p for p in layer.parameters() if p.dim() == 2)])

    close(second(), without(second))

    def checkpointed():
        leaf = x.clone().requires_grad_()
        out = torch.utils.checkpoint.checkpoint(layer, leaf, new, use_reentrant=False)
        return [out.detach(), *torch.autograd.grad(out.pow(2).sum(), [leaf, *layer.parameters()])]

    close(checkpointed(), without(checkpointed))
    assert torch.autograd.gradcheck(functools.partial(lambda x: layer(x, new)), (x.clone().requires_grad_(),))


def test_a_graph_that_comes_again_is_converted(device, over_new_graphs, monkeypatch):
    monkeypatch.setattr("gnnfast.dispatch.select.SMALL", dict.fromkeys(SMALL, Small(-1, -1)))
    if layers.ends_of_new(torch.zeros(2, 1, dtype=torch.int64, device=device), True) is None:
        pytest.skip("on a CPU each new graph is kept")
    monkeypatch.setattr("gnnfast.dispatch.select.gas_or_convert", lambda *_: (1.0, 3.3))
    x, edge_index = given("random", device)
    layer = LAYERS["SAGEConv"]().to(device).double()
    step(layer, x, edge_index)
    mine, kernels = edge_index.clone(), []
    for _ in range(6):
        gnnfast.clear_report()
        layer(x, mine)
        kernels += [kernel.split()[0] for _, kernel, _ in gnnfast.report().kernels]
    assert kernels == ["gas"] * 3 + ["gar"] * 3


def test_a_propagate_that_is_no_function(device):
    x, edge_index = given("random", device)
    layer = LAYERS["SAGEConv"]().to(device).double()
    steps(layer, x, edge_index)
    with mock.patch.object(nn.SAGEConv, "propagate", return_value=x):
        torch.testing.assert_close(layer(x, edge_index), layer.lin_l(x) + layer.lin_r(x))


def test_nothing_of_a_call_is_kept(device):
    """Neither the parameters that it was given, nor its edges once gradients are there."""
    x, edge_index = given("random", device)
    layer, of = LAYERS["SAGEConv"]().to(device).double(), torch.randn(F, F, device=device, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        weight, new = of * 2, edge_index.clone()
        kept = weakref.ref(weight), weakref.ref(new)
        loss = torch.func.functional_call(layer, {"lin_l.weight": weight}, (x, new)).sum()
        loss.backward()
        del weight, new
    gc.collect()
    assert kept[0]() is None and kept[1]() is None and loss.grad_fn is not None


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv", "GINConv"])
def test_a_complaint_of_an_earlier_call_is_heard(name, device, monkeypatch):
    if device.type != "cuda":
        pytest.skip("on a CPU the call itself raises")
    x, edge_index = given("random", device)
    layer = (LAYERS[name]() if name in LAYERS else nn.GINConv(torch.nn.Linear(F, F))).to(device).double()
    for requires_grad in (False, True):
        monkeypatch.setattr(ids, "_found", (ctypes.c_longlong * 2)(99, 101))
        with pytest.raises(IndexError, match="index 99 of an edge is out of range"):
            layer(x.clone().requires_grad_(requires_grad), edge_index.clone())


@pytest.mark.parametrize("within", ["lazy", "lazy normalisation", "scripted", "traced"])
def test_what_is_within_gin_may_not_have_its_parameters_yet(within, device):
    x, edge_index = given("random", device)
    x, lin = x.float(), torch.nn.Linear(F, F)
    inner = {
        "lazy": torch.nn.LazyLinear(F),
        "lazy normalisation": torch.nn.Sequential(lin, torch.nn.LazyBatchNorm1d()),
        "scripted": torch.nn.Sequential(torch.jit.script(lin), torch.nn.ReLU()),
        "traced": torch.jit.trace(lin, torch.randn(3, F)),
    }[within]
    layer = nn.GINConv(inner).to(device)
    found = layer(x, edge_index)
    torch.testing.assert_close(found, without(lambda: layer(x, edge_index)))
