"""What a user changes of DGL's layers after they were made: DGL's own code says what it means."""

from __future__ import annotations

import pytest
import torch
from comparison import without
from torch.nn.utils import parametrize

import gnnfast

dgl = pytest.importorskip("dgl")
from dgl.nn import pytorch as nn  # noqa: E402
from dgl.nn.pytorch.linear import TypedLinear  # noqa: E402

N, F = 100, 8
generator = torch.Generator().manual_seed(0)
ENDS, X = torch.randint(0, N, (2, 1500), generator=generator), torch.randn(N, F, generator=generator)
GRAPH = dgl.add_self_loop(dgl.graph((ENDS[0], ENDS[1]), num_nodes=N))
ETYPES, NTYPES = torch.arange(GRAPH.num_edges()) % 3, torch.arange(N) % 2


@pytest.fixture(autouse=True)
def served():
    with gnnfast.override(kernel="gar"):
        yield


def agree(step):
    """The same result, or an error of the same kind."""
    try:
        expected = without(step)
    except Exception as error:
        with pytest.raises(type(error)):
            step()
    else:
        torch.testing.assert_close(step(), expected, rtol=1e-4, atol=1e-5)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return (2 * weight).mT.contiguous().mT


def number(name, value=0.5):
    def change(layer):
        delattr(layer, name)
        setattr(layer, name, value)

    return change


def assign(name, value):
    return lambda layer: setattr(layer, name, value)


def put(path, make):
    def change(layer):
        owner, _, name = path.rpartition(".")
        setattr(layer.get_submodule(owner), name, make())

    return change


def typed(*args, **kwargs):
    return lambda: TypedLinear(*args, **kwargs)


CHANGES = {
    "GraphConv": (
        lambda: nn.GraphConv(F, 5),
        [*(assign("_norm", norm) for norm in (None, False, "sum", "left", "none")), number("bias"), number("weight", 2.0)],
    ),
    "GATConv": (lambda: nn.GATConv(F, 5, 3), [number("attn_l"), number("attn_r")]),
    "GATv2Conv": (
        lambda: nn.GATv2Conv(F, 5, 3),
        [number("attn"), lambda layer: parametrize.register_parametrization(layer, "attn", Doubled())],
    ),
    "AGNNConv": (nn.AGNNConv, [number("beta")]),
    "SAGEConv": (
        lambda: nn.SAGEConv(F, 5, "mean"),
        [
            put("fc_self", lambda: torch.nn.Linear(F, 1)),
            put("fc_neigh", lambda: torch.nn.Linear(F, 1, bias=False)),
            put("feat_drop", lambda: torch.nn.Unflatten(1, (1, F))),
            put("fc_self.bias", lambda: torch.nn.Parameter(torch.ones(5, dtype=torch.float64))),
            put("fc_neigh.weight", lambda: None),
            put("fc_self.weight", lambda: torch.nn.Parameter(torch.ones(F))),
        ],
    ),
    "GINConv": (
        lambda: nn.GINConv(torch.nn.Linear(F, 5)),
        [number("eps"), number("eps", torch.arange(3.0).view(3, 1, 1))],
    ),
    "RelGraphConv": (
        lambda: nn.RelGraphConv(F, 6, 3),
        [
            lambda layer: setattr(layer.linear_r, "num_types", 4),
            lambda layer: setattr(layer.linear_r, "out_size", 5),
            put("linear_r", typed(F, 6, 3, "bdd", 2)),
        ],
    ),
    "HGTConv": (
        lambda: nn.HGTConv(F, 4, 2, 2, 3),
        [
            put("linear_k", typed(F, 8, 2, "bdd", 2)),
            put("linear_a", typed(8, 8, 2, "bdd", 2)),
            put("linear_k", typed(F, 8, 5)),
            put("relation_att.1", typed(4, 4, 5)),
        ],
    ),
}
CASES = [(name, nth) for name, (_, changes) in CHANGES.items() for nth in range(len(changes))]


def arguments(name):
    return {"RelGraphConv": (ETYPES,), "HGTConv": (NTYPES, ETYPES)}.get(name, ())


@pytest.mark.parametrize(("name", "nth"), CASES)
def test_changes(name, nth):
    make, changes = CHANGES[name]
    torch.manual_seed(0)
    layer = make().eval()
    layer(GRAPH, X, *arguments(name))
    changes[nth](layer)
    for _ in range(2):
        agree(lambda: layer(GRAPH, X, *arguments(name)).detach())


@pytest.mark.parametrize("name", ["RelGraphConv", "HGTConv"])
def test_replaced_methods_of_typed_layers(name, monkeypatch):
    torch.manual_seed(0)
    layer = CHANGES[name][0]().eval()
    forward = TypedLinear.forward
    agree(lambda: layer(GRAPH, X, *arguments(name)).detach())
    monkeypatch.setattr(TypedLinear, "forward", lambda *args, **kwargs: 2 * forward(*args, **kwargs))
    agree(lambda: layer(GRAPH, X, *arguments(name)).detach())


@pytest.mark.parametrize("name", ["GraphConv", "GINConv", "HGTConv"])
def test_sparse_features(name):
    torch.manual_seed(0)
    layer = CHANGES[name][0]().eval()
    agree(lambda: layer(GRAPH, X.to_sparse(), *arguments(name)).detach())


class Doubling(dgl.DGLGraph):
    def in_degrees(self, *args, **kwargs):
        return 2 * super().in_degrees(*args, **kwargs)


def test_graphs_with_degrees_of_their_own():
    graph, layer = GRAPH.clone(), CHANGES["SAGEConv"][0]().eval()
    graph.__class__ = Doubling
    agree(lambda: dgl.ops.copy_u_mean(graph, X))
    agree(lambda: layer(graph, X).detach())
