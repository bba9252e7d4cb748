"""Node features of which most are zero: compressed, aggregated over a graph, and multiplied by dense weights.

Dense features are compressed by themselves where that pays and they are constant: not a result that could be differentiated, and
seen before at the same layer, unchanged (:mod:`gnnfast.cache` says what can be noticed; ``GNNFAST_FEATURE_DENSITY_THRESHOLD=0``
switches compression off). Hidden activations are new tensors in every pass and so are never measured, which would wait for the
device. Zeros that are not stored count as nothing: a weight that is infinite or NaN does not turn them into NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gnnfast import _native
from gnnfast.cache import Held, Sightings, cache, is_constant, keep_if_captured, nbytes_of
from gnnfast.config import settings
from gnnfast.dispatch.calls import arguments, count
from gnnfast.dispatch.select import SparseChoice, densities, sparse_pays
from gnnfast.graph import Graph
from gnnfast.graph.checks import saved_tensors_are_watched
from gnnfast.guards import tracing_state
from gnnfast.reporting import measured, ran
from gnnfast.stream import is_capturing
from gnnfast.types import FEATURE_DTYPES, split
from gnnfast.unsupported import CAPTURING, Unsupported

if _native.cpu.loaded:
    from gnnfast.ops.spmm import SPMM, call
    from gnnfast.ops.spmm_sparse_features import PRODUCT, SPARSE_FEATURES

# Smaller features cost next to nothing dense. A GPU reads that many times as much in 20 us, less than it takes to look at them.
MIN_WIDTH, MIN_ELEMENTS, TIMES_ON_CUDA = 128, 1 << 18, 64
_TO_CSR = {
    torch.strided: "gnnfast.spmm takes dense features; x.to_sparse_csr() compresses them",
    torch.sparse_coo: "x.coalesce().to_sparse_csr() converts it",
}


class Features(Held):
    """A compressed ``[N, F]`` matrix: ``rowptr [N + 1]`` and ``col [stored]``, int32, with columns ascending and none twice within
    a row, and ``values [stored]``.

    Of a ``torch.sparse_csr`` tensor the structure alone is kept: its values are the user's, who may write into them unseen.
    ``slot`` then maps each of its entries to the place in the values; ``None``: they are equal.
    """

    def __init__(
        self, shape: tuple[int, int], rowptr: Tensor, col: Tensor, values: Tensor | None, slot: Tensor | None = None
    ) -> None:
        super().__init__()
        self.shape, self.rowptr, self.col, self.values, self.slot = shape, rowptr, col, values, slot
        self.grew(sum(map(nbytes_of, (rowptr, col, values, slot))))

    @classmethod
    def from_dense(cls, x: Tensor) -> Features:
        """The entries of ``x [N, F]`` that are not zero (NaN is not zero)."""
        with torch.no_grad(), torch.inference_mode(False):
            stored = x.detach() != 0
            rowptr = torch.cat([stored.new_zeros(1, dtype=torch.int64), stored.sum(1).cumsum(0)])
            col = stored.nonzero()[:, 1]
            return cls((x.shape[0], x.shape[1]), rowptr.int(), col.int(), x.detach()[stored])

    @classmethod
    def from_csr(cls, x: Tensor) -> Features:
        """From a ``torch.sparse_csr`` tensor, whose rows may hold columns in any order and several times.

        Raises:
            ValueError, IndexError: the indices are no matrix of that shape.
        """
        with torch.no_grad(), torch.inference_mode(False):
            rowptr, col = x.crow_indices(), x.col_indices()
            try:
                Graph.from_csr(rowptr, col, num_src=x.shape[1])  # checks them
            except (IndexError, ValueError) as error:
                raise type(error)(f"the indices of x: {error}") from None
            row = torch.repeat_interleave(rowptr.diff().long(), output_size=col.numel())  # 64 bits for the key
            key = row * max(x.shape[1], 1) + col
            slot = None
            if not bool((key.diff() > 0).all()):
                key, slot = key.unique(return_inverse=True)
                row, col = key // max(x.shape[1], 1), key % max(x.shape[1], 1)
                rowptr = torch.searchsorted(row, torch.arange(x.shape[0] + 1, device=row.device))
            rowptr, col = (t.to(torch.int32, copy=True) for t in (rowptr, col))
            return cls((x.shape[0], x.shape[1]), rowptr, col, None, slot)

    @classmethod
    def of_csr(cls, x: Tensor) -> Features:
        """The same, kept as long as ``x`` lives and is not changed. Raises Unsupported if it cannot be made now."""
        parts = x.crow_indices(), x.col_indices()
        features: Features = cache.get((x,), "features", lambda: _unless_capturing(x, cls.from_csr), parts)
        if x.is_cuda:
            keep_if_captured(features)
        return features

    def values_of(self, x: Tensor) -> Tensor:
        """The values of the ``torch.sparse_csr`` tensor that this was made from, so that it can be differentiated."""
        values = x.values() if torch.is_grad_enabled() else x.values().detach()
        if self.slot is None:
            return values
        return values.new_zeros(self.col.numel()).index_add(0, self.slot, values)

    @cached_property
    def graph(self) -> Graph:
        """The matrix as a graph from its columns to its rows: the product with dense weights is an aggregation over it."""
        graph = Graph.from_csr(self.rowptr, self.col, num_src=self.shape[1])
        self.grew(graph.nbytes)
        graph.edges.account = self
        return graph

    @cached_property
    def values_t(self) -> Tensor:
        """The values in the order of the transpose."""
        assert self.values is not None
        perm = self.graph.csc.perm
        if perm is None:
            return self.values
        made = self.values.index_select(0, perm)
        self.grew(made.nbytes)
        return made

    def graph_for(self, csc: bool) -> Graph:
        """:attr:`graph` with the formats that a product, and with ``csc`` its gradient, need. Raises Unsupported if they cannot
        be made now."""
        if "graph" not in self.__dict__ or not self.graph.has(csc):
            _unless_capturing(self.col, lambda _: self.graph.args(csc, exact=True))
        return self.graph

    def product(self, csc: bool, row_bytes: int, values: Tensor | None = None) -> tuple[Any, ...]:
        """What the product with ``row_bytes`` of weights a column takes before the weights, with ``csc`` that of its gradient too;
        with ``values``, those are used. Raises Unsupported if it cannot be made now."""
        graph = self.graph_for(csc)
        if values is not None:
            return *graph.args(csc, row_bytes, exact=True), values, None
        if csc and "values_t" not in self.__dict__:
            _unless_capturing(self.col, lambda _: self.values_t)
        return *graph.args(csc, row_bytes, permuted=False, exact=True), self.values, self.values_t if csc else None

    @property
    def density(self) -> float:
        """The share of entries that are stored."""
        return self.col.numel() / max(self.shape[0] * self.shape[1], 1)

    def __repr__(self) -> str:
        return f"Features({list(self.shape)}, density={self.density:.2%})"


def aggregate(
    graph: Graph, features: Features, weight: Tensor | None, reduce: str, place: str, reason: str, values: Tensor | None = None
) -> Tensor:
    """``[num_dst, F]``: the sum or mean of the features of each node's in-neighbours, on unchecked operands. ``values`` of features
    that have none."""
    x = features.values if values is None else values
    assert x is not None
    grad_enabled = torch.is_grad_enabled()
    csc = grad_enabled and x.requires_grad
    weighted_grad = grad_enabled and weight is not None and weight.requires_grad
    if csc or weighted_grad:
        args = graph.args(csc, exact=True)
    else:
        args, weight, _ = arguments(graph, weight, False, exact=True)
    operands = (weight, features.rowptr, features.col, x, features.shape[1], reduce == "mean")
    count(graph, place, f"sparse features {reduce}", reason, x.nbytes)
    return call(SPARSE_FEATURES, csc or weighted_grad, args, *operands)


def multiply(features: Features, weight: Tensor, values: Tensor | None = None) -> Tensor:
    """``[N, O]``: the features times the transpose of dense ``weight [O, F]``, on unchecked operands. ``values`` of features that
    have none. Raises Unsupported."""
    grad_enabled, row_bytes = torch.is_grad_enabled(), weight.shape[0] * weight.element_size()
    if values is not None and values.requires_grad and grad_enabled:
        args = features.graph_for(True).args(True, row_bytes, exact=True)
        return call(SPMM, True, args, values, None, weight.t().contiguous(), False, None)
    csc = grad_enabled and weight.requires_grad
    product = features.product(csc, row_bytes, values)
    matrix, operands = split(product)
    return call(PRODUCT, csc, matrix, *operands, weight)


# ---- constant dense features ---------------------------------------------------------------------------------------------------
class Measured(Held):
    """The density of a tensor that is a constant, and its compressed copy once somebody wants it."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.features: Features | None = None
        self.choices: dict[Any, SparseChoice] = {}
        self.density = int(x.detach().count_nonzero()) / x.numel()
        self._entry = measured(list(x.shape), str(x.dtype).removeprefix("torch."), self.density)

    def chosen(self, choice: SparseChoice) -> None:
        """Has the report say why features stay dense."""
        if not choice.sparse and self.features is None:
            self._entry["state"] = f"dense: {choice.reason}"

    def compressed(self, x: Tensor) -> Features | None:
        """The copy, with its transpose counted in, if the cache can hold it."""
        if self.features is None:
            if 2 * self.density * x.numel() * (8 + x.element_size()) > cache.budget():
                self._entry["state"] = "dense: a compressed copy would not fit the cache (GNNFAST_CACHE_MB)"
                return None
            features = self.features = _unless_capturing(x, Features.from_dense)
            self._entry["state"] = "compressed"
            features.account = self
            self.grew(features.nbytes)
        return self.features


