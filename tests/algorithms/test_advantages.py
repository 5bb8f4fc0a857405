"""Advantage estimators: oracle numbers, the properties that all have, and what each says when it lacks something."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dapo.algorithms import AdvantageConfig, advantage, advantage_names, check_inputs, register_advantage
from tests.algorithms.cases import GROUPS, LENGTHS, SCORES, Batch, batches, given, padded, terminal_rewards
from tests.algorithms.verl_numbers import COMPONENTS, GROUP_IDS, NUMBERS, given_input

RAW = AdvantageConfig(singleton="raw")
REWARDS, MASK = terminal_rewards(SCORES, LENGTHS, 4)
GDPO = {"gdpo_reward_keys": ("a", "b"), "gdpo_reward_weights": (1.0, 0.5)}
ALL = pytest.mark.parametrize("name", advantage_names())
WITHOUT_GROUPS = {"gae", "reinforce_plus_plus", "remax"}
BY_GROUP = pytest.mark.parametrize("name", [name for name in advantage_names() if name not in WITHOUT_GROUPS])
WHITENED = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"}


def first_tokens(name: str, config: AdvantageConfig = RAW, **inputs: Any) -> Tensor:
    return advantage(name)(REWARDS, MASK, GROUPS, config=config, **inputs)[0][:, 0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.707106, -0.707106, 1.09109, -0.218217, -0.872869, 0.999999]),
        ("grpo_vectorized", [0.707106, -0.707106, 1.09109, -0.218217, -0.872869, 0.999999]),
        ("rloo", [1, -1, 0.625, -0.125, -0.5, 1.0]),
        ("opo", [0.571429, -0.428571, 0.4375, -0.0625, -0.3125, 1.0]),
        ("gpg", [0.6, -0.6, 0.5, -0.1, -0.4, 1.2]),
        ("reinforce_plus_plus", [0.941441, -1.44354, 0.941441, -0.251051, -0.847297, 0.941441]),
        ("reinforce_plus_plus_baseline", [0.573628, -1.19377, 0.426345, -0.457352, -0.899201, 1.45733]),
        ("grpo_passk", [1.41421, 0, 1.3093, 0, 0, 0.999999]),
    ],
)
def test_oracle(name: str, expected: list[float]) -> None:
    assert first_tokens(name).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_oracle_without_std_and_with_baselines() -> None:
    without = AdvantageConfig(singleton="raw", norm_adv_by_std_in_grpo=False)
    expected = [0.5, -0.5, 0.416667, -0.0833333, -0.333333, 1.0]
    assert first_tokens("grpo", without).tolist() == pytest.approx(expected, rel=1e-5)
    baselines = torch.tensor([0.5, 0.5, 0.2, 0.2, 0.2, 1.0])
    found = first_tokens("remax", reward_baselines=baselines)
    assert found.tolist() == pytest.approx([0.5, -0.5, 0.8, 0.3, 0.05, 0], abs=1e-6)


@pytest.mark.parametrize("name", list(NUMBERS["advantage"]))
def test_verl_numbers(name: str) -> None:
    """Every estimator on a batch with gaps in the mask."""
    expected = NUMBERS["advantage"][name]
    found = advantage(name)(
        given_input("token_rewards"),
        given_input("mask"),
        GROUP_IDS,
        config=AdvantageConfig(gamma=0.9, lam=0.8, singleton="raw", **GDPO),
        values=given_input("values"),
        reward_baselines=given_input("reward_baselines"),
        old_logprob=given_input("old_logprob"),
        sum_pi_squared=given_input("sum_pi_squared"),
        rollout_is_weights=given_input("weights"),
        component_rewards=COMPONENTS,
    )
    for tensor, key in zip(found, ("advantages", "returns"), strict=True):
        assert torch.allclose(tensor, torch.tensor(expected[key]), atol=3e-6)


# ---- one rule for lone samples, one for groups without a signal


@BY_GROUP
@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_singleton_rule(name: str, singleton: str) -> None:
    """ "zero": a sample alone in its group gets exactly 0; "raw": what its score is worth against a baseline of 0."""
    batch = inputs_for(MASK, seed=0)
    config = AdvantageConfig(singleton=singleton, **GDPO)
    found = advantage(name)(REWARDS, MASK, GROUPS, config=config, **batch)[0][5]
    assert (found == 0).all() if singleton == "zero" else (found != 0).any()


@BY_GROUP
@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, -7.3, 1e6])
def test_constant_groups_are_exactly_zero(name: str, value: float) -> None:
    scores = [value] * 3 + [1.0, 0.0, 0.5, 0.25]
    rewards, mask = terminal_rewards(scores, [3, 4, 1, 4, 2, 1, 3], 4)
    inputs = inputs_for(mask, seed=1)
    inputs["component_rewards"]["a"][:3] = value
    inputs["component_rewards"]["b"][:3] = -value
    found, _ = advantage(name)(rewards, mask, list("aaabbbb"), config=AdvantageConfig(**GDPO), **inputs)
    assert (found[:3] == 0).all() and (found[3:] != 0).any()


def test_large_offsets_do_not_drown_small_differences() -> None:
    rewards, mask = terminal_rewards([1e6, 1e6 + 1, 1e6 + 2], [1, 1, 1], 1)
    found, _ = advantage("grpo")(rewards.double(), mask, ["g"] * 3)
    assert found.flatten().tolist() == pytest.approx([-1, 0, 1], abs=1e-5)


@BY_GROUP
def test_rejected_rows_may_leave_the_baseline(name: str) -> None:
    """A row without valid tokens counts in its group's statistics, or is as if it were not there."""
    rewards, mask = terminal_rewards([1, 0, 0.5, 5], [3, 2, 4, 4], 4)
    mask[3] = False
    inputs = inputs_for(mask, seed=2)
    run = advantage(name)
    counted, _ = run(rewards, mask, list("gggg"), config=AdvantageConfig(**GDPO), **inputs)
    left_out, _ = run(rewards, mask, list("gggg"), config=AdvantageConfig(count_rejected=False, **GDPO), **inputs)
    alone = run(rewards[:3], mask[:3], list("ggg"), config=AdvantageConfig(**GDPO), **rows_of(inputs, slice(0, 3)))[0]
    assert torch.allclose(left_out[:3], alone, atol=1e-6)
    assert (left_out[3] == 0).all() and (counted[3] == 0).all()
    by_length = {"opo", "optimal_token_baseline", "tir_optimal_token_baseline"}  # where an empty row has no weight
    if name not in WHITENED | by_length:  # whitening removes a common offset
        assert not torch.allclose(counted[:3], left_out[:3])


