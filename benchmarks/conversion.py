"""What a graph that is new costs: an ``edge_index`` in the formats that kernels need, by gnnfast, PyG's EdgeIndex and DGL.

gnnfast bench conversion --device cuda --out benchmarks/results/NAME
gnnfast bench conversion --edges 2000 200000

Of a random graph of three edges a node. "one": CSR by destination, all that a sum in inference needs; "both": by source too, which
its gradient needs. Each time of a new copy of the edges, with what is found out and let go on the way: gnnfast's is what a layer
of PyG pays before its first kernel. A time is that of many such, waited for once: on CUDA the longer of host's and device's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnfast.pyg.adjacency import graph_of

from . import tables, timing
from .host import block_ms

EDGES = (200, 2_000, 20_000, 200_000, 2_000_000)


def by_gnnfast(edge_index: Tensor, nodes: int, both: bool) -> tuple[Tensor, ...]:
    graph = graph_of(edge_index, nodes, nodes, True)
    graph.args(csc=both)
    csr = graph.csr
    return csr.rowptr, csr.col


def by_pyg(edge_index: Tensor, nodes: int, both: bool) -> tuple[Tensor, ...]:
    from torch_geometric import EdgeIndex

    ordered = EdgeIndex(edge_index, sparse_size=(nodes, nodes)).sort_by("col").values
    if both:
        ordered.get_csr()
    (colptr, row), _ = ordered.get_csc()
    return colptr, row


def by_dgl(edge_index: Tensor, nodes: int, both: bool) -> tuple[Tensor, ...]:
    import dgl

    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=nodes)
    graph = graph.formats(["csc", "csr"] if both else ["csc"])
    graph.create_formats_()
    colptr, row, _ = graph.adj_tensors("csc")
    return colptr, row


def sides(device: torch.device) -> dict[str, Callable[..., tuple[Tensor, ...]]]:
    """gnnfast and its peers that are installed; PyPI's DGL has no CUDA."""
    found = {"gnnfast": by_gnnfast, "PyG": by_pyg}
    if device.type == "cpu":
        try:
            import dgl  # noqa: F401
        except ImportError as error:
            print(f"gnnfast bench conversion: without DGL: {error}")
        else:
            found["DGL"] = by_dgl
    return found


def measure(edges: int, device: torch.device, both: bool, options: Any) -> tables.Row:
    generator, nodes = torch.Generator().manual_seed(edges), max(edges // 3, 1)
    edge_index = torch.randint(nodes, (2, edges), generator=generator).to(device)
    calls = sides(device)
    rows: dict[str, tuple[Tensor, ...]] = {name: make(edge_index.clone(), nodes, both) for name, make in calls.items()}
    for name, (rowptr, col) in rows.items():
        ours, theirs = rows["gnnfast"], torch.repeat_interleave(rowptr.diff().long())
        same = torch.equal(rowptr.long(), ours[0].long())
        # Which of a node's edges comes first is nobody's promise.
        if not same or not torch.equal(*((theirs * nodes + c.long()).sort().values for c in (col, ours[1]))):
            raise SystemExit(f"gnnfast bench conversion: {name} makes another format than gnnfast of {edges} edges")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.repeats):
        for name, make in calls.items():
            times[name].append(block_ms(lambda make=make: make(edge_index.clone(), nodes, both), device, options.seconds))
    row: tables.Row = {"edges": edges, "formats": "both" if both else "one"}
    for name, found in times.items():
        row |= timing.Sample.of(found).columns(name)
    return row | {f"{name} / gnnfast": row[f"{name} ms"] / row["gnnfast ms"] for name in calls if name != "gnnfast"}


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("conversion", __doc__.splitlines()[0])
    tables.add_device(parser)
    parser.add_argument("--edges", nargs="*", type=int, default=EDGES, help=f"{' '.join(map(str, EDGES))} if not given")
    parser.add_argument("--repeats", type=int, default=5, help="times of each side, in turn")
    parser.add_argument("--seconds", type=float, default=0.2, help="of conversions in one of these")
    tables.add_output(parser)
    options, rows = parser.parse_args(arguments), []
    device = torch.device(options.device)
    for edges in options.edges:
        for both in (False, True):
            rows.append(measure(edges, device, both, options))
            print(", ".join(f"{k} {tables.cell(v)}" for k, v in rows[-1].items() if "spread" not in k), flush=True)
    ratios = {k: [r[k] for r in rows] for k in rows[0] if k.endswith("/ gnnfast")}
    summary = {
        f"{what}, {how}": f(found)
        for what, found in ratios.items()
        for how, f in (("geometric mean", timing.geometric_mean), ("least", min))
    }
    tables.write(options, f"An edge_index in the formats that kernels need, on {device.type}", rows, device, summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
