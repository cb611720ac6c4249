"""Features that are not keys: method="random", "taylor", "elu_plus_one" and "learned" (ICLAA in ICLCA sec. 5 and 6.4).

    b_KV = sum_j phi(k_j) v_j^T        b_D = sum_j phi(k_j)

as for linear attention, on one log-scale per head. Softmax scores of real models reach 100. An affordable number of random
features cannot represent them (they are measured to be little better than leaving the prompt out), and a second-order
polynomial is worse than leaving it out: it is accurate only for scores well below 1, which few heads of trained models have.
Features trained on the prompt can represent them, at the cost of the training. They have one of three kernels:

| kernel | phi(q) | phi(k) | source |
|---|---|---|---|
| "split" | exp(W_q q + a_q) | softmax(W_k k + a_k) | kvlens' own: two maps |
| "phi_mlp" | exp(W q + a) | exp(W k + a) | ICLCA's slides: phi_mlp(x) = [exp(w_i x + b_i)], one map for both |
| "hedgehog" | [exp(W q + a), exp(-W q + a)] | the same of k | Hedgehog, Zhang et al. 2024, with one log-scale a per head |

All heads are trained at once. The loss is the squared error of the heads' outputs on the reference queries, relative to the
square of the outputs, so an error of phi(q).phi(k) matters as much as the attention to that key.

The initial features of "split" approximate exp(q.k / scale), with some of the prompt's keys c_r as centers over which each key
is distributed: W_q = c_r / scale, and W_k, a_k such that phi_r(k) decreases with |k - c_r|^2. Training from random directions
fails: scores of real models reach 100, features that are off by e^100 have no usable gradient, and the final error is several
times that of leaving the prompt out. On stories260K (128 tokens, 64 features) the error of the logits is 10.2 % with the prompt
left out, 3.4 % at the start of training and 0.73 % after it. A map for both cannot start so: those start as random features,
W ~ N(0, I / scale), with an offset that takes the place of |q|^2 and |k|^2 by their means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from kvlens.arguments import MOST_ASKED
from kvlens.checks import Within, checked
from kvlens.conversion.gradients import descend
from kvlens.conversion.method import MEASURING, READING, SAMPLING, Approximation, Teacher, needs_plain_scores
from kvlens.conversion.prompt_pass import ConvertedExactly
from kvlens.errors import KVLensError
from kvlens.kv_bias import EluFeatures, Features, KVBias, LearnedFeatures, RandomFeatures, SoftmaxFeatures, TaylorFeatures
from kvlens.model.protocol import KVModel
from kvlens.ops.feature_maps import draw_projections
from kvlens.ops.softmax_features import elu_log_features, random_log_features, taylor_features

STEPS, LEARNING_RATE, ROWS = 300, 3e-2, 256
SHARPNESS = 5.0
"""Initially a key is distributed over centers by exp(-sharpness |k - c_r|^2 / (2 scale)); 5 to 100 differ little."""
FeatureKernel = Literal["split", "phi_mlp", "hedgehog"]


class FreeFeatures(Approximation):
    """A method whose features are not keys: for models that use plain scores exp(q.k)."""

    def check_model(self, model: KVModel) -> None:
        needs_plain_scores(model, self.name)


@checked
@dataclass(frozen=True, kw_only=True)
class RandomProjections(FreeFeatures):
    """Positive random features (FAVOR+, Choromanski et al. 2021); one draw per layer and key-value head. For comparison.

    Attributes:
        n_features: number of features per key-value head.
        random_feature_kind: "orthogonal" (in blocks of d_head), or "iid".
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; to measure errors alone.

    Source: ICLAA, algorithm 2.
    """

    name: ClassVar[str] = "random"

    n_features: Annotated[int, Within(1, MOST_ASKED)]
    random_feature_kind: Literal["orthogonal", "iid"] = "orthogonal"

    def fit(self, teacher: Teacher) -> KVBias:
        keys, generator = teacher.keys(0).keys, torch.Generator().manual_seed(self.seed)
        sizes = keys.shape[1], self.n_features, keys.shape[-1], self.random_feature_kind
        projection = torch.stack([draw_projections(*sizes, generator) for _ in range(teacher.n_layers)]).to(keys)
        logs = (random_log_features(_keys(teacher, i), w, _scale(teacher, i)) for i, w in enumerate(projection))
        return _summed(teacher.exact, [_scaled(teacher.exact, each) for each in logs], [RandomFeatures(w) for w in projection])


TRAINING_FEATURES = "training features"


@checked
@dataclass(frozen=True, kw_only=True)
class Learned(FreeFeatures):
    """Features trained on the reference queries and the prompt's keys.

    Attributes:
        n_features: number of features per key-value head.
        kernel: "split", kvlens' own, with one map for queries and one for keys; "phi_mlp", that of ICLCA's slides, with one map
            for both; "hedgehog", whose features come in pairs of opposite signs.
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; trained on the text.

    Source: ICLCA's slides ("various linearization methods"); Hedgehog, Zhang et al. 2024.
    """

    name: ClassVar[str] = "learned"
    fits_on_text: ClassVar[bool] = True

    n_features: Annotated[int, Within(1, MOST_ASKED)]
    kernel: FeatureKernel = "split"

    def __post_init__(self) -> None:
        if self.kernel == "hedgehog" and self.n_features % 2:
            raise KVLensError(
                f"learned: kernel='hedgehog' has features in pairs, so n_features must be even, got {self.n_features}"
            )

    def steps(self) -> dict[str, float]:
        """See :meth:`Approximation.steps`."""
        return {SAMPLING: 20.0, READING: 15.0, TRAINING_FEATURES: 60.0, MEASURING: 5.0}

    def fit(self, teacher: Teacher) -> KVBias:
        features, log_keys = train_features(teacher, self.n_features, self.kernel)
        of_layers = [features.map(lambda x, layer=layer: x[layer]) for layer in range(teacher.n_layers)]  # type: ignore[misc]
        return _summed(teacher.exact, [_scaled(teacher.exact, logs) for logs in log_keys], of_layers)


@checked
@dataclass(frozen=True, kw_only=True)
class EluKernel(FreeFeatures):
    """phi(x) = elu(x / sqrt(scale)) + 1, the kernel of linear attention, which grows linearly, not as exp(q.k). For comparison.

    Attributes:
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; to measure errors alone.

    Source: Katharopoulos et al. 2020, which ICLCA sec. 8 names among "more sophisticated kernels".
    """

    name: ClassVar[str] = "elu_plus_one"

    def fit(self, teacher: Teacher) -> KVBias:
        logs = (elu_log_features(_keys(teacher, layer), _scale(teacher, layer)) for layer in range(teacher.n_layers))
        of_layers = [_scaled(teacher.exact, each) for each in logs]
        return _summed(teacher.exact, of_layers, [EluFeatures(teacher.keys(0).keys.shape[-1])] * teacher.n_layers)


@checked
@dataclass(frozen=True, kw_only=True)
class TaylorPolynomial(FreeFeatures):
    """The second-order Taylor polynomial, with error |q.k / scale|^3 / 6, for scores below 1. For comparison.

    It approximates exp(10) = 22,026 by 61; the normalizer is then equally wrong, and the output worse than without the prompt.

    Attributes:
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; to measure errors alone.
    """

    name: ClassVar[str] = "taylor"

    def fit(self, teacher: Teacher) -> KVBias:
        of_layers = []
        for layer in range(teacher.n_layers):
            phi = taylor_features(_keys(teacher, layer), _scale(teacher, layer))
            sizes, top = _scaled(teacher.exact, phi.log_scale[..., None])
            of_layers.append((phi.features * sizes, top))
        return _summed(teacher.exact, of_layers, [TaylorFeatures(teacher.keys(0).keys.shape[-1])] * teacher.n_layers)


def _summed(exact: ConvertedExactly, of_layers: Sequence[tuple[Tensor, Tensor]], features: Sequence[SoftmaxFeatures]) -> KVBias:
    """The bias of phi(k) [batch, key, kv_head, r], its log-scale [batch, kv_head] and the features, given for each layer."""
    parts = []
    for (phi, log_scale), of_layer, keys in zip(of_layers, features, exact.bias.attention, strict=True):
        b_kv = torch.einsum("bjgr,bgjd->bgrd", phi, keys.b_kv)
        parts.append(Features(b_kv, phi.sum(dim=1), log_scale, of_layer))
    return exact.bias.with_attention(parts)


def _scaled(exact: ConvertedExactly, log_phi: Float[Tensor, "batch key kv_head r"]) -> tuple[Tensor, Tensor]:
    """Features that are given as logarithms, 0 at padding, and the log-scale at which the largest of a head is 1."""
    if exact.real is not None:
        log_phi = log_phi.masked_fill(~exact.real[:, :, None, None], -torch.inf)
    top = log_phi.amax(dim=(1, 3))
    return (log_phi - top[:, None, :, None]).exp(), top


def _keys(teacher: Teacher, layer: int) -> Float[Tensor, "batch key kv_head d_key"]:
    return teacher.keys(layer).keys.transpose(1, 2)


def _scale(teacher: Teacher, layer: int) -> float:
    return teacher.keys(layer).rule.scale


@dataclass(frozen=True, eq=False)
class Attended:
    """The training targets: queries, their attention outputs and normalizers, and the prompt's keys and values."""

    q: Float[Tensor, "layer kv_head batch row d_key"]
    z: Float[Tensor, "layer kv_head batch row d_head"]
    log_n: Float[Tensor, "layer kv_head batch row"]
    keys: Float[Tensor, "layer kv_head batch key d_key"]
    values: Float[Tensor, "layer kv_head batch key d_head"]
    on: Float[Tensor, "batch key"]

    @classmethod
    def of(cls, teacher: Teacher) -> "Attended":
        exact, queries = teacher.exact, teacher.read(teacher.whole, teacher.seen)
        group = queries[0].q.shape[2] // teacher.n_kv_heads
        q, z = (
            torch.stack([rearrange(getattr(each, x), "b i (g s) d -> g b (i s) d", s=group) for each in queries]) for x in "qz"
        )
        log_n = torch.stack([rearrange(each.log_n, "b i (g s) -> g b (i s)", s=group) for each in queries])
        prompts = [teacher.keys(layer) for layer in range(teacher.n_layers)]
        keys, values = (torch.stack([getattr(p, x).transpose(0, 1) for p in prompts]).to(q) for x in ("keys", "values"))
        on = torch.ones(keys.shape[2:4]).to(q) if exact.real is None else exact.real.to(q)
        return cls(q, z, log_n, keys, values, on)

    def some(self, rows: Tensor) -> "Attended":
        """Some of the queries."""
        q, z, log_n = (x[:, :, :, rows.to(x.device)].clone() for x in (self.q, self.z, self.log_n))
        return replace(self, q=q, z=z, log_n=log_n)


