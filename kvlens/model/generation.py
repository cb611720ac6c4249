"""Checks of what is generated, and reading a long text without logits, whose memory would exceed everything else."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from jaxtyping import Int
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens.arguments import is_number
from kvlens.base import HookedTransformer
from kvlens.checks import Within, ensure, unknown_argument
from kvlens.errors import KVLensError, brief
from kvlens.model.streaming import has_hooks

LONG = 1024
"""Texts of at least this many tokens are read without logits, which would take more memory than everything else."""
MOST_NEW = 2**31 - 1
COLDEST, HOTTEST = 1e-20, 1e20
TEMPERATURES = f"0 (the most probable token), or a number from {COLDEST:g} to {HOTTEST:g}"
TRANSFORMERS_KEYWORDS = ("output_logits", "return_dict_in_generate")
"""Keywords of Transformers' ``generate`` that TransformerLens supports; it ignores all others."""


def check_keywords(generate: Callable[..., Any], given: Collection[str]) -> None:
    """Raise WrongArguments for a keyword that neither ``generate`` nor TransformerLens supports."""
    names = [name for name in inspect.signature(generate).parameters if name != "generation_kwargs"] + [*TRANSFORMERS_KEYWORDS]
    for unknown in (name for name in given if name not in TRANSFORMERS_KEYWORDS):
        raise unknown_argument("HookedKVTransformer.generate", unknown, names)


def check_sampling(d_vocab: int, given: Mapping[str, Any]) -> None:
    """Raise KVLensError for an invalid argument of ``generate``, before anything in the model changes."""
    token, eos = Annotated[int, Within(0, d_vocab - 1)], given["eos_token_id"]
    if not isinstance(eos, list | tuple) or not eos:
        ensure("generate: eos_token_id, one or several,", token | None, eos)
    kinds: dict[str, Any] = {
        "eos_token_id": token | Sequence[token] | None,
        **dict.fromkeys(("stop_at_eos", "do_sample", "use_past_kv_cache", "verbose"), bool),
        "prepend_bos": bool | None,
        "max_new_tokens": Annotated[int, Within(1, MOST_NEW)],
        "top_k": Annotated[int, Within(1, MOST_NEW)] | None,
        "top_p": Annotated[float, Within(above=0, most=1)] | None,
        "freq_penalty": Annotated[float, Within(-HOTTEST, HOTTEST)],
        "return_type": Literal["input", "str", "tokens", "embeds"],
        "padding_side": Literal["left", "right"] | None,
    }
    for name, kind in kinds.items():
        ensure(f"generate: {name}", kind, given[name])
    if not is_temperature(given["temperature"]):
        raise KVLensError(f"generate: temperature must be {TEMPERATURES}, got {brief(given['temperature'])}")


def is_temperature(value: Any) -> bool:
    """Whether this is a valid temperature: 0 means the most probable token; below `COLDEST` logits would overflow float32."""
    return is_number(value) and (value == 0 or COLDEST <= value <= HOTTEST)


def check_start(cfg: Any, given: Any) -> None:
    """Raise KVLensError unless ``given`` is text, token ids or embeddings that ``generate`` can continue."""
    if cfg.d_vocab_out > cfg.d_vocab:
        raise KVLensError(f"generate: this model predicts {cfg.d_vocab_out} tokens but reads {cfg.d_vocab}: it cannot generate")
    shape = tuple(given.shape) if isinstance(given, Tensor) else None
    if shape is not None and (len(shape) in (1, 2) or (len(shape) == 3 and shape[-1] == cfg.d_model)):
        return
    if isinstance(given, str) or (isinstance(given, list) and given and all(isinstance(text, str) for text in given)):
        return
    came = type(given).__name__ if shape is None else f"shape {list(shape)}"
    raise KVLensError(
        f"generate: expected a string, strings, token ids [pos] or [batch, pos], or embeddings [batch, pos, {cfg.d_model}], "
        f"got {came}"
    )


def read_before_the_last(
    model: HookedTransformer, new: Tensor, mask: Tensor | None, cache: TransformerLensKeyValueCache | None
) -> tuple[Tensor, Tensor | None]:
    """Read a long text into the state of linear attention without logits; returns what is still to be read, with its mask."""
    n = new.shape[1] - 1
    if cache is None or mask is None or new.is_floating_point() or model.cfg.attention != "linear":
        return new, mask
    if n < LONG or has_hooks(model):  # a hook expects the whole text
        return new, mask
    model(new[:, :n], attention_mask=mask[:, :n], past_kv_cache=cache, return_type=None)
    return new[:, n:], mask[:, n:]


def check_left_padding(tokenizer: Any, tokens: Int[Tensor, "batch pos"], mask: Int[Tensor, "batch pos"]) -> None:
    """Raise KVLensError if rows end in padding (new tokens follow the last position), or if padding would be read as text."""
    pads_are_their_own = tokenizer.pad_token_id not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id)
    read_as_text = pads_are_their_own and bool(((tokens[:, 0] == tokenizer.pad_token_id) & mask[:, 0].bool()).any())
    if read_as_text or not bool(mask[:, -1].all()):
        raise KVLensError(
            "generate: rows must be padded on the left, so that the new token follows the text: give strings (which are padded "
            "on the left), or tokens padded on the left together with padding_side='left'"
        )
