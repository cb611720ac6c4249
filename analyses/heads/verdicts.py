"""The name of a head: by where its attention is far above chance, and by its effect on the loss if ablations were run.

**By the pattern.** E is the value-side pattern of :mod:`kvlens.analyses.heads.repeated_text`. For each kind, the criterion is
how much of what a head reads, |E|, is at the lag of that kind:

- *"previous token" and "current token"* are positional. A head with learned positions may attend to the token before on the
  first 24 positions and nowhere else, and still feed every induction head, so the strongest stretch of :data:`STRETCH`
  positions decides. It is searched for on the first :data:`EARLY` positions (and the BOS), which every repeated text of 16
  tokens has, so that the verdict does not depend on the text's length; and for the token before, if there is none there, on
  all: a head may attend to it only further on. There ``share = |sum of E at the lag| / sum of |E|`` must be
  at least ``threshold`` (:data:`OF_ITSELF` for the token itself, which an idle head comes close to), and ``ratio`` times
  chance, that is uniform attention over the i + 1 visible positions.
- *"prefix matching" and "duplicate token"* match tokens. Their share falls as the text grows, for a linear head as fast as
  chance. The *contrast* does not: E at the lag over the mean |E| on the other positions of the first copy, which the same query
  sees at a similar distance. It must be :data:`CONTRAST` over the whole second copy, where the share must be ``ratio`` times
  chance. And it must come from the match: on the control, whose first copy has other tokens, at most half as much may be read
  at that lag. A head that always attends 49 positions back reads as much there.

The first is half of what an induction head is (Olsson et al. 2022): no head is called "induction" by its pattern, because the
model may do as well without it, or better.

A matching head that reads, at its lag, less than :data:`WEAK` of what the model's strongest head of that kind does, is called
"weak prefix matching" or "weak duplicate token". In SmolLM2-135M and Qwen2.5-0.5B the weak ones together change nothing when
they are ablated (``tests/benchmarks/results/explanations.md`` has the figures).

A positional head must meet the criterion at three of four positions of the stretch, with half of ``ratio`` there, and a
matching head at :data:`MIN_MATCHES` positions, with half of the contrast: a head that attends to random fixed positions
occasionally hits a lag with all of its attention. If a head meets the criteria of two kinds, the one with the larger part of
sum E^2 names it: the tokens are independent, so this is the kind's part of the variance of the head's output. It is taken on
the second copy if a matching kind is met, and a match takes precedence over "current token".

Kinds whose parts differ by at most :data:`MARGIN` standard errors over positions are named together, as in
"prefix matching / duplicate token". A head that meets no criterion is "inconclusive" if its pattern does not decide: because it
is too spread out, or because the contrast of a kind is below its limit by at most :data:`MARGIN` standard errors. A head's
*spread* is the number of positions that it reads, counted as (sum of |E|)^2 / sum of E^2, over the number that it sees, on the
first :data:`EARLY` positions from the ninth, so that it does not depend on the text's length either: 1 for uniform attention,
2 / pi for E drawn from a normal distribution, about 0.1 for a sharp head. Above :data:`SPREAD` a head can be essential to a
model although its pattern does not show it (below). Any other head is "none": it attends to some positions more than to
others, but not to those of the four kinds.

**By the loss.** The costs of ablations and swaps: `name_by_loss` below, from :mod:`kvlens.analyses.heads.ablation`. A head that
the model needs for what it reads by prefix matching is called "induction". Only the kinds that a head attends to :data:`LEAD`
times as much as elsewhere are considered (by contrast; for positional kinds relative to chance on the strongest stretch, of E
or, since E of linear heads may change sign between texts, of the root of E^2): a head that reads all of the first copy equally
also raises the correct token, and is not an induction head.

The constants were chosen on models trained for this purpose (softmax ones with one to four layers, learned and rotary
positions, with and without KV shift; linear ones with elu + 1 features), on the shipped models, and on random models with
weights as sharp as trained ones. ``tests/benchmarks/bench_induction_heads.py`` measures the result.
"""

import math
from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .ablation import AblationEffect
from .repeated_text import PATTERNS, PatternScores, RepeatedTokens, lags_and_queries

