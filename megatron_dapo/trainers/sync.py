"""The synchronous loop: sample groups, train on them, push the weights. It reads as the algorithm."""

from dataclasses import replace
from functools import partial

import torch
from tensordict import TensorDict

from megatron_dapo.data.batch import to_batch, union
from megatron_dapo.data.types import Group
from megatron_dapo.metrics import Metrics, merge
from megatron_dapo.trainers import report, stages
from megatron_dapo.trainers.generation import component_rewards, group_values, score_groups, scored_part
from megatron_dapo.trainers.run import Run
from megatron_dapo.trainers.validation import validate


def fit(run: Run) -> None:
    """From the step after the last finished one to the end, or until a stop is requested."""
    config, timer = run.config, run.timer
    push_weights(run)
    report.begin(run, validate(run) if config.trainer.val_before_train and run.step == 0 else {})
    while run.step < run.total_steps and not run.stop:
        with timer.stage("step"):
            groups, metrics = sample_groups(run, run.step + 1)
            if groups:  # none where dynamic sampling may skip a step
                metrics = merge(metrics, train_on(run, groups, run.step + 1))
            run.step += 1
            metrics = merge(metrics, push_weights(run))
            metrics = merge(metrics, validate_and_save(run))
        report.step(run, groups, metrics)
    finish_saving(run)


def sample_groups(run: Run, step: int) -> tuple[list[Group], Metrics]:
    """Generation batches until `train_batch_size` groups carry a signal (dynamic sampling), in order of arrival."""
    sampler, metric = run.sampler, run.config.algorithm.filter_groups.metric
    metrics: Metrics = {}
    while count := sampler.need():
        prompts = run.loader.next(count)
        with run.timer.stage("gen"):
            trajectories = run.generate(prompts, run.config.rollout.n, run.sampling, step=step)
        with run.timer.stage("reward"):
            groups = score_groups(run.reward, prompts, trajectories)
        run.dump.failed(groups)
        scored = [group for group in map(scored_part, groups) if group.scores]
        metrics = merge(metrics, report.generation_metrics(scored))
        final = rewards_after_kl(run, scored) if metric == "seq_final_reward" else {}
        values_of = partial(group_values, metric=metric, final=final)
        kept = sampler.add(scored, values_of, failed=len(groups) - len(scored))
        run.dump.filtered(scored, kept, values_of)
    groups = sampler.take()
    return groups, metrics | report.filter_metrics(sampler)


def rewards_after_kl(run: Run, groups: list[Group]) -> dict[str, list[float]]:
    """Per prompt the rewards less their KL penalty, for a filter that judges those; empty without KL in the reward."""
    config, ranks = run.config, run.ranks
    if not groups or not config.algorithm.use_kl_in_reward:
        return {}
    batch = to_batch(groups, run.pad_id)
    with run.timer.stage("old_log_prob"):
        batch = union(batch, stages.old_log_prob(ranks, config, batch)[0])
    with run.timer.stage("ref"):
        batch = union(batch, stages.reference_log_prob(ranks, batch))
    rewards = iter(stages.rewards_after_kl(config, batch, run.kl.value)[0].sum(-1).tolist())
    return {group.prompt.uid: [next(rewards) for _ in group.scores] for group in groups}


def train_on(run: Run, groups: list[Group], step: int) -> Metrics:
    """One training step on whole groups: old and reference log-probs, values, advantages, updates."""
    config, ranks, timer = run.config, run.ranks, run.timer
    batch = to_batch(groups, run.pad_id)
    if config.algorithm.adv_estimator == "remax":
        with timer.stage("gen_max"):
            batch = union(batch, greedy_baselines(run, groups, step))
    ranks.sleep()  # nothing is generated until the next push
    with timer.stage("old_log_prob"):
        old, metrics = stages.old_log_prob(ranks, config, batch)
        batch = union(batch, old)
    if config.derived.reference_needed:
        with timer.stage("ref"):
            batch = union(batch, stages.reference_log_prob(ranks, batch))
    if config.derived.critic_enabled:
        with timer.stage("values"):
            batch = union(batch, stages.critic_values(ranks, config, batch))
    with timer.stage("adv"):
        components = component_rewards(groups, config.algorithm.gdpo_reward_keys)
        batch, adv_metrics = stages.advantages(config, batch, run.kl, components)
    if config.derived.critic_enabled:
        with timer.stage("update_critic"):
            metrics = merge(metrics, stages.update_critic(ranks, config, batch, step))
    if config.trainer.critic_warmup <= step:
        with timer.stage("update_actor"):
            metrics = merge(metrics, stages.update_actor(ranks, config, batch, step))
    return merge(merge(metrics, adv_metrics), report.batch_metrics(run, batch, groups, metrics))


def greedy_baselines(run: Run, groups: list[Group], step: int) -> TensorDict:
    """`reward_baselines [b]`: the reward of one greedy response to each row's prompt (ReMax).

    Where a verifier failed on it, the mean of the group.
    """
    prompts = [group.prompt for group in groups]
    trajectories = run.generate(prompts, 1, replace(run.sampling, temperature=0.0), step=step)
    greedy = map(scored_part, score_groups(run.reward, prompts, trajectories))
    known = [one.scores or group.scores for one, group in zip(greedy, groups, strict=True)]
    rewards = [sum(score.reward for score in scores) / len(scores) for scores in known]
    rows = [reward for reward, group in zip(rewards, groups, strict=True) for _ in group.trajectories]
    return TensorDict({"reward_baselines": torch.tensor(rows)}, batch_size=[len(rows)])


def push_weights(run: Run) -> Metrics:
    """The actor's weights to every engine, as version `run.step`."""
    with run.timer.stage("update_weights"):
        return stages.push_weights(run.ranks, version=run.step)


def validate_and_save(run: Run) -> Metrics:
    """What is due after the step that has just ended; a save under way goes on."""
    metrics: Metrics = {}
    run.saver.poll()
    if is_due(run, run.config.trainer.test_freq):
        metrics = validate(run)
    if is_due(run, run.config.trainer.save_freq):
        with run.timer.stage("save_checkpoint"):
            run.save()
    return metrics


def finish_saving(run: Run) -> None:
    """Waits for a save under way; a run that was asked to stop saves its last step."""
    run.saver.finish()
    if run.stop and run.step not in run.store.steps():
        run.save()


def is_due(run: Run, every: int) -> bool:
    """Whether something done every so many steps is due after this one; the last step always counts."""
    return every > 0 and (run.step % every == 0 or run.step == run.total_steps)
