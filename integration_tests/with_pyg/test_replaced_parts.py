"""No part that somebody replaced is overlooked: defects found from outside, each in the form it was found in."""

from __future__ import annotations

import functools
import hashlib
import inspect
import subprocess
import sys

import pytest
import torch
from comparison import compare
from promises import EDGES, NODES, F, both, same

import gnnfast
from gnnfast.patching import code_of
from gnnfast.pyg import known

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from torch_geometric.nn import MessagePassing, aggr
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from user_messages import Plain

BLOCKS = {
    "arguments over lines": "def f(\n    a,\n) -> int:\n    return a\n\n\nx = 1\n",
    "a comment further left": "def f(a):\n    a += 1\n# note\n\n    return a\n# another\nx = 1\n",
    "decorated": "import functools\n\n\n@functools.cache\ndef f(a):\n    return a\n\n\ndef g(): ...\n",
    "the last one": "def f(a):\n    if a:\n        return 1\n    return 2\n",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_source_of_a_function_ends_where_it_ends(name, tmp_path):
    """No statement of one that was edited is overlooked."""
    path, scope = tmp_path / "source.py", {}
    path.write_text(BLOCKS[name])
    exec(compile(BLOCKS[name], str(path), "exec"), scope)
    code = inspect.unwrap(scope["f"]).__code__
    lines = inspect.getblock(BLOCKS[name].splitlines(keepends=True)[code.co_firstlineno - 1 :])
    stripped = "\n".join(line.strip() for line in lines if line.strip())
    assert known.fingerprint_of(code) == hashlib.sha256(stripped.encode()).hexdigest()[:12]


def test_a_message_replaced_in_place(edge_index, x):
    class Edited(Plain):
        def message(self, x_j):
            return x_j

    def message(self, x_j):
        return 2 * x_j

    layer = Edited()
    for _ in range(3):
        same(lambda: layer(x, edge_index))
    Edited.message.__code__ = message.__code__  # what IPython's autoreload does
    same(lambda: layer(x, edge_index))


@pytest.mark.parametrize("in_c", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_what_a_verdict_depends_on(count, in_c, monkeypatch):
    """A verdict holds for as long as no function is another and none has another code, however it is looked at."""
    if not in_c:
        monkeypatch.setattr(known._native, "same_codes", None)

    class Watched:
        def a(self, x=1, *, y=2):
            return x + y

        def b(self):
            """Something."""

        def c(self):
            return 3

    judged = []
    names = ("a", "b", "c")[:count]
    watch = known.Watch(names, {"int": int}, (), lambda: judged.append(0) or len(judged), "own and part is None")

    def holds(cls=Watched):
        before = watch.of_instance(cls, {0: 0}, None)
        verdict = watch.verdict(cls)
        assert verdict == len(judged) and before in (None, verdict)
        return before == verdict

    assert not holds() and holds() and holds()
    assert watch.of_instance(Watched, {}, None) is None and watch.of_instance(Watched, {0: 0}, 1) is None
    for name in names:
        function = getattr(Watched, name)
        function.__code__ = (lambda self: 4).__code__
        assert not holds() and holds()
        setattr(Watched, name, lambda self: 5)
        assert not holds() and holds()
    Watched.a.note, Watched.a.__defaults__ = [1], (torch.ones(3),)
    assert holds()
    assert ("_FuncPtr" in repr([cell.cell_contents for cell in watch._last[0].__closure__])) is in_c
    del Watched.a
    with pytest.raises(AttributeError):
        watch.verdict(Watched)
    assert watch.of_instance(Watched, {0: 0}, None) is None


def test_a_verdict_on_what_is_no_function():
    class Watched:
        def other(self):
            return 1

        bound = Plain().message

    watch = known.Watch(("bound", "other"), {}, (), lambda: "verdict")
    holds = [watch.verdict(Watched) == "verdict" and watch._last[0](Watched) for _ in range(2)]
    assert all(holds)
    Watched.other.__code__ = (lambda self: 2).__code__
    assert not watch._last[0](Watched)


def test_a_hook_that_refuses_ctypes(tmp_path):
    """What C is asked by is looked up at import, not in a user's call."""
    script = tmp_path / "script.py"
    script.write_text("""
import sys
import torch, gnnfast
from torch_geometric.nn import GINConv

def hook(event, arguments):
    if event.startswith("ctypes.dl"):
        raise RuntimeError(event)

sys.addaudithook(hook)
GINConv(torch.nn.Linear(16, 4))(torch.randn(500, 16), torch.randint(500, (2, 70000)))
print(*gnnfast.report().calls())
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "pyg GINConv" in done.stdout, done.stderr


class Gathers(Plain):
    def _index_select(self, src, index):
        return 3 * super()._index_select(src, index)


class Lifts(Plain):
    def _lift(self, src, edge_index, dim):
        return 3 * super()._lift(src, edge_index, dim)


class Checks(Plain):
    def _check_input(self, edge_index, size):
        raise ValueError("mine")


class Sizes(Plain):
    def _set_size(self, size, dim, src):
        raise ValueError("mine too")


class Cached(Plain):
    @functools.lru_cache(None)  # noqa: B019
    def message(self, x_j):
        return x_j


class Static(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, y=x)

    def message(self, x_j):
        return x_j

    @staticmethod
    def update(inputs, y, z=1.0):
        return inputs * 2 + y * z


@pytest.mark.parametrize("kind", [Gathers, Lifts, Checks, Sizes, Cached, Static])
def test_parts_replaced_in_a_subclass(kind, edge_index, x):
    same(lambda: kind()(x, edge_index))
    assert gnnfast.report().fallbacks


def _times_3(function):
    def other(*args, **kwargs):
        out = function(*args, **kwargs)
        return 3 * out if isinstance(out, torch.Tensor) and out.is_floating_point() else out

    return other


REPLACED = {
    "MessagePassing.aggregate": (MessagePassing, "aggregate"),
    "MessagePassing._index_select": (MessagePassing, "_index_select"),
    "MessagePassing._index_select_safe": (MessagePassing, "_index_select_safe"),
    "MessagePassing.update": (MessagePassing, "update"),
    "SumAggregation.forward": (aggr.SumAggregation, "forward"),
    "Aggregation.reduce": (aggr.Aggregation, "reduce"),
    "Aggregation.__call__": (aggr.Aggregation, "__call__"),
    "scatter by name": (aggr.base, "scatter"),
    "torch.Tensor.scatter_add_": (torch.Tensor, "scatter_add_"),
    "Plain.collect": (Plain, "collect"),
}


@pytest.mark.parametrize("how", ["function", "code", "wrapped"])
@pytest.mark.parametrize("where", REPLACED)
def test_parts_replaced_by_somebody(where, how, edge_index, x, monkeypatch):
    owner, name = REPLACED[where]
    layer = Plain()
    for _ in range(2):
        same(lambda: layer(x, edge_index))
    gnnfast.clear_report()
    old = getattr(owner, name)
    if how == "function":
        monkeypatch.setattr(owner, name, _times_3(old))
    elif how == "wrapped":
        import wrapt

        monkeypatch.setattr(owner, name, wrapt.FunctionWrapper(old, lambda f, instance, args, kwargs: _times_3(f)(*args, **kwargs)))
    elif hasattr(old, "__code__") and old.__code__.co_freevars == ():
        copied = type(old)(old.__code__, old.__globals__, old.__name__, old.__defaults__)
        copied.__kwdefaults__ = old.__kwdefaults__
        old.__globals__["_gnnfast_test_old"], old.__globals__["_gnnfast_test_times_3"] = copied, _times_3
        replacement = eval("lambda *a, **k: _gnnfast_test_times_3(_gnnfast_test_old)(*a, **k)").__code__
        code = code_of(old)
        old.__code__ = replacement
    else:
        pytest.skip("no function of Python's, or one with a closure")
    try:
        same(lambda: layer(x, edge_index))
        found = gnnfast.report()  # if any, PyG's own functions run between gathers and reductions of gnnfast
        assert found.fallbacks or found.kernels
        assert not found.kernels or any(kernel.startswith("gathers") for _, kernel, _ in found.kernels)
    finally:
        if how == "code":
            old.__code__ = code
            del old.__globals__["_gnnfast_test_old"], old.__globals__["_gnnfast_test_times_3"]
    monkeypatch.undo()
    gnnfast.clear_report()
    same(lambda: layer(x, edge_index))
    assert gnnfast.report().kernels and not gnnfast.report().fallbacks


@pytest.mark.parametrize("name", ["scatter", "add_remaining_self_loops", "maybe_num_nodes"])
def test_parts_of_gcn_norm_replaced(name, edge_index, x, device, monkeypatch):
    import sys

    conv = nn.GCNConv(F, 4).to(device, torch.float64)
    same(lambda: conv(x, edge_index))
    module = sys.modules["torch_geometric.nn.conv.gcn_conv"]
    monkeypatch.setattr(module, name, _times_3(getattr(module, name)))
    same(lambda: conv(x, edge_index))


def test_parts_further_down_of_gcn_norm_replaced(monkeypatch):
    import sys

    edge_index = torch.randint(0, NODES, (2, EDGES))  # on a GPU the ids that this makes wrong end the process's CUDA context
    gcn_norm(edge_index, None, NODES)
    monkeypatch.setattr(sys.modules["torch_geometric.utils.loop"], "maybe_num_nodes", lambda index, n=None: NODES + 2)
    found, expected = both(lambda: gcn_norm(edge_index, None, NODES)[0].double())
    assert type(found) is type(expected) and (isinstance(found, tuple) or torch.equal(found, expected))


@pytest.mark.parametrize("where", ["class __call__", "class _call_impl", "instance _call_impl", "Module _call_impl"])
def test_calls_of_linear_parts_replaced(where, edge_index, x, device, monkeypatch):
    conv = nn.GCNConv(F, 4).to(device, torch.float64)
    for _ in range(3):
        same(lambda: conv(x, edge_index))
    place, name = where.split()
    owner = {"class": type(conv.lin), "instance": conv.lin, "Module": torch.nn.Module}[place]
    old = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: 1.5 * old(*args, **kwargs))
    same(lambda: conv(x, edge_index))


def test_an_aggregation_that_is_exchanged(edge_index, x):
    layer = Plain(aggr="sum")
    for other in (aggr.MeanAggregation(), aggr.MaxAggregation(), aggr.SumAggregation(), aggr.StdAggregation()):
        layer.aggr_module = other
        same(lambda: layer(x, edge_index))


def test_dispatch_modes_see_the_frameworks_ops(edge_index, x):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    layer = Plain()
    layer(x, edge_index)
    with Counts() as mode:
        mode.names = []
        layer(x, edge_index)
    assert any("scatter_add" in name for name in mode.names)


@pytest.mark.parametrize("make", [nn.GCNConv, nn.SAGEConv, nn.GraphConv, nn.TAGConv, nn.SGConv])
def test_transforms_of_torch_func(make, edge_index, x, device):
    conv, batch = make(F, 4).to(device, torch.float64), torch.stack([x, 2 * x])
    conv(x, edge_index)
    same(lambda: torch.vmap(lambda x: conv(x, edge_index))(batch))
    same(lambda: torch.func.grad(lambda x: conv(x, edge_index).square().sum())(x))
    same(lambda: torch.func.jvp(lambda x: conv(x, edge_index), (x,), (x,))[1])


def test_layers_are_still_served(edge_index, x, device):
    """The checks above let what is PyG's own through."""
    for layer in (nn.GCNConv(F, 4), nn.SAGEConv(F, 4, aggr="max"), nn.GINConv(torch.nn.Linear(F, 4)), nn.APPNP(2, 0.1)):
        report = compare(layer.to(device), x.float(), edge_index)
        assert report.kernels and not report.fallbacks


@pytest.mark.parametrize("make", [nn.SAGEConv, nn.GCNConv, nn.GraphConv, nn.GINConv])
def test_an_aggregation_of_another_class(make, edge_index, x):
    """The same module that has become another, or another that a subclass has instead."""
    layer = make(torch.nn.Linear(F, 5) if make is nn.GINConv else F, *([] if make is nn.GINConv else [5])).double().to(x.device)
    for _ in range(2):
        same(lambda: layer(x, edge_index))
    layer.aggr_module.__class__ = aggr.MaxAggregation
    for _ in range(2):
        same(lambda: layer(x, edge_index))

    class OfClass(make):
        aggr_module = property(lambda self: aggr.MinAggregation())

    layer.__class__ = OfClass
    for _ in range(2):
        same(lambda: layer(x, edge_index))
