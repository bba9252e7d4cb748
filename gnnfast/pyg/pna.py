"""PNAConv as a whole (Corso et al., NeurIPS 2020). With one layer before the aggregation, its message is linear in both ends of an
edge, ``W_i x_i + W_j x_j + b``: both products are made on nodes, and what is aggregated is ``W_j x_j``, shifted by the rest, all
statistics at once.
Scaling by degree is left until after the product with the layer behind, which is narrower. With edge features messages exist, but
nothing wider than they."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.config import settings
from gnnfast.dispatch import edges
from gnnfast.dispatch.bias import linear
from gnnfast.dispatch.several import degrees, log_degrees, reduce_messages, reduce_shifted
from gnnfast.graph import Graph
from gnnfast.graph.formats import BY_SRC
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import bounded
from gnnfast.pyg.adjacency import graph_of
from gnnfast.pyg.aggregations import kinds_of
from gnnfast.pyg.known import replaced_in_layer
from gnnfast.pyg.matrices import edges_for, is_matrix
from gnnfast.pyg.products import is_product
from gnnfast.pyg.small import SMALL, is_tiny
from gnnfast.pyg.verdict import check_steps, is_plain
from gnnfast.reporting import ran
from gnnfast.types import INDEX_DTYPES, REORDERED
from gnnfast.unsupported import Unsupported

# The degrees of nodes ``[N, 1]``, or, with a least degree, the logarithm of one more than the larger of both.
Degrees = Callable[[int | None], Tensor]
# As DegreeScalerAggregation has them: of a scaler and degrees, ``[N, 1]``.
_SCALES: dict[str, Callable[[Any, Degrees], Tensor]] = {
    "identity": lambda scaler, degrees: torch.ones_like(degrees(None)),
    "amplification": lambda scaler, degrees: degrees(0) / scaler.avg_deg_log,
    "attenuation": lambda scaler, degrees: scaler.avg_deg_log / degrees(1),
    "linear": lambda scaler, degrees: degrees(None) / scaler.avg_deg_lin,
    "inverse_linear": lambda scaler, degrees: scaler.avg_deg_lin / degrees(None).clamp(min=1),
}


class Parts(NamedTuple):
    """Of each tower the linear layer before the aggregation and the first one behind it; the layer of edge features, if they were
    given; the kinds of aggregations."""

    before: list[Any]
    behind: list[Any]
    encoder: Any
    kinds: tuple[str, ...]


def make_pna_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for the ``forward(x, edge_index, edge_attr)`` of PNAConv."""
    known = class_of(original)

    def pna_conv(module: Any, x: Any, edge_index: Any, edge_attr: Any) -> Any:
        if is_matrix(edge_index):
            edge_index = edges_for(module, edge_index, (x, x)) if edge_attr is None else None
        if type(edge_index) is not Tensor or edge_index.dim() != 2:
            return NotImplemented  # propagate says so
        place = f"pyg {type(module).__name__}"
        try:
            reason = guards.context()
            if reason:
                raise Unsupported(reason)
            if edge_attr is not None and is_tiny(x, edge_index, "tiny statistics cpu"):
                raise Unsupported(SMALL)
            parts = check_layer(known, module, edge_attr is not None)
            _check_operands(module, parts, x, edge_index, edge_attr)
            graph = graph_of(edge_index, x.shape[0], x.shape[0], module.flow == "source_to_target")
            graph.args(csc=torch.is_grad_enabled())
        except Unsupported as error:
            ran(place, "in parts", str(error))  # which say themselves how they ran
            return NotImplemented
        except (IndexError, ValueError):  # PyG raises its own
            return NotImplemented
        return _over_graph(module, parts, x, edge_index, edge_attr, graph, place)

    return pna_conv


def check_layer(known: Any, module: Any, of_edges: bool) -> Parts:
    """Raises Unsupported if the layer is not what PyG wrote, or an option is not served; ``of_edges``: it gets edge features."""
    own, cls, current = module.__dict__, type(module), settings()
    if cls is not known or "propagate" in own or not is_dispatched(cls.propagate):
        raise Unsupported("a method is another than the layer's")
    check_steps(module)
    reason = replaced_in_layer(cls)
    if reason:
        raise Unsupported(f"{reason} is not the known one")
    if own["node_dim"] != 0 or current.sample != "off" or current.kernel == "sampled":
        raise Unsupported("an option is not served")
    before, behind, encoder = _modules(module.pre_nns), _modules(module.post_nns), own["_modules"].get("edge_encoder")
    for nn in (*before, *behind):
        if type(nn) is not torch.nn.Sequential or not is_plain(nn) or not len(nn) or not is_product(_modules(nn)[0]):
            raise Unsupported("its linear layers are more than products")
    if any(len(nn) > 1 or _modules(nn)[0].bias is None for nn in before) or not len(before) == own["towers"] == len(behind):
        raise Unsupported("messages are not linear")
    if (encoder is not None) != of_edges or (encoder is not None and not is_product(encoder)):
        raise Unsupported("edge features of a layer that takes none, or none")
    return parts_of(module, of_edges, _kinds_of(module.aggr_module))


