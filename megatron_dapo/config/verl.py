"""verl's and the DAPO recipe's spellings in our words, so that an existing launch script's overrides can be pasted.

`RENAMED` moves a key (a trailing `.` moves everything below it), `DROPPED` says why a key has no counterpart,
`CONVERTED` also changes the value. A key that is spelled alike in both systems stands in none of them.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dapo.config.problems import ConfigError, Problem, nearest

A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.megatron."

RENAMED = {
    A + "policy_loss.": "actor.policy_loss.",
    A + "optim.": "actor.optim.",
    A + "tau_pos": "actor.policy_loss.tau_pos",
    A + "tau_neg": "actor.policy_loss.tau_neg",
    A + "grad_clip": "actor.optim.clip_grad",
    A + "ppo_max_token_len_per_gpu": "actor.max_tokens_per_micro_batch",
    A + "fsdp_config.param_offload": "actor.offload.param",
    A + "fsdp_config.optimizer_offload": "actor.offload.optimizer",
    A + "checkpoint.async_save": "trainer.async_save",
    M + "tensor_model_parallel_size": "parallel.tensor",
    M + "pipeline_model_parallel_size": "parallel.pipeline",
    M + "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    M + "context_parallel_size": "parallel.context",
    M + "expert_model_parallel_size": "parallel.expert",
    M + "expert_tensor_parallel_size": "parallel.expert_tensor",
    M + "sequence_parallel": "parallel.sequence_parallel",
    M + "param_offload": "actor.offload.param",
    M + "grad_offload": "actor.offload.grad",
    M + "optimizer_offload": "actor.offload.optimizer",
    M + "dtype": "model.dtype",
    M + "override_transformer_config.num_layers_in_first_pipeline_stage": "parallel.first_stage_layers",
    M + "override_transformer_config.num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
    M + "override_transformer_config.pipeline_model_parallel_layout": "parallel.pipeline_layout",
    M + "override_transformer_config.recompute_modules": "model.recompute_modules",
    M + "override_transformer_config.": "model.megatron.",
    M + "override_ddp_config.": "model.megatron_ddp.",
    A + "optim.override_optimizer_config.": "model.megatron_optimizer.",
    A: "actor.",
    R + "tensor_model_parallel_size": "rollout.tensor_parallel_size",
    R + "prompt_length": "data.max_prompt_length",
    R + "response_length": "data.max_response_length",
    R + "engine_kwargs.vllm.": "rollout.engine_kwargs.",
    R: "rollout.",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "ref.offload_param",
    "actor_rollout_ref.ref.megatron.param_offload": "ref.offload_param",
    "critic.model.path": "critic.path",
    "critic.ppo_max_token_len_per_gpu": "critic.max_tokens_per_micro_batch",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.megatron.param_offload": "critic.offload.param",
    "critic.megatron.grad_offload": "critic.offload.grad",
    "critic.megatron.optimizer_offload": "critic.offload.optimizer",
    "data.apply_chat_template_kwargs.": "data.chat_template_kwargs.",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "reward_model.overlong_buffer.": "reward.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward.overlong_buffer.",
    "reward.reward_kwargs.overlong_buffer_cfg.": "reward.overlong_buffer.",
    "reward_model.reward_manager": "reward.manager",
    "reward.reward_manager.name": "reward.manager",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.path",
    "reward_model.model.fsdp_config.param_offload": "reward.reward_model.offload_param",
    "reward_model.megatron.param_offload": "reward.reward_model.offload_param",
    "custom_reward_function.reward_kwargs.": "reward.custom_function.kwargs.",
    "custom_reward_function.": "reward.custom_function.",
    "reward.custom_reward_function.reward_kwargs.": "reward.custom_function.kwargs.",
    "reward.custom_reward_function.": "reward.custom_function.",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.v1.trainer_mode": "trainer.mode",
    "trainer.v1.separate_async.parameter_sync_step": "trainer.parameter_sync_step",
    "trainer.v1.separate_async.num_warmup_batches": "trainer.num_warmup_batches",
    "trainer.v1.colocate_async.num_warmup_batches": "trainer.num_warmup_batches",
    "trainer.v1.sampler.max_off_policy_threshold": "trainer.max_off_policy_threshold",
    "trainer.v1.sampler.max_off_policy_strategy": "trainer.max_off_policy_strategy",
}  # fmt: skip

_PACKED = "micro-batches are always packed up to max_tokens_per_micro_batch"
_ALWAYS = "always on"
_ONE_LAYOUT = "actor, reference and critic share the layout of `parallel`"
DROPPED = {
    A + "strategy": "training is Megatron-core's",
    A + "use_dynamic_bsz": _PACKED,
    A + "ppo_micro_batch_size": _PACKED,
    A + "ppo_micro_batch_size_per_gpu": _PACKED,
    A + "ulysses_sequence_parallel_size": "sequences are cut by parallel.context and parallel.tensor",
    A + "fsdp_config.": "there is no FSDP here; the layout is `parallel`",
    A + "entropy_from_logits_with_chunking": _ALWAYS,
    A + "entropy_checkpointing": _ALWAYS,
    A + "use_torch_compile": "Megatron-core's own kernels are used",
    A + "use_fused_kernels": "log-probs are always computed in chunks",
    A + "checkpoint.": "checkpoints always hold everything that a resumed run needs",
    A + "optim.lr_warmup_steps_ratio": "set actor.optim.lr_warmup_steps",
    M + "use_mbridge": "loading and export have their own tables",
    M + "vanilla_mbridge": "loading and export have their own tables",
    M + "use_dist_checkpointing": _ALWAYS,
    M + "dist_checkpointing_path": "set model.path; `megatron-dapo convert` reads Megatron checkpoints",
    M + "use_distributed_optimizer": _ALWAYS,
    M + "use_remove_padding": _ALWAYS,
    M + "seed": "set trainer.seed",
    M + "override_transformer_config.recompute_method": "whole layers are recomputed one by one",
    M + "override_transformer_config.recompute_num_layers": "whole layers are recomputed one by one",
    R + "name": "rollouts are vLLM's",
    R + "mode": "rollouts are always asynchronous requests",
    R + "load_format": "weights are pushed before the first rollout",
    R + "free_cache_engine": "decided by the trainer's mode",
    R + "enable_chunked_prefill": _ALWAYS,
    R + "log_prob_micro_batch_size": _PACKED,
    R + "log_prob_micro_batch_size_per_gpu": _PACKED,
    R + "log_prob_use_dynamic_bsz": _PACKED,
    R + "log_prob_max_token_len_per_gpu": _PACKED,
    R + "logprobs_mode": "rollout log-probs are always those of the distribution sampled from",
    R + "layered_summon": "weights are pushed shard by shard",
    R + "checkpoint_engine.": "weights are pushed shard by shard",
    "actor_rollout_ref.hybrid_engine": "decided by trainer.mode",
    "actor_rollout_ref.nccl_timeout": "set NCCL's own variables",
    "actor_rollout_ref.model.use_remove_padding": _ALWAYS,
    "actor_rollout_ref.model.use_fused_kernels": "log-probs are always computed in chunks",
    "actor_rollout_ref.model.trust_remote_code": "code in a model directory is never run",
    "actor_rollout_ref.model.override_config.": "architecture comes from the model's config.json",
    "actor_rollout_ref.model.use_liger": "Megatron-core's own kernels are used",
    "actor_rollout_ref.model.enable_activation_offload": "set model.recompute",
    "actor_rollout_ref.ref.": _ONE_LAYOUT,
    "algorithm.filter_groups.max_inflight_gen_batches": "the sync mode has one under way, the others as many groups as "
    "trainer.num_warmup_batches says",
    "critic.megatron.": _ONE_LAYOUT,
    "critic.model.": _ONE_LAYOUT,
    "critic.strategy": "training is Megatron-core's",
    "critic.use_dynamic_bsz": _PACKED,
    "critic.ppo_micro_batch_size": _PACKED,
    "critic.ppo_micro_batch_size_per_gpu": _PACKED,
    "data.return_raw_chat": _ALWAYS,
    "data.reward_fn_key": "the column is data_source",
    "data.dataloader_num_workers": "prompts are read by the driver, ahead of need",
    "data.val_batch_size": "validation prompts are sent at once",
    "data.filter_overlong_prompts_workers": "decided by the number of cores",
    "data.trust_remote_code": "code in a model directory is never run",
    "reward_model.launch_reward_fn_async": _ALWAYS,
    "reward_model.reward_kwargs.max_resp_len": "is data.max_response_length",
    "reward.reward_kwargs.max_resp_len": "is data.max_response_length",
    "trainer.use_v1": "there is one trainer per trainer.mode",
    "trainer.device": "found out at the start",
    "trainer.max_critic_ckpt_to_keep": "actor and critic are saved together; set trainer.max_ckpt_to_keep",
    "trainer.del_local_ckpt_after_load": "set trainer.max_ckpt_to_keep",
    "trainer.default_hdfs_dir": "checkpoints lie in trainer.default_local_dir",
    "trainer.validation_data_dir": "set trainer.rollout_data_dir",
    "trainer.log_val_generations": "set trainer.log_samples_every",
    "trainer.use_legacy_worker_impl": "there is one implementation",
}  # fmt: skip


def _gradient_checkpointing(value: str) -> str:
    return "model.recompute=" + ("full" if value.lower() == "true" else "none")


def _none_if_null(value: str) -> str:
    return "none" if value in ("null", "None", "disabled", "") else value


CONVERTED: dict[str, Callable[[str], str]] = {
    "actor_rollout_ref.model.enable_gradient_checkpointing": _gradient_checkpointing,
    M + "override_transformer_config.recompute_granularity": lambda v: "model.recompute=" + _none_if_null(v),
    A + "router_replay.mode": lambda v: "model.router_replay=" + _none_if_null(v),
    M + "router_replay.mode": lambda v: "model.router_replay=" + _none_if_null(v),
    R + "enable_rollout_routing_replay": lambda v: "model.router_replay=" + ("R3" if v.lower() == "true" else "none"),
    A + "optim.lr_warmup_steps": lambda v: f"actor.optim.lr_warmup_steps={0 if v == '-1' else v}",
    "critic.optim.lr_warmup_steps": lambda v: f"critic.optim.lr_warmup_steps={0 if v == '-1' else v}",
    "trainer.resume_mode": lambda v: "trainer.resume_mode=" + ("path" if v == "resume_path" else v),
    "data.seed": lambda v: f"data.seed={1 if v in ('null', 'None') else v}",
}
_NODES, _GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
_FOREIGN = ("actor_rollout_ref.", "reward_model.", "custom_reward_function.", "trainer.v1.", "global_profiler.", "ray_")
_MARKS = re.compile(r"^\+\+?")  # Hydra's "add this key"
_PER_GPU = (A + "ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu")  # verl multiplies by the context size
_CONTEXT = (M + "context_parallel_size", "parallel.context")


@dataclass(frozen=True)
class Translation:
    """`overrides` in our words; `notes` say what was renamed or left out and why."""

    overrides: tuple[str, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """For a terminal or a shell script: the notes as comments, then one override per line."""
        return "\n".join([*(f"# {note}" for note in self.notes), *map(shlex.quote, self.overrides)])


def split_words(script: str) -> list[str]:
    """The overrides in a piece of a shell script: line continuations, quotes and comments are the shell's."""
    return shlex.split(script.replace("\\\n", " "), comments=True)


