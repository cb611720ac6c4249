"""method="snapkv": the keys that the prompt's last queries attend to (Li et al. 2024, arXiv 2404.14469)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.softmax.kept_keys import KEEP, KeptKeys, attention_of_prompt, own_distance, real_keys
from kvlens.conversion.softmax.settings import MOST_ASKED
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.errors import KVLensError


@checked
@dataclass(frozen=True, kw_only=True)
class SnapKV(KeptKeys):
    """The last queries of the prompt vote for earlier keys; votes are averaged over neighboring keys.

    Attributes:
        window: number of last tokens that vote and are kept; at most half of the keys that are kept.
        kernel_size: number of neighboring keys over which votes are averaged; odd.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.

    Source: Li et al. 2024, arXiv 2404.14469; averages rather than maxima, and over the heads of a group, as in kvpress.
    """

    name: ClassVar[str] = "snapkv"
    needs_queries: ClassVar[bool] = True

    window: Annotated[int, Within(1, MOST_ASKED)] = 32
    kernel_size: Annotated[int, Within(1, MOST_ASKED)] = 5

    def __post_init__(self):
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise KVLensError(f"SnapKV: kernel_size must be odd, got {self.kernel_size}")

    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        window = (wanted // 2).clamp(min=1, max=self.window)
        last = (own_distance(teacher) <= window[:, None]) & real_keys(teacher)
        return [self._votes(teacher, layer, last) + KEEP * last[:, None] for layer in range(teacher.n_layers)]

    def _votes(self, teacher: Teacher, layer: int, last: Tensor) -> Tensor:
        votes = attention_of_prompt(teacher, layer, last.double()).double().masked_fill(last[:, None], 0.0)
        return torch.nn.functional.avg_pool1d(votes, self.kernel_size, stride=1, padding=self.kernel_size // 2)
