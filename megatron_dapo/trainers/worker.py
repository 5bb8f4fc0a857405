"""What one rank holds and can do: its roles (actor, reference, critic), its rollout engine, its part of every push.

The driver calls these methods on all ranks at once through a worker group; arguments and results are plain data.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from tensordict import TensorDict
from torch import Tensor

from megatron_dapo.algorithms import PolicyLossConfig
from megatron_dapo.algorithms.correction import RolloutCorrectionConfig
from megatron_dapo.config import Config
from megatron_dapo.config.training import OffloadConfig, OptimConfig
from megatron_dapo.engine.checkpoint import load_engine, save_engine
from megatron_dapo.engine.engine import MegatronEngine, StepResult
from megatron_dapo.engine.losses import Normalizer, actor_loss, critic_loss, supervised_loss
from megatron_dapo.engine.offload import Offload
from megatron_dapo.engine.random_state import load_random_state, save_random_state
from megatron_dapo.engine.routing import RowRouting
from megatron_dapo.metrics import Metrics, memory_metrics
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.export import export_hf
from megatron_dapo.models.storage import storages
from megatron_dapo.models.tables import megatron_slices
from megatron_dapo.parallel.capabilities import capabilities
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.resharding.messages import TransferError
from megatron_dapo.resharding.push import Pushed, Route, Sender, Standpoint, Target, Update, received_bytes
from megatron_dapo.resharding.transport_ipc import ExportedSlots
from megatron_dapo.rollout.engine import RolloutEngine
from megatron_dapo.rollout.requests import Generation, GenerationRequest
from megatron_dapo.rollout.spec import EngineSpec
from megatron_dapo.trainers.expert_load import Counts, RankLoad
from megatron_dapo.trainers.generation import rollout_hosts

ACTOR, REFERENCE, CRITIC = "actor", "ref", "critic"


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step's share of one rank."""

    micro_batches: list[TensorDict]
    normalizer: Normalizer


class SupervisedWorker:
    """A rank of supervised training: the actor alone."""

    def __init__(self, config: Config, arch: Architecture, topology: Topology, total_steps: int):
        self.arch, self.topology = arch, topology
        self.engines = {
            ACTOR: MegatronEngine(
                arch,
                config.model,
                config.parallel,
                topology,
                hf_dir=Path(config.model.path),
                optim=config.sft.optim,
                total_steps=total_steps,
            )
        }
        self.offloads = {ACTOR: Offload(self.engines[ACTOR], config.actor.offload)}

    def infer(
        self, micro_batches: list[TensorDict], *, role: str, outputs: Sequence[str], record: bool = False
    ) -> list[dict[str, Tensor]]:
        """Named per-token outputs of a role for every micro-batch, in order. `record`: see `row_routing`."""
        with self.offloads[role].present():
            return self.engines[role].forward(micro_batches, outputs, record)

    def row_routing(self, *, role: str) -> list[RowRouting]:
        """Experts of every token in the pass that was recorded last, for this rank's pipeline stage."""
        return self.engines[role].row_routing()

    def update_supervised(self, mini_batches: list[MiniBatch], *, step: int) -> list[StepResult]:
        """Optimizer steps on the negative log-likelihood."""
        engine = self.engines[ACTOR]
        engine.set_step(step)
        with self.offloads[ACTOR].present(training=True):
            return [
                engine.train_step(batch.micro_batches, supervised_loss(batch.normalizer), ["log_probs"])
                for batch in mini_batches
            ]

    def export(self, *, directory: Path, source: Path) -> None:
        """The actor in Hugging Face format; tokenizer and configuration come from `source`."""
        with self.offloads[ACTOR].present():
            export_hf(self.engines[ACTOR].chunks, self.arch, self.topology, directory, source_dir=source)

    def logits(self, *, rows: TensorDict) -> Tensor | None:
        """This rank's share of the actor's logits, see `MegatronEngine.logits`."""
        with self.offloads[ACTOR].present():
            return self.engines[ACTOR].logits(rows)


