"""Models under ``torch.compile`` beside PyG's own, uncompiled."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, relative_error

import gnnfast

F = 8
NAMES = ("random", "self_loops_and_duplicates", "hub", "no_edges", "isolated")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graph_of(name, device, dtype=torch.float64):
    edge_index, num_src, num_dst = GRAPHS[name]()
    n = max(num_src, num_dst)
    g = torch.Generator().manual_seed(n)
    weight = torch.rand(edge_index.shape[1], generator=g, dtype=dtype) + 0.1
    weight[edge_index[0] == edge_index[1]] = 0.7  # which of several loops gives a node its weight is open on a GPU
    return torch.randn(n, F, generator=g, dtype=dtype).to(device), edge_index.to(device), weight.to(device)


def step(function, module, x, edge_index, *rest, seed=0):
    """The output, and the gradients of ``x``, of what is given after the edges and requires one, and of all parameters."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(seed)
    out = function(x, edge_index, *rest)
    (out * out.detach().cos()).sum().backward()
    grads = [t.grad for t in rest if isinstance(t, torch.Tensor) and t.requires_grad]
    for t in rest:
        if isinstance(t, torch.Tensor):
            t.grad = None
    return [out.detach(), x.grad, *grads, *(None if p.grad is None else p.grad.clone() for p in module.parameters())]


def expected(module, *inputs):
    gnnfast.disable()
    try:
        return step(module, module, *inputs)
    finally:
        gnnfast.enable()


def check(found, wanted, tolerance=1e-9):
    largest = max(float(w.norm()) for w in wanted if w is not None)
    for f, w in zip(found, wanted, strict=True):
        assert (f is None) == (w is None)
        if w is not None:
            assert f.dtype == w.dtype and f.shape == w.shape
            assert relative_error(f, w) < tolerance or (f - w).norm() < 0.01 * tolerance * largest  # of sums that cancel


def compiled(module, **options):
    return torch.compile(module, fullgraph=True, **({"backend": "aot_eager"} | options))


def traced():
    """How often something was compiled, and that nothing broke it apart."""
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def is_served():
    report = gnnfast.report()
    assert report.kernels and not report.fallbacks, report
    return True
