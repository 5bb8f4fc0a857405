"""The random state of a rank beside its checkpoint: taken up again in the same layout, seeded anew in another."""

import random
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_dapo.parallel.capabilities import capabilities
from megatron_dapo.parallel.topology import Topology


def save_random_state(directory: Path, topology: Topology, rank: int) -> None:
    """Writes one small file: Python's, NumPy's, torch's and the device's generators and Megatron's tracker of them."""
    state: dict[str, Any] = {
        "topology": asdict(topology),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if capabilities().cuda:
        state["cuda"] = torch.cuda.get_rng_state()  # untested on GPU
    torch.save(state, _file(directory, rank))


def load_random_state(directory: Path, topology: Topology, rank: int) -> bool:
    """Whether the state was taken up. In another layout a rank has no counterpart: it keeps its seed and warns."""
    file = _file(directory, rank)
    state = torch.load(file, weights_only=False) if file.is_file() else None
    if state is None or state["topology"] != asdict(topology):
        if rank == 0:
            warnings.warn(f"{directory} is of another layout: random generators start from trainer.seed", stacklevel=2)
        return False
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if capabilities().cuda:
        torch.cuda.set_rng_state(state["cuda"])  # untested on GPU
    return True


def _file(directory: Path, rank: int) -> Path:
    return directory / f"random_state_{rank}.pt"
