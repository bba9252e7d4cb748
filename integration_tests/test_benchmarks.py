"""``gnnfast bench``: the made graphs, the limit, users' graph files, and runs of the SpMM benchmark on a tiny graph."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import gnnfast
from gnnfast.cli import benchmarks, main

PACKAGE = benchmarks().__name__
bench, cells, files, graphs, limits, spmm, tables, timing = (
    importlib.import_module(f"{PACKAGE}.{name}")
    for name in ("bench", "cells", "files", "graphs", "limits", "spmm", "tables", "timing")
)
CPU = torch.device("cpu")
EDGES = [[0, 1, 2, 3, 3, 4], [1, 0, 0, 0, 2, 2]]  # sources, destinations; node 0 has in-degree 3, nodes 3 and 4 have none
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
needs_scipy = pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="scipy is not installed")


# ---- made graphs -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def degree() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(5000, generator=generator).pow(-0.7) * 3).long() - 3  # a heavy tail; many nodes of degree 0 to 3


@pytest.mark.parametrize("order", ["chung_lu", "communities"])
def test_made_graphs_have_the_row_degrees_given_and_a_seed(order: str, degree: Tensor) -> None:
    make = getattr(graphs, order)
    rowptr, col, *_ = make(degree, torch.Generator().manual_seed(3))
    assert torch.equal(rowptr.diff().long(), degree)
    assert rowptr.dtype == col.dtype == torch.int32
    assert col.numel() == degree.sum() and col.min() >= 0 and col.max() < degree.numel()
    assert torch.equal(col, make(degree, torch.Generator().manual_seed(3))[1])
    assert not torch.equal(col, make(degree, torch.Generator().manual_seed(4))[1])


def test_seven_tenths_of_the_edges_stay_in_communities_that_ids_do_not_show(degree: Tensor) -> None:
    rowptr, col, label = graphs.communities(degree, torch.Generator().manual_seed(0), mean_size=50)
    row = torch.repeat_interleave(torch.arange(5000), rowptr.diff().long())
    inside = (label[row] == label[col.long()]).float().mean()
    assert 0.68 < inside < 0.75  # of the edges drawn globally a few fall inside by chance
    sizes = label.bincount()
    sizes = sizes[sizes > 0]
    assert 30 < sizes.float().mean() < 100 and sizes.max() > 2 * sizes.float().median()
    assert (label[1:] == label[:-1]).float().mean() < 0.1


def test_columns_are_drawn_in_proportion_to_degree(degree: Tensor) -> None:
    for make in (graphs.chung_lu, lambda *given: graphs.communities(*given, mean_size=50)):
        col = make(degree, torch.Generator().manual_seed(0))[1]
        drawn = col.bincount(minlength=degree.numel())
        assert drawn[degree == 0].sum() == 0
        top = degree.argsort(descending=True)[:500]
        assert abs(drawn[top].sum() / degree[top].sum() - 1) < 0.1


def test_coo_and_csr_of_a_sample_are_one_graph(degree: Tensor) -> None:
    made = graphs.Sample("made", "random", *graphs.chung_lu(degree, torch.Generator().manual_seed(0)))
    given = graphs.Sample.from_edge_index("given", "given", made.coo[0], made.nodes, CPU)
    assert torch.equal(given.rowptr, made.rowptr)
    for sample in (made, given):
        edge_index, slot = sample.coo
        assert torch.equal(edge_index[0], sample.col.long()[slot])
        assert torch.equal(slot.sort().values, torch.arange(sample.edges))
        rows = torch.repeat_interleave(torch.arange(sample.nodes), sample.rowptr.diff().long())
        assert torch.equal(edge_index[1], rows[slot])


# ---- the limit ---------------------------------------------------------------------------------------------------------------
def test_limit_of_a_known_graph() -> None:
    """5 nodes, 6 edges, all sources used, source 3 twice; F = 8 in fp32: rows of 32 bytes."""
    sample = graphs.Sample.from_edge_index("tiny", "random", torch.tensor(EDGES), 5, CPU)
    compulsory = (5 + 5) * 32 + 4 * 6 + 6 * (4 + 4)

    def ms(machine: limits.Machine, what: str = "forward", weighted: bool = True) -> float:
        return limits.Limits(sample, machine).ms(what, 8, 4, weighted)

    assert ms(limits.Machine(copy=1e3)) == pytest.approx(compulsory)
    assert ms(limits.Machine(copy=1e3), weighted=False) == pytest.approx(compulsory - 6 * 4)
    assert ms(limits.Machine(copy=1e9, l2=1e3)) == pytest.approx(6 * 32)
    # Backward gathers rows 0 (3 times), 1 and 2 (twice); with the weight it reads x and writes 6 values beside.
    backward = (3 + 5) * 32 + 4 * 6 + 6 * 8
    assert ms(limits.Machine(copy=1e3), "backward") == pytest.approx(backward)
    assert ms(limits.Machine(copy=1e3), "forward+backward") == pytest.approx(compulsory + backward + 5 * 32 + 6 * 4)
    assert ms(limits.Machine(copy=1e3), "conversion") is None


def test_a_gather_that_misses_is_bound_by_the_copy_bandwidth() -> None:
    gathers = limits.Gathers.count(torch.tensor([5, 90, 3, 2]), 4)
    machine = limits.Machine(copy=1e3, l2=1e9, l2_bytes=1024)
    # Rows of 1,024 bytes: one is kept, 10 gathers miss it, each array once is less.
    assert gathers.limit_ms(machine, 256, 4, weighted=True, random=True) == pytest.approx(11 * 1024)
    assert gathers.limit_ms(machine, 256, 4, weighted=True, random=False) == pytest.approx(8 * 1024 + 4 * 5 + 100 * 8)


# ---- users' graphs -----------------------------------------------------------------------------------------------------------
def _lines(separator: str) -> str:
    return "# a comment\n" + "".join(f"{s}{separator}{d}\n" for s, d in zip(*EDGES))


def _scipy_matrix():
    import scipy.sparse

    return scipy.sparse.csr_matrix((np.ones(6), (EDGES[1], EDGES[0])), shape=(5, 5))


def _mtx(path: Path) -> None:
    import scipy.io

    scipy.io.mmwrite(path, _scipy_matrix())


def _scipy_npz(path: Path) -> None:
    import scipy.sparse

    scipy.sparse.save_npz(path, _scipy_matrix())


def _pyg(path: Path) -> None:
    data = pytest.importorskip("torch_geometric.data").Data(edge_index=torch.tensor(EDGES), num_nodes=5)
    torch.save(data, path)


WRITERS = {
    "scipy.npz": pytest.param(_scipy_npz, marks=needs_scipy),
    "arrays.npz": lambda path: np.savez(path, edge_index=EDGES, num_nodes=5),
    "ids.npz": lambda path: np.savez(path, edge_index=EDGES),
    "tensor.pt": lambda path: torch.save(torch.tensor(EDGES, dtype=torch.int32), path),
    "dict.pt": lambda path: torch.save({"edge_index": torch.tensor(EDGES), "num_nodes": 5}, path),
    "pyg.pt": _pyg,
    "array.npy": lambda path: np.save(path, np.array(EDGES)),
    "edges.csv": lambda path: path.write_text(_lines(",")),
    "edges.tsv": lambda path: path.write_text(_lines("\t")),
    "edges.txt": lambda path: path.write_text(_lines(" ").replace("#", "%")),
    "edges.txt.gz": lambda path: path.write_bytes(gzip.compress(_lines(" ").encode())),
    "weighted.csv.gz": lambda path: path.write_bytes(gzip.compress(_lines(",").replace("\n", ",0.5\n").encode())),
    "matrix.mtx": pytest.param(_mtx, marks=needs_scipy),
}


@pytest.mark.parametrize(
    ("name", "write"),
    [pytest.param(n, *w.values, marks=w.marks) if hasattr(w, "marks") else (n, w) for n, w in WRITERS.items()],
    ids=list(WRITERS),
)
def test_every_kind_of_graph_file_is_read(name: str, write, tmp_path: Path) -> None:
    write(tmp_path / name)
    edge_index, nodes = files.load(tmp_path / name)
    assert nodes == 5 and edge_index.dtype == torch.int64 and edge_index.shape == (2, 6)
    assert sorted(edge_index.T.tolist()) == sorted(torch.tensor(EDGES).T.tolist())


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("graph.xlsx", lambda p: p.touch(), r"cannot be read from '\.xlsx'; accepted are \.npz"),
        ("absent.npy", lambda p: None, "there is no such file"),
        ("transposed.npy", lambda p: np.save(p, np.array(EDGES).T), r"got \[6, 2\]; transpose it"),
        ("floats.npy", lambda p: np.save(p, np.ones((2, 6))), "must hold integers, got torch.float64"),
        ("negative.npy", lambda p: np.save(p, np.array([[0, -1], [1, 1]])), r"in \[0, 2\), got -1 to 1"),
        ("small.npz", lambda p: np.savez(p, edge_index=EDGES, num_nodes=3), r"in \[0, 3\), got 0 to 4"),
        ("other.npz", lambda p: np.savez(p, features=EDGES), "the arrays are features, neither"),
        ("other.pt", lambda p: torch.save({"x": torch.ones(2)}, p), "a dict without edge_index; accepted are"),
        ("code.pt", lambda p: torch.save(Path("x"), p), "it holds other objects than tensors"),
        ("header.csv", lambda p: p.write_text("src,dst\n0,1\n"), "could not convert string 'src'"),
        ("empty.npy", lambda p: np.save(p, np.zeros((2, 0), np.int64)), r"E > 0, got \[2, 0\]"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and " " not in value else "",
)
def test_a_bad_graph_file_says_what_is_wrong(name: str, write, message: str, tmp_path: Path) -> None:
    write(tmp_path / name)
    with pytest.raises(ValueError, match=message) as error:
        files.load(tmp_path / name)
    assert name in str(error.value)


# ---- the command -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy bandwidth is not what these tests are about."""
    monkeypatch.setattr(spmm, "measure", lambda device, l2: limits.Machine(1e10))


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.npy"
    np.save(path, np.random.default_rng(0).integers(0, 40, (2, 300)))
    return path


