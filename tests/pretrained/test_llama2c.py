"""Files of llama2.c: the model computes what run.c computes, the tokenizer gives its ids, and a damaged file is refused."""

import struct

import numpy as np
import pytest
import torch
from llama2c_reference import SIZES, checkpoint_bytes, encode, forward, random_arrays, tokenizer_bytes
from precision import LAW, relative_error

from kvlens import HookedKVTransformer, KVShiftConfig, convert_prompt
from kvlens.errors import KVLensError
from kvlens.pretrained.llama2c import read_llama2c_tokenizer

BYTES = [(f"<0x{byte:02X}>".encode(), 0.0) for byte in range(256)]
SPECIAL = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
WORDS = [(word.encode(), -float(i)) for i, word in enumerate(["ab", " a", "aab", "aa", "ba", " ", "a", "b", "é", "éa", "aaaa"])]
TOKENS = SPECIAL + BYTES + WORDS


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "tiny.bin"
    path.write_bytes(checkpoint_bytes(random_arrays(0)))
    return path


@pytest.fixture
def tokenizer_file(tmp_path):
    path = tmp_path / "tok.bin"
    path.write_bytes(tokenizer_bytes(TOKENS))
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_run_c(tmp_path, tied):
    arrays = random_arrays(1, tied=tied)
    (tmp_path / "m.bin").write_bytes(checkpoint_bytes(arrays))
    model = HookedKVTransformer.from_llama2c(tmp_path / "m.bin", dtype=torch.float64, device="cpu")
    tokens = [3, 1, 6, 6, 0, 2, 5, 4]
    expected = forward(arrays, tokens)
    assert relative_error(model(torch.tensor([tokens]))[0], torch.from_numpy(expected)) < LAW


def test_weights_are_kept_as_they_are_and_leave_no_tie_between_embedding_and_unembedding(checkpoint):
    arrays, model = random_arrays(0), HookedKVTransformer.from_llama2c(checkpoint, device="cpu")
    assert torch.equal(model.W_E, torch.from_numpy(arrays["embedding"]))
    assert torch.equal(model.W_U, torch.from_numpy(arrays["embedding"]).T)
    assert model.W_E.data_ptr() != model.W_U.data_ptr()
    assert model.tokenizer is None and model.cfg.model_name == "tiny" and float(model.b_U.detach().abs().max()) == 0.0


