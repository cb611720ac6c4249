"""Forward passes over one text in three conditions, shared by all analyses that compare them.

- ``with_prompt``: the model reads [prompt; text];
- ``without_prompt``: the model reads the text at the same positions, after only the BOS with which the prompt began;
- ``converted``: the model reads the text alone, with the converted prompt attached as a bias.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVLensError, KVModel

from ..predictions import text_logits
from ..sequences import baseline_sequence, instead_of_prompt

CONDITIONS = ("with_prompt", "without_prompt", "converted")


class Reading(NamedTuple):
    """The results of a forward pass at the positions of the text.

    Attributes:
        logits: logits of the next tokens.
        residuals: the residual stream before each layer and after the last; None unless requested.
    """

    logits: Float[Tensor, "text_pos d_vocab"]
    residuals: Float[Tensor, "depth text_pos d_model"] | None


Readings = Mapping[str, Reading]
"""By condition."""


def check_readings(readings: Readings, conditions: Sequence[str], n_positions: int, *, residuals: bool = False) -> None:
    """Raise KVLensError unless ``readings`` are those of ``n_positions`` text tokens in ``conditions``."""
    for condition in conditions:
        reading = readings.get(condition)
        if not isinstance(reading, Reading) or len(reading.logits) != n_positions:
            came = "none" if reading is None else type(reading).__name__
            came = f"one of {len(reading.logits)}" if isinstance(reading, Reading) else came
            raise KVLensError(f"readings: expected a Reading of {n_positions} positions for {condition!r}, got {came}")
        if residuals and reading.residuals is None:
            raise KVLensError(f"readings: that of {condition!r} was read without residuals=True")


@torch.no_grad()
def read_text(
    model: KVModel,
    prompt: Int[Tensor, " prompt_pos"],
    text: Int[Tensor, " text_pos"],
    *,
    bias: KVBias | None = None,
    baseline: Int[Tensor, " baseline_pos"] | None = None,
    conditions: Sequence[str] = CONDITIONS,
    residuals: bool = False,
) -> dict[str, Reading]:
    """The readings of ``text`` in ``conditions``, in their order.

    Args:
        model: the model; what is attached to it is used in all conditions.
        prompt, text: tokens.
        bias: the converted prompt; only ``converted`` needs it.
        baseline: the tokens that stand in the prompt's place in ``without_prompt``, from its first position on; None takes the
            prompt's BOS, if it has one.
        conditions: some of :data:`CONDITIONS`.
        residuals: keep the residual stream as well.
    """
    baseline = baseline_sequence(model, prompt, None) if baseline is None else baseline
    found = {}
    for condition in conditions:
        streams: list[Tensor] | None = [] if residuals else None
        if condition == "converted":
            assert bias is not None
            with model.kv_bias(bias):
                logits = text_logits(model, None, text, streams)
        elif condition == "with_prompt":
            logits = text_logits(model, prompt, text, streams)
        else:
            before, kept = instead_of_prompt(prompt, baseline)
            logits = text_logits(model, before, text, streams, kept=kept)
        found[condition] = Reading(logits, None if streams is None else torch.stack(streams))
    return found
