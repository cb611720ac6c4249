"""Activation patching of the parts of a converted prompt: which part restores the clean answer?

The text is read with the *corrupted* prompt's bias, with one part replaced by the *clean* prompt's: the b_KV or b_D of a head,
its shift state, its z_bias. The result is scaled as in ``transformer_lens.patching``:

    recovered = (metric - corrupted) / (clean - corrupted)          0: nothing is recovered, 1: everything

TransformerLens' own patching replaces activations of the text's pass; here a prompt is a tensor, so parts of the prompt itself
can be patched. ``prompt`` in all layers gives the clean run, and so does ``bias`` without a KV shift; ``z_bias`` everywhere
need not, since the normalizer of ``hook_z_context`` still includes the corrupted b_D. Swap the two prompts to ask the opposite
question: which part is enough to break the clean run ("noising")?

In a softmax model each prompt has its own keys. Both prompts' keys are then used together, the corrupted one's with their
weights and the clean one's with 0, or the other way round in a patched head (:mod:`kvlens.analyses.bias.one_space`):

    z_i = (sum_j exp(s_ij) v_j + sum_r exp(q_i.c_r) w_r u_r) / (sum_j exp(s_ij) + sum_r exp(q_i.c_r) w_r)

    ``bias``:    c, w and u of the clean prompt: the head reads that prompt
    ``keys``:    its c and w, with the corrupted u: it attends as with the clean prompt, but reads the corrupted values
    ``values``:  its u alone, with the corrupted c and w

``keys`` and ``values`` pair the prompts token by token, so they exist for two prompts of equal length with every key kept. In
the last layer they are the k and v of all prompt positions in ``transformer_lens.patching``; in earlier layers those also
change what the prompt's own later layers write, and these do not. ``b_kv`` or ``b_d`` alone has no counterpart: exp(q.c) over
the normalizer of another prompt is unbounded.

Shift coefficients are parameters and the same under both prompts. They are patched with *given* coefficients, by default the
identity (1, 0, ...): what if this head did not shift the text? The prompt remains converted with its shift.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError
from kvlens.arguments import numbers_of
from kvlens.checks import Count, checked
from kvlens.errors import brief

from ..declaration import Columns, Option, analysis, tokens_field
from ..heads.repeated_text import shifted_projections
from ..registry import on_its_front_ends
from ..segments import bar_unless
from ..sequences import CorruptedTokens, PromptTokens, TextTokens, converted, one_sequence
from ..stream.logit_attribution import Token, logit_target
from .interventions import logits_under
from .one_space import halves, in_one_space, pair_token_by_token
from .patches import (
    POINTS,
    as_interventions,
    available_points,
    has_batch_axis,
    patch_hooks,
    patches_of,
)

Metric = Callable[[Float[Tensor, "row pos d_vocab"]], Float[Tensor, " row"]]
"""Maps the logits on the text, one row per patch, to one number per row."""

COLUMNS = Columns(
    point=("str", "what was patched"),
    layer=("int64", "-1: all layers"),
    head=(
        "int64",
        "-1: all heads. Key-value heads, each with its queries, for ``shift_state``, ``k_shift_coef`` and ``v_shift_coef``, "
        "query heads elsewhere",
    ),
    metric=("float64", "of the patched run"),
    clean_metric=("float64", "under the clean prompt"),
    corrupted_metric=("float64", "under the corrupted prompt"),
    recovered=("float64", "(metric - corrupted) / (clean - corrupted); NaN where clean and corrupted agree"),
)


def _n_patches(model: HookedKVTransformer, points: Sequence[str] | None) -> int:
    return len(patches_of(model, _known(model, points)))


@analysis(
    COLUMNS,
    "which part of a clean prompt, patched into the run with a corrupted one, restores the answer",
    inputs={"corrupted": tokens_field("corrupted", prepend_bos=True)},
    options={"points": Option("what is patched; empty: all that the model has", tuple(POINTS), many=True)},
    n_interventions=_n_patches,
)
@on_its_front_ends
@checked
@torch.no_grad()
def activation_patching(
    model: HookedKVTransformer,
    prompt: KVBias | PromptTokens,
    corrupted: KVBias | CorruptedTokens,
    text: TextTokens,
    *,
    answer: Token | None = None,
    rival: Token | None = None,
    metric: Metric | None = None,
    points: str | Sequence[str] | None = None,
    coefficients: Mapping[str, Any] | None = None,
    batch_size: Count | None = None,
    on_start: Callable[[int], None] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Patch every point, layer and head from the clean into the corrupted run.

    Args:
        model: linear or softmax.
        prompt, corrupted: the clean and the corrupted prompt: strings, tokens [pos], or biases (softmax: both converted by the
            same method). If positions are absolute they must have equal length.
        text: [pos], without BOS, read under both.
        answer, rival: the metric is the logit of ``answer``, minus that of ``rival``, at the text's last position (ids, or the
            texts of single tokens); without ``answer`` it is the mean logit of the text's next tokens. Without ``rival`` the
            mean logit of the vocabulary is subtracted.
        metric: another metric, used instead.
        points: one or several of :data:`kvlens.analyses.bias.patches.POINTS`; None takes all that the model and the
            two prompts have.
        coefficients: "k", "v" or "q" -> the shift coefficients to patch in, a tensor or lists, [window+1] or
            [layer, head, window+1]; the identity for those not given.
        batch_size: patches per forward pass; None takes what memory allows. Patches of shift coefficients run one per pass,
            since coefficients have no batch axis.
        on_start: called once, before the first patch, with their number.
        on_progress: called with the fraction done after each forward pass; None shows a bar on a terminal if it takes long.

    Returns:
        One row per patch; points in the order given, each by layer, then head, then whole layers, then everything:

        {columns}

    Raises:
        KVLensError: an unknown point (the nearest is proposed) or one that the model lacks, ``keys`` or ``values`` of prompts
            that do not pair token by token, prompts of different lengths where positions are absolute, coefficients of the
            wrong shape, a metric that is not one number per row.

    Source: the scale and the grids are those of ``transformer_lens.patching``.
    """
    clean, corrupted = converted(model, "prompt", prompt), converted(model, "corrupted", corrupted)
    text = one_sequence(model, "text", text)
    _check(clean, corrupted)
    metric = _default_metric(model, text, answer, rival) if metric is None else metric
    patches = patches_of(model, _points_of(model, points, clean, corrupted))
    sources = _given_coefficients(model, coefficients or {})
    donors = _donors(clean, corrupted)
    clean, corrupted = donors["prompt"], donors["corrupted"]
    if on_start is not None:
        on_start(len(patches))
    clean_metric, of_clean = _clean_run(model, clean, text, metric)
    sources |= of_clean
    with model.kv_bias(corrupted):
        corrupted_metric = _values(metric, model(text[None], attention_mask=torch.ones_like(text[None])))[0]
    order, values = list[int](), list[float]()
    with bar_unless(on_progress, "activation_patching") as tell:
        for batched, size in ((True, batch_size), (False, 1)):
            chosen = [number for number, patch in enumerate(patches) if has_batch_axis(patch) is batched]
            order += chosen
            of_chosen = [patches[number] for number in chosen]
            rows, hooks_of = as_interventions(corrupted, of_chosen, donors), partial(patch_hooks, of_chosen, sources)
            for logits in logits_under(model, text, corrupted, rows, batch_size=size, hooks_of=hooks_of):
                values += _values(metric, logits)
                tell(len(values) / len(patches))
    metrics = pd.Series(values, index=order, dtype=float).sort_index()
    gap = clean_metric - corrupted_metric
    return COLUMNS.frame(
        {
            "point": [patch.point for patch in patches],
            "layer": [patch.layer for patch in patches],
            "head": [patch.head for patch in patches],
            "metric": metrics,
            "clean_metric": clean_metric,
            "corrupted_metric": corrupted_metric,
            "recovered": (metrics - corrupted_metric) / (gap or float("nan")),
        }
    )


