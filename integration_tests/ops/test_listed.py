"""Edge lists with loops removed and added, and normalised: the bits of PyG's functions, and opcheck."""

from __future__ import annotations

import pytest
import torch
from comparison import without
from graphs import GRAPHS
from torch_geometric.nn import ChebConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops, scatter

loops, norm, laplacian, inverse, degrees = (
    getattr(torch.ops.gnnfast, name).default
    for name in ("loops_listed", "gcn_norm_listed", "laplacian_listed", "inverse_sums", "degrees")
)

SHAPES = {
    "no nodes": lambda: (torch.empty(2, 0, dtype=torch.int64), 0),
    "all loops": lambda: (torch.arange(5).expand(2, 5), 5),
    "one row in two": lambda: (GRAPHS["random"]()[0].repeat_interleave(2, 0)[::2], 30),
    "transposed": lambda: (GRAPHS["random"]()[0].t().contiguous().t(), 30),
    "several threads": lambda: (torch.randint(0, 300, (2, 200_001), generator=torch.Generator().manual_seed(0)), 300),
}
SHAPES |= {name: lambda make=make: (make()[0], max(make()[1:])) for name, make in GRAPHS.items()}
IDS, DTYPES, NORMALISATIONS = [torch.int64, torch.int32], [torch.float32, torch.float64], [None, "sym", "rw"]


def weights(kind, edges, dtype):
    """None, or numbers of which some are zero, negative or infinite."""
    if kind == "none":
        return None
    made = torch.randn(edges, 2, dtype=dtype, generator=torch.Generator().manual_seed(1))[:, 0]
    if kind == "positive":
        return made.abs()
    for value, at in ((0.0, 1), (float("inf"), 5), (-float("inf"), 7), (float("nan"), 11)):
        made[at::13] = value
    return made


def same_bits(found, expected):
    """On a GPU, where atomics add in any order, of ids."""
    assert len(found) == len(expected)
    for f, e in zip(found, expected):
        assert f.dtype is e.dtype and f.shape == e.shape and f.stride() == e.stride()
        if f.is_cuda and f.is_floating_point():
            torch.testing.assert_close(f.cpu(), e, equal_nan=True, rtol=1e-4 if f.dtype is torch.float32 else 1e-9, atol=1e-5)
            continue
        f = f.cpu()
        assert torch.equal(f.isnan(), e.isnan()) and torch.equal(f.nan_to_num(7), e.nan_to_num(7))


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("name", SHAPES)
def test_loops(name, dtype, remove, device):
    edge_index, nodes = SHAPES[name]()
    edge_index = edge_index.to(dtype)
    for number in (nodes, 0):
        rest = without(lambda: remove_self_loops(edge_index)[0] if remove else edge_index)
        expected, _ = without(lambda rest=rest, number=number: add_self_loops(rest, num_nodes=number))
        same_bits((loops(edge_index.to(device), number, remove),), (expected.long().contiguous(),))


