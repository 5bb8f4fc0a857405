"""Saved in one layout and loaded into another, training goes on as if nothing had happened.

The save is a background one: three more steps are trained while it is being written, and must not be in it.
"""

import multiprocessing as mp
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.parity import Case, _largest, boxes, engine_of, make_rows, weighted_loss
from tests.models.hf_models import saved

MODEL = "qwen3_moe"
SAVED = Case("tp2 pp2 ep2", MODEL, dict(tensor=2, pipeline=2, expert=2))
LOADED = [
    (1, Case("tp1", MODEL)),
    (4, Case("tp4", MODEL, dict(tensor=4))),
    (4, Case("ep4", MODEL, dict(expert=4), micro=1)),
]


def _steps(engine: Any, first: int, micro: int) -> None:
    from megatron.core import parallel_state as mpu

    rows = make_rows(engine.arch.vocab, even=False)
    count = int(rows["response_mask"].sum())
    mine = list(rows.split(micro))[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
    for step in range(first, first + 3):
        engine.set_step(step)
        engine.train_step(mine, weighted_loss(count), ["log_probs", "entropy"])


def _parameters(engine: Any, layout: Any) -> dict[Any, Any]:
    from megatron_dapo.models.storage import storages

    return boxes(layout, storages(engine.chunks))


def _save(hf_dir: str, directory: str) -> dict[Any, Any]:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from megatron_dapo.engine.checkpoint import save_engine

    # Megatron's is spawned, and every rank would wait for another import of torch.
    manager = mp.get_context("fork").Manager()
    filesystem_async._results_queue = manager.Queue()
    engine, layout = engine_of(SAVED, hf_dir, steps=6)
    _steps(engine, 1, SAVED.micro)
    writes = AsyncCallsQueue()
    save_engine(engine, Path(directory), writes)
    metadata = Path(directory) / "metadata.json"
    assert not metadata.exists()  # what makes it a checkpoint comes last
    _steps(engine, 4, SAVED.micro)
    writes.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    assert metadata.exists()
    manager.shutdown()
    return _parameters(engine, layout)


def _load(case: Case, hf_dir: str, directory: str) -> dict[Any, Any]:
    from megatron_dapo.engine.checkpoint import load_engine

    engine, layout = engine_of(case, hf_dir, steps=6)
    load_engine(engine, Path(directory))
    _steps(engine, 4, case.micro)
    return _parameters(engine, layout)


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    everything: dict[Any, Any] = {}
    for part in ranks.run(_save, 4, str(saved(MODEL)), str(directory)):
        everything |= part
    return directory, everything


@pytest.mark.parametrize(("world", "case"), LOADED, ids=[str(case) for _, case in LOADED])
def test_training_goes_on_in_another_layout(ranks, uninterrupted, world, case):
    directory, expected = uninterrupted
    for found in ranks.run(_load, world, case, str(saved(MODEL)), str(directory)):
        difference, where = _largest(found, expected, relative=False)
        assert difference <= 1e-6, where
