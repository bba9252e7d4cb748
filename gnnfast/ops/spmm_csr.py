"""SpMM over a matrix of torch's CSR as it is, on CUDA alone and without a gradient. Contract: ``plugin_src/spmm_csr/spmm_csr.h``.

``spmm_csr(rowptr [M + 1], col [E], value [E], x [N, F], mean) -> [M, F]``, sums or means of rows; pointers and columns are both
int32 or int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfast.ops.convert import out_of_memory

_spmm_csr = torch.ops.gnnfast.spmm_csr.default


@torch.library.register_fake("gnnfast::spmm_csr")
def _(rowptr: Tensor, col: Tensor, value: Tensor, x: Tensor, mean: bool) -> Tensor:
    return x.new_empty(rowptr.shape[0] - 1, x.shape[1])


def multiply_csr(rowptr: Tensor, col: Tensor, value: Tensor, x: Tensor, mean: bool) -> Tensor:
    """Calls it, of which nobody needs a gradient."""
    try:
        return _spmm_csr(rowptr, col, value, x, mean)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise out_of_memory(error) from None