# The name of a head by the loss, if ablations and swaps were measured.
#
# If the kernel cannot be sharp, a head may attend nearly everywhere and still carry the answer with a small part of its
# attention. Its pattern alone does not show that, but swaps do: the head reads another text's token at the lag of one kind, and
# nowhere else.
#
# A change of the loss is significant if it is more than :data:`COSTLY` and more than :data:`MARGIN` standard errors, up or
# down. A head whose ablation is significant is named by the swap with the largest significant change of the same sign, if that
# is at least :data:`PART` of the change by the ablation (it may be larger, since what a head reads elsewhere can have the
# opposite effect): by the name of the kind if the loss rises, by "negative" and the name of its pattern if it falls, so that
# nothing without which the loss falls is called induction. Kinds whose swaps differ
# by at most :data:`MARGIN` standard errors of the difference are named together. Otherwise, if the ablation raises the loss,
# the head is named by the kind of its pattern if that swap is significant, or is "other": the model needs it, but not for any
# one of these kinds of position. If the ablation lowers the loss it is "harmful": the model does better without it. If the
# ablation is not significant the name is that of the pattern, whatever a swap does; an inconclusive head is "none" if the
# ablation changes the loss by less than :data:`COSTLY`, its noise included.


NO_VERDICT = "none"
INCONCLUSIVE = "inconclusive"
OTHER = "other"
HARMFUL = "harmful"
NEGATIVE = "negative "
TIE = " / "
COSTLY = 0.1
"""The smallest significant change of the loss, in nats per token of the second copy."""
MARGIN = 2.0
"""Standard errors."""
PART = 1 / 3


Losses = tuple[AblationEffect, Float[Tensor, "kind layer head"], Float[Tensor, "kind kind layer head"]]
"""The effects of ablations, those of swaps, and the latter's errors (:func:`~kvlens.analyses.heads.ablation.swap_costs`)."""


class Named(NamedTuple):
    """A name, and the kinds of position that it refers to."""

    name: str
    kinds: tuple[str, ...]


def tied(names: Mapping[str, str], kinds: tuple[str, ...]) -> str:
    """The name of one kind, or those of several that cannot be distinguished."""
    return TIE.join(names[kind] for kind in kinds)


def name_by_loss(
    names: Mapping[str, str],
    by_pattern: Named,
    ablation: tuple[float, float],
    swaps: Mapping[str, float],
    errors: Mapping[tuple[str, str], float],
) -> Named:
    """The name of one head.

    Args:
        names: kind -> name of a head of that kind.
        by_pattern: the name by its pattern.
        ablation: the increase of the loss without the head, and its standard error.
        swaps: the increase for each kind considered, which counts where the ablation's does; NaN elsewhere.
        errors: two kinds -> standard error of their difference; the same kind twice -> that of its swap.
    """
    cost, error = ablation
    if not abs(cost) > max(COSTLY, MARGIN * error):
        return _unchanged(by_pattern, cost, error)
    sign = math.copysign(1, cost)
    alike = {kind: sign * loss for kind, loss in swaps.items() if sign * loss > max(COSTLY, MARGIN * errors[kind, kind])}
    kinds = _largest(alike, errors, PART * abs(cost))
    if cost > 0:
        kinds = kinds or tuple(kind for kind in by_pattern.kinds if kind in alike)
        return Named(tied(names, kinds), kinds) if kinds else Named(OTHER, ())
    return Named(NEGATIVE + tied(BY_PATTERN, kinds), kinds) if kinds else Named(HARMFUL, ())


def is_significant(effect: AblationEffect) -> Bool[Tensor, "layer head"]:
    """The heads whose ablation changes the loss significantly, which alone are named by what they read."""
    return effect.loss_change.abs() > (MARGIN * effect.loss_error).clamp(min=COSTLY)


def _unchanged(by_pattern: Named, cost: float, error: float) -> Named:
    """The name if the ablation changes nothing significantly: that of the pattern, as far as the noise allows."""
    if by_pattern.name == INCONCLUSIVE and abs(cost) + MARGIN * error <= COSTLY:
        return Named(NO_VERDICT, ())
    return Named(INCONCLUSIVE, ()) if by_pattern.name == NO_VERDICT and abs(cost) > COSTLY else by_pattern


