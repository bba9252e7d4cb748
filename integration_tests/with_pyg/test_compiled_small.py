"""Small graphs under ``torch.compile``, which are left to the compiler where kernels gain nothing."""

from __future__ import annotations

import pytest
import torch
from compiling import F, expected, fresh  # noqa: F401
from graphs import relative_error

import gnnfast
from gnnfast import _native
from gnnfast.dispatch import select

pytest.importorskip("torch_geometric", reason="PyG is not installed")
if not _native.cpu.loaded:
    pytest.skip(_native.cpu.reason, allow_module_level=True)
from compiled_layers import LAYERS

from gnnfast.pyg.compiled import questions

LEFT = ("SAGEConv", "SAGEConv max", "GraphConv", "GINConv", "GCNConv no loops", "GCNConv not normalised", "TransformerConv")
LEFT += ("GATConv mean of heads", "SimpleConv", "GCNConv", "PNAConv")


@pytest.mark.parametrize("name", [*LEFT, "GATConv"])
def test_what_is_small_is_the_compilers(name, device, monkeypatch):
    """As when it was traced: other sizes compile nothing again. Self loops of attention, for which PyG's own waits, are always served."""
    bound = select.Small(2000 * F * 4, 2000 * F * 4)
    monkeypatch.setattr(select, "SMALL", select.SMALL | dict.fromkeys(("compiled", "compiled cpu", "compiled sums cpu"), bound))
    monkeypatch.setattr(questions, "ATOMICS_TIMES", 1)
    monkeypatch.setattr(select, "relative_bandwidth", lambda: 1.0)  # of which the bound is
    layer, x = LAYERS[name]().to(device), torch.randn(30, F, device=device)
    for sizes in ((200, 100, 20_000, 30_000), (20_000, 30_000, 200, 100)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        call = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for edges in sizes:
            edge_index = torch.randint(0, 30, (2, edges), device=device)
            gnnfast.clear_report()
            found = call(x, edge_index)
            served = {kernel for _, kernel, _ in gnnfast.report().kernels} - {"PyG's own"}
            assert bool(served) == (sizes[0] > 2000 or name not in LEFT) and not gnnfast.report().fallbacks
            gnnfast.disable()
            assert relative_error(found, layer(x, edge_index)) < 1e-5
            gnnfast.enable()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["SAGEConv", "GINConv", "SAGEConv max", "TransformerConv"])
def test_small(name, training, device, small):
    """On a CPU the compiler's own code is slower than kernels at every size, but for what it scatters, where that takes no gradient of
    an extremum."""
    layer, x = LAYERS[name]().to(device), torch.randn(30, F, device=device)
    edge_index = torch.randint(0, 30, (2, 200), device=device)
    with torch.set_grad_enabled(training):
        expected = layer(x, edge_index)
        gnnfast.clear_report()
        assert relative_error(torch.compile(layer, backend="aot_eager")(x, edge_index), expected) < 1e-5
    kernels = {kernel for _, kernel, _ in gnnfast.report().kernels}
    scatters = name in ("SAGEConv", "GINConv") or (name == "SAGEConv max" and not training)
    assert (kernels == {"PyG's own"}) == (device.type == "cuda" or scatters)
