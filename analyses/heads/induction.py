"""Which heads continue what they have seen: scores of every head on text that repeats itself.

An induction head meets a token for the second time and attends to what followed it the first time. Each head is described
by where it looks (:mod:`kvlens.analyses.heads.lags`), by what it does with what it finds (copying score, logit attribution), by
what is lost without it (ablation), and by how it came to look there: the earlier head that its keys read most, or, in a model
with KV shift, its own coefficients (:mod:`kvlens.analyses.heads.shift_roles`), which can make an induction head in one layer.

The verdict goes by what the head *reads*, against chance, and with ``ablations`` by the loss of reading something else there
(:mod:`kvlens.analyses.heads.verdicts`, :mod:`kvlens.analyses.heads.loss_verdicts`): then every head without which the loss
changes by more than 0.1 nats and its noise has a name. A pattern that cannot tell, as most of linear attention, is
"inconclusive", not "none".
It says nothing of copying: a head that finds the right token and lowers its logit has the verdict ``induction`` and a
negative ``copying_score``.

Source: Olsson et al. 2022; Elhage et al. 2021; KVSA sec. 3, table 4.
"""

from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVLensError
from kvlens.arguments import check_seed
from kvlens.signature import checked

from ..declaration import Analysis, Columns, Option
from ..inputs import tokens_field
from ..passes import check_batch_size
from ..predictions import LOGIT_CHANGE, LOSS_CHANGE
from ..sequences import one_sequence
from .ablation import AblationEffect, Progress, Start, resampling_ablation
from .lags import KINDS
from .loss_verdicts import Losses
from .measures import HeadMeasures, measure_heads
from .repeated_tokens import RepeatedTokens, draw_piece, longest_repeat, repeat_tokens
from .shift_roles import displacement, roles
from .swaps import swap_costs
from .verdicts import (
    EARLY,
    MATCHES,
    RATIO,
    SPREAD,
    THRESHOLD,
    WORTH_ASKING,
    Verdict,
    contrasts,
    judge_heads,
    spreads,
)
from .weights import composition_scores, copying_scores, head_weights

