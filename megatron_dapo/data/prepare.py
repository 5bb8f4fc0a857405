"""Prepare a data set by name: read, remove copies, write parquet in one schema, and say on a card what came out.

Everything streams: memory holds one batch of rows and a short digest per distinct prompt.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from megatron_dapo.data import chat
from megatron_dapo.data.arithmetic import Arithmetic, write_arithmetic
from megatron_dapo.data.card import DataCard, FileCard, Lengths
from megatron_dapo.data.comparison import Comparison, write_comparison
from megatron_dapo.data.dedup import Deduplicator
from megatron_dapo.data.errors import DataError
from megatron_dapo.data.schema import PROMPT_SCHEMA, prompt_row
from megatron_dapo.data.sources import DAPO_INSTRUCTION, SOURCES, Source, local_splits, read
from megatron_dapo.data.tables import expand, stream
from megatron_dapo.data.tokenizer import load_tokenizer

DEFAULT_LIMIT = 2048  # tokens, the headline recipe's max_prompt_length
REASONING_PREFIX = "reasoning-gym:"


def prepare(
    name: str,
    output: Path,
    source: Path | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> DataCard:
    """Write the data set `name` under the directory `output`, with `<name>.card.json`, and return the card.

    `name` is a key of SOURCES or GENERATED, `reasoning-gym:<task>`, or the path of any file or directory in the
    schema. `source` is a local copy of a published set, read instead of the hub. Options for every set: `tokenizer` (a
    Hugging Face directory; lengths are then counted in tokens) and `max_prompt_length`; generated sets take their own.
    Raises DataError when something is missing, malformed, or already there and `overwrite` is false.
    """
    began = time.monotonic()
    wanted = {key: _literal(value) for key, value in (options or {}).items()}
    lengths = _Lengths(wanted.pop("tokenizer", None), int(wanted.pop("max_prompt_length", DEFAULT_LIMIT)))
    label = name.replace(":", "-")
    if source is not None and name not in SOURCES:
        raise DataError(
            f"--from {source}: only {', '.join(SOURCES)} are read from a local copy, and {name} is none of them"
        )
    if name in GENERATED:
        origin, plan = "generator", _write_generated(name, output, wanted, overwrite)
    elif name.startswith(REASONING_PREFIX):
        origin, plan = "reasoning-gym", _reasoning_gym(name.removeprefix(REASONING_PREFIX), output, wanted)
    elif name in SOURCES:
        _no_options(name, wanted)
        published = SOURCES[name]
        origin, plan = str(source or published.repository), _published(published, output, source)
    elif Path(name).exists():
        _no_options(name, wanted)
        label = Path(name).stem
        origin, plan = name, {output / f"{label}.parquet": _local(Path(name))}
    else:
        raise DataError(
            f"no data set {name!r}: use {', '.join([*SOURCES, *GENERATED])}, {REASONING_PREFIX}<task>, or a file's path"
        )
    for path in plan:
        if path.exists() and not overwrite and name not in GENERATED:
            raise DataError(f"{path} already exists; remove it or ask to overwrite it")
    cards = [_write(path, batches, lengths) for path, batches in plan.items()]
    card = DataCard(label, origin, cards, dict(options or {}), round(time.monotonic() - began, 2))
    card.save(output / f"{label}.card.json")
    return card


Plan = dict[Path, Iterable[pa.RecordBatch]]


def _published(source: Source, output: Path, local: Path | None) -> Plan:
    if local is None:
        return {output / file: read(source, split, None) for split, file in source.files.items()}
    return {
        output / source.files[split]: read(source, split, path) for split, path in local_splits(source, local).items()
    }


def _local(path: Path) -> Iterator[pa.RecordBatch]:
    """Batches of files that should already be in the schema."""
    for file in expand(path):
        for batch in stream(file):
            missing = [name for name in ("prompt", "data_source", "reward_model") if name not in batch.schema.names]
            if missing:
                there = ", ".join(batch.schema.names) or "none"
                raise DataError(f"{file} lacks the column(s) {', '.join(missing)}; it has {there}")
            yield batch


GENERATED: dict[str, tuple[type, Callable[[Path, Any], dict[str, Path]]]] = {
    "arithmetic": (Arithmetic, write_arithmetic),
    "number-comparison": (Comparison, write_comparison),
}


def _write_generated(name: str, output: Path, wanted: dict[str, Any], overwrite: bool) -> Plan:
    options, write = GENERATED[name]
    _only(wanted, {field.name for field in fields(options)}, name)
    if (output / "train.parquet").exists() and not overwrite:
        raise DataError(f"{output}/train.parquet already exists; remove it or ask to overwrite it")
    paths = write(output, options(**wanted))
    return {paths[split]: list(_local(paths[split])) for split in ("train", "val")}


def _reasoning_gym(task: str, output: Path, wanted: dict[str, Any]) -> Plan:
    """`train_rows` and `val_rows` problems with different seeds; every other option goes to the task's own config."""
    train, val, seed = (
        int(wanted.pop(key, default)) for key, default in (("train_rows", 4096), ("val_rows", 256), ("seed", 1))
    )
    sizes = {"train": (train, seed), "val": (val, seed + 1)}
    return {
        output / f"reasoning-gym-{task}-{split}.parquet": _generated(task, split, size, seed, wanted)
        for split, (size, seed) in sizes.items()
    }


