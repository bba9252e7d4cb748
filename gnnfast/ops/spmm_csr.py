"""SpMM over a matrix of torch's CSR as it is, on CUDA alone. Contract: ``plugin_src/spmm_csr/spmm_csr.h``.

``spmm_csr(rowptr [M + 1], col [E], value [E], x [N, F], mean) -> [M, F]``, sums or means of rows; pointers and columns are both
int32 or int64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfast.guards import is_batched
from gnnfast.ops.convert import coo_to_formats, out_of_memory
from gnnfast.ops.spmm import apply_of, below_autograd

_ops = torch.ops.gnnfast
_spmm_csr = _ops.spmm_csr.default


@torch.library.register_fake("gnnfast::spmm_csr")
def _(rowptr: Tensor, col: Tensor, value: Tensor, x: Tensor, mean: bool) -> Tensor:
    return x.new_empty(rowptr.shape[0] - 1, x.shape[1])


class _Product(torch.autograd.Function):
    """The product, whose gradient for ``x`` is that with the transpose, made anew: torch's is the same from run to run, so that it
    is not scattered, but where it is batched."""

    @staticmethod
    def forward(ctx: Any, rowptr: Tensor, col: Tensor, value: Tensor, x: Tensor, mean: bool) -> Tensor:
        ctx.mean, ctx.num_cols = mean, x.shape[0]
        ctx.save_for_backward(rowptr, col, value)
        with below_autograd():
            return _spmm_csr(rowptr, col, value, x, mean)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rowptr, col, value = ctx.saved_tensors
        row = _ops.csr_rows.default(rowptr, col.numel())
        if ctx.mean:
            grad = grad / rowptr.diff().clamp_(min=1).unsqueeze(1)
        if is_batched(grad):
            to_x = grad.new_zeros(ctx.num_cols, grad.shape[1]).index_add(0, col, grad.index_select(0, row) * value.unsqueeze(1))
        else:
            with below_autograd():
                ptr, idx, perm, *_ = coo_to_formats(col, row, ctx.num_cols, rowptr.numel() - 1, False, False)
                of_slots = value.index_select(0, perm)
            to_x = multiply_csr(ptr, idx, of_slots, grad, False)
        return None, None, None, to_x, None


_apply = apply_of(_Product)


def multiply_csr(rowptr: Tensor, col: Tensor, value: Tensor, x: Tensor, mean: bool) -> Tensor:
    """Calls it, so that it can be differentiated for ``x``, also twice."""
    try:
        if torch.is_grad_enabled() and x.requires_grad:
            return _apply(rowptr, col, value, x, mean)  # type: ignore[no-any-return]
        return _spmm_csr(rowptr, col, value, x, mean)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise out_of_memory(error) from None