def _check(clean: KVBias, corrupted: KVBias) -> None:
    if not clean.starts_where(corrupted):
        raise KVLensError(
            f"activation_patching: the text starts at position {clean.position_offset} under the clean prompt and at "
            f"{corrupted.position_offset} under the corrupted one; this model's positions are absolute: give prompts of "
            "equal length"
        )


def _default_metric(model: HookedKVTransformer, text: Tensor, answer: Token | None, rival: Token | None) -> Metric:
    target = logit_target(model, text, answer, rival)
    if not len(target.positions):
        raise KVLensError("activation_patching: a text of one token has no next token: give answer= (and rival=) or metric=")
    return lambda logits: target.read(logits).mean(dim=-1)


def _known(model: HookedKVTransformer, points: str | Sequence[str] | None) -> Sequence[str]:
    points = [points] if isinstance(points, str) else available_points(model) if points is None else points
    return points


def _points_of(
    model: HookedKVTransformer, points: str | Sequence[str] | None, clean: KVBias, corrupted: KVBias
) -> Sequence[str]:
    """The requested points that these prompts have."""
    halves, known = ("keys", "values"), _known(model, points)
    if model.cfg.attention == "linear" or pair_token_by_token(clean, corrupted):
        return known
    if points is not None and set(halves) & set(known):
        raise KVLensError(
            "activation_patching: keys and values can be patched separately only if the two prompts pair token by token: "
            f'convert both with method="exact" and give prompts of equal length (here {clean.d_phi} keys for '
            f"{clean.n_prompt_tokens} tokens, {corrupted.d_phi} for {corrupted.n_prompt_tokens}), or patch the whole bias"
        )
    return [name for name in known if name not in halves]


