"""``gnnfast.report()`` says why a model is not faster, ``gnnfast.profile()`` where the time goes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch

import gnnfast
from gnnfast import Graph, reporting, words
from gnnfast.rendering import percent

pyg = pytest.importorskip("torch_geometric.nn", reason="PyG is not installed")
ESCAPE = re.compile("\x1b")


def _fits(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80 and not ESCAPE.search(text)


def _edges(nodes: int, edges: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, nodes, (2, edges), device=device)


def test_a_served_model(device):
    conv, edge_index, x = pyg.GCNConv(8, 4).to(device), _edges(50, 400, device), torch.rand(50, 8, device=device)
    with gnnfast.override(kernel="gar"):
        for _ in range(4):
            conv(x, edge_index)
    report = gnnfast.report()
    text = str(report)
    _fits(text)
    assert "gnnfast: 4 calls, 100% on gnnfast's kernels" in text and "GCNConv (PyG)" in text
    assert "sum over edges grouped by destination (CSR)" in " ".join(text.split()) and "Graph cache: " in text
    assert "Why not faster" not in text and report.notes() == []


def test_fallbacks_say_what_would_help(device):
    conv, edge_index, x = pyg.SAGEConv(8, 4).to(device), _edges(50, 400, device), torch.rand(50, 8, device=device)
    conv(x, edge_index)
    conv.register_propagate_forward_hook(lambda *_: None)
    conv(x, edge_index)
    (note,) = gnnfast.report().notes()
    assert (note.layer, note.calls, note.of) == ("pyg SAGEConv", 1, 2)
    assert "hooks are registered on message passing" in note.why and "remove the hooks" in note.advice
    text = str(gnnfast.report())
    _fits(text)
    assert "50%" in text and "-> remove the hooks" in text


def test_graphs_that_are_new_in_each_call(device, converts_at_once):
    conv, x = pyg.SAGEConv(8, 4).to(device).eval(), torch.rand(50, 8, device=device)
    for _ in range(5):
        conv(x, _edges(50, 400, device))
    (note,) = (n for n in gnnfast.report().notes() if "converted for one call" in n.why)
    assert note.calls == note.of == 5 and "edge_index" in note.advice
    gnnfast.clear_report()
    edge_index = _edges(50, 400, device)
    for _ in range(5):
        conv(x, edge_index)
    assert gnnfast.report().notes() == []


def test_too_small_to_gain():
    reporting.ran("pyg GINConv", "PyG's own", "too small to gain: its operations alone")
    reporting.ran("pyg GINConv", "gar sum", "CSR exists")
    report = gnnfast.report()
    (note,) = report.notes()
    assert note.calls == 1 and note.of == 2 and note.why.startswith("too small to gain")
    assert "50% on gnnfast's kernels, 50% too small to gain" in report.headline()


def test_messages_of_pyg_are_counted_apart():
    edge_index, x = _edges(200, 2000, torch.device("cpu")), torch.rand(200, 64)
    conv, edge = pyg.SAGEConv(64, 8, aggr="median"), pyg.EdgeConv(torch.nn.Linear(128, 64))
    for layer in (conv, edge, pyg.GINConv(torch.nn.Linear(64, 8))):
        layer(x, edge_index[:, edge_index[1].argsort(stable=True)])
    report = gnnfast.report()
    assert "33% on gnnfast's kernels, 67% in part (message())" in report.headline()
    notes = {note.layer: note for note in report.notes()}
    assert notes["pyg EdgeConv"].why.startswith("served in part, message() makes rows of edges: ")
    assert "aggregation run over rows of edges: the aggregation is MedianAggregation" in notes["pyg SAGEConv"].why
    assert all(note.advice for note in notes.values()) and "pyg GINConv" not in notes


@pytest.mark.parametrize("is_summed", [True, False])
def test_operations_of_a_message_on_rows_of_edges_are_named(is_summed, device):
    """Also where a kernel sums what they give."""

    class Twisted(pyg.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            twisted = (x_i - x_j).cumsum(1)
            return twisted * x_j if is_summed else twisted

    x, edge_index = torch.rand(200, 64, device=device), _edges(200, 2000, device)
    layer = Twisted()
    for _ in range(3):
        layer(x, edge_index)
    report = gnnfast.report()
    (note,) = report.notes()
    assert "0% on gnnfast's kernels, 100% in part (message())" in report.headline()
    assert note.calls == note.of == 3 and note.advice
    assert note.why == "served in part, message() makes rows of edges: message() runs cumsum on [edges, 64]"


def test_calls_left_to_the_framework_for_their_size_are_too_small():
    reporting.fell_back("dgl u_add_v", "too small to gain")
    reporting.ran("dgl copy_u_sum", "gar sum", "CSR exists")
    report = gnnfast.report()
    assert "50% on gnnfast's kernels, 50% too small to gain" in report.headline() and "left to" not in report.headline()
    assert "left to DGL: too small to gain" in report.notes()[0].why


def test_features_of_mini_batches_are_one_line():
    for rows in (300, 200, 400):
        reporting.measured([rows, 1433], "float32", rows / 40_000)
    reporting.measured([300, 600], "float32", 0.5)["state"] = "dense: density 50.00%, not below 0.4"
    for density in (0.6, 0.7):
        reporting.measured([300, 700], "float32", density)["state"] = f"dense: density {density:.2%}, not below 0.4"
    text = " ".join(str(gnnfast.report()).split())
    assert "Features [*, 1433] float32, 3 tensors: 0.50% to 1.00% are not zero, dense: not used again after it was" in text
    assert "Features [300, 600] float32: 50.00% are not zero, dense: density 50.00%, not below 0.4" in text
    assert "Features [*, 700] float32, 2 tensors: 60.00% to 70.00% are not zero, dense: density not below 0.4" in text


def test_it_says_that_gnnfast_is_off():
    assert gnnfast.report().off == ""
    reporting.ran("pyg GCNConv", "gar sum", "CSR exists")
    gnnfast.disable()
    assert gnnfast.report().headline().endswith("gnnfast's kernels; now gnnfast is off: gnnfast.disable() was called")
    gnnfast.clear_report()
    assert gnnfast.report().headline() == "gnnfast is off: gnnfast.disable() was called"
    gnnfast.enable()
    assert gnnfast.report().headline().startswith("gnnfast: no message passing was seen")


def test_it_says_that_the_environment_has_gnnfast_off(run_python):
    printed = run_python("import gnnfast; print(gnnfast.report())", env={"GNNFAST": "0"})
    assert printed.startswith("gnnfast is off: GNNFAST=0\n")


def test_one_cause_is_one_line():
    reason = "libgnnfast_cpu.so is not in the installed package: reinstall gnnfast"
    states = {f"function_{n}": f"left alone: {reason}" for n in range(28)}
    report = reporting.Report(patches={"pyg": states}, off=f"gnnfast has no kernels here: {reason}")
    lines = str(report).splitlines()
    assert " ".join(lines[:2]) == f"gnnfast has no kernels here: {reason}" and lines[-1] == "PyG: 0 of 28 functions patched"
    assert len(lines) == 4
    report.off = ""
    assert "28 functions, function_0 among them, left alone: libgnnfast_cpu.so" in " ".join(str(report).split())


def test_features_that_stay_dense_say_why():
    conv, edge_index, x = pyg.GCNConv(600, 4), _edges(500, 3000, torch.device("cpu")), torch.rand(500, 600)
    for _ in range(4):
        conv(x, edge_index)
    assert "100.00% are not zero, dense: density 100.00%, not below" in " ".join(str(gnnfast.report()).split())


def test_long_names_and_reasons_fit_and_are_escaped():
    reporting.fell_back(f"pyg {'Long' * 30}<script>", f"{'word ' * 60}<b>&")
    report = gnnfast.report()
    _fits(str(report))
    page = report._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "&lt;b&gt;&amp;" in page


def test_keys_are_stable():
    gnnfast.spmm(Graph.from_edge_index(torch.tensor([[0], [1]]), 2), torch.ones(2, 3))
    found = json.loads(json.dumps(gnnfast.report().as_dict()))
    assert list(found) == ["kernels", "fallbacks", "notes", "patches", "schedules", "sampled", "features", "cache", "off"]
    assert found["kernels"][0] == {"place": "gnnfast.spmm", "kernel": "gar sum", "calls": 1} | {
        "reason": found["kernels"][0]["reason"]
    }


@pytest.mark.parametrize(
    ("part", "whole", "shown"), [(0, 5, "0%"), (1, 999, "1%"), (998, 999, "99%"), (5, 5, "100%"), (0, 0, "0%")]
)
def test_shares_are_never_rounded_to_none_or_all(part, whole, shown):
    assert percent(part, whole) == shown


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gar sum", "sum over edges grouped by destination (CSR)"),
        ("gas mean", "mean over edges as they come (COO)"),
        ("linear and gar sum", "linear layer, then sum over edges grouped by destination (CSR)"),
        ("gar mean and linear", "mean over edges grouped by destination (CSR), then linear layer"),
        ("gas dot", "dot product of each edge (COO)"),
        ("gathers and reductions", "message() and aggregation, over gnnfast's gathers"),
        ("edges", "both ends of each edge, in one pass"),
        ("something new", "something new"),
    ],
)
def test_kernels_in_words(name, said):
    assert words.kernel(name) == said


def _literals() -> list[str]:
    """What the package's code may say: its strings but docstrings, with a word and a dtype for what they are filled with."""
    found = []
    for path in Path(gnnfast.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree) if path.name != "words.py" else ():
            if isinstance(node, ast.JoinedStr):
                for filling in ("x", "'x'", "torch.int64"):
                    found.append("".join(v.value if isinstance(v, ast.Constant) else filling for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.append(node.value)
    return found


def test_advice_is_for_reasons_that_there_are():
    literals = _literals()
    for pattern, _ in words.ADVICE:
        for part in re.split(r"\|(?![^(]*\))", pattern):
            assert any(re.search(part, literal) for literal in literals), f"no reason in the code matches {part!r}"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("message() is not x_j or weight * x_j", "gnnfast.profile()"),
        ("the aggregation is MedianAggregation", "sum, mean, max, min"),
        ("reduce is 'mul'", "sum, mean, max and min are served"),
        ("op is dot", "u_dot_v"),
        ("operands are of e and v", "copy_u"),
        ("PNAConvTower.message is a Python function, which runs over rows of edges", "dgl.function"),
        ("several edge types at once", "multi_update_all"),
        ("features and parameters do not agree", "same dtype"),
        ("edge_index is a SparseTensor", "edge_index [2, E]"),
        ("x is a MaskedTensor", "plain torch.Tensor"),
        ("the number of nodes is not known", "size="),
        ("features are torch.int64", "float32"),
    ],
)
def test_advice(reason, said):
    assert said in words.advice(reason)


