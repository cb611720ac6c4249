"""kvlens' own tokenizers, in a form that TransformerLens accepts without network access.

`HookedTransformer.set_tokenizer` passes each tokenizer through `get_tokenizer_with_bos`, which

- reads ``init_kwargs["name_or_path"]`` and raises KeyError without it (an in-memory tokenizer has none by itself);
- keeps the tokenizer as it is if ``init_kwargs["add_bos_token"]`` is true, and otherwise loads
  ``AutoTokenizer.from_pretrained(name_or_path, add_bos_token=True)``: a lookup on the hub for an in-memory tokenizer, and
  reading the folder again for a loaded one, which fails if the folder no longer exists.

So the tokenizers made here have both entries and prepend BOS themselves, which TransformerLens detects
(``cfg.tokenizer_prepends_bos``) and handles for ``prepend_bos`` true and false.
"""

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast


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