_sightings = Sightings()


def sighted(x: Tensor, owner: object, what: str) -> bool:
    """Whether ``owner``, a layer, used these features before. Asked first: hidden activations, which are new in every pass, have
    then cost next to nothing."""
    if tracing_state() is not None or not large(x) or x.requires_grad or x.is_inference():
        return False
    return _sightings.again(x, id(owner), what)


def large(x: Tensor) -> bool:
    """Whether features are so large that their zeros may be worth knowing."""
    return x.numel() >= (MIN_ELEMENTS * TIMES_ON_CUDA if x.is_cuda else MIN_ELEMENTS) and x.dim() == 2 and x.shape[1] >= MIN_WIDTH


def eligible(x: Tensor) -> bool:
    """Whether dense features may be a constant input that is worth measuring."""
    return not (
        type(x) is not Tensor
        or tracing_state() is not None  # which would warn of the comparisons
        or x.dim() != 2
        or not large(x)
        or x.layout is not torch.strided
        or x.dtype not in FEATURE_DTYPES
        or not is_constant(x)
        or torch.compiler.is_compiling()
        or settings().feature_density_threshold == 0
        # Replays read what x holds then; a compressed copy would not follow.
        or (x.is_cuda and is_capturing())
    )


def measure(x: Tensor, owner: object, what: str) -> Measured | None:
    """What is known of dense features that ``owner``, a layer, uses for the second time or later; ``None`` for all others. ``what``
    tells its uses apart: several of one pass must not look like several passes."""
    return measure_sighted(x) if sighted(x, owner, what) else None


