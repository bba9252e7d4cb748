"""Layers with a matrix for each type of edges, RGCNConv and FastRGCNConv (Schlichtkrull et al., ESWC 2018).

PyG picks out the edges of each relation in each call and multiplies what they bring to all nodes, or makes a matrix for each edge.
Here the edges of one relation that end in one node meet in a row (:mod:`gnnfast.dispatch.relations`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfast import guards
from gnnfast.config import settings
from gnnfast.dispatch.bias import biased
from gnnfast.dispatch.execute import aggregate
from gnnfast.dispatch.relations import Relations, check_bounds, filled, has_all_rows, kept_with_edges, multiplied
from gnnfast.graph.checks import MOST_EDGES, MOST_NODES
from gnnfast.patching import class_of, code_of, is_dispatched
from gnnfast.pyg.as_written import sums
from gnnfast.pyg.known import replaced_in_layer, replaced_in_relations
from gnnfast.pyg.small import is_new_and_few
from gnnfast.pyg.verdict import Steps, check_steps
from gnnfast.reporting import ran
from gnnfast.types import FEATURE_DTYPES, INDEX_DTYPES, REORDERED
from gnnfast.unsupported import Unsupported

# Where PyG's own notes anew in each call whether to call pyg-lib; without it TorchScript compiles no layer.
_NOTED = "_use_segment_matmul_heuristic_output"


def make_rgcn_conv(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for the ``forward(x, edge_index, edge_type)`` of RGCNConv, or of FastRGCNConv."""
    known = class_of(original)
    fast, noted = known.__name__ == "FastRGCNConv", _NOTED in code_of(original).co_names

    def rgcn_conv(module: Any, x: Any, edge_index: Any, edge_type: Any) -> Any:
        place, training = f"pyg {type(module).__name__}", module.training
        few = fast and _is_new_and_few(module, edge_index)
        try:
            reduce = _reduction(known, fast, module)
            x_src, x_dst = x if type(x) is tuple and len(x) == 2 and x[1] is not None else (x, x)
            _check_operands(module, fast, x_src, x_dst, edge_index, edge_type)
            if few and (module.num_blocks is not None or x_src is None or not x_src.is_floating_point()):
                return NotImplemented  # propagate() says so
            relations = None if few else _relations_of(module, fast, x_src, x_dst, edge_index, edge_type)
        except Unsupported as error:
            ran(place, "in parts", str(error))  # which say themselves how they ran
            return NotImplemented
        weight, numbered = _weight_of(module), x_src is None or not x_src.is_floating_point()
        if fast:
            module.fuse = False  # as PyG's own leaves it
            weight = copied(module, weight)
        if relations is None:
            ran(place, "PyG's own", "too small to gain from a graph that is new: its operations alone")
            return _finish(module, _add_edges(weight, x_src, x_dst, edge_index, edge_type, reduce), x_dst)
        of_nodes = weight.reshape(-1, module.out_channels) if numbered else x_src
        rows = aggregate(relations.into, of_nodes, None, reduce, place=place, ties="scatter", training=training, copies=True)
        # In which RGCNConv sums over relations.
        dtype = rows.dtype if fast else torch.promote_types(rows.dtype, torch.get_default_dtype())
        if noted and module.num_blocks is None and _NOTED not in module.__dict__ and _asks_pyg_lib():
            setattr(module, _NOTED, False)
        if not numbered:
            out = relations.multiplied(rows, weight, place, training, dtype)
        elif relations.onto is None:
            out = rows.view(-1, module.num_relations, rows.shape[1]).sum(1).to(dtype)
        else:
            out = aggregate(relations.onto, rows.to(dtype), None, "sum", place=place, training=training)
        return _finish(module, out, x_dst)

    return rgcn_conv


def _finish(module: Any, out: Tensor, x_dst: Any) -> Tensor:
    if module.root is not None:
        nodes = torch.arange(module.in_channels_l, device=out.device) if x_dst is None else x_dst
        out = out + (nodes @ module.root if nodes.is_floating_point() else module.root[nodes])
    return out if module.bias is None else biased(out, module.bias)


