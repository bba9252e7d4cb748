"""Pairs without an edge are PyG's, from the same numbers, and Python's generator is left as PyG leaves it."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch_geometric.nn import SuperGATConv
from torch_geometric.utils import _negative_sampling as of_pyg
from torch_geometric.utils import batched_negative_sampling, negative_sampling, to_undirected

import gnnfast
from gnnfast.pyg import negative_sampling as served

NODES = 3_000


def graph(kind, device="cpu"):
    same = torch.Generator().manual_seed(len(kind))
    if kind == "none":
        return torch.empty(2, 0, dtype=torch.int64, device=device)
    if kind == "hub":
        edges = torch.stack([torch.arange(NODES), torch.zeros(NODES, dtype=torch.int64)])
    elif kind == "nearly full":  # so that numbers are drawn anew, and too few are found
        edges = torch.nonzero(torch.rand(150, 150, generator=same) < 0.93).t().contiguous()
    elif kind == "loops and duplicates":
        edges = torch.randint(NODES, (2, 2_000), generator=same)
        edges = torch.cat([edges, edges, torch.arange(NODES).expand(2, -1)], 1)
    else:
        edges = torch.randint(NODES, (2, 5_000), generator=same)
    edges = to_undirected(edges) if kind == "undirected" else edges
    return edges.to(device)


def both(call, seed=0):
    """What a call gives without gnnfast and with it, and the states of Python's generator after it."""
    found = []
    for switch in (gnnfast.disable, gnnfast.enable):
        switch()
        random.seed(seed)
        random.gauss(0, 1)  # keeps a number for the next call, and begins within a block of words
        found.append((call(), random.getstate()))
    return found


@pytest.fixture
def drawn(monkeypatch):
    """How many numbers were drawn at once, in each draw."""
    counts = []
    draw = served.draw
    monkeypatch.setattr(served, "draw", lambda n, k, generator: counts.append(k) or draw(n, k, generator))
    return counts


@pytest.mark.parametrize("kind", ["random", "undirected", "none", "hub", "nearly full", "loops and duplicates"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_neg_samples": 4_000},
        {"method": "dense", "num_neg_samples": 4_000},
        {"force_undirected": True, "num_neg_samples": 6_000},
        {"num_nodes": (NODES + 7, NODES + 1), "num_neg_samples": 4_000},
        {"num_nodes": (NODES, NODES), "num_neg_samples": 4_000, "force_undirected": True},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_pairs(kind, options, device, drawn):
    edges = graph(kind, device)
    options = {"num_nodes": 150 if kind == "nearly full" else NODES} | options
    if kind == "nearly full" and isinstance(options["num_nodes"], tuple):
        options["num_nodes"] = 150, 151
    kept = edges.clone()
    (expected, state), (found, after) = both(lambda: negative_sampling(edges, **options))
    assert torch.equal(found, expected) and found.dtype == expected.dtype and found.device == expected.device
    assert after == state and torch.equal(edges, kept)
    if kind not in ("none", "nearly full"):
        assert drawn


def test_ratio_and_missing_nodes(drawn):
    edges = graph("random")
    (expected, state), (found, after) = both(lambda: negative_sampling(edges, num_neg_samples=0.5))
    assert torch.equal(found, expected) and after == state and drawn
    whole = torch.cartesian_prod(torch.arange(40), torch.arange(40)).t()
    assert negative_sampling(whole, num_neg_samples=2_000).shape == (2, 0)


def test_batches(drawn):
    large, batch = graph("random"), torch.arange(2).repeat_interleave(NODES)
    edges = torch.cat([large, large + NODES], 1)
    (expected, state), (found, after) = both(lambda: batched_negative_sampling(edges, batch))
    assert torch.equal(found, expected) and after == state and len(drawn) == 2


@pytest.mark.parametrize("bits", [13, 31, 32, 33, 40, 61, 62])
@pytest.mark.parametrize("of", ["below", "at", "above"])
def test_numbers(bits, of):
    n = (1 << bits) + {"below": -1, "at": 0, "above": 1}[of]
    for k in (1, 5, 6, min(2_000, n // 7)):
        ours, python = random.Random(k), random.Random(k)
        for _ in range(3):  # beginning anywhere in a block of words
            assert served.draw(n, k, ours).tolist() == python.sample(range(n), k)
            assert ours.getstate() == python.getstate()


def test_threads_share_a_generator():
    """Each gets numbers of its own, as if they had drawn one after the other."""
    ours, python = random.Random(0), random.Random(0)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: served.draw(10**9, 20_000, ours).tolist(), range(12)))
    assert sorted(found) == sorted(python.sample(range(10**9), 20_000) for _ in range(12))
    assert ours.getstate() == python.getstate()


def test_another_generator_is_left_alone(monkeypatch, drawn):
    """Whoever replaces what draws gets their own numbers."""
    edges = graph("random")
    gnnfast.enable()
    monkeypatch.setattr(random, "sample", lambda population, k: list(range(k)))
    assert torch.equal(of_pyg.sample(10**7, 2_000, "cpu"), torch.arange(2_000))
    negative_sampling(edges, NODES)
    monkeypatch.undo()
    monkeypatch.setattr(random.Random, "_randbelow", lambda self, n: next(self.numbers), raising=True)
    random.sample.__self__.numbers = iter(range(100_000))
    try:
        assert torch.equal(of_pyg.sample(10**7, 2_000, "cpu"), torch.arange(2_000))
    finally:
        del random.sample.__self__.numbers
    assert not drawn


def test_system_generator_and_small_draws(monkeypatch, drawn):
    monkeypatch.setattr(random, "sample", random.SystemRandom().sample)
    assert len(of_pyg.sample(10**7, 2_000, "cpu").unique()) == 2_000
    monkeypatch.undo()
    for n, k in ((10**7, 100), (6_000, 2_000), (100, 100), (50, 100)):
        (expected, state), (found, after) = both(lambda n=n, k=k: of_pyg.sample(n, k, "cpu"))
        assert torch.equal(found, expected) and after == state
    assert not drawn


@pytest.mark.parametrize("attention", ["MX", "SD"])
def test_super_gat(attention, drawn):
    edges, x = graph("random"), torch.randn(NODES, 8)
    torch.manual_seed(0)
    layer = SuperGATConv(8, 4, heads=2, attention_type=attention, edge_sample_ratio=0.8)

    def step():
        torch.manual_seed(1)
        out = layer(x, edges)
        return out, layer.att_x, layer.att_y, layer.get_attention_loss()

    (expected, state), (found, after) = both(step)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert after == state and drawn
