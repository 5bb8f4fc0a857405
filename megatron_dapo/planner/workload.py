"""What one step asks of the machines: sequences, tokens, optimizer steps and micro-batches, from the configuration."""

from dataclasses import dataclass
from math import ceil

from megatron_dapo.config import Config
from megatron_dapo.planner.assumptions import Assumptions


@dataclass(frozen=True)
class Workload:
    """One training step, globally."""

    prompt_tokens: float  # mean
    response_tokens: float  # mean
    longest_response: int
    generated_prompts: int
    generated_sequences: int
    trained_sequences: int
    optimizer_steps: int
    tokens_per_optimizer_step: float
    max_tokens: int  # of a micro-batch of one data-parallel rank
    fill: float

    @property
    def sequence_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def trained_tokens(self) -> float:
        return self.trained_sequences * self.sequence_tokens

    @property
    def pack_tokens(self) -> float:
        """Tokens in a mean micro-batch."""
        return max(self.fill * self.max_tokens, min(self.sequence_tokens, self.max_tokens))

    def micro_batches(self, data_parallel: int, tokens: float | None = None) -> int:
        """Micro-batches of one data-parallel rank for so many tokens (default: one optimizer step's)."""
        tokens = self.tokens_per_optimizer_step if tokens is None else tokens
        return max(1, ceil(tokens / data_parallel / self.pack_tokens))


def workload(config: Config, assume: Assumptions) -> Workload:
    """The workload of a configuration under these lengths and this share of kept groups."""
    data, filters, n = config.data, config.algorithm.filter_groups, config.rollout.n
    prompt = assume.prompt_tokens or min(256, data.max_prompt_length)
    response = assume.response_tokens or data.max_response_length / 4
    batch, prompts = config.derived.gen_batch_size, data.train_batch_size
    if filters.enable:
        prompts = batch * ceil(data.train_batch_size / max(assume.kept, 1e-3) / batch)
    sequences = data.train_batch_size * n
    steps = data.train_batch_size // config.actor.ppo_mini_batch_size * config.actor.ppo_epochs
    mini = config.actor.ppo_mini_batch_size * n * (prompt + response)
    return Workload(
        prompt_tokens=prompt,
        response_tokens=response,
        longest_response=data.max_response_length,
        generated_prompts=prompts,
        generated_sequences=prompts * n,
        trained_sequences=sequences,
        optimizer_steps=max(1, steps),
        tokens_per_optimizer_step=mini,
        max_tokens=config.actor.max_tokens_per_micro_batch,
        fill=assume.fill,
    )
