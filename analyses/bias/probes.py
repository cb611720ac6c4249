"""What a text's queries read from a softmax prompt, for comparing prompts that have different keys.

A linear model's biases all use the model's own features. A softmax prompt has its own keys, and only what queries read from
them can be compared. The queries are those of a real text; head by head, query q_i reads

    phi(q_i)^T b_KV / n_i  [d_head]        phi(q_i)^T b_D / n_i        n_i: of all that is compared, the same for every bias

which is the prompt's share of the head's output, and of the mass of its normalizer. With one row per query, they replace b_KV
[d_phi, d_head] and b_D [d_phi] of a linear model.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias

from ..layers import stack_layers

Numbers = Callable[[KVBias], tuple[Float[Tensor, "layer head row d_head"], Float[Tensor, "layer head row"]]]
"""Maps a bias to its b_KV and b_D, or to what probes read from them, in float64 on the CPU."""


class Probes(NamedTuple):
    """Queries as a model scores them (shifted, after RoPE), layer by layer, and their positions in the text."""

    queries: list[Float[Tensor, "row head d_head"]]
    positions: Int[Tensor, " row"]


class Reads(NamedTuple):
    """What queries read: exp(log_scale) times ``kv`` and ``d``, whose product may overflow."""

    kv: Float[Tensor, "layer head row d_head"]
    d: Float[Tensor, "layer head row"]
    log_scale: Float[Tensor, "layer head row"]

    @property
    def log_normalizer(self) -> Float[Tensor, "layer head row"]:
        """The logarithm of the part of b_D; NaN where signed weights make it negative."""
        return self.d.log() + self.log_scale

    def over(self, log_n: Float[Tensor, "layer head row"]) -> tuple[Tensor, Tensor]:
        """``kv`` and ``d``, divided by n."""
        factor = (self.log_scale - log_n).exp()
        return self.kv * factor[..., None], self.d * factor


def numbers_stored(bias: KVBias) -> tuple[Tensor, Tensor]:
    """b_KV and b_D themselves, for biases over the model's own features."""
    return bias.b_KV.double().cpu(), bias.b_D.double().cpu()


def numbers_read(model: HookedKVTransformer, probes: Probes, all_of_it: Sequence[KVBias]) -> Numbers:
    """What ``probes`` read from a bias, over the normalizer of ``all_of_it`` together."""
    log_n = torch.stack([reads(model, bias, probes).log_normalizer for bias in all_of_it]).logsumexp(dim=0)
    log_n = torch.where(log_n == -torch.inf, 0.0, log_n)  # a query whose window contains none of them reads 0
    return lambda bias: reads(model, bias, probes).over(log_n)


def probes_of(model: HookedKVTransformer, bias: KVBias, text: Int[Tensor, " pos"]) -> Probes:
    """The queries of ``text`` after the prompt of ``bias``."""
    kept = "hook_q"
    if model.cfg.positional_embedding_type == "rotary":
        kept = "hook_rot_q"
    elif model.cfg.kv_shift is not None and model.cfg.kv_shift.queries:
        kept = "hook_q_shifted"
    names = [f"blocks.{layer}.attn.{kept}" for layer in range(model.cfg.n_layers)]
    with model.kv_bias(bias):
        _, cache = model.run_with_cache(text[None], names_filter=names)
    return Probes([cache[name][0].double().cpu() for name in names], torch.arange(len(text)))


def reads(model: HookedKVTransformer, bias: KVBias, probes: Probes) -> Reads:
    """What each query reads from ``bias``, as if its text followed it, with the model's own scoring."""
    bias = bias.per_query_head().to("cpu").to(torch.float64)
    layers = []
    for layer, block in enumerate(model.blocks):
        one = bias.of_layer(layer)
        b_kv, b_d = one.b_KV[0], one.b_D[0]
        rule, q = block.attn.score_rule(), probes.queries[layer][None]
        phi = one.features.read(0, q, rule, probes.positions[None], one.log_scale, one.b_KV, one.b_D)  # type: ignore
        features = phi.features[0].transpose(0, 1)  # [head, row, d_phi]
        layers.append((features @ b_kv, (features @ b_d[..., None])[..., 0], phi.log_scale[0].T))
    return Reads(*(stack_layers(x) for x in zip(*layers, strict=True)))
