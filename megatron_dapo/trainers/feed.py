"""From prompts sent to groups settled: trajectories and scores stream into the queue sample by sample.

Everything runs in the fleet's event loop, beside the trainer: a task per sample holds its conversation, and a few
writers carry what has finished to the queue and to the reward, together with whatever else finished meanwhile.
"""

import asyncio
import queue
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dapo.data.types import Prompt, Score, Trajectory
from megatron_dapo.rollout.agent import Conversation, ToolError
from megatron_dapo.rollout.client import EngineError
from megatron_dapo.rollout.fleet import Fleet
from megatron_dapo.rollout.requests import sample_seed
from megatron_dapo.runtime import rows
from megatron_dapo.runtime.queue import Queue
from megatron_dapo.trainers.expert_load import RankLoad

WRITERS = 4
ScoreAll = Callable[[Sequence[Prompt], Sequence[Trajectory]], list[Score]]


@dataclass(frozen=True)
class Settled:
    """A group of which every sample has ended. `values`: what the filter looks at, None for a group of no use."""

    uid: str
    values: tuple[float, ...] | None
    accuracies: tuple[float, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """One sample: its row, and its score unless something failed."""

    key: str | None
    score: Score | None


class Feed:
    """`send` prompts, collect `settled` groups; the rows are in the queue. Both are for the trainer's thread."""

    def __init__(
        self,
        fleet: Fleet,
        store: Queue,
        conversation: Conversation,
        score: ScoreAll,
        value: Callable[[Score], float],
        *,
        n: int,
        seed: int,
        keep_partial: bool,
        load: RankLoad | None = None,
    ) -> None:
        """`keep_partial`: a group of which some samples failed is trained on those that did not.

        `load` counts which experts the samples went to.
        """
        self.fleet, self.queue, self.conversation = fleet, store, conversation
        self.score, self.value, self.load = score, value, load
        self.n, self.seed, self.keep_partial = n, seed, keep_partial
        self.failed_samples = 0
        self._settled: queue.SimpleQueue[Settled | BaseException] = queue.SimpleQueue()
        self._outbox: asyncio.Queue[tuple[Prompt, Trajectory, asyncio.Future[Ended]]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.fleet.run(self._start_writers()).result()

    def send(self, prompts: Sequence[Prompt]) -> None:
        """Start these groups; their rows are in the queue."""
        if prompts:
            self.queue.mark({prompt.uid: {"status": rows.RUNNING} for prompt in prompts})
            self.fleet.run(self._start(prompts)).result()

    def settled(self, timeout: float) -> list[Settled]:
        """What has settled since the last call, waiting for the first. Raises what went wrong in the background."""
        found: list[Settled] = []
        while True:
            try:
                one = self._settled.get(timeout=0 if found else timeout) if timeout else self._settled.get_nowait()
            except queue.Empty:
                return found
            if isinstance(one, BaseException):
                raise one
            found.append(one)

    async def _start_writers(self) -> None:
        for _ in range(WRITERS):
            self._task(self._write())

    async def _start(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self._task(self._group(prompt))

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._settled.put(error)

    async def _group(self, prompt: Prompt) -> None:
        """All samples of one prompt; its status becomes terminal when the last of them has ended."""
        ended = await asyncio.gather(*(self._sample(prompt, sample) for sample in range(self.n)))
        good = [one.score for one in ended if one.score is not None]
        self.failed_samples += len(ended) - len(good)
        usable = bool(good) and (self.keep_partial or len(good) == len(ended))
        values = tuple(self.value(score) for score in good) if usable else None
        accuracies = tuple(score.acc for score in good)
        tags = {"status": rows.FINISHED if usable else rows.FAILURE, "values": values, "accuracies": accuracies}
        await asyncio.to_thread(self.queue.mark, {prompt.uid: tags})
        keys = tuple(one.key for one in ended if one.key is not None)
        self._settled.put(Settled(prompt.uid, values, accuracies, keys))

    async def _sample(self, prompt: Prompt, sample: int) -> Ended:
        seed = sample_seed(self.seed, 0, prompt.uid, sample)  # the draw has a name of its own: no step is needed
        try:
            trajectory = await self.conversation.trajectory(prompt, sample, seed, self.fleet.generate)
        except (EngineError, ToolError):
            return Ended(None, None)
        written: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait((prompt, trajectory, written))
        return await written

    async def _write(self) -> None:
        """One writer: takes what there is, stores it, has it scored, stores the scores."""
        while True:
            batch = [await self._outbox.get()]
            while not self._outbox.empty():
                batch.append(self._outbox.get_nowait())
            ended = await asyncio.to_thread(self._store, [(prompt, trajectory) for prompt, trajectory, _ in batch])
            for (_, _, written), one in zip(batch, ended, strict=True):
                written.set_result(one)

    def _store(self, samples: Sequence[tuple[Prompt, Trajectory]]) -> list[Ended]:
        samples = self._counted(samples)
        keys = [rows.trajectory_key(prompt.uid, trajectory.sample) for prompt, trajectory in samples]
        made = dict(zip(keys, samples, strict=True))
        self.queue.put(
            {key: rows.trajectory_row(trajectory) for key, (_, trajectory) in made.items()},
            {key: rows.trajectory_tags(prompt, trajectory) for key, (prompt, trajectory) in made.items()},
        )
        scores = self.score([prompt for prompt, _ in samples], [trajectory for _, trajectory in samples])
        self.queue.put({key: rows.score_row(score) for key, score in zip(keys, scores, strict=True)})
        return [Ended(key, score if score.status == "ok" else None) for key, score in zip(keys, scores, strict=True)]

    def _counted(self, samples: Sequence[tuple[Prompt, Trajectory]]) -> Sequence[tuple[Prompt, Trajectory]]:
        """The samples with as much of their routing as is needed further on."""
        if self.load is None:
            return samples
        kept = self.load.count([(trajectory.routed_experts, len(trajectory.response_ids)) for _, trajectory in samples])
        return [(prompt, replace(one, routed_experts=ids)) for (prompt, one), ids in zip(samples, kept, strict=True)]
