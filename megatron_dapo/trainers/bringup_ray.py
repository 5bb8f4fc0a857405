"""What a run asks of a Ray cluster: slots for its ranks, and places for the engines of an asynchronous mode."""

from collections import Counter
from collections.abc import Sequence

import ray

from megatron_dapo.config import Config
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.rollout.client import EngineClient
from megatron_dapo.rollout.remote import RemoteEngine
from megatron_dapo.runtime.ray import Pool
from megatron_dapo.trainers.generation import check_width, engine_count
from megatron_dapo.trainers.worker import engine_spec, tells_routing


def cpus_needed(config: Config) -> int:
    """CPUs that a Ray of the run's own must have: one per rank, per engine with a slot of its own, and the queue's."""
    trainer = config.trainer
    queue = 0 if trainer.mode == "sync" else 1 + trainer.queue_storage_units
    apart = engine_count(config) if trainer.mode == "separate_async" else 0
    return (config.parallel.world_size or 1) + apart + queue


def rank_resources() -> dict[str, float]:
    """One rank's share: a GPU where the cluster has any (untested on GPU), and a CPU."""
    return {"CPU": 1.0, "GPU": 1.0} if cluster_gpus() else {"CPU": 1.0}


def world_size(config: Config) -> int:
    """Ranks to start: `parallel.world_size`, else one per GPU that engines leave, else one."""
    apart = engine_count(config) if config.trainer.mode == "separate_async" else 0
    return config.parallel.world_size or max(1, cluster_gpus() - apart * config.rollout.tensor_parallel_size)


def cluster_gpus() -> int:
    """GPUs of all nodes."""
    return int(ray.cluster_resources().get("GPU", 0))


def start_engines(config: Config, ranks: Pool, devices: Sequence[Sequence[int]]) -> list[EngineClient]:
    """The engines of an asynchronous mode, which may still be loading; none in the sync mode, where ranks have them.

    separate_async: in slots of their own, on as many nodes as possible. colocate_async: beside every
    `tensor_parallel_size`-th rank, on the `devices` of the ranks from there on.
    """
    mode, count, width = config.trainer.mode, engine_count(config), config.rollout.tensor_parallel_size
    routed = tells_routing(config, Architecture.from_dir(config.model.path))
    if mode == "sync":
        return []
    if mode == "separate_async":
        gpus = {"GPU": float(width)} if cluster_gpus() else {}  # untested on GPU
        slots = Pool.take(count, {"CPU": 1.0, **gpus}, "SPREAD").slots
        return [RemoteEngine(engine_spec(config, i, routed_experts=routed), slot) for i, slot in enumerate(slots)]
    if cluster_gpus():  # untested on GPU
        check_width(width, min(Counter(slot.node for slot in ranks.slots).values()))
    engines: list[EngineClient] = []
    for index in range(count):
        first = index * width % len(ranks.slots)
        gpus_of_ranks = tuple(gpu for own in devices[first : first + width] for gpu in own)  # untested on GPU
        spec = engine_spec(config, index, gpus=gpus_of_ranks or None, sleeps=True, routed_experts=routed)
        engines.append(RemoteEngine(spec, ranks.slots[first].shared()))
    return engines
