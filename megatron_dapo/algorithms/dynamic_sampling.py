"""Dynamic sampling: keep generating until a whole training batch of groups that carry a signal has been collected.

A state machine without any I/O. The driver owns generation and reward:

    while (prompts := sampler.need()) > 0:
        sampler.add(generate_and_score(loader.next(prompts)), values_of)
    groups = sampler.take()

A driver that keeps several generation batches in flight passes `need(in_flight)` and adds groups as they finish.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

from megatron_dapo.algorithms.filtering import has_signal

G = TypeVar("G")


class GenerationLimitReached(ValueError):
    """The generation batches allowed for a step yielded too few groups; the text says what came of the prompts."""


class DynamicSampler(Generic[G]):
    """Collects `train_batch_size` whole groups in order of arrival (DAPO, arXiv:2503.14476, §3.2).

    train_batch_size: groups per training step.
    gen_batch_size: prompts per generation batch; None means train_batch_size.
    max_num_gen_batches: generation batches allowed per step; 0 or less means no limit.
    metric: the name of what the values are, for messages only; `values_of` yields the values.
    enable: without it every group is kept, and exactly the missing prompts are asked for.
    on_exhausted: what happens when the limit is reached with too few groups. "raise": an error says what came of the
        prompts; "train_partial": take() yields what there is; "skip": take() yields nothing, the step is left out.
    surplus: what becomes of groups beyond the batch. "discard"; or "carry": they come first in the next step. A carried
        group stays one object with all that was recorded when it was sampled (rollout log-probs, weight versions), so
        nothing of it is attributed to newer weights; `ages` says how many steps each taken group has waited.
    """

    def __init__(
        self,
        *,
        train_batch_size: int,
        gen_batch_size: int | None = None,
        max_num_gen_batches: int = 0,
        metric: str = "acc",
        enable: bool = True,
        on_exhausted: Literal["raise", "train_partial", "skip"] = "raise",
        surplus: Literal["discard", "carry"] = "discard",
    ):
        gen_batch_size = train_batch_size if gen_batch_size is None else gen_batch_size
        if train_batch_size < 1 or gen_batch_size < 1:
            raise ValueError(f"batch sizes must be at least 1, got train {train_batch_size} and gen {gen_batch_size}")
        if on_exhausted not in ("raise", "train_partial", "skip"):
            raise ValueError(f"on_exhausted must be raise, train_partial or skip, got {on_exhausted!r}")
        if surplus not in ("discard", "carry"):
            raise ValueError(f"surplus must be discard or carry, got {surplus!r}")
        self.train_batch_size = train_batch_size
        self.gen_batch_size = gen_batch_size
        self.max_num_gen_batches = max_num_gen_batches
        self.metric = metric
        self.enable = enable
        self.on_exhausted = on_exhausted
        self.surplus = surplus
        self.ages: tuple[int, ...] = ()
        self._kept: deque[tuple[int, G]] = deque()  # (steps waited, group), oldest first
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[float] = Counter()
        self._metrics: dict[str, float] = {}

    @property
    def num_gen_batches(self) -> int:
        """Generation batches of this step so far; one that has arrived in part counts."""
        return -(-self._counts["generated"] // self.gen_batch_size)

    def need(self, in_flight: int = 0) -> int:
        """How many prompts to start now, when `in_flight` are being generated already; 0: take(), or wait for those.

        Prompts in flight are assumed to be kept until they prove otherwise. Raises GenerationLimitReached at the limit,
        when nothing is in flight, too few groups were kept, and `on_exhausted` is "raise".
        """
        missing = self.train_batch_size - len(self._kept) - in_flight
        if missing <= 0:
            return 0
        if not self.enable:
            return missing
        if self.max_num_gen_batches <= 0:
            return self.gen_batch_size
        budget = self.max_num_gen_batches * self.gen_batch_size - self._counts["generated"] - in_flight
        if budget <= 0 and in_flight == 0 and self.on_exhausted == "raise":
            raise GenerationLimitReached(self._exhausted_message())
        return max(min(self.gen_batch_size, budget), 0)

    def add(
        self, groups: Sequence[G], values_of: Callable[[G], Sequence[float]] | None = None, *, failed: int = 0
    ) -> list[bool]:
        """Take in finished groups, in order of arrival, and say of each whether it is kept.

        `values_of(group)` gives one value of the metric per trajectory; a group of several whose values are all equal
        is dropped. `failed` prompts yielded no group at all: they count as generated, and are asked for again.
        """
        kept = []
        for group in groups:
            values = [float(value) for value in values_of(group)] if self.enable and values_of is not None else None
            if self.enable and values is None:
                raise ValueError(f"dynamic sampling by {self.metric!r} needs values_of to look at a group")
            keep = values is None or has_signal(values)
            if keep:
                self._kept.append((0, group))
            else:
                self._dropped[values[0] if values else float("nan")] += 1
            kept.append(keep)
        self._counts["generated"] += len(groups) + failed
        self._counts["kept"] += sum(kept)
        self._counts["failed"] += failed
        return kept

    def take(self) -> list[G]:
        """End the step: `train_batch_size` groups, the longest-waiting first, in order of arrival.

        Fewer only when the limit is reached and `on_exhausted` allows it: what there is for "train_partial" (possibly
        nothing), an empty list for "skip". Otherwise too few groups are a RuntimeError: need() was not heeded.
        """
        if self.need() > 0:
            raise RuntimeError(
                f"take() with {len(self._kept)} of {self.train_batch_size} groups; generate need() more prompts first"
            )
        complete = len(self._kept) >= self.train_batch_size
        size = self.train_batch_size if complete else len(self._kept) if self.on_exhausted == "train_partial" else 0
        taken = [self._kept.popleft() for _ in range(size)]
        surplus = len(self._kept)
        if self.surplus == "carry":
            self._kept = deque((age + 1, group) for age, group in self._kept)
        else:
            self._kept.clear()
        self.ages = tuple(age for age, _ in taken)
        self._metrics = self._step_metrics(surplus)
        self._counts.clear()
        self._dropped.clear()
        return [group for _, group in taken]

    def metrics(self) -> dict[str, float]:
        """Counts of the step that the last take() ended, in groups. Empty before the first."""
        return dict(self._metrics)

    def dropped_values(self) -> dict[float, int]:
        """Of the step under way: the common value of dropped groups → how many. All 0 is too hard, all 1 too easy."""
        return dict(self._dropped)

    def _step_metrics(self, surplus: int) -> dict[str, float]:
        prefix = "training/filter_groups"
        counts = {name: float(self._counts[name]) for name in ("generated", "kept", "failed")}
        carried = [age for age in self.ages if age > 0]
        return {
            "train/num_gen_batches": float(self.num_gen_batches),
            **{f"{prefix}/{name}": count for name, count in counts.items()},
            f"{prefix}/dropped": float(self._dropped.total()),
            f"{prefix}/discarded_surplus": float(surplus if self.surplus == "discard" else 0),
            f"{prefix}/carried_surplus": float(surplus if self.surplus == "carry" else 0),
            f"{prefix}/taken": float(len(self.ages)),
            f"{prefix}/taken_carried": float(len(carried)),
            f"{prefix}/taken_age_max": float(max(carried, default=0)),
            **{f"{prefix}/dropped_value/{value:g}": float(n) for value, n in self._dropped.most_common(_SHOWN)},
        }

    def _exhausted_message(self) -> str:
        dropped = ", ".join(f"{n} with all {self.metric} = {value:g}" for value, n in self._dropped.most_common(_SHOWN))
        return (
            f"dynamic sampling collected {len(self._kept)} of {self.train_batch_size} groups in {self.num_gen_batches} "
            f"generation batches (max_num_gen_batches={self.max_num_gen_batches}): {self._counts['generated']} prompts "
            f"generated, {self._counts['kept']} kept, {self._dropped.total()} dropped ({dropped or 'none'}), "
            f"{self._counts['failed']} failed. The data are too hard or too easy for this policy: choose other data, "
            "raise max_num_gen_batches (0: no limit) or gen_batch_size, or set filter_groups.on_exhausted to "
            "train_partial or skip"
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, the kept groups themselves among it."""
        return {
            "kept": [group for _, group in self._kept],
            "kept_ages": [age for age, _ in self._kept],
            "counts": dict(self._counts),
            "dropped": dict(self._dropped),
            "ages": list(self.ages),
            "metrics": dict(self._metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; batch sizes and limits are those of the constructor."""
        self._kept = deque(zip(state["kept_ages"], state["kept"], strict=True))
        self._counts = Counter(state["counts"])
        self._dropped = Counter(state["dropped"])
        self.ages = tuple(state["ages"])
        self._metrics = dict(state["metrics"])


_SHOWN = 8  # distinct values of dropped groups worth naming
