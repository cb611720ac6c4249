"""The name of a head: by where its attention is far above chance, and by what the loss says where ablations were asked for.

**By the pattern.** E is the value-side pattern of :mod:`kvlens.analyses.heads.lags`. For each kind a head is asked how much of
what it reads, |E|, lies at the lag of that kind:

- *"previous token" and "current token"* go by position. A head with learned positions may attend to the token before on the
  first 24 positions and nowhere else, and still feed every induction head, so the strongest stretch of :data:`STRETCH`
  positions decides. It is looked for on the first :data:`EARLY` positions (and the BOS), which every text of 16 tokens repeated
  has: so the verdict does not depend on the text's length. There ``share = |sum of E at the lag| / sum of |E|`` must be
  ``threshold`` or more (:data:`OF_ITSELF` for the token itself, which an idle head comes near), and ``ratio`` times chance,
  what uniform attention over the i + 1 visible positions would give.
- *"induction" and "duplicate token"* match tokens. Their share falls as the text grows, for a linear head as fast as chance
  does. What stays is the *contrast*: E at the lag over the mean |E| on the other positions of the first copy, which the same
  query sees from about as far. It must be :data:`CONTRAST` over the whole second copy, where the share must be ``ratio`` times
  chance.

A head that goes by position must do its part on three of four positions of the stretch, with half of ``ratio`` there, and one
that matches on :data:`PLACES` positions, with half of the contrast: a head that looks at one fixed position after the other at
random hits a lag now and then, with all of its attention. Of two kinds that are met the one with the larger part of sum E^2
names the head: the tokens are independent, so this is its part of the variance of what the head writes. It is taken on the
second copy where a match is met, and "current token" yields to a match.

Kinds whose parts differ by no more than :data:`MARGIN` standard errors, from position to position, are named together, as in
"induction / duplicate token". A head that meets no kind is "inconclusive" where its pattern does not decide: because it is too
spread out, or because the contrast of a kind is below what is asked by no more than :data:`MARGIN` standard errors. A head's
*spread* is the number of positions that it reads, counted as (sum of |E|)^2 / sum of E^2, over the number that it sees, on the
first :data:`EARLY` positions from the ninth, so that it too is the same in a longer text: 1 for uniform attention, 2 / pi for E
drawn from a normal distribution, about 0.1 for a sharp head. Above :data:`SPREAD` a head can be essential to a model without a
pattern that shows it (below). Any other head is "none": it does look at some positions more than at others, and these are not
of the four kinds.

**By the loss.** What ablations and swaps cost: :mod:`kvlens.analyses.heads.loss_verdicts`. Asked are the kinds that a head
looks at :data:`LEAD` times as much as elsewhere (by contrast; for positions by chance on the strongest stretch, of E or, as E
of linear heads may have any sign from text to text, of the root of E^2): one that reads all of the first copy alike raises the
right token too, and is no induction head.

The constants were chosen on models of our own, trained for this (softmax ones with one to four layers, learned and rotary
positions, with and without KV shift; linear ones with elu + 1 features), on the shipped ones, and on random ones with weights
as sharp as trained ones. ``tests/benchmarks/bench_induction_heads.py`` measures what came out.
"""

from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .lags import KINDS, PatternScores, lags_and_queries
from .loss_verdicts import INCONCLUSIVE, MARGIN, NO_VERDICT, Losses, Named, name_by_loss, tied
from .repeated_tokens import RepeatedTokens

VERDICTS = dict(zip(KINDS, ("induction", "previous token", "duplicate token", "current token"), strict=True))
STRETCH = 16
EARLY = 2 * STRETCH
FEW = 8
THRESHOLD = 0.2
RATIO = 3.0
CONTRAST = 4.5
OF_ITSELF = 0.4
STEADY = 0.75
PLACES = 5
SPREAD = 1 / 3
"""Of the positions that a head sees, those that it reads, from which on its pattern does not show what it is for."""
WORTH_ASKING = 0.005
"""Change of the loss, up or down, from which on a head's swaps are measured."""
LEAD = 1.25
ROUNDING = 1e-6
"""Of a part of sum E^2: some ten roundings of float32 patterns."""
MATCHES = ("prefix_matching", "duplicate_token")


