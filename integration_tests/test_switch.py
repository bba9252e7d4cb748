"""On, off, import order, environment, broken installations: each in its own process."""

from __future__ import annotations

import importlib
import inspect
import json
import operator
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import CodeType

import forked
import pytest
import torch

import gnnfast
from gnnfast.patching import Patches, Unknown, fingerprint

has_pyg = pytest.mark.skipif(not __import__("importlib.util").util.find_spec("torch_geometric"), reason="PyG is not installed")
has_dgl = pytest.mark.skipif(not __import__("importlib.util").util.find_spec("dgl"), reason="DGL is not installed")

USE_PYG = """
import torch
from torch_geometric.nn import SAGEConv
ei = torch.tensor([[0, 1, 2], [1, 2, 0]]); x = torch.randn(3, 4)
conv = SAGEConv(4, 4)
conv(x, ei)
"""
USE_DGL = """
import torch, dgl
g = dgl.graph(([0, 1, 2], [1, 2, 0]))
for _ in range(2):  # a small graph is left to DGL when it is met for the first time
    dgl.ops.copy_u_sum(g, torch.randn(3, 4))
"""
SHOW = "\nimport json; print('PLACES', json.dumps(sorted({k[0] for k in gnnfast.report().kernels})))\n"


def places(output: str) -> list[str]:
    return json.loads(next(line for line in output.splitlines() if line.startswith("PLACES"))[len("PLACES") :])


@has_pyg
@pytest.mark.parametrize("before", [True, False])
def test_import_order_pyg(before, run_python):
    code = "import gnnfast\n" + USE_PYG if before else USE_PYG + "import gnnfast\nconv(x, ei)\n"
    assert places(run_python(code + SHOW, apart=True)) == ["pyg SAGEConv"]


@has_pyg
def test_patched_functions_show_their_source():
    """To users, debuggers and TorchScript: what is added is in their code alone, and its lines are those of the source."""
    from gnnfast.patching import is_dispatched
    from gnnfast.pyg.install import PATCHES

    def shown() -> dict[str, tuple[str, int, int]]:
        functions = {p.name: inspect.unwrap(operator.attrgetter(p.name)(importlib.import_module(p.module))) for p in PATCHES}
        on = gnnfast.is_enabled()
        assert all(is_dispatched(function) == on for function in functions.values())
        return {name: (inspect.getsource(f), f.__code__.co_firstlineno, last_line(f.__code__)) for name, f in functions.items()}

    def last_line(code: CodeType) -> int:
        return max(line for *_, line in code.co_lines() if line is not None)

    patched = shown()
    gnnfast.disable()
    try:
        assert shown() == patched
    finally:
        gnnfast.enable()


@has_dgl
@pytest.mark.parametrize("before", [True, False])
def test_import_order_dgl(before, run_python):
    shim = "from gnnfast.dgl.startup import _gnnfast_dgl_shim"
    code = "import gnnfast\n" + USE_DGL
    if not before:  # DGL alone cannot be imported on this torch, so gnnfast is switched on late
        code = (
            f"import gnnfast; gnnfast.disable()\n{shim}\n"
            + USE_DGL
            + "gnnfast.enable()\nfor _ in range(2):\n    dgl.ops.copy_u_sum(g, torch.randn(3, 4))\n"
        )
    assert places(run_python(code + SHOW, apart=True)) == ["dgl copy_u_sum"]


def test_importing_gnnfast_imports_no_framework_and_is_quick(run_python):
    out = run_python(
        "import sys, time, torch\nbegin = time.perf_counter()\nimport gnnfast\nprint('SECONDS', time.perf_counter() - begin)\n"
        "assert not any(m.split('.')[0] in ('torch_geometric', 'dgl', 'rich') for m in sys.modules)",
        apart=True,
    )
    assert "SECONDS" in out


