"""Keys that are each legal but contradict one another: every rule is a small generator, and all of them run."""

from collections.abc import Iterator
from math import lcm
from typing import Literal

from megatron_dapo.config.checks_correction import correction_problems
from megatron_dapo.config.checks_parallel import parallel_problems
from megatron_dapo.config.problems import ConfigError, Problem
from megatron_dapo.config.schema import Config, problem

Command = Literal["train", "sft"]
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
        _model,
        _reward,
        _trainer,
        _async_modes,
    )
    found = [one for rule in rules for one in rule(config)]
    found += [*parallel_problems(config), *correction_problems(config)]
    return found if command is None else [*_required(config, command), *found]


def validate(config: Config, command: Command | None = None) -> None:
    """Raise ConfigError if `check` finds anything. For configs that were built in code or read from a file."""
    if found := check(config, command):
        raise ConfigError(found)


def _required(config: Config, command: Command) -> Problems:
    if not config.model.path:
        yield Problem("model.path", None, "Is required: the Hugging Face directory of the model to train.")
    if command == "train" and not config.data.train_files:
        text = "Is required: parquet or JSONL files with prompts (`megatron-dapo data prepare` makes them)."
        yield Problem("data.train_files", None, text)
    if command == "sft" and config.trainer.runtime != "torchrun":
        yield problem(config, "trainer.runtime", "Supervised training has no Ray driver: set torchrun.")
    if command == "sft" and not config.sft.train_files:
        yield Problem("sft.train_files", None, "Is required: parquet or JSONL files with prompt and response.")
    least = _aligned(config, config.sft.max_length)
    if command == "sft" and config.actor.max_tokens_per_micro_batch < least:
        words = _up("sft.max_length", config.sft.max_length, least)
        text = f"A full-length row would not fit: set at least {least} ({words})."
        yield problem(config, "actor.max_tokens_per_micro_batch", text, "sft.max_length")


def _nearest_divisors(total: int, wanted: int) -> str:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below, above = [d for d in divisors if d <= wanted], [d for d in divisors if d > wanted]
    return " or ".join(str(d) for d in below[-1:] + above[:1])


def _batches(config: Config) -> Problems:
    total = config.data.train_batch_size
    roles = [("actor", config.actor.ppo_mini_batch_size)]
    if config.derived.critic_enabled and config.critic.ppo_mini_batch_size is not None:
        roles.append(("critic", config.critic.ppo_mini_batch_size))
    for role, mini in roles:
        if total % mini:
            text = (
                f"Must divide data.train_batch_size = {total} (both count prompts), so that every optimizer step is "
                f"full. Nearest: {_nearest_divisors(total, mini)}."
            )
            yield problem(config, f"{role}.ppo_mini_batch_size", text, "data.train_batch_size")


def _lengths(config: Config) -> Problems:
    actor, critic, longest = config.actor, config.critic, config.derived.max_model_len
    limits = [("actor", actor.max_tokens_per_micro_batch)]
    if config.derived.critic_enabled and critic.max_tokens_per_micro_batch is not None:
        limits.append(("critic", critic.max_tokens_per_micro_batch))
    for role, tokens in limits:
        if tokens < (least := _aligned(config, longest)):
            lengths = ("data.max_prompt_length", "data.max_response_length")
            words = _up(" + ".join(lengths), longest, least)
            text = f"A full-length sequence would not fit: set at least {least} ({words})."
            yield problem(config, f"{role}.max_tokens_per_micro_batch", text, *lengths)
    if config.rollout.agent.name == "single_turn" and config.rollout.agent.max_turns != 1:
        text = "The single_turn loop has one turn: leave this at 1, or choose another rollout.agent.name."
        yield problem(config, "rollout.agent.max_turns", text, "rollout.agent.name")


