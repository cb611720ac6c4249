"""`kvlens.read_table`: what was written, or an error, wherever a file is damaged."""

import io
import os
import random

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from kvlens.analyses.batch.storage import read_facts, to_bytes, write_parquet

import kvlens
from kvlens import KVLensError
from kvlens.files.tables import MARK, table_bytes

DAMAGES = 400
FRAME = pd.DataFrame(
    {
        "prompt_id": [f"p{i // 40}" for i in range(120)],
        "kl": np.where(np.arange(120) % 7, np.random.default_rng(0).normal(size=120), np.nan),
        "head": np.arange(120),
        "small": np.arange(120, dtype=np.float32) / 3,
        "kind": pd.Categorical(["a", "b", MARK.decode()] * 40),
        "right": np.arange(120) % 3 == 0,
    }
)


def batch(path):
    schema = pa.Schema.from_pandas(FRAME, preserve_index=False)
    parts = (to_bytes(FRAME[i : i + 40], schema) for i in range(0, 120, 40))
    write_parquet(path, schema, parts, {"a": MARK.decode()})


NO_ROWS = FRAME[["prompt_id", "kl"]][:0]
WRITERS = {
    "batch": batch,
    "table": lambda path: path.write_bytes(table_bytes(FRAME)),
    "no rows": lambda path: path.write_bytes(table_bytes(NO_ROWS)),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_damage_is_refused_and_whole_files_are_what_was_written(kind, tmp_path):
    """One bit turned over, or the end cut off. pandas reads about a quarter of such tables as other numbers."""
    WRITERS[kind](path := tmp_path / "t.parquet")
    whole, draw = path.read_bytes(), random.Random(0)
    expected = NO_ROWS if kind == "no rows" else FRAME
    pd.testing.assert_frame_equal(kvlens.read_table(str(path)), expected, check_exact=True)
    pd.testing.assert_frame_equal(pd.read_parquet(path), expected, check_exact=True)
    for number in range(DAMAGES):
        damaged = bytearray(whole)
        if number % 5:
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        else:
            del damaged[draw.randrange(len(whole)) :]
        path.unlink()  # a file that is written over is flushed to the disk when it is closed
        path.write_bytes(damaged)
        with pytest.raises(KVLensError, match="is damaged"):
            kvlens.read_table(path)


def test_a_batch_keeps_its_facts_and_equal_tables_are_equal_bytes(tmp_path):
    for name in "ab":
        batch(tmp_path / name)
    assert read_facts(tmp_path / "a") == {"a": MARK.decode()}
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert table_bytes(FRAME) == table_bytes(FRAME.copy())


def test_tables_of_others_and_what_is_no_table(tmp_path):
    FRAME[["head", "kl"]].to_parquet(tmp_path / "own.parquet")
    with pytest.raises(KVLensError, match=r"own.parquet is damaged, or no table of this version.*pandas.read_parquet"):
        kvlens.read_table(tmp_path / "own.parquet")
    with pytest.raises(KVLensError, match="gone.parquet cannot be read"):
        kvlens.read_table(tmp_path / "gone.parquet")
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(KVLensError, match="is a pipe"):
        kvlens.read_table(tmp_path / "pipe.parquet")
    with pytest.raises(KVLensError, match="read_table: path"):
        kvlens.read_table(io.BytesIO())