@pytest.mark.parametrize("to_target", [True, False])
@pytest.mark.parametrize("fill", [None, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["none", "positive", "any"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("name", SHAPES)
def test_gcn_norm(name, ids, dtype, kind, fill, to_target, device):
    edge_index, nodes = SHAPES[name]()
    weight, flow = weights(kind, edge_index.shape[1], dtype), "source_to_target" if to_target else "target_to_source"
    expected = without(lambda: gcn_norm(edge_index, weight, nodes, fill == 2, fill is not None, flow, dtype))
    fill = 1.0 if fill is not None and weight is None else fill
    loops_at = edge_index[0][edge_index[0] == edge_index[1]]
    if device.type == "cuda" and weight is not None and fill is not None and len(loops_at.unique()) < len(loops_at):
        with pytest.raises(RuntimeError, match="several loops of a node have weights"):
            norm(edge_index.to(device, ids), on(weight, device), nodes, fill, to_target, dtype)
        return
    edges, made = norm(edge_index.to(device, ids), on(weight, device), nodes, fill, to_target, dtype)
    if fill is None:
        assert edges.shape == (2, 0)
        edges = edge_index
    same_bits((edges, made), expected)


def on(weight, device):
    return None if weight is None else weight.to(device)


@pytest.mark.parametrize("lambda_max", [None, 1.7])
@pytest.mark.parametrize("normalization", NORMALISATIONS)
@pytest.mark.parametrize("kind", ["none", "positive", "any"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("name", SHAPES)
def test_laplacian(name, ids, dtype, kind, normalization, lambda_max, device):
    edge_index, nodes = SHAPES[name]()
    weight, layer = weights(kind, edge_index.shape[1], dtype), ChebConv(2, 2, 2, normalization=normalization)
    make = lambda: getattr(layer, "__norm__")(edge_index, nodes, weight, normalization, lambda_max, dtype)  # noqa: B009, E731
    given = nodes, NORMALISATIONS.index(normalization), lambda_max, dtype
    if nodes == 0 and lambda_max is None:
        with pytest.raises(RuntimeError):
            without(make)
        with pytest.raises(RuntimeError, match="nothing has a largest weight"):
            laplacian(edge_index.to(device, ids), on(weight, device), *given)
        return
    same_bits(laplacian(edge_index.to(device, ids), on(weight, device), *given), without(make))


@pytest.mark.parametrize("kind", ["none", "positive", "any"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("name", SHAPES)
def test_inverse_sums(name, ids, dtype, kind):
    edge_index, nodes = SHAPES[name]()
    index, weight = edge_index[1], weights(kind, edge_index.shape[1], dtype)

    def expected():
        sums = scatter(torch.ones(len(index), dtype=dtype) if weight is None else weight, index, dim_size=nodes, reduce="sum")
        inverse = 1.0 / sums
        inverse[inverse == float("inf")] = 0
        return inverse[index]

    same_bits((inverse(index.to(ids), weight, nodes, dtype),), (without(expected),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("name", SHAPES)
def test_degrees(name, ids, dtype, device):
    edge_index, nodes = SHAPES[name]()
    expected = torch.bincount(edge_index[1], minlength=nodes).clamp(min=1).to(dtype)
    same_bits((degrees(edge_index.to(device, ids)[1], nodes, dtype),), (expected,))


EDGES = torch.zeros(2, 4, dtype=torch.int64)
WRONG_EDGES = [
    (torch.zeros(3, 4, dtype=torch.int64), "edge_index must have size 2 in dimension 0, got shape \\[3, 4\\]"),
    (torch.zeros(4, dtype=torch.int64), "edge_index must have 2 dimensions, got shape \\[4\\]"),
]


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        *((loops, (edges, 4), message) for edges, message in WRONG_EDGES),
        (loops, (torch.zeros(2, 4), 4), "edge_index has dtype Float; accepted are int32 and int64"),
        (loops, (EDGES, -1), "the number of nodes must not be negative, got -1"),
        *((norm, (edges, None, 4, 1.0, True, torch.float32), message) for edges, message in WRONG_EDGES),
        (norm, (EDGES, None, -1, 1.0, True, torch.float32), "num_nodes must not be negative, got -1"),
        (norm, (EDGES, None, 4, 1.0, True, torch.float16), "weight must be float32 or float64"),
        (norm, (EDGES, torch.ones(3), 4, 1.0, True, torch.float32), "weight must have size 4"),
        (norm, (EDGES + 4, None, 4, 1.0, True, torch.float32), "an index of an edge is out of range \\[0, 4\\)"),
        *((laplacian, (edges, None, 4, 0, None, torch.float32), message) for edges, message in WRONG_EDGES),
        (laplacian, (EDGES, None, -1, 0, None, torch.float32), "num_nodes must not be negative, got -1"),
        (laplacian, (EDGES, None, 4, 3, None, torch.float32), "normalization must be 0, 1 or 2, got 3"),
        (laplacian, (EDGES, None, 4, 0, None, torch.bfloat16), "weight must be float32 or float64"),
        (laplacian, (EDGES, torch.ones(4), 4, 0, None, torch.float64), "weight must have dtype Double"),
        (laplacian, (torch.tensor([[0], [-1]]), None, 4, 0, None, torch.float32), "out of range \\[0, 4\\)"),
        (inverse, (EDGES, None, 4, torch.float32), "index must have 1 dimensions"),
        (inverse, (EDGES[0], None, -1, torch.float32), "num_groups must not be negative, got -1"),
        (inverse, (EDGES[0], None, 4, torch.float16), "weight must be float32 or float64"),
        (inverse, (EDGES[0], torch.ones(3), 4, torch.float32), "weight must have size 4"),
        (inverse, (EDGES[0], torch.ones(4), 4, torch.float64), "weight must have dtype Double"),
        (inverse, (EDGES[0] - 1, None, 4, torch.float32), "index -1 is out of range \\[0, 4\\)"),
        (degrees, (EDGES, 4, torch.float32), "index must have 1 dimensions"),
        (degrees, (EDGES[0], -1, torch.float32), "num_groups must not be negative, got -1"),
        (degrees, (EDGES[0], 4, torch.float16), "degrees must be float32 or float64"),
        (degrees, (EDGES[0] + 4, 4, torch.float32), "index 4 is out of range \\[0, 4\\)"),
    ],
)
def test_wrong_arguments(op, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        op(*arguments)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (loops, (30,)),
        (loops, (30, False)),
        (norm, (None, 30, 1.0, True, torch.float32)),
        (norm, (None, 30, None, True, torch.float32)),
        (laplacian, (None, 30, 1, None, torch.float32)),
        (inverse, (None, 30, torch.float32)),
        (degrees, (30, torch.float32)),
    ],
)
def test_opcheck(op, arguments):
    checks, edge_index = ["test_schema", "test_autograd_registration", "test_faketensor"], GRAPHS["random"]()[0]
    torch.library.opcheck(op, (edge_index[0] if op in (inverse, degrees) else edge_index, *arguments), test_utils=checks)
