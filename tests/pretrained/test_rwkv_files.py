"""RWKV's files: the model computes what the paper says, in every type of file; damaged, hostile and other files are refused."""

import functools
import json
import random
import struct
import time
import tracemalloc

import numpy as np
import plain_rwkv as plain
import pytest
import torch
from precision import LAW, relative_error
from safetensors.torch import save_file

from kvlens import KVLensError, KVTransformerBridge, load
from kvlens.cli import main

pytestmark = pytest.mark.usefixtures("no_network", "without_gradients")

VERSIONS = ["5.1", "5.2", "6"]
TEXT = '"in the beginning, in the end"'
drawn = functools.cache(plain.drawn)


@pytest.fixture
def written(tmp_path):
    """``written(bytes)``: the path of a file that holds them."""

    def write(whole):
        (tmp_path / "model.bin").write_bytes(whole)
        return tmp_path / "model.bin"

    return write


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [plain.FLOAT32, plain.FLOAT16, plain.Q5_1])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_computes_what_the_paper_says(version, kind, written):
    model = load(str(written(plain.file_bytes(drawn(version), kind))), dtype=torch.float64)
    tokens = list(TEXT.encode())
    expected = torch.from_numpy(plain.logits(plain.as_stored(drawn(version), kind), tokens))
    assert isinstance(model, KVTransformerBridge) and model.original_model.config.version == version
    assert relative_error(model(torch.tensor([tokens]))[0], expected) < LAW
    assert relative_error(model(TEXT)[0], expected) < LAW  # bytes are the tokens, and no BOS stands before them


def test_bytes_of_any_text_come_back(written):
    model = load(written(plain.file_bytes(drawn("5.1"))), verify=False)
    for text in ("plain", "ä€𝄞\n\t\x00 <0x41>", "Ā ÿ"):
        tokens = model.to_tokens(text)[0]
        assert tokens.tolist() == list(text.encode()) and model.to_string(tokens) == text


def test_a_vocabulary_that_is_not_of_bytes_has_token_ids(written):
    weights = {name: x[:99] if name in ("emb.weight", "head.weight") else x for name, x in drawn("6").items()}
    model = load(written(plain.file_bytes(weights, header=(100, 99, plain.WIDTH, plain.LAYERS))))
    assert model.tokenizer is None and model(torch.arange(9)[None]).shape == (1, 9, 99)


@pytest.mark.usefixtures("short_answers")
def test_the_command_line_takes_a_file(written, capsys):
    path = written(plain.file_bytes(drawn("6")))
    assert main(["explain", "--model", str(path), "--prompt", "the cat sat.", "--text", " the"]) == 0
    assert capsys.readouterr().out


def without(*names):
    return lambda weights: {name: x for name, x in weights.items() if name not in names}


def renamed(old, new):
    return lambda weights: {name.replace(old, new): x for name, x in weights.items()}


def changed(name, x):
    return lambda weights: {**weights, name: np.asarray(x, dtype=np.float32)}


