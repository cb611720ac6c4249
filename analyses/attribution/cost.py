"""How many tokens an explanation reads, and how long that will take: known before it starts."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from kvlens import KVModel, convert_prompt
from kvlens.checks import checked

from ..sequences import PromptTokens, TextTokens
from .answers import Question
from .methods import Method
from .null import Null
from .units import Spans, Unit

CAP = 60
"""Passes over prompt and text in which the sets of an explanation are sought, besides one for each unit and two more."""
SHARES = (0.35, 0.75, 1.0)
"""Of the cap: where the search for units ends at the latest, that for heads, and that for positions."""
N_TIMED = 8
"""Rows of the batch that is timed."""
ENOUGH = 0.5
"""Seconds after which no more readings are timed than are needed."""


class Estimate(NamedTuple):
    """What an explanation takes at most.

    Attributes:
        tokens: that go through the model.
        seconds: rough.
    """

    tokens: int
    seconds: float


@checked
@torch.no_grad()
def expected_cost(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    by: str | Spans = "sentence",
    null: Null | None = None,
    single_tokens: bool = False,
) -> Estimate:
    """What :func:`kvlens.analyses.attribution.explain.explain` takes at most; most searches end earlier.

    Two kinds of pass are timed: over prompt and text, and over a batch of the text alone under a bias, as heads and positions
    are exchanged.

    Args:
        model, prompt, text, by, null: as they will be given to `explain`.
        single_tokens: also the effect of each token of the prompt, which a report measures.

    Raises:
        KVLensError: as `explain`.
    """
    question = Question.of(model, prompt, text, answer=0)
    a_pass, units = question.account.n_tokens_per_pass, question.units(by)
    bias = convert_prompt(model, question.prompt)
    long = _seconds_per_token(question, lambda: question.scores(question.rows([[]])))
    short = _seconds_per_token(question, lambda: question.scores_under(bias.repeat(N_TIMED)))
    n_long = len(units) + 2 + round(SHARES[0] * CAP) + (0 if null is None else null.n_for(1))
    n_long += len(question.prompt) if single_tokens else 0
    n_short = CAP - round(SHARES[0] * CAP)
    return Estimate((n_long + n_short) * a_pass, (n_long * long + n_short * short) * a_pass)


def _seconds_per_token(question: Question, read: Callable[[], object]) -> float:
    """The shortest of two to ten readings: the first fetches weights from disk, and other processes may delay any of them."""
    taken: list[float] = []
    began = perf_counter()
    while len(taken) < 2 or (len(taken) < 10 and perf_counter() - began < ENOUGH):
        before, start = question.account.n_tokens, perf_counter()
        read()
        taken.append((perf_counter() - start) / (question.account.n_tokens - before))
    return min(taken)


def cost_of_units(question: Question, units: Sequence[Unit], null: Null | None, method: Method) -> int:
    """Tokens that `prompt_attribution` reads for an answer of one token; a null of None reads no unrelated units."""
    n_prompt, n_text = len(question.prompt), len(question.text)
    both, longest = n_prompt + n_text, max(unit.stop - unit.start for unit in units)
    behind = sum(both - unit.start for unit in units) // len(units)  # tokens before the unit are read once for all rows
    n_null, n_rows = (0 if null is None else null.n_for(len(units))), getattr(method, "n_subsets", len(units))
    written = longest if null is not None and null.prompts is None else 0
    return (n_rows + n_null) * behind + n_null * written + (len(units) + 5) * n_text + 5 * n_prompt