@dataclass(frozen=True, eq=False)
class Maps:
    """Both maps, and whether each key's features add up to 1."""

    queries: LearnedFeatures
    keys: LearnedFeatures
    normalized: bool

    @classmethod
    def of(cls, kernel: FeatureKernel, free: Sequence[Tensor]) -> "Maps":
        """The maps of what is trained."""
        if kernel == "split":
            return cls(LearnedFeatures(*free[:2]), LearnedFeatures(*free[2:]), True)
        w, a = free
        if kernel == "hedgehog":
            w, a = torch.cat([w, -w], dim=-2), a.expand(*w.shape[:-2], 2 * w.shape[-2])
        return cls(LearnedFeatures(w, a), LearnedFeatures(w, a), False)

    def log_keys(self, keys: Tensor) -> Float[Tensor, "layer kv_head batch key m"]:
        """The logarithms of the features of keys."""
        logs = keys @ self.keys.weight[:, :, None].mT + self.keys.offset[:, :, None, None]
        return logs.log_softmax(dim=-1) if self.normalized else logs


def train_features(
    teacher: Teacher, m: int, kernel: FeatureKernel
) -> tuple[LearnedFeatures, Float[Tensor, "layer batch key kv_head m"]]:
    """``m`` features of queries, trained on the texts that the teacher has seen, and the logarithms of those of the keys."""
    generator = torch.Generator().manual_seed(teacher.method.seed)
    whole = Attended.of(teacher)
    scale = torch.tensor([teacher.keys(layer).rule.scale for layer in range(teacher.n_layers)]).to(whole.q)[:, None, None, None]
    with torch.inference_mode(False), torch.enable_grad():
        start = _centered(whole, m, scale, generator) if kernel == "split" else _random(whole, m, scale, kernel, generator)
        free = [x.clone().requires_grad_() for x in start]
        losses = descend(
            free,
            lambda rows: _loss(Maps.of(kernel, free), whole.some(rows), scale),
            n_rows=whole.q.shape[3],
            rows_per_step=ROWS,
            steps=STEPS,
            learning_rate=LEARNING_RATE,
            generator=generator,
        )
        for i, _ in enumerate(losses):
            teacher.tell(TRAINING_FEATURES, i / STEPS)
    maps = Maps.of(kernel, [x.detach() for x in free])
    return maps.queries, rearrange(maps.log_keys(whole.keys), "l g b j m -> l b j g m")


