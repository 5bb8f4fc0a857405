"""Keys that are each legal but contradict one another: every rule as a small generator, all of them run every time."""

from collections.abc import Iterator
from typing import Literal

from megatron_dapo.config.checks_correction import correction_problems
from megatron_dapo.config.checks_parallel import parallel_problems
from megatron_dapo.config.problems import ConfigError, Problem
from megatron_dapo.config.schema import Config

Command = Literal["train", "sft"]
GROUP_RELATIVE = {
    "grpo",
    "grpo_vectorized",
    "gdpo",
    "grpo_passk",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
}
Problems = Iterator[Problem]


def check(config: Config, command: Command | None = None) -> list[Problem]:
    """All contradictions in `config`; with a command also the keys that it cannot do without."""
    rules = (
        _batches,
        _lengths,
        _filter,
        _sampling,
        _estimator,
        _loss,
        _schedule,
        _moe,
        _reward,
        _critic,
        _trainer,
        _async_modes,
    )
    problems = [problem for rule in rules for problem in rule(config)]
    problems += [*parallel_problems(config), *correction_problems(config)]
    if command is not None:
        problems = [*_required(config, command), *problems]
    return problems


def validate(config: Config, command: Command | None = None) -> None:
    """Raise ConfigError if `check` finds anything. For configs that were built in code or read from a file."""
    if problems := check(config, command):
        raise ConfigError(problems)


def _required(config: Config, command: Command) -> Problems:
    if not config.model.path:
        yield Problem("model.path", None, "Is required: the Hugging Face directory of the model to train.")
    if command == "train" and not config.data.train_files:
        yield Problem(
            "data.train_files",
            None,
            "Is required: parquet files with prompts (`megatron-dapo data prepare` makes them).",
        )
    if command == "sft" and not config.sft.train_files:
        yield Problem("sft.train_files", None, "Is required: parquet files with prompt and response.")


def _nearest_divisors(total: int, wanted: int) -> str:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below, above = [d for d in divisors if d <= wanted], [d for d in divisors if d > wanted]
    return " or ".join(str(d) for d in below[-1:] + above[:1])


def _mini_batch(key: str, mini: int, total: int) -> Problems:
    if total % mini:
        yield Problem(
            key,
            mini,
            f"Must divide data.train_batch_size = {total} (both count prompts), so that every optimizer step is full. "
            f"Nearest: {_nearest_divisors(total, mini)}.",
            ("data.train_batch_size",),
        )


def _batches(config: Config) -> Problems:
    data = config.data
    yield from _mini_batch("actor.ppo_mini_batch_size", config.actor.ppo_mini_batch_size, data.train_batch_size)
    mini = config.critic.ppo_mini_batch_size
    if config.derived.critic_enabled and mini is not None:
        yield from _mini_batch("critic.ppo_mini_batch_size", mini, data.train_batch_size)


def _lengths(config: Config) -> Problems:
    actor, critic, longest = config.actor, config.critic, config.derived.max_model_len
    roles = [("actor.max_tokens_per_micro_batch", actor.max_tokens_per_micro_batch)]
    if config.derived.critic_enabled and critic.max_tokens_per_micro_batch is not None:
        roles.append(("critic.max_tokens_per_micro_batch", critic.max_tokens_per_micro_batch))
    for key, tokens in roles:
        if tokens < longest:
            yield Problem(
                key,
                tokens,
                f"A full-length sequence would not fit: set at least {longest} "
                "(data.max_prompt_length + data.max_response_length), or shorten those.",
                ("data.max_prompt_length", "data.max_response_length"),
            )
    if config.rollout.agent.name == "single_turn" and config.rollout.agent.max_turns != 1:
        yield Problem(
            "rollout.agent.max_turns",
            config.rollout.agent.max_turns,
            "The single_turn loop has one turn: leave this at 1 or choose another rollout.agent.name.",
        )


def _filter(config: Config) -> Problems:
    rule, gen, train = config.algorithm.filter_groups, config.derived.gen_batch_size, config.data.train_batch_size
    if not rule.enable:
        if gen > train:
            yield Problem(
                "data.gen_batch_size",
                gen,
                f"Without algorithm.filter_groups.enable the prompts beyond data.train_batch_size = {train} would be "
                "generated and thrown away: leave this at null, or enable the filter.",
                ("data.train_batch_size", "algorithm.filter_groups.enable"),
            )
        return
    if config.rollout.n < 2:
        yield Problem(
            "rollout.n",
            config.rollout.n,
            "algorithm.filter_groups compares the responses of one prompt: set n to at least 2, or disable the filter.",
            ("algorithm.filter_groups.enable",),
        )
    if not rule.metric:
        yield Problem(
            "algorithm.filter_groups.metric", rule.metric, "Is required while the filter is enabled; DAPO uses acc."
        )
    limit = rule.max_num_gen_batches
    if limit > 0 and limit * gen < train:
        yield Problem(
            "algorithm.filter_groups.max_num_gen_batches",
            limit,
            f"{limit} generation batches of data.gen_batch_size = {gen} prompts can never fill data.train_batch_size = "
            f"{train}: allow at least {-(-train // gen)}, or set 0 for no limit.",
            ("data.gen_batch_size", "data.train_batch_size"),
        )


