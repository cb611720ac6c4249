"""Files of RWKV-5.1, 5.2 and 6: those of rwkv.cpp, and folders of RWKV-6 as flash-linear-attention writes them, in safetensors.

A file of rwkv.cpp has no names of sizes: they follow from the shapes of its tensors.

    header   6 int32, little-endian: "ggmf", version of the format (100, 101), vocabulary, width, layers, type of the matrices
    tensors  until the end; each: 3 int32 (number of axes, length of the name, type), its sizes (int32, the fastest first), the
             name, the numbers
    types    0: float32; 1: float16; 8: Q5_1, blocks of 32 numbers in 24 bytes: float16 scale, float16 minimum, 4 bytes of fifth
             bits, 16 bytes of low halves (numbers 0 to 15 in the low nibbles, 16 to 31 in the high ones)

Where each tensor is, and which a model of these sizes has, is known before a number is read. Which version a file holds follows
from the names: only 6 has ``time_maa_x``, 5.2 a gate, 5.1 a norm of heads.

Source: https://github.com/RWKV/rwkv.cpp (``docs/FILE_FORMAT.md``, ``python/convert_pytorch_to_ggml.py``);
https://github.com/fla-org/flash-linear-attention (``fla/layers/rwkv6.py``, ``fla/models/rwkv6``).
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvlens.errors import KVLensError, brief, first_line
from kvlens.files import check_regular, read_json
from kvlens.pretrained.checkpoint_files import begins_with, check_checkpoint, check_known_ranges, read_tensors
from kvlens.pretrained.rwkv import FAST_MIXES, MIXED, Rwkv56Config, Rwkv56ForCausalLM
from kvlens.pretrained.transformers_model import check_size
from kvlens.tokenizer import for_transformer_lens, read_tokenizer

MAGIC = b"fmgg"
FORMATS = (100, 101)
OTHER_TYPES = {2: "Q4_0", 3: "Q4_1", 4: "Q4_1_O", 5: "Q4_2", 6: "Q4_3", 7: "Q5_0", 9: "Q8_0"}
BLOCK, BLOCK_BYTES = 32, 24
HEAD_NORM_EPS = 64e-5
"""Of version 6."""
BYTES_A_BLOCK = {0: (1, 4), 1: (1, 2), 8: (BLOCK, BLOCK_BYTES)}
"""Of each type that is read: how many numbers are stored together, and in how many bytes."""
SUPPORTED_VERSIONS = "5.1, 5.2 and 6"
_WITH_GATE = ("receptance", "key", "value", "output", "gate")
MATRICES = {"5.1": _WITH_GATE[:-1], "5.2": _WITH_GATE, "6": _WITH_GATE}
"""The square matrices of time mixing in each version."""
OTHER_FOLDERS = {"rwkv": "RWKV-4", "rwkv5": "RWKV-5", "rwkv7": "RWKV-7"}
"""Model types of folders that are refused, and what they hold."""
END = "<0xFF>"
"""The end of a text of bytes: the byte that no text in UTF-8 has."""


@dataclass(frozen=True, eq=False)
class Stored:
    """Where a tensor is in a file, and its shape, the slowest axis first."""

    shape: tuple[int, ...]
    kind: int
    place: int

    @property
    def n_bytes(self) -> int:
        block, size = BYTES_A_BLOCK[self.kind]
        return math.prod(self.shape) // block * size


class Sizes(NamedTuple):
    """The sizes of a model."""

    version: str
    vocab: int
    width: int
    layers: int
    heads: int
    inner: int
    mix_rank: int
    decay_rank: int


def is_rwkv_cpp(path: Path) -> bool:
    """Whether a regular file is one of rwkv.cpp, by its first bytes."""
    return path.is_file() and begins_with(path, MAGIC)


def read_rwkv_cpp(path: Path, dtype: torch.dtype) -> tuple[Rwkv56ForCausalLM, PreTrainedTokenizerFast | None]:
    """The model of a file of rwkv.cpp, its numbers as ``dtype``; and a tokenizer of bytes, if its vocabulary is that of bytes.

    Raises:
        KVLensError: a damaged file, one of another version of RWKV, or one that is quantized in another way.
    """
    check_regular("load", path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header, stored = _read_header(data)
            sizes = _sizes(header, stored)
            _check_shapes(stored, _shapes(sizes))
            weights = {name: _numbers(data, tensor) for name, tensor in stored.items()}
    except KVLensError:
        raise
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise KVLensError(f"load: {path} is damaged or not rwkv.cpp's ({first_line(error)}); use an intact copy") from error
    for name, x in weights.items():
        if not bool(x.isfinite().all()):
            raise KVLensError(f"load: {path} is damaged: {name} holds numbers that are not finite; use an intact copy")
    state_dict = _state_dict(sizes, weights)
    config = Rwkv56Config(
        version=sizes.version,
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_heads=sizes.heads,
        intermediate_size=sizes.inner,
        mix_rank=sizes.mix_rank,
        decay_rank=sizes.decay_rank,
        head_norm_eps=HEAD_NORM_EPS if sizes.version == "6" else 1e-5,
    )
    return _model(config, state_dict, dtype, path.stem), byte_tokenizer(path.stem) if sizes.vocab == 256 else None


def _model(config: Rwkv56Config, state_dict: Mapping[str, Tensor], dtype: torch.dtype, name: str) -> Rwkv56ForCausalLM:
    with torch.device("meta"):
        model = Rwkv56ForCausalLM(config)
    model.load_state_dict({key: x.to(dtype).contiguous() for key, x in state_dict.items()}, assign=True)
    model.config.name_or_path = name
    return model.eval().requires_grad_(True)


def _read_header(data: mmap.mmap) -> tuple[tuple[int, ...], dict[str, Stored]]:
    """The header, and where each tensor is; every length is held against the file's."""
    header = struct.unpack_from("<6i", data)
    if data[:4] != MAGIC or header[1] not in FORMATS or min(header[2:5]) < 1:
        raise ValueError(f"its header is {header[1:]}; expected version 100 or 101, and sizes above 0")
    at, stored = 24, dict[str, Stored]()
    while at < len(data):
        n_axes, length, kind = struct.unpack_from("<3i", data, at)
        if not 1 <= n_axes <= 4 or not 1 <= length <= len(data) - at:
            raise ValueError(f"a tensor at byte {at} has {n_axes} axes and a name of {length} bytes")
        shape = struct.unpack_from(f"<{n_axes}i", data, at + 12)[::-1]
        at += 12 + 4 * n_axes
        name, at = data[at : at + length].decode("utf-8"), at + length
        stored[name] = _checked(name, Stored(shape, kind, at), len(data), stored)
        at += stored[name].n_bytes
    return header, stored