class Verdict(NamedTuple):
    """The name of a head, and the stretch of positions that says so: of the kind of the verdict, or the strongest of any."""

    name: str
    share: float
    ratio: float
    start: int


class _Evidence(NamedTuple):
    """What speaks for one kind.

    Whether it is met, or missed by no more than noise; how much more it is looked at than elsewhere; its part of sum E^2 (where
    it is strongest, and on the second copy); its strongest stretch.
    """

    met: Bool[Tensor, "layer head"]
    nearly: Bool[Tensor, "layer head"]
    lead: Float[Tensor, "layer head"]
    variance: Float[Tensor, "layer head"]
    late_variance: Float[Tensor, "layer head"]
    share: Float[Tensor, "layer head"]
    ratio: Float[Tensor, "layer head"]
    start: Int[Tensor, "layer head"]


def judge_heads(
    scores: PatternScores, repeated: RepeatedTokens, losses: Losses | None = None, *, threshold: float, ratio: float
) -> list[list[Verdict]]:
    """The verdict on every head, by layer.

    Args:
        scores: of all layers.
        repeated: the text.
        losses: of ablations and swaps; None judges by the pattern alone.
        threshold: share from which on a head that goes by position is named.
        ratio: how many times chance the share of any kind must be.
    """
    n_layers, n_heads = scores.all_read.shape[:2]
    evidence = {kind: _evidence(scores, repeated, kind, threshold, ratio) for kind in KINDS}
    unclear = (spreads(scores, repeated) > SPREAD) | torch.stack([found.nearly for found in evidence.values()]).any(dim=0)
    places = {True: slice(repeated.second, None), False: _places(repeated, "previous_token")}
    errors = {matched: _part_errors(scores, of_kind) for matched, of_kind in places.items()}
    rows = []
    for layer, head in product(range(n_layers), range(n_heads)):
        of_head = {kind: _Evidence(*(x[layer, head] for x in found)) for kind, found in evidence.items()}
        kinds = _by_pattern(of_head, {matched: x[:, :, layer, head] for matched, x in errors.items()})
        nothing = INCONCLUSIVE if unclear[layer, head] else NO_VERDICT
        named = Named(tied(VERDICTS, kinds) if kinds else nothing, kinds)
        if losses is not None:
            named = _by_loss(of_head, named, losses, layer, head)
        rows.append(_verdict(of_head, named))
    return [rows[first : first + n_heads] for first in range(0, len(rows), n_heads)]


def spreads(scores: PatternScores, repeated: RepeatedTokens) -> Float[Tensor, "layer head"]:
    """How many positions a head reads over how many it sees, mean over the first :data:`EARLY`; 0 for one that reads nothing.

    The first :data:`FEW` of them, which see next to nothing, are left out.
    """
    end = _places(repeated, "previous_token").stop
    places = slice(min(repeated.second - repeated.n_repeated + FEW, end - 1), end)
    n_read = _over(scores.all_read[..., places].square(), scores.all_squares[..., places])
    return (n_read / torch.arange(places.start + 1, end + 1, dtype=n_read.dtype, device=n_read.device)).mean(dim=-1)


def contrasts(scores: PatternScores, repeated: RepeatedTokens, kind: str) -> Float[Tensor, "layer head"]:
    """The value-side score of a kind that matches over the mean attention to other positions of the first copy; 0 for 0 / 0."""
    read = scores.read[:, KINDS.index(kind), :, repeated.second :]
    return _over(read.sum(dim=-1).abs(), scores.elsewhere.sum(dim=-1))


