"""Sparse node features: aggregations and products by density, and layers and training steps on raw bag-of-words features.

    gnnfast bench sparse_features --device cuda --out benchmarks/results/NAME [--write gnnfast/dispatch/calibration.json]

Aggregations compare the dense kernel with the one for sparse features; products (forward and the gradient of the weights) compare
torch's dense product with gnnfast's sparse one. Both say what the selector chooses, by the calibration that --write writes if it is
given, else by the one that ships. Layers and training steps compare PyG eager with gnnfast.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch_geometric.nn import GCNConv, GINConv, GraphConv, SAGEConv, SGConv

import gnnfast
from gnnfast import Graph, features
from gnnfast.cache import cache
from gnnfast.config import settings
from gnnfast.dispatch import select as selector

from . import graphs, tables, timing

PARTS = ("aggregation", "product", "layers", "training")
REAL = ("coauthor-physics", "amazon-computers", "amazon-photo")
DENSITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.045, 0.065, 0.09, 0.12, 0.16, 0.22, 0.3, 0.45, 0.7, 1.0)
WIDTHS = {"cpu": (256, 1024), "cuda": (256, 1024, 4096)}
DTYPES = {"4": torch.float32, "2": torch.bfloat16}
WHAT = {"aggregation": "aggregate", "product": "product"}  # part -> the selector's name of it
OUT = 64
CLOSE = 1.1  # a choice this many times slower than the better one still counts as right
LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "SAGEConv": lambda width: SAGEConv(width, OUT),
    "GCNConv": lambda width: GCNConv(width, OUT),
    "GINConv": lambda width: GINConv(torch.nn.Linear(width, OUT)),
    "GraphConv": lambda width: GraphConv(width, OUT),
    "SGConv": lambda width: SGConv(width, OUT),
}


# ---- by density --------------------------------------------------------------------------------------------------------------
def compare(part: str, graph: Graph, x: Tensor) -> tables.Row:
    """The dense and the sparse way, and that their results agree."""
    found = features.Features.from_dense(x)
    weight = torch.randn(OUT, x.shape[1], device=x.device).to(x.dtype).requires_grad_()

    def product(multiply: Callable[[], Tensor]) -> Tensor:
        out = multiply()
        return torch.autograd.grad(out, weight, out.detach())[0]

    dense: Callable[[], Tensor]
    sparse: Callable[[], Tensor]
    if part == "aggregation":
        dense, sparse = lambda: gnnfast.spmm(graph, x), lambda: features.aggregate(graph, found, None, "sum")
    else:
        dense = lambda: product(lambda: linear(x, weight))  # noqa: E731
        sparse = lambda: product(lambda: features.multiply(found, weight))  # noqa: E731
    expected = dense()
    error = float((sparse() - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error < (1e-4 if x.dtype is torch.float32 else 0.02), f"results differ by {error}"
    del expected
    row: tables.Row = {"density": found.density, "dense ms": timing.median_ms(dense, x.device)}
    row["sparse ms"] = timing.median_ms(sparse, x.device)
    return row | {"dense / sparse": row["dense ms"] / row["sparse ms"]}


def sweep(part: str, device: torch.device) -> list[tables.Row]:
    """Random features of growing density on the graph of Coauthor-Physics, then real features."""
    edge_index, nodes = graphs.real("coauthor-physics")
    graph, rows = Graph.from_edge_index(edge_index.to(device), nodes), []
    for itemsize, dtype in DTYPES.items():
        for width in WIDTHS[device.type]:
            for density in DENSITIES:
                x = torch.rand(nodes, width, device=device).add_(0.5).mul_(torch.rand(nodes, width, device=device) < density)
                row = {"group": part, "features": "random", "F": width, "itemsize": int(itemsize)}
                rows.append(row | compare(part, graph, x.to(dtype)))
                print(tables.table(rows[-1:]).splitlines()[-1], flush=True)
    for name in REAL:
        data = graphs.real_data(name)
        graph, x = Graph.from_edge_index(data.edge_index.to(device), data.num_nodes), data.x.to(device)
        rows.append({"group": part, "features": name, "F": x.shape[1], "itemsize": 4} | compare(part, graph, x))
    return rows


def crossover(rows: list[tables.Row]) -> float:
    """The density below which choosing the sparse way costs least over all measured ones, the geometric mean of two of them. Where
    both ways take equally long single times are noise, and so is where their ratio first crosses 1."""
    rows = sorted(rows, key=lambda row: row["density"])
    gains = [math.log(row["dense / sparse"]) for row in rows]
    first_dense = max(range(len(rows) + 1), key=lambda n: sum(gains[:n]))
    if first_dense in (0, len(rows)):
        return 1.0 if first_dense else 0.0
    return math.sqrt(rows[first_dense - 1]["density"] * rows[first_dense]["density"])


def fit(rows: list[tables.Row]) -> dict[str, list[tuple[int, float]]]:
    """:class:`gnnfast.dispatch.select.Density` for each itemsize."""
    widths = sorted({row["F"] for row in rows if row["features"] == "random"})
    return {
        itemsize: [(w, float(f"{max(crossover([r for r in rows if _is(r, itemsize, w)]), 1e-6):.3g}")) for w in widths]
        for itemsize in DTYPES
    }


def judge(part: str, rows: list[tables.Row], device: torch.device, fitted: dict[str, list[tuple[int, float]]] | None) -> None:
    """Adds to each row what the selector chooses, and how much slower than the better one that is."""
    for row in rows:
        itemsize = str(row["itemsize"])
        known = selector.Density(fitted[itemsize]) if fitted else selector.densities(device.type, WHAT[part], row["itemsize"])
        current = settings().feature_density_threshold
        threshold = current if current is not None else known.threshold(row["F"])
        row["chosen"] = "sparse" if row["density"] < threshold else "dense"
        row["chosen / best"] = row[f"{row['chosen']} ms"] / min(row["dense ms"], row["sparse ms"])


def _is(row: tables.Row, itemsize: str, width: int) -> bool:
    return (row["features"], row["itemsize"], row["F"]) == ("random", int(itemsize), width)


# ---- whole layers and training -----------------------------------------------------------------------------------------------
class TwoLayers(torch.nn.Module):
    """Raw features to hidden ones to classes."""

    def __init__(self, conv: Any, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = conv(width, OUT), conv(OUT, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def beside_pyg(
    step_of: Callable[[torch.nn.Module], Callable[[], Any]], module: torch.nn.Module, device: torch.device
) -> tables.Row:
    """A step by PyG eager and with gnnfast on copies of one module; few of PyG's, which may take seconds."""
    row: tables.Row = {}
    gradients = {}
    for label in ("PyG", "gnnfast"):
        ours = copy.deepcopy(module)
        with _switched(on=label == "gnnfast"):
            step = step_of(ours)
            for _ in range(3 if label == "gnnfast" else 1):  # constant features are known from the second step on
                step()
            gradients[label] = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
            few = label == "PyG" and device.type == "cpu"
            row[f"{label} ms"] = timing.median_ms(step, device, 3 if few else None, warmup=0 if few else 3)
    if not getattr(step_of, "changes_weights", False):
        for a, b in zip(gradients["gnnfast"], gradients["PyG"], strict=True):
            error = float((a - b).norm() / b.norm())
            assert error < 1e-3, f"gradients differ by {error}"
    return row | {"PyG / gnnfast": row["PyG ms"] / row["gnnfast ms"]}


