"""What a prompt leaves in one layer: its parts, and the rows of its last tokens. A bias is a tuple of such layers.

| part | of | read by |
|---|---|---|
| :class:`Keys` | softmax attention: keys, their values and weights | exp(score of a query and a key) |
| :class:`Features` | softmax attention: sums over features that do not depend on the prompt | those features of a query |
| :class:`State` | linear attention: sums | the model's own features of a query |
| :class:`Recurrence` | a recurrent layer: its state | the model's own queries |

A layer that has attention beside a recurrence has two parts. The first axis of every tensor is ``batch``, of 1 for one prompt.
A kind of layer that leaves something else has a subclass, whose fields are the tensors (:class:`BiasPart`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.kv_bias.features import SoftmaxFeatures, VirtualKeys, in_use
from kvlens.ops.softmax_attention import ExtraKeys, ScaledFeatures
from kvlens.ops.softmax_features import ScoreRule

P = TypeVar("P", bound="BiasPart")
S = TypeVar("S", bound="State")
F = TypeVar("F", bound="Features")
OnTensor = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class BiasPart:
    """What one mechanism of a layer leaves.

    A subclass is a dataclass of tensors [batch, head, ...]. All of them are joined, checked, and selected and exchanged by
    prompt; those in `SUMS` are multiplied, added, and selected by head, while the others stay as in the first part of a sum.

    Attributes:
        b_kv: the sum that is read.
    """

    b_kv: Float[Tensor, "batch head d_phi d_head"]

    SUMS: ClassVar[tuple[str, ...]] = ("b_kv",)
    """The fields that are linear in what the prompt's tokens write."""
    NAMES: ClassVar[Mapping[str, str]] = {}
    """What a field is called among the tensors of a layer, where another part may have one of its name."""

    @property
    def n_heads(self) -> int:
        """How many rows the sums have."""
        return self.b_kv.shape[1]

    def sums(self) -> list[Tensor]:
        """The tensors that are multiplied and added."""
        return [getattr(self, name) for name in self.SUMS]

    def tensors(self) -> dict[str, Tensor]:
        """Those that have a row for each prompt, by the names that :meth:`kvlens.KVBias.stacked` takes."""
        return {name: x for name, field in self._fields().items() if isinstance(x := getattr(self, field), Tensor)}

    def with_tensors(self: P, tensors: Mapping[str, Tensor]) -> P:
        """The part with those of its tensors that are given, named as in :meth:`tensors`."""
        return replace(self, **{field: tensors[name] for name, field in self._fields().items() if name in tensors})

    def _fields(self) -> dict[str, str]:
        """The fields by what they are called among the tensors of a layer."""
        return {self.NAMES.get(field.name, field.name): field.name for field in fields(self)}

    def rows(self: P, change: OnTensor) -> P:
        """The part with ``change`` applied to every tensor that has a row for each prompt."""
        return self.with_tensors({name: change(x) for name, x in self.tensors().items()})

    def map(self: P, change: OnTensor) -> P:
        """The part with ``change`` applied to every tensor."""
        return self.rows(change)

    def times(self: P, factor: float | Tensor) -> P:
        """The part with its sums times a number, or times one for each head, [head] or [batch, head]."""

        def by(x: Tensor) -> Tensor:
            if not isinstance(factor, Tensor):
                return x * factor
            return x * factor.to(x).reshape(*factor.shape, *[1] * (x.dim() - 2))

        return replace(self, **{name: by(getattr(self, name)) for name in self.SUMS})

    @property
    def n_numbers(self) -> int:
        """How many numbers represent the prompts."""
        return sum(x.numel() for x in self.sums())

    @classmethod
    def total(cls: type[P], parts: Sequence[P]) -> P:
        """The sum of parts of one kind."""
        return replace(parts[0], **{name: reduce(add, [getattr(part, name) for part in parts]) for name in cls.SUMS})

    @classmethod
    def joined(cls: type[P], parts: Sequence[P]) -> P:
        """The rows of the prompts of all parts."""
        every = [part.tensors() for part in parts]
        return parts[0].with_tensors({name: torch.cat([x[name] for x in every]) for name in every[0]})


@dataclass(frozen=True, eq=False)
class Recurrence(BiasPart):
    """The state of a recurrent layer: b_kv has a row for each value head, and there is no normalizer."""

    NAMES: ClassVar[Mapping[str, str]] = {"b_kv": "state"}


@dataclass(frozen=True, eq=False)
class State(BiasPart):
    """Sums over a prompt's tokens, of linear attention.

    Attributes:
        b_kv: of phi(k) v^T, of each query head.
        b_d: of phi(k), zeros without a normalizer.
    """

    b_d: Float[Tensor, "batch head d_phi"]

    SUMS = ("b_kv", "b_d")

    def per_query_head(self: S, n_heads: int) -> S:
        """The part with a row of b_kv and b_d for every query head."""
        return self

    def narrowed(self: S) -> S:
        """The part without what nobody reads."""
        return self

    def per_kv_head(self: S) -> S:
        """The part with a row of b_kv and b_d for every key-value head, where its query heads have equal ones."""
        return self


