"""Random formulas: what functions of users make of rows, as trees of names."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuzz.world import F

UNARY: dict[str, Any] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": Tensor.tanh,
    "softplus": functional.softplus,
    "silu": functional.silu,
    "abs": Tensor.abs,
    "neg": lambda a: -a,
    "twice": lambda a: 2 * a,
    "leaky": lambda a: functional.leaky_relu(a, 0.2),
    "sin": torch.sin,
    "square": lambda a: a.tanh() ** 2,
    "from one": lambda a: 1 - a,
    "row softmax": lambda a: a.softmax(-1),
    "layer norm": lambda a: a + functional.layer_norm(a, a.shape[-1:], eps=1.0),  # which alone sums up to 0
    "mean": lambda a: a * a.mean(-1, keepdim=True),
    "detached": lambda a: a + a.detach(),
}
# Of rows [N, F]: theirs alone.
ROWS: dict[str, Any] = {
    "view": lambda a: a.view(-1, 2, a.shape[1] // 2).flatten(1),
    "halves": lambda a: torch.cat(a.chunk(2, dim=-1)[::-1], dim=-1),
    "rolled": lambda a: torch.cat([a[:, 1:], a[:, :1]], -1),
    "gated half": lambda a: (a[:, : a.shape[1] // 2] * a[..., a.shape[1] // 2 :].sigmoid()).repeat(1, 2),
    "turned": lambda a: a.view(-1, 2, a.shape[1] // 2).transpose(1, 2).reshape(a.shape),
}
BINARY: dict[str, Any] = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}
BINARY["dot"] = lambda a, b: (a * b).sum(-1, keepdim=True)
# The scores of both heads, of rows [E, 2, F / 2] and a parameter.
SCORES: dict[str, Any] = {
    "dots": lambda a, b, att: (a * b).sum(-1) / 2,
    "sums": lambda a, b, att: functional.leaky_relu((a * att).sum(-1) + (b * att).sum(-1), 0.2),
    "bent": lambda a, b, att: (functional.leaky_relu(a + b) * att).sum(-1),
    "side by side": lambda a, b, att: (torch.cat([a, b], -1) * torch.cat([att, att.tanh()], -1)).sum(-1),
}
ENDS = ("x_i", "x_j", "x_j", "wide", "column")
# Along the messages of each node, which are dimension 1.
REDUCED: dict[str, Any] = {
    "sum": lambda m: m.sum(1),
    "mean": lambda m: torch.mean(m, dim=1),
    "max": lambda m: m.max(dim=1)[0],
    "min": lambda m: torch.min(m, 1).values,
    "kept": lambda m: m.sum(1, keepdim=True).squeeze(1),
    "shares": lambda m: m.sum(dim=1) / m.shape[1],
    "scaled": lambda m: m.mean(1) * math.log(m.size(1) + 1),
    "weighted": lambda m: (m * m.sigmoid()).sum(1) / (m.sigmoid().sum(1) + 1e-6),
    "first": lambda m: m[:, 0],
    "spread": lambda m: (m - m.mean(1, keepdim=True)).square().sum(1),
}
# Of messages [N, D, F].
MAIL: dict[str, Any] = {
    "softened": lambda m: m.softmax(dim=1),
    "parts": lambda m: torch.cat([m[:, :, F // 2 :], m[..., : F // 2]], dim=2),
    "by head": lambda m: m.view(m.shape[0], m.shape[1], 2, F // 2).softmax(-1).view(m.shape[0], m.size(1), F),
    "sharing": lambda m: m / m.shape[1],
    "centred": lambda m: m - m.mean(dim=1, keepdim=True) / 2,  # the whole mean less, sums are of rounding alone
    "scored": lambda m: torch.softmax(m.sum(-1, keepdim=True), dim=1) * m,
}


def formula(r: random.Random, depth: int, leaves: Sequence[str] = ENDS, softmax: bool = True) -> Any:
    """Names of functions with their arguments, in tuples, down to ``leaves``; ``softmax``: of each node's edges, too."""
    if not depth or r.random() < 0.15:
        return r.choice(leaves)
    joined = ["joined"] if leaves is ENDS else []
    what = r.choice([*UNARY, *ROWS, "linear", "shifted", *BINARY, *BINARY, *joined, *([*SCORES, "softmax"] if softmax else [])])
    arguments = 3 if what in SCORES else 2 if what in BINARY or what == "joined" else 1
    return (what, *(formula(r, depth - 1, leaves, softmax) for _ in range(arguments)))