@has_pyg
def test_disable_restores_the_very_objects(run_python):
    run_python("""
import sys, gc, torch, torch_geometric.nn as nn
import torch_geometric.nn.conv.message_passing as mp
import torch_geometric.nn.conv.gcn_conv as gcn, torch_geometric.utils._spmm as sp
nn.SAGEConv(4, 4)
template = mp.module_from_template
holders = [gcn.gcn_norm, sp.spmm, nn.SAGEConv._jinja_propagate]
codes = [f.__code__ for f in holders]
names = [set(f.__globals__) for f in holders]
attributes = {k: v for k, v in vars(nn.SAGEConv).items()}
import gnnfast
class Later(nn.MessagePassing):
    def forward(self, x, e): return self.propagate(e, x=x)
assert all(f.__code__ is not c for f, c in zip(holders, codes)) and mp.module_from_template is not template
x, e = torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])
nn.GCNConv(4, 4)(x, e); nn.SAGEConv(4, 4)(x, e)
gnnfast.disable()
assert not gnnfast.is_enabled()
assert all(f.__code__ is c for f, c in zip(holders, codes)) and mp.module_from_template is template
assert all('_gnnfast' not in ''.join(set(f.__globals__) - n) for f, n in zip(holders, names))
assert attributes == {k: v for k, v in vars(nn.SAGEConv).items()}
gnnfast.clear_report()
nn.GCNConv(4, 4)(x, e); nn.SAGEConv(4, 4)(x, e); Later()(x, e)
assert not gnnfast.report().kernels and not gnnfast.report().patches
gnnfast.enable(); gnnfast.enable()
nn.GCNConv(4, 4)(x, e); Later()(x, e)
assert {k[0] for k in gnnfast.report().kernels} == {'pyg GCNConv', 'pyg gcn_norm', 'pyg Later'}
gnnfast.disable()
assert all(f.__code__ is c for f, c in zip(holders, codes))
""")


@has_dgl
@pytest.mark.parametrize("bridge", ["0", "1"])
def test_disable_restores_dgl(bridge, run_python):
    code = """
import gnnfast
gnnfast.disable()
import os, sys, dgl
modules = {n: m for n, m in sys.modules.items() if n.startswith('dgl') and 'graphbolt' not in n}
before = {(n, k): v for n, m in modules.items() for k, v in vars(m).items() if callable(v)}
index = sys.modules['dgl.heterograph_index'].HeteroGraphIndex
methods = {name: index.__dict__[name] for name in ('get_relation_graph', 'reverse')}
forwards = [vars(dgl.nn.pytorch.conv)[name].forward for name in ('GATConv', 'GraphConv', 'EdgeConv', 'SAGEConv')]
codes, names = [f.__code__ for f in forwards], [set(f.__globals__) for f in forwards]
gnnfast.enable()
assert all(f.__code__ is not code for f, code in zip(forwards, codes))
changed = {k for k in before if vars(sys.modules[k[0]]).get(k[1]) is not before[k]}
of_backend = {'gspmm': 'dgl.ops.spmm', 'gsddmm': 'dgl.ops.sddmm', 'edge_softmax': 'dgl.ops.edge_softmax'}
expected = {(m, f) for f in of_backend for m in ('dgl.backend', 'dgl.backend.pytorch', 'dgl.backend.pytorch.sparse')}
expected |= {(m, f + '_hetero') for m, f in expected}
expected |= {(m, f + '_internal') for f, m in of_backend.items()}
expected |= {('dgl.ops.spmm', 'gspmm_internal_hetero'), ('dgl.ops.sddmm', 'gsddmm_internal_hetero')}
expected |= {('dgl.ops.edge_softmax', 'edge_softmax_hetero_internal')}
expected |= {('dgl.ops', 'gspmm'), ('dgl.ops.spmm', 'gspmm')}
expected |= {('dgl.core', name) for name in ('message_passing', 'invoke_edge_udf', 'invoke_udf_reduce')}
assert changed == expected if os.environ.get('GNNFAST_DGL_BRIDGE') == '0' else changed >= expected, changed
assert all(index.__dict__[name] is not method for name, method in methods.items())
gnnfast.disable()
assert all(vars(sys.modules[m]).get(k) is v for (m, k), v in before.items())
assert all(index.__dict__[name] is method for name, method in methods.items())
assert all(f.__code__ is code and set(f.__globals__) == n for f, code, n in zip(forwards, codes, names))
"""
    run_python(code, env={"GNNFAST_DGL_BRIDGE": bridge})


