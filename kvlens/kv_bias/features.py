"""The features phi of a softmax model's bias, stored with b_KV and b_D because a softmax model has none of its own.

A linear model has its own features, so its biases store none (``bias.kind`` is None). For softmax (ICLCA sec. 5):

| class | phi_r(q) | depends on the prompt |
|---|---|---|
| VirtualKeys | exp(score of q and a virtual key c_r), with soft-cap, ALiBi and window | yes: its keys, or fitted ones |
| RandomFeatures | exp(w_r.q' - |q'|^2 / 2) / sqrt(m) | no |
| TaylorFeatures | [1, q', vec(q' q'^T) / sqrt 2] | no |
| EluFeatures | elu(q'_r) + 1 | no |
| LearnedFeatures | exp(w_r.q + a_r), w and a trained to match the attention | yes: trained on it |

Adding two biases concatenates their virtual keys; with features that do not depend on the prompt, b_KV and b_D are added.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.errors import KVLensError, check_known
from kvlens.ops.softmax_attention import ScaledFeatures
from kvlens.ops.softmax_features import (
    ScoreRule,
    elu_log_features,
    learned_log_features,
    random_log_features,
    scaled_exp,
    taylor_features,
    virtual_key_scores,
)

F = TypeVar("F", bound="SoftmaxFeatures")
QueryVectors = Float[Tensor, "batch pos head d_key"]
QueryPositions = Int[Tensor, "#batch pos"]
Used = Bool[Tensor, "#batch head d_phi"]
LogFeatures = Float[Tensor, "batch pos head d_phi"]


def in_use(b_kv: Float[Tensor, "*lead d_phi d_head"], b_d: Float[Tensor, "*lead d_phi"]) -> Bool[Tensor, "*lead d_phi"]:
    """True where a key, or a feature, has a weight or a value."""
    weighted = b_d != 0
    return weighted if bool(weighted.all()) else weighted | (b_kv != 0).any(dim=-1)


@dataclass(frozen=True, eq=False)
class SoftmaxFeatures(ABC):
    """One kind of features, for every key-value head of a layer."""

    kind: ClassVar[str]
    per_prompt: ClassVar[bool] = False
    """Whether the tensors have the bias's batch axis."""

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def map(self: F, change: Callable[[Tensor], Tensor]) -> F:
        """The same features with ``change`` applied to every tensor."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)

    @property
    @abstractmethod
    def n_features(self) -> int:
        """r: features per head."""

    @abstractmethod
    def of_queries(
        self, q: QueryVectors, rule: ScoreRule, positions: QueryPositions | None = None, used: Used | None = None
    ) -> ScaledFeatures:
        """phi(q), of the features of one layer.

        Args:
            q: queries as the model scores them: shifted, after RoPE.
            rule: how the layer scores a key.
            positions: positions of the queries within the text, from 0; needed with ALiBi or a window.
            used: True for features whose b_KV and b_D are not both 0; others do not affect the scale. None means all.
        """

    def read(
        self,
        q: QueryVectors,
        rule: ScoreRule,
        positions: QueryPositions | None,
        log_scale: Float[Tensor, "#batch kv_head"],
        b_kv: Float[Tensor, "#batch some_head d_phi d_head"],
        b_d: Float[Tensor, "#batch some_head d_phi"],
    ) -> ScaledFeatures:
        """phi(q), of the features of one layer, on the scale of a bias, for reading its b_KV and b_D."""
        heads = q.shape[2]
        used = None
        if not bool((b_d != 0).all()):
            used = in_use(b_kv, b_d).repeat_interleave(heads // b_d.shape[1], dim=1)
        phi = self.of_queries(q, rule, positions, used)
        stored = log_scale.to(q).repeat_interleave(heads // log_scale.shape[1], dim=1)
        return ScaledFeatures(phi.features, phi.log_scale + stored[:, None])

    def check(self, n_kv_heads: int, d_key: int) -> None:
        """Raise KVLensError unless the tensors, which have no axis of prompts, are of a layer whose keys have ``d_key``
        dimensions."""
        for name, tensor in self.tensors().items():
            shape = (n_kv_heads, self.n_features, d_key)[: tensor.dim()]
            if tensor.dim() < 2 or tuple(tensor.shape) != shape:
                raise KVLensError(f"KVBias: features.{name} must be {list(shape)}, got {list(tensor.shape)}")


class PositiveFeatures(SoftmaxFeatures):
    """A kind of features that are exponentials, given by their logarithms."""

    @abstractmethod
    def log_features(self, q: QueryVectors, rule: ScoreRule, positions: QueryPositions | None) -> LogFeatures:
        """log phi(q), of the features of one layer; arguments as in :meth:`of_queries`."""

    def of_queries(
        self, q: QueryVectors, rule: ScoreRule, positions: QueryPositions | None = None, used: Used | None = None
    ) -> ScaledFeatures:
        return scaled_exp(self.log_features(q, rule, positions), used)


@dataclass(frozen=True, eq=False)
class VirtualKeys(PositiveFeatures):
    """Keys that replace the prompt's.

    Attributes:
        keys: after RoPE, as the model scores them; ``d_key`` is ``d_head``, except in latent attention, whose keys and values
            differ in size. Heads with fewer keys have others of weight 0 behind them.
        distance: from each key to the first token of the text, at least 1; it matters with ALiBi and in local layers.
    """

    keys: Float[Tensor, "batch kv_head r d_key"]
    distance: Int[Tensor, "batch kv_head r"]
    kind: ClassVar[str] = "virtual_keys"
    per_prompt: ClassVar[bool] = True

    @property
    def n_features(self) -> int:
        return self.keys.shape[-2]

    def log_features(self, q: QueryVectors, rule: ScoreRule, positions: QueryPositions | None) -> LogFeatures:
        return virtual_key_scores(q, self.keys.to(q), rule, self.distance.to(q.device), positions)

    def further(self, n_tokens: int | Int[Tensor, " batch"]) -> "VirtualKeys":
        """These keys, ``n_tokens`` positions further away from the text."""
        passed = torch.as_tensor(n_tokens, device=self.distance.device)
        return VirtualKeys(self.keys, self.distance + (passed[:, None, None] if passed.dim() else passed))


@dataclass(frozen=True, eq=False)
class RandomFeatures(PositiveFeatures):
    """Positive random features (FAVOR+); ``projection`` holds w, rows ~ N(0, I), i.i.d. or orthogonal in blocks."""

    projection: Float[Tensor, "*layer kv_head m d_key"]
    kind: ClassVar[str] = "random"

    @property
    def n_features(self) -> int:
        return self.projection.shape[-2]

    def log_features(self, q: QueryVectors, rule: ScoreRule, positions: QueryPositions | None) -> LogFeatures:
        return random_log_features(q, self.projection.to(q), rule.scale)


@dataclass(frozen=True, eq=False)
class LearnedFeatures(PositiveFeatures):
    """Trained positive features of the queries; the map of the keys is needed only for conversion."""

    weight: Float[Tensor, "*layer kv_head m d_key"]
    offset: Float[Tensor, "*layer kv_head m"]
    kind: ClassVar[str] = "learned"

    @property
    def n_features(self) -> int:
        return self.weight.shape[-2]

    def log_features(self, q: QueryVectors, rule: ScoreRule, positions: QueryPositions | None) -> LogFeatures:
        return learned_log_features(q, self.weight.to(q), self.offset.to(q))


@dataclass(frozen=True, eq=False)
class EluFeatures(PositiveFeatures):
    """elu + 1 of each coordinate. It stores only the dimension of a key."""

    d_key: int
    kind: ClassVar[str] = "elu_plus_one"

    @property
    def n_features(self) -> int:
        return self.d_key

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def log_features(self, q: QueryVectors, rule: ScoreRule, positions: QueryPositions | None) -> LogFeatures:
        return elu_log_features(q, rule.scale)


@dataclass(frozen=True, eq=False)
class TaylorFeatures(SoftmaxFeatures):
    """The exponential to second order. It stores only the dimension of a key."""

    d_key: int
    kind: ClassVar[str] = "taylor"

    @property
    def n_features(self) -> int:
        return 1 + self.d_key + self.d_key**2

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def of_queries(
        self, q: QueryVectors, rule: ScoreRule, positions: QueryPositions | None = None, used: Used | None = None
    ) -> ScaledFeatures:
        return taylor_features(q, rule.scale)


KINDS = {each.kind: each for each in (VirtualKeys, RandomFeatures, TaylorFeatures, EluFeatures, LearnedFeatures)}


def features_from(kind: str, tensors: dict[str, Tensor], d_key: int) -> SoftmaxFeatures:
    """The features that a file describes."""
    check_known("KVBias.load: in this version no kind of features", kind, KINDS)
    made = KINDS[kind]
    if made in (TaylorFeatures, EluFeatures):
        return made(d_key)  # type: ignore[call-arg]
    return made(**tensors)  # type: ignore[arg-type]


def same_features(a: SoftmaxFeatures, b: SoftmaxFeatures) -> bool:
    """Whether two biases' features are the same functions, so that their b_KV and b_D may be added."""
    return a.kind == b.kind and all(
        x.shape == y.shape and torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True)
    )
