"""How many tokens an explanation reads, and how long that will take: known before it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch

from kvlens import KVModel, convert_prompt
from kvlens.checks import checked

from ..sequences import PromptTokens, TextTokens
from .answers import Question
from .methods import Method, method_of
from .null import FEWEST, Null
from .units import Spans, Unit, units_of

N_TIMED = 8
"""Rows of the batch that is timed."""
ENOUGH = 0.5
"""Seconds after which no more readings are timed than are needed."""
QUICK_HEADS = 8
"""Heads that are compared with unrelated units where an explanation is to be quick."""


@dataclass(frozen=True)
class Cost:
    """Tokens that go through the model, by what they are read for.

    Attributes:
        units: the effects of the prompt's units, and of unrelated ones.
        heads: of the unit with the largest effect: each head's part, compared with unrelated units.
        positions: likewise, each position's.
    """

    units: int
    heads: int
    positions: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.units + self.heads + self.positions


class Estimate(NamedTuple):
    """What an explanation will take.

    Attributes:
        tokens, seconds: of all of it; seconds are rough.
        quick_tokens, quick_seconds: with ``quick``.
    """

    tokens: int
    seconds: float
    quick_tokens: int
    quick_seconds: float


@checked
@torch.no_grad()
def expected_cost(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    by: str | Spans = "sentence",
    method: str | Method = "leave_one_out",
    null: Null | None = None,
    single_tokens: bool = False,
) -> Estimate:
    """What :func:`kvlens.analyses.attribution.explain.explain` will take.

    Two kinds of pass are timed: over prompt and text, and over a batch of the text alone under a bias, as heads and positions
    are exchanged.

    Args:
        model, prompt, text, by, method, null: as they will be given to `explain`.
        single_tokens: also the effect of each token of the prompt, which a report measures, unless it is quick.

    Raises:
        KVLensError: as `explain`.
    """
    question = Question.of(model, prompt, text, answer=0)
    units, how = units_of(model, question.prompt, by), method_of(method)
    bias = convert_prompt(model, question.prompt)
    long = _seconds_per_token(question, lambda: question.scores(question.rows([[]])))
    short = _seconds_per_token(question, lambda: question.scores_under(bias.repeat(N_TIMED)))
    slow, quick = (cost_of(question, units, null or Null(), how, n_tested) for n_tested in (None, QUICK_HEADS))
    single = cost_of(question, units_of(model, question.prompt, "token"), Null(), method_of("leave_one_out")).units
    more = single if single_tokens else 0
    seconds, quick_seconds = (cost.units * long + (cost.heads + cost.positions) * short for cost in (slow, quick))
    return Estimate(slow.total + more, seconds + more * long, quick.total, quick_seconds)


def _seconds_per_token(question: Question, read: Callable[[], object]) -> float:
    """The shortest of two to ten readings: the first fetches weights from disk, and other processes may delay any of them."""
    taken: list[float] = []
    began = perf_counter()
    while len(taken) < 2 or (len(taken) < 10 and perf_counter() - began < ENOUGH):
        before, start = question.account.n_tokens, perf_counter()
        read()
        taken.append((perf_counter() - start) / (question.account.n_tokens - before))
    return min(taken)


def cost_of(question: Question, units: Sequence[Unit], null: Null | None, method: Method, n_tested: int | None = None) -> Cost:
    """Of an answer of one token; a null of None reads no unrelated units."""
    n_prompt, n_text = len(question.prompt), len(question.text)
    both, longest = n_prompt + n_text, max(unit.stop - unit.start for unit in units)
    behind = sum(both - unit.start for unit in units) // len(units)  # tokens before the unit are read once for all rows
    n_null, n_rows = (0 if null is None else null.n_for(len(units))), getattr(method, "n_subsets", len(units))
    written = longest if null is not None and null.prompts is None else 0
    of_units = (n_rows + n_null) * behind + n_null * written + (len(units) + 5) * n_text + 5 * n_prompt
    n_heads, few = sum(question.model.heads_per_layer), min(n_null, FEWEST)
    n_tested = n_heads if n_tested is None else min(n_tested, n_heads)
    of_heads = few * (n_prompt + written) + 4 * n_prompt + (4 * n_heads + few * (3 * n_tested + 4)) * n_text
    return Cost(of_units, of_heads, 4 * n_prompt + 2 * n_prompt * n_text)
