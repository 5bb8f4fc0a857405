"""Worker methods for the two ways of `resharding.py` that are not ours; vLLM looks them up by name in every worker."""

import os
from math import prod

import torch
from vllm.config import set_current_vllm_config

from megatron_dapo.rollout.routing import RolloutWorkerExtension


class Baseline(RolloutWorkerExtension):
    """vLLM's own reload, fed from shared memory or from disk."""

    def baseline_full(self, path: str, entries: list[tuple[str, list[int], int]]) -> None:
        """Every tensor whole; `entries` are name, shape and first element in the file at `path`."""
        memory = torch.from_file(path, shared=True, size=os.path.getsize(path) // 4, dtype=torch.float32)
        weights = ((name, memory[at : at + prod(shape)].view(shape)) for name, shape, at in entries)
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=weights)

    def baseline_disk(self, directory: str) -> None:
        """From the safetensors files of a directory."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_path=directory)
