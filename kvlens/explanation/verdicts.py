"""What becomes of a claim under an intervention: a verdict on what the model says then.

Along the old response, its tokens given, the *firm difference* is the first token in whose place the model would say another
and whose log-odds against that other one moved by at least `FIRM` nats. What moved less is style, and the old token stays. From
the firm difference on the text is generated anew. Verdicts on a claim:

- *same words*: no token differs. *same but for near ties*: some do, none firmly.
- *lost*: there is a firm difference, in the claim's own tokens or so that these fall by more than `FIRM` nats, and the new text
  does not have the claim.
- *partly*: likewise, but the new text has some of its content words, not only the last.
- *other words*: there is a firm difference, and the new text has the claim.
- *not reached*: the new text does not have the claim, although the claim's tokens do not fall: it goes another way before.
- *not lost*: there is a firm difference, but the claim's tokens do not fall, and no text was generated. *unknown*: they fall,
  and none was (only where a few layers alone read the prompt).

Words are compared without case, accents and possessive endings.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.explanation.claims import Claim, normal
from kvlens.texts import Word

FIRM = math.log(4)
"""Nats: four times the odds."""
SAME, NEAR_TIES, OTHER_WORDS, PARTLY, LOST, NOT_REACHED, NOT_LOST, UNKNOWN = VERDICTS = (
    "same words",
    "same but for near ties",
    "other words",
    "partly",
    "lost",
    "not reached",
    "not lost",
    "unknown",
)
SAID, GONE = frozenset({SAME, NEAR_TIES, OTHER_WORDS}), frozenset({LOST, PARTLY})
"""With which the claim is still said, and with which it is lost, wholly or in part."""


class Walk(NamedTuple):
    """A walk along the old response under each of several interventions.

    Attributes:
        falls: of each token's log-probability, in nats.
        differs: the number of tokens in whose place the model would say another.
        firm: position of the firm difference; the number of tokens where there is none.
    """

    falls: Float[Tensor, "row pos"]
    differs: Int[Tensor, " row"]
    firm: Int[Tensor, " row"]


def walk(whole: Float[Tensor, "pos d_vocab"], now: Float[Tensor, "row pos d_vocab"], tokens: Int[Tensor, " pos"]) -> Walk:
    """Compare log-probabilities along a response with those under interventions.

    Args:
        whole: log-probabilities with the whole prompt.
        now: under each intervention.
        tokens: the response.
    """
    of_old, old_now = (x.gather(-1, tokens[:, None].expand(*x.shape[:-1], 1)).squeeze(-1) for x in (whole, now))
    said = now.argmax(dim=-1)
    new_now = now.gather(-1, said[..., None]).squeeze(-1)
    of_new = whole.expand_as(now).gather(-1, said[..., None]).squeeze(-1)
    moved = (of_old - of_new) - (old_now - new_now)
    differs = said != tokens
    is_firm = differs & (moved >= FIRM)
    n = len(tokens)
    firm = torch.where(is_firm.any(dim=-1), is_firm.long().argmax(dim=-1), n)
    return Walk(of_old - old_now, differs.sum(dim=-1), firm)


def may_be_lost(claim: Claim, fall: float, firm: int | None) -> bool:
    """Whether the claim's own tokens fall firmly, or one of them is the firm difference."""
    return firm is not None and (claim.start <= firm < claim.stop or fall > FIRM)


class Verdict(NamedTuple):
    """What became of a claim.

    Attributes:
        name: one of `VERDICTS`.
        fall: of the claim's own tokens, in nats.
        kept: its content words that the new text still has, where it is ``partly`` said.
    """

    name: str
    fall: float
    kept: tuple[str, ...] = ()


def verdict(claim: Claim, falls: Float[Tensor, " pos"], differs: int, firm: int | None, new: Sequence[Word] | None) -> Verdict:
    """The verdict on a claim under one intervention.

    Args:
        claim: what is asked about.
        falls: of the response's tokens.
        differs: how many tokens the model would say another for.
        firm: position of the firm difference, None where there is none.
        new: the words of the text that is said instead; None where it was not generated.
    """
    fall = float(falls[claim.start : claim.stop].sum())
    if firm is None:
        return Verdict(NEAR_TIES if differs else SAME, fall)
    if new is None:
        return Verdict(UNKNOWN if may_be_lost(claim, fall, firm) else NOT_LOST, fall)
    said = {normal(word.text) for word in new}
    kept = tuple(word for word in claim.words if word in said)
    if len(kept) == len(claim.words):
        return Verdict(OTHER_WORDS, fall)
    if not may_be_lost(claim, fall, firm):
        return Verdict(NOT_REACHED, fall)
    partly = bool(kept) and kept != claim.words[-1:]
    return Verdict(PARTLY if partly else LOST, fall, kept if partly else ())
