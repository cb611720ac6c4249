"""What a unit that has nothing to do with the answer would show: the same measure for units of unrelated prompts.

    null effect = score(prompt with an unrelated unit in the unit's place) - score(prompt without the unit)

for units of as many tokens, each where a unit of the prompt stands. A unit's p-value is the share of null effects, its own
included, that are at least as large: of units that have nothing to do with the answer, one in twenty has p <= 0.05. A prompt
has several units, so that some are below 0.05 by chance. The adjustment (S. Holm 1979, Scand. J. Statist. 6:65) is for that: of
prompts that have nothing to do with the answer, one in twenty has *any* unit with an adjusted p <= 0.05, however the effects of
its units depend on each other. The smallest p-value is 1 / (1 + null effects), so this takes :func:`enough_for` null effects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVLensError
from kvlens.checks import Seed, Within, checked
from kvlens.units import Unit

from ..sequences import begins_with_bos, prompt_sequence
from .answers import Question

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
