"""The stages between samples and updates: each reads fields of the batch and returns what it adds (see `union`)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from tensordict import TensorDict
from torch import Tensor

from megatron_dapo.algorithms import (
    AdvantageConfig,
    advantage,
    kl_in_reward,
)
from megatron_dapo.algorithms.correction import correct_rollout
from megatron_dapo.algorithms.kl import FixedKLController
from megatron_dapo.config import Config
from megatron_dapo.data.batch import ragged
from megatron_dapo.engine.engine import StepResult
from megatron_dapo.engine.losses import Normalizer
from megatron_dapo.errors import UserError
from megatron_dapo.metrics import (
    Last,
    Mean,
    Metrics,
    Sum,
    agreement_metrics,
    measured,
    merge,
    push_metrics,
    reduce,
    routing_disagreement,
)
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.tables import hf_shapes
from megatron_dapo.parallel.capabilities import capabilities
from megatron_dapo.resharding.push import Pushed, PushEngine, PushFailed, Route, choose_route, received_bytes
from megatron_dapo.runtime.group import WorkerGroup
from megatron_dapo.trainers.dispatch import Dispatcher
from megatron_dapo.trainers.worker import ACTOR, CRITIC, REFERENCE, MiniBatch, correction_config

ACTOR_FIELDS = ("response_mask", "advantages", "old_log_probs", "rollout_is_weights", "ref_log_prob")
CRITIC_FIELDS = ("response_mask", "returns", "values")


_ROLES = {"update_actor": "actor", "update_critic": "critic", "update_supervised": "sft"}  # as metrics name them


@dataclass(frozen=True)
class MiniBatchRows:
    """The rows of one optimizer step and its global denominators."""

    rows: Int[Tensor, "b"]
    normalizer: Normalizer


@dataclass(frozen=True)
class Ranks:
    """The ranks as the stages see them: whom to call, how rows are dealt out, which ranks host a rollout engine.

    `device` is the name of their GPU, None on a CPU host.
    """

    group: WorkerGroup
    dispatcher: Dispatcher
    hosts: tuple[int, ...] = ()
    engines: tuple[PushEngine, ...] = ()  # those that no rank hosts
    route: Route | None = None  # how weights reach all of them
    device: str | None = None

    def sleep(self) -> None:
        """Engines of ranks leave the devices that they share with them until the next push."""
        if self.hosts:
            self.group.call("sleep")

    def wake(self, *parts: str) -> None:
        """They take memory again: "weights" before a push, "kv_cache" after it."""
        if self.hosts:
            self.group.call("wake", parts=parts)

    def infer(
        self, batch: TensorDict, role: str, outputs: Sequence[str], *, replay: str | None = None, record: bool = False
    ) -> dict[str, Tensor]:
        """Per-token outputs `[b, t]` of a role for every row.

        `replay` names the field with the routing to follow; with `record`, `routing` can be asked for afterwards.
        """
        plan = self.dispatcher.plan(sequence_lengths(batch))
        shares = self.dispatcher.shares(batch, plan, (), replay)
        results = self.group.call("infer", shares, role=role, outputs=tuple(outputs), record=record)
        return self.dispatcher.collect(results, plan, len(batch), batch["responses"].shape[1])

    def routing(self, batch: TensorDict, role: str) -> list[Int[Tensor, "n layers k"]]:
        """The experts of every row's tokens, prompt first, in the pass that `infer` has just recorded."""
        lengths = sequence_lengths(batch)
        results = self.group.call("row_routing", role=role)
        return self.dispatcher.collect_routing(results, self.dispatcher.plan(lengths), lengths)

    def update(
        self,
        method: str,
        batch: TensorDict,
        mini_batches: Sequence[MiniBatchRows],
        fields: Sequence[str],
        step: int,
        replay: str | None = None,
    ) -> Metrics:
        """One optimizer step per mini-batch; losses averaged over mini-batches, everything else by its own kind."""
        present = [name for name in fields if name in batch]
        shares: list[list[MiniBatch]] = [[] for _ in range(self.group.size)]
        for mini_batch in mini_batches:
            rows = batch[mini_batch.rows]
            plan = self.dispatcher.plan(sequence_lengths(rows))
            for rank, micro_batches in enumerate(self.dispatcher.shares(rows, plan, present, replay)):
                shares[rank].append(MiniBatch(micro_batches, mini_batch.normalizer))
        results = self.group.call(method, shares, step=step)
        return _merge_updates(_ROLES[method], [results[rank] for rank in self.dispatcher.output_ranks()])


