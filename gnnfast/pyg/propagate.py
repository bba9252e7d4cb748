"""``MessagePassing.propagate`` as one aggregation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import _native, guards
from gnnfast.cache import cache
from gnnfast.config import settings
from gnnfast.dispatch import edges, gates
from gnnfast.dispatch.execute import aggregate, edge_relu, reproducible, reproducibly
from gnnfast.dispatch.select import cannot_win
from gnnfast.features import aggregate_csr, unsupported
from gnnfast.graph import Graph, ids
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.graph.formats import BY_SRC
from gnnfast.guards import tracing_state
from gnnfast.patching import left_alone
from gnnfast.pyg import bounded, general, known, listed
from gnnfast.pyg.adjacency import graph_of, running
from gnnfast.pyg.as_written import as_written, rule_of
from gnnfast.pyg.attention import dot_attention, is_first_and_small, is_small_transformer
from gnnfast.pyg.layers import left
from gnnfast.pyg.matrices import as_list, is_matrix, is_new_and_few, multiply
from gnnfast.pyg.messages import DOT_ATTENTION, GINE, RELU_FORMS, Message, means_relu
from gnnfast.pyg.products import is_product
from gnnfast.pyg.small import ALONE, NEW_AND_SMALL, PARTS, SMALL, bounds, is_new, most_ids, of_sums, parts_are_few, remember
from gnnfast.pyg.verdict import COLLECT, GENERIC, OfClass, Verdict, check_module, is_by_name, reduction_of, refused, served
from gnnfast.reporting import fell_back, ran
from gnnfast.types import EXTREMA, FEATURE_DTYPES, INDEX_DTYPES
from gnnfast.unsupported import Unsupported

_STRIDED = torch.strided


def propagate(
    original: FunctionType, module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any], collect: str = COLLECT
) -> Any:
    """Stands in for the ``original`` ``propagate`` that PyG generates for a class. Returns ``NotImplemented`` to let it run."""
    if type(edge_index) is not Tensor or edge_index.layout is not _STRIDED:
        if is_matrix(edge_index):
            if module.fuse:  # PyG's product, which gnnfast.pyg.sparse serves
                return multiply(module, edge_index, kwargs) if collect == COLLECT else NotImplemented
            return _over_list(original, module, edge_index, kwargs, collect)
        if _is_edge_index(edge_index) and _multiplies(module, edge_index):
            if _multiplies_otherwise(module):
                fell_back(f"pyg {type(module).__name__}", "its product with an EdgeIndex is another than the sum of its messages")
                return NotImplemented
            if edge_index.is_cuda and not reproducible.asked:
                with reproducibly(True):
                    return propagate(original, module, edge_index, size, kwargs, collect)
    of_module = id(module)
    bound = bounds.get(of_module)
    if bound is not None and (
        left.edge_index is edge_index or (not _is_own(edge_index) and bound.holds(kwargs.get(bound.feature), edge_index))
    ):
        return _left(original, module, edge_index, size, kwargs, collect, bound.place, SMALL)
    quiet = _quiet.get(of_module)
    if quiet is not None and _is_quiet(quiet, module, edge_index, kwargs):
        left.edge_index = None
        fell_back(quiet.place, quiet.reason)
        out = as_written(module, edge_index, size, kwargs, collect) if quiet.plain and not guards.context() else NotImplemented
        return _run(original, module, edge_index, size, kwargs) if out is NotImplemented else out
    cls = type(module)
    small = too_small(module, edge_index, kwargs)
    if small:
        return _left(original, module, edge_index, size, kwargs, collect, f"pyg {cls.__name__}", small)
    not_now = guards.context()
    refusal = refused(cls)
    reason, lasts = not_now or refusal, bool(refusal)
    if not reason:
        try:
            return _propagate(module, edge_index, size, kwargs, collect)
        except Unsupported as error:
            reason, lasts = str(error), isinstance(error, OfClass)
    pays = not not_now and general.pays(module, edge_index, kwargs)
    if pays:
        try:
            out = general.propagate(module, edge_index, size, kwargs, reason, collect)
            if quiet is not None and general.Few.of(module, quiet.on_cuda).nbytes < quiet.few.nbytes:
                _quiet.pop(of_module, None)  # it has been learnt how large graphs must be
            return out
        except Unsupported as error:
            reason = reason if str(error) == reason else f"{reason}; {error}"
    fell_back(f"pyg {cls.__name__}", reason)
    if lasts and not not_now and not pays:
        _keep_quiet(module, edge_index, kwargs, reason)
    return NotImplemented


def _multiplies(module: Any, edge_index: Any) -> bool:
    """Whether PyG multiplies with an ``EdgeIndex``."""
    return module.fuse and module.SUPPORTS_FUSED_EDGE_INDEX and edge_index.is_sorted_by_col  # type: ignore[no-any-return]


def _multiplies_otherwise(module: Any) -> bool:
    """Whether that is not as it reduces messages: by code that is not GraphConv's, or by the name of another reduction."""
    cls = next(c for c in type(module).__mro__ if "message_and_aggregate" in vars(c))
    if "message_and_aggregate" in module.__dict__ or cls.__module__ != "torch_geometric.nn.conv.graph_conv":
        return True
    return not known.multiplies(cls) or not is_by_name(module, reduction_of(module))


