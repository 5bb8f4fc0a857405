"""What a pipeline stage holds, and how to cut layers into stages when they do not divide."""

from dataclasses import dataclass
from functools import lru_cache

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.parallel.topology import Topology


@dataclass(frozen=True)
class StageShape:
    """All chunks of one pipeline stage together."""

    layers: int
    moe: int
    embedding: bool
    head: bool

    @property
    def dense(self) -> int:
        return self.layers - self.moe


def stage_shape(arch: Architecture, topology: Topology, pp: int) -> StageShape:
    """The shape of stage `pp`."""
    return stage_shapes(arch, topology)[pp]


@lru_cache(maxsize=4096)
def stage_shapes(arch: Architecture, topology: Topology) -> tuple[StageShape, ...]:
    """The shapes of all pipeline stages."""
    experts = set(arch.mixture.layers) if arch.mixture else set()
    shapes = []
    stages = topology.stages(arch.layers)
    for pp in range(topology.pipeline):
        mine = [stage for stage in stages if stage.pp == pp]
        layers = [layer for stage in mine for layer in stage.layers]
        ends = any(stage.embedding for stage in mine), any(stage.head for stage in mine)
        shapes.append(StageShape(len(layers), sum(layer in experts for layer in layers), *ends))
    return tuple(shapes)


def even_split(layers: int, pipeline: int, chunks: int = 1) -> tuple[int | None, int | None] | None:
    """(first_stage_layers, last_stage_layers): (None, None) where the layers divide, None where there is no split.

    All middle stages get the same, the ends, which hold more besides, the rest; the last at most as much as the first.
    """
    if layers % (pipeline * chunks) == 0:
        return None, None
    if pipeline < 2 or chunks > 1 or layers < pipeline:
        return None
    if pipeline == 2:
        return (layers + 1) // 2, layers // 2
    middle = -(-layers // pipeline)
    rest = layers - middle * (pipeline - 2)
    if rest < 2:
        return None
    return (rest + 1) // 2, rest // 2
