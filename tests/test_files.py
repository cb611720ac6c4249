"""Atomic writes: many writers at once, leftovers of dead ones, and deliberate obstacles."""

import base64
import io
import json
import os
import random
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from kvlens.analyses.batch.parts import REFUSED, Parts, PromptResult, read_facts, read_row_groups, write_table
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import linear_model, small_model
from tiny_hf import tiny_hf_folder, tiny_hf_model, tiny_tokenizer
from tiny_runs import SETTINGS, run, tiny_model, tiny_task, weights
from tiny_text_model import PROMPT, TEXT, tiny_text_model

import kvlens
from kvlens import HookedKVTransformer, KVBias, KVLensError, KVTransformerBridge, convert_prompt, load
from kvlens.checks import from_fields
from kvlens.files import (
    check_writable,
    checksum,
    checksum_of_json,
    clear_leftovers,
    file_in,
    lock,
    read_listed,
    write_atomically,
    write_folder,
)
from kvlens.files.parquet import MARK, table_bytes
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.kv_bias.storage import FORMAT, FORMAT_VERSION
from kvlens.pretrained import read_tensors
from kvlens.tokenizer import growth, read_tokenizer
from kvlens.training import TrainSettings
from kvlens.training.checkpoint import CheckpointFolder
from kvlens.training.run import Run, loss_of
from kvlens.zoo import folder_of


