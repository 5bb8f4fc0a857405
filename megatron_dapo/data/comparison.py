"""Which of two numbers is larger: a task that a 135M model half knows, asked as text after two examples.

The prompt is text to continue, not a conversation (`data.apply_chat_template=false`), and an answer ends with its line.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.data.errors import DataError
from megatron_dapo.data.schema import PROMPT_SCHEMA, prompt_row, write_rows

EXAMPLES = "larger of 12 and 45: 45\nlarger of 81 and 30: 81\n"


@dataclass(frozen=True)
class Comparison:
    """Sizes of the splits, which are disjoint as unordered pairs of two-digit numbers."""

    train_rows: int = 2048
    val_rows: int = 256
    seed: int = 1


def write_comparison(output: Path, options: Comparison) -> dict[str, Path]:
    """Writes `train` and `val` prompt files and returns their paths. Raises DataError for more rows than pairs."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a + 1, 100)]
    if options.train_rows + options.val_rows > len(pairs):
        raise DataError(
            f"number-comparison: {options.train_rows + options.val_rows} rows wanted, but there are {len(pairs)} pairs "
            "of two-digit numbers; lower train_rows or val_rows"
        )
    order = random.Random(options.seed)
    order.shuffle(pairs)
    parts = {"train": pairs[: options.train_rows], "val": pairs[len(pairs) - options.val_rows :]}
    paths = {split: output / f"{split}.parquet" for split in parts}
    for split, chosen in parts.items():
        rows = (_row(pair, index, split, order) for index, pair in enumerate(chosen))
        write_rows(paths[split], rows, PROMPT_SCHEMA)
    return paths


def _row(pair: tuple[int, int], index: int, split: str, order: random.Random) -> dict:
    first, second = order.sample(pair, 2)
    question = f"larger of {first} and {second}:"
    return prompt_row(
        "exact", question, str(max(pair)), index=index, split=split, text=EXAMPLES + question, ability="COMPARISON"
    )