def _checked(name: str, tensor: Stored, end: int, others: Mapping[str, Stored]) -> Stored:
    if tensor.kind not in BYTES_A_BLOCK:
        kind = f"{OTHER_TYPES[tensor.kind]}, which kvlens does not read" if tensor.kind in OTHER_TYPES else tensor.kind
        raise ValueError(f"{brief(name)} is of type {kind}; expected float32, float16 or Q5_1")
    block, _ = BYTES_A_BLOCK[tensor.kind]
    if min(tensor.shape) < 1 or tensor.shape[-1] % block or name in others:
        raise ValueError(f"{brief(name)} has shape {[*tensor.shape]} in blocks of {block}, or is there twice")
    if tensor.n_bytes > end - tensor.place:
        raise ValueError(f"{brief(name)} of shape {[*tensor.shape]} ends behind the end of the file")
    return tensor


def _sizes(header: tuple[int, ...], stored: Mapping[str, Stored]) -> Sizes:
    """The sizes of the model, as the shapes of its first layer say."""
    _, _, vocab, width, layers, _ = header
    version = _version(stored)
    if layers > len(stored):
        raise ValueError(f"its header counts {layers} layers, and it has {len(stored)} tensors")

    def rows(name: str) -> int:
        tensor = stored.get(f"blocks.0.{name}")
        if tensor is None:
            raise ValueError(f"it has no blocks.0.{name}")
        return tensor.shape[0]

    heads, inner = rows("att.time_decay"), rows("ffn.key.weight")
    if width % heads:
        raise ValueError(f"{heads} heads do not divide a width of {width}")
    if version != "6":
        return Sizes(version, vocab, width, layers, heads, inner, 0, 0)
    return Sizes(version, vocab, width, layers, heads, inner, rows("att.time_maa_w1") // FAST_MIXES, rows("att.time_decay_w1"))


def _version(stored: Mapping[str, Stored]) -> str:
    """The version of RWKV, by the names of the first layer's tensors."""
    names = {name.removeprefix("blocks.0.att.") for name in stored if name.startswith("blocks.0.att.")}
    if "r_k" in names or "x_r" in names:
        raise _refused("RWKV-7", "its state obeys another rule, a generalized delta rule")
    if "ln_x.weight" not in names:
        if "time_mix_k" in names:
            raise _refused("RWKV-4", "its state is no sum of products of keys and values")
        raise ValueError("its first layer is that of no version of RWKV")
    if "time_maa_x" in names:
        return "6"
    return "5.2" if "gate.weight" in names else "5.1"


def _refused(what: str, why: str) -> KVLensError:
    return KVLensError(f"load: this is {what}, which kvlens does not compute: {why}; it reads RWKV {SUPPORTED_VERSIONS}")


def _shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model."""
    c = sizes.width
    norm: dict[str, tuple[int, ...]] = {"weight": (c,), "bias": (c,)}
    ends: dict[str, tuple[int, ...]] = {"emb.weight": (sizes.vocab, c), "head.weight": (sizes.vocab, c)}
    ends |= {f"{part}.{name}": shape for part in ("blocks.0.ln0", "ln_out") for name, shape in norm.items()}
    block = {"ffn.key.weight": (sizes.inner, c), "ffn.value.weight": (c, sizes.inner), **_shapes_of_time_mixing(sizes)}
    block |= {f"{part}.{name}": shape for part in ("ln1", "ln2", "att.ln_x") for name, shape in norm.items()}
    kind = "time_maa" if sizes.version == "6" else "time_mix"
    block |= {"ffn.receptance.weight": (c, c), f"ffn.{kind}_k": (c,), f"ffn.{kind}_r": (c,)}
    return ends | {f"blocks.{layer}.{name}": shape for layer in range(sizes.layers) for name, shape in block.items()}


def _shapes_of_time_mixing(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    c, mix, decay = sizes.width, sizes.mix_rank, sizes.decay_rank
    names, is_first = MATRICES[sizes.version], sizes.version == "5.1"
    per_head: tuple[int, ...] = (sizes.heads,) if is_first else (sizes.heads, c // sizes.heads)
    shapes: dict[str, tuple[int, ...]] = {f"att.{name}.weight": (c, c) for name in names}
    shapes |= {"att.time_decay": per_head, f"att.{'time_first' if is_first else 'time_faaaa'}": per_head}
    if sizes.version != "6":
        return shapes | {f"att.time_mix_{name}": (c,) for name in MIXED[sizes.version]}
    shapes |= {f"att.time_maa_{name}": (c,) for name in ("x", *MIXED["6"])}
    shapes |= {"att.time_maa_w1": (FAST_MIXES * mix, c), "att.time_maa_w2": (FAST_MIXES, c, mix)}
    return shapes | {"att.time_decay_w1": (decay, c), "att.time_decay_w2": (c, decay)}


def _check_shapes(stored: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless a file has these tensors and no others; axes of 1 do not count."""
    for name in stored.keys() ^ expected.keys():
        raise ValueError(f"it {'has a tensor' if name in stored else 'lacks'} {brief(name)}, unlike a model of its sizes")
    for name, shape in expected.items():
        found = stored[name].shape
        if [n for n in found if n > 1] != [n for n in shape if n > 1]:
            raise ValueError(f"{name} has shape {[*found]}, expected {[*shape]}")


def _numbers(data: mmap.mmap, tensor: Stored) -> Tensor:
    """A tensor in float32."""
    raw = np.frombuffer(data[tensor.place : tensor.place + tensor.n_bytes], dtype=np.uint8)
    if tensor.kind == 8:
        numbers = _dequantized(raw.reshape(-1, BLOCK_BYTES))
    else:
        numbers = raw.view("<f4" if tensor.kind == 0 else "<f2").astype(np.float32)
    return torch.from_numpy(numbers.reshape(tensor.shape).copy())


def _dequantized(blocks: np.ndarray) -> np.ndarray:
    """Q5_1: minimum + scale * (low four bits + 16 * fifth bit)."""
    scale, minimum = (blocks[:, part].copy().view("<f2").astype(np.float32) for part in (slice(0, 2), slice(2, 4)))
    low = np.concatenate([blocks[:, 8:] & 15, blocks[:, 8:] >> 4], axis=1)
    fifth = np.unpackbits(blocks[:, 4:8], axis=1, bitorder="little")
    numbers: np.ndarray = (low + 16 * fifth).astype(np.float32) * scale + minimum
    return numbers


def _state_dict(sizes: Sizes, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by the names of :mod:`kvlens.pretrained.rwkv`."""
    wide = {name: x.double() for name, x in weights.items()}
    normed = (wide["blocks.0.ln0.weight"], wide["blocks.0.ln0.bias"])
    found = _ends(wide["emb.weight"], normed, 1e-5, wide["ln_out.weight"], wide["ln_out.bias"], wide["head.weight"])
    for layer in range(sizes.layers):
        of = {name.removeprefix(f"blocks.{layer}."): x for name, x in wide.items() if name.startswith(f"blocks.{layer}.")}
        named = {"input_layernorm": "ln1", "norm2": "ln2", "mixer.norm": "att.ln_x"}
        block = {f"{ours}.{x}": of[f"{theirs}.{x}"] for ours, theirs in named.items() for x in ("weight", "bias")}
        block |= {f"mlp.{name}.weight": of[f"ffn.{name}.weight"] for name in ("key", "value", "receptance")}
        block |= {f"mixer.{name}.weight": of[f"att.{name}.weight"] for name in MATRICES[sizes.version]}
        block |= _mixed_6(sizes, of) if sizes.version == "6" else _mixed_5(sizes, of)
        found |= {f"model.layers.{layer}.{name}": x for name, x in block.items()}
    return found


def _ends(embedding: Tensor, norm: tuple[Tensor, Tensor] | None, eps: float, *others: Tensor) -> dict[str, Tensor]:
    """The embedding with the norm behind it in it, the final norm's weight and bias, and the unembedding."""
    if norm is not None:
        embedding = torch.nn.functional.layer_norm(embedding, embedding.shape[-1:], *norm, eps)
    names = ("model.embed_tokens.weight", "model.norm.weight", "model.norm.bias", "lm_head.weight")
    return dict(zip(names, (embedding, *others), strict=True))


def _mixed_5(sizes: Sizes, of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mixes, decay and bonus of a layer of version 5; a file holds 1 - mu, and the decay itself."""
    bonus = of["att.time_first" if sizes.version == "5.1" else "att.time_faaaa"]
    decay, shape = of["att.time_decay"].flatten(1), (sizes.heads, sizes.width // sizes.heads)
    if not 0 <= float(decay.min()) <= float(decay.max()) <= 1:
        raise KVLensError(f"load: a decay of {float(decay.max()):g} is damaged; expected numbers from 0 to 1")
    tiny, eps = torch.finfo(torch.float32).tiny, torch.finfo(torch.float64).eps
    return {
        "mixer.mu": 1 - torch.stack([of[f"att.time_mix_{name}"].flatten() for name in MIXED[sizes.version]]),
        "mixer.decay": (-decay.clamp(tiny, 1 - eps).log()).log().expand(shape),
        "mixer.bonus": bonus.flatten(1).expand(shape),
        **{f"mlp.mu_{name}": 1 - of[f"ffn.time_mix_{name}"].flatten() for name in "kr"},
    }


def _mixed_6(sizes: Sizes, of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Likewise of version 6."""
    shape = (sizes.heads, sizes.width // sizes.heads)
    return {
        "mixer.mu": torch.stack([of[f"att.time_maa_{name}"].flatten() for name in MIXED["6"]]),
        "mixer.mu_x": of["att.time_maa_x"].flatten(),
        "mixer.mix_a.weight": of["att.time_maa_w1"],
        "mixer.mix_b": of["att.time_maa_w2"].reshape(FAST_MIXES, sizes.width, sizes.mix_rank),
        "mixer.decay_a.weight": of["att.time_decay_w1"],
        "mixer.decay_b.weight": of["att.time_decay_w2"],
        "mixer.decay": of["att.time_decay"].reshape(shape),
        "mixer.bonus": of["att.time_faaaa"].reshape(shape),
        **{f"mlp.mu_{name}": of[f"ffn.time_maa_{name}"].flatten() for name in "kr"},
    }


def byte_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Bytes as tokens, those of a text in UTF-8, without a BOS."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = dict(bos_token=END, eos_token=END, pad_token=END)
    return for_transformer_lens(PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **special), name)


def is_rwkv_folder(folder: Path) -> bool:
    """Whether a folder in Hugging Face's format holds RWKV, by the type of model that its configuration names."""
    return read_json("load", folder / "config.json").get("model_type") in ("rwkv6", *OTHER_FOLDERS)


def read_rwkv_folder(folder: Path, dtype: torch.dtype) -> tuple[Rwkv56ForCausalLM, PreTrainedTokenizerBase | None]:
    """The model of a folder of RWKV-6 that flash-linear-attention wrote, its numbers as ``dtype``; and its tokenizer, if it has
    a ``tokenizer.json``.

    Raises:
        KVLensError: another version or author; weights that are no safetensors, or not those of the configuration; a
            configuration that is damaged, or asks for what RWKV-6 does not have.
    """
    stored = check_checkpoint("load", folder)
    given = read_json("load", folder / "config.json")
    if given["model_type"] in OTHER_FOLDERS:
        raise KVLensError(
            f"load: {folder} holds {OTHER_FOLDERS[given['model_type']]}; kvlens reads folders of RWKV-6, as "
            f"flash-linear-attention writes them, and files of rwkv.cpp with RWKV {SUPPORTED_VERSIONS}"
        )
    if not any(folder.glob("*.safetensors")):
        raise KVLensError(f"load: {folder} holds no safetensors, and kvlens reads RWKV from no pickle; save it as safetensors")
    check_known_ranges("load: ", given)
    try:
        config = _config(given)
        check_size("load: ", str(folder), config, stored)
        with torch.device("meta"):
            expected = Rwkv56ForCausalLM(config).state_dict()
        weights = {name: x.double() for name, x in read_tensors(folder).items()}
        state_dict = _from_fla(config, weights, given)
    except (TypeError, ValueError, KeyError, RuntimeError, ArithmeticError) as error:
        if isinstance(error, KVLensError):
            raise
        what = f"{type(error).__name__}: {first_line(error)}"
        raise KVLensError(f"load: the weights in {folder} are not those of its configuration ({what})") from error
    for name, x in expected.items():
        if x.shape != state_dict[name].shape:
            found = f"{[*state_dict[name].shape]} for {[*x.shape]}"
            raise KVLensError(f"load: {name} in {folder} has another shape than its configuration says: {found}")
    tokenizer = read_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    if tokenizer is not None:
        tokenizer = for_transformer_lens(tokenizer, str(folder))
    return _model(config, state_dict, dtype, str(folder)), tokenizer


def _config(given: Mapping[str, Any]) -> Rwkv56Config:
    """The configuration, with flash-linear-attention's defaults."""
    other = {"attn": None, "hidden_act": "sqrelu", "norm_first": True}
    for name, expected in other.items():
        if given.get(name, expected) != expected:
            raise KVLensError(f"load: {name} of the configuration is {brief(given[name])}; RWKV-6 has {expected}")
    width = given.get("hidden_size", 2048)
    inner = given.get("intermediate_size") or 32 * math.ceil(int(width * (given.get("hidden_ratio") or 3.5)) / 32)
    eps = given.get("norm_eps", 1e-5)
    return Rwkv56Config(
        vocab_size=given.get("vocab_size", 32000),
        hidden_size=width,
        num_hidden_layers=given.get("num_hidden_layers", 24),
        num_heads=given.get("num_heads", 4),
        key_dim=round(width * given.get("expand_k", 0.5)),
        value_dim=round(width * given.get("expand_v", 1.0)),
        intermediate_size=inner,
        mix_rank=given.get("proj_low_rank_dim", 32),
        decay_rank=given.get("gate_low_rank_dim", 64),
        norm_eps=eps,
        head_norm_eps=eps,
    )


def _from_fla(config: Rwkv56Config, weights: dict[str, Tensor], given: Mapping[str, object]) -> dict[str, Tensor]:
    """The weights by the names of :mod:`kvlens.pretrained.rwkv`; every tensor is used."""

    def norm(name: str) -> tuple[Tensor, Tensor]:
        weight = weights.pop(f"{name}.weight")
        return weight, weights.pop(f"{name}.bias") if given.get("norm_bias", True) else torch.zeros_like(weight)

    embedding = weights.pop("model.embeddings.weight")
    head = weights.pop("lm_head.weight", embedding) if given.get("tie_word_embeddings") else weights.pop("lm_head.weight")
    found = _ends(embedding, norm("model.layers.0.pre_norm"), config.norm_eps, *norm("model.norm"), head)
    for layer in range(config.num_hidden_layers):
        of = to = f"model.layers.{layer}."
        for ours, theirs in (("input_layernorm", "attn_norm"), ("norm2", "ffn_norm")):
            found[f"{to}{ours}.weight"], found[f"{to}{ours}.bias"] = norm(of + theirs)
        names = ["rwkvg".index(x) for x in MIXED["6"]]
        found[f"{to}mixer.mix_b"] = weights.pop(f"{of}attn.x_proj.2.weight").unflatten(1, (FAST_MIXES, -1)).movedim(1, 0)[names]
        mixes = weights.pop(f"{of}attn.x_proj.0.linear.weight").unflatten(0, (FAST_MIXES, -1))[names]
        found[f"{to}mixer.mix_a.weight"] = mixes.flatten(0, 1)
        found[f"{to}mixer.mu"] = weights.pop(f"{of}attn.x_bias")[names]
        decay = weights.pop(f"{of}attn.w_proj.linear.lora.2.bias")
        found[f"{to}mixer.decay"] = decay.unflatten(0, (config.num_heads, -1))
        found |= {to + ours: weights.pop(of + theirs) for ours, theirs in FLA_NAMES.items()}
    if weights:
        raise KVLensError(f"load: the weights hold tensors that RWKV-6 has no place for: {sorted(weights)[:5]}")
    return found


FLA_NAMES = {
    "mixer.mu_x": "attn.x_proj.0.mu",
    "mixer.decay_a.weight": "attn.w_proj.linear.lora.0.weight",
    "mixer.decay_b.weight": "attn.w_proj.linear.lora.2.weight",
    "mixer.bonus": "attn.bonus",
    "mixer.norm.weight": "attn.g_norm.weight",
    "mixer.norm.bias": "attn.g_norm.bias",
    "mixer.output.weight": "attn.o_proj.weight",
    **{f"mixer.{ours}.weight": f"attn.{ours[0]}_proj.linear.weight" for ours in ("receptance", "key", "value", "gate")},
    "mlp.mu_k": "ffn.key.mu",
    "mlp.mu_r": "ffn.receptance.mu",
    "mlp.key.weight": "ffn.key.linear.weight",
    "mlp.receptance.weight": "ffn.receptance.linear.weight",
    "mlp.value.weight": "ffn.value.weight",
}
"""Ours and flash-linear-attention's, of what both hold alike."""
