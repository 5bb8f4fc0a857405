"""Everything the driver of a run holds: configuration, ranks, data, reward, sampler, trackers; and its saved state."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from megatron_dapo.algorithms import DynamicSampler
from megatron_dapo.algorithms.kl import FixedKLController
from megatron_dapo.config import Config
from megatron_dapo.data.dataset import PromptDataset, PromptLoader
from megatron_dapo.metrics import Timer, Trackers
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.rewards import RewardManager
from megatron_dapo.rollout.requests import Sampling
from megatron_dapo.runtime.failure import StopRequest
from megatron_dapo.trainers.checkpoints import CheckpointStore
from megatron_dapo.trainers.dump import RolloutDump
from megatron_dapo.trainers.expert_load import ExpertLoad
from megatron_dapo.trainers.generation import Generator
from megatron_dapo.trainers.saving import TRAINER_STATE, Saver
from megatron_dapo.trainers.stages import Ranks


class Part(Protocol):
    """Something beyond the model and the driver that a checkpoint of this run must hold."""

    def save(self, directory: Path) -> None: ...
    def restore(self, directory: Path, step: int) -> None:
        """`step`: the one that comes next."""

    def close(self) -> None: ...


@dataclass
class Run:
    """The driver's side of a run. `step` is the last finished step."""

    config: Config
    arch: Architecture
    directory: Path
    ranks: Ranks
    generate: Generator
    tokenizer: PreTrainedTokenizerBase
    loader: PromptLoader
    validation: PromptDataset | None
    reward: RewardManager
    sampler: DynamicSampler
    kl: FixedKLController
    trackers: Trackers
    dump: RolloutDump
    expert_load: ExpertLoad | None  # None: a dense model, or not wanted
    store: CheckpointStore
    saver: Saver
    total_steps: int
    sampling: Sampling
    validation_sampling: Sampling
    stop: StopRequest = field(default_factory=StopRequest)
    timer: Timer = field(default_factory=Timer)
    step: int = 0
    parts: tuple[Part, ...] = ()

    @property
    def pad_id(self) -> int:
        """The token that fills rows; no loss ever counts it."""
        return self.tokenizer.pad_token_id or 0

    def state_dict(self) -> dict[str, Any]:
        """What the driver itself must remember to go on as if nothing had happened."""
        return {
            "step": self.step,
            "loader": self.loader.state_dict(),
            "sampler": self.sampler.state_dict(),
            "kl": self.kl.state_dict(),
            "expert_load": None if self.expert_load is None else self.expert_load.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.loader.load_state_dict(state["loader"])
        self.sampler.load_state_dict(state["sampler"])
        self.kl.load_state_dict(state["kl"])
        if self.expert_load is not None and state.get("expert_load"):
            self.expert_load.load_state_dict(state["expert_load"])

    def save(self) -> None:
        """A checkpoint of this step; with `trainer.async_save` it is complete some steps later."""
        if self.expert_load is not None:
            self.expert_load.collect(self.ranks.group)
        self.saver.save(self.step, self.state_dict(), [part.save for part in self.parts])

    def restore(self, directory: Path) -> None:
        """Continues from a checkpoint of any layout."""
        self.ranks.group.call("load", directory=directory)
        self.load_state_dict(torch.load(directory / TRAINER_STATE, weights_only=False))
        for part in self.parts:
            part.restore(directory, self.step + 1)

    def close(self) -> None:
        """Waits for a checkpoint under way, then ends the serving ranks, the verifiers and the trackers."""
        self.saver.finish()
        for part in self.parts:
            part.close()
        self.ranks.group.close()
        self.reward.close()
        self.trackers.close()
        if self.expert_load is not None:
            self.expert_load.close()
