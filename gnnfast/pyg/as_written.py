"""``propagate`` as PyG writes it, where no kernel saves what asking for it takes: the operations of torch that PyG runs, in its
order, without what it does around them, which takes as long as they do on a small graph. Results have on a CPU the same bits and,
where they need a gradient, the same nodes of autograd, so that nothing but the time tells which ran."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.patching import left_alone
from gnnfast.pyg import listed
from gnnfast.pyg.small import parts_are_few
from gnnfast.pyg.verdict import COLLECT, Steps, check_steps, is_plain
from gnnfast.types import EXTREMA, INDEX_DTYPES, LINEAR, REORDERED
from gnnfast.unsupported import Unsupported

_STRIDED = torch.strided
_ops = torch.ops.gnnfast


def as_written(module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any], collect: str = COLLECT) -> Any:
    """What ``propagate`` returns, or raises; ``NotImplemented``: PyG's own must run. Not where :func:`guards.context` gives a
    reason."""
    if type(edge_index) is not Tensor or edge_index.layout is not _STRIDED or collect != COLLECT:
        return NotImplemented
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype not in INDEX_DTYPES:
        return NotImplemented
    if type(size) not in (type(None), tuple, list) or guards.function_modes():  # the latter would see other calls than PyG's
        return NotImplemented
    steps = rule_of(module)
    if steps is None:
        return NotImplemented
    found = _compiled.get(id(steps))
    run = found[1] if found is not None and found[0] is steps else _compile(steps)
    return left_alone(run, module, edge_index, size, kwargs) if parts_are_few(edge_index) else run(module, edge_index, size, kwargs)


_compiled: dict[int, tuple[Steps, Callable[..., Any]]] = {}  # by the id of the steps
_MOST = 4096


def _compile(steps: Steps) -> Callable[..., Any]:
    """``run(module, edge_index, size, kwargs)`` of the steps of a class: a function of its own, as loops over what a class asks for
    took as long as torch's operations over 200 edges."""
    if len(_compiled) >= _MOST:
        _compiled.clear()
    scope = {"Tensor": Tensor, "reduced": reduced}
    exec(_source(steps), scope)
    run: Any = scope["run"]
    _compiled[id(steps)] = steps, run
    return run  # type: ignore[no-any-return]


# Rows of nodes are named by n and a number, with their end; what is given to propagate() by g and a number.
_BEGIN = """\
def run(module, edge_index, size, kwargs):
    edge_0, edge_1 = edge_index.unbind()
    dim, to_target = module.node_dim, module.flow == "source_to_target"
    edge_i, edge_j = (edge_1, edge_0) if to_target else (edge_0, edge_1)
    num_i = num_j = None
    if size is not None:
        if len(size) != 2:
            return NotImplemented
        num_j, num_i = size if to_target else (size[1], size[0])
    try:
        pass
"""
_NODES = """\
        {n}_i = {n}_j = kwargs[{name!r}]
        pair = isinstance({n}_i, (tuple, list))
        if pair:
            if len({n}_i) != 2 or not (to_target or {n}_i[0] is {n}_i[1]):
                return NotImplemented
            {n}_j, {n}_i = {n}_i
"""
_SIZE = """\
        if {asked}isinstance({n}_{end}, Tensor):
            if num_{end} is None:
                num_{end} = {n}_{end}.size(dim)
            elif num_{end} != {n}_{end}.size(dim):
                return NotImplemented
"""
_GATHER = """\
        {n}_{end} = {n}_{end}.index_select(dim, edge_{end}) if isinstance({n}_{end}, Tensor) else None
"""
_GIVEN = """\
        {g} = kwargs[{name!r}]
"""
_END = """\
    except (KeyError, IndexError, RuntimeError):  # PyG raises its own, or takes a default
        return NotImplemented
    size_i, size_j = num_j if num_i is None else num_i, num_i if num_j is None else num_j
    if type(size_i) is not int:
        return NotImplemented
    sizes, aggregation = [num_j, num_i] if to_target else [num_i, num_j], module.__dict__["_modules"]["aggr_module"]
    messages = module.message({message})
    out = reduced(module, aggregation, messages, edge_i, size_i, {reduce!r})
    del messages  # before update(), as in PyG
    return module.update(out, {update})
"""
# What PyG makes besides.
_MADE = {"edge_index": "edge_index", "index": "edge_i", "edge_index_i": "edge_i", "edge_index_j": "edge_j", "ptr": "None"}
_MADE |= {"dim_size": "size_i", "size_i": "size_i", "size_j": "size_j", "size": "sizes"}


