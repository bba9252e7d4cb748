"""RGATConv (Busbridge et al., "Relational Graph Attention Networks", 2019): attention over edges that have types.

PyG makes a matrix for each edge, and multiplies the features at both of its ends. Here features are multiplied once for each node
and type of edges that begin there, of those at the other end only what their scores need, and edges carry what there is in these
rows: scores are numbers for each edge and head, and messages never exist.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.config import settings
from gnnfast.dispatch import edges
from gnnfast.dispatch.bias import biased
from gnnfast.dispatch.execute import aggregate, softmax
from gnnfast.dispatch.relations import Kept, Rows, are_filled, check_bounds, filled, kept_with_edges, listed
from gnnfast.dispatch.select import cannot_win
from gnnfast.graph import Graph
from gnnfast.graph.checks import MOST_EDGES, MOST_NODES
from gnnfast.graph.formats import BY_DST, BY_SRC
from gnnfast.patching import class_of
from gnnfast.pyg.known import replaced_in_attention
from gnnfast.pyg.products import is_product
from gnnfast.pyg.relations import check_layer, check_matrices, check_tensors, copied
from gnnfast.pyg.small import are_few
from gnnfast.pyg.verdict import is_plain
from gnnfast.reporting import ran
from gnnfast.types import REORDERED
from gnnfast.unsupported import Unsupported

ADDITIVE, MULTIPLICATIVE = "additive-self-attention", "multiplicative-self-attention"
ACROSS, WITHIN = "across-relation", "within-relation"


class Attended(Kept):
    """Edges from rows of sources ``onto`` nodes, and ``within`` types, to rows of destinations."""

    def __init__(self, src: Rows, dst: Rows, nodes: Tensor, num_nodes: int) -> None:
        onto, within = listed(src.edge, nodes, src.number, num_nodes), listed(src.edge, dst.edge, src.number, dst.number)
        super().__init__(onto, within, src.of_nodes, dst.of_nodes)
        self.src, self.dst, self.onto, self.within = src, dst, onto, within
        self.ends = edges.Ends(dst.edge, src.edge, lambda: within)


def make_rgat_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``RGATConv.forward(x, edge_index, edge_type, edge_attr, size, return_attention_weights)``."""
    known = class_of(original)

    def rgat_conv(module: Any, x: Any, edge_index: Any, edge_type: Any, edge_attr: Any, size: Any, asked: Any) -> Any:
        place = f"pyg {type(module).__name__}"
        try:
            if _is_small(module, x, edge_type) or _are_few(module, edge_index):
                raise Unsupported("too small to gain")
            _check(known, module, x, edge_index, edge_type, edge_attr, size)
            attended = _attended(module, x.shape[0], edge_index, edge_type)
        except Unsupported as error:
            ran(place, "in parts", str(error))
            return NotImplemented
        weight, heads = _weight_of(module), module.heads
        values = attended.src.product(x, weight, place)
        keys = values @ module.k
        of_edges = None if edge_attr is None else _scores_of_edges(module, edge_attr)
        alpha = _softmax(module, attended, _queries(attended.dst, x, weight, module.q, place), keys, of_edges, place)
        shares = _modified(module, attended.onto, alpha, edge_index[1])
        how: Any = dict(place=place, training=module.training)
        out = aggregate(attended.onto, values, shares, "sum", **how).view(-1, heads, module.out_channels)
        if module.mod == "additive":
            out = out + module.w * aggregate(attended.onto, values, None, "sum", **how).view_as(out)
        elif module.mod == "scaled":
            degree = module.activation(_degree(attended.onto, alpha) @ module.l1 + module.b1)
            out = out * (degree @ module.l2 + module.b2).unsqueeze(1)
        out = out.flatten(1) if module.concat is True else out.mean(dim=1)
        out = out if module.bias is None else biased(out, module.bias)
        return (out, (edge_index, alpha)) if isinstance(asked, bool) else out

    return rgat_conv


def _weight_of(module: Any) -> Tensor:
    """The matrices of all types, ``[R, F, O]``, or ``[R, B, F / B, O / B]`` where blocks stay."""
    if module.num_bases is None:
        return copied(module, filled(module.weight))
    bases = module.basis.view(module.num_bases, -1)
    return (module.att @ bases).view(module.num_relations, module.in_channels, -1)  # type: ignore[no-any-return]


def _queries(rows: Rows, x: Tensor, weight: Tensor, q: Tensor, place: str) -> Tensor:
    if weight.dim() == 4:
        return rows.product(x, weight, place) @ q
    return rows.product(x, weight @ q, place)


def _scores_of_edges(module: Any, edge_attr: Tensor) -> Tensor:
    rows, lin = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr, module.lin_edge
    if is_product(lin) and lin.bias is None:
        return rows @ (lin.weight.t() @ module.e)
    return lin(rows) @ module.e  # type: ignore[no-any-return]


def _softmax(module: Any, attended: Attended, q: Tensor, k: Tensor, of_edges: Tensor | None, place: str) -> Tensor:
    """The coefficient of each edge and head, ``[E, H]``."""
    within = module.attention_mechanism == WITHIN
    graph = attended.within if within else attended.onto
    if module.attention_mode == MULTIPLICATIVE:
        score = edges.gather(q, attended.ends, BY_DST) * edges.gather(k, attended.ends, BY_SRC)
        return softmax(graph, score if of_edges is None else score * of_edges, place=place)
    if within:
        return softmax(graph, of_edges, q, k, module.negative_slope, place=place)
    score = edges.gather(q, attended.ends, BY_DST)
    return softmax(graph, score if of_edges is None else score + of_edges, None, k, module.negative_slope, place=place)


