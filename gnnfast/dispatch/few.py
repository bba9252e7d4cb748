"""Attention over an edge list by torch's operations: what a framework does with a small graph that is new, with as few of them as
there can be. On such graphs the host decides, and to convert them costs what kernels save."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Few(NamedTuple):
    """The edges ``src [E]``, ``dst [E]`` of a small graph; those of ``hidden [E]`` bool count as none."""

    src: Tensor
    dst: Tensor
    hidden: Tensor | None
    num_src: int
    num_dst: int


def few_edges(edge_index: Tensor, num_src: int, num_dst: int) -> Few:
    """Those of ``edge_index [2, E]``."""
    src, dst = edge_index.unbind()
    return Few(src, dst, None, num_src, num_dst)


def few_edges_and_loops(edge_index: Tensor, num_src: int, num_dst: int) -> Few:
    """Those of ``edge_index [2, E]``, where each node has one loop in place of those it had: these are hidden and not taken out, as
    how many there are only the device knows."""
    with torch.no_grad(), torch.inference_mode(False):
        own = torch.arange(min(num_src, num_dst), device=edge_index.device)
        src, dst = torch.cat([edge_index, own.expand(2, -1)], 1).unbind()
        hidden = src == dst
        hidden[edge_index.shape[1] :] = False
        return Few(src, dst, hidden, num_src, num_dst)


def attend(few: Few, score: Callable[[Tensor, Tensor], Tensor], values: Tensor, dropout: float) -> Tensor:
    """``values [num_src, H, D]``, gathered by edge, weighted by the softmax of a score ``[E, H]`` of these and ``dst [E]``:
    ``[num_dst, H D]``. Divides by the sum and 1e-16, as PyG does."""
    gathered = values.index_select(0, few.src)
    s = score(gathered, few.dst)
    heads, index = s.shape[1], few.dst.unsqueeze(1).expand_as(s)
    if few.hidden is not None:
        s = s.masked_fill(few.hidden.unsqueeze(1), -torch.inf)
    most = s.new_full((few.num_dst, heads), -torch.inf).scatter_reduce_(0, index, s.detach(), "amax")
    share = (s - most.index_select(0, few.dst)).exp()
    total = share.new_zeros(few.num_dst, heads).scatter_add_(0, index, share) + 1e-16
    share = share / total.index_select(0, few.dst)
    if dropout:
        share = torch.nn.functional.dropout(share, p=dropout, training=True)
    messages = (gathered * share.unsqueeze(-1)).flatten(1)
    return messages.new_zeros(few.num_dst, messages.shape[1]).scatter_add_(0, few.dst.unsqueeze(1).expand_as(messages), messages)