def translate_verl(overrides: Sequence[str]) -> Translation:
    """Every override in our words. Raises ConfigError naming all keys of verl that no table knows."""
    ours: list[str] = []
    notes: list[str] = []
    problems: list[Problem] = []
    world: dict[str, int] = {}
    split = [_MARKS.sub("", text).partition("=") for text in overrides]
    context = next((int(value) for key, _, value in reversed(split) if key in _CONTEXT and value.isdigit()), 1)
    for text, (key, equals, value) in zip(overrides, split, strict=True):
        if key in (_NODES, _GPUS) and value.isdigit():
            world[key] = int(value)
        elif key in CONVERTED and equals:
            ours.append(CONVERTED[key](value))
            if not ours[-1].startswith(f"{key}="):
                notes.append(f"{key} is now {ours[-1].partition('=')[0]}")
        elif key in _PER_GPU and value.isdigit():
            ours.append(f"{RENAMED[key]}={int(value) * context}")
            notes.append(f"{key} is now {RENAMED[key]}, before the cut over parallel.context: {value} x {context}")
        elif (renamed := _renamed(key)) is not None:
            ours.append(renamed + equals + value)
            notes.append(f"{key} is now {renamed}")
        elif (reason := _longest(key, DROPPED)) is not None:
            notes.append(f"{key} is left out: {DROPPED[reason]}")
        elif key.startswith(_FOREIGN):
            near = nearest(key, [*RENAMED, *CONVERTED])
            hint = f" Did you mean {near}?" if near else ""
            problems.append(Problem(key, value, f"No counterpart of this key is known here.{hint}"))
        else:
            ours.append(text)
    if world:
        ours.append(f"parallel.world_size={world.get(_NODES, 1) * world.get(_GPUS, 8)}")
        notes.append(f"{_NODES} and {_GPUS} (default 1 and 8) are now parallel.world_size, their product")
    if problems:
        raise ConfigError(problems)
    return Translation(tuple(ours), tuple(notes))


def _renamed(key: str) -> str | None:
    """Our name of a moved key; the longest matching entry of the two tables decides."""
    entry, dropped = _longest(key, RENAMED), _longest(key, DROPPED)
    if entry is None or (dropped is not None and len(dropped) > len(entry)):
        return None
    return RENAMED[entry] + key.removeprefix(entry)


def _longest(key: str, table: dict[str, str]) -> str | None:
    fitting = [entry for entry in table if key == entry or (entry.endswith(".") and key.startswith(entry))]
    return max(fitting, key=len, default=None)