def _add_edges(weight: Tensor, x_src: Tensor, x_dst: Tensor, edge_index: Tensor, edge_type: Tensor, reduce: str) -> Tensor:
    """FastRGCNConv's sum or mean as PyG writes it, a matrix for each edge, but for how edges of a type are counted."""
    (src, dst), nodes = edge_index.unbind(), x_dst.shape[0]
    # A negative type is an error where PyG's one_hot() gets it.
    of_edges = weight.index_select(0, edge_type) if reduce == "mean" else weight[edge_type]
    messages = torch.bmm(x_src.index_select(0, src).unsqueeze(1), of_edges).squeeze(1)
    if reduce == "mean":
        of_type = torch.add(edge_type, dst, alpha=weight.shape[0])
        counts = torch.ops.gnnfast.degrees.default(of_type, nodes * weight.shape[0], weight.dtype)
        messages = messages * counts.index_select(0, of_type).reciprocal_().unsqueeze(1)
    return sums(messages, dst, nodes)


def _is_new_and_few(module: Any, edge_index: Any) -> bool:
    """Whether FastRGCNConv meets a new graph on a GPU, and makes few bytes of matrices for its edges."""
    if type(edge_index) is not Tensor or not edge_index.is_cuda or edge_index.dim() != 2:
        return False
    own = module.__dict__  # at once: this is asked where ten lines of Python count
    weight = own["_parameters"].get("weight")
    if weight is None:  # somebody has parametrised it
        return False
    row_bytes = own["in_channels_l"] * own["out_channels"] * weight.element_size()
    return is_new_and_few(edge_index, row_bytes, module, "cuda")


def _asks_pyg_lib() -> bool:
    import torch_geometric

    return torch_geometric.backend.use_segment_matmul is None


def make_hetero_linear(original: FunctionType) -> Callable[..., Any]:
    """A dispatcher for ``HeteroLinear.forward_naive(x, type_ptr)``, which HGTConv and HEATConv run without pyg-lib: rows in order
    of their types, of which each has a matrix. PyG writes what they make into one tensor, for whose gradient autograd copies the
    whole once for each type, and asks the device where each begins."""

    def forward_naive(module: Any, x: Any, type_ptr: Any) -> Any:
        weight = module._parameters.get("weight")
        if weight is None:  # somebody has parametrised it, and PyG asks for it once for each type
            return NotImplemented
        if any(guards.operand(name, t) for name, t in (("x", x), ("weight", weight), ("type_ptr", type_ptr))) or guards.context():
            return NotImplemented
        if x.dim() != 2 or x.dtype is not weight.dtype or x.device != weight.device or type_ptr.dim() != 1:
            return NotImplemented
        if weight.shape[1:] != (x.shape[1], module.out_channels):
            return NotImplemented
        if torch.is_autocast_enabled(x.device.type) or guards.capturing(x.device):
            return NotImplemented
        counts = _counts(type_ptr, weight.shape[0], x.shape[0])
        if counts is None:
            return NotImplemented
        return multiplied(x, weight, counts)

    return forward_naive


def biases_of_types(bias: Tensor, type_vec: Tensor, type_ptr: Tensor) -> Tensor:
    """``bias[type_vec]`` of rows in order of their types, in HeteroLinear. Its gradient adds up the rows of a type one after the
    other on a GPU: 13 ms for 169,343 rows of three types on an H200."""
    types, rows = bias.shape[0], type_vec.shape[0]
    if rows < 64 * types * types or not (bias.requires_grad and torch.is_grad_enabled()) or guards.context():
        return bias[type_vec]
    if guards.operand("bias", bias) or guards.operand("type_ptr", type_ptr) or guards.capturing(bias.device):
        return bias[type_vec]
    counts = _counts(type_ptr, types, rows)
    if counts is None:
        return bias[type_vec]
    return torch.cat([of_one.expand(count, -1) for of_one, count in zip(bias.unbind(), counts) if count])


