"""Contradictions between keys: each rule fires on its case, names the key and the way out, and stays quiet otherwise."""

import pytest

from megatron_dapo.config import (
    ConfigError,
    ModelNumbers,
    build,
    check,
    check_model,
    check_world,
    load_config,
    model_problems,
    validate,
)
from megatron_dapo.config.model import topology_of


def nested(flat: dict) -> dict:
    tree: dict = {}
    for dotted, value in flat.items():
        *path, leaf = dotted.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


def found(flat: dict, command=None) -> dict[str, str]:
    return {problem.key: problem.text for problem in check(build(nested(flat)), command)}


def test_the_defaults_contradict_nothing():
    assert found({}) == {}


RC = "algorithm.rollout_correction."
CASES = [
    ({"actor.ppo_mini_batch_size": 100}, "actor.ppo_mini_batch_size", "64 or 128"),
    ({"actor.ppo_mini_batch_size": 1024}, "actor.ppo_mini_batch_size", "512"),
    ({"critic.ppo_mini_batch_size": 100, "algorithm.adv_estimator": "gae"}, "critic.ppo_mini_batch_size", "64 or 128"),
    ({"data.max_response_length": 20480}, "actor.max_tokens_per_micro_batch", "at least 20992"),
    ({"data.max_response_length": 15873, "parallel.context": 4, "parallel.tensor": 2},
     "actor.max_tokens_per_micro_batch", "at least 16392"),
    ({"rollout.agent.max_turns": 3}, "rollout.agent.max_turns", "one turn"),
    ({"data.gen_batch_size": 1024}, "data.gen_batch_size", "thrown away"),
    ({"algorithm.filter_groups.enable": True, "rollout.n": 1}, "rollout.n", "at least 2"),
    ({"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": ""}, "algorithm.filter_groups.metric", "acc"),
    (
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 2, "data.gen_batch_size": 128},
        "algorithm.filter_groups.max_num_gen_batches",
        "at least 4",
    ),
    ({"rollout.val_kwargs.temperature": 0}, "rollout.val_kwargs.temperature", "do_sample=false"),
    ({"rollout.val_kwargs.do_sample": False, "rollout.val_kwargs.n": 4}, "rollout.val_kwargs.n", "same response"),
    ({"rollout.top_k": 0}, "rollout.top_k", "-1"),
    ({"rollout.val_kwargs.top_p": 0}, "rollout.val_kwargs.top_p", "use 1"),
    ({"algorithm.adv_estimator": "gae", "critic.enable": False}, "algorithm.adv_estimator", "critic.enable"),
    ({"rollout.n": 1}, "rollout.n", "grpo"),
    ({"algorithm.adv_estimator": "optimal_token_baseline"}, "algorithm.adv_estimator", "calculate_sum_pi_squared"),
    ({"algorithm.kl_ctrl.type": "adaptive"}, "algorithm.kl_ctrl.type", "use_kl_in_reward"),
    ({"actor.policy_loss.loss_mode": "dro"}, "actor.policy_loss.dro_beta", "positive"),
    ({"actor.policy_loss.loss_mode": "clip_cov", "actor.policy_loss.clip_cov_lb": 9}, "actor.policy_loss.clip_cov_lb", "5.0"),
    ({"actor.clip_ratio": 1.5}, "actor.clip_ratio", "below 1"),
    ({"actor.optim.min_lr": 1}, "actor.optim.min_lr", "exceed"),
    ({"actor.optim.lr_warmup_steps": 5, "actor.optim.lr_decay_steps": 5}, "actor.optim.lr_decay_steps", "exceed"),
    ({"model.moe.aux_loss_coeff": 0.1}, "model.moe.aux_loss_coeff", "load_balancing"),
    ({"model.moe.load_balancing": "aux_loss"}, "model.moe.load_balancing", "0.001"),
    ({"model.recompute_modules": ["moe"]}, "model.recompute_modules", "selective"),
    ({"model.router_replay": "R2", RC + "bypass_mode": True}, "model.router_replay", "R3"),
    ({"reward.overlong_buffer.enable": True}, "reward.overlong_buffer.len", "512"),
    ({"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 513}, "reward.overlong_buffer.len", "512"),
    ({"reward.reward_model.enable": True}, "reward.reward_model.path", "required"),
    ({"trainer.save_freq": 0}, "trainer.save_freq", "never"),
    ({"trainer.test_freq": 5}, "trainer.test_freq", "val_files"),
    ({"trainer.resume_mode": "path"}, "trainer.resume_from_path", "required"),
    ({"trainer.resume_from_path": "x"}, "trainer.resume_from_path", "resume_mode=path"),
    ({"trainer.critic_warmup": 5}, "trainer.critic_warmup", "no critic"),
    ({"trainer.parameter_sync_step": 2}, "trainer.parameter_sync_step", "separate_async"),
    ({"rollout.agent.name": "calculator"}, "rollout.agent.name", "colocate_async"),
    ({"trainer.mode": "colocate_async", "trainer.parameter_sync_step": 2}, "trainer.parameter_sync_step", "separate_async"),
    ({"trainer.mode": "colocate_async", "algorithm.adv_estimator": "remax"}, "algorithm.adv_estimator", "holds the devices"),
    ({"trainer.mode": "separate_async", "trainer.num_warmup_batches": 8}, "trainer.max_off_policy_threshold", "9 or more"),
    ({"trainer.mode": "separate_async", "algorithm.filter_groups.surplus": "discard"}, "algorithm.filter_groups.surplus", "carry"),
    ({"trainer.mode": "separate_async", "trainer.max_off_policy_strategy": "wait", "trainer.replay_sampler": "newest_first"},
     "trainer.replay_sampler", "oldest_first"),
    ({"trainer.mode": "separate_async", "trainer.parameter_sync_step": 3}, "trainer.parameter_sync_step", "2 or 4"),
    ({"trainer.mode": "separate_async", "trainer.parameter_sync_step": 4}, "actor.ppo_mini_batch_size", "128"),
    ({"parallel.sequence_parallel": True}, "parallel.sequence_parallel", "null"),
    ({"parallel.virtual_pipeline": 2}, "parallel.virtual_pipeline", "pipeline > 1"),
    ({"parallel.pipeline": 2, "parallel.first_stage_layers": 1, "parallel.pipeline_layout": "Et|tL"},
     "parallel.first_stage_layers", "pipeline_layout"),
    ({"parallel.world_size": 6, "parallel.tensor": 4}, "parallel.world_size", "4 or 8"),
    ({"parallel.world_size": 4, "parallel.expert": 8}, "parallel.world_size", "expert_tensor x expert x pipeline"),
    ({RC + "preset": "decoupled_seq"}, RC + "preset", "decoupled_seq_is"),
    ({RC + "rollout_is": "token", RC + "rollout_is_threshold": "5_0.5"}, RC + "rollout_is_threshold", "lower bound"),
    ({RC + "rollout_is": "token", RC + "rollout_is_threshold": "a_b"}, RC + "rollout_is_threshold", "0.5_5.0"),
    ({RC + "rollout_is": "token", RC + "rollout_is_threshold": -1}, RC + "rollout_is_threshold", "positive"),
    ({RC + "rollout_rs": "seq_mean_k9", RC + "rollout_rs_threshold": 1}, RC + "rollout_rs", "Did you mean seq_mean_k"),
    ({RC + "rollout_rs": "seq_mean_k1"}, RC + "rollout_rs_threshold", "required"),
    ({RC + "rollout_rs": "token_k1,token_k2,token_k3", RC + "rollout_rs_threshold": "1,2"}, RC + "rollout_rs_threshold", "3 rules"),
    ({RC + "rollout_rs": "token_k2", RC + "rollout_rs_threshold": "1_2"}, RC + "rollout_rs_threshold", "upper bound only"),
    ({"rollout.calculate_log_probs": False}, "rollout.calculate_log_probs", "at true"),
    ({RC + "bypass_mode": True, "actor.policy_loss.loss_mode": "gspo"}, "actor.policy_loss.loss_mode", "vanilla"),
    ({RC + "loss_type": "reinforce"}, RC + "loss_type", "bypass_mode"),
]  # fmt: skip


@pytest.mark.parametrize(("flat", "key", "words"), CASES, ids=[f"{i}-{case[1]}" for i, case in enumerate(CASES)])
def test_contradiction(flat: dict, key: str, words: str):
    problems = found(flat)
    assert key in problems, problems
    assert words in problems[key]
    assert len(problems) == 1, problems


QUIET = [
    {"reward.overlong_buffer.len": 99999},  # the feature is off
    {"critic.ppo_mini_batch_size": 100, "critic.optim.min_lr": 1},  # no critic
    {"algorithm.filter_groups.max_num_gen_batches": 1, "data.gen_batch_size": 8},
    {RC + "rollout_rs_threshold": "nonsense"},
    {"actor.policy_loss.clip_cov_lb": 9},
    {"trainer.max_off_policy_threshold": 1, "trainer.num_warmup_batches": 0},
    {"rollout.n": 1, "algorithm.adv_estimator": "reinforce_plus_plus"},
    {"parallel.world_size": 8, "parallel.tensor": 2, "parallel.pipeline": 2, "parallel.expert": 2},
]


@pytest.mark.parametrize("flat", QUIET)
def test_a_disabled_feature_asks_for_nothing(flat: dict):
    assert found(flat) == {}


def test_a_command_requires_its_own_files_only():
    assert set(found({}, "train")) == {"model.path", "data.train_files"}
    assert set(found({}, "sft")) == {"model.path", "sft.train_files"}
    assert found({"model.path": "m", "sft.train_files": "a"}, "sft") == {}
    assert set(found({"model.path": "m", "sft.train_files": "a", "sft.max_length": 16385}, "sft")) == {
        "actor.max_tokens_per_micro_batch"
    }


def test_types_and_contradictions_are_reported_together_without_echoes():
    with pytest.raises(ConfigError) as caught:
        load_config(["rollout.n=x", "actor.ppo_mini_batch_size=100", "actor.clip_ratoi=1", "reward.overlong_buffer.len=-1",
                     "reward.overlong_buffer.enable=true"])  # fmt: skip
    keys = [problem.key for problem in caught.value.problems]
    assert sorted(keys) == ["actor.clip_ratoi", "actor.ppo_mini_batch_size", "reward.overlong_buffer.len", "rollout.n"]
    text = str(caught.value)
    assert text.startswith("The configuration has 4 problems:") and "Did you mean actor.clip_ratio?" in text


def test_validate_raises():
    with pytest.raises(ConfigError, match="a problem"):
        validate(build({"rollout": {"n": 1}}))


def test_check_world():
    config = build({"parallel": {"tensor": 2, "expert": 2}})
    check_world(config, 4)
    with pytest.raises(ConfigError, match="2 or 4"):
        check_world(config, 3)
    with pytest.raises(ConfigError, match="started 8 ranks"):
        check_world(build({"parallel": {"world_size": 4}}), 8)


QWEN3_30B = ModelNumbers(layers=48, heads=32, kv_heads=4, experts=128, topk=8, expert_ffn=768, max_positions=40960)
DENSE = ModelNumbers(layers=64, heads=40, kv_heads=8, ffn=27648, max_positions=32768)
SHARED = ModelNumbers(layers=4, heads=8, kv_heads=8, ffn=64, experts=8, topk=2, expert_ffn=32, shared_ffn=6)
MODEL_CASES = [
    (QWEN3_30B, {"parallel.tensor": 6}, "parallel.tensor", "4 KV heads"),
    (QWEN3_30B, {"parallel.tensor": 6}, "parallel", "Nearest legal layouts: tensor 2"),
    (QWEN3_30B, {"parallel.expert": 48}, "parallel.expert", "128 experts"),
    (QWEN3_30B, {"parallel.expert": 48, "parallel.world_size": 48}, "parallel", "expert 16"),
    (QWEN3_30B, {"parallel.expert_tensor": 5}, "parallel.expert_tensor", "size 768"),
    (QWEN3_30B, {"parallel.pipeline": 5}, "parallel.pipeline", "48 layers"),
    (QWEN3_30B, {"parallel.pipeline": 4, "parallel.virtual_pipeline": 5}, "parallel.virtual_pipeline", "12"),
    (QWEN3_30B, {"parallel.pipeline": 2, "parallel.pipeline_layout": "Et*40|t*4L"}, "parallel.pipeline_layout", "44 layers"),
    (SHARED, {"parallel.tensor": 4}, "parallel.tensor", "Shared experts' feed-forward size 6"),
    (QWEN3_30B, {"parallel.tensor": 2, "parallel.sequence_parallel": False}, "parallel.sequence_parallel", "null or true"),
    (DENSE, {"parallel.expert": 2}, "parallel.expert", "no experts"),
    (DENSE, {"model.router_replay": "R3"}, "model.router_replay", "no router"),
    (DENSE, {"data.max_response_length": 40000}, "data.max_response_length", "32768"),
    (DENSE, {"parallel.pipeline": 2, "parallel.first_stage_layers": 32, "parallel.last_stage_layers": 31},
     "parallel.pipeline", "1 layers for 0 even stages"),
]  # fmt: skip


@pytest.mark.parametrize(("numbers", "flat", "key", "words"), MODEL_CASES)
def test_model_does_not_fit(numbers: ModelNumbers, flat: dict, key: str, words: str):
    with pytest.raises(ConfigError) as caught:
        check_model(build(nested(flat)), numbers)
    texts = {problem.key: problem.text for problem in caught.value.problems}
    assert words in texts[key], texts


def test_one_error_lists_what_is_wrong_with_layout_model_and_rest():
    flat = {"parallel.tensor": 3, "parallel.pipeline": 5, "data.max_response_length": 40000}
    keys = {problem.key for problem in model_problems(build(nested(flat)), DENSE, world=15)}
    assert keys == {"parallel.tensor", "parallel.pipeline", "parallel", "data.max_response_length"}


@pytest.mark.parametrize("world", [8, 16])
def test_what_is_accepted_is_what_the_engine_takes(world):
    """Key/value heads may be fewer than tensor-parallel ranks, as in tests/distributed/test_layout_parity.py."""
    config = build(nested({"parallel.tensor": 8}))
    check_model(config, QWEN3_30B, world)
    sizes = {"layers": 48, "heads": 32, "kv_heads": 4, "experts": 128, "expert_ffn": 768}
    assert topology_of(config.parallel, world).problems(**sizes) == []


def test_model_fits():
    check_model(
        build(nested({"parallel.tensor": 4, "parallel.pipeline": 4, "parallel.virtual_pipeline": 3})), QWEN3_30B
    )
    uneven = {"parallel.pipeline": 8, "parallel.first_stage_layers": 11, "parallel.last_stage_layers": 11}
    check_model(build(nested({**uneven, "parallel.tensor": 4})), ModelNumbers(layers=94, heads=64, kv_heads=4))