def _bench(*arguments: object) -> int:
    return main(["bench", "spmm", *map(str, arguments)])


def test_a_run_on_a_users_graph(graph_file: Path, tmp_path: Path, small_copy: None, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "results" / "run"
    status = _bench("--device", "cpu", "--graph", graph_file, "--widths", 5, "--repeats", 2, "--out", out)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "cpu mine.npy given fp32 forward sum F=5: gnnfast ms" in printed
    record = json.loads(out.with_suffix(".json").read_text())
    weighted, unweighted = (r for r in record["rows"] if r["group"] == "cpu")
    assert (weighted["weighted"], unweighted["weighted"]) == ("yes", "no")
    for row in (weighted, unweighted):
        assert (row["graph"], row["order"], row["nodes"], row["edges"], row["F"]) == ("mine.npy", "given", 40, 300, 5)
        assert row["kernel"] == "gar sum" and row["first call ms"] > 0
        assert row["MKL / gnnfast"] == row["MKL ms"] / row["gnnfast ms"]
        peers = [row[k] for k in ("MKL ms", "DGL ms", "PyG ms") if k in row]
        assert row["best peer / gnnfast"] == min(peers) / row["gnnfast ms"]
        assert row["limit / gnnfast"] == row["limit ms"] / row["gnnfast ms"]
    assert record["environment"]["torch"] == torch.__version__
    best = next(r for r in record["summary"] if r["ratio"] == "best peer / gnnfast" and r["weighted"] == "all")
    values = [weighted["best peer / gnnfast"], unweighted["best peer / gnnfast"]]
    assert (best["cells"], best["least"], best["greatest"]) == (2, min(values), max(values))
    assert best["geometric mean"] == pytest.approx((values[0] * values[1]) ** 0.5)
    text = out.with_suffix(".md").read_text()
    assert "## cpu\n" in text and "## threads\n" in text and "| mine.npy | given | 5 |" in text
    assert out.with_suffix(".svg").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_other_groups_run_on_a_cpu_and_say_what_they_leave_out(
    graph_file: Path, tmp_path: Path, small_copy: None, capsys: pytest.CaptureFixture
) -> None:
    groups = ["half", "backward", "reductions", "conversion", "schedules"]
    assert (
        _bench("--device", "cpu", "--graph", graph_file, "--widths", 8, "--repeats", 2, "--out", tmp_path / "r", "--group", *groups)
        == 0
    )
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    found = {(r["group"], r["pass"], r["reduce"], r["dtype"]): r for r in rows}
    assert found["half", "forward", "sum", "fp16"]["note"].startswith("cuSPARSE: needs a CUDA device; cuSPARSE fp32: ")
    both = found["backward", "forward+backward", "sum", "fp32"]
    assert both["gnnfast / forward"] == both["gnnfast ms"] / both["forward ms"]
    assert both["forward ms"] == found["backward", "forward", "sum", "fp32"]["gnnfast ms"]
    largest = found["reductions", "forward", "max", "fp32"]
    assert largest["gnnfast / sum"] == largest["gnnfast ms"] / found["reductions", "forward", "sum", "fp32"]["gnnfast ms"]
    assert "limit ms" not in found["conversion", "conversion", "sum", "fp32"]


@pytest.mark.parametrize(
    "factor, status, said",
    [
        (0.0, 1, "failed: MKL: results differ by 1 of their norm, which is no rounding; gnnfast's are right"),
        (1.001, 0, "note: MKL is off by 0.001 of float64's result, gnnfast by "),
    ],
)
def test_a_wrong_peer_fails_the_run_and_one_that_rounds_badly_is_noted(
    factor: float, status: int, said: str, graph_file: Path, small_copy: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    right = bench.PEERS["MKL"]
    monkeypatch.setitem(bench.PEERS, "MKL", lambda *given: lambda: factor * right(*given)())
    arguments = ("--device", "cpu", "--graph", graph_file, "--group", "cpu", "--widths", 8, "--repeats", 1)
    assert _bench(*arguments) == status
    assert said in capsys.readouterr().out


def test_a_wrong_result_of_gnnfast_fails_the_run(
    graph_file: Path, small_copy: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    right = gnnfast.spmm
    monkeypatch.setattr(gnnfast, "spmm", lambda *given: 1.001 * right(*given))
    assert _bench("--device", "cpu", "--graph", graph_file, "--group", "reductions", "--repeats", 1) == 1
    out = capsys.readouterr().out
    assert all(f"forward {reduce} F=64 unweighted" in out for reduce in ("sum", "mean", "max"))
    assert out.count("failed: PyG: results differ by 0.001 of their norm; accepted is 0.0001") >= 6


def test_wrong_gradients_are_noticed() -> None:
    sample = graphs.Sample.from_edge_index("tiny", "given", torch.tensor(EDGES), 5, CPU)
    subject = bench.Bench(sample, limits.Machine(1e10), 1)
    cell = cells.Cell(8, "fp32", "forward+backward", "sum", True, None)
    gradients = subject.prepare(cell, *subject.inputs(cell))()
    subject.check_gradients(cell, gradients)
    with pytest.raises(bench.MismatchError):
        subject.check_gradients(cell, (gradients[0], 1.01 * gradients[1]))


def test_axes_are_replaced_and_cases_are_listed_once() -> None:
    found = cells.cases(["forward"], {"graphs": ["reddit"], "widths": [48], "orders": None})
    assert [(c.graph, c.order, c.cell.width) for c in found] == [("reddit", "random", 48), ("reddit", "community", 48)]
    assert cells.thread_counts(6) == [1, 2, 4, 6] and cells.thread_counts(4) == [1, 2, 4] and cells.thread_counts(1) == [1]


def test_repeats_adapt_to_the_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for ms, expected in ((100.0, 5), (4.0, 15), (0.1, 30)):
        calls.clear()
        monkeypatch.setattr(timing, "wall_ms", lambda call, device, ms=ms: call() or ms)
        timing.median_ms(lambda: calls.append(1), CPU, warmup=2)
        assert len(calls) == 2 + 1 + expected


def test_the_fraction_of_the_limit_counts_large_graphs_only() -> None:
    common = {"group": "g", "pass": "forward", "reduce": "sum", "dtype": "fp32", "order": "random", "weighted": "yes", "F": 64}
    rows = [common | {"edges": 10, tables.LIMIT: 0.1}, common | {"edges": 2_000_000, tables.LIMIT: 0.8}]
    (row,) = tables.summarise(rows)
    assert (row["cells"], row["geometric mean"]) == (1, pytest.approx(0.8))


RECORD = {
    "title": "SpMM on cuda",
    "environment": {"device": "a device"},
    "summary": [{"group": "forward", "ratio": "cuSPARSE / gnnfast", "geometric mean": 1.5}],
    "rows": [
        {"group": "forward", "graph": graph, "order": order, "edges": edges, "F": width, "dtype": "fp32", "pass": "forward"}
        | {"reduce": "sum", "weighted": "yes", "gnnfast ms": 2.0, "cuSPARSE ms": 3.0, "cuSPARSE / gnnfast": 1.5}
        for graph, edges in (("large", 20), ("small", 10))
        for order in ("random", "community")
        for width in (16, 64)
    ],
}


@needs_matplotlib
def test_a_result_is_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "old.json").write_text(json.dumps(RECORD))
    assert _bench("--from", tmp_path / "old.json", "--out", tmp_path / "new") == 0
    assert json.loads((tmp_path / "new.json").read_text()) == RECORD
    assert "| large | random | 20 | 16 |" in (tmp_path / "new.md").read_text()
    drawn = (tmp_path / "new.svg").read_text()
    for text in ("random order, fp32, weighted", "community order, fp32, weighted", "F = 64", "time of cuSPARSE"):
        assert text in drawn
    assert drawn.index("small") < drawn.index("large")  # by edges
    assert _bench("--from", tmp_path / "old.json") == 0
    assert (tmp_path / "old.svg").read_text() == drawn


def test_without_matplotlib_there_is_a_line_and_no_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "old.json").write_text(json.dumps(RECORD))
    assert _bench("--from", tmp_path / "old.json") == 0
    assert "no chart: matplotlib is not installed; pip install 'gnnfast[bench]'" in capsys.readouterr().out
    assert not (tmp_path / "old.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'; accepted are cpu and cuda"),
        (["--group", "backwards"], "invalid choice: 'backwards'"),
        (["--device", "cpu", "--widths", "0"], "--widths must be above 0, got 0"),
        (["--repeats", "-1"], "--repeats must be above 0, got -1"),
        (["--device", "cpu", "--graph", "a.doc"], "cannot be read from '.doc'; accepted are .npz"),
        (["--device", "cpu", "--graph", "a.npy", "--orders", "random"], "give one or the other"),
        (["--device", "cpu", "--graphs", "marmoset"], "'marmoset' is no graph of order 'real'; known are cora"),
        (["--from", "absent.json"], "accepted is a RESULT.json that --out wrote"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_say_what_is_accepted(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as error:
        _bench(*arguments)
    assert error.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_no_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SystemExit):
        _bench("--from", tmp_path / "other.json")
    assert "no record of measurements" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["sddmm"]])
