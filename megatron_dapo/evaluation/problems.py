"""What is asked: the rows of the prompt files, copies of a problem folded into one problem with several samples."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_dapo.config.evaluation import EvalConfig
from megatron_dapo.data.dataset import PromptDataset, PromptOptions
from megatron_dapo.data.types import Prompt


@dataclass(frozen=True)
class Problem:
    """One problem and how often it is answered. `index` is its number among the distinct problems, in file order."""

    index: int
    prompt: Prompt
    samples: int


def read_problems(config: EvalConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[Problem]:
    """The distinct problems of `config.data`. Raises DataError for anything wrong with the files or a long prompt."""
    options = PromptOptions(
        max_prompt_length=config.max_prompt_length,
        prompt_key=config.prompt_key,
        system_prompt=config.system_prompt,
        chat_template_kwargs=config.chat_template_kwargs,
        apply_chat_template=config.apply_chat_template,
    )
    dataset = PromptDataset(config.data, tokenizer, options, max_samples=config.max_samples)
    copies: dict[tuple[str, ...], list[Prompt]] = {}
    for row in range(len(dataset)):
        prompt = dataset.draw(row, epoch=0)
        copies.setdefault(_identity(prompt), []).append(prompt)
    removed = _removed_copies(config.data)
    return [
        Problem(index, rows[0], config.n or (len(rows) if len(rows) > 1 else removed))
        for index, rows in enumerate(copies.values())
    ]


def _identity(prompt: Prompt) -> tuple[str, ...]:
    """What makes two rows the same problem: who says what, spacing aside."""
    return (prompt.data_source, *(" ".join([m["role"], *m["content"].split()]) for m in prompt.messages))


def _removed_copies(files: Sequence[str]) -> int:
    """How many copies each problem had before `data prepare` removed them, from the card beside the file; else 1."""
    if len(files) != 1:
        return 1
    path = Path(files[0])
    card = path.with_name(f"{path.stem}.card.json")
    if not card.is_file():
        return 1
    suggested = (file.get("suggested_n") for file in json.loads(card.read_text())["files"] if _is(file["path"], path))
    return next(suggested, None) or 1


def _is(recorded: str, path: Path) -> bool:
    return Path(recorded).name == path.name