def test_concurrent_writers_of_one_file_and_folder_leave_one_complete_result(tmp_path):
    failed, done, size = [], threading.Event(), 100_000

    def write(which: int) -> None:
        try:
            for _ in range(4):
                write_atomically(tmp_path / "file", bytes([which]) * size)
                write_folder(tmp_path / "folder", lambda new: [(new / name).write_text(str(which)) for name in "abc"])
        except BaseException as error:
            failed.append(error)

    def read() -> None:
        while not done.is_set():
            content = (tmp_path / "file").read_bytes()
            if len(content) != size or len(set(content)) != 1:
                failed.append(content)

    write(9)
    reader, writers = threading.Thread(target=read), [threading.Thread(target=write, args=[i]) for i in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert failed == [] and sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert len({path.read_text() for path in (tmp_path / "folder").iterdir()}) == 1


def test_what_a_dead_writer_left_is_cleared_and_what_a_living_one_writes_is_not(tmp_path):
    (tmp_path / ".x.kvlens-new").mkdir()
    with lock(tmp_path / ".x.kvlens-lock"):
        clear_leftovers(tmp_path / "x")
        assert (tmp_path / ".x.kvlens-new").exists()
        with pytest.raises(TimeoutError), lock(tmp_path / ".x.kvlens-lock", patience=0):
            pass
    clear_leftovers(tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_a_folder_moved_aside_is_restored_only_to_a_free_path(tmp_path):
    (tmp_path / ".x.kvlens-old").mkdir()
    (tmp_path / ".x.kvlens-old" / "a").touch()
    clear_leftovers(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"] and os.listdir(tmp_path / "x") == ["a"]
    (tmp_path / ".x.kvlens-old").mkdir()
    clear_leftovers(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"] and os.listdir(tmp_path / "x") == ["a"]


def test_a_link_that_somebody_planted_is_not_written_through(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".mine.kvlens-new").symlink_to(tmp_path / "theirs")
    write_atomically(tmp_path / "mine", "mine")
    assert (tmp_path / "theirs").read_text() == "theirs" and (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(("path", "words"), [("no/file", "No such file or directory"), ("file/x", "Not a directory")])
def test_paths_that_do_not_exist_are_not_created(path, words, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(KVLensError, match=f"cannot write .*: {words}"):
        write_atomically(tmp_path / path, b"")
    check_writable(tmp_path / "new" / "and" / "newer")
    assert os.listdir(tmp_path) == ["file"]


def test_permissions_are_those_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", b"")
        write_folder(tmp_path / "folder", Path.exists)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("file", "folder")] == [0o640, 0o750]


DAMAGES = 300  # of each kind of file


def damage(path, whole, seed):
    """Write ``whole`` to ``path`` with one bit turned over, or (one time in five) the end cut off."""
    draw, data = random.Random(seed), bytearray(whole)
    if draw.random() < 0.2:
        del data[draw.randrange(len(data)) :]
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.unlink()  # a file that is written over is flushed to the disk when it is closed
    path.write_bytes(bytes(data))


def n_refused(read, *paths):
    """How many damages, of each file in turn, make reading an error of ours; what is read must be what the whole files hold."""
    original, refused = read(), 0
    for seed in range(DAMAGES):
        path = paths[seed % len(paths)]
        whole = path.read_bytes()
        damage(path, whole, seed)
        try:
            assert read() == original
        except KVLensError:
            refused += 1
        path.unlink()
        path.write_bytes(whole)
    return refused


def of_bias(bias):
    raw = {name: x.contiguous().view(torch.uint8).flatten().tolist() for name, x in bias.tensors().items()}
    return raw, bias.n_prompt_tokens, bias.position_offset, bias.fingerprint


def test_a_bias(tmp_path):
    path = tmp_path / "bias.safetensors"
    convert_prompt(tiny_text_model(), PROMPT).save(path)
    assert n_refused(lambda: of_bias(KVBias.load(path)), path) >= DAMAGES - 1  # white space of the header may change


def of_model(model):
    tokens = model.to_tokens(TEXT)
    return weights(model).tolist(), model.cfg.to_json(), tokens.tolist(), model.fingerprint()


def test_every_file_of_a_model_folder(tmp_path):
    folder = tmp_path / "m"
    tiny_text_model().save(folder)
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    refused = n_refused(lambda: of_model(HookedKVTransformer.load(folder)), *files)
    assert refused >= DAMAGES - 5  # white space of config.json may change


def test_a_checkpoint(tmp_path):
    path = tmp_path / "run" / "checkpoint.safetensors"
    run(folder=path.parent)
    task = tiny_task()
    taken_up = Run(tiny_model(), task, loss_of(task), from_fields(TrainSettings, SETTINGS))
    store = CheckpointFolder(path.parent, taken_up)

    def resumed():
        assert store.resume()
        best, optimizer = (sorted(x.items()) for x in (taken_up.best, dict(enumerate(taken_up.optimizer.state.values()))))
        held = [weights(taken_up.model).tolist(), [(name, value.tolist()) for name, value in best]]
        return *held, [{key: x.tolist() for key, x in state.items()} for _, state in optimizer], repr(taken_up.progress)

    assert n_refused(resumed, path) >= DAMAGES - 1
    whole = path.read_bytes()
    path.write_bytes(damaged := whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(KVLensError, match="train: the checkpoint.*is damaged"):
        run(folder=path.parent)  # which reads it in the same way
    assert path.read_bytes() == damaged


def test_files_read_next_to_a_trained_model(tmp_path):
    for file in ("config.json", "training.json", "watched.parquet"):
        shutil.copy(folder_of("docs-shift") / file, tmp_path / file)
    for name in ("training.json", "watched.parquet"):
        n_refused(lambda name=name: read_listed(tmp_path, name), tmp_path / "config.json", *[tmp_path / name] * 2)
    with pytest.raises(KVLensError, match=r"training.json is damaged: it does not match its checksum"):
        shutil.copy(folder_of("docs-linear") / "training.json", tmp_path / "training.json")
        read_listed(tmp_path, "training.json")


def tables_of_kl(n):
    """Some tables of a batch."""
    draw = np.random.default_rng(0)
    frames = [pd.DataFrame({"prompt_id": f"p{i}", "head": range(40), "kl": draw.normal(size=40)}) for i in range(n)]
    return [pa.Table.from_pandas(frame, preserve_index=False) for frame in frames]


def test_the_parts_of_a_batch(tmp_path):
    """A damaged part is missing, and its prompt run again, or it holds what was written; it never stops the batch."""
    folder, tables = tmp_path / "out.partial", tables_of_kl(2)
    parts = Parts(folder, {"seed": 1}, tables[0].schema)
    for i, rows in enumerate(tables):
        parts.add(PromptResult(0, i, f"p{i}", rows.num_rows, rows=rows))
    parts.add(PromptResult(0, 2, "bad", kind=REFUSED, error="too long"))
    paths = sorted(folder.glob("*.parquet"))

    def held():
        found = Parts(folder, {"seed": 1}, tables[0].schema)
        if found.damaged:
            raise KVLensError("missing")
        return list(found.tables()), found.failures, found.done

    assert n_refused(held, *paths) > DAMAGES * 0.99


def test_a_checksum_that_was_taken_out_is_missed(tmp_path):
    tiny_text_model().save(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    stored = json.loads(config.read_text())
    for gone in ("checksum", "files"):
        config.write_text(json.dumps({name: value for name, value in stored.items() if name != gone}))
        with pytest.raises(KVLensError, match="config.json is damaged"):
            HookedKVTransformer.load(tmp_path / "model")
    bias, path = convert_prompt(tiny_text_model(), PROMPT), tmp_path / "bias.safetensors"
    bias.save(path)
    with safe_open(path, framework="pt") as file:
        header = {name: value for name, value in file.metadata().items() if name != "checksum"}
    save_file(load_file(path), path, header)
    with pytest.raises(KVLensError, match="bias.safetensors is damaged"):
        KVBias.load(path)


def test_the_table_of_a_batch(tmp_path):
    """`--retry-failed` takes the rows of a finished table over."""
    path = tmp_path / "t.parquet"
    tables = tables_of_kl(3)
    write_table(path, tables[0].schema, tables, {"a": 1})
    assert list(read_row_groups(path, tables[0].schema)) == tables
    assert n_refused(lambda: list(read_row_groups(path, tables[0].schema)), path) > DAMAGES / 2


pytestmark = pytest.mark.usefixtures("no_network")

DEEP = "[" * 100_000 + "]" * 100_000
LONG = '{"a": ' + "9" * (sys.get_int_max_str_digits() + 700) + "}"


def sharded(folder):
    tiny_hf_model("gpt2").save_pretrained(folder, max_shard_size="20KB")
    return folder


def ours(folder):
    HookedKVTransformer.from_pretrained("x", hf_model=tiny_hf_model("gpt2"), tokenizer=tiny_tokenizer()).save(folder)
    return folder


FOLDERS = {"hugging_face": tiny_hf_folder, "sharded": sharded, "ours": ours}
SPECIAL = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_pipe_or_a_device_instead_of_a_file_is_refused_by_name(kind, special, tmp_path):
    folder = FOLDERS[kind](tmp_path / "whole")
    its_own = HookedKVTransformer.load if kind == "ours" else HookedKVTransformer.from_pretrained
    for name in sorted(path.name for path in folder.iterdir()):
        copy = tmp_path / name / "m"
        shutil.copytree(folder, copy)
        (copy / name).unlink()
        SPECIAL[special](copy / name)
        with pytest.raises(KVLensError, match=rf"{name} is a (pipe|device), not a file"):
            its_own(copy)
        with pytest.raises(KVLensError):
            load(copy)


@pytest.mark.parametrize("special", SPECIAL)
def test_single_files_are_held_to_the_same(special, tmp_path):
    path = tmp_path / "tokenizer.json"
    SPECIAL[special](path)
    for read in (KVBias.load, read_tensors, HookedKVTransformer.from_llama2c, lambda path: read_tokenizer(path.parent)):
        with pytest.raises(KVLensError, match="not a file; nothing is read from it"):
            read(path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(KVLensError, match="not a file"):
        read_listed(tmp_path, "tokenizer.json")


def replaced(old, new, **of):
    return {"type": "Replace", "pattern": of or {"String": old}, "content": new}


DOUBLED = [replaced("l", "ll")] * 30
TWICE = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
TABLE = base64.b64encode(bytes(4) + b"l" * 9999 + bytes(1)).decode()
GROWING = {
    "doubled": {"normalizer": {"type": "Sequence", "normalizers": DOUBLED}},
    "nested": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": DOUBLED[:5]}] * 5}},
    "by a pattern": {"normalizer": {"type": "Sequence", "normalizers": [replaced("", "l", Regex="(?=l)")] * 30}},
    "at once": {"normalizer": replaced("l", "l" * 10**6)},
    "prepended": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "llll"}] * 9}},
    "by a table": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": TABLE}},
    "decoded": {"decoder": {"type": "Sequence", "decoders": DOUBLED}},
    "repeated": {"post_processor": dict(type="TemplateProcessing", single=TWICE[:1] * 9999, pair=TWICE, special_tokens={})},
}
"""Tokenizers that make a text longer without end: the first filled the memory and ended the process."""


@pytest.mark.parametrize("kind", ["hugging_face", "ours"])
@pytest.mark.parametrize("name", GROWING)
def test_a_tokenizer_that_makes_texts_longer_without_end_is_refused_on_every_door(name, kind, tmp_path):
    folder, (part,) = FOLDERS[kind](tmp_path / "m"), GROWING[name]
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **GROWING[name]}))
    if kind == "ours":
        stored = json.loads((folder / "config.json").read_text())
        stored["files"]["tokenizer.json"] = checksum(path.read_bytes())
        (folder / "config.json").write_text(json.dumps({**stored, "checksum": checksum_of_json(stored)}))
    doors = {"hugging_face": (HookedKVTransformer.from_pretrained, KVTransformerBridge.boot_transformers), "ours": ()}[kind]
    for door in (load, read_tokenizer, *doors):
        with pytest.raises(KVLensError, match=f"the {part} of .* may make a text more than 1000 times as long"):
            door(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.1.0.json")  # which Transformers reads in its place
    (folder / "tokenizer_config.json").write_text(json.dumps({"fast_tokenizer_files": ["tokenizer.1.0.json"]}))
    with pytest.raises(KVLensError, match="times as long"):
        read_tokenizer(folder)


def test_a_panic_of_the_tokenizers_library_is_an_error_like_any_other(tmp_path):
    folder = tiny_hf_folder(tmp_path / "m")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": replaced("", "x")}))
    for door in (load, HookedKVTransformer.from_pretrained, KVTransformerBridge.boot_transformers):
        with pytest.raises(KVLensError, match="cannot be loaded: PanicException"):
            door(folder)


def test_tokenizers_of_known_kinds_grow_little():
    sentencepiece = [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + b"l" * 33).decode()}]
    sentencepiece += [replaced("``", '"'), {"type": "NFKD"}, replaced("", "\u2581", Regex=" {2,}")]
    for parts, at_most in (
        ([{"type": "Prepend", "prepend": "\u2581"}, replaced(" ", "\u2581")], 2),
        (sentencepiece, 66),
        ([None, 5, "x", {"type": ["Replace"]}, {"type": "Replace", "pattern": 5, "content": "abc"}], 4),
    ):
        assert growth({"type": "Sequence", "normalizers": parts}) == at_most


