"""Normalisation of an edge list in one call. Contracts: ``plugin_src/gcn_norm/gcn_norm.h``, ``laplacian/laplacian.h``,
``degrees/degrees.h`` and ``inverse_sums/inverse_sums_cpu.cpp``.

``gcn_norm_coo(edge_index [2, E], weight [E] | None, num_nodes, fill | None, to_target, dtype) -> edge_index' [2, E + N], weight'
[E + N]``, int64 and ``dtype``. With ``fill`` each node gets a loop and the weight of its loops is shared among them, so that sums
over the result are those of PyG, but not means; without, ``edge_index'`` is empty ``[2, 0]``, as the edges stay as they are. There
are no gradients.

``gcn_norm_listed``, with the same arguments, lists edges as PyG does, each node's loop once and at the end; ``laplacian_listed(
edge_index, weight, num_nodes, normalization, lambda_max | None, dtype)`` is ChebConv's; ``degrees(index [E], num_groups, dtype) ->
[num_groups]`` is what a mean divides by; ``inverse_sums(index [E], weight [E] | None, num_groups, dtype) -> [E]`` (CPU only) makes
sums over groups means, as HypergraphConv does. On a CPU all have PyG's bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.register_fake("gnnfast::gcn_norm_coo")
def _(edge_index: Tensor, weight: Any, num_nodes: int, fill: Any, to_target: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    edges = edge_index.shape[1]
    size = edges if fill is None else edges + num_nodes
    made = edge_index.new_empty(2, 0 if fill is None else size, dtype=torch.int64)
    return made, edge_index.new_empty(size, dtype=dtype)


@torch.library.register_fake("gnnfast::gcn_norm_listed")
def _(edge_index: Tensor, weight: Any, num_nodes: int, fill: Any, to_target: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    size = edge_index.shape[1] if fill is None else torch.library.get_ctx().new_dynamic_size()
    made = edge_index.new_empty(2, 0 if fill is None else size, dtype=torch.int64)
    return made, edge_index.new_empty(size, dtype=dtype)


@torch.library.register_fake("gnnfast::laplacian_listed")
def _(
    edge_index: Tensor, weight: Any, num_nodes: int, normalization: int, lambda_max: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return edge_index.new_empty(2, size, dtype=torch.int64), edge_index.new_empty(size, dtype=dtype)


@torch.library.register_fake("gnnfast::inverse_sums")
def _(index: Tensor, weight: Any, num_groups: int, dtype: torch.dtype) -> Tensor:
    return index.new_empty(index.shape, dtype=dtype)


@torch.library.register_fake("gnnfast::degrees")
def _(index: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    return index.new_empty(num_groups, dtype=dtype)
