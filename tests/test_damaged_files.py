"""One flipped bit, or a file that ends too early: what was saved is refused, or read as what it was."""

import json
import random
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from kvlens.analyses.batch.storage import Journal, read_parquet, to_bytes, write_parquet
from kvlens.analyses.batch.workers import REFUSED, PromptResult
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import SETTINGS, run, tiny_model, tiny_task, weights
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import HookedKVTransformer, KVBias, KVLensError, convert_prompt
from kvlens.files import read_listed
from kvlens.kv_bias.fields import TENSORS
from kvlens.training import TrainSettings
from kvlens.training.checkpoint import CheckpointFolder
from kvlens.training.run import Run, loss_of
from kvlens.zoo import folder_of

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
    raw = [getattr(bias, name).contiguous().view(torch.uint8).flatten().tolist() for name in TENSORS]
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
    taken_up = Run(tiny_model(), task, loss_of(task), TrainSettings.of(SETTINGS))
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


def outcomes():
    draw = random.Random(0)
    done = [PromptResult(0, i, f"prompt {i}", n_rows=i, rows=draw.randbytes(900)) for i in range(40)]
    return [*done, PromptResult(0, 40, "bad", kind=REFUSED, error="too long")]


def test_a_journal(tmp_path):
    path = tmp_path / "out.partial"
    with Journal(path, {"seed": 1}) as journal:
        journal.add(outcomes())

    def held():
        with Journal(path, {"seed": 1}) as journal:
            return list(journal.tables()), list(journal.failures()), journal.progress()

    whole, original = path.read_bytes(), held()
    for seed in range(DAMAGES):
        damage(path, whole, seed)
        try:
            rows, failures, progress = held()
        except KVLensError:
            continue
        assert len(path.read_bytes()) <= len(whole) and progress.n_done < 41, "the end is cut off, as by a kill"
        assert rows == original[0][: len(rows)] and not failures
    path.write_bytes(whole)
    assert held() == original and original[2].n_done == 41


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
    frames = [
        pd.DataFrame({"model": "m", "prompt_id": f"p{i}", "head": range(40), "kl": np.random.default_rng(i).normal(size=40)})
        for i in range(3)
    ]
    schema = pa.Schema.from_pandas(frames[0], preserve_index=False)
    write_parquet(path, schema, (to_bytes(frame, schema) for frame in frames), {"a": 1})
    assert [rows for *_, rows in read_parquet(path, schema)] == [to_bytes(frame, schema) for frame in frames]
    assert n_refused(lambda: list(read_parquet(path, schema)), path) > DAMAGES / 2
