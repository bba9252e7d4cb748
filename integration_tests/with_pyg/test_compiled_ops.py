"""The ops that compiled models call: opcheck, and their gradients."""

from __future__ import annotations

import pytest
import torch
from compiling import F, fresh, graph_of  # noqa: F401

from gnnfast import _native

pytest.importorskip("torch_geometric", reason="PyG is not installed")
if not _native.cpu.loaded:
    pytest.skip(_native.cpu.reason, allow_module_level=True)

from gnnfast.ops.edge_gate import WEIGHT, role
from gnnfast.pyg.compiled import ops
from gnnfast.types import ACTIVATIONS, KINDS


def _cases(device, graph="random"):
    x, edge_index, weight = graph_of(graph, device)
    n = x.shape[0]
    plain, looped, listed, incidence = (
        (edge_index, n, n, True, form, "test") for form in ("given", "looped", "listed", "incidence")
    )
    x, weight = x.requires_grad_(), weight.requires_grad_()
    scores = [torch.randn(n, 2, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    att, seed = torch.randn(F, dtype=torch.float64, device=device, requires_grad=True), torch.tensor([5], device=device)
    other = torch.randn(n, F, dtype=torch.float64, device=device, requires_grad=True)
    for turned in (False, True):
        yield ops.SPMM, (x, weight, turned, False, True, turned, *plain)
        yield ops.GCN, (x, None, False, False, True, turned, *looped)
    yield ops.SDDMM, (x, other, 2, True, *plain)
    yield ops.SPMM_BACKWARD, (other, x, weight, True, *plain)
    yield ops.EXTREMUM, (x, weight, False, True, *plain)
    yield ops.EXTREMUM, (x.detach(), None, True, False, *plain)
    yield ops.ATTENTION, (x, *scores, 0.2, 0.5, seed, True, *looped)
    yield ops.ATTENTION, (x.detach(), *(s.detach() for s in scores), 0.2, 0.0, None, False, *plain)
    yield ops.PAIR_ATTENTION, (x, other, other, None, None, 2, 0.3, 0.0, None, True, *plain)
    yield ops.PAIR_ATTENTION, (x, other, None, att, None, 2, 0.2, 0.5, seed, True, *looped)
    # Of edges and the loops that are added, of which some rows do not exist.
    rows = torch.randn(edge_index.shape[1] + n, F, dtype=torch.float64, device=device, requires_grad=True)
    most = rows[:, :2].detach().requires_grad_()
    yield ops.PAIR_ATTENTION, (x, other, None, att, rows, 2, 0.2, 0.5, seed, True, *listed)
    yield ops.SPMM, (x, most, False, False, True, False, *listed)
    yield ops.SDDMM, (x, other, 2, False, *listed)
    yield ops.SOFTMAX, (most, *scores, 0.2, *listed)
    own = rows[: edge_index.shape[1]].detach().requires_grad_()
    yield ops.SOFTMAX, (own, None, None, 1.0, *plain)
    yield ops.SPMM, (own, weight, False, False, True, False, *incidence)
    yield ops.SDDMM, (x, own, 2, False, *incidence)
    yield ops.WITH_LOOPS, (own, None, *listed)
    yield ops.WITH_LOOPS, (own, 0.5, *listed)
    kinds = [*KINDS.values()]
    yield ops.REDUCTIONS, (x, other, kinds, True, *plain)
    yield ops.REDUCTIONS, (own, other, kinds[:3], True, *incidence)
    yield ops.REDUCTIONS, (x.detach(), other.detach(), kinds[2:], False, *plain)
    yield ops.REDUCTIONS, (x, None, kinds[:2], True, *plain)
    yield ops.SOFTENED, (x, att, 1.0, True, *plain)
    yield ops.SOFTENED, (own, None, 0.5, True, *incidence)
    yield ops.SOFTENED, (x.detach(), None, 2.0, False, *plain)
    yield ops.DEGREE, plain
    yield ops.RELU, (x, own, True, *plain)
    yield ops.RELU, (x.detach(), own.detach(), False, *plain)
    parts, acts = [x, other, own, own.detach()[:, :1]], [ACTIVATIONS["tanh"], ACTIVATIONS["sigmoid"]]
    roles = [role(0, "src"), role(0, "scale"), role(1, "edge"), WEIGHT]
    yield ops.GATE, (parts, roles, acts, True, True, *plain)
    yield ops.GATE, ([t.detach() for t in parts], roles, acts, False, False, *plain)


def test_ops(device):
    for op, arguments in _cases(device):
        torch.library.opcheck(op, arguments)


def test_ops_of_sums_have_second_derivatives(device):
    for op, arguments in (*_cases(device, "self_loops_and_duplicates"), *_cases(device, "isolated")):
        if op not in (ops.SPMM, ops.GCN, ops.SDDMM, ops.SPMM_BACKWARD):
            continue
        leaves = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
        tail = arguments[len(leaves) :]
        assert torch.autograd.gradcheck(lambda *t, op=op, tail=tail: op(*t, *tail), leaves)
        assert torch.autograd.gradgradcheck(lambda *t, op=op, tail=tail: op(*t, *tail), leaves)


def test_gradients_that_are_not_there_are_an_error(device):
    for op, arguments in _cases(device):
        of = arguments[0][0] if op is ops.GATE else arguments[0]
        if op not in (ops.SPMM, ops.GCN, ops.SDDMM, ops.SPMM_BACKWARD) and of.requires_grad:
            out = op(*arguments)
            out = out if isinstance(out, torch.Tensor) else out[0]
            (grad,) = torch.autograd.grad(out.pow(2).sum(), of, create_graph=True)
            with pytest.raises(RuntimeError, match="second derivative"):
                grad.sum().backward()
