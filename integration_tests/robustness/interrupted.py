"""The process that :func:`robustness.runs.interrupts` interrupts: ``python -m robustness.interrupted DEVICE SEED COUNT``."""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
from typing import Any

import torch

import gnnfast
from gnnfast.patching import is_dispatched
from robustness.runs import Model, made, train


class Interrupts:
    """Raises KeyboardInterrupt as Python's own handler does, but never while the script checks what the last one did."""

    armed = False

    def __call__(self, *_: Any) -> None:
        if self.armed:
            raise KeyboardInterrupt


def main(device: str, seed: int, count: int) -> None:
    from torch_geometric.nn import GCNConv

    faulthandler.register(signal.SIGUSR1)
    random.seed(seed)
    x, edge_index, _ = made(300, 3000, device)
    model = Model().to(device).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gnnfast.disable()
    expected = model(x, edge_index).detach()
    gnnfast.enable()
    interrupts = Interrupts()
    signal.signal(signal.SIGINT, interrupts)
    print("ready", flush=True)
    for _ in range(count):
        torch.set_grad_enabled(True)  # torch's own contexts leave it off where they are interrupted as they end
        try:
            interrupts.armed = True
            while True:
                train(model, optimizer, made(300, 3000, device, random.randrange(50)))
                gnnfast.disable()
                gnnfast.enable()
        except KeyboardInterrupt:
            interrupts.armed = False
            gnnfast.enable()
            assert torch.allclose(model(x, edge_index), expected, atol=1e-4), "other numbers after an interrupt"
            print("met", flush=True)
    gnnfast.disable()
    assert torch.allclose(model(x, edge_index), expected, atol=1e-4)
    assert not is_dispatched(GCNConv.forward), "a patch was left"
    gnnfast.enable()
    assert is_dispatched(GCNConv.forward), gnnfast.report().as_dict()["patches"]
    print("fine", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
