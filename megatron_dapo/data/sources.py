"""The published data sets that can be prepared by name, and how their rows become rows of our schema."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from megatron_dapo.data.errors import DataError
from megatron_dapo.data.schema import PROMPT_SCHEMA, prompt_row
from megatron_dapo.data.tables import BATCH_ROWS, expand, stream

# The instruction of DAPO-Math-17k and its AIME file; a model trained on the one must be asked the other the same way.
DAPO_INSTRUCTION = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
GSM8K_INSTRUCTION = '{problem} Let\'s think step by step and output the final answer after "####".'

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """`repository` on the Hugging Face hub; `files` maps its splits to our file names.

    `convert(row, index, split)` makes one row of the schema; None when the data set already has it.
    """

    repository: str
    files: Mapping[str, str]
    config: str | None = None
    convert: Callable[[Row, int, str], dict[str, Any]] | None = None
    columns: tuple[str, ...] = ("data_source", "prompt", "reward_model")


def _gsm8k(row: Row, index: int, split: str) -> dict[str, Any]:
    truth = row["answer"].rpartition("####")[2].strip().replace(",", "")
    text = GSM8K_INSTRUCTION.format(problem=row["question"])
    return prompt_row("openai/gsm8k", row["question"], truth, index=index, split=split, text=text)


def _math500(row: Row, index: int, split: str) -> dict[str, Any]:
    text = DAPO_INSTRUCTION.format(problem=row["problem"])
    return prompt_row("math-500", row["problem"], row["answer"], index=index, split=split, text=text)


SOURCES = {
    "dapo-math-17k": Source("BytedTsinghua-SIA/DAPO-Math-17k", {"train": "dapo-math-17k.parquet"}),
    "aime-2024": Source("BytedTsinghua-SIA/AIME-2024", {"train": "aime-2024.parquet"}),
    "gsm8k": Source(
        "openai/gsm8k",
        {"train": "gsm8k-train.parquet", "test": "gsm8k-test.parquet"},
        config="main",
        convert=_gsm8k,
        columns=("question", "answer"),
    ),
    "math-500": Source(
        "HuggingFaceH4/MATH-500", {"test": "math-500.parquet"}, convert=_math500, columns=("problem", "answer")
    ),
}


def read(source: Source, split: str, local: Path | None) -> Iterator[pa.RecordBatch]:
    """Batches of the schema, from the local file or directory or else from the hub. Raises DataError."""
    batches = _hub(source, split) if local is None else _local(source, local)
    if source.convert is None:
        yield from batches
        return
    index = 0
    for batch in batches:
        rows = [source.convert(row, index + i, split) for i, row in enumerate(batch.to_pylist())]
        index += len(rows)
        yield pa.RecordBatch.from_pylist(rows, PROMPT_SCHEMA)


def local_splits(source: Source, local: Path) -> dict[str, Path]:
    """Which local file is which split: one file for a set of one split, else recognised by the split in its name."""
    files = expand(local)
    if len(source.files) == 1:
        return {split: local for split in source.files}
    found = {split: file for split in source.files for file in files if split in file.stem}
    if not found:
        names = ", ".join(file.name for file in files)
        raise DataError(f"{local}: no file name contains one of the splits {', '.join(source.files)} (found {names})")
    return found


def _local(source: Source, local: Path) -> Iterator[pa.RecordBatch]:
    for path in expand(local):
        for batch in stream(path):
            yield _checked(batch, source, str(path))


def _hub(source: Source, split: str) -> Iterator[pa.RecordBatch]:
    try:
        import datasets
    except ImportError as error:
        raise DataError("downloading needs the package datasets; or give a local copy with --from FILE") from error
    try:
        rows = datasets.load_dataset(source.repository, source.config, split=split)
    except (OSError, ValueError) as error:  # the hub's errors are of these two families
        raise DataError(
            f"cannot download {source.repository} (split {split}) from the Hugging Face hub: {error}; without network, "
            "give a local copy with --from FILE"
        ) from error
    for table in rows.with_format("arrow").iter(BATCH_ROWS):
        for batch in table.to_batches():
            yield _checked(batch, source, source.repository)


def _checked(batch: pa.RecordBatch, source: Source, where: str) -> pa.RecordBatch:
    present = batch.schema.names
    missing = [name for name in source.columns if name not in present]
    if missing:
        raise DataError(f"{where} lacks the column(s) {', '.join(missing)}; it has {', '.join(present) or 'none'}")
    return batch
