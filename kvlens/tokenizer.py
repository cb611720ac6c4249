"""Tokenizers, kvlens' own and those of pretrained models, in a form that TransformerLens accepts without network access.

`HookedTransformer.set_tokenizer` passes each tokenizer through `get_tokenizer_with_bos`, which

- reads ``init_kwargs["name_or_path"]`` and raises KeyError without it (an in-memory tokenizer has none by itself);
- keeps the tokenizer as it is if ``init_kwargs["add_bos_token"]`` is true, and otherwise loads
  ``AutoTokenizer.from_pretrained(name_or_path, add_bos_token=True)``: a lookup on the hub for an in-memory tokenizer, and
  reading the folder again for a loaded one, which fails if the folder no longer exists.

So the tokenizers made here have both entries and prepend BOS themselves, which TransformerLens detects
(``cfg.tokenizer_prepends_bos``) and handles for ``prepend_bos`` true and false.
"""

import base64
import contextlib
import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from jaxtyping import Int
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvlens.errors import KVLensError, warn
from kvlens.files import check_regular_files, file_in, read_json

logger = logging.getLogger(__name__)

KEEP_THEIR_BOS = ("OlmoForCausalLM", "OlmoeForCausalLM", "Olmo2ForCausalLM")
"""Architectures whose tokenizers are used as they are; all others are made to prepend a BOS."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model")
TEXT_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"""The parts of a tokenizer.json that change texts, one behind the other."""
MOST_GROWTH = 1000
"""How many times as long a part may make a text. A letter may become 33 bytes in SentencePiece's table, and each replacement of
a pattern, which may match between letters, counts twice."""
TRIAL = "A b\u00e9.\n 1"
MOST_NAMED = 5
"""Unknown words that a warning names."""


def with_bos(tokenizer: Tokenizer, name: str, *, bos_token: str, **special_tokens: str) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer that prepends BOS to every text, pads on the right, and is accepted by TransformerLens.

    Args:
        tokenizer: a tokenizer whose vocabulary contains the special tokens.
        name: the name that TransformerLens uses for it.
        bos_token: BOS.
        special_tokens: ``eos_token``, ``pad_token``, ``unk_token``.
    """
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos_token} $A",
        pair=f"{bos_token} $A {bos_token} $B",
        special_tokens=[(bos_token, tokenizer.token_to_id(bos_token))],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos_token,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )
    return for_transformer_lens(fast, name)


def for_transformer_lens(tokenizer: PreTrainedTokenizerFast, name: str) -> PreTrainedTokenizerFast:
    """Give a tokenizer that prepends BOS the two entries that TransformerLens needs."""
    tokenizer.init_kwargs["name_or_path"] = name
    tokenizer.init_kwargs["add_bos_token"] = True
    return tokenizer


def find_tokenizer(
    given: PreTrainedTokenizerBase | None, folder: Path | None, official: str | None, cfg: Any
) -> PreTrainedTokenizerBase | None:
    """Find the tokenizer (given, in the folder, in the local cache, in that order), prepare it, and name it in cfg."""
    tokenizer, name = given, given.name_or_path if given is not None else ""
    if tokenizer is None and folder is not None and any((folder / file).is_file() for file in TOKENIZER_FILES):
        tokenizer, name = read_tokenizer(folder), official or str(folder)
    if tokenizer is not None:
        check_vocabulary(tokenizer, cfg.d_vocab, "from_pretrained", "the model's vocabulary")
    if tokenizer is None and official is not None:
        tokenizer, name = _cached_tokenizer(official, cfg.d_vocab), official
    if tokenizer is None:
        return None
    cfg.tokenizer_name = name or cfg.model_name
    return with_bos_in_front(tokenizer, cfg.tokenizer_name, cfg.original_architecture)


def read_tokenizer(folder: str | Path, **options: object) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. Code that comes with it is not run, and nothing is fetched.

    Args:
        folder: the folder.
        options: for Transformers' ``from_pretrained``.

    Raises:
        KVLensError: it needs code of its own, its files are missing or damaged, or it may make texts very
            much longer.
    """
    check_regular_files("tokenizer", Path(folder))
    check_growth(Path(folder))
    try:
        # False, not the default, which asks on the terminal whether to run code that comes with the folder
        tokenizer = AutoTokenizer.from_pretrained(folder, **options, local_files_only=True, trust_remote_code=False)
        with contextlib.suppress(Exception):  # a vocabulary of words may have none of these
            tokenizer.decode(tokenizer.encode(TRIAL))
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # transformers raises whatever its parsers raise, and a panic of Rust's is no Exception
        if _names_code(Path(folder) / "tokenizer_config.json"):
            raise KVLensError(
                f"the tokenizer in {folder} is code of its own, which kvlens does not run. If you trust it, load it with "
                "transformers and pass tokenizer=; without tokenizer_config.json the model works on token ids"
            ) from error
        raise KVLensError(
            f"the tokenizer in {folder} cannot be loaded: {_in_one_line(error)}. Repair it, or pass tokenizer="
        ) from error


def check_growth(folder: Path) -> None:
    """Raise KVLensError where a tokenizer.json may make texts very much longer: that happens in Rust, where nothing stops it.

    Thirty replacements, each of a letter by two of the same, fill any memory.
    """
    config = folder / "tokenizer_config.json"
    said = read_json("tokenizer", config) if config.is_file() else {}
    further = said.get("fast_tokenizer_files") if isinstance(said, dict) else None
    named = {file_in("tokenizer", folder, name) for name in further} if isinstance(further, list) else set()
    for path in sorted(named | {folder / "tokenizer.json"}):
        stored = read_json("tokenizer", path) if path.is_file() else {}
        for part in TEXT_PARTS if isinstance(stored, dict) else ():
            if growth(stored.get(part)) > MOST_GROWTH:
                raise KVLensError(
                    f"tokenizer: the {part} of {path} may make a text more than {MOST_GROWTH} times as long; "
                    "use a copy that you trust"
                )


def growth(part: object) -> float:
    """How many times as long a part of a tokenizer.json makes a text at most, if what Unicode says of letters is left out."""
    total, parts = 1.0, [part]
    while parts and total <= MOST_GROWTH:
        part = parts.pop()
        if isinstance(part, dict):
            total *= _own_growth(part)
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return total


def _own_growth(part: Mapping[str, Any]) -> float:
    kind, pattern = part.get("type"), part.get("pattern")
    if kind == "Replace":
        found = pattern.get("String") if isinstance(pattern, dict) else None
        n = len(str(part.get("content")))
        return max(1.0, n / len(found)) if isinstance(found, str) and found else 1.0 + n  # a pattern may match between letters
    if kind == "Prepend":
        return 1.0 + len(str(part.get("prepend")))
    if kind == "Precompiled":
        return max(map(len, _table(part.get("precompiled_charsmap")).split(b"\0")), default=0) or 1.0
    if kind == "TemplateProcessing" and isinstance(part.get("single"), list):
        return max(1.0, sum("Sequence" in piece for piece in part["single"]))
    return 1.0


def _table(stored: Any) -> bytes:
    """The texts of a table of SentencePiece's, each ended by a zero; in front of them is a tree, whose size stands first."""
    try:
        raw = base64.b64decode(stored or "")
    except (TypeError, ValueError):
        return b""  # which the tokenizers library will not read either
    return raw[4 + int.from_bytes(raw[:4], "little") :]


