"""The effect of a prompt on each next token at each depth: the logit lens, with and without the prompt.

The residual stream before layer l, through the final norm and the unembedding, is a guess at the next token (the logit lens).
The increase of its loss without the prompt measures how much of the prompt's effect is present at this depth.

Source: nostalgebraist 2020, interpreting GPT: the logit lens; TransformerLens' ``ActivationCache.accumulated_resid``.
"""

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import KVModel
from kvlens.checks import checked

from ..declaration import Columns, analysis
from ..predictions import LOSS_CHANGE, log_probabilities, next_token_losses
from ..sequences import (
    BaselineTokens,
    PromptTokens,
    TextTokens,
    baseline_sequence,
    one_sequence,
    prompt_sequence,
)
from ..texts import next_token_texts, token_texts
from .readings import Readings, check_readings, read_text

COLUMNS = Columns(
    layer=("int64", "number of layers applied; the number of layers for the whole model"),
    position=("int64", "0 is the first token of the text"),
    token=("str", "the token at this position"),
    next_token=("str", "the token that follows in the text, missing at the last position"),
    loss_with=("float64", "-log p(next_token) at this depth with the prompt, nats; NaN at the last position"),
    loss_without=("float64", "the same without the prompt"),
    loss_change=("float64", f"{LOSS_CHANGE}; without the prompt, loss_without - loss_with"),
    guess_with=("str", "the likeliest next token at this depth with the prompt"),
    guess_without=("str", "the same without the prompt"),
)


@analysis(COLUMNS, "the effect of a prompt on each next token at each depth (logit lens)")
@checked
@torch.no_grad()
def prompt_by_depth(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    baseline: BaselineTokens | None = None,
    readings: Readings | None = None,
) -> pd.DataFrame:
    """Measure losses on the text at every depth, with and without the prompt.

    Args:
        model: with any attention; what is attached to it stays attached.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        baseline: [pos], the tokens that stand in the prompt's place "without the prompt", possibly none; None takes the
            prompt's BOS, or nothing if the prompt does not begin with the tokenizer's BOS. They start at the prompt's first
            position, and the text keeps its positions: nothing but what stands before it differs.
        readings: of this text with and without the prompt, residuals included, if they have been read already; None reads it
            here.

    Returns:
        By depth, then position of the text:

        {columns}

    Raises:
        KVLensError: tokens that are empty, misshapen or outside the vocabulary.
    """
    prompt = prompt_sequence(model, "prompt", prompt)
    text = one_sequence(model, "text", text)
    baseline = baseline_sequence(model, prompt, baseline)
    if readings is None:
        conditions = ("with_prompt", "without_prompt")
        readings = read_text(model, prompt, text, baseline=baseline, conditions=conditions, residuals=True)
    check_readings(readings, ("with_prompt", "without_prompt"), len(text), residuals=True)
    streams = [readings[condition].residuals for condition in ("with_prompt", "without_prompt")]
    tokens, n_depths = token_texts(model, text), model.cfg.n_layers + 1
    losses: dict[str, list[Tensor]] = {"with": [], "without": []}
    guesses: dict[str, list[Tensor]] = {"with": [], "without": []}
    for depth in range(n_depths):
        for name, stream in zip(losses, streams, strict=True):
            assert stream is not None
            log_p = log_probabilities(model.logits_of(stream[depth][None])[0])
            losses[name].append(next_token_losses(log_p, text))
            guesses[name].append(log_p.argmax(dim=-1))
    loss_with, loss_without = (torch.stack(losses[name]) for name in ("with", "without"))
    return COLUMNS.frame(
        {
            "layer": torch.arange(n_depths)[:, None].expand(-1, len(text)),
            "position": torch.arange(len(text)).expand(n_depths, -1),
            "token": tokens * n_depths,
            "next_token": [*tokens[1:], None] * n_depths,
            "loss_with": loss_with,
            "loss_without": loss_without,
            "loss_change": loss_without - loss_with,
            **{f"guess_{name}": _texts_by_depth(model, text, torch.stack(guesses[name])) for name in guesses},
        }
    )


def _texts_by_depth(model: KVModel, text: Tensor, guesses: Int[Tensor, "depth pos"]) -> list[str]:
    """The guesses as text, by depth, then position."""
    by_place = next_token_texts(model, text, guesses.T)
    return [texts[depth] for depth in range(len(guesses)) for texts in by_place]
