"""Some of the prompt's keys as they are, with their own values, as in eviction from a KV cache: weights are 1.

A method scores every key, and the keys with the highest scores are kept, per key-value head or over all heads. Scores come from
positions ("streaming_llm"), from the attention of the prompt's own queries ("h2o", "snapkv") or of later ones, whose
distribution is assumed ("expected_attention"), or from the attention while the prompt is read again ("kvzip").
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.arguments import MOST_ASKED
from kvlens.checks import Within, checked
from kvlens.conversion.few_keys import FewKeys, assembled, with_own_values
from kvlens.conversion.method import Teacher, needs_plain_scores
from kvlens.conversion.reference_queries import room_after
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias
from kvlens.model import HookedKVTransformer, attention_parts
from kvlens.model.protocol import KVModel
from kvlens.ops.key_scores import attention_received, expected_log_attention
from kvlens.ops.landmarks import Queries, blocks_of, key_shares
from kvlens.ops.rotary import rotate

KEEP = 1e30
"""Added to the score of a key that is always kept."""


@dataclass(frozen=True, kw_only=True)
class KeptKeys(FewKeys):
    """A method that scores each key.

    Attributes:
        heads_compete: whether the keys of all layers and heads of a prompt are ranked together; otherwise every head keeps the
            same number.
    """

    heads_compete: ClassVar[bool] = False

    @abstractmethod
    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        """The score of every key, layer by layer.

        Args:
            teacher: as passed to :meth:`~kvlens.conversion.Approximation.fit`.
            wanted: how many keys per key-value head each prompt keeps.
        """

    @torch.no_grad()
    def kept(self, teacher: Teacher) -> Bool[Tensor, "layer batch kv_head key"]:
        """Which keys are kept."""
        wanted = self.wanted(teacher)
        scores = torch.stack([each.double() for each in self.scores(teacher, wanted)])
        real = real_keys(teacher)
        scores = scores.masked_fill(~real[:, None], -torch.inf)
        if self.heads_compete:
            flat = scores.transpose(0, 1).flatten(1)
            rank = _ranks(flat).view(len(wanted), scores.shape[0], *scores.shape[2:]).transpose(0, 1)
            return (rank < (wanted * scores.shape[0] * scores.shape[2])[:, None, None]) & real[:, None]
        return (_ranks(scores) < wanted[:, None, None]) & real[:, None]

    @torch.no_grad()
    def fit(self, teacher: Teacher) -> KVBias:
        kept = self.kept(teacher)
        r = max(1, int(kept.sum(dim=-1).max()))
        layers = []
        for layer, some in enumerate(kept.flatten(1, 2)):
            active, index = some.int().sort(dim=-1, descending=True, stable=True)
            layers.append(with_own_values(teacher.keys(layer), index[:, :r], active[:, :r] > 0))
        return assembled(teacher.exact, layers)


def _ranks(scores: Tensor) -> Tensor:
    """0 for the highest score along the last axis, 1 for the next, ...; ties go to the earlier key."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order))


def real_keys(teacher: Teacher) -> Bool[Tensor, "batch key"]:
    """True at positions of the prompt whose token is read."""
    return teacher.exact.bias.attention[0].b_d[:, 0] != 0


def own_distance(teacher: Teacher) -> Int[Tensor, "batch key"]:
    """How many positions before the text each token lies; 1 for the last."""
    return teacher.keys(0).distance[:, 0]


def attention_of_prompt(teacher: Teacher, layer: int, counts: Float[Tensor, "batch key"]) -> Float[Tensor, "batch kv_head key"]:
    """The attention that each key gets from the prompt's own queries, weighted by ``counts`` and summed over a group's heads.

    It is the attention in the prompt's own pass, so the bias that the prompt continues is in the normalizer.
    """
    exact, part = teacher.exact, attention_parts(teacher.model)[layer]
    assert exact.queries is not None
    held = teacher.whole.attention[layer]
    q = exact.queries[layer].to(held.keys)
    sink = None if part.sinks is None else part.sinks.to(q)
    near = own_distance(teacher)
    received = attention_received(q, near, counts.to(q), held.keys, held.distance, held.b_d, part.score_rule(), sink)
    own = received[..., -near.shape[1] :]  # keys of the old bias come first
    return own.unflatten(1, (teacher.n_kv_heads, -1)).sum(dim=2)


