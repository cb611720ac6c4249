"""Induction heads: what every head attends to on repeated text, and in a prompt whose tokens the text repeats.

At the second occurrence of a token, an induction head attends to the token that followed the first one. The text is random
tokens, or a prompt, repeated once; the four kinds of attention are those of :mod:`kvlens.analyses.heads.repeated_text`. This
table has a row for each head and kind. The names of heads, and all measures with one number per head, are in
:func:`kvlens.analyses.heads.naming.induction_verdicts`, which takes the same arguments.

Source: Olsson et al. 2022; Elhage et al. 2021; KVSA sec. 3, table 4.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.checks import Seed, Within, checked
from kvlens.errors import IndirectHeads
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.model import Block, HeadsRead, StreamReading, direct_path, heads_per_layer, output_weights

from ..bias.exchange import HEAD
from ..declaration import Columns, Option, analysis, tokens_field
from ..logit_attribution import residual_directions
from ..predictions import LOSS_CHANGE
from ..registry import on_its_front_ends
from ..segments import heads_of_model, progress, stack_layers
from ..sequences import PromptTokens, TextTokens, one_sequence, prompt_sequence
from .ablation import AblationEffect, cached, resampling_ablation, swap_costs
from .head_pairs import wide_dtype
from .repeated_text import (
    LONGEST_TEXT,
    PATTERNS,
    PatternScores,
    RepeatedTokens,
    ShiftTaps,
    draw_piece,
    layer_taps,
    longest_repeat,
    pattern_scores,
    repeat_tokens,
    roles,
    shifted_projections,
)
from .retrieval import N_SPLITS, of_cases
from .rows import visit_rows
from .verdicts import MATCHES, WORTH_ASKING, contrasts

# All measures of heads that come from one forward pass over repeated tokens.
#
# Patterns are reduced to scores layer by layer, and never kept; direct attribution needs only each head's output and what lies
# between the heads and the logits.


def measured_heads(
    model: KVModel, repeated: RepeatedTokens
) -> tuple[PatternScores, Float[Tensor, "layer head"], list[ShiftTaps]]:
    """Scores, attributions (means over the text's sequences) and shift coefficients (:class:`HeadsFound`).

    As many sequences are read at a time as memory allows.
    """
    parts = repeated.split(max(1, NUMBERS_PER_PASS // _numbers_per_sequence(model, repeated)))
    scores, attributions, taps = zip(*(_measure_part(model, part) for part in parts), strict=True)
    shares = [len(part.tokens) / len(repeated.tokens) for part in parts]
    of_parts = dict(zip(PatternScores._fields, zip(*scores, strict=True), strict=True))
    every = torch.cat(of_parts.pop("by_sequence"), dim=-1)
    mean = PatternScores(by_sequence=every, **{name: _weighted(shares, tensors) for name, tensors in of_parts.items()})
    return mean, _weighted(shares, attributions), taps[0]


def _numbers_per_sequence(model: KVModel, repeated: RepeatedTokens) -> int:
    """The numbers of one layer's pattern, scores and temporaries; every layer's z; the widest activations."""
    pos, cfg = repeated.tokens.shape[1], model.cfg
    return pos * (6 * cfg.n_heads * pos + cfg.n_layers * cfg.n_heads * cfg.d_head + 4 * max(cfg.d_mlp or 0, cfg.d_model))


def _weighted(shares: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([share * x for share, x in zip(shares, tensors, strict=True)]).sum(dim=0)


def _measure_part(model: KVModel, repeated: RepeatedTokens) -> tuple[PatternScores, Tensor, list[ShiftTaps]]:
    """Run one forward pass; patterns are reduced to scores immediately and never kept."""
    coefficients: dict[str, Tensor] = {}
    outputs: list[Tensor] = []
    taps: list[ShiftTaps] = []
    scores: list[PatternScores] = []

    def keep(x: Tensor, hook: Any) -> None:
        coefficients[hook.name] = x

    def score(layer: int, read: HeadsRead) -> None:
        used = {x: coefficients[f"blocks.{layer}.attn.hook_{x}_shift_coef"] for x in shifted_projections(model)}
        taps.append(layer_taps(model, layer, used, wide_dtype(model)))
        scores.append(pattern_scores(read.pattern, repeated, taps[-1]))
        outputs.append(read.z)

    shifts = [f"blocks.{i}.attn.hook_{x}_shift_coef" for i in range(model.cfg.n_layers) for x in shifted_projections(model)]
    with model.hooks(fwd_hooks=[(name, keep) for name in shifts]):
        path: StreamReading | None = None
        with contextlib.suppress(IndirectHeads):  # after all layers have been visited
            path = direct_path(model, repeated.tokens, score)
    if path is None:
        attribution = scores[0].raw.new_full((len(scores), max(heads_per_layer(model))), torch.nan)
    else:
        positions = slice(repeated.second, repeated.tokens.shape[1] - 1)
        attribution = stack_layers(_logit_attribution(model, path, outputs, positions, repeated.next_tokens))
    return _stacked(scores), attribution, taps


def _stacked(scores: Sequence[PatternScores]) -> PatternScores:
    """The scores of all layers, zeros for heads that a layer does not have."""
    return PatternScores(*(stack_layers(of_layers) for of_layers in zip(*scores, strict=True)))


def _logit_attribution(
    model: KVModel,
    path: StreamReading,
    outputs: Sequence[Float[Tensor, "batch pos _ _"]],
    positions: slice,
    targets: Int[Tensor, "batch position"],
) -> list[Float[Tensor, " _"]]:
    """Mean over batch and positions of what each head adds to the centered logit of the target, layer by layer.

    With the scale of every norm frozen, and without later layers and biases, the direct contribution of z_h to the logit of
    token t is

        z_h W_O . d_t / s

    with d_t and s from :mod:`kvlens.analyses.logit_attribution`. The directions are pulled back to d_head numbers per
    head and position, so no head's output is expanded to d_model numbers. If there is a norm between the heads and the
    residual stream (Gemma 2, OLMo 2), its scale is frozen like that of the final norm, and its gain and centering are part of
    the path.

    Args:
        model: the model that was run.
        path: what lay between its heads and its logits in that run (:func:`kvlens.model.direct_path`).
        outputs: z of every layer.
        positions: the positions whose logits are attributed.
        targets: the token at each position whose logit is attributed.

    Source: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits (direct paths); TransformerLens,
    ``logit_attrs``.
    """
    dtype = wide_dtype(model)
    direction = residual_directions(model, targets) / path.scale[:, positions].to(dtype)
    rows = []
    for number, (layer, z, of) in enumerate(zip(model.layers(), outputs, path.layers, strict=True)):
        into_stream = direction if of.scale is None else _in_front_of(layer, direction, of.scale[:, positions].to(dtype))
        into_head = torch.einsum("bpm,hdm->bphd", into_stream, output_weights(model, number).to(dtype))
        written = z[:, positions].to(dtype)
        written = written if of.factor is None else written * of.factor[:, positions].to(dtype)
        rows.append((written * into_head).sum(dim=-1).mean(dim=(0, 1)))
    return rows


def _in_front_of(layer: Block, direction: Tensor, scale: Tensor) -> Tensor:
    """Pull ``direction`` back through the norm behind a layer's heads, with its scale frozen, from its output to its input."""
    _, norm = layer.norms()
    assert norm is not None
    direction = direction * norm.gain
    return (direction - direction.mean(dim=-1, keepdim=True) if norm.centers else direction) / scale


DEFAULT_LENGTH, N_TEXTS = 50, 10
RepeatedPrompt = str | Int[Tensor, "*batch piece"]
COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", HEAD),
    kind=(
        "str",
        "what is attended to: ``prefix_matching``, the token after the first copy, from the second copy; "
        "``previous_token``, the position before; ``duplicate_token``, the token's first copy, from the second copy; "
        "``current_token``, the position itself",
    ),
    score=("float64", "mean attention to it"),
    score_value=("float64", "the same of the value-side pattern A (beta_1 I + beta_2 Shift): what is read"),
    score_low=("float64", "the 95 % interval of score_value (bootstrap over sequences); NaN for a single sequence"),
    score_high=("float64", ""),
    null=("float64", "score_value where the first copy has other tokens: of a head that goes by position alone the same"),
    stability=(
        "float64",
        "of the kind's list of heads: rank correlation (Spearman's) of score_value from two halves of the sequences, mean over "
        f"{N_SPLITS} splits; NaN for a single sequence",
    ),
    score_key=("float64", "the same of the key-side pattern A (alpha_1 I + alpha_2 Shift): whose keys drew the attention"),
    contrast=(
        "float64",
        "score_value over the mean |attention| to other positions of the first copy; NaN for the two kinds that go by position",
    ),
    loss_change=(
        "float64",
        f"{LOSS_CHANGE}; with another text's token read there. NaN without ablations, and for a head whose "
        f"ablation changes the loss by at most {WORTH_ASKING}",
    ),
)


