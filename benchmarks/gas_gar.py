"""Where converting a graph that is seen for the first time begins to pay: GAS on COO against conversion and GAR, one forward and
backward pass, over random graphs of growing average degree. The crossover is the default of GNNFAST_DEGREE_THRESHOLD.

    gnnfast bench gas_gar --out benchmarks/results/NAME
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import gnnfast
from gnnfast import Graph

from . import tables, timing


def once(kernel: str, edge_index: Tensor, nodes: int, x: Tensor) -> None:
    """What a graph costs that is used once: everything is made in the call."""
    with gnnfast.override(kernel=kernel):
        gnnfast.spmm(Graph.from_edge_index(edge_index, nodes), x).sum().backward()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gnnfast bench gas_gar", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write OUT.json and OUT.md")
    options = parser.parse_args(arguments)
    device, rows = torch.device("cuda"), []
    for nodes in (20_000, 200_000, 1_000_000):
        for width in (32, 128):
            x = torch.randn(nodes, width, device=device, requires_grad=True)
            for degree in (1, 2, 4, 8, 16, 32, 64):
                edge_index = torch.randint(0, nodes, (2, nodes * degree), device=device)
                gas = timing.median_ms(lambda: once("gas", edge_index, nodes, x), device, 7)
                gar = timing.median_ms(lambda: once("gar", edge_index, nodes, x), device, 7)
                row = {"nodes": nodes, "F": width, "average degree": degree, "GAS ms": gas, "convert + GAR ms": gar}
                rows.append(row | {"GAS / (convert + GAR)": gas / gar})
    tables.write(options.out, "A graph used once: GAS against conversion and GAR", rows, device, {})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
