"""What heads an explanation: of the words that the response says, those that answer the question.

Long claims fall by many nats, whatever was asked, and a response often repeats the question first, so that behind its words
an answer falls by nothing when the question goes. Therefore each candidate is read as if it were the whole response: its
log-probability right behind the prompt, minus that behind the prompt without the question. To this is added a `SHARE_OF_FALL`
of the nats by which it falls without all units, of which no more than `MOST_FALL` count. The largest sum heads the
explanation. Candidates are the claims and, since what answers the question may not depend on the prompt at all, other runs of
content words with a name or a number, none of them the question's, that the model says without any unit, too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlens.explanation.citations import needs_account
from kvlens.explanation.claims import DEPENDS, SAID, Claim, claims_of, normal, places_of_words

SHARE_OF_FALL, MOST_FALL = 0.3, 10.0
"""SmolLM2, 13 right answers of Natural Questions with a claim that states the short answer: it heads 11 with any share from 0.1
to 0.4, 10 without; 7 where the largest fall heads, and 6 where the first claim does."""


def candidates_of(explaining: Any) -> list[Claim]:
    """The claims, then the other runs of content words with a name or a number that are said without any unit, too."""
    response, claims = explaining.response, explaining.claims
    places = places_of_words(response)

    def is_other(i: int) -> bool:
        word = response.words[i]
        in_claim = any(claim.start <= word.start < claim.stop for claim in claims)
        return not in_claim and needs_account(word, response.text, *places[i]) and normal(word.text) not in explaining.question

    marked = [2 * DEPENDS if is_other(i) else 0.0 for i in range(len(response.words))]
    others = [each for each in claims_of(response, marked, explaining.question) if any(map(_is_sign_of_a_name, each.text))]
    apart = [each for each in others if all(each.stop <= claim.start or claim.stop <= each.start for claim in claims)]
    said = [each for each in apart if explaining.of(each, explaining.nothing).name in SAID]
    return [*claims, *(each._replace(nats=explaining.fall(each, explaining.nothing)) for each in said)]


def _is_sign_of_a_name(letter: str) -> bool:
    return letter.isupper() or letter.isdigit()


def asked_for(explaining: Any, candidates: list[Claim]) -> list[float]:
    """By how many nats each candidate, as the whole response, is more probable with the question than without it."""
    texts = [_tokens(explaining, each) for each in candidates]
    biases = explaining.runs.bias, explaining.runs.without_question
    whole, other = (explaining.runs.replies(bias, texts) for bias in biases)
    return [a - b for a, b in zip(whole, other, strict=True)]


def answering(candidates: Sequence[Claim], asked: Sequence[float]) -> int:
    """The number of the candidate that heads the explanation.

    Args:
        candidates: of :func:`candidates_of`.
        asked: of :func:`asked_for`.
    """
    sums = [score + SHARE_OF_FALL * min(max(each.nats, 0.0), MOST_FALL) for each, score in zip(candidates, asked, strict=True)]
    return max(range(len(sums)), key=sums.__getitem__)


def _tokens(explaining: Any, claim: Claim) -> Tensor:
    """A claim as it would stand at the beginning of a response."""
    tokenizer, tokens = explaining.model.tokenizer, explaining.response.tokens
    if tokenizer is not None and not explaining.is_continuation and claim.start > 0:
        alone = tokenizer(claim.text, add_special_tokens=False)["input_ids"]
        if alone:  # without the blank in front
            return torch.tensor(alone, device=tokens.device)
    return tokens[claim.start : claim.stop]
