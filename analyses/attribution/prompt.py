"""Which units of a prompt made the model say the answer: their total and their attention-knockout effects, with a null.

The null is what a unit that has nothing to do with the answer would show: the same measure for units of unrelated prompts.

    null effect = score(prompt with an unrelated unit in the unit's place) - score(prompt without the unit)

for units of as many tokens, each where a unit of the prompt stands. A unit's p-value is the share of null effects, its own
included, that are at least as large: of units that have nothing to do with the answer, one in twenty has p <= 0.05. A prompt
has several units, so that some are below 0.05 by chance. The adjustment (S. Holm 1979, Scand. J. Statist. 6:65) is for that: of
prompts that have nothing to do with the answer, one in twenty has *any* unit with an adjusted p <= 0.05, however the effects of
its units depend on each other. The smallest p-value is 1 / (1 + null effects), so this takes :func:`enough_for` null effects.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.checks import Seed, Within, checked
from kvlens.units import Unit, begins_with_bos, positions_of

from ..declaration import PROMPT_OR_CHAT, TEXT_IF_ANY, Columns, Option, analysis
from ..predictions import EFFECT
from ..sequences import PromptTokens, TextTokens, prompt_sequence
from .answers import BY, Answer, Positions, Question, Rival, Spans
from .methods import ATTRIBUTION_METHODS, Method, attribution_method
from .terms import hidden_from_text

SIGNIFICANT = 0.05
FEWEST, MOST = 40, 1000


@checked
@dataclass(frozen=True)
class Null:
    """The null distribution: where unrelated units come from, and how many are read.

    Attributes:
        n_units: how many unrelated units; None for `FEWEST`, and as many more, up to `MOST`, as adjusted p-values
            need.
        prompts: unrelated prompts, strings or tokens; None takes texts that the model writes by itself.
        seed: of what is drawn.
    """

    n_units: Annotated[int, Within(1, 2**20)] | None = None
    prompts: Sequence[str | Tensor] | None = None
    seed: Seed = 0

    def n_for(self, n_tested: int) -> int:
        """How many unrelated units are read to test as many units of a prompt."""
        return self.n_units or min(max(FEWEST, enough_for(n_tested)), MOST)

    def effects(
        self, question: Question, units: Sequence[Unit], without: Float[Tensor, " unit"] | None = None
    ) -> Float[Tensor, " null"]:
        """Null effects, spread evenly over the units' positions.

        Args:
            question, units: whose effects are tested.
            without: the score without each unit, where it was measured before.
        """
        where = [units[i % len(units)] for i in range(self.n_for(len(units)))]
        unrelated = self.drawn(question, where)
        spans = [(unit.start, unit.stop) for unit in where]
        with_them = question.rows([[]] * len(spans), [{span: new} for span, new in zip(spans, unrelated, strict=True)])
        if without is None:
            without = question.scores(question.rows([[(unit.start, unit.stop)] for unit in units[: len(where)]]))
        return question.scores(with_them) - without[torch.arange(len(where)) % len(units)]

    def drawn(self, question: Question, where: Sequence[Unit]) -> list[Int[Tensor, " pos"]]:
        """A stretch of an unrelated prompt, as long as each unit; each prompt is used as often as the others."""
        generator = torch.Generator().manual_seed(self.seed)
        longest = max(unit.stop - unit.start for unit in where)
        sources = self._sources(question, longest, len(where))
        sources = [sources[i] for i in torch.randperm(len(sources), generator=generator).tolist()]
        drawn = []
        for unit in where:
            length = unit.stop - unit.start
            source = next((source for source in sources if len(source) >= length), None)
            if source is None:
                raise KVLensError(f"Null: a unit has {length} tokens, and no unrelated prompt is as long: give longer ones")
            sources = [*(other for other in sources if other is not source), source]
            start = int(torch.randint(len(source) - length + 1, (), generator=generator))
            drawn.append(source[start : start + length])
        return drawn

    def _sources(self, question: Question, longest: int, n_texts: int) -> list[Int[Tensor, " pos"]]:
        model = question.model
        if self.prompts is not None:
            read = [prompt_sequence(model, "Null: prompts", prompt) for prompt in self.prompts]
            return [tokens[int(begins_with_bos(model, tokens)) :].cpu() for tokens in read]
        first = question.prompt[:1]  # BOS where there is one
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            start = first[None].expand(n_texts, -1)
            written = model.generate(start, max_new_tokens=longest, stop_at_eos=False, verbose=False, return_type="tokens")
        self_written = written[:, 1:].clone().cpu()
        question.account.count(self_written.numel())
        return list(self_written)


def p_values(effects: Float[Tensor, " unit"], null: Float[Tensor, " null"]) -> Float[Tensor, " unit"]:
    """Two-sided: (1 + null effects at least as large) / (1 + their number)."""
    larger = (null.abs()[None] >= effects.abs()[:, None]).sum(dim=1)
    return (1.0 + larger.double()) / (1.0 + len(null))


def holm(p: Float[Tensor, " unit"]) -> Float[Tensor, " unit"]:
    """Adjusted p-values: the smallest times the number of units, the second smallest times one less, and so on; none smaller
    than the one before, and at most 1."""
    order = p.argsort(stable=True)
    steps = p[order] * torch.arange(len(p), 0, -1)
    return steps.cummax(dim=0).values.clamp(max=1.0)[order.argsort()]


def enough_for(n_units: int) -> int:
    """How many null effects allow the largest of ``n_units`` effects an adjusted p-value of at most `SIGNIFICANT`."""
    return round(n_units / SIGNIFICANT)


FLOOR = 0.1
"""Nats: below so large an effect of the whole prompt, a unit's share of it says nothing."""

