"""The effect of a prompt on the predictions on a text, and whether its conversion has the same effect.

The three conditions of :mod:`kvlens.analyses.prompt.readings`, aligned on the tokens of the text.
"""

import pandas as pd
import torch

from kvlens import KVBias, KVModel
from kvlens.checks import checked

from ..declaration import Columns, analysis
from ..predictions import KL, kl_divergence, log_probabilities, next_token_losses
from ..sequences import BaselineTokens, PromptTokens, TextTokens, baseline_sequence, prompt_text_bias
from ..texts import next_token_texts, token_texts
from .readings import CONDITIONS, Readings, check_readings, read_text

COLUMNS = Columns(
    position=("int64", "0 is the first token of the text"),
    token=("str", "the token at this position"),
    next_token=("str", "the token that follows in the text, missing at the last position"),
    condition=("str", "``with_prompt``, ``without_prompt`` or ``converted``"),
    predicted_token=("str", "the most probable next token"),
    kl=("float64", f"{KL}; original ``with_prompt``, intervened this condition"),
    argmax_agrees=("bool", "whether the most probable next token is that of ``with_prompt``"),
    loss=("float64", "-log p(next_token) in nats, NaN at the last position"),
)


@analysis(COLUMNS, "the effect of a prompt on the predictions on a text, and whether its conversion has the same effect")
@checked
@torch.no_grad()
def prompt_effect(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    baseline: BaselineTokens | None = None,
    bias: KVBias | None = None,
    readings: Readings | None = None,
) -> pd.DataFrame:
    """Compare the next-token predictions on the text in the three conditions.

    Args:
        model: linear or softmax.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        baseline: [pos], the tokens that stand in the prompt's place "without the prompt", possibly none; None takes the
            prompt's BOS, or nothing if the prompt does not begin with the tokenizer's BOS. They start at the prompt's first
            position, and the text keeps its positions: nothing but what stands before it differs.
        bias: the converted prompt, if it has been converted already; None converts it here.
        readings: of this text in the three conditions, if they have been read already; None reads it here.

    Returns:
        One row per position of the text and condition, positions in order, conditions as in :data:`CONDITIONS`:

        {columns}

    Raises:
        KVLensError: tokens that are empty, misshapen or outside the vocabulary.
    """
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    if readings is None:
        readings = read_text(model, prompt, text, bias=bias, baseline=baseline_sequence(model, prompt, baseline))
    check_readings(readings, CONDITIONS, len(text))
    logits = {condition: readings[condition].logits for condition in CONDITIONS}
    tokens = token_texts(model, text)
    reference = log_probabilities(logits["with_prompt"])
    frames = []
    for condition in CONDITIONS:
        log_p, predicted = log_probabilities(logits[condition]), logits[condition].argmax(dim=-1)
        frames.append(
            COLUMNS.frame(
                {
                    "position": range(len(text)),
                    "token": tokens,
                    "next_token": [*tokens[1:], None],
                    "condition": condition,
                    "predicted_token": [name for (name,) in next_token_texts(model, text, predicted[:, None])],
                    "kl": kl_divergence(reference, log_p),
                    "argmax_agrees": (predicted == logits["with_prompt"].argmax(dim=-1)),
                    "loss": next_token_losses(log_p, text),
                }
            )
        )
    return pd.concat(frames).sort_values("position", kind="stable", ignore_index=True)
