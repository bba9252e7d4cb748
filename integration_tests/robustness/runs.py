"""What must hold for hours, and under what goes wrong. Each run raises AssertionError where it does not."""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import gnnfast


class Model(torch.nn.Module):
    """Layers of each kind, so that every cache takes part."""

    def __init__(self, features: int = 16, classes: int = 4) -> None:
        from torch_geometric.nn import GATv2Conv, GCNConv, GINConv, SAGEConv

        super().__init__()
        self.layers = torch.nn.ModuleList(
            [
                GCNConv(features, features),
                SAGEConv(features, features, aggr="max"),
                GINConv(torch.nn.Linear(features, features)),
                GATv2Conv(features, classes, heads=2, concat=False),
            ]
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x, edge_index).relu()
        return self.layers[-1](x, edge_index)


def made(nodes: int, edges: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, 16, generator=generator)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    return x.to(device), edge_index.to(device), torch.randint(4, (nodes,), generator=generator).to(device)


def train(model: Model, optimizer: torch.optim.Optimizer, graph: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """One step."""
    x, edge_index, y = graph
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, edge_index), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _resident() -> int:
    """Bytes of memory this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


FEWEST_STEPS = 180


def changing_graphs(seconds: float, device: str) -> str:
    """Trains on graphs that are new, used again, and changed in place, for so long, or as many steps as tell something. The memory in use
    must not grow: the least of the last third is compared with the most of the middle third, so that what grows steadily is found and
    what goes up and down is not."""
    model, chance = Model().to(device), random.Random(0)
    optimizer = torch.optim.Adam(model.parameters())
    kept = [made(500, 4000, device, seed) for seed in range(4)]
    begin, steps, samples = time.time(), 0, []
    while time.time() - begin < seconds or steps < FEWEST_STEPS:
        kind = chance.randrange(4)
        if kind == 0:
            graph = chance.choice(kept)
        elif kind == 1:
            graph = kept[chance.randrange(4)]
            graph[1][:, 0] = graph[1][:, -1]  # in place
        else:
            nodes = chance.randrange(1, 2000)
            graph = made(nodes, chance.randrange(0, 20000), device, steps)
        loss = train(model, optimizer, graph)
        steps += 1
        if steps % 20 == 0:
            assert bool(torch.isfinite(loss)), f"step {steps}: the loss is {loss}"
            gc.collect()
            used = torch.cuda.memory_allocated() if device == "cuda" else _resident()
            samples.append((used, gnnfast.report().cache["bytes"]))
    third = len(samples) // 3
    middle, last = ([used for used, _ in samples[first : first + third]] for first in (third, 2 * third))
    growth = (min(last) - max(middle)) / 2**20
    assert growth < 8, f"{growth:.1f} MiB more in the last third of {steps} steps than at most in the middle third"
    most = max(cached for _, cached in samples) / 2**20
    return f"{steps} steps, {max(last) / 2**20:.0f} MiB in use at most, {most:.1f} MiB remembered at most, growth {growth:.1f} MiB"


def threads(seconds: float, device: str, count: int = 8) -> str:
    """So many threads use one graph, forward and backward, while one of them switches gnnfast off and on. All get the same numbers."""
    x, edge_index, _ = made(300, 3000, device)
    model = Model().to(device).eval()
    gnnfast.disable()
    expected = model(x, edge_index).detach()
    gnnfast.enable()
    errors: list[str] = []
    calls = [0] * count
    end = time.time() + seconds

    def work(nth: int) -> None:
        try:
            while time.time() < end and not errors:
                mine = x.clone().requires_grad_()
                out = model(mine, edge_index)
                torch.autograd.grad(out.sum(), mine)
                if not torch.allclose(out, expected, atol=1e-4, rtol=1e-4):
                    errors.append(f"thread {nth}: off by {(out - expected).abs().max()}")
                if nth == 0 and calls[0] % 10 == 9:
                    gnnfast.disable()
                    gnnfast.enable()
                calls[nth] += 1
        except Exception as error:
            errors.append(f"thread {nth}: {type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(nth,)) for nth in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors
    assert all(calls), calls
    return f"{sum(calls)} calls of {count} threads"


class Graphs(torch.utils.data.Dataset):
    """Runs a layer in the worker that loads."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, nth: int) -> Tensor:
        x, edge_index, _ = made(50, 300, "cpu", nth)
        with torch.no_grad():
            return gnnfast.spmm(gnnfast.Graph.from_edge_index(edge_index, 50), x)


