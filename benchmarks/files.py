"""A user's own graph from a file."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ACCEPTED = """\
.npz (scipy.sparse, or arrays edge_index and num_nodes), .pt (a [2, E] tensor, a PyG Data, or a dict with edge_index), \
.npy ([2, E]), .csv, .tsv or .txt (a 'source destination' pair a line; also .gz), .mtx (Matrix Market; also .gz)"""


def load(path: str | Path) -> tuple[Tensor, int]:
    """Reads a graph. In matrices, the entry (i, j) is an edge from j to i; values are ignored.

    Returns:
        ``edge_index [2, E]``, int64, row 0 sources, row 1 destinations, and the number of nodes.

    Raises:
        ValueError: the file is not there, or not one of the accepted kinds, or holds no graph; the message says what is accepted.
    """
    path = Path(path)
    suffix = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:]).lower()
    if suffix not in READERS:
        raise ValueError(f"{path}: a graph cannot be read from {suffix or 'a file without suffix'!r}; accepted are {ACCEPTED}")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        edge_index, nodes = READERS[suffix](path)
    except ImportError as error:
        raise ValueError(f"{path}: reading {suffix} needs {error.name}; pip install {error.name}") from error
    except Exception as error:
        raise ValueError(f"{path}: {error}; accepted are {ACCEPTED}") from error
    return _checked(path, edge_index, nodes)


def _checked(path: Path, edge_index: Any, nodes: Any) -> tuple[Tensor, int]:
    edge_index = torch.as_tensor(edge_index)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.shape[1] == 0:
        hint = "; transpose it" if edge_index.dim() == 2 and edge_index.shape[1] == 2 else ""
        raise ValueError(f"{path}: edge_index must have shape [2, E] with E > 0, got {list(edge_index.shape)}{hint}")
    if edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype == torch.bool:
        raise ValueError(f"{path}: edge_index must hold integers, got {edge_index.dtype}")
    edge_index = edge_index.long()
    low, high = int(edge_index.min()), int(edge_index.max())
    nodes = high + 1 if nodes is None else int(nodes)
    if low < 0 or high >= nodes:
        raise ValueError(f"{path}: node ids must be in [0, {nodes}), got {low} to {high}")
    return edge_index, nodes


def _npz(path: Path) -> tuple[Any, Any]:
    with np.load(path) as arrays:
        if "edge_index" in arrays:
            return arrays["edge_index"], arrays.get("num_nodes")
        if "format" not in arrays:
            raise ValueError(f"the arrays are {', '.join(arrays.files)}, neither edge_index nor a scipy.sparse matrix")
    import scipy.sparse

    return _matrix(scipy.sparse.load_npz(path))


def _mtx(path: Path) -> tuple[Any, Any]:
    import scipy.io
    import scipy.sparse

    return _matrix(scipy.sparse.coo_array(scipy.io.mmread(path)))


def _matrix(matrix: Any) -> tuple[Any, Any]:
    coo = matrix.tocoo()
    return np.stack([coo.col, coo.row]).astype(np.int64), max(coo.shape)


def _npy(path: Path) -> tuple[Any, Any]:
    return np.load(path), None


def _pt(path: Path) -> tuple[Any, Any]:
    try:
        from torch_geometric.data.data import Data, DataEdgeAttr, DataTensorAttr
        from torch_geometric.data.storage import GlobalStorage

        known = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]
    except ImportError:
        known = []
    try:
        with torch.serialization.safe_globals(known):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError("it holds other objects than tensors, dicts and a PyG Data, which loading would run code for") from error
    if isinstance(content, Tensor):
        return content, None
    found = content if isinstance(content, dict) else getattr(content, "to_dict", dict)()
    if "edge_index" not in found:
        raise ValueError(f"a {type(content).__name__} without edge_index")
    nodes = found.get("num_nodes", getattr(content, "num_nodes", None))
    return found["edge_index"], nodes


def _edge_list(path: Path) -> tuple[Any, Any]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
        first = next((line for line in lines if line.strip() and line[0] not in "#%"), "")
    comma = "," if "," in first else None
    pairs = np.loadtxt(path, np.int64, comments=("#", "%"), delimiter=comma, usecols=(0, 1), ndmin=2)
    return pairs.T.copy(), None


READERS: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    ".npz": _npz,
    ".npy": _npy,
    ".pt": _pt,
    **dict.fromkeys((".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz"), _edge_list),
    **dict.fromkeys((".mtx", ".mtx.gz"), _mtx),
}
