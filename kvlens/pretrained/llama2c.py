"""Checkpoints of llama2.c: one ``.bin`` file with a header of seven numbers and float32 weights, as the first export wrote it.

    header      7 int32, little-endian: d_model, d_mlp, layers, heads, key-value heads, vocabulary, context
                (a negative vocabulary says that the unembedding is not the embedding)
    weights     embedding [vocab d_model]; rms_att [layer d_model]; w_q, w_k, w_v, w_o [layer out in]; rms_ffn [layer d_model];
                w1 [layer d_mlp d_model] (gate), w2 [layer d_model d_mlp] (out), w3 [layer d_mlp d_model] (in);
                rms_final [d_model]
    rotary      two tables [context d_head / 2], which nothing reads: they follow from the sizes
    unembedding [vocab d_model], where it is not the embedding

The header decides how long the file must be, and that is checked before anything is read or allocated. The model is a Llama:
RMSNorm with eps 1e-5, SwiGLU, rotary positions over adjacent pairs with base 10000, no biases.

Source: https://github.com/karpathy/llama2.c (``export.py``, ``legacy_export``; ``run.c``, ``memory_map_weights``).
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvlens.arguments import path_of
from kvlens.base import HookedTransformerConfig
from kvlens.errors import KVLensError
from kvlens.files import check_regular, reason
from kvlens.pretrained.llama2c_tokenizer import read_llama2c_tokenizer
from kvlens.pretrained.parts import PretrainedParts

HEADER = struct.Struct("<7i")
MAGIC = 0x616B3432
"""Opens the files of llama2.c's later exports, which hold the weights in another order or quantized."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Llama2cSizes:
    """The header of a file.

    Attributes:
        d_model, d_mlp, n_layers, n_heads, n_kv_heads, vocab, n_ctx: as the file has them, ``vocab`` without its sign.
        tied: whether the unembedding is the embedding.
    """

    d_model: int
    d_mlp: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab: int
    n_ctx: int
    tied: bool

    @property
    def d_head(self) -> int:
        """Of queries, keys and values."""
        return self.d_model // self.n_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array of the file, in its order."""
        layers, d, d_kv = self.n_layers, self.d_model, self.n_kv_heads * self.d_head
        table = (self.n_ctx, self.d_head // 2)
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab, d),
            "rms_att": (layers, d),
            "w_q": (layers, d, d),
            "w_k": (layers, d_kv, d),
            "w_v": (layers, d_kv, d),
            "w_o": (layers, d, d),
            "rms_ffn": (layers, d),
            "w1": (layers, self.d_mlp, d),
            "w2": (layers, d, self.d_mlp),
            "w3": (layers, self.d_mlp, d),
            "rms_final": (d,),
            "cos": table,
            "sin": table,
        }
        return shapes if self.tied else {**shapes, "unembedding": (self.vocab, d)}

    @property
    def n_bytes(self) -> int:
        """The required length of the file."""
        return HEADER.size + FLOAT_BYTES * sum(prod(shape) for shape in self.shapes().values())


def load_llama2c_parts(
    path: str | Path, tokenizer_path: str | Path | None = None, *, dtype: torch.dtype = torch.float32
) -> PretrainedParts:
    """Read a llama2.c checkpoint and its tokenizer; nothing in them is run.

    Args:
        path: the ``.bin`` file of the weights.
        tokenizer_path: the ``.bin`` file of the tokenizer; None for a model that works on token ids.
        dtype: of the configuration and of the weights.

    Returns:
        Configuration, weights and tokenizer, as :func:`kvlens.pretrained.load_pretrained_parts` returns them.

    Raises:
        KVLensError: not such a file, truncated, too long, damaged, of a later export, or a tokenizer that does not fit.
    """
    path = path_of("llama2.c checkpoint", path)
    sizes = read_sizes(path)
    tokenizer = None if tokenizer_path is None else read_llama2c_tokenizer(tokenizer_path, sizes.vocab)
    cfg = _config(sizes, path.stem, dtype, tokenizer)
    state_dict = {name: weight.to(dtype) for name, weight in _state_dict(sizes, _read_arrays(path, sizes)).items()}
    return PretrainedParts(cfg, state_dict, tokenizer, {})


