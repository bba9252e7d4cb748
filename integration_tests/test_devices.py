"""Which devices the tests ran on."""

from __future__ import annotations

import pytest
import torch


def test_tests_run_on_a_gpu_too():
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device: no test ran on one")
