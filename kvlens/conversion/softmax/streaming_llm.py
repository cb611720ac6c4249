"""method="streaming_llm": the first and the last keys (Xiao et al. 2023, arXiv 2309.17453)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.softmax.kept_keys import KEEP, KeptKeys, own_distance, real_keys
from kvlens.conversion.softmax.settings import MOST_ASKED
from kvlens.conversion.softmax.teacher import Teacher


@checked
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(KeptKeys):
    """The prompt's first keys, which many heads use as attention sinks, and its last keys.

    Here the keys keep their positions; the paper renumbers them to be contiguous.

    Attributes:
        n_sink: number of first keys that are kept.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.

    Source: Xiao et al. 2023, arXiv 2309.17453.
    """

    name: ClassVar[str] = "streaming_llm"

    n_sink: Annotated[int, Within(0, MOST_ASKED)] = 4

    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        recent = -own_distance(teacher).double() + KEEP * first_keys(teacher, self.n_sink)
        return [recent[:, None].expand(-1, teacher.n_kv_heads, -1)] * teacher.n_layers


def first_keys(teacher: Teacher, n: int) -> Float[Tensor, "batch key"]:
    """1 at the first ``n`` tokens of each prompt that are read, else 0."""
    real = real_keys(teacher)
    return (real & (real.cumsum(dim=1) <= n)).to(torch.float64)
