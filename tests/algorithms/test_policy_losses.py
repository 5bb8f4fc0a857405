"""Policy losses: oracle numbers, gradients, and the properties that every registered loss has."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from megatron_dapo.algorithms import (
    AGGREGATION_MODES,
    PolicyLossConfig,
    RolloutCorrectionConfig,
    aggregate_loss,
    effective_loss_mode,
    policy_loss,
    policy_loss_names,
    rollout_correction_preset,
)
from megatron_dapo.algorithms.policy_losses.bypass import BYPASS_NAMES
from megatron_dapo.metrics import compute, measured
from tests.algorithms.cases import ADVANTAGES, LOGPROB, MASK, OLD, ROLLOUT, WEIGHTS, Batch, batches, given, padded
from tests.algorithms.verl_numbers import NUMBERS, given_input

DAPO = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28)
BYPASS_RULES = RolloutCorrectionConfig(
    rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.5, bypass_mode=True, loss_type="reinforce"
)
# Every token that covariance may choose is chosen, so that no draw and no tie disturbs the properties.
EVERY = PolicyLossConfig(
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_cov_ratio=1.0,
    clip_cov_lb=0.1,
    kl_cov_ratio=1.0,
    dro_beta=0.05,
    rollout_correction=BYPASS_RULES,
)
SMOOTH = dataclasses.replace(EVERY, clip_cov_lb=1e6, clip_cov_ub=2e6)
ALL = pytest.mark.parametrize("name", [name for name in policy_loss_names() if name != "bypass"])  # an alias
# Their means run over the tokens of the call.
COVARIANCE = {"clip_cov", "kl_cov"}


def run(name: str, batch: Batch, config: PolicyLossConfig = EVERY, weighted: bool = False) -> Tensor:
    weights = batch.weights if weighted and name != "bypass_mode" else None
    return policy_loss(name)(
        batch.logprob, batch.old_logprob, batch.advantages, batch.mask, config, rollout_is_weights=weights
    )[0]


@pytest.mark.parametrize(
    ("mode", "with_c3", "with_c10"),
    [
        ("token-mean", 0.440587, 0.769851),
        ("token-sum", 3.965282, 6.928660),
        ("seq-mean-token-sum", 1.321761, 2.309553),
        ("seq-mean-token-mean", 0.467337, 0.714285),
        ("seq-mean-token-sum-norm", 0.330440, 0.577388),
    ],
)
def test_vanilla_oracle(mode: str, with_c3: float, with_c10: float) -> None:
    for c, expected, lower in ((3.0, with_c3, 1 / 9), (10.0, with_c10, 0)):
        loss, metrics = policy_loss("vanilla")(
            LOGPROB, OLD, ADVANTAGES, MASK, dataclasses.replace(DAPO, clip_ratio_c=c)
        )
        assert aggregate_loss(loss, MASK, mode).item() == pytest.approx(expected, abs=1e-6)
        assert metrics == pytest.approx(
            {"actor/pg_clipfrac": 1 / 3, "actor/ppo_kl": -0.0666667, "actor/pg_clipfrac_lower": lower}, abs=1e-6
        )


def test_vanilla_oracle_gradient_and_weights() -> None:
    logprob = LOGPROB.clone().requires_grad_()
    loss, _ = policy_loss("vanilla")(logprob, OLD, ADVANTAGES, MASK, DAPO)
    (gradient,) = torch.autograd.grad(aggregate_loss(loss, MASK, "token-mean"), logprob)
    expected = torch.tensor([[-0.135711, -0.07448, 0, 0], [0.166667, 0, 0, 0], [0, -0.0411566, 0, -0.0613984]])
    assert torch.allclose(gradient, expected, atol=1e-6)
    weights = torch.tensor([[1.2, 0.5, 2, 0], [1, 0.3, 0, 0], [0.8, 1.1, 0, 1]])
    loss, _ = policy_loss("vanilla")(LOGPROB, OLD, ADVANTAGES, MASK, DAPO, rollout_is_weights=weights)
    assert aggregate_loss(loss, MASK, "token-mean").item() == pytest.approx(-0.441431, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "mode", "value", "metrics", "config"),
    [
        ("dppo_tv", "token-mean", -1.00068, {"actor/pg_clipfrac": 0.2222}, {"clip_ratio_c": 20.0}),
        ("dppo_kl", "token-mean", -0.982363, {"actor/pg_clipfrac": 0.1111}, {"clip_ratio_c": 20.0}),
        ("sapo", "seq-mean-token-mean", 0.289611, {}, {}),
        ("gspo", "seq-mean-token-mean", 0.0747187, {"actor/pg_clipfrac": 0.888889}, {}),
        ("gpg", "token-mean", -0.538889, {}, {}),
        ("clip_cov", "token-mean", 0.769851, {"actor/pg_clipfrac": 0.0}, {}),
        ("kl_cov", "token-mean", 0.501002, {"actor/ppo_kl": 0.666667}, {}),
        (
            "geo_mean",
            "seq-mean-token-mean",
            0.171926,
            {"actor/pg_clipfrac": 0.4444, "actor/pg_clipfrac_lower": 0.2222},
            {},
        ),
        ("dro", "token-mean", -0.517222, {}, {"dro_beta": 0.05}),
        ("cispo", "token-mean", -0.491423, {"actor/pg_clipfrac": 0.6667}, {}),
    ],
)
def test_oracle(name: str, mode: str, value: float, metrics: dict[str, float], config: dict[str, float]) -> None:
    loss, found = policy_loss(name)(LOGPROB, OLD, ADVANTAGES, MASK, dataclasses.replace(DAPO, **config))
    assert aggregate_loss(loss, MASK, mode).item() == pytest.approx(value, rel=1e-5)
    assert {key: found[key] for key in metrics} == pytest.approx(metrics, abs=1e-4)


@pytest.mark.parametrize("case", list(NUMBERS["policy_loss"]))
def test_verl_numbers(case: str) -> None:
    """Value, gradient and metrics of each loss, with and without importance weights."""
    name, _, weighted = case.partition("+")
    expected = NUMBERS["policy_loss"][case]
    config = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, kl_cov_ratio=0.1, dro_beta=0.05)
    logprob = given_input("logprob").requires_grad_()
    loss, metrics = policy_loss(name)(
        logprob,
        given_input("old_logprob"),
        given_input("advantages"),
        given_input("mask"),
        config,
        rollout_is_weights=given_input("weights") if weighted else None,
    )
    total = aggregate_loss(loss, given_input("mask"), expected["mode"])
    assert total.item() == pytest.approx(expected["loss"], abs=2e-6)
    (gradient,) = torch.autograd.grad(total, logprob)
    assert torch.allclose(gradient, torch.tensor(expected["gradient"]), atol=2e-6)
    assert {key: metrics[key] for key in expected["metrics"]} == pytest.approx(expected["metrics"], abs=1e-5)


@pytest.mark.parametrize(("loss_type", "value"), [("ppo_clip", -0.0100254), ("reinforce", -0.494907)])
def test_bypass_oracle(loss_type: str, value: float) -> None:
    """The oracle divides by what rejection leaves (4 tokens); here rejected tokens have loss 0 and may count or not."""
    config = dataclasses.replace(DAPO, rollout_correction=dataclasses.replace(BYPASS_RULES, loss_type=loss_type))
    loss, metrics = policy_loss("bypass_mode")(LOGPROB, ROLLOUT, ADVANTAGES, MASK, config)
    kept = loss != 0
    assert kept.sum() == 4
    assert aggregate_loss(loss, kept, "token-mean").item() == pytest.approx(value, abs=1e-6)
    assert aggregate_loss(loss, MASK, "token-mean").item() == pytest.approx(value * 4 / 9, abs=1e-6)
    found = compute(measured(metrics))
    assert found["actor/ppo_kl"] == pytest.approx(0.0375, abs=1e-6)
    assert found["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)


# ---- what setting bypass mode, or one clip ratio, does


def test_bypass_reaches_the_loss_that_is_used() -> None:
    config = dataclasses.replace(DAPO, rollout_correction=rollout_correction_preset("bypass_pg_is"))
    assert effective_loss_mode("vanilla", config) == "bypass_mode"
    used = policy_loss(effective_loss_mode("vanilla", config))
    loss, metrics = used(LOGPROB, ROLLOUT, ADVANTAGES, MASK, config)
    weights = torch.where(MASK, LOGPROB - ROLLOUT, 0.0).sum(-1, keepdim=True).exp().clamp(max=2.0)
    assert torch.allclose(loss, torch.where(MASK, -ADVANTAGES * LOGPROB * weights, 0.0))
    assert "rollout_corr/rollout_is_mean" in metrics


def test_bypass_and_the_loss_mode_must_agree() -> None:
    bypass = dataclasses.replace(DAPO, rollout_correction=rollout_correction_preset("bypass_ppo_clip"))
    decoupled = dataclasses.replace(DAPO, rollout_correction=rollout_correction_preset("decoupled_token_is"))
    with pytest.raises(ValueError, match=r"bypass_mode replaces the policy loss, but loss_mode is 'gspo'"):
        effective_loss_mode("gspo", bypass)
    for config in (DAPO, decoupled):
        assert effective_loss_mode("gspo", config) == "gspo"
        with pytest.raises(ValueError, match="needs rollout_correction"):
            effective_loss_mode("bypass_mode", config)
    with pytest.raises(ValueError, match="needs rollout_correction"):
        policy_loss("bypass")(LOGPROB, OLD, ADVANTAGES, MASK, DAPO)
    with pytest.raises(ValueError, match="rollout_is_weights must be None"):
        policy_loss("bypass")(LOGPROB, OLD, ADVANTAGES, MASK, bypass, rollout_is_weights=WEIGHTS)


def test_clip_ratio_alone_sets_both_sides() -> None:
    one = PolicyLossConfig(clip_ratio=0.3)
    assert (one.low, one.high) == (0.3, 0.3)
    both = PolicyLossConfig(clip_ratio_low=0.3, clip_ratio_high=0.3)
    for name in ("vanilla", "gspo", "cispo", "dppo_tv", "geo_mean"):
        found, expected = (policy_loss(name)(LOGPROB, OLD, ADVANTAGES, MASK, config) for config in (one, both))
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    assert (
        PolicyLossConfig(clip_ratio=0.3, clip_ratio_high=0.28).low,
        PolicyLossConfig(clip_ratio_high=0.28).high,
    ) == (0.3, 0.28)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"clip_ratio_c": 1.0}, "clip_ratio_c.*1.0"), ({"clip_ratio_low": -0.1}, "negative.*-0.1")],
)
def test_bad_settings_are_named(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PolicyLossConfig(**settings)


@pytest.mark.parametrize(
    ("name", "key"), [("dro", "dro_beta"), ("clip_cov", "clip_cov_ratio"), ("kl_cov", "kl_cov_ratio")]
)
def test_settings_a_loss_cannot_do_without(name: str, key: str) -> None:
    config = dataclasses.replace(DAPO, **{key: 0.0})
    with pytest.raises(ValueError, match=key):
        policy_loss(name)(LOGPROB, OLD, ADVANTAGES, MASK, config)


# ---- vanilla against its textbook form


@given(batches())
def test_vanilla_is_the_dual_clip_formula(batch: Batch) -> None:
    ratio = (batch.logprob - batch.old_logprob).clamp(-20, 20).exp()
    worst = torch.maximum(-batch.advantages * ratio, -batch.advantages * ratio.clamp(0.8, 1.28))
    bounded = torch.minimum(worst, -3.0 * batch.advantages)
    formula = torch.where(batch.advantages < 0, bounded, worst)
    assert torch.allclose(run("vanilla", batch), torch.where(batch.mask, formula, 0.0))


def test_extreme_ratios_stay_finite() -> None:
    logprob = torch.tensor([[-500.0, -1e-3, -1e-3]], requires_grad=True)
    old, mask = torch.tensor([[-1e-3, -500.0, -500.0]]), torch.ones(1, 3).bool()
    for advantages in (torch.tensor([[1.0, 1.0, -1.0]]), torch.zeros(1, 3)):
        for name in policy_loss_names():
            loss, metrics = policy_loss(name)(
                logprob, old, advantages, mask, dataclasses.replace(EVERY, clip_ratio_c=1e30)
            )
            (gradient,) = torch.autograd.grad(loss.sum(), logprob)
            if name != "geo_mean":  # its ratio is a mean over the row, not bounded against the policy falling away
                assert loss.isfinite().all() and gradient.isfinite().all(), name
            if name not in BYPASS_NAMES:
                assert all(value == value for value in metrics.values()), name
            else:
                assert all(value == value for value in compute(measured(metrics)).values())


# ---- properties of every loss


@ALL
@given(batches())
def test_padding_never_leaks(name: str, batch: Batch) -> None:
    tensors = (batch.logprob, batch.old_logprob, batch.advantages, batch.weights)
    lp, old, adv, weights = (padded(torch.where(batch.mask, x, float("nan")), 2) for x in tensors)
    dirty = Batch(lp, old, adv, padded(batch.mask, 2), weights, batch.generator)
    clean, expected = batch.logprob.requires_grad_(), run(name, batch, weighted=True)
    dirty.logprob = dirty.logprob.detach().requires_grad_()
    found = run(name, dirty, weighted=True)
    assert torch.allclose(found[:, :-2], torch.where(batch.mask, expected, 0.0))
    assert (expected[~batch.mask] == 0).all() and (found[:, -2:] == 0).all()
    (g_clean,), (g_dirty,) = torch.autograd.grad(expected.sum(), clean), torch.autograd.grad(found.sum(), dirty.logprob)
    assert torch.allclose(g_dirty, torch.nn.functional.pad(g_clean, (0, 2)))


@ALL
@given(batches(min_rows=2))
def test_order_of_rows_does_not_matter(name: str, batch: Batch) -> None:
    order = torch.randperm(len(batch.mask), generator=batch.generator)
    assert torch.allclose(run(name, batch.rows(order), weighted=True), run(name, batch, weighted=True)[order])


@ALL
@given(st.sampled_from(AGGREGATION_MODES), batches(min_rows=2))
def test_micro_batches_add_up(name: str, mode: str, batch: Batch) -> None:
    if name in COVARIANCE:
        return
    whole = batch.logprob.requires_grad_()
    counts = {"global_tokens": int(batch.mask.sum()), "global_sequences": len(batch.mask), "horizon": 9}
    total = aggregate_loss(run(name, batch), batch.mask, mode, **counts)
    cuts = (slice(0, 1), slice(1, 1), slice(1, None))
    parts = [aggregate_loss(run(name, part), part.mask, mode, **counts) for part in map(batch.rows, cuts)]
    summed = torch.stack(parts).sum()
    assert torch.allclose(summed, total, rtol=1e-6, atol=1e-9)
    assert torch.allclose(*(torch.autograd.grad(x, whole)[0] for x in (summed, total)), rtol=1e-6, atol=1e-9)


@ALL
@given(batches())
def test_dtypes_agree(name: str, batch: Batch) -> None:
    low = Batch(
        *(x.bfloat16() for x in (batch.logprob, batch.old_logprob, batch.advantages)),
        batch.mask,
        batch.weights.bfloat16(),
        batch.generator,
    )
    exact = Batch(
        *(x.double() for x in (low.logprob, low.old_logprob, low.advantages)),
        batch.mask,
        low.weights.double(),
        batch.generator,
    )
    found = run(name, low)
    assert found.dtype == torch.float32
    if name not in ("clip_cov", "bypass_mode"):  # a threshold may fall between the two precisions
        assert torch.allclose(found.double(), run(name, exact), rtol=1e-4, atol=1e-5)


@ALL
@given(batches())
def test_importance_weights_scale_the_loss_and_carry_no_gradient(name: str, batch: Batch) -> None:
    if name == "bypass_mode":
        return
    batch.weights.requires_grad_()
    batch.logprob.requires_grad_()
    plain, weighted = run(name, batch), run(name, batch, weighted=True)
    if name == "geo_mean":
        logs = torch.where(batch.mask, batch.weights.log(), 0.0).sum(-1) / batch.mask.sum(-1)
        assert torch.allclose(weighted, plain * logs.exp()[:, None])
    else:
        assert torch.allclose(weighted, torch.where(batch.mask, plain * batch.weights, 0.0))
    assert torch.autograd.grad(weighted.sum(), batch.weights, allow_unused=True)[0] is None


@pytest.mark.parametrize("name", ["vanilla", "sapo", "gpg", "reinforce", "dro", "geo_mean", "clip_cov", "kl_cov"])
@given(batches())
def test_gradient_by_differences(name: str, batch: Batch) -> None:
    """Losses without a stop-gradient; clip_cov detaches nothing here, because its choice is not differentiable."""
    logprob = batch.logprob.requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return policy_loss(name)(x, batch.old_logprob, batch.advantages, batch.mask, SMOOTH)[0]

    assert torch.autograd.gradcheck(loss, logprob, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "dppo_kl", "gspo", "bypass_mode"])
@given(batches())
def test_gradient_through_stop_gradients(name: str, batch: Batch) -> None:
    """What the gradient is by the formula, where the loss is not meant to be differentiated as it stands."""
    logprob = batch.logprob.requires_grad_()
    loss = run(name, batch)
    (found,) = torch.autograd.grad(loss.sum(), logprob)
    with torch.no_grad():
        delta = torch.where(batch.mask, batch.logprob - batch.old_logprob, 0.0)
        if name == "gspo":
            ratio = (delta.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True)).exp().expand_as(delta)
            stopped = torch.where(batch.advantages > 0, ratio > 1.28, ratio < 0.8)
            expected = torch.where(stopped, 0.0, -batch.advantages * ratio)
        else:  # the loss is weight · log π, so the gradient is the weight
            expected = loss / batch.logprob
        assert torch.allclose(found, torch.where(batch.mask, expected, 0.0))


@given(batches())
def test_gspo_with_one_token_is_ppo(batch: Batch) -> None:
    one = batch.rows(slice(None))
    one.mask = torch.zeros_like(batch.mask)
    one.mask[:, 0] = True
    free = dataclasses.replace(EVERY, clip_ratio_c=1e9)
    assert torch.allclose(run("gspo", one, free), run("vanilla", one, free))


def test_sapo_gate_has_slope_one_on_policy() -> None:
    logprob = OLD.double().requires_grad_()
    loss, _ = policy_loss("sapo")(logprob, OLD.double(), ADVANTAGES.double(), MASK, DAPO)
    (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    assert torch.allclose(gradient, torch.where(MASK, -ADVANTAGES.double(), 0.0))


def test_covariance_losses_choose_the_tokens_of_high_covariance() -> None:
    g = torch.Generator().manual_seed(0)
    logprob, advantages = -torch.rand(4, 50, generator=g), torch.randn(4, 50, generator=g)
    mask = torch.ones(4, 50).bool()
    cov = (advantages - advantages.mean()) * (logprob - logprob.mean())
    config = PolicyLossConfig(kl_cov_ratio=0.05, ppo_kl_coef=1.0, clip_cov_ratio=0.05, clip_cov_lb=0.1, clip_cov_ub=9)
    old = logprob - 0.01
    penalised = policy_loss("kl_cov")(logprob, old, advantages, mask, config)[0] + advantages * (logprob - old).exp()
    assert torch.equal(penalised > 1e-3, cov >= cov.flatten().topk(10).values.min())
    clipped, metrics = policy_loss("clip_cov")(logprob, old, advantages, mask, config)
    assert (clipped == 0).sum() == 10 and (cov[clipped == 0] > 0.1).all()
    assert metrics["actor/pg_clipfrac"] == pytest.approx(10 / 200)
    again, _ = policy_loss("clip_cov")(logprob, old, advantages, mask, config)
    other, _ = policy_loss("clip_cov")(logprob, old, advantages, mask, dataclasses.replace(config, clip_cov_seed=1))
    assert torch.equal(clipped, again) and not torch.equal(clipped, other)


@ALL
def test_batches_without_valid_tokens(name: str) -> None:
    nothing = torch.zeros_like(MASK)
    logprob = LOGPROB.clone().requires_grad_()
    loss, _ = policy_loss(name)(logprob, OLD, ADVANTAGES, nothing, EVERY)
    assert (loss == 0).all()
    assert torch.equal(
        torch.autograd.grad(loss.sum(), logprob, allow_unused=True, materialize_grads=True)[0],
        torch.zeros_like(LOGPROB),
    )
