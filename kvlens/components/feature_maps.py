"""The feature maps of linear attention: one class per map, listed by name in FEATURE_MAPS.

phi turns a score exp(q.k / attn_scale) into a product phi(q).phi(k), so that a sum over keys can be stored (ICLCA eq. 12). The
pure functions are in :mod:`kvlens.ops.feature_maps`.

**A feature map.** A feature map is one class: its name, its number of features, where RoPE is applied, whether it is positive,
its parameters and their initial values, and phi. The configuration, attention, conversion and file formats read all of this
from the class, and find it by its line in `FEATURE_MAPS`. `FeatureMap` documents each attribute. The same function is applied
to queries and keys. A token's features must not depend on the other tokens in the batch, because a prompt's features are
stored and later combined with those of its continuation.

```python
import torch
from torch import nn

from kvlens.components import FEATURE_MAPS, FeatureMap, per_head


class SquaredReLU(FeatureMap):
    '''phi(x) = relu(g x)^2 + 1e-3, with a learned gain g, initially 1, for each dimension of each key-value head.'''

    kind = "squared_relu"
    positive = True
    rotary_placement = "after"

    def __init__(self, cfg, attn_scale):
        super().__init__(cfg, attn_scale)
        self.gain = nn.Parameter(torch.zeros(cfg.n_kv_heads, cfg.d_head, dtype=cfg.dtype))

    @torch.no_grad()
    def init_weights(self, generator):
        self.gain.fill_(1.0)

    def forward(self, x):
        return (per_head(self.gain, x).to(x.dtype) * x).relu().square() + 1e-3


FEATURE_MAPS[SquaredReLU.kind] = SquaredReLU
```

To add it to kvlens itself, add a line to `FEATURE_MAPS` in `kvlens/components/feature_maps.py` instead, and put mathematics of
more than one line into `kvlens/ops/feature_maps.py`. `tests/components/test_feature_map_classes.py` and `by_the_formula` in
`tests/ops/test_feature_maps.py` list all maps. A program that loads a model with a map of your own imports its module first.
Test one answer computed by hand, and a general property: here, that a converted prompt replaces the prompt exactly.

```python
from kvlens import HookedKVTransformer, HookedKVTransformerConfig, convert_prompt

sizes = dict(n_layers=2, n_heads=4, n_key_value_heads=2, d_model=32, d_head=8, n_ctx=64, d_vocab=20, act_fn="gelu", seed=0)
cfg = HookedKVTransformerConfig(
    **sizes,
    attention="linear",
    feature_map="squared_relu",
    positional_embedding_type="rotary",
    dtype=torch.float64,
    device="cpu",
)
model = HookedKVTransformer(cfg)
phi = model.blocks[0].attn.feature_map
ones = torch.ones(1, 1, 4, 8, dtype=torch.float64)
assert (phi(3 * ones) == 9 + 1e-3).all() and (phi(-3 * ones) == 1e-3).all()

tokens = torch.arange(15)[None]
with model.kv_bias(convert_prompt(model, tokens[0, :9])):
    continued = model(tokens[:, 9:])
expected = model(tokens)[:, 9:]
assert (continued - expected).norm() < 1e-11 * expected.norm()
```
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlens.components.config import AttentionConfig
from kvlens.ops import feature_maps as ops
from kvlens.ops.feature_maps import draw_projections


class FeatureMap(nn.Module, ABC):
    """phi of one layer, the same function for queries and keys.

    To add a map, write a subclass with ``kind``, ``positive`` and ``forward``; everything else has a default. Parameters and
    buffers have one slice per key-value head, are read through :func:`per_head`, and are initialized in :meth:`init_weights`.

    Attributes:
        kind: the name in ``cfg.feature_map`` (not ``name``, which TransformerLens sets on every module).
        positive: whether phi(q).phi(k) > 0 for all q and k. A token then always sees itself, so a normalizer of 0 can only be
            an underflow, which raises an error.
        rotary_placement: RoPE "before" or "after" the map if ``cfg.rotary_placement`` is None. "after" rotates the features,
            which requires d_phi = d_head.
        needs_float64: whether features exceed the range of float32 at ordinary scores; attention is then computed in float64.
    """

    kind: ClassVar[str]
    positive: ClassVar[bool]
    rotary_placement: ClassVar[Literal["before", "after"]] = "before"
    needs_float64: ClassVar[bool] = False

    def __init__(self, cfg: AttentionConfig, attn_scale: float):
        super().__init__()
        self.attn_scale = float(attn_scale)

    @classmethod
    def d_phi(cls, cfg: AttentionConfig) -> int:
        """Features per head of a model with this configuration."""
        return cfg.d_head

    @classmethod
    def check(cls, cfg: AttentionConfig) -> None:
        """Raise KVLensError for a configuration that this map does not support. Called after all other checks."""

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None) -> None:
        """Initialize the parameters and buffers, drawing all random numbers from ``generator``."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_phi"]:
        """phi(x), for queries (``head`` query heads) and for keys (``head`` key-value heads)."""


