"""SpMM beside its peers, on the same inputs in one run: cuSPARSE through torch on CUDA; MKL through torch and DGL on a CPU.

python benchmarks/spmm.py --device cuda --out benchmarks/results/NAME
python benchmarks/spmm.py --device cpu
"""

from __future__ import annotations

import argparse
import warnings

import graphs
import timing
import torch
from torch import Tensor

import gnnfast
from gnnfast import Graph

warnings.filterwarnings("ignore", message=".*[Ss]parse")


def check(found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).norm() / expected.norm())
    assert error < 1e-4, f"results differ by {error}"


def cuda_rows(names: list[str], widths: list[int]) -> list[dict]:
    device, rows = torch.device("cuda"), []
    for name in names:
        rowptr, col = graphs.random_order(name, device)
        nodes, edges = rowptr.numel() - 1, col.numel()
        weight = torch.rand(edges, device=device)
        graph = Graph.from_csr(rowptr, col)
        matrix = torch.sparse_csr_tensor(rowptr, col, weight, (nodes, nodes))
        for width in widths:
            x = torch.randn(nodes, width, device=device)
            with torch.no_grad():
                check(gnnfast.spmm(graph, x, weight), matrix @ x)
                ours = timing.median_ms(lambda: gnnfast.spmm(graph, x, weight), device)
                theirs = timing.median_ms(lambda: matrix @ x, device)
                half = timing.median_ms(lambda x=x.bfloat16(), w=weight.bfloat16(): gnnfast.spmm(graph, x, w), device)
                maximum = timing.median_ms(lambda: gnnfast.spmm(graph, x, reduce="max"), device)
            rows.append(
                {
                    "graph": name, "nodes": nodes, "edges": edges, "F": width, "gnnfast ms": ours, "cuSPARSE ms": theirs,
                    "cuSPARSE / gnnfast": theirs / ours, "bf16 ms": half, "max ms": maximum,
                    "gather TB/s": edges * width * 4 / ours / 1e9,
                }
            )  # fmt: skip
    return rows


def cpu_rows(names: list[str], widths: list[int]) -> list[dict]:
    import dgl

    device, rows = torch.device("cpu"), []
    for name in names:
        edge_index, nodes = graphs.real(name)
        weight = torch.rand(edge_index.shape[1])
        csr = Graph.from_edge_index(edge_index, nodes).csr
        perm = slice(None) if csr.perm is None else csr.perm.long()
        graph, in_slots = Graph.from_csr(csr.rowptr, csr.col), weight[perm]
        matrix = torch.sparse_csr_tensor(csr.rowptr.long(), csr.col.long(), in_slots, (nodes, nodes))
        g = dgl.graph((edge_index[0], edge_index[1]), num_nodes=nodes).formats("csc")
        for width in widths:
            x = torch.randn(nodes, width)
            with torch.no_grad():
                gnnfast.disable()  # so that DGL runs its own kernels
                expected = matrix @ x
                check(gnnfast.spmm(graph, x, in_slots), expected)
                check(dgl.ops.u_mul_e_sum(g, x, weight.view(-1, 1)), expected)
                row = {"graph": name, "edges": edge_index.shape[1], "F": width}
                row["gnnfast ms"] = timing.median_ms(lambda: gnnfast.spmm(graph, x, in_slots), device)
                row["MKL ms"] = timing.median_ms(lambda: matrix @ x, device)
                row["DGL u_mul_e_sum ms"] = timing.median_ms(lambda: dgl.ops.u_mul_e_sum(g, x, weight.view(-1, 1)), device)
                row["gnnfast unweighted ms"] = timing.median_ms(lambda: gnnfast.spmm(graph, x), device)
                row["DGL copy_u_sum ms"] = timing.median_ms(lambda: dgl.ops.copy_u_sum(g, x), device)
                gnnfast.enable()
            row["MKL / gnnfast"] = row["MKL ms"] / row["gnnfast ms"]
            row["DGL u_mul_e / gnnfast"] = row["DGL u_mul_e_sum ms"] / row["gnnfast ms"]
            row["DGL copy_u / gnnfast"] = row["DGL copy_u_sum ms"] / row["gnnfast unweighted ms"]
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graphs", nargs="*")
    parser.add_argument("--widths", nargs="*", type=int)
    parser.add_argument("--out", help="write OUT.json and OUT.md")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        rows = cuda_rows(arguments.graphs or graphs.random_order_names(), arguments.widths or [32, 64, 128])
        summary = {
            f"geometric mean of cuSPARSE / gnnfast, F = {f}": timing.geometric_mean(
                r["cuSPARSE / gnnfast"] for r in rows if r["F"] == f
            )
            for f in sorted({r["F"] for r in rows})
        }
        summary["geometric mean over all"] = timing.geometric_mean(r["cuSPARSE / gnnfast"] for r in rows)
    else:
        rows = cpu_rows(arguments.graphs or list(graphs.REAL), arguments.widths or [16, 64, 128])
        summary = {
            f"geometric mean of {name}": timing.geometric_mean(r[name] for r in rows) for name in rows[0] if "/ gnnfast" in name
        }
    timing.write(arguments.out, f"SpMM on {arguments.device}", rows, device, summary)


if __name__ == "__main__":
    main()