def check_model(model: KVModel) -> None:
    """Raise KVLensError for a model in which induction is not defined."""
    if model.cfg.attention_dir != "causal":
        raise KVLensError("induction_heads: expected causal attention; a bidirectional model sees the next token")
    if model.cfg.d_vocab_out != model.cfg.d_vocab:
        raise KVLensError(
            f"induction_heads: expected a model that predicts its own tokens; it reads {model.cfg.d_vocab} and predicts "
            f"{model.cfg.d_vocab_out}"
        )


REPEATED = tokens_field("prompt", prepend_bos=False)
"""The prompt's tokens, without BOS, which is added once before both copies."""
N_SEQUENCES = Option(
    "repeat so many sequences of random tokens, as long as the prompt (default: repeat the prompt itself)", value_type=int
)
SEED = Option("of random tokens")
ABLATIONS = Option("also measure the effect of resampling each head's output, and what it reads at each kind of position")


@analysis(
    COLUMNS,
    "induction heads: attention of every head to four kinds of position on the repeated prompt",
    cost="the repeated text twice; with ablations once more for each head, and four times for each that matters",
    inputs={"prompt": REPEATED},
    options={"n_sequences": N_SEQUENCES, "seed": SEED, "ablations": ABLATIONS},
    check_model=check_model,
)
@on_its_front_ends
@checked
@torch.no_grad()
def induction_heads(
    model: KVModel,
    prompt: RepeatedPrompt | None = None,
    *,
    n_sequences: Annotated[int, Within(1, LONGEST_TEXT)] | None = None,
    n_repeated: Annotated[int, Within(2, LONGEST_TEXT)] | None = None,
    seed: Seed = 0,
    prepend_bos: bool | None = None,
    ablations: bool = False,
) -> pd.DataFrame:
    """Score every head on repeated tokens, for each kind of attention.

    Args:
        model: causal, with the same vocabulary for input and output; an attached bias stays attached.
        prompt: the text that is repeated, without BOS: a string, or tokens [pos] or [batch, pos]. None takes random tokens.
        n_sequences: repeat so many sequences of random tokens; with a prompt in its place, each as long as it. None takes 10
            where there is no prompt.
        n_repeated: length of one copy of random tokens; None takes the prompt's, or else 50, or as much as ``n_ctx`` allows.
        seed: seed of the random tokens, and of those that ablations resample from.
        prepend_bos: None prepends BOS if that is the model's default.
        ablations: also replace each head's output by that on other random tokens (n_layers x n_heads x n_sequences runs), and,
            for each head that changes the loss by more than 0.005 nats, what it reads at each of the four kinds of position
            (4 n_sequences runs per head; not in models with an attention variant).

    Returns:
        One row per head and kind, by layer, head, then kind in the order below:

        {columns}

    Raises:
        KVLensError: a model that this analysis does not support, invalid tokens, numbers out of range.
    """
    found = look_at_heads(
        model, prompt, n_sequences=n_sequences, n_repeated=n_repeated, seed=seed, prepend_bos=prepend_bos,
        swapped=(lambda effect: effect.loss_change.abs() > WORTH_ASKING) if ablations else None,
    )  # fmt: skip
    scores = found.scores
    contrast = [
        contrasts(scores, found.repeated, kind) if kind in MATCHES else torch.full_like(scores.raw[:, 0], torch.nan)
        for kind in PATTERNS
    ]
    heads, by_head = heads_of_model(model), "layer kind head -> layer head kind"
    return COLUMNS.frame(
        {
            **{name: number.repeat_interleave(len(PATTERNS)) for name, number in zip(("layer", "head"), heads, strict=True)},
            "kind": list(PATTERNS) * len(heads[0]),
            "score": rearrange(scores.raw, by_head)[heads],
            "score_value": rearrange(scores.value_side, by_head)[heads],
            **_over_sequences(model, found, seed),
            "score_key": rearrange(scores.key_side, by_head)[heads],
            "contrast": torch.stack(contrast, dim=-1)[heads],
            "loss_change": rearrange(found.swap_changes, "kind layer head -> layer head kind")[heads],
        }
    )