# ---- errors


def test_missing_inputs_are_named() -> None:
    with pytest.raises(ValueError, match=r"'gae' needs values.*critic"):
        advantage("gae")(REWARDS, MASK, GROUPS)
    with pytest.raises(ValueError, match=r"'remax' needs reward_baselines.*greedy"):
        advantage("remax")(REWARDS, MASK, GROUPS)
    with pytest.raises(ValueError, match=r"needs old_logprob, sum_pi_squared.*calculate_sum_pi_squared"):
        advantage("tir_optimal_token_baseline")(REWARDS, MASK, GROUPS)
    with pytest.raises(ValueError, match=r"'grpo' needs group_ids"):
        advantage("grpo")(REWARDS, MASK)


def test_missing_inputs_are_found_when_a_run_is_configured() -> None:
    check_inputs("grpo", {"group_ids"})
    check_inputs("gae", {"values"})
    with pytest.raises(ValueError, match="values"):
        check_inputs("gae", {"group_ids"})
    with pytest.raises(TypeError, match="sum_pi_sqared"):
        advantage("grpo")(REWARDS, MASK, GROUPS, sum_pi_sqared=REWARDS)


@ALL
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_name_the_samples(name: str, bad: float) -> None:
    rewards = REWARDS.clone()
    rewards[1, 3] = rewards[4, 0] = bad
    with pytest.raises(ValueError, match="samples 1, 4 are not finite"):
        advantage(name)(rewards, MASK, GROUPS, config=AdvantageConfig(**GDPO), **inputs_for(MASK, seed=0))


