"""What a key left at null comes to. One place gives every "null: as that other key" its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from megatron_dapo.config.schema import Config

T = TypeVar("T")


@dataclass(frozen=True)
class Derived:
    """The keys that follow others, with their final values."""

    gen_batch_size: int  # prompts
    clip_ratio_low: float
    clip_ratio_high: float
    loss_scale_factor: float
    critic_enabled: bool
    critic_path: str
    critic_mini_batch_size: int  # prompts
    critic_max_tokens_per_micro_batch: int
    reference_needed: bool
    ref_path: str
    rollout_dtype: str
    expert_tensor: int
    sequence_parallel: bool
    max_model_len: int  # tokens of the longest prompt + response
    surplus: Literal["discard", "carry"]


def _or(value: T | None, other: T) -> T:
    return other if value is None else value


def derive(config: Config) -> Derived:
    """Resolve every null that depends on nothing but the configuration."""
    actor, critic, parallel, data = config.actor, config.critic, config.parallel, config.data
    return Derived(
        gen_batch_size=_or(data.gen_batch_size, data.train_batch_size),
        clip_ratio_low=_or(actor.clip_ratio_low, actor.clip_ratio),
        clip_ratio_high=_or(actor.clip_ratio_high, actor.clip_ratio),
        loss_scale_factor=_or(actor.loss_scale_factor, float(data.max_response_length)),
        critic_enabled=_or(critic.enable, config.algorithm.adv_estimator == "gae"),
        critic_path=_or(critic.path, config.model.path),
        critic_mini_batch_size=_or(critic.ppo_mini_batch_size, actor.ppo_mini_batch_size),
        critic_max_tokens_per_micro_batch=_or(critic.max_tokens_per_micro_batch, actor.max_tokens_per_micro_batch),
        reference_needed=config.algorithm.use_kl_in_reward or actor.use_kl_loss,
        ref_path=_or(config.ref.path, config.model.path),
        rollout_dtype=_or(config.rollout.dtype, config.model.dtype),
        expert_tensor=_or(parallel.expert_tensor, parallel.tensor if parallel.expert == 1 else 1),
        sequence_parallel=_or(parallel.sequence_parallel, parallel.tensor > 1),
        max_model_len=data.max_prompt_length + data.max_response_length,
        surplus=_or(config.algorithm.filter_groups.surplus, "discard" if config.trainer.mode == "sync" else "carry"),
    )


def explain(config: Config) -> dict[str, str]:
    """For each key at null that follows another: a comment with its final value and where it comes from."""
    derived, actor, critic, parallel = config.derived, config.actor, config.critic, config.parallel
    rows = [
        ("data.gen_batch_size", config.data.gen_batch_size, derived.gen_batch_size, "data.train_batch_size"),
        ("actor.clip_ratio_low", actor.clip_ratio_low, derived.clip_ratio_low, "actor.clip_ratio"),
        ("actor.clip_ratio_high", actor.clip_ratio_high, derived.clip_ratio_high, "actor.clip_ratio"),
        ("actor.loss_scale_factor", actor.loss_scale_factor, derived.loss_scale_factor, "data.max_response_length"),
        ("critic.enable", critic.enable, str(derived.critic_enabled).lower(), "algorithm.adv_estimator"),
        ("critic.path", critic.path, derived.critic_path, "model.path"),
        ("critic.ppo_mini_batch_size", critic.ppo_mini_batch_size, derived.critic_mini_batch_size, "the actor's"),
        (
            "critic.max_tokens_per_micro_batch",
            critic.max_tokens_per_micro_batch,
            derived.critic_max_tokens_per_micro_batch,
            "the actor's",
        ),
        (
            "algorithm.filter_groups.surplus",
            config.algorithm.filter_groups.surplus,
            derived.surplus,
            "trainer.mode",
        ),
        ("ref.path", config.ref.path, derived.ref_path, "model.path"),
        ("rollout.dtype", config.rollout.dtype, derived.rollout_dtype, "model.dtype"),
        ("parallel.expert_tensor", parallel.expert_tensor, derived.expert_tensor, "parallel.tensor and .expert"),
        (
            "parallel.sequence_parallel",
            parallel.sequence_parallel,
            str(derived.sequence_parallel).lower(),
            "parallel.tensor",
        ),
    ]
    return {key: f"= {final or '(not set)'}, from {source}" for key, given, final, source in rows if given is None}
