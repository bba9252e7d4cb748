"""A layer that is linear up to its bias as one node of autograd: on small graphs the nodes of its parts take longer than their
kernels, and the sums between them need not exist.

``A (X W^T) + b + X_dst R^T`` or ``(A X) W^T + b + X_dst R^T``: A is the adjacency, with its constant weights, as a sum or a mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfast.ops.bias import column_sums, plus_product
from gnnfast.ops.spmm import SPMM, apply_of, below_autograd, run
from gnnfast.ops.spmm_sparse_features import PRODUCT
from gnnfast.types import REDUCTIONS, REORDERED, Matrix, split

_ops = torch.ops.gnnfast
_SUM, _MEAN = REDUCTIONS["sum"], REDUCTIONS["mean"]
FREED_BYTES = 8 << 20  # of sums, from which on not to keep them is worth gradients that round otherwise


class Formats(NamedTuple):
    """A over CSR: ``graph`` and the weights as SPMM takes them."""

    graph: Matrix
    weight: Tensor | None
    weight_t: Tensor | None
    mean: bool

    def times(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return run(_ops.spmm.default, *self.graph, self.weight, self.weight_t, x, self.mean), None

    def kept(self) -> tuple[Tensor | None, Tensor | None]:
        """What the user could write into before the backward pass, which autograd then finds out."""
        return self.weight, self.weight_t

    def bare(self) -> Formats:
        """Without these, for as long as nodes of autograd live."""
        return self if self.weight is None else self._replace(weight=None, weight_t=None)

    def transpose_times(self, kept: tuple[Any, Any], degree: Any, grad: Tensor) -> Tensor:
        found = SPMM.backward(self, self.graph, (*kept, None, None), (False, False, True), grad)[2]
        assert found is not None
        return found


class Coo(NamedTuple):
    """A over COO: ``coo`` are row and column, ``(Tensor, Tensor)``."""

    coo: Any
    weight: Tensor | None
    num_rows: int
    num_cols: int
    mean: bool

    def times(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return run(_ops.spmm_coo.default, *self.coo, self.weight, x, self.num_rows, _MEAN if self.mean else _SUM)  # type: ignore[no-any-return]

    def degree(self) -> Tensor | None:
        """The degrees of a mean, which :meth:`times` returns too."""
        ones = self.coo[0].new_ones(self.num_cols, 1, dtype=torch.float32)
        return self._replace(weight=None).times(ones)[1] if self.mean else None

    def kept(self) -> tuple[Tensor | None, ...]:
        return *self.coo, self.weight

    def bare(self) -> Coo:
        return Coo(None, None, self.num_rows, self.num_cols, self.mean)

    def transpose_times(self, kept: tuple[Any, ...], degree: Any, grad: Tensor) -> Tensor:
        row, column, weight = kept
        over = degree if self.mean else None
        return run(_ops.spmm_coo.default, column, row, weight, grad, self.num_cols, _SUM, over)[0]  # type: ignore[no-any-return]


def compute(
    a: Formats | Coo, first: bool, product: Any, x: Tensor, lin_weight: Tensor, bias: Any, x_dst: Any, root: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The layer ``[M, O]``, what lies between its product and its aggregation, and the degrees of a mean over COO.

    Args:
        a: the adjacency ``[M, N]``.
        first: whether the product comes before the aggregation.
        product: what PRODUCT takes before its weight, if ``x`` is to be used compressed.
        x: ``[N, F]``; lin_weight: ``[O, F]``; bias: ``[O]`` or ``None``.
        x_dst: ``[M, F']``, or ``None`` for ``x``; root: ``[O, F']`` or ``None``.
    """
    if first:
        hidden = torch.nn.functional.linear(x, lin_weight) if product is None else PRODUCT.op(*product, lin_weight)
        out, degree = a.times(hidden)
        if bias is not None:
            out.add_(bias)
    else:
        hidden, degree = a.times(x)
        out = torch.nn.functional.linear(hidden, lin_weight, bias)
    if root is not None:
        out.addmm_(x if x_dst is None else x_dst, root.t())
    return out, hidden, degree


