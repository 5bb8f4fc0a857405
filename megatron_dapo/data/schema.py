"""The on-disk schema of a prompt file: the columns of DAPO-Math-17k, which verl's users already have."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

PROMPT_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("raw_problem", pa.string()), ("split", pa.string())])),
    ]
)

SFT_SCHEMA = pa.schema([("prompt", pa.string()), ("response", pa.string())])


def prompt_row(
    data_source: str,
    problem: str,
    ground_truth: str,
    *,
    index: int,
    split: str,
    text: str | None = None,
    ability: str = "MATH",
) -> dict[str, Any]:
    """One row of the schema. `text` is what the user turn says; by default the bare problem."""
    return {
        "data_source": data_source,
        "prompt": [{"content": problem if text is None else text, "role": "user"}],
        "ability": ability,
        "reward_model": {"ground_truth": ground_truth, "style": "rule"},
        "extra_info": {"index": index, "raw_problem": problem, "split": split},
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema, *, chunk: int = 8192) -> int:
    """Write rows as parquet, a chunk at a time, under a temporary name until complete. Returns the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    total, pending = 0, []
    try:
        with pa.parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
            for row in rows:
                pending.append(row)
                if len(pending) == chunk:
                    writer.write_table(pa.Table.from_pylist(pending, schema))
                    total, pending = total + chunk, []
            if pending:
                writer.write_table(pa.Table.from_pylist(pending, schema))
                total += len(pending)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return total