# ---- profiles ------------------------------------------------------------------------------------------------------------------
def test_a_profile_tells_gnnfast_from_the_rest(device):
    edge_index, x = _edges(2000, 40000, device), torch.rand(2000, 64, device=device)
    conv = pyg.GCNConv(64, 64).to(device)
    optimizer = torch.optim.Adam(conv.parameters())

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.dropout(conv(x, edge_index)).square().mean().backward()
        optimizer.step()

    step()
    with gnnfast.profile() as found:
        for _ in range(3):
            step()
    names = {row.name: row for row in found.operations}
    assert found.steps == 3
    spmm = [row for name, row in names.items() if name.startswith("gnnfast: spmm")]  # over COO on a GPU
    assert spmm and spmm[0].host_ms > 0 and "dropout" in names and "optimiser (Adam)" in names
    assert "bernoulli_" not in names  # a part of dropout
    (site,) = (s for s in found.sites if s.kernel not in words.PARTS)
    assert site.layer == "pyg GCNConv" and site.calls == 3 and site.site.startswith("test_report.py:")
    covered = sum(row.host_ms for row in found.operations)
    assert covered == pytest.approx(found.wall_ms, rel=0.3) or device.type == "cuda"  # there the backward pass has its own thread
    assert (found.device_ms > 0) == (device.type == "cuda")
    text = str(found)
    _fits(text)
    assert "a step" in text and "dropout" in text and "Calls by line" in text
    assert json.dumps(found.as_dict()) and "<table" in found._repr_html_()