def test_gdpo_settings_are_checked() -> None:
    inputs = inputs_for(MASK, seed=0)
    for config, named in (
        (AdvantageConfig(), r"gdpo_reward_keys.*\['a', 'b'\]"),
        (AdvantageConfig(gdpo_reward_keys=("a", "c")), r"\['c'\] were not returned"),
        (AdvantageConfig(gdpo_reward_keys=("a", "b"), gdpo_reward_weights=(1.0,)), "1 entries for 2"),
    ):
        with pytest.raises(ValueError, match=named):
            advantage("gdpo")(REWARDS, MASK, GROUPS, config=config, **inputs)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"singleton": "none"}, "singleton"), ({"gamma": 1.5}, "gamma"), ({"lam": -0.1}, "lam")],
)
def test_bad_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AdvantageConfig(**settings)


def test_shapes_and_labels_must_agree() -> None:
    with pytest.raises(ValueError, match=r"token_rewards \(6, 4\) and mask \(6, 3\)"):
        advantage("grpo")(REWARDS, MASK[:, :3], GROUPS)
    with pytest.raises(ValueError, match="5 group ids for 6 samples"):
        advantage("grpo")(REWARDS, MASK, GROUPS[:5])


@pytest.mark.parametrize("name", sorted(WHITENED))
def test_whitening_one_token_is_an_error(name: str) -> None:
    one = torch.tensor([[True, False]])
    config = AdvantageConfig(**GDPO)
    with pytest.raises(ValueError, match="at least two valid tokens"):
        advantage(name)(torch.zeros(1, 2), one, ["g"], config=config, **inputs_for(one, seed=0))


def test_a_custom_estimator_has_the_same_call_shape() -> None:
    @register_advantage("test_only_values", needs=("values",))
    def values_as_advantages(token_rewards, mask, group_ids, *, config, values, **_):
        return values * mask, values * mask

    values = torch.ones(6, 4)
    found, _ = advantage("test_only_values")(REWARDS, MASK, GROUPS, values=values)
    assert torch.equal(found, MASK.float())
    with pytest.raises(ValueError, match="test_only_values"):
        advantage("test_only_values")(REWARDS, MASK, GROUPS)
    with pytest.raises(ValueError, match=r"cannot need \['logits'\]"):
        register_advantage("test_only_logits", needs=("logits",))


# ---- properties of every estimator


def inputs_for(mask: Tensor, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Every optional input, random, for a batch of this mask."""
    g = torch.Generator().manual_seed(seed)
    shape = tuple(mask.shape)
    return {
        "values": torch.randn(shape, generator=g, dtype=dtype),
        "reward_baselines": torch.randn(shape[0], generator=g, dtype=dtype),
        "old_logprob": -torch.rand(shape, generator=g, dtype=dtype) - 0.1,
        "sum_pi_squared": torch.rand(shape, generator=g, dtype=dtype) + 1.0,
        "rollout_is_weights": torch.rand(shape, generator=g, dtype=dtype) + 0.5,
        "component_rewards": {key: torch.randn(shape[0], generator=g, dtype=dtype) for key in ("a", "b")},
    }


def rows_of(inputs: dict[str, Any], index: Tensor | slice) -> dict[str, Any]:
    return {
        name: {key: x[index] for key, x in value.items()} if isinstance(value, dict) else value[index]
        for name, value in inputs.items()
    }


def scored(batch: Batch) -> tuple[Tensor, Tensor]:
    """Terminal rewards from {0, 0.1, …, 1} on the batch's mask, which has two tokens at least."""
    mask = torch.cat([batch.mask, torch.ones(len(batch.mask), 1, dtype=torch.bool)], dim=1)
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[:, -1] = torch.randint(0, 11, (len(mask),), generator=batch.generator) / 10
    return rewards, mask


def labels_for(batch: Batch) -> list[int]:
    return torch.randint(0, 3, (len(batch.mask),), generator=batch.generator).tolist()


CONFIGS = st.builds(
    AdvantageConfig,
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.8]),
    norm_adv_by_std_in_grpo=st.booleans(),
    singleton=st.sampled_from(["zero", "raw"]),
    handle_zero_tail=st.booleans(),
    gdpo_reward_keys=st.just(("a", "b")),
)


