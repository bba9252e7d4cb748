"""Adjacency matrices, torch's and ``torch_sparse.SparseTensor``: what layers multiply with them, without what PyG does around that,
and the edges that they list, for layers that do more. The edges are kept with a matrix. Its values are read anew in each call:
nothing would tell who wrote into the tensor that it was made of."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import _native, guards
from gnnfast.cache import Sightings, cache, keep_if_captured, usable_later
from gnnfast.config import settings
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.patching import is_dispatched
from gnnfast.pyg import known
from gnnfast.pyg.sparse import MULTIPLIED, is_multiplied_as_it_is, multiply_as_it_is
from gnnfast.pyg.verdict import COLLECT, check_steps, fused_hooks
from gnnfast.types import INDEX_DTYPES
from gnnfast.unsupported import Unsupported

_STRIDED = torch.strided
_HAS_CUDA = _native.cuda.loaded


def is_matrix(adjacency: Any) -> bool:
    """Whether it is one, torch's or a ``SparseTensor``."""
    kind = type(adjacency)
    return kind.__name__ == "SparseTensor" or (kind is Tensor and adjacency.layout is not _STRIDED)


_of_class = operator.attrgetter("message_and_aggregate", "update", "_check_input")


class _Asked(NamedTuple):
    """What gets the arguments of a ``message_and_aggregate()`` from those of ``propagate()``, if that is all that runs; whether it
    is one alone; the code of PyG's functions around it."""

    fetch: Callable[[dict[str, Any]], Any] | None
    alone: bool
    update: Any
    check: Any


_asked: dict[tuple[Any, ...], _Asked] = {}  # by what _of_class gives
_MOST = 1024
_NO_HOOKS: tuple[dict[int, Any], ...] = ({}, {}, {}, {})


def multiply(module: Any, adj: Any, kwargs: dict[str, Any]) -> Any:
    """PyG's fused route: its product with a matrix, without the loops over no hooks around it, which on small graphs take as long.
    ``NotImplemented``: there are hooks, or functions of a subclass."""
    asked = _asked_of(module)
    if asked is None:
        return NotImplemented
    try:
        found = asked.fetch(kwargs)  # type: ignore[misc]
    except KeyError:  # PyG raises its own
        return NotImplemented
    return module.message_and_aggregate(adj, found) if asked.alone else module.message_and_aggregate(adj, *found)


def aggregated(module: Any, layer: type, x: Any, adj: Any) -> Tensor | None:
    """What PyG's ``layer``, which a module is, aggregates of ``x [N, F]`` over a square matrix, where that is one operation which
    takes the matrix as it is: there the host decides. ``None``: PyG's own must run."""
    if type(x) is not Tensor or not x.is_cuda or type(adj) is not Tensor or x.dim() != 2 or adj.shape != (x.shape[0],) * 2:
        return None
    own, cls = module.__dict__, type(module)
    if not module.fuse or own["_explain"] or "propagate" in own or "message_and_aggregate" in own:
        return None
    aggr = module.aggr
    if type(aggr) is not str or aggr not in MULTIPLIED:
        return None
    if cls.message_and_aggregate is not layer.message_and_aggregate or not known.multiplies(layer, alone=True):  # type: ignore[attr-defined]
        return None
    if not is_dispatched(cls.propagate) or _asked_of(module) is None or not is_multiplied_as_it_is(adj, x):
        return None
    return multiply_as_it_is(adj, x, aggr, f"pyg {cls.__name__}")


def _asked_of(module: Any) -> _Asked | None:
    """What is known of the functions of a module, if around its ``message_and_aggregate()`` there is nothing else."""
    own, cls = module.__dict__, type(module)
    functions = _of_class(cls)
    asked = _asked.get(functions) or _ask(cls, functions)
    if asked.fetch is None or functions[1].__code__ is not asked.update or functions[2].__code__ is not asked.check:
        return None
    if fused_hooks(own) != _NO_HOOKS or own["flow"] != "source_to_target" or "_check_input" in own or "update" in own:
        return None
    return None if guards.function_modes() else asked


def _ask(cls: type, functions: tuple[Any, ...]) -> _Asked:
    plain = all(type(function) is FunctionType and not function.__dict__ for function in functions)
    codes: list[Any] = [function.__code__ for function in functions] if plain else [None] * 3
    multiplies, names = codes[0], ()
    if plain and known.is_known_method(cls, "update") and known.is_known_method(cls, "_check_input"):
        several = multiplies.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or multiplies.co_kwonlyargcount
        names = () if several else multiplies.co_varnames[2 : multiplies.co_argcount]
    if len(_asked) >= _MOST:
        _asked.clear()
    found = _asked[functions] = _Asked(operator.itemgetter(*names) if names else None, len(names) == 1, *codes[1:])
    return found


