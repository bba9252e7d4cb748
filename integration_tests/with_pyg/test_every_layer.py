"""Every class of ``torch_geometric.nn.conv`` gives, with gnnfast, what PyG gives without: outputs and gradients."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from comparison import both, compare, same
from graphs import relative_error
from torch.nn import Linear, ReLU, Sequential
from torch.nn.attention import SDPBackend, sdpa_kernel

pyg = pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn  # noqa: E402
from torch_geometric.nn import conv  # noqa: E402

pytestmark = pytest.mark.usefixtures("converts_at_once")

N, E, F, R = 60, 400, 8, 3  # nodes, edges, features, relations

# What of PyG needs other libraries, and raises ImportError without them.
NEEDS = {
    "DynamicEdgeConv": "pyg-lib, to find neighbours",
    "GravNetConv": "pyg-lib, to find neighbours",
    "XConv": "pyg-lib, to find neighbours",
    "SplineConv": "pyg-lib, for its splines",
    "PANConv": "torch-sparse, for products of adjacencies",
}
# Their kernels, in place of message passing, are another library's.
OTHERS = {
    "CuGraphSAGEConv": lambda: nn.CuGraphSAGEConv(F, 4),
    "CuGraphGATConv": lambda: nn.CuGraphGATConv(F, 4),
    "CuGraphRGCNConv": lambda: nn.CuGraphRGCNConv(F, 4, R),
    "FusedGATConv": lambda: nn.FusedGATConv(F, 4, add_self_loops=False),
}


def mlp(width, out):
    return Sequential(Linear(width, F), ReLU(), Linear(F, out))


def plain(layer, g):
    return layer(g.x, g.edges)


def weighted(layer, g):
    return layer(g.x, g.edges, g.weight)


def attributed(layer, g):
    return layer(g.x, g.edges, edge_attr=g.attr)


def typed(layer, g):
    return layer(g.x, g.edges, g.types)


def numbered(layer, g):
    """Features of nodes are the layer's own, and the nodes are given by numbers."""
    return layer(g.numbers, g.edges, g.types) * g.x.mean(1, keepdim=True)


def between(layer, g):
    """From nodes of one kind to nodes of another."""
    return layer((g.x, g.other), g.across)


def hetero(layer, g):
    return layer(
        {"a": g.x, "b": g.other}, {("a", "to", "b"): g.across, ("a", "by", "a"): g.edges, ("b", "of", "a"): g.across.flip(0)}
    )


METADATA = ["a", "b"], [("a", "to", "b"), ("a", "by", "a"), ("b", "of", "a")]
DEGREES = torch.bincount(torch.arange(N) % 7)

