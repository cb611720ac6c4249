"""What a head is called: by where its attention is far above chance, and by what the loss says where ablations were asked for.

**By the pattern.** E is the value-side pattern of :mod:`kvlens.analyses.heads.lags`. For each kind a head is asked how much of
what it reads, |E|, lies at the lag of that kind:

- *"previous token" and "current token"* go by place. A head with learned positions may attend to the token before on the first
  24 places and nowhere else, and still feed every induction head, so the strongest stretch of :data:`STRETCH` places decides.
  It is looked for on the first :data:`EARLY` places (and the BOS), which every text of 16 tokens said twice has: so the verdict
  does not depend on the text's length. There ``share = |sum of E at the lag| / sum of |E|`` must be ``threshold`` or more
  (:data:`OF_ITSELF` for the token itself, which an idle head comes near), and ``ratio`` times chance, what uniform attention
  over the i + 1 visible places would give.
- *"induction" and "duplicate token"* match tokens. Their share falls as the text grows, for a linear head as fast as chance
  does. What stays is the *contrast*: E at the lag over the mean |E| on the other places of the first copy, which the same
  query sees from about as far. It must be :data:`CONTRAST` over the whole second copy, where the share must be ``ratio`` times
  chance.

A head that goes by place must do its part on three of four places of the stretch, with half of ``ratio`` there, and one that
matches on :data:`PLACES` places, with half of the contrast: a head that looks at one fixed place after the other at random hits
a lag now and then, with all of its attention. Of two kinds that are met the one with the larger part of sum E^2 names the head:
the tokens are independent, so this is its part of the variance of what the head writes. It is taken on the second copy where a
match is met, and "current token" yields to a match.

**By the loss.** Where a kernel cannot be sharp, a head may look nearly everywhere and still carry the answer by the small rest
of its attention. Its pattern alone does not tell, but swapping does: :mod:`kvlens.analyses.heads.swaps` lets a head read
another text's token at the lag of one kind, and nowhere else. Asked are the kinds that a head looks at :data:`LEAD` times as
much as elsewhere (by contrast; for places by chance on the strongest stretch, of E or, as E of linear heads may have any sign
from text to text, of the root of E^2): one that reads all of the first copy alike raises the right token too, and is no
induction head. A head of which a swap or the ablation costs more than :data:`COSTLY` is called by its dearest swap, if that is
at least :data:`PART` of what the ablation costs (it may be more: what a head reads elsewhere can do harm). Else it keeps the
name of its pattern, if that swap costs more than :data:`COSTLY`; else it is "other", if the ablation does: the model needs it,
and not for any one of these kinds of place.

The constants were chosen on models of our own, trained for this (softmax ones with one to four layers, learned and rotary
positions, with and without KV shift; linear ones with elu + 1 features), on the shipped ones, and on random ones with weights
as sharp as trained ones. ``tests/benchmarks/bench_induction_heads.py`` measures what came out.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .lags import KINDS, PatternScores, lags_and_queries
from .repeated_tokens import RepeatedTokens

VERDICTS = dict(zip(KINDS, ("induction", "previous token", "duplicate token", "current token"), strict=True))
NO_VERDICT = "none"
OTHER = "other"
STRETCH = 16
EARLY = 2 * STRETCH
THRESHOLD = 0.2
RATIO = 3.0
CONTRAST = 4.5
OF_ITSELF = 0.4
STEADY = 0.75
PLACES = 5
COSTLY = 0.1
"""Nats per token of the second copy."""
WORTH_ASKING = 0.005
"""Change of the loss, up or down, from which on a head's swaps are measured."""
PART = 1 / 3
LEAD = 1.25
MATCHES = ("prefix_matching", "duplicate_token")


class Verdict(NamedTuple):
    """What a head is called, and the stretch of places that says so: of the kind of the verdict, or the strongest of any."""

    name: str
    share: float
    ratio: float
    start: int


class Losses(NamedTuple):
    """By how much the loss rises without a head, and with another text's token at one kind of place; NaN: not measured."""

    ablation: Float[Tensor, "layer head"]
    swaps: Float[Tensor, "kind layer head"]


