"""Whatever is passed to a public function, it returns or raises an error that helps, and the process lives on.

Run as a script, in a process of its own: each function is tried in a forked child, with every value in the place of every argument.
Prints what went wrong: a child that died, an error of another kind, or one whose message does not name the argument.
"""

from __future__ import annotations

import os
import sys
import warnings

import numpy as np
import torch

import gnnfast
from gnnfast import Graph

ERRORS = (TypeError, ValueError, IndexError, RuntimeError)
N, E, F = 6, 10, 4
warnings.simplefilter("ignore")
torch.manual_seed(0)


def tensors(like: torch.Tensor) -> list[object]:
    """Wrong, strange and unusual tensors in the place of one."""
    t, shape = like, list(like.shape)
    strided = torch.stack([t, t], -1)[..., 0]
    found = [
        t.double(), t.float(), t.half(), t.bool(), t.to(torch.uint8), t.to(torch.int16), t.int(), t.to(torch.complex64),
        t.to(torch.float8_e5m2), t[:0], t[..., :0], t[:-1], torch.cat([t, t]), t.unsqueeze(0), t.unsqueeze(-1), t.flatten()[0],
        t.sum(), strided, t.flip(0), t.new_zeros(1).expand(shape), t.new_zeros(()).expand(shape), t.t() if t.dim() == 2 else t,
        t.clone().fill_(-1), t.clone().fill_(N), t.clone().fill_(2**31 - 1), t.to("meta"), t.numpy(), t.tolist(),
        torch.nn.Parameter(t.float()), torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
        torch.nested.nested_tensor([t.float().flatten(), t.float().flatten()[:1]]), t.float().to_mkldnn(),
        torch._efficientzerotensor(shape, dtype=t.dtype), torch.complex(t.float(), t.float()).conj().imag, t.as_subclass(Odd),
        t.clone().fill_(2**62) if t.dtype is torch.int64 else t.fill_(float("nan")) if t.is_floating_point() else t,
        t + 2**32 if t.dtype is torch.int64 else t,
    ]  # fmt: skip
    if t.dim() == 2:
        found += [t.float().to_sparse(), t.float().to_sparse_csr(), t.float().to_sparse_csc()]
    return found


class Odd(torch.Tensor):
    """A subclass without anything of its own."""


THINGS = [
    None,
    "text",
    "",
    b"x",
    0,
    1,
    -1,
    7,
    2.5,
    float("nan"),
    True,
    [],
    [1, 2],
    (),
    (3, 4),
    (3, 4, 5),
    {},
    object(),
    type,
    len,
    E,
]
THINGS += [
    np.int64(N),
    np.float64(N),
    np.arange(E),
    torch.tensor(N),
    torch.tensor(2.5),
    torch.tensor([3, 4]),
    2**31,
    2**70,
    -(2**40),
]
THINGS += ["sum", "first", "bucket", ("a", "b"), (N, None), [N, N], 1 << 20, Graph]


def use(graph: object) -> None:
    """Runs over a graph that was accepted."""
    if not isinstance(graph, Graph) or max(graph.num_src, graph.num_dst) > 1 << 21:
        return
    for g in (graph, graph.reverse()):
        for kernel in ("gas", "gar"):
            with gnnfast.override(kernel=kernel):
                x, w = torch.randn(g.num_src, F, requires_grad=True), torch.rand(g.num_edges, requires_grad=True)
                for reduce in ("sum", "mean", "max"):
                    gnnfast.spmm(g, x, w, reduce).sum().backward()
                gnnfast.sddmm(g, torch.randn(g.num_dst, F), x).sum().backward()
        gnnfast.spmm_sampled(g, x, w, width=2, strategy="random").sum().backward()