def read_sizes(path: Path) -> Llama2cSizes:
    """Read the header of ``path`` and compare it with the length of the file.

    Raises:
        KVLensError: as :func:`load_llama2c_parts`.
    """
    check_regular("from_llama2c", path)
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
        found = path.stat().st_size
    except OSError as error:
        raise KVLensError(f"from_llama2c: cannot read {path}: {reason(error)}") from error
    if len(head) < HEADER.size:
        raise KVLensError(f"from_llama2c: {path} is truncated: the header has {HEADER.size} bytes, the file {found}")
    d_model, d_mlp, n_layers, n_heads, n_kv_heads, vocab, n_ctx = HEADER.unpack(head)
    if d_model == MAGIC:
        raise KVLensError(
            f"from_llama2c: {path} was written by a later export of llama2.c (version {d_mlp}); export it with --version 0, or "
            "as a Hugging Face folder for from_pretrained"
        )
    sizes = Llama2cSizes(d_model, d_mlp, n_layers, n_heads, n_kv_heads, abs(vocab), n_ctx, tied=vocab > 0)
    _check_sizes(path, sizes)
    if found != sizes.n_bytes:
        what = "truncated" if found < sizes.n_bytes else "too long"
        raise KVLensError(
            f"from_llama2c: {path} is {what}, or no llama2.c checkpoint: its header ({_in_words(sizes)}) asks for "
            f"{sizes.n_bytes:,} bytes, the file has {found:,}"
        )
    return sizes


def _check_sizes(path: Path, sizes: Llama2cSizes) -> None:
    numbers = (sizes.d_model, sizes.d_mlp, sizes.n_layers, sizes.n_heads, sizes.n_kv_heads, sizes.vocab, sizes.n_ctx)
    fits = min(numbers) > 0 and sizes.d_model % sizes.n_heads == 0 and sizes.n_heads % sizes.n_kv_heads == 0
    if not (fits and sizes.d_head % 2 == 0):
        raise KVLensError(
            f"from_llama2c: {path} is not a llama2.c checkpoint, or damaged: its header says {_in_words(sizes)}; expected "
            "positive numbers, heads that divide the width into even parts, and key-value heads that divide the heads"
        )


def _in_words(sizes: Llama2cSizes) -> str:
    return (
        f"width {sizes.d_model}, MLP {sizes.d_mlp}, {sizes.n_layers} layers, {sizes.n_heads} heads, {sizes.n_kv_heads} "
        f"key-value heads, vocabulary {sizes.vocab}, context {sizes.n_ctx}"
    )


def _read_arrays(path: Path, sizes: Llama2cSizes) -> dict[str, Float[Tensor, "..."]]:
    """The arrays of a file of the right length, in order, without the rotary tables."""
    arrays: dict[str, Tensor] = {}
    offset = HEADER.size
    for name, shape in sizes.shapes().items():
        if name not in ("cos", "sin"):
            array = torch.from_numpy(np.fromfile(path, dtype="<f4", count=prod(shape), offset=offset).astype("=f4"))
            if not bool(array.isfinite().all()):
                raise KVLensError(f"from_llama2c: {path} is damaged: {name} holds numbers that are not finite")
            arrays[name] = array.reshape(shape)
        offset += FLOAT_BYTES * prod(shape)
    return arrays


def _state_dict(sizes: Llama2cSizes, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under TransformerLens' names."""
    weights = {
        "embed.W_E": arrays["embedding"],
        "ln_final.w": arrays["rms_final"],
        "unembed.W_U": arrays.get("unembedding", arrays["embedding"]).T.contiguous(),
    }
    in_heads = {"W_Q": ("w_q", sizes.n_heads), "_W_K": ("w_k", sizes.n_kv_heads), "_W_V": ("w_v", sizes.n_kv_heads)}
    for layer in range(sizes.n_layers):
        block = f"blocks.{layer}."
        weights |= {block + "ln1.w": arrays["rms_att"][layer], block + "ln2.w": arrays["rms_ffn"][layer]}
        for name, (array, heads) in in_heads.items():
            weights[f"{block}attn.{name}"] = rearrange(arrays[array][layer], "(h d) m -> h m d", h=heads).contiguous()
        weights[block + "attn.W_O"] = rearrange(arrays["w_o"][layer], "m (h d) -> h d m", h=sizes.n_heads).contiguous()
        for name, array in {"W_gate": "w1", "W_out": "w2", "W_in": "w3"}.items():
            weights[f"{block}mlp.{name}"] = arrays[array][layer].T.contiguous()
    return weights


def _config(
    sizes: Llama2cSizes, name: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast | None
) -> HookedTransformerConfig:
    return HookedTransformerConfig(
        model_name=name,
        n_layers=sizes.n_layers,
        d_model=sizes.d_model,
        d_head=sizes.d_head,
        n_heads=sizes.n_heads,
        n_key_value_heads=sizes.n_kv_heads,
        d_mlp=sizes.d_mlp,
        n_ctx=sizes.n_ctx,
        d_vocab=sizes.vocab,
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMS",
        eps=1e-5,
        final_rms=True,
        positional_embedding_type="rotary",
        rotary_adjacent_pairs=True,
        rotary_base=10000,
        rotary_dim=sizes.d_head,
        dtype=dtype,
        tokenizer_prepends_bos=None if tokenizer is None else True,
    )