def _donors(clean: KVBias, corrupted: KVBias) -> dict[str, KVBias]:
    """What replaces the corrupted prompt at each point, and that prompt, all in one feature space."""
    paired = pair_token_by_token(clean, corrupted)
    clean, corrupted = in_one_space(clean, corrupted)
    donors = dict.fromkeys(("bias", "shift_state", "prompt"), clean) | {"corrupted": corrupted}
    donors |= {"b_kv": replace(corrupted, b_KV=clean.b_KV), "b_d": replace(corrupted, b_D=clean.b_D)}
    return donors | (halves(clean, corrupted) if paired else {})


def _given_coefficients(model: HookedKVTransformer, given: Mapping[str, Any]) -> dict[tuple[str, int], Tensor]:
    """(hook, layer) -> the coefficients [head, window+1] that are patched in."""
    cfg = model.cfg
    known = shifted_projections(model)
    for x in given:
        if x not in known:
            raise KVLensError(f"coefficients: {x!r} is not shifted in this model; shifted are: {', '.join(known) or 'none'}")
    sources: dict[tuple[str, int], Tensor] = {}
    for x in known:
        full = (cfg.n_layers, cfg.n_heads if x == "q" else cfg.n_kv_heads, cfg.kv_shift.window + 1)  # type: ignore[union-attr]
        n_heads = [of.n_heads if x == "q" else of.n_kv_heads for of in map(cfg.of_layer, range(cfg.n_layers))]
        coef = numbers_of(given.get(x, [1.0, *[0.0] * (full[-1] - 1)]))
        if tuple(coef.shape) not in (full, full[-1:]):
            raise KVLensError(f"coefficients: {x!r} must be {list(full[-1:])} or {list(full)}, got {list(coef.shape)}")
        sources |= {(f"{x}_shift_coef", layer): row[: n_heads[layer]] for layer, row in enumerate(coef.expand(full))}
    return sources


def _clean_run(
    model: HookedKVTransformer, clean: KVBias, text: Tensor, metric: Metric
) -> tuple[float, dict[tuple[str, int], Tensor]]:
    """The metric under the clean prompt, and z_bias of every layer."""
    where = {f"blocks.{layer}.attn.hook_z_bias": ("z_bias", layer) for layer in range(model.cfg.n_layers)}
    with model.kv_bias(clean):
        logits, cache = model.run_with_cache(text[None], attention_mask=torch.ones_like(text[None]), names_filter=list(where))
    return _values(metric, logits)[0], {source: cache[name] for name, source in where.items()}


def _values(metric: Metric, logits: Tensor) -> list[float]:
    values = metric(logits)
    if not isinstance(values, Tensor) or tuple(values.shape) != logits.shape[:1]:
        raise KVLensError(
            f"metric: expected one number per row, [{logits.shape[0]}], from logits {list(logits.shape)}, got {brief(values)}"
        )
    return values.double().tolist()
