"""What one layer's text reads from a prompt, taken apart by prompt position, from one pass over [prompt; text].

    z_i = inherited_i + sum_j A_ij v'_j + boundary_i + text_i        A_ij = phi~(q_i) . phi~(k'_j) gamma^{M+i-j} / n_i

A_ij is what the unconverted model pays from text place i to prompt position j. The conversion changes no query, no key and
no normaliser, and b_KV is a sum over the prompt's positions, so inherited_i + sum_j A_ij v'_j is what the converted model
reads from its bias (``hook_z_bias``): no bias is built here. The other terms:

- *inherited*: what a bias that the prompt continued (an attached one, a trained one) still gives; its own tokens are no
  longer told apart;
- *boundary*: what a value shift carries over the end of the prompt: the first ``window`` values of the text hold the prompt's
  last raw values, and every place that attends there reads them. It lies in z_context, not in z_bias. (The key shift carries
  over as well, inside phi, where nothing is a sum: only an ablation can tell its effect.)

With a value shift v'_j = sum_s beta_s v_{j-s} mixes the values of several tokens, and there are two answers to "which
position". ``attended``: the position j that is attended to, with its mixed value. ``source``: the token p whose raw value
it is, with the weight sum_s beta_s A_{i,p+s} over p + s < M; what tokens before the prompt gave to its first values is
then inherited. Both have the same sum.

For softmax attention A is the pattern itself: the exact shares of the prompt's own keys, which ``method="exact"`` keeps and
the other methods approximate.

Source: ICLCA eq. 13 and 19; the boundary, the decay and the two views are kvlens'.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.stream.logit_attribution import final_scale_name
from kvlens import HookedKVTransformer, KVBias

VIEWS = ("attended", "source")


def run_prompt_and_text(model: HookedKVTransformer, prompt: Tensor, text: Tensor, initial: KVBias | None) -> Any:
    """The ActivationCache of one pass over [prompt; text], continuing ``initial`` or what the model holds."""
    names = [f"blocks.{layer}.attn.{name}" for layer in range(model.cfg.n_layers) for name in hooks_to_read(model)]
    tokens = torch.cat([prompt, text])[None]
    with contextlib.nullcontext() if initial is None else model.kv_bias(initial):
        _, cache = model.run_with_cache(
            tokens,
            attention_mask=torch.ones_like(tokens),
            names_filter=[*names, final_scale_name(model)],
            return_type=None,
        )
    return cache


class LayerReads(NamedTuple):
    """One layer's attention from the text to everything before it, in float64.

    ``queries`` hold the normaliser and gamma^{i+1}, ``keys`` gamma^{M-1-j}, so that their product is the pattern. The
    outputs that no prompt position accounts for are there as such; None where the model has no such thing.
    """

    queries: Float[Tensor, "text head d_phi"]
    keys: Float[Tensor, "prompt head d_phi"]
    values: Float[Tensor, "prompt head d_head"]
    z: Float[Tensor, "text head d_head"]
    inherited: Float[Tensor, "text head d_head"] | None
    boundary: Float[Tensor, "text head d_head"] | None

    def at(self, places: list[int]) -> "LayerReads":
        """The same for some places of the text."""
        inherited, boundary = (None if x is None else x[places] for x in (self.inherited, self.boundary))
        return self._replace(queries=self.queries[places], z=self.z[places], inherited=inherited, boundary=boundary)

    def of_prompt(self) -> Float[Tensor, "text head d_head"]:
        """sum_j A_ij v'_j, by way of the state that the prompt leaves."""
        state = torch.einsum("phf,phd->hfd", self.keys, self.values)
        return torch.einsum("thf,hfd->thd", self.queries, state)

    def of_text(self) -> Float[Tensor, "text head d_head"]:
        """What is left of z."""
        before = [x for x in (self.inherited, self.boundary) if x is not None]
        return self.z - self.of_prompt() - sum(before)


