"""What the loop tells: metrics to the trackers, a line and a sample to the reader, generations to the dump."""

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict

from megatron_dapo.algorithms import DynamicSampler
from megatron_dapo.data.types import Group, Trajectory
from megatron_dapo.metrics import (
    Last,
    Metric,
    Metrics,
    Sum,
    compute,
    data_metrics,
    group_metrics,
    memory_metrics,
    merge,
    reduce,
    reward_metrics,
    sequence_balance_metrics,
    source_metrics,
    spec_decode_metrics,
    throughput_metrics,
    timing_metrics,
    variance_proxy_metrics,
    verifier_metrics,
)
from megatron_dapo.trainers.efficiency import stage_efficiency
from megatron_dapo.trainers.generation import engine_count
from megatron_dapo.trainers.run import Run


def filter_metrics(sampler: DynamicSampler) -> Metrics:
    """The counts of dynamic sampling in the step that just ended."""
    return {name: Sum(value) for name, value in sampler.metrics().items()}


def generation_metrics(groups: Sequence[Group]) -> Metrics:
    """Of the groups as generated, before the filter: how many are all right, all wrong, mixed."""
    rows = [(score.acc, group.prompt.uid) for group in groups for score in group.scores]
    return group_metrics([acc for acc, _ in rows], [uid for _, uid in rows]) if rows else {}


def batch_metrics(
    run: Run, batch: TensorDict, groups: Sequence[Group], updates: Mapping[str, Metric] | None = None
) -> Metrics:
    """What the trained batch was like: data, rewards, sources, and how its tokens lie on the ranks.

    `updates` are the metrics of its updates: the variance proxy reads the gradient's norm there.
    """
    config = run.config
    scores = [score for group in groups for score in group.scores]
    accuracies = [score.acc for score in scores]
    lengths = (batch["prompt_length"] + batch["response_length"]).tolist()
    run.dump.trained(batch, groups)
    trajectories = [one for group in groups for one in group.trajectories]
    if config.rollout.agent.max_turns > 1:
        turns = {
            "num_turns": [one.turns for one in trajectories],
            "tool_call_counts": [one.tool_calls for one in trajectories],
        }
        batch = batch.copy().update({name: torch.tensor(values) for name, values in turns.items()})
    partition = [[row for micro in rows for row in micro] for rows in run.ranks.dispatcher.plan(torch.tensor(lengths))]
    return {
        **data_metrics(
            batch, use_critic=config.derived.critic_enabled, max_prompt_length=config.data.max_prompt_length
        ),
        **reward_metrics([score.reward for score in scores], [score.raw for score in scores], accuracies),
        **source_metrics([group.prompt.data_source for group in groups for _ in group.scores], accuracies),
        **sequence_balance_metrics(lengths, partition),
        **_speculation(trajectories),
        **_variance_proxy(batch, updates or {}),
    }


def _speculation(trajectories: Sequence[Trajectory]) -> Metrics:
    """Of the trajectories whose engine speculated and told all of it; an interrupted request does not."""
    told = [one.speculation for one in trajectories if one.speculation is not None]
    return spec_decode_metrics(*zip(*told, strict=True)) if told else {}


def _variance_proxy(batch: TensorDict, updates: Mapping[str, Metric]) -> Metrics:
    """Signal and noise of the gradient, where the old-log-prob pass computed Σπ²."""
    if "sum_pi_squared" not in batch:
        return {}
    norm = compute({name: updates[name] for name in ("actor/grad_norm",) if name in updates})
    return variance_proxy_metrics(
        batch["sum_pi_squared"],
        batch["old_log_probs"],
        batch["advantages"],
        batch["response_mask"],
        gradient_norm=norm.get("actor/grad_norm"),
        rollout_is_weights=batch.get("rollout_is_weights"),
    )


def step(run: Run, groups: Sequence[Group], metrics: Metrics) -> None:
    """Everything about the step that just ended: metrics, timing, throughput, a sample now and then."""
    seconds = run.timer.pop()
    responses = sum(len(one.response_ids) for group in groups for one in group.trajectories)
    prompts = sum(len(group.prompt.token_ids) * len(group.trajectories) for group in groups)
    total = responses + prompts
    metrics = merge(metrics, timing_metrics(seconds, responses, total))
    metrics = merge(metrics, throughput_metrics(total, seconds["step"], devices(run)))
    metrics = merge(
        metrics, stage_efficiency(run.arch, run.config, groups, seconds, run.ranks.group.size, run.ranks.device)
    )
    metrics = merge(metrics, reduce([memory_metrics(), *run.ranks.group.call("memory")]))
    metrics = merge(metrics, verifier_metrics(run.reward.take_counts(), run.reward.take_seconds()))
    if run.expert_load is not None:
        metrics = merge(metrics, run.expert_load.step(run.ranks.group, run.step, last=run.step == run.total_steps))
    metrics["training/epoch"] = Last(run.loader.epoch)
    log(run, run.step, metrics)
    run.dump.write(run.step, groups)
    if groups:
        every = run.config.trainer.log_samples_every
        if every > 0 and (run.step % every == 0 or run.step == 1):
            _print_samples(run, groups[0])


def devices(run: Run) -> int:
    """Of the ranks, and of engines that have devices of their own."""
    apart = engine_count(run.config) if run.config.trainer.mode == "separate_async" else 0
    return run.ranks.group.size + apart * run.config.rollout.tensor_parallel_size


def begin(run: Run, metrics: Metrics) -> None:
    """Before the first step: its metrics, if any, as those of step 0; what was timed and counted is in no step."""
    if metrics:
        log(run, 0, metrics)
    run.timer.pop()
    run.reward.take_counts()
    run.reward.take_seconds()
    if run.expert_load is not None:
        run.expert_load.drop(run.ranks.group)


def log(run: Run, step: int, metrics: Metrics) -> None:
    """Plain numbers to every tracker."""
    values = compute({**metrics, "training/global_step": Last(step), "training/total_steps": Last(run.total_steps)})
    run.trackers.log(step, values)


def _print_samples(run: Run, group: Group) -> None:
    """The best and the worst answer of one group."""
    ranked = sorted(zip(group.scores, group.trajectories, strict=True), key=lambda pair: pair[0].reward)
    print(f"  sample {group.prompt.uid}: {group.prompt.messages[-1]['content']!r} (answer {group.prompt.ground_truth})")
    for score, trajectory in {id(pair): pair for pair in (ranked[0], ranked[-1])}.values():
        text = run.tokenizer.decode(list(trajectory.response_ids), skip_special_tokens=True)
        print(f"    reward {score.reward:+.2f}: {text!r}", flush=True)