NAN = np.full(plain.WIDTH, np.nan)
REFUSED = {
    "RWKV-4": (lambda weights: {n: x for n, x in weights.items() if "att.ln_x" not in n}, "this is RWKV-4, .* 5.1, 5.2 and 6"),
    "RWKV-7": (
        changed("blocks.0.att.r_k", np.ones((4, 16))),
        "this is RWKV-7, which .*generalized delta rule; it reads RWKV 5.1",
    ),
    "none": (renamed("blocks.0.att.", "blocks.0.other."), "its first layer is that of no version of RWKV"),
    "a tensor less": (without("blocks.1.ln2.bias"), "it lacks 'blocks.1.ln2.bias'"),
    "no heads": (without("blocks.0.att.time_decay"), "it has no blocks.0.att.time_decay"),
    "a tensor more": (changed("blocks.2.ln1.bias", NAN), "it has a tensor 'blocks.2.ln1.bias'"),
    "another shape": (
        changed("blocks.1.att.key.weight", np.ones((64, 63))),
        r"key.weight has shape \[64, 63\], expected \[64, 64\]",
    ),
    "turned": (changed("blocks.1.ffn.key.weight", np.ones((64, 96))), r"shape \[64, 96\], expected \[96, 64\]"),
    "no number": (changed("ln_out.bias", NAN), "ln_out.bias holds numbers that are not finite"),
    "a decay above 1": (changed("blocks.1.att.time_decay", np.full((4, 16, 1), 1.5)), "a decay of 1.5 is damaged"),
    "heads that do not divide": (
        changed("blocks.0.att.time_decay", np.full((5, 16, 1), 0.5)),
        "5 heads do not divide a width of 64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_of_something_else_is_refused(name, written):
    change, says = REFUSED[name]
    with pytest.raises(KVLensError, match=says):
        load(written(plain.file_bytes(change(drawn("5.2")))))


def number(place, value):
    """A change of one of the numbers of the header, or of the first tensor's entry, which stands behind it."""
    return lambda whole: whole[: 4 * place] + struct.pack("<i", value) + whole[4 * place + 4 :]


HOSTILE = {
    "another version of the format": (number(1, 102), r"its header is \(102, .*; expected version 100 or 101"),
    "no width": (number(3, 0), "sizes above 0"),
    "a negative width": (number(3, -64), "sizes above 0"),
    "many layers": (number(4, 2**31 - 1), r"its header counts 2147483647 layers, and it has \d+ tensors"),
    "a layer more": (number(4, 3), "it lacks 'blocks.2"),
    "a large vocabulary": (number(2, 2**31 - 1), r"emb.weight has shape \[256, 64\], expected \[2147483647, 64\]"),
    "many axes": (number(6, 2**30), "has 1073741824 axes"),
    "no axes": (number(6, 0), "has 0 axes"),
    "a long name": (number(7, 2**31 - 1), "a name of 2147483647 bytes"),
    "a negative length": (number(7, -1), "a name of -1 bytes"),
    "Q4_0": (number(8, 2), "is of type Q4_0, which kvlens does not read; expected float32, float16 or Q5_1"),
    "an unknown type": (number(8, 77), "is of type 77; expected"),
    "a long axis": (number(9, 2**31 - 1), "ends behind the end of the file"),
    "a negative axis": (number(9, -64), r"has shape \[256, -64\]"),
    "an empty axis": (number(9, 0), r"has shape \[256, 0\]"),
    "blocks that do not fit": (lambda whole: number(9, 63)(number(8, 8)(whole)), "in blocks of 32"),
    "more behind": (lambda whole: whole + bytes(5), "damaged or not rwkv.cpp's"),
    "a tensor twice": (lambda whole: whole + plain.tensor_bytes("ln_out.bias", np.ones(64), 0), "or is there twice"),
    "no text": (lambda whole: whole.replace(b"ln_out.bias", b"ln_out\xff\xffias"), "can't decode"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_before_anything_is_made_of_it(name, written):
    change, says = HOSTILE[name]
    path = written(change(plain.file_bytes(drawn("5.2"))))
    started = time.process_time()
    tracemalloc.start()
    with pytest.raises(KVLensError, match=says):
        load(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.process_time() - started < 5 and most < 2**24


def test_a_truncated_file_is_refused(written):
    whole = plain.file_bytes(drawn("6"), plain.Q5_1)
    places = [4, 23, 24, 30, 35, 60, *random.Random(0).choices(range(60, len(whole)), k=40), len(whole) - 1]
    for length in places:
        with pytest.raises(KVLensError, match="damaged or not rwkv.cpp's"):
            load(written(whole[:length]))


def test_a_changed_header_is_refused_or_changes_no_number(written):
    """Of the header, and of what stands before a tensor's numbers."""
    whole = plain.file_bytes(drawn("6"), plain.FLOAT16)
    starts = [(whole.index(name.encode()), name, x.ndim) for name, x in drawn("6").items()]
    entries = [place for at, name, n_axes in starts for place in range(at - 12 - 4 * n_axes, at + len(name))]
    draw, refused = random.Random(1), 0
    for place in draw.choices([*range(4, 24), *entries], k=80):
        other = bytes([whole[place] ^ (1 << draw.randrange(8))])
        path = written(whole[:place] + other + whole[place + 1 :])
        try:
            model = load(path, verify=False, dtype=torch.float64)
        except KVLensError:
            refused += 1
        else:
            expected = plain.logits(plain.as_stored(drawn("6"), plain.FLOAT16), list(TEXT.encode()))
            assert relative_error(model(TEXT)[0], torch.from_numpy(expected)) < LAW, place
    assert refused >= 70


# --- folders of RWKV-6, as flash-linear-attention writes them ---

FLA = dict(
    vocab_size=plain.VOCAB, hidden_size=plain.WIDTH, num_heads=plain.HEADS, num_hidden_layers=plain.LAYERS, expand_k=1.0,
    expand_v=1.0, intermediate_size=plain.INNER, proj_low_rank_dim=plain.RANK, gate_low_rank_dim=plain.DECAY_RANK,
    norm_eps=1e-5, norm_bias=True, norm_first=True, hidden_act="sqrelu", attn=None, tie_word_embeddings=False,
    model_type="rwkv6", architectures=["RWKV6ForCausalLM"],
)  # fmt: skip


def fla_tensors(weights):
    """The weights by the names, and in the orders, of ``fla/layers/rwkv6.py``: what is mixed for r, w, k, v and g."""
    order = ["wkvrg".index(x) for x in "rwkvg"]
    found = {"model.embeddings.weight": weights["emb.weight"], "lm_head.weight": weights["head.weight"]}
    norms = {"model.layers.0.pre_norm": "blocks.0.ln0", "model.norm": "ln_out"}
    for layer in range(plain.LAYERS):
        at, of = f"model.layers.{layer}.", plain._below(f"blocks.{layer}.", weights)
        norms |= {f"{at}attn_norm": f"blocks.{layer}.ln1", f"{at}ffn_norm": f"blocks.{layer}.ln2"}
        norms[f"{at}attn.g_norm"] = f"blocks.{layer}.att.ln_x"
        low = of["att.time_maa_w1"].reshape(5, plain.RANK, -1)[order]
        found[f"{at}attn.x_proj.0.linear.weight"] = low.reshape(5 * plain.RANK, -1)
        found[f"{at}attn.x_proj.2.weight"] = of["att.time_maa_w2"][order].transpose(1, 0, 2).reshape(plain.WIDTH, -1)
        found[f"{at}attn.x_bias"] = np.stack([of[f"att.time_maa_{x}"] for x in "rwkvg"])
        found[f"{at}attn.x_proj.0.mu"] = of["att.time_maa_x"]
        found[f"{at}attn.w_proj.linear.lora.0.weight"] = of["att.time_decay_w1"]
        found[f"{at}attn.w_proj.linear.lora.2.weight"] = of["att.time_decay_w2"]
        found[f"{at}attn.w_proj.linear.lora.2.bias"] = of["att.time_decay"].reshape(-1)
        found[f"{at}attn.bonus"] = of["att.time_faaaa"].reshape(plain.HEADS, -1)
        for name, theirs in (("receptance", "r"), ("key", "k"), ("value", "v"), ("gate", "g")):
            found[f"{at}attn.{theirs}_proj.linear.weight"] = of[f"att.{name}.weight"]
        found[f"{at}attn.o_proj.weight"] = of["att.output.weight"]
        for name, mixed in (("key", "k"), ("receptance", "r")):
            found[f"{at}ffn.{name}.mu"] = of[f"ffn.time_maa_{mixed}"]
            found[f"{at}ffn.{name}.linear.weight"] = of[f"ffn.{name}.weight"]
        found[f"{at}ffn.value.weight"] = of["ffn.value.weight"]
    found |= {f"{ours}.{part}": weights[f"{theirs}.{part}"] for ours, theirs in norms.items() for part in ("weight", "bias")}
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in found.items()}


@pytest.fixture
def folder(tmp_path):
    """``folder(tensors, **changes of the configuration)``."""

    def write(tensors=None, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**FLA, **changes}))
        save_file(fla_tensors(drawn("6")) if tensors is None else tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


def test_a_folder_is_the_file_with_other_names(folder, written, monkeypatch):
    """But for the epsilon of the norm of heads, which flash-linear-attention has no field for."""
    found = load(folder(), dtype=torch.float64)
    assert found.original_model.config.head_norm_eps == 1e-5 and found.tokenizer is None
    monkeypatch.setattr("kvlens.pretrained.rwkv_files.HEAD_NORM_EPS", 1e-5)
    expected = load(written(plain.file_bytes(drawn("6"))), dtype=torch.float64)
    tokens = torch.tensor([list(TEXT.encode())])
    assert relative_error(found(tokens), expected(tokens)) < LAW


def test_values_wider_than_keys_and_norms_without_a_bias(folder):
    tensors = fla_tensors(drawn("6"))
    half = lambda name: tensors[name].unflatten(0, (plain.HEADS, -1))[:, :8].flatten(0, 1)  # noqa: E731
    for layer in range(plain.LAYERS):
        at = f"model.layers.{layer}.attn."
        for name in (
            "r_proj.linear.weight",
            "k_proj.linear.weight",
            "w_proj.linear.lora.2.weight",
            "w_proj.linear.lora.2.bias",
        ):
            tensors[at + name] = half(at + name).contiguous()
        tensors[f"{at}bonus"] = tensors[f"{at}bonus"][:, :8].contiguous()
    bare = {name: x for name, x in tensors.items() if not name.endswith("norm.bias") or "g_norm" in name}
    model = load(folder(bare, expand_k=0.5, norm_bias=False))
    assert (model.layers()[0].parts[0].mixer.d_k, model.layers()[0].parts[0].mixer.d_v) == (8, 16)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(model_type="rwkv7"), "holds RWKV-7; kvlens reads folders of RWKV-6"),
        (dict(model_type="rwkv5"), "holds RWKV-5; .* and files of rwkv.cpp with RWKV 5.1, 5.2 and 6"),
        (dict(model_type="rwkv"), "holds RWKV-4"),
        (dict(attn={"layers": [1]}), "attn of the configuration is .*; RWKV-6 has None"),
        (dict(hidden_act="relu"), "hidden_act of the configuration is 'relu'"),
        (dict(num_hidden_layers=10**8), "num_hidden_layers of the configuration is 100000000"),
        (dict(num_hidden_layers=1), "no place for: .*model.layers.1"),
        (dict(hidden_size=10**7), "the configuration describes .* weights|not those of its configuration"),
        (dict(num_heads=0), "not those of its configuration"),
        (dict(num_heads="four"), "not those of its configuration"),
        (dict(num_heads=8), r"mixer.bonus in .* has another shape than .*: \[4, 16\] for \[8, 8\]"),
        (dict(intermediate_size=97), r"mlp.key.weight in .* has another shape than its configuration says: \[96, 64\] for"),
        (dict(norm_eps=float("inf")), "norm_eps of the configuration is inf"),
    ],
)
def test_folders_that_cannot_be_read_are_refused(changes, says, folder):
    with pytest.raises(KVLensError, match=says):
        load(folder(**changes))


def test_a_pickle_and_missing_tensors_are_refused(folder):
    tensors = fla_tensors(drawn("6"))
    missing = {name: x for name, x in tensors.items() if name != "model.layers.1.attn.bonus"}
    with pytest.raises(KVLensError, match=r"not those of its configuration \(KeyError: 'model.layers.1.attn.bonus'"):
        load(folder(missing))
    path = folder(tensors)
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    with pytest.raises(KVLensError, match="holds no safetensors, and kvlens reads RWKV from no pickle"):
        load(path)
