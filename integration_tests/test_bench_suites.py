"""``gnnfast bench``: whole models, memory, a user's script, the comparison of two result files, the page of many, and their tables."""

from __future__ import annotations

import argparse
import collections
import importlib
import importlib.util
import json
import re
import shutil
from concurrent.futures import Future
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnfast
from gnnfast.cli import benchmarks, main

pytest.importorskip("torch_geometric", reason="PyG is not installed")
PACKAGE = benchmarks().__name__
MODULES = (
    "compare, compiled, conversion, convs, host, layers, lists, memory, page, processes, sampled, script, tables, timing, train"
)
compare, compiled, conversion, convs, host, layers, lists, memory, page, processes, sampled, script, tables, timing, train = (
    importlib.import_module(f"{PACKAGE}.{name}") for name in MODULES.split(", ")
)
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


# ---- train -------------------------------------------------------------------------------------------------------------------
def _train(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    out = tmp_path / "train"
    status = main(["bench", "train", "--quick", "--repeats", "1", "--out", str(out), *arguments])
    return status, json.loads(out.with_suffix(".json").read_text())


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_models_are_trained_on_both_sides(framework: str, device, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip({"pyg": "torch_geometric", "dgl": "dgl"}[framework], reason="the framework is not installed")
    status, record = _train(tmp_path, "--device", device.type, "--frameworks", framework, "--models", "GCN", "GAT")
    assert status == 0 and [(r["group"][5:], r["model"]) for r in record["rows"]] == [
        ("full", "GCN"), ("full", "GAT"), ("mini", "GCN"), ("mini", "GAT")
    ]  # fmt: skip
    for row in record["rows"]:
        assert row["on ms"] > 0 and "failed" not in row
        if "note" not in row:  # DGL on a GPU has no side without
            assert row["off / on"] == row["off ms"] / row["on ms"] and row["loss differs by"] < 1e-3
        assert ("on accuracy" in row) == ("full" in row["group"])
    assert {"gnnfast", "torch", "device"} <= record["environment"].keys()
    printed = capsys.readouterr().out
    assert " GCN on tiny: " in printed and max(map(len, printed.splitlines())) < 130


def test_a_wrong_side_fails_before_it_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = train.Trainer.step
    monkeypatch.setattr(train.Trainer, "step", lambda self, batch: right(self, batch) * (1.01 if gnnfast.is_enabled() else 1))
    status, record = _train(tmp_path, "--device", "cpu", "--frameworks", "pyg", "--models", "SAGE", "--batching", "full")
    (row,) = record["rows"]
    assert status == 1 and "losses differ by 0.01" in row["failed"] and "on ms" not in row


def test_a_side_that_runs_out_of_memory_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = train.Trainer.step

    def step(self, batch):
        if not gnnfast.is_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(self, batch)

    monkeypatch.setattr(train.Trainer, "step", step)
    status, record = _train(tmp_path, "--device", "cpu", "--frameworks", "pyg", "--models", "SAGE", "--batching", "full")
    (row,) = record["rows"]
    assert status == 0 and row["off ms"] == "out of memory" and row["on ms"] > 0 and "off / on" not in row


def test_neighbours_are_edges_of_the_graph_and_local() -> None:
    edge_index = torch.randint(0, 60, (2, 300), generator=torch.Generator().manual_seed(0))
    task = sampled.Task(edge_index, torch.rand(60, 4), torch.arange(60) % 3)
    neighbours, seeds = train.Neighbours(task, (3, 2)), torch.tensor([5, 0, 59])
    known = set(map(tuple, edge_index.t().tolist()))
    for seed in range(3):  # what a draw left behind would show in the next
        nodes, edges = neighbours.draw(seeds, torch.Generator().manual_seed(seed))
        assert torch.equal(nodes[:3], seeds) and nodes.unique().numel() == nodes.numel()
        assert edges.min() >= 0 and edges.max() < nodes.numel()
        assert set(map(tuple, nodes[edges].t().tolist())) <= known
        assert int((edges[1] < 3).sum()) >= int(edge_index[1].bincount(minlength=60)[seeds].clamp(max=3).sum())


# ---- memory ------------------------------------------------------------------------------------------------------------------
def test_peaks_of_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def in_this_process(name: str, width: int, graph: str, side: str) -> memory.Found:
        (gnnfast.enable if side == "on" else gnnfast.disable)()
        try:
            return memory.child(name, width, graph)
        finally:
            gnnfast.enable()

    alone = memory.in_child("GCNConv", 128, "tiny", "on")
    assert isinstance(alone.peak, float) and 0 <= alone.peak < 1 and len(alone.norms) == 3
    monkeypatch.setattr(memory, "in_child", in_this_process)
    out = tmp_path / "memory"
    arguments = ["--device", "cpu", "--layers", "GCNConv", "--graph", "computers-size", "--out", str(out)]
    assert main(["bench", "memory", *arguments]) == 0
    (row,) = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert row["off GiB"] > row["on GiB"] > 0  # 250 MB of messages
    assert "GCNConv: off " in capsys.readouterr().out


def test_sides_that_differ_have_no_ratio_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "in_child", lambda name, width, graph, side: memory.Found(1.0, [1.0, 2.0 + (side == "on")]))
    row = memory.measure("GCNConv", 128, "tiny", None, 1.0)
    assert row["failed"] == "gradients differ by 0.5" and "off / on" not in row
    monkeypatch.setattr(memory, "in_child", lambda name, width, graph, side: memory.Found("out of memory", []))
    assert "failed" not in memory.measure("GCNConv", 128, "tiny", None, 1.0)


def test_layers_of_every_convolution() -> None:
    from torch_geometric.nn import conv

    classes = {name.split()[0] for name in convs.ALL}
    assert classes | set(convs.WITHOUT) >= set(conv.__all__) and not classes & set(convs.WITHOUT)


@pytest.mark.parametrize("name", convs.OWN)
def test_messages_of_ones_own_make_no_rows_of_edges(name):
    torch.manual_seed(0)
    x, edge_index = torch.rand(300, 64, requires_grad=True), torch.randint(300, (2, 20_000))
    layer = convs.OWN[name](64, 64)
    found = layers.gradients(layer, x, edge_index)
    assert not any(kernel.startswith(("rows of edges", "gathers")) for _, kernel, _ in gnnfast.report().kernels)
    gnnfast.disable()
    expected = layers.gradients(layer, x, edge_index)
    gnnfast.enable()
    assert layers.difference(found, expected) < 1e-4


@pytest.mark.parametrize(("group", "names"), [("layers", ("GCNConv", "SimpleConv")), ("matrices", ("GCNConv", "SAGEConv"))])
def test_layers_alone_on_small_graphs(group: str, names: tuple[str, ...], device, tmp_path: Path) -> None:
    """SimpleConv has no parameter."""
    out = tmp_path / "host"
    quick = ("--repeats", "1", "--warmup", "1", "--seconds", "0.001", "--quick", "--out", str(out))
    chosen = ("--groups", group, "--sizes", "200", "--models", *names)
    assert main(["bench", "host", "--device", device.type, *chosen, *quick]) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    cells = [(name, mode, graph) for name in names for mode in ("training", "inference") for graph in ("same", "new")]
    assert [(r["model"], r["pass"], r["graph"]) for r in record["rows"]] == cells
    edges = 200 if group == "layers" else record["rows"][0]["edges"]  # of which a matrix has each once
    assert all(r["edges"] == edges <= 200 and r["ratio"] == r["PyG ms"] / r["gnnfast ms"] for r in record["rows"])
    assert all(r["ratio of fastest"] == r["PyG fastest ms"] / r["gnnfast fastest ms"] for r in record["rows"])
    assert all(r[f"{side} fastest ms"] <= r[f"{side} ms"] for r in record["rows"] for side in ("PyG", "gnnfast"))
    for line in record["summary"]:
        of = {r["model"]: r["ratio"] for r in record["rows"] if (r["pass"], r["graph"]) == (line["pass"], line["graph"])}
        assert (
            line["kind"] == f"{group}, 200 edges"
            and line["cells"] == 2
            and line["least"] == of[line["least of"]] == min(of.values())
        )


@pytest.mark.parametrize("control", [False, True])
def test_processes_of_both_sides_take_turns(control: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of them is one of both, in a control either."""
    timed: list[tuple[int, bool]] = []

    class Process(host.Here):
        def __init__(self, *_: str, on: bool, variables: dict[str, str]) -> None:
            super().__init__("cpu", on)

        def ask(self, what: str, *arguments: Any) -> Any:
            if what == "time":
                timed.append((id(self), self._switch is gnnfast.enable))
            return super().ask(what, *arguments)

    monkeypatch.setattr(processes, "Apart", Process)
    out = tmp_path / "host"
    chosen = ("--device", "cpu", "--groups", "layers", "--sizes", "200", "--models", "SimpleConv", "--out", str(out))
    how = ("--apart", "--processes", "3", "--repeats", "6", "--warmup", "1", "--seconds", "0.001", "--quick")
    assert main(["bench", "host", *chosen, *how, *(["--control"] if control else [])]) == 0
    of_cell = timed[:12]
    assert len(timed) == 4 * 12 and set(collections.Counter(of_cell).values()) == {2} and len({id for id, _ in of_cell}) == 6
    assert [on for _, on in of_cell].count(True) == (0 if control else 6)
    for nth in range(0, 12, 2):  # a round: one process of each side, the same ones three rounds later
        assert {id for id, _ in of_cell[nth : nth + 2]} == {id for id, _ in of_cell[(nth + 6) % 12 : (nth + 6) % 12 + 2]}
    (sides,) = {row["sides"] for row in json.loads(out.with_suffix(".json").read_text())["rows"]}
    assert sides == ("PyG / PyG again" if control else "PyG / gnnfast")


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_instructions_are_the_same_in_each_run(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--fewer"):
        pytest.skip("under valgrind torch alone takes a minute to import: make test-all")
    out = tmp_path / "host"
    chosen = ("--device", "cpu", "--groups", "layers", "--sizes", "200", "--models", "SimpleConv", "--out", str(out))
    assert main(["bench", "host", *chosen, "--instructions", "--control"]) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    for row in record["rows"]:
        assert row["PyG instructions"] > 1e5 and row["ratio"] == row["PyG instructions"] / row["PyG again instructions"]
        assert abs(row["ratio"] - 1) < 0.02
    assert len(record["rows"]) == 4 and all("of rounds" not in line for line in record["summary"])


def test_instructions_need_valgrind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit):
        main(["bench", "host", "--device", "cpu", "--groups", "layers", "--instructions"])
    assert "--instructions: there is no valgrind: install it" in capsys.readouterr().err


def test_layers_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.gradients
    monkeypatch.setattr(layers, "gradients", lambda *given: [g * (1.1 if gnnfast.is_enabled() else 1) for g in right(*given)])
    monkeypatch.setattr(timing, "in_turn", lambda *_: pytest.fail("timed"))
    edge_index = torch.arange(200).view(2, 100) % 50
    with pytest.raises(SystemExit, match=r"gradients of GCNConv on g differ by 0\.1"):
        layers.measure("GCNConv", layers.Graph("g", edge_index, 50, (4, 4), False, 1))


def test_a_compiled_model_that_fails_in_its_process_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    class Pool:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, *_: object) -> Future:
            failed: Future = Future()
            failed.set_exception(RuntimeError("CUDA error: misaligned address\nand more"))
            return failed

    monkeypatch.setattr(compiled.concurrent.futures, "ProcessPoolExecutor", Pool)
    out = tmp_path / "compiled"
    assert main(["bench", "compiled", "--device", "cpu", "--models", "GCN", "GIN", "--out", str(out)]) == 0
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row["note"] for row in rows] == ["RuntimeError: CUDA error: misaligned address"] * 2
    capsys.readouterr()


# ---- lists ---------------------------------------------------------------------------------------------------------------------
def test_lists(device, tmp_path, monkeypatch):
    arguments = ["bench", "lists", "--device", device.type, "--edges", "50", "--widths", "2", "--out", str(tmp_path / "lists")]
    monkeypatch.setattr(timing, "ENOUGH_MS", 0.0)
    assert main(arguments) == 0
    rows = json.loads((tmp_path / "lists.json").read_text())["rows"]
    assert len(rows) == len(lists.OF_EDGES) + len(lists.OF_GROUPS) * len(lists.GROUPS)
    assert all(row["PyG / gnnfast"] > 0 and row["limit ms"] > 0 for row in rows)
    monkeypatch.setattr(lists, "softmax", lambda rows, *_, **__: rows * (2 if gnnfast.is_enabled() else 1))
    with pytest.raises(SystemExit, match="results of softmax over 50 edges, random, differ by 1"):
        lists.main(["--device", device.type, "--edges", "50", "--functions", "softmax"])


# ---- conversion --------------------------------------------------------------------------------------------------------------
def test_formats_of_all_sides(device, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["bench", "conversion", "--device", device.type, "--edges", "1", "300", "--repeats", "1", "--seconds", "0.001"]
    assert main([*arguments, "--out", str(tmp_path / "conversion")]) == 0
    rows = json.loads((tmp_path / "conversion.json").read_text())["rows"]
    assert [(row["edges"], row["formats"]) for row in rows] == [(1, "one"), (1, "both"), (300, "one"), (300, "both")]
    assert all(row["PyG / gnnfast"] == row["PyG ms"] / row["gnnfast ms"] > 0 for row in rows)
    assert "edges 300, formats both" in capsys.readouterr().out


def test_formats_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = conversion.by_pyg
    monkeypatch.setattr(conversion, "by_pyg", lambda edges, *of: right(edges.flip([0]), *of))
    with pytest.raises(SystemExit, match="PyG makes another format than gnnfast of 300 edges"):
        conversion.main(["--device", "cpu", "--edges", "300", "--repeats", "1", "--seconds", "0.001"])


# ---- what is asked for -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*benchmarks().BENCHMARKS, *benchmarks().TOOLS])
def test_help_fits_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    if name in ("operators", "bridge", "functions"):
        pytest.importorskip("dgl")
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["bench", name, "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attention", "--graphs", "nope"], "--graphs: 'nope' is no graph"),
        (["host", "--sizes", "banana"], "invalid choice: 'banana'"),
        (["host", "--processes", "2"], "--processes 2: 1 to --repeats 3, and with --apart"),
        (["host", "--groups", "molecules", "--sizes", "cora"], "--groups molecules has none of these --sizes"),
        (["memory", "--limit", "-1"], "--limit must be above 0 GiB, got -1"),
        (["compare", "absent.json", "absent.json"], "error: absent.json: No such file or directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as error:
        main(["bench", *arguments])
    assert error.value.code == 2 and said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "name", ["attention", "compiled", "conversion", "host", "layers", "memory", "sampled", "sparse_features", "spmm", "train"]
)
def test_a_device_that_torch_does_not_have(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as error:
        main(["bench", name, "--device", "cuda"])
    assert error.value.code == 2 and "--device: torch sees no CUDA device" in capsys.readouterr().err


def test_the_largest_graph_that_fits(device) -> None:
    if device.type != "cuda":
        pytest.skip("on a CPU nothing limits a process to a part of the memory")
    off, on = (memory.largest("GCNConv", 128, device, side, 4.0) for side in ("off", "on"))
    assert on >= off > 0 and gnnfast.is_enabled()


# ---- a script ----------------------------------------------------------------------------------------------------------------
def test_a_script_runs_on_both_sides(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    file = tmp_path / "train.py"
    file.write_text("import sys, os\nprint('accuracy', 0.7 if os.environ['GNNFAST'] == '1' else 0.6, sys.argv[1:])\n")
    assert main(["bench", "script", "--repeats", "1", str(file), "--epochs", "3"]) == 0
    printed = capfd.readouterr().out
    assert "printed without: accuracy 0.6 ['--epochs', '3']" in printed and "printed with:    accuracy 0.7" in printed
    assert "seconds in all" in printed and "peak MiB (process)" in printed
    assert "no ratios: gnnfast saw no message passing" in printed and "does not tell how much their times vary" in printed


def test_last_lines_that_both_sides_print() -> None:
    from gnnfast.sides import LAST_LINES, last_in_common

    assert last_in_common(["a 1", "b 2.5"], ["a 1", "b 2.6"]) == [("a 1", "a 1"), ("b 2.5", "b 2.6")]
    assert last_in_common(["one 1", "no number"], ["another thing 2", "no number"]) == []
    assert last_in_common(["loss 0.5"], ["loss nan"]) == [("loss 0.5", "loss nan")]
    report = [f"{n} calls of layer {n}" for n in range(9)]
    assert last_in_common(["loss 2", "loss 1", "acc 0.7", "no calls"], ["loss 2", "loss 1.5", "acc 0.8", *report]) == [
        ("loss 2", "loss 2"), ("loss 1", "loss 1.5"), ("acc 0.7", "acc 0.8")
    ]  # fmt: skip
    losses = [f"loss {n}" for n in range(100)]
    assert last_in_common(losses, [*losses[9:], *report]) == [(line, line) for line in losses[-LAST_LINES:]]  # the ends match


def test_steps_that_vary_are_noise(tmp_path: Path) -> None:
    side = script.Side(0, 1.0, 10.0, [8.0, 12.0])
    row = script.row("with gnnfast", [side, side], "")
    assert row["step spread"] == pytest.approx(0.4) and "with gnnfast" not in tables.noise([row])  # the only row
    assert "vary by more than 20%" in tables.noise([row]) and script.middle([side, side]).step_quartiles == [8.0, 12.0]


# ---- compare -----------------------------------------------------------------------------------------------------------------
def _record(path: Path, **row: object) -> str:
    rows = [{"group": "g", "model": "GCN", "edges": 10, "off ms": 10.0, "off spread": 0.02, "on ms": 2.0, "on spread": 0.02} | row]
    path.write_text(json.dumps({"title": "t", "environment": {"device": "d"}, "summary": [], "rows": rows}))
    return str(path)


@pytest.mark.parametrize(
    ("new", "status", "said"),
    [
        ({}, 0, "no regression"),
        ({"on ms": 2.09}, 0, "no regression"),  # below a twentieth
        ({"on ms": 2.2}, 1, "Regressions"),
        ({"on ms": 2.2, "on spread": 0.3}, 0, "no regression"),  # noise
        ({"off ms": 20.0}, 0, "what is not gnnfast's takes 2.00 times as long"),
        ({"on ms": 1.0}, 0, "Improvements"),
        ({"on ms": "out of memory"}, 1, "on ms was 2, is out of memory"),
        ({"failed": "losses differ"}, 1, "failed: "),
    ],
)
def test_two_results(new: dict, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    old, other = _record(tmp_path / "old.json"), _record(tmp_path / "new.json", **new)
    assert main(["bench", "compare", old, other]) == status
    assert said in capsys.readouterr().out


def test_results_that_have_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    old = _record(tmp_path / "old.json")
    for other, said in (
        (_record(tmp_path / "new.json", model="GAT"), "no measurement in common"),
        (str(tmp_path / "absent.json"), "absent.json"),
    ):
        with pytest.raises(SystemExit) as error:
            main(["bench", "compare", old, other])
        assert error.value.code == 2 and said in capsys.readouterr().err


# ---- page --------------------------------------------------------------------------------------------------------------------
class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        self.references += [value for name, value in attrs if name in ("href", "src", "xlink:href")]


def test_a_page_of_all_results(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    drawn = '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"><defs><path id="m1"/></defs><use href="#m1"/></svg>'
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        _record(tmp_path / name / "train.json", model="<script>alert(1)</script>")
        (tmp_path / name / "train.svg").write_text(drawn)
    (tmp_path / "other.json").write_text("[1]")
    assert main(["bench", "page", str(tmp_path)]) == 0
    assert "2 result files" in capsys.readouterr().out
    text = (tmp_path / "index.html").read_text()
    found = _Tags()
    found.feed(text)
    assert text.count("<svg") == 2 and "<?xml" not in text and "<script>" not in text and "&lt;script&gt;" in text
    assert len(found.ids) == len(set(found.ids)) and {f"#{i}" for i in found.ids} == set(found.references)  # nothing from elsewhere
    with pytest.raises(SystemExit):
        main(["bench", "page", str(tmp_path / "a" / "none")])


def test_the_committed_results_make_a_page() -> None:
    folder = Path(__file__).parents[1] / "benchmarks" / "results" / "h200-2026-11-21"
    if not folder.is_dir():
        pytest.skip("results are part of the repository, not of the package")
    text, count = page.page(folder, "all")
    found = _Tags()
    found.feed(text)
    assert count == 5 and text.count("<svg") > 3 and len(found.ids) == len(set(found.ids))
    assert not re.findall(r'(?:src|href)="https?:', re.sub(r"xmlns(:\w+)?=", "", text))


# ---- tables ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fit_the_terminal(width: int) -> None:
    rows = [{"model": f"model {i}", "graph": "one"} | {f"column {c} ms": 1000.0 * c + i for c in range(12)} for i in range(3)]
    text = tables.terminal({"title": "t", "environment": {"device": "d"}, "rows": rows, "summary": {}}, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("model 2") >= (1 if width == 200 else 2) and "graph one" in text  # what is the same stands above
    for c in range(12):
        assert tables.cell(1000.0 * c + 2) in text
    assert "|" not in text and "| model 2 |" in tables.markdown({"title": "t", "environment": {}, "rows": rows, "summary": {}})


def test_a_noisy_machine_is_named() -> None:
    assert tables.noise([{"on spread": 0.02}, {"on spread": 0.04}]) == "" == tables.noise([{"on ms": 1.0}])
    assert "vary by more than 30%" in tables.noise([{"on spread": 0.3}] * 3)
    rows = [{"model": f"m{i}", "graph": "g", "on spread": 0.01, "off spread": 0.01} for i in range(20)]
    rows[3] |= {"off spread": 1.58}
    assert tables.noise(rows) == "warning: times vary in m3 by 158%; differences of that size mean nothing"
    for row in rows[5:10]:
        row["on spread"] = 0.2
    assert "m3 by 158%, m5 by 20%, m6 by 20%, and 3 more rows" in tables.noise(rows)


def test_medians_have_spreads() -> None:
    assert timing.Sample.of([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert timing.Sample.of([10.0] * 8 + [100.0]) == (10.0, 0.0)  # one outlier is none


@needs_matplotlib
def test_charts_of_sampling_are_drawn_again(tmp_path: Path) -> None:
    exact = {"graph": "g", "model": "GCN", "strategy": "off", "S": None, "accuracy": 0.8, "ms": 4.0}
    rows = [exact] + [exact | {"strategy": "random", "S": s, "ms": 1.0, "accuracy": 0.79} for s in (64, 16)]
    (tmp_path / "r.json").write_text(json.dumps({"title": "t", "environment": {}, "summary": {}, "rows": rows}))
    assert main(["bench", "sampled", "--from", str(tmp_path / "r.json")]) == 0
    drawn = (tmp_path / "r.svg").read_text()
    assert "edges a node, at most" in drawn and "random" in drawn and "times as fast" in drawn


@needs_matplotlib
def test_a_side_that_did_not_fit_is_in_the_chart(tmp_path: Path) -> None:
    rows = [{"group": "PyG, full", "graph": "g", "model": model} for model in ("GCN", "GAT", "GIN")]
    rows[0] |= {"off ms": 4.0, "on ms": 1.0, "off / on": 4.0}
    rows[1] |= {"off ms": "out of memory", "on ms": 1.0}
    rows[2] |= {"failed": "losses differ"}
    train.draw({"title": "t", "environment": {}, "summary": {}, "rows": rows}, str(tmp_path / "r.svg"))
    drawn = (tmp_path / "r.svg").read_text()
    assert ">4x<" in drawn and "out of memory without gnnfast" in drawn and "GAT" in drawn and "GIN" not in drawn


def test_a_process_that_ends_is_one_cell(capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled may make a GPU fail, and with it the process: its layers are compiled again, each by another."""
    compiled = layers.Compiled(argparse.Namespace(device="cpu", all=False, graphs=["tiny"]), on=False)
    done: list[tuple[str, ...]] = []

    class Process:
        def __init__(self) -> None:
            self.asked: list[tuple[Any, ...]] = []

        def send(self, *asked: Any) -> None:
            self.asked.append(asked)

        def answer(self) -> Any:
            what, name, *_ = self.asked.pop(0)
            if name == "ends":
                self.send = self.fail  # type: ignore[method-assign]
                self.answer = self.fail  # type: ignore[method-assign]
                self.fail()
            if name == "fails":
                raise RuntimeError("gradients differ")
            done.append((what, name))
            return {"PyG compiled ms": 1.0} if what == "time" else None

        def fail(self, *_: Any) -> None:
            raise processes.Ended("the process ended")

        def ask(self, *asked: Any) -> Any:
            self.send(*asked)
            return self.answer()

        def end(self) -> None:
            pass

    monkeypatch.setattr(compiled, "_start", Process)
    monkeypatch.setattr(layers, "PROCESSES", 1)
    compiled.prepare(["first", "ends", "fails", "last"], 0)
    found = {name: compiled.columns(name) for name in ("first", "ends", "fails", "last")}
    served = {"PyG compiled ms": 1.0}
    assert found == {"first": served, "ends": {}, "fails": {}, "last": served}
    assert done.count(("prepare", "first")) == 2 and done.count(("prepare", "last")) == 1
    printed = capfd.readouterr().err
    assert "PyG, ends under torch.compile: the process ended" in printed and "PyG, fails under torch.compile" in printed


def test_processes_apart_answer_until_they_end() -> None:
    process = processes.Apart("layers", "--device", "cpu", "--serve", on=False)
    with pytest.raises(RuntimeError, match="AttributeError"):
        process.ask("nothing of that name")
    process.end()
    with pytest.raises(processes.Ended):
        process.ask("time", "GCNConv")