def of_messages(r: random.Random, depth: int) -> Any:
    """A formula of messages ``"m"`` and ``"e"`` of nodes with features ``"h"``."""
    if not depth or r.random() < 0.25:
        return r.choice(["m", "m", "e", "h"])
    what = r.choice([*UNARY, "linear", "shifted", *BINARY, *BINARY, *MAIL, "pair"])
    return (what, *(of_messages(r, depth - 1) for _ in range(2 if what in BINARY or what == "pair" else 1)))


def of_mailbox(r: random.Random, depth: int) -> Any:
    """A formula of what is reduced."""
    if not depth or r.random() < 0.3:
        return (r.choice([*REDUCED]), of_messages(r, 2))
    what = r.choice([*UNARY, *ROWS, "linear", "shifted", "add", "sub", "mul"])
    return (what, *(of_mailbox(r, depth - 1) for _ in range(2 if what in BINARY else 1)))


class Formulas:
    """What computes formulas, for a module of which it is a part."""

    def make_parameters(self) -> None:
        self.linear, self.joined = nn.Linear(F, F), nn.Linear(2 * F + 2, F)
        self.pair, self.wide, self.shift = nn.Linear(2 * F, F), nn.Linear(2, F), nn.Parameter(torch.randn(F))

    def value(self, tree: Any, given: Any) -> Any:
        """Of rows ``x_i`` and ``x_j``, of features ``attr`` of edges, and of what else is given by name."""
        if tree == "wide":
            return self.wide(given["attr"])
        if isinstance(tree, str):
            return given["attr"][:, :1] if tree == "column" else given[tree]
        what, *rest = tree
        a, *more = (self.value(t, given) for t in rest)
        if what in BINARY:
            return BINARY[what](a, *more)
        a, *more = (t.expand(-1, F) if t.shape[1] == 1 else t for t in (a, *more))
        if what == "softmax":
            return given["softmax"](a)
        if what in SCORES:
            first, second, rows = (t.reshape(-1, 2, F // 2) for t in (a, *more))
            share = given["softmax"](SCORES[what](first, second, self.shift.view(1, 2, F // 2)))
            return (rows * share.unsqueeze(-1)).view(-1, F)
        if what == "joined":
            return self.joined(torch.cat([a, *more, given["attr"]], -1))
        return self.simple(what, a)

    def simple(self, what: str, a: Any) -> Any:
        if what in ("shifted", "linear"):
            return a + self.shift if what == "shifted" else self.linear(a)
        return UNARY[what](a) if what in UNARY else ROWS[what](a)

    def mail(self, tree: Any, given: Any) -> Any:
        """Of messages."""
        if isinstance(tree, str):
            return given["h"].unsqueeze(1) if tree == "h" else given[tree]
        what, *rest = tree
        a, *more = (self.mail(t, given) for t in rest)
        if what == "pair":
            return self.pair(torch.cat([t.expand_as(given["m"]) for t in (a, *more)], dim=-1))
        return BINARY[what](a, *more) if what in BINARY else MAIL[what](a) if what in MAIL else self.simple(what, a)

    def reduced(self, tree: Any, given: Any) -> Any:
        """Of a mailbox."""
        what, *rest = tree
        if what in REDUCED:
            return REDUCED[what](self.mail(rest[0], given))
        a, *more = (self.reduced(t, given) for t in rest)
        return BINARY[what](a, *more) if what in BINARY else self.simple(what, a)