@has_dgl
def test_spawned_workers_can_import_dgl(run_python):
    out = run_python("""
import gnnfast, multiprocessing as mp
def work(q):
    import dgl, torch
    q.put(float(dgl.ops.copy_u_sum(dgl.graph(([0, 1], [1, 0])), torch.ones(2, 1)).sum()))
if __name__ == '__main__':
    import dgl
    ctx = mp.get_context('spawn')
    q = ctx.Queue()
    p = ctx.Process(target=work, args=(q,)); p.start()
    print('RESULT', q.get(timeout=120)); p.join()
""")
    assert "RESULT 2.0" in out


@has_dgl
def test_worker_without_gnnfast_can_import_dgl(run_python):
    """A spawned process that never imports gnnfast gets the shim through the installed .pth file."""
    if not list(Path(gnnfast.__path__[0]).parent.glob("gnnfast.pth")):
        pytest.skip("gnnfast is not installed in site-packages but run from a source tree")
    out = run_python("""
import gnnfast, subprocess, sys
print(subprocess.run([sys.executable, '-W', 'ignore', '-c', 'import dgl; print("IMPORTED", dgl.__version__)'], capture_output=True, text=True))
""")
    assert "IMPORTED" in out


@has_dgl
def test_graphbolt_stub_says_why(run_python):
    out = run_python("import gnnfast, dgl\ndgl.graphbolt.ItemSet", check=False)
    if not out.strip():
        pytest.skip("this DGL brings GraphBolt for this torch")
    assert "dgl.graphbolt.ItemSet is not available" in out and "gnnfast put a stub in its place" in out


@has_dgl
def test_a_missing_sparse_library_says_what_to_do(run_python):
    out = run_python("import gnnfast, dgl\ndgl.rand_graph(3, 4).adj()", check=False)
    if "Error" not in out and "Unavailable" not in out:
        pytest.skip("this DGL ships its libraries for this torch")
    assert "dgl.sparse, which g.adj() needs too, is not available" in out and "g.adj_external()" in out


@has_pyg
@pytest.mark.parametrize(
    "env,expected",
    [
        ({}, ["pyg SAGEConv"]),
        ({"GNNFAST": "0"}, []),
        ({"GNNFAST_BACKENDS": "dgl"}, []),
        ({"GNNFAST_BACKENDS": "pyg"}, ["pyg SAGEConv"]),
    ],
)
def test_environment(env, expected, run_python):
    assert places(run_python("import gnnfast\n" + USE_PYG + SHOW, env=env)) == expected


@has_pyg
def test_kernel_and_log_variables(run_python):
    out = run_python(
        "import gnnfast\n" + USE_PYG + "print({k[1] for k in gnnfast.report().kernels})",
        env={"GNNFAST_KERNEL": "gas", "GNNFAST_LOG": "debug"},
    )
    assert "{'gas mean and linear'}" in out and "gnnfast: pyg SAGEConv: gas mean and linear (kernel=gas is set)" in out


@has_pyg
def test_strict(run_python):
    code = "import gnnfast\n" + USE_PYG.replace("SAGEConv(4, 4)", "SAGEConv(4, 4, aggr='median')")
    assert "FallbackError" not in run_python(code)
    out = run_python(code, check=False, env={"GNNFAST_STRICT": "1"})
    assert "FallbackError: gnnfast would leave pyg SAGEConv to the framework: the aggregation is MedianAggregation" in out


