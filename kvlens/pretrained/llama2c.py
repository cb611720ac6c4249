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

The tokenizer of a checkpoint becomes a Hugging Face tokenizer that gives the same ids.

    file    int32 length of the longest token; then for each token float32 score, int32 length, that many bytes (little-endian)
            tokens 0, 1, 2 are unknown, BOS and EOS; ``<0xNN>`` is the byte NN

llama2.c puts a space in front of the text, splits it into characters (one that is no token into its bytes), and then joins,
again and again, the two neighbors whose union is the token with the highest score, the first such pair where several score
the same. That is byte-pair encoding: each way of splitting a token in two is a merge, ordered by the score of the whole. Where
a token can be split in two ways that overlap in a text ("a" + "aa" and "aa" + "a" in "aaaa"), an order of merges cannot always
say "the first pair"; in runs of one character, where this occurs, both come to the same, because they fill up from the left.

Source: https://github.com/karpathy/llama2.c (``tokenizer.py``, ``export``; ``run.c``, ``encode`` and ``decode``).
"""

import math
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvlens.arguments import path_of
from kvlens.base import HookedTransformerConfig
from kvlens.errors import KVLensError, first_line
from kvlens.files import check_regular, reading_file
from kvlens.pretrained.hugging_face import PretrainedParts
from kvlens.tokenizer import with_bos

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
        """The length of queries, keys and values."""
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
    with reading_file("from_llama2c", path), path.open("rb") as file:
        head, found = file.read(HEADER.size), path.stat().st_size
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


UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
UNK, BOS, EOS = "<unk>", "<s>", "</s>"
_ENTRY = struct.Struct("<fi")
_LONGEST = 4096
"""A token of more bytes than this means that the file is damaged."""


def read_llama2c_tokenizer(path: str | Path, vocab: int) -> PreTrainedTokenizerFast:
    """Read a tokenizer.

    Args:
        path: the ``.bin`` file.
        vocab: size of the model's vocabulary.

    Returns:
        A tokenizer that prepends BOS unless ``add_special_tokens=False`` and pads on the right. Special tokens written out in a
        text are read as such, as with every Hugging Face tokenizer.

    Raises:
        KVLensError: not such a file, truncated, damaged, or of another number of tokens.
    """
    path = path_of("tokenizer", path)
    tokens = _read_tokens(path)
    if len(tokens) != vocab:
        raise KVLensError(
            f"from_llama2c: the tokenizer {path} has {len(tokens)} tokens, the model's vocabulary {vocab}: they do not belong "
            "together"
        )
    return _as_hugging_face(tokens, path)


def _read_tokens(path: Path) -> list[tuple[str, float]]:
    """Text and score of each token: pairs of tokens are merged into one in order of decreasing score."""
    check_regular("from_llama2c", path)
    with reading_file("from_llama2c", path):
        raw = path.read_bytes()
    tokens = list[tuple[str, float]]()
    at = 4
    try:
        while at < len(raw):
            score, length = _ENTRY.unpack_from(raw, at)
            start, at = at + _ENTRY.size, at + _ENTRY.size + length
            if not 0 < length <= _LONGEST or not math.isfinite(score) or at > len(raw):
                raise ValueError(f"its length is {length} and its score {score}, {len(raw) - start} bytes are left")
            tokens.append((raw[start:at].decode("utf-8"), score))
    except (struct.error, ValueError) as error:
        where = f"the tokenizer {path} is truncated or damaged at token {len(tokens)}"
        raise KVLensError(f"from_llama2c: {where}: {first_line(error)}") from error
    return tokens


def _as_hugging_face(tokens: list[tuple[str, float]], path: Path) -> PreTrainedTokenizerFast:
    names = {UNK_ID: UNK, BOS_ID: BOS, EOS_ID: EOS}  # the file pads two of them with line breaks
    ids = {names.get(number, text): number for number, (text, _) in enumerate(tokens)}
    if len(tokens) <= EOS_ID or len(ids) != len(tokens):
        raise KVLensError(
            f"from_llama2c: the tokenizer {path} is damaged: {len(tokens)} tokens, of which {len(ids)} differ; expected at "
            "least three, all different"
        )
    tokenizer = Tokenizer(models.BPE(ids, _merges(tokens, ids), unk_token=UNK, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in (UNK, BOS, EOS)])
    return with_bos(tokenizer, str(path), bos_token=BOS, eos_token=EOS, pad_token=EOS, unk_token=UNK)


def _merges(tokens: list[tuple[str, float]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to split a token into two tokens, those of the token with the highest score first."""
    ordered = sorted(tokens[EOS_ID + 1 :], key=lambda token: -token[1])  # equal ones stay in the file's order
    splits = ((text[:cut], text[cut:]) for text, _ in ordered for cut in range(1, len(text)))
    return [(left, right) for left, right in splits if left in ids and right in ids]
