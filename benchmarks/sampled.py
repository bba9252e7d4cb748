"""What sampling costs in accuracy and gains in time.

    gnnfast bench sampled --script eval.py           your own trained model: eval.py defines evaluate(), returning an accuracy
    gnnfast bench sampled --device cuda --out PATH   the cases below

In Python, ``gnnfast.benchmarks.sampled.check(evaluate)`` does what ``--script`` does. evaluate() is called for each strategy and
width under ``gnnfast.override(sample=..., sample_width=...)``; it must run the model in inference (torch.no_grad()).

Cases without a script:

    speed      the SpMM alone, F = 128 and 64, beside cuSPARSE and gnnfast's exact kernel (CUDA)
    planted    GCN and GraphSAGE, 128 hidden features, on a reddit-size graph with planted communities (CUDA); see planted()
    real       the same on Tolokers and Amazon-Computers
    training   "random" at half the edges against all of them, each evaluated on all, on Amazon-Computers and Coauthor-Physics
    rates      the share of edges that a width keeps, by gnnfast and by min(S, nnz) / nnz over the degree histograms
"""

from __future__ import annotations

import itertools
import runpy
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gnnfast
from gnnfast import Graph
from gnnfast.config import STRATEGIES

from . import graphs, tables, timing
from .compare import read

WIDTHS = (16, 32, 64, 128, 256, 512)
CASES = ("speed", "planted", "real", "training", "rates")
CLASSES, FEATURES, SIGNAL, REDRAWN = 40, 64, 0.32, 0.05


# ---- the accuracy check ------------------------------------------------------------------------------------------------------
def check(
    evaluate: Callable[[], float | Tensor],
    widths: Iterable[int] = WIDTHS,
    strategies: Iterable[str] = STRATEGIES,
    loss: float = 0.01,
    repeats: int = 3,
) -> tuple[list[tables.Row], str]:
    """Accuracy and time of a trained model for each strategy and width.

    Args:
        evaluate: returns the model's accuracy, from 0 to 1; runs it in inference, so under ``torch.no_grad()``.
        widths: the most edges of a node.
        strategies: of ``bucket``, ``fastrand`` and ``random``.
        loss: the most accuracy that a recommended setting may lose.
        repeats: timed calls of ``evaluate`` for each row, of which the fastest counts; with ``random``, the accuracies of that
            many draws are averaged.

    Returns:
        A row for the exact model and one for each setting, and a line that recommends the fastest within the loss.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [_measure(evaluate, "off", None, device, repeats)]
    exact = rows[0]
    for strategy in strategies:
        for width in widths:
            row = _measure(evaluate, strategy, width, device, repeats)
            row |= {"loss": exact["accuracy"] - row["accuracy"], "exact / sampled": exact["ms"] / row["ms"]}
            rows.append(row)
    return rows, recommend(rows, loss)


def _measure(evaluate: Callable[[], Any], strategy: str, width: int | None, device: torch.device, repeats: int) -> tables.Row:
    with gnnfast.override(sample=strategy, sample_width=width or 1):
        gnnfast.clear_report()
        evaluate()  # what is made once is not timed
        report = gnnfast.report()
        accuracies: list[float] = []
        times = [timing.wall_ms(lambda: accuracies.append(float(evaluate())), device) for _ in range(repeats)]
    row: tables.Row = {"strategy": strategy, "S": width, "accuracy": statistics.mean(accuracies), "ms": min(times)}
    if strategy != "off":
        row["edges taken"] = report.sampled["draws"] / report.sampled["edges"] if report.sampled["edges"] else 1.0
        reasons = {reason.partition("not sampled: ")[2] for _, _, reason in report.kernels} - {""}
        row |= {"note": "not sampled: " + "; ".join(sorted(reasons))} if reasons else {}
    return row


def recommend(rows: list[tables.Row], loss: float) -> str:
    """The fastest setting of :func:`check`'s rows that loses at most ``loss``."""
    exact = rows[0]
    good = [row for row in rows[1:] if row["loss"] <= loss and row["edges taken"] < 1 and row["ms"] < exact["ms"]]
    if not good:
        return f"recommended: no sampling; no setting is faster than the exact model and loses at most {loss:.1%}"
    best = min(good, key=lambda row: row["ms"])
    return (
        f"recommended: GNNFAST_SAMPLE={best['strategy']} GNNFAST_SAMPLE_WIDTH={best['S']}, {best['exact / sampled']:.2f} times as "
        f"fast, {best['loss']:+.2%} accuracy lost (accepted: {loss:.1%})"
    )


