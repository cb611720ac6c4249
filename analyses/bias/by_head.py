"""Which layers and heads carry a converted prompt: the size of each bias, its share of the head's output, and the effect of
removing it.

Size and share are descriptive; only an ablation shows whether the model uses a head's bias. A head's bias is ablated by
replacing it with that of the *baseline*, the prompt's BOS alone (without a BOS, the empty prompt), because BOS is always
present and is not part of the prompt's content. The columns ``zero_kl`` and ``zero_loss_change`` set b_KV and b_D to 0
instead, which also removes BOS.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pandas as pd
import torch

from kvlens import HookedKVTransformer, KVBias
from kvlens.checks import checked

from ..declaration import Analysis, Columns
from ..inputs import PROMPT, TEXT
from ..predictions import KL, LOSS_CHANGE
from ..sequences import PromptTokens, TextTokens, prompt_text_bias
from .outputs import bias_outputs, share_by_size
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
BY_HEAD = Columns(layer=("int64", "from 0"), head=("int64", "query head"), **MEASURES)
BY_LAYER = Columns(layer=("int64", "from 0"), **MEASURES)


@BY_HEAD.document
@checked
@torch.no_grad()
def bias_by_head(
    model: HookedKVTransformer,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
    batch_size: int | None = None,
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
    described = _describe(model, prompt, text, bias, 1, batch_size, on_progress)
    layer, head = torch.cartesian_prod(torch.arange(model.cfg.n_layers), torch.arange(model.cfg.n_heads)).T
    return BY_HEAD.frame({"layer": layer, "head": head, **described})


@BY_LAYER.document
@checked
@torch.no_grad()
def bias_by_layer(
    model: HookedKVTransformer,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
    batch_size: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Describe the bias of each layer, with the outputs of its heads concatenated, and ablate all of its heads at once.

    Effects do not add up, since information removed from one head may still be carried by another.

    Args:
        model, prompt, text, bias, batch_size, on_progress: as in :func:`bias_by_head`.

    Returns:
        One row per layer:

        {columns}

    Raises:
        KVLensError: as :func:`bias_by_head`.
    """
    described = _describe(model, prompt, text, bias, model.cfg.n_heads, batch_size, on_progress)
    return BY_LAYER.frame({"layer": range(model.cfg.n_layers), **described})


def _describe(
    model: HookedKVTransformer,
    prompt: PromptTokens,
    text: TextTokens,
    bias: KVBias | None,
    heads_a_group: int,
    batch_size: int | None,
    on_progress: Callable[[float], None] | None,
) -> dict[str, Any]:
    """The numbers of both tables, for groups of consecutive heads: single heads, or all heads of a layer concatenated."""
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    outputs = bias_outputs(model, bias, text)
    of_bias, of_context = (z.square().sum(dim=-1).unflatten(2, (-1, heads_a_group)).sum(dim=-1).sqrt() for z in outputs[:2])
    pairs = list(product(range(bias.n_layers), range(bias.n_heads)))
    groups = [pairs[first : first + heads_a_group] for first in range(0, len(pairs), heads_a_group)]
    tell = on_progress or (lambda done: None)
    options: dict[str, Any] = dict(batch_size=batch_size)
    effect = baseline_ablation(model, prompt, text, groups, bias=bias, **options, on_progress=lambda done: tell(done / 2))
    zero = bias_ablation(model, bias, text, groups, **options, on_progress=lambda done: tell((1 + done) / 2))
    return {
        "b_kv_norm": sizes(bias, "b_KV", heads_a_group),
        "b_d_norm": sizes(bias, "b_D", heads_a_group),
        "bias_share": share_by_size(of_bias, of_context).mean(dim=1),
        "ablation_kl": effect["kl"],
        "loss_change": effect["loss_change"],
        "zero_kl": zero["kl"],
        "zero_loss_change": zero["loss_change"],
    }


BIAS_BY_HEAD = Analysis(
    name="bias_by_head",
    summary="which heads carry a converted prompt: size of the bias, its share of the output, the effect of removing it",
    function=bias_by_head,
    columns=BY_HEAD,
    inputs={"prompt": PROMPT, "text": TEXT},
)
