"""Every step's generations on disk (`trainer.rollout_data_dir`): what was asked, answered, rewarded, and its fate."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from megatron_dapo.config import Config
from megatron_dapo.data.types import Group, Score, Trajectory
from megatron_dapo.trainers.generation import failed_part

TRAINED, SURPLUS, CARRIED, FAILED = "trained", "surplus", "carried over", "failed"


class RolloutDump:
    """Collects a step's groups and writes them as `{step}.jsonl` or `.parquet`, one row per trajectory.

    Does nothing without `trainer.rollout_data_dir`. A group that the filter dropped says why; one beyond the batch is
    "surplus" or "carried over"; a sample that could not be scored is "failed". `advantage` is the mean over a trained
    trajectory's tokens.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        directory = config.trainer.rollout_data_dir
        self.directory = None if directory is None else Path(directory)
        self._format, self._tokenizer = config.trainer.rollout_data_format, tokenizer
        self._metric = config.algorithm.filter_groups.metric
        self._beyond = CARRIED if config.algorithm.filter_groups.surplus == "carry" else SURPLUS
        self._dropped: list[tuple[Group, str]] = []
        self._kept: list[Group] = []
        self._advantages: dict[tuple[str, int], float] = {}

    @property
    def wanted(self) -> bool:
        """Whether anything is written at all."""
        return self.directory is not None

    def failed(self, groups: Sequence[Group]) -> None:
        """Of these whole groups, the samples that could not be scored."""
        for group in groups if self.wanted else ():
            self._dropped.append((failed_part(group), FAILED))

    def left(self, group: Group, fate: str) -> None:
        """A group that is not trained on, and why."""
        if self.wanted:
            self._dropped.append((group, fate))

    def filtered(
        self, groups: Sequence[Group], kept: Sequence[bool], values_of: Callable[[Group], Sequence[float]]
    ) -> None:
        """What dynamic sampling said of generated groups; `values_of` gives the values that it judged them by."""
        if not self.wanted:
            return
        for group, keep in zip(groups, kept, strict=True):
            if keep:
                self._kept.append(group)
            else:
                self._dropped.append((group, f"dropped: all {self._metric} = {values_of(group)[0]:g}"))

    def trained(self, batch: TensorDict, groups: Sequence[Group]) -> None:
        """The advantages of the batch that these groups became, row by row."""
        if not self.wanted:
            return
        mask = batch["response_mask"]
        means = (batch["advantages"] * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        keys = [(group.prompt.uid, one.sample) for group in groups for one in group.trajectories]
        self._advantages |= dict(zip(keys, means.tolist(), strict=True))

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """All of the step: `groups` were trained; then a new step begins."""
        if self.directory is None:
            return
        taken = {group.prompt.uid for group in groups}
        fates = [(group, TRAINED) for group in groups] + self._dropped
        fates += [(group, self._beyond) for group in self._kept if group.prompt.uid not in taken]
        rows = [
            self._row(step, group, fate, trajectory, score)
            for group, fate in fates
            for trajectory, score in zip(group.trajectories, group.scores, strict=True)
        ]
        self._dropped, self._kept, self._advantages = [], [], {}
        if rows:
            self.directory.mkdir(parents=True, exist_ok=True)
            WRITERS[self._format](rows, self.directory / f"{step}.{self._format}")

    def _row(self, step: int, group: Group, fate: str, trajectory: Trajectory, score: Score) -> dict[str, Any]:
        return {
            "step": step,
            "uid": group.prompt.uid,
            "sample": trajectory.sample,
            "fate": fate,
            "data_source": group.prompt.data_source,
            "prompt": group.prompt.messages[-1]["content"],
            "response": self._tokenizer.decode(list(trajectory.response_ids), skip_special_tokens=True),
            "ground_truth": group.prompt.ground_truth,
            "length": len(trajectory.response_ids),
            "finish_reason": trajectory.finish_reason,
            "advantage": self._advantages.get((group.prompt.uid, trajectory.sample)),
            **{name: value for name, value in asdict(score).items() if name != "extra"},
        }


def _write_jsonl(rows: Sequence[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), path, compression="zstd")


WRITERS = {"jsonl": _write_jsonl, "parquet": _write_parquet}
