"""GCN normalisation in one operation against its definition edge by edge in float64, and opcheck."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import TOLERANCE

op = torch.ops.gnnfast.gcn_norm_coo

# name -> (edges, number of nodes)
GRAPHS = {
    "no edges": ([], 3),
    "no nodes": ([], 0),
    "isolated": ([(0, 5), (5, 2)], 9),
    "all loops": ([(i, i) for i in range(4)], 4),
    "duplicate loops": ([(1, 1), (0, 1), (1, 1), (2, 0), (1, 1), (2, 2)], 4),
    "duplicates": ([(0, 1), (0, 1), (1, 0), (2, 1)], 3),
    "hub": ([(i, 0) for i in range(1, 300)] + [(0, 7), (0, 0)], 300),
}
WEIGHTS = {"none": None, "positive": [0.5, 2.0, 1.5], "zero": [0.0, 1.0, 0.0], "negative": [-1.0, 0.25, -0.5]}


def graph_of(name, device, index=torch.int64):
    edges, nodes = GRAPHS[name]
    return torch.tensor(edges, dtype=index, device=device).view(-1, 2).t(), nodes


def weights_of(kind, edges, device, dtype=torch.float64):
    values = WEIGHTS[kind]
    return None if values is None else torch.tensor([values[e % 3] for e in range(edges)], dtype=dtype, device=device)


def by_definition(edge_index, weight, nodes, fill, to_target):
    """The matrix [N, N] of the weights after normalisation, as PyG's functions make it one after the other."""
    pairs = list(zip(*edge_index.tolist()))
    values = [1.0] * len(pairs) if weight is None else weight.tolist()
    if fill is not None:
        loops = dict.fromkeys(range(nodes), float(fill))
        loops.update({i: w for (i, j), w in zip(pairs, values) if i == j})
        rest = [(pair, w) for pair, w in zip(pairs, values) if pair[0] != pair[1]]
        pairs, values = [p for p, _ in rest] + [(i, i) for i in loops], [w for _, w in rest] + list(loops.values())
    degree = [0.0] * nodes
    for pair, w in zip(pairs, values):
        degree[pair[to_target]] += w
    root = [0.0 if d == 0 else d**-0.5 if d > 0 else math.nan for d in degree]
    matrix = torch.zeros(nodes, nodes, dtype=torch.float64)
    for (i, j), w in zip(pairs, values):
        matrix[i, j] += root[i] * w * root[j]
    return matrix


def matrix_of(edge_index, weight, nodes):
    flat = (edge_index[0] * nodes + edge_index[1]).long()
    return torch.zeros(nodes * nodes, dtype=torch.float64).index_add(0, flat.cpu(), weight.double().cpu()).view(nodes, nodes)


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("to_target", [True, False])
@pytest.mark.parametrize("fill", [None, 1.0, 2.0])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", GRAPHS)
def test_definition(name, kind, fill, to_target, index, device):
    edge_index, nodes = graph_of(name, device, index)
    weight = weights_of(kind, edge_index.shape[1], device)
    edges, made = op(edge_index, weight, nodes, fill, to_target, torch.float64)
    expected = by_definition(edge_index, weight, nodes, fill, to_target)
    assert edges.dtype == torch.int64 and edges.shape == (2, 0 if fill is None else edge_index.shape[1] + nodes)
    assert made.shape == (edge_index.shape[1] + (0 if fill is None else nodes),)
    if fill is not None:
        assert torch.equal(edges[:, : edge_index.shape[1]], edge_index.long())
    found = matrix_of(edge_index if fill is None else edges, made, nodes)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14, equal_nan=True)


def test_loops_of_a_node_share_its_weight(device):
    """So that each message is finite or not as that of PyG's one loop."""
    edge_index = torch.tensor([[0, 0, 1], [0, 0, 0]], device=device)
    edges, weight = op(edge_index, torch.tensor([5.0, 3.0, 1.0], device=device), 2, 1.0, True, torch.float32)
    assert edges.tolist() == [[0, 0, 1, 0, 1], [0, 0, 0, 0, 1]]
    torch.testing.assert_close(weight[[0, 1, 3]].cpu(), torch.full((3,), 3 / 4 / 3))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype, weighted, device):
    edge_index, nodes = torch.randint(0, 40, (2, 300), device=device), 40
    weight = torch.rand(300, device=device).to(dtype) if weighted else None
    edges, made = op(edge_index, weight, nodes, 1.0, True, dtype)
    expected = by_definition(edge_index, None if weight is None else weight.double(), nodes, 1.0, True)
    assert made.dtype == dtype
    assert (matrix_of(edges, made, nodes) - expected).norm() < TOLERANCE[dtype] * expected.norm()


