"""Removing copies of a problem while streaming: what makes two rows the same is what the prompt says."""

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

import pyarrow as pa
import pyarrow.compute as pc

DIGEST_BYTES = 16


@dataclass
class Deduplicator:
    """Keeps the first row of every distinct prompt, spacing aside.

    Memory grows with the distinct prompts only, some 300 bytes each.
    """

    prompt_key: str = "prompt"
    rows: int = 0
    conflicts: int = 0
    _index: dict[bytes, int] = field(default_factory=dict)
    _exact: dict[bytes, int] = field(default_factory=dict)
    _copies: list[int] = field(default_factory=list)
    _truths: list[int] = field(default_factory=list)  # hash of the first ground truth; -1 once a conflict is counted

    def keep(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of `batch` whose prompt was not seen before."""
        fresh = []
        truths = batch.column("reward_model").field("ground_truth").to_pylist()
        for row, (text, truth) in enumerate(zip(prompt_texts(batch.column(self.prompt_key)), truths, strict=True)):
            found = self._number(text)
            if found == len(self._copies):
                fresh.append(row)
                self._copies.append(1)
                self._truths.append(_positive_hash(truth))
                continue
            self._copies[found] += 1
            if self._truths[found] not in (-1, _positive_hash(truth)):
                self._truths[found] = -1
                self.conflicts += 1
        self.rows += batch.num_rows
        return batch if len(fresh) == batch.num_rows else batch.take(pa.array(fresh, pa.int64()))

    def _number(self, text: str) -> int:
        """The number of this prompt. Most rows are exact copies, so the text as it is comes first."""
        exact = _digest(text)
        found = self._exact.get(exact)
        if found is None:
            found = self._index.setdefault(_digest(" ".join(text.split())), len(self._index))
            self._exact[exact] = found
        return found

    @property
    def copies(self) -> dict[int, int]:
        """How many problems came how often."""
        return dict(sorted(Counter(self._copies).items()))


def prompt_texts(column: pa.Array) -> list[str]:
    """Every prompt as one text, its turns with their roles joined. Works on whole columns: a row costs ~1 µs."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.to_pylist()
    turns = column.flatten()
    contents, roles = turns.field("content").to_pylist(), turns.field("role").to_pylist()
    counts = pc.list_value_length(column).to_pylist()
    if set(counts) == {1} and set(roles) == {"user"}:
        return contents
    texts, start = [], 0
    for turn_count in counts:
        end = start + turn_count
        texts.append("\0".join(f"{roles[i]}:{contents[i]}" for i in range(start, end)))
        start = end
    return texts


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def _positive_hash(truth: str | None) -> int:
    return hash(truth) & 0x7FFF_FFFF_FFFF_FFFF