# ---- models ------------------------------------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    """Two layers of GCNConv or SAGEConv."""

    def __init__(self, kind: str, features: int, hidden: int, classes: int) -> None:
        from torch_geometric.nn import GCNConv, SAGEConv

        super().__init__()
        layer = {"GCN": GCNConv, "SAGE": SAGEConv}[kind]
        self.first, self.second = layer(features, hidden), layer(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x, edge_index)), edge_index)


class Task:
    """Node classification: data, a random split (half of the nodes train, a quarter validate, a quarter test), and training with
    Adam that keeps the parameters of the best accuracy in validation, which is exact and looked at every fifth epoch."""

    def __init__(self, edge_index: Tensor, x: Tensor, y: Tensor, seed: int = 0) -> None:
        self.edge_index, self.x, self.y, self.classes = edge_index, x, y, int(y.max()) + 1
        part = torch.rand(y.numel(), generator=torch.Generator().manual_seed(seed)).to(y.device)
        self.train, self.validation, self.test = part < 0.5, (part >= 0.5) & (part < 0.75), part >= 0.75

    def fit(self, kind: str, epochs: int, seed: int = 0, hidden: int = 128) -> Model:
        torch.manual_seed(seed)
        model = Model(kind, self.x.shape[1], hidden, self.classes).to(self.x.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        best, kept = -1.0, model.state_dict()
        for epoch in range(1, epochs + 1):
            optimizer.zero_grad(set_to_none=True)
            logits = model(self.x, self.edge_index)
            torch.nn.functional.cross_entropy(logits[self.train], self.y[self.train]).backward()
            optimizer.step()
            if epoch % 5 == 0:
                with gnnfast.override(sample="off"):
                    found = self.accuracy(model, self.validation)
                if found > best:
                    best, kept = found, {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(kept)
        return model.eval()

    def accuracy(self, model: Model, part: Tensor | None = None) -> float:
        """On the test nodes, or on others."""
        with torch.no_grad():
            right = model(self.x, self.edge_index).argmax(1) == self.y
        return float(right[self.test if part is None else part].float().mean())


def planted(name: str, device: torch.device) -> Task:
    """A graph of a benchmark's size in which communities have classes.

    ``graphs.communities`` draws 70% of each node's edges within its community. A community's class is one of 40; 5% of the nodes
    have their label redrawn, which bounds the accuracy near 95%. Features (64) are 0.32 times a normal vector of the class plus
    normal noise, so that the best rule on a node's features alone is right in 58.5% of the nodes: what Hamilton et al. (GraphSAGE,
    NeurIPS 2017, Table 1) report for the raw features of Reddit.
    """
    generator = torch.Generator(device).manual_seed(0)
    rowptr, col, community = graphs.communities(graphs.degrees(name, generator), generator)
    label = torch.randint(CLASSES, (int(community.max()) + 1,), generator=generator, device=device)[community]
    means = torch.randn(CLASSES, FEATURES, generator=generator, device=device)
    x = SIGNAL * means[label] + torch.randn(label.numel(), FEATURES, generator=generator, device=device)
    redrawn = torch.rand(label.numel(), generator=generator, device=device) < REDRAWN
    y = torch.where(redrawn, torch.randint(CLASSES, label.shape, generator=generator, device=device), label)
    guess = (x @ means.t() - SIGNAL / 2 * means.square().sum(1)).argmax(1)
    print(f"{name}, planted: {float((guess == y).float().mean()):.1%} right by features alone", flush=True)
    return Task(graphs.to_edge_index(rowptr, col, shuffle=False), x, y)


def real(name: str, device: torch.device, seed: int = 0) -> Task:
    """A real graph with its own features and classes."""
    data = graphs.real_data(name)
    return Task(data.edge_index.to(device), data.x.to(device), data.y.to(device), seed)


# ---- cases -------------------------------------------------------------------------------------------------------------------
def speed(device: torch.device) -> Iterator[tables.Row]:
    """The op alone beside cuSPARSE and the exact kernel, both weighted. ``L2 TB/s`` is what is gathered over the time."""
    for name, order in (("reddit", "random"), ("reddit", "community"), ("proteins", "random")):
        make = graphs.random_order if order == "random" else graphs.community_order
        rowptr, col = make(name, device)
        graph, nodes = Graph.from_csr(rowptr, col), rowptr.numel() - 1
        weight = torch.rand(col.numel(), device=device)
        matrix = torch.sparse_csr_tensor(rowptr, col, weight, (nodes, nodes))
        for width in (128, 64):
            x = torch.randn(nodes, width, device=device)
            cusparse = timing.median_ms(lambda: matrix @ x, device)
            exact = timing.median_ms(lambda: gnnfast.spmm(graph, x, weight), device, warmup=8)
            full = gnnfast.spmm(graph, x, weight)
            assert float((full - matrix @ x).norm() / full.norm()) < 1e-4, "cuSPARSE and gnnfast disagree"
            for strategy, most, w in itertools.product(STRATEGIES, WIDTHS, (weight, None)):
                call = lambda: gnnfast.spmm_sampled(graph, x, w, width=most, strategy=strategy, seed=0)  # noqa: E731
                ms = timing.median_ms(call, device)
                _, draws = graph.draws.sizes(graph, most)
                row: tables.Row = {"graph": name, "order": order, "F": width, "strategy": strategy, "S": most}
                row["weighted"] = "no" if w is None else "yes"
                row |= {"edges taken": draws / col.numel(), "sampled ms": ms, "exact ms": exact, "cuSPARSE ms": cusparse}
                row |= {"exact / sampled": exact / ms, "cuSPARSE / sampled": cusparse / ms}
                yield row | {"L2 TB/s": draws * width * 4e-9 / ms}


def accuracies(task: Task, name: str, epochs: int) -> Iterator[tables.Row]:
    """:func:`check` on trained models."""
    for kind in ("GCN", "SAGE"):
        model = task.fit(kind, epochs)
        rows, line = check(lambda: task.accuracy(model))
        print(f"{name} {kind}: {line}", flush=True)
        for row in rows:
            yield {"graph": name, "model": f"{kind}-128"} | row


def training(device: torch.device, names: Iterable[str], seeds: int = 10, epochs: int = 150) -> Iterator[tables.Row]:
    """Test accuracy (mean and standard deviation over seeds) of models trained on all edges and on half of them, drawn anew for
    each pass; both are evaluated on all edges."""
    for name in names:
        found: dict[tuple[str, bool], list[float]] = {}
        taken = width = 0.0
        for seed in range(seeds):
            task = real(name, device, seed)
            width = half_width(Graph.from_edge_index(task.edge_index, task.y.numel()))
            for kind in ("GCN", "SAGE"):
                for sampled in (False, True):
                    gnnfast.clear_report()
                    how = {"sample": "random", "sample_width": width} if sampled else {"sample": "off"}
                    with gnnfast.override(**how):
                        model = task.fit(kind, epochs, seed)
                    counts = gnnfast.report().sampled
                    taken = counts["draws"] / counts["edges"] if sampled else taken
                    found.setdefault((kind, sampled), []).append(task.accuracy(model))
        for kind in ("GCN", "SAGE"):
            row: tables.Row = {"graph": name, "model": f"{kind}-128", "S": int(width), "edges taken": taken, "seeds": seeds}
            for label, sampled in (("all edges", False), ("sampled", True)):
                values = found[kind, sampled]
                row |= {label: statistics.mean(values), f"{label} deviation": statistics.pstdev(values)}
            yield row | {"loss": row["all edges"] - row["sampled"]}


def half_width(graph: Graph) -> int:
    """The width that keeps half of the edges, or as close as it gets."""
    longest, _ = graph.draws.sizes(graph, 1)
    low, high = 1, max(longest, 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if 2 * graph.draws.sizes(graph, middle)[1] < graph.num_edges else (low, middle)
    return low


def rates(device: torch.device) -> Iterator[tables.Row]:
    """Graphs with the degrees of each histogram, whatever their columns."""
    for name in graphs.random_order_names():
        degree = graphs.degrees(name, torch.Generator(device).manual_seed(0))
        rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)]).int()
        graph = Graph.from_csr(rowptr, torch.zeros(int(rowptr[-1]), dtype=torch.int32, device=device))
        for width in WIDTHS:
            apart = sum(min(width, n) * k for n, k in zip(*(t.tolist() for t in degree.unique(return_counts=True))))
            _, draws = graph.draws.sizes(graph, width)
            assert draws == apart, f"{name}: {draws} edges of at most {width} a row, {apart} by the histogram"
            yield {"graph": name, "S": width, "edges taken": draws / graph.num_edges, "by histogram": apart / graph.num_edges}