def cases() -> dict[str, tuple[object, dict[str, object]]]:
    """Every public function with good arguments."""
    ids = torch.stack([torch.randint(0, N, (E,)), torch.randint(0, N, (E,))])
    rowptr = torch.tensor([0, 2, 4, 4, 7, 9, 10])
    graph, x, w = Graph.from_edge_index(ids, N), torch.randn(N, F), torch.rand(E)
    sparse = torch.randn(N, F).relu().to_sparse_csr()
    heads = torch.randn(N, 2, F)
    compressed = {"num_src": N, "perm": torch.randperm(E)}
    return {
        "Graph.from_edge_index": (Graph.from_edge_index, {"edge_index": ids, "num_nodes": N}),
        "Graph.from_coo": (Graph.from_coo, {"src": ids[0], "dst": ids[1], "num_src": N, "num_dst": N}),
        "Graph.from_csr": (Graph.from_csr, {"rowptr": rowptr, "col": ids[0], **compressed}),
        "Graph.from_csc": (
            Graph.from_csc,
            {"colptr": rowptr.int(), "row": ids[0].int(), "num_dst": N, "perm": compressed["perm"].int()},
        ),
        "spmm": (gnnfast.spmm, {"graph": graph, "x": x, "weight": w, "reduce": "sum", "ties": "even"}),
        "spmm max": (gnnfast.spmm, {"graph": graph, "x": x, "weight": w, "reduce": "max", "ties": "first"}),
        "spmm heads": (gnnfast.spmm, {"graph": graph, "x": torch.randn(N, 2, F), "weight": torch.rand(E, 2)}),
        "sddmm": (gnnfast.sddmm, {"graph": graph, "dst": x, "src": x.clone()}),
        "edge_softmax": (gnnfast.edge_softmax, {"graph": graph, "score": w, "by": "dst"}),
        "edge_softmax heads": (gnnfast.edge_softmax, {"graph": graph, "score": torch.randn(E, 2), "by": "src"}),
        "attention": (
            gnnfast.attention,
            {
                "graph": graph,
                "dst": heads,
                "src": heads.clone(),
                "value": heads.clone(),
                "score": "dot",
                "scale": 0.5,
                "dropout": 0.2,
            },
        ),
        "attention additive": (
            gnnfast.attention,
            {"graph": graph, "dst": heads[:, :, 0], "src": heads[:, :, 1], "value": heads, "score": "additive", "slope": 0.2},
        ),
        "attention gatv2": (
            gnnfast.attention,
            {
                "graph": graph,
                "dst": heads,
                "src": heads.clone(),
                "score": "gatv2",
                "att": torch.randn(2, F),
                "edge": torch.randn(graph.num_edges, 2, F),
            },
        ),
        "spmm_sampled": (
            gnnfast.spmm_sampled,
            {"graph": graph, "x": x, "weight": w, "reduce": "mean", "width": 2, "strategy": "random", "rescale": True, "seed": 3},
        ),
        "spmm_sparse_features": (gnnfast.spmm_sparse_features, {"graph": graph, "x": sparse, "weight": w, "reduce": "sum"}),
        "override": (
            lambda **changes: gnnfast.override(**changes).__enter__(),
            {"kernel": "gar", "degree_threshold": 2.0, "sample": "off", "sample_width": 4, "strict": False, "schedule": "auto"},
        ),
    }


def report(*parts: object) -> None:
    print(*parts, flush=True)


def attempt(name: str, function: object, good: dict[str, object], argument: str, value: object) -> None:
    nested = isinstance(value, torch.Tensor) and value.is_nested
    given = (
        f"{type(value).__name__} {getattr(value, 'dtype', '')} {'nested' if nested else str(getattr(value, 'shape', value))[:60]}"
    )
    os.write(3, f"{name}({argument}={given})\n".encode())  # where a parent that loses this child finds it
    try:
        use(function(**(good | {argument: value})))
    except ERRORS as error:
        text = str(error)
        related = {"perm", "col", "row", "rowptr", "colptr", "edge_index", "src", "dst"} if "from_" in name else {"x", "dst", "src"}
        named = argument in text or any(f"{other} " in text for other in related) or "num_" in text or "index" in text
        if not named or len(text) < 20 or ".h:" in text or ".cpp:" in text:
            report(f"{name}({argument}={given}): {type(error).__name__}: {text[:150]}")
    except BaseException as error:
        report(f"{name}({argument}={given}): {type(error).__name__}: {str(error)[:150]}")


def main() -> int:
    torch.set_num_threads(1)  # so that a forked child finds no lost threads
    tried = 0
    for name, (function, good) in cases().items():
        for argument, value in good.items():
            values = THINGS + (tensors(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else [])
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                values = values + tensors(value.to_dense()) + [value.to_sparse_coo(), value.to(torch.float64)]
            tried += len(values)
            with open(f"/tmp/gnnfast-arguments-{os.getpid()}", "wb+") as last:
                child = os.fork()
                if child == 0:
                    os.dup2(last.fileno(), 3)
                    for wrong in values:
                        attempt(name, function, good, argument, wrong)
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                if status:
                    last.seek(0)
                    report(f"died with status {status}:", last.read().decode().splitlines()[-1])
            os.unlink(last.name)
    print(f"{tried} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
