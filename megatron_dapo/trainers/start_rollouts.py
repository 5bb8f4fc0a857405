"""Starts the generating half of a streaming run: engines, queue, fleet, feed, buffer and ledger."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.algorithms import filter_value
from megatron_dapo.config import Config
from megatron_dapo.errors import UserError
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.parallel.capabilities import capabilities
from megatron_dapo.rollout.agent import AGENTS, Conversation
from megatron_dapo.rollout.client import EngineClient
from megatron_dapo.rollout.engine import RolloutEngine
from megatron_dapo.rollout.fleet import Fleet
from megatron_dapo.runtime.failure import StopRequest
from megatron_dapo.runtime.queue import Queue, set_environment
from megatron_dapo.trainers.expert_load import RankLoad
from megatron_dapo.trainers.feed import Feed
from megatron_dapo.trainers.generation import engine_count
from megatron_dapo.trainers.ledger import LEDGER_FILE, Ledger
from megatron_dapo.trainers.replay import SAMPLERS, ReplayBuffer, ReplayPolicy
from megatron_dapo.trainers.rollouts import Rollouts
from megatron_dapo.trainers.run import Run
from megatron_dapo.trainers.stages import Ranks, connect_rollout
from megatron_dapo.trainers.worker import engine_spec, rank_load, ranks_on_node, tells_routing

STORE_BYTES = 100 * 2**20  # nothing of ours lies in Ray's object store


@contextmanager
def own_engines(config: Config, world: int, stop: StopRequest | None) -> Iterator[list[EngineClient]]:
    """Inside, the driver of an asynchronous mode has engines that are loading, and a Ray for the queue.

    Ranks keep to their cores. `stop` is the driver's; the other ranks have none, and no engines. Raises UserError for a
    world of several nodes: engines could only be beside the driver.
    """
    if config.trainer.mode == "sync":
        yield []
        return
    if (local := ranks_on_node(world)) < world:
        raise UserError(
            f"trainer.mode={config.trainer.mode} with {world} ranks, {local} of them on this node: across nodes the "
            "asynchronous modes need trainer.runtime=ray"
        )
    cores = split_cores(config)[0]
    if stop is None:
        keep_to(cores, world)
        yield []
        return
    import ray

    size = {"num_cpus": 1 + config.trainer.queue_storage_units, "object_store_memory": STORE_BYTES}
    set_environment()
    ray.init("local", include_dashboard=False, logging_level="ERROR", **size)
    stop.install()  # again: Ray has handlers of its own
    engines = start_engines(config, world)
    keep_to(cores, world)  # what was started before may use them all
    try:
        yield engines
    finally:
        ray.shutdown()


def start_engines(config: Config, world: int) -> list[EngineClient]:
    """The driver's own engines, on the devices of this host that `split_cores` and the ranks leave."""
    width, cores = config.rollout.tensor_parallel_size, split_cores(config)[1]
    routed = tells_routing(config, Architecture.from_dir(config.model.path))
    first = 0 if config.trainer.mode == "colocate_async" else world
    starts = [first + index * width for index in range(engine_count(config))]
    if capabilities().cuda and starts[-1] + width > (gpus := torch.cuda.device_count()):  # untested on GPU
        raise UserError(
            f"trainer.mode={config.trainer.mode}: {len(starts)} engines of rollout.tensor_parallel_size={width} from "
            f"GPU {first} on need {starts[-1] + width} GPUs, this node has {gpus}: lower rollout.engines or the width"
        )
    return [
        RolloutEngine.start(
            engine_spec(
                config,
                index,
                gpus=tuple(range(start, start + width)) if capabilities().cuda else None,  # untested on GPU
                cpus=None if capabilities().cuda else cores,
                sleeps=config.trainer.mode == "colocate_async",
                routed_experts=routed,
            )
        )
        for index, start in enumerate(starts)
    ]


def split_cores(config: Config) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """On a CPU host with engines of its own: the first half of the cores is the ranks', the second the engines'."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if config.trainer.mode != "separate_async" or capabilities().cuda or len(cores) == 1:
        return cores, None
    half = len(cores) // 2
    return cores[:half], cores[half:]


def keep_to(cores: Sequence[int], local_world: int) -> None:
    """This rank computes on these cores only."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(max(1, len(cores) // local_world))


def build_rollouts(config: Config, run: Run, engines: Sequence[EngineClient]) -> Rollouts:
    """Over engines that may still be loading; the queue starts in the Ray that this process is connected to."""
    fleet, queue = Fleet(engines), Queue.open(config.trainer.queue_storage_units)
    load = rank_load(config, run.arch)
    if run.expert_load is not None:
        run.expert_load.own = load
    run.generate = replace(run.generate, group=FleetGroup(fleet, load), hosts=(0,))
    agent, filters = config.rollout.agent, config.algorithm.filter_groups
    conversation = Conversation(AGENTS.find(agent.name)(), run.tokenizer, run.sampling, agent.max_turns)
    feed = Feed(
        fleet,
        queue,
        conversation,
        run.reward.score,
        partial(filter_value, metric=filters.metric if filters.enable else "acc"),
        n=config.rollout.n,
        seed=config.trainer.seed,
        keep_partial=config.rollout.failed_groups == "keep",
        load=load,
    )
    return Rollouts(
        loader=run.loader,
        queue=queue,
        fleet=fleet,
        feed=feed,
        buffer=ReplayBuffer(replay_policy(config), SAMPLERS.find(config.trainer.replay_sampler)),
        ledger=Ledger(Path(config.trainer.default_local_dir) / LEDGER_FILE),
        connect=partial(connect, arch=run.arch, config=config),
        dump=run.dump,
        lends=config.trainer.mode == "colocate_async",
    )


@dataclass(frozen=True)
class FleetGroup:
    """The fleet in the words of `Generator`: validation prompts go to it beside everything else."""

    fleet: Fleet
    load: RankLoad | None = None
    size = 1

    def call(self, method: str, shares: Sequence[Any] | None = None, **common: Any) -> list[Any]:
        assert shares is not None
        generations = self.fleet.run(self.fleet.generate_all(shares[0])).result()
        return [generations if self.load is None else self.load.sampled(generations)]

    def close(self) -> None:
        pass


def connect(ranks: Ranks, engines: Sequence[EngineClient], *, arch: Architecture, config: Config) -> Ranks:
    """`connect_rollout` as the configuration wants it."""
    return connect_rollout(
        ranks,
        arch,
        config.rollout.weight_transport,
        engines,
        check_every=config.rollout.weight_check_every,
        directory=str((Path(config.trainer.default_local_dir) / "weights").resolve()),
    )


def replay_policy(config: Config) -> ReplayPolicy:
    """The buffer's rules in the words of the configuration."""
    trainer, filters = config.trainer, config.algorithm.filter_groups
    return ReplayPolicy(
        batch_size=config.data.train_batch_size,
        ahead=trainer.num_warmup_batches,
        max_span=trainer.max_off_policy_threshold,
        strategy=trainer.max_off_policy_strategy,
        filter=filters.enable,
        max_generated=max(0, filters.max_num_gen_batches) * config.derived.gen_batch_size if filters.enable else 0,
        on_exhausted=filters.on_exhausted,
        surplus=config.derived.surplus,
    )