COLUMNS = Columns(
    unit=("int64", "from 0, as the prompt has them"),
    name=("str", "such as ``minutes.txt, sentence 5``"),
    unit_text=("str", "of the unit"),
    start=("int64", "position of its first token; BOS has 0 where there is one"),
    stop=("int64", "position behind its last token"),
    total_effect=("float64", f"{EFFECT}; the unit removed, everything recomputed"),
    total_share=(
        "float64",
        f"total_effect over that of the whole prompt against the baseline; NaN where the latter is below {FLOOR} nats",
    ),
    knockout_effect=(
        "float64",
        f"{EFFECT}; the unit knocked out: the text does not read its keys and values, the prompt's own pass is unchanged; with "
        "a KV shift also the next positions, which carry some of them, and the unit's rows of the shift state; in a recurrent "
        "layer, the terms of the unit's tokens taken out of the state, and the inputs of its convolution at the unit's tokens",
    ),
    p_value=("float64", "share of units of unrelated prompts with a total effect as large; NaN without a null"),
    significant=("bool", f"p_value at most {SIGNIFICANT}: each unit by itself"),
    p_adjusted=("float64", "p_value adjusted for the number of units by Holm's method; NaN without a null"),
)


@analysis(
    COLUMNS,
    "which sentence (word, token) of the prompt made the model say it: effects of removing it, with a null",
    cost="the prompt three times, and once without each unit from there on; the text three times, and twice for each "
    "unit; about once more for each unit of the null",
    inputs={"prompt": PROMPT_OR_CHAT, "text": TEXT_IF_ANY},
    options={
        "by": BY,
        "method": Option("how effects are found", choices=tuple(ATTRIBUTION_METHODS)),
        "null": Option("compare with so many units of unrelated texts, such as 40 (default: no p-values)", value_type=int),
        "positions": Option("what follows a removed unit stays, or moves up", choices=("kept", "closed")),
    },
)
@checked
@torch.no_grad()
def prompt_attribution(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens | None = None,
    *,
    by: str | Spans = "sentence",
    answer: Answer = None,
    rival: Rival = None,
    method: str | Method = "leave_one_out",
    null: Null | Annotated[int, Within(1, 2**20)] | None = None,
    positions: Positions = "kept",
) -> pd.DataFrame:
    """The effect of each unit of a prompt on an answer.

    Args:
        model: linear or softmax.
        prompt: a string, a chat, or tokens [pos] with BOS where the model wants one.
        text: what follows the prompt, a string or tokens [pos] without BOS, up to where the answer begins; behind a chat the
            first words of the answer, or None where that begins at once.
        by: the units: one of :data:`kvlens.arguments.UNITS`, or token ranges. A chat's question is in none.
        answer: whose log-probability is explained: a string, a token, or several tokens, which add up; None for the most
            probable next token.
        rival: another answer, whose log-probability is taken away; None for none.
        method: a name of :data:`kvlens.analyses.attribution.methods.ATTRIBUTION_METHODS`, or a method with its options.
        null: where unrelated units come from (:class:`kvlens.analyses.attribution.prompt.Null`), or how many are taken from
            texts that the model writes by itself; None leaves p-values out.
        positions: ``kept``: what follows a removed unit stays where it stood; ``closed``: it moves up.

    Returns:
        One row per unit, in the prompt's order:

        {columns}

    Raises:
        KVLensError: tokens that do not fit, ranges that hold BOS or overlap, an unknown name, an answer of no tokens.
    """
    question = Question.of(model, prompt, text, answer, rival, positions)
    units, null = question.units(by), Null(null) if isinstance(null, int) else null
    expected = _cost(question, units, null, attribution_method(method))
    with question.account.bar("prompt_attribution", expected):
        found = attribution_method(method).explain(question, units)
        baseline = float(question.scores(question.baseline())[0])
        whole = float(question.scores(question.rows([[]]))[0]) if found.whole is None else found.whole
        nothing = torch.full_like(found.effects, float("nan"))
        p = nothing if null is None else p_values(found.effects, null.effects(question, units, found.without))
        return units_table(question, units, found.effects, whole - baseline, p)


