"""Hydra's part: groups, recipes, overrides, interpolation, and its errors in our words."""

import pytest

from megatron_dapo.config import ConfigError, compose, load_config


def error_of(overrides: list[str], **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, **kwargs)
    return str(caught.value)


def test_overrides_reach_every_depth():
    config = load_config(
        ["actor.optim.lr=3e-5", "model.megatron.moe_ffn_hidden_size=64", "rollout.stop=['\\n','</s>']"]
    )
    assert config.actor.optim.lr == 3e-5
    assert config.model.megatron == {"moe_ffn_hidden_size": 64}
    assert config.rollout.stop == ("\\n", "</s>")


def test_interpolation_sees_defaults():
    assert load_config(["data.gen_batch_size=${data.train_batch_size}"]).data.gen_batch_size == 512


def test_a_group_is_chosen_and_an_override_wins():
    small = ["actor.max_tokens_per_micro_batch=32768", "data.max_response_length=20480"]
    config = load_config(["algorithm=dapo", "actor.clip_ratio_c=5", *small])
    assert (config.actor.clip_ratio_high, config.actor.clip_ratio_c) == (0.28, 5.0)
    assert config.algorithm.filter_groups.enable and config.reward.overlong_buffer.enable


def test_compose_returns_only_what_was_set():
    assert compose(["actor.clip_ratio=0.3"]) == {"actor": {"clip_ratio": 0.3}}


def test_a_directory_of_ones_own(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /algorithm: dapo\n  - _self_\nreward: {overlong_buffer: {len: 8}}\n"
    )
    config = load_config([], "mine", config_dir=tmp_path)
    assert (config.reward.overlong_buffer.len, config.actor.clip_ratio_high) == (8, 0.28)
    assert "Did you mean mine?" in error_of(["recipe=mien"], config_dir=tmp_path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.n", "write key=value"),
        ("recipe=nothing_like_it", "no such file in configs/recipe"),
        ("algorithm=dpao", "Did you mean dapo?"),
        ("actor.optim.betas=[0.9", "actor.optim.betas=[0.9"),
        ("--n=3", "dotted name"),
        ("data.gen_batch_size=${data.nothing}", "nothing"),
        ("actor.optim.lr=1e-6,1e-5", "actor.optim.lr"),
    ],
)
def test_what_hydra_refuses_is_a_config_error(override: str, words: str):
    assert words in error_of([override])