DEFAULT_LENGTH = 50
_LOOKS = {
    "prefix_matching": "from the second copy to what followed the token's first copy",
    "previous_token": "to the place before",
    "duplicate_token": "from the second copy to the token's first copy",
    "current_token": "to the place itself",
}
COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    verdict=(
        "str",
        '"induction", "previous token", "duplicate token", "current token", or several, " / " between, where none is above the '
        'others; "none"; "inconclusive": too spread out, or too near the limit, to tell. With ablations also "negative '
        'induction" and so on: what it reads there raises the loss; "other" and "harmful": the model needs it, or does better '
        "without it, and not for any one of these",
    ),
    stretch_share=("float64", "of what the head reads on its strongest stretch of places, the part that the verdict speaks of"),
    stretch_ratio=("float64", 'how many times what uniform attention would give there; of the strongest kind for "none"'),
    stretch_start=("int64", "first place of that stretch, BOS counted"),
    spread=(
        "float64",
        f"(sum |A|)^2 / sum A^2 over keys, value-side, over how many it sees, mean over places 8 to {EARLY - 1} behind a BOS: "
        f"1 for uniform attention; above {SPREAD:.2f} the pattern alone does not tell what a head is for",
    ),
    threshold=("float64", "of the verdict, as given"),
    role=("str", 'by its shift coefficients: "plain", "induction", "predecessor", "delayed"'),
    **{f"{kind}_score": ("float64", f"mean attention {_LOOKS[kind]}") for kind in KINDS},
    **{f"{kind}_score_value": ("float64", "the same of the value-side pattern A (beta_1 I + beta_2 Shift)") for kind in KINDS},
    **{f"{kind}_score_key": ("float64", "the same of the key-side pattern A (alpha_1 I + alpha_2 Shift)") for kind in KINDS},
    **{
        f"{kind}_contrast": ("float64", f"score_value of {kind} over the mean |attention| to other places of the first copy")
        for kind in MATCHES
    },
    copying_score=(
        "float64",
        "sum(lambda) / sum(|lambda|), in [-1, 1], over the eigenvalues of W_E W_V W_O W_U, the last three folded: times their "
        "norm's gain, less the mean over d_model that a LayerNorm takes away, W_U also less its mean over the vocabulary",
    ),
    logit_attribution=("float64", "mean direct contribution to the logit of the right next token, second copy"),
    ablation_loss_change=("float64", f"{LOSS_CHANGE}; resampled head, mean over the second copy; NaN unless asked for"),
    ablation_loss_error=("float64", "standard error of ablation_loss_change"),
    ablation_logit_change=("float64", f"{LOGIT_CHANGE}; the right next token's, likewise; NaN unless asked for"),
    **{
        f"{kind}_loss_change": (
            "float64",
            f"{LOSS_CHANGE}; {_LOOKS[kind].split('to ', 1)[1]} is another text's token for this head; "
            f"NaN unless asked for, and where the ablation changes it by at most {WORTH_ASKING}",
        )
        for kind in KINDS
    },
    k_composition_layer=("Int64", "the earlier head that this head's keys read most; NA in the first layer"),
    k_composition_head=("Int64", "which of that layer"),
    k_composition_score=("float64", "||W_OV W_K W_Q^T|| / (||W_OV|| ||W_K W_Q^T||), folded likewise; NaN in the first layer"),
    alpha_1=("float64", "key coefficient of the token; 1 without a shift"),
    alpha_2=("float64", "of its predecessor; 0 without a shift"),
    beta_1=("float64", "value coefficient of the token; 1 without a shift"),
    beta_2=("float64", "of its predecessor; 0 without a shift"),
    displacement=(
        "int64",
        "how many places behind the token it matches a head reads, by its largest coefficients (all of them where the window "
        "is above 1)",
    ),
)