class Layer(torch.autograd.Function):
    """:func:`compute`, which can be differentiated, also twice. Gradients are those of the product ``first`` or of the aggregation
    first, whose result is then a second output: the gradient of the weight depends on it."""

    @staticmethod
    def forward(ctx: Any, a: Any, first: bool, product: Any, *operands: Any) -> Any:
        ctx.set_materialize_grads(False)
        with below_autograd():
            out, hidden, degree = compute(a, first, product, *operands)
        x, lin_weight, _, x_dst, root = operands
        need_x, need_weight, _, need_dst, need_root = ctx.needs_input_grad[3:]
        # A^T (grad W) is (A^T grad) W. Where x is kept for its root anyway and grad is not wider, the sums need not be kept.
        if not first and x_dst is None and need_x and need_root and x.dtype in REORDERED:
            first = lin_weight.shape[0] <= lin_weight.shape[1] and hidden.nbytes >= FREED_BYTES
        ctx.a, ctx.first, ctx.product, ctx.degree, ctx.square = a.bare(), first, product, degree, x_dst is None
        ctx.save_for_backward(
            (x if first else hidden) if need_weight and product is None else None,
            lin_weight if need_x else None,
            (x if x_dst is None else x_dst) if need_root else None,
            root if need_dst or (need_x and x_dst is None) else None,
            *(a.kept() if need_x or (first and need_weight) else ()),
        )
        return out if first else (out, hidden)

    @staticmethod
    def backward(ctx: Any, grad: Any, to_hidden: Any = None) -> Any:
        multiplied, lin_weight, x_dst, root, *of_a = ctx.saved_tensors
        need_x, need_weight, need_bias, need_dst, need_root = ctx.needs_input_grad[3:]
        to_x = to_weight = to_bias = to_dst = to_root = None
        if ctx.first and grad is not None and (need_x or need_weight):
            hidden = ctx.a.transpose_times(of_a, ctx.degree, grad)
            to_x = hidden.mm(lin_weight) if need_x else None
            if need_weight and ctx.product is None:
                to_weight = hidden.t().mm(multiplied)
            elif need_weight:
                to_weight = PRODUCT.backward(ctx, *split(ctx.product), None, hidden)[2]
        elif not ctx.first:
            if need_x:
                through = None if grad is None else grad.mm(lin_weight)
                both = through is not None and to_hidden is not None
                through = through + to_hidden if both else to_hidden if through is None else through
                to_x = None if through is None else ctx.a.transpose_times(of_a, ctx.degree, through)
            if need_weight and grad is not None:
                to_weight = grad.t().mm(multiplied)
        if grad is not None:
            to_bias = column_sums(grad) if need_bias else None
            to_root = grad.t().mm(x_dst) if need_root else None
            if to_x is not None and root is not None and ctx.square:
                to_x = plus_product(to_x, grad, root)
            to_dst = grad.mm(root) if need_dst else None
        return None, None, None, to_x, to_weight, to_bias, to_dst, to_root


_apply = apply_of(Layer)


def layer(needs_grad: bool, a: Formats | Coo, first: bool, *rest: Any) -> Tensor:
    """The first result of :func:`compute`, so that it can be differentiated if ``needs_grad``."""
    if needs_grad:
        out = _apply(a, first, *rest)
        return out[0] if isinstance(out, tuple) else out
    with below_autograd():
        return compute(a, first, *rest)[0]


class Shifted(torch.autograd.Function):
    """``(A + s I) X`` of a square A and ``s [1]``: a sum over neighbours and what a node keeps of itself, as in GIN. As nodes of
    their own, the sum, the product and the addition of their gradients take longer than on small graphs the kernel."""

    @staticmethod
    def forward(ctx: Any, a: Any, x: Tensor, scale: Tensor) -> Tensor:
        _, need_x, need_scale = ctx.needs_input_grad
        out, ctx.degree = a.times(x)
        ctx.a = a.bare()
        ctx.save_for_backward(scale, x if need_scale else None, *(a.kept() if need_x else ()))
        return out.addcmul_(x, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scale, x, *of_a = ctx.saved_tensors
        _, need_x, need_scale = ctx.needs_input_grad
        to_x = ctx.a.transpose_times(of_a, ctx.degree, grad) if need_x else None
        if to_x is not None:
            to_x = torch.addcmul(to_x, grad, scale) if torch.is_grad_enabled() else to_x.addcmul_(grad, scale)
        return None, to_x, (grad * x).sum().view(1) if need_scale else None


_apply_shifted = apply_of(Shifted)


def shifted(needs_grad: bool, a: Formats | Coo, x: Tensor, scale: Tensor) -> Tensor:
    """``A x + scale * x``, so that it can be differentiated if ``needs_grad``; A ``[N, N]``, ``x [N, F]``, ``scale [1]`` of its
    dtype."""
    if needs_grad:
        return _apply_shifted(a, x, scale)  # type: ignore[no-any-return]
    with below_autograd():
        return a.times(x)[0].addcmul_(x, scale)
