"""What users make of the features at the ends of edges, as functions that one layer runs, and in layers of their own."""

from __future__ import annotations

import torch
from graphs import GRAPHS
from torch import nn as tnn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

H, C = 2, 4
F = H * C


class Layer(MessagePassing):
    """Runs one of the functions below."""

    def __init__(self, function, aggr="sum", heads=False, **kwargs):
        super().__init__(aggr=aggr, **kwargs, **({"node_dim": 0} if heads else {}))
        self.function, self.heads = function, heads
        self.att = tnn.Parameter(torch.linspace(-1, 1, F).view(1, H, C))
        self.lin, self.pair, self.wide = tnn.Linear(F, F), tnn.Linear(2 * F + 1, F), tnn.Linear(1, F)
        self.drop = 0.5
        self.kept = None

    def forward(self, x, edge_index, attr):
        out = self.propagate(edge_index, x=x.view(-1, H, C) if self.heads else x, attr=attr)
        return out.flatten(1)

    def message(self, x_i, x_j, attr, index, size_i):
        return self.function(self, x_i, x_j, attr, (index, None, size_i))


class Plain(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


class Weighted(MessagePassing):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, edge_weight=w)

    def message(self, x_j, edge_weight):
        return edge_weight.view(-1, 1) * x_j


class Doubled(torch.autograd.Function):
    """Whose gradient is wrong on purpose, by which it is known that it was asked."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


@torch.jit.script
def scripted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b.sigmoid()


def plain_rows(m, i, j, attr, at):
    return j


def differences(m, i, j, attr, at):
    return (j - i).tanh()


def relu_rows(m, i, j, attr, at):
    return j.relu() + 1e-7


def of_numpy(m, i, j, attr, at):
    return j * torch.from_numpy(j.detach().cpu().numpy().sum(1, keepdims=True)).to(j.device)


def attention(m, i, j, attr, at):
    alpha = (i * m.att).sum(-1) + (j * m.att).sum(-1)
    return j * softmax(tnn.functional.leaky_relu(alpha), *at).unsqueeze(-1)


def dots(m, i, j, attr, at):
    return (j.view(-1, H, C) * (i.view(-1, H, C) * j.view(-1, H, C)).sum(dim=-1, keepdim=True).tanh()).view(-1, F)


def shares(m, i, j, attr, at):
    """Of a head's dot products."""
    return softmax((i.view(-1, H, C) * j.view(-1, H, C)).sum(-1) / C**0.5, *at)


def attends(m, i, j, attr, at):
    return (j.view(-1, H, C) * shares(m, i, j, attr, at).unsqueeze(-1)).view(-1, F)


def attends_by_one_head(m, i, j, attr, at):
    score = -2 * (i * m.lin(j)).sum(dim=-1, keepdim=True)
    share = tnn.functional.dropout(softmax(score, at[0]), m.drop, False)
    return share.squeeze(-1).view(-1, 1) * j


def attends_with_heads(m, i, j, attr, at):
    share = softmax(torch.sum(i * j, -1), *at)
    return share[:, :, None] * j + (share.unsqueeze(2) * j) * 0


def sums(m, i, j, attr, at):
    """GATConv's scores, by head."""
    return (i.view(-1, H, C) * m.att).sum(-1) + (j.view(-1, H, C) * m.att).sum(-1)


def weighted_by(scores, m, j, at):
    return (j.view(-1, H, C) * softmax(scores, *at).unsqueeze(-1)).view(-1, F)


def bends(m, i, j, attr, at):
    """GATv2Conv's."""
    return (tnn.functional.leaky_relu(i.view(-1, H, C) + j.view(-1, H, C), 0.2) * m.att).sum(-1)


def joined_scores(m, i, j, attr, at):
    """GATConv's as of old."""
    both = torch.cat([i.view(-1, H, C), j.view(-1, H, C)], -1)
    return tnn.functional.leaky_relu((both * torch.cat([m.att, 2 * m.att], -1)).sum(-1), 0.2)