@contextlib.contextmanager
def _switched(on: bool) -> Any:
    (gnnfast.enable if on else gnnfast.disable)()
    cache.clear()
    try:
        yield
    finally:
        gnnfast.enable()


def layers(device: torch.device) -> list[tables.Row]:
    """Forward and backward of single layers on raw features."""
    data = graphs.real_data("coauthor-physics")
    x, edge_index, rows = data.x.to(device), data.edge_index.to(device), []
    messages = edge_index.shape[1] * x.shape[1] * x.element_size()
    for name, make in LAYERS.items():
        if name == "SGConv" and 2.1 * messages > _free_memory(device):
            print(f"{name} left out: PyG's messages and their weighted copy take {2 * messages / 1e9:.0f} GB")
            continue
        torch.manual_seed(0)

        def step_of(layer: torch.nn.Module) -> Callable[[], Any]:
            def step() -> None:
                layer.zero_grad(set_to_none=True)
                layer(x, edge_index).sum().backward()

            return step

        row = {"group": "layers", "layer": name, "graph": "coauthor-physics", "in": x.shape[1], "out": OUT}
        rows.append(row | beside_pyg(step_of, make(x.shape[1]).to(device), device))
        print(tables.table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def _free_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def training(device: torch.device) -> list[tables.Row]:
    """Steps of two-layer models: forward, loss, backward, Adam."""
    rows = []
    for graph in REAL:
        data = graphs.real_data(graph)
        x, y, edge_index = data.x.to(device), data.y.to(device), data.edge_index.to(device)
        for name, conv in (("GCN", GCNConv), ("GraphSAGE", SAGEConv)):
            torch.manual_seed(0)

            def step_of(model: torch.nn.Module, x: Tensor = x, y: Tensor = y, edge_index: Tensor = edge_index) -> Callable[[], Any]:
                optimizer = torch.optim.Adam(model.parameters())

                def step() -> None:
                    optimizer.zero_grad(set_to_none=True)
                    cross_entropy(model(x, edge_index), y).backward()
                    optimizer.step()

                return step

            step_of.changes_weights = True  # type: ignore[attr-defined]
            model = TwoLayers(conv, x.shape[1], int(y.max()) + 1).to(device)
            row = {"group": "training", "model": name, "graph": graph, "in": x.shape[1], "hidden": OUT}
            rows.append(row | beside_pyg(step_of, model, device))
            print(tables.table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


# ---- results -----------------------------------------------------------------------------------------------------------------
def summarise(part: str, rows: list[tables.Row]) -> list[tables.Row]:
    found = []
    for itemsize in DTYPES:
        for width in sorted({row["F"] for row in rows if row["features"] == "random"}):
            cells = [row for row in rows if _is(row, itemsize, width)]
            ratios = [row["chosen / best"] for row in cells]
            found.append(
                {"part": part, "F": width, "itemsize": itemsize, "crossover": crossover(cells)}
                | {"within 10% of the better": sum(r <= CLOSE for r in ratios) / len(ratios), "worst": max(ratios)}
            )
    return found


def chart(rows: list[tables.Row], path: str) -> str:
    """Draws dense over sparse time by density, a panel for aggregations and one for products."""
    from .plot import plt

    parts = [part for part in WHAT if any(row["group"] == part for row in rows)]
    figure, axes = plt.subplots(1, len(parts), figsize=(4.2 * len(parts), 3.4), sharey=True, squeeze=False, layout="constrained")
    for axis, part in zip(axes[0], parts):
        mine = [row for row in rows if row["group"] == part]
        for itemsize, style in (("4", "o-"), ("2", "s--")):
            for width in sorted({row["F"] for row in mine if row["features"] == "random"}):
                cells = [row for row in mine if _is(row, itemsize, width)]
                at, ratios = [row["density"] for row in cells], [row["dense / sparse"] for row in cells]
                axis.plot(at, ratios, style, ms=3, label=f"F = {width}, {DTYPES[itemsize]}".replace("torch.", ""))
        for row in mine:
            if row["features"] != "random":
                axis.plot(row["density"], row["dense / sparse"], "k*", ms=7)
                axis.annotate(row["features"], (row["density"], row["dense / sparse"]), fontsize=7)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="density of the features", title=part)
    axes[0, 0].set_ylabel("time dense / time sparse")
    axes[0, 0].legend(frameon=False, fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return f"chart: {path}"


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("sparse_features", __doc__)
    tables.add_device(parser)
    parser.add_argument("--parts", nargs="*", default=PARTS, **tables.named(PARTS))
    tables.add_output(parser, chart=True)
    parser.add_argument("--write", metavar="FILE", help="write the thresholds, as gnnfast/dispatch/calibration.json")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    for name in REAL:
        reason = graphs.missing(name, "real")
        if reason:
            parser.error(reason)
    rows: list[tables.Row] = []
    summary: list[tables.Row] = []
    fitted: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for part in options.parts:
        if part in WHAT:
            measured = sweep(part, device)
            fitted[WHAT[part]] = fit(measured)
            judge(part, measured, device, fitted[WHAT[part]] if options.write else None)
            summary += summarise(part, measured)
        else:
            measured = (layers if part == "layers" else training)(device)
        rows += measured
    record = tables.make_record("Sparse node features", device, rows, summary)
    tables.show(record, options.markdown)
    if options.write:
        file = Path(options.write)
        table = json.loads(file.read_text()) if file.is_file() else {}
        table.setdefault("density", {}).setdefault(device.type, {}).update(fitted)
        file.write_text(json.dumps(table, indent=1) + "\n")
    if options.out and fitted:
        tables.save_with_chart(record, options.out, lambda path: chart(rows, path))
    elif options.out:
        tables.save(record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
