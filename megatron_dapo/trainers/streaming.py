"""The streaming loop: groups arrive while the trainer trains, weights flow back. It reads as the algorithm.

`colocate_async` shares the devices: requests are interrupted while the trainer trains and go on after the push.
`separate_async` has engines of its own, which never stop; the trainer pushes every `parameter_sync_step` local updates.
The stages of an update are those of the sync loop.
"""

from dataclasses import replace

from megatron_dapo.data.types import Group
from megatron_dapo.metrics import Metrics, Sum, merge, staleness_metrics
from megatron_dapo.resharding.push import PushFailed
from megatron_dapo.rollout.client import EngineDied
from megatron_dapo.trainers import report, stages
from megatron_dapo.trainers.rollouts import Rollouts
from megatron_dapo.trainers.run import Run
from megatron_dapo.trainers.sync import finish_saving, train_on, validate_and_save
from megatron_dapo.trainers.validation import validate


def fit(run: Run, rollouts: Rollouts) -> None:
    """From the step after the last finished one to the end, or until a stop is requested."""
    config, timer = run.config.trainer, run.timer
    if run.step == 0:
        rollouts.ledger.start_over()
    push_weights(run, rollouts)
    report.begin(run, validate(run) if config.val_before_train and run.step == 0 else {})
    rollouts.fleet.busy_seconds()  # counts from here
    while run.step < run.total_steps and not run.stop:
        with timer.stage("step"):
            groups, metrics = step(run, rollouts, run.step + 1)
            run.step += 1
            metrics = merge(metrics, push_weights(run, rollouts))
            metrics = merge(metrics, validate_and_save(run))
        metrics = merge(metrics, rollouts.metrics(timer.seconds["step"], timer.seconds["gen"]))
        report.step(run, groups, metrics)
    finish_saving(run)


def step(run: Run, rollouts: Rollouts, number: int) -> tuple[list[Group], Metrics]:
    """`parameter_sync_step` local updates, each on its share of the batch."""
    updates = run.config.trainer.parameter_sync_step
    trained: list[Group] = []
    metrics: Metrics = {}
    rollouts.begin(number)
    for _ in range(updates):
        groups, new = step_once(run, rollouts, number, run.config.data.train_batch_size // updates)
        trained += groups
        metrics = merge(metrics, new)
    return trained, metrics


def step_once(run: Run, rollouts: Rollouts, number: int, count: int) -> tuple[list[Group], Metrics]:
    """One local update on `count` whole groups, the oldest that are complete and not too old."""
    groups = sample_groups(run, rollouts, count)
    if not groups:  # where dynamic sampling may skip a step
        return [], {}
    versions = [one.weight_versions for group in groups for one in group.trajectories]
    metrics = staleness_metrics(versions, number - 1)
    if rollouts.lends:
        rollouts.fleet.hold()  # until the push
    return groups, merge(metrics, train_on(run, groups, number))


def sample_groups(run: Run, rollouts: Rollouts, count: int) -> list[Group]:
    """Waits for the groups, and meanwhile for engines that died and come back in need of weights."""
    while True:
        with run.timer.stage("gen"):  # the trainer's idle time
            if (uids := rollouts.poll(count)) is not None:
                return rollouts.read(uids)
            rollouts.fleet.sweep()
        if rollouts.fleet.newcomers:
            push_weights(run, rollouts)


def push_weights(run: Run, rollouts: Rollouts) -> Metrics:
    """The actor's weights, as version `run.step`, to every living engine; none serves without them."""
    with run.timer.stage("update_weights"):
        rollouts.fleet.wake("weights")
        failed = 0
        while True:
            engines = rollouts.fleet.wait_loaded()
            try:
                if run.ranks.engines != tuple(engines):
                    run.ranks = rollouts.connect(run.ranks, engines)
                metrics = stages.push_weights(run.ranks, version=run.step)
            except (PushFailed, EngineDied):
                run.ranks = replace(run.ranks, engines=())
                if all(engine.alive for engine in engines):
                    raise
                failed += 1
            else:
                break
        rollouts.fleet.serve(engines)
        rollouts.fleet.release()
    return {**metrics, "push/failed": Sum(failed)}