def test_impossible_environment_values(run_python):
    out = run_python("""
import os, sys, torch

def attempt(variable, value, accepts):
    os.environ[variable] = value
    try:
        import gnnfast
    except ValueError as error:
        assert str(error) == f"the environment variable {variable} is '{value}'; it accepts {accepts}", error
    else:
        raise AssertionError(variable)
    del os.environ[variable]
    for name in [name for name in sys.modules if name.partition('.')[0] == 'gnnfast']:
        del sys.modules[name]

attempt('GNNFAST', 'yes', '0 or 1')
attempt('GNNFAST_BACKENDS', 'tensorflow', 'a comma list of pyg and dgl')
attempt('GNNFAST_KERNEL', 'fast', 'auto, gas, gar or sampled')
attempt('GNNFAST_DEGREE_THRESHOLD', '-1', 'a number above 0')
attempt('GNNFAST_CACHE_MB', 'many', 'an integer of at least 0')
attempt('GNNFAST_STRICT', '2', '0 or 1')
attempt('GNNFAST_LOG', 'loud', 'off, info or debug')
print('REFUSED')
""")
    assert "REFUSED" in out


def test_override_rejects_what_it_does_not_know():
    with (
        pytest.raises(TypeError, match="accepts kernel, degree_threshold, feature_density_threshold, schedule, autotune, sample, "),
        gnnfast.override(kernle="gas"),
    ):
        pass
    with pytest.raises(ValueError, match="kernel accepts auto, gas, gar or sampled"), gnnfast.override(kernel="fast"):
        pass


@has_pyg
@pytest.mark.parametrize("damage,reason", [("missing", "is not in the installed package"), ("corrupt", "cannot be loaded")])
def test_broken_native_library(damage, reason, tmp_path, run_python):
    """The import works, everything falls back, and doctor says why."""
    import shutil

    copy = tmp_path / "broken" / "gnnfast"
    shutil.copytree(gnnfast.__path__[0], copy, ignore=shutil.ignore_patterns("__pycache__"))
    library = copy / "lib" / "libgnnfast_cpu.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
    library.unlink(missing_ok=True)
    if damage == "corrupt":
        library.write_bytes(b"this is no shared library")
    env = {"PYTHONPATH": str(tmp_path / "broken")}
    out = run_python(
        "import gnnfast\n"
        + USE_PYG
        + "print(gnnfast.report().patches)\nfrom gnnfast.cli import main; print('STATUS', main(['doctor']))"
        + SHOW,
        env=env,
    )
    assert places(out) == [] and reason in out and "STATUS 1" in out and "reinstall" in out
    out = run_python(
        "import gnnfast, torch\ng = gnnfast.Graph.from_edge_index(torch.tensor([[0], [0]]), 1)\ngnnfast.spmm(g, torch.ones(1, 1))",
        check=False,
        env=env,
    )
    assert "RuntimeError: gnnfast has no kernels for cpu" in out


def test_old_torch(run_python):
    out = run_python(
        "import torch\ntorch.__version__ = '2.9.1+cpu'\nimport gnnfast\nfrom gnnfast import _native\nprint(_native.cpu.reason)"
    )
    assert "torch 2.9.1+cpu is older than 2.10" in out


@has_pyg
def test_unknown_pyg_is_left_alone(run_python):
    out = run_python(
        """
import gnnfast
from gnnfast.pyg import install
install.TEMPLATES['propagate.jinja'] = ('0' * 12,)
install.PATCHES = tuple(install.dataclasses.replace(p, known=('0' * 12,)) for p in install.PATCHES)
"""
        + USE_PYG
        + "print(gnnfast.report().patches)\nfrom gnnfast.cli import main; print('STATUS', main(['doctor']))"
        + SHOW,
        apart=True,
    )
    assert places(out) == [] and "left alone: propagate.jinja has fingerprint" in out and "STATUS 1" in out


