"""GCN normalisation of an edge list in one call. Contract: ``plugin_src/gcn_norm/gcn_norm.h``.

``gcn_norm_coo(edge_index [2, E], weight [E] | None, num_nodes, fill | None, to_target, dtype) -> edge_index' [2, E + N], weight'
[E + N]``, int64 and ``dtype``. With ``fill`` each node gets a loop and the weight of its loops is shared among them, so that sums
over the result are those of PyG, but not means; without, ``edge_index'`` is empty ``[2, 0]``, as the edges stay as they are. There
are no gradients.
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