def _largest(changes: Mapping[str, float], errors: Mapping[tuple[str, str], float], enough: float) -> tuple[str, ...]:
    """The kind of the largest change, with those not significantly different; none if it is below ``enough``."""
    top = max(changes, key=lambda kind: changes[kind], default=None)
    if top is None or changes[top] < enough:
        return ()
    return tuple(k for k in changes if k == top or changes[top] - changes[k] <= MARGIN * errors[top, k])


BY_PATTERN = dict(zip(PATTERNS, ("prefix matching", "previous token", "duplicate token", "current token"), strict=True))
VERDICTS = {**BY_PATTERN, "prefix_matching": "induction"}
"""The names of heads that the model needs for what they read there."""
STRETCH = 16
EARLY = 2 * STRETCH
FEW = 8
THRESHOLD = 0.2
RATIO = 3.0
CONTRAST = 4.5
OF_ITSELF = 0.4
STEADY = 0.75
MIN_MATCHES = 5
SPREAD = 1 / 3
"""The spread (share of the visible positions that a head reads) above which its pattern does not show its function."""
WORTH_ASKING = 0.005
"""The smallest change of the loss, up or down, for which a head's swaps are measured."""
LEAD = 1.25
BY_MATCH = 0.5
"""The largest part of what a matching head reads at its lag that it may read there without a match."""
WEAK = 1 / 8
ROUNDING = 1e-6
"""Tolerance of a part of sum E^2: about ten roundings of float32 patterns."""
MATCHES = ("prefix_matching", "duplicate_token")


class HeadVerdict(NamedTuple):
    """The name of a head, and the stretch of positions behind it: of the kind of the verdict, or the strongest of any kind."""

    name: str
    share: float
    ratio: float
    start: int


class _Evidence(NamedTuple):
    """The evidence for one kind.

    Whether its criterion is met, or missed within noise; how much more the head attends to it than elsewhere; its part of
    sum E^2 (where it is strongest, and on the second copy); its strongest stretch.
    """

    met: Bool[Tensor, "layer head"]
    nearly: Bool[Tensor, "layer head"]
    lead: Float[Tensor, "layer head"]
    variance: Float[Tensor, "layer head"]
    late_variance: Float[Tensor, "layer head"]
    share: Float[Tensor, "layer head"]
    ratio: Float[Tensor, "layer head"]
    start: Int[Tensor, "layer head"]


def name_heads(
    scores: PatternScores,
    control: PatternScores,
    repeated: RepeatedTokens,
    losses: Losses | None = None,
    *,
    threshold: float,
    ratio: float,
) -> list[list[HeadVerdict]]:
    """The verdict on every head, by layer.

    Args:
        scores: scores of all layers.
        control: those on the control.
        repeated: the text.
        losses: losses of ablations and swaps; None uses the pattern alone.
        threshold: the share required of a positional head.
        ratio: the share required of any kind, as a multiple of chance.
    """
    n_layers, n_heads = scores.all_read.shape[:2]
    evidence = {kind: _evidence(scores, control, repeated, kind, threshold, ratio) for kind in PATTERNS}
    whole = _evidence(scores, control, repeated, "previous_token", threshold, ratio, slice(1, repeated.tokens.shape[1]))
    early = evidence["previous_token"]
    evidence["previous_token"] = _Evidence(
        *(torch.where(~early.met & whole.met, b, a) for a, b in zip(early, whole, strict=True))
    )
    weak = {kind: _is_weak(scores, repeated, kind, evidence[kind].met) for kind in MATCHES}
    unclear = (spreads(scores, repeated) > SPREAD) | torch.stack([found.nearly for found in evidence.values()]).any(dim=0)
    positions = {True: slice(repeated.second, None), False: _positions(repeated, "previous_token")}
    errors = {matched: _part_errors(scores, of_kind) for matched, of_kind in positions.items()}
    rows = []
    for layer, head in product(range(n_layers), range(n_heads)):
        of_head = {kind: _Evidence(*(x[layer, head] for x in found)) for kind, found in evidence.items()}
        kinds = _by_pattern(of_head, {matched: x[:, :, layer, head] for matched, x in errors.items()})
        nothing = INCONCLUSIVE if unclear[layer, head] else NO_VERDICT
        named = Named(tied(BY_PATTERN, kinds) if kinds else nothing, kinds)
        if kinds and all(kind in MATCHES and bool(weak[kind][layer, head]) for kind in kinds):
            named = Named(f"weak {named.name}", kinds)
        if losses is not None:
            named = _by_loss(of_head, named, losses, layer, head)
        rows.append(_verdict(of_head, named))
    return [rows[first : first + n_heads] for first in range(0, len(rows), n_heads)]