@pytest.mark.parametrize("name", ["/dev/zero", "../secret.safetensors", "deep/pipe", "circle", "x" * 300, "", "a\0b", 5, None])
def test_an_index_names_files_inside_its_folder(name, tmp_path):
    folder = sharded(tmp_path / "m")
    shutil.copy(folder / "config.json", tmp_path / "secret.safetensors")
    (folder / "deep").mkdir()
    os.mkfifo(folder / "deep" / "pipe")
    os.symlink("circle", folder / "circle")
    index = folder / "model.safetensors.index.json"
    stored = json.loads(index.read_text())
    stored["weight_map"]["transformer.wte.weight"] = name
    index.write_text(json.dumps(stored))
    for read in (HookedKVTransformer.from_pretrained, read_tensors):
        with pytest.raises(KVLensError, match=r"inside the folder|not a file|is damaged|cannot read"):
            read(folder)


@pytest.mark.parametrize("name", ["/dev/zero", "../config.json", "\0"])
def test_the_files_of_a_model_of_ours_are_inside_its_folder(name, tmp_path):
    folder = ours(tmp_path / "m")
    stored = json.loads((folder / "config.json").read_text())
    stored["files"][name] = ""
    stored["checksum"] = checksum_of_json(stored)
    (folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(KVLensError, match="expected one inside the folder"):
        HookedKVTransformer.load(folder)


def test_a_link_to_a_file_is_a_file(tmp_path):
    """transformers' own cache holds links from a folder's names to files that stand elsewhere."""
    folder = tiny_hf_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    HookedKVTransformer.from_pretrained(folder)
    assert file_in("x", folder, "model.safetensors") == folder / "model.safetensors"


@pytest.mark.parametrize("text", [DEEP, LONG, f'{{"weight_map": {DEEP}}}'], ids=["deep", "long", "deeper"])
def test_json_beyond_what_python_reads_is_damage(text, tmp_path):
    for make, its_own in ((tiny_hf_folder, HookedKVTransformer.from_pretrained), (ours, HookedKVTransformer.load)):
        folder = make(tmp_path / make.__name__)
        for name in sorted(path.name for path in folder.glob("*.json")):
            whole = (folder / name).read_text()
            (folder / name).write_text(text)
            for read in (its_own, load):
                with pytest.raises(KVLensError):
                    read(folder)
            (folder / name).write_text(whole)
        its_own(folder)
    folder = sharded(tmp_path / "sharded")
    (folder / "model.safetensors.index.json").write_text(text)
    for read in (HookedKVTransformer.from_pretrained, read_tensors):
        with pytest.raises(KVLensError):
            read(folder)


@pytest.mark.parametrize(
    "change",
    [
        dict(format_version="9" * 5000),
        dict(format_version="\N{SUPERSCRIPT TWO}"),
        dict(kv_bias=DEEP),
        dict(kv_bias=LONG),
        dict(kv_bias="[]"),
        dict(kv_bias="null"),
        *(dict(features=value) for value in (5, [], {})),
        *(dict(fit=value) for value in (5, [1], "x")),
        *(dict(n_prompt_tokens=value) for value in (None, "x", [10**30], 10**4000, [[1]], {})),
        *(dict(fingerprint=value) for value in (None, 5, [], [[1]], {})),
    ],
    ids=lambda change: f"{next(iter(change))}={str(next(iter(change.values())))[:12]}",
)
def test_a_forged_bias_with_a_right_checksum_is_damage(change, tmp_path):
    path = tmp_path / "bias.safetensors"
    convert_prompt(linear_model(), torch.arange(4)[None]).save(path)
    tensors, metadata = read_checked_tensors(path, "test", FORMAT, FORMAT_VERSION)
    if next(iter(change)) in metadata:
        metadata |= change
    else:
        metadata["kv_bias"] = json.dumps({**json.loads(metadata["kv_bias"]), **change})
    path.write_bytes(checked_tensor_bytes(tensors, metadata))
    with pytest.raises(KVLensError):
        KVBias.load(path)


def test_saving_where_a_pipe_stands_for_the_configuration_waits_for_nothing(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(KVLensError, match="not empty"):
        small_model().save(tmp_path)


N_DAMAGES = 400
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
    rows = pa.Table.from_pandas(FRAME, preserve_index=False)
    write_table(path, schema, (rows[i : i + 40] for i in range(0, 120, 40)), {"a": MARK.decode()})


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
    for number in range(N_DAMAGES):
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
