"""Python functions of users on edges and on mailboxes, which gnnfast runs on rows that do not exist, give what DGL gives on a CPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from comparison import close, without
from torch import nn as tnn

import gnnfast

dgl = pytest.importorskip("dgl")
pytest.importorskip("torch_geometric", reason="the messages of test_lazy.py, which also run here, are PyG's")
import dgl.function as fn  # noqa: E402
from dgl_functions import SQUARE, Messages, Reducers, comparable, compare, make, step  # noqa: E402, F401
from user_messages import GATES, MESSAGES, SUMS, F  # noqa: E402


@pytest.mark.parametrize("graph", [*SQUARE, "bipartite"])
@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name, graph, device):
    function, heads, fused = MESSAGES[name]
    for reduce in ("sum", "mean", "max"):

        def passes(g, layer, reduce=reduce):
            g.update_all(layer.of_edges, getattr(fn, reduce)("m", "o"))
            return g.dstdata["o"]

        report = compare(graph, Messages(function, "sum", heads), passes, device)
        kernels = {kernel for _, kernel, _ in report.kernels}
        if graph == "random" and fused == GATES and reduce != "max":
            assert f"gates, {reduce}" in kernels
        elif graph == "random" and (fused is True or (fused == SUMS and reduce != "max")):
            assert {f"gar {reduce}", f"gas {reduce}", *(["attention"] if fused == SUMS else [])} & kernels


@pytest.mark.parametrize("graph", [*SQUARE, "bipartite"])
@pytest.mark.parametrize("name", MESSAGES)
def test_features_of_edges(name, graph, device):
    function, heads, _ = MESSAGES[name]

    def passes(g, layer):
        g.apply_edges(layer.of_edges)
        return g.edata["m"]

    compare(graph, Messages(function, "sum", heads), passes, device)


SERVED = {
    "sums": "copied",
    "means": "copied",
    "maxima": "copied",
    "kept": "copied",
    "attention": "scored",
    "dot_attention": "copied",
    "gates": "gated",
    "sage": "copied",
    "rows": "copied",
    "joined": "copied",
    "length": "copied",
    "scalers": "copied",
    "sizes": "copied",
    "parts": "copied",
    "moments": "copied",
    "is_number": "copied",
}
LEFT = [
    "branches",
    "equals",
    "math_log",
    "of_a_tensor",
    "in_a_loop",
    "flattened",
    "number_of_nodes",
    "last",
    "some_nodes",
]
LEFT += ["of_batch", "over_nodes", "over_all", "normalised", "first", "sorted", "written", "indices", "new"]
LEFT += ["crossed", "detached"]
BUILT_IN = {"copied": fn.copy_u("x", "m"), "times": fn.u_mul_e("x", "w", "m"), "sums": fn.u_add_v("x", "x", "m")}


@pytest.mark.parametrize("graph", [*SQUARE, "bipartite"])
@pytest.mark.parametrize("name", [*SERVED, *LEFT])
def test_reducers(name, graph, device):
    def passes(g, layer):
        g.update_all(getattr(layer, SERVED.get(name, "copied")), getattr(layer, name))
        return torch.cat([g.dstdata["o"].flatten(1), *([g.dstdata["other"].view(-1, 1)] if "other" in g.dstdata else [])], 1)

    report = compare(graph, Reducers(), passes, device)
    by_degree = [reason for _, reason in report.fallbacks if "degree by degree" in reason]
    assert bool(by_degree) == (name in LEFT)


@pytest.mark.parametrize("name", ["sums", "maxima", "dot_attention", "rows"])
@pytest.mark.parametrize("message", BUILT_IN)
def test_reducers_of_built_in_messages(message, name, device):
    def passes(g, layer):
        g.update_all(BUILT_IN[message], getattr(layer, name))
        return g.dstdata["o"]

    for graph in ("random", "isolated", "bipartite"):
        for idtype in (torch.int32, torch.int64):
            assert not compare(graph, Reducers(), passes, device, idtype=idtype).fallbacks


@pytest.mark.parametrize("name", ["sums", "attention", "gates", "sage"])
def test_float32(name, device):
    def passes(g, layer):
        g.update_all(getattr(layer, SERVED[name]), getattr(layer, name))
        return g.dstdata["o"]

    compare("random", Reducers(), passes, device, torch.float32, 1e-5)


@pytest.mark.parametrize("reducer", ["dropped", "dropped_shares"])
def test_dropout(reducer, device):
    def passes(g, layer):
        g.update_all(layer.scored, getattr(layer, reducer))
        return g.dstdata["o"]

    compare("random", Reducers().eval(), passes, device)
    layer, g = Reducers().to(device, torch.float64), make("random", device)
    outs = [step(g, layer, passes)() for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*outs) if a is not None)  # by one seed
    layer.eval()
    whole = step(g, layer, passes)()[0]
    if reducer == "dropped":
        share = (outs[0][0] == 0).double().mean()
        assert 0.3 < share < 0.7 and torch.allclose(outs[0][0][outs[0][0] != 0], 2 * whole[outs[0][0] != 0])
    else:
        assert not torch.allclose(outs[0][0], whole)


def test_functions_that_stand_alone(device):
    """Lambdas, what they have from around them, nodes' own functions afterwards, and parts of a graph."""
    scale = 2.0

    def passes(g, layer):
        g.update_all(
            lambda edges: {"m": layer(edges.src["x"]) * scale},
            lambda nodes: {"o": nodes.mailbox["m"].sum(1) * scale},
            lambda nodes: {"p": nodes.data["o"] + nodes.data["x"]},
        )
        g.update_all(
            lambda edges: {"m": edges.src["p"] * edges.data["w"]}, fn.max("m", "q"), lambda nodes: {"q": nodes.data["q"] * 2}
        )
        some = torch.arange(5, dtype=g.idtype, device=g.device)
        g.pull(some, lambda edges: {"m": edges.src["q"]}, fn.sum("m", "r"))
        g.send_and_recv(some, lambda edges: {"m": edges.src["q"]}, lambda nodes: {"s": nodes.mailbox["m"].mean(1)})
        return torch.cat([g.ndata[name] for name in "pqrs"], 1)

    assert not compare("random", tnn.Sequential(tnn.Linear(F, F), tnn.ReLU()), passes, device).fallbacks


