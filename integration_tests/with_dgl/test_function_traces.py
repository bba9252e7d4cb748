"""Python functions of users that write, keep or count: what they leave behind is what it is where DGL runs them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn as tnn
from torch.nn import functional

dgl = pytest.importorskip("dgl")
pytest.importorskip("torch_geometric", reason="the messages of test_lazy.py, which also run here, are PyG's")
import dgl.function as fn  # noqa: E402
from dgl_functions import comparable, compare  # noqa: E402, F401
from user_messages import F  # noqa: E402


def test_what_leaves_traces_runs_once(device):
    seen = []

    def counted(edges):
        seen.append(1)
        return {"m": edges.src["x"].cumsum(1)}

    def passes(g, layer):
        g.update_all(counted, fn.sum("m", "o"))
        return g.ndata["o"]

    compare("random", tnn.Linear(1, 1), passes, device)
    assert len(seen) == 2  # in DGL, and in gnnfast

    def stored(edges):
        edges.data["e"] = edges.src["x"] * 2
        return {"m": edges.data["e"]}

    def stores(g, layer):
        g.update_all(stored, fn.sum("m", "o"))
        g.update_all(stored, lambda nodes: {"p": nodes.mailbox["m"].sigmoid().max(1)[0]})
        return torch.cat([g.ndata["o"], g.ndata["p"], g.edata["e"]])

    report = compare("random", tnn.Linear(1, 1), stores, device)
    assert not any("degree by degree" in reason for _, reason in report.fallbacks)  # messages are made once, and reduced at once


class Kept:
    """Which is not restored."""

    def __init__(self):
        self.data = {"n": 0}


KEPT = Kept()


class Storing(tnn.Module):
    """As gated graph networks do: features of edges for the next layer."""

    def stored(self, edges):
        e = edges.data["e"] + edges.src["x"] + edges.dst["x"]
        edges.data["e"] = e
        return {"m": edges.src["x"], "e": e}

    def read_again(self, edges):
        edges.data["e"] = edges.data["e"] + edges.src["x"]
        edges.data["e"] = edges.data["e"] * 2
        edges.data["f"] = edges.dst["x"]
        return {"m": edges.src["x"], "e": edges.data["e"].sigmoid() * edges.data["f"]}

    def through_a_name(self, edges):
        data = edges.data
        data["e"] = data["e"] + edges.src["x"]
        return {"m": edges.src["x"], "e": data["e"]}

    def of_another(self, edges):
        of, edges = edges, {"data": edges.data}
        edges["data"]["e"] = of.data["e"] + of.src["x"]
        return {"m": of.src["x"], "e": of.data["e"]}

    def in_a_default(self, edges, kept=KEPT):
        kept.data["n"] = kept.data["n"] + 1
        return {"m": edges.src["x"], "e": edges.dst["x"] * kept.data["n"]}

    def of_one_or_another(self, edges):
        kept = KEPT
        (kept or edges).data["n"] = KEPT.data["n"] + 1
        return {"m": edges.src["x"], "e": edges.dst["x"] * kept.data["n"]}

    def gates(self, nodes):
        sigma = torch.sigmoid(nodes.mailbox["e"])
        return {"o": nodes.data["x"] + (sigma * nodes.mailbox["m"]).sum(1) / (sigma.sum(1) + 1e-6)}

    def left(self, nodes):
        return {"o": (nodes.mailbox["e"] * nodes.mailbox["m"]).var(1, unbiased=False)}


STORING = ["stored", "read_again", "through_a_name", "of_another", "in_a_default", "of_one_or_another"]


@pytest.mark.parametrize("reduce", ["gates", "left", "built in"])
@pytest.mark.parametrize("name", STORING)
def test_features_of_edges_written_by_functions(name, reduce, device):
    kept = []

    def passes(g, layer):
        KEPT.data["n"] = 0
        g.edata["e"] = g.edata["w"] * torch.ones(1, F, dtype=g.edata["w"].dtype, device=g.device)
        for _ in range(2):
            g.update_all(getattr(layer, name), fn.sum("e", "o") if reduce == "built in" else getattr(layer, reduce))
        g.apply_edges(getattr(layer, name))
        kept.append(g.edata["e"])
        return torch.cat([g.ndata["o"], g.edata["e"], g.edata.get("f", g.edata["e"])])

    for graph in ("random", "isolated", "hub"):
        report = compare(graph, Storing(), passes, device)
        assert all(type(t) is torch.Tensor for t in kept)
        if name in ("stored", "read_again") and reduce == "gates":
            assert not report.fallbacks, report


SEEN = set()


class Tracing(tnn.Module):
    """What DGL runs once, or once for each degree, gnnfast must not run more or less often."""

    def __init__(self):
        super().__init__()
        self.norm, self.act, self.lin = tnn.BatchNorm1d(F), tnn.LeakyReLU(0.5, inplace=True), tnn.Linear(F, F)
        self.items = [1.0, 2.0, 3.0]

    def left(self, nodes):
        return {"o": nodes.mailbox["m"].var(1, unbiased=False)}

    def normed(self, edges):
        return {"m": self.norm(edges.src["x"])}

    def written(self, edges):
        return {"m": self.act(edges.data["w"]) * edges.src["x"]}

    def written_by_position(self, edges):
        return {"m": functional.leaky_relu(edges.data["w"], 0.5, True) * edges.src["x"]}

    def added(self, edges):
        SEEN.add(len(SEEN))
        return {"m": edges.src["x"] * len(SEEN)}

    def reversed(self, edges):
        self.items.reverse()
        return {"m": edges.src["x"] * self.items[0]}

    def from_default(self, edges, numbers=[1.0, 2.0]):  # noqa: B006
        numbers.reverse()
        return {"m": edges.src["x"] * numbers[0]}


@pytest.mark.parametrize("name", ["normed", "written", "written_by_position", "added", "reversed", "from_default"])
def test_messages_whose_reduction_is_left_run_once(name, device):
    """The function of the mailbox cannot run once for all nodes; that of the edges had run before it was known."""

    def passes(g, layer):
        SEEN.clear()
        Tracing.from_default.__defaults__[0][:] = [1.0, 2.0]
        g.edata["w"] = torch.full((g.num_edges(), 1), -4.0, dtype=torch.float64, device=g.device)
        for _ in range(3):
            g.update_all(getattr(layer, name), layer.left)
        return torch.cat([g.ndata["o"], g.edata["w"].expand(-1, F)])

    compare("random", Tracing(), passes, device)  # buffers, too


def test_what_a_function_of_a_mailbox_keeps(device):
    """It keeps tensors of the last degree, in DGL."""

    class Keeps(tnn.Module):
        def alpha_kept(self, nodes):
            self.alpha = alpha = functional.softmax(nodes.mailbox["m"], dim=1)
            self.box = nodes.mailbox
            return {"o": (alpha * nodes.mailbox["m"]).sum(1)}

    layer = Keeps()

    def passes(g, layer):
        g.update_all(fn.copy_u("x", "m"), layer.alpha_kept)
        return g.ndata["o"] * layer.alpha.mean() + layer.box["m"].sum()

    compare("random", layer, passes, device)


def test_failures_that_a_function_catches(device):
    def caught(nodes):
        mail = nodes.mailbox["m"]
        try:
            return {"o": mail.std(1, unbiased=False)}
        except BaseException:
            return {"o": mail.sum(1) * 100}

    def suppressed(nodes):
        out = nodes.mailbox["m"].sum(1)
        with contextlib.suppress(BaseException):
            out = out * len(nodes)
        return {"o": out}

    def returned(nodes):
        out = nodes.mailbox["m"].sum(1)
        try:
            out = out * len(nodes)
        finally:
            return {"o": out}  # noqa: B012

    for function in (caught, suppressed, returned):

        def passes(g, layer, function=function):
            g.update_all(lambda edges: {"m": edges.src["x"] * 2}, function)
            return g.ndata["o"]

        compare("random", tnn.Linear(1, 1), passes, device)


def test_features_written_into_afterwards(device):
    """Messages are those of before, and so are gradients, as where DGL keeps what it has gathered."""

    def passes(g, layer):
        g = dgl.add_self_loop(g)  # so that each node has a message
        x, w = g.ndata["x"] * 1, g.edata["w"] * 1
        g.ndata["y"], g.edata["v"] = x, w
        g.update_all(
            lambda edges: {"m": edges.src["y"].sigmoid() * edges.data["v"]},
            lambda nodes: {"o": nodes.mailbox["m"].sum(1) * nodes.data["y"]},
        )
        g.update_all(lambda edges: {"m": edges.src["y"] * edges.data["v"]}, fn.sum("m", "p"))
        out = torch.cat([g.ndata["o"], g.ndata["p"]])
        with torch.no_grad():
            x.mul_(3)
        return out

    compare("random", tnn.Linear(1, 1), passes, device)
