"""Whole ways of working with PyG: loaders, modes of torch, tools that take models apart, each with gnnfast and without."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
from comparison import both, compare, same
from graphs import relative_error
from torch.func import functional_call
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import gnnfast

pyg = pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import explain, nn  # noqa: E402
from torch_geometric.data import Data, TemporalData  # noqa: E402
from torch_geometric.loader import DataLoader, LinkNeighborLoader, NeighborLoader, NodeLoader, TemporalDataLoader  # noqa: E402
from torch_geometric.loader.link_loader import LinkLoader  # noqa: E402
from torch_geometric.nn.models import dimenet  # noqa: E402
from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator, LastNeighborLoader  # noqa: E402
from torch_geometric.sampler import BaseSampler, SamplerOutput  # noqa: E402
from torch_geometric.utils import negative_sampling  # noqa: E402

N, E, F, CLASSES = 120, 900, 8, 3


def graph(device="cpu", dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    return Data(
        x=torch.randn(N, F, generator=g, dtype=dtype),
        edge_index=torch.randint(N, (2, E), generator=g),
        y=torch.randint(CLASSES, (N,), generator=g),
    ).to(device)


DEGREES = torch.bincount(torch.arange(40) % 12)
# name -> a model of two layers, that takes what else is given
MODELS = {
    "GCN": functools.partial(nn.GCN, F, 16, 2, CLASSES),
    "GraphSAGE": functools.partial(nn.GraphSAGE, F, 16, 2, CLASSES),
    "GIN": functools.partial(nn.GIN, F, 16, 2, CLASSES),
    "GAT": functools.partial(nn.GAT, F, 16, 2, CLASSES, heads=2),
    "GAT, v2": functools.partial(nn.GAT, F, 16, 2, CLASSES, heads=2, v2=True),
    "PNA": functools.partial(
        nn.PNA, F, 16, 2, CLASSES, aggregators=["mean", "max", "std"], scalers=["identity", "amplification"], deg=DEGREES
    ),
    "EdgeCNN": functools.partial(nn.EdgeCNN, F, 16, 2, CLASSES),
}


def state(model):
    """Parameters and buffers of a model."""
    return [t.detach().clone() for t in model.state_dict().values() if t.is_floating_point()]


def gradients(out, model, *leaves):
    """A result with the gradients of all that led to it."""
    given = [*leaves, *model.parameters()]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given, allow_unused=True)]


def fit(model, batches, loss_of, epochs=2, after=lambda: None):
    """The losses of some epochs and the model after them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            after()
            losses.append(loss.detach())
    return [*losses, *state(model)]


# ---- loaders -------------------------------------------------------------------------------------------------------------------
class Neighbours(BaseSampler):
    """Draws what NeighborLoader draws, which needs pyg-lib or torch-sparse, in torch alone."""

    def __init__(self, data, most):
        self.src, self.dst = data.edge_index
        self.most = most

    def draw(self, seeds):
        node, frontier, edges, counts = seeds, seeds, [], [len(seeds)]
        for most in self.most:
            edge = torch.isin(self.dst, frontier).nonzero().view(-1)
            edge = edge[torch.randperm(len(edge))]
            dst, order = self.dst[edge].sort(stable=True)
            edge = edge[order][torch.arange(len(edge)) - torch.searchsorted(dst, dst) < most]
            frontier = self.src[edge].unique()
            frontier = frontier[~torch.isin(frontier, node)]
            node = torch.cat([node, frontier])
            edges.append(edge)
            counts.append(len(frontier))
        edge, place = torch.cat(edges), torch.full((N,), -1)
        place[node] = torch.arange(len(node))
        sizes = [len(e) for e in edges]
        rows, columns = place[self.src[edge]], place[self.dst[edge]]
        return SamplerOutput(node, rows, columns, edge, num_sampled_nodes=counts, num_sampled_edges=sizes)

    def sample_from_nodes(self, index, **kwargs):
        out = self.draw(index.node)
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(self, index, neg_sampling=None):
        seeds, places = torch.cat([index.row, index.col]).unique(return_inverse=True)
        out = self.draw(seeds)
        out.metadata = (index.input_id, places.view(2, -1), index.label, index.time)
        return out