FEW_ENTRIES, FEW_ENTRIES_ON_CPU = 1 << 17, 1 << 13


def is_new_and_few(adj: Any) -> bool:
    """Whether a matrix of few entries is met for the first time, of which PyG makes no more operations than a list takes."""
    if not settings().is_free or (torch.is_grad_enabled() and saved_tensors_are_watched()):
        return False
    of_torch = type(adj) is Tensor
    if _met.again(adj if of_torch else adj.storage.col(), "edges"):
        return False
    entries, on_cpu = (adj._nnz(), adj.is_cpu) if of_torch else (adj.nnz(), not adj.is_cuda())
    return entries <= (FEW_ENTRIES_ON_CPU if on_cpu else FEW_ENTRIES)


def as_list(module: Any, adj: Any, kwargs: dict[str, Any], collect: str) -> tuple[Tensor, dict[str, Any]] | None:
    """The edges that a matrix lists, and the arguments of ``propagate()``, of which its values are one where none was given, as
    PyG's ``collect()`` has it; ``None`` if it collects something else."""
    if collect != COLLECT or module.__dict__["flow"] != "source_to_target" or guards.context():
        return None
    try:
        steps = check_steps(module)
    except Unsupported:
        return None
    asked = (*steps.message, *steps.aggregate, *steps.update)
    if steps.collected is None or "edge_index" in asked:
        return None
    # PyG gives the pointers of a matrix to who asks for them; its own aggregations do not compute anything else with them.
    own = (*steps.message, *steps.update, *(() if steps.known_aggregate else steps.aggregate))
    if "ptr" in own or not _is_of_pyg(module.__dict__["_modules"].get("aggr_module")):
        return None
    edge_index = edges_of(adj)
    if edge_index is None:
        return None
    name = next((name for name in ("edge_weight", "edge_attr", "edge_type") if name in asked), None)
    if name is not None and kwargs.get(name, adj) is None:
        values = _values_of(adj)
        if values is not None and (name != "edge_attr" or values.dim() > 1):
            kwargs = kwargs | {name: values}
    return edge_index, kwargs


def _is_of_pyg(aggregation: Any) -> bool:
    """Whether an aggregation, with all its parts, is PyG's or torch's own."""
    parts = aggregation.modules() if isinstance(aggregation, torch.nn.Module) else ()
    return all(type(part).__module__.startswith(("torch_geometric.", "torch.")) for part in parts)


def _values_of(adj: Any) -> Tensor | None:
    return adj.values() if type(adj) is Tensor else adj.storage.value()  # type: ignore[no-any-return]


def edges_of(adj: Any) -> Tensor | None:
    """The ``edge_index [2, E]`` of a matrix, in the order of its elements and kept with it; ``None`` of one that PyG does not
    list, or not by int64."""
    rows: Tensor
    holder: tuple[Tensor, ...] = (adj,)
    parts: tuple[Tensor, ...] = ()
    compressed = False
    if type(adj) is not Tensor:
        if type(adj).__name__ != "SparseTensor":
            return None
        rows, cols, _ = adj.coo()
        holder = rows, cols  # which copies of it with other values share
    elif adj.layout is torch.sparse_csr:
        rows, cols, compressed = adj.crow_indices(), adj.col_indices(), True
        parts = (rows, cols)
    elif adj.layout is torch.sparse_coo and adj.is_coalesced():
        rows, cols = parts = adj.indices().unbind()
    else:
        return None
    if not guards.has_kernels(cols) or holder[0].is_inference() or cols.dtype is not torch.int64 or cols.dim() != 1:
        return None
    found: Tensor | None = cache.find(holder, "edges", parts)
    if guards.capturing(cols.device):
        keep_if_captured(found)
        return found

    def build() -> Tensor:
        with usable_later():
            if compressed and cols.is_cpu:
                return torch._convert_indices_from_csr_to_coo(rows, cols, transpose=True)  # one operation
            return torch.stack((cols, torch.ops.gnnfast.csr_rows.default(rows, cols.numel()) if compressed else rows))

    if found is None and not _met.again(holder[-1]):
        return build()  # layers that add loops make a matrix in each call
    return cache.get(holder, "edges", build, parts) if found is None else found


