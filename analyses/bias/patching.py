"""Activation patching of the parts of a converted prompt: which part restores the clean answer?

The text is read with the *corrupted* prompt's bias, with one part replaced by the *clean* prompt's: the b_KV or b_D of a head,
its shift state, its z_bias. The result is scaled as in ``transformer_lens.patching``:

    recovered = (metric - corrupted) / (clean - corrupted)          0: nothing is recovered, 1: everything

TransformerLens' own patching replaces activations of the text's pass; here a prompt is a tensor, so parts of the prompt itself
can be patched. ``prompt`` in all layers gives the clean run, and so does ``bias`` without a KV shift; ``z_bias`` everywhere
need not, since the normalizer of ``hook_z_context`` still includes the corrupted b_D. Swap the two prompts to ask the opposite
question: which part is enough to break the clean run ("noising")?

In a softmax model each prompt has its own keys. Both prompts' keys are then used together
(:func:`~kvlens.analyses.bias.exchange.in_one_space`), the corrupted one's with their weights and the clean one's with 0, or the
other way round in a patched head:

    z_i = (sum_j exp(s_ij) v_j + sum_r exp(q_i.c_r) w_r u_r) / (sum_j exp(s_ij) + sum_r exp(q_i.c_r) w_r)

    ``bias``:    c, w and u of the clean prompt: the head reads that prompt
    ``keys``:    its c and w, with the corrupted u: it attends as with the clean prompt, but reads the corrupted values
    ``values``:  its u alone, with the corrupted c and w

``keys`` and ``values`` pair the prompts token by token, so they exist for two prompts of equal length with every key kept. In
the last layer they are the k and v of all prompt positions in ``transformer_lens.patching``; in earlier layers those also
change what the prompt's own later layers write, and these do not. ``b_kv`` or ``b_d`` alone has no counterpart: exp(q.c) over
the normalizer of another prompt is unbounded.

A recurrent layer has its state in ``bias``, a value head each, and the inputs of its short convolution in ``shift_state``, all
of a layer's at once.

Shift coefficients are parameters and the same under both prompts. They are patched with the identity (1, 0, ...): what if this
head did not shift the text? The prompt remains converted with its shift.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import KVBias, KVLensError, KVModel
from kvlens.checks import checked
from kvlens.errors import brief, check_known
from kvlens.model import head_hooks

from ..attribution.answers import Answer, Rival
from ..declaration import Columns, Option, analysis, tokens_field
from ..heads.repeated_text import shifted_projections
from ..logit_attribution import check_predicts_text, predicted_tokens
from ..predictions import log_probabilities, next_token_losses, text_logits
from ..segments import OnProgress, part_of, progress
from ..sequences import CorruptedTokens, PromptTokens, TextTokens, converted, one_sequence
from .exchange import (
    ALL,
    HEAD_PART,
    PART_KINDS,
    SHIFT_STATE_PART,
    ExchangedPart,
    HeadExchange,
    has_shift_state,
    heads_with,
    in_one_space,
    layers_with_convolution,
    shifts,
)

Metric = Callable[[Float[Tensor, "row pos d_vocab"]], Float[Tensor, " row"]]
"""Maps the logits on the text, one row per patch, to one number per row."""

COLUMNS = Columns(
    point=("str", "what was patched"),
    layer=("int64", "-1: all layers"),
    head=(
        "int64",
        "-1: all heads. Key-value heads, each with its queries, for ``shift_state``, ``k_shift_coef`` and ``v_shift_coef``, "
        "query heads elsewhere, and behind them the value heads of a recurrent layer",
    ),
    metric=("float64", "of the patched run"),
    clean_metric=("float64", "under the clean prompt"),
    corrupted_metric=("float64", "under the corrupted prompt"),
    recovered=("float64", "(metric - corrupted) / (clean - corrupted); NaN where clean and corrupted agree"),
)


class Point(NamedTuple):
    """What is patched.

    Attributes:
        heads: the kind of heads that are patched one by one; None: all of a layer at once.
        hooks: the hook points, in ``blocks.L.attn``, whose tensors are replaced.
        bias, shift_state: what is replaced of the prompt.
    """

    heads: str | None
    hooks: tuple[str, ...]
    bias: bool = False
    shift_state: bool = False


_BIAS, _LAST = ("hook_b_kv", "hook_b_d", "hook_b_keys"), ("hook_last_k", "hook_last_v", "hook_last_q")
POINTS = {
    "b_kv": Point("query", ("hook_b_kv",), bias=True),
    "b_d": Point("query", ("hook_b_d",), bias=True),
    "bias": Point("query", _BIAS, bias=True),
    "keys": Point("query", ("hook_b_keys", "hook_b_d"), bias=True),
    "values": Point("query", ("hook_b_kv",), bias=True),
    "shift_state": Point("key-value", _LAST, shift_state=True),
    "prompt": Point(None, (*_BIAS, *_LAST), bias=True, shift_state=True),
    "z_bias": Point("query", ("hook_z_bias",)),
    "k_shift_coef": Point("key-value", ("hook_k_shift_coef",)),
    "v_shift_coef": Point("key-value", ("hook_v_shift_coef",)),
    "q_shift_coef": Point("query", ("hook_q_shift_coef",)),
}
"""The points by name: those of one hook point are named as it is. A layer sees ``hook_b_keys`` with softmax attention alone;
``keys`` and ``values`` are the two halves of a softmax bias, ``b_kv`` and ``b_d`` those of a linear one.
"""
_WIDEST = max(map(len, POINTS))
__doc__ = (__doc__ or "") + "".join(
    f"\n{line}"
    for line in (
        "The points, and the hook points in ``blocks.L.attn`` whose tensors each replaces::\n",
        *(f"    {name:<{_WIDEST}}  {', '.join(point.hooks)}" for name, point in POINTS.items()),
        "",
    )
)


Patch = tuple[str, int, int]
"""The point, layer and head of one intervention; -1 for all of them."""
Sources = Mapping[tuple[str, int, str, int], Tensor]
"""(point, layer, hook point, number of its first head in the layer) -> the activation that a hook puts in: z_bias with a batch
of 1, or shift coefficients, without one."""


def _has(model: KVModel, bias: KVBias, point: str) -> bool:
    linear = model.cfg.attention == "linear"
    softmax = not linear and len(bias.attention) > 0
    halves = {"b_kv": linear, "b_d": linear and model.cfg.normalizer != "none", "keys": softmax, "values": softmax}
    others = {"bias": True, "prompt": True, "z_bias": True, "shift_state": has_shift_state(bias)}
    return (halves | others).get(point, point[0] in shifted_projections(model))


def available_points(model: KVModel, bias: KVBias) -> list[str]:
    """The points that the model has, without duplicates: ``bias`` requires a b_D, and ``prompt`` a shift state."""
    twins = {"bias": "b_d" if model.cfg.attention == "linear" else "bias", "prompt": "shift_state"}
    return [name for name in POINTS if _has(model, bias, name) and _has(model, bias, twins.get(name, name))]


def patches_of(model: KVModel, bias: KVBias, points: Sequence[str]) -> list[Patch]:
    """All patches of ``points``: every head, every layer (head -1), everything (layer -1, head -1), in this order."""
    patches = list[Patch]()
    here = [name for name in POINTS if _has(model, bias, name)]
    check_known("activation_patching: no point of this model", points, here)
    for name in points:
        n_heads = {layer: n for layer in range(bias.n_layers) if (n := _n_heads(bias, name, layer)) is not None}
        patches += [(name, layer, head) for layer, n in n_heads.items() for head in range(n)]
        patches += [*((name, layer, ALL) for layer in n_heads), (name, ALL, ALL)]
    return patches


def _n_heads(bias: KVBias, name: str, layer: int) -> int | None:
    """How many heads of a layer a point patches one by one; None where the layer has nothing there."""
    n_queries, n_heads, convolves = bias.first_state_head(layer), bias.n_heads_of(layer), layer in layers_with_convolution(bias)
    if name == "prompt":
        return 0 if n_heads or convolves else None
    if POINTS[name].heads == "key-value":
        return bias.n_kv_heads_of(layer) if n_queries and shifts(bias) else 0 if convolves else None
    return (n_heads if name in ("bias", "z_bias") else n_queries) or None


def has_batch_axis(point: str) -> bool:
    """Whether a patch there can share a pass with others."""
    return not point.endswith("_shift_coef")


@analysis(
    COLUMNS,
    "which part of a clean prompt, patched into the run with a corrupted one, restores the answer",
    cost="both prompts once; the text twice, and from its layer on for each patch: each head, layer and all, of every point",
    inputs={"corrupted": tokens_field("corrupted", prepend_bos=True)},
    options={"points": Option("what is patched; empty: all that the model has", tuple(POINTS), many=True)},
)
@checked
@torch.no_grad()
def activation_patching(
    model: KVModel,
    prompt: KVBias | PromptTokens,
    corrupted: KVBias | CorruptedTokens,
    text: TextTokens,
    *,
    answer: Answer = None,
    rival: Rival = None,
    metric: Metric | None = None,
    points: str | Sequence[str] | None = None,
) -> pd.DataFrame:
    """Patch every point, layer and head from the clean into the corrupted run.

    Args:
        model: any.
        prompt, corrupted: the clean and the corrupted prompt: strings, tokens [pos], or biases (softmax: both converted by the
            same method). If positions are absolute they must have equal length.
        text: [pos], without BOS, read under both.
        answer, rival: the metric is the log-probability of ``answer`` behind the text, less that of ``rival``, in nats, summed
            over the tokens of each (words, a token id, or token ids); without ``answer`` it is the mean of the text's next
            tokens.
        metric: another metric of the logits on the text, used instead.
        points: one or several of :data:`POINTS`; None takes all that the model and the two prompts have.

    Returns:
        One row per patch; points in the order given, each by layer, then head, then whole layers, then everything:

        {columns}

    Raises:
        KVLensError: an unknown point (the nearest is proposed) or one that the model lacks, ``keys`` or ``values`` of prompts
            that do not pair token by token, prompts of different lengths where positions are absolute.

    Source: the scale and the grids are those of ``transformer_lens.patching``.
    """
    clean, corrupted = converted(model, "prompt", prompt), converted(model, "corrupted", corrupted)
    text = one_sequence(model, "text", text)
    _check(clean, corrupted)
    readings = _readings(model, text, answer, rival) if metric is None else [(text, metric)]
    patches = patches_of(model, corrupted, _points_of(model, points, clean, corrupted))
    donors = _donors(clean, corrupted)
    of_all = model, donors, patches, HeadExchange(donors["corrupted"], *donors.values())
    with progress("activation_patching") as tell:
        runs = [_run(*of_all, *reading, part_of(tell, i, len(readings))) for i, reading in enumerate(readings)]
    clean_metric, corrupted_metric, metrics = (sum(values) for values in zip(*runs, strict=True))
    gap = clean_metric - corrupted_metric
    return COLUMNS.frame(
        {
            **pd.DataFrame(patches, columns=["point", "layer", "head"]),
            "metric": metrics,
            "clean_metric": clean_metric,
            "corrupted_metric": corrupted_metric,
            "recovered": (metrics - corrupted_metric) / (gap or float("nan")),
        }
    )


def _run(
    model: KVModel,
    donors: Mapping[str, KVBias],
    patches: Sequence[Patch],
    exchange: HeadExchange,
    text: Int[Tensor, " pos"],
    metric: Metric,
    tell: OnProgress,
) -> tuple[float, float, pd.Series]:
    """The metric on a text under the clean prompt, under the corrupted one, and of each patch.

    Args:
        donors: what is patched in, by the point.
        exchange: the corrupted prompt's parts.
    """
    clean_metric, of_clean = _clean_run(model, donors["prompt"], text, metric)
    sources = _identity_coefficients(model) | of_clean
    with model.kv_bias(donors["corrupted"]):
        corrupted_metric = _values(metric, text_logits(model, None, text)[None])[0]
    order, values = list[int](), list[float]()
    for batched, size in ((True, None), (False, 1)):
        chosen = [number for number, (point, *_) in enumerate(patches) if has_batch_axis(point) is batched]
        order += chosen
        of_chosen = [patches[number] for number in chosen]
        rows = _replaced(exchange, of_chosen, list(donors))
        hooks_of = partial(_patch_hooks, of_chosen, sources)
        first = [max(layer, 0) for _, layer, _ in of_chosen]
        for logits in exchange.logits(model, text, *rows, first=first, batch_size=size, hooks_of=hooks_of):
            values += _values(metric, logits)
            tell(len(values) / len(patches))
    return clean_metric, corrupted_metric, pd.Series(values, index=order, dtype=float).sort_index()


def _check(clean: KVBias, corrupted: KVBias) -> None:
    if not clean.starts_where(corrupted):
        raise KVLensError(
            f"activation_patching: the text starts at position {clean.position_offset} under the clean prompt and at "
            f"{corrupted.position_offset} under the corrupted one; this model's positions are absolute: give prompts of "
            "equal length"
        )


def _readings(
    model: KVModel, text: Int[Tensor, " pos"], answer: Answer, rival: Rival
) -> list[tuple[Int[Tensor, " _"], Metric]]:
    """The texts that are read, each with a metric; the metrics add up to log p of the answer, less that of the rival."""
    if answer is None:
        if rival is not None or len(text) < 2:
            raise KVLensError("activation_patching: a rival, and a text of one token, need an answer; give answer=, or metric=")
        check_predicts_text(model, text)
        return [(text, lambda logits: -next_token_losses(log_probabilities(logits), text)[:, :-1].mean(dim=-1))]
    said = [(1.0, predicted_tokens(model, "answer", answer))]
    said += [] if rival is None else [(-1.0, predicted_tokens(model, "rival", rival))]
    behind: dict[tuple[int, ...], list[tuple[float, Tensor]]] = {}
    for sign, tokens in said:
        behind.setdefault(tuple(tokens[:-1].tolist()), []).append((sign, tokens))  # those of one token share a reading
    return [(torch.cat([text, some[0][1][:-1]]), partial(_log_p, some)) for some in behind.values()]


def _log_p(said: Sequence[tuple[float, Tensor]], logits: Float[Tensor, "row pos d_vocab"]) -> Float[Tensor, " row"]:
    """The log-probability of tokens at the end of the logits, summed with a sign each."""
    log_p = log_probabilities(logits[:, -len(said[0][1]) :])
    each = [sign * log_p.gather(-1, tokens[None, :, None].expand(len(log_p), -1, -1)).sum(dim=(1, 2)) for sign, tokens in said]
    return torch.stack(each).sum(dim=0)


def _points_of(model: KVModel, points: str | Sequence[str] | None, clean: KVBias, corrupted: KVBias) -> Sequence[str]:
    """The requested points that these prompts have."""
    halves, known = ("keys", "values"), [points] if isinstance(points, str) else points
    known = available_points(model, corrupted) if known is None else known
    if model.cfg.attention == "linear" or _pair_token_by_token(clean, corrupted):
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
    paired = _pair_token_by_token(clean, corrupted)
    clean, corrupted = in_one_space(clean, corrupted)
    donors = dict.fromkeys(("bias", "shift_state", "prompt"), clean) | {"corrupted": corrupted}
    for name in ("b_kv", "b_d"):
        parts = zip(corrupted.attention, clean.attention, strict=True)
        donors[name] = corrupted.with_attention([part.with_tensors({name: getattr(given, name)}) for part, given in parts])
    return donors | (_halves(clean, corrupted) if paired else {})


def _pair_token_by_token(a: KVBias, b: KVBias) -> bool:
    """Whether both have one weighted virtual key per token, and the same number of tokens."""
    return a.d_phi == b.d_phi and all(
        bias.kind == "virtual_keys"
        and bias.fit is None
        and bias.d_phi == bias.n_prompt_tokens
        and all(bool((part.b_d != 0).all()) for part in bias.attention)
        for bias in (a, b)
    )


def _halves(clean: KVBias, corrupted: KVBias) -> dict[str, KVBias]:
    """The clean keys with the corrupted values, and the other way round, of two biases :func:`in_one_space`, in this order.

    Recurrent states, which have no such halves, are the corrupted prompt's.
    """
    parts = zip(clean.attention, corrupted.attention, strict=True)
    halves = [_halves_of(a.b_kv, a.b_d, b.b_kv, b.b_d) for a, b in parts]
    found = {}
    for name, bias, of_layers in zip(("keys", "values"), (clean, corrupted), zip(*halves, strict=True), strict=True):
        mixed = [replace(part, b_kv=b_kv) for part, b_kv in zip(bias.attention, of_layers, strict=True)]
        layers = zip(bias.with_attention(mixed).layers, corrupted.layers, strict=True)
        found[name] = bias.with_layers([layer.with_state_of(own) for layer, own in layers])
    return found


def _halves_of(kv: Tensor, d: Tensor, other_kv: Tensor, other_d: Tensor) -> tuple[Tensor, Tensor]:
    """b_kv of the clean keys with the corrupted values, and of the corrupted keys with the clean values."""
    r = kv.shape[2] // 2
    kv, d, other_kv, other_d = kv[:, :, :r], d[:, :, :r, None], other_kv[:, :, r:], other_d[:, :, r:, None]
    nothing = torch.zeros_like(kv)
    return torch.cat([d * (other_kv / other_d), nothing], dim=2), torch.cat([nothing, other_d * (kv / d)], dim=2)


def _replaced(
    exchange: HeadExchange, patches: Sequence[Patch], donors: Sequence[str]
) -> tuple[Bool[Tensor, "row part"], Int[Tensor, " row"]]:
    """What each patch replaces of the prompt, and the number of its donor, which are those of the points."""
    rows = []
    for name, layer, head in patches:
        point = POINTS[name]
        if point.heads == "key-value" and head != ALL:
            head = heads_with(exchange.own, ExchangedPart(layer, head, SHIFT_STATE_PART)).start
        kinds = [kind for kind in PART_KINDS if (point.bias if kind == HEAD_PART else point.shift_state)]
        rows.append(exchange.of(layer, head, kinds))
    donor = [donors.index(point) if point in donors else 0 for point, *_ in patches]
    return exchange.rows(rows), torch.tensor(donor, dtype=torch.long)


def _identity_coefficients(model: KVModel) -> dict[tuple[str, int, str, int], Tensor]:
    """The coefficients [head, window+1] of no shift, which are patched in."""
    sources: dict[tuple[str, int, str, int], Tensor] = {}
    for x in shifted_projections(model):
        for layer, of in enumerate(map(model.cfg.of_layer, range(model.cfg.n_layers))):
            n_heads, name = of.n_heads if x == "q" else of.n_kv_heads, f"{x}_shift_coef"
            identity = torch.eye(1, model.cfg.kv_shift.window + 1).expand(n_heads, -1)
            sources[name, layer, f"blocks.{layer}.attn.hook_{name}", 0] = identity
    return sources


_Key = TypeVar("_Key")


def _clean_run(
    model: KVModel, clean: KVBias, text: Int[Tensor, " pos"], metric: Metric
) -> tuple[float, dict[tuple[str, int, str, int], Tensor]]:
    """The metric under the clean prompt, and z_bias of every layer."""
    sources, hooks = dict[tuple[str, int, str, int], Tensor](), []
    for layer in range(model.cfg.n_layers):
        first = 0
        for name, n_heads in head_hooks(model, layer, "hook_z_bias").items():
            hooks.append((name, partial(_keep, sources, ("z_bias", layer, name, first))))
            first += n_heads
    with model.kv_bias(clean), model.hooks(fwd_hooks=hooks):
        return _values(metric, text_logits(model, None, text)[None])[0], sources


def _keep(into: dict[_Key, Tensor], key: _Key, x: Tensor, hook: object) -> None:
    into[key] = x.clone()


def _values(metric: Metric, logits: Tensor) -> list[float]:
    values = metric(logits)
    if not isinstance(values, Tensor) or values.shape != logits.shape[:1]:
        raise KVLensError(f"metric: expected one number per row, [{len(logits)}], from logits, got {brief(values)}")
    return values.double().tolist()


def _patch_hooks(patches: Sequence[Patch], sources: Sources, rows: slice) -> list[tuple[str, Callable[..., Tensor]]]:
    """TransformerLens hooks that put the activations of ``patches[rows][i]`` into row i of the input."""
    hooks, patches = [], patches[rows]
    for (point, layer, hook_point, first), tensor in sources.items():
        axis = 2 if has_batch_axis(point) else 0
        here = torch.tensor([name == point and where in (layer, ALL) for name, where, _ in patches])
        named = torch.tensor([head for *_, head in patches])[:, None]
        mask = here[:, None] & ((named == ALL) | (named == first + torch.arange(tensor.shape[axis])))
        if bool(mask.any()):
            hooks.append((hook_point, _setter(mask, tensor, axis)))
    return hooks


def _setter(mask: Bool[Tensor, "row head"], source: Tensor, axis: int) -> Callable[..., Tensor]:
    """A hook that replaces the entries in ``mask`` by those of ``source``."""
    shape = [1] * source.dim()
    shape[axis] = mask.shape[1]
    if axis:
        shape[0] = mask.shape[0]
    mask = mask.reshape(shape)

    def patch(x: Tensor, hook: object) -> Tensor:
        return torch.where(mask.to(x.device), source.to(x), x)

    return patch
