"""Reading the arguments ``prompt`` and ``text`` of an analysis, and converting the prompt.

Each is a string, a chat, or token ids [pos] or [1, pos]. A string is tokenized as the model would: a prompt gets a BOS if that
is the model's default and no bias is attached; a text follows a prompt and gets none. Comparisons are made on concatenated
tokens, never on concatenated strings, since the tokens of "ab" need not be those of "a" and "b".

If an analysis needs only the converted prompt, ``prompt`` may also be a `KVBias`, and is read by `converted`. If it needs the
prompt's tokens, `prompt_sequence` reads it, and refuses a bias, which has none.
"""

from jaxtyping import Int
from torch import Tensor

from kvlens import Chat, KVBias, KVLensError, KVModel, convert_prompt
from kvlens.chat import one_sequence

PromptTokens = str | Chat | list[dict[str, str]] | Int[Tensor, "*one_prompt prompt_pos"]
CorruptedTokens = str | Chat | list[dict[str, str]] | Int[Tensor, "*one_corrupted corrupted_pos"]
TextTokens = str | Int[Tensor, "*one_text text_pos"]
BaselineTokens = str | Int[Tensor, "*one_baseline baseline_pos"]


def prompt_sequence(model: KVModel, what: str, prompt: object, initial: KVBias | None = None) -> Int[Tensor, " pos"]:
    """Read a prompt as ids [pos]; a string gets a BOS as in ``convert_prompt``: by default, unless it continues a bias.

    Raises:
        KVLensError: a bias, which has no tokens; otherwise as :func:`one_sequence`.
    """
    if isinstance(prompt, KVBias):
        raise KVLensError(
            f"{what}: this analysis reads the prompt's own tokens, and a bias has none; give the prompt as a string or token "
            "ids (an analysis that can use its bias as well takes it as bias=)"
        )
    continues = initial is not None or model.attached_kv_bias is not None
    return one_sequence(model, what, prompt, prepend_bos=model.prepends_bos and not continues)


def bias_of(model: KVModel, prompt: Int[Tensor, " pos"], bias: KVBias | None) -> KVBias:
    """``bias`` if it is given, else the converted prompt."""
    return one_bias("bias", convert_prompt(model, prompt) if bias is None else bias)


def one_bias(what: str, bias: KVBias) -> KVBias:
    """Return ``bias``; raise KVLensError that names ``what`` for a batch of biases."""
    if bias.batch_size is not None:
        raise KVLensError(
            f"{what}: expected the bias of one prompt, got a batch of {bias.batch_size}; bias.select_prompt(i) picks one"
        )
    return bias


def check_detached(what: str, model: KVModel) -> None:
    """Raise KVLensError where a bias is attached, which every pass of the analysis would read."""
    if model.attached_kv_bias is not None:
        raise KVLensError(f"{what}: a bias is attached to this model; detach it first (model.detach_kv_bias())")


def converted(model: KVModel, what: str, prompt: object) -> KVBias:
    """The bias of a prompt, given as a bias, a string or tokens."""
    if isinstance(prompt, KVBias):
        return one_bias(what, prompt)
    return convert_prompt(model, prompt_sequence(model, what, prompt))


def prompt_text_bias(
    model: KVModel, prompt: PromptTokens, text: TextTokens, bias: KVBias | None
) -> tuple[Tensor, Tensor, KVBias]:
    """Read the prompt and the text of an analysis, and convert the prompt."""
    prompt = prompt_sequence(model, "prompt", prompt)
    text = one_sequence(model, "text", text)
    return prompt, text, bias_of(model, prompt, bias)


def bias_and_text(model: KVModel, analysis: str, prompt: object, text: object) -> tuple[KVBias, Tensor]:
    """Read the prompt of an analysis, converted already or not, as a bias, and the text."""
    text = one_sequence(model, "text", text)
    return converted(model, analysis, prompt), text
