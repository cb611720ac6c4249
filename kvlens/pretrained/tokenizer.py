"""The tokenizer of a pretrained model, in a form that TransformerLens accepts without network access."""

import copy
import logging
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvlens.base import HookedTransformerConfig
from kvlens.errors import KVLensError
from kvlens.files import check_regular_files
from kvlens.tokenizer import check_vocabulary

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model")


def find_tokenizer(
    given: PreTrainedTokenizerBase | None, folder: Path | None, official: str | None, cfg: HookedTransformerConfig
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


def read_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. Code that comes with it is not run, and nothing is fetched.

    Raises:
        KVLensError: it needs code of its own, or its files are missing or damaged.
    """
    check_regular_files("tokenizer", Path(folder))
    try:
        # False, not the default, which asks on the terminal whether to run code that comes with the folder
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parsers raise
        config = Path(folder) / "tokenizer_config.json"
        if config.is_file() and '"auto_map"' in config.read_text(encoding="utf-8", errors="replace"):
            raise KVLensError(
                f"the tokenizer in {folder} is code of its own, which kvlens does not run. If you trust it, load it with "
                "transformers and pass tokenizer=; without tokenizer_config.json the model works on token ids"
            ) from error
        raise KVLensError(
            f"the tokenizer in {folder} cannot be loaded: {_in_one_line(error)}. Repair it, or pass tokenizer="
        ) from error


def _in_one_line(error: Exception) -> str:
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
    if tokenizer.bos_token is None or architecture in ("OlmoForCausalLM", "OlmoeForCausalLM", "Olmo2ForCausalLM"):
        return tokenizer  # set_tokenizer leaves these alone
    if tokenizer.encode("")[:1] != [tokenizer.bos_token_id]:
        try:
            tokenizer.add_bos_token = True
        except ValueError:
            # A BOS token with ":" in it has no template; TransformerLens, too, then keeps the tokenizer as it is.
            object.__setattr__(tokenizer, "_add_bos_token", False)
    tokenizer.init_kwargs["add_bos_token"] = True
    return tokenizer
