"""A tokenizer of ours in the form that TransformerLens takes without a network.

`HookedTransformer.set_tokenizer` passes each tokenizer through `get_tokenizer_with_bos`, which

- reads ``init_kwargs["name_or_path"]`` and raises KeyError without it (an in-memory tokenizer has none by itself);
- keeps the tokenizer as it is if ``init_kwargs["add_bos_token"]`` is true, and otherwise loads
  ``AutoTokenizer.from_pretrained(name_or_path, add_bos_token=True)``: a look-up on the hub for an in-memory tokenizer, a second
  reading of the folder for a loaded one, which fails if the folder is gone by then.

So the tokenizers made here carry both entries and prepend BOS themselves, which TransformerLens finds out
(``cfg.tokenizer_prepends_bos``) and honors for ``prepend_bos`` true and false.
"""

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast


def with_bos(tokenizer: Tokenizer, name: str, *, bos_token: str, **special_tokens: str) -> PreTrainedTokenizerFast:
    """A tokenizer of Hugging Face's that puts BOS in front of every text, pads on the right, and that TransformerLens accepts.

    Args:
        tokenizer: knows the special tokens.
        name: what TransformerLens calls it.
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
    """Give a tokenizer that prepends BOS the two entries that TransformerLens asks for."""
    tokenizer.init_kwargs["name_or_path"] = name
    tokenizer.init_kwargs["add_bos_token"] = True
    return tokenizer