def _over_sequences(model: KVModel, found: "HeadsFound", seed: int) -> dict[str, np.ndarray]:
    """Interval, null and stability of the value-side score, in the order of the table's rows."""
    heads = heads_of_model(model)

    def of_kind(scores: PatternScores, kind: int) -> np.ndarray:
        return scores.by_sequence[:, kind][heads].T.double().cpu().numpy()

    kinds = [of_cases(model, of_kind(found.scores, i), of_kind(found.control, i), seed) for i in range(len(PATTERNS))]
    names, n = ("score_low", "score_high", "null", "stability"), len(heads[0])
    return {name: np.stack([np.broadcast_to(of[name], n) for of in kinds], axis=1).ravel() for name in names}


class HeadsFound(NamedTuple):
    """All measurements of every head on repeated tokens.

    Attributes:
        repeated: the tokens.
        scores: of the repeated text.
        control: of the same text whose first copy has other tokens, so that only a head that goes by position attends alike.
        attribution: to the right next token's logit; NaN in models whose heads do not write to the residual stream directly.
        taps: the shift coefficients as used.
        ablation: the effect of resampling a head's output; NaN unless requested.
        swap_changes: the change of the loss when a head reads another text's token at a kind of position; NaN unless requested.
        swap_errors: the standard errors of the differences of two swaps; None if they were not measured.
    """

    repeated: RepeatedTokens
    scores: PatternScores
    control: PatternScores
    attribution: Float[Tensor, "layer head"]
    taps: list[ShiftTaps]
    ablation: AblationEffect
    swap_changes: Float[Tensor, "kind layer head"]
    swap_errors: Float[Tensor, "kind kind layer head"] | None


