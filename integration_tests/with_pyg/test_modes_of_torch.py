"""Modes of torch: autocast, deterministic algorithms, checkpoints, data parallel training, functions of parameters, with gnnfast and
without."""

from __future__ import annotations

import pytest
import torch
from comparison import same
from graphs import relative_error
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from workflows import MODELS, F, N, fit, gradients, graph, state


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


class _Scaled(TorchFunctionMode):
    """Of which linear layers give more."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 1.5 * out if function is torch.nn.functional.linear else out


LINEAR = {
    "GCN": lambda: nn.GCNConv(F, 5),
    "cached GCN": lambda: nn.GCNConv(F, 5, cached=True),
    "SAGE": lambda: nn.SAGEConv(F, 5),
    "GraphConv": lambda: nn.GraphConv(F, 5),
    "SG": lambda: nn.SGConv(F, 5),
    "GIN": lambda: nn.GINConv(torch.nn.Linear(F, 5)),
    "GINE": lambda: nn.GINEConv(torch.nn.Linear(F, 5), edge_dim=3),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_function_mode_sees_products_of_layers(name, device):
    data, layer = graph(device, torch.float64), LINEAR[name]().to(device, torch.float64)
    attr = torch.randn(data.edge_index.shape[1], 3, device=device, dtype=torch.float64)

    def run():
        x = data.x.clone().requires_grad_()
        for _ in range(2):
            with _Scaled():
                out = layer(x, data.edge_index, *((attr,) if name == "GINE" else ()))
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))]

    same(run)


def test_a_default_device_is_no_mode_that_matters(device):
    data, layer = graph(device, torch.float64), nn.GCNConv(F, 5).to(device, torch.float64)
    gnnfast.clear_report()
    with torch.device(device):
        layer(data.x, data.edge_index).sum().backward()
    assert any(kernel.startswith("linear") for place, kernel, _ in gnnfast.report().kernels if place == "pyg GCNConv")


@pytest.mark.parametrize("width", [2, F, 2 * F])
def test_weights_made_in_inference_mode(width, device):
    data, layer = graph(device, torch.float64), nn.GraphConv(F, width).to(device, torch.float64)
    with torch.inference_mode():
        weight = torch.rand(data.edge_index.shape[1], device=device, dtype=torch.float64)

    def run():
        out = layer(data.x, data.edge_index, weight)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [*layer.parameters()])]

    same(run)
