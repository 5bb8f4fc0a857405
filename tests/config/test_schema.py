"""Types, ranges and spelling: what the schema alone refuses, and the way to YAML and back."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from megatron_dapo.config import Config, ConfigError, build
from megatron_dapo.config.problems import all_keys
from megatron_dapo.errors import UserError


def problems_of(values: dict) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        build(values)
    return {problem.key: problem.text for problem in caught.value.problems}


def test_importing_the_config_imports_neither_torch_nor_hydra():
    code = "import sys, megatron_dapo.config; print('torch' in sys.modules, 'hydra' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


def test_config_is_frozen():
    with pytest.raises(ValidationError):
        Config().actor.clip_ratio = 0.3


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("actor", "clip_ratio_hihg", "actor.clip_ratio_high"),
        ("data", "clip_ratio_high", "actor.clip_ratio_high"),
        ("rollout", "num_samples", None),
        ("trainer", "total_steps", "trainer.total_training_steps"),
        ("actor", "lr", "actor.optim.lr"),
    ],
)
def test_unknown_key_names_the_nearest(section: str, key: str, meant: str | None):
    text = problems_of({section: {key: 1}})[f"{section}.{key}"]
    assert "no such key" in text
    assert meant is None or meant in text


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"rollout": {"n": 0}}, "rollout.n", "at least 1"),
        ({"rollout": {"n": True}}, "rollout.n", "number"),
        ({"rollout": {"n": "many"}}, "rollout.n", "integer"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature", "greater than 0"),
        ({"actor": {"optim": {"betas": [0.9, 1.0]}}}, "actor.optim.betas[1]", "less than 1"),
        ({"actor": {"optim": 3}}, "actor.optim", "section"),
        ({"actor": {"loss_agg_mode": "token_mean"}}, "actor.loss_agg_mode", "Did you mean token-mean?"),
        ({"actor": {"clip_ratio_c": 1.0}}, "actor.clip_ratio_c", "greater than 1"),
        ({"model": {"dtype": "float16"}}, "model.dtype", "bfloat16"),
        ({"trainer": {"logger": ["consul"]}}, "trainer.logger[0]", "console"),
        ({"actor": {"optim": {"lr": float("nan")}}}, "actor.optim.lr", "finite"),
        ({"algorithm": {"rollout_correction": {"rollout_is_threshold": [1]}}},
         "algorithm.rollout_correction.rollout_is_threshold", "number"),
    ],
)  # fmt: skip
def test_wrong_value_says_what_is_right(values: dict, key: str, words: str):
    assert words in problems_of(values)[key]


def test_all_problems_come_at_once_and_are_user_errors():
    found = problems_of({"rollout": {"n": 0, "temprature": 1}, "actor": {"optim": {"lr": -1}}, "nonsense": 1})
    assert set(found) == {"rollout.n", "rollout.temprature", "actor.optim.lr", "nonsense"}
    assert issubclass(ConfigError, UserError)


def test_yaml_round_trip_and_comments(tmp_path):
    config = build({"model": {"path": "m"}, "data": {"train_files": "a.parquet"}, "actor": {"clip_ratio": 0.3}})
    path = config.save(tmp_path / "run")
    assert Config.from_yaml(path) == config
    text = path.read_text()
    assert "clip_ratio_high: null  # = 0.3, from actor.clip_ratio" in text
    assert "train_files: [a.parquet]" in text
    assert "ref:\n  path: null  # = m, from model.path" in text


def test_unreadable_yaml_is_one_clear_error(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="Cannot be read"):
        Config.from_yaml(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        Config.from_yaml(tmp_path / "missing.yaml")


def test_only_clip_ratio_sets_both_sides():
    derived = build({"actor": {"clip_ratio": 0.1}}).derived
    assert (derived.clip_ratio_low, derived.clip_ratio_high) == (0.1, 0.1)
    derived = build({"actor": {"clip_ratio": 0.1, "clip_ratio_high": 0.28}}).derived
    assert (derived.clip_ratio_low, derived.clip_ratio_high) == (0.1, 0.28)


def test_derived_values_follow_the_key_they_name():
    config = build(
        {"parallel": {"tensor": 4, "expert": 1}, "algorithm": {"adv_estimator": "gae"}, "model": {"path": "m"}}
    )
    derived = config.derived
    assert (derived.expert_tensor, derived.sequence_parallel, derived.critic_enabled) == (4, True, True)
    assert (derived.critic_path, derived.ref_path, derived.reference_needed) == ("m", "m", False)
    assert build({"parallel": {"tensor": 4, "expert": 2}}).derived.expert_tensor == 1


def test_preset_expands_and_explicit_keys_win():
    rule = build({"algorithm": {"rollout_correction": {"preset": "decoupled_seq_is_rs", "rollout_is_threshold": 3}}})
    got = rule.algorithm.rollout_correction
    assert (got.rollout_is, got.rollout_is_threshold, got.rollout_rs) == ("sequence", 3.0, "seq_sum_k1")
    assert Config.model_validate(rule.model_dump()) == rule


def test_every_key_has_a_description():
    def undocumented(model, prefix=""):
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from undocumented(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                yield prefix + name

    assert list(undocumented(Config)) == []
    assert "actor.optim.lr" in all_keys(Config)
