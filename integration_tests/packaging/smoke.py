"""Smoke test of an installed wheel: no Python in the binaries, both libraries inside where they were built, and a layer that runs
on gnnfast's kernel with PyG's numbers. ``python smoke.py WHEEL``, outside the source tree."""

import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from torch_geometric.nn import GCNConv

import gnnfast

wheel = Path(sys.argv[1])
assert "-py3-none-" in wheel.name, wheel.name
names = zipfile.ZipFile(wheel).namelist()
assert {"gnnfast.pth", "_gnnfast_dgl_shim.py", "gnnfast/lib/libgnnfast_cpu.so"} <= set(names), names
assert [name for name in names if name.endswith(".pth")] == ["gnnfast.pth"] and "gnnfast/py.typed" in names, names
assert {"gnnfast/benchmarks/spmm.py", "gnnfast/benchmarks/spmm_cases.json"} <= set(names), names
assert not any(name.startswith(("gnnfast/benchmarks/results", "gnnfast/benchmarks/demo")) for name in names), names
for library in (Path(gnnfast.__path__[0]) / "lib").glob("*.so"):
    dynamic = subprocess.run(["readelf", "-d", "--dyn-syms", "-W", library], capture_output=True, text=True, check=True).stdout
    assert "libpython" not in dynamic and " Py" not in dynamic, f"{library} needs Python"
    assert "[libtorch_cpu.so]" in dynamic, f"{library} does not name libtorch_cpu as needed"
    if "cuda" in library.name:
        assert "[libtorch_cuda.so]" in dynamic and "libcudart" not in dynamic

conv, x, edge_index = GCNConv(8, 4), torch.randn(5, 8), torch.randint(0, 5, (2, 20))
found = conv(x, edge_index)
kernels = gnnfast.report().kernels
assert any(place == "pyg GCNConv" for place, _, _ in kernels), kernels
gnnfast.disable()
assert torch.allclose(found, conv(x, edge_index), atol=1e-6)
print(f"smoke test passed: {wheel.name}, libraries {[n for n in names if n.endswith('.so')]}")
