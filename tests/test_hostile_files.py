"""Only files are read, only those inside a folder, and JSON beyond what Python reads is damage: nothing hangs or is raw."""

import json
import os
import shutil
import sys

import pytest
import torch
from small_models import linear_model, small_model
from tiny_hf import tiny_hf_model, tiny_tokenizer

from kvlens import HookedKVTransformer, KVBias, KVLensError, convert_prompt, load
from kvlens.files import checksum_of_json, file_in, read_listed
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.kv_bias.storage import FORMAT, FORMAT_VERSION
from kvlens.pretrained import read_tensors
from kvlens.tokenizer import read_tokenizer

pytestmark = pytest.mark.usefixtures("no_network")

DEEP = "[" * 100_000 + "]" * 100_000
LONG = '{"a": ' + "9" * (sys.get_int_max_str_digits() + 700) + "}"


def hugging_face(folder):
    tiny_hf_model("gpt2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def sharded(folder):
    tiny_hf_model("gpt2").save_pretrained(folder, max_shard_size="20KB")
    return folder


def ours(folder):
    HookedKVTransformer.from_pretrained("x", hf_model=tiny_hf_model("gpt2"), tokenizer=tiny_tokenizer()).save(folder)
    return folder


FOLDERS = {"hugging_face": hugging_face, "sharded": sharded, "ours": ours}
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


@pytest.mark.parametrize("name", ["/dev/zero", "../secret.safetensors", "deep/pipe", "", "a\0b", 5, None])
def test_an_index_names_files_inside_its_folder(name, tmp_path):
    folder = sharded(tmp_path / "m")
    shutil.copy(folder / "config.json", tmp_path / "secret.safetensors")
    (folder / "deep").mkdir()
    os.mkfifo(folder / "deep" / "pipe")
    index = folder / "model.safetensors.index.json"
    stored = json.loads(index.read_text())
    stored["weight_map"]["transformer.wte.weight"] = name
    index.write_text(json.dumps(stored))
    for read in (HookedKVTransformer.from_pretrained, read_tensors):
        with pytest.raises(KVLensError, match=r"inside the folder|not a file|is damaged"):
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
    folder = hugging_face(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    HookedKVTransformer.from_pretrained(folder)
    assert file_in("x", folder, "model.safetensors") == folder / "model.safetensors"


@pytest.mark.parametrize("text", [DEEP, LONG, f'{{"weight_map": {DEEP}}}'], ids=["deep", "long", "deeper"])
def test_json_beyond_what_python_reads_is_damage(text, tmp_path):
    for make, its_own in ((hugging_face, HookedKVTransformer.from_pretrained), (ours, HookedKVTransformer.load)):
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
