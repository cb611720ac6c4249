"""What heads an explanation: of the words that the response says, those that answer the question.

Long claims fall by many nats, whatever was asked, and a response often repeats the question first, so that behind its words an
answer falls by nothing when the question goes. Therefore each candidate is read as if it were the whole response: its
log-probability right behind the prompt, minus that behind the prompt without the question. The largest difference heads the
explanation. Candidates are the claims, and runs of other content words that the question does not have, since what answers it
may not depend on the prompt at all.
"""

from typing import Any

import torch
from torch import Tensor

from kvlens.explanation.citations import needs_account
from kvlens.explanation.claims import DEPENDS, Claim, claims_of, normal, places_of_words


def candidates_of(explaining: Any) -> list[Claim]:
    """The claims, then the other runs of content words that the question does not have."""
    response, claims = explaining.response, explaining.claims
    places = places_of_words(response)

    def is_other(i: int) -> bool:
        word = response.words[i]
        in_claim = any(claim.start <= word.start < claim.stop for claim in claims)
        return not in_claim and needs_account(word, response.text, *places[i]) and normal(word.text) not in explaining.question

    marked = [2 * DEPENDS if is_other(i) else 0.0 for i in range(len(response.words))]
    others = claims_of(response, marked, explaining.question)
    apart = [each for each in others if all(each.stop <= claim.start or claim.stop <= each.start for claim in claims)]
    return [*claims, *(each._replace(nats=explaining.fall(each, explaining.nothing)) for each in apart)]


def asked_for(explaining: Any, candidates: list[Claim]) -> list[float]:
    """By how many nats each candidate, as the whole response, is more probable with the question than without it."""
    texts = [_tokens(explaining, each) for each in candidates]
    without = explaining.runs.without_question()
    whole, other = (explaining.runs.replies(bias, texts) for bias in (explaining.runs.bias, without))
    return [a - b for a, b in zip(whole, other, strict=True)]


def _tokens(explaining: Any, claim: Claim) -> Tensor:
    """A claim as it would stand at the beginning of a response."""
    tokenizer, tokens = explaining.model.tokenizer, explaining.response.tokens
    if tokenizer is not None and not explaining.is_continuation and claim.start > 0:
        alone = tokenizer(claim.text, add_special_tokens=False)["input_ids"]
        if alone:  # without the blank in front
            return torch.tensor(alone, device=tokens.device)
    return tokens[claim.start : claim.stop]
