"""The replay buffer: how many prompts to send, which finished groups a step trains on, which are too old for it.

Bookkeeping over group ids without any I/O; the trajectories lie in the queue. One invariant replaces all special cases:
what is outstanding (under way, or finished and not yet trained) plus what this step has taken is kept at `1 + ahead`
batches. A filtered, failed or stale group leaves a gap of one, and the gap is what `need` asks for; so are the first
batches of a run, and after a restart only what is missing.

    closed = buffer.begin(step)                       # stale groups leave
    while (batch := buffer.take(count)) is None:
        buffer.issue(send(buffer.need()))
        for uid, values in finished(): buffer.settle(uid, values)

The bound: a group sent in step b may be trained in step g if its span g - b + 1 is at most `max_span`. Engines have at
least the weights of the step before, so no token trained is older than `max_span - 1` versions.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_dapo.algorithms import GenerationLimitReached
from megatron_dapo.algorithms.filtering import has_signal
from megatron_dapo.algorithms.registry import Registry

Outcome = Literal["trained", "filtered", "failed", "stale", "surplus"]
Closed = tuple[str, Outcome]


@dataclass(frozen=True)
class Entry:
    """One outstanding group. `issued`: the step it was last sent in; `order`: its place in the order of sending."""

    uid: str
    issued: int
    order: int
    finished: bool = False


Sampler = Callable[[Sequence[Entry], int], Sequence[Entry]]
"""Chooses so many of the finished groups, which come oldest first."""

SAMPLERS: Registry[Sampler] = Registry("replay sampler")


@SAMPLERS.register("oldest_first")
def oldest_first(finished: Sequence[Entry], count: int) -> Sequence[Entry]:
    """By the step they were sent in, then by the order of sending: as little as possible grows stale."""
    return finished[:count]


@SAMPLERS.register("newest_first")
def newest_first(finished: Sequence[Entry], count: int) -> Sequence[Entry]:
    """The most on-policy groups there are; older ones may grow stale and be sampled in vain."""
    return finished[len(finished) - count :]


@dataclass(frozen=True)
class ReplayPolicy:
    """batch_size: groups per step. ahead: further batches under way. max_span: see above.

    strategy: "drop" lets the step go on and evicts what grew too old; "wait" holds it back until everything left over,
    oldest first, can still be trained in time. filter: groups without a signal leave. max_generated: most prompts
    judged in a step, 0 for no limit, and what happens then (as in `DynamicSampler`). surplus: what becomes of groups
    that a step leaves over.
    """

    batch_size: int
    ahead: int = 0
    max_span: int = 1
    strategy: Literal["drop", "wait"] = "drop"
    filter: bool = False
    max_generated: int = 0
    on_exhausted: Literal["raise", "train_partial", "skip"] = "raise"
    surplus: Literal["carry", "discard"] = "carry"

    @property
    def target(self) -> int:
        return (1 + self.ahead) * self.batch_size


class ReplayBuffer:
    """See the head of this file. `stale_spans` and `counts` are of the step under way."""

    def __init__(self, policy: ReplayPolicy, sampler: Sampler = oldest_first) -> None:
        if policy.strategy == "wait" and (policy.max_span <= policy.ahead or sampler is not oldest_first):
            raise ValueError(f"waiting could last forever with {policy}: it needs max_span > ahead and oldest_first")
        self.policy, self.sampler = policy, sampler
        self.step = 0
        self.counts: Counter[str] = Counter()
        self.stale_spans: list[int] = []
        self._under_way: dict[str, Entry] = {}
        self._finished: dict[str, Entry] = {}
        self._taken = self._judged = self._sent = 0

    @property
    def in_flight(self) -> int:
        return len(self._under_way)

    @property
    def ready(self) -> int:
        return len(self._finished)

    def outstanding(self) -> list[Entry]:
        """Everything sent and not yet closed, in the order of sending."""
        return sorted([*self._under_way.values(), *self._finished.values()], key=_age)

    def begin(self, step: int) -> list[Closed]:
        """Start a step and return what it closes: groups over the bound, and the surplus if that is discarded."""
        self.step, self._taken, self._judged = step, 0, 0
        self.counts, self.stale_spans = Counter(), []
        closed = [self._close(self._finished, uid, "stale") for uid in [*self._finished] if self._stale(uid)]
        if self.policy.surplus == "discard":
            closed += [self._close(self._finished, uid, "surplus") for uid in [*self._finished]]
        return closed

    def need(self) -> int:
        """How many prompts to send now."""
        return max(0, self.policy.target - self._taken - self.in_flight - self.ready)

    def issue(self, uids: Iterable[str]) -> None:
        """These prompts are on their way, as of this step. Sending one again keeps it outstanding exactly once."""
        for uid in uids:
            if uid in self._finished:
                raise ValueError(f"prompt {uid} is finished and waits to be trained; it cannot be sent again")
            known = self._under_way.get(uid)
            entry = Entry(uid, self.step, self._sent) if known is None else replace(known, issued=self.step)
            self._under_way[uid] = entry
            self._sent += known is None

    def settle(self, uid: str, values: Sequence[float] | None) -> Outcome | None:
        """A group has come back; None for its values: it failed. Returns the outcome of one that is of no use."""
        if uid not in self._under_way:
            raise ValueError(f"group {uid} was not under way")
        self._judged += 1
        self.counts["generated"] += 1
        if values is None:
            return self._close(self._under_way, uid, "failed")[1]
        if self.policy.filter and not has_signal(values):
            return self._close(self._under_way, uid, "filtered")[1]
        if self._stale(uid):
            return self._close(self._under_way, uid, "stale")[1]
        self._finished[uid] = replace(self._under_way.pop(uid), finished=True)
        return None

    def take(self, count: int) -> list[str] | None:
        """Ids of `count` finished groups to train on now, oldest first; None: wait for more.

        Fewer only when `max_generated` prompts came back in this step and `on_exhausted` allows it; else
        GenerationLimitReached says what became of them.
        """
        if self.ready < count:
            if not 0 < self.policy.max_generated <= self._judged:
                return None
            if self.policy.on_exhausted == "raise":
                raise GenerationLimitReached(self._exhausted(count))
            count = self.ready if self.policy.on_exhausted == "train_partial" else 0
        chosen = self.sampler(sorted(self._finished.values(), key=_age), count) if count else []
        if self.policy.strategy == "wait" and not self._in_time({entry.uid for entry in chosen}):
            return None
        for entry in chosen:
            assert self.step - entry.issued < self.policy.max_span, f"{entry} is over the bound in step {self.step}"
            self._close(self._finished, entry.uid, "trained")
        self._taken += len(chosen)
        return [entry.uid for entry in chosen]

    def restore(self, entries: Iterable[Entry]) -> None:
        """Outstanding groups of an earlier process, in the order of sending. Those under way must be issued again."""
        for entry in entries:
            kept = replace(entry, order=self._sent)
            (self._finished if entry.finished else self._under_way)[entry.uid] = kept
            self._sent += 1

    def _in_time(self, chosen: set[str]) -> bool:
        """Whether all but the chosen can be trained within the bound, oldest first, a batch per step."""
        left = [entry for entry in self.outstanding() if entry.uid not in chosen]
        turns = range(self._taken + len(chosen), self._taken + len(chosen) + len(left))
        steps = (self.step + turn // self.policy.batch_size for turn in turns)
        return all(step - entry.issued < self.policy.max_span for step, entry in zip(steps, left, strict=True))

    def _stale(self, uid: str) -> bool:
        entry = self._finished.get(uid) or self._under_way[uid]
        return self.step - entry.issued + 1 > self.policy.max_span

    def _close(self, where: dict[str, Entry], uid: str, outcome: Outcome) -> Closed:
        entry = where.pop(uid)
        self.counts[outcome] += 1
        if outcome == "stale":
            self.stale_spans.append(self.step - entry.issued + 1)
        return uid, outcome

    def _exhausted(self, count: int) -> str:
        told = ", ".join(f"{self.counts[name]} {name}" for name in ("filtered", "failed", "stale"))
        return (
            f"step {self.step} has {self.ready} of {count} groups after {self._judged} prompts came back ({told}), and "
            "algorithm.filter_groups.max_num_gen_batches allows no more. The data are too hard or too easy for this "
            "policy: choose other data, raise the limit (0: none), or set filter_groups.on_exhausted"
        )


def _age(entry: Entry) -> tuple[int, int]:
    return entry.issued, entry.order
