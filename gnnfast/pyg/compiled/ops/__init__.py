"""Ops over the user's own ``edge_index``, which a compiler cannot look into: what its code calls in place of the operations that
graphs are made and used by. Each finds the graph by the tensor, as uncompiled calls do: a model compiled once serves any graph, and
one that was seen before costs nothing.

Only tensors that users own may be known by identity: a compiler writes other values into buffers that it made, without a sign of
it. So ``edge_index`` must be an input of the compiled code, and ``constant`` says that ``weight`` is; :mod:`gnnfast.pyg.compiled`
sees to it. What ops return is new, and they stay outside of CUDA graphs, as they make graphs when first met.
"""

from gnnfast.pyg.compiled.ops.attention import ATTENTION, PAIR_ATTENTION, SOFTMAX, WITH_LOOPS
from gnnfast.pyg.compiled.ops.define import Edges
from gnnfast.pyg.compiled.ops.edges import GATE, RELU
from gnnfast.pyg.compiled.ops.reductions import EXTREMUM, REDUCTIONS, SOFTENED
from gnnfast.pyg.compiled.ops.sums import DEGREE, GCN, SDDMM, SPMM, SPMM_BACKWARD

__all__ = [
    "ATTENTION",
    "DEGREE",
    "EXTREMUM",
    "GATE",
    "GCN",
    "PAIR_ATTENTION",
    "REDUCTIONS",
    "RELU",
    "SDDMM",
    "SOFTENED",
    "SOFTMAX",
    "SPMM",
    "SPMM_BACKWARD",
    "WITH_LOOPS",
    "Edges",
]
