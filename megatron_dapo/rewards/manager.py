"""The reward manager: responses in, scores out."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_dapo.data.types import Prompt, Score, Trajectory
from megatron_dapo.rewards.routing import compute_score


class RewardManager:
    """Scores trajectories. First version: built-in verifiers in this process."""

    def __init__(self, config: Any, tokenizer: PreTrainedTokenizerBase, max_response_length: int) -> None:
        self.config, self.tokenizer, self.max_response_length = config, tokenizer, max_response_length
        self.counts: dict[str, int] = {"scored": 0}

    def score(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory; `prompts[i]` is the prompt of `trajectories[i]`."""
        texts = self.tokenizer.batch_decode([list(t.response_ids) for t in trajectories], skip_special_tokens=True)
        return [self._one(prompt, t, text) for prompt, t, text in zip(prompts, trajectories, texts, strict=True)]

    def close(self) -> None:
        """Nothing to release yet."""

    def _one(self, prompt: Prompt, trajectory: Trajectory, text: str) -> Score:
        result = compute_score(
            prompt.data_source, text, prompt.ground_truth, prompt.extra_info, strict=self.config.strict
        )
        raw, reward, extra = float(result["score"]), float(result["score"]), dict(result)
        buffer = self.config.overlong_buffer
        if buffer.enable:
            exceed = len(trajectory.response_ids) - (self.max_response_length - buffer.len)
            penalty = max(min(-exceed / buffer.len * buffer.penalty_factor, 0.0), -buffer.penalty_factor)
            reward += penalty
            if buffer.log:
                extra |= {"overlong_reward": penalty, "overlong": penalty < 0}
        self.counts["scored"] += 1
        return Score(reward=reward, raw=raw, acc=float(result["acc"]), extra=extra)