def drawn(loader, device):
    """The batches of a loader: the same ones for both sides."""
    batches = [batch.to(device) for batch in loader]
    assert len(batches) > 3
    return batches


def classifies(model, batch, trimmed=True):
    hops = (batch.num_sampled_nodes, batch.num_sampled_edges) if trimmed else (None, None)
    out = model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=hops[0], num_sampled_edges_per_hop=hops[1])
    return cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])


def predicts_links(model, batch):
    ends = model(batch.x, batch.edge_index)[batch.edge_label_index]
    return binary_cross_entropy_with_logits(ends.prod(0).sum(-1), batch.edge_label)


def trains(make, batches, loss_of, device):
    def run():
        torch.manual_seed(0)
        return fit(make().to(device, torch.float64), batches, loss_of)

    assert same(run).kernels


def links(data):
    pairs = torch.cat([data.edge_index[:, ::20], negative_sampling(data.edge_index, N, 45)], 1)
    return {"edge_label_index": pairs, "edge_label": (torch.arange(90) < 45).double(), "batch_size": 20, "shuffle": True}


SEEDS = {"input_nodes": torch.arange(0, N, 2), "batch_size": 13, "shuffle": True}


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_batches_around_nodes(name, trimmed, device):
    data = graph()
    batches = drawn(NodeLoader(data, Neighbours(data, [5, 3]), **SEEDS), device)
    trains(MODELS[name], batches, functools.partial(classifies, trimmed=trimmed), device)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_batches_around_links(name, device):
    data = graph()
    trains(MODELS[name], drawn(LinkLoader(data, Neighbours(data, [5, 3]), **links(data)), device), predicts_links, device)


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
@pytest.mark.parametrize("loader", [NeighborLoader, LinkNeighborLoader], ids=lambda loader: loader.__name__)
def test_batches_of_pygs_own_sampler(loader, device):
    data = graph()
    try:
        batches = drawn(loader(data, [5, 3], **(SEEDS if loader is NeighborLoader else links(data))), device)
    except ImportError as error:
        pytest.skip(str(error))
    trains(MODELS["GraphSAGE"], batches, classifies if loader is NeighborLoader else predicts_links, device)


def molecules():
    g = torch.Generator().manual_seed(9)

    def molecule(n):
        x, edges = torch.randn(n, F, generator=g, dtype=torch.float64), torch.randint(n, (2, 3 * (n - 1)), generator=g)
        return Data(x=x, edge_index=edges, y=torch.randint(CLASSES, (1,), generator=g))

    return [molecule(1 + k % 12) for k in range(40)]  # some are one node, without edges


class Pooled(torch.nn.Module):
    def __init__(self, conv, pool, width):
        super().__init__()
        self.conv, self.pool, self.linear = conv, pool, Linear(width, CLASSES)

    def forward(self, batch):
        return self.linear(self.pool(self.conv(batch.x, batch.edge_index).relu(), batch.edge_index, batch.batch))

    @staticmethod
    def loss(model, batch):
        return cross_entropy(model(batch), batch.y)


