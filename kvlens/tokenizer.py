"""kvlens' own tokenizers, in a form that TransformerLens accepts without network access.

`HookedTransformer.set_tokenizer` passes each tokenizer through `get_tokenizer_with_bos`, which

- reads ``init_kwargs["name_or_path"]`` and raises KeyError without it (an in-memory tokenizer has none by itself);
- keeps the tokenizer as it is if ``init_kwargs["add_bos_token"]`` is true, and otherwise loads
  ``AutoTokenizer.from_pretrained(name_or_path, add_bos_token=True)``: a lookup on the hub for an in-memory tokenizer, and
  reading the folder again for a loaded one, which fails if the folder no longer exists.

So the tokenizers made here have both entries and prepend BOS themselves, which TransformerLens detects
(``cfg.tokenizer_prepends_bos``) and handles for ``prepend_bos`` true and false.
"""

from typing import Any

from jaxtyping import Int
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvlens.errors import KVLensError, warn

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


def check_vocabulary(tokenizer: Any, d_vocab: int, what: str, whose: str) -> None:
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


def warn_of_unknown_words(tokenizer: Any, texts: str | list[str], tokens: Int[Tensor, "batch pos"]) -> None:
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
