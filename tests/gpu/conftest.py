"""What runs on a GPU only: `make test-gpu`. SEARCH_R1_GPU_TESTS=cpu runs the lines of the trainer's tests on a CPU."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> str:
    wanted = os.environ.get("SEARCH_R1_GPU_TESTS", "cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return wanted


@pytest.fixture
def gpu() -> str:
    """For what means nothing on a CPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"
