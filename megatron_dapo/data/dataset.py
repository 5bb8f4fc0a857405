"""The prompt dataset and the loader that draws from it: lazy token ids, a seeded order, exact resumption."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megatron_dapo.data import chat
from megatron_dapo.data.errors import DataError
from megatron_dapo.data.tables import column_names, expand, open_mapped
from megatron_dapo.data.types import Prompt

SCAN_ROWS = 4096


@dataclass(frozen=True)
class PromptOptions:
    """How rows become prompts; the fields carry the names of the `data` section of the configuration."""

    max_prompt_length: int
    truncation: str = "error"
    filter_overlong_prompts: bool = False
    prompt_key: str = "prompt"
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    apply_chat_template: bool = True


class PromptDataset:
    """Rows of one or more prompt files (parquet, JSON lines, Hugging Face directory) as token ids.

    Rows stay on disk. Over-long prompts are found when the dataset opens, so a run fails (`truncation="error"`) or
    knows its size (`"drop"`, `filter_overlong_prompts`) before it starts any process.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase | None,
        options: PromptOptions,
        *,
        max_samples: int = -1,
    ) -> None:
        """`max_samples` keeps the first rows only (-1: all). Raises DataError for anything wrong with files or rows.

        Without a tokenizer prompts stay messages, of any length: for a server that has its own.
        """
        if options.truncation not in chat.TRUNCATIONS:
            raise DataError(f"data.truncation={options.truncation!r} must be one of {', '.join(chat.TRUNCATIONS)}")
        if tokenizer is not None and options.apply_chat_template:
            chat.require_chat_template(tokenizer)
        paths = [part for file in files for part in expand(Path(file))]
        if not paths:
            raise DataError("no data files: set data.train_files (and data.val_files)")
        self.tokenizer, self.options = tokenizer, options
        self._paths = paths
        self._tables = [_open_prompts(path, options.prompt_key) for path in paths]
        self._ends = np.cumsum([table.num_rows for table in self._tables])
        total = int(self._ends[-1])
        rows = np.arange(total if max_samples < 0 else min(total, max_samples))
        self.dropped = 0
        if tokenizer is not None and (options.truncation in ("error", "drop") or options.filter_overlong_prompts):
            rows = self._check_lengths(tokenizer, rows)
        self._rows = rows
        if not len(rows):
            names = ", ".join(map(str, paths))
            raise DataError(f"no prompt is left of {total} in {names} (dropped as too long: {self.dropped})")

    def __len__(self) -> int:
        return len(self._rows)

    def draw(self, index: int, epoch: int, attempt: int = 0) -> Prompt:
        """The prompt of row `index`, drawn for the `attempt`-th time in `epoch`."""
        source = int(self._rows[index])
        row = self._row(source)
        messages = self._messages(row, source)
        ids = [] if self.tokenizer is None else chat.encode(self.tokenizer, self._text(self.tokenizer, messages))
        reward_model = row["reward_model"]
        return Prompt(
            uid=f"{epoch}-{index}-{attempt}",
            epoch=epoch,
            index=index,
            attempt=attempt,
            token_ids=chat.truncate(ids, self.options.max_prompt_length, self.options.truncation),
            messages=messages,
            data_source=row["data_source"],
            ground_truth=_ground_truth(reward_model, self._where(source)),
            extra_info=row.get("extra_info") or {},
        )

    def _row(self, source: int) -> dict[str, Any]:
        table = bisect_right(self._ends, source)
        start = int(self._ends[table - 1]) if table else 0
        return self._tables[table].slice(source - start, 1).to_pylist()[0]

    def _where(self, source: int) -> str:
        table = bisect_right(self._ends, source)
        return f"{self._paths[table]} row {source - (int(self._ends[table - 1]) if table else 0)}"

    def _messages(self, row: Mapping[str, Any], source: int) -> tuple[dict[str, str], ...]:
        prompt = row[self.options.prompt_key]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not prompt or any(not turn.get("role") or turn.get("content") is None for turn in prompt):
            key, where = self.options.prompt_key, self._where(source)
            raise DataError(f"{where}: {key} must be a list of turns with role and content, got {str(prompt)[:200]}")
        return chat.with_system_prompt(prompt, self.options.system_prompt)

    def _text(self, tokenizer: PreTrainedTokenizerBase, messages: chat.Messages) -> str:
        """What the model continues: the rendered conversation, or the bare text of its turns."""
        if not self.options.apply_chat_template:
            return "".join(message["content"] for message in messages)
        return chat.render(tokenizer, messages, self.options.chat_template_kwargs)

    def _check_lengths(self, tokenizer: PreTrainedTokenizerBase, rows: np.ndarray) -> np.ndarray:
        """Rows that fit. A text of fewer bytes than the limit has no more tokens, so most rows are never encoded."""
        limit = self.options.max_prompt_length
        drop = self.options.truncation == "drop" or self.options.filter_overlong_prompts
        fits = np.ones(len(rows), dtype=bool)
        for start, chunk in self._chunks(len(rows)):
            texts = {}
            for source, row in enumerate(chunk, start):
                text = self._text(tokenizer, self._messages(row, source))
                if len(text.encode()) > limit:
                    texts[source] = text
            for source, length in zip(texts, _lengths(tokenizer, list(texts.values())), strict=True):
                fits[source] = length <= limit
                if not fits[source] and not drop:
                    raise DataError(
                        f"{self._where(source)}: the prompt has {length} tokens, more than data."
                        f"max_prompt_length={limit}; raise it, or set data.truncation to drop, left, right or middle"
                    )
        self.dropped = int((~fits).sum())
        return rows[fits]

    def _chunks(self, stop: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """The first `stop` rows in file order, some thousands at a time, with the number of the first of them."""
        first = 0
        for table in self._tables:
            for start in range(0, min(table.num_rows, stop - first), SCAN_ROWS):
                yield first + start, table.slice(start, min(SCAN_ROWS, stop - first - start)).to_pylist()
            first += table.num_rows


class PromptLoader:
    """Draws prompts in an order that depends only on (seed, epoch) and the number of rows; resumes exactly.

    The stream never ends: after the last row of an epoch comes the first row of the next. `epoch` and `offset` name
    the next row to be drawn, so at an epoch's end they already read (epoch + 1, 0).
    """

    def __init__(self, dataset: PromptDataset, *, seed: int = 1, shuffle: bool = True) -> None:
        self.dataset, self.seed, self.shuffle = dataset, seed, shuffle
        self.epoch, self.offset = 0, 0
        self._order = self._permutation(0)

    def __len__(self) -> int:
        return len(self.dataset)

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
        drawn = []
        for _ in range(n):
            drawn.append(self.dataset.draw(int(self._order[self.offset]), self.epoch))
            self.offset += 1
            if self.offset == len(self.dataset):
                self.epoch, self.offset = self.epoch + 1, 0
                self._order = self._permutation(self.epoch)
        return drawn

    def state_dict(self) -> dict[str, int | bool]:
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": len(self.dataset),
        }

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue from a saved state. Raises DataError when the data or the order is not the saved one."""
        for key, now in (("rows", len(self.dataset)), ("seed", self.seed), ("shuffle", self.shuffle)):
            if state[key] != now:
                raise DataError(
                    f"cannot resume the data order: the checkpoint has {key}={state[key]}, this run has {key}={now}; "
                    "use the same data files and data.seed/data.shuffle, or start a new run"
                )
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
        self._order = self._permutation(self.epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        return permutation(len(self.dataset), self.seed, epoch, self.shuffle)


def permutation(rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order in which an epoch draws its rows."""
    return np.random.default_rng([seed, epoch]).permutation(rows) if shuffle else np.arange(rows)


