"""Supervised rows: a prompt and response parquet as token ids with a loss mask over the response."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dapo.data import chat
from megatron_dapo.data.errors import DataError
from megatron_dapo.data.tables import column_names, expand, open_mapped

_ENCODED_ROWS = 1 << 16


@dataclass(frozen=True)
class SftRow:
    """One example: prompt ids, response ids, end-of-sequence; `loss_mask` is 1 on what is trained."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


class SftDataset:
    """Rows with the columns `prompt` (text or chat turns) and `response` (text).

    The response is encoded apart from the prompt, exactly as a sampled response would follow it.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        chat.require_chat_template(tokenizer)
        self.tokenizer, self.max_length = tokenizer, max_length
        self.system_prompt, self.chat_template_kwargs = system_prompt, chat_template_kwargs
        self._tables = []
        for path in (part for file in files for part in expand(Path(file))):
            present = column_names(path)
            missing = [name for name in ("prompt", "response") if name not in present]
            if missing:
                names = ", ".join(present) or "no columns"
                raise DataError(f"{path} lacks the column(s) {', '.join(missing)}; it has {names}")
            self._tables.append(open_mapped(path, ["prompt", "response"]))
        if not self._tables:
            raise DataError("no data files: set sft.train_files")
        self._ends = np.cumsum([table.num_rows for table in self._tables])
        self._encoded = lru_cache(maxsize=_ENCODED_ROWS)(self._encode)  # small sets are encoded once, not every epoch

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> SftRow:
        return self._encoded(index)

    def _encode(self, index: int) -> SftRow:
        table = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[table - 1]) if table else 0
        row = self._tables[table].slice(index - start, 1).to_pylist()[0]
        messages = [{"role": "user", "content": row["prompt"]}] if isinstance(row["prompt"], str) else row["prompt"]
        text = chat.render(
            self.tokenizer, chat.with_system_prompt(messages, self.system_prompt), self.chat_template_kwargs
        )
        prompt = chat.encode(self.tokenizer, text)
        response = [*chat.encode(self.tokenizer, row["response"]), self.tokenizer.eos_token_id]
        if len(prompt) + len(response) > self.max_length:
            raise DataError(
                f"SFT row {index} has {len(prompt) + len(response)} tokens, more than sft.max_length="
                f"{self.max_length}; raise it"
            )
        return SftRow((*prompt, *response), (0,) * len(prompt) + (1,) * len(response))

    def batches(self, batch_size: int, *, seed: int, epoch: int) -> Iterator[list[SftRow]]:
        """Full batches of one epoch, in an order that depends only on (seed, epoch)."""
        order = np.random.default_rng([seed, epoch]).permutation(len(self))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield [self[int(index)] for index in order[start : start + batch_size]]