class Worker(SupervisedWorker):
    """A rank of reinforcement learning. Built after the process groups; its engines share the rank's device."""

    def __init__(self, config: Config, arch: Architecture, topology: Topology, rank: int, total_steps: int):
        self.config, self.arch, self.topology, self.rank = config, arch, topology, rank
        self.sender: Sender | None = None
        self.route: Route | None = None
        self._storages: dict[str, Tensor] = {}
        self._writes = AsyncCallsQueue()
        self._pushing = ExitStack()  # keeps the actor on the device from a push's first part to its last
        self.expert_load = rank_load(config, arch)
        # on a CPU host its process loads while Megatron is being built
        self.rollout = start_rollout(config, topology, rank, routed_experts=tells_routing(config, arch))
        if shares_gpus(config):  # untested on GPU
            self.sleep()  # once it has loaded: Megatron is built in the memory that all engines have left
            dist.barrier()
        self.engines = build_engines(config, arch, topology, total_steps)
        self.offloads = {role: Offload(engine, offload_of(config, role)) for role, engine in self.engines.items()}

    def update_actor(self, mini_batches: list[MiniBatch], *, step: int) -> list[StepResult]:
        """One optimizer step per mini-batch, all at the learning rate of trainer step `step`."""
        actor, engine = self.config.actor, self.engines[ACTOR]
        engine.set_step(step)
        reported = actor.calculate_entropy and self.config.algorithm.rollout_correction.bypass_mode
        entropy = ["entropy"] if actor.entropy_coeff or reported else []
        loss_config = policy_loss_config(self.config)
        results, counts = [], self.expert_load
        with self.offloads[ACTOR].present(training=True):
            for index, batch in enumerate(mini_batches):
                loss = actor_loss(actor, loss_config, batch.normalizer, fresh=index == 0)
                outputs = ["log_probs", *entropy]
                results.append(engine.train_step(batch.micro_batches, loss, outputs, record=counts is not None))
                if counts is not None:
                    counts.trained(engine.expert_counts())
        return results

    def update_critic(self, mini_batches: list[MiniBatch], *, step: int) -> list[StepResult]:
        """As `update_actor`, for the value model."""
        engine = self.engines[CRITIC]
        engine.set_step(step)
        with self.offloads[CRITIC].present(training=True):
            return [
                engine.train_step(batch.micro_batches, critic_loss(self.config.critic, batch.normalizer), ["values"])
                for batch in mini_batches
            ]

    def ranks_per_node(self) -> int:
        """How many ranks stand on this rank's node."""
        return ranks_on_node(self.topology.world)

    def device_name(self) -> str | None:
        """The name of this rank's GPU; None on a CPU host."""
        return torch.cuda.get_device_name() if capabilities().cuda else None

    def memory(self) -> Metrics:
        """Peak memory of this rank's device and process, see `memory_metrics`."""
        return memory_metrics()

    def hosts_engine(self) -> bool:
        """Whether a rollout engine lives on this rank."""
        return self.rollout is not None

    def generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Samples on this rank's engine; ranks without one get no requests."""
        generations = self.rollout.generate(requests) if self.rollout is not None and requests else []
        return generations if self.expert_load is None else self.expert_load.sampled(generations)

    def sleep(self) -> None:
        """This rank's engine leaves the device to the trainer until the next push, if they share one."""
        if self.rollout is not None and self.rollout.spec.sleeps:  # untested on GPU
            self.rollout.sleep()

    def wake(self, *, parts: tuple[str, ...]) -> None:
        """It takes memory again: "weights" before a push, "kv_cache" after it."""
        if self.rollout is not None and self.rollout.spec.sleeps:  # untested on GPU
            self.rollout.wake(*parts)

    def take_expert_load(self) -> Counts:
        """Where tokens went on this rank since the last call."""
        return Counts(None, None) if self.expert_load is None else self.expert_load.take()

    def standpoint(self) -> tuple[Standpoint, Target | None]:
        """Where this rank runs, and what a push must know of its engine, if it hosts one."""
        if self.rollout is None:
            return Standpoint.here(), None
        self.rollout.wait_ready(_START_SECONDS)
        return Standpoint.here(), self.rollout.target()

    def export_slots(self, *, nbytes: int) -> list[ExportedSlots]:
        """Memory of the GPUs of this rank's engine, for ranks to write weights to."""
        return [] if self.rollout is None else self.rollout.export_slots(nbytes)  # untested on GPU

    def connect(self, *, route: Route) -> None:
        """Plans this rank's part of every push along `route`; an earlier route ends."""
        if self.sender is not None:
            self.sender.close()
        te = capabilities().transformer_engine
        sources = {rank: megatron_slices(self.arch, self.topology, rank, te=te) for rank in range(self.topology.world)}
        self.route, self.sender = route, Sender(self.rank, sources, self._storage, route)

    def _storage(self, name: str) -> Tensor:
        return self._storages[name]

    def prepare_push(self) -> list[Any]:
        """This rank's first part of a push, before any engine knows of it."""
        assert self.sender is not None, "connect comes before a push"
        self._pushing.enter_context(self.offloads[ACTOR].present())
        self._storages = storages(self.engines[ACTOR].chunks)  # where they are now: offloading moves them
        return self.sender.prepare()

    def push(self, update: Update, *, version: int) -> Pushed:
        """Sends the actor's weights while the engines take them, this rank's own (if it hosts one) among them."""
        assert self.sender is not None and self.route is not None, "connect comes before a push"
        taking = self.route.start(self.rollout, update, version) if self.rollout is not None else None
        sent, reasons = 0, []
        try:
            with self._pushing:
                sent = self.sender.send()
        except TransferError as error:
            reasons.append(str(error))
        failed = taking.exception() if taking is not None else None
        received = received_bytes(taking) if taking is not None and failed is None else 0
        return Pushed(sent, received, tuple(reasons), None if failed is None else str(failed))

    def save(self, *, directory: Path, background: bool = False) -> None:
        """Every trained role's distributed checkpoint and this rank's random state, below `directory`.

        With `background` the files are complete only when `saved` says so.
        """
        for role, engine in self.engines.items():
            if engine.training is not None:
                (directory / role).mkdir(exist_ok=True)
                with self.offloads[role].present(training=True):
                    save_engine(engine, directory / role, self._writes if background else None)
        save_random_state(directory, self.topology, self.rank)

    def saved(self, *, wait: bool) -> bool:
        """Whether every rank's background writes are complete; with `wait`, after they are."""
        self._writes.maybe_finalize_async_calls(blocking=wait)
        return self._writes.get_num_unfinalized_calls() == 0

    def load(self, *, directory: Path) -> None:
        """The inverse of `save`, from any layout."""
        for role, engine in self.engines.items():
            if engine.training is not None:
                with self.offloads[role].present(training=True):
                    load_engine(engine, directory / role)
        load_random_state(directory, self.topology, self.rank)

    def close(self) -> None:
        """Ends this rank's engine and gives the shared memory back."""
        if self.rollout is not None:
            self.rollout.close()
        if self.sender is not None:
            self.sender.close()