def _source(steps: Steps) -> str:
    """That of the function that :func:`_compile` makes."""
    collected: Any = steps.collected
    nodes = {of: f"n{k}" for k, of in enumerate(dict.fromkeys(of for _, of, _ in collected.lifted))}
    values, lines = dict(_MADE), [_BEGIN]
    for name, n in nodes.items():
        asked = {"i" if at_i else "j" for _, of, at_i in collected.lifted if of == name}
        lines.append(_NODES.format(n=n, name=name))
        lines += [_SIZE.format(n=n, end=end, asked="" if end in asked else "pair and ") for end in "ji"]
    for name, of, at_i in collected.lifted:
        end = "i" if at_i else "j"
        values[name] = f"{nodes[of]}_{end}"
        lines.append(_GATHER.format(n=nodes[of], end=end))
    for k, name in enumerate(collected.given):
        values[name] = f"g{k}"
        lines.append(_GIVEN.format(g=values[name], name=name))
    message, update = (", ".join(f"{name}={values[name]}" for name in names) for names in (steps.message, steps.update))
    return "".join((*lines, _END.format(message=message, update=update, reduce=steps.reduce)))


def rule_of(module: Any) -> Steps | None:
    """The steps of a module, if these and one reduction are all that runs."""
    try:
        steps = check_steps(module)
    except Unsupported:
        return None
    return steps if steps.reduce and steps.collected is not None else None


def reduced(module: Any, aggregation: Any, messages: Any, index: Tensor, num_dst: int, reduce: str) -> Any:
    """What PyG's ``aggregate()``, with an ``aggregation`` that is a ``reduce``, makes of messages."""
    dim, dims = module.node_dim, messages.dim() if type(messages) is Tensor else 0
    if module.__dict__["_modules"]["aggr_module"] is not aggregation or not is_plain(aggregation):  # message() has changed it
        return module.aggregate(messages, index=index, ptr=None, dim_size=num_dst)
    needs_grad = dims and messages.requires_grad and torch.is_grad_enabled()
    if dims and not needs_grad:
        out = listed.scatter_rows(messages, index, dim, num_dst, reduce)
        if out is not NotImplemented:
            return out
    try:
        # With torch-scatter PyG takes its maxima where they get a gradient on a GPU.
        if dims and -dims <= dim < dims and (reduce in LINEAR or not (messages.requires_grad and messages.is_cuda)):
            if (
                messages.is_cuda
                and not needs_grad
                and dims == 2
                and dim in (0, -2)
                and reduce in LINEAR
                and index.dtype is torch.int64
            ):
                out = sums(messages, index, num_dst)
                return out if reduce == "sum" else out / _counts(messages, index, num_dst, 0).view(-1, 1)
            dim %= dims
            trailing = (1,) * (dims - dim - 1)
            column, size = index.view(-1, *trailing).expand_as(messages), [*messages.shape]
            size[dim] = num_dst
            out = messages.new_zeros(size)
            if reduce in EXTREMA:
                return out.scatter_reduce_(dim, column, messages, f"a{reduce}", include_self=False)
            out = out.scatter_add_(dim, column, messages)
            return out if reduce == "sum" else out / _counts(messages, index, num_dst, dim).view(-1, *trailing).expand_as(out)
        if -dims <= dim < dims:
            return _scatter()(messages, index, dim, num_dst, reduce)
    except (IndexError, RuntimeError):  # PyG raises its own
        pass
    return module.aggregate(messages, index=index, ptr=None, dim_size=num_dst)


def sums(messages: Tensor, index: Tensor, num_dst: int) -> Tensor:
    """Messages ``[E, F]`` on a GPU, where no order of adding is PyG's, summed by ``index [E]``: ``[num_dst, F]``."""
    out = messages.new_zeros((num_dst, messages.size(1)))
    if messages.requires_grad and torch.is_grad_enabled():
        return out.scatter_add_(0, index.unsqueeze(1).expand_as(messages), messages)
    return out.index_add_(0, index, messages)  # two calls less, but for its gradient it would keep the messages


def _counts(messages: Tensor, index: Tensor, num_dst: int, dim: int) -> Tensor:
    """What sums of messages are divided by to be means."""
    if messages.dtype in REORDERED and messages.device == index.device and guards.has_kernels(messages):
        return _ops.degrees.default(index, num_dst, messages.dtype)  # type: ignore[no-any-return]
    # PyG counts in the dtype of messages, as far as 16 bits go.
    return messages.new_zeros(num_dst).scatter_add_(0, index, messages.new_ones(messages.shape[dim])).clamp(min=1)


@functools.cache
def _scatter() -> Callable[..., Any]:
    from torch_geometric.utils import scatter

    return scatter  # type: ignore[no-any-return]
