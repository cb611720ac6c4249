"""A converted prompt, one prompt position at a time: what each of them gives to each head's output and to a logit.

The parts of a head's output, and the two views of a shifted value, are those of :mod:`analyses.bias.reads`. Here they are
made into numbers that add up: everything is linear in the part, a product with one probe vector per text place.

Sums over the text's places are taken before those over features: sum_i A_ij (v'_j . w_i) = phi~(k'_j)^T (sum_i q_i w_i^T) v'_j.
A text x prompt x head tensor arises only where single places of the text are asked for.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.bias.outputs import share_probes
from analyses.bias.reads import VIEWS, LayerReads, read_layer, run_prompt_and_text
from analyses.declaration import Analysis, Columns, Option
from analyses.inputs import ANSWER, PROMPT, TEXT, WRONG
from analyses.sequences import PromptTokens, TextTokens, one_sequence, prompt_sequence, token_texts
from analyses.stream.logit_attribution import (
    LogitTarget,
    Token,
    check_heads_write_directly,
    final_scale,
    logit_target,
)
from kvlens import HookedKVTransformer, KVBias, KVLensError

NONE = -1
"""In place of a position: all places of the text together, or a part that is no prompt position."""

PLACES = ("together", "last", "each")
COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    text_position=("int64", "-1 where all places are taken together"),
    part=("str", "``inherited``, ``prompt``, ``boundary`` or ``text``"),
    prompt_position=("int64", "from 0; -1 but for ``prompt``"),
    token=("str", "the prompt's token, missing but for ``prompt``"),
    attention=(
        "float64",
        "A_ij, for ``source`` with the shift's coefficients in it; its mean over all places where they are taken together. "
        "NaN but for ``prompt``",
    ),
    output_share=("float64", "projection on the head's output, over its square; all parts sum to 1 (to 0 for no output)"),
    logit=(
        "float64",
        "direct logit attribution, final norm frozen; the mean over the target's places where all are taken together, NaN at "
        "a place without target and in a text that has none",
    ),
)


@COLUMNS.document
@torch.no_grad()
def bias_positions(
    model: HookedKVTransformer,
    prompt_tokens: PromptTokens,
    text_tokens: TextTokens,
    *,
    initial: KVBias | None = None,
    by: str = "attended",
    at: Sequence[int] | None = None,
    answer: Token | None = None,
    wrong: Token | None = None,
) -> pd.DataFrame:
    """What each prompt position gives to each head's output on the text, and to a logit.

    Args:
        model: linear or softmax.
        prompt_tokens: a string, or tokens [pos] as converted, with BOS where the model wants one.
        text_tokens: a string, or tokens [pos] without BOS.
        initial: the bias that the prompt continues; None continues what the model holds now, as ``convert_prompt`` does.
        by: ``attended`` or ``source``, see :mod:`analyses.bias.reads`; the same thing where values are not shifted.
        at: places of the text to tell apart; None takes all of them together.
        answer, wrong: the logit, as in :func:`analyses.bias.decomposition.bias_decomposition`.

    Returns:
        By layer, head and place of the text, then the parts of the head's output in the order in which they stand before
        it: one row "inherited" if something was held, one per prompt position, one "boundary" if values are shifted, "text":

        {columns}

    Raises:
        KVLensError: an unknown view, places outside the text, tokens that do not fit.
    """
    check_heads_write_directly(model, "bias_positions")
    prompt = prompt_sequence(model, "prompt_tokens", prompt_tokens, initial)
    text = one_sequence(model, "text_tokens", text_tokens)
    target = logit_target(model, text, answer, wrong)
    _check_view(by, at, len(text))
    cache = run_prompt_and_text(model, prompt, text, initial)
    scale = final_scale(model, cache)[0, len(prompt) :].double()
    layers = []
    for layer in range(model.cfg.n_layers):
        reads = read_layer(model, cache, layer, len(prompt), by)
        probes = torch.stack([share_probes(reads.z, at is None), _logit_probes(model, target, scale, layer, at)], dim=-1)
        if at is not None:
            reads, probes = reads.at(list(at)), probes[list(at)]
        layers.append(_numbers(reads, probes, pooled=at is None))
    return _frame(model, prompt, torch.stack(layers), at, reads.inherited is not None, reads.boundary is not None)


def _check_view(by: str, at: Sequence[int] | None, n_text: int) -> None:
    if by not in VIEWS:
        raise KVLensError(f"bias_positions: by must be one of {', '.join(VIEWS)}, got {by!r}")
    outside = [] if at is None else [place for place in at if not 0 <= place < n_text]
    if outside:
        raise KVLensError(f"bias_positions: at={outside[0]} lies outside the text, whose {n_text} places count from 0")


def _logit_probes(
    model: HookedKVTransformer, target: LogitTarget, scale: Tensor, layer: int, at: Sequence[int] | None
) -> Float[Tensor, "text head d_head"]:
    """Those of the target; their mean over its places, or NaN at single places that have none."""
    probes = target.probes(model, scale, layer)
    if at is None:
        return probes / len(target.places)
    has_target = torch.zeros(len(probes), dtype=torch.bool, device=probes.device)
    has_target[target.places] = True
    return probes.where(has_target[:, None, None], float("nan"))


def _numbers(
    reads: LayerReads, probes: Float[Tensor, "text head d_head probe"], pooled: bool
) -> Float[Tensor, "head place part number"]:
    """Attention and one number a probe, for each part in the order of the frame."""
    if pooled:
        attention = torch.einsum("hf,phf->hp", reads.queries.mean(dim=0), reads.keys)[:, None]
        read = torch.einsum("thf,thdn->hfdn", reads.queries, probes)
        numbers = torch.einsum("phf,hfdn,phd->hpn", reads.keys, read, reads.values)[:, None]
    else:
        attention = torch.einsum("thf,phf->htp", reads.queries, reads.keys)
        numbers = attention[..., None] * torch.einsum("phd,thdn->htpn", reads.values, probes)
    prompt = torch.cat([attention[..., None], numbers], dim=-1)
    inherited, boundary, text = (
        [] if z is None else [_numbers_of(z, probes, pooled)] for z in (reads.inherited, reads.boundary, reads.of_text())
    )
    return torch.cat([*inherited, prompt, *boundary, *text], dim=2)


def _numbers_of(z: Tensor, probes: Tensor, pooled: bool) -> Float[Tensor, "head place 1 number"]:
    numbers = torch.einsum("thd,thdn->htn", z, probes)
    numbers = numbers.sum(dim=1, keepdim=True) if pooled else numbers
    return torch.cat([torch.full_like(numbers[..., :1], float("nan")), numbers], dim=-1)[:, :, None]


def _frame(
    model: HookedKVTransformer,
    prompt: Tensor,
    numbers: Float[Tensor, "layer head place part number"],
    at: Sequence[int] | None,
    has_inherited: bool,
    has_boundary: bool,
) -> pd.DataFrame:
    n_layers, n_heads, n_places, n_parts, _ = numbers.shape
    before, after = ["inherited"] * has_inherited, ["boundary"] * has_boundary + ["text"]
    parts = np.array([*before, *["prompt"] * len(prompt), *after], dtype=object)
    positions = np.full(n_parts, NONE)
    positions[len(before) : len(before) + len(prompt)] = np.arange(len(prompt))
    tokens = np.array([*[None] * len(before), *token_texts(model, prompt), *[None] * len(after)], dtype=object)
    layer, head, place, part = np.indices((n_layers, n_heads, n_places, n_parts)).reshape(4, -1)
    attention, output_share, logit = numbers.flatten(0, 3).cpu().numpy().T
    return COLUMNS.frame(
        {
            "layer": layer,
            "head": head,
            "text_position": np.array([NONE] if at is None else list(at))[place],
            "part": parts[part],
            "prompt_position": positions[part],
            "token": tokens[part],
            "attention": attention,
            "output_share": output_share,
            "logit": logit,
        }
    )


def _of_places(
    model: HookedKVTransformer,
    prompt_tokens: Tensor,
    text_tokens: Tensor,
    answer: Token | None,
    wrong: Token | None,
    *,
    by: str = VIEWS[0],
    places: str = PLACES[0],
) -> pd.DataFrame:
    """:func:`bias_positions` at places that are named by a word."""
    last = len(text_tokens) - 1
    at = {"together": None, "last": [last], "each": range(last + 1)}[places]
    return bias_positions(model, prompt_tokens, text_tokens, by=by, at=at, answer=answer, wrong=wrong)


BIAS_POSITIONS = Analysis(
    name="bias_positions",
    summary="what each prompt position gives to each head's output and to a logit",
    function=_of_places,
    columns=COLUMNS,
    inputs={"prompt_tokens": PROMPT, "text_tokens": TEXT, "answer": ANSWER, "wrong": WRONG},
    options={
        "by": Option("whose position counts where values are shifted", VIEWS),
        "places": Option("which places of the text to tell apart", PLACES),
    },
)
