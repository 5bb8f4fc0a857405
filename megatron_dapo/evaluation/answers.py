"""Answers as they come in, kept in a journal that an interrupted evaluation continues from."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_dapo.data.types import Prompt
from megatron_dapo.errors import UserError
from megatron_dapo.metrics import JsonlWriter, read_jsonl
from megatron_dapo.rollout.requests import Sampling

JOURNAL = "answers.jsonl"


@dataclass(frozen=True)
class Question:
    """One sample to draw: a problem, the number of the sample, and its own seed."""

    problem: int
    sample: int
    prompt: Prompt
    seed: int
    sampling: Sampling


@dataclass(frozen=True)
class Answer:
    """What came back. `tokens` is the length of `text` in tokens, as the one who sampled it counts."""

    problem: int
    sample: int
    text: str
    tokens: int
    finish_reason: str  # "stop" | "length"


class Source(Protocol):
    """Whoever answers: an engine or a server."""

    def answers(self, questions: Sequence[Question]) -> Iterator[list[Answer]]:
        """All answers, a few at a time, as they are finished."""
        ...


class Journal:
    """`answers.jsonl`: a head with the settings, then one line per answer; each batch is on disk before it returns."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        """Raises UserError where the directory holds the answers of another evaluation."""
        path = directory / JOURNAL
        head, *rows = (read_jsonl(path) if path.exists() else []) or [{"settings": settings}]
        if head["settings"] != settings:
            changed = [key for key in settings if settings[key] != head["settings"].get(key)]
            raise UserError(
                f"{path} holds answers under other settings ({', '.join(changed)} differ); remove it, or give another "
                "--output"
            )
        self.answers = {(row["problem"], row["sample"]): Answer(**row) for row in rows}
        self._writer = JsonlWriter(path)
        if path.stat().st_size == 0:
            self._writer.write(head)

    def add(self, answers: Sequence[Answer]) -> None:
        self._writer.write_all(asdict(answer) for answer in answers)
        self.answers |= {(answer.problem, answer.sample): answer for answer in answers}

    def close(self) -> None:
        self._writer.close()
