"""RWKV-5.1, 5.2 and 6 in numpy, written from the paper: one token after the other; and the files of rwkv.cpp.

Weights go by the names of rwkv.cpp's files. Nothing here is shared with kvlens.

Source: Eagle and Finch (2404.05892), eq. 3-18; https://github.com/RWKV/rwkv.cpp, ``docs/FILE_FORMAT.md``.
"""

import struct
from collections.abc import Mapping, Sequence

import numpy as np

Weights = Mapping[str, np.ndarray]
WIDTH, HEADS, INNER, LAYERS, VOCAB, RANK, DECAY_RANK = 64, 4, 96, 2, 256, 32, 32
"""Of the drawn models; blocks of 32 numbers fit in every matrix."""


def normed(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    scaled = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def time_mixing(of: Weights, h: np.ndarray, before: np.ndarray, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The output at a token, and the state behind it [head, d_k, d_v]; ``of`` has the weights of ``att.``."""
    n_heads, version_6 = len(S), "time_maa_x" in of
    if version_6:
        back = before - h
        low = np.tanh(of["time_maa_w1"] @ (h + back * of["time_maa_x"])).reshape(5, -1)
        mixed = {n: h + back * (of[f"time_maa_{n}"] + of["time_maa_w2"][i] @ low[i]) for i, n in enumerate("wkvrg")}
        steps = of["time_decay"].reshape(-1) + of["time_decay_w2"] @ np.tanh(of["time_decay_w1"] @ mixed["w"])
        w = np.exp(-np.exp(steps)).reshape(n_heads, -1, 1)
    else:
        mixed = {n: h * of[f"time_mix_{n}"] + before * (1 - of[f"time_mix_{n}"]) for n in "rkvg" if f"time_mix_{n}" in of}
        w = of["time_decay"].reshape(n_heads, -1, 1)
    names = {"receptance": "r", "key": "k", "value": "v"}
    r, k, v = ((of[f"{name}.weight"] @ mixed[n]).reshape(n_heads, -1) for name, n in names.items())
    u = of["time_faaaa" if "time_faaaa" in of else "time_first"].reshape(n_heads, -1, 1)
    written = k[:, :, None] * v[:, None, :]
    z = np.einsum("hk,hkv->hv", r, S + u * written)
    z = (z - z.mean(axis=1, keepdims=True)) / np.sqrt(z.var(axis=1, keepdims=True) + (64e-5 if version_6 else 1e-5))
    z = z.reshape(-1) * of["ln_x.weight"] + of["ln_x.bias"]
    if "g" in mixed:
        gate = of["gate.weight"] @ mixed["g"]
        z = z * gate * sigmoid(gate)
    return of["output.weight"] @ z, w * S + written


def channel_mixing(of: Weights, h: np.ndarray, before: np.ndarray) -> np.ndarray:
    if "time_maa_k" in of:
        k, r = (h + (before - h) * of[f"time_maa_{n}"] for n in "kr")
    else:
        k, r = (h * of[f"time_mix_{n}"] + before * (1 - of[f"time_mix_{n}"]) for n in "kr")
    return sigmoid(of["receptance.weight"] @ r) * (of["value.weight"] @ np.maximum(of["key.weight"] @ k, 0) ** 2)


def logits(weights: Weights, tokens: Sequence[int]) -> np.ndarray:
    """[pos, vocabulary] in float64."""
    wide = {name: x.astype(np.float64) for name, x in weights.items()}
    n_layers = 1 + max(int(name.split(".")[1]) for name in wide if name.startswith("blocks."))
    parts = [{part: _below(f"blocks.{layer}.{part}.", wide) for part in ("att", "ffn")} for layer in range(n_layers)]
    n_heads, width = len(wide["blocks.0.att.time_decay"]), wide["emb.weight"].shape[1]
    states = [np.zeros((n_heads, width // n_heads, width // n_heads))] * n_layers
    rows = [[np.zeros(width), np.zeros(width)] for _ in range(n_layers)]
    found = []
    for token in tokens:
        x = normed(wide["emb.weight"][token], wide, "blocks.0.ln0")
        for layer, of in enumerate(parts):
            h = normed(x, wide, f"blocks.{layer}.ln1")
            output, states[layer] = time_mixing(of["att"], h, rows[layer][0], states[layer])
            x, rows[layer][0] = x + output, h
            h = normed(x, wide, f"blocks.{layer}.ln2")
            x, rows[layer][1] = x + channel_mixing(of["ffn"], h, rows[layer][1]), h
        found.append(wide["head.weight"] @ normed(x, wide, "ln_out"))
    return np.array(found)


def _below(prefix: str, weights: Weights) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


def drawn(version: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of a model of two layers, in the order of a file."""
    draw = np.random.default_rng(seed)

    def some(*shape: int, size: float = 0.3, around: float = 0.0) -> np.ndarray:
        return (around + size * draw.normal(size=shape)).astype(np.float32)

    c, heads, per_head = WIDTH, HEADS, WIDTH // HEADS
    found = {"emb.weight": some(VOCAB, c), **_norm("blocks.0.ln0", some)}
    for layer in range(LAYERS):
        at = f"blocks.{layer}."
        found |= {**_norm(f"{at}ln1", some), **_norm(f"{at}ln2", some), **_norm(f"{at}att.ln_x", some)}
        for name in ("receptance", "key", "value", "output", *(["gate"] if version != "5.1" else [])):
            found[f"{at}att.{name}.weight"] = some(c, c)
        found |= {f"{at}ffn.key.weight": some(INNER, c), f"{at}ffn.value.weight": some(c, INNER)}
        found[f"{at}ffn.receptance.weight"] = some(c, c)
        if version == "6":
            found |= {f"{at}att.time_maa_{n}": some(c, around=0.5) for n in "xwkvrg"}
            found |= {f"{at}ffn.time_maa_{n}": some(c, around=0.5) for n in "kr"}
            found |= {f"{at}att.time_maa_w1": some(5 * RANK, c), f"{at}att.time_maa_w2": some(5, c, RANK, size=0.05)}
            found |= {f"{at}att.time_decay_w1": some(DECAY_RANK, c), f"{at}att.time_decay_w2": some(c, DECAY_RANK)}
            found |= {
                f"{at}att.time_decay": some(heads, per_head, 1, around=-2.0),
                f"{at}att.time_faaaa": some(heads, per_head, 1),
            }
        else:
            names = "rkv" if version == "5.1" else "rkvg"
            found |= {f"{at}att.time_mix_{n}": some(c, around=0.5) for n in names}
            found |= {f"{at}ffn.time_mix_{n}": some(c, around=0.5) for n in "kr"}
            shape = (heads, 1, 1) if version == "5.1" else (heads, per_head, 1)
            found[f"{at}att.time_decay"] = np.exp(-np.exp(some(*shape, around=-1.0)))
            found[f"{at}att.{'time_first' if version == '5.1' else 'time_faaaa'}"] = some(*shape)
    return found | _norm("ln_out", some) | {"head.weight": some(VOCAB, c)}


def _norm(name: str, some: object) -> dict[str, np.ndarray]:
    return {f"{name}.weight": some(WIDTH, around=1.0), f"{name}.bias": some(WIDTH)}  # type: ignore[operator]


FLOAT32, FLOAT16, Q5_1 = 0, 1, 8


def file_bytes(weights: Weights, kind: int = FLOAT32, header: Sequence[int] = (101, VOCAB, WIDTH, LAYERS)) -> bytes:
    """A file; ``kind`` is that of the matrices, as rwkv.cpp has it, which keeps the embedding and the head."""
    parts = [struct.pack("<6i", 0x67676D66, *header, kind)]
    for name, x in weights.items():
        matrix = x.ndim == 2 and name not in ("emb.weight", "head.weight")
        parts.append(tensor_bytes(name, x, kind if matrix else FLOAT32))
    return b"".join(parts)


def tensor_bytes(name: str, x: np.ndarray, kind: int) -> bytes:
    numbers = {
        FLOAT32: lambda: x.astype("<f4").tobytes(),
        FLOAT16: lambda: x.astype("<f2").tobytes(),
        Q5_1: lambda: quantized(x),
    }
    sizes = struct.pack(f"<{x.ndim}i", *x.shape[::-1])
    return struct.pack("<3i", x.ndim, len(name.encode()), kind) + sizes + name.encode() + numbers[kind]()


def quantized(x: np.ndarray) -> bytes:
    """Q5_1, block by block and number by number."""
    found = []
    for block in x.reshape(-1, 32):
        low = np.float16(block.min())
        scale = np.float16((block.max() - block.min()) / 31) or np.float16(1e-4)
        whole = [int(n) for n in np.clip(np.round((block - np.float32(low)) / np.float32(scale)), 0, 31)]
        fifth = sum((n >> 4) << i for i, n in enumerate(whole))
        halves = bytes((whole[i] & 15) | (whole[i + 16] & 15) << 4 for i in range(16))
        found.append(struct.pack("<2eI", scale, low, fifth) + halves)
    return b"".join(found)


def rounded(x: np.ndarray, kind: int) -> np.ndarray:
    """What a file of this kind holds of a matrix."""
    if kind == FLOAT16:
        return x.astype(np.float16).astype(np.float32)
    if kind == FLOAT32:
        return x
    return dequantized(quantized(x)).reshape(x.shape)


def dequantized(raw: bytes) -> np.ndarray:
    """Q5_1, number by number of all blocks."""
    blocks = np.frombuffer(raw, np.dtype([("scale", "<f2"), ("low", "<f2"), ("fifth", "<u4"), ("halves", "u1", 16)]))
    numbers = np.empty((len(blocks), 32), dtype=np.float32)
    for i in range(32):
        byte = blocks["halves"][:, i % 16]
        nibble = byte >> 4 if i >= 16 else byte & 15
        whole = nibble + 16 * (blocks["fifth"] >> i & 1)
        numbers[:, i] = blocks["scale"].astype(np.float32) * whole.astype(np.float32) + blocks["low"].astype(np.float32)
    return numbers.reshape(-1)


def as_stored(weights: Weights, kind: int) -> dict[str, np.ndarray]:
    """The numbers of :func:`file_bytes`."""
    matrices = {name for name, x in weights.items() if x.ndim == 2 and name not in ("emb.weight", "head.weight")}
    return {name: rounded(x, kind if name in matrices else FLOAT32) for name, x in weights.items()}
