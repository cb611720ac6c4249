"""Decoding at a cost per token that does not grow with the text.

TransformerLens' ``generate`` copies the embeddings of the whole text for every token. With linear attention, whose state has a
fixed size, that copy soon costs more than the model; the loop here passes on only the new token. Tokenization, sampling,
stopping and padding are those of TransformerLens.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from kvlens._tl import HookedTransformer, TransformerLensKeyValueCache, get_attention_mask, sample_logits
from kvlens.arguments import is_number
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


def check_sampling(
    *,
    max_new_tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    freq_penalty: Any,
    return_type: Any,
    padding_side: Any,
    eos_token_id: Any,
    stop_at_eos: Any,
    do_sample: Any,
    use_past_kv_cache: Any,
    verbose: Any,
    prepend_bos: Any,
    d_vocab: int,
) -> None:
    """Raise KVLensError for an invalid argument of ``generate``, before anything in the model changes."""

    token = Annotated[int, Within(0, d_vocab - 1)]
    if not isinstance(eos_token_id, list | tuple) or not eos_token_id:
        ensure("generate: eos_token_id, one or several,", token | None, eos_token_id)
    ensure("generate: eos_token_id", token | Sequence[token] | None, eos_token_id)
    for name, kind, value in (
        ("stop_at_eos", bool, stop_at_eos),
        ("do_sample", bool, do_sample),
        ("use_past_kv_cache", bool, use_past_kv_cache),
        ("verbose", bool, verbose),
        ("prepend_bos", bool | None, prepend_bos),
        ("max_new_tokens", Annotated[int, Within(1, MOST_NEW)], max_new_tokens),
        ("top_k", Annotated[int, Within(1, MOST_NEW)] | None, top_k),
        ("top_p", Annotated[float, Within(above=0, most=1)] | None, top_p),
        ("freq_penalty", Annotated[float, Within(-HOTTEST, HOTTEST)], freq_penalty),
        ("return_type", Literal["input", "str", "tokens", "embeds"], return_type),
        ("padding_side", Literal["left", "right"] | None, padding_side),
    ):
        ensure(f"generate: {name}", kind, value)
    if not is_temperature(temperature):
        raise KVLensError(f"generate: temperature must be {TEMPERATURES}, got {brief(temperature)}")


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


def generate_from_state(
    model: HookedTransformer,
    input: str | list[str] | Int[Tensor, "batch pos"],  # noqa: A002
    *,
    max_new_tokens: int,
    stop_at_eos: bool,
    eos_token_id: int | Sequence[int] | None,
    prepend_bos: Any,
    padding_side: Any,
    return_type: str,
    verbose: bool,
    do_sample: bool,
    **sampling: Any,
) -> str | list[str] | Int[Tensor, "batch pos_plus_new_tokens"]:
    """``HookedTransformer.generate`` with a cache, for strings and tokens (arguments as there).

    Raises:
        KVLensError: ``stop_at_eos`` without an EOS to stop at, or a string without a tokenizer.
    """
    tokens, mask, is_text = _tokens_and_mask(model, input, prepend_bos, padding_side)
    stops, filler = _stop_tokens(model, stop_at_eos, eos_token_id)
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, model.cfg.device, tokens.shape[0])
    finished = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    text, new, mask = tokens, *_read_all_but_the_last(model, tokens, mask, cache)
    for _ in tqdm(range(max_new_tokens), disable=not verbose):
        logits = model(new, attention_mask=mask, past_kv_cache=cache)[:, -1]
        chosen = sample_logits(logits, tokens=text, **sampling) if do_sample else logits.argmax(dim=-1)
        if stops is not None:
            chosen = torch.where(finished, filler, chosen)
            finished |= torch.isin(chosen, stops)
        new = chosen[:, None].to(tokens)
        mask = torch.ones_like(new)
        text = torch.cat([text, new], dim=1)
        if bool(finished.all()):
            break
    if return_type == "tokens" or (return_type == "input" and not is_text):
        return text
    decoded = [model.tokenizer.decode(row, skip_special_tokens=True) for row in text]  # type: ignore[union-attr]
    return decoded[0] if len(decoded) == 1 else decoded


def _read_all_but_the_last(
    model: HookedTransformer, tokens: Int[Tensor, "batch pos"], mask: Tensor, cache: TransformerLensKeyValueCache
) -> tuple[Tensor, Tensor]:
    """Read a long text into the cache without logits; returns the tokens still to be read, with their mask."""
    n = tokens.shape[1] - 1
    if n < LONG or has_hooks(model):  # a hook expects the whole text
        return tokens, mask
    model(tokens[:, :n], attention_mask=mask[:, :n], past_kv_cache=cache, return_type=None)
    return tokens[:, n:], mask[:, n:]


def _tokens_and_mask(model: HookedTransformer, given: Any, prepend_bos: Any, padding_side: Any) -> tuple[Tensor, Tensor, bool]:
    """The tokens, their mask, and whether text was given. A batch of texts is padded on the left."""
    if isinstance(given, Tensor):
        tokens, side = given.to(model.W_E.device), padding_side if padding_side in ("left", "right") else None
    else:
        side = "left" if isinstance(given, list) and len(given) > 1 else None
        tokens = model.to_tokens(given, prepend_bos=prepend_bos, padding_side=side or padding_side)
    model.check_tokens(tokens)
    if model.tokenizer is None:
        return tokens, torch.ones_like(tokens), False
    has_bos = prepend_bos if isinstance(prepend_bos, bool) else model.prepends_bos
    mask = get_attention_mask(model.tokenizer, tokens, has_bos, side)
    _check_left_padding(model, tokens, mask)
    return tokens, mask, not isinstance(given, Tensor)


def _check_left_padding(model: HookedTransformer, tokens: Tensor, mask: Tensor) -> None:
    """Raise KVLensError if rows end in padding (new tokens follow the last position), or if padding would be read as text."""
    tokenizer = model.tokenizer
    pads_are_their_own = tokenizer.pad_token_id not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id)  # type: ignore
    read_as_text = pads_are_their_own and bool(((tokens[:, 0] == tokenizer.pad_token_id) & mask[:, 0].bool()).any())  # type: ignore
    if read_as_text or not bool(mask[:, -1].all()):
        raise KVLensError(
            "generate: rows must be padded on the left, so that the new token follows the text: give strings (which are padded "
            "on the left), or tokens padded on the left together with padding_side='left'"
        )


def _stop_tokens(
    model: HookedTransformer, stop_at_eos: bool, eos_token_id: int | Sequence[int] | None
) -> tuple[Tensor | None, int]:
    """The tokens that end a row (None if nothing does), and the token that fills a finished row."""
    if not stop_at_eos:
        return None, 0
    own = None if model.tokenizer is None else model.tokenizer.eos_token_id
    stops = own if eos_token_id is None else eos_token_id
    if stops is None:
        raise KVLensError(
            "generate: stop_at_eos=True needs an EOS, and this model has none: pass eos_token_id, or stop_at_eos=False"
        )
    several = [stops] if isinstance(stops, int) else list(stops)
    filler = several[0] if own is None or isinstance(stops, int) else own
    return torch.tensor(several, device=model.W_E.device), filler
