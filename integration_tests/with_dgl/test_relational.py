"""RelGraphConv and HGTConv of DGL, which gnnfast serves as a whole, give what DGL gives on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import close, without
from graphs import GRAPHS, relative_error

import gnnfast

dgl = pytest.importorskip("dgl")
from dgl.nn.pytorch import HGTConv, RelGraphConv  # noqa: E402

from gnnfast.dgl import bridge  # noqa: E402

F, R, T = 8, 5, 3  # types of edges, of which one has none, and of nodes
SOME = ["random", "hub", "isolated", "self_loops_and_duplicates", "one_edge", "bipartite", "no_edges"]
RELATIONAL = {
    "plain": lambda: RelGraphConv(F, 6, R),
    "wide": lambda: RelGraphConv(F, 12, R, bias=False, self_loop=False),
    "basis": lambda: RelGraphConv(F, 6, R, "basis", 2),
    "blocks": lambda: RelGraphConv(F, 6, R, "bdd", 2, activation=torch.relu),
    "norm of rows": lambda: RelGraphConv(F, 6, R, layer_norm=True),
}
HGT = {
    "one head": lambda: HGTConv(F, 4, 1, T, R, dropout=0.0),
    "heads": lambda: HGTConv(F, 4, 3, T, R, dropout=0.0),
    "as wide as the input": lambda: HGTConv(F, 4, 2, T, R, dropout=0.0, use_norm=True),
}


@pytest.fixture
def device(device):
    if device.type == "cuda" and bridge.absent():
        pytest.skip(f"there is no bridge: {bridge.absent()}")
    return device


def make(name, idtype=torch.int64):
    """A graph, types of its edges and nodes, and norms of edges."""
    (src, dst), num_src, num_dst = GRAPHS[name]()
    if name == "bipartite":
        g = dgl.heterograph({("u", "e", "v"): (src, dst)}, {"u": num_src, "v": num_dst}, idtype=idtype)
    else:
        g = dgl.graph((src, dst), num_nodes=max(num_src, num_dst), idtype=idtype)
    generator = torch.Generator().manual_seed(7)
    of_edges = torch.randint(R - 1, (g.num_edges(),), generator=generator)
    of_nodes = torch.randint(T, (g.num_src_nodes(),), generator=generator)
    return g, of_edges, of_nodes, torch.rand(g.num_edges(), 1, generator=generator)


def step(layer, g, *args, dtype=torch.float64, **options):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(g.num_src_nodes(), F, generator=generator, dtype=dtype).to(g.device).requires_grad_()
    norm = options.pop("norm", None)
    if norm is not None:
        norm = options["norm"] = norm.to(dtype, copy=True).requires_grad_()
    layer.zero_grad()
    out = layer(g, x, *args, **options)
    out.pow(2).sum().backward()
    return [out.detach(), x.grad, *([] if norm is None else [norm.grad]), *(p.grad for p in layer.parameters())]


def compare(layer, device, g, *args, tolerance=1e-9, **options):
    """With gnnfast on a device, in calls one after the other, equals without it on a CPU."""
    dtype = options.get("dtype", torch.float64)
    layer = layer.to(dtype)
    expected = without(lambda: step(copy.deepcopy(layer), g, *args, **options))
    own, there = copy.deepcopy(layer).to(device), g.to(device)
    args = [t.to(device) for t in args]
    options = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    gnnfast.clear_report()
    for _ in range(2):
        close(step(own, there, *args, **options), expected, tolerance)
    return {kernel for place, kernel, _ in gnnfast.report().kernels}


@pytest.mark.parametrize("graph", SOME)
@pytest.mark.parametrize("name", RELATIONAL)
def test_rel_graph_conv(name, graph, rows, device):
    g, types, _, norm = make(graph)
    if name != "wide" and graph == "bipartite" and g.num_src_nodes() < g.num_dst_nodes():
        pytest.skip("DGL takes destinations to be the first of the sources")
    kernels = compare(RELATIONAL[name](), device, g, types)
    assert ("in parts" in kernels) == (graph == "no_edges" or g.num_src_nodes() < g.num_dst_nodes())
    compare(RELATIONAL[name](), device, g, types, norm=norm)


@pytest.mark.parametrize("graph", [name for name in SOME if name != "bipartite"])
@pytest.mark.parametrize("name", HGT)
def test_hgt_conv(name, graph, device):
    g, types, nodes, _ = make(graph)
    kernels = compare(HGT[name](), device, g, nodes, types)
    assert ("in parts" in kernels) == (graph == "no_edges")
    compare(HGT[name](), device, g, nodes.sort()[0], types)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_dtypes(idtype, device):
    g, types, nodes, norm = make("random", idtype)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        compare(RELATIONAL["basis"](), device, g, types, norm=norm, dtype=dtype, tolerance=tolerance)
        compare(HGT["heads"](), device, g, nodes, types, dtype=dtype, tolerance=tolerance)


def test_presorted(device):
    g, types, nodes, _ = make("random")
    types, nodes = types.sort()[0], nodes.sort()[0]
    layer = RELATIONAL["plain"]()
    compare(layer, device, g, types, presorted=True)
    compare(HGT["heads"](), device, g, nodes, types, presorted=True)
    layer(g, torch.randn(g.num_nodes(), F, dtype=torch.float64), types, presorted=True)
    assert layer.presorted is True


def test_blocks_of_a_sampler(device):
    g, types, nodes, _ = make("random")
    block = dgl.to_block(dgl.in_subgraph(g, torch.arange(9)), torch.arange(9))
    some, of_nodes = (
        types[block.edata[dgl.EID]] if dgl.EID in block.edata else types[: block.num_edges()],
        nodes[block.srcdata[dgl.NID]],
    )
    assert "in parts" not in compare(RELATIONAL["plain"](), device, block, some)
    assert "in parts" not in compare(HGT["heads"](), device, block, of_nodes, some)


def test_a_norm_among_the_features_of_edges_is_taken(device):
    g, types, _, norm = make("random")
    g.edata["norm"] = norm.double()
    assert "in parts" not in compare(RELATIONAL["plain"](), device, g, types)


def test_types_written_into(device):
    g, types, nodes, _ = make("random")
    layer = RELATIONAL["plain"]().to(device, torch.float64)
    hgt = HGT["heads"]().to(device, torch.float64)
    there, given, of_nodes = g.to(device), types.to(device), nodes.to(device)
    x = torch.randn(g.num_nodes(), F, dtype=torch.float64, device=device)
    before = layer(there, x, given), hgt(there, x, of_nodes, given)
    given.copy_((given + 1) % (R - 1))
    of_nodes.copy_((of_nodes + 1) % T)
    found = layer(there, x, given), hgt(there, x, of_nodes, given)
    host = [t.cpu() for t in (x, given, of_nodes)]
    expected = without(lambda: (copy.deepcopy(layer).cpu()(g, *host[:2]), copy.deepcopy(hgt).cpu()(g, host[0], host[2], host[1])))
    for a, b, c in zip(found, expected, before):
        assert relative_error(a.cpu(), b) < 1e-9 and relative_error(c.cpu(), b) > 1e-3


def test_of_a_reverse(device):
    """Its index shares what is known of the graph."""
    g, types, nodes, _ = make("random")
    for name in ("plain", "blocks"):
        compare(RELATIONAL[name](), device, g, types)
        compare(RELATIONAL[name](), device, g.reverse(), types)
    compare(HGT["heads"](), device, g.reverse(), nodes, types)


def plain_hgt(module, g, x, ntype, etype):
    """HGTConv of torch's operations alone: DGL's softmax of edges has no right second derivative."""
    (src, dst), heads, width = g.edges(), module.num_heads, module.head_size

    def typed(linear, rows, types):
        return torch.bmm(rows.unsqueeze(1), linear.get_weight()[types]).squeeze(1)

    k, q, v = (typed(lin, x, ntype).view(-1, heads, width) for lin in (module.linear_k, module.linear_q, module.linear_v))
    scores, messages = [], []
    for h, (att, msg, prior) in enumerate(zip(module.relation_att, module.relation_msg, module.relation_pri)):
        scores.append((typed(att, k[src][:, h], etype) * q[dst][:, h]).sum(-1) * prior[etype] / module.sqrt_d)
        messages.append(typed(msg, v[src][:, h], etype))
    shares = torch.stack(scores, 1).exp()
    shares = shares / torch.zeros(g.num_nodes(), heads, dtype=x.dtype).index_add(0, dst, shares)[dst]
    out = torch.zeros(g.num_nodes(), heads, width, dtype=x.dtype)
    out = out.index_add(0, dst, torch.stack(messages, 1) * shares.unsqueeze(-1)).flatten(1)
    alpha = torch.sigmoid(module.skip[ntype]).unsqueeze(-1)
    return typed(module.linear_a, out, ntype) * alpha + (x @ module.residual_w) * (1 - alpha)


def second_derivatives(layer, call, g):
    x = torch.linspace(-1, 1, g.num_nodes() * F, dtype=torch.float64, device=g.device).view(-1, F).requires_grad_()
    (grad,) = torch.autograd.grad(call(layer, g, x).pow(3).sum(), x, create_graph=True)
    return [grad, *torch.autograd.grad(grad.pow(2).sum(), [x, *layer.parameters()])]


def test_second_derivatives(device):
    g, types, nodes, _ = make("random")
    layer = RELATIONAL["basis"]().double()
    expected = without(lambda: second_derivatives(layer, lambda m, g, x: m(g, x, types), g))
    own, there, of_edges, of_nodes = copy.deepcopy(layer).to(device), g.to(device), types.to(device), nodes.to(device)
    close(second_derivatives(own, lambda m, g, x: m(g, x, of_edges), there), expected, 1e-9)
    layer = HGTConv(F, 4, 3, T, R, dropout=0.0).double()
    expected = second_derivatives(layer, lambda m, g, x: plain_hgt(m, g, x, nodes, types), g)
    own = copy.deepcopy(layer).to(device)
    found = second_derivatives(own, lambda m, g, x: m(g, x, of_nodes, of_edges), there)
    assert all(relative_error(a.cpu(), b) < 1e-9 for a, b in zip(found, expected, strict=True))


class Own(RelGraphConv):
    def message(self, edges):
        return {"m": 2 * super().message(edges)["m"]}


def test_what_is_changed_is_left_to_dgl(device):
    g, types, nodes, norm = make("random")

    def hooked(layer, part):
        part(layer).register_forward_hook(lambda module, inputs, out: out * 2)
        return layer

    for layer, args, options in (
        (Own(F, 6, R), (types,), {}),
        (hooked(RELATIONAL["plain"](), lambda layer: layer.linear_r), (types,), {}),
        (hooked(HGT["heads"](), lambda layer: layer.relation_msg[1]), (nodes, types), {}),
        (RELATIONAL["plain"](), (types,), {"norm": norm.expand(-1, 6).contiguous()}),
    ):
        assert "in parts" in compare(layer, device, g, *args, **options)


def test_types_out_of_range_are_dgls_to_report():
    g, types, _, _ = make("random")
    types[3] = R
    layer, x = RELATIONAL["blocks"](), torch.randn(g.num_nodes(), F)
    with pytest.raises(IndexError):
        layer(g, x, types)


def test_evaluation_and_dropout(device):
    g, types, nodes, _ = make("random")
    layer = RelGraphConv(F, 6, R, dropout=0.5)
    compare(layer.eval(), device, g, types)
    compare(HGTConv(F, 4, 2, T, R, dropout=0.5).eval(), device, g, nodes, types)
    if device.type == "cpu":  # which draws the same numbers
        x, results = torch.randn(g.num_nodes(), F, dtype=torch.float64), []
        for on in (True, False):
            (gnnfast.enable if on else gnnfast.disable)()
            torch.manual_seed(5)
            results.append(layer.double().train()(g, x, types))
        gnnfast.enable()
        assert relative_error(*results) < 1e-9
