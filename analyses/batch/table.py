"""From frames to the Parquet file: one schema for all prompts, one row group per prompt.

A prompt's rows are passed as the bytes of an Arrow stream, which are copied from worker to journal to file without parsing.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvlens import KVLensError
from kvlens.checks import checked
from kvlens.files import write_file
from kvlens.files.tables import TableWriter, checked_bytes

METADATA = b"kvlens.batch"


@checked
def schema_of(columns: Mapping[str, str]) -> pa.Schema:
    """The Arrow schema of a table with these columns (name -> dtype of pandas)."""
    empty = pd.DataFrame({name: pd.Series(dtype="str" if kind == "category" else kind) for name, kind in columns.items()})
    schema = pa.Schema.from_pandas(empty, preserve_index=False)
    for i, kind in enumerate(columns.values()):
        if kind == "category":  # an empty one has no type
            schema = schema.set(i, schema.field(i).with_type(pa.dictionary(pa.int32(), pa.string())))
    return schema


def to_bytes(frame: pd.DataFrame, schema: pa.Schema) -> bytes:
    """A prompt's rows, in the schema's columns, as a compressed Arrow stream.

    Raises:
        pyarrow.ArrowException: a value does not fit its column without loss.
    """
    return stream(pa.Table.from_pandas(frame, schema=schema, preserve_index=False), schema)


def stream(table: pa.Table, schema: pa.Schema) -> bytes:
    """A table as a compressed Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def write_parquet(path: Path, schema: pa.Schema, prompts: Iterable[bytes], facts: Mapping[str, Any]) -> None:
    """Write one row group per prompt; ``path`` is replaced when the file is complete.

    Args:
        path: the file.
        schema: from :func:`schema_of`.
        prompts: rows of each prompt from :func:`to_bytes`, in order; a prompt without rows has no row group.
        facts: kept as JSON in the file's metadata, for :func:`read_facts`.

    Raises:
        KVLensError: not writable, or the disk is full.
    """

    def fill(file: IO[bytes]) -> None:
        with TableWriter(file, schema) as writer:
            for rows in prompts:
                table = pa.ipc.open_stream(rows).read_all()
                if table.num_rows:
                    writer.write_table(table, row_group_size=table.num_rows)
            writer.seal({METADATA: json.dumps(facts)})

    write_file(path, fill)


def read_parquet(path: Path, schema: pa.Schema) -> Iterator[tuple[str, str, int, bytes]]:
    """(model, prompt_id, number of rows, rows as :func:`to_bytes` makes them) of every row group of a batch's table.

    Raises:
        KVLensError: it cannot be read, or has other columns.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(checked_bytes(path)))
        for group in range(file.num_row_groups):
            table = file.read_row_group(group).cast(schema)
            yield table["model"][0].as_py(), table["prompt_id"][0].as_py(), table.num_rows, stream(table, schema)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise KVLensError(
            f"{path} cannot be read as the table of a batch: {error}; pass --overwrite to start from scratch"
        ) from error


def read_facts(path: Path) -> dict[str, Any] | None:
    """The facts that :func:`write_parquet` put into a file; None for any other file."""
    try:
        return json.loads(pq.read_metadata(path).metadata[METADATA])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None
