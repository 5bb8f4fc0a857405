"""What the loop tells: metrics to the trackers, a line and a sample to the reader, generations to disk."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from megatron_dapo.algorithms import DynamicSampler
from megatron_dapo.data.types import Group, Score, Trajectory
from megatron_dapo.metrics import (
    Last,
    Metrics,
    Sum,
    compute,
    data_metrics,
    group_metrics,
    memory_metrics,
    merge,
    reward_metrics,
    sequence_balance_metrics,
    source_metrics,
    throughput_metrics,
    timing_metrics,
)
from megatron_dapo.trainers.run import Run


def filter_metrics(sampler: DynamicSampler) -> Metrics:
    """The counts of dynamic sampling in the step that just ended."""
    return {name: Sum(value) for name, value in sampler.metrics().items()}


def generation_metrics(groups: Sequence[Group]) -> Metrics:
    """Of the groups as generated, before the filter: how many are all right, all wrong, mixed."""
    rows = [(score.acc, group.prompt.uid) for group in groups for score in group.scores]
    return group_metrics([acc for acc, _ in rows], [uid for _, uid in rows]) if rows else {}


def batch_metrics(run: Run, batch: TensorDict, groups: Sequence[Group]) -> Metrics:
    """What the trained batch was like: data, rewards, sources, and how its tokens lie on the ranks."""
    config = run.config
    scores = [score for group in groups for score in group.scores]
    accuracies = [score.acc for score in scores]
    lengths = (batch["prompt_length"] + batch["response_length"]).tolist()
    partition = [[row for micro in rows for row in micro] for rows in run.ranks.dispatcher.plan(torch.tensor(lengths))]
    return {
        **data_metrics(
            batch, use_critic=config.derived.critic_enabled, max_prompt_length=config.data.max_prompt_length
        ),
        **reward_metrics(
            [score.reward for score in scores], [score.raw for score in scores], accuracies, [False] * len(scores)
        ),
        **source_metrics([group.prompt.data_source for group in groups for _ in group.scores], accuracies),
        **sequence_balance_metrics(lengths, partition),
    }


def step(run: Run, groups: Sequence[Group], metrics: Metrics) -> None:
    """Everything about the step that just ended: metrics, timing, throughput, a sample now and then."""
    seconds = run.timer.pop()
    responses = sum(len(one.response_ids) for group in groups for one in group.trajectories)
    prompts = sum(len(group.prompt.token_ids) * len(group.trajectories) for group in groups)
    total = responses + prompts
    metrics = merge(metrics, timing_metrics(seconds, responses, total))
    metrics = merge(metrics, throughput_metrics(total, seconds["step"], run.ranks.group.size))
    metrics = merge(metrics, memory_metrics())
    metrics["training/epoch"] = Last(run.loader.epoch)
    log(run, run.step, metrics)
    if groups:
        _dump(run, groups)
        every = run.config.trainer.log_samples_every
        if every > 0 and (run.step % every == 0 or run.step == 1):
            _print_samples(run, groups[0])


def log(run: Run, step: int, metrics: Metrics) -> None:
    """Plain numbers to every tracker."""
    values = compute({**metrics, "training/global_step": Last(step)})
    run.trackers.log(step, values)


def _print_samples(run: Run, group: Group) -> None:
    """The best and the worst answer of one group."""
    ranked = sorted(zip(group.scores, group.trajectories, strict=True), key=lambda pair: pair[0].reward)
    print(f"  sample {group.prompt.uid}: {group.prompt.messages[-1]['content']!r} (answer {group.prompt.ground_truth})")
    for score, trajectory in {id(pair): pair for pair in (ranked[0], ranked[-1])}.values():
        text = run.tokenizer.decode(list(trajectory.response_ids), skip_special_tokens=True)
        print(f"    reward {score.reward:+.2f}: {text!r}", flush=True)


def _dump(run: Run, groups: Sequence[Group]) -> None:
    """`rollouts/{step}.jsonl`: one line per trajectory, for `megatron-dapo rollouts` and the report."""
    if run.config.trainer.rollout_data_dir is None:
        return
    directory = Path(run.config.trainer.rollout_data_dir)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{run.step}.jsonl").open("w", encoding="utf-8") as stream:
        for group in groups:
            for trajectory, score in zip(group.trajectories, group.scores, strict=True):
                stream.write(json.dumps(_line(run, group, trajectory, score), ensure_ascii=False) + "\n")


def _line(run: Run, group: Group, trajectory: Trajectory, score: Score) -> dict[str, Any]:
    return {
        "step": run.step,
        "uid": group.prompt.uid,
        "sample": trajectory.sample,
        "data_source": group.prompt.data_source,
        "prompt": group.prompt.messages[-1]["content"],
        "response": run.tokenizer.decode(list(trajectory.response_ids), skip_special_tokens=True),
        "ground_truth": group.prompt.ground_truth,
        "length": len(trajectory.response_ids),
        "finish_reason": trajectory.finish_reason,
        **{name: value for name, value in asdict(score).items() if name != "extra"},
    }
