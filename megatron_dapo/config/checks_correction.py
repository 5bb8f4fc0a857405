"""The grammar of rollout correction (rule names, threshold spellings), checked before anything runs."""

from collections.abc import Iterator, Sequence

from megatron_dapo.config.algorithm import PRESETS
from megatron_dapo.config.problems import Problem, nearest
from megatron_dapo.config.schema import Config, problem

PREFIX = "algorithm.rollout_correction."
RULES = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)


def correction_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with `algorithm.rollout_correction`, alone and with the keys it relies on."""
    rule = config.algorithm.rollout_correction
    if rule.preset is not None and rule.preset not in PRESETS:
        yield problem(config, PREFIX + "preset", _one_of(rule.preset, list(PRESETS)))
    if rule.rollout_is is not None and (fault := _bounds_fault(rule.rollout_is_threshold)):
        yield problem(config, PREFIX + "rollout_is_threshold", fault)
    if rule.rollout_rs is not None:
        yield from _rejection(config, rule.rollout_rs.split(","))
    if not config.rollout.calculate_log_probs:
        text = "Every step compares the two engines by the rollout's log-probs: leave this at true."
        yield problem(config, "rollout.calculate_log_probs", text)
    if rule.bypass_mode and config.actor.policy_loss.loss_mode != "vanilla":
        text = f"{PREFIX}bypass_mode brings its own loss ({PREFIX}loss_type): leave this at vanilla."
        yield problem(config, "actor.policy_loss.loss_mode", text, PREFIX + "bypass_mode")
    if rule.loss_type != "ppo_clip" and not rule.bypass_mode:
        text = f"Is read with {PREFIX}bypass_mode=true only."
        yield problem(config, PREFIX + "loss_type", text, PREFIX + "bypass_mode")


def _rejection(config: Config, rules: list[str]) -> Iterator[Problem]:
    names, key = [rule.strip() for rule in rules], PREFIX + "rollout_rs_threshold"
    for name in names:
        if name not in RULES:
            yield problem(config, PREFIX + "rollout_rs", f"`{name}` is no rule. {_one_of(name, RULES)}")
    thresholds = config.algorithm.rollout_correction.rollout_rs_threshold
    if thresholds is None:
        yield problem(config, key, f"Is required with {PREFIX}rollout_rs.", PREFIX + "rollout_rs")
        return
    given = [part.strip() for part in str(thresholds).split(",")]
    if len(given) not in (1, len(names)):
        text = f"Give one threshold, or one for each of the {len(names)} rules."
        yield problem(config, key, text, PREFIX + "rollout_rs")
        return
    for name, text in zip(names, given * len(names) if len(given) == 1 else given, strict=True):
        if "_" in text and not name.endswith("k1"):
            yield problem(config, key, f"{name} has an upper bound only: give one number.")
        elif fault := _bounds_fault(text):
            yield problem(config, key, fault)


def _one_of(given: str, known: Sequence[str]) -> str:
    near = nearest(given, known)
    return (f"Did you mean {near}? " if near else "") + f"There are: {', '.join(known)}."


def _bounds_fault(threshold: float | str) -> str | None:
    """Why `threshold` is neither a positive number nor `lower_upper`; None if it is one of them."""
    parts = str(threshold).split("_", 1)
    try:
        bounds = [float(part) for part in parts]
    except ValueError:
        return "Must be a number, or two joined by an underscore such as 0.5_5.0 (lower_upper)."
    if min(bounds) <= 0:
        return "Bounds act on a ratio and must be positive."
    if len(bounds) == 2 and bounds[0] > bounds[1]:
        return "The lower bound comes first and must not exceed the upper."
    return None
