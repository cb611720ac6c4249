"""Which layers and heads carry a converted prompt: the size of each bias, its share of the head's output, and the effect of
removing it.

Size and share are descriptive; only an ablation shows whether the model uses a head's bias. A head's bias is ablated by
replacing it with that of the *baseline*, the prompt's BOS alone (without a BOS, the empty prompt), because BOS is always
present and is not part of the prompt's content. The columns ``zero_kl`` and ``zero_loss_change`` set b_KV and b_D to 0
instead, which also removes BOS.
"""

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel
from kvlens.checks import Count, checked

from ..declaration import Columns, analysis
from ..predictions import KL, LOSS_CHANGE
from ..segments import bar_unless
from ..sequences import PromptTokens, TextTokens, prompt_text_bias
from .outputs import bias_outputs, share_by_size
from .parts import HEAD, heads_of
from .removal import baseline_ablation, bias_ablation
from .spectrum import sizes

MEASURES = dict(
    b_kv_norm=("float64", "Frobenius norm of b_KV, its log_scale included"),
    b_d_norm=("float64", "norm of b_D, likewise"),
    bias_share=("float64", "mean over the text's positions of ||z_bias|| / (||z_bias|| + ||z_context||), 0 for 0 / 0"),
    ablation_kl=("float64", f"{KL}; with the baseline's b_KV, b_D and shift state, mean over the text's positions"),
    loss_change=("float64", f"{LOSS_CHANGE}; likewise, mean over the text's next tokens; NaN for one token"),
    zero_kl=("float64", f"{KL}; with b_KV and b_D at 0, BOS's among them, mean over the text's positions"),
    zero_loss_change=("float64", f"{LOSS_CHANGE}; with b_KV and b_D at 0, mean over the text's next tokens; NaN for one token"),
)
BY_HEAD = Columns(layer=("int64", "from 0"), head=("int64", HEAD), **MEASURES)
BY_LAYER = Columns(layer=("int64", "from 0"), **MEASURES)


@analysis(BY_HEAD, "which heads carry a converted prompt: size of the bias, its share of the output, the effect of removing it")
@checked
@torch.no_grad()
def bias_by_head(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
    batch_size: Count | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Describe the bias of each head, and ablate it.

    Args:
        model: linear or softmax.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        bias: the converted prompt, if it has been converted already; None converts it here. For a prompt that continues
            another one, attach that one first: it then belongs to the baseline.
        batch_size, on_progress: as in :func:`kvlens.analyses.bias.removal.bias_ablation`.

    Returns:
        One row per head, by layer, then head:

        {columns}

    Raises:
        KVLensError: tokens that are empty, misshapen or outside the vocabulary.
    """
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    units = [[pair] for pair in heads_of(bias)]
    described = _describe(model, prompt, text, bias, units, batch_size, on_progress)
    return BY_HEAD.frame({"head": [head for ((_, head),) in units], **described})


@BY_LAYER.document
@checked
@torch.no_grad()
def bias_by_layer(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
    batch_size: Count | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Describe the bias of each layer, with the outputs of its heads concatenated, and ablate all of its heads at once.

    Effects do not add up, since information removed from one head may still be carried by another.

    Args:
        model, prompt, text, bias, batch_size, on_progress: as in :func:`bias_by_head`.

    Returns:
        One row per layer with heads:

        {columns}

    Raises:
        KVLensError: as :func:`bias_by_head`.
    """
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    units = [list(of_layer) for _, of_layer in groupby(heads_of(bias), key=itemgetter(0))]
    return BY_LAYER.frame(_describe(model, prompt, text, bias, units, batch_size, on_progress))


def _describe(
    model: KVModel,
    prompt: Int[Tensor, " prompt_pos"],
    text: Int[Tensor, " pos"],
    bias: KVBias,
    units: list[list[tuple[int, int]]],
    batch_size: int | None,
    on_progress: Callable[[float], None] | None,
) -> dict[str, Any]:
    """The columns of both tables, for single heads, or for all heads of a layer, side by side."""
    outputs = bias_outputs(model, bias, text)
    of_bias, of_context = (_norms([z.norm(dim=-1).T for z in part], units) for part in outputs)
    with bar_unless(on_progress, "ablating the bias") as tell:
        with_baseline = baseline_ablation(
            model, prompt, text, units, bias=bias, batch_size=batch_size, on_progress=lambda done: tell(done / 2)
        )
        with_zero = bias_ablation(
            model, bias, text, units, batch_size=batch_size, on_progress=lambda done: tell((1 + done) / 2)
        )
    return {
        "layer": [unit[0][0] for unit in units],
        "b_kv_norm": _norms(sizes(bias, "b_KV"), units),
        "b_d_norm": _norms(sizes(bias, "b_D"), units),
        "bias_share": share_by_size(of_bias, of_context).mean(dim=-1),
        "ablation_kl": with_baseline["kl"],
        "loss_change": with_baseline["loss_change"],
        "zero_kl": with_zero["kl"],
        "zero_loss_change": with_zero["loss_change"],
    }


def _norms(of_heads: list[Float[Tensor, " _ *pos"]], units: list[list[tuple[int, int]]]) -> Float[Tensor, " unit *pos"]:
    """From the norms of heads, layer by layer, those of units of heads side by side."""
    return torch.stack([torch.stack([of_heads[layer][head] for layer, head in unit]).norm(dim=0) for unit in units])