def spreads(scores: PatternScores, repeated: RepeatedTokens) -> Float[Tensor, "layer head"]:
    """How many positions a head reads over how many it sees, mean over the first :data:`EARLY`; 0 if it reads nothing.

    The first :data:`FEW` of them, which see almost nothing, are left out.
    """
    end = _positions(repeated, "previous_token").stop
    positions = slice(min(repeated.second - repeated.n_repeated + FEW, end - 1), end)
    n_read = _over(scores.all_read[..., positions].square(), scores.all_squares[..., positions])
    return (n_read / torch.arange(positions.start + 1, end + 1, dtype=n_read.dtype, device=n_read.device)).mean(dim=-1)


def contrasts(scores: PatternScores, repeated: RepeatedTokens, kind: str) -> Float[Tensor, "layer head"]:
    """The value-side score of a matching kind over the mean attention to other positions of the first copy; 0 for 0 / 0."""
    read = scores.read[:, PATTERNS.index(kind), :, repeated.second :]
    return _over(read.sum(dim=-1).abs(), scores.elsewhere.sum(dim=-1))


def _read_at_lag(scores: PatternScores, repeated: RepeatedTokens, kind: str) -> Float[Tensor, "layer head"]:
    """What is read at the lag of a matching kind, over what is read, on the second copy."""
    read, whole = (x[..., repeated.second :].sum(dim=-1) for x in _of_kind(scores, kind)[:2])
    return _over(read.abs(), whole)


def _is_weak(
    scores: PatternScores, repeated: RepeatedTokens, kind: str, met: Bool[Tensor, "layer head"]
) -> Bool[Tensor, "layer head"]:
    """Whether a head reads at its lag less than :data:`WEAK` of what the strongest head does that meets the criterion."""
    share = _read_at_lag(scores, repeated, kind)
    return share < WEAK * share.where(met, 0.0).max()


def _evidence(
    scores: PatternScores,
    control: PatternScores,
    repeated: RepeatedTokens,
    kind: str,
    threshold: float,
    ratio: float,
    positions: slice | None = None,
) -> _Evidence:
    positions = positions or _positions(repeated, kind)
    read, whole, squares, all_squares = (x[..., positions] for x in _of_kind(scores, kind))
    chance = 1 / torch.arange(positions.start + 1, positions.stop + 1, dtype=read.dtype, device=read.device)
    length = min(STRETCH, repeated.n_repeated, read.shape[-1])
    own, looked, own_squares, looked_squares, expected = (
        x.unfold(-1, length, 1).sum(dim=-1) for x in (read, whole, squares, all_squares, chance)
    )
    shares = _over(own.abs(), looked)
    ratios, late_variance = shares / (expected / length), _late_variance(scores, repeated, kind)
    if kind in MATCHES:
        enough = _over(read.sum(dim=-1).abs(), whole.sum(dim=-1)) >= ratio * chance.mean()
        some = (read.abs() >= CONTRAST / 2 * scores.elsewhere).sum(dim=-1) >= min(MIN_MATCHES, STEADY * read.shape[-1])
        enough &= _read_at_lag(control, repeated, kind) <= BY_MATCH * _read_at_lag(scores, repeated, kind)
        lead = contrasts(scores, repeated, kind)
        met, variance = enough & some & (lead >= CONTRAST), late_variance
        noise = _over((squares.mean(dim=-1) - read.mean(dim=-1).square()).clamp(min=0).sqrt(), scores.elsewhere.mean(dim=-1))
        reach = lead + MARGIN * noise / (read.shape[-1] * len(repeated.tokens)) ** 0.5
        nearly = enough & some & ~met & (reach >= CONTRAST)
        best = ratios.argmax(dim=-1)
    else:
        part = _over(read.abs(), whole) >= ratio / 2 * chance
        steady = part.unfold(-1, length, 1).double().mean(dim=-1) >= STEADY
        good = (shares >= threshold) & (ratios >= ratio) & steady
        if kind == "current_token":
            good &= (_over(read.sum(dim=-1).abs(), whole.sum(dim=-1)) >= max(threshold, OF_ITSELF))[..., None]
        variances = _over(own_squares, looked_squares)
        met, variance = good.any(dim=-1), variances.where(good, 0.0).amax(dim=-1)
        nearly = torch.zeros_like(met)
        lead = torch.maximum(ratios, (variances / (expected / length)).sqrt()).amax(dim=-1)
        best = ratios.where(good | ~met[..., None], -1.0).argmax(dim=-1)
    share, times = (x.gather(-1, best[..., None]).squeeze(-1) for x in (shares, ratios))
    return _Evidence(met, nearly, lead, variance, late_variance, share, times, best + positions.start)