def look_at_heads(
    model: KVModel,
    prompt: RepeatedPrompt | None,
    *,
    n_sequences: int | None,
    n_repeated: int | None,
    seed: int,
    prepend_bos: bool | None,
    swapped: Callable[[AblationEffect], Bool[Tensor, "layer head"]] | None,
) -> HeadsFound:
    """Make the measurements behind both tables; arguments and errors as :func:`induction_heads`.

    Every head is ablated where ``swapped`` is given: it then says of which heads what they read is swapped, too.
    """
    check_model(model)
    generator = torch.Generator().manual_seed(seed)
    piece = None if prompt is None else _pieces(model, prompt)
    if piece is None or n_sequences is not None:
        usual = longest_repeat(model, prepend_bos, DEFAULT_LENGTH) if piece is None else piece.shape[1]
        piece = draw_piece(model, n_sequences or N_TEXTS, n_repeated or usual, generator)
    repeated = repeat_tokens(model, piece, prepend_bos)
    others = draw_piece(model, piece.shape[0], piece.shape[1], generator)
    scores, attribution, taps = measured_heads(model, repeated)
    measured = (repeated, scores, measured_heads(model, repeated.control(others))[0], attribution, taps)
    unknown = torch.full((len(PATTERNS), model.cfg.n_layers, max(heads_per_layer(model))), torch.nan)
    if swapped is None:
        return HeadsFound(*measured, AblationEffect(*unknown[:3]), unknown, None)
    donors = repeat_tokens(model, others, prepend_bos)
    with progress("ablating heads") as tell:
        ablated = resampling_ablation(model, repeated, donors, on_progress=tell)
    if model.cfg.attention_variant is not None:
        return HeadsFound(*measured, ablated, unknown, None)
    costs, errors = swap_costs(model, repeated, donors, taps, swapped(ablated))
    return HeadsFound(*measured, ablated, costs, errors)


