"""method="kvzip": the keys that the model needs to repeat the prompt (Kim et al. 2025, arXiv 2505.23416)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.softmax.kept_keys import KEEP, KeptKeys, first_keys, real_keys
from kvlens.conversion.softmax.reference import room_after
from kvlens.conversion.softmax.settings import MOST_ASKED
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.ops.landmarks import Queries, blocks_of, key_shares


@checked
@dataclass(frozen=True, kw_only=True)
class KVzip(KeptKeys):
    """The model reads the prompt a second time after itself; a key's score is the largest attention that it then receives.

    One threshold applies to the scores of all layers and heads, so that heads keep different numbers of keys. The paper inserts
    an instruction to repeat the context; here the prompt follows directly, since base models follow no instructions. If the
    prompt does not fit a second time within ``n_ctx``, only its beginning is repeated.

    Attributes:
        n_sink: how many of the first keys every head keeps.
        n_keys, ratio: how many keys per key-value head, on average; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.

    Source: Kim et al. 2025, arXiv 2505.23416; maximum and threshold as in kvpress' ``KVzipPress``.
    """

    name: ClassVar[str] = "kvzip"
    heads_compete: ClassVar[bool] = True

    n_sink: Annotated[int, Within(0, MOST_ASKED)] = 4

    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        real = real_keys(teacher)
        order = (~real).int().argsort(dim=1, stable=True)  # tokens that are read come first
        room = min(room_after(teacher.model, teacher.whole), real.shape[1])
        again = teacher.prompt.tokens.gather(1, order)[:, :room]
        counts = real.gather(1, order)[:, :room]
        queries = teacher.read(teacher.whole, [again[:, None]])
        sinks = KEEP * first_keys(teacher, self.n_sink)[:, None]
        return [self._largest(teacher, layer, each, counts).double() + sinks for layer, each in enumerate(queries)]

    def _largest(self, teacher: Teacher, layer: int, queries: Queries, counts: Tensor) -> Tensor:
        prompt = teacher.keys(layer)
        batch, kv_heads, n_keys = prompt.distance.shape
        largest = queries.q.new_zeros(batch * kv_heads, n_keys)
        group, first = queries.q.shape[2] // kv_heads, 0
        for block in blocks_of(queries, n_keys):
            rows = counts[:, first : first + len(block.positions)].repeat_interleave(kv_heads, dim=0)
            first += len(block.positions)
            psi = key_shares(block, prompt) * rows.repeat_interleave(group, dim=1)[..., None]
            largest = torch.maximum(largest, psi.amax(dim=1))
        return largest.view(batch, kv_heads, n_keys)
