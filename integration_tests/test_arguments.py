"""No public argument, whatever it holds, ends the process or raises an error that does not help."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from graphs import GRAPHS, relative_error

import gnnfast
from gnnfast import Graph


def test_every_argument_of_every_function():
    script = Path(__file__).with_name("arguments.py")
    done = forked.run([str(script)], script.parent, dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    *complaints, calls = done.stdout.splitlines()
    assert not complaints, "\n".join(complaints)
    assert int(calls.split()[0]) > 2000


PTR, COL = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    "perm,error,message",
    [
        (torch.tensor([0, 1, 2, 4]), IndexError, r"perm index 4 is out of range \[0, 4\)"),
        (torch.tensor([0, 1, 2, 10**9]), IndexError, "perm index 1000000000 is out of range"),
        (torch.tensor([0, 1, 2, 2**32 + 3]), IndexError, "perm index 4294967299 is out of range"),
        (torch.tensor([0, -1, 2, 3]), IndexError, "perm index -1 is out of range"),
        (torch.tensor([0, 1, 1, 1]), ValueError, "perm must hold each edge id once"),
        (torch.tensor([0.5, 1.0, 2.0, 3.0]), TypeError, "perm holds ids and must be int32 or int64, got torch.float32"),
        (torch.tensor([0, 1, 2]), ValueError, r"perm must have the shape of (col|row) \[4\], got \[3\]"),
        ([0, 1, 2, 3], TypeError, "perm must be a torch.Tensor, got list"),
    ],
)
@pytest.mark.parametrize("make", [Graph.from_csr, Graph.from_csc])
def test_perm(make, perm, error, message, device):
    perm = perm.to(device) if isinstance(perm, torch.Tensor) else perm
    with pytest.raises(error, match=message):
        make(PTR.to(device), COL.to(device), 4, perm)


def test_rowptr_that_ascends_by_overflow(device):
    edges = 4
    rowptr = torch.tensor([0, 2**63 - 1, -(2**63) + edges + 1, edges], device=device)
    assert (rowptr.diff() > 0).all()
    with pytest.raises(ValueError, match="rowptr must ascend from 0 to num_edges = 4"):
        Graph.from_csr(rowptr, COL.to(device), 4)


@pytest.mark.parametrize("nodes", [np.int64(4), torch.tensor(4), np.int32(4), (np.int64(4), torch.tensor(4)), [4, 4]])
def test_sizes(nodes, device):
    edge_index = torch.tensor([[0, 3], [1, 2]], device=device)
    assert Graph.from_edge_index(edge_index, nodes).num_dst == 4


@pytest.mark.parametrize("nodes", [4.0, "4", torch.tensor(4.0), None, True, (4,), ("a", 4), object()])
def test_sizes_that_are_none(nodes):
    with pytest.raises((TypeError, ValueError), match="num_"):
        Graph.from_coo(COL, COL, nodes, nodes)


def test_ids_that_change_after_the_check(device):
    """The ids of COO are the user's memory: kernels do not trust them."""
    edge_index, num_src, num_dst = GRAPHS["random"]()
    edge_index = edge_index.to(device)
    graph = Graph.from_edge_index(edge_index, (num_src, num_dst))
    x = torch.randn(num_src, 8, device=device, requires_grad=True)
    w = torch.rand(edge_index.shape[1], device=device, requires_grad=True)
    with gnnfast.override(kernel="gas"):
        gnnfast.spmm(graph, x, w)
        for bad in (10**9, -(10**9)):
            edge_index[0, ::2] = edge_index[1, 1::2] = bad
            with pytest.raises(IndexError if device.type == "cuda" else RuntimeError, match="out of range"):
                out = gnnfast.spmm(graph, x, w)
                grads = torch.autograd.grad(out.sum() + gnnfast.sddmm(graph, x, x).sum(), (x, w))
                assert all(not t.any() for t in (out, grads[1]))
                torch.cuda.synchronize()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda g: pickle.loads(pickle.dumps(g))])
@pytest.mark.parametrize("form", ["coo", "csr", "csc", "reversed"])
def test_copies(form, copied, device):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]()
    graph = Graph.from_edge_index(edge_index.to(device), (num_src, num_dst))
    if form in ("csr", "csc"):
        csr = getattr(graph, form)
        make, columns = (Graph.from_csr, num_src) if form == "csr" else (Graph.from_csc, num_dst)
        graph = make(csr.rowptr, csr.col, columns, csr.perm)
    elif form == "reversed":
        graph = graph.reverse()
    x, w = torch.randn(graph.num_src, 8, device=device), torch.rand(graph.num_edges, device=device)
    expected = gnnfast.spmm(graph, x, w)
    with gnnfast.override(kernel="gar"):
        gnnfast.spmm(graph, x.requires_grad_(), None, "mean").sum().backward()  # for which degrees are kept with an array
    assert relative_error(gnnfast.spmm(copied(graph), x, w), expected) < 1e-6
    for found, array in zip(copied(graph.csr), graph.csr):
        assert found == array if not isinstance(array, torch.Tensor) else torch.equal(found, array)


def test_a_graph_holds_copies_of_compressed_arrays(device):
    ptr, col, perm = PTR.int().to(device), COL.int().to(device), COL.int().flip(0).to(device)
    graph = Graph.from_csr(ptr, col, 4, perm)
    x, w = torch.randn(4, 3, device=device), torch.rand(4, device=device)
    expected = gnnfast.spmm(graph, x, w)
    for t in (ptr, col, perm):
        t.fill_(10**9)
    assert torch.equal(gnnfast.spmm(graph, x, w), expected)


def test_messages_do_not_name_files_of_the_build(device):
    args = Graph.from_edge_index(torch.zeros(2, 3, dtype=torch.long, device=device), 2).args(False)
    with pytest.raises(RuntimeError) as error:
        torch.ops.gnnfast.spmm(*args, torch.ones(3, device=device), None, torch.ones(2, 2, device=device).double(), False)
    assert str(error.value).startswith("gnnfast: weight must have dtype Double, got Float")
    assert ".h" not in str(error.value)


def test_emptied_storage(device):
    graph, x = Graph.from_csr(PTR.to(device), COL.to(device)), torch.rand(4, 3, device=device)
    for name in ("x", "weight"):
        empty = torch.rand(4, 3, device=device) if name == "x" else torch.rand(4, device=device)
        empty.untyped_storage().resize_(4)
        with pytest.raises(ValueError, match=f"{name} has shape .*, but its storage holds 4 bytes"):
            gnnfast.spmm(graph, **({"x": x} | {name: empty}))


def test_forward_mode_is_refused(device):
    graph, x = Graph.from_csr(PTR.to(device), COL.to(device)), torch.rand(4, 3, device=device)
    with pytest.raises(RuntimeError, match="gnnfast has no forward-mode derivatives"):
        torch.func.jvp(lambda v: gnnfast.spmm(graph, v), (x,), (x,))
