"""Sums of columns, and products and sums whose bias gets them as its gradient, against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from gnnfast.dispatch import bias as dispatch
from gnnfast.ops import bias as ops

NEAR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [(0, 4), (5, 0), (1, 1), (7, 3), (300, 47), (5000, 128), (40_000, 1), (33, 1500), (2_000_003, 2)]


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("shape", SHAPES)
def test_column_sums(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    found, expected = torch.ops.gnnfast.column_sums(x), x.double().sum(0)
    assert found.dtype == dtype and found.shape == expected.shape
    assert float((found.double() - expected).norm()) <= NEAR[dtype] * float(x.double().norm(dim=0).norm() + expected.norm())
    assert torch.equal(found, torch.ops.gnnfast.column_sums(x))


def test_column_sums_of_what_is_not_contiguous_or_aligned(device: torch.device) -> None:
    wide = torch.randn(50, 33, device=device)
    for x in (wide[:, 1:], wide.t(), wide[:1].expand(50, -1), torch.randn(50 * 32 + 1, device=device)[1:].view(50, 32)):
        torch.testing.assert_close(ops.column_sums(x), x.sum(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.ops.gnnfast.column_sums(x), x.sum(0), rtol=1e-5, atol=1e-5)


def test_column_sums_say_what_is_wrong(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="x must have 2 dimensions"):
        torch.ops.gnnfast.column_sums(torch.randn(3, device=device))


def test_op(device: torch.device) -> None:
    x = torch.randn(7, 6, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.gnnfast.column_sums.default, (x,))
    exact = torch.randn(7, 6, dtype=torch.float64, device=device, requires_grad=True)
    torch.autograd.gradcheck(ops.column_sums, (exact,))
    torch.autograd.gradgradcheck(ops.column_sums, (exact,))


def _operands(device: torch.device, needs: tuple[bool, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = (9, 5), (4, 5), (4,)
    return [torch.randn(s, dtype=dtype, device=device, requires_grad=need) for s, need in zip(shapes, needs)]


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, True), (True, False, True), (False, False, True)])
def test_derivatives(device: torch.device, needs: tuple[bool, ...]) -> None:
    x, weight, bias = _operands(device, needs)
    for function in (lambda x, w, b: ops.LINEARS(x, w, b)[0], lambda x, w, b: ops.BIASED(x.matmul(w.t()), b)):
        out, expected = function(x, weight, bias), functional.linear(x, weight, bias)
        torch.testing.assert_close(out, expected)
        wanted = [t for t in (x, weight, bias) if t.requires_grad]
        grad = torch.randn_like(out)
        for ours, theirs in zip(torch.autograd.grad(out, wanted, grad), torch.autograd.grad(expected, wanted, grad)):
            torch.testing.assert_close(ours, theirs)
        torch.autograd.gradcheck(function, (x, weight, bias))
        torch.autograd.gradgradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "of a sum"])
@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2), (1,)])
def test_several_layers_of_the_same_rows(device: torch.device, used: tuple[int, ...], dense: bool) -> None:
    """Of which some may not be used, and some have no bias."""
    x, weight, bias = _operands(device, (True, True, True))
    other = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    operands = (x, weight, bias, other, None, weight, bias)
    inputs = [t for t in (x, weight, bias, other) if t is not None]

    def by_torch() -> tuple[torch.Tensor, ...]:
        return functional.linear(x, weight, bias), functional.linear(x, other), functional.linear(x, weight, bias)

    def gradients(outs: tuple[torch.Tensor, ...], create: bool = False) -> list[torch.Tensor | None]:
        loss = sum((outs[i].square() if dense else outs[i]).sum() * (i + 1) for i in used)
        return [*torch.autograd.grad(loss, inputs, create_graph=create, allow_unused=True)]

    for found, expected in zip(gradients(ops.LINEARS(*operands)), gradients(by_torch())):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected)
    if dense:
        seconds = []
        for outs in (ops.LINEARS(*operands), by_torch()):
            norm = sum(g.square().sum() for g in gradients(outs, create=True) if g is not None)
            seconds.append(torch.autograd.grad(norm, inputs, allow_unused=True))
        for found, expected in zip(*seconds):
            if expected is not None:
                torch.testing.assert_close(found, expected)


def test_a_backward_pass_alone_under_autocast(device: torch.device) -> None:
    x, weight, bias = _operands(device, (True, True, True), torch.float32)
    outs = ops.LINEARS(x, weight, bias, weight, None)
    with torch.autocast(device.type, torch.bfloat16):
        (outs[0] + outs[1]).sum().backward()
    torch.testing.assert_close(x.grad, 2 * weight.sum(0).expand_as(x), rtol=0.05, atol=0.05)


class Stopped(torch.autograd.Function):
    """Gives what comes before no gradient, not one of zeros."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> None:
        return None


def test_gradients_in_batches(device: torch.device) -> None:
    x, weight, bias = _operands(device, (True, True, True))
    grads = torch.randn(3, 9, 4, dtype=torch.float64, device=device)
    expected = functional.linear(x, weight, bias)
    for out in (ops.LINEARS(x, weight, bias)[0], ops.BIASED(x @ weight.t(), bias)):
        found, wanted = (
            torch.autograd.grad(t, (x, weight, bias), grads, is_grads_batched=True, retain_graph=True) for t in (out, expected)
        )
        for ours, theirs in zip(found, wanted):
            torch.testing.assert_close(ours, theirs)


def test_no_gradient_is_none(device: torch.device) -> None:
    x, weight, bias = _operands(device, (True, True, True))
    for out in (ops.LINEARS(x, weight, bias)[0], ops.BIASED(x @ weight.t(), bias)):
        Stopped.apply(out).sum().backward()
        assert x.grad is None and weight.grad is None and bias.grad is None


def test_torch_has_what_is_not_served(device: torch.device) -> None:
    x, weight, bias = _operands(device, (True, True, True), torch.float32)

    def names(out: torch.Tensor) -> bool:
        return type(out.grad_fn).__name__ in ("_LinearsBackward", "_BiasedBackward")

    assert names(dispatch.linear(x, weight, bias)) == names(dispatch.biased(x @ weight.t(), bias)) == (device.type == "cuda")

    assert not names(dispatch.linear(x, weight, None)) and not names(dispatch.linear(x, weight, bias.detach()))
    with torch.overrides.BaseTorchFunctionMode():
        assert not names(dispatch.linear(x, weight, bias))
    with torch.no_grad():
        assert dispatch.linear(x, weight, bias).grad_fn is None
    assert dispatch.linear(x.view(3, 3, 5), weight, bias).shape == (3, 3, 4)
    assert not names(dispatch.biased(x, torch.randn(1, device=device, requires_grad=True)))
    with torch.autocast(device.type, torch.bfloat16):
        assert dispatch.linear(x, weight, bias).dtype == torch.bfloat16
    out = torch.func.vmap(dispatch.linear, (0, None, None))(x.view(3, 3, 5), weight, bias)
    torch.testing.assert_close(out.view(9, 4), functional.linear(x, weight, bias))
    with pytest.raises(RuntimeError):
        dispatch.linear(x[:, :3], weight, bias)
    with pytest.raises(RuntimeError):
        dispatch.biased(x, bias)