def _counts(type_ptr: Tensor, types: int, rows: int) -> list[int] | None:
    """How many of the rows, of which there are some, are of each type; ``None`` if those of a type that there is not are among
    them."""
    bounds = type_ptr.tolist()
    counts = [end - begin for begin, end in itertools.pairwise(bounds)]
    fits = len(counts) == types and min(counts, default=0) >= 0 and bounds[0] == 0 and bounds[-1] == rows
    return counts if fits and rows else None


def _weight_of(module: Any) -> Tensor:
    """The matrices of all relations, ``[R, F, O]``, or ``[R, B, F / B, O / B]`` where blocks stay."""
    weight, bases, relations = module.weight, module.num_bases, module.num_relations
    if bases is not None:
        return (module.comp @ weight.view(bases, -1)).view(relations, -1, module.out_channels)  # type: ignore[no-any-return]
    return filled(weight)


def copied(module: Any, weight: Tensor) -> Tensor:
    """The matrices of a layer of which PyG makes one for each edge, so that the user may write into its own before the backward
    pass."""
    return weight.clone() if weight is module.weight and torch.is_grad_enabled() else weight


def check_layer(known: Any, module: Any) -> Steps:
    """What a layer with types of edges runs. Raises Unsupported if it is not what PyG wrote, or is asked for something else."""
    own, cls, current = module.__dict__, type(module), settings()
    reason = guards.context()
    if not reason and (cls is not known or "propagate" in own or not is_dispatched(cls.propagate)):
        reason = "a method is another than the layer's"
    if reason:
        raise Unsupported(reason)
    steps, replaced = check_steps(module), replaced_in_layer(cls) or replaced_in_relations()
    if replaced:
        raise Unsupported(f"{replaced} is not the known one")
    if own["node_dim"] != 0 or own["flow"] != "source_to_target" or current.sample != "off" or current.kernel == "sampled":
        raise Unsupported("an option is not served")
    return steps


def _reduction(known: Any, fast: bool, module: Any) -> str:
    """How edges of a relation are aggregated. Raises Unsupported."""
    import torch_geometric

    steps, own = check_layer(known, module), module.__dict__
    if fast:
        if type(own["aggr"]) is not str or own["aggr"] not in _LINEAR:
            raise Unsupported(f"the aggregation is {own['aggr']}")
        return _LINEAR[own["aggr"]]
    if steps.reduce not in ("sum", "mean", "max", "min"):
        raise Unsupported("the aggregation is none of sum, mean, max and min")
    in_segments = torch_geometric.typing.WITH_SEGMM and torch_geometric.backend.use_segment_matmul is not False
    if in_segments and steps.reduce != "sum" and module.num_bases is None and module.num_blocks is None:
        raise Unsupported("with pyg-lib, PyG may aggregate over the edges of all relations at once, which is not the same")
    return steps.reduce


def check_tensors(edge_index: Any, edge_type: Any, others: dict[str, Any]) -> None:
    """Raises Unsupported unless edges and their types are what kernels take; ``others`` are with them, or ``None``."""
    names = {"edge_index": edge_index, "edge_type": edge_type} | {name: t for name, t in others.items() if t is not None}
    for name, t in names.items():
        reason = guards.operand(name, t)
        if reason or t.device != edge_index.device:
            raise Unsupported(reason or f"{name} is on {t.device}, and edge_index is on {edge_index.device}")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype not in INDEX_DTYPES:
        raise Unsupported(f"edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}")
    if not edge_index.shape[1]:
        raise Unsupported("there are no edges")
    if edge_type.dtype is not torch.int64 or edge_type.shape != edge_index.shape[1:]:
        raise Unsupported(f"edge_type is {edge_type.dtype} of shape {list(edge_type.shape)}")