def _aligned(config: Config, tokens: int) -> int:
    """What a sequence of so many tokens occupies at most: micro-batches are cut into equal parts (engine/packed.py)."""
    tensor, context = config.parallel.tensor, config.parallel.context
    multiple = lcm(2 * context, tensor * context) if context > 1 else tensor
    return -(-tokens // multiple) * multiple


def _up(words: str, tokens: int, aligned: int) -> str:
    return words if aligned == tokens else f"{words}, rounded up to what parallel.tensor and .context cut evenly"


def _filter(config: Config) -> Problems:
    rule, gen, train = config.algorithm.filter_groups, config.derived.gen_batch_size, config.data.train_batch_size
    prefix = "algorithm.filter_groups."
    if not rule.enable:
        if gen > train:
            text = (
                f"Without {prefix}enable the prompts beyond data.train_batch_size = {train} would be generated and "
                "thrown away: set null, or enable the filter."
            )
            yield problem(config, "data.gen_batch_size", text, "data.train_batch_size", prefix + "enable")
        return
    if config.rollout.n < 2:
        text = f"{prefix}enable compares the responses of one prompt: set at least 2, or disable the filter."
        yield problem(config, "rollout.n", text, prefix + "enable")
    if not rule.metric:
        yield problem(config, prefix + "metric", "Is required while the filter is enabled; DAPO uses acc.")
    if rule.max_num_gen_batches > 0 and rule.max_num_gen_batches * gen < train:
        text = (
            f"So many generation batches of data.gen_batch_size = {gen} prompts can never fill data.train_batch_size = "
            f"{train}: allow at least {-(-train // gen)}, or set 0 for no limit."
        )
        yield problem(config, prefix + "max_num_gen_batches", text, "data.gen_batch_size", "data.train_batch_size")


def _sampling(config: Config) -> Problems:
    val, do_sample = config.rollout.val_kwargs, "rollout.val_kwargs.do_sample"
    if val.do_sample and val.temperature == 0:
        text = f"Sampling needs a temperature above 0: set one, or {do_sample}=false for greedy decoding."
        yield problem(config, "rollout.val_kwargs.temperature", text, do_sample)
    if not val.do_sample and val.n > 1:
        text = f"Greedy decoding gives the same response every time: set 1, or {do_sample}=true."
        yield problem(config, "rollout.val_kwargs.n", text, do_sample)
    for section, kwargs in (("rollout", config.rollout), ("rollout.val_kwargs", val)):
        if kwargs.top_k == 0:
            yield problem(config, f"{section}.top_k", "Leaves no token to sample: use -1 for all tokens.")
        if kwargs.top_p == 0:
            yield problem(config, f"{section}.top_p", "Leaves no token to sample: use 1 for all tokens.")


GROUP_RELATIVE = {
    *(
        "grpo",
        "grpo_vectorized",
        "gdpo",
        "grpo_passk",
        "reinforce_plus_plus_baseline",
        "rloo",
        "rloo_vectorized",
        "opo",
    ),
    *("gpg", "optimal_token_baseline", "tir_optimal_token_baseline"),
}


def _estimator(config: Config) -> Problems:
    key, name = "algorithm.adv_estimator", config.algorithm.adv_estimator
    if name == "gae" and not config.derived.critic_enabled:
        text = "Needs values: remove critic.enable=false, or choose an estimator without a critic such as grpo."
        yield problem(config, key, text, "critic.enable")
    if name in GROUP_RELATIVE and config.rollout.n < 2:
        text = f"{key} = {name} compares the responses of one prompt: set at least 2."
        yield problem(config, "rollout.n", text, key)
    if name.endswith("optimal_token_baseline") and not config.actor.calculate_sum_pi_squared:
        text = "Needs the sum of squared probabilities: set actor.calculate_sum_pi_squared=true."
        yield problem(config, key, text, "actor.calculate_sum_pi_squared")
    if config.algorithm.kl_ctrl.type == "adaptive" and not config.algorithm.use_kl_in_reward:
        text = "Steers the KL penalty in the reward, which is off: set algorithm.use_kl_in_reward=true, or type=fixed."
        yield problem(config, "algorithm.kl_ctrl.type", text, "algorithm.use_kl_in_reward")


def _loss(config: Config) -> Problems:
    loss, prefix = config.actor.policy_loss, "actor.policy_loss."
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        text = "Is required by loss_mode=dro: a positive weight, e.g. 0.05."
        yield problem(config, prefix + "dro_beta", text, prefix + "loss_mode")
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        text = f"Must be below {prefix}clip_cov_ub = {loss.clip_cov_ub}."
        yield problem(config, prefix + "clip_cov_lb", text, prefix + "clip_cov_ub")
    if config.derived.clip_ratio_low >= 1 and loss.loss_mode in ("vanilla", "gspo", "clip_cov", "cispo"):
        key = "actor.clip_ratio" if config.actor.clip_ratio_low is None else "actor.clip_ratio_low"
        text = "Would allow probability ratios down to 0: set it below 1 (DAPO: 0.2)."
        yield problem(config, key, text, prefix + "loss_mode")


def _schedule(config: Config) -> Problems:
    roles = {"actor": config.actor.optim, "sft": config.sft.optim}
    if config.derived.critic_enabled:
        roles["critic"] = config.critic.optim
    for role, optim in roles.items():
        prefix = f"{role}.optim."
        if optim.min_lr > optim.lr:
            yield problem(config, prefix + "min_lr", f"Must not exceed {prefix}lr = {optim.lr}.", prefix + "lr")
        if optim.lr_decay_steps is not None and optim.lr_decay_steps <= optim.lr_warmup_steps:
            text = f"Counts from the first step and must exceed {prefix}lr_warmup_steps = {optim.lr_warmup_steps}."
            yield problem(config, prefix + "lr_decay_steps", text, prefix + "lr_warmup_steps")


def _model(config: Config) -> Problems:
    model, moe = config.model, config.model.moe
    if moe.load_balancing == "none" and moe.aux_loss_coeff > 0:
        text = "Has no effect while model.moe.load_balancing is none: choose aux_loss, seq_aux_loss or global_aux_loss."
        yield problem(config, "model.moe.aux_loss_coeff", text, "model.moe.load_balancing")
    if moe.load_balancing != "none" and moe.aux_loss_coeff == 0:
        text = "Has no effect at model.moe.aux_loss_coeff = 0: set e.g. 0.001."
        yield problem(config, "model.moe.load_balancing", text, "model.moe.aux_loss_coeff")
    if model.recompute_modules and model.recompute != "selective":
        text = "Is read by model.recompute=selective only."
        yield problem(config, "model.recompute_modules", text, "model.recompute")
    bypass = "algorithm.rollout_correction.bypass_mode"
    if model.router_replay == "R2" and config.algorithm.rollout_correction.bypass_mode:
        text = f"Records the routing in the old-log-prob pass, which {bypass} leaves out: use R3."
        yield problem(config, "model.router_replay", text, bypass)


def _reward(config: Config) -> Problems:
    overlong, limit = config.reward.overlong_buffer, config.data.max_response_length
    if overlong.enable and not 0 < overlong.len <= limit:
        text = f"Is the end of a response over which the penalty grows: 1 to data.max_response_length = {limit} tokens."
        related = ("data.max_response_length", "reward.overlong_buffer.enable")
        yield problem(config, "reward.overlong_buffer.len", text, *related)
    if config.reward.reward_model.enable and not config.reward.reward_model.path:
        yield Problem("reward.reward_model.path", None, "Is required while reward.reward_model.enable is true.")


def _trainer(config: Config) -> Problems:
    trainer = config.trainer
    periods = {
        "save_freq": trainer.save_freq,
        "test_freq": trainer.test_freq,
        "log_samples_every": trainer.log_samples_every,
    }
    for key, period in periods.items():
        if period == 0:
            yield problem(config, f"trainer.{key}", "Is a number of steps: use -1 for never.")
    if trainer.test_freq > 0 and not config.data.val_files:
        text = "There is nothing to validate on: set data.val_files, or -1 for never."
        yield problem(config, "trainer.test_freq", text, "data.val_files")
    if trainer.resume_mode == "path" and not trainer.resume_from_path:
        text = "Is required by trainer.resume_mode=path: a checkpoint directory."
        yield Problem("trainer.resume_from_path", None, text, ("trainer.resume_mode",))
    if trainer.resume_mode != "path" and trainer.resume_from_path:
        text = f"Is not read at trainer.resume_mode = {trainer.resume_mode}: set trainer.resume_mode=path."
        yield problem(config, "trainer.resume_from_path", text, "trainer.resume_mode")
    if trainer.critic_warmup and not config.derived.critic_enabled:
        text = "There is no critic to warm up: set 0, or algorithm.adv_estimator=gae."
        yield problem(config, "trainer.critic_warmup", text, "critic.enable", "algorithm.adv_estimator")


def _async_modes(config: Config) -> Problems:
    trainer, train, mini = config.trainer, config.data.train_batch_size, config.actor.ppo_mini_batch_size
    key, sync = "trainer.parameter_sync_step", trainer.parameter_sync_step
    if trainer.mode != "sync":
        yield from _replay(config)
    elif config.rollout.agent.name != "single_turn":
        text = "The sync loop generates single turns: use trainer.mode=colocate_async or separate_async."
        yield problem(config, "rollout.agent.name", text, "trainer.mode")
    if trainer.mode == "colocate_async" and config.algorithm.adv_estimator == "remax":
        text = "Generates its baselines while the trainer holds the devices: use trainer.mode=sync or separate_async."
        yield problem(config, "algorithm.adv_estimator", text, "trainer.mode")
    if sync == 1:
        return
    if trainer.mode != "separate_async":
        text = "Only trainer.mode=separate_async trains several times between two pushes: set 1."
        yield problem(config, key, text, "trainer.mode")
    elif train % sync:
        near = _nearest_divisors(train, sync)
        text = f"Must divide data.train_batch_size = {train}: each local update trains an equal share. Nearest: {near}."
        yield problem(config, key, text, "data.train_batch_size", "trainer.mode")
    elif (train // sync) % mini:
        near = _nearest_divisors(train // sync, mini)
        share = f"{train // sync} prompts of one local update (data.train_batch_size / {key})"
        text = f"Must divide the {share}. Nearest: {near}."
        yield problem(config, "actor.ppo_mini_batch_size", text, key, "data.train_batch_size", "trainer.mode")


def _replay(config: Config) -> Problems:
    """The bound on staleness, and what it means for how much is generated ahead."""
    trainer, filters = config.trainer, config.algorithm.filter_groups
    key, ahead, span = "trainer.max_off_policy_threshold", trainer.num_warmup_batches, trainer.max_off_policy_threshold
    if span <= ahead:
        text = f"Batches are sent trainer.num_warmup_batches = {ahead} steps ahead: set {ahead + 1} or more."
        yield problem(config, key, text, "trainer.num_warmup_batches")
    if trainer.max_off_policy_strategy == "wait" and trainer.replay_sampler != "oldest_first":
        text = "Could wait for ever for groups that are passed over: set oldest_first, or max_off_policy_strategy=drop."
        yield problem(config, "trainer.replay_sampler", text, "trainer.max_off_policy_strategy")
    if filters.surplus == "discard" and ahead:
        text = "Would throw away what trainer.num_warmup_batches generates ahead: set carry, or num_warmup_batches=0."
        yield problem(config, "algorithm.filter_groups.surplus", text, "trainer.num_warmup_batches")
    if filters.metric == "seq_final_reward" and filters.enable:
        text = "Is known only after the KL penalty, but groups are judged as they arrive: use seq_reward, or mode=sync."
        yield problem(config, "algorithm.filter_groups.metric", text, "trainer.mode")