def sequence_lengths(batch: TensorDict) -> Int[Tensor, "b"]:
    """Tokens of prompt and response together."""
    return batch["prompt_length"] + batch["response_length"]


def old_log_prob(ranks: Ranks, config: Config, batch: TensorDict) -> tuple[TensorDict, Metrics]:
    """`old_log_probs` (and `entropy`, `sum_pi_squared`) of the weights that the update starts from.

    In bypass mode the rollout engine's log-probabilities are the old ones and no forward pass is made. Under router
    replay R2 the routing of this pass is added as `old_routing`; under R3 the pass follows the rollout engine's.
    """
    if config.algorithm.rollout_correction.bypass_mode:
        return _fields(batch, old_log_probs=batch["rollout_log_probs"]), {}
    names = ["log_probs"]
    names += ["entropy"] if config.actor.calculate_entropy else []
    names += ["sum_pi_squared"] if config.actor.calculate_sum_pi_squared else []
    mode = config.model.router_replay
    outputs = ranks.infer(
        batch, ACTOR, names, replay=replayed(config, batch) if mode == "R3" else None, record=mode == "R2"
    )
    outputs["old_log_probs"] = outputs.pop("log_probs")
    metrics = agreement_metrics(outputs["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
    if "entropy" in outputs:
        tokens = batch["response_mask"].sum()
        metrics["actor/entropy"] = Mean((outputs["entropy"] * batch["response_mask"]).sum(), tokens)
    added = _fields(batch, **outputs)
    if mode == "R2":
        routing = ranks.routing(batch, ACTOR)
        added["old_routing"] = ragged(routing)
        metrics |= routing_agreement(batch, routing)
    return added, metrics


def routing_agreement(batch: TensorDict, recorded: Sequence[Int[Tensor, "n layers k"]]) -> Metrics:
    """`training/moe/routing_disagreement/*` over the response tokens that the rollout engine fed through its model.

    `recorded` is the routing of each row in the old-log-prob pass. Nothing without `rollout_routing` in the batch.
    """
    if "rollout_routing" not in batch:
        return {}
    sampled, trained = [], []
    for rollout, ours, prompt, response in zip(
        batch["rollout_routing"],
        recorded,
        batch["prompt_length"].tolist(),
        batch["response_length"].tolist(),
        strict=True,
    ):
        fed = max(0, response - 1)  # the last token was sampled and never fed
        sampled.append(rollout[len(rollout) - fed :])
        trained.append(ours[prompt : prompt + fed])
    return routing_disagreement(torch.cat(sampled), torch.cat(trained))


def replayed(config: Config, batch: TensorDict) -> str | None:
    """The field with the routing that the update follows: none, the old-log-prob pass's, the rollout engine's."""
    field = {"none": None, "R2": "old_routing", "R3": "rollout_routing"}[config.model.router_replay]
    if field is not None and field not in batch:
        raise UserError(
            "model.router_replay=R3: the rollout engine returned some trajectories without their routed experts (it "
            "forgets them when it preempts a request): raise rollout.kv_cache_gb or lower rollout.max_num_seqs, or "
            "set model.router_replay=R2"
        )
    return field


def reference_log_prob(ranks: Ranks, batch: TensorDict) -> TensorDict:
    """`ref_log_prob` under the frozen reference policy."""
    return _fields(batch, ref_log_prob=ranks.infer(batch, REFERENCE, ["log_probs"])["log_probs"])


def critic_values(ranks: Ranks, config: Config, batch: TensorDict) -> TensorDict:
    """`values` before the critic's update."""
    return _fields(batch, values=_of_critic(ranks, config).infer(batch, CRITIC, ["values"])["values"])


def _of_critic(ranks: Ranks, config: Config) -> Ranks:
    """The same ranks with the critic's micro-batches."""
    tokens = config.critic.max_tokens_per_micro_batch
    return ranks if tokens is None else replace(ranks, dispatcher=replace(ranks.dispatcher, max_tokens=tokens))


def rewards_after_kl(config: Config, batch: TensorDict, coef: float) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """Token rewards less `coef` times the estimated KL to the reference, and what the penalty was."""
    return kl_in_reward(
        batch["token_level_scores"],
        batch["old_log_probs"],
        batch["ref_log_prob"],
        batch["response_mask"],
        coef=coef,
        kind=config.algorithm.kl_penalty,
    )


def advantages(
    config: Config, batch: TensorDict, kl: FixedKLController, component_rewards: Mapping[str, Tensor] | None = None
) -> tuple[TensorDict, Metrics]:
    """Rewards after KL, rollout correction (weights and mask), then advantages and returns.

    Returns the whole batch: the corrected mask replaces `response_mask`, and `loss_mask` is what the loss's
    denominators count. The rewards of rejected samples still count in their group's baseline, unless configured.
    """
    algorithm = config.algorithm
    metrics: Metrics = {}
    rewards, mask = batch["token_level_scores"], batch["response_mask"]
    if algorithm.use_kl_in_reward:
        rewards, penalty = rewards_after_kl(config, batch, kl.value)
        kl.update(penalty["actor/reward_kl_penalty"], len(batch))
        metrics |= {name: Mean(value * len(batch), len(batch)) for name, value in penalty.items()}  # means over rows
    added = {"token_level_rewards": rewards, "loss_mask": mask}
    correction = correction_config(config)
    if not correction.bypass_mode and (correction.rollout_is or correction.rollout_rs):
        corrected = correct_rollout(correction, batch["old_log_probs"], batch["rollout_log_probs"], mask)
        metrics |= measured(corrected.metrics)
        mask = corrected.mask
        added["loss_mask"] = added["loss_mask"] if correction.count_rejected else mask
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
            singleton=algorithm.singleton,
            count_rejected=algorithm.count_rejected_in_baseline,
            gdpo_reward_keys=algorithm.gdpo_reward_keys,
            gdpo_reward_weights=algorithm.gdpo_reward_weights,
            handle_zero_tail=algorithm.handle_zero_tail,
        ),
        **{name: batch[field] for name, field in _ESTIMATOR_INPUTS.items() if field in batch},
        rollout_is_weights=added.get("rollout_is_weights"),
        component_rewards=component_rewards,
    )
    return batch.copy().update({**added, "response_mask": mask}), metrics