def parts_of(module: Any, of_edges: bool, kinds: tuple[str, ...]) -> Parts:
    before, behind = ([_modules(nn)[0] for nn in _modules(nns)] for nns in (module.pre_nns, module.post_nns))
    return Parts(before, behind, module.edge_encoder if of_edges else None, kinds)


def _modules(container: Any) -> list[Any]:
    """What a ModuleList or a Sequential holds: to ask it by position takes it ten times as long."""
    return list(container._modules.values())


def _kinds_of(scaler: Any) -> tuple[str, ...]:
    """The aggregations that are scaled. Raises Unsupported if they, or the scalers, are not served."""
    from torch_geometric.nn.aggr import DegreeScalerAggregation

    if type(scaler) is not DegreeScalerAggregation:
        raise Unsupported(f"the aggregation is {type(scaler).__name__}")
    if not is_plain(scaler):
        raise Unsupported("hooks are registered on the aggregation")
    if not all(name in _SCALES for name in scaler.scaler) or "avg_deg_log" in scaler._parameters:
        raise Unsupported("a scaler is not served")
    return kinds_of(scaler.aggr)


def _check_operands(module: Any, parts: Parts, x: Any, edge_index: Tensor, edge_attr: Any) -> None:
    """Raises Unsupported if kernels do not take them, or PyG does not."""
    given, own = (x, edge_index) if edge_attr is None else (x, edge_index, edge_attr), tensors_of(module, parts)
    names = itertools.chain(("x", "edge_index", "edge_attr")[: len(given)], itertools.repeat("a parameter or degree"))
    reason = next(filter(None, map(guards.operand, names, (*given, *own))), "")
    if reason:
        raise Unsupported(reason)
    if edge_index.shape[0] != 2 or edge_index.dtype not in INDEX_DTYPES:
        raise Unsupported(f"edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}")
    check_shapes(module, parts, own, x, edge_index, edge_attr)
    if edge_index.shape[1] < x.shape[0]:
        raise Unsupported("there are fewer edges than nodes, of which more would be multiplied")
    if edge_attr is not None:
        check_memory(module, edge_index.shape[1], x)


def tensors_of(module: Any, parts: Parts) -> list[Any]:
    """The parameters of its linear layers, and the degrees that scalers divide by."""
    scaler, linears = module.aggr_module, [*parts.before, *parts.behind] + ([] if parts.encoder is None else [parts.encoder])
    return [t for lin in linears for t in (lin.weight, lin.bias) if t is not None] + [scaler.avg_deg_log, scaler.avg_deg_lin]


def check_shapes(module: Any, parts: Parts, tensors: list[Any], x: Any, edge_index: Any, edge_attr: Any) -> None:
    """Raises Unsupported if they do not fit together, with the layer's own ``tensors``. Asked of tensors without values, too."""
    scaler, width, towers, device, dtype = module.aggr_module, module.F_in, module.towers, edge_index.device, x.dtype
    for t in (*tensors, x, *(() if edge_attr is None else (edge_attr,))):
        if t.device != device or t.dtype is not dtype:
            raise Unsupported("features, parameters and edge_index do not agree in dtype or device")
    if x.dtype not in REORDERED or torch.is_autocast_enabled(x.device.type):
        raise Unsupported("sums in another order need 32 bits")
    ends, behind = 2 if edge_attr is None else 3, 1 + len(parts.kinds) * len(scaler.scaler)
    shapes = [lin.weight.shape == (width, ends * width) for lin in parts.before]
    shapes += [lin.weight.shape[1] == behind * width for lin in parts.behind]
    shapes += [x.dim() == 2 and x.shape[1] == width * (towers if module.divide_input else 1)]
    if edge_attr is not None:
        fitting = edge_index.shape[1], parts.encoder.weight.shape[1]
        shapes += [edge_attr.shape == fitting, parts.encoder.weight.shape[0] == width]
    linears = [*parts.before, *parts.behind, *([] if parts.encoder is None else [parts.encoder])]
    shapes += [lin.bias is None or lin.bias.shape == lin.weight.shape[:1] for lin in linears]
    if not all(shapes):
        raise Unsupported("shapes do not fit together")


