"""method="h2o": the last keys and those with the highest accumulated attention (Zhang et al. 2023, arXiv 2306.14048)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.softmax.kept_keys import KEEP, KeptKeys, attention_of_prompt, own_distance, real_keys
from kvlens.conversion.softmax.teacher import Teacher


@checked
@dataclass(frozen=True, kw_only=True)
class H2O(KeptKeys):
    """Heavy hitters: half of the keys are the prompt's last, half are those with the largest total attention from its queries.

    The total is over all of the prompt's queries at once. The paper evicts keys while reading, so that a query sees only the
    keys that are left after earlier steps.

    Attributes:
        recent: fraction of the keys that are the last ones.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.

    Source: Zhang et al. 2023, arXiv 2306.14048.
    """

    name: ClassVar[str] = "h2o"
    needs_queries: ClassVar[bool] = True

    recent: Annotated[float, Within(0, 1)] = 0.5

    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        last = own_distance(teacher) <= (self.recent * wanted).long()[:, None]
        counts = real_keys(teacher).double()
        layers = range(teacher.n_layers)
        return [attention_of_prompt(teacher, layer, counts).double() + KEEP * last[:, None] for layer in layers]
