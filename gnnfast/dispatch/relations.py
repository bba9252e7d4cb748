"""Edges that have types, each with a matrix of its own, for the layers of any framework.

Edges of one type that end (or begin) in one node meet in a row. Most nodes have edges of a few types only: there are rows for
these, in the order of types, each matrix multiplies those of its own, and a second aggregation sums them up at nodes. Where so
little is to be multiplied that the number of operations counts, each node has rows of all types, side by side, which one product
multiplies by all matrices and sums up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import _native, guards
from gnnfast.cache import Held, cache, keep_if_captured, usable_later
from gnnfast.dispatch.execute import aggregate
from gnnfast.graph import Graph
from gnnfast.types import INDEX_DTYPES, REORDERED
from gnnfast.unsupported import Unsupported

if _native.cpu.loaded:
    from gnnfast.ops.convert import coo_facts


def listed(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Graph:
    """A graph of edges that are in range, and of which nobody else holds the ids."""
    src, dst = torch.stack([src, dst]).unbind()
    graph = Graph.of_ids(src, dst, num_src, num_dst, src.numel())
    graph.edges.grew(2 * src.nbytes)
    graph.edges.checked = True
    return graph


class Kept(Held):
    """What is kept with edges and their types, of which ``graphs`` are the large part."""

    def __init__(self, *graphs: Graph | None) -> None:
        super().__init__()
        for graph in graphs:
            if graph is not None:
                self.nbytes += graph.edges.nbytes
                graph.edges.account = self


class Relations(Kept):
    """The graph of edges ``into`` rows, one for each relation and node in which edges of it end, and that of rows ``onto`` nodes;
    ``counts`` are the numbers of rows of each relation, in the order of rows. Without ``onto``, each node has a row of each
    relation."""

    def __init__(self, into: Graph, onto: Graph | None = None, counts: tuple[int, ...] = ()) -> None:
        super().__init__(into, onto)
        self.into, self.onto, self.counts = into, onto, counts

    @classmethod
    def of(cls, src: Tensor, dst: Tensor, types: Tensor, num_src: int, num_dst: int, relations: int, all_rows: bool) -> Relations:
        """Of edges and their types, which are in range."""
        if all_rows:
            return cls(listed(src, dst * relations + types, num_src, num_dst * relations))
        row, node, counts = rows_there_are(dst, types, num_dst, relations)
        ids = torch.arange(node.numel(), device=row.device)
        return cls(listed(src, row, num_src, node.numel()), listed(ids, node, node.numel(), num_dst), counts)

    def multiplied(self, rows: Tensor, weight: Tensor, place: str, training: bool, dtype: torch.dtype | None = None) -> Tensor:
        """``rows`` times the matrices of their types, ``[R, F, O]`` or blocks, summed up at nodes in a ``dtype``: ``[N, O]``."""
        if self.onto is None:
            return (rows.view(-1, weight.shape[0] * rows.shape[1]) @ _fill(weight).flatten(0, 1)).to(dtype)
        return aggregate(self.onto, multiplied(rows, weight, self.counts).to(dtype), None, "sum", place=place, training=training)


class Rows(NamedTuple):
    """A row for each type of edges and node: of each ``edge``, ``[E]``; ``of_nodes`` is the graph of nodes to their rows, in the
    order of types, of which each has as many as ``counts`` says. Without it each node has a row of each type."""

    edge: Tensor
    number: int
    of_nodes: Graph | None = None
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, ids: Tensor, types: Tensor, num_nodes: int, relations: int, all_rows: bool = False) -> Rows:
        if all_rows:
            return cls(ids * relations + types, num_nodes * relations)
        row, node, counts = rows_there_are(ids, types, num_nodes, relations)
        order = torch.arange(node.numel(), device=row.device)
        return cls(row, node.numel(), listed(node, order, num_nodes, node.numel()), counts)

    def product(self, x: Tensor, weight: Tensor, place: str) -> Tensor:
        """The features of each row's node times the matrix of its type: ``[rows, O]``."""
        if self.of_nodes is not None:
            return multiplied(aggregate(self.of_nodes, x, None, "sum", place=place), weight, self.counts)
        if torch.is_grad_enabled() and weight.requires_grad:
            x = x.clone()  # which the user may write into before the backward pass
        weight = _fill(weight)
        return (x @ weight.transpose(0, 1).flatten(1)).view(self.number, weight.shape[2])


