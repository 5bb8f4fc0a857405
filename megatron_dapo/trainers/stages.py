"""The stages between samples and updates: each reads fields of the batch and returns only what it adds (see `union`)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from tensordict import TensorDict
from torch import Tensor

from megatron_dapo.algorithms import (
    AdvantageConfig,
    advantage,
    kl_in_reward,
)
from megatron_dapo.algorithms.kl import FixedKLController
from megatron_dapo.config import Config
from megatron_dapo.engine.engine import StepResult
from megatron_dapo.engine.losses import Normalizer
from megatron_dapo.metrics import Last, Max, Mean, Metrics, Sum, merge, reduce
from megatron_dapo.resharding.transport_shm import weight_update
from megatron_dapo.runtime.group import WorkerGroup
from megatron_dapo.trainers.dispatch import Dispatcher
from megatron_dapo.trainers.worker import ACTOR, CRITIC, REFERENCE, MiniBatch

ACTOR_FIELDS = ("response_mask", "advantages", "old_log_probs", "rollout_is_weights", "ref_log_prob")
CRITIC_FIELDS = ("response_mask", "returns", "values")


@dataclass(frozen=True)
class MiniBatchRows:
    """The rows of one optimizer step and its global denominators."""

    rows: Int[Tensor, "b"]
    normalizer: Normalizer


@dataclass(frozen=True)
class Ranks:
    """The ranks as the stages see them: whom to call, how rows are dealt to them, which of them own a rollout engine."""

    group: WorkerGroup
    dispatcher: Dispatcher
    hosts: tuple[int, ...] = ()

    def infer(self, batch: TensorDict, role: str, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Per-token outputs `[b, t]` of a role for every row."""
        plan = self.dispatcher.plan(sequence_lengths(batch))
        results = self.group.call("infer", self.dispatcher.shares(batch, plan, ()), role=role, outputs=tuple(outputs))
        return self.dispatcher.collect(results, plan, len(batch), batch["responses"].shape[1])

    def update(
        self, method: str, batch: TensorDict, mini_batches: Sequence[MiniBatchRows], fields: Sequence[str], step: int
    ) -> Metrics:
        """One optimizer step per mini-batch; losses averaged over mini-batches, everything else by its own kind."""
        present = [name for name in fields if name in batch.keys()]
        shares: list[list[MiniBatch]] = [[] for _ in range(self.group.size)]
        for mini_batch in mini_batches:
            rows = batch[mini_batch.rows]
            plan = self.dispatcher.plan(sequence_lengths(rows))
            for rank, micro_batches in enumerate(self.dispatcher.shares(rows, plan, present)):
                shares[rank].append(MiniBatch(micro_batches, mini_batch.normalizer))
        results = self.group.call(method, shares, step=step)
        return _merge_updates([results[rank] for rank in self.dispatcher.output_ranks()])


def sequence_lengths(batch: TensorDict) -> Int[Tensor, "b"]:
    """Tokens of prompt and response together."""
    return batch["prompt_length"] + batch["response_length"]


