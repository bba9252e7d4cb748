"""Softmax over groups of rows: on a CPU the bits of PyG's, gradients, and opcheck."""

from __future__ import annotations

import pytest
import torch
from comparison import without
from graphs import GRAPHS
from torch_geometric.utils import softmax

from gnnfast.graph import ids

op, backward = torch.ops.gnnfast.softmax_coo.default, torch.ops.gnnfast.softmax_coo_backward.default

SHAPES = {name: lambda make=make: (make()[0][1], make()[2]) for name, make in GRAPHS.items()}
SHAPES["large groups, one after the other"] = lambda: (torch.arange(5).repeat_interleave(333), 5)
SHAPES["every other in one group"] = lambda: (torch.where(torch.arange(2000) % 2 == 0, torch.arange(2000) * 7 % 40, 11), 40)
SHAPES["half in one group"] = lambda: (torch.where(rows(torch.arange(2000), (), torch.float32) > 0, 5, torch.arange(2000) % 40), 40)
SHAPES["many groups"] = lambda: (torch.arange(0, 300_001, 7), 300_001)


def rows(index, shape, dtype):
    return 3 * torch.randn(*index.shape, *shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def same(found, expected, device):
    """On a GPU sums are those of atomics."""
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True, **(dict(rtol=0, atol=0) if device.type == "cpu" else {}))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (12,), (16,), (3, 8), (128,), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_like_pyg(name, dtype, shape, device):
    index, groups = SHAPES[name]()
    src = rows(index, shape, dtype).requires_grad_()
    expected = without(lambda: softmax(src, index, num_nodes=groups))
    found = op(src.to(device), index.to(device), groups)
    assert found.dtype is dtype and found.is_contiguous() and expected.is_contiguous()
    same(found, expected, device)
    grad = torch.randn_like(expected)
    (to_src,), (wanted,) = torch.autograd.grad(found, src, grad.to(device)), torch.autograd.grad(expected, src, grad)
    assert (to_src - wanted).norm() <= torch.finfo(dtype).eps * 8 * grad.norm()  # differences that cancel


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_what_is_not_contiguous(ids, device):
    index, groups = SHAPES["random"]()
    src, index = rows(index, (6,), torch.float64).t().contiguous().t()[:, ::2], index.to(ids).repeat_interleave(2)[::2]
    on_device = src.t().to(device).t(), index.to(device).repeat_interleave(2)[::2]
    same(op(*on_device, groups), op(src.contiguous(), index.contiguous(), groups), device)
    grad = torch.randn(3, src.shape[0], dtype=torch.float64).t()
    found = backward(on_device[0], grad.t().to(device).t(), on_device[1], groups)
    same(found, backward(src, grad.contiguous(), index, groups), device)


def test_numbers_that_begin_between_vectors(device):
    index, groups = SHAPES["random"]()
    src = rows(index, (8,), torch.float32)
    shifted = torch.cat([src.new_zeros(1), src.view(-1)]).to(device)[1:].view(src.shape)
    assert shifted.data_ptr() % 16
    same(op(shifted, index.to(device), groups), op(src, index, groups), device)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(value, device):
    src, index = torch.tensor([1.0, value, 2.0, 3.0, value, value]), torch.tensor([0, 0, 0, 1, 2, 2])
    same(op(src.to(device), index.to(device), 4), without(lambda: softmax(src, index, num_nodes=4)), device)


def test_gradients_of_gradients(device):
    index = torch.tensor([0, 1, 1, 3, 0, 1], device=device)
    src = torch.randn(6, 2, dtype=torch.float64, requires_grad=True, device=device)
    assert torch.autograd.gradcheck(lambda s: op(s, index, 4), (src,))
    assert torch.autograd.gradgradcheck(lambda s: op(s, index, 4), (src,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(index=torch.zeros(3, dtype=torch.int64)), "index must have size 4 in dimension 0, got shape \\[3\\]"),
        (dict(index=torch.zeros(4, 1, dtype=torch.int64)), "index must have 1 dimensions, got shape \\[4, 1\\]"),
        (dict(index=torch.zeros(4)), "index has dtype Float; accepted are int32 and int64"),
        (dict(index=torch.tensor([0, 1, 3, 2])), "index 3 is out of range \\[0, 3\\)"),
        (dict(index=torch.tensor([0, -1, 1, 2])), "index -1 is out of range \\[0, 3\\)"),
        (dict(src=torch.zeros(())), "src must have a dimension"),
        (dict(src=torch.zeros(4).half()), "src must be float32 or float64"),
        (dict(num_groups=-1), "the number of groups must not be negative, got -1"),
    ],
)
def test_wrong_arguments(change, message):
    given = dict(src=torch.zeros(4, 2), index=torch.tensor([0, 1, 0, 2]), num_groups=3)
    with pytest.raises(RuntimeError, match=message):
        op(*(given | change).values())


def test_a_wrong_gradient():
    with pytest.raises(RuntimeError, match="grad must have the shape of src, \\[4, 2\\], got \\[4, 1\\]"):
        backward(torch.zeros(4, 2), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), 3)


def test_a_group_that_does_not_exist_on_a_gpu():
    """Its rows are 0, and those of others as they would be alone."""
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    src, index = torch.randn(4, 2), torch.tensor([0, 7, 1, 0])
    ids.watch(index.cuda())
    found, kept = op(src.cuda(), index.cuda(), 3).cpu(), [0, 2, 3]
    torch.testing.assert_close(found[kept], op(src[kept], index[kept], 3))
    assert not found[1].any()
    with pytest.raises(IndexError, match="index 7 of an edge is out of range \\[0, 3\\)"):
        torch.cuda.synchronize()


def test_opcheck(device):
    index, groups = SHAPES["random"]()
    src, index = rows(index, (3,), torch.float32).to(device).requires_grad_(), index.to(device)
    # Sums by atomics are not the same twice.
    checks = {} if device.type == "cpu" else dict(test_utils=["test_schema", "test_autograd_registration", "test_faketensor"])
    torch.library.opcheck(op, (src, index, groups), **checks)
    torch.library.opcheck(backward, (src.detach(), torch.randn_like(src), index, groups), **checks)
