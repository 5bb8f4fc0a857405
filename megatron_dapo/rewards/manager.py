"""The reward manager: responses in, scores out, whatever the verifiers do.

Verdicts that need no algebra are given in this process; algebra, user functions and reasoning-gym run in the pool,
under a deadline. A failure of the machinery is never a score: it is counted, tried again, and then left to
`reward.on_failure`. The raw score is recorded before the length penalty (and a reward model) change the reward.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_dapo.algorithms.overlong import overlong_penalty
from megatron_dapo.config.sampling import RewardConfig
from megatron_dapo.data.types import Prompt, Score, Trajectory
from megatron_dapo.rewards.custom import CustomFunction
from megatron_dapo.rewards.errors import RewardError
from megatron_dapo.rewards.math_robust import SYMBOLIC_CPU_SECONDS
from megatron_dapo.rewards.model import RewardModel, open_reward_model
from megatron_dapo.rewards.pool import Outcome, Pool
from megatron_dapo.rewards.routing import quick, resolve
from megatron_dapo.rewards.verdict import Pending
from megatron_dapo.rewards.worker import Setup

Result = Mapping[str, Any] | str  # what a reward function said, or the reason why there is nothing


class RewardManager:
    """Scores trajectories. `score` may be called from several threads at once."""

    def __init__(
        self, config: RewardConfig, tokenizer: PreTrainedTokenizerBase | None, max_response_length: int
    ) -> None:
        """Without a tokenizer only texts can be scored.

        Raises RewardError when a user's function or a reward model cannot be loaded, or the buffer does not fit."""
        buffer = config.overlong_buffer
        if buffer.enable and not 0 < buffer.len <= max_response_length:
            raise RewardError(
                f"reward.overlong_buffer.len={buffer.len} must lie in [1, data.max_response_length="
                f"{max_response_length}]; set reward.overlong_buffer.enable=false to switch the penalty off"
            )
        self.config, self.tokenizer, self.max_response_length = config, tokenizer, max_response_length
        self._counts: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()  # what `take_counts` has told
        self._lock = threading.Lock()
        custom = config.custom_function
        function = None if custom.path is None else CustomFunction(custom.path, custom.name, dict(custom.kwargs))
        self._custom = function is not None
        budget = math.inf if self._custom else SYMBOLIC_CPU_SECONDS
        self._pool = Pool(config.num_workers, Setup(config.timeout_s, function, budget), retries=config.retries)
        if self._custom:
            self._pool.start()
        self._model: RewardModel | None = open_reward_model(config.reward_model)

    def score(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory; `prompts[i]` is the prompt of `trajectories[i]`.

        A Score with status "failed" says that nothing is known about the response (`on_failure=drop`). Raises
        UnknownDataSource for a source without verifier, and RewardError on a failure under `on_failure=raise`.
        """
        if not trajectories:
            return []
        assert self.tokenizer is not None, "token ids need a tokenizer to become text"
        ids = [list(trajectory.response_ids) for trajectory in trajectories]
        return self.score_texts(
            prompts, self.tokenizer.batch_decode(ids, skip_special_tokens=True), [len(row) for row in ids]
        )

    def score_texts(self, prompts: Sequence[Prompt], texts: Sequence[str], lengths: Sequence[int]) -> list[Score]:
        """As `score`, for responses that are text already; `lengths` are their tokens, for the length penalty."""
        results = self._results(prompts, texts)
        added: Sequence[float | str] = [0.0] * len(texts)
        if self._model is not None:
            added = self._model.score([prompt.messages for prompt in prompts], texts)
        return [self._finish(*row) for row in zip(results, added, lengths, strict=True)]

    @property
    def counts(self) -> dict[str, int]:
        """What happened so far: scored, in_process, pooled, undecided, timeouts, crashes, errors, retries, failed, …"""
        with self._lock, self._pool.lock:
            return dict(self._counts + self._pool.counts)

    def take_counts(self) -> dict[str, int]:
        """What happened since the last call."""
        now = Counter(self.counts)
        since, self._taken = now - self._taken, now
        return dict(since)

    def take_seconds(self) -> list[float]:
        """Seconds of every job that a verifier process has answered since the last call."""
        with self._pool.lock:
            seconds, self._pool.seconds = self._pool.seconds, []
        return seconds

    def worker_pids(self) -> list[int]:
        """Process ids of the verifier workers that run now."""
        return self._pool.pids()

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def __enter__(self) -> "RewardManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _results(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Result]:
        """What the reward function says of each text, in order."""
        results: list[Result] = [""] * len(texts)
        waiting: dict[int, Pending] = {}
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            if self._custom:
                arguments = (prompt.data_source, text, prompt.ground_truth, dict(prompt.extra_info))
                waiting[i] = Pending("custom", arguments)
                continue
            answer = quick(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, strict=self.config.strict)
            if isinstance(answer, Pending):
                waiting[i] = answer
            else:
                results[i] = answer.as_dict()
        if waiting:
            outcomes = self._pool.run([(pending.kind, pending.arguments) for pending in waiting.values()])
            for (i, pending), outcome in zip(waiting.items(), outcomes, strict=True):
                results[i] = self._resolved(pending, outcome)
        self._count(scored=len(texts), pooled=len(waiting), in_process=len(texts) - len(waiting))
        return results

    def _resolved(self, pending: Pending, outcome: Outcome) -> Result:
        if pending.kind == "custom":
            if outcome.status != "ok":
                return f"{outcome.status}: {outcome.value}"
            return _user_result(outcome.value)
        verdict = resolve(pending, outcome.status, outcome.value, outcome.cpu_s)
        if verdict is None:
            return f"{outcome.status}: {outcome.value}"
        if verdict.detail.get("symbolic") == "undecided":
            self._count(undecided=1)
        return verdict.as_dict()

    def _finish(self, result: Result, model_score: float | str, length: int) -> Score:
        """Shape the raw score, or apply the policy for a failure."""
        if isinstance(result, str):
            return self._failed(result)
        if isinstance(model_score, str):
            return self._failed(model_score)
        raw = float(result["score"])
        extra = {key: value for key, value in result.items() if key != "acc"}
        reward = self.config.rule_weight * raw
        if self._model is not None:
            reward += self.config.reward_model.weight * model_score
            extra["reward_model"] = model_score
        buffer = self.config.overlong_buffer
        if buffer.enable:
            penalty = overlong_penalty(
                length,
                self.max_response_length,
                buffer.len,
                buffer.penalty_factor,
                reference_unbounded=buffer.unbounded,
            )
            reward += penalty
            if buffer.log:
                extra |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return Score(reward=reward, raw=raw, acc=float(result["acc"]), extra=extra)

    def _failed(self, reason: str) -> Score:
        policy = self.config.on_failure
        self._count(failed=1)
        if policy == "raise":
            raise RewardError(
                f"a reward could not be computed ({reason}) after {self.config.retries} retries; raise reward."
                "timeout_s, fix the function, or set reward.on_failure to drop or zero"
            )
        self._count(**{"dropped" if policy == "drop" else "zeroed": 1})
        return Score(0.0, 0.0, 0.0, {"failure": reason}, status="failed" if policy == "drop" else "ok")

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)


def _user_result(value: Any) -> Result:
    """A user's float or dict as {score, acc, ...}; text when it is neither, or not a finite number."""
    fields = dict(value) if isinstance(value, Mapping) else {"score": value}
    try:
        score = float(fields["score"])
        accuracy = float(fields.get("acc", score))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: the reward function returned {str(value)[:200]!r}, not a number or a dict with score ({error})"
    if not (math.isfinite(score) and math.isfinite(accuracy)):
        return f"error: the reward function returned the score {score} (acc {accuracy})"
    return {**fields, "score": score, "acc": accuracy}
