"""COO to CSR. Contract: ``plugin_src/graph/convert.h``."""

from __future__ import annotations

import torch
from torch import Tensor


def coo_to_csr(row: Tensor, column: Tensor, num_rows: int, num_cols: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sorts edges by row, stably.

    Args:
        row: ``[num_edges]``, int32 or int64, any order.
        column: ``[num_edges]``, the same dtype.

    Returns:
        ``rowptr [num_rows + 1]``, ``col [num_edges]`` and ``perm [num_edges]`` (the edge id of each slot; ``None`` where rows
        came sorted, so that slots are edge ids), all int32.

    Raises:
        IndexError: an index is out of range.
        ValueError: the graph has 2^31 - 1 or more nodes or edges.
    """
    try:
        rowptr, col, perm = torch.ops.gnnfast.coo_to_csr(row, column, num_rows, num_cols)
    except RuntimeError as error:
        raise _typed(error) from None
    return rowptr, col, perm if perm.numel() else None


def check_coo(row: Tensor, column: Tensor, num_rows: int, num_cols: int) -> None:
    """Checks index ranges only; raises as :func:`coo_to_csr`."""
    try:
        torch.ops.gnnfast.check_coo(row, column, num_rows, num_cols)
    except RuntimeError as error:
        raise _typed(error) from None


def _typed(error: RuntimeError) -> Exception:
    message = str(error).splitlines()[0] if str(error) else ""
    start = message.find("gnnfast: ")
    if start < 0:
        return error
    message = message[start + len("gnnfast: ") :]
    if "out of range" in message:
        return IndexError(message)
    return ValueError(message)


@torch.library.register_fake("gnnfast::coo_to_csr")
def _(row: Tensor, column: Tensor, num_rows: int, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = torch.library.get_ctx().new_dynamic_size()
    return (
        row.new_empty(num_rows + 1, dtype=torch.int32),
        row.new_empty(row.shape[0], dtype=torch.int32),
        row.new_empty(slots, dtype=torch.int32),
    )


@torch.library.register_fake("gnnfast::check_coo")
def _(row: Tensor, column: Tensor, num_rows: int, num_cols: int) -> None:
    return None