def _modified(module: Any, graph: Graph, alpha: Tensor, dst: Tensor) -> Tensor:
    """What edges are weighted by."""
    if module.mod == "f-additive":
        return torch.where(alpha > 0, alpha + 1, alpha)
    if module.mod == "f-scaled":
        return alpha * _degree(graph, alpha)[dst]
    if module.mod not in ("additive", "scaled") and module.training and module.dropout > 0:
        return torch.nn.functional.dropout(alpha, p=module.dropout, training=True)
    return alpha


def _degree(graph: Graph, like: Tensor) -> Tensor:
    return graph.csr.rowptr.diff().to(like.dtype).unsqueeze(1)


def _check(known: Any, module: Any, x: Any, edge_index: Any, edge_type: Any, edge_attr: Any, size: Any) -> None:
    """Raises Unsupported if the layer is not what PyG wrote, or kernels do not take what it is given."""
    steps = check_layer(known, module)
    replaced = replaced_in_attention(known)
    if replaced:
        raise Unsupported(replaced)
    if steps.reduce != "sum" or module.dim != 1:
        raise Unsupported("an option is not served")
    activation = module._modules.get("activation")
    if module.mod == "scaled" and not (type(activation) is torch.nn.ReLU and is_plain(activation)):
        raise Unsupported("the activation is not torch's ReLU alone")  # PyG calls it for each edge
    if module.attention_mode not in (ADDITIVE, MULTIPLICATIVE) or module.attention_mechanism not in (ACROSS, WITHIN):
        raise Unsupported("the kind of attention is not known")
    if type(module.negative_slope) not in (int, float):
        raise Unsupported("the slope is no number")
    check_tensors(edge_index, edge_type, {**module._parameters, "edge_attr": edge_attr})
    reason = guards.operand("x", x)
    first = module.weight if module.num_bases is None else module.basis
    if reason or first.dtype not in REORDERED or torch.is_autocast_enabled(x.device.type):
        raise Unsupported(reason or f"weights are {first.dtype}, or autocast is on")
    check_matrices(module, first, module.in_channels, module.heads * module.out_channels)
    if x.dim() != 2 or x.shape[1] != module.in_channels or x.dtype is not first.dtype or x.device != first.device:
        raise Unsupported("features do not fit the weights")
    if size is not None and tuple(size) != (x.shape[0],) * 2:
        raise Unsupported("there are other nodes at the two ends of edges")
    if edge_attr is not None and (module.lin_edge is None or edge_attr.dim() > 2 or edge_attr.shape[0] != edge_type.shape[0]):
        raise Unsupported("features of edges do not fit")


def _attended(module: Any, num_nodes: int, edge_index: Tensor, edge_type: Tensor) -> Attended:
    """What is kept with edges and their types. Raises Unsupported, also if an id is out of range, of which PyG says so."""
    types, num_edges = module.num_relations, edge_index.shape[1]
    if types * num_nodes >= MOST_NODES or num_edges >= MOST_EDGES:
        raise Unsupported("there are too many nodes, relations or edges")
    all_rows = _has_all_rows(module, types * num_nodes, num_edges)

    def make() -> Attended:
        src, dst = edge_index.long().unbind()
        check_bounds([(src, num_nodes), (dst, num_nodes), (edge_type, types)])
        of_src, of_dst = (Rows.of(ids, edge_type, num_nodes, types, all_rows) for ids in (src, dst))
        return Attended(of_src, of_dst, dst, num_nodes)

    return kept_with_edges((edge_index, edge_type), ("attended", num_nodes, types, all_rows), make)  # type: ignore[no-any-return]


def _is_small(module: Any, x: Any, edge_type: Any) -> bool:
    """Whether PyG's own operations are done, on a GPU, before the host has started those of fewer bytes; asked before anything is
    looked at. Within types PyG selects the edges of each, for which the host waits."""
    if type(x) is not Tensor or type(edge_type) is not Tensor or not x.is_cuda or edge_type.dim() != 1:
        return False
    if module.attention_mechanism == WITHIN or torch.are_deterministic_algorithms_enabled() or guards.context():
        return False
    # The matrix of each edge is written once and read twice; so are the gradients at both of its ends.
    training = torch.is_grad_enabled()
    nbytes = edge_type.shape[0] * module.in_channels * module.heads * module.out_channels * x.element_size()
    return cannot_win((8 if training else 3) * nbytes // (module.num_blocks or 1), training, settings(), "messages")


def _are_few(module: Any, edge_index: Any) -> bool:
    """Whether a graph on a CPU has so few edges that a matrix for each of them is less than what finds the rows of a new one."""
    if type(edge_index) is not Tensor or not edge_index.is_cpu or edge_index.dim() != 2:
        return False
    matrix_bytes = module.in_channels * module.heads * module.out_channels * 4
    return are_few(edge_index, matrix_bytes, "matrices cpu")


def _has_all_rows(module: Any, rows: int, num_edges: int) -> bool:
    """Whether one product makes the rows of all nodes and types, and none is gathered for it."""
    weight = module.weight if module.num_bases is None else module.basis
    if weight.dim() == 4 and not are_filled(weight):
        return False
    row_bytes = module.heads * module.out_channels * weight.element_size()
    return rows * row_bytes <= ALL_ROWS_BYTES if weight.is_cuda else rows <= ALL_ROWS * num_edges


# A layer with 8 types on one GPU took 3.6 ms with rows of all, 87 MB, and 4.0 with those there are; at 350 MB 5.3 and 4.2. On a CPU
# with as many rows as edges 10.6 and 13.2, with 13 times as many 100 and 38.
ALL_ROWS_BYTES, ALL_ROWS = 128 << 20, 4
