"""Open any prompt file (parquet, JSON lines, Hugging Face directory) as an Arrow table that stays on disk.

Rows are read through a memory map, so a file of millions of rows costs address space, not memory.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from megatron_dapo.data.errors import DataError

BATCH_ROWS = 16_384
BUFFER_BYTES = 1 << 20
JSON_BLOCK_BYTES = 4 << 20
PARQUET_SUFFIXES = (".parquet", ".pq")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


def expand(path: Path) -> list[Path]:
    """The data files behind `path`: itself, or the parquet / JSON / Arrow files of a directory in name order."""
    if not path.exists():
        raise DataError(f"data file not found: {path} (write it with `megatron-dapo data prepare <name>`)")
    if path.is_file():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        raise DataError(f"{path} holds several splits ({', '.join(splits)}): name one of them, e.g. {path}/train")
    for pattern in ("data-*.arrow", "*.arrow", "*.parquet", "*.jsonl", "data/*.parquet"):
        found = sorted(path.glob(pattern))
        if found:
            return found
    raise DataError(f"{path} is a directory without .parquet, .jsonl or .arrow files")


def stream(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Read one file batch by batch; only one batch is in memory at a time."""
    try:
        if path.suffix in PARQUET_SUFFIXES:
            yield from _parquet(path, None if columns is None else list(columns))
        elif path.suffix in JSON_SUFFIXES:
            options = pa.json.ReadOptions(block_size=JSON_BLOCK_BYTES)
            with pa.json.open_json(path, read_options=options) as reader:
                yield from (batch if columns is None else batch.select(list(columns)) for batch in reader)
        elif path.suffix == ".arrow":
            yield from (
                batch if columns is None else batch.select(list(columns)) for batch in _arrow(path).to_batches()
            )
        else:
            raise DataError(f"{path}: unknown kind of file; use .parquet, .jsonl or a Hugging Face dataset directory")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        kind = path.suffix[1:]
        raise DataError(f"cannot read {path}: it is corrupt, truncated or not a {kind} file ({error})") from error


def _parquet(path: Path, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    """Row group by row group through a small buffer: otherwise Arrow fetches whole files or groups ahead."""
    with pa.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        for group in range(file.num_row_groups):
            yield from file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False)


def column_names(path: Path) -> list[str]:
    """Columns of one file, without reading its rows."""
    if path.suffix in PARQUET_SUFFIXES:
        try:
            return list(pa.parquet.read_schema(path).names)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"cannot read {path}: it is corrupt, truncated or not a parquet file ({error})") from error
    for batch in stream(path):
        return list(batch.schema.names)
    return []


def open_mapped(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """One file as a memory-mapped table. A file not already Arrow is re-written once into an unlinked scratch file."""
    if path.suffix == ".arrow":
        table = _arrow(path)
        return table if columns is None else table.select(list(columns))
    with tempfile.NamedTemporaryFile(prefix="megatron_dapo_", suffix=".arrow") as scratch:
        writer = None
        for batch in stream(path, columns):
            if writer is None:
                writer = pa.ipc.new_file(scratch.name, batch.schema)
            writer.write_batch(batch)
        if writer is None:
            raise DataError(f"{path} has no rows")
        writer.close()
        # The map keeps the pages alive after the name is gone, so no scratch file outlives the process.
        return pa.ipc.open_file(pa.memory_map(scratch.name)).read_all()


def _arrow(path: Path) -> pa.Table:
    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(source).read_all()  # what `datasets` saves
    except pa.ArrowInvalid:
        return pa.ipc.open_file(source).read_all()
