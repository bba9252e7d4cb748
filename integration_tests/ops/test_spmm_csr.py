"""Matrices of torch's CSR multiplied as they are, on CUDA alone."""

from __future__ import annotations

import pytest
import torch
from graphs import GRAPHS, TOLERANCE, many_rows, reference_spmm, relative_error

from gnnfast.graph import ids as graph_ids

if not torch.cuda.is_available():
    pytest.skip("this machine has no CUDA device", allow_module_level=True)

spmm_csr = torch.ops.gnnfast.spmm_csr.default
on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


def _long_rows(rows):
    """Of several lengths around what a group of lanes, a team of them and a block take, among others without any."""
    lengths = torch.tensor([0, 1, 127, 128, 129, 300, 5, 3000, 257] * 4 + [0] * (rows - 36))
    dst = torch.arange(rows).repeat_interleave(lengths)
    return torch.stack([torch.randint(0, 50, (dst.numel(),), generator=torch.Generator().manual_seed(0)), dst]), 50, rows


SHAPES = GRAPHS | {f"long rows of {rows}": lambda rows=rows: _long_rows(rows) for rows in (36, 400, 9000)}
SHAPES |= {"no rows": lambda: (torch.empty(2, 0, dtype=torch.int64), 4, 0)}
SHAPES |= {"no columns": lambda: (torch.empty(2, 0, dtype=torch.int64), 0, 5), "many rows": many_rows}


def made(name, device, index=torch.int64, dtype=torch.float64):
    """``rowptr``, ``col`` and ``value``, and the edges in their order."""
    edge_index, num_src, num_dst = SHAPES[name]()
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), edge_index[1].bincount(minlength=num_dst).cumsum(0)])
    value = torch.randn(edge_index.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device, dtype)
    return rowptr.to(device, index), edge_index[0].to(device, index), value, edge_index.to(device), num_src, num_dst


@on_cuda
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SHAPES)
def test_products(name, dtype, index, mean, device):
    rowptr, col, value, edges, num_src, num_dst = made(name, device, index, dtype)
    for width in (0, 1, 3, 16, 64, 130, 256) if name != "many rows" else (1, 4):
        x = torch.randn(num_src, width, device=device, dtype=torch.float64).to(dtype)
        wide = torch.randn(num_src + 1, 2 * width + 1, device=device, dtype=torch.float64).to(dtype)
        for given in (x, wide[1:, :width], wide[:-1, 1 : 2 * width + 1 : 2]):
            found = spmm_csr(rowptr, col, value, given, mean)
            expected = reference_spmm(edges, num_dst, given.double().unsqueeze(1), value.double(), "mean" if mean else "sum")
            assert found.dtype is dtype and found.shape == (num_dst, width) and found.is_contiguous()
            assert relative_error(found, expected.squeeze(1)) < TOLERANCE[dtype], width
            assert torch.equal(found, spmm_csr(rowptr, col, value, given, mean))  # sums vary from run to run in no bit


@on_cuda
def test_numbers_that_are_none(device):
    """Infinite ones stay in their rows, long and short."""
    rowptr, col, value, edges, num_src, num_dst = made("long rows of 400", device)
    x = torch.randn(num_src, 5, device=device, dtype=torch.float64)
    x[3], x[11], value[::97] = float("inf"), float("nan"), 0
    expected = reference_spmm(edges, num_dst, x.unsqueeze(1), value, "sum").squeeze(1)
    assert relative_error(spmm_csr(rowptr, col, value, x, False), expected) < 1e-10


@on_cuda
def test_ids_out_of_range_are_said(device):
    graph_ids.watch(torch.zeros(1, device=device))
    x, value = torch.ones(4, 8, device=device), torch.full((6,), float("inf"), device=device)
    value[:4] = 1
    rowptr, col = torch.tensor([0, 2, 4, 6], device=device), torch.tensor([0, 3, 1, 2, 4, -1], device=device)
    out = spmm_csr(rowptr, col, value, x, False)
    with pytest.raises(IndexError, match=r"out of range \[0, 4\)"):
        torch.cuda.synchronize()
    assert out[:, 0].tolist() == [2, 2, 0]
    for pointers in ([-3, 2, 4, 4], [0, 2, 4, 1 << 40], [4, 2, 0, 2]):  # what is not there is not read
        spmm_csr(torch.tensor(pointers, device=device), col.clamp(0, 3), value, x, True)
    torch.cuda.synchronize()


@on_cuda
def test_opcheck(device):
    rowptr, col, value, _, num_src, _ = made("random", device)
    torch.library.opcheck(spmm_csr, (rowptr, col, value, torch.randn(num_src, 8, device=device, dtype=torch.float64), True))


@on_cuda
def test_what_is_refused(device):
    rowptr, col, value, _, num_src, _ = made("random", device)
    x = torch.randn(num_src, 8, device=device, dtype=torch.float64)
    given = {"rowptr": rowptr, "col": col, "value": value, "x": x}
    for name, wrong, message in (
        ("rowptr", rowptr[:0], "at least one"),
        ("col", col.int(), "col must have dtype"),
        ("col", col.cpu(), "another device"),
        ("value", value.float(), "value must have dtype"),
        ("value", value[1:], "value must have size"),
        ("x", x[0], "x must have 2 dimensions"),
    ):
        with pytest.raises(RuntimeError, match=message):
            spmm_csr(*(given | {name: wrong}).values(), False)
    with pytest.raises(RuntimeError, match="accepted are int32 and int64"):
        spmm_csr(rowptr.short(), col.short(), value, x, False)
