"""What llama2.c computes, written from ``run.c``: token by token in float64, and the greedy joining of its tokenizer."""

import struct

import numpy as np

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
