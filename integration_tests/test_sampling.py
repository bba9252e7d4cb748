"""When gnnfast samples: only where asked, in inference, and in training with the random strategy alone."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from graphs import relative_error

import gnnfast
from gnnfast import Graph
from gnnfast.cli import benchmarks, main
from gnnfast.config import settings
from gnnfast.dispatch.select import Sampling, default_width, select_sampling
from gnnfast.types import STRATEGIES

geometric = pytest.mark.skipif(importlib.util.find_spec("torch_geometric") is None, reason="PyG is not installed")
with_dgl = pytest.mark.skipif(importlib.util.find_spec("dgl") is None, reason="DGL is not installed")


@pytest.fixture
def edge_index() -> torch.Tensor:
    """100 nodes of in-degree about 60."""
    return torch.randint(100, (2, 6000), generator=torch.Generator().manual_seed(1))


def kernels() -> set[str]:
    return {kernel for _, kernel, _ in gnnfast.report().kernels}


def reasons() -> str:
    return "; ".join(reason for _, _, reason in gnnfast.report().kernels)


# ---- the choice -------------------------------------------------------------------------------------------------------------
def choose(degree=100.0, reduce="sum", needs_grad=False, training=False, **changes):
    with gnnfast.override(**({"sample": "fastrand"} | changes)):
        return select_sampling(degree, reduce, needs_grad, training, settings())


def test_the_choice():
    assert choose() == Sampling("fastrand", 16, True)
    assert choose(sample_width=64, sample_rescale=False) == Sampling("fastrand", 64, False)
    assert choose(reduce="max") == "max has no sampled form"
    assert "fastrand has no gradient" in choose(needs_grad=True)
    assert "fastrand is for inference" in choose(training=True)
    assert choose(needs_grad=True, training=True, sample="random") == Sampling("random", 16, True)
    assert choose(degree=8.0) == "the average degree 8 is at most half of the 16 edges a row to sample"
    assert choose(degree=8.1) == Sampling("fastrand", 16, True)
    assert choose(degree=2.0, kernel="sampled", sample="off") == Sampling("fastrand", 16, True)


@pytest.mark.parametrize("degree,width", [(0, 16), (10, 16), (130, 16), (250, 32), (492, 64), (597, 64), (5000, 512)])
def test_the_width_follows_the_average_degree(degree, width):
    assert default_width(degree) == width


@pytest.mark.parametrize(
    "change,message",
    [
        ({"sample": "first"}, "sample accepts off, bucket, fastrand or random"),
        ({"sample_width": 0}, "sample_width accepts an integer of at least 1"),
        ({"sample_width": "wide"}, "sample_width accepts an integer of at least 1"),
        ({"sample_rescale": "yes"}, "sample_rescale accepts 0 or 1"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message), gnnfast.override(**change):
        pass


def test_environment(run_python):
    code = "import gnnfast; print(gnnfast.settings().sample, gnnfast.settings().sample_width)"
    code = code.replace("gnnfast.settings", "gnnfast.config.settings")
    assert "bucket 32" in run_python(code, env={"GNNFAST_SAMPLE": "bucket", "GNNFAST_SAMPLE_WIDTH": "32"})
    out = run_python("import gnnfast", check=False, env={"GNNFAST_SAMPLE_WIDTH": "0"})
    assert "GNNFAST_SAMPLE_WIDTH is '0'; it accepts an integer of at least 1" in out


# ---- calls ------------------------------------------------------------------------------------------------------------------
def test_never_unless_asked(edge_index, device):
    graph, x = Graph.from_edge_index(edge_index.to(device), 100), torch.randn(100, 8, device=device)
    with torch.no_grad():
        exact = gnnfast.spmm(graph, x)
        assert "sampled" not in str(gnnfast.report()).lower()
        with gnnfast.override(sample="bucket", sample_width=8):
            sampled = gnnfast.spmm(graph, x)
    assert relative_error(sampled, exact) > 0.1
    assert relative_error(sampled, gnnfast.spmm_sampled(graph, x, width=8, strategy="bucket")) < 1e-6
    assert gnnfast.report().sampled == {"edges": 12000, "draws": 1600}
    assert "13.3% of the edges" in str(gnnfast.report())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_rows_no_longer_than_the_width_are_exact(edge_index, reduce, device):
    graph, x = Graph.from_edge_index(edge_index.to(device), 100), torch.randn(100, 8, device=device)
    longest = int(graph.csr.rowptr.diff().max())
    with torch.no_grad():
        exact = gnnfast.spmm(graph, x, reduce=reduce)
        with gnnfast.override(sample="fastrand", sample_width=longest):
            assert torch.equal(gnnfast.spmm(graph, x, reduce=reduce), exact)
    assert f"not sampled: no node has more than {longest} edges" in reasons() and "sampled sum" not in kernels()


def test_gradients_under_other_strategies_are_exact_and_say_why(edge_index, device):
    graph = Graph.from_edge_index(edge_index.to(device), 100)
    x = torch.randn(100, 8, device=device, requires_grad=True)
    for strategy in ("bucket", "fastrand"):
        with gnnfast.override(sample=strategy, sample_width=8):
            out = gnnfast.spmm(graph, x)
        (found,) = torch.autograd.grad(out.sum(), x)
        (expected,) = torch.autograd.grad(gnnfast.spmm(graph, x).sum(), x)
        assert torch.equal(found, expected)
        assert f"not sampled: {strategy} has no gradient; use random" in reasons()


def test_autotuning_and_sampling_together(edge_index, device):
    graph, x = Graph.from_edge_index(edge_index.to(device), 100), torch.randn(100, 8, device=device)
    with torch.no_grad(), gnnfast.override(sample="fastrand", sample_width=8, autotune=True):
        sampled = gnnfast.spmm_sampled(graph, x, width=8, strategy="fastrand")
        assert relative_error(gnnfast.spmm(graph, x), sampled) < 1e-6


def test_sampling_prepares_once(edge_index, device):
    graph, x = Graph.from_edge_index(edge_index.to(device), 100), torch.randn(100, 8, device=device, requires_grad=True)
    w = torch.rand(6000, device=device)
    for _ in range(3):
        gnnfast.spmm_sampled(graph, x, w, width=8).sum().backward()
    before = graph.nbytes
    args = graph.draws.args(graph, csc=True)
    gnnfast.spmm_sampled(graph, x, w, width=8).sum().backward()
    assert graph.nbytes == before and graph.draws.args(graph, csc=True) is args
    # What is counted: both formats, the inverse of CSR's perm, slots of CSC, and the weight by slots.
    perm, formats = 4 * 6000, (graph.csr, graph.csc)
    assert before >= sum(t.nbytes for c in formats for t in c if isinstance(t, torch.Tensor)) + 2 * perm + w.nbytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("calls", [1, 2])  # before draws are kept, and after
def test_cuda_graph_capture(calls, edge_index):
    device = torch.device("cuda")
    graph, x = Graph.from_edge_index(edge_index.to(device), 100), torch.randn(100, 8, device=device)
    with torch.no_grad(), gnnfast.override(sample="fastrand", sample_width=8):
        for _ in range(calls):
            expected = gnnfast.spmm(graph, x)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = gnnfast.spmm(graph, x)
            with gnnfast.override(sample="random"):
                exact = gnnfast.spmm(graph, x)
        out.zero_()
        captured.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        with gnnfast.override(sample="off"):
            assert torch.equal(exact, gnnfast.spmm(graph, x))
    assert "would make the same draw in each replay" in reasons()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_captured_draws_outlive_other_settings(edge_index):
    device = torch.device("cuda")
    graph, x = Graph.from_edge_index(edge_index.to(device), 100), torch.randn(100, 8, device=device)

    def call(width):
        return gnnfast.spmm_sampled(graph, x, width=width, strategy="fastrand")

    expected = [call(8) for _ in range(3)][-1]
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = call(8)
    for width in range(9, 15):
        for _ in range(2):
            call(width)
    scribbled = [torch.full((size,), 7, dtype=torch.int32, device=device) for size in (100, 101, 200, 800) for _ in range(50)]
    captured.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and scribbled


# ---- frameworks -------------------------------------------------------------------------------------------------------------
@geometric
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GraphConv", "GINConv"])
def test_pyg_inference(name, strategy, edge_index, device):
    import torch_geometric.nn as nn

    edge_index, x = edge_index.to(device), torch.randn(100, 8, device=device)
    layer = (nn.GINConv(torch.nn.Linear(8, 4)) if name == "GINConv" else getattr(nn, name)(8, 4)).to(device)
    exact = layer.eval()(x, edge_index)
    with gnnfast.override(sample=strategy, sample_width=20):
        with torch.no_grad():
            sampled = layer(x, edge_index)
        evaluated = layer(x, edge_index)  # eval(), gradients enabled
    assert 0.001 < relative_error(sampled, exact) < 5
    assert evaluated.requires_grad
    assert any(k.startswith("sampled") for k in kernels())
    with torch.no_grad(), gnnfast.override(sample="bucket", sample_width=1000):
        assert relative_error(layer(x, edge_index), exact) < 1e-5


@geometric
def test_pyg_knows_evaluation_by_the_module(edge_index):
    """A first layer aggregates features that need no gradient, in training as well."""
    from torch_geometric.nn import SimpleConv

    layer, x = SimpleConv(aggr="mean"), torch.randn(100, 8)
    with gnnfast.override(sample="bucket", sample_width=20):
        layer.train()(x, edge_index)
        assert kernels() == {"gar mean"} and "bucket is for inference, and gradients are enabled" in reasons()
        layer.eval()(x, edge_index)
        assert "sampled mean" in kernels()


@geometric
def test_pyg_training_draws_anew_each_step_and_its_gradient_is_of_that_draw(edge_index, device):
    from torch_geometric.nn import SAGEConv

    edge_index, x = edge_index.to(device), torch.randn(100, 8, device=device, requires_grad=True)
    layer = SAGEConv(8, 4).to(device)
    with gnnfast.override(sample="random", sample_width=20):
        first, second = layer(x, edge_index), layer(x, edge_index)
        torch.manual_seed(3)
        a = torch.autograd.grad(layer(x, edge_index).sum(), x)[0]
        torch.manual_seed(3)
        b = torch.autograd.grad(layer(x, edge_index).sum(), x)[0]
    assert not torch.equal(first, second) and torch.equal(a, b)
    assert "sampled mean" in kernels() and "gar mean" not in kernels()


@with_dgl
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["GraphConv", "SAGEConv"])
def test_dgl_inference(name, strategy, edge_index):
    import dgl

    g, x = dgl.graph((edge_index[0], edge_index[1]), num_nodes=100).add_self_loop(), torch.randn(100, 8)
    layer = dgl.nn.GraphConv(8, 4) if name == "GraphConv" else dgl.nn.SAGEConv(8, 4, "mean")
    with torch.no_grad():
        exact = layer(g, x)
        with gnnfast.override(sample=strategy, sample_width=20):
            assert 0.001 < relative_error(layer(g, x), exact) < 5
    assert any(k.startswith("sampled") for k in kernels())


@with_dgl
def test_dgl_training_is_exact_but_for_random(edge_index):
    import dgl

    g, x = dgl.graph((edge_index[0], edge_index[1]), num_nodes=100), torch.randn(100, 8)
    layer = dgl.nn.SAGEConv(8, 4, "mean")
    with gnnfast.override(sample="fastrand", sample_width=20):
        layer(g, x).sum().backward()
    assert "sampled" not in "".join(kernels())
    with gnnfast.override(sample="random", sample_width=20):
        layer(g, x).sum().backward()
    assert any(k.startswith("sampled") for k in kernels())


# ---- the accuracy check -----------------------------------------------------------------------------------------------------
def _check():
    return importlib.import_module(f"{benchmarks().__name__}.sampled")


def test_check_recommends_the_fastest_within_the_loss(edge_index):
    graph, x = Graph.from_edge_index(edge_index, 100), torch.randn(100, 8)

    def evaluate():  # accurate only if the setting keeps enough edges
        with torch.no_grad():
            gnnfast.spmm(graph, x)
        width = settings().sample_width if settings().sample != "off" else 100
        return 0.9 if width >= 32 else 0.7

    rows, line = _check().check(evaluate, widths=(8, 32, 512), strategies=("bucket", "random"), repeats=2)
    assert [(r["strategy"], r["S"]) for r in rows[1:]] == [(s, w) for s in ("bucket", "random") for w in (8, 32, 512)]
    assert rows[0]["accuracy"] == 0.9 and rows[1]["loss"] == pytest.approx(0.2)
    assert rows[1]["edges taken"] == pytest.approx(800 / 6000) and rows[3]["edges taken"] == 1.0
    assert rows[3]["note"].startswith("not sampled: the average degree 60")
    pretended = [r | {"ms": ms} for r, ms in zip(rows, (9.0, 1.0, 5.0, 9.0, 1.0, 4.0, 9.0))]
    pretended = [r | ({"exact / sampled": 9.0 / r["ms"]} if "loss" in r else {}) for r in pretended]
    assert "GNNFAST_SAMPLE=random GNNFAST_SAMPLE_WIDTH=32, 2.25 times as fast" in _check().recommend(pretended, 0.01)
    assert "GNNFAST_SAMPLE=bucket GNNFAST_SAMPLE_WIDTH=8" in _check().recommend(pretended, 0.5)
    assert "no sampling" in _check().recommend([pretended[0], pretended[1]], 0.01)
    assert line.startswith("recommended: ")


SCRIPT = """
import sys, torch, gnnfast
from gnnfast import Graph
assert sys.argv[1:] == ["--data", "x"]
torch.manual_seed(0)
graph, x = Graph.from_edge_index(torch.randint(100, (2, 6000)), 100), torch.randn(100, 8)
y = gnnfast.spmm(graph, x, reduce="mean").argmax(1)