_ESTIMATOR_INPUTS = {
    "values": "values",
    "old_logprob": "old_log_probs",
    "sum_pi_squared": "sum_pi_squared",
    "reward_baselines": "reward_baselines",
}


def update_actor(ranks: Ranks, config: Config, batch: TensorDict, step: int) -> Metrics:
    """`ppo_epochs` passes over the batch in mini-batches of whole groups."""
    actor = config.actor
    bypass = config.algorithm.rollout_correction.bypass_mode  # no old-log-prob pass has compared the two engines yet
    fields = (*ACTOR_FIELDS, "rollout_log_probs") if bypass else ACTOR_FIELDS
    mini_batches = [
        mini_batch
        for epoch in range(actor.ppo_epochs)
        for mini_batch in split_mini_batches(
            batch,
            actor.ppo_mini_batch_size,
            actor.loss_agg_mode,
            config.derived.loss_scale_factor,
            seed=(actor.data_loader_seed, step, epoch) if actor.shuffle else None,
        )
    ]
    return ranks.update("update_actor", batch, mini_batches, fields, step, replayed(config, batch))


def update_critic(ranks: Ranks, config: Config, batch: TensorDict, step: int) -> Metrics:
    """As `update_actor`, for the value model."""
    critic = config.critic
    mini_batches = split_mini_batches(
        batch, config.derived.critic_mini_batch_size, critic.loss_agg_mode, config.derived.loss_scale_factor
    )
    return _of_critic(ranks, config).update(
        "update_critic", batch, mini_batches * critic.ppo_epochs, CRITIC_FIELDS, step
    )


