"""What lies between the prompt loader and whole groups: sending, settling, taking, closing; and how it survives.

The trainer's thread alone draws prompts, closes draws and removes rows. So whenever it looks, the rows of the queue and
the lines of the ledger together are all prompts ever drawn, and a checkpoint is a plain copy of both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.data.dataset import PromptLoader
from megatron_dapo.data.types import Group
from megatron_dapo.metrics import Last, Metrics, Sum, eviction_metrics, group_metrics
from megatron_dapo.rollout.client import EngineClient
from megatron_dapo.rollout.fleet import Fleet
from megatron_dapo.runtime import rows
from megatron_dapo.runtime.queue import Queue, Tags
from megatron_dapo.trainers.dump import RolloutDump
from megatron_dapo.trainers.feed import Feed, Settled
from megatron_dapo.trainers.generation import scored_part
from megatron_dapo.trainers.ledger import Ledger
from megatron_dapo.trainers.replay import Closed, Entry, ReplayBuffer
from megatron_dapo.trainers.stages import Ranks

QUEUE_FILE, LEDGER_STATE = "queue.pt", "ledger.pt"
POLL_SECONDS = 0.5


@dataclass
class Rollouts:
    """The generating half of a streaming run, as the loop sees it.

    `connect` plans how weights reach a set of engines. `lends`: the fleet shares its devices with the trainer.
    """

    loader: PromptLoader
    queue: Queue
    fleet: Fleet
    feed: Feed
    buffer: ReplayBuffer
    ledger: Ledger
    dump: RolloutDump
    connect: Callable[[Ranks, Sequence[EngineClient]], Ranks]
    lends: bool = False
    _keys: dict[str, Sequence[str]] = field(default_factory=dict)  # a settled prompt's rows
    _sent: int = 0
    _accuracies: list[tuple[float, str]] = field(default_factory=list)  # of what settled in this step

    def begin(self, step: int) -> None:
        """Start a step: what has grown too old for it is closed, and new prompts are on their way."""
        self._accuracies.clear()
        self._close(self.buffer.begin(step))
        self._top_up()

    def poll(self, count: int) -> list[str] | None:
        """Ids of `count` groups to train on, or None after having waited a moment for more."""
        self._settle(self.feed.settled(0))
        self._top_up()
        taken = self.buffer.take(count)
        if taken is None:
            self._settle(self.feed.settled(POLL_SECONDS))
        return taken

    def read(self, uids: Sequence[str]) -> list[Group]:
        """Groups out of the queue, less the samples that could not be scored: draws are closed, rows removed."""
        groups = rows.read_groups(self.queue, uids, self._keys)
        self.dump.failed(groups)
        self._close([(uid, "trained") for uid in uids])
        return [scored_part(group) for group in groups]

    def metrics(self, seconds: float, trainer_idle: float) -> Metrics:
        """Of the step that took so many seconds, of which the trainer spent some waiting for groups."""
        counts, buffer = self.buffer.counts, self.buffer
        filters, gone = "training/filter_groups", ("filtered", "failed", "stale")
        return {
            f"{filters}/generated": Sum(counts["generated"]),
            f"{filters}/kept": Sum(counts["generated"] - counts["filtered"] - counts["failed"]),
            f"{filters}/dropped": Sum(counts["filtered"]),
            f"{filters}/failed": Sum(counts["failed"]),
            f"{filters}/taken": Sum(counts["trained"]),
            "streaming/evicted": Sum(counts["stale"]),
            "streaming/refilled": Sum(sum(counts[name] for name in gone)),
            "streaming/discarded": Sum(counts["surplus"]),
            "streaming/queue_depth": Last(buffer.ready),
            "streaming/in_flight": Last(buffer.in_flight),
            "streaming/failed_samples": Last(self.feed.failed_samples),
            "streaming/engine_restarts": Last(self.fleet.restarts),
            "streaming/idle_s/trainer": Sum(trainer_idle),
            "streaming/idle_s/rollout": Sum(max(0.0, seconds - self.fleet.busy_seconds())),
            **(eviction_metrics(buffer.stale_spans) if buffer.stale_spans else {}),
            **(group_metrics(*zip(*self._accuracies, strict=True)) if self._accuracies else {}),
        }

    def save(self, directory: Path) -> None:
        """Finished groups with their rows, prompts under way without; and how long the ledger is now."""
        self._settle(self.feed.settled(0))
        torch.save({"ledger": self.ledger.state_dict(), "sent": self._sent}, directory / LEDGER_STATE)
        self.queue.snapshot(directory / QUEUE_FILE, _worth_keeping)

    def restore(self, directory: Path, step: int) -> None:
        """Into an empty queue. What was under way is sent again, as of `step`; finished groups wait as they did.

        A checkpoint of the sync mode has none of it: there is nothing under way between its steps.
        """
        if not (directory / QUEUE_FILE).exists():
            return
        state = torch.load(directory / LEDGER_STATE, weights_only=False)
        self.ledger.load_state_dict(state["ledger"])
        self._sent = state["sent"]
        self.queue.restore(directory / QUEUE_FILE)
        again = rows.reissue(self.queue, step)
        tags = self.queue.tags()
        prompts = sorted((tag["order"], uid) for uid, tag in tags.items() if tag["is_prompt"])
        self.buffer.begin(step)
        self.buffer.restore(Entry(uid, tags[uid]["global_steps"], order) for order, uid in prompts)
        keys = rows.rows_of(tags)
        terminal = [uid for _, uid in prompts if tags[uid]["status"] in (rows.FINISHED, rows.FAILURE)]
        found = ((uid, tags[uid]) for uid in terminal)
        self._settle([Settled(uid, tag["values"], tag["accuracies"], tuple(keys[uid])) for uid, tag in found])
        self.buffer.issue(prompt.uid for prompt in again)
        self.ledger.issue(prompt.uid for prompt in again)
        self.feed.send(again)

    def close(self) -> None:
        self.fleet.close()
        self.queue.close()
        self.ledger.end()

    def _top_up(self) -> None:
        if not (need := self.buffer.need()):
            return
        prompts = self.loader.next(need)
        tags: dict[str, Tags] = {}
        for prompt in prompts:
            tags[prompt.uid] = rows.prompt_tags(self.buffer.step, self._sent)
            self._sent += 1
        self.queue.put({prompt.uid: rows.prompt_row(prompt) for prompt in prompts}, tags)
        self.buffer.issue(tags)
        self.ledger.issue(tags)
        self.feed.send(prompts)

    def _settle(self, settled: Sequence[Settled]) -> None:
        closed: list[Closed] = []
        for one in settled:
            self._keys[one.uid] = one.keys
            self._accuracies += [(accuracy, one.uid) for accuracy in one.accuracies]
            if (outcome := self.buffer.settle(one.uid, one.values)) is not None:
                closed.append((one.uid, outcome))
        self._close(closed)

    def _close(self, closed: Sequence[Closed]) -> None:
        self._tell([(uid, outcome) for uid, outcome in closed if outcome != "trained"])
        for uid, outcome in closed:
            self.ledger.close(uid, outcome, self.buffer.step)
        self.queue.clear([key for uid, _ in closed for key in (uid, *self._keys.pop(uid))])
        if closed:
            self.ledger.flush()

    def _tell(self, left: Sequence[Closed]) -> None:
        """Groups that are of no use to the dump, while their rows are there."""
        if not left or not self.dump.wanted:
            return
        groups = rows.read_groups(self.queue, [uid for uid, _ in left], self._keys)
        self.dump.failed(groups)
        for group, (_, outcome) in zip(map(scored_part, groups), left, strict=True):
            if outcome == "filtered":
                self.dump.filtered([group], [False], lambda one: [self.feed.value(score) for score in one.scores])
            else:
                self.dump.left(group, outcome)


def _worth_keeping(tags: dict[str, Any]) -> list[str]:
    """Prompts, and the rows of those that are finished: what a restart would generate anew is not saved."""
    finished = {key for key, tag in tags.items() if tag["is_prompt"] and tag["status"] == rows.FINISHED}
    return [key for key, tag in tags.items() if tag["is_prompt"] or tag["uid"] in finished]