def accuracy():
    with torch.no_grad():
        return (gnnfast.spmm(graph, x, reduce="mean").argmax(1) == y).float().mean()

if __name__ == "__main__":
    raise SystemExit("must not run as main")
"""


def test_a_users_script(tmp_path: Path, capsys):
    script = tmp_path / "eval.py"
    script.write_text(SCRIPT)
    base = ["bench", "sampled", "--script", str(script), "--widths", "16", "64", "--out", str(tmp_path / "r")]
    assert main([*base, "--function", "accuracy", "--repeats", "1", "--", "--data", "x"]) == 0
    out = capsys.readouterr().out
    assert "recommended" in out and re.search(r"random +64 ", out) and (tmp_path / "r.json").is_file()
    for arguments, message in (
        ([*base, "--", "--data", "x"], "it must define a function evaluate()"),
        (["bench", "sampled", "--script", str(tmp_path / "none.py")], "there is no such file"),
        (["bench", "sampled", "--widths", "0"], "--widths must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_rates_by_histogram(data_folder, monkeypatch):
    module = _check()
    monkeypatch.setattr(module.graphs, "random_order_names", lambda: ["pubmed", "arxiv", "amazon0601"])
    rows = list(module.rates(torch.device("cpu")))
    assert len(rows) == 18 and all(row["edges taken"] == row["by histogram"] for row in rows)