def test_an_unknown_benchmark_lists_what_there_is(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert all(name in printed.out for name in benchmarks().BENCHMARKS)
    assert ("there is no benchmark 'sddmm'" in printed.err) == bool(arguments)


def test_gnnfast_is_on_again_after_a_peer_failed() -> None:
    from_peers = importlib.import_module(f"{PACKAGE}.peers")
    with pytest.raises(RuntimeError), from_peers.without_gnnfast():
        assert not gnnfast.is_enabled()
        raise RuntimeError
    assert gnnfast.is_enabled()


# ---- sparse features ---------------------------------------------------------------------------------------------------------
def _density_rows(module, threshold_of):
    """Rows as if the sparse kernel took as long as the dense one at ``threshold_of(width)``, and in proportion to density."""
    rows = []
    for itemsize in (2, 4):
        for width in module.WIDTHS["cpu"]:
            for density in module.DENSITIES:
                row = {"features": "random", "itemsize": itemsize, "F": width, "density": density, "dense ms": 1.0}
                row["sparse ms"] = density / threshold_of(width)
                rows.append(row | {"dense / sparse": row["dense ms"] / row["sparse ms"]})
    return rows


def test_density_thresholds_are_fitted_to_the_crossovers() -> None:
    pytest.importorskip("torch_geometric", reason="PyG is not installed")
    module = importlib.import_module(f"{PACKAGE}.sparse_features")
    rows = _density_rows(module, lambda width: 0.1 - 8 / width)
    fitted = module.fit(rows)
    for crossovers in fitted.values():
        for (width, found), known in zip(crossovers, module.WIDTHS["cpu"], strict=True):
            assert width == known and 0.7 < found / (0.1 - 8 / width) < 1.4  # densities are measured in steps
    module.judge("aggregation", rows, CPU, fitted)
    assert max(row["chosen / best"] for row in rows) == 1.0
    (summary, *_) = module.summarise("aggregation", rows)
    assert summary["within 10% of the better"] == 1.0
    cells = [row for row in rows if module._is(row, "4", module.WIDTHS["cpu"][0])]
    noisy = [row | {"dense / sparse": 0.99} if row["density"] == 0.002 else row for row in cells]
    assert module.crossover(noisy) == module.crossover(cells)
    always = [row | {"dense / sparse": 2.0} for row in cells]
    assert module.crossover(always) == 1.0 and module.crossover([r | {"dense / sparse": 0.5} for r in cells]) == 0.0


def test_real_features_come_with_the_graph(data_folder: Path) -> None:
    pytest.importorskip("torch_geometric", reason="PyG is not installed")
    data = graphs.real_data("amazon-photo")
    assert data.x.shape == (7650, 745) and torch.equal(data.edge_index, graphs.real("amazon-photo")[0])