def test_ids_are_those_of_run_c(tokenizer_file):
    tokenizer = read_llama2c_tokenizer(tokenizer_file, len(TOKENS))
    generator = np.random.default_rng(0)
    texts = [
        "",
        "a",
        "é",
        "日本",
        " ",
        "ab ba",
        "\n",
        "a" * 17,
        *("".join(generator.choice(list("aabb é\n"), 12)) for _ in range(300)),
    ]
    for text in texts:
        assert tokenizer.encode(text) == encode(TOKENS, text), repr(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_ids_of_a_published_tokenizer_are_those_of_run_c(outside_data):
    path = outside_data / "tok512.bin"
    tokenizer, tokens = read_llama2c_tokenizer(path, 512), read_entries(path.read_bytes())
    text = (outside_data / "wikitext2-test.txt").read_text(encoding="utf-8")
    for start in range(0, 40_000, 400):
        piece = text[start : start + 400]
        if "<unk>" not in piece:  # a Hugging Face tokenizer reads it as the special token
            assert tokenizer.encode(piece) == encode(tokens, piece)
            assert tokenizer.decode(tokenizer.encode(piece), skip_special_tokens=True) == piece


def test_model_and_tokenizer_survive_a_save(tmp_path, tokenizer_file):
    sizes = {**SIZES, "vocab": len(TOKENS)}
    (tmp_path / "m.bin").write_bytes(checkpoint_bytes(random_arrays(2, sizes=sizes), sizes))
    model = HookedKVTransformer.from_llama2c(tmp_path / "m.bin", tokenizer_file, device="cpu")
    model.save(tmp_path / "saved")
    again = HookedKVTransformer.load(tmp_path / "saved", device="cpu")
    tokens = model.to_tokens("ab é")
    assert tokens[0].tolist() == encode(TOKENS, "ab é") and torch.equal(again.to_tokens("ab é"), tokens)
    assert torch.equal(model(tokens), again(tokens))


def test_the_file_is_no_longer_needed_and_its_model_converts_prompts(checkpoint):
    trained = HookedKVTransformer.from_llama2c(checkpoint, dtype=torch.float64, device="cpu")
    checkpoint.unlink()
    model = HookedKVTransformer.from_hooked_transformer(trained, attention="linear")
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    whole = model(tokens)[:, 4:]
    with model.kv_bias(convert_prompt(model, tokens[:, :4])):
        assert relative_error(model(tokens[:, 4:]), whole) < LAW


def changed(raw: bytes, at: int, number: int) -> bytes:
    return raw[: 4 * at] + struct.pack("<i", number) + raw[4 * at + 4 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"", "truncated: the header has 28 bytes, the file 0"),
        (lambda raw: raw[:27], "truncated: the header has 28 bytes, the file 27"),
        (
            lambda raw: raw[:-1],
            r"is truncated, or no llama2.c checkpoint: its header \(width 12, .* asks for [\d,]+ bytes, the file has",
        ),
        (lambda raw: raw + b"\0", "is too long, or no llama2.c checkpoint"),
        (lambda raw: changed(raw, 0, 0x616B3432), r"later export of llama2.c \(version 10\)"),
        (lambda raw: changed(raw, 0, 13), "heads that divide the width"),
        (lambda raw: changed(raw, 2, -2), "expected positive numbers"),
        (lambda raw: changed(raw, 3, 0), "expected positive numbers"),
        (lambda raw: changed(raw, 4, 2), "key-value heads that divide the heads"),
        (lambda raw: changed(raw, 5, 2**31 - 1), "is truncated, .* vocabulary 2147483647"),  # 200 GB, never allocated
        (lambda raw: raw[:40] + struct.pack("<f", float("nan")) + raw[44:], "damaged: embedding holds numbers that are not"),
        (lambda raw: b"PK\3\4" + raw[4:], "is truncated, or no llama2.c checkpoint"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(checkpoint, change, message):
    checkpoint.write_bytes(change(checkpoint.read_bytes()))
    with pytest.raises(KVLensError, match=message) as error:
        HookedKVTransformer.from_llama2c(checkpoint)
    assert str(checkpoint) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], r"truncated or damaged at token 269: it has 4 bytes, 3 are left"),
        (lambda raw: raw[:14], "at token 0: it has 5 bytes, 2 are left"),
        (lambda raw: raw[:6], "at token 0: 2 bytes are left, an entry begins with 8"),
        (lambda raw: raw[:8] + struct.pack("<i", -1) + raw[12:], "at token 0: its length is -1"),
        (lambda raw: raw[:8] + struct.pack("<i", 2**31 - 1) + raw[12:], "at token 0: its length is 2147483647"),
        (lambda raw: raw[:4] + struct.pack("<f", float("inf")) + raw[8:], "its score inf"),
        (lambda raw: raw[:12] + b"\xff" + raw[13:], "its bytes are not UTF-8"),
        (lambda raw: raw + struct.pack("<fi", 0, 1) + b"a", "has 271 tokens, the model's vocabulary 270"),
        (lambda raw: raw[:-12] + struct.pack("<fi", 0, 1) + b"a", "270 tokens, of which 269 differ"),
    ],
)
def test_a_tokenizer_that_is_not_whole_is_refused(tokenizer_file, change, message):
    tokenizer_file.write_bytes(change(tokenizer_file.read_bytes()))
    with pytest.raises(KVLensError, match=message) as error:
        read_llama2c_tokenizer(tokenizer_file, len(TOKENS))
    assert str(tokenizer_file) in str(error.value)


def test_a_file_that_is_not_there_and_a_tokenizer_of_another_model_are_refused(tmp_path, checkpoint, tokenizer_file):
    with pytest.raises(KVLensError, match=r"cannot read .*nowhere.bin: No such file"):
        HookedKVTransformer.from_llama2c(tmp_path / "nowhere.bin")
    with pytest.raises(KVLensError, match="has 270 tokens, the model's vocabulary 7: they do not belong together"):
        HookedKVTransformer.from_llama2c(checkpoint, tokenizer_file)


def read_entries(raw: bytes) -> list[tuple[bytes, float]]:
    at, entries = 4, []
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        entries.append((raw[at + 8 : at + 8 + length], score))
        at += 8 + length
    return entries


def load_stories260k(folder):
    return HookedKVTransformer.from_llama2c(folder / "stories260K.bin", folder / "tok512.bin", device="cpu")


def greedy(model, n):
    start = torch.tensor([[1]])
    return model.generate(start, max_new_tokens=n, do_sample=False, stop_at_eos=False, verbose=False)[0, 1:].tolist()


def test_greedy_text_is_the_published_one(outside_data):
    model = load_stories260k(outside_data)
    published = (outside_data / "stories260K-greedy.txt").read_text(encoding="utf-8")
    assert model.tokenizer.decode(greedy(model, 200)).strip() == published.strip()


def test_its_weights_under_linear_attention_convert_exactly(outside_data):
    trained = load_stories260k(outside_data)
    model = HookedKVTransformer.from_hooked_transformer(
        trained, attention="linear", kv_shift=KVShiftConfig(init="identity"), dtype=torch.float64
    )
    x = torch.randint(3, 512, (1, 90), generator=torch.Generator().manual_seed(0))
    with model.kv_bias(convert_prompt(model, x[:, :60])):
        new = model(x[:, 60:])
    assert relative_error(new, model(x)[:, 60:]) < LAW
