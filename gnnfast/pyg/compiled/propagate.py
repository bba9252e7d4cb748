"""``propagate`` in compiled code: one op where a kernel does what ``message()`` and the aggregation do, else step by step
(:mod:`gnnfast.pyg.compiled.messages`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.patching import is_dispatched
from gnnfast.pyg.compiled import ops
from gnnfast.pyg.compiled.messages import in_steps, is_several, steps_of
from gnnfast.pyg.compiled.norm import Normalised, aggregate_normalised
from gnnfast.pyg.compiled.questions import (
    EXTREMUM_TIMES,
    PLAIN,
    TOO_SMALL,
    ask,
    check_edges,
    check_operand,
    context,
    deciding,
    is_constant,
    is_small,
    left,
    needs_grad,
    state,
)
from gnnfast.pyg.messages import DOT_ATTENTION, GINE, RELU_FORMS, means_relu
from gnnfast.pyg.products import is_product
from gnnfast.pyg.propagate import weight_of
from gnnfast.pyg.verdict import COLLECT, GENERIC, OfClass, check_module, reduction_of
from gnnfast.reporting import ran
from gnnfast.types import LINEAR
from gnnfast.unsupported import Unsupported


def propagate(module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any], collect: str = COLLECT) -> Any:
    """Stands in for the ``propagate`` that PyG generates for a class."""
    if not torch.compiler.is_dynamo_compiling() or not guards.is_size(size):
        return NotImplemented
    message = ask(_message, module, collect, *deciding(module))
    if message is None:
        operands = [t for found in kwargs.values() for t in (found if isinstance(found, (tuple, list)) else (found,))]
        tensors = [t for t in operands if isinstance(t, Tensor)]
        steps = ask(steps_of, module, collect, edge_index, tuple(kwargs), *deciding(module), *tensors)
        return NotImplemented if steps is None else in_steps(module, edge_index, size, kwargs, *steps)
    feature, weighs, update, adds = message
    given: Any = kwargs.get(feature)
    x, x_dst, weight, to_target = given, None, kwargs.get(weighs), module.flow == "source_to_target"
    normed = weight if isinstance(weight, Normalised) else None
    if isinstance(given, (tuple, list)):
        if len(given) != 2 or not (to_target or given[0] is given[1]):
            return NotImplemented
        x, x_dst = given
    of_src, of_dst = (None, None) if size is None else size if to_target else size[::-1]
    if normed is None:
        plan = ask(_plan, module, collect, edge_index, x, x_dst, weight, weighs in kwargs, of_src, of_dst)
    else:
        plan = ask(_plan_normalised, module, collect, edge_index, x, normed.dtype, x_dst, of_src, of_dst)
    if plan is None:
        if normed is None:
            return NotImplemented
        options = normed.improved, normed.loops, module.flow, normed.dtype
        edge_index, weight = normed.original(edge_index, normed.weight, x.shape[module.node_dim], *options)
        return module.propagate(edge_index, size=size, **(kwargs | {weighs: weight}))
    reduce, per_head, constant, place = plan
    dim = module.node_dim % x.dim()
    num_src = x.shape[dim]
    num_dst = of_dst if of_dst is not None else num_src if x_dst is None else x_dst.shape[dim]
    if normed is not None:
        x = x.to(normed.dtype)
    elif adds is not None:
        lin = getattr(module, adds) if adds else None
        weight = weight if lin is None else lin(weight)
    elif weight is not None:
        weight = weight.reshape(-1, x.shape[1]) if per_head else weight if weight.dim() == 1 else weight.reshape(-1)
        if weight.dtype != x.dtype:
            dtype = torch.promote_types(x.dtype, weight.dtype)
            x, weight = x.to(dtype), weight.to(dtype)
    moved = x if dim == 0 else x.movedim(dim, 0)
    shape = moved.shape[1:]
    flat = moved.reshape(num_src, math.prod(shape))
    edges = edge_index, num_src, num_dst, to_target, "given", place
    if normed is not None:
        out = aggregate_normalised(normed, flat, edge_index, to_target, reduce == "mean", place)
    elif adds is not None:
        out = ops.RELU(flat, weight, needs_grad(flat, weight), *edges)[0]
    elif reduce == "sum" or reduce == "mean":
        out = ops.SPMM(flat, weight, reduce == "mean", constant, needs_grad(flat, weight), False, *edges)
    else:
        out = ops.EXTREMUM(flat, weight, reduce == "min", needs_grad(flat, weight), *edges)[0]
    out = out if len(shape) == 1 else out.view(num_dst, *shape)  # a view would be made again after the compiled code
    out = out if dim == 0 else out.movedim(0, dim).contiguous()
    return out if update is None else module.update(out, **{name: kwargs[name] for name in update if name in kwargs})


def generic(module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
    """Stands in for the ``propagate`` of all classes, as :func:`gnnfast.pyg.propagate.generic`."""
    return propagate(module, edge_index, size, kwargs, GENERIC)


def _message(module: Any, collect: str, *_: Any) -> Any:
    """The names of features and weights, what update() asks for, and where the ReLU of a sum is aggregated the name of a linear
    layer, there or not, of what is added (empty: it has none); ``None`` if PyG's own must run, or its steps."""
    if state.said is module or is_several(module):
        return None
    try:
        reason = context()
        if reason:
            raise Unsupported(reason)
        verdict = check_module(module, collect)
        if verdict.message is DOT_ATTENTION and is_dispatched(type(module).forward):
            state.said = module  # by which it is said why
            return None
        if verdict.message is DOT_ATTENTION:
            raise Unsupported("attention of another forward than the layer's")
    except Unsupported as error:
        if not (isinstance(error, OfClass) and reduction_of(module)):  # else of its steps
            left(module, str(error))
            state.said = module
        return None
    message, adds = verdict.message, None
    if message.form in RELU_FORMS:
        adds = "lin" if message is GINE else ""
    return message.feature, message.weight or "", verdict.update, adds


