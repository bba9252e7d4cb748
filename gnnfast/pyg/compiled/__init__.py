"""What ``torch.compile`` traces in place of PyG's functions: short functions that lead to opaque ops over the user's ``edge_index``
(:mod:`gnnfast.pyg.compiled.ops`), or return ``NotImplemented``, so that PyG's own body is compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from gnnfast.pyg import attention as eager
from gnnfast.pyg.compiled.attention import make_agnn_conv, make_attention, run_gat, run_gatv2, run_transformer
from gnnfast.pyg.compiled.layers import make_layer
from gnnfast.pyg.compiled.messages import softmax
from gnnfast.pyg.compiled.norm import make_apart, make_gcn_norm, make_stopping
from gnnfast.pyg.compiled.pna import make_pna_conv
from gnnfast.pyg.compiled.propagate import generic
from gnnfast.pyg.layers import GCN, GRAPH, SAGE, SG

TRACED: dict[str, Callable[[FunctionType], Callable[..., Any]]] = {
    "MessagePassing.propagate": lambda _: generic,
    "gcn_norm": make_gcn_norm,
    "softmax": lambda _: softmax,
    "add_self_loops": make_stopping,
    "remove_self_loops": make_stopping,
    "ChebConv.__norm__": make_stopping,
    "MFConv.forward": make_stopping,
    "RGATConv.forward": make_apart,
    "RGCNConv.forward": make_apart,
    "FastRGCNConv.forward": make_apart,
    "GCNConv.forward": make_layer(GCN),
    "SGConv.forward": make_layer(SG),
    "SAGEConv.forward": make_layer(SAGE),
    "GraphConv.forward": make_layer(GRAPH),
    "GATConv.forward": make_attention(eager.GAT, run_gat),
    "GATv2Conv.forward": make_attention(eager.GATV2, run_gatv2),
    "AGNNConv.forward": make_agnn_conv,
    "PNAConv.forward": make_pna_conv,
    "TransformerConv.forward": make_attention(eager.TRANSFORMER, run_transformer),
}
