"""The program of a run, `-m megatron_dapo.train key=value …`.

Under torchrun every rank runs it: rank 0 drives, the others serve. Under Ray only the driver does.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_dapo.config import Config, load_config
from megatron_dapo.errors import UserError
from megatron_dapo.parallel import host_cuda
from megatron_dapo.runtime.failure import StopRequest, ignore_stop_signals, run_rank
from megatron_dapo.runtime.group import WorkerGroup, serve

if TYPE_CHECKING:
    from megatron_dapo.parallel.topology import Topology
    from megatron_dapo.rollout.client import EngineClient
    from megatron_dapo.trainers.bringup import Inputs


def train(config: Config) -> None:
    """Brings this rank up and drives or serves until the run ends."""
    host_cuda.install()  # before anything imports megatron.core
    from megatron_dapo.trainers import bringup, start_rollouts
    from megatron_dapo.trainers.worker import Worker

    topology = bringup.topology_of(config)
    arch = bringup.checked_architecture(config, topology.world)
    driver = bringup.rank() == 0
    inputs = bringup.read_inputs(config)
    stop = StopRequest()
    stop.install() if driver else ignore_stop_signals()
    with start_rollouts.own_engines(config, topology.world, stop if driver else None) as engines:
        control = bringup.join_world(config, topology)
        worker = Worker(config, arch, topology, bringup.rank(), inputs.total_steps)
        try:
            if driver or control is None:
                drive(config, topology, bringup.worker_group(worker, control), inputs, stop, engines)
            else:
                serve(worker, control)
        finally:
            worker.close()
    if driver and stop:
        sys.exit(stop.exit_code)


def train_on_ray(config: Config) -> None:
    """Has Ray start the ranks and drives them until the run ends; nothing of it outlives this process."""
    host_cuda.install()
    from megatron_dapo.runtime.ray import Pool, RayWorkerGroup, cluster
    from megatron_dapo.trainers import bringup, bringup_ray

    if "RANK" in os.environ:
        raise UserError("trainer.runtime=ray: start one driver with `megatron-dapo train`, not ranks with torchrun")
    bringup.checked_architecture(config)
    inputs = bringup.read_inputs(config)
    stop = StopRequest()
    with cluster(bringup_ray.cpus_needed(config)):
        stop.install()  # after Ray's own handlers
        topology = bringup.topology_of(config, bringup_ray.world_size(config))
        pool = Pool.take(topology.world, bringup_ray.rank_resources())
        group = RayWorkerGroup.start(pool, bringup.build_worker, (config, inputs.total_steps))
        try:
            drive(config, topology, group, inputs, stop, bringup_ray.start_engines(config, pool, group.devices))
        finally:
            group.close()
    if stop:
        sys.exit(stop.exit_code)


def drive(
    config: Config,
    topology: "Topology",
    group: WorkerGroup,
    inputs: "Inputs",
    stop: StopRequest,
    engines: "Sequence[EngineClient]" = (),
) -> None:
    """The run over ranks that stand, from its start or its last checkpoint to its end; `engines`: not the ranks'."""
    from megatron_dapo.trainers import bringup, start_rollouts, streaming, sync
    from megatron_dapo.trainers.export import export_and_check

    run = bringup.build_run(config, topology, group, inputs, stop)
    if config.trainer.mode == "sync":
        run.ranks = start_rollouts.connect(run.ranks, (), arch=run.arch, config=config)
        bringup.resume(run)
        sync.fit(run)
    else:
        rollouts = start_rollouts.build_rollouts(config, run, engines)
        run.parts = (rollouts,)
        bringup.resume(run)
        streaming.fit(run, rollouts)
    if config.trainer.export_hf and not stop:
        export_and_check(run)
    run.close()


def main() -> None:
    """The process's entry point; every way out sets the exit code."""

    def run() -> None:
        config = load_config(sys.argv[1:], command="train")
        train_on_ray(config) if config.trainer.runtime == "ray" else train(config)

    run_rank(run)


if __name__ == "__main__":  # checkpointing starts helper processes that import this file
    main()
