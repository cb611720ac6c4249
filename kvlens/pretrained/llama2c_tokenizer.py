"""The tokenizer of a llama2.c checkpoint, as a Hugging Face tokenizer that gives the same ids.

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
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from kvlens.arguments import path_of
from kvlens.errors import KVLensError
from kvlens.files import check_regular, reason
from kvlens.tokenizer import with_bos

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
UNK, BOS, EOS = "<unk>", "<s>", "</s>"
_ENTRY = struct.Struct("<fi")
_LONGEST = 4096
"""A token of more bytes than this means that the file is damaged."""


class ScoredToken(NamedTuple):
    """One entry of the file.

    Attributes:
        text: text of the token.
        score: pairs of tokens are merged into this one in order of decreasing score.
    """

    text: str
    score: float


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


def _read_tokens(path: Path) -> list[ScoredToken]:
    check_regular("from_llama2c", path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise KVLensError(f"from_llama2c: cannot read {path}: {reason(error)}") from error
    tokens: list[ScoredToken] = []
    at = 4
    while at < len(raw):
        where = f"from_llama2c: the tokenizer {path} is truncated or damaged at token {len(tokens)}"
        if at + _ENTRY.size > len(raw):
            raise KVLensError(f"{where}: {len(raw) - at} bytes are left, an entry begins with {_ENTRY.size}")
        score, length = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        if not 0 < length <= _LONGEST or not math.isfinite(score):
            raise KVLensError(f"{where}: its length is {length} and its score {score}")
        if at + length > len(raw):
            raise KVLensError(f"{where}: it has {length} bytes, {len(raw) - at} are left")
        try:
            tokens.append(ScoredToken(raw[at : at + length].decode("utf-8"), score))
        except UnicodeDecodeError as error:
            raise KVLensError(f"{where}: its bytes are not UTF-8 text") from error
        at += length
    return tokens


def _as_hugging_face(tokens: list[ScoredToken], path: Path) -> PreTrainedTokenizerFast:
    names = {UNK_ID: UNK, BOS_ID: BOS, EOS_ID: EOS}  # the file pads two of them with line breaks
    ids = {names.get(number, token.text): number for number, token in enumerate(tokens)}
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


def _merges(tokens: list[ScoredToken], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to split a token into two tokens, those of the token with the highest score first."""
    order = sorted(range(EOS_ID + 1, len(tokens)), key=lambda number: (-tokens[number].score, number))
    texts = [tokens[number].text for number in order]
    splits = ((text[:cut], text[cut:]) for text in texts for cut in range(1, len(text)))
    return [(left, right) for left, right in splits if left in ids and right in ids]
