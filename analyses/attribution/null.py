"""What a unit that has nothing to do with the answer would show: the same measure for units of unrelated prompts.

    null effect = score(prompt with an unrelated unit in the unit's place) - score(prompt without the unit)

for units of as many tokens, each where a unit of the prompt stands. A unit's p-value is the share of null effects, its own
included, that are at least as large; with it at most one unrelated unit in twenty is called significant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVLensError
from kvlens.checks import Seed, Within, checked

from ..sequences import begins_with_bos, prompt_sequence
from .answers import Question
from .units import Unit

SIGNIFICANT = 0.05


@checked
@dataclass(frozen=True)
class Null:
    """Where unrelated units come from, and how many are read.

    Attributes:
        n_units: unrelated units; 20 and more can call anything significant, more measure a p-value more finely.
        prompts: unrelated prompts, strings or tokens; None takes texts that the model writes by itself.
        seed: of what is drawn.
    """

    n_units: Annotated[int, Within(19, 2**20)] = 40
    prompts: Sequence[str | Tensor] | None = None
    seed: Seed = 0

    def effects(self, question: Question, units: Sequence[Unit]) -> Float[Tensor, " null"]:
        """Null effects, spread evenly over the units' positions."""
        where = [units[i % len(units)] for i in range(self.n_units)]
        unrelated = self.drawn(question, where)
        spans = [(unit.start, unit.stop) for unit in where]
        with_them = question.rows([[]] * len(spans), [{span: new} for span, new in zip(spans, unrelated, strict=True)])
        distinct = list(dict.fromkeys(spans))
        without = question.scores(question.rows([[span] for span in distinct]))
        index = torch.tensor([distinct.index(span) for span in spans])
        return question.scores(with_them) - without[index]

    def drawn(self, question: Question, where: Sequence[Unit]) -> list[Int[Tensor, " pos"]]:
        """For each unit, one of an unrelated prompt of as many tokens."""
        generator = torch.Generator().manual_seed(self.seed)
        longest = max(unit.stop - unit.start for unit in where)
        sources = self._sources(question, longest)
        drawn = []
        for unit in where:
            length = unit.stop - unit.start
            fitting = [source for source in sources if len(source) >= length]
            if not fitting:
                raise KVLensError(f"Null: a unit has {length} tokens, and no unrelated prompt is as long: give longer ones")
            source = fitting[int(torch.randint(len(fitting), (), generator=generator))]
            start = int(torch.randint(len(source) - length + 1, (), generator=generator))
            drawn.append(source[start : start + length])
        return drawn

    def _sources(self, question: Question, longest: int) -> list[Int[Tensor, " pos"]]:
        model = question.model
        if self.prompts is not None:
            read = [prompt_sequence(model, "Null: prompts", prompt) for prompt in self.prompts]
            return [tokens[int(begins_with_bos(model, tokens)) :].cpu() for tokens in read]
        first = question.prompt[:1]  # BOS where there is one
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            start = first[None].expand(self.n_units, -1)
            written = model.generate(start, max_new_tokens=longest, stop_at_eos=False, verbose=False, return_type="tokens")
        self_written = written[:, 1:].clone().cpu()
        question.account.count(self_written.numel())
        return list(self_written)


def p_values(effects: Float[Tensor, " unit"], null: Float[Tensor, " null"]) -> Float[Tensor, " unit"]:
    """Two-sided: (1 + null effects at least as large) / (1 + their number)."""
    larger = (null.abs()[None] >= effects.abs()[:, None]).sum(dim=1)
    return (1.0 + larger) / (1.0 + len(null))
