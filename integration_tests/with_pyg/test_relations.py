"""RGCNConv and FastRGCNConv against PyG's own."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import both, compare, same, without
from graphs import GRAPHS, relative_error

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn

from gnnfast.cache import cache

F, OUT, R = 8, 12, 5
MAKES = {"RGCNConv": nn.RGCNConv, "FastRGCNConv": nn.FastRGCNConv}
OPTIONS = {
    "plain": {},
    "sum": {"aggr": "add"},
    "bases": {"num_bases": 2},
    "blocks": {"num_blocks": 4},
    "no root": {"root_weight": False},
    "no bias": {"bias": False, "root_weight": False},
    "sorted": {"is_sorted": True},
}
SOME_GRAPHS = ["one_edge", "random", "hub", "self_loops_and_duplicates", "isolated", "sorted", "bipartite"]


def made(name, device, dtype=torch.float64):
    """Edges with types of which one has none."""
    edge_index, num_src, num_dst = GRAPHS[name]()
    types = torch.randint(R - 1, (edge_index.shape[1],))
    x = torch.randn(num_src, F, dtype=dtype), torch.randn(num_dst, F, dtype=dtype)
    return *(t.to(device) for t in x), edge_index.to(device), types.to(device)


class Between(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x_src, x_dst, edge_index, types):
        return self.conv((x_src, x_dst), edge_index, types)


def served(report):
    names = {kernel for place, kernel, _ in report.kernels if place.endswith("RGCNConv")}
    return bool(names) and names.isdisjoint(("in parts", "PyG's own"))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", SOME_GRAPHS)
def test_graphs_and_options(name, make, options, rows, device):
    layer = Between(MAKES[make](F, OUT, R, **OPTIONS[options])).double()
    assert served(compare(layer, *made(name, device), tolerance=1e-9))


@pytest.mark.parametrize("aggr", ["max", "min"])
@pytest.mark.parametrize("name", SOME_GRAPHS)
def test_extrema(name, aggr, rows, device):
    """Of integers, so that there are ties, and zeros."""
    x_src, x_dst, edge_index, types = made(name, device)
    layer = Between(nn.RGCNConv(F, OUT, R, aggr=aggr)).double()
    assert served(compare(layer, x_src.round(), x_dst, edge_index, types, tolerance=1e-9))


def test_no_edges(device):
    x_src, x_dst, edge_index, types = made("no_edges", device)
    assert not served(compare(Between(nn.RGCNConv(F, OUT, R)).double(), x_src, x_dst, edge_index, types, tolerance=1e-9))


@pytest.mark.parametrize("aggr", ["add", "mean", "max"])
@pytest.mark.parametrize("given", ["all nodes", "numbers"])
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("bases", [None, 2])
def test_numbered_nodes(make, given, aggr, bases, rows, device):
    """FastRGCNConv looks up weights by the place of a node, whatever its number."""
    if make == "FastRGCNConv" and aggr == "max":
        return
    _, _, edge_index, types = made("random", device)
    nodes = int(edge_index.max()) + 1
    layer = MAKES[make](nodes, OUT, R, num_bases=bases, aggr=aggr).double().to(device)
    x = None if given == "all nodes" else torch.randperm(nodes, device=device)

    def step():
        layer.zero_grad()
        for _ in range(2):
            out = layer(x, edge_index, types)
        out.square().sum().backward()
        return [out, *(p.grad.clone() for p in layer.parameters())]

    assert served(same(step))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype, device):
    """PyG sums over relations in the default dtype."""
    x_src, x_dst, edge_index, types = made("random", device, dtype)
    layer = Between(nn.RGCNConv(F, OUT, R)).to(device, dtype)
    out, expected, report = both(lambda: layer(x_src, x_dst, edge_index, types))
    assert served(report) and out.dtype is expected.dtype is torch.float32
    assert relative_error(out, expected) < {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]


def test_another_default_dtype(rows, device):
    x_src, x_dst, edge_index, types = made("random", device, torch.float32)
    layer = Between(nn.RGCNConv(F, OUT, R)).to(device)
    torch.set_default_dtype(torch.float64)
    try:
        out, expected, report = both(lambda: layer(x_src, x_dst, edge_index, types))
    finally:
        torch.set_default_dtype(torch.float32)
    assert served(report) and out.dtype is expected.dtype is torch.float64 and relative_error(out, expected) < 1e-5


def test_autocast(device):
    x_src, x_dst, edge_index, types = made("random", device, torch.float32)
    for make in MAKES.values():
        layer = Between(make(F, OUT, R)).to(device)

        def step(layer=layer):
            with torch.autocast(device.type, torch.bfloat16):
                return layer(x_src, x_dst, edge_index, types)

        out, expected, _ = both(step)
        assert out.dtype is expected.dtype and relative_error(out, expected) < 3e-2


def test_ids32(rows, device):
    """Of which torch sums gradients wrongly."""
    x_src, x_dst, edge_index, types = made("random", device)
    layer = Between(nn.RGCNConv(F, OUT, R)).double().to(device)

    def step(edges):
        x = x_src.clone().requires_grad_()
        out = layer(x, x_dst, edges, types)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    found, expected = step(edge_index.int()), step(edge_index)
    assert served(gnnfast.report()) and all(relative_error(f, e) < 1e-12 for f, e in zip(found, expected))


@pytest.mark.parametrize("what", ["edge_index", "types", "numbers"])
def test_what_was_written_into_is_seen(what, rows, device):
    _, _, edge_index, types = made("random", device)
    nodes = int(edge_index.max()) + 1
    numbers = torch.arange(nodes, device=device)
    layer = nn.RGCNConv(nodes, OUT, R).double().to(device)
    layer(numbers, edge_index, types)
    if what == "numbers":
        numbers.copy_(numbers.flip(0))
    elif what == "types":
        types.copy_((types + 1) % R)
    else:
        edge_index.copy_(edge_index.flip(1))
    out, expected, report = both(lambda: layer(numbers, edge_index, types))
    assert served(report) and relative_error(out, expected) < 1e-9


def test_edges_are_kept_with_their_types(rows, device):
    x, _, edge_index, types = made("self_loops_and_duplicates", device)
    layer = nn.RGCNConv(F, OUT, R).double().to(device)
    cache.clear()
    for _ in range(3):
        layer(x, edge_index, types)
    assert cache.misses and len(cache) == 1 and cache.nbytes >= edge_index.nbytes
    del types
    assert len(cache) == 0 and cache.nbytes == 0


@pytest.mark.parametrize("what", ["a type", "a source", "a destination"])
def test_ids_out_of_range(what):
    """PyG says what it says. (On a GPU that leaves the device unusable.)"""
    x, _, edge_index, types = made("self_loops_and_duplicates", torch.device("cpu"))
    edge_index, types = edge_index.clone(), types.clone()
    wrong = types if what == "a type" else edge_index[0 if what == "a source" else 1]
    wrong[0] = max(len(x), R) + 3
    layer = nn.RGCNConv(F, OUT, R).double()

    def failed():
        with pytest.raises((IndexError, RuntimeError, ValueError)) as raised:
            layer(x, edge_index, types)
        return str(raised.value)

    found, expected, _ = both(failed)
    assert found == expected


def test_types_that_are_none_of_blocks():
    """PyG leaves such edges out where it does not count them."""
    x, _, edge_index, types = made("random", torch.device("cpu"))
    types[::3] = R + 2
    x = torch.randn(int(edge_index.max()) + 1, F).double()
    assert not served(compare(nn.RGCNConv(F, OUT, R, num_blocks=2).double(), x, edge_index, types, tolerance=1e-9))


class Doubled(nn.RGCNConv):
    def message(self, x_j, edge_type_ptr):
        return 2 * x_j


def test_other_layers_are_left_alone(device, monkeypatch):
    _, _, edge_index, types = made("random", device)
    x = torch.randn(int(edge_index.max()) + 1, F, dtype=torch.float64, device=device)
    layers = {
        "subclass": Doubled(F, OUT, R),
        "turned around": nn.RGCNConv(F, OUT, R, flow="target_to_source"),
        "product": nn.RGCNConv(F, OUT, R, aggr="mul"),
        "hooked": nn.RGCNConv(F, OUT, R),
    }
    layers["hooked"].register_message_forward_hook(lambda module, inputs, output: output * 3)
    for layer in layers.values():
        assert not served(compare(layer.double(), x, edge_index, types, tolerance=1e-9))
    from torch_geometric.nn.conv import rgcn_conv

    monkeypatch.setattr(rgcn_conv, "masked_edge_index", lambda edges, mask: edges[:, mask].flip(0))
    assert not served(compare(nn.RGCNConv(F, OUT, R).double(), x, edge_index, types, tolerance=1e-9))


def test_pyg_lib(device, monkeypatch):
    """With it PyG may take the mean over all edges of a node: not with a sum, or where the user says no."""
    import torch_geometric

    x, _, edge_index, types = made("self_loops_and_duplicates", device)
    monkeypatch.setattr(torch_geometric.typing, "WITH_SEGMM", True)
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", None)
    for options, expected in (({}, False), ({"aggr": "sum"}, True), ({"num_bases": 2}, True)):
        monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul_heuristic", lambda **_: False)
        assert served(compare(nn.RGCNConv(F, OUT, R, **options).double(), x, edge_index, types, tolerance=1e-9)) is expected
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", False)
    assert served(compare(nn.RGCNConv(F, OUT, R).double(), x, edge_index, types, tolerance=1e-9))


def test_gradients(rows, device):
    x_src, x_dst, edge_index, types = made("isolated", device)
    for make in MAKES.values():
        layer = Between(make(F, 2, R)).double().to(device)
        x_src.requires_grad_()
        step = lambda x, layer=layer: layer(x, x_dst, edge_index, types)  # noqa: E731
        assert torch.autograd.gradcheck(step, x_src) and torch.autograd.gradgradcheck(step, x_src)


@pytest.mark.parametrize("make", MAKES)
def test_compiled(make, device):
    """Between the compiler's pieces; PyG's own where there must be one."""
    x, _, edge_index, types = made("self_loops_and_duplicates", device, torch.float32)
    layer = MAKES[make](F, OUT, R).to(device)
    expected = layer(x, edge_index, types)
    torch._dynamo.reset()
    gnnfast.clear_report()
    model = torch.compile(torch.nn.Sequential(Stack(layer), torch.nn.Tanh()))
    for _ in range(2):
        out = model((x, edge_index, types))
    assert relative_error(out, expected.tanh()) < 1e-5 and served(gnnfast.report())
    if make == "FastRGCNConv":
        out = torch.compile(layer, fullgraph=True)(x, edge_index, types)
        assert relative_error(out, expected) < 1e-5


class Stack(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, given):
        return self.layer(*given)


def test_copies(device):
    """A copied layer, and one that was saved, find the same edges."""
    x, _, edge_index, types = made("self_loops_and_duplicates", device)
    layer = nn.RGCNConv(F, OUT, R).double().to(device)
    out = layer(x, edge_index, types)
    assert torch.equal(copy.deepcopy(layer)(x, edge_index, types), out)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", ["sorted", "known to be sorted", "any"])
def test_linear_layers_of_types(order, bias, device):
    """Rows of types of which some have none, and of one type alone."""
    x = torch.randn(40, F, dtype=torch.float64, device=device)
    layer = nn.HeteroLinear(F, OUT, R, is_sorted=order == "known to be sorted", bias=bias).double()
    for types in (torch.tensor([0, 3, 3, 1]).repeat(10), torch.full((40,), R - 1), torch.arange(40) % R):
        types = (types if order == "any" else types.sort().values).to(device)
        compare(layer, x, types, tolerance=1e-12)
    compare(layer, x[:0], types[:0], tolerance=1e-12)
    few = types.sort().values[:7]
    assert torch.autograd.gradgradcheck(lambda x: layer(x, few), x[:7].requires_grad_())
    layer.float()
    with torch.autocast(device.type, torch.bfloat16):
        found, expected, _ = both(lambda: layer(x.detach().float(), types))
    assert found.dtype is expected.dtype is torch.float32 and relative_error(found, expected) < 3e-2


@pytest.mark.parametrize("kind", ["each type", "some types", "one type", "a type that there is not"])
def test_many_rows_of_types(kind, monkeypatch, device):
    """Biases, whose gradient is a sum for each type."""
    from gnnfast.pyg import relations

    asked, counts = [], relations._counts
    monkeypatch.setattr(relations, "_counts", lambda *given: asked.append(counts(*given)) or asked[-1])
    x = torch.randn(3_000, F, dtype=torch.float64, device=device)
    of = {"each type": R, "some types": 2, "one type": 1, "a type that there is not": R + 1}[kind]
    types = (torch.arange(3_000) % of).to(device)
    layer = nn.HeteroLinear(F, OUT, R).double().to(device)
    if of > R:
        if device.type == "cpu":  # elsewhere the device fails
            with pytest.raises(IndexError):
                layer(x, types)
        return
    compare(layer, x, types, tolerance=1e-12)
    assert [sum(found) for found in asked[-2:]] == [3_000, 3_000]  # of rows, and of biases
    with torch.no_grad():
        asked.clear()
        layer(x, types)
    assert len(asked) == 1
    small = nn.HeteroLinear(2, 3, 2).double().to(device)
    some, x = (torch.arange(256) % 2).to(device), torch.randn(256, 2, dtype=torch.float64, device=device)
    assert torch.autograd.gradgradcheck(lambda bias: torch.func.functional_call(small, {"bias": bias}, (x, some)) ** 2, small.bias)


def test_linear_layers_of_types_are_served(monkeypatch, device):
    from gnnfast.pyg import relations

    asked, multiplied = [], relations.multiplied
    monkeypatch.setattr(relations, "multiplied", lambda *given: asked.append(given[2]) or multiplied(*given))
    x, types = torch.randn(6, F, device=device), torch.tensor([0, 2, 2, 2, 3, 3], device=device)
    layer = nn.HeteroLinear(F, OUT, R, bias=False).to(device)
    layer(x, types)
    assert asked == [[1, 0, 3, 2, 0]]
    layer(x, types + 2)  # of types that there are not, PyG leaves rows as they were
    assert len(asked) == 1


def test_memory():
    """Rows of relations that a node has no edges of take none."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU, whose memory is counted")
    nodes, width, device = 50_000, 64, torch.device("cuda")
    edge_index = torch.randint(nodes, (2, 200_000), device=device)
    types, x = torch.randint(16, (200_000,), device=device), torch.randn(nodes, width, device=device, requires_grad=True)
    layer = nn.RGCNConv(width, width, 16).to(device)

    def peak():
        for _ in range(2):
            layer(x, edge_index, types).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x, edge_index, types).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    found, expected, report = both(peak)
    assert served(report) and found < 0.7 * expected


def test_new_graphs_of_few_edges_are_left_on_a_gpu(device, small):
    """There FastRGCNConv's product for each type is as fast as what a kernel needs of a graph; again it is served."""
    x, _, edge_index, types = made("random", device, torch.float32)
    layer = nn.FastRGCNConv(F, OUT, R).to(device)
    found = []
    for edges in (edge_index.clone(), edge_index, edge_index):
        gnnfast.clear_report()
        out = layer(x, edges, types)
        found.append(served(gnnfast.report()))
    assert found == [device.type == "cpu", device.type == "cpu", True]
    assert relative_error(out, without(lambda: layer(x, edge_index, types))) < 1e-5


def test_several_aggregations_raise_as_in_pyg():
    edge_index, types = torch.randint(20, (2, 60)), torch.arange(60) % 3
    layer = nn.FastRGCNConv(F, 4, 3, aggr=["sum", "max"])
    for call in (
        lambda: without(lambda: layer(torch.randn(20, F), edge_index, types)),
        lambda: layer(torch.randn(20, F), edge_index, types),
    ):
        with pytest.raises(AssertionError):
            call()
