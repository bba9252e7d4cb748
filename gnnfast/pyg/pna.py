"""PNAConv as a whole (Corso et al., NeurIPS 2020). With one layer before the aggregation, its message is linear in both ends of an
edge, ``W_i x_i + W_j x_j + b``: both products are made on nodes, and what is aggregated is ``W_j x_j``, shifted by the rest, all
statistics at once.
Scaling by degree is left until after the product with the layer behind, which is narrower. With edge features messages exist, but
nothing wider than they."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from gnnfast.config import settings
from gnnfast.dispatch import edges
from gnnfast.dispatch.several import degrees, log_degrees, reduce_messages, reduce_shifted
from gnnfast.graph import Graph
from gnnfast.graph.formats import BY_SRC
from gnnfast.patching import class_of, is_dispatched
from gnnfast.pyg import bounded, guards
from gnnfast.pyg.adjacency import graph_of
from gnnfast.pyg.aggregations import kinds_of
from gnnfast.pyg.known import replaced_in_layer
from gnnfast.pyg.layers import REORDERED, is_product
from gnnfast.pyg.verdict import check_steps, is_plain
from gnnfast.reporting import ran
from gnnfast.types import INDEX_DTYPES
from gnnfast.unsupported import Unsupported

# As DegreeScalerAggregation has them: of a scaler, the graph and a dtype, ``[N, 1]``.
_SCALES: dict[str, Callable[[Any, Graph, torch.dtype], Tensor]] = {
    "identity": lambda scaler, graph, dtype: torch.ones(graph.num_dst, 1, dtype=dtype, device=graph.device),
    "amplification": lambda scaler, graph, dtype: log_degrees(graph, dtype) / scaler.avg_deg_log,
    "attenuation": lambda scaler, graph, dtype: scaler.avg_deg_log / log_degrees(graph, dtype, 1),
    "linear": lambda scaler, graph, dtype: degrees(graph, dtype) / scaler.avg_deg_lin,
    "inverse_linear": lambda scaler, graph, dtype: scaler.avg_deg_lin / degrees(graph, dtype).clamp(min=1),
}


class _Parts(NamedTuple):
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
        if type(edge_index) is not Tensor or edge_index.dim() != 2:
            return NotImplemented  # propagate says so
        place = f"pyg {type(module).__name__}"
        try:
            parts = _check(known, module, edge_attr)
            _check_operands(module, parts, x, edge_index, edge_attr)
            graph = graph_of(edge_index, x.shape[0], x.shape[0], module.flow == "source_to_target")
            graph.args(csc=torch.is_grad_enabled())
        except Unsupported as error:
            ran(place, "in parts", str(error))  # which say themselves how they ran
            return NotImplemented
        except (IndexError, ValueError):  # PyG raises its own
            return NotImplemented
        return _forward(module, parts, x, edge_index, edge_attr, graph, place)

    return pna_conv


def _check(known: Any, module: Any, edge_attr: Any) -> _Parts:
    """Raises Unsupported if the layer is not what PyG wrote, or an option is not served."""
    own, cls, current = module.__dict__, type(module), settings()
    reason = guards.context()
    if reason or cls is not known or "propagate" in own or not is_dispatched(cls.propagate):
        raise Unsupported(reason or "a method is another than the layer's")
    check_steps(module)
    reason = replaced_in_layer(cls)
    if reason:
        raise Unsupported(f"{reason} is not the known one")
    if own["node_dim"] != 0 or current.sample != "off" or current.kernel == "sampled":
        raise Unsupported("an option is not served")
    before, behind, encoder = list(module.pre_nns), list(module.post_nns), own["_modules"].get("edge_encoder")
    for nn in (*before, *behind):
        if type(nn) is not torch.nn.Sequential or not is_plain(nn) or not len(nn) or not is_product(nn[0]):
            raise Unsupported("its linear layers are more than products")
    if any(len(nn) > 1 or nn[0].bias is None for nn in before) or len(before) != own["towers"] or len(behind) != len(before):
        raise Unsupported("messages are not linear")
    if (encoder is None) != (edge_attr is None) or (encoder is not None and not is_product(encoder)):
        raise Unsupported("edge features of a layer that takes none, or none")
    return _Parts([nn[0] for nn in before], [nn[0] for nn in behind], encoder, _kinds_of(module.aggr_module))


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


def _check_operands(module: Any, parts: _Parts, x: Any, edge_index: Tensor, edge_attr: Any) -> None:
    """Raises Unsupported if kernels do not take them, or PyG does not."""
    scaler, width, towers = module.aggr_module, module.F_in, module.towers
    linears = [*parts.before, *parts.behind] + ([] if parts.encoder is None else [parts.encoder])
    given = [("x", x), ("edge_attr", x if edge_attr is None else edge_attr), ("edge_index", edge_index)]
    given += [("a parameter", t) for lin in linears for t in (lin.weight, lin.bias) if t is not None]
    given += [("a degree", t) for t in (scaler.avg_deg_log, scaler.avg_deg_lin)]
    for name, t in given:
        reason = guards.operand(name, t)
        if reason:
            raise Unsupported(reason)
        if t.device != edge_index.device or (t is not edge_index and t.dtype is not x.dtype):
            raise Unsupported("features, parameters and edge_index do not agree in dtype or device")
    if x.dtype not in REORDERED or torch.is_autocast_enabled(x.device.type):
        raise Unsupported("sums in another order need 32 bits")
    if edge_index.shape[0] != 2 or edge_index.dtype not in INDEX_DTYPES:
        raise Unsupported(f"edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}")
    ends, behind = 2 if edge_attr is None else 3, 1 + len(parts.kinds) * len(scaler.scaler)
    shapes = [lin.weight.shape == (width, ends * width) for lin in parts.before]
    shapes += [lin.weight.shape[1] == behind * width for lin in parts.behind]
    shapes += [x.dim() == 2 and x.shape[1] == width * (towers if module.divide_input else 1)]
    if edge_attr is not None:
        fitting = edge_index.shape[1], parts.encoder.weight.shape[1]
        shapes += [edge_attr.shape == fitting, parts.encoder.weight.shape[0] == width]
    if not all(shapes):
        raise Unsupported("shapes do not fit together")
    if edge_index.shape[1] < x.shape[0]:
        raise Unsupported("there are fewer edges than nodes, of which more would be multiplied")
    if edge_attr is not None and bounded.may_not_fit(edge_index.shape[1], towers * width * x.element_size(), x.device):
        raise Unsupported("messages with edge features may not fit")


def _forward(module: Any, parts: _Parts, x: Tensor, edge_index: Tensor, edge_attr: Any, graph: Graph, place: str) -> Tensor:
    width, towers, nodes, scaler = module.F_in, module.towers, x.shape[0], module.aggr_module
    if torch.is_grad_enabled():
        x = x.clone()  # PyG keeps a copy too, so that users may write into theirs
    of_tower = x.split(width, 1) if module.divide_input else [x] * towers
    to_src = _products(of_tower, [lin.weight[:, width : 2 * width] for lin in parts.before])
    to_dst = _products(of_tower, [lin.weight[:, :width] for lin in parts.before], [lin.bias for lin in parts.before])
    if edge_attr is None:
        out = reduce_shifted(graph, to_src, to_dst, parts.kinds, place)
    else:
        of_edges, encoder = _side_by_side([lin.weight[:, 2 * width :] for lin in parts.before]), parts.encoder
        bias = None if encoder.bias is None else of_edges.mv(encoder.bias)
        first, second = edge_index
        dst, src = (second, first) if module.flow == "source_to_target" else (first, second)
        ends = edges.Ends(dst, src, lambda: graph)
        messages = linear(edge_attr, of_edges @ encoder.weight, bias) + edges.gather(to_src, ends, BY_SRC)
        ran(place, "edges reductions", "edge features are added to messages")
        out = reduce_messages(messages, to_dst, ends, parts.kinds)
    scales = torch.cat([_SCALES[name](scaler, graph, x.dtype) for name in scaler.scaler], 1).unsqueeze(2)
    kinds, results = len(parts.kinds), []
    for tower, (own, lin, nn) in enumerate(zip(of_tower, parts.behind, module.post_nns)):
        reduced = out if towers == 1 else out.view(nodes, kinds, towers, width)[:, :, tower].reshape(nodes, kinds * width)
        # [O, S * A F] -> [S * O, A F]
        weight = lin.weight[:, width:].unflatten(1, (len(scaler.scaler), kinds * width)).transpose(0, 1).flatten(0, 1)
        scaled = linear(reduced, weight).view(nodes, len(scaler.scaler), lin.weight.shape[0]) * scales
        result = linear(own, lin.weight[:, :width], lin.bias) + scaled.sum(1)
        for layer in nn[1:]:
            result = layer(result)
        results.append(result)
    return module.lin(results[0] if towers == 1 else torch.cat(results, 1))


def _products(of_tower: Any, weights: list[Tensor], biases: list[Tensor] | None = None) -> Tensor:
    """``[N, T F]``: the features of each tower times its weight, and its bias."""
    if all(x is of_tower[0] for x in of_tower):
        return linear(of_tower[0], _side_by_side(weights), None if biases is None else _side_by_side(biases))
    return torch.cat([linear(x, w, None if biases is None else biases[i]) for i, (x, w) in enumerate(zip(of_tower, weights))], 1)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
