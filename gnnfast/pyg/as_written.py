"""``propagate`` as PyG writes it, where no kernel saves what asking for it takes: the operations of torch that PyG runs, in its
order, without what it does around them, which takes as long as they do on a small graph. Results have the same bits and, where they
need a gradient, the same nodes of autograd, so that nothing but the time tells which ran."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnfast.patching import left_alone
from gnnfast.pyg import listed
from gnnfast.pyg.small import parts_are_few
from gnnfast.pyg.verdict import COLLECT, Steps, check_steps, is_plain, reduction_of
from gnnfast.types import EXTREMA, INDEX_DTYPES, LINEAR
from gnnfast.unsupported import Unsupported

_STRIDED = torch.strided
_function_modes = torch._C._len_torch_function_stack


def as_written(module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any], collect: str = COLLECT) -> Any:
    """What ``propagate`` returns, or raises; ``NotImplemented``: PyG's own must run. Not where :func:`guards.context` gives a
    reason."""
    if type(edge_index) is not Tensor or edge_index.layout is not _STRIDED or collect != COLLECT:
        return NotImplemented
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype not in INDEX_DTYPES:
        return NotImplemented
    if type(size) not in (type(None), tuple, list) or _function_modes():  # the latter would see other calls than PyG's
        return NotImplemented
    steps = rule_of(module, edge_index.is_cuda, torch.is_grad_enabled())
    if steps is None or steps.collected is None:
        return NotImplemented
    collected, aggregation = steps.collected, module.__dict__["_modules"]["aggr_module"]
    i, j = (1, 0) if module.flow == "source_to_target" else (0, 1)
    sizes, ends, dim = [None, None] if size is None else [*size], edge_index.unbind(), module.node_dim
    if len(sizes) != 2:
        return NotImplemented
    found: dict[str, Any] = {}
    try:
        for name, of_nodes, at_i in collected.lifted:
            x, end = kwargs[of_nodes], i if at_i else j
            if isinstance(x, (tuple, list)):
                if len(x) != 2 or end != at_i:
                    return NotImplemented
                for n in (0, 1):
                    if isinstance(x[n], Tensor) and not _has_size(sizes, n, x[n].size(dim)):
                        return NotImplemented
                x = x[at_i]
            elif isinstance(x, Tensor) and not _has_size(sizes, end, x.size(dim)):
                return NotImplemented
            found[name] = x.index_select(dim, ends[end]) if isinstance(x, Tensor) else None
        for name in collected.given:
            found[name] = kwargs[name]
    except (KeyError, IndexError, RuntimeError):  # PyG raises its own, or takes a default
        return NotImplemented
    index, size_i, size_j = ends[i], sizes[j] if sizes[i] is None else sizes[i], sizes[i] if sizes[j] is None else sizes[j]
    if type(size_i) is not int:
        return NotImplemented
    if collected.made:
        found |= {"edge_index": edge_index, "index": index, "edge_index_i": index, "edge_index_j": ends[j], "ptr": None}
        found |= {"dim_size": size_i, "size_i": size_i, "size_j": size_j, "size": sizes}
    arguments = module, steps, found, aggregation, index, size_i
    return left_alone(_run, *arguments) if parts_are_few(edge_index) else _run(*arguments)


def _run(module: Any, steps: Steps, found: dict[str, Any], aggregation: Any, index: Tensor, num_dst: int) -> Any:
    # Messages are let go before update(), as in PyG.
    out = _reduced(
        module, aggregation, module.message(**{name: found[name] for name in steps.message}), index, num_dst, steps.reduce
    )
    return module.update(out, **{name: found[name] for name in steps.update})


def rule_of(module: Any, on_cuda: bool, training: bool) -> Steps | None:
    """The steps of a module, if these and one reduction are all that runs, and what PyG does around them takes longer than to be
    sure of that, as it does not beside a GPU's mean or maximum with a gradient."""
    reduce = reduction_of(module)
    if reduce is None or (on_cuda and training and reduce != "sum"):
        return None
    try:
        steps = check_steps(module)
    except Unsupported:
        return None
    return steps if steps.reduce and steps.collected is not None else None


def _has_size(sizes: list[int | None], end: int, size: int) -> bool:
    if sizes[end] is None:
        sizes[end] = size
    return sizes[end] == size


def _reduced(module: Any, aggregation: Any, messages: Any, index: Tensor, num_dst: int, reduce: str) -> Any:
    """What PyG's ``aggregate()``, with an ``aggregation`` that is a ``reduce``, makes of messages."""
    dim, dims = module.node_dim, messages.dim() if type(messages) is Tensor else 0
    if module.__dict__["_modules"]["aggr_module"] is not aggregation or not is_plain(aggregation):  # message() has changed it
        return module.aggregate(messages, index=index, ptr=None, dim_size=num_dst)
    if dims and not (messages.requires_grad and torch.is_grad_enabled()):
        out = listed.scatter_rows(messages, index, dim, num_dst, reduce)
        if out is not NotImplemented:
            return out
    try:
        if dims and -dims <= dim < dims and (reduce in LINEAR or not messages.requires_grad):
            dim %= dims
            size, trailing = [*messages.shape], (1,) * (dims - dim - 1)
            size[dim] = num_dst
            column, out = index.view(-1, *trailing).expand_as(messages), messages.new_zeros(size)
            if reduce in EXTREMA:
                return out.scatter_reduce_(dim, column, messages, f"a{reduce}", include_self=False)
            if reduce == "sum":
                return out.scatter_add_(dim, column, messages)
            count = messages.new_zeros(num_dst).scatter_add_(0, index, messages.new_ones(messages.shape[dim])).clamp(min=1)
            out = out.scatter_add_(dim, column, messages)
            return out / count.view(-1, *trailing).expand_as(out)
        if -dims <= dim < dims:
            return _scatter()(messages, index, dim, num_dst, reduce)
    except (IndexError, RuntimeError):  # PyG raises its own
        pass
    return module.aggregate(messages, index=index, ptr=None, dim_size=num_dst)


@functools.cache
def _scatter() -> Callable[..., Any]:
    from torch_geometric.utils import scatter

    return scatter  # type: ignore[no-any-return]
