"""Removing parts of a converted prompt: what the text's predictions lose when chosen heads forget it.

Removing a head's bias sets its b_KV and b_D to zero; the shift boundary and the position offset stay. Many removals run in
one forward pass, each as a row of a batch of biases.
"""

from collections.abc import Callable, Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError
from kvlens.signature import checked

from ..declaration import Columns
from ..predictions import KL, LOSS_CHANGE
from ..sequences import PromptTokens, TextTokens, bias_and_text
from ..stream.logit_attribution import logit_target
from .effects import measured_effects
from .interventions import Interventions, donors_of

Heads = Sequence[tuple[int, int]]


COLUMNS = Columns(
    removal=("int64", "index into ``removals``"),
    n_heads=("int64", "how many heads were removed"),
    kl=("float64", f"{KL}; without these heads, mean over the text's places"),
    loss_change=("float64", f"{LOSS_CHANGE}; without these heads, mean over the text's next tokens; NaN for one token"),
)


@COLUMNS.document
@checked
@torch.no_grad()
def bias_ablation(
    model: HookedKVTransformer,
    prompt: KVBias | PromptTokens,
    text_tokens: TextTokens,
    removals: Sequence[Heads],
    *,
    batch_size: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Measure what each removal changes against the whole bias.

    Args:
        model: linear or softmax.
        prompt: converted, or a string or tokens [pos], which are converted here.
        text_tokens: a string, or tokens [pos] without BOS.
        removals: for each, the (layer, head) pairs whose bias is removed; an empty one changes nothing.
        batch_size: removals per forward pass; None takes what :data:`kvlens.analyses.passes.MEMORY_PER_PASS` allows.
        on_progress: called with the fraction done after each forward pass.

    Returns:
        One row per removal, in the order given:

        {columns}

    Raises:
        KVLensError: a head that does not exist, a batch of biases, a bias of another model, tokens that do not fit.
    """
    bias, text = bias_and_text(model, "bias_ablation", prompt, text_tokens)
    keep = _kept_heads(bias, removals)
    no_donor = torch.zeros(len(keep), dtype=torch.long, device=keep.device)
    rows = Interventions(keep, torch.ones_like(keep), no_donor, donors_of(bias))
    target = logit_target(model, text)
    effects = measured_effects(model, text, bias, rows, target, batch_size=batch_size, on_progress=on_progress)
    n_heads = (1 - keep).sum(dim=(1, 2)).long()
    removed = {"removal": range(len(removals)), "n_heads": n_heads}
    return COLUMNS.frame({**removed, "kl": effects["kl"], "loss_change": effects["loss_change"]})


def _kept_heads(bias: KVBias, removals: Sequence[Heads]) -> Float[Tensor, "removal layer head"]:
    keep = bias.b_KV.new_ones(len(removals), bias.n_layers, bias.n_heads)
    for row, removal in enumerate(removals):
        for layer, head in removal:
            if not (0 <= layer < bias.n_layers and 0 <= head < bias.n_heads):
                raise KVLensError(
                    f"bias_ablation: removal {row} names layer {layer}, head {head}; there are {bias.n_layers} layers "
                    f"of {bias.n_heads} heads, counted from 0"
                )
            keep[row, layer, head] = 0
    return keep