def split_mini_batches(
    batch: TensorDict, groups: int, mode: str, horizon: float, seed: tuple[int, ...] | None = None
) -> list[MiniBatchRows]:
    """`groups` prompts per optimizer step, each with the global counts that its loss is divided by.

    In the order of the batch, or, with a `seed`, in an order drawn from it.
    """
    place, count = batch["uid"], int(batch["uid"].max()) + 1
    if seed is not None:
        place = torch.from_numpy(np.random.default_rng(seed).permutation(count))[place]
    parts = [(place // groups == index).nonzero().flatten() for index in range(-(-count // groups))]
    return [MiniBatchRows(rows, _normalizer(batch[rows], mode, horizon)) for rows in parts]


def _normalizer(rows: TensorDict, mode: str, horizon: float) -> Normalizer:
    """Counts of one optimizer step over `loss_mask`: what the denominators count, which may exceed what is trained."""
    counted = rows["loss_mask"]
    return Normalizer(mode, int(counted.sum()), int(counted.any(-1).sum()), horizon)


def connect_rollout(
    ranks: Ranks,
    arch: Architecture,
    transport: str = "auto",
    engines: Sequence[PushEngine] = (),
    *,
    check_every: int = 1,
    directory: str = "",
) -> Ranks:
    """Ranks that know how weights reach their own engines and `engines`, which live elsewhere; each plans its part.

    To be called again whenever an engine has come, gone or failed a push. `directory`: where files may travel through.
    """
    stood = ranks.group.call("standpoint")
    targets = [target for _, target in stood if target is not None] + [engine.target() for engine in engines]
    backend = "nccl" if capabilities().cuda else "gloo"  # nccl: untested on GPU
    route = choose_route(
        [place for place, _ in stood],
        targets,
        hf_shapes(arch),
        transport,
        backend,
        check_every=check_every,
        directory=directory,
    )
    if route.transport == "cuda_ipc":  # untested on GPU
        slots = [one for of_rank in ranks.group.call("export_slots", nbytes=route.slots_bytes) for one in of_rank]
        slots += [one for engine in engines for one in engine.export_slots(route.slots_bytes)]
        route = replace(route, slots=tuple(slots))
    ranks.group.call("connect", route=route)
    route.hide()
    return replace(ranks, route=route, engines=tuple(engines))


def push_weights(ranks: Ranks, version: int) -> Metrics:
    """The actor's weights to every engine. Raises PushFailed, after which `connect_rollout` comes before a new push."""
    start, route = time.perf_counter(), ranks.route
    assert route is not None, "connect_rollout comes before a push"
    ranks.wake("weights")
    updates = route.updates(receipt for of_rank in ranks.group.call("prepare_push") for receipt in of_rank)
    own, others = updates[: len(ranks.hosts)], updates[len(ranks.hosts) :]
    taking = [route.start(engine, update, version) for engine, update in zip(ranks.engines, others, strict=True)]
    shares = [own[ranks.hosts.index(rank)] if rank in ranks.hosts else [] for rank in range(ranks.group.size)]
    pushed: list[Pushed] = ranks.group.call("push", shares, version=version)
    errors = [pushed[host].engine_error for host in ranks.hosts]
    errors += [None if (error := future.exception()) is None else str(error) for future in taking]
    reasons = [error for error in errors if error is not None] + [reason for one in pushed for reason in one.reasons]
    if reasons:
        raise PushFailed(reasons, [engine for engine, error in enumerate(errors) if error is not None])
    ranks.wake("kv_cache")
    return push_metrics(
        time.perf_counter() - start,
        sum(one.sent for one in pushed),
        received=sum(one.received for one in pushed) + sum(map(received_bytes, taking)),
        stored=route.stored,
    )


def _fields(batch: TensorDict, **fields: Tensor) -> TensorDict:
    return TensorDict(fields, batch_size=batch.batch_size)


def _merge_updates(role: str, by_rank: Sequence[Sequence[StepResult]]) -> Metrics:
    """Exact over ranks and micro-batches; a loss is the sum of its shares, then the mean over optimizer steps."""
    metrics: Metrics = {}
    for results in zip(*by_rank, strict=True):
        step = reduce(result.metrics for result in results)
        step = {name: Mean(metric.value, 1) if isinstance(metric, Sum) else metric for name, metric in step.items()}
        step |= {f"{role}/grad_norm": Mean(results[0].grad_norm, 1), f"{role}/lr": Last(results[0].lr)}
        metrics = merge(metrics, step)
    return metrics