@ALL
@given(batches(), CONFIGS)
def test_padding_changes_nothing_and_is_zero(name: str, batch: Batch, config: AdvantageConfig) -> None:
    rewards, mask = scored(batch)
    inputs, ids = inputs_for(mask, 3, torch.float64), labels_for(batch)
    expected = advantage(name)(rewards, mask, ids, config=config, **inputs)
    wider = {k: padded(v, 3) if isinstance(v, Tensor) and v.ndim == 2 else v for k, v in inputs.items()}
    for key in ("values", "old_logprob", "sum_pi_squared", "rollout_is_weights"):
        wider[key] = torch.where(padded(mask, 3), wider[key], float("nan"))
    found = advantage(name)(torch.nn.functional.pad(rewards, (0, 3)), padded(mask, 3), ids, config=config, **wider)
    for wide, narrow in zip(found, expected, strict=True):
        assert torch.allclose(wide[:, :-3], narrow) and (wide[:, -3:] == 0).all()
        assert (narrow[~mask] == 0).all()


@ALL
@given(batches(), CONFIGS)
def test_order_labels_and_dtype_do_not_matter(name: str, batch: Batch, config: AdvantageConfig) -> None:
    rewards, mask = scored(batch)
    inputs, ids = inputs_for(mask, 4, torch.float64), labels_for(batch)
    expected, _ = advantage(name)(rewards, mask, ids, config=config, **inputs)
    order = torch.randperm(len(mask), generator=batch.generator)
    shuffled = [ids[i] for i in order]
    found, _ = advantage(name)(rewards[order], mask[order], shuffled, config=config, **rows_of(inputs, order))
    assert torch.allclose(found, expected[order])
    for other in (
        [f"uid-{i}" for i in ids],
        [-99991 * i for i in ids],
        np.array(ids),
        torch.tensor(ids),
        [(i, "x") for i in ids],
    ):
        assert torch.equal(advantage(name)(rewards, mask, other, config=config, **inputs)[0], expected)
    single = {k: {n: x.float() for n, x in v.items()} if isinstance(v, dict) else v.float() for k, v in inputs.items()}
    half = advantage(name)(rewards.float(), mask, ids, config=config, **single)[0]
    assert half.dtype == torch.float32
    assert torch.allclose(half.double(), expected, rtol=1e-3, atol=1e-4)


@ALL
@given(batches(), CONFIGS)
def test_masked_spans_are_passed_over(name: str, batch: Batch, config: AdvantageConfig) -> None:
    """Tool output between the tokens leaves the advantages of the tokens as they are."""
    if name == "optimal_token_baseline":  # counts positions; the tir_ variant counts tokens
        return
    rewards, mask = scored(batch)
    inputs, ids = inputs_for(mask, 5, torch.float64), labels_for(batch)
    expected = advantage(name)(rewards, mask, ids, config=config, **inputs)

    def gap(x: Tensor, fill: float | bool) -> Tensor:
        return torch.cat([x[:, :1], torch.full((len(x), 2), fill, dtype=x.dtype), x[:, 1:]], dim=1)

    wider = {k: gap(v, 9.0) if isinstance(v, Tensor) and v.ndim == 2 else v for k, v in inputs.items()}
    found = advantage(name)(gap(rewards, 0.0), gap(mask, False), ids, config=config, **wider)
    for wide, narrow in zip(found, expected, strict=True):
        assert torch.allclose(torch.cat([wide[:, :1], wide[:, 3:]], dim=1), narrow)


