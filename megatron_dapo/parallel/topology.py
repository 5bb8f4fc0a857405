"""The five dimensions of a run as plain numbers: which rank stands where, and what is wrong with a layout. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import log2, prod

from megatron_dapo.errors import UserError
from megatron_dapo.parallel.stages import Stage, split_layers


@dataclass(frozen=True)
class Coordinate:
    """Where one rank stands. Dense layers see (tp, cp, dp, pp), expert layers (etp, ep, edp, pp)."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


class LayoutError(UserError, ValueError):
    """A layout that does not fit its world or its model; the text names everything wrong and legal neighbours."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a layout: the size to blame (a field of `Topology`) and a sentence."""

    size: str
    text: str


@dataclass(frozen=True)
class Topology:
    """Sizes of every dimension. Ranks are numbered in Megatron's order: tp fastest, then cp, (ep), dp, and pp last.

    `expert_tensor=None` means the tensor size without expert parallelism and 1 with it (experts whole on a rank).
    """

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    pipeline_layout: str | None = None

    @property
    def etp(self) -> int:
        """Tensor-parallel size inside experts."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return self.tensor if self.expert == 1 else 1

    @property
    def data(self) -> int:
        """Data-parallel size of the dense layers (context-parallel ranks not counted)."""
        return self.world // (self.tensor * self.context * self.pipeline)

    @property
    def expert_data(self) -> int:
        """How often each expert shard is replicated."""
        return self.world // (self.etp * self.expert * self.pipeline)

    @property
    def chunks(self) -> int:
        """Model chunks per rank: 1, or the virtual pipeline size."""
        return self.virtual_pipeline or 1

    def coordinate(self, rank: int) -> Coordinate:
        """Where `rank` stands. Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the world of {self.world}")
        pp, inner = divmod(rank, self.world // self.pipeline)
        tp, cp_dp = inner % self.tensor, inner // self.tensor
        etp, ep_edp = inner % self.etp, inner // self.etp
        return Coordinate(
            rank=rank,
            tp=tp,
            cp=cp_dp % self.context,
            dp=cp_dp // self.context,
            pp=pp,
            ep=ep_edp % self.expert,
            etp=etp,
            edp=ep_edp // self.expert,
        )

    def coordinates(self) -> Iterator[Coordinate]:
        """Every rank's coordinate, in rank order."""
        return (self.coordinate(rank) for rank in range(self.world))

    def stages(self, layers: int) -> tuple[Stage, ...]:
        """How the model's layers lie on pipeline ranks and chunks."""
        return split_layers(
            layers,
            self.pipeline,
            self.virtual_pipeline,
            self.first_stage_layers,
            self.last_stage_layers,
            self.pipeline_layout,
        )

    def problems(self, **model: int) -> list[str]:
        """Everything that is wrong with this layout, see `faults`; the last sentence names the nearest legal ones."""
        found = [fault.text for fault in self.faults(**model)]
        return [*found, self.neighbours(**model)] if found else []

    def faults(
        self,
        layers: int = 0,
        heads: int = 0,
        kv_heads: int = 0,
        experts: int = 0,
        expert_ffn: int = 0,
        ffn: int = 0,
        shared_ffn: int = 0,
    ) -> list[Fault]:
        """Everything that is wrong with this layout for a model of these sizes (0: unknown). None means legal."""
        found = self._world_faults()
        if min(self.tensor, self.pipeline, self.etp, self.expert) < 1:
            return found
        if heads % self.tensor:
            found.append(Fault("tensor", f"{heads} attention heads are not divisible by tensor {self.tensor}"))
        if kv_heads and kv_heads % self.tensor and self.tensor % kv_heads:
            found.append(Fault("tensor", f"{kv_heads} KV heads neither divide nor are divided by tensor {self.tensor}"))
        if ffn % self.tensor:
            found.append(Fault("tensor", f"feed-forward size {ffn} is not divisible by tensor {self.tensor}"))
        if shared_ffn % self.tensor:
            text = f"shared experts' feed-forward size {shared_ffn} is not divisible by tensor {self.tensor}"
            found.append(Fault("tensor", text))
        if experts and experts % self.expert:
            found.append(Fault("expert", f"{experts} experts are not divisible by expert {self.expert}"))
        if self.expert > 1 and not experts and layers:
            text = f"expert {self.expert} needs a mixture-of-experts model; this one has no experts"
            found.append(Fault("expert", text))
        if expert_ffn % self.etp:
            text = f"expert feed-forward size {expert_ffn} is not divisible by expert_tensor {self.etp}"
            found.append(Fault("expert_tensor", text))
        return found + (self._stage_faults(layers) if layers else [])

    def neighbours(self, **model: int) -> str:
        """The nearest legal layouts of the same world in words."""
        names = "; ".join(other.describe() for other in self.nearest_legal(**model))
        return f"nearest legal layouts: {names}" if names else f"no layout of {self.world} ranks fits"

    def nearest_legal(self, limit: int = 3, **model: int) -> list["Topology"]:
        """The legal layouts of this world that differ least from this one (sum of |log2| of the sizes' ratios)."""
        sizes = [n for n in range(1, self.world + 1) if self.world % n == 0]
        etps = sizes if self.expert_tensor is not None else [None]
        candidates = []
        for tp, pp, cp, ep, etp in product(sizes, sizes, sizes, sizes, etps):
            if self.world % (tp * pp * cp) or (model.get("experts", 0) == 0 and ep > 1):
                continue
            other = replace(self, tensor=tp, pipeline=pp, context=cp, expert=ep, expert_tensor=etp)
            for vpp in {self.virtual_pipeline if pp > 1 else None, None}:
                other = replace(other, virtual_pipeline=vpp)
                if pp != self.pipeline or vpp != self.virtual_pipeline:
                    other = replace(other, first_stage_layers=None, last_stage_layers=None, pipeline_layout=None)
                if not other.faults(**model):
                    candidates.append(other)
        return sorted(candidates, key=lambda other: (self._distance(other), other.describe()))[:limit]

    def describe(self) -> str:
        """The sizes that are not one, e.g. "tensor 2, pipeline 2, data 2"."""
        sizes = {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "virtual_pipeline": self.chunks,
            "context": self.context,
            "expert": self.expert,
            "expert_tensor": self.etp if self.etp != self.tensor or self.expert > 1 else 1,
            "data": self.data,
        }
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"

    def _distance(self, other: "Topology") -> float:
        pairs = [
            (self.tensor, other.tensor),
            (self.pipeline, other.pipeline),
            (self.chunks, other.chunks),
            (self.context, other.context),
            (self.expert, other.expert),
            (self.etp, other.etp),
        ]
        return sum(abs(log2(max(a, 1) / b)) for a, b in pairs)

    def _world_faults(self) -> list[Fault]:
        sizes = {
            "world": self.world,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "virtual_pipeline": self.chunks,
            "context": self.context,
            "expert": self.expert,
            "expert_tensor": self.etp,
        }
        found = [Fault(name, f"{name} is {size}, must be at least 1") for name, size in sizes.items() if size < 1]
        if found:
            return found
        dense = prod((self.tensor, self.context, self.pipeline))
        if self.world % dense:
            text = (
                f"world {self.world} is not divisible by tensor {self.tensor} x context {self.context} x "
                f"pipeline {self.pipeline} = {dense}"
            )
            found.append(Fault("world", text))
        sparse = prod((self.etp, self.expert, self.pipeline))
        if self.world % sparse:
            text = (
                f"world {self.world} is not divisible by expert_tensor {self.etp} x expert {self.expert} x "
                f"pipeline {self.pipeline} = {sparse}"
            )
            found.append(Fault("world", text))
        if self.chunks > 1 and self.pipeline == 1:
            found.append(Fault("virtual_pipeline", f"virtual_pipeline {self.chunks} needs pipeline > 1"))
        return found

    def _stage_faults(self, layers: int) -> list[Fault]:
        tried = [("pipeline", replace(self, virtual_pipeline=None)), ("virtual_pipeline", self)]
        for size, layout in tried if self.pipeline_layout is None else [("pipeline_layout", self)]:
            try:
                layout.stages(layers)
            except ValueError as error:
                return [Fault(size, str(error))]
        return []