def drawn_uids(state: Mapping[str, int | bool]) -> Iterator[str]:
    """Every draw that a loader with this saved state has made, in order."""
    rows, seed, shuffle = int(state["rows"]), int(state["seed"]), bool(state["shuffle"])
    for epoch in range(int(state["epoch"]) + 1):
        count = rows if epoch < state["epoch"] else int(state["offset"])
        yield from (f"{epoch}-{index}-0" for index in permutation(rows, seed, epoch, shuffle)[:count])


def _open_prompts(path: Path, prompt_key: str) -> pa.Table:
    """The needed columns of one prompt file; DataError names the missing ones and those that are there."""
    present = column_names(path)
    required = [prompt_key, "data_source", "reward_model"]
    missing = [name for name in required if name not in present]
    if missing:
        raise DataError(
            f"{path} lacks the column(s) {', '.join(missing)}; it has {', '.join(present) or 'none'}. A prompt file "
            f"needs {', '.join(required)} (and may have extra_info); data.prompt_key names the prompt column"
        )
    table = open_mapped(path, required + (["extra_info"] if "extra_info" in present else []))
    kind = table.schema.field("reward_model").type
    if not pa.types.is_struct(kind) or kind.get_field_index("ground_truth") < 0:
        raise DataError(f"{path}: column reward_model must be a struct with the field ground_truth, but it is {kind}")
    return table


def _ground_truth(reward_model: Mapping[str, Any] | None, where: str) -> str:
    truth = None if reward_model is None else reward_model["ground_truth"]
    if truth is None:
        raise DataError(f"{where}: reward_model.ground_truth is empty")
    return str(truth)


def _lengths(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[int]:
    if not texts:
        return []
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
