"""What both runs of a case have in common: tensors, writes into them, optimisers, and the log of what came out."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import Tensor

import gnnfast

F = 6


class World:
    """The state of one run of a case. Steps draw from a random.Random of their own, so both runs decide alike."""

    steps: ClassVar[dict[str, int]] = {}  # name of a method -> how often it is drawn

    def __init__(self, seed: int, device: str, on: bool) -> None:
        self.device, self.on, self.log = device, on, []
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizer: Any = None
        self.undo: list[Any] = []

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64).to(self.device)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.device)

    def ids(self, high: int, count: int) -> Tensor:
        return torch.randint(0, max(high, 1), (count,), generator=self.generator).to(self.device)

    second_derivatives = True  # whether those of the framework are right

    def record(self, what: str, *values: Any) -> None:
        """Notes results as they are now."""
        self.log.append((what, [v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for v in values]))

    def leaf(self, t: Tensor, kind: str) -> Tensor:
        if kind == "parameter":
            return torch.nn.Parameter(t)
        return t.requires_grad_() if kind == "leaf" else t

    def gradients(self, r: random.Random, what: str, out: Tensor, leaves: list[Tensor]) -> None:
        """Records first, and now and then second derivatives."""
        twice = r.random() < 0.25 and self.second_derivatives
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)).sum()
        if twice:
            loss = loss + out.square().sum()
        found = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=twice)
        for leaf, g in zip(leaves, found):
            leaf.grad = None if g is None else torch.empty_like(leaf).copy_(g.detach())  # in the layout of the leaf, as backward()
        second: tuple[Any, ...] = ()
        if twice:
            # Whether a gradient without numbers has one itself tells nobody anything.
            total = sum(g.square().sum() for g in found if g is not None and g.requires_grad and g.numel())
            if isinstance(total, Tensor):
                second = torch.autograd.grad(total, leaves, allow_unused=True)
        self.record(f"{what}: output, gradients and second derivatives", out, *found, *second)

    def write(self, r: random.Random, t: Tensor, how: str) -> Tensor:
        """Changes a tensor in one of the ways that gnnfast must notice, or that cannot matter to it."""
        if how == "mul_":
            with torch.no_grad():
                t.mul_(1.5)
        elif how == "data.mul_":
            t.data.mul_(1.5)
        elif how == "data =":
            t.data = t.data * 1.5
        elif how == "data = twice":  # the second copy may lie where the first was
            for _ in range(2):
                t.data = t.data * 1.5
        return t

    def other_graph(self, r: random.Random) -> None:
        self.at = 1 - self.at
        if self.device != "cpu":  # a cached graph of another size is an error there that ends the process
            for layer in self.layers:
                if hasattr(layer, "_cached_edge_index"):
                    layer._cached_edge_index = None

    def toggle(self, r: random.Random) -> None:
        if self.on:
            gnnfast.disable()
            gnnfast.enable()

    def change_weight(self, r: random.Random) -> None:
        w = self.now["weight"]
        if w is not None:
            # Writes through .data into a constant cannot be noticed, and README says so.
            unseen = ["data.mul_"] if self.weight_kind != "constant" else []
            self.write(r, w, r.choice(["mul_", "data =", "data = twice", *unseen]))

    def change_x(self, r: random.Random) -> None:
        unseen = ["data.mul_"] if self.x_kind != "constant" else []
        self.write(r, self.now["x"], r.choice(["mul_", "data =", "data = twice", *unseen]))

    def optimise(self, r: random.Random) -> None:
        g, layer = self.now, self.layers[0]
        parameters = [t for t in (g["x"], g["weight"], *layer.parameters()) if t is not None and t.requires_grad]
        # Not Adam, which makes a whole step of a gradient that differs from 0 by rounding.
        options = {"sgd": {}, "fused": {"fused": True}, "foreach": {"foreach": True}}[
            r.choice(["sgd", "fused", "fused", "foreach"])
        ]
        if not parameters or all(p.grad is None for p in parameters):
            return
        for p in parameters:
            if p.grad is not None and (p.grad.dtype != p.dtype or not p.grad.isfinite().all()):
                p.grad = None
        torch.optim.SGD(parameters, lr=0.1, **options).step()

    def cast(self, r: random.Random) -> None:
        dtype = r.choice([torch.float32, torch.float64])
        for layer in self.layers:
            layer.to(dtype)
            if getattr(layer, "_cached_edge_index", None) is not None:
                layer._cached_edge_index = None
            for kept in ("_cached_x", "_cached_h"):
                if getattr(layer, kept, None) is not None:
                    setattr(layer, kept, None)
        for g in self.graphs:
            for name in ("x", "weight"):
                if g[name] is not None:
                    g[name].grad = None
                    g[name].data = g[name].data.to(dtype)

    def run(self, plan: list[tuple[str, int]]) -> list[Any]:
        for name, seed in plan:
            torch.manual_seed(seed)
            try:
                getattr(self, name)(random.Random(seed))
            except Exception as error:
                self.log.append((name, error))
            finally:
                while self.undo:
                    self.undo.pop()()
        return self.log
