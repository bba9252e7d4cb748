"""The public functions refuse bad input with an error that says what was given and what is accepted."""

from __future__ import annotations

import pytest
import torch

import gnnfast
from gnnfast import Graph

EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])


@pytest.mark.parametrize(
    "arguments,error,message",
    [
        (dict(x=torch.ones(3, 2, dtype=torch.int64)), TypeError, "x has dtype torch.int64; accepted are float32"),
        (dict(x=torch.ones(3, 2, dtype=torch.complex64)), TypeError, "complex64; accepted are"),
        (dict(x=torch.ones(4, 2)), ValueError, r"x must have shape \[3, F\] or \[3, H, D\], got \[4, 2\]"),
        (dict(x=torch.ones(3)), ValueError, r"got \[3\]"),
        (
            dict(x=torch.ones(3, 2), weight=torch.ones(4)),
            ValueError,
            r"weight must have shape \[3\] \(one value per edge\), got \[4\]",
        ),
        (
            dict(x=torch.ones(3, 2, 2), weight=torch.ones(3, 3)),
            ValueError,
            r"\[3\] or \[3, 2\] \(one value per edge\), got \[3, 3\]",
        ),
        (
            dict(x=torch.ones(3, 2), weight=torch.ones(3).double()),
            ValueError,
            "weight must be torch.float32 on cpu, as x is, got torch.float64",
        ),
        (dict(x=torch.ones(3, 2), reduce="median"), ValueError, "reduce must be one of sum, mean, max, min, got 'median'"),
        (dict(x=torch.ones(3, 2), reduce="max", ties="last"), ValueError, "ties must be 'first' or 'even', got 'last'"),
        (dict(x=torch.ones(3, 2, device="meta")), ValueError, "x is on meta but the graph is on cpu"),
        (dict(graph=EDGES, x=torch.ones(3, 2)), TypeError, "graph must be a gnnfast.Graph, got Tensor"),
    ],
)
def test_spmm(arguments, error, message):
    with pytest.raises(error, match=message):
        gnnfast.spmm(**({"graph": Graph.from_edge_index(EDGES, 3)} | arguments))


def test_sddmm():
    graph = Graph.from_edge_index(EDGES, 3)
    with pytest.raises(ValueError, match="dst and src must agree in dtype and feature shape"):
        gnnfast.sddmm(graph, torch.ones(3, 2), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"src must have shape \[3, F\]"):
        gnnfast.sddmm(graph, torch.ones(3, 2), torch.ones(5, 2))


def test_device_mix():
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    graph = Graph.from_edge_index(EDGES, 3)
    with pytest.raises(ValueError, match="x is on cuda:0 but the graph is on cpu; move one of them"):
        gnnfast.spmm(graph, torch.ones(3, 2, device="cuda"))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_out_of_memory(device, needs_grad):
    """As torch says it: libraries look for its error, or for its words, and take a smaller batch."""
    nodes, width = 1 << 24, 1 << 22  # 256 TiB of results, more than there are addresses
    graph = Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64, device=device), (1, nodes))
    x = torch.ones(1, width, device=device, requires_grad=needs_grad)
    words = "CUDA out of memory. Tried" if device.type == "cuda" else "DefaultCPUAllocator: can't allocate memory"
    with pytest.raises(torch.OutOfMemoryError, match=words):
        gnnfast.spmm(graph, x)
    assert torch.equal(gnnfast.spmm(graph, x[:, :1])[:2], torch.tensor([[1.0], [0.0]], device=device))


def test_report_prints():
    graph = Graph.from_edge_index(EDGES, 3)
    gnnfast.spmm(graph, torch.ones(3, 2))
    text = str(gnnfast.report())
    assert "gnnfast.spmm" in text and "sum over edges" in text and "Graph cache" in text
    assert gnnfast.report().as_dict()["kernels"][0]["calls"] == 1
