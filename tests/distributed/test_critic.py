"""The critic trains the same in every layout, through a checkpoint between its two steps: values, loss, parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity import Case, _largest, boxes, engine_of, make_rows
from tests.models.hf_models import saved

MODEL = "qwen3_moe"
LAYOUTS = [Case("tp2", MODEL, dict(tensor=2)), Case("pp2", MODEL, dict(pipeline=2))]


def _critic(case: Case, hf_dir: str) -> tuple[Any, Any]:
    """Its head at something else than zero, from which no gradient would reach the body."""
    engine, layout = engine_of(case, hf_dir, steps=2, value_head=True)
    for chunk in engine.chunks:
        if chunk.post_process:
            chunk.output_layer.weight.data.copy_(torch.linspace(-1, 1, engine.arch.hidden)[None])
    engine.trainable.optimizer.reload_model_params()
    return engine, layout


def _step(engine: Any, number: int) -> tuple[list[Any], float, Any]:
    """The values before the step, and what the step reports."""
    from megatron_dapo.config.training import CriticConfig
    from megatron_dapo.engine.losses import Normalizer, critic_loss

    rows = make_rows(engine.arch.vocab, even=False)
    rows["returns"], rows["values"] = rows["weight"], 0.1 * rows["weight"]
    micro = list(rows.split(2))
    values = [output["values"] for output in engine.forward(micro, ["values"])]
    normalizer = Normalizer("token-mean", int(rows["response_mask"].sum()), len(rows))
    engine.set_step(number)
    result = engine.train_step(micro, critic_loss(CriticConfig(), normalizer), ["values"])
    return values, result.grad_norm, result.metrics.get("critic/vf_loss")


def _train(case: Case, hf_dir: str, directory: str) -> dict[str, Any]:
    """Two steps, the second by another engine that begins with the first one's checkpoint."""
    from megatron_dapo.engine.checkpoint import load_engine, save_engine
    from megatron_dapo.models.storage import storages
    from megatron_dapo.parallel.groups import destroy

    engine, _ = _critic(case, hf_dir)
    reports = [_step(engine, 1)]
    save_engine(engine, Path(directory))
    dist.barrier()
    destroy(world=False)
    engine, layout = engine_of(case, hf_dir, steps=2, value_head=True)
    load_engine(engine, Path(directory))
    reports.append(_step(engine, 2))
    return {"reports": reports, "parameters": boxes(layout, storages(engine.chunks))}


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    return ranks.run(_train, 1, Case("alone", MODEL), str(saved(MODEL)), str(tmp_path_factory.mktemp("alone")))[0]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_critic_equals_one_rank(ranks, alone, tmp_path, case):
    found = ranks.run(_train, 2, case, str(saved(MODEL)), str(tmp_path))
    for rank in found:
        difference, where = _largest(rank["parameters"], alone["parameters"], relative=False)
        assert difference <= 1e-6, where
        for (_, norm, _), (_, expected, _) in zip(rank["reports"], alone["reports"], strict=True):
            assert norm == pytest.approx(expected, rel=1e-5) and expected > 0
    for (values, _, loss), (expected, _, whole) in zip(found[-1]["reports"], alone["reports"], strict=True):
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)  # the last rank holds the last stage
        assert loss.value == pytest.approx(whole.value, rel=1e-5)
    assert not torch.equal(alone["reports"][0][0][0], alone["reports"][1][0][0])
