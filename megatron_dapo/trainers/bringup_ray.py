"""What a run asks of a Ray cluster."""

import ray

from megatron_dapo.config import Config


def cpus_needed(config: Config) -> int:
    """CPUs that a Ray of the run's own must have: one per rank."""
    return config.parallel.world_size or 1


def rank_resources() -> dict[str, float]:
    """One rank's share: a GPU where the cluster has any (untested on GPU), and a CPU."""
    return {"CPU": 1.0, "GPU": 1.0} if ray.cluster_resources().get("GPU") else {"CPU": 1.0}


def world_size(config: Config) -> int:
    """Ranks to start: `parallel.world_size`, else all GPUs of the cluster, else one."""
    return config.parallel.world_size or int(ray.cluster_resources().get("GPU", 0)) or 1
