"""Python functions of DGL's users on edges and on mailboxes, and what compares them with DGL on a CPU."""

from __future__ import annotations

import copy
import math

import dgl
import numpy as np
import pytest
import torch
from comparison import close, without
from graphs import GRAPHS
from torch import nn as tnn
from torch.nn import functional
from user_messages import C, F, H, Layer

import gnnfast
from gnnfast.dgl import bridge

SQUARE = ["random", "hub", "isolated", "self_loops_and_duplicates"]


def make(name, device, idtype=torch.int64):
    (src, dst), num_src, num_dst = GRAPHS[name]()
    if name == "bipartite":
        g = dgl.heterograph({("u", "e", "v"): (src, dst)}, {"u": num_src, "v": num_dst}, idtype=idtype)
    else:
        g = dgl.graph((src, dst), num_nodes=max(num_src, num_dst), idtype=idtype)
    return g.to(device)


OTHER_ON_A_GPU = {
    "dropped": "a GPU draws other numbers than the CPU it is compared with",
    "some_nodes": "torch sorts nodes by degree for DGL: which of one degree is first is another on a GPU",
}


@pytest.fixture(autouse=True)
def comparable(request, device):
    if device.type == "cuda" and bridge.absent():
        pytest.skip(f"there is no bridge: {bridge.absent()}")
    of = getattr(request.node, "callspec", None)
    if device.type == "cuda" and of and (reason := OTHER_ON_A_GPU.get(of.params.get("name"))):
        pytest.skip(reason)