class _Evidence(NamedTuple):
    """What speaks for one kind: whether it is met, how much more it is looked at than elsewhere, its part of sum E^2 (where it
    is strongest, and on the second copy), and its strongest stretch."""

    met: Bool[Tensor, "layer head"]
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
        threshold: share from which on a head that goes by place is named.
        ratio: how many times chance the share of any kind must be.
    """
    n_layers, n_heads = scores.all_read.shape[:2]
    evidence = {kind: _evidence(scores, repeated, kind, threshold, ratio) for kind in KINDS}
    return [[_judge(evidence, losses, layer, head) for head in range(n_heads)] for layer in range(n_layers)]


def contrasts(scores: PatternScores, repeated: RepeatedTokens, kind: str) -> Float[Tensor, "layer head"]:
    """The value-side score of a kind that matches over the mean attention to other places of the first copy; 0 for 0 / 0."""
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
        best = ratios.argmax(dim=-1)
    else:
        part = _over(read.abs(), whole) >= ratio / 2 * chance
        steady = part.unfold(-1, length, 1).double().mean(dim=-1) >= STEADY
        good = (shares >= threshold) & (ratios >= ratio) & steady
        if kind == "current_token":
            good &= (_over(read.sum(dim=-1).abs(), whole.sum(dim=-1)) >= max(threshold, OF_ITSELF))[..., None]
        variances = _over(own_squares, looked_squares)
        met, variance = good.any(dim=-1), variances.where(good, 0.0).amax(dim=-1)
        lead = torch.maximum(ratios, (variances / (expected / length)).sqrt()).amax(dim=-1)
        best = ratios.where(good | ~met[..., None], -1.0).argmax(dim=-1)
    share, times = (x.gather(-1, best[..., None]).squeeze(-1) for x in (shares, ratios))
    return _Evidence(met, lead, variance, late_variance, share, times, best + places.start)


def _of_kind(scores: PatternScores, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """E at the lag, sum |E|, E^2 at the lag, sum E^2: [layer, head, pos]."""
    at = KINDS.index(kind)
    return scores.read[:, at], scores.all_read, scores.squares[:, at], scores.all_squares


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


def _judge(evidence: dict[str, _Evidence], losses: Losses | None, layer: int, head: int) -> Verdict:
    def number(of_heads: Tensor) -> float:
        return float(of_heads[layer, head])

    kind = _by_pattern({kind: _Evidence(*(x[layer, head] for x in found)) for kind, found in evidence.items()})
    name = NO_VERDICT if kind is None else VERDICTS[kind]
    if losses is not None:
        swaps = {k: number(swap) for k, swap in zip(KINDS, losses.swaps, strict=True) if number(evidence[k].lead) >= LEAD}
        name = _by_loss(name, number(losses.ablation), {VERDICTS[k]: loss for k, loss in swaps.items()})
    of_name = [kind for kind in KINDS if VERDICTS[kind] == name]
    shown = max(of_name or (*MATCHES, "previous_token"), key=lambda kind: number(evidence[kind].ratio))
    found = evidence[shown]
    return Verdict(name, number(found.share), number(found.ratio), int(found.start[layer, head]))


def _by_pattern(of_head: dict[str, _Evidence]) -> str | None:
    """The kind that the pattern of one head shows, if any."""
    met = {kind: found for kind, found in of_head.items() if bool(found.met)}
    matched = any(kind in MATCHES for kind in met)
    if matched:
        met.pop("current_token", None)
    return max(met, key=lambda kind: float(met[kind].late_variance if matched else met[kind].variance), default=None)


def _by_loss(name: str, cost: float, swaps: dict[str, float]) -> str:
    """The name of a head, given what its ablation and its swaps cost; where they were not measured, it stays."""
    if any(math.isnan(loss) for loss in swaps.values()):
        return name
    dearest = max(swaps, key=lambda kind: swaps[kind], default=None)
    if not max(cost, -math.inf if dearest is None else swaps[dearest]) > COSTLY:
        return name
    if dearest is not None and swaps[dearest] >= PART * cost:
        return dearest
    return name if swaps.get(name, -math.inf) > COSTLY else OTHER
