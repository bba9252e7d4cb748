"""A layer with gnnfast and without."""

from __future__ import annotations

import copy

import torch
from graphs import relative_error

import gnnfast


def run(layer, *inputs, repeats=3):
    """Output and all gradients of the last of several calls (by which graphs are converted and kept)."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point() and t.layout is torch.strided]
    for _ in range(repeats):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        mapping = {id(t): leaf for t, leaf in zip(tensors, leaves)}
        layer.zero_grad()
        torch.manual_seed(1)
        out = layer(*(mapping.get(id(i), i) for i in inputs))
        out.pow(2).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in layer.parameters())]


def without(step):
    """What a step gives without gnnfast."""
    gnnfast.disable()
    try:
        return step()
    finally:
        gnnfast.enable()


def both(step):
    """What a step gives with gnnfast, what it gives without, and the report of the first."""
    gnnfast.clear_report()
    found, report = step(), gnnfast.report()
    return found, without(step), report


def same(step, tolerance=1e-9):
    """The tensors that a step gives, which makes what it changes anew, are those without gnnfast."""
    found, expected, report = both(step)
    close(found, expected, tolerance)
    return report


def close(found, expected, tolerance=1e-9):
    """Tensors, wherever they are, equal others but for rounding."""
    largest = max(float(e.detach().norm()) for e in expected if e is not None)
    for f, e in zip(found, expected, strict=True):
        assert (f is None) == (e is None)
        if e is not None:
            assert f.dtype == e.dtype and f.shape == e.shape and f.is_contiguous() == e.is_contiguous()
            f = f.to(e.device)
            assert relative_error(f, e) < tolerance or (f - e).norm() < 1e-14 * max(e.numel(), largest)  # of sums that cancel


def compare(layer, *inputs, tolerance=1e-5, **kwargs):
    """With gnnfast equals without."""
    layer = layer.to(inputs[0].device)
    copies = [layer, copy.deepcopy(layer)]
    return same(lambda: run(copies.pop(), *inputs, **kwargs), tolerance)


def nodes_behind(t):
    """The names of the nodes of autograd that lead to a tensor."""
    found, behind = set(), [t.grad_fn]
    while behind:
        node = behind.pop()
        if node is not None and node not in found:
            found.add(node)
            behind += [before for before, _ in node.next_functions]
    return {type(node).__name__ for node in found}