def _plan(
    module: Any, collect: str, edge_index: Any, x: Any, x_dst: Any, weight: Any, passed: bool, of_src: Any, of_dst: Any
) -> tuple[Any, ...] | None:
    """The reduction, whether there are weights per head, whether these are constant, and the place of the report."""
    try:
        verdict = check_module(module, collect)
        message = verdict.message
        dim = _check_sizes(module, edge_index, x, x_dst, of_src, of_dst)
        per_head = False
        if message.weight is not None and weight is None and not (message.optional and passed):
            raise Unsupported(f"message() uses {message.weight}, which was not passed to propagate()")
        if message.form in RELU_FORMS:
            _check_added(module, message, edge_index, x, weight, dim)
        elif weight is not None:
            check_operand(message.weight or "", weight, edge_index)
            per_head = weight_of(message, edge_index.fake.shape[1], x.fake, weight.fake, dim).dim() == 2
    except Unsupported as error:
        left(module, str(error))
        return None
    width, linear = math.prod(n for at, n in enumerate(x.fake.shape) if at != dim), verdict.reduce in LINEAR
    times, scatters = 1 if linear else EXTREMUM_TIMES, not torch.is_grad_enabled() or (linear and message.form not in RELU_FORMS)
    if is_small(edge_index, width, x.fake.dtype, times, scatters):
        ran(verdict.place, *TOO_SMALL)
        return None
    # Weights that change their dtype or shape on the way are other tensors in each call.
    constant = is_constant(weight) and weight.fake.dim() == 1 and weight.fake.dtype == x.fake.dtype
    return verdict.reduce, per_head, constant, verdict.place


def _check_added(module: Any, message: Any, edge_index: Any, x: Any, added: Any, dim: int) -> None:
    """Raises Unsupported if the ReLU of ``x_j`` and what is ``added`` is not what kernels sum."""
    check_operand(message.weight, added, edge_index)
    if not means_relu(message.form, type(module).message):
        raise Unsupported("what message() calls is not torch's ReLU")
    rows, like, lin = added.fake, x.fake, module.lin if message is GINE else None
    if like.dim() != 2 or dim != 0 or rows.dim() != 2 or rows.shape[0] != edge_index.fake.shape[1]:
        raise Unsupported("sizes do not fit together")
    width = rows.shape[1]
    if lin is not None:
        if not is_product(lin) or type(lin.weight) not in PLAIN or torch.is_autocast_enabled(like.device.type):
            raise Unsupported("what is added is made by more than a linear layer")
        if lin.weight.dtype != rows.dtype or lin.weight.shape[1] != width:
            raise Unsupported("edge features do not fit their linear layer")
        width = lin.weight.shape[0]
    if width != like.shape[1] or rows.dtype != like.dtype:
        raise Unsupported(f"edge features are {rows.dtype}, or not as wide as those of nodes")


def _plan_normalised(
    module: Any, collect: str, edge_index: Any, x: Any, dtype: torch.dtype, x_dst: Any, of_src: Any, of_dst: Any
) -> tuple[Any, ...] | None:
    """The same where ``gcn_norm`` gives the weights."""
    try:
        verdict = check_module(module, collect)
        dim = _check_sizes(module, edge_index, x, x_dst, of_src, of_dst)
        if x_dst is not None or of_dst is not None or verdict.message.form != "view" or dim != x.fake.dim() - 2:
            raise Unsupported("an argument is not served")
        if verdict.reduce not in LINEAR or torch.promote_types(x.fake.dtype, dtype) != dtype:
            raise Unsupported(f"features are {x.fake.dtype}")
    except Unsupported as error:
        left(module, str(error))
        return None
    return verdict.reduce, False, False, verdict.place


def _check_sizes(module: Any, edge_index: Any, x: Any, x_dst: Any, of_src: Any, of_dst: Any) -> int:
    """The dimension of the nodes. Raises Unsupported if features and sizes do not fit together."""
    check_edges(edge_index)
    check_operand("x", x, edge_index)
    dims, dim = x.fake.dim(), module.node_dim
    if not -dims <= dim < dims or dims < 2:
        raise Unsupported("sizes do not fit together")
    if x_dst is not None:
        check_operand("x", x_dst, edge_index)
        if x_dst.fake.dim() <= dim % dims or (of_dst is not None and of_dst != x_dst.fake.shape[dim]):
            raise Unsupported("sizes do not fit together")
    if of_src is not None and of_src != x.fake.shape[dim]:
        raise Unsupported("sizes do not fit together")
    return dim % dims  # type: ignore[no-any-return]