_START_SECONDS = 600.0


def build_engines(
    config: Config, arch: Architecture, topology: Topology, total_steps: int
) -> dict[str, MegatronEngine]:
    """The roles that this configuration needs."""

    def engine(path: str, optim: OptimConfig | None = None, value_head: bool = False) -> MegatronEngine:
        return MegatronEngine(
            arch,
            config.model,
            config.parallel,
            topology,
            hf_dir=Path(path),
            optim=optim,
            total_steps=total_steps,
            value_head=value_head,
            temperature=config.rollout.temperature,
        )

    engines = {ACTOR: engine(config.model.path, config.actor.optim)}
    if config.derived.reference_needed:
        engines[REFERENCE] = engine(config.derived.ref_path)
    if config.derived.critic_enabled:
        engines[CRITIC] = engine(config.derived.critic_path, config.critic.optim, value_head=True)
    return engines


def offload_of(config: Config, role: str) -> OffloadConfig:
    """What of a role leaves the device while others use it."""
    offloads = {
        ACTOR: config.actor.offload,
        CRITIC: config.critic.offload,
        REFERENCE: OffloadConfig(param=config.ref.offload_param),
    }
    return offloads[role]


def policy_loss_config(config: Config) -> PolicyLossConfig:
    """The parameters of the policy losses, gathered from where users set them."""
    actor = config.actor
    named = actor.policy_loss.model_dump(exclude={"loss_mode"})
    return PolicyLossConfig(
        clip_ratio=actor.clip_ratio,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        rollout_correction=correction_config(config),
        **named,
    )


