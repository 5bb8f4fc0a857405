"""The same seed gives the same run: deterministic kernels wherever torch, NCCL and Transformer Engine have a choice."""

import os

import torch
from torch.utils import deterministic

# Read by libraries when they start, so this must come before the first use of a device. # untested on GPU
_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def be_deterministic() -> None:
    """For this process and what it starts; a kernel without a deterministic form then raises instead of drifting."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time and mends nothing here
