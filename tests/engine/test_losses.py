"""What a loss says of micro-batches adds up to what it says of the whole, whatever the loss and the split."""

import pytest
import torch
from tensordict import TensorDict

from megatron_dapo.algorithms import PolicyLossConfig, rollout_correction_preset
from megatron_dapo.config.training import ActorConfig, CriticConfig
from megatron_dapo.engine.losses import Normalizer, actor_loss, critic_loss
from megatron_dapo.metrics import compute, reduce
from megatron_dapo.metrics.names import undocumented

ROWS, WIDTH = 6, 5


def batch() -> TensorDict:
    draw = torch.Generator().manual_seed(3)
    fields = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_prob", "entropy")
    tensors = {name: -torch.rand(ROWS, WIDTH, generator=draw) for name in fields}
    tensors |= {name: torch.randn(ROWS, WIDTH, generator=draw) for name in ("advantages", "values", "returns")}
    lengths = torch.tensor([5, 1, 3, 5, 2, 4])
    return TensorDict({**tensors, "response_mask": torch.arange(WIDTH) < lengths[:, None]}, batch_size=[ROWS])


def normalizer() -> Normalizer:
    return Normalizer("token-mean", 20, ROWS)


def told(loss, rows: TensorDict, outputs: tuple[str, ...]) -> dict:
    return loss({name: rows[name].clone() for name in outputs}, rows.exclude(*outputs))[1]


CORRECTED = ("bypass_ppo_clip_k3_rs", "bypass_pg_geo_rs_token_tis", "bypass_pg_is")


@pytest.mark.parametrize("preset", [None, *CORRECTED])
def test_actor(preset: str | None):
    actor = ActorConfig(use_kl_loss=True, entropy_coeff=0.1, kl_loss_coef=0.5)
    correction = None if preset is None else rollout_correction_preset(preset)
    loss = actor_loss(actor, PolicyLossConfig(rollout_correction=correction), normalizer(), fresh=True)
    rows, outputs = batch(), ("log_probs", "entropy")
    whole = compute(told(loss, rows, outputs))
    for sizes in ((1, 5), (2, 2, 2), (1, 1, 1, 1, 1, 1)):
        merged = compute(reduce(told(loss, part, outputs) for part in rows.split(sizes)))
        assert merged == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert not undocumented(whole) and ("rollout_corr/kl" in whole) == (preset is not None)
    terms = whole["actor/pg_loss"] - 0.1 * whole["actor/entropy_loss"] + 0.5 * whole["actor/kl_loss"]
    assert whole["actor/loss"] == pytest.approx(terms) and whole["actor/kl_coef"] == 0.5


def test_critic():
    loss, rows = critic_loss(CriticConfig(), normalizer()), batch()
    rows["old"] = rows["values"] + 0.3

    def of(part: TensorDict) -> dict:
        return loss({"values": part["old"]}, part.exclude("old"))[1]

    whole = compute(of(rows))
    assert compute(reduce(of(part) for part in rows.split((1, 3, 2)))) == pytest.approx(whole, rel=1e-5)