def correction_config(config: Config) -> RolloutCorrectionConfig:
    """The rollout correction of this run, in the words of the algorithms."""
    return RolloutCorrectionConfig(**config.algorithm.rollout_correction.model_dump(exclude={"preset"}))


def ranks_on_node(world: int) -> int:
    """How many of the ranks stand on this node, as the launcher says; all of them where there is none."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def counts_experts(config: Config, arch: Architecture) -> bool:
    """Whether expert load is told: not of a dense model, nor where nobody wants to know."""
    return arch.mixture is not None and config.trainer.log_expert_load_every > 0


def rank_load(config: Config, arch: Architecture) -> RankLoad | None:
    """What counts expert load beside an engine, where it is told.

    Under router replay routing is handed on: R3 follows it, R2 compares it with the trainer's own.
    """
    return RankLoad(arch, keep_routing=config.model.router_replay != "none") if counts_experts(config, arch) else None


def tells_routing(config: Config, arch: Architecture) -> bool:
    """Whether rollout engines must tell every token's experts: to be counted or followed."""
    return counts_experts(config, arch) or config.model.router_replay == "R3"


def start_rollout(config: Config, topology: Topology, rank: int, *, routed_experts: bool) -> RolloutEngine | None:
    """Starts this rank's vLLM process, if it hosts one; does not wait for it."""
    cuda = capabilities().cuda
    hosts = rollout_hosts(config, topology, node_gpus=ranks_on_node(topology.world) if cuda else 0)
    if rank not in hosts:
        return None
    local, width = int(os.environ.get("LOCAL_RANK", "0")), config.rollout.tensor_parallel_size
    gpus = tuple(range(local, local + width)) if cuda else None  # untested on GPU
    spec = engine_spec(config, hosts.index(rank), gpus=gpus, sleeps=shares_gpus(config), routed_experts=routed_experts)
    return RolloutEngine.start(spec)


def shares_gpus(config: Config) -> bool:
    """Whether ranks host engines on their own GPUs, which one of the two then leaves to the other."""
    return capabilities().cuda and config.trainer.mode == "sync"


def engine_spec(config: Config, index: int, **place: Any) -> EngineSpec:
    """The engine of this number; `place` says where it runs and what also does: cpus, gpus, sleeps, …"""
    rollout = config.rollout
    return EngineSpec(
        model=config.model.path,
        dtype=config.derived.rollout_dtype,
        tensor_parallel_size=rollout.tensor_parallel_size,
        max_model_len=config.derived.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_gb=rollout.kv_cache_gb,
        enforce_eager=rollout.enforce_eager,
        enable_prefix_caching=rollout.enable_prefix_caching,
        seed=config.trainer.seed,
        name=f"rollout-{index}",
        engine_kwargs=rollout.engine_kwargs,
        **place,
    )