def units_table(
    question: Question,
    units: Sequence[Unit],
    effects: Float[Tensor, " unit"],
    of_prompt: float,
    p: Float[Tensor, " unit"],
) -> pd.DataFrame:
    """The table of :func:`prompt_attribution`, with each unit's knockout effect measured.

    Args:
        question: what is explained.
        units, effects: one for each row; total effects.
        of_prompt: the total effect of the whole prompt.
        p: p-values; NaN without a null.
    """
    knockout = knockout_effects(question, units)
    return COLUMNS.frame(
        {
            "unit": range(len(units)),
            "name": [unit.name for unit in units],
            "unit_text": [unit.text for unit in units],
            "start": [unit.start for unit in units],
            "stop": [unit.stop for unit in units],
            "total_effect": effects,
            "total_share": effects / (of_prompt if abs(of_prompt) >= FLOOR else math.nan),
            "knockout_effect": knockout,
            "p_value": p,
            "significant": p <= SIGNIFICANT,
            "p_adjusted": holm(p),
        }
    )


def knockout_effects(question: Question, units: Sequence[Unit]) -> Float[Tensor, " unit"]:
    """Return, for each unit, the score as it is less the score with the unit knocked out."""
    own = positions_of(units, len(question.prompt))
    everything = torch.cat([torch.zeros_like(own[:1]), own])
    hidden = hidden_from_text(question.model, question.prompt, everything)
    question.account.count(len(question.prompt))
    scores = torch.cat([question.scores_under(biases) for biases in hidden])
    return scores[0] - scores[1:]


def _cost(question: Question, units: Sequence[Unit], null: Null | None, method: Method) -> int:
    """Tokens that are read for an answer of one token, about."""
    n_prompt, n_text = len(question.prompt), len(question.text)
    both, longest = n_prompt + n_text, max(unit.stop - unit.start for unit in units)
    behind = sum(both - unit.start for unit in units) // len(units)  # tokens before the unit are read once for all rows
    n_null, n_rows = (0 if null is None else null.n_for(len(units))), getattr(method, "n_subsets", len(units))
    written = longest if null is not None and null.prompts is None else 0
    return (n_rows + n_null) * behind + n_null * written + (len(units) + 5) * n_text + 5 * n_prompt
