"""What advantage estimators share: the call shape, the configuration, the registry and the rule for lone samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.groups import Grouped, GroupIds
from megatron_dapo.algorithms.masked import real
from megatron_dapo.algorithms.registry import Registry

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class AdvantageConfig:
    """Parameters of the estimators, under their usual names; each estimator reads its own.

    singleton: what a sample alone in its group gets, the same for every group-relative estimator. "zero": advantage 0,
        since nothing says whether it is better or worse than expected. "raw": its score against a baseline of 0 and a
        deviation of 1, the rule behind published results.
    count_rejected: whether rows whose mask is empty (rejected by the rollout correction, or an empty response) still
        count in the statistics of their group. Their rewards are honest samples of the rollout policy, so they do.
    """

    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    singleton: Literal["zero", "raw"] = "zero"
    count_rejected: bool = True
    gdpo_reward_keys: tuple[str, ...] = ()
    gdpo_reward_weights: tuple[float, ...] | None = None
    handle_zero_tail: bool = True  # optimal_token_baseline

    def __post_init__(self) -> None:
        if self.singleton not in ("zero", "raw"):
            raise ValueError(f"singleton must be 'zero' or 'raw', got {self.singleton!r}")
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {value}")


Estimate = tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]
F = TypeVar("F", bound=Callable[..., Estimate])


@dataclass(frozen=True)
class Estimator:
    """A registered estimator with the names of the inputs it cannot do without."""

    name: str
    function: Callable[..., Estimate]
    needs: tuple[str, ...] = ()

    def __call__(
        self,
        token_rewards: Float[Tensor, "b t"],
        mask: Bool[Tensor, "b t"],
        group_ids: GroupIds | None = None,
        *,
        config: AdvantageConfig = AdvantageConfig(),
        values: Float[Tensor, "b t"] | None = None,
        reward_baselines: Float[Tensor, " b"] | None = None,
        old_logprob: Float[Tensor, "b t"] | None = None,
        sum_pi_squared: Float[Tensor, "b t"] | None = None,
        rollout_is_weights: Float[Tensor, "b t"] | None = None,
        component_rewards: Mapping[str, Float[Tensor, " b"]] | None = None,
    ) -> Estimate:
        """Advantages and returns, [b, t], 0 in padding.

        The score of a row is the sum of its token rewards over all positions, masked ones too: a token that the
        rollout correction rejects keeps its reward. Raises ValueError naming an input that the estimator needs and
        that is absent, or the samples whose rewards are not finite.
        """
        inputs: dict[str, Any] = {
            "group_ids": group_ids,
            "values": values,
            "reward_baselines": reward_baselines,
            "old_logprob": old_logprob,
            "sum_pi_squared": sum_pi_squared,
            "rollout_is_weights": rollout_is_weights,
            "component_rewards": component_rewards,
        }
        check_inputs(self.name, {name for name, value in inputs.items() if value is not None})
        if token_rewards.shape != mask.shape:
            raise ValueError(f"token_rewards {tuple(token_rewards.shape)} and mask {tuple(mask.shape)} must agree")
        ids = inputs.pop("group_ids")
        with torch.no_grad():
            return self.function(real(token_rewards), mask.bool(), ids, config=config, **inputs)


_estimators: Registry[Estimator] = Registry("advantage estimator (adv_estimator)")
advantage_names = _estimators.names


def register_advantage(*names: str, needs: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Decorator that files an estimator under each name; `needs` are the inputs it cannot do without.

    The function takes `(token_rewards, mask, group_ids, *, config, **inputs)` and returns `(advantages, returns)`.
    """

    unknown = [need for need in needs if need not in _PROVIDED_BY]
    if unknown:
        raise ValueError(f"an estimator cannot need {unknown}; inputs are {list(_PROVIDED_BY)}")

    def decorate(function: F) -> F:
        for name in names:
            if name not in _estimators.names() or _estimators[name].function is not function:
                _estimators.register(name)(Estimator(name, function, needs))
        return function

    return decorate


def advantage(name: str) -> Estimator:
    """The estimator registered under `name`; ValueError lists the names there are."""
    return _estimators[name]


def check_inputs(name: str, available: set[str]) -> None:
    """Raise ValueError naming what estimator `name` needs beyond `available`.

    Call it once when a run is configured, with what the run will provide, and no step is wasted on finding out.
    """
    missing = [need for need in advantage(name).needs if need not in available]
    if missing:
        raise ValueError(
            f"advantage estimator {name!r} needs {', '.join(missing)}, which this run does not provide: "
            + "; ".join(f"{need} {_PROVIDED_BY[need]}" for need in missing)
        )


_PROVIDED_BY = {
    "group_ids": "name the prompt of each sample",
    "values": "come from a critic (critic.enable)",
    "reward_baselines": "are the scores of one greedy response per prompt",
    "old_logprob": "are the log-probs of the policy before the update",
    "sum_pi_squared": "is Σπ² per token (actor.calculate_sum_pi_squared)",
    "rollout_is_weights": "come from the rollout correction (algorithm.rollout_correction.rollout_is)",
    "component_rewards": "are one score per sample and reward key, returned by the reward function",
}


def sequence_scores(token_rewards: Float[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """Sum of each row's token rewards; ValueError names the rows where it is not finite."""
    scores = token_rewards.sum(-1)
    check_finite(scores, "rewards")
    return scores


def check_finite(scores: Float[Tensor, " b"], what: str) -> None:
    """Raise ValueError naming the samples whose score is NaN or infinite."""
    bad = (~scores.isfinite()).nonzero().flatten().tolist()
    if bad:
        shown = ", ".join(map(str, bad[:10])) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
        raise ValueError(f"{what} of samples {shown} are not finite; a reward function must return finite numbers")


def grouped_scores(
    scores: Float[Tensor, " b"], mask: Bool[Tensor, "b t"], group_ids: GroupIds, config: AdvantageConfig
) -> Grouped:
    """The scores by group, with or without the rows that have no valid token."""
    return Grouped(scores, group_ids, None if config.count_rejected else mask.any(-1))


def apply_singleton_rule(
    relative: Float[Tensor, " b"], raw: Float[Tensor, " b"], group: Grouped, config: AdvantageConfig
) -> Float[Tensor, " b"]:
    """`relative` for members of a group; for a sample alone in its group 0 or, by configuration, `raw`."""
    relative = torch.where(group.is_constant, 0.0, relative)
    return torch.where(group.is_single, raw, relative) if config.singleton == "raw" else relative


def spread(per_row: Float[Tensor, " b"], mask: Bool[Tensor, "b t"], dtype: torch.dtype) -> Float[Tensor, "b t"]:
    """One finite value per row on each of its valid tokens, 0 in padding.

    For a large batch on a CPU this is most of the work. The bytes of the mask times the value take a third of the time
    of a `where`; and numpy asks the kernel for huge pages, which makes new memory three times as fast to fill.
    """
    if mask.device.type == "cpu":
        out = torch.from_numpy(np.empty(tuple(mask.shape), dtype=torch.empty(0, dtype=dtype).numpy().dtype))
    else:
        out = torch.empty(mask.shape, dtype=dtype, device=mask.device)
    return out.copy_(mask.view(torch.uint8)).mul_(per_row.to(dtype)[:, None])
