"""Routing is recorded once per token and replayed to the same experts, in any layout, packing and order of recomputation.

The routers are made so that groups of experts are nearly tied: a change of the weights too small to move a log-probability
by itself sends every token to other experts. Replay must bring the log-probabilities back.
"""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tests.distributed.parity import Case, boxes, engine_of, full_gradients, make_rows, weighted_loss
from tests.distributed.test_heads import _largest_difference
from tests.models.hf_models import saved

ALONE = Case("alone", "qwen3_moe")
CASES = [
    Case("tp2, experts recomputed", "qwen3_moe", dict(tensor=2), dict(recompute="selective", recompute_modules=("moe",))),
    Case("pp2 vpp2, all recomputed", "qwen3_moe", dict(pipeline=2, virtual_pipeline=2), dict(recompute="full")),
    Case("cp2 ep2, one row each", "qwen3_moe", dict(context=2, expert=2), micro=1),
]  # fmt: skip


def _tie(engine: Any, sign: float) -> None:
    """Each half of the experts gets one router row; which of the half is ahead, by 1e-5, is the sign's."""
    from megatron.core.transformer.moe.router import TopKRouter

    for chunk in engine.chunks:
        for router in (m for m in chunk.modules() if isinstance(m, TopKRouter)):
            half = router.weight.shape[0] // 2
            ahead = torch.arange(half, dtype=torch.float32).repeat(2)[:, None]
            row = router.weight.data[[0] * half + [half] * half]
            router.weight.data.copy_(row * (1 + sign * 1e-5 * ahead))
    engine.trainable.optimizer.reload_model_params()


def _rows(order: Tensor, routing: list[Tensor] | None) -> TensorDict:
    rows = make_rows(211, even=False)
    if routing is not None:
        width = max(map(len, routing))
        rows["routed_experts"] = torch.stack(
            [torch.nn.functional.pad(ids, (0, 0, 0, 0, 0, width - len(ids))) for ids in routing]
        )
        rows["routed_length"] = torch.tensor([len(ids) for ids in routing])
    return rows[order]


def _log_probs(outputs: list, parts: list[Tensor]) -> dict[int, Tensor]:
    values: dict[int, Tensor] = {}
    for part, output in zip(parts, outputs, strict=False):
        for row, line in zip(part.tolist(), output["log_probs"], strict=True):
            values[row] = torch.nn.functional.pad(line, (0, 20 - len(line)))
    return values


def _record(hf_dir: str) -> tuple[dict[int, Tensor], list[Tensor]]:
    """One rank: log-probs of every row and its routing [tokens, layers, k], as a rollout engine would return them."""
    from megatron_dapo.engine.routing import stack_layers

    engine, _ = engine_of(ALONE, hf_dir)
    _tie(engine, 1)
    rows = _rows(torch.arange(8), None)
    parts = list(torch.arange(8).split(3))
    outputs = engine.forward([rows[part] for part in parts], ["log_probs"], record=True)
    routing = []
    for part, found in zip(parts, engine.row_routing(), strict=True):
        for row, ids in zip(part.tolist(), found.experts, strict=True):
            length = int(rows["prompt_length"][row] + rows["response_length"][row]) - 1  # the last is never fed
            routing.append(stack_layers({layer: ids[:length, i] for i, layer in enumerate(found.layers)}))
    return _log_probs(outputs, parts), routing


def _replay(case: Case, hf_dir: str, routing: list[Tensor]) -> dict[str, Any]:
    """The other tie: log-probs without and with replay, gradients with it, and how often each expert was chosen."""
    from megatron.core import parallel_state as mpu

    engine, layout = engine_of(case, hf_dir)
    _tie(engine, -1)
    parts = list(torch.arange(8).flip(0).split(case.micro))
    free = _log_probs(engine.forward([_rows(part, None) for part in parts], ["log_probs"]), parts)
    micro = [_rows(part, routing) for part in parts]
    held = _log_probs(engine.forward(micro, ["log_probs"]), parts)
    step, gradients = engine.trainable.optimizer.step, {}

    def keep_gradients() -> Any:
        gradients.update(boxes(layout, full_gradients(engine)))
        return step()

    engine.trainable.optimizer.step = keep_gradients
    engine.set_step(1)
    engine.train_step(micro, weighted_loss(100), ["log_probs", "entropy"], record=True)
    counts = engine.expert_counts()
    torch.distributed.all_reduce(counts)
    assert mpu.get_data_parallel_world_size() == 1
    return {"free": free, "held": held, "gradients": gradients, "counts": counts}