def run(cases: Iterable[str], device: torch.device) -> Iterator[tables.Row]:
    """The rows of some of CASES."""
    for case in cases:
        if case in ("speed", "planted") and device.type != "cuda":
            print(f"{case} left out: needs a CUDA device")
            continue
        lacking = [graphs.missing(name, "real") for name in ("tolokers", "amazon-computers", "coauthor-physics")]
        if case in ("real", "training") and any(lacking):
            print(f"{case} left out: " + "; ".join(filter(None, lacking)))
            continue
        rows: dict[str, Callable[[], Iterable[tables.Row]]] = {
            "speed": lambda: speed(device),
            "planted": lambda: accuracies(planted("reddit", device), "reddit, planted", 40),
            "real": lambda: (r for n in ("tolokers", "amazon-computers") for r in accuracies(real(n, device), n, 100)),
            "training": lambda: training(device, ("amazon-computers", "coauthor-physics")),
            "rates": lambda: rates(device),
        }
        for row in rows[case]():
            print(", ".join(f"{k} {tables.cell(v)}" for k, v in ({"group": case} | row).items()), flush=True)
            yield {"group": case} | row


def chart(rows: list[tables.Row], path: str) -> str:
    """Draws by edges a node what is lost in accuracy and what is won in time, two panels above one another for each model."""
    from .plot import plt

    models: dict[str, list[tables.Row]] = {}
    for row in rows:
        if "accuracy" in row:
            models.setdefault("\n".join(filter(None, (row.get("graph", ""), row.get("model", "")))), []).append(row)
    if not models:
        return "no chart: no accuracy was measured"
    size = max(2.6 * len(models), 4.5), 4.6
    figure, axes = plt.subplots(2, len(models), figsize=size, squeeze=False, sharex=True, sharey="row", layout="constrained")
    for (lost, won), (title, cells) in zip(axes.T, models.items()):
        exact = next(row for row in cells if row["strategy"] == "off")
        for strategy in [s for s in dict.fromkeys(row["strategy"] for row in cells) if s != "off"]:
            mine = sorted((row for row in cells if row["strategy"] == strategy), key=lambda row: row["S"])
            at = [row["S"] for row in mine]
            lost.plot(at, [100 * (row["accuracy"] - exact["accuracy"]) for row in mine], "o-", ms=3, label=strategy)
            won.plot(at, [exact["ms"] / row["ms"] for row in mine], "o-", ms=3)
        widths = sorted({row["S"] for row in cells if row["S"]})
        won.set_xscale("log", base=2)
        won.set_xticks(widths, [str(width) for width in widths], fontsize=8)
        won.set_xlabel("edges a node, at most")
        lost.set_title(title, loc="left", fontsize=9)
        for axis, exactly in ((lost, 0), (won, 1)):
            axis.axhline(exactly, color="black", linewidth=0.8)
            axis.grid(axis="y", linewidth=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("accuracy, points\nagainst exact")
    axes[1, 0].set_ylabel("times as fast\nas exact")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return f"chart: {path}"


# ---- the command line --------------------------------------------------------------------------------------------------------
class ScriptError(ValueError):
    """A script is not what was asked for."""


def load(script: str, function: str, arguments: list[str]) -> Callable[[], float]:
    """The function of a script, which runs as ``python script arguments`` would but for its name.

    Raises:
        ScriptError: there is no such script or function. What the script itself raises is not touched.
    """
    if not Path(script).is_file():
        raise ScriptError(f"--script {script}: there is no such file")
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    found = runpy.run_path(script, run_name="__eval__").get(function)
    if not callable(found):
        raise ScriptError(
            f"--script {script}: it must define a function {function}() that returns the accuracy of a trained model; "
            "another name is given with --function"
        )
    return found  # type: ignore[no-any-return]


def main(arguments: list[str] | None = None) -> int:
    parser = tables.make_parser("sampled", __doc__)
    tables.add_device(parser)
    parser.add_argument("--cases", nargs="+", default=CASES, **tables.named(CASES))
    parser.add_argument("--script", metavar="EVAL.py", help="a script that defines evaluate()")
    parser.add_argument("--function", default="evaluate", metavar="NAME", help="its name, if it is another")
    parser.add_argument("--loss", type=float, default=0.01, help="accuracy that a recommended setting may lose (0.01)")
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS, metavar="S", help="with --script")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, **tables.named(STRATEGIES, "with --script"))
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="with --script: calls of evaluate() a row")
    tables.add_output(parser, chart=True)
    parser.add_argument("--from", dest="source", metavar="RESULT.json", help="draw the chart again, measure nothing")
    parser.add_argument("rest", nargs="*", metavar="ARGUMENT", help="of the script, after --")
    options = parser.parse_args(arguments)
    for name, values in (("widths", options.widths), ("repeats", [options.repeats])):
        if min(values) < 1:
            parser.error(f"--{name} must be at least 1, got {min(values)}")
    if options.source:
        try:
            print(chart(read(options.source)["rows"], options.source.removesuffix(".json") + ".svg"))
        except ValueError as error:
            parser.error(f"--from {error}")
        return 0
    device, summary = torch.device(options.device), {}
    if options.script:
        try:
            evaluate = load(options.script, options.function, options.rest)
        except ScriptError as error:
            parser.error(str(error))
        rows, line = check(evaluate, options.widths, options.strategies, options.loss, options.repeats)
        summary["recommended"] = line.removeprefix("recommended: ")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        rows = list(run(options.cases, device))
    record = tables.make_record("Sampled aggregation", device, rows, summary)
    if options.script:
        tables.show(record, options.markdown)
    if options.out:
        tables.save_with_chart(record, options.out, lambda path: chart(rows, path))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
