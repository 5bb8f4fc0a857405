"""How evenly tokens fall on experts: counts per layer and expert, and what they say about balance and agreement."""

from collections.abc import Hashable, Iterable, Mapping, MutableMapping
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_dapo.metrics.typed import Metrics, PerLayer

CPU_CHUNK = (
    1 << 17
)  # assignments widened to int64 at once: the scratch stays in cache and does not grow with the tokens
GPU_CHUNK = 1 << 24


class MoELoadAccumulator:
    """Counts how often every expert of every MoE layer was chosen; memory is `layers × experts`, whatever the tokens.

    Layers are numbered as MoE layers of the whole model, 0 … num_layers-1. Two sources feed it:

    * the rollout engine's routed experts (`update`, `update_trajectory`): response tokens only, without the last one,
      which was sampled but never fed through the model, so it has no routing. Prompt tokens do not count, so rows that
      a prefix-cache hit left out of the prompt do not matter;
    * the training router (`update_layer`), one layer and one micro-batch at a time.

    An id outside `[0, num_experts)` is counted in `invalid` and skipped; it never wraps onto another expert.
    """

    def __init__(self, num_layers: int, num_experts: int, prefix: str = "rollout/moe") -> None:
        if num_layers < 1 or num_experts < 1:
            raise ValueError(f"MoELoadAccumulator needs layers and experts, got {num_layers} and {num_experts}")
        self.num_layers, self.num_experts, self.prefix = num_layers, num_experts, prefix
        self._cells = torch.zeros(num_layers * num_experts + 1, dtype=torch.int64)  # the last cell counts invalid ids
        self._previous: Tensor | None = None
        self._seen: set[Hashable] = set()

    @property
    def counts(self) -> Int[Tensor, "layers experts"]:
        """Assignments since the last reset (a view, not a copy)."""
        return self._cells[:-1].view(self.num_layers, self.num_experts)

    @property
    def invalid(self) -> int:
        """Ids outside the experts since the last reset."""
        return int(self._cells[-1])

    def update(
        self, routed_experts: Int[Tensor, "b s layers k"] | np.ndarray, response_mask: Bool[Tensor, "b t"]
    ) -> None:
        """Counts the response tokens of a padded batch: the last `t` of the `s` positions are the response.

        A row's last valid token is left out (see above). Raises ValueError when the shapes do not fit each other.
        """
        ids = _as_tensor(routed_experts)
        if ids.ndim != 4 or response_mask.ndim != 2 or ids.shape[0] != response_mask.shape[0]:
            raise ValueError(
                f"routed_experts must be [batch, sequence, layers, k] and response_mask [batch, response], "
                f"got {tuple(ids.shape)} and {tuple(response_mask.shape)}"
            )
        prompt_width = ids.shape[1] - response_mask.shape[1]
        if prompt_width < 0:
            raise ValueError(f"response_mask is wider ({response_mask.shape[1]}) than routed_experts ({ids.shape[1]})")
        mask = response_mask.bool().to(ids.device)
        later = mask.flip(-1).cumsum(-1).flip(-1) - mask.long()  # valid tokens after this one
        row, column = (mask & (later > 0)).nonzero(as_tuple=True)
        tokens = row * ids.shape[1] + column + prompt_width
        flat = ids.flatten(0, 1)
        for part in tokens.split(self._tokens_per_chunk(ids)):
            self._count(flat.index_select(0, part))

    def update_trajectory(self, routed_experts: Int[Tensor, "n layers k"] | np.ndarray, response_length: int) -> None:
        """Counts one unpadded trajectory, `n = prompt + response - 1` rows: its last `response_length - 1` rows."""
        self.update_trajectories([(routed_experts, response_length)])

    def update_trajectories(self, samples: Iterable[tuple[Int[Tensor, "n layers k"] | np.ndarray, int]]) -> None:
        """`update_trajectory` of many; short ones are counted together, for every count costs something of its own."""
        waiting: list[Tensor] = []
        tokens = 0
        for routed_experts, response_length in samples:
            ids, fed = _as_tensor(routed_experts), max(0, response_length - 1)
            if fed > len(ids):
                raise ValueError(f"{response_length} response tokens need {fed} routing rows, got {len(ids)}")
            waiting.append(ids[len(ids) - fed :])
            tokens += fed
            if tokens >= self._tokens_per_chunk(ids):
                self.update_rows(torch.cat(waiting))
                waiting, tokens = [], 0
        if waiting:
            self.update_rows(torch.cat(waiting))

    def update_rows(self, ids: Int[Tensor, "n layers k"] | np.ndarray) -> None:
        """Counts every given token."""
        ids = _as_tensor(ids)
        for part in ids.split(self._tokens_per_chunk(ids)):
            self._count(part)

    def update_layer(self, layer: int, ids: Int[Tensor, "n k"] | np.ndarray, once: Hashable | None = None) -> None:
        """Counts the router's choice of one layer, for the tokens this rank holds.

        `once` names the micro-batch (any hashable): the same layer and name count once, so a recomputed forward or a
        replayed pass adds nothing. Ranks that hold different tokens (DP, CP, EP, sequence parallel) or layers (PP,
        VPP) all count; of ranks that hold the same tokens (TP without sequence parallelism) only one may.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is not one of {self.num_layers} MoE layers")
        if once is not None:
            if (layer, once) in self._seen:
                return
            self._seen.add((layer, once))
        flat = _as_tensor(ids).reshape(-1)
        for part in flat.split(CPU_CHUNK if flat.device.type == "cpu" else GPU_CHUNK):
            self._add(part, torch.tensor(layer * self.num_experts, device=part.device).expand(part.shape))

    def add_counts(self, counts: Int[Tensor, "layers experts"], invalid: int = 0) -> None:
        """Adds counts made elsewhere, e.g. by the ranks, and how many ids were skipped there."""
        if self.counts.shape != counts.shape:
            raise ValueError(f"counts {tuple(self.counts.shape)} and {tuple(counts.shape)} cannot be added")
        self._cells[:-1] += counts.flatten().cpu()
        self._cells[-1] += invalid

    def merge(self, other: Self) -> None:
        """Adds another accumulator's counts (of a rank, a micro-batch, a rollout engine)."""
        if self.counts.shape != other.counts.shape:
            raise ValueError(f"counts {tuple(self.counts.shape)} and {tuple(other.counts.shape)} cannot be merged")
        self._cells += other._cells

    def all_reduce(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        """Sums the counts over the ranks of `group` in one collective; every rank then holds the total.

        `device` is where the group's backend wants tensors (the rank's GPU for NCCL).
        """
        cells = self._cells.to(device or "cpu")
        dist.all_reduce(cells, group=group)
        self._cells = cells.cpu()

    def compute(self) -> dict[str, float]:
        """Balance per layer and overall, drift from the previous report, invalid ids; nothing counted, no keys."""
        metrics = balance(self.counts, self.prefix)
        if metrics and self._previous is not None:
            metrics |= _overall(f"{self.prefix}/drift", load_distance(self._previous, self.counts))
        if self.invalid:
            metrics[f"{self.prefix}/invalid_assignments"] = float(self.invalid)
        return metrics

    def add_to_metrics(self, metrics: MutableMapping[str, Any]) -> None:
        """Adds `compute()`, whether anything was found and how much, then starts a new report."""
        metrics.update(self.compute())
        total = int(self.counts.sum())
        metrics[f"{self.prefix}/routed_experts_found"] = 1.0 if total else 0.0
        metrics[f"{self.prefix}/routed_expert_assignments"] = float(total)
        self.reset()

    def reset(self) -> None:
        """Forgets the counts, keeping them only as what the next report's drift is measured from."""
        if self.counts.any():
            self._previous = self.counts.clone()
        self.clear()

    def clear(self) -> None:
        """Forgets the counts as if they had never been: drift is measured from what was reported before."""
        self._cells = torch.zeros_like(self._cells)
        self._seen.clear()

    def state_dict(self) -> dict[str, Any]:
        """The counts so far and those of the last report, which the next one's drift is measured from."""
        return {"cells": self._cells.clone(), "previous": self._previous}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cells, self._previous = state["cells"], state["previous"]

    def _tokens_per_chunk(self, ids: Tensor) -> int:
        if ids.shape[-2] != self.num_layers:
            raise ValueError(f"routed experts of {ids.shape[-2]} layers, but the accumulator has {self.num_layers}")
        chunk = CPU_CHUNK if ids.device.type == "cpu" else GPU_CHUNK
        return max(1, chunk // max(1, ids.shape[-2] * ids.shape[-1]))

    def _count(self, ids: Int[Tensor, "n layers k"]) -> None:
        first = torch.arange(self.num_layers, device=ids.device)[:, None] * self.num_experts
        self._add(ids, first.expand(ids.shape[1:]).contiguous())  # laid out like one token: adding it is one plain pass

    def _add(self, ids: Int[Tensor, "..."], first: Int[Tensor, "..."]) -> None:
        """Adds ids to the cells `first + id`."""
        if ids.numel() == 0:
            return
        cells = ids + first
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= self.num_experts:
            cells = torch.where((ids >= 0) & (ids < self.num_experts), cells, self._cells.numel() - 1)
        self._cells += torch.bincount(cells.reshape(-1), minlength=self._cells.numel()).cpu()


def balance(counts: Int[Tensor, "layers experts"], prefix: str) -> dict[str, float]:
    """Balance of each layer and overall, from assignment counts.

    With `load` an expert's share times the number of experts (1 = even):
    `max_vio = max load - 1` (the extra work of the busiest expert), `min_vio = min load - 1`,
    `avg_vio = mean |load - 1|`, `cv` = standard deviation of load, `entropy` = entropy of the shares / log experts
    (1 = even), `dead_experts` = experts without a token. Each as `/layer_{i}`, `/max`, `/avg` over layers; layers
    without any assignment (not held here) are left out.
    """
    used = counts.sum(-1) > 0
    layers = used.nonzero().flatten().tolist()
    if not layers:
        return {}
    share = counts[used].double()
    share /= share.sum(-1, keepdim=True)
    experts = counts.shape[-1]
    deviation = share * experts - 1
    values = {
        "max_vio": deviation.amax(-1),
        "min_vio": deviation.amin(-1),
        "avg_vio": deviation.abs().mean(-1),
        "cv": deviation.square().mean(-1).sqrt(),
        "entropy": torch.special.entr(share).sum(-1) / torch.log(torch.tensor(float(max(experts, 2)))),
        "dead_experts": (share == 0).double().sum(-1),
    }
    metrics: dict[str, float] = {}
    for name, per_layer in values.items():
        for layer, value in zip(layers, per_layer.tolist(), strict=True):
            metrics[f"{prefix}/{name}/layer_{layer}"] = value
        metrics |= _overall(f"{prefix}/{name}", per_layer)
    return metrics


def load_distance(a: Int[Tensor, "layers experts"], b: Int[Tensor, "layers experts"]) -> Float[Tensor, " used_layers"]:
    """Total variation distance of two load distributions per layer, 0 (same) … 1 (disjoint); layers in both only."""
    used = (a.sum(-1) > 0) & (b.sum(-1) > 0)
    p, q = (x[used].double() / x[used].double().sum(-1, keepdim=True) for x in (a, b))
    return (p - q).abs().sum(-1) / 2


def routing_disagreement(
    rollout: Int[Tensor, "n layers k"] | np.ndarray,
    training: Int[Tensor, "n layers k"] | np.ndarray,
    prefix: str = "training/moe",
) -> Metrics:
    """Share of expert choices that the trainer's router does not share with the rollout's, for the same tokens.

    The order within the top-k does not matter. `/layer_{i}`, `/max`, `/avg`; 0 is full agreement. This is what router
    replay brings to zero, and the first place to look when log-probs of an MoE disagree.
    """
    a, b = (_as_tensor(ids) for ids in (rollout, training))
    if a.shape != b.shape or a.ndim != 3:
        raise ValueError(f"routing of the same tokens must have one shape [n, layers, k]: {a.shape} and {b.shape}")
    n, layers, k = a.shape
    if n == 0:
        return {}
    shared = torch.zeros(layers, dtype=torch.int64)
    for x, y in zip(a.split(4096), b.split(4096), strict=True):
        shared += (x.long()[..., :, None] == y.long()[..., None, :]).any(-1).sum((0, -1)).cpu()
    lost = (n * k - shared).double()
    return {f"{prefix}/routing_disagreement": PerLayer(tuple(lost.tolist()), n * k)}


def source_distance(rollout: MoELoadAccumulator, training: MoELoadAccumulator) -> dict[str, float]:
    """How far the two sources' loads differ, `training/moe/rollout_distance/{max,avg}`; cheap, needs counts only."""
    return _overall("training/moe/rollout_distance", load_distance(rollout.counts, training.counts))


def _overall(name: str, per_layer: Float[Tensor, " layers"]) -> dict[str, float]:
    if per_layer.numel() == 0:
        return {}
    return {f"{name}/max": float(per_layer.max()), f"{name}/avg": float(per_layer.mean())}


def _as_tensor(ids: Tensor | np.ndarray) -> Tensor:
    """As a tensor without a copy; unsigned types torch cannot compute with are read as signed (too big = negative)."""
    tensor = ids if isinstance(ids, Tensor) else torch.from_numpy(np.ascontiguousarray(ids))
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return tensor.view(signed[tensor.dtype]) if tensor.dtype in signed else tensor
