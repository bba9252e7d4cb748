"""A kernel that does nothing but read from the L2 cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, TILES, PROGRAMS = 1024, 64, 16384


@triton.jit
def _read(table, out, tiles, TILE: tl.constexpr, TILES: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros([TILE], dtype=tl.float32)
    for i in range(TILES):
        tile = (program * 7919 + i * 104729) % tiles
        total += tl.load(table + tile * TILE + tl.arange(0, TILE))
    tl.store(out + program, tl.sum(total))


def read_tiles(table: Tensor) -> tuple[Callable[[], object], int]:
    """A call that reads random tiles of ``table`` (float32), and the bytes it reads."""
    out = torch.empty(PROGRAMS, device=table.device)
    tiles = table.numel() // TILE
    return lambda: _read[(PROGRAMS,)](table, out, tiles, TILE, TILES), 4 * TILE * TILES * PROGRAMS
