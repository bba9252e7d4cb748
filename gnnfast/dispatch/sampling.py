"""Aggregation over at most so many edges of each node, where the user asked for it."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfast import _native, reporting
from gnnfast.config import settings
from gnnfast.dispatch.calls import count, over_formats
from gnnfast.dispatch.select import Sampling, select_sampling
from gnnfast.graph import Graph
from gnnfast.stream import is_capturing
from gnnfast.types import STRATEGIES

if _native.cpu.loaded:
    from gnnfast.ops.spmm import SPMM, call
    from gnnfast.ops.spmm_sampled import SPMM_SAMPLED


def plan(graph: Graph, reduce: str, needs_grad: bool, training: bool) -> Sampling | str:
    """How the settings want an aggregation to be sampled, or why it is not."""
    planned = select_sampling(graph.average_degree, reduce, needs_grad, training, settings())
    if isinstance(planned, str):
        return planned
    if graph.device.type == "cuda" and is_capturing():
        if planned.strategy == "random":
            return "a captured CUDA graph would make the same draw in each replay"
        if not graph.draws.prepared(graph, planned.width, csc=False):
            return "a CUDA graph is being captured and this one was not sampled before; run once before capturing"
    longest, _ = graph.draws.sizes(graph, planned.width)
    return planned if longest > planned.width else f"no node has more than {planned.width} edges"


def run(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    needs_grad: bool,
    how: Sampling,
    place: str,
    seed: int | None = None,
) -> Tensor:
    """One sampled aggregation on operands as :func:`gnnfast.dispatch.execute.aggregate` takes them."""
    _, draws = graph.draws.sizes(graph, how.width)
    reporting.sampled(graph.num_edges, draws)
    rate = draws / max(graph.num_edges, 1)
    reason = f"{how.strategy}, at most {how.width} edges a node: {rate:.1%} of {graph.num_edges:,}"
    mean, strategy = reduce == "mean", STRATEGIES[how.strategy]
    # Two CUDA kernels add in different orders; a deterministic result must not depend on how often the graph was used.
    if how.strategy != "random" and not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        kept = graph.draws.get(graph, how.strategy, how.width)
        if kept is not None:
            drawn, scale = kept
            if weight is not None:
                in_slots, perm = drawn.slot_weights(weight, csc=False), drawn.csr.perm
                assert perm is not None
                weight = weight.index_select(0, perm) if in_slots is None else in_slots[0]
            count(graph, place, f"sampled {reduce}", f"{reason}; draws kept", x.nbytes)
            args = drawn.args(False, x.shape[1] * x.element_size(), permuted=False)
            return call(SPMM, False, args, weight, None, x, mean, scale if how.rescale and not mean else None)
    count(graph, place, f"sampled {reduce}", reason, x.nbytes)
    args = graph.draws.args(graph, csc=needs_grad)
    if weight is not None and not (needs_grad and weight.requires_grad):
        in_slots = graph.slot_weights(weight, csc=False)
        if in_slots is not None:
            args, weight = args._replace(perm=None), in_slots[0]
    if how.strategy != "random":
        seed = 0
    elif seed is None:  # the generator of the CPU: nothing waits for the device
        seed = int(torch.randint(2**62, ()))
    draw = how.width, strategy, seed
    return call(SPMM_SAMPLED, needs_grad, args, graph.order, weight, x, *draw, mean, how.rescale, False)


def aggregate(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, needs_grad: bool, how: Sampling, place: str, seed: int | None
) -> Tensor:
    """:func:`run`, or the exact aggregation if no row has more edges than are drawn."""
    if graph.draws.sizes(graph, how.width)[0] > how.width:
        return run(graph, x, weight, reduce, needs_grad, how, place, seed)
    count(graph, place, f"gar {reduce}", f"no node has more than {how.width} edges", x.nbytes)
    weight_grad = needs_grad and weight is not None and weight.requires_grad
    return over_formats(graph, x, weight, reduce, "even", 0.0, needs_grad, weight_grad, None)