@dataclass(frozen=True, eq=False)
class Features(State):
    """Sums over features that come with the bias, for softmax attention; they stand for exp(log_scale) times themselves.

    b_kv and b_d have a row for each key-value head, or for each query head, after heads were chosen.
    """

    log_scale: Float[Tensor, "batch kv_head"]
    features: SoftmaxFeatures

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads."""
        return self.log_scale.shape[1]

    def map(self: F, change: OnTensor) -> F:
        return replace(self.rows(change), features=self.features.map(change))  # type: ignore[call-arg,attr-defined]

    def per_query_head(self: F, n_heads: int) -> F:
        return self if n_heads == self.n_heads else self.times(torch.ones(n_heads))

    def per_kv_head(self: F) -> F:
        b_kv, b_d = grouped_where_equal(self.n_kv_heads, self.b_kv, self.b_d)
        return replace(self, b_kv=b_kv, b_d=b_d)

    def times(self: F, factor: float | Tensor) -> F:
        """As of a state; numbers for the query heads give each of them a row of its own."""
        if not isinstance(factor, Tensor) or factor.shape[-1] == self.n_heads:
            return super().times(factor)
        by = factor.to(self.b_kv).unflatten(-1, (self.n_heads, -1))[..., None]
        b_kv, b_d = self.b_kv[:, :, None] * by[..., None], self.b_d[:, :, None] * by
        return replace(self, b_kv=b_kv.flatten(1, 2), b_d=b_d.flatten(1, 2))

    def phi(
        self, q: Float[Tensor, "batch pos head d_key"], rule: ScoreRule, positions: Int[Tensor, "#batch pos"] | None
    ) -> ScaledFeatures:
        """phi of queries, with which b_kv and b_d are read; see :meth:`kvlens.kv_bias.SoftmaxFeatures.of_queries`."""
        return self.features.read(q, rule, positions, self.log_scale, self.b_kv, self.b_d)

    def placed(self: F, device: torch.device, dtype: torch.dtype) -> F:
        """The part where it is read, with b_kv and b_d in ``dtype``."""
        b_kv, b_d = self.b_kv.to(device, dtype), self.b_d.to(device, dtype)
        return replace(self, b_kv=b_kv, b_d=b_d, log_scale=self.log_scale.to(device))

    def scaled(self: F, log_scale: Float[Tensor, "batch kv_head"]) -> F:
        """The same on another scale."""
        factor = (self.log_scale - log_scale).exp().repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
        return replace(self.times(factor), log_scale=log_scale)

    @classmethod
    def on_one_scale(cls: type[F], parts: Sequence[F]) -> Sequence[F]:
        """Parts with as many rows each, on the largest of their scales."""
        first, most = parts[0].log_scale, max(part.n_heads for part in parts)
        parts = [part.per_query_head(most) for part in parts]
        if all(torch.equal(part.log_scale, first) for part in parts):
            return parts
        log_scale = torch.stack([part.log_scale for part in parts]).amax(dim=0)
        return [part.scaled(log_scale) for part in parts]

    @classmethod
    def total(cls: type[F], parts: Sequence[F]) -> F:
        return super().total(cls.on_one_scale(parts))


@dataclass(frozen=True, eq=False)
class Keys(Features):
    """Keys for softmax attention, b_d their weights and b_kv their values times these."""

    features: VirtualKeys

    @property
    def keys(self) -> Float[Tensor, "batch kv_head r d_key"]:
        return self.features.keys

    @property
    def distance(self) -> Tensor:
        """From each key to the first token of the text, [batch, kv_head, r]."""
        return self.features.distance

    @property
    def used(self) -> Bool[Tensor, "batch kv_head r"]:
        """True where a key has a weight or a value for any of the query heads that read it."""
        return in_use(self.b_kv, self.b_d).unflatten(1, (self.n_kv_heads, -1)).any(dim=2)

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "keys": self.keys, "distance": self.distance}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Keys":
        keys = VirtualKeys(tensors.get("keys", self.keys), tensors.get("distance", self.distance))
        return replace(super().with_tensors(tensors), features=keys)

    def map(self, change: OnTensor) -> "Keys":
        return self.rows(change)

    def by_key(self) -> dict[str, Tensor]:
        """The tensors that have an axis of keys, which is their third, by name."""
        return {name: x for name, x in self.tensors().items() if name != "log_scale"}

    def with_keys(self, change: OnTensor) -> "Keys":
        """The part with ``change`` applied to every tensor of :meth:`by_key`."""
        return self.with_tensors({name: change(x) for name, x in self.by_key().items()})

    def some(self, keys: Tensor) -> "Keys":
        """The keys of these numbers alone, of every head."""
        return self.with_keys(lambda x: x.index_select(2, keys.to(x.device)))

    def widened(self, r: int) -> "Keys":
        """With keys of weight 0 behind the others, ``r`` in all."""
        more = r - self.keys.shape[2]
        if not more:
            return self

        def wider(name: str, x: Tensor) -> Tensor:
            filler = x.new_full((*x.shape[:2], more, *x.shape[3:]), 1 if name == "distance" else 0)
            return torch.cat([x, filler], dim=2)

        return self.with_tensors({name: wider(name, x) for name, x in self.by_key().items()})

    @property
    def n_numbers(self) -> int:
        of_a_key = self.n_heads // self.n_kv_heads * (self.b_kv.shape[3] + 1) + self.keys.shape[3]
        return int(self.used.sum()) * of_a_key

    def narrowed(self) -> "Keys":
        """As wide as its widest head: keys of weight 0 stand behind the others of their head, or are gone."""
        used = self.used
        r = max(1, int(used.sum(dim=-1).max()))
        if r == used.shape[-1]:
            return self
        order = used.int().argsort(dim=-1, descending=True, stable=True)[..., :r]

        def first(x: Tensor) -> Tensor:
            index = order.repeat_interleave(x.shape[1] // order.shape[1], dim=1)
            return x.gather(2, index if x.dim() == 3 else index[..., None].expand(*index.shape, x.shape[-1]))

        return self.with_keys(first)

    def extra(self, dtype: torch.dtype) -> ExtraKeys | None:
        """The keys in ``dtype``, as further keys of a softmax; None where it cannot express their weights."""
        return ExtraKeys.of(self.keys.to(self.b_kv.device, dtype), self.b_kv, self.b_d, self.log_scale)

    def in_window(self, rule: ScoreRule, positions: Int[Tensor, "#batch pos"]) -> "Keys":
        """Without the first keys, as many as no query at ``positions`` of the text sees; one key always stays."""
        if rule.window is None:
            return self
        seen = (self.distance + positions.min().to(self.distance) < rule.window).flatten(0, -2).any(dim=0)
        first = int(seen.long().argmax()) if bool(seen.any()) else len(seen) - 1
        return self if first == 0 else self.with_keys(lambda x: x[:, :, first:])

    def further(self, n_tokens: int | Tensor) -> "Keys":
        """The keys ``n_tokens`` positions further away from the text."""
        return replace(self, features=self.features.further(n_tokens))

    @classmethod
    def total(cls, parts: Sequence["Keys"]) -> "Keys":
        """The keys of all parts, side by side."""
        parts = cls.on_one_scale(parts)
        every = [part.by_key() for part in parts]
        return parts[0].with_tensors({name: torch.cat([x[name] for x in every], dim=2) for name in every[0]})

    @classmethod
    def joined(cls, parts: Sequence["Keys"]) -> "Keys":
        most, rows = max(part.keys.shape[2] for part in parts), max(part.n_heads for part in parts)
        return super().joined([part.per_query_head(rows).widened(most) for part in parts])


@dataclass(frozen=True, eq=False)
class Layer:
    """What a prompt leaves in a layer; nothing in an MLP or experts alone.

    Attributes:
        parts: of its attention, then of its recurrence.
        last: raw rows of the last tokens, oldest first: "k" and "v" [batch, window, kv_head, d_head] and "q" [batch, window,
            head, d_head], no rows where not shifted, and the inputs "conv" [batch, rows, channel] of a short convolution;
            of RWKV the inputs of its two shifts, side by side.
    """

    parts: tuple[BiasPart, ...] = ()
    last: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of_keys(part: Keys, n_heads: int, last: Mapping[str, Tensor] | None = None) -> "Layer":
        """A layer of softmax attention with ``n_heads`` query heads; no rows in ``last`` where none are given."""
        (batch, n_kv_heads), d_head = part.b_kv.shape[:2], part.b_kv.shape[3]
        none = {x: part.b_kv.new_zeros(batch, 0, n, d_head) for x, n in (("k", n_kv_heads), ("v", n_kv_heads), ("q", n_heads))}
        return Layer((part,), none | dict(last or {}))

    @property
    def attention(self) -> Any:
        """The part of its attention: a :class:`State`, :class:`Features` or :class:`Keys`; None without."""
        return next((part for part in self.parts if not isinstance(part, Recurrence)), None)

    @property
    def state(self) -> Recurrence | None:
        """The part of its recurrence; None without."""
        return next((part for part in self.parts if isinstance(part, Recurrence)), None)

    def times(self, factor: float | Float[Tensor, " head"]) -> "Layer":
        """The layer with its parts times a number, or times one for each head: of attention, then of a recurrence."""
        if not isinstance(factor, Tensor):
            return self.each(lambda part: part.times(factor))
        n_attention = len(factor) - (0 if self.state is None else self.state.n_heads)
        of_attention, of_state = factor[:n_attention], factor[n_attention:]
        return self.each(lambda part: part.times(of_state if isinstance(part, Recurrence) else of_attention))

    @staticmethod
    def joined(layers: Sequence["Layer"]) -> "Layer":
        """The rows of all prompts of several biases' layers."""
        parts = [type(of[0]).joined(of) for of in zip(*(layer.parts for layer in layers), strict=True)]
        return Layer(tuple(parts), {name: torch.cat([layer.last[name] for layer in layers]) for name in layers[0].last})

    def with_state_of(self, other: "Layer") -> "Layer":
        """The layer with the part of the recurrence that another has."""
        own = (part for part in self.parts if not isinstance(part, Recurrence))
        return replace(self, parts=(*own, *(part for part in other.parts if isinstance(part, Recurrence))))

    def with_last_of(self, other: "Layer", taken: Bool[Tensor, " head"], n_query_heads: int) -> "Layer":
        """The layer with the last rows of another where all heads that read them are taken from it."""
        of_queries, of_state = taken[:n_query_heads], taken[n_query_heads:]
        last = {}
        for name, rows in self.last.items():
            if name == "conv":
                here = torch.tensor(len(of_state) > 0 and bool(of_state.all()))
            else:
                here = of_queries.unflatten(0, (rows.shape[2], -1)).all(dim=1)[:, None]
            last[name] = torch.where(here.to(rows.device), other.last[name].to(rows), rows)
        return replace(self, last=last)

    def each(self, change: Callable[[Any], BiasPart]) -> "Layer":
        """The layer with ``change`` applied to every part."""
        return replace(self, parts=tuple(map(change, self.parts)))

    def of_attention(self, change: Callable[[Any], State]) -> "Layer":
        """The layer with ``change`` applied to the part of its attention, if it has one."""
        return self.each(lambda part: part if isinstance(part, Recurrence) else change(part))

    def map(self, change: OnTensor) -> "Layer":
        """The layer with ``change`` applied to every tensor."""
        return Layer(tuple(part.map(change) for part in self.parts), {name: change(x) for name, x in self.last.items()})

    def rows(self, change: OnTensor) -> "Layer":
        """The layer with ``change`` applied to every tensor that has a row for each prompt."""
        return Layer(tuple(part.rows(change) for part in self.parts), {name: change(x) for name, x in self.last.items()})

    def once(self) -> "Layer":
        """The layer with one row where all rows are views of the same, as :meth:`kvlens.KVBias.repeat` makes them."""
        repeated = all(x.shape[0] > 1 and x.stride(0) == 0 for x in self.tensors().values())
        return self.rows(lambda x: x[:1]) if repeated else self

    def tensors(self) -> dict[str, Tensor]:
        """Those that have a row for each prompt by the names that :meth:`kvlens.KVBias.stacked` takes."""
        found = {name: x for part in self.parts for name, x in part.tensors().items()}
        return found | {name if name == "conv" else f"last_{name}": x for name, x in self.last.items()}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Layer":
        """The layer with tensors named as in :meth:`tensors`."""
        last = {name: tensors.get(name if name == "conv" else f"last_{name}", x) for name, x in self.last.items()}
        return Layer(tuple(part.with_tensors(tensors) for part in self.parts), last)


def grouped_where_equal(n_kv_heads: int, *rows: Tensor) -> tuple[Tensor, ...]:
    """Reduce rows per query head to one per key-value head if those of each group are equal, so that they read as unhooked."""
    if any(b.requires_grad for b in rows):
        return rows  # each query head has a gradient of its own
    groups = [b.unflatten(1, (n_kv_heads, -1)) for b in rows]
    if not all(torch.equal(b, b[:, :, :1].expand_as(b)) for b in groups):
        return rows
    return tuple(b[:, :, 0] for b in groups)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no number is NaN or infinite."""
    sums = [x.detach().sum() for x in tensors]  # a quarter of the time of looking at each; sums of finite numbers can overflow
    return not sums or bool(torch.stack(sums).isfinite().all())


def padded(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of several layers, stacked; smaller ones are filled up with zeros."""
    shapes = [x.shape for x in tensors]
    if len(set(shapes)) == 1:
        return torch.stack(list(tensors))
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    whole = tensors[0].new_zeros(len(tensors), *largest)
    for layer, x in enumerate(tensors):
        whole[layer][tuple(slice(n) for n in x.shape)] = x
    return whole
