"""Files of llama2.c: the model computes what run.c computes, the tokenizer gives its ids, and a damaged file is refused.

First what llama2.c computes, written from ``run.c``: token by token in float64, and the greedy joining of its tokenizer.
"""

import struct

import numpy as np
import pytest
import torch
from precision import LAW, relative_error

from kvlens import HookedKVTransformer, KVShiftConfig, convert_prompt
from kvlens.errors import KVLensError
from kvlens.pretrained.llama2c import read_llama2c_tokenizer

SIZES = dict(d_model=12, d_mlp=10, n_layers=2, n_heads=3, n_kv_heads=1, vocab=7, n_ctx=9)


def random_arrays(seed: int, *, tied: bool = True, sizes: dict[str, int] = SIZES) -> dict[str, np.ndarray]:
    """Arrays of a checkpoint in the order of the file; the rotary tables are noise, which must not matter."""
    d, hidden, layers, heads, kv_heads, vocab, n_ctx = sizes.values()
    d_kv, table = kv_heads * d // heads, (n_ctx, d // heads // 2)
    shapes = dict(
        embedding=(vocab, d), rms_att=(layers, d), wq=(layers, d, d), wk=(layers, d_kv, d), wv=(layers, d_kv, d),
        wo=(layers, d, d), rms_ffn=(layers, d), w1=(layers, hidden, d), w2=(layers, d, hidden), w3=(layers, hidden, d),
        rms_final=(d,), cos=table, sin=table, **({} if tied else {"classifier": (vocab, d)}),
    )  # fmt: skip
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype("<f4") for name, shape in shapes.items()}


def checkpoint_bytes(arrays: dict[str, np.ndarray], sizes: dict[str, int] = SIZES) -> bytes:
    numbers = list(sizes.values())
    if "classifier" in arrays:
        numbers[5] *= -1
    return struct.pack("<7i", *numbers) + b"".join(array.tobytes() for array in arrays.values())


def tokenizer_bytes(tokens: list[tuple[bytes, float]]) -> bytes:
    longest = max(len(text) for text, _ in tokens)
    return struct.pack("<i", longest) + b"".join(struct.pack("<fi", score, len(text)) + text for text, score in tokens)


def forward(arrays: dict[str, np.ndarray], tokens: list[int], sizes: dict[str, int] = SIZES) -> np.ndarray:
    """``forward`` of run.c for one token after the other: logits [pos vocab]."""
    d, _, layers, heads, kv_heads, _, _ = sizes.values()
    d_head, group = d // heads, heads // kv_heads
    a = {name: array.astype(np.float64) for name, array in arrays.items()}
    keys, values, logits = [[] for _ in range(layers)], [[] for _ in range(layers)], []
    for pos, token in enumerate(tokens):
        x = a["embedding"][token].copy()
        for layer in range(layers):
            normed = _rmsnorm(x, a["rms_att"][layer])
            q, k, v = (a[name][layer] @ normed for name in ("wq", "wk", "wv"))
            q, k = _rotate(q, pos, d_head), _rotate(k, pos, d_head)
            keys[layer].append(k.reshape(kv_heads, d_head))
            values[layer].append(v.reshape(kv_heads, d_head))
            z = np.zeros((heads, d_head))
            for head in range(heads):
                query = q[head * d_head : (head + 1) * d_head]
                scores = np.array([key[head // group] @ query for key in keys[layer]]) / np.sqrt(d_head)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                z[head] = sum(w * value[head // group] for w, value in zip(weights, values[layer], strict=True))
            x += a["wo"][layer] @ z.reshape(-1)
            normed = _rmsnorm(x, a["rms_ffn"][layer])
            gate = a["w1"][layer] @ normed
            x += a["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (a["w3"][layer] @ normed))
        logits.append(a.get("classifier", a["embedding"]) @ _rmsnorm(x, a["rms_final"]))
    return np.stack(logits)


def _rmsnorm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean() + 1e-5)


def _rotate(x: np.ndarray, pos: int, d_head: int) -> np.ndarray:
    out = x.copy()
    for i in range(0, len(x), 2):
        angle = pos / 10000 ** ((i % d_head) / d_head)
        out[i] = x[i] * np.cos(angle) - x[i + 1] * np.sin(angle)
        out[i + 1] = x[i] * np.sin(angle) + x[i + 1] * np.cos(angle)
    return out


def encode(tokens: list[tuple[bytes, float]], text: str) -> list[int]:
    """``encode`` of run.c, with BOS: characters or bytes, then the best pair joined until none is left."""
    ids = {word: number for number, (word, _) in enumerate(tokens)}
    found: list[int] = []
    for character in (" " + text) if text else "":
        raw = character.encode()
        found += [ids[raw]] if raw in ids else [byte + 3 for byte in raw]
    while True:
        best, place = None, -1
        for i in range(len(found) - 1):
            joined = ids.get(tokens[found[i]][0] + tokens[found[i + 1]][0])
            if joined is not None and (best is None or tokens[joined][1] > tokens[best][1]):
                best, place = joined, i
        if best is None:
            return [1, *found]
        found[place : place + 2] = [best]


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
        (lambda raw: raw[:-1], r"truncated or damaged at token 269: its length is 4 and its score .*, 3 bytes are left"),
        (lambda raw: raw[:14], "at token 0: its length is 5"),
        (lambda raw: raw[:6], "at token 0: unpack_from requires"),
        (lambda raw: raw[:8] + struct.pack("<i", -1) + raw[12:], "at token 0: its length is -1"),
        (lambda raw: raw[:8] + struct.pack("<i", 2**31 - 1) + raw[12:], "at token 0: its length is 2147483647"),
        (lambda raw: raw[:4] + struct.pack("<f", float("inf")) + raw[8:], "its score inf"),
        (lambda raw: raw[:12] + b"\xff" + raw[13:], "at token 0: 'utf-8' codec"),
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
