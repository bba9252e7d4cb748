"""Two GPUs: tensors on another than the current one, models over both, and a process for each."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import same
from graphs import GRAPHS, relative_error
from torch_geometric import nn

import gnnfast

LAYERS = {
    "GCNConv": lambda: nn.GCNConv(16, 8),
    "SAGEConv max": lambda: nn.SAGEConv(16, 8, aggr="max"),
    "GATConv": lambda: nn.GATConv(16, 4, heads=2),
    "TransformerConv": lambda: nn.TransformerConv(16, 4, heads=2),
    "PNAConv": lambda: nn.PNAConv(16, 8, ["mean", "max", "std"], ["identity", "amplification"], torch.tensor([1, 2, 3])),
    "ResGatedGraphConv": lambda: nn.ResGatedGraphConv(16, 8),
    "EdgeConv": lambda: nn.EdgeConv(torch.nn.Linear(32, 8)),
    "GENConv": lambda: nn.GENConv(16, 8),
    "FeaStConv": lambda: nn.FeaStConv(16, 8, heads=2),
}


@pytest.fixture
def gpus() -> list[torch.device]:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has fewer than two GPUs")
    return [torch.device("cuda", n) for n in range(2)]


def gradients(layer, x, edge_index):
    """Of a step: the output, and what it gives features and parameters."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = layer(x, edge_index)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_another_gpu_than_the_current_one(name, compiled, gpus):
    """Kernels are launched where the tensors are, and streams and what is kept are those of that GPU."""
    torch._dynamo.reset()
    made, (edge_index, n, _) = LAYERS[name]().double(), GRAPHS["hub"]()
    n = max(n, int(edge_index.max()) + 1)
    x, results = torch.randn(n, 16, dtype=torch.float64), []
    for gpu in (gpus[1], gpus[0], gpus[1]):
        layer, edges = copy.deepcopy(made).to(gpu), edge_index.to(gpu)
        if compiled:
            call = torch.compile(layer)
            results += [gradients(call, x.to(gpu), edges) for _ in range(2)]
        else:
            assert same(lambda: gradients(layer, x.to(gpu), edges)).kernels  # noqa: B023 (called at once)
            results.append(gradients(layer, x.to(gpu), edges))
        assert torch.cuda.current_device() == 0
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            assert relative_error(a.cpu(), b.cpu()) < 1e-9 or a.abs().max() < 1e-9


def test_operators_on_another_gpu(gpus):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    x, w = torch.randn(num_src, 2, 8), torch.randn(edge_index.shape[1], 2)
    for reduce in ("sum", "mean", "max"):
        for kernel in ("gas", "gar"):
            with gnnfast.override(kernel=kernel):
                here, there = (
                    gnnfast.spmm(gnnfast.Graph.from_edge_index(edge_index.to(g), (num_src, num_dst)), x.to(g), w.to(g), reduce)
                    for g in gpus
                )
            assert there.device == gpus[1] and relative_error(there.cpu(), here.cpu()) < 1e-6


def test_replicas_in_threads(gpus):
    """torch's DataParallel runs a copy of the model on each GPU, in a thread each, over the same edges."""
    edge_index, x = torch.randint(500, (2, 4000)), torch.randn(2 * 500, 16, dtype=torch.float64)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = torch.nn.ModuleList([nn.GCNConv(16, 16), nn.SAGEConv(16, 16), nn.GATConv(16, 8)])

        def forward(self, x):
            for conv in self.convs:
                x = conv(x, edge_index.to(x.device)).relu()
            return x

    model = torch.nn.DataParallel(Model().double().to(gpus[0]), [0, 1])
    report = same(lambda: [model(x.to(gpus[0])).detach() for _ in range(3)])
    assert {kernel for place, kernel, _ in report.kernels if place == "pyg GCNConv"}


def test_pipeline_over_two_gpus(gpus):
    """Layers of one model on different GPUs, whose backward pass runs in a thread for each."""
    edge_index, x = torch.randint(500, (2, 4000)), torch.randn(500, 16, dtype=torch.float64)
    layers = [nn.GCNConv(16, 16).double().to(gpus[0]), nn.GATConv(16, 8).double().to(gpus[1])]

    def step():
        h = x.to(gpus[0]).requires_grad_()
        out = layers[1](layers[0](h, edge_index.to(gpus[0])).relu().to(gpus[1]), edge_index.to(gpus[1]))
        parameters = [p for layer in layers for p in layer.parameters()]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [h, *parameters])]

    assert same(step).kernels


DISTRIBUTED = """
import torch
import gnnfast
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GAT, GCN, GraphSAGE


def train(make, rank, on):
    (gnnfast.enable if on else gnnfast.disable)()
    torch.manual_seed(0)
    model = DistributedDataParallel(make(16, 16, 2, 3).double().to(rank), [rank])
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(3):
        g = torch.Generator().manual_seed(10 * step + rank)
        x, edges = torch.randn(2000, 16, generator=g, dtype=torch.float64), torch.randint(2000, (2, 20000), generator=g)
        optimizer.zero_grad()
        loss = model(x.to(rank), edges.to(rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def work(rank, store):
    torch.distributed.init_process_group("nccl", init_method=store, rank=rank, world_size=2)
    for make in (GCN, GraphSAGE, GAT):
        for found, expected in zip(train(make, rank, True), train(make, rank, False), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, ("file://STORE",), nprocs=2)
    print("the same")
"""


def test_data_parallel_over_nccl(gpus, tmp_path, run_python):
    assert run_python(DISTRIBUTED.replace("STORE", str(tmp_path / "store"))).strip().endswith("the same")