def without_gradient(m, i, j, attr, at):
    with torch.no_grad():
        weight = (i * j).sum(-1, keepdim=True)
    return weight * j


def written(m, i, j, attr, at):
    seen = j.view(-1, H, C)
    j *= 2
    i[:, 0] = 1.0
    return (seen * i.view(-1, H, C)[:, :, :1]).view(-1, F)


def written_through_a_view(m, i, j, attr, at):
    before, seen = j * attr.detach(), j.view(-1, H, C)
    j[:, :2].mul_(3)
    return before + m.lin(j) + (seen * attr.detach().view(-1, 1, 1)).view(-1, F)


def written_through_parts(m, i, j, attr, at):
    first, second, third = j[:, :2], j[:, 2:4], j[:, 4:]
    before = first * 1
    heads = j.view(-1, H, C).transpose(1, 2)
    third.mul_(3)
    heads[:, 0] += 1
    second.view(-1, 2)[:, 0] = 5.0
    return j * attr.detach() + before.sum(1, keepdim=True) + third.sum(-1, True) * attr.detach() + second.narrow(1, 0, 1)


def elements(m, i, j, attr, at):
    functional = tnn.functional
    bent = functional.celu(functional.mish(j), 0.7) + functional.selu(j) * functional.hardtanh(j) - functional.relu6(j)
    bent = bent + functional.hardsigmoid(j) * functional.hardswish(j) - functional.softsign(j) * functional.logsigmoid(j)
    return (bent + functional.tanhshrink(j) + j.sin() - torch.cos(j) * j.erf() + j.clamp(min=-0.5, max=1) + j.clone()) * attr


def within_rows(m, i, j, attr, at):
    functional = tnn.functional
    by_head = j.view(-1, H, C)
    shares = functional.softmax(by_head, dim=-1) * torch.softmax(by_head, 1) + by_head.softmax(-1) * functional.log_softmax(
        by_head, 2
    )
    scaled = j.norm(dim=1, keepdim=True) * j
    normed = functional.layer_norm(j, (F,), m.att.flatten(), m.lin.bias) + functional.layer_norm(by_head, (C,)).flatten(1)
    return (
        shares.flatten(1)
        + scaled
        + normed
        + functional.prelu(j, m.wide.bias)
        + j.mean(-1, keepdim=True)
        + by_head.mean((1, 2))[:, None]
    )


def activated_in_place(m, i, j, attr, at):
    seen = j.view(-1, H, C)
    tnn.functional.leaky_relu(j, 0.2, True)
    tnn.ReLU(inplace=True)(i)
    return (seen * attr.detach().view(-1, 1, 1)).view(-1, F) + m.lin(i)


def own_rows_in_place(m, i, j, attr, at):
    made = m.lin(j)
    other = made * attr.detach()
    return tnn.functional.elu(made, 1.0, True) * attr.detach() + other


def written_weight(m, i, j, attr, at):
    weight = attr.clone()
    out = j * weight
    weight.mul_(3)
    return out


def dropped(m, i, j, attr, at):
    weight = tnn.functional.dropout((i * j).sum(-1), m.drop, True)
    return tnn.functional.dropout(j * weight.view(-1, 1), m.drop, True)


def kept(m, i, j, attr, at):
    product = j * attr
    m.kept = [j, j.view(-1, H, C), product]
    return product


def gated(m, i, j, attr):
    return m.pair(torch.cat([i, j, attr], -1))


def by_type(m, i, j, attr, at):
    return j * attr if isinstance(j, torch.Tensor) and j.requires_grad == i.requires_grad and len(j) == len(attr) else None


def caught(m, i, j, attr, at):
    try:
        return Doubled.apply(j) * attr
    except Exception:
        return j