def measure_sighted(x: Tensor) -> Measured | None:
    """:func:`measure` for features that were :func:`sighted`, which is asked once in a use: each time is taken for one."""
    if not eligible(x):
        return None
    if torch.is_grad_enabled() and saved_tensors_are_watched():
        return None
    try:
        return cache.get((x,), "density", lambda: _unless_capturing(x, Measured))  # type: ignore[no-any-return]
    except Unsupported:
        return None


def _unless_capturing(x: Tensor, make: Callable[[Tensor], Any]) -> Any:
    if x.is_cuda and is_capturing():
        raise Unsupported(CAPTURING)
    with torch.no_grad(), torch.inference_mode(False):
        return make(x)


def choose(x: Tensor, found: Measured, what: str) -> SparseChoice:
    """The selector's choice for measured features: ``what`` is ``"aggregate"`` or ``"product"``."""
    current = settings()
    key = what, current.feature_density_threshold
    choice = found.choices.get(key)
    if choice is None:
        choice = found.choices[key] = sparse_pays(x.device.type, what, found.density, x.shape[1], x.element_size(), current)
        found.chosen(choice)
    return choice


def share(x: Tensor, found: Measured, what: str) -> float:
    """The cost of the features in the way chosen, over that of dense ones, which is equal at the calibrated limit."""
    if not choose(x, found, what).sparse:
        return 1.0
    return min(found.density / max(densities(x.device.type, what, x.element_size()).threshold(x.shape[1]), 1e-9), 1.0)


