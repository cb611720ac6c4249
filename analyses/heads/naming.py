"""The name of each head by its behavior on repeated text, and all measures with one number per head.

Each head is described by the effect of what it reads (logit attribution), by the effect of ablating it, and by
the source of its attention: the earlier head that its keys read most, or, in a model with KV shift, its own coefficients
(:mod:`kvlens.analyses.heads.repeated_text`), which can make an induction head in one layer. Its attention to each kind of
position is in :func:`kvlens.analyses.heads.induction.induction_heads`.

The verdict compares what the head *reads* with chance, and with ``ablations`` also uses the effect on the loss of reading
something else there (:mod:`kvlens.analyses.heads.ablation`, :mod:`kvlens.analyses.heads.verdicts`): then every head whose
ablation changes the loss by more than 0.1 nats and its noise has a name. A head whose pattern does not decide, as in most
linear attention, is "inconclusive", not "none".

A pattern says where a head attends, and not what for: a head that finds the right token and lowers its logit, or without which
the model does better, has the verdict "prefix matching", too. "induction" is the verdict on one that the model needs. Heads
that can stand in for each other are needed together and not one by one: such a head keeps the verdict of its pattern.

Source: Olsson et al. 2022; Elhage et al. 2021; KVSA sec. 3, table 4.
"""

import math
from typing import Annotated

import pandas as pd
import torch
from einops import rearrange
from torch import Tensor

from kvlens import KVModel
from kvlens.checks import Seed, Within, checked
from kvlens.model import head_matrices

from ..bias.exchange import HEAD
from ..declaration import Columns, Option, analysis
from ..predictions import LOGIT_CHANGE, LOSS_CHANGE
from ..segments import heads_of_model
from .head_pairs import composition_scores
from .induction import (
    ABLATIONS,
    N_SEQUENCES,
    REPEATED,
    SEED,
    HeadsFound,
    RepeatedPrompt,
    check_model,
    look_at_heads,
)
from .repeated_text import LONGEST_TEXT, displacement, roles
from .verdicts import EARLY, RATIO, SPREAD, THRESHOLD, HeadVerdict, is_significant, name_heads, spreads

COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", HEAD),
    verdict=(
        "str",
        'by the pattern: "prefix matching", "previous token", "duplicate token", "current token", or several joined by " / " '
        'if they are not significantly different; "weak prefix matching" and "weak duplicate token": less than an eighth of '
        'what the strongest head of that kind reads there; "none"; "inconclusive": too spread out or too near the limit. With '
        'ablations "induction": the model needs the head, and needs what it reads by prefix matching; "negative prefix '
        'matching" and so on: it does better without both; "other" or "harmful": it needs the head, or does better without '
        "it, but not because of any one of these",
    ),
    stretch_share=(
        "float64",
        "share of what the head reads on its strongest stretch of positions that is at the verdict's lag",
    ),
    stretch_ratio=("float64", 'that share over the share of uniform attention there; of the strongest kind for "none"'),
    stretch_start=("int64", "first position of that stretch, BOS counted"),
    spread=(
        "float64",
        f"(sum |A|)^2 / sum A^2 over keys, value-side, over how many it sees, mean over positions 8 to {EARLY - 1} after a "
        f"BOS: 1 for uniform attention; above {SPREAD:.2f} the pattern alone does not show a head's function",
    ),
    threshold=("float64", "threshold of the verdict, as given"),
    role=("str", 'by its shift coefficients: "plain", "prefix matching", "predecessor", "delayed"'),
    logit_attribution=(
        "float64",
        "mean direct contribution to the centered logit of the right next token, second copy; NaN in models whose heads do not "
        "write to the residual stream directly",
    ),
    ablation_loss_change=("float64", f"{LOSS_CHANGE}; resampled head, mean over the second copy; NaN unless asked for"),
    ablation_loss_error=("float64", "standard error of ablation_loss_change"),
    ablation_logit_change=("float64", f"{LOGIT_CHANGE}; the right next token's, likewise; NaN unless asked for"),
    k_composition_layer=(
        "Int64",
        "the earlier head that this head's keys read most; NA in the first layer, and in hybrid models",
    ),
    k_composition_head=("Int64", "which of that layer"),
    k_composition_score=("float64", "||W_OV W_K W_Q^T|| / (||W_OV|| ||W_K W_Q^T||), folded likewise; NaN in the first layer"),
    alpha_1=("float64", "key coefficient of the token; 1 without a shift"),
    alpha_2=("float64", "of its predecessor; 0 without a shift"),
    beta_1=("float64", "value coefficient of the token; 1 without a shift"),
    beta_2=("float64", "of its predecessor; 0 without a shift"),
    displacement=(
        "int64",
        "positions from the matched to the read token, by the head's largest coefficients (all of them where the window "
        "is above 1)",
    ),
)


