"""What a library was compiled for, and whether this machine has it."""

from __future__ import annotations

import functools
import os
import platform
import struct
from pathlib import Path
from typing import NamedTuple

# Of the fat binaries in an ELF file: a header (magic, version, its size, that of what follows), then entries, each with a header
# (kind, version, its size, that of what follows, ..., architecture).
_MAGIC, _HEADER, _ENTRY, _ARCHITECTURE = struct.pack("<I", 0xBA55ED50), "<IHHQ", "<HHIQ", 28
_PTX, _CUBIN = 1, 2


class Architectures(NamedTuple):
    """Compute capabilities times 10: of machine code, which runs from there to the end of the major version, and of PTX, which the
    driver compiles for any later GPU."""

    cubin: tuple[int, ...]
    ptx: tuple[int, ...]

    def serve(self, capability: tuple[int, int]) -> bool:
        """Whether kernels run on a GPU."""
        own = 10 * capability[0] + capability[1]
        return any(own // 10 == a // 10 and a <= own for a in self.cubin) or any(a <= own for a in self.ptx)

    def __str__(self) -> str:
        return ", ".join([*(f"sm_{a}" for a in self.cubin), *(f"PTX {a}" for a in self.ptx)]) or "unknown architectures"


def architectures(library: Path) -> Architectures:
    """What a CUDA library was compiled for; nothing where that cannot be read."""
    data, found = library.read_bytes(), set[tuple[int, int]]()
    at = data.find(_MAGIC)
    while at >= 0:
        _, version, size, rest = struct.unpack_from(_HEADER, data, at)
        position, end = at + size, at + size + rest
        while version == 1 and position + _ARCHITECTURE + 4 <= min(end, len(data)):
            kind, _, header, length = struct.unpack_from(_ENTRY, data, position)
            if kind not in (_PTX, _CUBIN) or header < _ARCHITECTURE + 4:
                break
            found.add((kind, struct.unpack_from("<I", data, position + _ARCHITECTURE)[0]))
            position += header + length
        at = data.find(_MAGIC, at + 4)
    return Architectures(*(tuple(sorted(a for kind, a in found if kind == wanted)) for wanted in (_CUBIN, _PTX)))


H200_BANDWIDTH = 4.8e12  # bytes a second


@functools.cache
def relative_bandwidth() -> float:
    """The memory bandwidth of the first GPU, as its clock and bus say, over that of an H200; 1 where they say nothing."""
    import torch

    if not torch.cuda.is_available():
        return 1.0
    properties = torch.cuda.get_device_properties(0)
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # kHz, twice a cycle; bits
    return float(2e3 * clock * width / 8 / H200_BANDWIDTH) or 1.0


def instruction_set() -> str:
    """Which of the CPU kernels run here: the rule of ``plugin_src/common/isa.h``."""
    wish, flags = os.environ.get("GNNFAST_ISA"), _cpu_flags()
    avx2 = {"avx2", "fma", "f16c"} <= flags
    if wish == "baseline" or not avx2:
        return "plain"
    return "AVX-512" if wish != "avx2" and {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags else "AVX2"


def _cpu_flags() -> set[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return set()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def nvidia_driver() -> str:
    """The version of the loaded NVIDIA driver; empty if there is none."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "of unknown version")