@BY_GROUP
@given(batches(min_rows=2), st.sampled_from([-3.0, 0.25, 1000.0]))
def test_a_common_offset_of_a_group_does_not_matter(name: str, batch: Batch, offset: float) -> None:
    if name in ("gdpo", "gpg"):  # gdpo looks at component rewards, the scale of gpg at the scores themselves
        return
    rewards, mask = scored(batch)
    mask = torch.ones_like(mask)  # of equal length, so that positions of one group compare
    inputs, ids = inputs_for(mask, 6, torch.float64), [0] * len(mask)
    shifted = rewards.clone()
    shifted[:, -1] += offset
    found, expected = (advantage(name)(r, mask, ids, **inputs)[0] for r in (shifted, rewards))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@given(batches(min_rows=2, max_rows=6))
def test_grpo_rows_of_a_group_sum_to_zero_with_variance_one(batch: Batch) -> None:
    rewards, mask = scored(batch)
    found = advantage("grpo")(rewards, mask, ["g"] * len(mask))[0][:, -1]
    assert abs(found.sum().item()) < 1e-9
    assert found.std().item() == pytest.approx(1.0, abs=1e-4) or (found == 0).all()


@given(batches(min_rows=2))
def test_rloo_compares_with_the_mean_of_the_others(batch: Batch) -> None:
    rewards, mask = scored(batch)
    scores = rewards.sum(-1)
    found = advantage("rloo")(rewards, mask, ["g"] * len(mask))[0][:, -1]
    for i in range(len(scores)):
        others = torch.cat([scores[:i], scores[i + 1 :]])
        assert found[i].item() == pytest.approx((scores[i] - others.mean()).item(), abs=1e-9)


@given(batches(min_rows=2))
def test_gae_with_lambda_one_is_return_minus_value_whitened(batch: Batch) -> None:
    rewards, mask = scored(batch)
    values = inputs_for(mask, 7, torch.float64)["values"]
    found, returns = advantage("gae")(rewards, mask, None, values=values)
    total = torch.where(mask, rewards.sum(-1, keepdim=True), 0.0)
    assert torch.allclose(returns, total)
    raw = (total - values)[mask]
    assert torch.allclose(found[mask], (raw - raw.mean()) / (raw.var() + 1e-8).sqrt())


@pytest.mark.parametrize(
    ("mask", "reward", "gamma", "expected"),
    [
        ([1, 1, 0, 0, 1, 1], 1.0, 1.0, [1, 1, 0, 0, 1, 1]),
        ([1, 1, 0, 0, 1], 2.0, 0.5, [0.5, 1, 0, 0, 2]),
    ],
)
def test_returns_cross_tool_output(mask: list[int], reward: float, gamma: float, expected: list[float]) -> None:
    valid = torch.tensor([mask]).bool()
    rewards = torch.zeros(1, len(mask))
    rewards[0, -1] = reward
    _, returns = advantage("reinforce_plus_plus")(rewards, valid, config=AdvantageConfig(gamma=gamma))
    assert returns[0].tolist() == expected


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae", "remax", "grpo"])
def test_a_rejected_last_token_leaves_its_reward(name: str) -> None:
    """Token-level rejection may mask the very token that carries the score."""
    rewards, mask = terminal_rewards([1.0, 0.0], [4, 4], 4)
    mask[:, 3] = False
    inputs = inputs_for(mask, 8) | {"values": torch.zeros(2, 4), "reward_baselines": torch.zeros(2)}
    found, _ = advantage(name)(rewards, mask, ["g", "g"], **inputs)
    assert (found[0, :3] > 0).all() and (found[:, 3] == 0).all()


def test_best_of_a_tie_earns_nothing_in_passk() -> None:
    rewards, mask = terminal_rewards([1, 1, 0, 1, 0.5, 0], [1] * 6, 1)
    found, _ = advantage("grpo_passk")(
        rewards, mask, list("aaabbb"), config=AdvantageConfig(norm_adv_by_std_in_grpo=False)
    )
    assert found.flatten().tolist() == [0, 0, 0, 0.5, 0, 0]
