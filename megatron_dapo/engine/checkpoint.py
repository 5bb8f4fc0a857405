"""One engine's distributed checkpoint: model, optimizer and schedule, loadable into any other layout."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_dapo.engine.engine import MegatronEngine

_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save_engine(engine: MegatronEngine, directory: Path, background: AsyncCallsQueue | None = None) -> None:
    """Collective over all ranks. `directory` must exist and be empty; the caller makes the result visible.

    With `background` this returns as soon as the state is fixed (copied to the host; on a host, kept by a forked
    process), and the files are complete once the queue has finalised the call, which is collective too.
    """
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), _replicas(), False)
    request = dist_checkpointing.save(
        _state(engine, loading=False),
        str(directory),
        strategy,
        async_sharded_save=background is not None,
        content_metadata=_CONTENT,
    )
    if background is not None and request is not None:
        background.schedule_async_request(request)


def load_engine(engine: MegatronEngine, directory: Path) -> None:
    """Collective. The checkpoint may come from another tensor, pipeline, expert or data parallel layout."""
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(directory)), _replicas())
    state = dist_checkpointing.load(_state(engine, loading=True), str(directory), strategy)
    for name, chunk in zip(_chunk_names(engine), engine.chunks, strict=True):
        chunk.load_state_dict(state[name])
    if engine.training is not None:
        engine.training.optimizer.load_state_dict(state["optimizer"])
        engine.training.scheduler.load_state_dict(state["scheduler"])


def _replicas() -> dist.ProcessGroup:
    return mpu.get_data_parallel_group(with_context_parallel=True)


def _chunk_names(engine: MegatronEngine) -> list[str]:
    return ["model"] if len(engine.chunks) == 1 else [f"model{index}" for index in range(len(engine.chunks))]


def _state(engine: MegatronEngine, *, loading: bool) -> dict[str, Any]:
    metadata = {**_CONTENT, "dp_cp_group": _replicas()}
    state: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(_chunk_names(engine), engine.chunks, strict=True)
    }
    if engine.training is not None:
        model = state if len(engine.chunks) > 1 else state["model"]
        state["optimizer"] = engine.training.optimizer.sharded_state_dict(
            dict(model), is_loading=loading, metadata=metadata
        )
        state["scheduler"] = engine.training.scheduler.state_dict()
    return state