def _evidence(scores: PatternScores, repeated: RepeatedTokens, kind: str, threshold: float, ratio: float) -> _Evidence:
    places = _places(repeated, kind)
    read, whole, squares, all_squares = (x[..., places] for x in _of_kind(scores, kind))
    chance = 1 / torch.arange(places.start + 1, places.stop + 1, dtype=read.dtype, device=read.device)
    length = min(STRETCH, repeated.n_repeated, read.shape[-1])
    own, looked, own_squares, looked_squares, expected = (
        x.unfold(-1, length, 1).sum(dim=-1) for x in (read, whole, squares, all_squares, chance)
    )
    shares = _over(own.abs(), looked)
    ratios, late_variance = shares / (expected / length), _late_variance(scores, repeated, kind)
    if kind in MATCHES:
        enough = _over(read.sum(dim=-1).abs(), whole.sum(dim=-1)) >= ratio * chance.mean()
        some = (read.abs() >= CONTRAST / 2 * scores.elsewhere).sum(dim=-1) >= min(PLACES, STEADY * read.shape[-1])
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
    return _Evidence(met, nearly, lead, variance, late_variance, share, times, best + places.start)


def _of_kind(scores: PatternScores, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """E at the lag, sum |E|, E^2 at the lag, sum E^2: [layer, head, pos]."""
    at = KINDS.index(kind)
    return scores.read[:, at], scores.all_read, scores.squares[:, at], scores.all_squares


def _part_errors(scores: PatternScores, places: slice) -> Float[Tensor, "kind kind layer head"]:
    """The standard error, from position to position, of the difference between two kinds' parts of sum E^2."""
    squares, whole = scores.squares[..., places].movedim(1, 0), scores.all_squares[..., places]
    difference = squares[:, None] - squares
    rest = difference - _over(difference.sum(dim=-1), whole.sum(dim=-1))[..., None] * whole
    return _over(rest.square().sum(dim=-1).sqrt(), whole.sum(dim=-1))


def _late_variance(scores: PatternScores, repeated: RepeatedTokens, kind: str) -> Float[Tensor, "layer head"]:
    _, _, squares, all_squares = (x[..., repeated.second :].sum(dim=-1) for x in _of_kind(scores, kind))
    return _over(squares, all_squares)


def _places(repeated: RepeatedTokens, kind: str) -> slice:
    """The queries at which a kind is looked for."""
    _, first = lags_and_queries(repeated)[kind]
    end = repeated.tokens.shape[1]
    if kind in MATCHES:
        return slice(first, end)
    return slice(first, min(end, repeated.second - repeated.n_repeated + EARLY))


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, 0 for 0 / 0: a head that looks nowhere is none."""
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
    error = errors[matched][KINDS.index(top)]
    return tuple(k for k in part if k == top or part[top] - part[k] <= MARGIN * float(error[KINDS.index(k)]) + ROUNDING)


def _by_loss(of_head: dict[str, _Evidence], named: Named, losses: Losses, layer: int, head: int) -> Named:
    """The name of one head, given what its ablation and the swaps of the kinds that are asked cost."""
    asked = [place for place, kind in enumerate(KINDS) if float(of_head[kind].lead) >= LEAD]
    return name_by_loss(
        VERDICTS,
        named,
        (float(losses.ablation[layer, head]), float(losses.ablation_error[layer, head])),
        {KINDS[a]: float(losses.swaps[a, layer, head]) for a in asked},
        {(KINDS[a], KINDS[b]): float(losses.swap_errors[a, b, layer, head]) for a in asked for b in asked},
    )


def _verdict(of_head: dict[str, _Evidence], named: Named) -> Verdict:
    shown = max(named.kinds or (*MATCHES, "previous_token"), key=lambda kind: float(of_head[kind].ratio))
    found = of_head[shown]
    return Verdict(named.name, float(found.share), float(found.ratio), int(found.start))
