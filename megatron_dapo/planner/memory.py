"""What every pipeline stage's ranks hold in every phase of a step, in bytes, against what the device has."""

from dataclasses import dataclass

from megatron_dapo.config import Config
from megatron_dapo.config.training import OffloadConfig
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.activations import FP32, Pack, chunks_in_flight, head_bytes, layer_bytes
from megatron_dapo.planner.assumptions import Assumptions
from megatron_dapo.planner.devices import Device
from megatron_dapo.planner.parameters import Parameters, engine_parameters, rank_parameters
from megatron_dapo.planner.stages import stage_shape
from megatron_dapo.planner.workload import Workload

ITEM = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class RoleMemory:
    """What a trained role keeps between micro-batches. Gradients are float32; main weights and both moments too."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: "RoleMemory") -> "RoleMemory":
        return RoleMemory(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


@dataclass(frozen=True)
class StageMemory:
    """One pipeline stage's ranks: elements of the actor, its state, activations, logits, and the peak of each phase."""

    pp: int
    layers: int
    elements: Parameters
    actor: RoleMemory
    critic: RoleMemory
    reference: RoleMemory
    activations: float
    logits: float
    phases: dict[str, float]

    @property
    def others(self) -> RoleMemory:
        return self.critic + self.reference

    @property
    def peak(self) -> float:
        return max(self.phases.values())


@dataclass(frozen=True)
class EngineMemory:
    """A rollout rank: weights, what is left for keys and values, and how much that holds."""

    weights: float
    kv_bytes_per_token: float
    kv_room: float  # negative: the weights do not fit into the engine's share
    kv_tokens: int
    longest_sequences: int  # of max_model_len tokens, at once
    budget: float


def role_memory(elements: Parameters, topology: Topology, dtype: str) -> RoleMemory:
    """A trained role under the distributed optimizer. In float32 the main weights are the parameters themselves."""
    item, moments = ITEM[dtype], 8 if dtype == "float32" else 12
    dense, expert = elements.dense, elements.expert
    sharded = dense / (topology.data * topology.context) + expert / topology.expert_data
    return RoleMemory(elements.total * item, FP32 * (dense + expert), moments * sharded)


def stage_activations(
    config: Config, arch: Architecture, topology: Topology, pp: int, pack: Pack, micro_batches: int, assume: Assumptions
) -> tuple[float, float]:
    """(bytes kept over the micro-batches in flight, bytes of the largest single layer while it is computed)."""
    model = config.model
    recomputed = frozenset(model.recompute_modules) if model.recompute == "selective" else frozenset()
    stage = stage_shape(arch, topology, pp)
    kinds = {True: stage.moe, False: stage.dense}
    each = {
        kind: layer_bytes(arch, topology, pack, kind, recomputed, assume.imbalance) if count else 0.0
        for kind, count in kinds.items()
    }
    if model.recompute == "full":
        kept = stage.layers * pack.input_bytes(arch)
    else:
        kept = sum(count * each[kind] for kind, count in kinds.items())
    return kept * chunks_in_flight(topology, pp, micro_batches), max(each.values())


