"""The keys that the prompt needs when it is read again, as they are: method="kvzip". Weights are 1, and nothing is fitted.

What other methods leave in a cache of Transformers, such as those of kvpress, is a bias by :meth:`kvlens.KVBias.from_cache`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.arguments import MOST_ASKED
from kvlens.checks import Within, checked
from kvlens.conversion.few_keys import FewKeys, assembled, with_own_values
from kvlens.conversion.method import Teacher
from kvlens.conversion.reference_queries import room_after
from kvlens.kv_bias import KVBias
from kvlens.ops.landmarks import Queries, blocks_of, key_shares


@checked
@dataclass(frozen=True, kw_only=True)
class KVzip(FewKeys):
    """The model reads the prompt a second time after itself; a key's score is the largest attention that it then receives.

    The keys with the highest scores of all layers and heads are kept, so that heads keep different numbers. The paper inserts
    an instruction to repeat the context; here the prompt follows directly, since base models follow no instructions. If the
    prompt does not fit a second time within ``n_ctx``, only its beginning is repeated.

    Attributes:
        n_sink: how many of the first keys every head keeps.
        n_keys, ratio: how many keys per key-value head, on average; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; to measure errors alone.

    Source: Kim et al. 2025, arXiv 2505.23416; maximum and threshold as in kvpress' ``KVzipPress``.
    """

    name: ClassVar[str] = "kvzip"

    n_sink: Annotated[int, Within(0, MOST_ASKED)] = 4

    @torch.no_grad()
    def kept(self, teacher: Teacher) -> Bool[Tensor, "layer batch kv_head key"]:
        """Which keys are kept; of keys with equal scores the earlier ones."""
        real, wanted = teacher.exact.bias.attention[0].b_d[:, 0] != 0, self.wanted(teacher)
        always = real & (real.cumsum(dim=1) <= self.n_sink)
        scores = torch.stack(self._scores(teacher, real)).double().masked_fill(always[:, None], torch.inf)
        flat = scores.masked_fill(~real[:, None], -torch.inf).transpose(0, 1).flatten(1)
        order = flat.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(flat.shape[-1], device=flat.device).expand_as(order))
        is_kept = rank < (wanted * scores.shape[0] * scores.shape[2])[:, None]
        return is_kept.view(scores.transpose(0, 1).shape).transpose(0, 1) & real[:, None]

    @torch.no_grad()
    def fit(self, teacher: Teacher) -> KVBias:
        kept = self.kept(teacher)
        r = max(1, int(kept.sum(dim=-1).max()))
        layers = []
        for layer, some in enumerate(kept.flatten(1, 2)):
            active, index = some.int().sort(dim=-1, descending=True, stable=True)
            layers.append(with_own_values(teacher.keys(layer), index[:, :r], active[:, :r] > 0))
        return assembled(teacher.exact, layers)

    def _scores(self, teacher: Teacher, real: Bool[Tensor, "batch key"]) -> list[Float[Tensor, "batch kv_head key"]]:
        order = (~real).int().argsort(dim=1, stable=True)  # tokens that are read come first
        room = min(room_after(teacher.model, teacher.whole), real.shape[1])
        again = teacher.prompt.tokens.gather(1, order)[:, :room]
        counts = real.gather(1, order)[:, :room]
        queries = teacher.read(teacher.whole, [again[:, None]])
        return [self._largest(teacher, layer, each, counts) for layer, each in enumerate(queries)]

    def _largest(self, teacher: Teacher, layer: int, queries: Queries, counts: Tensor) -> Float[Tensor, "batch kv_head key"]:
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
