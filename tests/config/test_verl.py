"""verl's spellings: a pasted launch script becomes ours, with a note for each change and an error for what is unknown."""

import logging

import pytest

from megatron_dapo.config import Config, ConfigError, load_config, split_words, translate_verl
from megatron_dapo.config.problems import all_keys
from megatron_dapo.config.verl import DROPPED, RENAMED

PUBLISHED = """
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 \\
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 \\
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    data.max_prompt_length=2048 data.max_response_length=20480 data.prompt_key=prompt data.truncation='left' \\
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=4096 \\
    reward_model.overlong_buffer.penalty_factor=1.0 actor_rollout_ref.actor.loss_agg_mode=token-mean \\
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \\
    algorithm.filter_groups.max_num_gen_batches=10 \\
    data.gen_batch_size=1536 data.train_batch_size=512 actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.model.path=models/Qwen2.5-32B actor_rollout_ref.model.use_remove_padding=True \\
    +actor_rollout_ref.model.override_config.attention_dropout=0. \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528 \\
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=22528 \\
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.grad_clip=1.0 \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.max_num_batched_tokens=22528 \\
    actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k="-1" \\
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=1 \\
    trainer.logger='["console","wandb"]' trainer.project_name=DAPO trainer.n_gpus_per_node=8 trainer.nnodes=16 \\
    trainer.val_before_train=True trainer.total_epochs=1 trainer.resume_mode=auto
"""


def test_the_published_script_can_be_pasted():
    translation = translate_verl(split_words(PUBLISHED))
    config = load_config(translation.overrides)
    assert (config.actor.clip_ratio_high, config.actor.clip_ratio_c, config.rollout.n) == (0.28, 10.0, 16)
    assert (config.model.recompute, config.actor.optim.clip_grad, config.parallel.world_size) == ("full", 1.0, 128)
    assert config.reward.overlong_buffer.len == 4096 and config.actor.offload.optimizer
    assert config.trainer.logger == ("console", "wandb")
    assert "actor_rollout_ref.actor.use_dynamic_bsz is left out" in translation.text()


def test_load_config_accepts_old_spellings_with_a_note(caplog):
    with caplog.at_level(logging.WARNING):
        assert load_config(["actor_rollout_ref.rollout.n=4", "rollout.temperature=0.9"]).rollout.n == 4
    assert [record.getMessage() for record in caplog.records] == [
        "deprecated spelling: actor_rollout_ref.rollout.n is now rollout.n"
    ]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4", "parallel.tensor=4"),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full", "model.recompute=full"),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True",
         "model.megatron.moe_permute_fusion=True"),
        ("+actor_rollout_ref.actor.megatron.override_ddp_config.overlap_grad_reduce=True",
         "model.megatron_ddp.overlap_grad_reduce=True"),
        ("+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True",
         "model.megatron_optimizer.optimizer_cpu_offload=True"),
        ("actor_rollout_ref.actor.router_replay.mode=disabled", "model.router_replay=none"),
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", "model.router_replay=R3"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "actor.optim.lr_warmup_steps=0"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len=8", "reward.overlong_buffer.len=8"),
        ("custom_reward_function.path=score.py", "reward.custom_function.path=score.py"),
        ("trainer.v1.sampler.max_off_policy_threshold=4", "trainer.max_off_policy_threshold=4"),
        ("trainer.resume_mode=resume_path", "trainer.resume_mode=path"),
        ("trainer.n_gpus_per_node=4", "parallel.world_size=4"),
        ("critic.model.path=m", "critic.path=m"),
        ("critic.optim.lr=1e-5", "critic.optim.lr=1e-5"),
        ("rollout.n=4", "rollout.n=4"),
    ],
)  # fmt: skip
def test_one_override(theirs: str, ours: str):
    assert translate_verl([theirs]).overrides == (ours,)


def test_tokens_per_gpu_become_tokens_before_the_cut_over_context_ranks():
    prefix = "actor_rollout_ref.actor."
    script = [prefix + "ppo_max_token_len_per_gpu=8192", prefix + "megatron.context_parallel_size=4",
              "critic.ppo_max_token_len_per_gpu=1000"]  # fmt: skip
    assert translate_verl(script).overrides == (
        "actor.max_tokens_per_micro_batch=32768",
        "parallel.context=4",
        "critic.max_tokens_per_micro_batch=4000",
    )


def test_a_key_that_nothing_reads_is_left_out_with_the_reason():
    found = translate_verl(["algorithm.filter_groups.max_inflight_gen_batches=4"])
    assert found.overrides == () and "trainer.num_warmup_batches" in found.text()


def test_unknown_keys_of_verl_are_all_named():
    with pytest.raises(ConfigError) as caught:
        translate_verl(["actor_rollout_ref.model.lora_rank=8", "trainer.v1.nonsense=1", "rollout.n=2"])
    assert [problem.key for problem in caught.value.problems] == [
        "actor_rollout_ref.model.lora_rank",
        "trainer.v1.nonsense",
    ]


def test_every_renamed_key_leads_to_a_key_that_exists():
    known = set(all_keys(Config))
    open_ended = (
        "model.megatron",
        "model.megatron_ddp",
        "model.megatron_optimizer",
        "rollout.engine_kwargs",
        "data.chat_template_kwargs",
        "reward.custom_function.kwargs",
    )
    for target in RENAMED.values():
        name = target.removesuffix(".")
        assert name in known or name.startswith(open_ended), target
    assert not set(RENAMED) & set(DROPPED)
