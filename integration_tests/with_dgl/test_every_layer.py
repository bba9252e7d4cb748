"""Every layer of ``dgl.nn.pytorch.conv``, with gnnfast, gives what DGL gives on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from graphs import relative_error

import gnnfast

dgl = pytest.importorskip("dgl")
from dgl_layers import FLOAT32, LAYERS, node_features, step, with_loops  # noqa: E402

from gnnfast.dgl import bridge  # noqa: E402


@pytest.fixture
def full_digits():
    allow = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # in which cuDNN's LSTM computes
    yield
    torch.backends.cudnn.allow_tf32 = allow


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(device, name, dtype, idtype, full_digits):
    if device.type == "cuda" and bridge.absent():
        pytest.skip(f"there is no bridge: {bridge.absent()}")
    if name in FLOAT32 and dtype is torch.float64:
        pytest.skip("DGL has it in float32 only")
    if not hasattr(dgl.nn, name.split()[0]):
        pytest.skip(f"DGL {dgl.__version__} has no {name.split()[0]}")
    make, arguments = LAYERS[name]
    host = with_loops(idtype)
    host.edata["w"] = host.edata["w"].to(dtype)
    given = [t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in arguments(host)]
    torch.manual_seed(3)
    layer, x = make().to(dtype), node_features().to(dtype)
    layer.train("lstm" in name)  # which cuDNN wants for a backward pass
    gnnfast.disable()
    try:
        expected = step(layer, host, x, given)
    finally:
        gnnfast.enable()
    g, own = host.to(device), copy.deepcopy(layer).to(device)
    given = [t.to(device) if isinstance(t, torch.Tensor) else t for t in given]
    for _ in range(3):  # new, met again, converted
        found = step(own, g, x.to(device), given)
        for a, b in zip(found, expected, strict=True):
            assert (a.device.type, a.dtype, a.shape) == (device.type, b.dtype, b.shape)
            assert relative_error(a.cpu(), b) < (1e-5 if dtype is torch.float32 else 1e-9)


def test_none_is_left_out():
    from dgl.nn.pytorch import conv

    classes = {name.split()[0] for name in LAYERS}
    # Dense layers take a matrix and no graph; those of cuGraph need that library; the last is what TWIRLSConv is made of.
    left_out = ("Dense", "CuGraph", "TWIRLSUnfoldingAndAttention")
    assert {name for name in conv.__all__ if not name.startswith(left_out)} <= classes