def _pieces(model: KVModel, prompt: str | Tensor) -> Tensor:
    if isinstance(prompt, str) or (isinstance(prompt, Tensor) and prompt.dim() == 1):
        return one_sequence(model, "induction_heads: prompt", prompt)[None]
    return prompt


COPIES = Columns(
    layer=("int64", "from 0"),
    head=("int64", HEAD),
    position=("int64", "in the text"),
    prompt_position=("int64", "of the token after an earlier occurrence of the text's token"),
    attention=("float64", "of the head, from the one to the other"),
    shifted=("bool", "whether the head reaches the following token by its shift coefficients rather than an earlier layer"),
)


@analysis(COPIES, "attention from each text token to what followed it in the prompt", cost="the prompt and the text once")
@checked
@torch.no_grad()
def prompt_copies(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
) -> pd.DataFrame:
    """Measure every head's attention along the pairs that induction would use.

    Args:
        model: with any attention.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.

    Returns:
        By layer, head, text token, then earlier occurrence; no rows if no token is repeated:

        {columns}

    Raises:
        KVLensError: tokens that are empty, misshapen or outside the vocabulary.
    """
    prompt = prompt_sequence(model, "prompt", prompt)
    text = one_sequence(model, "text", text)
    pairs = repeated_pairs(prompt, text)
    queries, row = pairs[:, 0].unique(return_inverse=True)
    n_pairs, counts = len(pairs), heads_per_layer(model)
    attention = torch.zeros(len(counts), max(counts), n_pairs)

    def pick(layer: int, first: int, rows: Tensor) -> None:
        here = (pairs[:, 1] >= first) & (pairs[:, 1] < first + rows.shape[-1])
        attention[layer, : len(rows), here] = rows[:, row[here], pairs[here, 1] - first]

    with progress("prompt_copies") as tell:
        visit_rows(model, torch.cat([prompt, text]), queries, pick, on_progress=tell)
    by_shift = torch.tensor([role == "prefix matching" for row in _roles(model, prompt[:1]) for role in row])
    layer, head = heads = heads_of_model(model)
    return COPIES.frame(
        {
            "layer": layer.repeat_interleave(n_pairs),
            "head": head.repeat_interleave(n_pairs),
            "position": (pairs[:, 0] - len(prompt)).repeat(len(head)),
            "prompt_position": pairs[:, 1].repeat(len(head)),
            "attention": attention[heads],
            "shifted": by_shift.repeat_interleave(n_pairs),
        }
    )


def repeated_pairs(prompt: Int[Tensor, " prompt_pos"], text: Int[Tensor, " text_pos"]) -> Int[Tensor, "pair 2"]:
    """(position of a text token, position after an equal token of the prompt), both in the concatenation of prompt and text."""
    before = prompt[:-1].cpu()
    keys = [(before == token).nonzero().squeeze(1) + 1 for token in text.cpu()]
    queries = [torch.full_like(found, len(prompt) + i) for i, found in enumerate(keys)]
    return torch.stack([torch.cat(queries), torch.cat(keys)], dim=1)


def _roles(model: KVModel, token: Int[Tensor, " 1"]) -> list[list[str]]:
    """The role of every head by its shift coefficients, including the effect of hooks on them."""
    shifted = shifted_projections(model)
    names = [{x: f"blocks.{layer}.attn.hook_{x}_shift_coef" for x in shifted} for layer in range(model.cfg.n_layers)]
    wanted = [name for of_layer in names for name in of_layer.values()]
    cache = cached(model, token[None], wanted) if wanted else {}
    used = [{x: cache[name] for x, name in of_layer.items()} for of_layer in names]
    return [roles(layer_taps(model, layer, of_layer, torch.float64)) for layer, of_layer in enumerate(used)]