def _over_list(original: FunctionType, module: Any, adj: Any, kwargs: dict[str, Any], collect: str) -> Any:
    """Over the edges that a matrix lists."""
    if is_new_and_few(adj):
        ran(f"pyg {type(module).__name__}", "PyG's own", NEW_AND_SMALL)
        return NotImplemented
    found = as_list(module, adj, kwargs, collect)
    if found is None:
        fell_back(f"pyg {type(module).__name__}", f"the adjacency is a {_kind(adj)}")
        return NotImplemented
    edge_index, kwargs = found
    return propagate(original, module, edge_index, (adj.size(1), adj.size(0)), kwargs, collect)


def _left(
    original: FunctionType, module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any], collect: str, place: str, why: str
) -> Any:
    left.edge_index = None
    out = NotImplemented
    if not guards.context():
        if _is_listed(module, edge_index, kwargs):
            try:
                return _propagate(module, edge_index, size, kwargs, collect, as_listed=True)
            except Unsupported:
                pass
        out = as_written(module, edge_index, size, kwargs, collect)
    ran(place, "PyG's own", why if out is NotImplemented else ALONE[why])
    return _run(original, module, edge_index, size, kwargs) if out is NotImplemented else out


def _is_listed(module: Any, edge_index: Any, kwargs: dict[str, Any]) -> bool:
    """Whether what is left reduces features, times weights or not, and one operation over the edges as they are listed pays."""
    verdict = served.get(id(type(module)))
    if verdict is None or verdict.message is DOT_ATTENTION or verdict.message.form in RELU_FORMS:
        return False
    weight = None if verdict.message.weight is None else kwargs.get(verdict.message.weight)
    if isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled():
        return False
    return listed.pays(edge_index, kwargs.get(verdict.message.feature))


