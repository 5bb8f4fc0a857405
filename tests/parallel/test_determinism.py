"""Asked for, determinism reaches torch and the libraries that read the environment."""

import os

import torch
from torch.utils import deterministic

from megatron_dapo.parallel.determinism import be_deterministic


def test_torch_and_the_environment_are_told_and_what_a_user_set_stays(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    filled = deterministic.fill_uninitialized_memory
    try:
        be_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Tree")
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = filled
        os.environ.pop("NVTE_ALLOW_NONDETERMINISTIC_ALGO", None)
