"""Between its uses a role's memory is free, and training does not notice that it was away."""

from typing import Any

import pytest
import torch

from tests.distributed.parity import Case, engine_of, make_rows, weighted_loss
from tests.models.hf_models import saved


def _train(hf_dir: str, dtype: str, away: dict[str, bool] | None) -> tuple[dict[str, Any], dict[str, int]]:
    """Parameters after a forward and two steps; with `away`, bytes held between them."""
    from contextlib import nullcontext

    from megatron_dapo.config.training import OffloadConfig
    from megatron_dapo.engine.offload import (
        Offload,
        gradient_tensors,
        optimizer_tensors,
        parameter_tensors,
        storages_of,
    )

    case = Case("alone", "qwen3_moe", settings=dict(dtype=dtype))
    engine, _ = engine_of(case, hf_dir)
    offload = None if away is None else Offload(engine, OffloadConfig(**away))

    def present(training: bool) -> Any:
        return nullcontext() if offload is None else offload.present(training)

    rows = make_rows(engine.arch.vocab, even=False)
    with present(False):
        engine.forward([rows], ["log_probs"])
    for step in (1, 2):
        engine.set_step(step)
        with present(True):
            engine.train_step([rows[:4], rows[4:]], weighted_loss(100), ["log_probs", "entropy"])
    held = {
        "param": sum(s.nbytes() for s in storages_of(parameter_tensors(engine))),
        "grad": sum(s.nbytes() for s in storages_of(gradient_tensors(engine))),
        "optimizer": sum(s.nbytes() for s in storages_of(optimizer_tensors(engine))),
    }
    with present(False):
        return {name: p.detach().clone() for name, p in engine.chunks[0].named_parameters()}, held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_with_everything_away_between_uses(ranks, dtype):
    hf_dir = str(saved("qwen3_moe"))
    ((expected, before),) = ranks.run(_train, 1, hf_dir, dtype, None)
    ((found, after),) = ranks.run(_train, 1, hf_dir, dtype, dict(param=True, grad=True, optimizer=True))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert min(before.values()) > 0 and max(after.values()) == 0, (before, after)


def test_only_what_is_asked_for_leaves(ranks):
    ((_, held),) = ranks.run(_train, 1, str(saved("qwen3_moe")), "bfloat16", dict(optimizer=True))
    assert held["optimizer"] == 0 < min(held["param"], held["grad"])