def _run(original: FunctionType, module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
    """What PyG's own ``propagate`` returns where its parts have nothing to gain, either."""
    if type(edge_index) is not Tensor or guards.context() or not parts_are_few(edge_index):
        return NotImplemented
    return left_alone(original, module, edge_index, size=size, **kwargs)


class _Quiet(NamedTuple):
    """A module whose message passing is left to PyG where edges on a device are ``few``, for a ``reason``; ``plain``: it may be
    :func:`as_written`."""

    module: weakref.ref[Any]
    few: general.Few
    on_cuda: bool
    place: str
    reason: str
    plain: bool


# By the id of the module. What was found out about one may change, but PyG's own has always the right results.
_quiet: dict[int, _Quiet] = {}


def _is_quiet(quiet: _Quiet, module: Any, edge_index: Any, kwargs: dict[str, Any]) -> bool:
    if type(edge_index) is not Tensor or tracing_state() is not None:  # a trace would warn of the comparison
        return False
    return edge_index.is_cuda is quiet.on_cuda and quiet.few.holds(module, edge_index, kwargs)


def _keep_quiet(module: Any, edge_index: Any, kwargs: dict[str, Any], reason: str) -> None:
    """Remembers of a module for whose class no kernel is known that nothing more is looked at where graphs are as small as this
    one."""
    if type(edge_index) is not Tensor or edge_index.dim() != 2:
        return
    few, key = general.Few.of(module, edge_index.is_cuda), id(module)
    if few.holds(module, edge_index, kwargs):
        forget = weakref.ref(module, lambda _: _quiet.pop(key, None))
        plain = rule_of(module) is not None
        _quiet[key] = _Quiet(forget, few, edge_index.is_cuda, f"pyg {type(module).__name__}", reason, plain)


def too_small(module: Any, edge_index: Any, kwargs: dict[str, Any]) -> str:
    """Why a call of a class that was served before has nothing to gain: what PyG writes runs, which is right whatever has become of
    the class. Empty if it may gain. Asked before anything else, since there every look at the call costs more than kernels save."""
    verdict, asked = served.get(id(type(module))), left.edge_index
    if asked is not None:
        left.edge_index = None
        if asked is edge_index:
            return SMALL
    if verdict is None or type(edge_index) is not Tensor:
        return ""
    training = torch.is_grad_enabled()
    if training and saved_tensors_are_watched():  # what was met before must not decide
        return ""
    if not edge_index.is_cuda:
        return _small_on_cpu(module, edge_index, kwargs, verdict)
    if verdict.message is DOT_ATTENTION:
        edge_attr = kwargs.get("edge_attr")
        small = is_first_and_small(module, edge_index) if edge_attr is None else is_small_transformer(module, edge_index, edge_attr)
        return NEW_AND_SMALL if small else ""
    x = kwargs.get(verdict.message.feature)
    if type(x) is tuple:
        x = x[0]
    if type(x) is not Tensor or x.layout is not _STRIDED or (training and reduction_of(module) in EXTREMA):
        return ""
    if x.dim() < 2:
        return ""
    row_bytes = (x.shape[1] if x.dim() == 2 else _row(module, x)) * x.element_size()
    if not cannot_win(edge_index.shape[-1] * row_bytes, training, settings()):
        return ""
    if reproducible.asked or torch.are_deterministic_algorithms_enabled():
        return ""
    if x.dim() == 2:
        inference, in_training = most_ids(x, "cuda")
        most = inference, -1 if reduction_of(module) in EXTREMA else in_training
        remember(module, verdict.message.feature, x, edge_index, most)
    return SMALL


def _row(module: Any, x: Tensor) -> int:
    """The numbers of a node, whichever dimension is that of nodes."""
    dim, dims = module.node_dim, x.dim()
    return x.numel() // (x.shape[dim] or 1) if -dims <= dim < dims else x.numel()


def _is_own(edge_index: Any) -> bool:
    """Whether the layer made an ``edge_index`` with its graph."""
    own = running.graph
    return own is not None and own.edge_index is edge_index


def _small_on_cpu(module: Any, edge_index: Tensor, kwargs: dict[str, Any], verdict: Verdict) -> str:
    """The same on a CPU: of attention, and of a graph that is new, but for one that the layer made with its ``edge_index``."""
    if verdict.message is DOT_ATTENTION:
        return SMALL if is_small_transformer(module, edge_index, kwargs.get("edge_attr")) else ""
    if _is_own(edge_index) or edge_index.dtype is not torch.int64 or tracing_state() is not None:
        return ""
    x = kwargs.get(verdict.message.feature)
    x = x[0] if type(x) is tuple and x else x
    if type(x) is not Tensor or x.layout is not _STRIDED or x.dim() < 2 or edge_index.dim() != 2:
        return ""
    row_bytes = (x.shape[1] if x.dim() == 2 else _row(module, x)) * x.element_size()
    nbytes, training, current = edge_index.numel() // 2 * row_bytes, torch.is_grad_enabled(), settings()
    weight = None if verdict.message.weight is None else kwargs.get(verdict.message.weight)
    reduce = reduction_of(module)
    tiny, new = where = PARTS if verdict.message.form in RELU_FORMS else of_sums(x, reduce, weight)
    if cannot_win(nbytes, training, current, tiny):
        if x.dim() == 2:
            remember(module, verdict.message.feature, x, edge_index, most_ids(x, tiny))
        return SMALL
    if isinstance(weight, Tensor) and weight.requires_grad:  # whose gradient is summed over features in another order
        return ""
    if running.passing is edge_index:  # in several propagations, for which it would be converted
        return NEW_AND_SMALL if cannot_win(nbytes // 4 if where is PARTS else nbytes, training, current, new) else ""
    if not cannot_win(nbytes, training, current, new):
        return ""
    return NEW_AND_SMALL if is_new(edge_index, module) and cache.origin(edge_index) is None else ""


def make_generic(original: FunctionType) -> Callable[..., Any]:
    """What stands in for the ``propagate`` of all classes, which those run for which PyG generates none: it could not read their
    source, or they have a ``propagate`` of their own that calls this one."""

    def generic(module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        return propagate(original, module, edge_index, size, kwargs, GENERIC)

    return generic


def _propagate(module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any], collect: str, as_listed: bool = False) -> Any:
    if (type(edge_index) is not Tensor or edge_index.layout is not _STRIDED) and not _is_edge_index(edge_index):
        raise Unsupported(f"the adjacency is a {_kind(edge_index)}")
    verdict = check_module(module, collect)
    if verdict.message is DOT_ATTENTION:
        if verdict.reduce != "sum" or verdict.update is not None:
            raise Unsupported("attention that is not summed")
        if not edge_index.is_cuda and is_small_transformer(module, edge_index, kwargs.get("edge_attr")):
            ran(verdict.place, "PyG's own", SMALL)
            return NotImplemented
        return dot_attention(module, edge_index, size, kwargs, verdict.place)
    message, reduce = verdict.message, verdict.reduce
    x, num_src, num_dst, to_target = _sizes(module, message, edge_index, size, kwargs)
    weight = None
    if message.weight is not None:
        weight = kwargs.get(message.weight)
        if weight is None and not (message.optional and message.weight in kwargs):
            raise Unsupported(f"message() uses {message.weight}, which was not passed to propagate()")
    if collect == GENERIC and not kwargs.keys() >= {*(verdict.update or ())}:
        raise Unsupported("update() uses what was not passed to propagate()")
    if message.form in RELU_FORMS:
        out = _relu_sum(module, message, edge_index, (num_src, num_dst, to_target), x, weight, verdict.place)
        return _updated(module, verdict.update, out, kwargs)
    features, weight, restore = _operands(module, message, edge_index, num_dst, x, weight)
    if features.is_cuda:
        ids.check()  # of earlier calls; in this one PyG raises its own error
    if as_listed:
        out = listed.aggregate(edge_index, to_target, weight, features, num_dst, reduce)
        if out is NotImplemented:
            raise Unsupported(SMALL)
        ran(verdict.place, f"gas {reduce}", listed.WHY)
    else:
        out = _over_graph(module, edge_index, (num_src, num_dst, to_target), features, weight, reduce, verdict.place)
    if restore is not None:
        out = restore(out)
    return _updated(module, verdict.update, out, kwargs)


def _updated(module: Any, names: tuple[str, ...] | None, out: Tensor, kwargs: dict[str, Any]) -> Any:
    """What ``update()``, which asks for some of the arguments by name, makes of an aggregation."""
    return out if names is None else module.update(out, **{name: kwargs[name] for name in names if name in kwargs})


def _relu_sum(
    module: Any, message: Message, edge_index: Any, sizes: tuple[int, int, bool], x: Tensor, of_edges: Any, place: str
) -> Tensor:
    """The sum of ``relu(x_j + of_edges)``; GINEConv has a linear layer for the latter."""
    reason = guards.operand("x", x) or guards.operand(str(message.weight), of_edges)
    if reason or type(edge_index) is not Tensor or not means_relu(message.form, type(module).message):
        raise Unsupported(reason or "the adjacency is an EdgeIndex, or what message() calls is not torch's ReLU")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype not in INDEX_DTYPES or not edge_index.is_contiguous():
        raise Unsupported(f"edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}, or not contiguous")
    if x.dim() != 2 or module.node_dim not in (0, -2) or x.dtype not in FEATURE_DTYPES or x.device != edge_index.device:
        raise Unsupported(f"features are {x.dtype} of shape {list(x.shape)}, or on another device than edge_index")
    lin, shape = module.lin if message is GINE else None, (edge_index.shape[1], x.shape[1])
    if of_edges.device != x.device or (of_edges.shape != shape if lin is None else of_edges.shape[:1] != shape[:1]):
        raise Unsupported(f"edge features of shape {list(of_edges.shape)} against features of shape {list(x.shape)}")
    if lin is not None and bounded.may_not_fit(shape[0], shape[1] * x.element_size(), x.device):
        raise Unsupported("what the layer makes of edge features may not fit into the memory")
    try:
        graph = graph_of(edge_index, *sizes)
        graph.args(csc=torch.is_grad_enabled())
    except (IndexError, ValueError) as error:  # a bad index or size: PyG raises its own error
        raise Unsupported(f"invalid input: {error}") from None
    if lin is not None and _is_narrow_product(lin, of_edges, x):
        return _relu_sum_of_product(graph, x, of_edges, lin, place)
    if lin is not None:  # from here on nothing is refused: hooks of the layer have seen it run
        of_edges = lin(of_edges)
    if _fits(of_edges, shape, x):
        return edge_relu(graph, x, of_edges, place=place)
    ran(place, "edges sum", f"edge features are {of_edges.dtype} of shape {list(of_edges.shape)}")
    ends = edges.Ends(edge_index[int(sizes[2])], edge_index[int(not sizes[2])], lambda: graph)
    return edges.reduce((edges.gather(x, ends, BY_SRC) + of_edges).relu(), ends, "sum")


def _is_narrow_product(lin: Any, of_edges: Tensor, x: Tensor) -> bool:
    """Whether what a linear layer makes of features of edges, which get no gradient, need not exist for a kernel."""
    if x.is_cuda or not gates.takes(x) or of_edges.dim() != 2 or of_edges.requires_grad or not is_product(lin):
        return False
    if guards.function_modes():
        return False
    weight, bias, depth = lin.weight, lin.bias, of_edges.shape[1]
    of_dtype = all(
        t.dtype is x.dtype and not guards.operand("lin", t) for t in (of_edges, weight, *(() if bias is None else (bias,)))
    )
    return of_dtype and depth <= gates.MOST_DEPTH and weight.shape == (x.shape[1], depth) and not torch.is_autocast_enabled("cpu")


def _relu_sum_of_product(graph: Graph, x: Tensor, of_edges: Tensor, lin: Any, place: str) -> Tensor:
    if torch.is_grad_enabled():  # users may write into theirs
        of_edges, x = of_edges.clone(), x.clone() if lin.bias is None else x
    x = x if lin.bias is None else x + lin.bias
    return gates.gate(graph, (gates.Factor(x, attr=of_edges, matrix=lin.weight.t(), act="relu"),), None, "sum", place)


def _fits(t: Any, shape: tuple[int, int], like: Tensor) -> bool:
    return type(t) is Tensor and t.layout is _STRIDED and t.shape == shape and t.dtype is like.dtype and t.device == like.device


def _over_graph(
    module: Any, edge_index: Tensor, sizes: tuple[int, int, bool], features: Tensor, weight: Tensor | None, reduce: str, place: str
) -> Tensor:
    graph = graph_of(edge_index, *sizes)
    try:
        if features.layout is not _STRIDED:
            return _sparse_features(graph, features, weight, reduce, place)
        how: Any = dict(ties="scatter", training=module.training, owner=module, copies=True)
        return aggregate(graph, features, weight, reduce, place=place, **how)
    except (IndexError, ValueError) as error:  # a bad index or size: PyG raises its own error
        raise Unsupported(f"invalid input: {error}") from None


def _sizes(module: Any, message: Message, edge_index: Tensor, size: Any, kwargs: dict[str, Any]) -> tuple[Tensor, int, int, bool]:
    """The gathered features and the sizes of the graph in the direction of the messages, as PyG's collect() finds them."""
    to_target, dim = module.flow == "source_to_target", module.node_dim
    if not to_target and type(edge_index) is not Tensor and module.SUPPORTS_FUSED_EDGE_INDEX:
        raise Unsupported("flow is target_to_source, which PyG's product with an EdgeIndex does not ask for")
    if message.feature not in kwargs:
        raise Unsupported(f"message() uses {message.feature}_j, which was not passed to propagate()")
    x = kwargs[message.feature]
    pair = isinstance(x, (tuple, list))
    if pair:
        if len(x) != 2:
            raise Unsupported("features are not a pair")
        if not to_target and x[0] is not x[1]:
            raise Unsupported("features are a pair and flow is target_to_source")
        x, target = x
    if x is None:
        raise Unsupported("the features to gather are missing")
    num_src = _rows(message.feature, x, dim)
    num_dst = num_src if not pair or target is x or target is None else _rows(message.feature, target, dim)
    if size is not None or type(edge_index) is not Tensor:
        if not guards.is_size(size):
            raise Unsupported("size is not a pair of numbers")
        given = (edge_index.num_rows, edge_index.num_cols) if _is_edge_index(edge_index) else size or (None, None)  # type: ignore[attr-defined]
        of_src, of_dst = given if to_target else given[::-1]
        if of_src not in (None, num_src) or (pair and target is not None and of_dst not in (None, num_dst)):
            raise Unsupported("sizes do not fit together")
        if of_dst is not None:
            num_dst = of_dst
    return x, num_src, num_dst, to_target


def _rows(name: str, t: Any, dim: int) -> int:
    """The number of nodes of a tensor of features."""
    reason = guards.operand(name, t)
    if reason and not _is_sparse_features(t):
        raise Unsupported(reason)
    if not -t.dim() <= dim < t.dim():
        raise Unsupported("sizes do not fit together")
    return t.shape[dim]  # type: ignore[no-any-return]


def _operands(
    module: Any, message: Message, edge_index: Tensor, num_dst: int, x: Tensor, weight: Any
) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor] | None]:
    """Features ``[num_src, F]``, weights ``[E]`` or ``[E, H]`` of the dtype that the framework computes in, and what brings the
    result back into the layout of the features (``None``: it is in it)."""
    dims = x.dim()
    dim = module.node_dim % dims
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype not in INDEX_DTYPES:
        raise Unsupported(f"edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}")
    if x.device != edge_index.device:
        raise Unsupported("features and edge_index are on different devices")
    if weight is not None:
        reason = guards.operand(str(message.weight), weight)
        if reason:
            raise Unsupported(reason)
        weight = weight_of(message, edge_index.shape[1], x, weight, dim)
        if weight.device != x.device:
            raise Unsupported("features and weights are on different devices")
        if x.dtype != weight.dtype and x.layout is _STRIDED:
            dtype = torch.promote_types(x.dtype, weight.dtype)
            x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype not in FEATURE_DTYPES:
        raise Unsupported(f"features are {x.dtype}")
    if dim == 0 and dims == 2:  # the same object: constant features are known by it
        return x, weight, None
    if x.layout is not _STRIDED:
        raise Unsupported(f"features of layout {x.layout} along dimension {dim}")
    moved = x if dim == 0 else x.movedim(dim, 0)
    shape = moved.shape[1:]

    def restore(out: Tensor) -> Tensor:
        out = out.view(num_dst, *shape)
        return out if dim == 0 else out.movedim(0, dim).contiguous()

    return moved.reshape(moved.shape[0], shape.numel()), weight, restore


