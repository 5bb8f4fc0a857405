"""Where experts live and what their load costs: load per EP rank, GPU and node, and what other placements give."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

EMPTY = -1


@dataclass(frozen=True)
class Placement:
    """Which experts each GPU holds.

    `slots[layer, gpu, slot]` is an expert id, or -1 for an empty slot (a GPU of another pipeline stage holds nothing of
    this layer). An expert in several slots is replicated and its tokens are shared evenly among the copies: expert data
    parallelism, expert tensor parallelism (each rank does its share of the work) and hot-expert replication alike.
    """

    slots: Int[np.ndarray, "layers gpus slots"]
    gpus_per_node: int
    ep_rank: tuple[int, ...]  # of each GPU

    def __post_init__(self) -> None:
        if self.slots.ndim != 3 or self.slots.shape[1] != len(self.ep_rank):
            raise ValueError(f"slots {self.slots.shape} must be [layers, {len(self.ep_rank)} gpus, slots]")
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node must be at least 1, got {self.gpus_per_node}")

    @property
    def gpus(self) -> int:
        return self.slots.shape[1]

    @property
    def holds(self) -> Bool[np.ndarray, "layers gpus"]:
        """Which GPU holds anything of which layer."""
        return (self.slots != EMPTY).any(-1)

    @property
    def node(self) -> tuple[int, ...]:
        """The node of each GPU."""
        return tuple(gpu // self.gpus_per_node for gpu in range(self.gpus))


def megatron_placement(
    num_layers: int,
    num_experts: int,
    *,
    world: int,
    expert: int,
    expert_tensor: int = 1,
    stage_layers: Sequence[Sequence[int]] | None = None,
    gpus_per_node: int = 8,
) -> Placement:
    """Megatron-core's placement: ranks in the order expert-tensor, expert, expert-data, pipeline (fastest first), each
    EP rank with a contiguous block of `num_experts / expert` experts.

    `stage_layers[p]` lists the MoE layers of pipeline stage p (all its virtual chunks); None: one stage holds all.
    """
    stages = [list(range(num_layers))] if stage_layers is None else [list(layers) for layers in stage_layers]
    if num_experts % expert or world % (expert * expert_tensor * len(stages)):
        raise ValueError(
            f"{num_experts} experts over expert={expert} and world={world} over expert_tensor={expert_tensor} × "
            f"expert={expert} × {len(stages)} pipeline stages must divide evenly"
        )
    each = num_experts // expert
    slots = np.full((num_layers, world, each), EMPTY)
    ep_rank = tuple(gpu // expert_tensor % expert for gpu in range(world))
    gpus_per_stage = world // len(stages)
    for gpu in range(world):
        first = ep_rank[gpu] * each
        slots[stages[gpu // gpus_per_stage], gpu] = np.arange(first, first + each)
    return Placement(slots, gpus_per_node, ep_rank)


def gpu_load(counts: Int[np.ndarray, "layers experts"], placement: Placement) -> Float[np.ndarray, "layers gpus"]:
    """Assignments each GPU works on per layer. Raises ValueError when an expert with load is placed nowhere."""
    layers, experts = counts.shape
    if placement.slots.shape[0] != layers:
        raise ValueError(f"counts of {layers} layers on a placement of {placement.slots.shape[0]}")
    row = np.arange(layers)[:, None, None] * experts
    held = placement.slots != EMPTY
    copies = np.bincount((placement.slots + row)[held], minlength=layers * experts).reshape(layers, experts)
    lost = np.argwhere((copies == 0) & (counts > 0))
    if len(lost):
        raise ValueError(f"expert {lost[0][1]} of layer {lost[0][0]} has load but is placed on no GPU")
    share = (counts / np.maximum(copies, 1)).ravel()
    return np.where(held, share[np.where(held, placement.slots + row, 0)], 0.0).sum(-1)


def overhead(load: Float[np.ndarray, "layers holders"], holds: Bool[np.ndarray, "layers holders"]) -> float:
    """Step-time cost of imbalance: `Σ_layers max / Σ_layers mean`, the mean over those that hold something of a layer.

    Every layer ends with an exchange that waits for its slowest holder, so the maxima add up. 1 is perfect balance; 1.3
    means that expert layers take 30 % longer than they could. Counts are summed over many micro-batches, each of which
    is less even than their sum, so this is a lower bound. Without any load it is 1.
    """
    even = load.sum(-1) / np.maximum(holds.sum(-1), 1)
    return float(load.max(-1).sum() / even.sum()) if even.sum() > 0 else 1.0


def load_by(
    load: Float[np.ndarray, "layers gpus"], owner: Sequence[int] | np.ndarray
) -> Float[np.ndarray, "layers owners"]:
    """GPU loads added up by owner (node, EP rank) of each GPU."""
    groups = np.asarray(owner)
    return load @ (groups[:, None] == np.arange(groups.max() + 1))


def placement_metrics(
    counts: Int[np.ndarray, "layers experts"], placement: Placement, prefix: str = "rollout/moe"
) -> dict[str, float]:
    """`{prefix}/{gpu,ep_rank,node}_load/max_over_mean` (time cost), `…/worst_layer`; `gpu_load/slowest` (number)."""
    if not counts.any():
        return {}
    load = gpu_load(counts, placement)
    metrics: dict[str, float] = {f"{prefix}/gpu_load/slowest": float(load.sum(0).argmax())}
    owners = {
        "gpu": range(placement.gpus),
        "ep_rank": placement.ep_rank,
        "node": placement.node,
    }
    for name, owner in owners.items():
        held, holds = load_by(load, owner), load_by(placement.holds, owner) > 0
        worst = max(overhead(held[i : i + 1], holds[i : i + 1]) for i in range(len(held)))
        metrics[f"{prefix}/{name}_load/max_over_mean"] = overhead(held, holds)
        metrics[f"{prefix}/{name}_load/worst_layer"] = worst
    return metrics


def greedy_placement(
    counts: Int[np.ndarray, "layers experts"], gpus: int, gpus_per_node: int, extra_slots: int = 0
) -> Placement:
    """A placement fitted to `counts`: `extra_slots` copies per GPU for the hottest experts, packed heaviest first.

    Copies go one by one to the expert with the largest load per copy; then the (replicated) experts, heaviest first, go
    to the least loaded GPU, on the least loaded node among equals, that has a free slot and no copy of it yet (the
    scheme of DeepSeek's EPLB, without its groups). Experts need not divide evenly: GPUs then have `ceil` slots.
    """
    layers, experts = counts.shape
    slots_per_gpu = -(-experts // gpus) + extra_slots
    slots = np.full((layers, gpus, slots_per_gpu), EMPTY)
    node = np.arange(gpus) // gpus_per_node
    for layer in range(layers):
        copies = _copies(counts[layer], min(gpus * slots_per_gpu, experts + gpus * extra_slots), gpus)
        weight = counts[layer] / copies
        order = np.argsort(-weight, kind="stable")
        load, used = np.zeros(gpus), np.zeros(gpus, dtype=int)
        for e in np.repeat(order, copies[order]):
            on_node = np.bincount(node, load)[node]
            taken = (used == slots_per_gpu) * 2 + (slots[layer] == e).any(-1)  # a second copy only in need
            gpu = np.lexsort((used, on_node, load, taken))[0]
            slots[layer, gpu, used[gpu]] = e
            load[gpu] += weight[e]
            used[gpu] += 1
    return Placement(slots, gpus_per_node, tuple(range(gpus)))


def _copies(load: Int[np.ndarray, " experts"], total: int, limit: int) -> Int[np.ndarray, " experts"]:
    """Copies per expert, `total` in all, at least one each and at most `limit`, the hottest per copy first."""
    copies = np.ones(len(load), dtype=int)
    for _ in range(total - len(load)):
        per_copy = np.where(copies < limit, load / copies, -1.0)
        copies[per_copy.argmax()] += 1
    return copies