def check_matrices(module: Any, weight: Tensor, width: int, out_width: int) -> None:
    """Raises Unsupported unless there is a matrix for each relation, or blocks of one. PyG needs no more than are asked for."""
    blocks, relations = module.num_blocks, module.num_relations
    shape = (relations, width, out_width) if blocks is None else (relations, blocks, width // blocks, out_width // blocks)
    if module.num_bases is None and weight.shape != shape:
        raise Unsupported("there are other matrices than one for each relation")


_LINEAR = {"add": "sum", "sum": "sum", "mean": "mean"}


def _check_operands(module: Any, fast: bool, x_src: Any, x_dst: Any, edge_index: Any, edge_type: Any) -> None:
    """Raises Unsupported if kernels do not take them, or PyG does not."""
    weight = module.weight
    parts = {name: getattr(module, name) for name in ("weight", "root", "comp", "bias")}
    check_tensors(edge_index, edge_type, {**parts, "x": x_src, "x of destinations": x_dst})
    if weight.dtype not in (REORDERED if fast else FEATURE_DTYPES):
        raise Unsupported(f"weights are {weight.dtype}")
    if fast and torch.is_autocast_enabled(weight.device.type):
        raise Unsupported("autocast is on")
    width = module.in_channels_l
    check_matrices(module, weight, width, module.out_channels)
    if x_src is not None and x_src.is_floating_point():
        if x_src.dtype is not weight.dtype or x_src.dim() != 2 or x_src.shape[1] != width or not x_dst.is_floating_point():
            raise Unsupported("features do not fit the weights")
    else:
        for t in (x_src, x_dst):
            if t is not None and (t.dtype is not torch.int64 or t.dim() != 1):
                raise Unsupported("numbers of nodes are not one-dimensional int64")
        if module.num_blocks is not None:
            raise Unsupported("blocks of weights are for features")  # PyG says so


def _relations_of(module: Any, fast: bool, x_src: Any, x_dst: Any, edge_index: Tensor, edge_type: Tensor) -> Relations:
    """What is kept with edges and their types, and the numbers of nodes if they are given. Raises Unsupported, also if an id is out
    of range, of which PyG says what it says."""
    width, relations = module.in_channels_l, module.num_relations
    of_weights = width if x_src is None or not x_src.is_floating_point() else 0
    numbers = x_src if of_weights and not fast else None  # FastRGCNConv looks up nodes by their place instead
    num_src = width if x_src is None else x_src.shape[0]
    num_dst = num_src if x_dst is None else x_dst.shape[0]
    if relations * max(of_weights, num_dst) >= MOST_NODES or max(num_src, num_dst, edge_index.shape[1]) >= MOST_EDGES:
        raise Unsupported("there are too many nodes, relations or edges")
    keys = (edge_index, edge_type) if numbers is None else (edge_index, edge_type, numbers)
    rows = num_dst * relations
    all_rows = rows <= 4 * edge_index.shape[1] and has_all_rows(module.weight, rows, 0 if of_weights else width)
    key = "relations", num_src, num_dst, relations, of_weights, all_rows
    make = lambda: _build(edge_index, edge_type, numbers, num_src, num_dst, relations, of_weights, all_rows)  # noqa: E731
    return kept_with_edges(keys, key, make)  # type: ignore[no-any-return]


def _build(
    edge_index: Tensor,
    edge_type: Tensor,
    numbers: Tensor | None,
    num_src: int,
    num_dst: int,
    relations: int,
    of_weights: int,
    all_rows: bool,
) -> Relations:
    src, dst = edge_index.long().unbind()
    bounds = [(src, num_src), (dst, num_dst), (edge_type, relations)]
    if of_weights:
        bounds.append((src if numbers is None else numbers, of_weights))
    check_bounds(bounds)
    if of_weights:
        src = edge_type * of_weights + (src if numbers is None else numbers[src])
        num_src = relations * of_weights
    return Relations.of(src, dst, edge_type, num_src, num_dst, relations, all_rows)
