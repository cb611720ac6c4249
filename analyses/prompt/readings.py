"""One text, read in three conditions: a forward pass for each, for all analyses that compare them.

- ``with_prompt``: the model reads [prompt; text];
- ``without_prompt``: the model reads the text with nothing in front but the BOS that the prompt began with;
- ``converted``: the model reads the text alone, under the bias that the prompt was converted to.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError

from ..predictions import text_logits
from ..sequences import baseline_sequence

CONDITIONS = ("with_prompt", "without_prompt", "converted")


class Reading(NamedTuple):
    """What a forward pass found at the positions of the text.

    Attributes:
        logits: of the next tokens.
        residuals: the residual stream before each layer and after the last; None where it was not asked for.
    """

    logits: Float[Tensor, "text_pos d_vocab"]
    residuals: Float[Tensor, "depth text_pos d_model"] | None


Readings = Mapping[str, Reading]
"""By condition."""


def check_readings(readings: Readings, conditions: Sequence[str], n_positions: int, *, residuals: bool = False) -> None:
    """Raise KVLensError unless readings at hand are those of ``n_positions`` text tokens in ``conditions``."""
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
    model: HookedKVTransformer,
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
        model: with nothing attached but what is to stay.
        prompt, text: tokens.
        bias: the converted prompt; only ``converted`` needs it.
        baseline: what stands in front of the text in ``without_prompt``; None takes the prompt's BOS, where it has one.
        conditions: of :data:`CONDITIONS`.
        residuals: keep the residual stream as well.
    """
    baseline = baseline_sequence(model, prompt, None) if baseline is None else baseline
    before = {"with_prompt": prompt, "without_prompt": baseline, "converted": None}
    found = {}
    for condition in conditions:
        streams: list[Tensor] | None = [] if residuals else None
        if condition == "converted":
            assert bias is not None
            with model.kv_bias(bias):
                logits = text_logits(model, None, text, streams)
        else:
            logits = text_logits(model, before[condition], text, streams)
        found[condition] = Reading(logits, None if streams is None else torch.stack(streams))
    return found
