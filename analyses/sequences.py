"""What the analyses of one prompt and one text share: reading them, and the prompt's bias.

Every analysis calls them ``prompt`` and ``text``. Each is a string, or token ids [pos] or [1, pos]. A string becomes the
tokens that the model would read: a prompt begins with BOS where the model is used to one and holds no bias; a text follows a
prompt and gets none. Comparisons are made on concatenated tokens, never on concatenated text: the tokens of "ab" are not those
of "a" and "b".

Where an analysis needs only what the prompt leaves behind, ``prompt`` may also be a `KVBias`, and `converted` reads it. Where
an analysis needs the prompt's own tokens, `prompt_sequence` reads it, and refuses a bias, which has none.
"""

from typing import Any

from jaxtyping import Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError, KVModel, convert_prompt

PromptTokens = str | Int[Tensor, "*one_prompt prompt_pos"]
CorruptedTokens = str | Int[Tensor, "*one_corrupted corrupted_pos"]
TextTokens = str | Int[Tensor, "*one_text text_pos"]
BaselineTokens = str | Int[Tensor, "*one_baseline baseline_pos"]


def one_sequence(
    model: HookedKVTransformer, what: str, tokens: Any, *, may_be_empty: bool = False, prepend_bos: bool = False
) -> Int[Tensor, " pos"]:
    """``tokens``, a string or ids [pos] or [1, pos], as ids [pos] on the model's device.

    Args:
        model: whose tokenizer reads strings.
        what: the argument's name, for messages.
        tokens: what was given.
        may_be_empty: whether no token at all will do.
        prepend_bos: whether a string gets a BOS in front.

    Raises:
        KVLensError: something else, several sequences, nothing, ids outside the vocabulary, a string without a tokenizer.
    """
    check_is_model(what, model)
    return read_sequence(model, what, tokens, may_be_empty=may_be_empty, prepend_bos=prepend_bos)


def read_sequence(
    model: KVModel, what: str, tokens: Any, *, may_be_empty: bool = False, prepend_bos: bool = False
) -> Int[Tensor, " pos"]:
    """:func:`one_sequence` for a model of either front end."""
    if isinstance(tokens, str):
        if model.tokenizer is None:
            raise KVLensError(f"{what}: this model has no tokenizer, so it cannot read {tokens[:40]!r}; give token ids")
        text, tokens = tokens, model.to_tokens(tokens, prepend_bos=prepend_bos, truncate=False)
        if tokens.shape[1] <= int(prepend_bos) and not may_be_empty:
            raise KVLensError(f"{what}: the tokenizer finds no tokens in {text[:40]!r}; give another text, or token ids")
    if isinstance(tokens, Tensor) and tokens.dim() == 2 and len(tokens) == 1:
        tokens = tokens[0]
    if not isinstance(tokens, Tensor) or tokens.dim() != 1:
        came = f"shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise KVLensError(f"{what}: expected a string or token ids [pos] or [1, pos], got {came}; one at a time")
    if tokens.numel() == 0 and not may_be_empty:
        raise KVLensError(f"{what}: it is empty; give at least one token")
    try:
        if tokens.numel():
            model.check_tokens(tokens)
    except KVLensError as error:
        raise KVLensError(f"{what}: {error}") from error
    return tokens.to(model.cfg.device)


def check_is_model(what: str, model: Any) -> None:
    """Raise KVLensError unless ``model`` is one of kvlens."""
    if not isinstance(model, HookedKVTransformer):
        raise KVLensError(f"{what}: expected a HookedKVTransformer to read it with, got {type(model).__name__}")


def prompt_sequence(model: HookedKVTransformer, what: str, prompt: Any, initial: KVBias | None = None) -> Int[Tensor, " pos"]:
    """A prompt as ids [pos]; a string gets a BOS as in ``convert_prompt``: by the model's habit, where nothing is continued.

    Raises:
        KVLensError: a bias, which has no tokens; otherwise as :func:`one_sequence`.
    """
    check_is_model(what, model)
    if isinstance(prompt, KVBias):
        raise KVLensError(
            f"{what}: this analysis reads the prompt's own tokens, and a bias has none; give the prompt as a string or token "
            "ids (an analysis that can use its bias as well takes it as bias=)"
        )
    continues = initial is not None or model.attached_kv_bias is not None
    return one_sequence(model, what, prompt, prepend_bos=model.prepends_bos and not continues)


def begins_with_bos(model: HookedKVTransformer, prompt: Int[Tensor, " pos"]) -> bool:
    """Whether the first token is the tokenizer's BOS, which is always there."""
    return model.tokenizer is not None and len(prompt) > 0 and int(prompt[0]) == model.tokenizer.bos_token_id


def baseline_sequence(model: HookedKVTransformer, prompt: Int[Tensor, " pos"], given: Any) -> Int[Tensor, " baseline_pos"]:
    """What precedes a text without its prompt: ``given``, or the BOS that the prompt began with, or nothing."""
    if given is not None:
        return one_sequence(model, "baseline", given, may_be_empty=True)
    return prompt[: int(begins_with_bos(model, prompt))]


def bias_of(model: HookedKVTransformer, prompt: Int[Tensor, " pos"], bias: KVBias | None) -> KVBias:
    """``bias`` if the caller has converted the prompt already, else its conversion."""
    return one_bias("bias", convert_prompt(model, prompt) if bias is None else bias)


def one_bias(what: str, bias: KVBias) -> KVBias:
    """``bias``, or KVLensError that names ``what`` for a batch of biases, and for what is none."""
    if not isinstance(bias, KVBias):
        raise KVLensError(f"{what}: expected a KVBias, got {type(bias).__name__}; convert_prompt(model, prompt) makes one")
    if bias.batch_size is not None:
        raise KVLensError(
            f"{what}: expected the bias of one prompt, got a batch of {bias.batch_size}; bias.select_prompt(i) picks one"
        )
    return bias


def converted(model: HookedKVTransformer, what: str, prompt: Any) -> KVBias:
    """The bias of a prompt that is given as such, or as a string or tokens."""
    if isinstance(prompt, KVBias):
        return one_bias(what, prompt)
    return convert_prompt(model, prompt_sequence(model, what, prompt))


def prompt_text_bias(
    model: HookedKVTransformer, prompt: PromptTokens, text: TextTokens, bias: KVBias | None
) -> tuple[Tensor, Tensor, KVBias]:
    """What every analysis of one prompt and one text begins with: both read, and the prompt's bias."""
    prompt = prompt_sequence(model, "prompt", prompt)
    text = one_sequence(model, "text", text)
    return prompt, text, bias_of(model, prompt, bias)


def bias_and_text(model: HookedKVTransformer, analysis: str, prompt: Any, text: Any) -> tuple[KVBias, Tensor]:
    """What every analysis of one bias and one text begins with: the prompt, converted or still to be, and the text."""
    if isinstance(text, KVBias):
        raise KVLensError(f"{analysis}: the bias comes before the text: {analysis}(model, bias, text, ...)")
    text = one_sequence(model, "text", text)
    return converted(model, analysis, prompt), text
