"""What heads an explanation: of the words that the response says, those that answer the question.

Long claims fall by many nats, whatever was asked, and a response often repeats the question first. Therefore each candidate is
read as if it were the whole response: that whose tokens have the largest mean log-probability right behind the prompt heads the
explanation. Candidates are the claims and, since what answers the question may not depend on the prompt at all, other runs of
content words with a name or a number, none of them the question's, that the model says without any unit, too.
"""

from typing import Any

import torch
from torch import Tensor

from kvlens.explanation.citations import needs_account
from kvlens.explanation.claims import DEPENDS, SAID, Claim, claims_of, normal, places_of_words


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
    """The mean log-probability of each candidate's tokens, as the whole response, in nats."""
    texts = [_tokens(explaining, each) for each in candidates]
    return [log_p / len(text) for log_p, text in zip(explaining.runs.replies(texts), texts, strict=True)]


def _tokens(explaining: Any, claim: Claim) -> Tensor:
    """A claim as it would stand at the beginning of a response."""
    tokenizer, tokens = explaining.model.tokenizer, explaining.response.tokens
    if tokenizer is not None and not explaining.is_continuation and claim.start > 0:
        alone = tokenizer(claim.text, add_special_tokens=False)["input_ids"]
        if alone:  # without the blank in front
            return torch.tensor(alone, device=tokens.device)
    return tokens[claim.start : claim.stop]