def per_head(
    weight: Float[Tensor, " kv_head *rest"], x: Float[Tensor, "batch pos head d_head"]
) -> Float[Tensor, " head *rest"]:
    """``weight`` with one slice per head of ``x``: query heads use the slice of their key-value head."""
    return weight if weight.shape[0] == x.shape[2] else weight.repeat_interleave(x.shape[2] // weight.shape[0], dim=0)


class Identity(FeatureMap):
    """phi(x) = x: plain linear attention, RetNet-like with normalizer "none" (ICLCA)."""

    kind = "identity"
    positive = False
    rotary_placement = "after"

    def forward(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_phi"]:
        """x."""
        return x


class EluPlusOne(FeatureMap):
    """phi(x) = elu(x) + 1 (Katharopoulos et al. 2020; ICLCA eq. 12)."""

    kind = "elu_plus_one"
    positive = True
    rotary_placement = "after"

    def forward(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_phi"]:
        """elu(x) + 1."""
        return ops.elu_plus_one(x)


class ReLU(FeatureMap):
    """phi(x) = relu(x) + 1e-3, so that the normalizer stays positive (ICLCA)."""

    kind = "relu"
    positive = True
    rotary_placement = "after"

    def forward(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_phi"]:
        """relu(x) + 1e-3."""
        return ops.relu(x)


class FavorPlus(FeatureMap):
    """phi(x) = exp(w.x' - |x'|^2 / 2) / sqrt(m), x' = x / sqrt(attn_scale), m fixed random w per key-value head (FAVOR+).

    phi(q).phi(k) approximates exp(q.k / attn_scale). ``cfg.n_random_features`` is m (None: 2 d_head) and
    ``cfg.random_feature_kind`` is how the w are drawn; they are a buffer, saved with the model. The exponentials exceed the
    range of float32 at scores of about 150.

    Source: Choromanski et al. 2021; ICLCA assumption 4.4 (1b).
    """

    kind = "random"
    positive = True
    needs_float64 = True
    projection: Tensor

    def __init__(self, cfg: AttentionConfig, attn_scale: float):
        super().__init__(cfg, attn_scale)
        self.draw = cfg.random_feature_kind
        self.register_buffer("projection", torch.zeros(cfg.n_kv_heads, self.d_phi(cfg), cfg.d_head))

    @classmethod
    def d_phi(cls, cfg: AttentionConfig) -> int:
        """m."""
        return cfg.n_random_features or 2 * cfg.d_head

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None) -> None:
        """Draw the projections."""
        n_heads, m, d_head = self.projection.shape
        self.projection.copy_(draw_projections(n_heads, m, d_head, self.draw, generator))

    def forward(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_phi"]:
        """exp(w.x' - |x'|^2 / 2) / sqrt(m)."""
        return ops.random_features(x, per_head(self.projection, x), self.attn_scale)


class Taylor(FeatureMap):
    """phi(x) = [1, x', vec(x' x'^T) / sqrt 2], x' = x / sqrt(attn_scale): exp to second order (Arora et al. 2024).

    phi(q).phi(k) = 1 + s + s^2 / 2 with s = q.k / attn_scale is at least 1/2, but the features themselves may be negative.
    """

    kind = "taylor"
    positive = False

    @classmethod
    def d_phi(cls, cfg: AttentionConfig) -> int:
        """1 + d + d^2."""
        return 1 + cfg.d_head + cfg.d_head**2

    def forward(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_phi"]:
        """[1, x', vec(x' x'^T) / sqrt 2]."""
        return ops.taylor(x, self.attn_scale)


class Hedgehog(FeatureMap):
    """phi(x) = softmax([2Wx, -2Wx]), W learned per key-value head and initialized to the identity (Zhang et al. 2024).

    The smaller features underflow in float32 where 2 W q and 2 W k differ by more than 40.
    """

    kind = "hedgehog"
    positive = True
    needs_float64 = True

    def __init__(self, cfg: AttentionConfig, attn_scale: float):
        super().__init__(cfg, attn_scale)
        self.hedgehog_weight = nn.Parameter(torch.zeros(cfg.n_kv_heads, cfg.d_head, cfg.d_head, dtype=cfg.dtype))

    @classmethod
    def d_phi(cls, cfg: AttentionConfig) -> int:
        """2 d."""
        return 2 * cfg.d_head

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None) -> None:
        """W = identity."""
        self.hedgehog_weight.copy_(torch.eye(self.hedgehog_weight.shape[-1]))

    def forward(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_phi"]:
        """softmax([2Wx, -2Wx])."""
        return ops.hedgehog(x, per_head(self.hedgehog_weight, x))


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    feature_map.kind: feature_map
    for feature_map in (
        Identity,
        EluPlusOne,
        ReLU,
        FavorPlus,
        Taylor,
        Hedgehog,
    )
}
"""The feature maps by their name in ``cfg.feature_map``. A map added here can be used by name."""
