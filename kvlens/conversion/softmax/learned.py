"""Training of learned features, of one of three kernels.

| kernel | phi(q) | phi(k) | source |
|---|---|---|---|
| "split" | exp(W_q q + a_q) | softmax(W_k k + a_k) | kvlens' own: two maps |
| "phi_mlp" | exp(W q + a) | exp(W k + a) | ICLCA's slides: phi_mlp(x) = [exp(w_i x + b_i)], one map for both |
| "hedgehog" | [exp(W q + a), exp(-W q + a)] | the same of k | Hedgehog, Zhang et al. 2024, with one log-scale a per head |

    b_KV = sum_j phi(k_j) v_j^T      b_D = sum_j phi(k_j)

for all heads at once. The loss is the squared error of the heads' outputs on the reference queries, relative to the square of
the outputs, so an error of phi(q).phi(k) matters as much as the attention to that key.

The initial features of "split" approximate exp(q.k / scale), with some of the prompt's keys c_r as centers over which each key
is distributed: W_q = c_r / scale, and W_k, a_k such that phi_r(k) decreases with |k - c_r|^2. Training from random directions
fails: scores of real models reach 100, features that are off by e^100 have no usable gradient, and the final error is several
times that of leaving the prompt out. On stories260K (128 tokens, 64 features) the error of the logits is 10.2 % with the prompt
left out, 3.4 % at the start of training and 0.73 % after it. A map for both cannot start so: those start as random features,
W ~ N(0, I / scale), with an offset that takes the place of |q|^2 and |k|^2 by their means.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from kvlens.conversion.softmax.descent import descend
from kvlens.conversion.softmax.teacher import Teacher

STEPS, LEARNING_RATE, ROWS = 300, 3e-2, 256
SHARPNESS = 5.0
"""Initially a key is distributed over centers by exp(-sharpness |k - c_r|^2 / (2 scale)); 5 to 100 differ little."""


Kernel = Literal["split", "phi_mlp", "hedgehog"]


class FeatureMap(NamedTuple):
    """exp(weight x + offset), for each layer and key-value head."""

    weight: Float[Tensor, "layer kv_head m d_key"]
    offset: Float[Tensor, "layer kv_head m"]


class Attended(NamedTuple):
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
        return self._replace(q=q, z=z, log_n=log_n)


class Trained(NamedTuple):
    """The feature map for queries, and the logarithms of the features of the prompt's keys."""

    queries: FeatureMap
    log_keys: Float[Tensor, "layer batch key kv_head m"]


class Maps(NamedTuple):
    """Both maps, and whether each key's features add up to 1."""

    queries: FeatureMap
    keys: FeatureMap
    normalized: bool

    @classmethod
    def of(cls, kernel: Kernel, free: Sequence[Tensor]) -> "Maps":
        """From what is trained."""
        if kernel == "split":
            w_q, a_q, w_k, a_k = free
            return cls(FeatureMap(w_q, a_q), FeatureMap(w_k, a_k), True)
        w, a = free
        both = FeatureMap(w, a)
        if kernel == "hedgehog":
            both = FeatureMap(torch.cat([w, -w], dim=-2), a.expand(*w.shape[:-2], 2 * w.shape[-2]))
        return cls(both, both, False)

    def log_keys(self, keys: Tensor) -> Float[Tensor, "layer kv_head batch key m"]:
        """The logarithms of the features of keys."""
        logs = keys @ self.keys.weight[:, :, None].mT + self.keys.offset[:, :, None, None]
        return logs.log_softmax(dim=-1) if self.normalized else logs


def train_features(teacher: Teacher, m: int, kernel: Kernel = "split") -> Trained:
    """``m`` features trained on the texts that the teacher has seen."""
    generator = torch.Generator().manual_seed(teacher.options.seed)
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
        progress = tqdm(losses, desc="training features", total=STEPS, disable=not teacher.verbose)
        for loss in progress:
            progress.set_postfix(loss=f"{float(loss):.3g}")
    maps = Maps.of(kernel, [x.detach() for x in free])
    return Trained(maps.queries, rearrange(maps.log_keys(whole.keys), "l g b j m -> l b j g m"))


def _centered(whole: Attended, m: int, scale: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Where "split" starts."""
    centers, sharp = _centers(whole, m, generator), SHARPNESS / scale
    w_q, w_k, a_k = centers / scale, sharp * centers, -sharp[..., 0] / 2 * centers.square().sum(dim=-1)
    return w_q, torch.zeros_like(a_k), w_k, a_k


def _random(whole: Attended, m: int, scale: Tensor, kernel: Kernel, generator: torch.Generator) -> tuple[Tensor, ...]:
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