class Coarser(torch.nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool, self.conv = pool, nn.GraphConv(16, 16)

    def forward(self, x, edge_index, batch):
        x, edge_index, _, batch, *_ = self.pool(x, edge_index, batch=batch)
        return nn.global_mean_pool(self.conv(x, edge_index), batch)


class Whole(torch.nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, x, edge_index, batch):
        return self.pool(x, batch)


POOLS = {
    "add": lambda: Whole(nn.global_add_pool),
    "mean": lambda: Whole(nn.global_mean_pool),
    "max": lambda: Whole(nn.global_max_pool),
    "softmax": lambda: Whole(nn.SoftmaxAggregation(learn=True)),
    "attention": lambda: Whole(nn.AttentionalAggregation(Linear(16, 1))),
    "set2set": lambda: Whole(nn.Set2Set(16, 2)),
    "sort": lambda: Whole(nn.SortAggregation(2)),
    "top": lambda: Coarser(nn.TopKPooling(16, 0.6)),
    "attention of a graph": lambda: Coarser(nn.SAGPooling(16, 0.6, GNN=nn.GATConv)),
}


@pytest.mark.parametrize("pool", POOLS)
def test_batches_of_small_graphs(pool, device):
    batches = drawn(DataLoader(molecules(), batch_size=7, shuffle=True), device)
    model = Pooled(nn.GINConv(Linear(F, 16)), POOLS[pool](), 32 if pool in ("set2set", "sort") else 16)
    trains(lambda: copy.deepcopy(model), batches, Pooled.loss, device)


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_batches_of_workers(way, device):
    """They are in memory that processes share, and a kernel has run before the processes start."""
    data, model = graph(device), Pooled(nn.GCNConv(F, 16), Whole(nn.global_mean_pool), 16).to(device, torch.float64)
    model.conv(data.x, data.edge_index)
    loader = DataLoader(molecules(), batch_size=10, shuffle=True, num_workers=1, multiprocessing_context=way)
    trains(lambda: copy.deepcopy(model), drawn(loader, device), Pooled.loss, device)


class OfEvents(torch.nn.Module):
    """As in PyG's example of TGN: a memory of events, attention over the last ones, and whether a pair is next."""

    def __init__(self):
        super().__init__()
        message = IdentityMessage(4, F, 5)
        self.memory = nn.TGNMemory(N, 4, F, 5, message, aggregator_module=LastAggregator())
        self.attention, self.linear = nn.TransformerConv(F, 4, heads=2, edge_dim=9), Linear(2 * F, 1)

    def forward(self, ends, nodes, edge_index, t, msg):
        x, updated = self.memory(nodes)
        passed = self.memory.time_enc((updated[edge_index[0]] - t).to(x.dtype))
        x = self.attention(x, edge_index, torch.cat([passed, msg], -1))
        at = torch.searchsorted(nodes, ends)
        return self.linear(x[at].flatten(1)).view(-1)


def test_batches_of_events(device):
    """The graph grows with each batch, and the memory with it."""
    g, count = torch.Generator().manual_seed(6), 160
    events = TemporalData(
        src=torch.randint(40, (count,), generator=g),
        dst=torch.randint(40, N, (count,), generator=g),
        t=torch.arange(count),
        msg=torch.randn(count, 4, generator=g, dtype=torch.float64),
    ).to(device)

    def run():
        torch.manual_seed(0)
        model, last = OfEvents().to(device, torch.float64), LastNeighborLoader(N, 5, device)
        model.memory.reset_state()  # in float64, too

        def predicts(model, batch):
            ends = torch.stack([torch.cat([batch.src, batch.src]), torch.cat([batch.dst, batch.dst.flip(0)])], 1)
            nodes, edge_index, at = last(ends.unique())
            out = model(ends, nodes, edge_index, events.t[at], events.msg[at])
            model.memory.update_state(batch.src, batch.dst, batch.t, batch.msg)
            last.insert(batch.src, batch.dst)
            return binary_cross_entropy_with_logits(out, (torch.arange(len(out), device=device) < len(batch.src)).double())

        return fit(model, TemporalDataLoader(events, batch_size=25), predicts, epochs=1, after=model.memory.detach)

    assert same(run).kernels


# ---- models --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given", [{"jk": "cat", "norm": "layer_norm"}, {"jk": "max", "norm": "graph_norm"}, {"jk": "lstm"}], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_jumping_knowledge(name, given, device):
    data = graph(device)
    compare(MODELS[name](**given).double(), data.x, data.edge_index, tolerance=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_draws_the_same(name, device):
    data, given = graph(device), {"dropout": 0.4} | ({"act": "elu"} if "GAT" in name else {})
    with gnnfast.override(dropout="framework"):
        compare(MODELS[name](**given).double(), data.x, data.edge_index, tolerance=1e-9)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("block", ["res+", "res", "dense", "plain"])
def test_deep_layers(block, checkpointed, device):
    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            width = 2 * F if block == "dense" else F
            self.layers = torch.nn.ModuleList(
                nn.DeepGCNLayer(conv, nn.LayerNorm(F), ReLU(), block, ckpt_grad=checkpointed)
                for conv in (nn.GENConv(F, F, learn_t=True), nn.GraphConv(F, F))
            )
            self.last = nn.SAGEConv(width, CLASSES)

        def forward(self, x, edge_index):
            if block == "dense":
                return self.last(self.layers[0](x, edge_index), edge_index)
            for layer in self.layers:
                x = layer(x, edge_index)
            return self.last(x, edge_index)

    data = graph(device)
    compare(Deep().double(), data.x, data.edge_index, tolerance=1e-9)


def test_reversible_layers(device):
    """What comes in is emptied, and computed again in the backward pass, which empties what came out."""
    data = graph(device)
    model = Sequential(*(nn.GroupAddRev(nn.SAGEConv(F // 2, F // 2), num_groups=2) for _ in range(2))).double()

    def run():
        x = data.x.clone().requires_grad_()
        h = x * 1
        for layer in copy.deepcopy(model).to(device):
            h = layer(h, data.edge_index)
        kept = h.detach().clone()
        return [kept, *torch.autograd.grad(h.square().sum(), x)]

    same(run)


def test_sequential_with_transformers(device):
    data = graph(device)
    layer = functools.partial(nn.GPSConv, F, heads=2)
    model = nn.Sequential(
        "x, edge_index, batch",
        [
            (layer(nn.GINConv(Linear(F, F))), "x, edge_index, batch -> x"),
            (layer(nn.GATConv(F, F), norm="layer_norm"), "x, edge_index, batch -> x"),
            (nn.DirGNNConv(nn.GCNConv(F, CLASSES)), "x, edge_index -> x"),
        ],
    )
    compare(model.double(), data.x, data.edge_index, torch.arange(N, device=device) // 30, tolerance=1e-9)


class Vectors(nn.MessagePassing):
    """As in PaiNN: scalars and vectors of atoms, of which messages are made with distances and directions."""

    def __init__(self, width):
        super().__init__(aggr="sum", node_dim=0)
        self.of_atoms = Sequential(Linear(width, width), torch.nn.SiLU(), Linear(width, 3 * width))
        self.of_distances = Linear(5, 3 * width)
        self.mix = Linear(width, 2 * width, bias=False)

    def forward(self, s, v, edge_index, distance, direction):
        basis = torch.exp(-((distance.view(-1, 1) - torch.linspace(0, 3, 5, device=s.device, dtype=s.dtype)) ** 2))
        ds, dv = self.propagate(edge_index, s=self.of_atoms(s), v=v, filters=self.of_distances(basis), direction=direction)
        s, v = s + ds, v + dv
        first, second = self.mix(v).chunk(2, -1)
        return s + (first * second).sum(1), v

    def message(self, s_j, v_j, filters, direction):
        scalars, gates, further = (s_j * filters).chunk(3, -1)
        vectors = v_j * gates.unsqueeze(1) + further.unsqueeze(1) * direction.unsqueeze(-1)
        return torch.cat([scalars.unsqueeze(1), vectors], 1)

    def update(self, aggregated):
        return aggregated[:, 0], aggregated[:, 1:]


class OfVectors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.last = torch.nn.Embedding(9, F), Linear(F, 1)
        self.layers = torch.nn.ModuleList([Vectors(F), Vectors(F)])

    def forward(self, z, pos, batch):
        edge_index, distance = near(pos, batch)
        direction = (pos[edge_index[0]] - pos[edge_index[1]]) / distance.view(-1, 1)
        s = self.embedding(z)
        v = s.new_zeros(len(z), 3, F)
        for layer in self.layers:
            s, v = layer(s, v, edge_index, distance, direction)
        return nn.global_add_pool(self.last(s), batch)


def near(pos, batch):
    """Pairs of atoms of a molecule that are near each other, for which PyG asks pyg-lib."""
    with torch.no_grad():
        apart = torch.cdist(pos, pos) + 10 * (batch.view(-1, 1) != batch) + 10 * torch.eye(len(pos), device=pos.device)
        edge_index = (apart < 2.0).nonzero().t().contiguous()
    return edge_index, (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)


def triplets(edge_index, num_nodes):
    """Of edges from k to j and from j to i, as DimeNet has them of torch-sparse."""
    src, dst = edge_index
    first, second = (dst.view(-1, 1) == src).nonzero().t()
    kept = src[first] != dst[second]
    first, second = first[kept], second[kept]
    return dst, src, dst[second], src[second], src[first], first, second


FORCES = {
    "SchNet": lambda: nn.SchNet(F, F, 2, 5, 2.0, near),
    "DimeNet++": lambda: nn.DimeNetPlusPlus(F, 1, 2, 4, 4, 4, 3, 4, cutoff=2.0),
    "vectors": OfVectors,
}


@pytest.mark.parametrize("name", FORCES)
def test_forces(name, device, monkeypatch):
    """A loss of forces, which are gradients, has second derivatives."""
    monkeypatch.setattr(dimenet, "radius_graph", lambda pos, r, batch, max_num_neighbors: near(pos, batch)[0])
    monkeypatch.setattr(dimenet, "triplets", triplets)
    g = torch.Generator().manual_seed(1)
    z, pos = torch.randint(1, 9, (36,), generator=g).to(device), torch.randn(36, 3, generator=g, dtype=torch.float64).to(device)
    batch = torch.arange(36, device=device) // 12

    def run():
        torch.manual_seed(0)
        model, places = FORCES[name]().to(device, torch.float64), pos.clone().requires_grad_()
        energy = model(z, places, batch)
        (forces,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return [energy.detach(), *gradients(forces, model, places)]

    assert same(run).kernels or name == "DimeNet++"  # which scatters, and passes no messages


# ---- modes of torch ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_autocast_with_a_scaler(name, device):
    """The gradients of one step are not finite: it is left out, and the scale is halved."""
    data = graph(device, torch.float32)
    batches = [data.x, data.x.where(torch.arange(N, device=device).view(-1, 1) > 0, torch.inf), data.x.flip(0)]

    def run():
        torch.manual_seed(0)
        model, scaler = MODELS[name]().to(device), torch.amp.GradScaler(device.type, init_scale=2.0**10)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
        for x in batches:
            with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
                out = model(x, data.edge_index)
                loss = cross_entropy(out, data.y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found += [torch.tensor(scaler.get_scale()), *([] if x is batches[1] else [out.detach(), loss.detach()])]
        assert scaler.get_scale() == 2.0**9
        return [*found, *state(model)]

    assert same(run, tolerance=3e-2).kernels


@pytest.mark.parametrize("name", MODELS)
def test_deterministic_algorithms(name, device):
    data = graph(device)
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")  # PyG has some that are not there
    try:
        model = MODELS[name]().to(device, torch.float64)

        def run():
            return [t for _ in range(3) for t in gradients(model(data.x, data.edge_index), model)]

        same(run)
        first, *others = (gradients(model(data.x, data.edge_index), model) for _ in range(3))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints(name, reentrant, device):
    data, model = graph(device), MODELS[name](dropout=0.3).to(device, torch.float64)

    def run(checkpointed=True):
        found = []
        for _ in range(3):
            torch.manual_seed(1)
            x = data.x.clone().requires_grad_()
            out = checkpoint(model, x, data.edge_index, use_reentrant=reentrant) if checkpointed else model(x, data.edge_index)
            model.zero_grad()
            out.square().sum().backward()
            found += [out.detach(), x.grad, *(p.grad for p in model.parameters())]
        return found

    with gnnfast.override(dropout="framework"):
        assert same(run).kernels
    for a, b in zip(run(True), run(False), strict=True):  # what kernels drop, they drop again
        assert relative_error(a, b) < 1e-9


def test_checkpoints_of_a_sequence(device):
    data = graph(device)
    layers = torch.nn.ModuleList(make(F, F) for make in (nn.SAGEConv, nn.GCNConv, nn.GATConv, nn.GraphConv))
    layers.to(device, torch.float64)

    def run():
        x = data.x.clone().requires_grad_()
        out = checkpoint_sequential([lambda h, c=c: c(h, data.edge_index).relu() for c in layers], 2, x, use_reentrant=False)
        return gradients(out, layers, x)

    assert same(run).kernels


def test_data_parallel_of_one_process(tmp_path, device):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        data = graph(device)
        for name in MODELS:

            def run(name=name):
                torch.manual_seed(0)
                model = torch.nn.parallel.DistributedDataParallel(MODELS[name]().to(device, torch.float64))
                return fit(model, [data.x, data.x.flip(0)], lambda model, x: cross_entropy(model(x, data.edge_index), data.y))

            assert same(run).kernels
    finally:
        torch.distributed.destroy_process_group()


DISTRIBUTED = """
import torch
import gnnfast
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GAT, GCN, GraphSAGE


def train(make, rank, on):
    (gnnfast.enable if on else gnnfast.disable)()
    torch.manual_seed(0)
    model = DistributedDataParallel(make(16, 16, 2, 3).double())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(3):
        g = torch.Generator().manual_seed(10 * step + rank)  # each process has graphs of its own
        x, edges = torch.randn(2000, 16, generator=g, dtype=torch.float64), torch.randint(2000, (2, 20000), generator=g)
        optimizer.zero_grad()
        loss = model(x, edges).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def work(rank, store):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for make in (GCN, GraphSAGE, GAT):
        for found, expected in zip(train(make, rank, True), train(make, rank, False), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
            others = [torch.empty_like(found) for _ in range(2)]
            torch.distributed.all_gather(others, found)
            assert found.dim() == 0 or torch.equal(*others)  # the same parameters on both, whatever the losses
    assert gnnfast.report().kernels
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, ("file://STORE",), nprocs=2, start_method="fork")
    print("the same")
"""


def test_data_parallel_of_two_processes(tmp_path, run_python):
    assert "the same" in run_python(DISTRIBUTED.replace("STORE", str(tmp_path / "store"))).splitlines()  # Gloo may warn, too


@pytest.mark.parametrize("name", MODELS)
def test_functions_of_parameters(name, device):
    data, model = graph(device), MODELS[name]().to(device, torch.float64)
    parameters = dict(model.named_parameters())
    twice = {key: torch.stack([p, 2 * p]) for key, p in parameters.items()}

    def call(parameters, x):
        return functional_call(model, parameters, (x, data.edge_index))

    def loss(parameters, x):
        return call(parameters, x).square().sum()

    steps = {
        "functional_call": lambda: gradients(call(parameters, data.x), model),
        "grad": lambda: list(torch.func.grad(loss)(parameters, data.x).values()),
        "vmap over features": lambda: [torch.vmap(call, (None, 0))(parameters, torch.stack([data.x, data.x.cos()]))],
        "vmap over parameters": lambda: [torch.vmap(call, (0, None))(twice, data.x)],
        "grad within vmap": lambda: list(torch.vmap(torch.func.grad(loss), (0, None))(twice, data.x).values()),
        "jvp": lambda: torch.func.jvp(lambda x: call(parameters, x), (data.x,), (data.x.cos(),)),
    }
    for step in steps.values():
        same(step)


def outcome(call):
    """What a call gives, or the type of its error: some of torch's tools do not take PyG's models."""
    try:
        return call()
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
@pytest.mark.parametrize("tool", ["export", "script", "trace", "fx", "fx of PyG"])
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT"])
def test_tools_that_take_models_apart(name, tool, device):
    """What a tool makes of a model with gnnfast, it makes without; that runs with gnnfast and without."""
    data, model = graph(device), MODELS[name]().to(device, torch.float64)
    example = (data.x, data.edge_index)
    make = {
        "export": lambda: torch.export.export(model, example).module(),
        "script": lambda: torch.jit.script(model),
        "trace": lambda: torch.jit.trace(model, example),
        "fx": lambda: torch.fx.symbolic_trace(model),
        "fx of PyG": lambda: nn.fx.symbolic_trace(model),
    }[tool]
    on, off, _ = both(lambda: outcome(make))
    if isinstance(off, type):
        assert on is off
        return
    if isinstance(on, torch.fx.GraphModule):
        assert not any("gnnfast" in str(node.target) for node in on.graph.nodes)
    for made in (on, off):
        for _ in range(3):
            same(lambda made=made: [made(*example).detach()])
    assert relative_error(on(*example), model(*example)) < 1e-9


# ---- copies and switches -------------------------------------------------------------------------------------------------------
def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": through_a_file,
    "state_dict": lambda model: None,
}


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MODELS)
def test_copies(name, how, on, device):
    """A model that has run with gnnfast is copied, and runs without, and the other way round."""
    data, model = graph(device), MODELS[name]().to(device, torch.float64)

    def step(model):
        return gradients(model(data.x, data.edge_index), model)

    try:
        (gnnfast.enable if on else gnnfast.disable)()
        for _ in range(3):
            expected = step(model)
        assert b"gnnfast" not in pickle.dumps(model)  # it is loaded where there is none
        other = COPIES[how](model)
        if how == "state_dict":
            other = MODELS[name]().to(device, torch.float64)
            other.load_state_dict(model.state_dict())
        (gnnfast.disable if on else gnnfast.enable)()
        for a, b in zip(step(other), expected, strict=True):
            assert relative_error(a, b) < 1e-9
    finally:
        gnnfast.enable()


@pytest.mark.parametrize("name", MODELS)
def test_switched_within_training(name, device):
    """Each step has gnnfast or not, in turn: forward passes with it have backward passes without, too."""
    data, states = graph(device), []
    for switched in (True, False):
        try:
            gnnfast.disable()
            torch.manual_seed(0)
            model = MODELS[name]().to(device, torch.float64)  # built without
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(6):
                (gnnfast.enable if switched and step % 3 < 2 else gnnfast.disable)()
                optimizer.zero_grad()
                loss = cross_entropy(model(data.x, data.edge_index), data.y)
                if switched and step % 2:
                    gnnfast.disable()
                loss.backward()
                optimizer.step()
            states.append([loss.detach(), *state(model)])
        finally:
            gnnfast.enable()
    for a, b in zip(*states, strict=True):
        assert relative_error(a, b) < 1e-9


# ---- hooks and explanations ----------------------------------------------------------------------------------------------------
HOOKS = ["propagate", "message", "aggregate", "edge_update", "message_and_aggregate"]
EACH_HOOK = [
    *(f"{name}_forward{end}" for name in HOOKS[:4] for end in ("_pre_hook", "_hook")),
    *("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"),  # of any module
]


def watch(model, change):
    """Hooks of all kinds on all layers, what they see, and, if asked to, what they change."""
    seen = []

    def before(name, module, inputs):
        seen.append((name, "before", type(module).__name__, sorted(inputs[-1])))

    def after(name, module, inputs, out):
        seen.append((name, "after", type(module).__name__, sorted(inputs[-1]), tuple(out.shape)))
        return 0.5 * out if change else None

    for module in model.modules():
        if isinstance(module, nn.MessagePassing):
            for name in HOOKS:
                getattr(module, f"register_{name}_forward_pre_hook")(functools.partial(before, name))
                getattr(module, f"register_{name}_forward_hook")(functools.partial(after, name))
        if isinstance(module, nn.MessagePassing | Linear | nn.Linear):
            module.register_forward_hook(
                lambda module, inputs, out: seen.append(("forward", type(module).__name__, tuple(out.shape)))
            )
            module.register_full_backward_hook(lambda module, *given: seen.append(("backward", type(module).__name__)))
    return seen


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_hooks(name, change, device):
    data = graph(device)
    model, seen = MODELS[name]().to(device, torch.float64), []

    def run():
        watched = copy.deepcopy(model)
        calls = watch(watched, change)
        x = data.x.clone().requires_grad_()
        found = [t for _ in range(3) for t in gradients(watched(x, data.edge_index), watched, x)]
        seen.append(calls)
        return found

    same(run)
    assert seen[0] == seen[1] and len(seen[0]) > 3 * 2 * 6


@pytest.mark.parametrize("hook", EACH_HOOK)
def test_one_hook(hook, device):
    """Layers with a hook of one kind alone may be served otherwise than those with all."""
    data, model, counts = graph(device), MODELS["GAT"]().to(device, torch.float64), []

    def run():
        watched, counted = copy.deepcopy(model), []
        handles = [getattr(conv, f"register_{hook}")(lambda *given: counted.append(len(given))) for conv in watched.convs]
        x = data.x.clone().requires_grad_()
        found = gradients(watched(x, data.edge_index), watched, x)
        for handle in handles:
            handle.remove()
        counts.append((*counted, len(counted)))
        return [*found, *gradients(watched(x, data.edge_index), watched, x)]

    assert same(run).kernels
    assert counts[0] == counts[1] and counts[0][-1] == 2


EXPLAINERS = {
    "GNNExplainer": (lambda: explain.GNNExplainer(epochs=8), "model", "attributes"),
    "PGExplainer": (lambda: explain.PGExplainer(epochs=2), "phenomenon", None),
    "AttentionExplainer": (lambda: explain.AttentionExplainer(), "model", None),
    "CaptumExplainer": (lambda: explain.CaptumExplainer("IntegratedGradients"), "model", "attributes"),
}
EXPLAINED = [(name, model) for name in ("GNNExplainer", "PGExplainer") for model in ("GCN", "GraphSAGE", "GAT")]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # as PGExplainer does
@pytest.mark.parametrize(("algorithm", "name"), [*EXPLAINED, ("AttentionExplainer", "GAT"), ("CaptumExplainer", "GCN")])
def test_explainers(algorithm, name, device):
    make, kind, node_mask = EXPLAINERS[algorithm]
    if algorithm == "CaptumExplainer":
        pytest.importorskip("captum", reason="captum is not installed")
    data, trained = graph(device), MODELS[name]().to(device, torch.float64).eval()

    def run():
        torch.manual_seed(0)
        model = copy.deepcopy(trained)
        before = model(data.x, data.edge_index).detach()
        explainer = explain.Explainer(
            model,
            make().to(device, torch.float64),
            explanation_type=kind,
            node_mask_type=node_mask,
            edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        )
        given = {} if kind == "model" else {"target": data.y}
        if algorithm == "PGExplainer":
            for epoch in range(2):
                for index in (3, 17):
                    explainer.algorithm.train(epoch, model, data.x, data.edge_index, index=index, **given)
        explanation = explainer(data.x, data.edge_index, index=3, **given)
        masks = [explanation.edge_mask, *([explanation.node_mask] if node_mask else [])]
        return [before, *masks, model(data.x, data.edge_index).detach()]

    assert same(run, tolerance=1e-5).kernels
