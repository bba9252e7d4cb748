"""``MessagePassing.propagate`` as one aggregation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.cache import cache
from gnnfast.dispatch.execute import aggregate
from gnnfast.features import aggregate_csr, unsupported
from gnnfast.graph import Graph, ids
from gnnfast.pyg import guards
from gnnfast.pyg.messages import Message
from gnnfast.pyg.verdict import Verdict, check_module, refused
from gnnfast.reporting import fell_back
from gnnfast.types import FEATURE_DTYPES, INDEX_DTYPES
from gnnfast.unsupported import Unsupported


def propagate(module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
    """Stands in for the ``propagate`` that PyG generates for a class. Returns ``NotImplemented`` to let it run."""
    reason = guards.context() or refused(type(module))
    if not reason:
        try:
            return _propagate(module, edge_index, size, kwargs)
        except Unsupported as error:
            reason = str(error)
    fell_back(f"pyg {type(module).__name__}", reason)
    return NotImplemented


def _propagate(module: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
    if (type(edge_index) is not Tensor or edge_index.layout is not torch.strided) and not _is_edge_index(edge_index):
        if module.fuse and _is_sparse(edge_index):
            return NotImplemented  # PyG's fused route, which gnnfast.pyg.sparse serves
        raise Unsupported(f"the adjacency is a {_kind(edge_index)}")
    verdict = check_module(module)
    message, reduce = verdict.message, verdict.reduce
    x, num_src, num_dst, flow = _sizes(module, message, edge_index, size, kwargs)
    weight = kwargs.get(message.weight) if message.weight is not None else None
    if message.weight is not None and weight is None and not (message.optional and message.weight in kwargs):
        raise Unsupported(f"message() uses {message.weight}, which was not passed to propagate()")
    graph = graph_of(edge_index, num_src, num_dst, flow)
    features, weight, restore = _operands(module, message, graph, x, weight)

    if graph.is_cuda:
        ids.check()  # of earlier calls; in this one PyG raises its own error
    try:
        place = f"pyg {type(module).__name__}"
        if features.layout is torch.sparse_csr:
            out = _sparse_features(graph, features, weight, reduce, place)
        else:
            how: Any = dict(ties="scatter", training=module.training, owner=module, copies=True)
            out = aggregate(graph, features, weight, reduce, place=place, **how)
    except (IndexError, ValueError) as error:  # a bad index or size: PyG raises its own error
        raise Unsupported(f"invalid input: {error}") from None
    return _update(module, verdict, restore(out), kwargs)


def _sizes(module: Any, message: Message, edge_index: Tensor, size: Any, kwargs: dict[str, Any]) -> tuple[Tensor, int, int, bool]:
    """The gathered features and the sizes of the graph in the direction of the messages, as PyG's collect() finds them."""
    to_target = module.flow == "source_to_target"
    i, j = (1, 0) if to_target else (0, 1)
    sizes = [edge_index.num_rows, edge_index.num_cols] if _is_edge_index(edge_index) else list(size or (None, None))  # type: ignore[attr-defined]
    if message.feature not in kwargs:
        raise Unsupported(f"message() uses {message.feature}_j, which was not passed to propagate()")
    x = kwargs[message.feature]
    given: list[tuple[int, Any]]
    if isinstance(x, (tuple, list)):
        if not to_target:
            raise Unsupported("features are a pair and flow is target_to_source")
        if len(x) != 2:
            raise Unsupported("features are not a pair")
        given, x = [(0, x[0]), (1, x[1])], x[0]
    else:
        given = [(j, x)]
    if len(sizes) != 2:
        raise Unsupported("size is not a pair")
    dim = module.node_dim
    for at, t in given:
        if t is None:
            continue
        reason = guards.operand(message.feature, t)
        if reason and not _is_sparse_features(t):
            raise Unsupported(reason)
        if not -t.dim() <= dim < t.dim() or (sizes[at] is not None and sizes[at] != t.shape[dim]):
            raise Unsupported("sizes do not fit together")
        sizes[at] = t.shape[dim]
    if x is None or sizes[j] is None or x.shape[dim] != sizes[j]:
        raise Unsupported("the features to gather are missing")
    rows = sizes[i] if sizes[i] is not None else sizes[j]
    return x, sizes[j], rows, to_target


def graph_of(edge_index: Tensor, num_src: int, num_dst: int, to_target: bool) -> Graph:
    """The cached graph of an edge list. Raises Unsupported if it is none."""

    def build() -> Graph:
        if edge_index.dtype not in INDEX_DTYPES or edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise Unsupported(f"edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}")
        origin = cache.origin(edge_index)
        if origin is not None:
            return graph_of(origin, num_src, num_dst, to_target)
        plain = holder[-1].detach()  # so that the rows do not keep the user's tensor object alive as their base
        src, dst = (plain[0], plain[1]) if to_target else (plain[1], plain[0])
        return Graph.from_coo(src, dst, num_src, num_dst)

    holder = (edge_index, edge_index.as_tensor()) if _is_edge_index(edge_index) else (edge_index,)  # type: ignore[attr-defined]
    try:
        return cache.get(holder, ("edge_index", num_src, num_dst, to_target), build)
    except (TypeError, ValueError) as error:
        raise Unsupported(f"invalid input: {error}") from None


def _operands(
    module: Any, message: Message, graph: Graph, x: Tensor, weight: Any
) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    """Features ``[num_src, F]``, weights ``[E]`` or ``[E, H]`` of the dtype that the framework computes in, and what brings the
    result back into the layout of the features."""
    dim = module.node_dim % x.dim()
    if x.device != graph.device:
        raise Unsupported("features and edge_index are on different devices")
    if weight is not None:
        reason = guards.operand(str(message.weight), weight)
        if reason:
            raise Unsupported(reason)
        weight = _weight(message, graph, x, weight, dim)
        if weight.device != x.device:
            raise Unsupported("features and weights are on different devices")
        if x.dtype != weight.dtype and x.layout is torch.strided:
            dtype = torch.promote_types(x.dtype, weight.dtype)
            x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype not in FEATURE_DTYPES:
        raise Unsupported(f"features are {x.dtype}")
    if dim == 0 and x.dim() == 2:  # the same object: constant features are known by it
        return x, weight, lambda out: out
    if x.layout is not torch.strided:
        raise Unsupported(f"features of layout {x.layout} along dimension {dim}")
    moved = x if dim == 0 else x.movedim(dim, 0)
    shape = moved.shape[1:]

    def restore(out: Tensor) -> Tensor:
        out = out.view(graph.num_dst, *shape)
        return out if dim == 0 else out.movedim(0, dim).contiguous()

    return moved.reshape(moved.shape[0], shape.numel()), weight, restore


def _weight(message: Message, graph: Graph, x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """The weight as ``[E]`` or ``[E, H]``, for the shapes where the framework's broadcasting means just that."""
    edges, shape = graph.num_edges, weight.shape
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


def _update(module: Any, verdict: Verdict, out: Tensor, kwargs: dict[str, Any]) -> Any:
    if verdict.update is None:
        return out
    return module.update(out, **{name: kwargs[name] for name in verdict.update if name in kwargs})


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


def _is_sparse(adjacency: Any) -> bool:
    return _kind(adjacency) == "SparseTensor" or (isinstance(adjacency, Tensor) and adjacency.layout is not torch.strided)


def _kind(adjacency: Any) -> str:
    if isinstance(adjacency, Tensor) and adjacency.layout is not torch.strided:
        return f"tensor of layout {adjacency.layout}"
    return type(adjacency).__name__