def test_a_degree_that_16_bits_do_not_hold(device):
    edge_index = torch.zeros(2, 100_000, dtype=torch.int64, device=device)
    edge_index[0] = 1
    _, made = op(edge_index, None, 2, 1.0, True, torch.float16)
    assert made[-2].item() == pytest.approx(1 / 100_001, rel=1e-2)


@pytest.mark.parametrize("weighted", [True, False])
def test_many_edges(weighted, device):
    """By several threads, and blocks: the same as by one."""
    nodes, edges = 50_000, 400_000
    edge_index = torch.randint(0, nodes, (2, edges), device=device)
    edge_index[1, :1000] = edge_index[0, :1000]
    weight = torch.rand(edges, device=device, dtype=torch.float64) if weighted else None
    made = op(edge_index, weight, nodes, 1.0, True, torch.float64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = op(edge_index.cpu(), None if weight is None else weight.cpu(), nodes, 1.0, True, torch.float64)
    finally:
        torch.set_num_threads(threads)
    for found, expected in zip(made, alone):
        assert torch.equal(found.cpu(), expected) if device.type == "cpu" else torch.allclose(found.cpu(), expected)


def test_strided_operands(device):
    edge_index = torch.randint(0, 9, (20, 2), device=device)
    weight = torch.rand(20, 3, device=device)[:, 1]
    found = op(edge_index.t(), weight, 9, 1.0, True, torch.float32)
    expected = op(edge_index.t().contiguous(), weight.contiguous(), 9, 1.0, True, torch.float32)
    assert all(torch.equal(f, e) for f, e in zip(found, expected))


@pytest.mark.parametrize("bad", [-1, 4, 1 << 40])
@pytest.mark.parametrize("side", [0, 1])
def test_ids_out_of_range(side, bad, device):
    edge_index = torch.tensor([[0, 1, 2], [1, 1, 3]], device=device)
    edge_index[side, 1] = bad
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match=r"out of range \[0, 4\)"):
            op(edge_index, None, 4, 1.0, True, torch.float32)
        return
    from gnnfast.graph import ids

    ids.watch(edge_index)
    _, weight = op(edge_index, None, 4, 1.0, True, torch.float32)
    with pytest.raises(IndexError, match=rf"index {bad} of an edge is out of range \[0, 4\)"):
        torch.cuda.synchronize()
    assert weight[1] == 0
    rest = op(edge_index[:, [0, 2]], None, 4, 1.0, True, torch.float32)[1]
    assert torch.equal(weight[[0, 2, 3, 4, 5, 6]], rest)


@pytest.mark.parametrize(
    "change,message",
    [
        ({0: torch.zeros(3, 4, dtype=torch.int64)}, "edge_index must have size 2"),
        ({0: torch.zeros(4, dtype=torch.int64)}, "edge_index must have 2 dimensions"),
        ({0: torch.zeros(2, 4)}, "edge_index must have dtype Int"),
        ({1: torch.ones(3)}, "weight must have size 4"),
        ({1: torch.ones(4, 1)}, "weight must have 1 dimensions"),
        ({1: torch.ones(4, dtype=torch.float64)}, "weight must have dtype Float"),
        ({2: -1}, "num_nodes must not be negative"),
        ({5: torch.int64}, "weight has dtype Long"),
    ],
)
def test_wrong_arguments(change, message, device):
    arguments = [torch.zeros(2, 4, dtype=torch.int64), None, 3, 1.0, True, torch.float32]
    for i, value in change.items():
        arguments[i] = value
    with pytest.raises(RuntimeError, match=f"gnnfast: {message}"):
        op(*(a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_nothing_waits_for_the_device():
    edge_index = torch.randint(0, 9, (2, 20), device="cuda")
    weight = torch.rand(20, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(edge_index, weight, 9, 1.0, True, torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fill", [None, 2.0])
@pytest.mark.parametrize("kind", ["none", "positive"])
def test_opcheck(kind, fill, device):
    edge_index, nodes = graph_of("duplicate loops", device)
    torch.library.opcheck(op.default, (edge_index, weights_of(kind, 6, device), nodes, fill, True, torch.float64))