def filled(weight: Tensor) -> Tensor:
    """Blocks ``[R, B, F / B, O / B]`` as the matrices ``[R, F, O]``, if they are multiplied as such."""
    return _fill(weight) if are_filled(weight) else weight


def _fill(weight: Tensor) -> Tensor:
    if weight.dim() != 4:
        return weight
    diagonal = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    return torch.einsum("rbio,bc->rbico", weight, diagonal).flatten(3, 4).flatten(1, 2)


def are_filled(weight: Tensor) -> bool:
    """Whether blocks are multiplied as whole matrices, with zeros around them: on a GPU the gradients of batches of narrow
    products, few and long sums, take five times as long as four times as many products."""
    return weight.dim() == 4 and weight.is_cuda and weight.shape[1] <= FEW_BLOCKS


FEW_BLOCKS = 8


def multiplied(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """``rows [U, F]`` times the matrices of their relations."""
    parts = [(of_one, matrix) for of_one, matrix in zip(rows.split([*counts]), weight.unbind()) if of_one.shape[0]]
    if weight.dim() == 3:
        return torch.cat([of_one @ matrix for of_one, matrix in parts])
    blocks = [(of_one.unflatten(1, matrix.shape[:2]), matrix) for of_one, matrix in parts]
    return torch.cat([torch.einsum("abc,bcd->abd", of_one, matrix).flatten(1) for of_one, matrix in blocks])


def kept_with_edges(keys: tuple[Tensor, ...], key: tuple[object, ...], make: Callable[[], Any]) -> Any:
    """What is made of edges, their types and other tensors once. Raises Unsupported."""
    if guards.capturing(keys[0].device):
        found = cache.find(keys, key)
        if found is None:
            raise Unsupported("a CUDA graph is being captured, and its edges are not known; run once before")
        keep_if_captured(found)
        return found

    def build() -> Any:
        with torch.no_grad(), usable_later():
            return make()

    return cache.get(keys, key, build)


def check_bounds(bounds: list[tuple[Tensor, int]]) -> None:
    """Raises Unsupported unless all ids are below their bound."""
    some = [(ids, size) for ids, size in bounds if ids.numel()]
    if all(ids.is_cpu and ids.dim() == 1 and ids.dtype in INDEX_DTYPES for ids, _ in some):  # one operation for each
        limits = [limit for ids, _ in some for limit in coo_facts(ids, ids).tolist()[:2]]
    else:
        limits = torch.stack([limit.long() for ids, _ in some for limit in ids.aminmax()]).tolist()
    if any(low < 0 or high >= size for low, high, (_, size) in zip(limits[::2], limits[1::2], some)):
        raise Unsupported("an id is out of range")


def rows_there_are(ids: Tensor, types: Tensor, num_nodes: int, relations: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """A row for each relation and node that edges have, in the order of relations: that of each edge, the node of each, and how
    many each relation has."""
    rows, row = torch.unique(types * num_nodes + ids, return_inverse=True)
    type_of = rows.div(num_nodes, rounding_mode="floor") if num_nodes else rows
    return row, rows - type_of * num_nodes, tuple(torch.bincount(type_of, minlength=relations).tolist())


def has_all_rows(weight: Tensor, rows: int, width: int) -> bool:
    """Whether products of all ``rows`` take less time than to start those of each type: in dtypes that have the digits for any
    order of a sum. ``width`` is that of the rows, ``[R, width, O]`` the shape of the matrices unless they are blocks."""
    if weight.dtype not in REORDERED or torch.is_autocast_enabled(weight.device.type):
        return False
    blocks = weight.shape[1] if weight.dim() == 4 else 1
    if blocks > FEW_BLOCKS:
        return False
    out_width = weight.shape[-1] * blocks
    if weight.is_cuda:
        return rows * max(width, out_width) * weight.element_size() <= ALL_ROWS_BYTES
    return rows * out_width * max(width, 1) <= ALL_ROWS_PRODUCTS


# On an H200, where each relation takes 0.1 ms of the host, rows of as many bytes 0.1 to 0.2 in all; on a core that multiplies at
# 50 GFLOP/s, in both passes 0.2.
ALL_ROWS_BYTES = 64 << 20
ALL_ROWS_PRODUCTS = 1 << 20
