"""Cases over DGL's layers and message passing."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import Tensor

from fuzz.world import F, World


class Dgl(World):
    steps: ClassVar[dict[str, int]] = {
        "train": 10,
        "evaluate": 10,
        "change_weight": 6,
        "change_x": 4,
        "optimise": 6,
        "cast": 2,
        "other_graph": 3,
        "toggle": 1,
    }

    def __init__(self, seed: int, device: str, on: bool) -> None:
        super().__init__(seed, device, on)
        import dgl

        r = random.Random(seed)
        torch.manual_seed(seed)
        self.weight_kind = r.choice(["none", "constant", "leaf", "parameter"])
        self.x_kind = r.choice(["constant", "leaf", "parameter"])
        self.reduce = r.choice(["sum", "mean", "max", "min"])
        self.layer = self.make(r)
        if self.layer is not None:
            self.layer.to(device)
        self.graphs, self.at = [], 0
        for _ in range(2):
            n = r.choice([2, 5, 12])
            e = r.choice([n, 8 + n, 30 + n])
            # Each node has an edge: DGL gives the gradient of a maximum over none to node 0.
            dst = torch.cat([torch.arange(n, device=device), self.ids(n, e - n)])
            g = dgl.graph((self.ids(n, e), dst), num_nodes=n, idtype=r.choice([torch.int32, torch.int64]))
            x = self.leaf(self.randn(n, F), self.x_kind)
            weight = None if self.weight_kind == "none" else self.leaf(self.rand(e) + 0.1, self.weight_kind)
            self.graphs.append({"g": g, "x": x, "weight": weight})

    def make(self, r: random.Random) -> Any:
        from dgl.nn import pytorch as nn

        makers = {
            "GraphConv": lambda: nn.GraphConv(F, F, norm=r.choice(["none", "both", "right", "left"]), allow_zero_in_degree=True),
            "SAGEConv": lambda: nn.SAGEConv(F, F, r.choice(["mean", "gcn", "pool"])),
            "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, F), r.choice(["sum", "mean", "max"])),
            "TAGConv": lambda: nn.TAGConv(F, F, 2),
            "SGConv": lambda: nn.SGConv(F, F, k=2, allow_zero_in_degree=True),
            "GATConv": lambda: nn.GATConv(F, 3, 2, allow_zero_in_degree=True),
            "GATv2Conv": lambda: nn.GATv2Conv(F, 3, 2, allow_zero_in_degree=True),
            "DotGatConv": lambda: nn.DotGatConv(F, 3, 2, allow_zero_in_degree=True),
            "AGNNConv": lambda: nn.AGNNConv(allow_zero_in_degree=True),
            "update_all": lambda: None,
        }
        self.name = r.choice([*makers, "update_all", "update_all"])
        layer = makers[self.name]()
        return None if layer is None else layer.double()

    @property
    def now(self) -> dict[str, Any]:
        return self.graphs[self.at]

    @property
    def second_derivatives(self) -> bool:
        """DGL's edge_softmax has wrong ones."""
        return self.name not in ("GATConv", "GATv2Conv", "DotGatConv", "AGNNConv")

    def call(self, x: Tensor) -> Tensor:
        import dgl.function as fn

        now = self.now
        g, weight = now["g"], now["weight"]
        if self.name == "update_all":
            with g.local_scope():
                g.srcdata["h"] = x
                message = fn.copy_u("h", "m")
                if weight is not None:
                    g.edata["w"] = weight.unsqueeze(1)
                    message = fn.u_mul_e("h", "w", "m")
                g.update_all(message, getattr(fn, self.reduce)("m", "o"))
                return g.dstdata["o"]
        if self.name in ("GraphConv", "SAGEConv", "TAGConv", "SGConv"):
            return self.layer(g, x, edge_weight=weight)
        return self.layer(g, x)

    def train(self, r: random.Random) -> None:
        now = self.now
        parameters = [] if self.layer is None else list(self.layer.parameters())
        leaves = [t for t in (now["x"], now["weight"], *parameters) if t is not None and t.requires_grad]
        hidden = r.random() < 0.6
        x = now["x"] * 1 if hidden else now["x"]
        out = self.call(x)
        if hidden and r.random() < 0.3:
            x.relu_()
        if out.requires_grad:
            self.gradients(r, "train", out, leaves)
        else:
            self.record("train", out)

    def evaluate(self, r: random.Random) -> None:
        for _ in range(r.choice([1, 2, 3])):
            with r.choice([torch.no_grad, torch.inference_mode])():
                self.record("evaluate", self.call(self.now["x"]))

    @property
    def layers(self) -> list[Any]:
        return [torch.nn.Module() if self.layer is None else self.layer]