def try_aggregate(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, owner: object, place: str) -> Tensor | None:
    """:func:`aggregate` where ``x`` is constant and so sparse that it pays, else ``None``."""
    if reduce not in ("sum", "mean") or (weight is not None and weight.dim() != 1):
        return None
    chosen = find(x, owner, "aggregate")
    if chosen is None:
        return None
    return aggregate(graph, chosen[0], weight, reduce, place, chosen[1])


def try_multiply(x: Tensor, weight: Tensor, owner: object, place: str) -> Tensor | None:
    """``x @ weight.t()`` for ``weight [O, F]`` where ``x`` is constant and so sparse that it pays, else ``None``."""
    chosen = find(x, owner, "product")
    if chosen is None:
        return None
    try:
        out = multiply(chosen[0], weight)
    except Unsupported:
        return None
    ran(place, "sparse product", chosen[1])
    return out


def find(x: Tensor, owner: object, what: str) -> tuple[Features, str] | None:
    """The compressed copy of ``x`` and the reason, if ``x`` is constant and so sparse that it pays for ``what`` (as
    :func:`choose`)."""
    found = measure(x, owner, what)
    if found is None:
        return None
    choice = choose(x, found, what)
    try:
        features = found.compressed(x) if choice.sparse else None
    except Unsupported:
        return None
    return None if features is None else (features, choice.reason)


# ---- features given as torch.sparse_csr ----------------------------------------------------------------------------------------
def aggregate_csr(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, place: str) -> Tensor:
    """:func:`spmm_sparse_features` on unchecked operands. Raises Unsupported."""
    features = Features.of_csr(x)
    reason = f"x is torch.sparse_csr, density {features.density:.2%}"
    return aggregate(graph, features, weight, reduce, place, reason, features.values_of(x))


def multiply_csr(x: Tensor, weight: Tensor, place: str) -> Tensor:
    """``x @ weight.t()`` for ``weight [O, F]``, on unchecked operands. Raises Unsupported."""
    features = Features.of_csr(x)
    out = multiply(features, weight, features.values_of(x))
    ran(place, "sparse product", f"x is torch.sparse_csr, density {features.density:.2%}")
    return out


def unsupported(x: Tensor) -> str:
    """Why a tensor is not taken as sparse features; empty if it is."""
    if not isinstance(x, Tensor):
        return f"x must be a torch.sparse_csr tensor, got {type(x).__name__}"
    if x.layout is not torch.sparse_csr:
        hint = _TO_CSR.get(x.layout, "x.to_sparse_csr() converts it")
        return f"x has layout {x.layout}; sparse features are taken as torch.sparse_csr ({hint})"
    if x.dtype not in FEATURE_DTYPES:
        return f"x has dtype {x.dtype}; accepted are float32, float64, float16 and bfloat16"
    if x.dim() == 2 and x.values().dim() != 1:
        return f"x stores entries of shape {list(x.values().shape[1:])}; accepted are single numbers"
    return ""
