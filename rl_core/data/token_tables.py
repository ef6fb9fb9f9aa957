"""Token rows in Arrow files (IPC), read by mapping them into memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data.token_rows import TokenChunk, TokenRows
from rl_core.errors import CorruptError

if TYPE_CHECKING:
    import pyarrow

__all__ = ["is_available", "read_column", "read_table", "write_column", "write_table"]


def is_available() -> bool:
    """True if pyarrow is installed."""
    return importlib.util.find_spec("pyarrow") is not None


def write_table(file: IO[bytes], chunks: Iterable[TokenChunk]) -> None:
    """Write one record batch a chunk: row, prompt (its tokens), ids, mask."""
    import pyarrow as pa

    with pa.ipc.new_file(file, _schema()) as writer:
        for chunk in chunks:
            starts = pa.array(chunk.starts)
            columns = [
                pa.array(chunk.rows),
                pa.array(chunk.prompts),
                pa.LargeListArray.from_arrays(starts, pa.array(chunk.ids)),
                pa.LargeListArray.from_arrays(starts, pa.array(chunk.mask)),
            ]
            writer.write_batch(pa.record_batch(columns, schema=_schema()))


def read_table(path: Path) -> TokenRows:
    """The rows of a file that `write_table` wrote; nothing is copied. Raises: CorruptError."""
    chunks = []
    for batch in _batches(path, _schema()):
        ids, mask = batch.column(2), batch.column(3)
        chunks.append(
            TokenChunk(
                batch.column(0).to_numpy(),
                batch.column(1).to_numpy(),
                ids.offsets.to_numpy(),
                ids.values.to_numpy(),
                mask.values.to_numpy(),
            )
        )
    return TokenRows(chunks, recipe=(read_table, (path,)))


def write_column(file: IO[bytes], values: NDArray[np.int64]) -> None:
    """Write one column of integers."""
    import pyarrow as pa

    schema = pa.schema([pa.field("place", pa.int64(), nullable=False)])
    with pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(values)], schema=schema))


def read_column(path: Path) -> NDArray[np.int64]:
    """The integers of a file that `write_column` wrote. Raises: CorruptError."""
    parts: list[NDArray[np.int64]] = [batch.column(0).to_numpy() for batch in _batches(path, None)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("row", pa.int64(), nullable=False),
            pa.field("prompt", pa.int32(), nullable=False),
            pa.field("ids", pa.large_list(pa.int32()), nullable=False),
            pa.field("mask", pa.large_list(pa.uint8()), nullable=False),
        ]
    )


def _batches(path: Path, schema: pyarrow.Schema | None) -> list[Any]:
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if schema is not None and reader.schema != schema:
            raise CorruptError(f"{path}: has the columns {reader.schema.names}")
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"{path}: cannot be read as Arrow: {error}") from error
