"""Parquet tables that contain a checksum of the whole file. Other programs read them as they read any Parquet file.

Parquet's own checksums are of the values alone: where the rest of a file is damaged, readers return other numbers. Here a mark
in the file's metadata stands for the checksum, which takes its place when the file is complete.
"""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import IO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from kvlens.arguments import path_of
from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.files.untrusted import check_regular

KEY = "kvlens.checksum"
MARK = b"xxh3-128:" + b"0" * 32
"""Where the checksum goes; it is that of the file with this mark in place."""


class TableWriter(pq.ParquetWriter):
    """A writer of row groups; :meth:`seal` completes the file.

    Args:
        file: an empty file, open for reading and writing.
        schema: of all row groups.
    """

    def __init__(self, file: IO[bytes], schema: pa.Schema):
        super().__init__(file, schema, compression="zstd", write_page_checksum=True)
        self._file = file

    def seal(self, facts: Mapping[str, str] | None = None) -> None:
        """Write the end of the file, with ``facts`` in its metadata, and the checksum."""
        self.add_key_value_metadata({**(facts or {}), KEY: MARK})
        self.close()
        self._file.flush()
        size = self._file.seek(0, 2)
        hasher, start = xxhash.xxh3_128(), _start(self._file, size)
        self._file.seek(0)
        while part := self._file.read(1 << 20):
            hasher.update(part)
        self._file.seek(start)
        self._file.write(_sealed(hasher))


def table_bytes(table: pd.DataFrame) -> bytes:
    """A table as a Parquet file, for :func:`read_table`."""
    file, rows = BytesIO(), pa.Table.from_pandas(table, preserve_index=False)
    with TableWriter(file, rows.schema) as writer:
        writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        writer.seal()
    return file.getvalue()


@checked
def read_table(path: str | Path) -> pd.DataFrame:
    """Read a table that kvlens wrote: of a batch, a report, an explanation, an experiment or a training run.

    Unlike ``pandas.read_parquet``, it returns what was written or raises an error, wherever the file is damaged.

    Raises:
        KVLensError: the file is missing, damaged, or was not written by this version of kvlens.
    """
    return pd.read_parquet(BytesIO(checked_bytes(path_of("read_table: path", path))))


def checked_bytes(path: Path) -> bytes:
    """The contents of a table that kvlens wrote; raises as :func:`read_table`."""
    check_regular("read_table", path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise KVLensError(f"read_table: {path} cannot be read ({error.strerror or error})") from error
    start = content.rfind(MARK[:9])
    if start < 0:
        raise KVLensError(
            f"read_table: {path} is damaged, or no table of this version of kvlens: use an intact copy, or make it again; "
            "pandas.read_parquet reads tables of other programs"
        )
    hasher = xxhash.xxh3_128()
    for part in (content[:start], MARK, content[start + len(MARK) :]):
        hasher.update(part)
    if content[start : start + len(MARK)] != _sealed(hasher):
        raise KVLensError(
            f"read_table: {path} is damaged: it does not match its checksum; use an intact copy, or make it again"
        )
    return content


def _sealed(hasher: xxhash.xxh3_128) -> bytes:
    return MARK[:9] + hasher.hexdigest().encode()


def _start(file: IO[bytes], size: int) -> int:
    """Find where the mark is: in the metadata at the end of the file, whose length the last 8 bytes say."""
    file.seek(size - 8)
    length = int.from_bytes(file.read(4), "little")
    file.seek(size - 8 - length)
    return size - 8 - length + file.read(length).rindex(MARK)