def read_layer(model: HookedKVTransformer, cache: Any, layer: int, n_prompt: int, by: str) -> LayerReads:
    """One layer of a run over [prompt; text], as the text reads it.

    Args:
        model: whose run it was.
        cache: its ActivationCache, with the hook points of :func:`hooks_to_read` that fire.
        layer: which.
        n_prompt: M, how many of the places are the prompt's.
        by: ``attended`` or ``source``.
    """
    cfg, at = model.cfg, f"blocks.{layer}.attn."
    of = {name: cache[at + name].double() for name in hooks_to_read(model) if at + name in cache}
    of = {name: x if name == "hook_v_shift_coef" else x[0] for name, x in of.items()}
    group = cfg.n_heads // cfg.n_kv_heads
    coef = of["hook_v_shift_coef"].repeat_interleave(group, dim=0) if "hook_v_shift_coef" in of else None
    window = 0 if coef is None else coef.shape[1] - 1
    if cfg.attention == "softmax":
        queries, keys = _of_pattern(of["hook_pattern"], n_prompt, window)
    else:
        kind = "rot" if cfg.rotates_after else "phi"
        queries, keys = of[f"hook_{kind}_q"][n_prompt:], of[f"hook_{kind}_k"][: n_prompt + window]
        queries, keys = _with_decay(cfg.decay_per_head(), queries, keys.repeat_interleave(group, dim=1), n_prompt)
        n = of.get("hook_normalizer")
        queries = queries / (model.blocks[layer].attn.attn_scale if n is None else n[n_prompt:, :, None])
    reads = LayerReads(
        queries=queries,
        keys=keys[:n_prompt],
        values=of["hook_v" if coef is None else "hook_v_shifted"][:n_prompt].repeat_interleave(group, dim=1),
        z=of["hook_z"][n_prompt:],
        inherited=of["hook_z_bias"][n_prompt:] if "hook_z_bias" in of else None,
        boundary=None,
    )
    if coef is None:
        return reads
    before = of.get("hook_last_v", torch.zeros_like(of["hook_v"][:window]))
    raw = torch.cat([before.expand(window, -1, -1), of["hook_v"][:n_prompt]]).repeat_interleave(group, dim=1)
    reads = reads._replace(boundary=_through_boundary(reads.queries, keys[n_prompt:], raw[n_prompt:], coef))
    return reads if by == "attended" else _by_source(reads, raw, coef)


def hooks_to_read(model: HookedKVTransformer) -> list[str]:
    """What :func:`read_layer` reads of a layer's attention; those of a feature that is off do not fire."""
    kind = "rot" if model.cfg.rotates_after else "phi"
    features = [f"hook_{kind}_q", f"hook_{kind}_k"] if model.cfg.attention == "linear" else ["hook_pattern"]
    return [
        *features,
        "hook_v",
        "hook_v_shifted",
        "hook_v_shift_coef",
        "hook_last_v",
        "hook_normalizer",
        "hook_z",
        "hook_z_bias",
    ]


def _of_pattern(pattern: Float[Tensor, "head query key"], n_prompt: int, window: int) -> tuple[Tensor, Tensor]:
    """Softmax attention as a product: each position of the prompt (and the first ``window`` of the text) is a feature."""
    n_keys = min(n_prompt + window, pattern.shape[-1])
    one_hot = torch.eye(n_keys, dtype=pattern.dtype, device=pattern.device)
    return pattern[:, n_prompt:, :n_keys].transpose(0, 1), one_hot[:, None].expand(-1, len(pattern), -1)


def _with_decay(gamma: Tensor | None, queries: Tensor, keys: Tensor, n_prompt: int) -> tuple[Tensor, Tensor]:
    """gamma^{M+i-j} shared out: gamma^{i+1} to the queries, gamma^{M-1-j} to the keys, [head]."""
    if gamma is None:
        return queries, keys
    gamma = gamma.to(queries)
    passed = torch.arange(1, len(queries) + 1, device=queries.device)[:, None]
    left = n_prompt - 1 - torch.arange(len(keys), device=queries.device)[:, None]
    return queries * (gamma**passed)[..., None], keys * (gamma**left)[..., None]


def _through_boundary(
    queries: Float[Tensor, "text head d_phi"],
    keys: Float[Tensor, "first head d_phi"],
    raw: Float[Tensor, "window head d_head"],
    coef: Float[Tensor, "head taps"],
) -> Float[Tensor, "text head d_head"]:
    """What the text reads of the raw values before it: text value i holds sum_{s>i} beta_s raw_{i-s}, ``raw`` ending at -1."""
    padded = torch.cat([raw, torch.zeros_like(raw)])
    carried = torch.einsum("whds,hs->whd", padded.unfold(0, coef.shape[1], 1), coef.flip(-1))[: len(keys)]
    pattern = torch.einsum("thf,whf->htw", queries, keys).tril()
    return torch.einsum("htw,whd->thd", pattern, carried)


def _by_source(reads: LayerReads, raw: Float[Tensor, "rows head d_head"], coef: Float[Tensor, "head taps"]) -> LayerReads:
    """The same, told by whose raw value it is: token p is read with the key sum_s beta_s k_{p+s}, over p + s in the prompt.

    ``raw`` begins with the ``window`` values before the prompt: what they gave to its first values becomes inherited.
    """
    window = coef.shape[1] - 1
    edge = reads.keys.new_zeros(window, *reads.keys.shape[1:])
    keys = torch.einsum("phfs,hs->phf", torch.cat([edge, reads.keys, edge]).unfold(0, window + 1, 1), coef)
    inherited = reads.inherited
    if inherited is not None:
        weights = torch.einsum("thf,whf->twh", reads.queries, keys[:window])
        inherited = inherited + torch.einsum("twh,whd->thd", weights, raw[:window])
    return reads._replace(keys=keys[window:], values=raw[window:], inherited=inherited)