def old_log_prob(ranks: Ranks, config: Config, batch: TensorDict) -> tuple[TensorDict, Metrics]:
    """`old_log_probs` (and `entropy`, `sum_pi_squared`) of the weights that the update starts from.

    In bypass mode the rollout engine's log-probabilities are the old ones and no forward pass is made.
    """
    if config.algorithm.rollout_correction.bypass_mode:
        return _fields(batch, old_log_probs=batch["rollout_log_probs"]), {}
    names = ["log_probs"]
    names += ["entropy"] if config.actor.calculate_entropy else []
    names += ["sum_pi_squared"] if config.actor.calculate_sum_pi_squared else []
    outputs = ranks.infer(batch, ACTOR, names)
    outputs["old_log_probs"] = outputs.pop("log_probs")
    metrics = agreement_metrics(outputs["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
    if "entropy" in outputs:
        tokens = batch["response_mask"].sum()
        metrics["actor/entropy"] = Mean((outputs["entropy"] * batch["response_mask"]).sum(), tokens)
    return _fields(batch, **outputs), metrics


def reference_log_prob(ranks: Ranks, batch: TensorDict) -> TensorDict:
    """`ref_log_prob` under the frozen reference policy."""
    return _fields(batch, ref_log_prob=ranks.infer(batch, REFERENCE, ["log_probs"])["log_probs"])


def critic_values(ranks: Ranks, batch: TensorDict) -> TensorDict:
    """`values` before the critic's update."""
    return _fields(batch, values=ranks.infer(batch, CRITIC, ["values"])["values"])


def advantages(config: Config, batch: TensorDict, kl: FixedKLController) -> tuple[TensorDict, Metrics]:
    """Rewards after KL, rollout correction (weights and mask), then advantages and returns.

    Returns the whole batch, since the corrected mask replaces `response_mask`; the rewards of rejected samples still count in their group's baseline.
    """
    algorithm = config.algorithm
    metrics: Metrics = {}
    rewards, mask = batch["token_level_scores"], batch["response_mask"]
    if algorithm.use_kl_in_reward:
        rewards, penalty = kl_in_reward(
            rewards, batch["old_log_probs"], batch["ref_log_prob"], mask, coef=kl.value, kind=algorithm.kl_penalty
        )
        kl.update(penalty["actor/reward_kl_penalty"], len(batch))
        metrics |= {name: Mean(value, 1) for name, value in penalty.items()}
    added = {"token_level_rewards": rewards}
    correction = algorithm.rollout_correction
    if not correction.bypass_mode and (correction.rollout_is or correction.rollout_rs):
        from megatron_dapo.algorithms import rollout_correction

        corrected = rollout_correction(
            batch["old_log_probs"],
            batch["rollout_log_probs"],
            mask,
            rollout_is=correction.rollout_is,
            rollout_is_threshold=correction.rollout_is_threshold,
            rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
            rollout_rs=correction.rollout_rs,
            rollout_rs_threshold=correction.rollout_rs_threshold,
        )
        mask = corrected.mask
        metrics |= {name: Mean(value, 1) for name, value in corrected.metrics.items()}
        if corrected.weights is not None:
            added["rollout_is_weights"] = corrected.weights
    added["advantages"], added["returns"] = advantage(algorithm.adv_estimator)(
        rewards,
        mask,
        batch["uid"],
        config=AdvantageConfig(
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        ),
        **{name: batch[field] for name, field in _ESTIMATOR_INPUTS.items() if field in batch.keys()},
        rollout_is_weights=added.get("rollout_is_weights"),
    )
    return batch.copy().update({**added, "response_mask": mask}), metrics


_ESTIMATOR_INPUTS = {"values": "values", "old_logprob": "old_log_probs", "sum_pi_squared": "sum_pi_squared"}


def update_actor(ranks: Ranks, config: Config, batch: TensorDict, step: int) -> Metrics:
    """`ppo_epochs` passes over the batch in mini-batches of whole groups."""
    actor = config.actor
    mini_batches = split_mini_batches(
        batch, actor.ppo_mini_batch_size, actor.loss_agg_mode, config.derived.loss_scale_factor
    )
    return ranks.update("update_actor", batch, mini_batches * actor.ppo_epochs, ACTOR_FIELDS, step)


def update_critic(ranks: Ranks, config: Config, batch: TensorDict, step: int) -> Metrics:
    """As `update_actor`, for the value model."""
    critic = config.critic
    mini_batches = split_mini_batches(
        batch, config.derived.critic_mini_batch_size, critic.loss_agg_mode, config.derived.loss_scale_factor
    )
    return ranks.update("update_critic", batch, mini_batches * critic.ppo_epochs, CRITIC_FIELDS, step)


def split_mini_batches(batch: TensorDict, groups: int, mode: str, horizon: float) -> list[MiniBatchRows]:
    """`groups` prompts per optimizer step, in order, each with the global counts that its loss is divided by."""
    number = batch["uid"] // groups
    parts = [(number == index).nonzero().flatten() for index in range(int(number.max()) + 1)]
    return [
        MiniBatchRows(rows, Normalizer(mode, int(batch["response_mask"][rows].sum()), len(rows), horizon))
        for rows in parts
    ]


def connect_rollout(ranks: Ranks, prefix: str) -> None:
    """Tells every training rank what the rollout engines store, so that each plans its part of a push, once."""
    stored = ranks.group.call("rollout_layouts")
    layouts = [layout for of_rank, _ in stored for layout in of_rank]
    ranks.group.call("connect", destinations=dict(enumerate(layouts)), dtypes=stored[ranks.hosts[0]][1], prefix=prefix)


def push_weights(ranks: Ranks, version: int) -> Metrics:
    """All ranks write the bytes that the engines' ranks store, then the engines take them over."""
    start = time.perf_counter()
    receipts = [receipt for of_rank in ranks.group.call("publish") for receipt in of_rank]
    updates = weight_update(receipts)
    width = len(updates) // len(ranks.hosts)
    shares: list[list] = [[] for _ in range(ranks.group.size)]
    for index, host in enumerate(ranks.hosts):
        shares[host] = updates[index * width : (index + 1) * width]
    ranks.group.call("load_weights", shares, version=version)
    return {
        "push/seconds": Sum(time.perf_counter() - start),
        "push/bytes": Sum(sum(receipt.written for receipt in receipts)),
    }


def agreement_metrics(ours: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """How far the rollout engine and the trainer are apart on the sampled tokens, at the same weights."""
    mask = mask.bool()
    if not mask.any():
        return {}
    log_diff = (ours - rollout)[mask].abs()
    prob_diff = (ours[mask].exp() - rollout[mask].exp()).abs()
    return {
        "training/rollout_logprob_diff_max": Max(log_diff.max()),
        "training/rollout_logprob_diff_mean": Mean(log_diff.sum(), log_diff.numel()),
        "training/rollout_probs_diff_max": Max(prob_diff.max()),
        "training/rollout_probs_diff_mean": Mean(prob_diff.sum(), prob_diff.numel()),
    }


def _fields(batch: TensorDict, **fields: Tensor) -> TensorDict:
    return TensorDict(fields, batch_size=batch.batch_size)


def _merge_updates(by_rank: Sequence[Sequence[StepResult]]) -> Metrics:
    """Exact over ranks and micro-batches; a loss is the sum of its shares, then the mean over optimizer steps."""
    metrics: Metrics = {}
    for results in zip(*by_rank, strict=True):
        step = reduce(result.metrics for result in results)
        step = {name: Mean(metric.value, 1) if isinstance(metric, Sum) else metric for name, metric in step.items()}
        role = "critic" if "critic/vf_loss" in step else "actor"
        step |= {f"{role}/grad_norm": Mean(results[0].grad_norm, 1), f"{role}/lr": Last(results[0].lr)}
        metrics = merge(metrics, step)
    return metrics
