"""The ops ``torch.ops.gnnfast.*``: per family one file with wrappers, fake kernels and autograd formulas. Importing it needs the
native library; :mod:`gnnfast._native` says whether that is there."""

from gnnfast.ops import convert, edge_softmax, gcn_norm, sddmm, spmm, spmm_coo, spmm_csr, spmm_sampled, spmm_sparse_features

__all__ = ["convert", "edge_softmax", "gcn_norm", "sddmm", "spmm", "spmm_coo", "spmm_csr", "spmm_sampled", "spmm_sparse_features"]
