"""KL estimators, KL in the reward, KL in the loss, and the controllers of its coefficient."""

import math

import pytest
import torch

from megatron_dapo.algorithms import KL_KINDS, kl_controller, kl_in_reward, kl_loss, kl_penalty
from tests.algorithms.cases import Batch, batches, given, padded

KINDS = [kind for kind in KL_KINDS if kind != "full"]


def value_and_gradient(difference: float, kind: str) -> tuple[float, float]:
    logprob = torch.tensor([[difference]], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(logprob, torch.zeros(1, 1, dtype=torch.float64), kind)
    return value.item(), torch.autograd.grad(value.sum(), logprob)[0].item()


@pytest.mark.parametrize(
    ("difference", "kind", "value", "gradient"),
    [
        (0.4, "k1", 0.4, 1),
        (0.4, "kl", 0.4, 1),
        (-0.4, "abs", 0.4, -1),
        (0.4, "k2", 0.08, 0.4),
        (0.4, "mse", 0.08, 0.4),
        (0.4, "k3", 0.0703201, 0.32968),
        (-2.2, "low_var_kl", 5.82501, -8.02501),
        (-5, "k3", 10, 0),
        (-5, "k3+", 10, -5),
        (-30, "k3", 10, 0),
        (30, "k3", 10, 0),
        (-3, "k3", 10, 0),
        (0.4, "k1+", 0.4, 0.4),
        (0.4, "mse+", 0.08, 0.4),
        (-0.4, "abs+", 0.4, -0.4),
    ],
)
def test_oracle(difference: float, kind: str, value: float, gradient: float) -> None:
    assert value_and_gradient(difference, kind) == pytest.approx((value, gradient), rel=1e-5)


def test_full_and_unknown_kinds() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(NotImplementedError, match="full"):
        kl_penalty(x, x, "full")
    with pytest.raises(ValueError, match=r"k4.*k3"):
        kl_penalty(x, x, "k4")


@pytest.mark.parametrize("kind", KINDS)
@given(batches())
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str, batch: Batch) -> None:
    logprob = batch.logprob.requires_grad_()
    plain, through = kl_penalty(logprob, batch.old_logprob, kind), kl_penalty(logprob, batch.old_logprob, kind + "+")
    assert torch.allclose(plain, through)
    (gradient,) = torch.autograd.grad(through.sum(), logprob)
    assert torch.allclose(gradient, batch.logprob - batch.old_logprob)


@pytest.mark.parametrize("kind", KINDS)
@given(batches())
def test_gradient_by_differences(kind: str, batch: Batch) -> None:
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, batch.old_logprob, kind), batch.logprob.requires_grad_())


@pytest.mark.parametrize("kind", [*KINDS, "k3+"])
@given(batches())
def test_loss_ignores_padding_in_value_and_gradient(kind: str, batch: Batch) -> None:
    x = padded(batch.logprob, 2).requires_grad_()
    loss = kl_loss(x, padded(batch.old_logprob, 2), padded(batch.mask, 2), kind)
    assert torch.allclose(
        loss[:, :-2], torch.where(batch.mask, kl_penalty(batch.logprob, batch.old_logprob, kind), 0.0)
    )
    assert (loss[:, -2:] == 0).all()
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert (gradient[~padded(batch.mask, 2)] == 0).all()


@given(batches())
def test_kl_in_reward(batch: Batch) -> None:
    scores = torch.where(batch.mask, batch.advantages, 0.0)
    rewards, metrics = kl_in_reward(scores, batch.logprob, batch.old_logprob, batch.mask, coef=0.3, kind="k1")
    difference = batch.logprob - batch.old_logprob
    assert torch.allclose(rewards, torch.where(batch.mask, scores - 0.3 * difference, 0.0))
    per_row = [difference[i][batch.mask[i]].mean().item() for i in range(len(scores))]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(math.fsum(per_row) / len(per_row), abs=1e-9)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.3


def test_half_precision_is_widened() -> None:
    x = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    assert kl_penalty(x, x, "k3").dtype == torch.float32


def test_adaptive_controller_oracle() -> None:
    controller = kl_controller("adaptive", kl_coef=0.2, target_kl=6, horizon=10000)
    seen = []
    for kl in (6, 12, 0, 6.6):
        controller.update(kl, 256)
        seen.append(controller.value)
    assert seen == pytest.approx([0.2, 0.201024, 0.19999475712, 0.200506743698], rel=1e-10)
    resumed = kl_controller("adaptive", kl_coef=0.2, target_kl=6, horizon=10000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value


def test_fixed_controller_and_bad_settings() -> None:
    controller = kl_controller("fixed", kl_coef=0.01)
    controller.update(100.0, 256)
    assert controller.value == 0.01
    with pytest.raises(ValueError, match="horizon"):
        kl_controller("adaptive", horizon=0)
    with pytest.raises(ValueError, match="linear"):
        kl_controller("linear")