def stage_memory(
    config: Config, arch: Architecture, topology: Topology, pp: int, load: Workload, engine: EngineMemory,
    assume: Assumptions, fused: bool = True,
) -> StageMemory:  # fmt: skip
    """Everything that a rank of stage `pp` holds, phase by phase (a colocated, synchronous step)."""
    sequence = config.parallel.sequence_parallel is not False and topology.tensor > 1
    item, dtype, micro_batches = ITEM[config.model.dtype], config.model.dtype, load.micro_batches(topology.data)

    def working(tokens: float, training: bool, vocabulary: bool) -> tuple[float, float]:
        """(bytes of the layers, bytes of the head) while one role computes."""
        pack = Pack.of(tokens, topology, sequence, item, fused)
        kept, single = stage_activations(config, arch, topology, pp, pack, micro_batches, assume)
        head = head_bytes(arch, topology, pack, bool(assume.deferred_head), training) if vocabulary else 0.0
        return (kept + (single if config.model.recompute == "full" else 0.0) if training else 2 * single), head

    shape, elements = stage_shape(arch, topology, pp), rank_parameters(arch, topology, pp)
    actor, critic, reference = role_memory(elements, topology, dtype), RoleMemory(), RoleMemory()
    activations, logits = working(load.max_tokens, training=True, vocabulary=shape.head)
    busy = {"log_prob": sum(working(load.max_tokens, False, shape.head)), "update": activations + logits}
    if config.derived.critic_enabled:
        critic = role_memory(rank_parameters(arch, topology, pp, value_head=True), topology, dtype)
        tokens = config.derived.critic_max_tokens_per_micro_batch
        busy |= {"values": working(tokens, False, False)[0], "update_critic": working(tokens, True, False)[0]}
    if config.derived.reference_needed:
        reference = RoleMemory(parameters=actor.parameters)
        busy["ref"] = busy["log_prob"]
    phases = phase_peaks(config, actor, critic, reference, busy, engine, assume)
    return StageMemory(pp, shape.layers, elements, actor, critic, reference, activations, logits, phases)


def roles(
    config: Config, actor: RoleMemory, critic: RoleMemory, reference: RoleMemory
) -> tuple[tuple[RoleMemory, OffloadConfig], ...]:
    """Each role with what of it leaves the device while another role uses it."""
    frozen = OffloadConfig(param=config.ref.offload_param)
    return (actor, config.actor.offload), (critic, config.critic.offload), (reference, frozen)


def phase_peaks(
    config: Config, actor: RoleMemory, critic: RoleMemory, reference: RoleMemory, busy: dict[str, float],
    engine: EngineMemory, assume: Assumptions,
) -> dict[str, float]:  # fmt: skip
    """The peak of every phase: who is on the device in it, under each role's offloading and a sleeping engine or not.

    `busy`: what the one role that a phase is about needs besides its state.
    """
    everybody = roles(config, actor, critic, reference)

    def present(used: RoleMemory | None, training: bool = False) -> float:
        found = assume.overhead_gib * 2**30
        for role, away in everybody:
            mine = role is used
            found += role.parameters if mine or not away.param else 0.0
            found += role.gradients if (mine and training) or not away.grad else 0.0
            found += role.optimizer if (mine and training) or not away.optimizer else 0.0
        return found

    awake = engine.weights if assume.engine_sleeps else engine.budget
    asleep = 0.0 if assume.engine_sleeps else engine.budget
    users = {"log_prob": actor, "ref": reference, "values": critic, "update_critic": critic, "update": actor}
    return {
        "rollout": present(None) + engine.budget,
        **{
            phase: present(role, phase.startswith("update")) + asleep + busy[phase]
            for phase, role in users.items()
            if phase in busy
        },
        "push": present(actor) + awake + 2 * assume.bucket_mib * 2**20,
    }


def kv_bytes_per_token(arch: Architecture, tensor: int, item: int) -> float:
    """One token's keys and values on one rank; a latent is whole on every rank."""
    if arch.latent is not None:
        return (arch.latent.kv_rank + arch.latent.rope_dim) * arch.layers * item
    return 2 * max(1.0, arch.kv_heads / tensor) * arch.head_dim * arch.layers * item


def engine_memory(config: Config, arch: Architecture, device: Device, assume: Assumptions) -> EngineMemory:
    """A rank of a rollout engine within `rollout.gpu_memory_utilization` (on a host: within `kv_cache_gb`)."""
    rollout, item = config.rollout, ITEM[config.derived.rollout_dtype]
    tensor = rollout.tensor_parallel_size
    weights = engine_parameters(arch, tensor) * item
    per_token = kv_bytes_per_token(arch, tensor, item)
    if device.name == "cpu":
        room = rollout.kv_cache_gb * 2**30 / tensor
        budget = room + weights
    else:
        budget = rollout.gpu_memory_utilization * device.memory
        room = budget - weights - assume.engine_overhead_gib * 2**30
    tokens = max(0, int(room / per_token))
    return EngineMemory(weights, per_token, room, tokens, tokens // config.derived.max_model_len, budget)
