"""Models that are copied, taken apart by tools, or switched within training, with gnnfast and without."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from comparison import both, same
from graphs import relative_error
from torch.nn.functional import cross_entropy

import gnnfast

pytest.importorskip("torch_geometric", reason="PyG is not installed")
from torch_geometric import nn
from workflows import MODELS, gradients, graph, state


def outcome(call):
    """What a call gives, or the type of its error: some of torch's tools do not take PyG's models."""
    try:
        return call()
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
@pytest.mark.parametrize("tool", ["export", "script", "trace", "fx", "fx of PyG"])
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT"])
def test_tools_that_take_models_apart(name, tool, device):
    """What a tool makes of a model with gnnfast, it makes without; that runs with gnnfast and without."""
    data, model = graph(device), MODELS[name]().to(device, torch.float64)
    example = (data.x, data.edge_index)
    make = {
        "export": lambda: torch.export.export(model, example).module(),
        "script": lambda: torch.jit.script(model),
        "trace": lambda: torch.jit.trace(model, example),
        "fx": lambda: torch.fx.symbolic_trace(model),
        "fx of PyG": lambda: nn.fx.symbolic_trace(model),
    }[tool]
    on, off, _ = both(lambda: outcome(make))
    if isinstance(off, type):
        assert on is off
        return
    if isinstance(on, torch.fx.GraphModule):
        assert not any("gnnfast" in str(node.target) for node in on.graph.nodes)
    for made in (on, off):
        for _ in range(3):
            same(lambda made=made: [made(*example).detach()])
    assert relative_error(on(*example), model(*example)) < 1e-9


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": through_a_file,
    "state_dict": lambda model: None,
}


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MODELS)
def test_copies(name, how, on, device):
    """A model that has run with gnnfast is copied, and runs without, and the other way round."""
    data, model = graph(device), MODELS[name]().to(device, torch.float64)

    def step(model):
        return gradients(model(data.x, data.edge_index), model)

    try:
        (gnnfast.enable if on else gnnfast.disable)()
        for _ in range(3):
            expected = step(model)
        assert b"gnnfast" not in pickle.dumps(model)  # it is loaded where there is none
        other = COPIES[how](model)
        if how == "state_dict":
            other = MODELS[name]().to(device, torch.float64)
            other.load_state_dict(model.state_dict())
        (gnnfast.disable if on else gnnfast.enable)()
        for a, b in zip(step(other), expected, strict=True):
            assert relative_error(a, b) < 1e-9
    finally:
        gnnfast.enable()


@pytest.mark.parametrize("name", MODELS)
def test_switched_within_training(name, device):
    """Each step has gnnfast or not, in turn: forward passes with it have backward passes without, too."""
    data, states = graph(device), []
    for switched in (True, False):
        try:
            gnnfast.disable()
            torch.manual_seed(0)
            model = MODELS[name]().to(device, torch.float64)  # built without
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(6):
                (gnnfast.enable if switched and step % 3 < 2 else gnnfast.disable)()
                optimizer.zero_grad()
                loss = cross_entropy(model(data.x, data.edge_index), data.y)
                if switched and step % 2:
                    gnnfast.disable()
                loss.backward()
                optimizer.step()
            states.append([loss.detach(), *state(model)])
        finally:
            gnnfast.enable()
    for a, b in zip(*states, strict=True):
        assert relative_error(a, b) < 1e-9
