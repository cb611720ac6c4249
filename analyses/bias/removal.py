"""Removing a converted prompt from chosen heads: the effect on the text's predictions.

Removing a head's bias sets its b_KV and b_D to zero; the shift state and the position offset are kept. Many removals run in
one forward pass, each as a row of a batch of biases.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import KVBias, KVLensError, KVModel
from kvlens.checks import Count, checked

from ..declaration import Columns
from ..predictions import KL, LOSS_CHANGE
from ..segments import bar_unless
from ..sequences import PromptTokens, TextTokens, bias_and_text, prompt_text_bias
from ..stream.logit_attribution import logit_target
from .baseline import baseline_of, has_baseline
from .effects import measured_effects
from .interventions import Interventions, donors_of, kept
from .one_space import with_references

Heads = Sequence[tuple[int, int]]


COLUMNS = Columns(
    removal=("int64", "index into ``removals``"),
    n_heads=("int64", "how many heads were removed"),
    kl=("float64", f"{KL}; without these heads, mean over the text's positions"),
    loss_change=("float64", f"{LOSS_CHANGE}; without these heads, mean over the text's next tokens; NaN for one token"),
)


@COLUMNS.document
@checked
@torch.no_grad()
def bias_ablation(
    model: KVModel,
    prompt: KVBias | PromptTokens,
    text: TextTokens,
    removals: Sequence[Heads],
    *,
    batch_size: Count | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Measure the effect of each removal relative to the whole bias.

    Args:
        model: linear or softmax.
        prompt: a bias, or a string or tokens [pos], which are converted here.
        text: a string, or tokens [pos] without BOS.
        removals: for each, the (layer, head) pairs whose bias is removed; an empty one changes nothing.
        batch_size: removals per forward pass; None takes what :data:`kvlens.memory.NUMBERS_PER_PASS` allows.
        on_progress: called with the fraction done after each forward pass; None shows a bar on a terminal if it takes long.

    Returns:
        One row per removal, in the order given:

        {columns}

    Raises:
        KVLensError: a head that does not exist, a batch of biases, a bias of another model, invalid tokens.
    """
    bias, text = bias_and_text(model, "bias_ablation", prompt, text)
    keep = _kept_heads(bias, removals)
    options: dict[str, Any] = dict(batch_size=batch_size, on_progress=on_progress)
    return _effects(model, text, bias, keep, torch.ones_like(keep), donors_of(bias), **options)


def _effects(
    model: KVModel, text: Tensor, bias: KVBias, keep: Tensor, keep_shift_state: Tensor, donors: KVBias, **options: Any
) -> pd.DataFrame:
    """The table of what is not kept being replaced by the first of ``donors``."""
    rows = Interventions(keep, keep_shift_state, torch.zeros(len(keep), dtype=torch.long, device=keep.device), donors)
    with bar_unless(options.pop("on_progress"), "ablating the bias") as tell:
        effects = measured_effects(model, text, bias, rows, logit_target(model, text), on_progress=tell, **options)
    removed = {"removal": range(len(keep)), "n_heads": (1 - keep).sum(dim=(1, 2)).long()}
    return COLUMNS.frame({**removed, "kl": effects["kl"], "loss_change": effects["loss_change"]})


@COLUMNS.document
@checked
@torch.no_grad()
def baseline_ablation(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    removals: Sequence[Heads],
    *,
    bias: KVBias | None = None,
    batch_size: Count | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Replace heads of a converted prompt by those of the baseline, including the shift state, so that BOS is kept.

    The inputs of a recurrent layer's convolution belong to no head, and are replaced with all heads of the layer. With random,
    Taylor or learned features there is no baseline, and removed heads become 0.

    Args:
        model: linear or softmax, with the bias attached that the prompt continues.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        removals, batch_size, on_progress: as in :func:`bias_ablation`.
        bias: the converted prompt, if it has been converted already; None converts it here.

    Returns:
        One row per removal, in the order given:

        {columns}

    Raises:
        KVLensError: as :func:`bias_ablation`; a bias that is not this prompt's.
    """
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    baseline = baseline_of(model, prompt)
    if not bias.starts_where(baseline):
        raise KVLensError(
            f"bias: the text starts at position {bias.position_offset} after this bias, and at "
            f"{int(torch.as_tensor(baseline.position_offset).max())} after the prompt: give the bias of this prompt; if it "
            "continues another one, attach that one"
        )
    own, donors = with_references(bias, baseline) if has_baseline(bias) else (bias, donors_of(bias))
    assert donors is not None
    keep = _kept_heads(own, removals)
    keep_shift_state = keep.clone()
    for layer in [layer for layer in own.recurrent.layers if own.n_heads_of(layer)]:
        first = own.first_state_head(layer)
        keep_shift_state[:, layer, first:] = keep[:, layer, first : own.n_heads_of(layer)].amax(dim=-1, keepdim=True)
    options: dict[str, Any] = dict(batch_size=batch_size, on_progress=on_progress)
    return _effects(model, text, own, keep, keep_shift_state, donors, **options)


def _kept_heads(bias: KVBias, removals: Sequence[Heads]) -> Float[Tensor, "removal layer head"]:
    """0 at the heads that each removal takes."""
    for row, removal in enumerate(removals):
        for layer, head in removal:
            if not (0 <= layer < bias.n_layers and 0 <= head < bias.n_heads_of(layer)):
                heads = sorted({bias.n_heads_of(layer) for layer in range(bias.n_layers)})
                raise KVLensError(
                    f"bias_ablation: removal {row} names layer {layer}, head {head}; there are {bias.n_layers} layers "
                    f"of {' or '.join(map(str, heads))} heads, counted from 0"
                )
    return kept(bias, removals)