def make_ptr2index(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``ptr2index(ptr [N + 1], output_size)``, the row of each element of a CSR matrix, by which PyG lists its
    edges: on a GPU, for few of them, in one launch in place of six."""

    def ptr2index(ptr: Any, output_size: Any) -> Any:
        if type(ptr) is not Tensor or not ptr.is_cuda or type(output_size) is not int or not 0 < output_size <= FEW_ENTRIES:
            return NotImplemented
        if not _HAS_CUDA or ptr.dtype not in INDEX_DTYPES or ptr.dim() != 1 or ptr.shape[0] < 2:
            return NotImplemented
        if guards.context() or guards.function_modes():
            return NotImplemented
        return torch.ops.gnnfast.csr_rows.default(ptr, output_size)

    return ptr2index


_met = Sightings()


def edges_for(module: Any, adj: Any, pair: Any) -> Tensor | None:
    """The same for a layer as a whole, with features ``pair`` of sources and destinations; ``None`` if PyG would see more than the
    edges: features of theirs, elements that are the same, of which loops make one, or a dropout that it draws in their order."""
    if len(pair) != 2 or not all(type(x) is Tensor and x.dim() for x in pair) or guards.context():
        return None
    if module.__dict__["flow"] != "source_to_target":  # PyG raises its own
        return None
    if _shape_of(adj) != [pair[1].shape[0], pair[0].shape[0]] or _requires_grad(adj):
        return None
    if module.training and module.__dict__.get("dropout") and settings().dropout == "framework":
        return None
    of_torch = type(adj) is Tensor
    if not of_torch and adj.has_value() and module.__dict__.get("edge_dim") is not None:
        return None
    edge_index = edges_of(adj)
    if edge_index is None or not module.__dict__.get("add_self_loops") or not of_torch or _order_of(edge_index).once:
        return edge_index
    return None


def _shape_of(adj: Any) -> list[int]:
    """Of two dimensions, if values are numbers; else of more."""
    if type(adj) is Tensor:
        return [*adj.shape]
    value = adj.storage.value()
    return [*adj.sparse_sizes(), *(() if value is None else value.shape[1:])]


def _requires_grad(adj: Any) -> bool:
    return bool(adj.requires_grad if type(adj) is Tensor else adj.requires_grad())


def weighed(original: FunctionType, module: Any, adj: Any, x: Any) -> tuple[Tensor, Tensor | None] | None:
    """Edges and weights for a layer whose ``original`` forward normalises a matrix and multiplies with it. PyG keeps the loops of a
    list that are there; to those of torch's matrix it adds the one that it gives to each node, which in a ``SparseTensor`` takes
    their place."""
    own = module.__dict__
    if type(x) is not Tensor or x.dim() != 2 or own["flow"] != "source_to_target" or own["node_dim"] not in (-2, 0):
        return None
    if module.training and own.get("dropout"):  # APPNP's and FAConv's, drawn in the order of the matrix
        return None
    if _shape_of(adj) != [x.shape[0]] * 2 or _requires_grad(adj):
        return None
    of_torch = type(adj) is Tensor
    if of_torch and "num_stacks" in own:  # ARMAConv, of whose [K, N, F] torch makes no product
        return None
    edge_index = edges_of(adj)
    if edge_index is None:
        return None
    loops = known.option(original, module, "normalize", True) and known.option(original, module, "add_self_loops")
    weight, fill = _values_of(adj), 2.0 if known.option(original, module, "improved") else 1.0
    if weight is None:
        if not loops or fill == 1:
            return edge_index, None
        weight = x.new_ones(edge_index.shape[1])
    elif weight.dtype is not x.dtype:
        return None
    if loops:
        order = _order_of(edge_index)
        if of_torch and not order.once:
            return None
        if order.loops is not None:
            weight = torch.where(order.loops, weight + fill if of_torch else fill, weight)
    return edge_index, weight


class _Order(NamedTuple):
    """Whether edges are listed by destination and source, each ``once``, and which are ``loops``, if any."""

    once: bool
    loops: Tensor | None


def _order_of(edge_index: Tensor) -> _Order:
    if guards.capturing(edge_index.device):
        found: _Order = cache.find((edge_index,), "order") or _Order(False, None)
        keep_if_captured(found.loops)
        return found

    def build() -> _Order:
        with usable_later():
            src, dst = edge_index.unbind()
            loops = src == dst
            once = ((dst[1:] > dst[:-1]) | ((dst[1:] == dst[:-1]) & (src[1:] > src[:-1]))).all()
        is_once, has_loops = torch.stack((once, loops.any())).tolist()
        return _Order(is_once, loops if has_loops else None)

    return cache.get((edge_index,), "order", build)  # type: ignore[no-any-return]