# name -> (layer, one step of it on a graph)
LAYERS = {
    "AGNNConv": (lambda: nn.AGNNConv(), plain),
    "AntiSymmetricConv": (lambda: nn.AntiSymmetricConv(F, num_iters=2), plain),
    "AntiSymmetricConv of GATConv": (lambda: nn.AntiSymmetricConv(F, nn.GATConv(F, F)), plain),
    "APPNP": (lambda: nn.APPNP(2, 0.1), weighted),
    "ARMAConv": (lambda: nn.ARMAConv(F, 4, num_stacks=2, num_layers=2), weighted),
    "CGConv": (lambda: nn.CGConv(F, 3, aggr="mean"), attributed),
    "ChebConv": (lambda: nn.ChebConv(F, 4, 3), weighted),
    "ClusterGCNConv": (lambda: nn.ClusterGCNConv(F, 4, diag_lambda=0.5), plain),
    "DNAConv": (
        lambda: nn.DNAConv(F, heads=2, groups=2),
        lambda c, g: c(torch.stack([g.x, g.x.sin(), g.x.cos()], 1), g.edges, g.weight),
    ),
    "DirGNNConv of GCNConv": (lambda: nn.DirGNNConv(nn.GCNConv(F, 4)), plain),
    "DirGNNConv of GATConv": (lambda: nn.DirGNNConv(nn.GATConv(F, 4), alpha=0.3, root_weight=False), plain),
    "DirGNNConv of SAGEConv": (lambda: nn.DirGNNConv(nn.SAGEConv(F, 4)), plain),
    "DynamicEdgeConv": (lambda: nn.DynamicEdgeConv(mlp(2 * F, 4), 3), lambda c, g: c(g.x)),
    "EGConv": (lambda: nn.EGConv(F, 4, num_heads=2, num_bases=3), plain),
    "EGConv of several": (
        lambda: nn.EGConv(F, 4, ["sum", "mean", "symnorm", "min", "max", "var", "std"], num_heads=2, num_bases=3),
        plain,
    ),
    "EdgeConv": (lambda: nn.EdgeConv(mlp(2 * F, 4)), plain),
    "FAConv": (lambda: nn.FAConv(F), lambda c, g: c(g.x, g.other[:1] + g.x.cos(), g.edges)),
    "FastRGCNConv": (lambda: nn.FastRGCNConv(F, 4, R), typed),
    "FastRGCNConv sum": (lambda: nn.FastRGCNConv(F, 4, R, aggr="sum"), typed),
    "FastRGCNConv of bases": (lambda: nn.FastRGCNConv(F, 4, R, num_bases=2), typed),
    "FastRGCNConv of blocks": (lambda: nn.FastRGCNConv(F, 4, R, num_blocks=2), typed),
    "FastRGCNConv of numbers": (lambda: nn.FastRGCNConv(N, 4, R), numbered),
    "FastRGCNConv of bases and numbers": (lambda: nn.FastRGCNConv(N, 4, R, num_bases=2), numbered),
    "FastRGCNConv of all nodes": (lambda: nn.FastRGCNConv(N, 4, R), lambda c, g: c(None, g.edges, g.types) * g.x[:, :4]),
    "FeaStConv": (lambda: nn.FeaStConv(F, 4, heads=2), plain),
    "FiLMConv": (lambda: nn.FiLMConv(F, 4, R), typed),
    "GATConv": (lambda: nn.GATConv(F, 4, heads=2, edge_dim=3, residual=True), attributed),
    "GATv2Conv": (lambda: nn.GATv2Conv(F, 4, heads=2, edge_dim=3), attributed),
    "GCN2Conv": (lambda: nn.GCN2Conv(F, 0.1, 0.5, 2), lambda c, g: c(g.x, g.x.cos(), g.edges, g.weight)),
    "GCNConv": (lambda: nn.GCNConv(F, 4), weighted),
    "GENConv": (lambda: nn.GENConv(F, 4, learn_t=True, edge_dim=3), attributed),
    "GENConv powermean": (lambda: nn.GENConv(F, 4, aggr="powermean", learn_p=True, msg_norm=True, learn_msg_scale=True), plain),
    "GINConv": (lambda: nn.GINConv(mlp(F, 4), train_eps=True), plain),
    "GINEConv": (lambda: nn.GINEConv(mlp(F, 4), edge_dim=3), attributed),
    "GMMConv": (lambda: nn.GMMConv(F, 4, 3, 2), attributed),
    "GMMConv separate": (lambda: nn.GMMConv(F, 4, 3, 2, separate_gaussians=True), attributed),
    "GPSConv of GINConv": (lambda: nn.GPSConv(F, nn.GINConv(mlp(F, F)), heads=2), lambda c, g: c(g.x, g.edges, g.batch)),
    "GPSConv of GATConv": (
        lambda: nn.GPSConv(F, nn.GATConv(F, F, edge_dim=3), heads=2, norm="layer_norm", attn_type="performer"),
        lambda c, g: c(g.x, g.edges, g.batch, edge_attr=g.attr),
    ),
    "GatedGraphConv": (lambda: nn.GatedGraphConv(F, 2), weighted),
    "GeneralConv": (lambda: nn.GeneralConv(F, 4, 3, attention=True, heads=2), attributed),
    "GeneralConv normalised": (lambda: nn.GeneralConv(F, 4, directed_msg=False, heads=2, l2_normalize=True), plain),
    "GraphConv": (lambda: nn.GraphConv(F, 4, aggr="max"), weighted),
    "GravNetConv": (lambda: nn.GravNetConv(F, 4, 3, 5, 4), lambda c, g: c(g.x)),
    "HANConv": (lambda: nn.HANConv(F, 4, METADATA, heads=2), hetero),
    "HEATConv": (
        lambda: nn.HEATConv(F, 4, 2, R, 5, 3, 6, heads=2, concat=False),
        lambda c, g: c(g.x, g.edges, g.batch % 2, g.types, g.attr),
    ),
    "HGTConv": (lambda: nn.HGTConv(F, 4, METADATA, heads=2), hetero),
    "HeteroConv": (lambda: nn.HeteroConv({edge: nn.SAGEConv((F, F), 4) for edge in METADATA[1]}), hetero),
    "HypergraphConv": (lambda: nn.HypergraphConv(F, 4), lambda c, g: c(g.x, g.across, g.other[:, 0].exp())),
    "HypergraphConv attention": (
        lambda: nn.HypergraphConv(F, 4, use_attention=True, heads=2),
        lambda c, g: c(g.x, g.across, hyperedge_attr=g.other),
    ),
    "LEConv": (lambda: nn.LEConv(F, 4), weighted),
    "LGConv": (lambda: nn.LGConv(), weighted),
    "MFConv": (lambda: nn.MFConv(F, 4, max_degree=5), plain),
    "MFConv between": (lambda: nn.MFConv((F, F), 4, max_degree=5), between),
    "MeshCNNConv": (lambda: nn.MeshCNNConv(F, 4), lambda c, g: c(g.x, g.mesh)),
    "MixHopConv": (lambda: nn.MixHopConv(F, 4, [0, 1, 3]), weighted),
    "NNConv": (lambda: nn.NNConv(F, 4, mlp(3, F * 4), aggr="mean"), attributed),
    "PANConv": (lambda: nn.PANConv(F, 4, 2), lambda c, g: c(g.x, g.edges)[0]),
    "PDNConv": (lambda: nn.PDNConv(F, 4, 3, 6), attributed),
    "PNAConv": (
        lambda: nn.PNAConv(F, 4, ["mean", "max", "std"], ["identity", "attenuation"], DEGREES, edge_dim=3, towers=2),
        attributed,
    ),
    "PPFConv": (
        lambda: nn.PPFConv(mlp(F + 4, F), mlp(F, 4)),
        lambda c, g: c(g.x, g.points, torch.nn.functional.normalize(g.points.cos()), g.edges),
    ),
    "PointGNNConv": (lambda: nn.PointGNNConv(mlp(F, 3), mlp(F + 3, 5), mlp(5, F)), lambda c, g: c(g.x, g.points, g.edges)),
    "PointNetConv": (lambda: nn.PointNetConv(mlp(F + 3, F), mlp(F, 4)), lambda c, g: c(g.x, g.points, g.edges)),
    "PointNetConv of points": (lambda: nn.PointNetConv(mlp(3, F)), lambda c, g: c(None, g.points, g.edges) * g.x),
    "PointTransformerConv": (lambda: nn.PointTransformerConv(F, 4), lambda c, g: c(g.x, g.points, g.edges)),
    "RGATConv": (lambda: nn.RGATConv(F, 4, R, heads=2), typed),
    "RGATConv of bases": (
        lambda: nn.RGATConv(F, 4, R, num_bases=2, attention_mechanism="within-relation", mod="additive", edge_dim=3),
        lambda c, g: c(g.x, g.edges, g.types, g.attr),
    ),
    "RGATConv of blocks": (
        lambda: nn.RGATConv(
            F, 4, R, num_blocks=2, attention_mode="multiplicative-self-attention", dim=2, heads=2, concat=False, mod="f-scaled"
        ),
        typed,
    ),
    "RGCNConv": (lambda: nn.RGCNConv(F, 4, R), typed),
    "RGCNConv max": (lambda: nn.RGCNConv(F, 4, R, aggr="max", root_weight=False), typed),
    "RGCNConv between": (lambda: nn.RGCNConv((F, F), 4, R), lambda c, g: c((g.x, g.other), g.across, g.types)),
    "RGCNConv of bases": (lambda: nn.RGCNConv(F, 4, R, num_bases=2), typed),
    "RGCNConv of blocks": (lambda: nn.RGCNConv(F, 4, R, num_blocks=2), typed),
    "RGCNConv of numbers": (lambda: nn.RGCNConv(N, 4, R, num_bases=2), numbered),
    "RGCNConv of all nodes": (lambda: nn.RGCNConv(N, 4, R), lambda c, g: c(None, g.edges, g.types) * g.x[:, :4]),
    "RGCNConv of a relation without edges": (lambda: nn.RGCNConv(F, 4, R + 1), typed),
    "ResGatedGraphConv": (lambda: nn.ResGatedGraphConv(F, 4, edge_dim=3), attributed),
    "SAGEConv": (lambda: nn.SAGEConv(F, 4, aggr="lstm"), lambda c, g: c(g.x, g.edges[:, g.edges[1].argsort(stable=True)])),
    "SAGEConv between": (lambda: nn.SAGEConv((F, F), 4, normalize=True, project=True), between),
    "SGConv": (lambda: nn.SGConv(F, 4, 2), weighted),
    "SSGConv": (lambda: nn.SSGConv(F, 4, 0.1, 2), weighted),
    "SignedConv": (lambda: nn.SignedConv(F, 4, True), lambda c, g: c(g.x, g.edges[:, ::2], g.edges[:, 1::2])),
    "SignedConv further": (lambda: nn.SignedConv(F // 2, 4, False), lambda c, g: c(g.x, g.edges[:, ::2], g.edges[:, 1::2])),
    "SimpleConv": (lambda: nn.SimpleConv("mean", "cat"), weighted),
    "SplineConv": (lambda: nn.SplineConv(F, 4, 3, 5), lambda c, g: c(g.x, g.edges, g.attr.detach().sigmoid())),
    "SuperGATConv": (lambda: nn.SuperGATConv(F, 4, heads=2, is_undirected=True), plain),
    "TAGConv": (lambda: nn.TAGConv(F, 4), weighted),
    "TransformerConv": (lambda: nn.TransformerConv(F, 4, heads=2, edge_dim=3, beta=True), attributed),
    "WLConv": (lambda: nn.WLConv(), lambda c, g: c(g.batch, g.edges).view(-1, 1) * g.x),
    "WLConvContinuous": (lambda: nn.WLConvContinuous(), weighted),
    "XConv": (lambda: nn.XConv(F, 4, 3, 4, hidden_channels=2), lambda c, g: c(g.x, g.points)),
}


class Step(torch.nn.Module):
    """A layer on one graph, as a module of what has gradients."""

    def __init__(self, layer, call, device):
        super().__init__()
        self.layer, self.call = layer, call
        g = torch.Generator().manual_seed(4)
        edges = torch.randint(N - 5, (2, E), generator=g)  # five nodes have none
        edges[:, :20] = edges[:, 20:40]  # some twice, and some loops
        edges[0, 40:50] = edges[1, 40:50]
        given = {
            "edges": edges,
            "across": torch.stack([edges[0], edges[1] % 30]),
            "mesh": torch.stack([torch.arange(N).repeat_interleave(4), torch.randint(N, (4 * N,), generator=g)]),
            "types": torch.arange(E) % R,
            "batch": torch.arange(N) // 20,
            "numbers": torch.arange(N).flip(0),
        }
        self.given = {name: t.to(device) for name, t in given.items()}

    def forward(self, x, other, weight, attr, points):
        out = self.call(self.layer, SimpleNamespace(x=x, other=other, weight=weight, attr=attr, points=points, **self.given))
        return torch.cat([t.flatten() for t in out.values() if t is not None]) if isinstance(out, dict) else out


def made(name, device):
    """A layer as a module, and what it takes."""
    if name == "MeshCNNConv" and device.type == "cuda":
        pytest.skip("PyG's own makes its messages on the CPU, and fails")
    make, call = LAYERS[name]
    g = torch.Generator().manual_seed(5)
    shapes = (N, F), (30, F), (E,), (E, 3), (N, 3)
    x, other, weight, attr, points = (torch.randn(shape, generator=g, dtype=torch.float64).to(device) for shape in shapes)
    return Step(make(), call, device).to(device, torch.float64), x, other, weight.abs(), attr, points


@contextmanager
def needs(name):
    try:
        yield
    except ImportError:
        assert name in NEEDS
        pytest.skip(f"it needs {NEEDS[name]}")


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, device):
    with needs(name):
        compare(*made(name, device), tolerance=1e-9)  # new, met again, converted


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives(name, device):
    def run(layer):
        for _ in range(2):
            torch.manual_seed(1)
            leaves = [t.clone().requires_grad_() for t in given]
            wanted = [*leaves, *layer.parameters()]
            first = torch.autograd.grad(layer(*leaves).sin().sum(), wanted, create_graph=True, allow_unused=True)
            total = sum(t.square().sum() for t in first if t is not None)
        second = torch.autograd.grad(total, wanted, allow_unused=True)
        return [total.detach(), *(None if t is None else t.contiguous() for t in second)]

    # cuDNN's LSTM and fused attention have none.
    with needs(name), torch.backends.cudnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH):
        step, *given = made(name, device)
        same(lambda: run(copy.deepcopy(step)))


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_call_leaves_in_a_layer(name, device):
    """TorchScript, for one, compiles no other attributes than those there are."""

    def run():
        layer = copy.deepcopy(step)
        for _ in range(2):
            layer(*given)
        return {path: set(vars(m)) for path, m in layer.named_modules()}

    with needs(name):
        step, *given = made(name, device)
        found, expected, _ = both(run)
    assert found == expected


TRANSFORMS = {
    "vmap": lambda f, x, *others: [torch.vmap(lambda x: f(x, *others), randomness="same")(torch.stack([x, x.cos()]))],
    "jvp": lambda f, *given: torch.func.jvp(f, given, tuple(t.cos() for t in given)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_transforms(name, transform, device):
    """Some layers cannot be transformed: the same ones, for the same reasons."""

    def run():
        torch.manual_seed(1)
        try:
            return TRANSFORMS[transform](copy.deepcopy(step), *given)
        except RuntimeError as error:
            return str(error)

    with needs(name):
        step, *given = made(name, device)
        found, expected, _ = both(run)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert all(relative_error(a, b) < 1e-9 for a, b in zip(found, expected, strict=True))


def test_none_is_left_out():
    named = {name.split()[0] for name in LAYERS}
    assert set(conv.__all__) - {"MessagePassing"} <= named | OTHERS.keys()
    assert NEEDS.keys() <= named and not OTHERS.keys() & named


@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_other_libraries(name):
    with pytest.raises(ImportError, match=r"pylibcugraphops|dgNN"):
        OTHERS[name]()
        pytest.skip("that library is installed, and its kernels run in place of message passing")