def check_memory(module: Any, num_edges: int, x: Any) -> None:
    """Raises Unsupported where messages with edge features, which exist, may not fit."""
    if bounded.may_not_fit(num_edges, module.towers * module.F_in * x.dtype.itemsize, x.device):
        raise Unsupported("messages with edge features may not fit")


def _over_graph(module: Any, parts: Parts, x: Tensor, edge_index: Tensor, edge_attr: Any, graph: Graph, place: str) -> Tensor:
    def reduce(to_src: Tensor, to_dst: Tensor, of_edges: Tensor | None) -> Tensor:
        if of_edges is None:
            return reduce_shifted(graph, to_src, to_dst, parts.kinds, place)
        first, second = edge_index
        dst, src = (second, first) if module.flow == "source_to_target" else (first, second)
        ends = edges.Ends(dst, src, lambda: graph)
        ran(place, "edges reductions", "edge features are added to messages")
        return reduce_messages(of_edges + edges.gather(to_src, ends, BY_SRC), to_dst, ends, parts.kinds)

    if torch.is_grad_enabled():
        x = x.clone()  # PyG keeps a copy too, so that users may write into theirs
    dtype = x.dtype
    return forward(
        module,
        parts,
        x,
        edge_attr,
        reduce,
        lambda least: degrees(graph, dtype) if least is None else log_degrees(graph, dtype, least),
    )


def forward(
    module: Any, parts: Parts, x: Tensor, edge_attr: Any, reduce: Callable[[Tensor, Tensor, Any], Tensor], of_nodes: Degrees
) -> Tensor:
    """The layer, with ``reduce(to_src [N, T F], to_dst [N, T F], of_edges [E, T F] | None)`` for all its statistics, which are
    those of ``to_src[src] + to_dst[dst] + of_edges``: ``[N, kinds T F]``."""
    width, towers, nodes, scaler = module.F_in, module.towers, x.shape[0], module.aggr_module
    own = x.split(width, 1) if module.divide_input else [x] * towers
    shared = towers == 1 or not module.divide_input
    to_src = _products(own, shared, [lin.weight[:, width : 2 * width] for lin in parts.before])
    to_dst = _products(own, shared, [lin.weight[:, :width] for lin in parts.before], [lin.bias for lin in parts.before])
    of_edges = None
    if edge_attr is not None:
        weight, encoder = _side_by_side([lin.weight[:, 2 * width :] for lin in parts.before]), parts.encoder
        bias = encoder.bias  # PyG keeps none for the backward pass, so that users may write into theirs
        bias = None if bias is None else weight.mv(bias.clone() if torch.is_grad_enabled() else bias)
        of_edges = linear(edge_attr, weight @ encoder.weight, bias)
    out = reduce(to_src, to_dst, of_edges)
    scales = torch.cat([_SCALES[name](scaler, of_nodes) for name in scaler.scaler], 1).unsqueeze(2)
    kinds, results = len(parts.kinds), []
    for tower, (of_tower, lin, nn) in enumerate(zip(own, parts.behind, module.post_nns)):
        reduced = out if towers == 1 else out.view(nodes, kinds, towers, width)[:, :, tower].reshape(nodes, kinds * width)
        # [O, S * A F] -> [S * O, A F]
        weight = lin.weight[:, width:].unflatten(1, (len(scaler.scaler), kinds * width)).transpose(0, 1).flatten(0, 1)
        scaled = linear(reduced, weight).view(nodes, len(scaler.scaler), lin.weight.shape[0]) * scales
        result = linear(of_tower, lin.weight[:, :width], lin.bias) + scaled.sum(1)
        for layer in _modules(nn)[1:]:
            result = layer(result)
        results.append(result)
    return module.lin(results[0] if towers == 1 else torch.cat(results, 1))  # type: ignore[no-any-return]


def _products(own: Any, shared: bool, weights: list[Tensor], biases: list[Tensor] | None = None) -> Tensor:
    """``[N, T F]``: the features of each tower, which may be the same, times its weight, and its bias."""
    if shared:
        return linear(own[0], _side_by_side(weights), None if biases is None else _side_by_side(biases))
    return torch.cat([linear(x, w, None if biases is None else biases[i]) for i, (x, w) in enumerate(zip(own, weights))], 1)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
