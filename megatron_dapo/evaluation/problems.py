"""What is asked: the rows of the prompt files, copies of a problem folded into one problem with several samples."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_dapo.config.evaluation import EvalConfig
from megatron_dapo.data.card import removed_copies
from megatron_dapo.data.dataset import PromptDataset, PromptOptions
from megatron_dapo.data.dedup import identity
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
    copies: dict[str, list[Prompt]] = {}
    for row in range(len(dataset)):
        prompt = dataset.draw(row, epoch=0)
        copies.setdefault(identity(prompt.data_source, prompt.messages), []).append(prompt)
    removed = removed_copies(Path(config.data[0])) if len(config.data) == 1 else 1
    return [
        Problem(index, rows[0], config.n or (len(rows) if len(rows) > 1 else removed))
        for index, rows in enumerate(copies.values())
    ]
