"""What heads an explanation: of the words that the response says, those that answer the question.

Long claims fall by many nats, whatever was asked, and a response often repeats the question first. Therefore each candidate is
read as if it were the whole response: that whose tokens have the largest mean log-probability right behind the prompt heads the
explanation. Candidates are the claims and, since what answers the question may not depend on the prompt at all, other runs of
content words with a name or a number, none of them the question's, that the model says without any unit, too. The capital of a
sentence's first word is no sign of a name, unless a mark follows or the prompt has that word with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlens import KVLensError
from kvlens.errors import nearest
from kvlens.explanation.claims import DEPENDS, SAID, Claim, claim_of, claims_of, needs_account, normal, places_of_words
from kvlens.explanation.explaining import Explaining
from kvlens.explanation.runs import ENDS


def expected_claim(explaining: Explaining) -> int:
    """The number of the claim that will head the page, unless words that depend on no unit do."""
    claims, wanted = explaining.claims, explaining.wanted
    if wanted is not None:
        return next((i for i, claim in enumerate(claims) if wanted.casefold() in claim.text.casefold()), -1)
    if len(claims) > 1 and bool(explaining.runs.asked.any()):
        return _answering(explaining, claims)
    return max(range(len(claims)), key=lambda i: claims[i].nats)


def _answering(explaining: Explaining, claims: Sequence[Claim]) -> int:
    """The number of that which answers the question; those that have no score yet are scored."""
    if new := [claim for claim in claims if claim[1:3] not in explaining.asked]:
        with explaining.runs.step("head"):
            explaining.asked |= zip((claim[1:3] for claim in new), asked_for(explaining, new), strict=True)
    return max(range(len(claims)), key=lambda i: explaining.asked[claims[i][1:3]])


def heading_claim(explaining: Explaining) -> int:
    """The number of the claim that heads the page: that of ``about``, or that which answers the question; it may be new."""
    if explaining.wanted is not None:
        return _named(explaining, explaining.wanted) if explaining.expected < 0 else explaining.expected
    candidates = [] if explaining.is_whole or not bool(explaining.runs.asked.any()) else candidates_of(explaining)
    if len(candidates) < 2:
        return explaining.expected
    best = _answering(explaining, candidates)
    return best if best < len(explaining.claims) else explaining.with_claim(candidates[best])


def _named(explaining: Explaining, about: str) -> int:
    """A claim that the user names, of words of the response."""
    names = [word.text.casefold() for word in explaining.response.words]
    wanted = [word.casefold() for word in about.split()]
    for start in range(len(names)):
        stop = start + len(wanted)
        if names[start:stop] == wanted:
            words = explaining.response.words[start:stop]
            nats = float(explaining.nothing.falls[words[0].start : words[-1].stop].sum())
            return explaining.with_claim(claim_of(explaining.response, start, stop, nats, explaining.question))
    said = [word.text for word in explaining.response.words if word.is_word]
    raise KVLensError(f"about: the response has no {about!r}{nearest(about, said)}. It is: {explaining.response.text!r}")


def candidates_of(explaining: Explaining) -> list[Claim]:
    """The claims, then the other runs of content words with a name or a number that are said without any unit, too."""
    response, claims = explaining.response, explaining.claims
    places = places_of_words(response)

    def is_other(i: int) -> bool:
        word = response.words[i]
        in_claim = any(claim.start <= word.start < claim.stop for claim in claims)
        return not in_claim and needs_account(word, response.text, *places[i]) and normal(word.text) not in explaining.question

    marked = [2 * DEPENDS if is_other(i) else 0.0 for i in range(len(response.words))]
    others = [each for each in claims_of(response, marked, explaining.question) if _has_name(explaining, each)]
    apart = [each for each in others if all(each.stop <= claim.start or claim.stop <= each.start for claim in claims)]
    said = [each for each in apart if explaining.of(each, explaining.nothing).name in SAID]
    return [*claims, *(each._replace(nats=explaining.fall(each, explaining.nothing)) for each in said)]


def _has_name(explaining: Explaining, claim: Claim) -> bool:
    """Whether a capital or a digit is a sign of a name or a number. The capital of a sentence's first word (``Welcome to``) is
    none, unless a mark follows (``Yes, ...``) or the prompt has that word with it."""
    response = explaining.response
    own = [i for i, word in enumerate(response.words) if claim.start <= word.start < claim.stop]
    before, word = response.text[: places_of_words(response)[own[0]][0]].rstrip(" "), response.words[own[0]].text
    begins = not before or before.endswith(ENDS)
    goes_on = any(following.is_word for following in response.words[own[-1] + 1 :][:1])
    is_none = begins and goes_on and all(word != known.text for known in explaining.prompt_words)
    return any(letter.isupper() or letter.isdigit() for letter in claim.text[is_none:])


def asked_for(explaining: Explaining, candidates: list[Claim]) -> list[float]:
    """The mean log-probability of each candidate's tokens, as the whole response, in nats."""
    texts = [_tokens(explaining, each) for each in candidates]
    return [log_p / len(text) for log_p, text in zip(explaining.runs.replies(texts), texts, strict=True)]


def _tokens(explaining: Explaining, claim: Claim) -> Tensor:
    """A claim as it would stand at the beginning of a response."""
    tokenizer, tokens = explaining.model.tokenizer, explaining.response.tokens
    if tokenizer is not None and not explaining.is_continuation and claim.start > 0:
        alone = tokenizer(claim.text, add_special_tokens=False)["input_ids"]
        if alone:  # without the blank in front
            return torch.tensor(alone, device=tokens.device)
    return tokens[claim.start : claim.stop]