@COLUMNS.document
@checked
@torch.no_grad()
def induction_heads(
    model: HookedKVTransformer,
    *,
    n_sequences: int = 10,
    n_repeated: int | None = None,
    seed: int = 0,
    prompt: str | Int[Tensor, "*batch piece"] | None = None,
    prepend_bos: bool | None = None,
    threshold: float = THRESHOLD,
    ratio: float = RATIO,
    ablations: bool = False,
    batch_size: int | None = None,
    on_start: Start | None = None,
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """Score every head on tokens that are said twice.

    Args:
        model: causal, one vocabulary for input and output; a bias that is attached stays attached.
        n_sequences: how many random sequences.
        n_repeated: length of the piece that is said twice; None takes 50, or what ``n_ctx`` has room for.
        seed: of the random tokens, and of those that ablations resample from.
        prompt: what is repeated instead of random tokens, without BOS: a string, or tokens [pos] or [batch, pos].
        prepend_bos: None puts a BOS in front where the model is used to one.
        threshold: share of what a head reads from which on it is a "previous token" or "current token" head, on its strongest
            stretch of 16 places.
        ratio: how many times what uniform attention would give the share of any kind must be; see
            :mod:`kvlens.analyses.heads.verdicts`.
        ablations: also replace each head's output by that on other random tokens (n_layers x n_heads x n_sequences runs), and,
            of each head that changes the loss by more than 0.005 nats, what it reads at each of the four kinds of place
            (4 n_sequences runs a head; not in models with an attention variant, which keep the verdict of the pattern).
        batch_size: rows per forward pass of the ablations; None goes by memory.
        on_start: called with the number of ablations before they start.
        on_progress: called with the fraction of the ablations done.

    Returns:
        One row per head, by layer, then head:

        {columns}

    Raises:
        KVLensError: a model without what this needs, tokens that do not fit, numbers out of range.
    """
    check_model(model)
    if not 0 < threshold <= 1:
        raise KVLensError(f"induction_heads: threshold must lie in (0, 1], got {threshold}")
    if not 0 < ratio < 1e9:
        raise KVLensError(f"induction_heads: ratio must be above 0, and is a few times chance, got {ratio}")
    check_seed("induction_heads: seed", seed)
    check_batch_size("induction_heads", batch_size)
    generator = torch.Generator().manual_seed(seed)
    if prompt is None:
        n_repeated = longest_repeat(model, prepend_bos, DEFAULT_LENGTH) if n_repeated is None else n_repeated
    piece = draw_piece(model, n_sequences, n_repeated or 0, generator) if prompt is None else _pieces(model, prompt)
    repeated = repeat_tokens(model, piece, prepend_bos)
    measured = measure_heads(model, repeated)
    effect, losses = _unknown(model), None
    if ablations:
        donors = repeat_tokens(model, draw_piece(model, piece.shape[0], piece.shape[1], generator), prepend_bos)
        ablated = resampling_ablation(
            model, repeated, donors, batch_size=batch_size, on_start=on_start, on_progress=on_progress
        )
        effect = _Effect(ablated, effect.by_kind)
        if model.cfg.attention_variant is None:
            asked = ablated.loss_change.abs() > WORTH_ASKING
            swaps = swap_costs(model, repeated, donors, measured.taps, asked, batch_size=batch_size)
            effect = effect._replace(by_kind=swaps.costs)
            losses = Losses(ablated.loss_change, ablated.loss_error, *swaps)
    verdicts = judge_heads(measured.scores, repeated, losses, threshold=threshold, ratio=ratio)
    return _frame(model, measured, repeated, effect, [verdict for layer in verdicts for verdict in layer], threshold)


class _Effect(NamedTuple):
    """What the model loses without a head, or with another text's token at one kind of place; NaN where not measured."""

    ablation: AblationEffect
    by_kind: Float[Tensor, "kind layer head"]


def _unknown(model: HookedKVTransformer) -> _Effect:
    nothing = torch.full((len(KINDS), model.cfg.n_layers, model.cfg.n_heads), torch.nan)
    return _Effect(AblationEffect(*nothing[:3]), nothing)


def check_model(model: HookedKVTransformer) -> None:
    """Raise KVLensError for a model in which induction has no meaning."""
    if model.cfg.attention_dir != "causal":
        raise KVLensError("induction_heads: expected causal attention; a bidirectional model sees the next token")
    if model.cfg.d_vocab_out != model.cfg.d_vocab:
        raise KVLensError(
            f"induction_heads: expected a model that predicts its own tokens; it reads {model.cfg.d_vocab} and predicts "
            f"{model.cfg.d_vocab_out}"
        )


def _pieces(model: HookedKVTransformer, prompt: Any) -> Tensor:
    if isinstance(prompt, str) or (isinstance(prompt, Tensor) and prompt.dim() == 1):
        return one_sequence(model, "induction_heads: prompt", prompt)[None]
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or not prompt.numel():
        came = f"shape {list(prompt.shape)}" if isinstance(prompt, Tensor) else type(prompt).__name__
        raise KVLensError(f"induction_heads: prompt: expected a string or token ids [pos] or [batch, pos], got {came}")
    return prompt


def _frame(
    model: HookedKVTransformer,
    measured: HeadMeasures,
    repeated: RepeatedTokens,
    effect: _Effect,
    verdicts: list[Verdict],
    threshold: float,
) -> pd.DataFrame:
    n_layers, n_heads, scores = model.cfg.n_layers, model.cfg.n_heads, measured.scores
    weights = [head_weights(model, layer) for layer in range(n_layers)]
    columns: dict[str, Any] = {
        "layer": torch.arange(n_layers).repeat_interleave(n_heads),
        "head": torch.arange(n_heads).repeat(n_layers),
        "verdict": [verdict.name for verdict in verdicts],
        "stretch_share": [verdict.share for verdict in verdicts],
        "stretch_ratio": [verdict.ratio for verdict in verdicts],
        "stretch_start": [verdict.start for verdict in verdicts],
        "spread": spreads(scores, repeated),
        "threshold": threshold,
        "role": [role for taps in measured.taps for role in roles(taps)],
        "copying_score": copying_scores(model, weights),
        "logit_attribution": measured.attribution,
        "ablation_loss_change": effect.ablation.loss_change,
        "ablation_loss_error": effect.ablation.loss_error,
        "ablation_logit_change": effect.ablation.logit_change,
        "displacement": torch.stack([displacement(taps) for taps in measured.taps]),
    }
    columns |= {f"{kind}_loss_change": effect.by_kind[i] for i, kind in enumerate(KINDS)}
    columns |= {f"{kind}_contrast": contrasts(scores, repeated, kind) for kind in MATCHES}
    for view, by_kind in (("", scores.raw), ("_value", scores.value_side), ("_key", scores.key_side)):
        columns |= {f"{kind}_score{view}": by_kind[:, i] for i, kind in enumerate(KINDS)}
    for name, taps in (("alpha", [t.k for t in measured.taps]), ("beta", [t.v for t in measured.taps])):
        by_lag = torch.nn.functional.pad(torch.stack(taps), (0, 1))  # a zero behind: without a shift there is one column
        columns |= {f"{name}_1": by_lag[..., 0], f"{name}_2": by_lag[..., 1]}
    columns |= _strongest_k_composition(composition_scores(weights, "K"))
    return COLUMNS.frame(columns)


def _strongest_k_composition(scores: Tensor) -> dict[str, Any]:
    """For each head its best earlier one; the first layer has none."""
    n_heads = scores.shape[1]
    strongest, where = scores.flatten(0, 1).max(dim=0)  # [layer, head]
    strongest[0] = torch.nan
    first = [pd.NA] * n_heads
    return {
        "k_composition_layer": [*first, *(where[1:] // n_heads).flatten().tolist()],
        "k_composition_head": [*first, *(where[1:] % n_heads).flatten().tolist()],
        "k_composition_score": strongest,
    }


def _of_prompt_said_twice(
    model: HookedKVTransformer,
    prompt: Tensor,
    *,
    n_random: int = 0,
    seed: int = 0,
    threshold: float = THRESHOLD,
    ratio: float = RATIO,
    ablations: bool = False,
) -> pd.DataFrame:
    """:func:`induction_heads` of a prompt, or of ``n_random`` sequences of random tokens that are as long."""
    common: dict[str, Any] = dict(seed=seed, threshold=threshold, ratio=ratio, ablations=ablations)
    if n_random:
        return induction_heads(model, n_sequences=n_random, n_repeated=len(prompt), **common)
    return induction_heads(model, prompt=prompt[None], **common)


def _n_ablations(model: HookedKVTransformer, *, n_random: int, ablations: bool, **_: object) -> int:
    return model.cfg.n_layers * model.cfg.n_heads * max(1, n_random) if ablations else 0


INDUCTION_HEADS = Analysis(
    name="induction_heads",
    summary="prefix-matching, copying and other scores of every head on the prompt said twice",
    function=_of_prompt_said_twice,
    columns=COLUMNS,
    inputs={"prompt": tokens_field("prompt", prepend_bos=False)},  # its BOS comes later, once
    options={
        "n_random": Option("use this many sequences of random tokens, as long as the prompt; 0 repeats the prompt itself"),
        "seed": Option("of random tokens"),
        "threshold": Option(
            "share of what a head reads from which on it is a previous or current token head, on its strongest stretch"
        ),
        "ratio": Option("how many times what uniform attention would give that share must be"),
        "ablations": Option("also measure what resampling each head's output costs, and name heads by that"),
    },
    check_model=check_model,
    n_interventions=_n_ablations,
)
