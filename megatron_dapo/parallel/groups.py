"""Bring up and take down torch.distributed and Megatron's process groups for one topology."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from megatron.core import parallel_state as mpu
from megatron.core.rerun_state_machine import (
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_dapo.parallel.capabilities import capabilities
from megatron_dapo.parallel.noise import hush
from megatron_dapo.parallel.topology import LayoutError, Topology


def init_distributed(topology: Topology, seed: int, timeout_minutes: float = 10.0) -> None:
    """Join the world that the environment describes and build Megatron's groups for `topology`.

    With RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set (torchrun, SLURM, Ray) that world is joined; without them
    this process is a world of one and opens no port. A world that stands already is kept, so groups of another
    topology can be built after `destroy(world=False)`. Seeds Python-visible random state per tensor and expert rank.

    Raises LayoutError when the layout is illegal or the world's size differs from the topology's.
    """
    hush()
    problems = topology.problems()
    if problems:
        raise LayoutError("illegal parallel layout: " + "; ".join(problems))
    if not dist.is_initialized():
        _join_world(timedelta(minutes=timeout_minutes))
    if dist.get_world_size() != topology.world:
        raise LayoutError(
            f"the launcher started {dist.get_world_size()} processes, but the layout has world {topology.world}; "
            f"start {topology.world} processes or set parallel.world_size={dist.get_world_size()}"
        )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=topology.tensor,
        pipeline_model_parallel_size=topology.pipeline,
        virtual_pipeline_model_parallel_size=topology.virtual_pipeline,
        context_parallel_size=topology.context,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=topology.etp,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
    )
    destroy_rerun_state_machine()  # one may be left from earlier groups of this process
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)  # what Megatron would do by itself, with a warning
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def destroy(world: bool = True) -> None:
    """Take down Megatron's groups, and with `world` torch.distributed too. Safe to call twice.

    Megatron only forgets its groups; each gloo group keeps threads and sockets until it is really destroyed.
    """
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    if not dist.is_initialized():
        return
    if world:
        dist.destroy_process_group()
        return
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _join_world(timeout: timedelta) -> None:
    backend = capabilities().backend
    if "WORLD_SIZE" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    if capabilities().cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistNetworkError as error:
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        raise RuntimeError(
            f"rank {os.environ.get('RANK')} cannot open or reach {address}:{port} ({error}); "
            "if the port is in use, choose another MASTER_PORT"
        ) from error
