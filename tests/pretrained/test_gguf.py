"""GGUF files: the model that Transformers reads of them, and files that are damaged, hostile or of another kind."""

import json
import math
import os
import random
import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_mutations import mutated
from tiny_hf import tiny_hf_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlens import Chat, HookedKVTransformer, KVLensError, KVTransformerBridge, load, loading
from kvlens.cli import main
from kvlens.pretrained import gguf as reader

gguf = pytest.importorskip("gguf", reason="GGUF files are read by the package gguf: pip install 'kvlens[gguf]'")

pytestmark = pytest.mark.usefixtures("no_network", "without_gradients")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


def write(path: Path, architecture="llama", further=None, template=TEMPLATE, **changes) -> Path:
    """A tiny Llama as llama.cpp's converter names its parts."""
    tokenizer = tiny_tokenizer()
    model = tiny_hf_model("llama", vocab_size=len(tokenizer))
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    numbers = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
    }
    for name, number in {**numbers, **changes}.items():
        writer.add_uint32(f"{architecture}.{name}", number)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    writer.add_token_types([3, *[1] * (len(tokenizer) - 1)])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(template)
    for name, weight in {**model.state_dict(), **(further or {})}.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "model.gguf")


@pytest.mark.parametrize("front_end", [HookedKVTransformer, KVTransformerBridge])
def test_the_model_of_a_file_is_transformers_own(front_end, file, monkeypatch):
    if front_end is KVTransformerBridge:  # as for a family that only the bridge runs
        monkeypatch.setattr(loading, "SUPPORTED_ARCHITECTURES", ())
    model = load(str(file))
    plain = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float64)
    tokens = model.to_tokens("the cat sat on the mat")
    found = model(tokens).log_softmax(-1).double()
    expected = plain(tokens).logits.log_softmax(-1)
    # weights of 32 bits, three layers of sums of at most 37 terms
    assert isinstance(model, front_end)
    assert float((found - expected).norm() / expected.norm()) < 100 * torch.finfo(torch.float32).eps
    assert model.tokenizer.chat_template == TEMPLATE
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert model.tokenizer("the dog sat", add_special_tokens=False)["input_ids"] == theirs("the dog sat")["input_ids"]


def test_entries_are_read_once_and_the_package_is_left_as_it_was(file, monkeypatch):
    import gguf
    from transformers import modeling_gguf_pytorch_utils as theirs

    made, parsed, own = [], [], theirs._gguf_parse_value

    class Counted(gguf.GGUFReader):
        def __init__(self, path):
            made.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    monkeypatch.setattr(theirs, "_gguf_parse_value", lambda stored, kind: parsed.append(stored) or own(stored, kind))
    before = gguf.GGUFReader, gguf.get_tensor_name_map, theirs._gguf_parse_value
    load(str(file), verify=False)
    assert len(made) == 1 and (gguf.GGUFReader, gguf.get_tensor_name_map, theirs._gguf_parse_value) == before
    assert len(parsed) == len({id(stored) for stored in parsed}) > 100
    monkeypatch.setattr(reader, "read_model", lambda *args, **more: 1 / 0)
    with pytest.raises(KVLensError, match="division by zero"):
        load(str(file))
    assert (gguf.GGUFReader, gguf.get_tensor_name_map, theirs._gguf_parse_value) == before


def test_nothing_is_written_to_stderr_which_a_notebook_shows_red(file, capfd):
    load(file)
    assert capfd.readouterr().err == ""