@pytest.fixture(scope="module")
def recorded(ranks):
    ((log_probs, routing),) = ranks.run(_record, 1, str(saved("qwen3_moe")))
    return log_probs, routing


@pytest.fixture(scope="module")
def alone(ranks, recorded):
    """The replay on one rank, without recomputation."""
    return ranks.run(_replay, 1, ALONE, str(saved("qwen3_moe")), recorded[1])[0]


def _difference(found: dict[int, Tensor], expected: dict[int, Tensor]) -> float:
    return max((found[row] - expected[row]).abs().max().item() for row in found) if found else 0.0


def test_replay_brings_the_log_probs_back(recorded, alone):
    assert _difference(alone["free"], recorded[0]) > 1e-2
    assert _difference(alone["held"], recorded[0]) < 1e-5


def test_every_choice_counts_once(recorded, alone):
    """Replayed choices: those recorded, with each row's last token like the one before it."""
    _, routing = recorded
    layers, experts = alone["counts"].shape
    expected = torch.zeros(layers, experts, dtype=torch.int64)
    for ids in routing:
        for layer in range(layers):
            chosen = torch.cat([ids[:, layer], ids[-1:, layer]]).flatten().long()
            expected[layer] += torch.bincount(chosen, minlength=experts)
    assert torch.equal(alone["counts"], expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay_in_any_layout(ranks, recorded, alone, case):
    log_probs, routing = recorded
    results = ranks.run(_replay, 2, case, str(saved("qwen3_moe")), routing)
    assert max(_difference(found["free"], log_probs) for found in results) > 1e-2
    assert max(_difference(found["held"], log_probs) for found in results) < 1e-5
    for found in results:
        assert torch.equal(found["counts"], alone["counts"])
        assert _largest_difference(found["gradients"], alone["gradients"]) < 1e-5


def _step_with_padding(hf_dir: str, padding: bool) -> tuple[Tensor, list[Tensor], Any]:
    """One step, perhaps with a micro-batch of padding: choices counted, expert biases afterwards, what is reported."""
    from megatron.core.transformer.moe.router import TopKRouter

    losses = dict(load_balancing="aux_loss", aux_loss_coeff=0.5, z_loss_coeff=0.05, expert_bias_update_rate=1e-2)
    engine, _ = engine_of(Case("padded", "deepseek_v3", settings={"moe": losses}), hf_dir)
    rows = make_rows(engine.arch.vocab, even=False)
    nothing = rows[:1].clone()
    nothing["is_padding"], nothing["response_mask"] = torch.tensor([True]), torch.zeros_like(nothing["response_mask"])
    engine.set_step(1)
    micro = [rows, nothing] if padding else [rows]
    result = engine.train_step(micro, weighted_loss(100), ["log_probs", "entropy"], record=True)
    routers = [module for module in engine.chunks[0].modules() if isinstance(module, TopKRouter)]
    return engine.expert_counts(), [router.expert_bias for router in routers], result


def test_padding_counts_in_no_router(ranks):
    """Neither in the counts nor in the experts' bias; and a loss over no tokens is 0, not NaN."""
    (counts, biases, _), (with_padding, same, result) = (
        ranks.run(_step_with_padding, 1, str(saved("deepseek_v3")), padding)[0] for padding in (False, True)
    )
    assert torch.equal(with_padding, counts) and 0 < result.grad_norm < float("inf")
    assert result.metrics["actor/expert_bias/max_abs"].value == max(float(bias.abs().max()) for bias in biases)
    assert all(result.metrics[f"actor/{name}_aux"].compute()[""] > 0 for name in ("load_balancing_loss", "z_loss"))
    assert all(torch.equal(a, b) and bool(b.any()) for a, b in zip(same, biases, strict=True))