def _names_code(config: Path) -> bool:
    try:
        return '"auto_map"' in config.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"


def _cached_tokenizer(official: str, d_vocab: int) -> PreTrainedTokenizerBase | None:
    """Take the official tokenizer from the local Hugging Face cache, if it is there and its ids fit the model."""
    # Looked up here, as a folder: by name, transformers asks the hub even with local_files_only when nothing is cached.
    cached = [try_to_load_from_cache(official, file) for file in TOKENIZER_FILES]
    folders = [Path(path).parent for path in cached if isinstance(path, str)]
    if not folders:
        return None
    try:
        tokenizer = read_tokenizer(folders[0])
    except KVLensError as error:  # an incomplete download: the model then works on token ids
        logger.warning("no tokenizer for %s: %s", official, error)
        return None
    return tokenizer if tokenizer.vocab_size <= d_vocab else None


def with_bos_in_front(tokenizer: PreTrainedTokenizerBase, name: str, architecture: str | None) -> PreTrainedTokenizerBase:
    """Return a copy that prepends BOS, in the form that ``HookedTransformer.set_tokenizer`` takes as it is.

    ``set_tokenizer`` loads the tokenizer again by name, with ``add_bos_token=True``, unless it already says that. A
    copy that says so, and does so, spares the reload, which for a tokenizer made in memory could not succeed.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.init_kwargs.setdefault("name_or_path", name)
    if tokenizer.bos_token is None or architecture in KEEP_THEIR_BOS:
        return tokenizer  # set_tokenizer leaves these alone
    if tokenizer.encode("")[:1] != [tokenizer.bos_token_id]:
        try:
            tokenizer.add_bos_token = True
        except ValueError:
            # A BOS token with ":" in it has no template; TransformerLens, too, then keeps the tokenizer as it is.
            object.__setattr__(tokenizer, "_add_bos_token", False)
    tokenizer.init_kwargs["add_bos_token"] = True
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, d_vocab: int, what: str, whose: str) -> None:
    """Hold a tokenizer against ``whose`` vocabulary of ``d_vocab``: a warning if it has fewer than half as many tokens.

    Raises:
        KVLensError: it has more; the error starts with ``what``, as the warning does.
    """
    if tokenizer.vocab_size > d_vocab:
        raise KVLensError(
            f"{what}: the tokenizer has {tokenizer.vocab_size} tokens, {whose} only {d_vocab}: they do not belong together"
        )
    if 2 * len(tokenizer) < d_vocab:
        warn(
            f"{what}: the tokenizer has {len(tokenizer)} tokens, {whose} {d_vocab}: it is probably another model's. Pass the "
            "tokenizer that the model was trained with, or give token ids"
        )


def warn_of_unknown_words(
    tokenizer: PreTrainedTokenizerBase, texts: str | list[str], tokens: Int[Tensor, "*batch pos"]
) -> None:
    """Warn if words of ``texts`` are not in the vocabulary: the model reads the same token for all of them.

    Args:
        tokenizer: of the model; one that knows every character (such as GPT-2's) never warns.
        texts: what was tokenized.
        tokens: what became of it.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id) or not bool((tokens == unknown).any()):
        return
    words: dict[str, None] = {}
    for text in [texts] if isinstance(texts, str) else texts:
        found = tokenizer(text, return_offsets_mapping=True) if tokenizer.is_fast else {"input_ids": [], "offset_mapping": []}
        spans = zip(found["input_ids"], found["offset_mapping"], strict=True)
        words |= dict.fromkeys(text[start:end].strip() or text[start:end] for token, (start, end) in spans if token == unknown)
    words.pop(tokenizer.unk_token, None)  # written by who wants it read
    if words or not tokenizer.is_fast:
        named = ", ".join(map(repr, [*words][:MOST_NAMED])) or "some words"
        more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
        warn(
            f"the model's vocabulary lacks {named}{more}: it reads {tokenizer.unk_token} in place of each, so what it does "
            "with them says nothing about these words. Use words that it knows, or another model"
        )
