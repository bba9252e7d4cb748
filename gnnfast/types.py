"""Names that users write and kernels know by number: each is listed here once, with its code."""

from __future__ import annotations

import torch

FEATURE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)

# The codes are those of spmm_coo (plugin_src/spmm_coo/spmm_coo.h).
REDUCTIONS = {"sum": 0, "mean": 1, "max": 2, "min": 3}
LINEAR = ("sum", "mean")
EXTREMA = ("max", "min")

# Who gets the gradient of max and min (plugin_src/spmm/spmm.h). Users may ask for the first two.
TIES = {"first": 1, "even": 2, "scatter": 3}

# How edges are drawn (plugin_src/spmm_sampled/draw.h).
STRATEGIES = {"bucket": 0, "fastrand": 1, "random": 2}
