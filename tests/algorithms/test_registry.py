"""Registries: every name of the contract is there, names are unique, unknown ones are answered with the choices."""

import pytest

from megatron_dapo.algorithms import advantage, advantage_names, policy_loss, policy_loss_names, register_advantage
from megatron_dapo.algorithms.registry import Registry

LOSSES = [
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "reinforce",
    "bypass",
    "bypass_mode",
]
ESTIMATORS = [
    "gae",
    "grpo",
    "grpo_vectorized",
    "gdpo",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "remax",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]


def test_every_name_of_the_contract_is_registered() -> None:
    assert policy_loss_names() == sorted(LOSSES)
    ours = [name for name in advantage_names() if not name.startswith("test_")]  # other tests register some
    assert ours == sorted(ESTIMATORS)


@pytest.mark.parametrize(("lookup", "near"), [(policy_loss, "Vanilla"), (advantage, "GRPO")])
def test_unknown_names_are_answered_with_the_choices(lookup, near: str) -> None:
    with pytest.raises(ValueError, match=f"{near}.*{near.lower()}"):
        lookup(near)


def test_a_name_belongs_to_one_function() -> None:
    registry: Registry = Registry("thing")

    def one() -> int:
        return 1

    assert registry.register("a", "b")(one) is one
    assert registry.register("a")(one) is one
    with pytest.raises(ValueError, match="thing 'b' is already registered"):
        registry.register("b")(lambda: 2)
    assert registry["a"] is one and registry.names() == ["a", "b"]


def test_registering_an_estimator_again() -> None:
    grpo = advantage("grpo").function
    assert register_advantage("grpo", needs=("group_ids",))(grpo) is grpo
    with pytest.raises(ValueError, match="'grpo' is already registered"):
        register_advantage("grpo")(lambda *a, **k: None)