@torch.jit.script
def centre(x: torch.Tensor) -> torch.Tensor:
    return x.mean(0, keepdim=True)


def test_operations_that_torch_does_not_show(device):
    def scripted(nodes):
        return {"o": nodes.mailbox["m"].sum(1) - centre(nodes.data["x"])}

    def foreign(nodes):
        x = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(nodes.data["x"].detach()))
        return {"o": nodes.mailbox["m"].sum(1) - x.mean(0, keepdim=True)}

    for function in (scripted, foreign):

        def passes(g, layer, function=function):
            g.update_all(fn.copy_u("x", "m"), function)
            return g.ndata["o"]

        compare("random", tnn.Linear(1, 1), passes, device)


def test_features_of_edges_as_a_frame(device):
    def of_parts(edges):
        whole, some = edges.src.clone(), edges.dst.subframe(torch.arange(7, device=edges.data["w"].device))
        return {"e": whole["x"] + some["x"].sum(0)}

    def passes(g, layer):
        g.apply_edges(of_parts)
        return g.edata["e"]

    compare("random", tnn.Linear(1, 1), passes, device)


def test_numbers_of_messages_are_those_of_python(device):
    numbers = {
        "integer": lambda n: np.reciprocal(n) + n // 2 + n % 3,
        "complex": lambda n: abs((n - 3) ** 0.5),
        "of numpy": lambda n: np.log1p(n) + np.sqrt(n) + np.float32(2) * n,
        "negative": lambda n: -n + abs(-n) - (3 - n) / n,
    }
    for number in numbers.values():

        def passes(g, layer, number=number):
            g.update_all(fn.copy_u("x", "m"), lambda nodes: {"o": nodes.mailbox["m"].sum(1) * number(nodes.mailbox["m"].size(1))})
            return g.ndata["o"]

        compare("hub", tnn.Linear(1, 1), passes, device)

    def divided(g, layer):
        g.update_all(fn.copy_u("x", "m"), lambda nodes: {"o": nodes.mailbox["m"].sum(1) / (1 / (nodes.mailbox["m"].size(1) - 1))})

    g = dgl.graph(([0, 1, 2], [1, 0, 0])).to(device)
    g.ndata["x"] = torch.ones(3, F, device=device)
    with pytest.raises(ZeroDivisionError):
        divided(g, None)


def test_rows_without_edges_are_the_initializers(device):
    def passes(g, layer):
        g.set_n_initializer(lambda shape, dtype, ctx, ids: torch.full(shape, 7, dtype=dtype, device=ctx))
        g.update_all(layer.copied, layer.sums)
        return g.ndata["o"]

    compare("isolated", Reducers(), passes, device)


def test_relations(device):
    ids = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 2, 2])

    def run(device):
        g = dgl.heterograph({("a", "x", "b"): ids, ("b", "y", "a"): ids, ("a", "z", "a"): ids}).to(device)
        x = torch.arange(3.0 * F, dtype=torch.float64, device=device).view(3, F).requires_grad_()
        with g.local_scope():
            for ntype in "ab":
                g.nodes[ntype].data["x"] = x
            message, reduce = lambda edges: {"m": edges.src["x"] + edges.dst["x"]}, lambda nodes: {"o": nodes.mailbox["m"].sum(1)}
            g.update_all(message, reduce, etype="x")
            g["y"].apply_edges(lambda edges: {"e": (edges.src["x"] * edges.dst["x"]).sum(-1)})
            g.multi_update_all({"y": (message, fn.sum("m", "p")), "z": (message, fn.mean("m", "p"))}, "sum")
            out = torch.cat([g.nodes["b"].data["o"].flatten(), g.edges["y"].data["e"], g.nodes["a"].data["p"].flatten()])
        out.sum().backward()
        return [out.detach(), x.grad]

    expected = without(lambda: run(torch.device("cpu")))
    gnnfast.clear_report()
    close(run(device), expected)
    assert not gnnfast.report().fallbacks


def test_errors_are_those_of_dgl(device):

    def raised(device, message, reduce):
        g = make("random", device)
        g.ndata["x"] = torch.ones(g.num_nodes(), F, device=device)
        with pytest.raises(Exception) as caught:
            g.update_all(message, reduce)
        return caught.type, str(caught.value)

    for message, reduce in [
        (lambda edges: {"n": edges.src["x"]}, fn.sum("m", "o")),
        (lambda edges: {"m": edges.src["y"]}, fn.sum("m", "o")),
        (lambda edges: edges.src["x"], fn.sum("m", "o")),
        (fn.copy_u("x", "m"), lambda nodes: {"o": nodes.mailbox["n"].sum(1)}),
        (fn.copy_u("x", "m"), lambda nodes: {"o": nodes.mailbox["m"] + nodes.data["x"]}),
        (fn.copy_u("x", "m"), lambda nodes: {"o": nodes.mailbox["m"]}),
    ]:
        expected = without(functools.partial(raised, torch.device("cpu"), message, reduce))
        assert raised(device, message, reduce) == expected