def weight_of(message: Message, edges: int, x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """The weight as ``[E]`` or ``[E, H]``, for the shapes where the framework's broadcasting means just that."""
    shape = weight.shape
    if message.form == "view":
        scalar = weight.numel() == edges
    else:
        scalar = shape == ((edges, 1) if message.form == "plain" else (edges,))
    # [E, 1] times x_j means a scalar per edge where edges are x_j's last dimension but one.
    if scalar and x.dim() >= 2 and dim == x.dim() - 2:
        return weight if weight.dim() == 1 else weight.reshape(-1)  # the same object: it is known by identity
    if x.dim() == 3 and dim == 0:
        heads = {"unsqueeze": shape, "plain": shape[:2] if shape[2:] == (1,) else ()}.get(message.form, ())
        if heads == (edges, x.shape[1]):
            return weight.reshape(heads)
    raise Unsupported(f"weights of shape {list(shape)} against features of shape {list(x.shape)}")


def _is_sparse_features(x: Any) -> bool:
    return type(x) is Tensor and x.dim() == 2 and not unsupported(x) and not _native.missing(x.device.type)


def _sparse_features(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, place: str) -> Tensor:
    if reduce not in ("sum", "mean"):
        raise Unsupported(f"the {reduce} of features of layout {x.layout}")
    if weight is not None and (weight.dim() != 1 or weight.dtype != x.dtype):
        raise Unsupported(f"weights {weight.dtype} of shape {list(weight.shape)} against features {x.dtype} of layout {x.layout}")
    try:
        return aggregate_csr(graph, x, weight, reduce, place)
    except Unsupported as error:
        raise Unsupported(str(error)) from None


def _is_edge_index(edge_index: Any) -> bool:
    return type(edge_index).__name__ == "EdgeIndex" and type(edge_index).__module__ == "torch_geometric.edge_index"


def _kind(adjacency: Any) -> str:
    if isinstance(adjacency, Tensor) and adjacency.layout is not torch.strided:
        return f"tensor of layout {adjacency.layout}"
    return type(adjacency).__name__