def features(g, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    sizes = (g.num_src_nodes(), F), (g.num_dst_nodes(), F), (g.num_edges(), 1)
    return [torch.randn(size, generator=generator, dtype=dtype).to(g.device) for size in sizes]


class Messages(Layer):
    """Makes messages of the features of both ends by one of PyG's users' functions; ``heads`` have a dimension."""

    def of_edges(self, edges):
        x_i, x_j = edges.dst["x"], edges.src["x"]
        dst = edges._graph.edges()[1].long()
        return {"m": self.function(self, x_i, x_j, edges.data["w"], (dst, None, edges._graph.num_dst_nodes()))}


def step(g, layer, passes, dtype=torch.float64):
    """Features, of which ``passes(g, layer)`` makes something; this and all gradients."""

    def run():
        leaves = [t.requires_grad_() for t in features(g, dtype)]
        layer.zero_grad()
        torch.manual_seed(1)
        with g.local_scope():
            src, dst, w = leaves
            if getattr(layer, "heads", False):
                src, dst = (t.view(-1, H, C) for t in (src, dst))
            g.srcdata["x"] = src
            if g.is_block or len(g.ntypes) > 1:
                g.dstdata["x"] = dst
            g.edata["w"] = w
            out = passes(g, layer)
        loss = out.pow(2).sum()
        if loss.requires_grad:
            loss.backward()
        buffers = [b for b in layer.buffers() if b.is_floating_point()]
        return [out.detach(), *(t.grad for t in leaves), *(p.grad for p in layer.parameters()), *buffers]

    return run


def compare(graph, layer, passes, device, dtype=torch.float64, tolerance=1e-9, idtype=torch.int64):
    """With gnnfast on a device equals without it on a CPU."""
    if device.type == "cuda":
        tolerance = max(tolerance, 1e-7)  # torch has some constants of activations in float32 there
    expected = without(step(make(graph, torch.device("cpu"), idtype), copy.deepcopy(layer).to("cpu", dtype), passes, dtype))
    gnnfast.clear_report()
    found = step(make(graph, device, idtype), layer.to(device, dtype), passes, dtype)()
    report = gnnfast.report()
    close(found, expected, tolerance)
    return report


class Reducers(tnn.Module):
    """Methods that reduce messages; those of ``LEFT`` look at more than each node by itself."""

    def __init__(self):
        super().__init__()
        self.lin, self.pair, self.att = tnn.Linear(F, F), tnn.Linear(2 * F, F), tnn.Linear(2 * F, 1)
        self.norm, self.batch, self.drop = tnn.LayerNorm(F), tnn.BatchNorm1d(F), tnn.Dropout(0.5)
        self.bias = tnn.Parameter(torch.linspace(-1, 1, F))
        self.heads = False

    def copied(self, edges):
        return {"m": edges.src["x"]}

    def scored(self, edges):
        both = torch.cat([edges.src["x"], edges.dst["x"]], dim=1)
        return {"m": edges.src["x"], "e": functional.leaky_relu(self.att(both))}

    def gated(self, edges):
        return {"m": edges.src["x"], "e": edges.data["w"] + edges.src["x"] + edges.dst["x"]}

    def sums(self, nodes):
        return {"o": nodes.mailbox["m"].sum(1)}

    def means(self, nodes):
        return {"o": torch.mean(nodes.mailbox["m"], dim=1)}

    def maxima(self, nodes):
        return {"o": torch.max(nodes.mailbox["m"], dim=1)[0] + nodes.mailbox["m"].min(dim=1).values}

    def kept(self, nodes):
        mail = nodes.mailbox["m"]
        return {"o": (mail.mean(dim=1, keepdim=True) * 2).squeeze(1) - torch.sum(mail, (1,), keepdim=True).squeeze(1)}

    def attention(self, nodes):
        alpha = functional.softmax(nodes.mailbox["e"], dim=1)
        return {"o": torch.sum(alpha * nodes.mailbox["m"], dim=1)}

    def dot_attention(self, nodes):
        score = (nodes.data["x"].unsqueeze(1) * nodes.mailbox["m"]).sum(-1, keepdim=True) / F**0.5
        return {"o": (torch.softmax(score, 1) * self.lin(nodes.mailbox["m"])).sum(1)}

    def gates(self, nodes):
        sigma = torch.sigmoid(nodes.mailbox["e"])
        share = torch.sum(sigma * nodes.mailbox["m"], dim=1) / (torch.sum(sigma, dim=1) + 1e-6)
        return {"o": nodes.data["x"] + share}

    def sage(self, nodes):
        mean = nodes.mailbox["m"].mean(1)
        return {"o": functional.relu(self.pair(torch.cat([nodes.data["x"], mean], dim=-1)))}

    def rows(self, nodes):
        mail = self.norm(nodes.mailbox["m"] + self.bias) ** 2 - nodes.mailbox["m"].mean(2, keepdim=True)
        return {"o": self.norm(mail.sum(1)) @ self.lin.weight + self.bias}

    def joined(self, nodes):
        x = nodes.data["x"].unsqueeze(1).expand_as(nodes.mailbox["m"])
        out = self.pair(torch.cat([nodes.mailbox["m"], x], dim=2)).relu().sum(1)
        return {"o": out.view(-1, H, C).softmax(-1).reshape(-1, F), "other": out.sum(-1)}

    def length(self, nodes):
        return {"o": nodes.mailbox["m"].sum(1) / nodes.mailbox["m"].shape[1]}

    def scalers(self, nodes):
        """As in PNAConv."""
        mail = nodes.mailbox["m"]
        n = mail.size(1)
        scaled = [
            mail.mean(1),
            mail.max(1)[0] * (np.log(n + 1) / 2.5),
            mail.sum(1) * (2.5 / np.log(n + 1)),
            n**0.5 * mail.min(1)[0],
        ]
        return {"o": sum(scaled) + (2 - n) / (n + 1.0) - mail.sum(1) / np.float64(2) ** -n, "other": (mail / n).sum((1,))[:, 0]}

    def sizes(self, nodes):
        mail = nodes.mailbox["m"]
        n, d, f = mail.shape
        heads = mail.view(n, d, H, f // H)[..., :1].sum(1)
        return {"o": (self.lin.weight.sum() * mail).sum(1).view(n, H, -1).sum(-1) * d + heads.view(n, -1) - heads.reshape(-1, H)}

    def parts(self, nodes):
        """As in DGNConv."""
        mail = nodes.mailbox["m"]
        share = mail[:, :, 1].abs() / (torch.sum(mail[:, :, 1].abs(), keepdim=True, dim=1) + 1e-30)
        out = torch.sum(torch.mul(mail, share.unsqueeze(-1)), dim=1)
        return {"o": torch.abs(out - torch.sum(share.unsqueeze(-1), dim=1) * nodes.data["x"])[:, ::2]}

    def moments(self, nodes):
        mail = nodes.mailbox["m"]
        third = torch.pow(mail - mail.mean(1, keepdim=True), 3).mean(1)
        return {"o": torch.sign(third) * (third.abs() + 1e-3) ** (1 / 3) + torch.maximum(mail.sin().mean(1), nodes.data["x"])}

    def branches(self, nodes):
        mail = nodes.mailbox["m"]
        return {"o": mail.sum(1) * 2 if mail.shape[1] > 2 else mail.mean(1)}

    def equals(self, nodes):
        mail = nodes.mailbox["m"]
        return {"o": mail.sum(1) * 2 if mail.shape[1] == 2 else mail.mean(1)}

    def is_number(self, nodes):
        mail = nodes.mailbox["m"]
        return {"o": mail.sum(1) if isinstance(mail.shape[1], int) else mail.mean(1)}

    def math_log(self, nodes):
        return {"o": nodes.mailbox["m"].sum(1) * math.log(nodes.mailbox["m"].size(1))}

    def of_a_tensor(self, nodes):
        return {"o": nodes.mailbox["m"].sum(1) * self.bias.new_tensor(float(nodes.mailbox["m"].size(1)))}

    def in_a_loop(self, nodes):
        mail = nodes.mailbox["m"]
        return {"o": sum(mail[:, k] * (k + 1) for k in range(mail.shape[1]))}

    def flattened(self, nodes):
        mail = nodes.mailbox["m"]
        return {"o": mail.view(-1, F).sum(0, keepdim=True).expand(mail.shape[0], F)}

    def number_of_nodes(self, nodes):
        return {"o": nodes.mailbox["m"].sum(1) * nodes.mailbox["m"].shape[0]}

    def last(self, nodes):
        return {"o": nodes.mailbox["m"][:, -1] + nodes.mailbox["m"][:, :2].sum(1)}

    def some_nodes(self, nodes):
        out = nodes.mailbox["m"].sum(1)
        return {"o": out - out[:1]}

    def of_batch(self, nodes):
        return {"o": nodes.mailbox["m"].sum(1) / nodes.batch_size()}

    def over_nodes(self, nodes):
        out = nodes.mailbox["m"].sum(1)
        return {"o": out - out.mean(0)}

    def over_all(self, nodes):
        return {"o": nodes.mailbox["m"].mean(1) - nodes.mailbox["m"].max()}

    def normalised(self, nodes):
        out = nodes.mailbox["m"].sum(1)
        return {"o": self.batch(out) if len(out) > 1 else out}

    def first(self, nodes):
        return {"o": nodes.mailbox["m"][:, 0]}

    def sorted(self, nodes):
        return {"o": nodes.mailbox["m"].sort(1)[0].mean(1) + nodes.mailbox["m"].std(1, unbiased=False)}

    def written(self, nodes):
        out = nodes.mailbox["m"].sum(1)
        out += nodes.data["x"]
        out.mul_(2)
        return {"o": out}

    def indices(self, nodes):
        return {"o": torch.max(nodes.mailbox["m"], dim=1).indices.double()}

    def dropped(self, nodes):
        return {"o": functional.dropout(nodes.mailbox["m"].sum(1), 0.5, self.training)}

    def dropped_shares(self, nodes):
        alpha = self.drop(functional.softmax(nodes.mailbox["e"], dim=1))
        return {"o": torch.sum(alpha * nodes.mailbox["m"], dim=1)}

    def new(self, nodes):
        return {"o": nodes.mailbox["m"].sum(1) + torch.ones(len(nodes), 1, dtype=torch.float64, device=nodes.data["x"].device)}

    def crossed(self, nodes):
        return {"o": nodes.mailbox["m"].sum(1) @ self.lin.weight @ (nodes.data["x"].t() @ nodes.data["x"])}

    def detached(self, nodes):
        with torch.no_grad():
            share = nodes.mailbox["m"].mean(1)
        return {"o": share + nodes.data["x"]}