def workers(seconds: float, device: str) -> str:
    """``DataLoader`` workers by fork and by spawn run kernels, after this process has."""
    loaded = 0
    end = time.time() + seconds
    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    while not loaded or time.time() < end:
        for method in ("fork", "spawn"):
            train(model, optimizer, made(300, 3000, device))  # caches and threads that the children find
            loader = torch.utils.data.DataLoader(
                Graphs(8), batch_size=None, num_workers=2, multiprocessing_context=method, timeout=120
            )
            for nth, found in enumerate(loader):
                assert torch.equal(found, Graphs(8)[nth]), f"{method}: graph {nth}"
                loaded += 1
    return f"{loaded} graphs from workers"


def out_of_memory(seconds: float, device: str) -> str:
    """On a GPU, an operation that does not fit raises, and what comes after works: nothing stays allocated, no cache is half made."""
    if device != "cuda":
        return "nothing to do without a GPU"
    x, edge_index, y = made(2000, 200_000, device)
    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    expected = model.eval()(x, edge_index).detach()
    met, end = 0, time.time() + seconds
    chance, total = random.Random(0), torch.cuda.mem_get_info()[1]
    while met < 3 or time.time() < end:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + chance.randrange(4 << 20, 64 << 20)) / total)
        wide = torch.randn(2000, 16, device=device)
        try:
            for _ in range(50):
                new = torch.randint(2000, (2, 1_000_000), device=device)
                wide = wide + model(wide, new).sum()
        except torch.OutOfMemoryError:
            met += 1
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        wide = new = None
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        found = model.eval()(x, edge_index).detach()
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-3), "other numbers after running out of memory"
        before = torch.cuda.memory_allocated()
        train(model, optimizer, (x, edge_index, y))
        expected = model.eval()(x, edge_index).detach()
        assert torch.cuda.memory_allocated() - before < 256 << 20
    return f"ran out of memory {met} times"


def interrupts(seconds: float, device: str, count: int = 20) -> str:
    """Ctrl-C at any moment: while training, converting, switching. Afterwards the numbers are the same, and everything can be undone."""
    met, seed, end = 0, 0, time.time() + seconds
    chance = random.Random(0)
    while not met or time.time() < end:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "robustness.interrupted", device, str(seed), str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],  # where the gnnfast of this process is found, not that of a source tree around
        )
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "ready\n", child.communicate()[1]
        for _ in range(count):
            time.sleep(chance.random() * 0.05)
            for _attempt in range(30):  # Python drops an interrupt that comes within a finalizer
                child.send_signal(signal.SIGINT)
                if select.select([child.stdout], [], [], 2)[0]:
                    break
            else:
                child.send_signal(signal.SIGUSR1)  # says where it hangs
                child.kill()
            line = child.stdout.readline()
            assert line == "met\n", line + child.communicate()[1]
            met += 1
        said, complaint = child.communicate(timeout=120)
        assert child.returncode == 0 and "fine" in said, said + complaint
        seed += 1
    return f"{met} interrupts in {seed} processes"


RUNS: dict[str, Callable[[float, str], str]] = {
    "changing_graphs": changing_graphs,
    "threads": threads,
    "workers": workers,
    "out_of_memory": out_of_memory,
    "interrupts": interrupts,
}