@analysis(
    COLUMNS,
    "the name of every head by its behavior on the repeated prompt: prefix matching, previous token and so on",
    cost="the repeated text twice; with ablations once more for each head, and four times for each that matters",
    inputs={"prompt": REPEATED},
    options={
        "n_sequences": N_SEQUENCES,
        "seed": SEED,
        "threshold": Option(
            "share of what a head reads on its strongest stretch that makes it a previous or current token head"
        ),
        "ratio": Option("the share required of any kind, as a multiple of uniform attention"),
        "ablations": ABLATIONS,
    },
    check_model=check_model,
)
@checked
@torch.no_grad()
def induction_verdicts(
    model: KVModel,
    prompt: RepeatedPrompt | None = None,
    *,
    n_sequences: Annotated[int, Within(1, LONGEST_TEXT)] | None = None,
    n_repeated: Annotated[int, Within(2, LONGEST_TEXT)] | None = None,
    seed: Seed = 0,
    prepend_bos: bool | None = None,
    threshold: Annotated[float, Within(above=0, most=1)] = THRESHOLD,
    ratio: Annotated[float, Within(above=0)] = RATIO,
    ablations: bool = False,
) -> pd.DataFrame:
    """Name every head by its behavior on repeated tokens.

    Args:
        model, prompt, n_sequences, n_repeated, seed, prepend_bos: as in
            :func:`kvlens.analyses.heads.induction.induction_heads`, which has the scores behind the verdict.
        threshold: share of what a head reads, on its strongest stretch of 16 positions, that makes it a "previous token" or
            "current token" head.
        ratio: the share required of any kind, as a multiple of uniform attention; see :mod:`kvlens.analyses.heads.verdicts`.
        ablations: also measure the effect of resampling each head's output and, where that is significant, of reading another
            text's tokens, and name heads by these (models with an attention variant keep the verdict of the pattern).

    Returns:
        One row per head, by layer, then head:

        {columns}

    Raises:
        KVLensError: a model that this analysis does not support, invalid tokens, numbers out of range.
    """
    found = look_at_heads(
        model, prompt, n_sequences=n_sequences, n_repeated=n_repeated, seed=seed, prepend_bos=prepend_bos,
        swapped=is_significant if ablations else None,
    )  # fmt: skip
    losses = None if found.swap_errors is None else (found.ablation, found.swap_changes, found.swap_errors)
    verdicts = name_heads(found.scores, found.control, found.repeated, losses, threshold=threshold, ratio=ratio)
    return _frame(model, found, verdicts, threshold)


def _frame(
    model: KVModel,
    found: HeadsFound,
    verdicts: list[list[HeadVerdict]],
    threshold: float,
) -> pd.DataFrame:
    heads = heads_of_model(model)
    matrices = head_matrices(model)
    linear = [of_layer for of_layer in matrices if of_layer is not None]
    of_heads = [verdicts[layer][head] for layer, head in zip(*(x.tolist() for x in heads), strict=True)]
    columns: dict[str, object] = {
        "layer": heads[0],
        "head": heads[1],
        "verdict": [verdict.name for verdict in of_heads],
        "stretch_share": [verdict.share for verdict in of_heads],
        "stretch_ratio": [verdict.ratio for verdict in of_heads],
        "stretch_start": [verdict.start for verdict in of_heads],
        "spread": spreads(found.scores, found.repeated)[heads],
        "threshold": threshold,
        "role": [role for taps in found.taps for role in roles(taps)],
        "logit_attribution": found.attribution[heads],
        "ablation_loss_change": found.ablation.loss_change[heads],
        "ablation_loss_error": found.ablation.loss_error[heads],
        "ablation_logit_change": found.ablation.logit_change[heads],
        "displacement": torch.cat([displacement(taps) for taps in found.taps]),
    }
    for name, taps in (("alpha", [t.k for t in found.taps]), ("beta", [t.v for t in found.taps])):
        by_lag = torch.nn.functional.pad(torch.cat(taps), (0, 1))  # append a zero, since without a shift there is one column
        columns |= {f"{name}_1": by_lag[..., 0], f"{name}_2": by_lag[..., 1]}
    composed = composition_scores(linear, "K") if len(linear) == len(matrices) else None
    columns |= _unknown_composition(len(of_heads)) if composed is None else _strongest_k_composition(composed, heads)
    return COLUMNS.frame(columns)


def _unknown_composition(n_rows: int) -> dict[str, object]:
    """Stand in for :func:`_strongest_k_composition` if some heads are not linear maps."""
    unknown = [pd.NA] * n_rows
    return {"k_composition_layer": unknown, "k_composition_head": unknown, "k_composition_score": [math.nan] * n_rows}


def _strongest_k_composition(scores: Tensor, heads: tuple[Tensor, Tensor]) -> dict[str, object]:
    """Return for each head the earlier head with the largest score; the first layer has none."""
    n_heads = scores.shape[1]
    strongest, where = rearrange(scores, "from_layer from_head layer head -> (from_layer from_head) layer head").max(dim=0)
    strongest[0] = torch.nan
    first = [pd.NA] * int((heads[0] == 0).sum())
    found = where[heads][len(first) :]
    return {
        "k_composition_layer": [*first, *(found // n_heads).tolist()],
        "k_composition_head": [*first, *(found % n_heads).tolist()],
        "k_composition_score": strongest[heads],
    }