def test_a_fingerprint_is_of_the_weights_and_not_of_the_place(file, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{")  # Transformers gets the file alone
    (elsewhere / "adapter_config.json").write_text("{")
    shutil.copy(file, elsewhere / "renamed.gguf")
    assert load(file).fingerprint() == load(elsewhere / "renamed.gguf").fingerprint()


def test_bfloat16(file):
    assert {weight.dtype for weight in load(file, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


@pytest.mark.usefixtures("short_answers")
def test_the_command_line_takes_a_file(file, capsys):
    assert main(["explain", "--model", str(file), "--prompt", "the cat sat on the mat.", "--text", " the dog"]) == 0
    assert capsys.readouterr().out


def test_numbers_that_transformers_leaves_out_are_told(tmp_path):
    path = write(tmp_path / "m.gguf", further={"rope_freqs.weight": torch.ones(2)})
    with pytest.warns(UserWarning, match=r"its reader leaves some out \(rope_freqs.weight"):
        load(path)


def test_without_the_package_the_extra_is_named(file, monkeypatch):
    monkeypatch.setattr(reader, "is_gguf_available", lambda: False)
    with pytest.raises(KVLensError, match=r"is a GGUF file, .* the package gguf: pip install 'kvlens\[gguf\]'"):
        load(file)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(architecture="rwkv6"), "cannot read the GGUF file .* of the architecture 'rwkv6' .*; it reads llama, "),
        (dict(block_count=10**8), "num_hidden_layers of the configuration is 100000000, and the weights in .* have 3 layers"),
        (dict(block_count=4), "have 3 layers"),
        (dict(embedding_length=24 * 10**6), "the configuration describes .* weights, and .* other shapes"),
        (dict(context_length=0), "max_position_embeddings of the configuration is 0"),
        (dict(feed_forward_length=38), r"9 weights in .* other shapes .*down_proj.weight \[24, 37\] for \[24, 38\]"),
    ],
)
def test_files_that_cannot_be_read_are_refused(changes, says, tmp_path):
    path = write(tmp_path / "m.gguf", **changes)
    with pytest.raises(KVLensError, match=says):
        load(path)


def test_a_damaged_file_is_refused(file, tmp_path):
    whole = file.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for length in (0, 3, 4, 23, 24, 100, len(whole) // 4, len(whole) // 2, len(whole) - 1000):
        damaged.write_bytes(whole[:length])
        with pytest.raises(KVLensError):
            load(damaged)
    for at in (8, 16, 24, whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8):
        # a length that Transformers' reader would follow
        damaged.write_bytes(whole[:at] + struct.pack("<Q", 2**60) + whole[at + 8 :])
        with pytest.raises(KVLensError, match=r"damaged or no GGUF file \(a length of 1152921504606846976 in a file"):
            load(damaged)
    damaged.write_bytes(whole[:4] + struct.pack(">I", 3) + whole[8:])
    with pytest.raises(KVLensError, match="version 50331648 of the format, expected 2 or 3, little-endian"):
        load(damaged)


def at_the_place(name: str, places: Callable[[int], int]):
    """A change of where a tensor is said to be: its number of bytes from the first one, at the end of its entry."""

    def change(whole: bytes) -> bytes:
        key = struct.pack("<Q", len(name)) + name.encode()
        at = whole.index(key) + len(key)
        at += 4 + 8 * struct.unpack_from("<I", whole, at)[0] + 4
        return whole[:at] + struct.pack("<Q", places(struct.unpack_from("<Q", whole, at)[0])) + whole[at + 8 :]

    return change


def all_at_the_first(whole: bytes) -> bytes:
    for name in re.findall(rb"(?:blk\.\d\.)?[a-z_]+\.weight", whole):
        whole = at_the_place(name.decode(), lambda place: 0)(whole)
    return whole


def entry(name: str, value: bytes):
    """A change of what stands behind the name of an entry: its type and its value."""

    def change(whole: bytes) -> bytes:
        at = whole.index(name.encode()) + len(name)
        return whole[:at] + value + whole[at + len(value) :]

    return change


def more(name: str, value: bytes):
    """A further entry, in front of all others."""

    def change(whole: bytes) -> bytes:
        n = struct.unpack_from("<Q", whole, 16)[0]
        added = struct.pack("<Q", len(name)) + name.encode() + value
        return whole[:16] + struct.pack("<Q", n + 1) + added + whole[24:]

    return change


FLOAT, STRINGS = struct.pack("<I", 6), struct.pack("<II", 9, 8)
BASE, EPS = "llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"
VALUES, NORM = "blk.1.attn_v.weight", "blk.1.attn_norm.weight"
LAST = "output_norm.weight"
MANY, LONG = 10**6, 2 * 10**7
DAMAGED = {
    "two at one place": (at_the_place(VALUES, lambda place: 0), rf"{VALUES}' of shape .* is at 0, expected \d+"),
    "all at the first": (all_at_the_first, "is at 0, expected"),
    "over the one before": (at_the_place(VALUES, lambda place: place - 32), "is at .* expected"),
    "between two steps": (at_the_place(NORM, lambda place: place + 4), "is at .* expected"),
    "behind the end": (at_the_place(LAST, lambda place: place + 2**20), "is at .* expected"),
    "beyond all files": (at_the_place(LAST, lambda place: 2**63), "is at 9223372036854775808, expected"),
    "more behind": (lambda whole: whole + bytes(64), r"its tensors end at byte \d+, and the file has"),
    "an infinite base": (entry(BASE, FLOAT + struct.pack("<f", math.inf)), "rope_theta of the configuration is inf"),
    "a base that is none": (entry(BASE, FLOAT + struct.pack("<f", math.nan)), "rope_theta of the configuration is nan"),
    "a base of 2**63": (entry(BASE, FLOAT + struct.pack("<f", 2.0**63)), "rope_theta of the configuration is 9.2"),
    "an epsilon of 1e30": (
        entry(EPS, FLOAT + struct.pack("<f", 1e30)),
        "rms_norm_eps of the configuration is 1.*to 0.1",
    ),
    "many strings": (more("general.tags", STRINGS + struct.pack("<Q", MANY) + bytes(8 * MANY)), "up to 1,000,000 in an array"),
    "a long string": (
        more("tokenizer.ggml.model_2", struct.pack("<IQ", 8, LONG) + b"x" * LONG),
        r"bytes of metadata, .* are too many for \d+ tokens",
    ),
    "a name twice": (more(EPS, FLOAT + struct.pack("<f", 1e-6)), f"two entries or tensors are called '{EPS}'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_would_be_other_numbers_or_take_long_is_refused(name, file):
    change, says = DAMAGED[name]
    changed = change(file.read_bytes())
    file.write_bytes(changed)
    started = time.perf_counter()
    with pytest.raises(KVLensError, match=says):
        load(file)
    assert time.perf_counter() - started < 20  # these took minutes


def changes_of(seeds, tmp_path):
    """How many changed headers were refused; that no other changes a number, and none takes long."""
    whole = entry(BASE, FLOAT + struct.pack("<f", 500))(write(tmp_path / "m.gguf").read_bytes())
    whole = entry(EPS, FLOAT + struct.pack("<f", 1e-3))(whole)  # what Transformers takes where there is none is another number
    path, tokens, refused = tmp_path / "m.gguf", torch.arange(11)[None], 0
    path.write_bytes(whole)
    logits, ids = load(path)(tokens), load(path).tokenizer("the cat sat")["input_ids"]
    for seed in seeds:
        part, changed = mutated(whole, random.Random(seed))
        path.unlink()
        path.write_bytes(changed)
        started = time.perf_counter()
        try:
            model = load(path)
        except KVLensError:
            refused += 1
        else:
            assert torch.equal(model(tokens), logits), (seed, part)
            of_tokenizer = part == "name" or part.startswith(("text", "value"))  # which nothing contradicts
            assert of_tokenizer or model.tokenizer("the cat sat")["input_ids"] == ids, (seed, part)
        assert time.perf_counter() - started < 20, (seed, part)
    return refused


def test_a_changed_header_is_refused_or_changes_no_number(tmp_path):
    assert changes_of(range(40), tmp_path) >= 20


@pytest.mark.slow
def test_many_changed_headers_are_refused_or_change_no_number(tmp_path):
    assert changes_of(range(1000, 1300), tmp_path) >= 200


def test_the_template_of_a_file_runs_within_bounds(tmp_path):
    model = load(write(tmp_path / "m.gguf", template="{{ 'a' * 10**10 }}"))
    with pytest.raises(KVLensError, match="it makes more than 1,000,070 characters"):
        Chat([{"role": "user", "content": "who"}]).text(model)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """Its permissions do not matter to everyone; a process' memory cannot be read at its beginning, nor links in a circle."""
    os.symlink("/proc/self/mem", tmp_path / "memory.gguf")
    os.symlink("circle.gguf", tmp_path / "circle.gguf")
    with pytest.raises(KVLensError, match=r"cannot read .*memory.gguf: Input/output error"):
        load(tmp_path / "memory.gguf")
    for door in (load, HookedKVTransformer.from_pretrained, KVTransformerBridge.boot_transformers):
        with pytest.raises(KVLensError):
            door(tmp_path / "circle.gguf")


def test_not_a_number_is_named(tmp_path):
    path = write(tmp_path / "m.gguf", further={"model.norm.weight": torch.full((24,), torch.nan)})
    with pytest.raises(KVLensError, match=r"hold NaN or infinity: \['model.norm.weight'\]"):
        load(path)
