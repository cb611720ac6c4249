"""method="expected_attention": keys ranked by their expected attention from Gaussian queries (Devoto et al. 2025)."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.softmax.kept_keys import KEEP, KeptKeys, first_keys, own_distance, real_keys
from kvlens.conversion.softmax.method import needs_plain_scores
from kvlens.conversion.softmax.settings import MOST_ASKED
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.errors import KVLensError
from kvlens.model import HookedKVTransformer
from kvlens.model.protocol import ReadsPrompts
from kvlens.ops.key_scores import expected_log_attention
from kvlens.ops.rotary import rotate


@checked
@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(KeptKeys):
    """Later queries are assumed to follow the distribution of the prompt's own, N(mu, Sigma), under the mean rotation of the
    positions after the prompt. A key's score is its share of E exp(q.k / scale), times the length of its value.

    Attributes:
        n_future: number of positions after the prompt over which rotations are averaged, as far as the model's tables reach.
        n_sink: how many of the first keys are kept whatever their scores; their queries are left out of mu and Sigma.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.

    Source: Devoto et al. 2025, arXiv 2510.00636, after kvpress' ``ExpectedAttentionPress``.
    """

    name: ClassVar[str] = "expected_attention"
    needs_queries: ClassVar[bool] = True

    n_future: Annotated[int, Within(1, MOST_ASKED)] = 512
    n_sink: Annotated[int, Within(0, MOST_ASKED)] = 4

    def check_model(self, model: ReadsPrompts) -> None:
        needs_plain_scores(model, self.name)
        if not isinstance(model, HookedKVTransformer):
            raise KVLensError(
                f'convert_prompt: method="{self.name}" turns queries to later positions, for which a HookedKVTransformer has '
                f"tables; in a {type(model).__name__} rotations belong to Transformers, in another form in each family"
            )

    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        sinks = first_keys(teacher, self.n_sink)
        real = real_keys(teacher).double()
        counts = torch.where((real - sinks).sum(dim=1, keepdim=True) > 0, real - sinks, real)
        return [self._scores(teacher, layer, counts, sinks) for layer in range(teacher.n_layers)]

    def _scores(self, teacher: Teacher, layer: int, counts: Tensor, sinks: Tensor) -> Tensor:
        prompt = teacher.keys(layer)
        q = self._future(teacher, layer).double()
        logs = expected_log_attention(q, counts, prompt.keys.double(), prompt.rule.scale)
        logs = logs.masked_fill((counts == 0)[:, None], -torch.inf)
        share = logs.softmax(dim=-1).unflatten(1, (prompt.keys.shape[1], -1)).mean(dim=2)
        return share * prompt.values.double().norm(dim=-1) + KEEP * sinks[:, None]

    def _future(self, teacher: Teacher, layer: int) -> Float[Tensor, "batch query head d_head"]:
        """The prompt's queries, rotated back to position 0 and forward by the mean rotation of the following positions."""
        model: Any = teacher.model
        assert teacher.exact.queries is not None
        q = teacher.exact.queries[layer]
        if model.cfg.positional_embedding_type != "rotary":
            return q
        attn = model.blocks[layer].attn
        end = torch.as_tensor(teacher.whole.position_offset, device=q.device).expand(len(q))
        positions = (end[:, None] - own_distance(teacher)).clamp(min=0)
        cos, sin = (table[positions][:, :, None].to(q) for table in (attn.rotary_cos, attn.rotary_sin))
        length = cos.square() + sin.square()  # not 1 if a scaled form of RoPE rescales them
        back = rotate(q, cos / length, -sin / length, model.cfg.rotary_adjacent_pairs)
        ahead = end[:, None] + torch.arange(self.n_future, device=q.device)
        inside = (ahead < len(attn.rotary_cos)).to(q)
        share = (inside / inside.sum(dim=1, keepdim=True).clamp(min=1))[:, :, None]
        ahead = ahead.clamp(max=len(attn.rotary_cos) - 1)
        cos, sin = ((share * table[ahead].to(q)).sum(dim=1)[:, None, None] for table in (attn.rotary_cos, attn.rotary_sin))
        return rotate(back, cos, sin, model.cfg.rotary_adjacent_pairs)