# (function, whether heads have a dimension, whether messages need not exist; GATES: for sums and means; SUMS: likewise, as several
# that are reduced one by one; ATTENDS: nor what they are weighted by for sums)
GATES, SUMS, ATTENDS = "gates", "sums", "attends"
MESSAGES = {
    "attention": (attention, True, True),
    "dots": (dots, False, True),
    "rows": (lambda m, i, j, attr, at: m.lin(j).relu(), False, True),
    "matrix": (lambda m, i, j, attr, at: (j @ m.lin.weight) * attr, False, True),
    "a weight for each feature": (lambda m, i, j, attr, at: (i + j).sigmoid() * j, False, GATES),
    "heads summed": (lambda m, i, j, attr, at: (j.view(-1, H, C) * attr.view(-1, 1, 1)).sum(1), False, True),
    "two weights": (lambda m, i, j, attr, at: (attr.view(-1, 1, 1) * j) * (i * j).sum(-1, keepdim=True), True, True),
    "joined": (lambda m, i, j, attr, at: m.pair(torch.cat([i, j, attr], -1)).tanh(), False, GATES),
    "joined with a difference": (lambda m, i, j, attr, at: m.pair(torch.cat([i, j - i, attr], dim=1)), False, GATES),
    "relu of a sum": (lambda m, i, j, attr, at: (m.wide(attr) + j).relu(), False, None),
    "sum with edges": (lambda m, i, j, attr, at: j + m.wide(attr), False, GATES),
    "scaled": (lambda m, i, j, attr, at: (2 * j - 1) / 3 + m.att.view(1, F), False, True),
    "difference": (lambda m, i, j, attr, at: (j - i) * attr, False, GATES),
    "destinations": (lambda m, i, j, attr, at: i * attr, False, GATES),
    "reversed": (lambda m, i, j, attr, at: (1 - j) * attr + (i - m.att.view(-1)), False, SUMS),
    "gate": (lambda m, i, j, attr, at: torch.sigmoid(m.lin(i) + j) * m.lin(j), False, GATES),
    "gate with edges": (lambda m, i, j, attr, at: (m.wide(attr) + (i + j)).sigmoid() * j, False, GATES),
    "gate of edges": (lambda m, i, j, attr, at: m.wide(attr).tanh() * (i - j).tanh(), False, GATES),
    "two gates": (
        lambda m, i, j, attr, at: gated(m, i, j, attr).sigmoid() * tnn.functional.softplus(gated(m, j, i, attr)),
        False,
        GATES,
    ),
    "three gates": (lambda m, i, j, attr, at: (i + j).sigmoid() * (i + j).tanh() * j, False, False),
    "affine": (lambda m, i, j, attr, at: tnn.functional.silu(i * j + i), False, GATES),
    "weighted gate": (lambda m, i, j, attr, at: attr * (i + j).relu() * attr, False, GATES),
    "gate of weighted rows": (lambda m, i, j, attr, at: (attr * j) * (i - j).sigmoid(), False, GATES),
    "perceptron": (lambda m, i, j, attr, at: m.lin(m.pair(torch.cat([i, j, attr], 1)).relu()), False, GATES),
    "perceptron of a gate": (lambda m, i, j, attr, at: m.lin((i + j).sigmoid() * j), False, GATES),
    "perceptron of weighted rows": (lambda m, i, j, attr, at: m.lin(j * attr), False, GATES),
    "gate with a bias": (lambda m, i, j, attr, at: (i + j + m.att.view(F)).tanh(), False, GATES),
    "gate of a product with a bias": (lambda m, i, j, attr, at: (i * j + m.att.view(F)).tanh(), False, False),
    "gate times a number": (lambda m, i, j, attr, at: -((i - j).abs() * 2) / 3, False, GATES),
    "square of a difference": (lambda m, i, j, attr, at: (i - j) * (i - j), False, GATES),
    "gate of a gate": (lambda m, i, j, attr, at: (2 * (i + j)).sigmoid(), False, False),
    "perceptron without a bias": (lambda m, i, j, attr, at: tnn.functional.linear((i + j).tanh(), m.lin.weight), False, GATES),
    "gate of heads": (lambda m, i, j, attr, at: (i.view(-1, H, C) + j.view(-1, H, C)).sigmoid().view(-1, F), False, False),
    "gate of heads alone": (lambda m, i, j, attr, at: (i + j).sigmoid() * j, True, GATES),
    "gate, seen": (lambda m, i, j, attr, at: (i + j).sigmoid() * j + (i + j).sigmoid().detach().sum() * 0, False, False),
    "softplus with a slope": (lambda m, i, j, attr, at: tnn.functional.softplus(i + j, 2.0), False, False),
    "flattened": (lambda m, i, j, attr, at: (j * attr.unsqueeze(-1)).flatten(1), True, True),
    "indexed": (lambda m, i, j, attr, at: torch.cat([j[:, :1] * attr, j[:, 1:]], 1), False, False),
    "transposed": (lambda m, i, j, attr, at: (j.t() * attr.view(-1)).t(), False, False),
    "a part": (lambda m, i, j, attr, at: j[:, 2:] * attr, False, True),
    "a part of heads": (lambda m, i, j, attr, at: (i[..., 1:].flatten(1) + j[:, :, None, :-1].flatten(1)).tanh(), True, GATES),
    "chunks": (lambda m, i, j, attr, at: j.chunk(2, dim=-1)[0].sigmoid() * torch.chunk(j, 2, 1)[1], False, True),
    "splits of both ends": (lambda m, i, j, attr, at: i.split(C, 1)[0] + torch.split(j, [F - C, C], dim=-1)[1], False, GATES),
    "unbound heads": (lambda m, i, j, attr, at: j.unbind(1)[0] * attr.view(-1, 1) + j.select(1, 1).sin(), True, SUMS),
    "turned": (lambda m, i, j, attr, at: j.transpose(1, 2).flatten(1) * attr + i.permute(0, 2, 1).reshape(-1, F), True, SUMS),
    "turned and viewed": (lambda m, i, j, attr, at: j.permute((0, -1, 1)).contiguous().view(-1, F) * attr, True, False),
    "weighted rows and others": (lambda m, i, j, attr, at: j * attr + m.lin(i) + (j * attr.square() + m.wide(attr)), False, SUMS),
    "gates and others": (lambda m, i, j, attr, at: (i + j).sigmoid() * j + ((i - j).tanh() + attr * j) + i, False, GATES),
    "edges and weighted rows": (lambda m, i, j, attr, at: m.wide(attr).sin() + j * attr, False, SUMS),
    "difference of weighted rows": (lambda m, i, j, attr, at: j * attr - m.lin(i) * attr, False, False),
    "side by side": (lambda m, i, j, attr, at: torch.cat([j, attr, j.sin()], -1), False, SUMS),
    "side by side, of both ends": (lambda m, i, j, attr, at: torch.cat([i, m.wide(attr), j], -1), False, SUMS),
    "heads side by side": (lambda m, i, j, attr, at: torch.cat([j[..., 1:], i], -1), True, SUMS),
    "one edge of all": (lambda m, i, j, attr, at: j[:1] * attr + i[-1:, :1], False, False),
    "elements": (elements, False, True),
    "within rows": (within_rows, False, True),
    "normalised": (lambda m, i, j, attr, at: tnn.functional.normalize(j, dim=-1) * attr, False, True),
    "along edges": (lambda m, i, j, attr, at: torch.softmax(j, 0) + tnn.functional.normalize(j, dim=0) * j.mean(), False, False),
    "squares": (lambda m, i, j, attr, at: (i - j).pow(2) + torch.square(i - j) + j**2, False, GATES),
    "square of a sum": (lambda m, i, j, attr, at: (i + j) ** 2, False, GATES),
    "from one": (lambda m, i, j, attr, at: (1 - j.sigmoid()) * (2.0 - j.square()) * attr, False, True),
    "as it is": (lambda m, i, j, attr, at: j.to(j.dtype).double().to(torch.float64) * attr, False, True),
    "written through parts": (written_through_parts, False, False),
    "einsum": (lambda m, i, j, attr, at: torch.einsum("ef,eg->ef", j, attr), False, False),
    "mean over edges": (lambda m, i, j, attr, at: j - j.mean(0), False, True),
    "without gradient": (without_gradient, False, False),
    "own gradient": (lambda m, i, j, attr, at: Doubled.apply(j) * attr, False, False),
    "own gradient, caught": (caught, False, False),
    "scripted": (lambda m, i, j, attr, at: scripted(j, i), False, False),
    "numpy": (of_numpy, False, True),
    "vmap": (lambda m, i, j, attr, at: torch.vmap(torch.dot)(i, j).unsqueeze(1) * j.sin(), False, False),
    "written": (written, False, False),
    "written through a view": (written_through_a_view, False, False),
    "activated in place": (activated_in_place, False, False),
    "own rows in place": (own_rows_in_place, False, False),
    "dropped": (dropped, False, False),
    "kept": (kept, False, True),
    "asked": (by_type, False, True),
    "dot attention": (attends, False, ATTENDS),
    "dot attention by one head": (attends_by_one_head, False, ATTENDS),
    "dot attention, indexed": (attends_with_heads, True, SUMS),
    "dot attention with heads": (lambda m, i, j, attr, at: j * softmax((i * j).sum(-1), *at).unsqueeze(-1), True, ATTENDS),
    "dot attention, seen": (lambda m, i, j, attr, at: (i * j).sum(-1).softmax(1)[..., None] * j[:, None].squeeze(1), True, True),
    "dot attention with one more": (lambda m, i, j, attr, at: j * softmax((i * j).sum(-1), *at)[..., None], True, ATTENDS),
    "dot attention by einsum": (
        lambda m, i, j, attr, at: torch.einsum("eh, ehd -> ehd", softmax(torch.einsum("ehd,ehd->eh", i, j), *at), j),
        True,
        ATTENDS,
    ),
    "weighted by einsum": (lambda m, i, j, attr, at: torch.einsum("ef,e->ef", j, attr.view(-1)), False, True),
    "dots by einsum": (lambda m, i, j, attr, at: torch.einsum("ef,ef->e", i, j)[:, None] * j, False, True),
    "other einsums": (
        lambda m, i, j, attr, at: (
            torch.einsum("ef,fg->eg", j, m.lin.weight)
            + torch.einsum("ef,ef->f", i, j) / 1000
            + torch.einsum("ee->e", i[:, :1] @ j[:, :1].t())[:, None]
        ),
        False,
        False,
    ),
    "dot attention, weighted": (lambda m, i, j, attr, at: attends(m, i, j, attr, at) * attr, False, True),
    "dot attention of others": (lambda m, i, j, attr, at: m.wide(j[:, :1]) * softmax((i * j).sum(-1, True), *at), False, ATTENDS),
    "sum attention": (lambda m, i, j, attr, at: weighted_by(sums(m, i, j, attr, at), m, j, at), False, True),
    "sum attention, leaky": (
        lambda m, i, j, attr, at: weighted_by(tnn.functional.leaky_relu(sums(m, i, j, attr, at), 0.2), m, j, at),
        False,
        True,
    ),
    "sum attention with edges": (
        lambda m, i, j, attr, at: weighted_by(tnn.functional.leaky_relu(m.wide(attr)[:, :H] + sums(m, i, j, attr, at)), m, j, at),
        False,
        True,
    ),
    "sum attention with edges, seen": (
        lambda m, i, j, attr, at: (
            j.view(-1, H, C) * softmax(sums(m, i, j, attr, at).unsqueeze(-1) + m.wide(attr)[:, :H].view(-1, H, 1), *at)
        ).view(-1, F),
        False,
        True,
    ),
    "sum attention, twice leaky": (
        lambda m, i, j, attr, at: weighted_by(
            tnn.functional.leaky_relu(tnn.functional.leaky_relu(sums(m, i, j, attr, at)), 0.5), m, j, at
        ),
        False,
        True,
    ),
    "sum attention of each feature": (
        lambda m, i, j, attr, at: j * softmax(tnn.functional.leaky_relu(i + m.lin(j), 0.2), *at),
        False,
        True,
    ),
    "sum attention of others": (
        lambda m, i, j, attr, at: m.wide(attr) * softmax((i * m.att[0, 0, 0]).sum(-1, True) + j[:, :1], *at),
        False,
        False,
    ),
    "sum attention by a linear layer": (
        lambda m, i, j, attr, at: j * softmax(tnn.functional.leaky_relu(m.pair(torch.cat([i, j, attr], -1))[:, :1]), *at),
        False,
        True,
    ),
    "sum attention of a linear layer": (
        lambda m, i, j, attr, at: j * softmax(tnn.functional.leaky_relu(gated(m, i, j, attr)), *at),
        False,
        True,
    ),
    "joined attention": (lambda m, i, j, attr, at: weighted_by(joined_scores(m, i, j, attr, at), m, j, at), False, True),
    "joined scores": (joined_scores, False, False),
    "joined, multiplied by head": (
        lambda m, i, j, attr, at: (
            (torch.cat([i.view(-1, 4, F // 4), j.view(-1, 4, F // 4)], -1) @ m.lin.weight[: F // 2, :4]).flatten(1)
            + tnn.functional.linear(
                torch.cat([i.view(-1, 4, F // 4), j.view(-1, 4, F // 4)], -1), m.lin.weight[:4, : F // 2]
            ).flatten(1)
        ),
        False,
        False,
    ),
    "joined, scaled and seen": (
        lambda m, i, j, attr, at: (torch.cat([j, i], 1) * 2).sum(1, True) * j + (torch.cat([j, attr], 1).sum(1) * 2)[:, None],
        False,
        False,
    ),
    "bent attention": (
        lambda m, i, j, attr, at: j * softmax((tnn.functional.leaky_relu(i + j, 0.2) * m.att).sum(-1), *at).unsqueeze(-1),
        True,
        ATTENDS,
    ),
    "bent attention by one head": (
        lambda m, i, j, attr, at: (
            j * softmax((tnn.functional.leaky_relu(m.lin(i) + j, 0.2) * m.att.view(1, F)).sum(-1, True), at[0])
        ),
        False,
        ATTENDS,
    ),
    "bent attention of others": (
        lambda m, i, j, attr, at: m.lin(j) * softmax((tnn.functional.leaky_relu(i + j) * m.att.view(1, F)).sum(-1, True), *at),
        False,
        True,
    ),
    "bends": (bends, False, False),
    "scaled sums": (lambda m, i, j, attr, at: tnn.functional.leaky_relu(i + j) * m.att.view(1, F), False, False),
    "sums": (lambda m, i, j, attr, at: tnn.functional.leaky_relu(sums(m, i, j, attr, at), 0.2), False, False),
    "narrow sums": (lambda m, i, j, attr, at: m.wide((i.sum(-1, True) + j.sum(-1, True)) - attr), False, False),
    "scores": (lambda m, i, j, attr, at: (i.view(-1, H, C) * j.view(-1, H, C)).sum(-1) * 2, False, False),
    "shares": (shares, False, False),
    "shares and scores": (
        lambda m, i, j, attr, at: j * (shares(m, i, j, attr, at).sum(1) - (i * j).sum(1) / 3)[:, None],
        False,
        True,
    ),
    "detached": (lambda m, i, j, attr, at: j * (i.detach() * j.detach()).sum(-1, keepdim=True), False, True),
}


def arguments(graph, device, dtype=torch.float64):
    edge_index, num_src, num_dst = GRAPHS[graph]()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(max(num_src, num_dst), F, generator=generator, dtype=dtype)
    attr = torch.rand(edge_index.shape[1], 1, generator=generator, dtype=dtype)
    return x.to(device), edge_index.to(device), attr.to(device)
