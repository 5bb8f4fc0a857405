"""Seconds of one step, stage by stage, from FLOPs, bandwidths and stated assumptions. An estimate, not a promise."""

from dataclasses import dataclass
from math import ceil, log

from megatron_dapo.config import Config
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.assumptions import Assumptions
from megatron_dapo.planner.devices import Device
from megatron_dapo.planner.memory import ITEM, EngineMemory, StageMemory, roles
from megatron_dapo.planner.parameters import attention_matrices, engine_parameters, matrix_parameters
from megatron_dapo.planner.stages import stage_shape
from megatron_dapo.planner.traffic import Network, Traffic, data_traffic, layer_traffic, push_link
from megatron_dapo.planner.workload import Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds by stage of a step, and what they mean."""

    stages: dict[str, float]
    bubble: float  # share of the update that pipeline ranks wait
    micro_batches: int  # per rank and optimizer step
    flops: float  # of the whole step, model FLOPs: 2 per weight and token forwards, no recomputation
    mfu_update: float
    communication: float  # share of a micro-batch that communication is exposed
    tokens_per_gpu_second: float
    traffic: Traffic
    concurrency: float  # sequences that one engine decodes at once

    @property
    def total(self) -> float:
        return sum(self.stages.values())


@dataclass(frozen=True)
class _Pass:
    """One micro-batch through the busiest stage, forwards."""

    arithmetic: float
    exposed: float  # tensor and context traffic that nothing hides, all-to-all, half of the stage boundary
    traffic: Traffic

    @property
    def seconds(self) -> float:
        return self.arithmetic + self.exposed


def attention_flops(arch: Architecture, length: float) -> float:
    """Forward FLOPs per token of the scores and the mix of all layers, causal, in sequences of this mean length."""
    width = 2 * arch.head_dim
    if arch.latent:
        width = arch.latent.nope_dim + arch.latent.rope_dim + arch.latent.v_dim
    return 2.0 * arch.heads * width * arch.layers * (length + 1) / 2


def forward_flops(arch: Architecture, length: float) -> float:
    """Forward FLOPs per token."""
    return 2.0 * matrix_parameters(arch) + attention_flops(arch, length)


def stage_seconds(
    arch: Architecture, topology: Topology, pp: int, device: Device, tokens: float, length: float, assume: Assumptions
) -> float:
    """Arithmetic of one micro-batch forwards on a rank of stage `pp`."""
    stage = stage_shape(arch, topology, pp)
    layers, moe = stage.layers, stage.moe
    mixture, hidden = arch.mixture, arch.hidden
    dense = layers * sum(attention_matrices(arch)) + (layers - moe) * 3 * hidden * arch.ffn
    dense += hidden * arch.vocab if stage.head else 0
    experts = 0.0
    if mixture:
        dense += moe * hidden * (mixture.experts + 3 * mixture.shared_ffn)
        experts = moe * 3 * hidden * mixture.topk * mixture.ffn * (assume.imbalance if topology.expert > 1 else 1.0)
    scores = attention_flops(arch, length) * layers / arch.layers
    share, peak = tokens / (topology.tensor * topology.context), device.tflops * 1e12
    return share * ((2 * dense + scores) / assume.dense_efficiency + 2 * experts / assume.expert_efficiency) / peak


def busiest_pass(
    config: Config, arch: Architecture, topology: Topology, device: Device, load: Workload, assume: Assumptions,
    engine: EngineMemory, stages: tuple[StageMemory, ...],
) -> _Pass:  # fmt: skip
    """The stage that the others wait for."""
    tokens = load.pack_tokens
    times = [
        stage_seconds(arch, topology, pp, device, tokens, load.sequence_tokens, assume)
        for pp in range(topology.pipeline)
    ]
    pp = max(range(topology.pipeline), key=lambda p: times[p])
    tensor_ranks = config.rollout.tensor_parallel_size
    engines = config.rollout.engines or max(1, topology.world // tensor_ranks)
    push = push_link(topology, device, engine.weights, tensor_ranks, engines, assume)
    shape = stage_shape(arch, topology, pp)
    tensor, exchange, context, boundary = layer_traffic(config, arch, topology, device, tokens, shape, assume)
    data = data_traffic(config, topology, device, stages[pp].elements, assume)
    hidden = (tensor.seconds + context.seconds) * assume.overlap
    exposed = tensor.seconds + context.seconds - hidden + exchange.seconds + boundary.seconds / 2
    return _Pass(times[pp], exposed, Traffic(tensor, exchange, context, boundary, data, push))


def decode_seconds(
    arch: Architecture, device: Device, tensor: int, batch: float, context: float, engine: EngineMemory, item: int,
    assume: Assumptions,
) -> float:  # fmt: skip
    """One decoding step of an engine: the weights that this batch touches and its keys and values are read once."""
    weights = engine_parameters(arch, tensor) * item
    mixture = arch.mixture
    if mixture:
        experts = len(mixture.layers) * mixture.experts * 3 * arch.hidden * mixture.ffn // tensor * item
        touched = 1 - (1 - mixture.topk / mixture.experts) ** max(1.0, batch)
        weights -= experts * (1 - touched)
    read = (weights + batch * context * engine.kv_bytes_per_token) / (device.memory_gbs * 1e9 * assume.decode_bandwidth)
    compute = batch * forward_flops(arch, context) / tensor / (device.tflops * 1e12 * assume.dense_efficiency)
    reduce = Network(device, assume.network_efficiency).link(
        "tensor", 4 * arch.layers * batch * arch.hidden * item * (tensor - 1) / tensor, tensor, tensor
    )
    return max(read, compute) + reduce.seconds + arch.layers * assume.decode_layer_us * 1e-6


def rollout_seconds(
    config: Config, arch: Architecture, device: Device, load: Workload, engine: EngineMemory, engines: int,
    assume: Assumptions,
) -> tuple[float, float]:  # fmt: skip
    """(seconds of generation, sequences at once). Work in bulk, then the longest answer alone with a few others."""
    tensor, item = config.rollout.tensor_parallel_size, ITEM[config.derived.rollout_dtype]
    sequences = ceil(load.generated_sequences / engines)
    fits = engine.kv_tokens / (load.prompt_tokens + load.response_tokens / 2)
    batch = min(float(config.rollout.max_num_seqs), float(sequences), fits)
    if batch < 1:
        return float("inf"), 0.0
    mean = load.prompt_tokens + load.response_tokens / 2
    step = decode_seconds(arch, device, tensor, batch, mean, engine, item, assume)
    bulk = sequences * load.response_tokens / batch * step
    alone = decode_seconds(arch, device, tensor, 1 + log(batch), load.longest_response, engine, item, assume)
    tail = load.longest_response * alone
    prompts = (
        load.generated_prompts * load.prompt_tokens * (1 if config.rollout.enable_prefix_caching else config.rollout.n)
    )
    prefill = prompts / engines * forward_flops(arch, load.prompt_tokens)
    prefill /= tensor * device.tflops * 1e12 * assume.dense_efficiency
    return prefill + max(bulk, tail), batch


def step_time(
    config: Config, arch: Architecture, topology: Topology, device: Device, load: Workload, engine: EngineMemory,
    stages: tuple[StageMemory, ...], assume: Assumptions,
) -> StepTime:  # fmt: skip
    """The synchronous step: generate, log-probabilities, update, push."""
    one = busiest_pass(config, arch, topology, device, load, assume, engine, stages)
    pipeline, chunks = topology.pipeline, topology.chunks
    per_step = load.micro_batches(topology.data)
    forward_only = load.micro_batches(topology.data, load.trained_tokens)
    fill_up = (pipeline - 1) / chunks
    backward = 2 * one.arithmetic + one.exposed
    again = one.seconds if config.model.recompute == "full" else 0.0
    update = (per_step + fill_up) * (one.seconds + backward + again)
    update += one.traffic.data.seconds * (1 - assume.overlap)
    inference = (forward_only + fill_up) * one.seconds
    tensor = config.rollout.tensor_parallel_size
    engines = config.rollout.engines or max(1, topology.world // tensor)
    generation, batch = rollout_seconds(config, arch, device, load, engine, engines, assume)
    critic, reference = config.derived.critic_enabled, config.derived.reference_needed
    moved = max(offloaded_bytes(config, stage) for stage in stages)
    seconds = {
        "gen": generation,
        "old_log_prob": inference,
        "ref": inference if reference else 0.0,
        "values": inference if critic else 0.0,
        "update_critic": update * load.optimizer_steps if critic else 0.0,
        "update_actor": update * load.optimizer_steps,
        "update_weights": one.traffic.push.seconds,
        "offload": moved / (assume.host_gbs * 1e9),
    }
    per_token, total = forward_flops(arch, load.sequence_tokens), sum(seconds.values())
    trained = load.trained_tokens * config.actor.ppo_epochs * per_token * 3
    peak = topology.world * device.tflops * 1e12
    passes = 1 + reference
    whole = trained * (2 if critic else 1) + load.trained_tokens * per_token * (passes + critic)
    whole += load.generated_sequences * load.sequence_tokens * per_token
    return StepTime(
        stages={name: value for name, value in seconds.items() if value},
        bubble=fill_up / (per_step + fill_up),
        micro_batches=per_step,
        flops=whole,
        mfu_update=trained / (seconds["update_actor"] * peak),
        communication=one.exposed / one.seconds,
        tokens_per_gpu_second=load.trained_tokens / total / topology.world,
        traffic=one.traffic,
        concurrency=batch,
    )


def offloaded_bytes(config: Config, stage: StageMemory) -> float:
    """What goes to the host and comes back in a step."""
    moved = 0.0
    for role, away in roles(config, stage.actor, stage.critic, stage.reference):
        moved += (role.parameters if away.param else 0.0) + (role.optimizer if away.optimizer else 0.0)
    return 2 * moved  # gradients are zeroed, not moved