def _generated(task: str, split: str, size: int, seed: int, options: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"{REASONING_PREFIX}{task} needs the package: pip install 'megatron-dapo[reasoning-gym]'"
        ) from error
    try:
        problems = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
    except (ValueError, TypeError, AssertionError) as error:  # unknown task, unknown or inconsistent options
        raise DataError(f"{REASONING_PREFIX}{task}: {error}") from error
    schema = PROMPT_SCHEMA.set(
        PROMPT_SCHEMA.get_field_index("extra_info"),
        pa.field("extra_info", pa.struct([*PROMPT_SCHEMA.field("extra_info").type, pa.field("entry", pa.string())])),
    )
    for start in range(0, size, 1024):
        rows = []
        for index in range(start, min(start + 1024, size)):
            entry = problems[index]
            text = DAPO_INSTRUCTION.format(problem=entry["question"])
            truth = "" if entry["answer"] is None else str(entry["answer"])
            row = prompt_row(f"reasoning_gym:{task}", entry["question"], truth, index=index, split=split, text=text)
            row["extra_info"]["entry"] = json.dumps(entry, default=str)
            rows.append(row)
        yield pa.RecordBatch.from_pylist(rows, schema)


class _Lengths:
    """Counts prompt lengths of kept rows: in tokens when there is a tokenizer, else in characters."""

    def __init__(self, tokenizer: Any | None, limit: int) -> None:
        self.tokenizer: PreTrainedTokenizerBase | None = None if tokenizer is None else load_tokenizer(str(tokenizer))
        if self.tokenizer is not None:
            chat.require_chat_template(self.tokenizer)
        self.limit = limit

    def of(self, batch: pa.RecordBatch) -> list[int]:
        prompts = batch.column("prompt").to_pylist()
        messages = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
        if self.tokenizer is None:
            return [sum(len(turn["content"]) for turn in turns) for turns in messages]
        texts = [chat.render(self.tokenizer, turns) for turns in messages]
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def summary(self, lengths: list[int]) -> Lengths | None:
        if not lengths:
            return None
        unit = "characters" if self.tokenizer is None else "tokens"
        # Without a tokenizer the limit is compared with a guess of four characters to a token.
        return Lengths.of(np.array(lengths), unit, self.limit * (4 if self.tokenizer is None else 1))


def _write(path: Path, batches: Iterable[pa.RecordBatch], measure: _Lengths) -> FileCard:
    """Stream batches through de-duplication into one parquet file, which appears only when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    dedup, lengths, sources = Deduplicator(), [], Counter[str]()
    writer = None
    try:
        for batch in batches:
            kept = dedup.keep(batch)
            if not kept.num_rows:
                continue
            lengths += measure.of(kept)
            sources.update(kept.column("data_source").to_pylist())
            table = _typed(pa.Table.from_batches([kept]))
            if writer is None:
                writer = pa.parquet.ParquetWriter(partial, table.schema, compression="zstd")
            writer.write_table(table.cast(writer.schema))
        if writer is None:
            raise DataError(f"{path}: the source has no rows")
        writer.close()
        partial.replace(path)
    finally:
        if writer is not None:
            writer.close()
        partial.unlink(missing_ok=True)
    return FileCard(
        str(path), dedup.rows, len(lengths), dedup.conflicts, dedup.copies, dict(sources), measure.summary(lengths)
    )


def _typed(table: pa.Table) -> pa.Table:
    """Without pandas' index column, and with text where a column of nothing but nulls has no type."""
    table = table.select([name for name in table.column_names if not name.startswith("__index_level_")])
    schema = pa.schema([pa.field(column.name, _without_null(column.type)) for column in table.schema])
    return table.cast(schema)


def _without_null(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _without_null(field.type)) for field in kind])
    return kind


def _literal(value: Any) -> Any:
    """`key=value` words from a command line as numbers and booleans where they are such."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _no_options(name: str, wanted: Mapping[str, Any]) -> None:
    _only(wanted, set(), name)


def _only(wanted: Mapping[str, Any], known: set[str], name: str) -> None:
    unknown = sorted(set(wanted) - known)
    if unknown:
        there = ", ".join(sorted(known | {"tokenizer", "max_prompt_length"}))
        raise DataError(f"{name}: unknown option(s) {', '.join(unknown)}; there are {there}")