def _centered(whole: Attended, m: int, scale: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Where "split" starts."""
    centers, sharp = _centers(whole, m, generator), SHARPNESS / scale
    w_q, w_k, a_k = centers / scale, sharp * centers, -sharp[..., 0] / 2 * centers.square().sum(dim=-1)
    return w_q, torch.zeros_like(a_k), w_k, a_k


def _random(whole: Attended, m: int, scale: Tensor, kernel: FeatureKernel, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Where a map for queries and keys starts: E exp(w.(q + k)) = exp(|q + k|^2 / 2 scale), and m terms of it are summed."""
    rows = m // 2 if kernel == "hedgehog" else m
    w = torch.randn(*whole.q.shape[:2], rows, whole.q.shape[-1], generator=generator).to(whole.q) / scale.sqrt()
    squares = sum(x.square().sum(dim=-1).mean(dim=(2, 3)) for x in (whole.q, whole.keys))
    a = -(squares / scale[..., 0, 0] / 2 + math.log(m))[..., None] / 2
    return w, a if kernel == "hedgehog" else a.repeat(1, 1, rows)


def _centers(whole: Attended, m: int, generator: torch.Generator) -> Float[Tensor, "layer kv_head m d_key"]:
    """``m`` of the prompts' keys, drawn without replacement until all have been used."""
    keys = whole.keys.flatten(2, 3)[:, :, whole.on.flatten() > 0]
    n = keys.shape[2]
    index = torch.cat([torch.randperm(n, generator=generator) for _ in range(-(-m // n))])[:m]
    return keys[:, :, index.to(keys.device)].clone()


def _loss(maps: Maps, some: Attended, scale: Tensor) -> Float[Tensor, ""]:
    """Squared error of the heads' outputs over the outputs' square, mean over heads."""
    log_q = some.q @ maps.queries.weight[:, :, None].mT + maps.queries.offset[:, :, None, None]
    log_k = maps.log_keys(some.keys)
    top_k = 0.0 if maps.normalized else log_k.detach().amax(dim=(-2, -1), keepdim=True)
    top = log_q.detach().amax(dim=-1, keepdim=True)
    product = (log_q - top).exp() @ (log_k - top_k).exp().mT
    top = top + top_k
    on = some.on[:, None]
    log_share = product.clamp(min=torch.finfo(product.dtype).tiny).log() + top - some.log_n[..., None]
    share = log_share.clamp(max=30.0).exp() * on  # a true share is at most 1, so clamping affects only wrong ones
    true = (some.q @ some.keys.mT / scale[..., None] - some.log_n[..., None]).exp() * on
    off = (share - true) @ torch.cat([some.values, torch.ones_like(some.values[..., :1])], dim=-1)
    whole = (1 + off[..., -1:]).clamp(min=1e-6)
    error = (off[..., :-1] - some.z * off[..., -1:]) / whole
    size = some.z.square().sum(dim=-1).mean(dim=-1).clamp(min=1e-12)
    return (error.square().sum(dim=-1).mean(dim=-1) / size).mean()