def test_doctor():  # as a newcomer calls it
    done = subprocess.run([sys.executable, "-m", "gnnfast", "doctor"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CPU kernels" in done.stdout and str(torch.__version__) in done.stdout


@has_pyg
def test_run(tmp_path):
    (tmp_path / "user.py").write_text(USE_PYG + "import sys; print(sys.argv[1:], __name__)")
    done = forked.run(["-m", "gnnfast", "run", "--report", "user.py", "--lr", "1"], tmp_path, dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "['--lr', '1'] __main__" in done.stdout and "SAGEConv" in done.stdout


@has_pyg
def test_dataloader_workers_and_threads(run_python):
    out = run_python("""
import gnnfast, torch, threading
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv
if __name__ == '__main__':
    data = [Data(x=torch.randn(5, 4), edge_index=torch.randint(0, 5, (2, 9))) for _ in range(40)]
    conv, results, lock = GCNConv(4, 4), [], threading.Lock()
    def work():
        with lock:  # some libraries forbid to fork while another thread does
            batches = iter(DataLoader(data, batch_size=8, num_workers=1))
        for batch in batches:
            results.append(conv(batch.x, batch.edge_index).shape)
    threads = [threading.Thread(target=work) for _ in range(2)]
    [t.start() for t in threads]; [t.join() for t in threads]
    assert len(results) == 10
    import gc; del work; gc.collect()
    print('FALLBACKS', dict(gnnfast.report().fallbacks))
""")
    assert "FALLBACKS {}" in out


def test_settings_go_along_into_backward_passes():
    """Also where autograd runs them in a thread of its own, as on a GPU, and on a CPU where they are nested deeply."""
    from gnnfast.config import settings

    here = threading.get_ident()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seen, depth):
            ctx.seen, ctx.depth = seen, depth
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if threading.get_ident() != here:
                with gnnfast.override(sample="random"):
                    inner = settings()
                ctx.seen.append((settings().kernel, inner.kernel, inner.sample, settings().sample))
            elif ctx.depth:
                with torch.enable_grad():
                    Nested.apply(torch.ones(1, requires_grad=True), ctx.seen, ctx.depth - 1).sum().backward()
            return grad, None, None

    def backward():
        seen = []
        Nested.apply(torch.ones(1, requires_grad=True), seen, 100).sum().backward()
        return seen[0]

    with gnnfast.override(kernel="gar"):
        assert backward() == ("gar", "gar", "random", "off")
        with gnnfast.override(kernel="gas"):
            assert backward()[0] == "gas"
        assert backward()[0] == settings().kernel == "gar"
        other = []
        of_another = threading.Thread(target=lambda: other.append(settings().kernel))
        of_another.start(), of_another.join()
        assert other == ["auto"]
    assert backward()[0] == settings().kernel == "auto"


WITHIN_AN_IF = """\
import sys

if sys.maxsize > 0:

    def twice(x):
        return 2 * x

    def both(x):
        return twice(x)

else:

    def twice(x):
        return x + x + 0
"""


@pytest.mark.parametrize(("condition", "body"), [("sys.maxsize > 0", "2 * x"), ("sys.maxsize < 0", "x + x + 0")])
def test_a_function_that_is_defined_within_an_if(condition, body, tmp_path, monkeypatch):
    """As PyG 2.6 has its scatter: the one that was defined is the one that is known and patched."""
    source = WITHIN_AN_IF.replace("sys.maxsize > 0", condition)
    (tmp_path / "within_an_if.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "within_an_if", raising=False)
    twice, patches = importlib.import_module("within_an_if").twice, Patches()
    code = twice.__code__
    alone = f"def twice(x):\n    return {body}\n"
    assert fingerprint(source, "twice", code.co_firstlineno) == fingerprint(alone, "twice")
    patches.add_dispatch(twice, source, lambda x: -1 if x == 7 else NotImplemented)
    assert twice(7) == -1 and twice(3) == 6 and inspect.getsourcelines(twice)[1] == code.co_firstlineno
    patches.restore()
    assert twice.__code__ is code and twice(7) == 14
    with pytest.raises(Unknown, match="thrice is not defined there"):
        fingerprint(source, "thrice")
