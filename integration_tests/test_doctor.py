"""``gnnfast doctor``: what is wrong, and the line to type."""

from __future__ import annotations

import struct

import pytest
import torch

from gnnfast import doctor, hardware
from gnnfast.config import Settings, without_effect
from gnnfast.hardware import Architectures

CUBIN, PTX = 2, 1


def _fat_binary(*entries: tuple[int, int]) -> bytes:
    """Entries of a kind for an architecture, with some code each, as nvcc lays them out."""
    made = b"".join(struct.pack("<HHIQ12xI", kind, 0x101, 64, 24, arch).ljust(64, b"\0") + b"\x7f" * 24 for kind, arch in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(made)) + made


def test_architectures_are_read_from_a_library(tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"ELF" + _fat_binary((CUBIN, 80), (CUBIN, 90)) + b"between" + _fat_binary((CUBIN, 80), (PTX, 120)) + b"end")
    found = hardware.architectures(library)
    assert found == Architectures((80, 90), (120,)) and str(found) == "sm_80, sm_90, PTX 120"
    library.write_bytes(b"no kernels" + _fat_binary((CUBIN, 80))[:40])
    assert hardware.architectures(library) == Architectures((), ())


@pytest.mark.parametrize(
    ("capability", "served"),
    [((7, 5), False), ((8, 0), True), ((8, 6), True), ((9, 0), True), ((10, 0), False), ((12, 0), True), ((13, 0), True)],
)
def test_kernels_serve_their_major_version_and_ptx_what_is_later(capability, served):
    compiled = Architectures((80, 90), (120,))
    assert compiled.serve(capability) == served
    found = doctor.device_finding("CUDA device 0", "a GPU", capability, compiled, "580.1")
    assert (found.state == "ok") == served
    assert served or (
        found.fix.startswith(f"CUDAARCHS={capability[0]}{capability[1]} pip install") and "sm_80, sm_90" in found.note
    )


def test_an_extension_for_another_torch():
    assert doctor.extension_finding("torch-sparse", "0.6.18", True).state == "ok"
    found = doctor.extension_finding("torch-sparse", "0.6.18", False)
    assert found.state == "problem" and f"torch-{torch.__version__.split('+')[0]}" in found.fix and "torch-sparse" in found.fix


@pytest.mark.parametrize(
    ("version", "cuda", "conflict"),
    [
        ("2.1.0", "13.0", False),
        ("2.1.0", None, False),
        ("2.1.0+cu121", "12.6", False),
        ("2.1.0+cu121", "13.0", True),
        ("2.1.0+cu118", None, True),
    ],
)
def test_a_dgl_for_another_cuda(version, cuda, conflict):
    note, fix = doctor.dgl_conflict(version, cuda)
    assert bool(note) == bool(fix) == conflict


@pytest.mark.parametrize(
    ("asked", "machine", "expected"),
    [
        (dict(), dict(cuda=False), []),
        (dict(schedule="degree", autotune=True), dict(cuda=True), []),
        (dict(schedule="degree", autotune=True, degree_threshold=4.0), dict(cuda=False), ["GNNFAST_SCHEDULE", "GNNFAST_AUTOTUNE", "GNNFAST_DEGREE_THRESHOLD"]),
        (dict(sample_width=8), dict(), ["GNNFAST_SAMPLE_WIDTH"]),
        (dict(sample_rescale=False), dict(), ["GNNFAST_SAMPLE_RESCALE"]),
        (dict(sample_rescale=False, sample="random", sample_width=8), dict(), []),
        (dict(kernel="gar", degree_threshold=4.0), dict(), ["GNNFAST_DEGREE_THRESHOLD"]),
        (dict(backends=("dgl",)), dict(installed=("pyg",)), ["GNNFAST_BACKENDS"]),
        (dict(dgl_bridge=False), dict(installed=("pyg",)), ["GNNFAST_DGL_BRIDGE"]),
        (dict(enabled=False, kernel="gar", sample_width=3), dict(), ["GNNFAST_KERNEL", "GNNFAST_SAMPLE_WIDTH"]),
    ],
)  # fmt: skip
def test_settings_without_effect(asked, machine, expected):
    assert [text.split()[0].split("=")[0] for text in without_effect(Settings(**asked), **machine)] == expected


def test_every_problem_has_a_line_to_type(monkeypatch):
    monkeypatch.setenv("GNNFAST_SAMPEL", "random")
    found = doctor.findings()
    assert {"python", "torch", "CPU kernels", "torch_geometric", "GNNFAST_SAMPEL"} <= {finding.what for finding in found}
    assert all(finding.fix for finding in found if finding.state == "problem")
    (unknown,) = (finding for finding in found if finding.what == "GNNFAST_SAMPEL")
    assert unknown.fix == "export GNNFAST_SAMPLE=random; unset GNNFAST_SAMPEL"
