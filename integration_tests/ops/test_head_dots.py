"""Dot products of heads with shared vectors, and their gradients, against the same in torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnfast.dispatch import execute

SHAPES = [(5, 2, 3), (70, 8, 32), (33, 1, 40), (9, 3, 16), (4000, 4, 16), (3, 1, 1500), (1, 1, 1), (0, 2, 4), (6, 2, 0)]


def by_torch(x: Tensor, vectors: Tensor) -> Tensor:
    heads, width = vectors.shape[1:]
    return torch.stack([(x.view(x.shape[0], heads, width) * v).sum(-1) for v in vectors])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_torch_computes_them(device: torch.device, dtype: torch.dtype, count: int, shape: tuple[int, int, int]) -> None:
    rows, heads, width = shape
    torch.manual_seed(0)
    x = torch.randn(rows, heads * width, device=device).to(dtype).requires_grad_()
    vectors = torch.randn(count, heads, width, device=device).to(dtype).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, vectors)]
    out, expected = execute.head_dots(x, vectors), by_torch(*exact)
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(out, (x, vectors), grad.to(dtype))
    wanted = torch.autograd.grad(expected, exact, grad.to(dtype).double())
    near = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for ours, theirs in zip((out.detach(), *found), (expected.detach(), *wanted)):
        assert ours.dtype == dtype
        assert float((ours.double() - theirs).norm()) <= near * float(theirs.norm())


@pytest.mark.parametrize("count", [1, 2])
def test_derivatives(device: torch.device, count: int) -> None:
    x = torch.randn(7, 6, dtype=torch.float64, device=device, requires_grad=True)
    vectors = torch.randn(count, 2, 3, dtype=torch.float64, device=device, requires_grad=True)
    torch.autograd.gradcheck(execute.head_dots, (x, vectors))
    torch.autograd.gradgradcheck(execute.head_dots, (x, vectors))
    torch.autograd.gradgradcheck(lambda v: execute.head_dots(x.detach(), v), (vectors,))


def test_op(device: torch.device) -> None:
    x = torch.randn(7, 6, device=device, requires_grad=True)
    vectors = torch.randn(2, 6, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.gnnfast.head_dots.default, (x, vectors, 3))
    grad = torch.randn(2, 7, 3, device=device)
    for need_x in (True, False):
        torch.library.opcheck(torch.ops.gnnfast.head_dots_backward.default, (x, vectors, grad, 3, need_x))


def test_rows_that_are_not_contiguous_or_aligned(device: torch.device) -> None:
    wide = torch.randn(50, 33, device=device)
    vectors = torch.randn(2, 4, 8, device=device)
    for x in (wide[:, 1:], torch.randn(32, 50, device=device).t(), torch.randn(50 * 32 + 1, device=device)[1:].view(50, 32)):
        torch.testing.assert_close(execute.head_dots(x, vectors), by_torch(x.contiguous(), vectors), rtol=1e-5, atol=1e-5)


def test_what_is_refused() -> None:
    op, x = torch.ops.gnnfast.head_dots.default, torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="heads = 4 must divide the 6 features"):
        op(x, torch.randn(1, 6), 4)
    with pytest.raises(RuntimeError, match="a must have 1 or 2 rows"):
        op(x, torch.randn(3, 6), 2)
