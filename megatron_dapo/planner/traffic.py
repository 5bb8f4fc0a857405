"""Bytes that a rank sends, by kind of communication, and over which links: inside a node or between nodes.

Counts are per rank and direction. A ring all-gather or reduce-scatter of S bytes over n ranks sends S·(n-1)/n; an
all-to-all keeps 1/n at home.
"""

from dataclasses import dataclass

from megatron_dapo.config import Config
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.activations import FP32, Pack
from megatron_dapo.planner.assumptions import Assumptions
from megatron_dapo.planner.devices import Device
from megatron_dapo.planner.memory import ITEM
from megatron_dapo.planner.parameters import Parameters
from megatron_dapo.planner.stages import StageShape


@dataclass(frozen=True)
class Link:
    """One kind of traffic: bytes, the group's size, how far apart its ends are, and the seconds that takes."""

    kind: str
    bytes: float
    ranks: int
    crosses_nodes: bool
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """Of the busiest stage's ranks. `layers` is one micro-batch forwards; a backward pass sends the same again."""

    tensor: Link
    all_to_all: Link
    context: Link
    pipeline: Link
    data: Link  # once per optimizer step
    push: Link  # once per step: what a rollout rank receives, or a trainer's rank sends, whichever is more


@dataclass(frozen=True)
class Network:
    """The links of a cluster of one kind of device."""

    device: Device
    efficiency: float

    def link(self, kind: str, size: float, ranks: int, span: int) -> Link:
        """`span` is how many consecutive ranks the group reaches over: a node's worth stays inside the node."""
        crosses = span > self.device.per_node
        rate = self.device.network_gbs if crosses else self.device.node_gbs
        inside = self.device.per_node / span if crosses else 1.0  # of an all-to-all, what stays inside the node
        if crosses and kind == "all_to_all":
            seconds = size / 1e9 * max((1 - inside) / self.device.network_gbs, inside / self.device.node_gbs)
        else:
            seconds = size / 1e9 / rate
        return Link(kind, size, ranks, crosses, seconds / self.efficiency)


def layer_traffic(
    config: Config, arch: Architecture, topology: Topology, device: Device, tokens: float, stage: StageShape,
    assume: Assumptions,
) -> tuple[Link, Link, Link, Link]:  # fmt: skip
    """(tensor, all-to-all, context, pipeline) traffic of one micro-batch forwards through a stage."""
    network = Network(device, assume.network_efficiency)
    tensor, context, expert, etp = topology.tensor, topology.context, topology.expert, topology.etp
    item = ITEM[config.model.dtype]
    pack = Pack.of(tokens, topology, tensor > 1, item)
    hidden, moe = arch.hidden, stage.moe
    blocks = 2 * stage.layers - moe  # attention and dense MLP are entered and left by a gather and a scatter
    if arch.mixture and arch.mixture.shared_ffn:
        blocks += moe
    whole = pack.whole * hidden * item * (tensor - 1) / tensor
    rows = pack.share * (arch.mixture.topk if arch.mixture else 0) * hidden * item
    inside_expert = 2 * moe * rows * (etp - 1)
    exchanged = 2 * moe * rows * (expert - 1) / expert * (assume.imbalance if expert > 1 else 1.0)
    keys = _key_width(arch, tensor)
    ring = stage.layers * pack.whole * keys * item * (context - 1)
    boundary = pack.share * hidden * item * topology.chunks if topology.pipeline > 1 else 0.0
    stage_ranks = topology.world // topology.pipeline
    return (
        network.link("tensor", 2 * blocks * whole + inside_expert, max(tensor, etp), max(tensor, etp)),
        network.link("all_to_all", exchanged, expert, etp * expert),
        network.link("context", ring, context, tensor * context),
        network.link("pipeline", boundary, topology.pipeline, stage_ranks + 1),
    )


def _key_width(arch: Architecture, tensor: int) -> float:
    """Elements per token that context parallelism passes round: keys and values of this rank's heads."""
    if arch.latent:
        return arch.heads / tensor * (arch.latent.nope_dim + arch.latent.rope_dim + arch.latent.v_dim)
    return 2 * max(1.0, arch.kv_heads / tensor) * arch.head_dim


def data_traffic(config: Config, topology: Topology, device: Device, elements: Parameters, assume: Assumptions) -> Link:
    """One optimizer step of the distributed optimizer: float32 gradients scattered, parameters gathered."""
    network, item = Network(device, assume.network_efficiency), ITEM[config.model.dtype]
    dense_ranks, expert_ranks = topology.data * topology.context, topology.expert_data
    share = elements.dense * (dense_ranks - 1) / dense_ranks + elements.expert * (expert_ranks - 1) / expert_ranks
    return network.link("data", share * (FP32 + item), dense_ranks, topology.world // topology.pipeline if share else 1)


def push_link(
    topology: Topology, device: Device, engine_bytes: float, engine_tensor: int, engines: int, assume: Assumptions
) -> Link:
    """A weight push: every rollout rank receives exactly what it stores; the trainers share the sending evenly."""
    received, ranks = engine_bytes, engines * engine_tensor
    sent = engine_bytes * ranks / topology.world
    return Network(device, assume.network_efficiency).link("push", max(received, sent), ranks, topology.world)