def _sampling(config: Config) -> Problems:
    val = config.rollout.val_kwargs
    if val.do_sample and val.temperature == 0:
        yield Problem(
            "rollout.val_kwargs.temperature",
            val.temperature,
            "Sampling needs a temperature above 0: set one, or set rollout.val_kwargs.do_sample=false for greedy decoding.",
            ("rollout.val_kwargs.do_sample",),
        )
    if not val.do_sample and val.n > 1:
        yield Problem(
            "rollout.val_kwargs.n",
            val.n,
            "Greedy decoding gives the same response every time: set n=1, or rollout.val_kwargs.do_sample=true.",
            ("rollout.val_kwargs.do_sample",),
        )
    for key, top_k in (("rollout.top_k", config.rollout.top_k), ("rollout.val_kwargs.top_k", val.top_k)):
        if top_k == 0:
            yield Problem(key, top_k, "Leaves no token to sample: use -1 for all tokens.")
    for key, top_p in (("rollout.top_p", config.rollout.top_p), ("rollout.val_kwargs.top_p", val.top_p)):
        if top_p == 0:
            yield Problem(key, top_p, "Leaves no token to sample: use 1 for all tokens.")


def _estimator(config: Config) -> Problems:
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    key = "algorithm.adv_estimator"
    if name == "gae" and not config.derived.critic_enabled:
        yield Problem(
            key,
            name,
            "Needs values: remove critic.enable=false, or choose an estimator without a critic such as grpo.",
            ("critic.enable",),
        )
    if name in GROUP_RELATIVE and config.rollout.n < 2:
        yield Problem(
            "rollout.n",
            config.rollout.n,
            f"{key} = {name} compares the responses of one prompt: set n to at least 2.",
            (key,),
        )
    if name.endswith("optimal_token_baseline") and not config.actor.calculate_sum_pi_squared:
        yield Problem(
            key,
            name,
            "Needs the sum of squared probabilities: set actor.calculate_sum_pi_squared=true.",
            ("actor.calculate_sum_pi_squared",),
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield Problem(
            "algorithm.kl_ctrl.type",
            "adaptive",
            "Steers the KL penalty in the reward, which is off: set algorithm.use_kl_in_reward=true, or type=fixed.",
            ("algorithm.use_kl_in_reward",),
        )


def _loss(config: Config) -> Problems:
    loss, actor = config.actor.policy_loss, config.actor
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield Problem(
            "actor.policy_loss.dro_beta",
            "null",
            "Is required by loss_mode=dro: a positive weight, e.g. 0.05.",
            ("actor.policy_loss.loss_mode",),
        )
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield Problem(
            "actor.policy_loss.clip_cov_lb",
            loss.clip_cov_lb,
            f"Must be below actor.policy_loss.clip_cov_ub = {loss.clip_cov_ub}.",
            ("actor.policy_loss.clip_cov_ub",),
        )
    low = config.derived.clip_ratio_low
    if low >= 1 and loss.loss_mode in ("vanilla", "gspo", "clip_cov", "cispo"):
        yield Problem(
            "actor.clip_ratio_low" if actor.clip_ratio_low is not None else "actor.clip_ratio",
            low,
            "Would allow ratios down to 0 or below: set it below 1 (DAPO: 0.2).",
            ("actor.policy_loss.loss_mode",),
        )


def _schedule(config: Config) -> Problems:
    for section, optim in (("actor", config.actor.optim), ("critic", config.critic.optim), ("sft", config.sft.optim)):
        if section == "critic" and not config.derived.critic_enabled:
            continue
        if optim.min_lr > optim.lr:
            yield Problem(
                f"{section}.optim.min_lr",
                optim.min_lr,
                f"Must not exceed {section}.optim.lr = {optim.lr}.",
                (f"{section}.optim.lr",),
            )
        if optim.lr_decay_steps is not None and optim.lr_decay_steps <= optim.lr_warmup_steps:
            yield Problem(
                f"{section}.optim.lr_decay_steps",
                optim.lr_decay_steps,
                f"Counts from the first step and must exceed {section}.optim.lr_warmup_steps = {optim.lr_warmup_steps}.",
                (f"{section}.optim.lr_warmup_steps",),
            )


def _moe(config: Config) -> Problems:
    model, moe = config.model, config.model.moe
    if moe.load_balancing == "none" and moe.aux_loss_coeff > 0:
        yield Problem(
            "model.moe.aux_loss_coeff",
            moe.aux_loss_coeff,
            "Has no effect while model.moe.load_balancing is none: choose aux_loss, seq_aux_loss or global_aux_loss.",
            ("model.moe.load_balancing",),
        )
    if moe.load_balancing != "none" and moe.aux_loss_coeff == 0:
        yield Problem(
            "model.moe.load_balancing",
            moe.load_balancing,
            "Has no effect at model.moe.aux_loss_coeff = 0: set e.g. 0.001.",
            ("model.moe.aux_loss_coeff",),
        )
    if model.recompute_modules and model.recompute != "selective":
        yield Problem(
            "model.recompute_modules",
            list(model.recompute_modules),
            "Is read by model.recompute=selective only.",
            ("model.recompute",),
        )
    if model.router_replay == "R2" and config.algorithm.rollout_correction.bypass_mode:
        yield Problem(
            "model.router_replay",
            "R2",
            "Records the routing in the old-log-prob pass, which algorithm.rollout_correction.bypass_mode leaves out: use R3.",
            ("algorithm.rollout_correction.bypass_mode",),
        )


def _reward(config: Config) -> Problems:
    overlong, limit, reward = config.reward.overlong_buffer, config.data.max_response_length, config.reward
    if overlong.enable and not 0 < overlong.len <= limit:
        yield Problem(
            "reward.overlong_buffer.len",
            overlong.len,
            f"Must lie between 1 and data.max_response_length = {limit}: the penalty grows over the last so many tokens.",
            ("data.max_response_length", "reward.overlong_buffer.enable"),
        )
    if reward.reward_model.enable and not reward.reward_model.path:
        yield Problem("reward.reward_model.path", None, "Is required while reward.reward_model.enable is true.")


def _critic(config: Config) -> Problems:
    if config.trainer.critic_warmup and not config.derived.critic_enabled:
        yield Problem(
            "trainer.critic_warmup",
            config.trainer.critic_warmup,
            "There is no critic to warm up: set 0, or algorithm.adv_estimator=gae.",
            ("critic.enable", "algorithm.adv_estimator"),
        )


def _trainer(config: Config) -> Problems:
    trainer = config.trainer
    for key in ("save_freq", "test_freq", "log_samples_every"):
        if (value := getattr(trainer, key)) == 0:
            yield Problem(f"trainer.{key}", value, "Is a number of steps: use -1 for never.")
    if trainer.test_freq > 0 and not config.data.val_files:
        yield Problem(
            "trainer.test_freq",
            trainer.test_freq,
            "There is nothing to validate on: set data.val_files, or -1 for never.",
            ("data.val_files",),
        )
    if trainer.resume_mode == "path" and not trainer.resume_from_path:
        yield Problem(
            "trainer.resume_from_path",
            None,
            "Is required by trainer.resume_mode=path: a checkpoint directory.",
            ("trainer.resume_mode",),
        )
    if trainer.resume_mode != "path" and trainer.resume_from_path:
        yield Problem(
            "trainer.resume_from_path",
            trainer.resume_from_path,
            f"Is not read at trainer.resume_mode = {trainer.resume_mode}: set resume_mode=path.",
            ("trainer.resume_mode",),
        )


def _async_modes(config: Config) -> Problems:
    trainer, train = config.trainer, config.data.train_batch_size
    sync = trainer.parameter_sync_step
    if trainer.mode == "sync" and sync != 1:
        yield Problem(
            "trainer.parameter_sync_step",
            sync,
            "The sync loop pushes weights after every step: leave this at 1.",
            ("trainer.mode",),
        )
    elif train % sync:
        yield Problem(
            "trainer.parameter_sync_step",
            sync,
            f"Must divide data.train_batch_size = {train}: each local update trains an equal share. "
            f"Nearest: {_nearest_divisors(train, sync)}.",
            ("data.train_batch_size", "trainer.mode"),
        )
    elif sync > 1 and (train // sync) % config.actor.ppo_mini_batch_size:
        yield Problem(
            "actor.ppo_mini_batch_size",
            config.actor.ppo_mini_batch_size,
            f"Must divide the {train // sync} prompts of one local update (data.train_batch_size / "
            f"trainer.parameter_sync_step). Nearest: {_nearest_divisors(train // sync, config.actor.ppo_mini_batch_size)}.",
            ("trainer.parameter_sync_step", "data.train_batch_size", "trainer.mode"),
        )