def test_a_profile_by_layers(device):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = pyg.GCNConv(64, 64), pyg.SAGEConv(64, 64), torch.nn.Linear(64, 8)

        def forward(self, x, edge_index):
            return self.head(self.second(self.first(x, edge_index), edge_index))

    with gnnfast.profile(layers=True) as probe:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    if not probe.layers:
        assert "records no calls of modules" in str(probe)
        pytest.skip("this torch's profiler records no calls of modules here")
    edge_index, x = _edges(5000, 200_000, device), torch.rand(5000, 64, device=device)
    net = Net().to(device)
    for _ in range(2):
        net(x, edge_index).square().mean().backward()
    with gnnfast.profile(layers=True) as found:
        for _ in range(3):
            net(x, edge_index).square().mean().backward()
    layers = {row.name: row for row in found.layers}
    # The products of a layer are its own; Net, which is none, has what is in no other module.
    assert {*layers} == {"GCNConv 0", "SAGEConv 0", "Linear 0", "Net 0"} and all(row.calls == 3 for row in found.layers)
    ours = sum(row.host_ms for row in found.operations if row.name.startswith("gnnfast: spmm"))
    assert layers["GCNConv 0"].host_ms + layers["SAGEConv 0"].host_ms > ours > 0  # backward passes too
    of_layers = sum(row.device_ms for row in found.layers)
    assert of_layers > found.device_ms / 2 if device.type == "cuda" else not of_layers
    assert "GCNConv 0" in str(found) and "layer" in str(found) and json.dumps(found.as_dict())
    _fits(str(found))


def test_a_profile_ends_with_its_block():
    with pytest.raises(ValueError, match="mine"), gnnfast.profile():
        raise ValueError("mine")
    with gnnfast.profile() as found:
        pass
    reporting.ran("pyg GCNConv", "gar sum", "CSR exists")
    assert found.sites == [] and not reporting._watchers
