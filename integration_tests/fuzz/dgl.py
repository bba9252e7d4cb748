"""Cases over DGL's layers and message passing."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fuzz.formulas import Formulas, formula, of_mailbox
from fuzz.world import F, World


class Functions(Formulas, nn.Module):
    """Passes messages by Python functions of edges, of mailboxes and of nodes, in one of the ways that DGL has for it."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.make_parameters()
        self.of_edge, self.of_node = formula(r, 3, softmax=False), formula(r, 2, ("x_i", "x_j"), softmax=False)
        self.of_mail, self.reduce = of_mailbox(r, 2), r.choice(["sum", "mean", "max", "min"])
        self.way = r.choice(["update_all"] * 4 + ["apply_edges", "written", "pull", "push", "send_and_recv"])
        self.builtin, self.mailbox, self.applies = r.random() < 0.2, r.random() < 0.5, r.random() < 0.3
        if self.builtin and self.way not in ("apply_edges", "written"):
            self.mailbox = True

    def edge(self, edges: Any) -> Any:
        found = self.value(self.of_edge, {"x_i": edges.dst["h"], "x_j": edges.src["h"], "attr": edges.data["a"]})
        return {"m": found.expand(-1, F) if found.shape[1] == 1 else found, "e": edges.src["h"] + self.wide(edges.data["a"])}

    def storing(self, edges: Any) -> Any:
        found = self.value(self.of_edge, {"x_i": edges.dst["h"], "x_j": edges.src["h"], "attr": edges.data["a"]})
        edges.data["kept"] = found
        return {"m": edges.src["h"] * found.sigmoid(), "e": found.expand(-1, F) if found.shape[1] == 1 else found}

    def mail_of(self, nodes: Any) -> Any:
        mail = nodes.mailbox["m"]
        other = nodes.mailbox.get("e", mail)
        return {"o": self.reduced(self.of_mail, {"m": mail, "e": other, "h": nodes.data["h"]})}

    def node(self, nodes: Any) -> Any:
        found = self.value(self.of_node, {"x_i": nodes.data["h"], "x_j": nodes.data["o"]})
        return {"o": found.expand(-1, F) if found.shape[1] == 1 else found}

    def forward(self, g: Any, x: Tensor, attr: Tensor) -> tuple[Tensor, ...]:
        import dgl.function as fn

        with g.local_scope():
            g.srcdata["h"], g.dstdata["h"] = x, x
            g.edata["a"] = attr
            message = fn.copy_u("h", "m") if self.builtin else self.edge
            reduce = self.mail_of if self.mailbox else getattr(fn, self.reduce)("m", "o")
            after = self.node if self.applies else None
            if self.way == "apply_edges":
                g.apply_edges(self.edge)
                g.update_all(fn.copy_e("m", "m"), reduce, after)
                return g.dstdata["o"], g.edata["m"]
            if self.way == "written":
                g.update_all(self.storing, reduce, after)
                return g.dstdata["o"], g.edata["kept"]
            if self.way == "update_all":
                g.update_all(message, reduce, after)
            elif self.way == "pull":
                g.pull(g.dstnodes()[::2], message, reduce, after)
            elif self.way == "push":
                g.push(g.srcnodes()[::2], message, reduce, after)
            else:
                g.send_and_recv(torch.arange(0, g.num_edges(), 2, dtype=g.idtype, device=g.device), message, reduce, after)
            return (g.dstdata["o"],)


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
            dst, src, idtype = (
                torch.cat([torch.arange(n, device=device), self.ids(n, e - n)]),
                self.ids(n, e),
                r.choice([torch.int32, torch.int64]),
            )
            if self.name == "functions" and self.layer.mailbox and r.random() < 0.5:
                dst = dst // 2
            if self.name == "functions" and r.random() < 0.3:
                g = dgl.heterograph({("u", "to", "v"): (src, dst)}, {"u": n, "v": n}, idtype=idtype)
            else:
                g = dgl.graph((src, dst), num_nodes=n, idtype=idtype)
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
            "functions": lambda: Functions(r),
        }
        self.name = r.choice([*makers, "update_all", "update_all", *["functions"] * 6])
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
        if self.name == "functions":
            ids = torch.arange(g.num_edges(), device=x.device, dtype=x.dtype)
            attr = torch.stack([ids.cos(), ids.sin()], 1)
            found = self.layer(g, x, attr if weight is None else attr * weight.unsqueeze(1))
            return torch.cat([t.reshape(-1) for t in found])
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