def _of_kind(scores: PatternScores, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """E at the lag, sum |E|, E^2 at the lag, sum E^2: [layer, head, pos]."""
    at = PATTERNS.index(kind)
    return scores.read[:, at], scores.all_read, scores.squares[:, at], scores.all_squares


def _part_errors(scores: PatternScores, positions: slice) -> Float[Tensor, "kind kind layer head"]:
    """The standard error over positions of the difference between two kinds' parts of sum E^2."""
    squares, whole = scores.squares[..., positions].movedim(1, 0), scores.all_squares[..., positions]
    difference = squares[:, None] - squares
    rest = difference - _over(difference.sum(dim=-1), whole.sum(dim=-1))[..., None] * whole
    return _over(rest.square().sum(dim=-1).sqrt(), whole.sum(dim=-1))


def _late_variance(scores: PatternScores, repeated: RepeatedTokens, kind: str) -> Float[Tensor, "layer head"]:
    _, _, squares, all_squares = (x[..., repeated.second :].sum(dim=-1) for x in _of_kind(scores, kind))
    return _over(squares, all_squares)


def _positions(repeated: RepeatedTokens, kind: str) -> slice:
    """The queries at which a kind is scored."""
    _, first = lags_and_queries(repeated)[kind]
    end = repeated.tokens.shape[1]
    if kind in MATCHES:
        return slice(first, end)
    return slice(first, min(end, repeated.second - repeated.n_repeated + EARLY))


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, 0 for 0 / 0, so that a head that attends to nothing has no kind."""
    return (a / b).nan_to_num(posinf=torch.inf)


def _by_pattern(of_head: dict[str, _Evidence], errors: dict[bool, Tensor]) -> tuple[str, ...]:
    """The kinds that the pattern of one head shows: none, one, or several that cannot be distinguished."""
    met = {kind: found for kind, found in of_head.items() if bool(found.met)}
    matched = any(kind in MATCHES for kind in met)
    if matched:
        met.pop("current_token", None)
    part = {kind: float(found.late_variance if matched else found.variance) for kind, found in met.items()}
    top = max(part, key=lambda kind: part[kind], default=None)
    if top is None:
        return ()
    error = errors[matched][PATTERNS.index(top)]
    return tuple(k for k in part if k == top or part[top] - part[k] <= MARGIN * float(error[PATTERNS.index(k)]) + ROUNDING)


def _by_loss(of_head: dict[str, _Evidence], named: Named, losses: Losses, layer: int, head: int) -> Named:
    """The name of one head, given the costs of its ablation and of the swaps of the kinds considered."""
    ablation, swaps, errors = losses
    asked = [i for i, kind in enumerate(PATTERNS) if float(of_head[kind].lead) >= LEAD]
    return name_by_loss(
        VERDICTS,
        named,
        (float(ablation.loss_change[layer, head]), float(ablation.loss_error[layer, head])),
        {PATTERNS[a]: float(swaps[a, layer, head]) for a in asked},
        {(PATTERNS[a], PATTERNS[b]): float(errors[a, b, layer, head]) for a in asked for b in asked},
    )


def _verdict(of_head: dict[str, _Evidence], named: Named) -> HeadVerdict:
    shown = max(named.kinds or (*MATCHES, "previous_token"), key=lambda kind: float(of_head[kind].ratio))
    found = of_head[shown]
    return HeadVerdict(named.name, float(found.share), float(found.ratio), int(found.start))