def first_keys(teacher: Teacher, n: int) -> Float[Tensor, "batch key"]:
    """1 at the first ``n`` tokens of each prompt that are read, else 0."""
    real = real_keys(teacher)
    return (real & (real.cumsum(dim=1) <= n)).to(torch.float64)


@checked
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(KeptKeys):
    """The prompt's first keys, which many heads use as attention sinks, and its last keys.

    Here the keys keep their positions; the paper renumbers them to be contiguous.

    Attributes:
        n_sink: number of first keys that are kept.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; to measure errors alone.

    Source: Xiao et al. 2023, arXiv 2309.17453.
    """

    name: ClassVar[str] = "streaming_llm"

    n_sink: Annotated[int, Within(0, MOST_ASKED)] = 4

    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        recent = -own_distance(teacher).double() + KEEP * first_keys(teacher, self.n_sink)
        return [recent[:, None].expand(-1, teacher.n_kv_heads, -1)] * teacher.n_layers


@checked
@dataclass(frozen=True, kw_only=True)
class H2O(KeptKeys):
    """Heavy hitters: half of the keys are the prompt's last, half are those with the largest total attention from its queries.

    The total is over all of the prompt's queries at once. The paper evicts keys while reading, so that a query sees only the
    keys that are left after earlier steps.

    Attributes:
        recent: fraction of the keys that are the last ones.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; to measure errors alone.

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


@checked
@dataclass(frozen=True, kw_only=True)
class SnapKV(KeptKeys):
    """The last queries of the prompt vote for earlier keys; votes are averaged over neighboring keys.

    Attributes:
        window: number of last tokens that vote and are kept; at most half of the keys that are kept.
        kernel_size: number of neighboring keys over which votes are averaged; odd.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; to measure errors alone.

    Source: Li et al. 2024, arXiv 2404.14469; averages rather than maxima, and over the heads of a group, as in kvpress.
    """

    name: ClassVar[str] = "snapkv"
    needs_queries: ClassVar[bool] = True

    window: Annotated[int, Within(1, MOST_ASKED)] = 32
    kernel_size: Annotated[int, Within(1, MOST_ASKED)] = 5

    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        window = (wanted // 2).clamp(min=1, max=self.window)
        last = (own_distance(teacher) <= window[:, None]) & real_keys(teacher)
        return [self._votes(teacher, layer, last) + KEEP * last[:, None] for layer in range(teacher.n_layers)]

    def _votes(self, teacher: Teacher, layer: int, last: Tensor) -> Tensor:
        votes = attention_of_prompt(teacher, layer, last.double()).double().masked_fill(last[:, None], 0.0)
        return torch.nn.functional.avg_pool1d(votes, self.kernel_size, stride=1, padding=self.kernel_size // 2)


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
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; to measure errors alone.

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


@checked
@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(KeptKeys):
    """Later queries are assumed to follow the distribution of the prompt's own, N(mu, Sigma), under the mean rotation of the
    positions after the prompt. A key's score is its share of E exp(q.k / scale), times the length of its value.

    Attributes:
        n_future: number of positions after the prompt over which rotations are averaged, as far as the model's tables reach.
        n_sink: how many of the first keys are kept whatever their scores; their queries are left out of mu and Sigma.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; to measure errors alone.

    Source: Devoto et al. 2025, arXiv 2510.00636, after kvpress' ``ExpectedAttentionPress``.
    """

    name: ClassVar[str] = "expected_attention"
    needs_queries: ClassVar[bool] = True

    n_future: Annotated[int, Within(1, MOST_ASKED)] = 512
    n_sink: Annotated[int, Within(0, MOST_ASKED)] = 4

    def check_model(self, model: KVModel) -> None:
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
