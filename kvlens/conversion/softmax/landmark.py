"""method="landmark": r of the prompt's keys per head, with fitted weights and values.

For each layer, on the queries of the reference text: choose keys, give out budgets, fit weights, fit values. No gradient, no
forward pass beyond the prompt's own and the reference text's; see :mod:`kvlens.ops.landmarks` for the mathematics.

Source: a chosen subset of the keys, with weights and then values fitted in closed form on reference queries, is Attention
Matching (Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284). kvlens' are: the values' fit counts what the weights leave wrong in the
normalizer, so that it is the output's own error that falls; greedy budgets over heads by that error; polishing through the
whole model; and the result, a KV bias, whose weights may have either sign, so that it can be added, subtracted and cut down.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.softmax.method import Approximation
from kvlens.conversion.softmax.polish import Objective, polish
from kvlens.conversion.softmax.prompt_pass import continued
from kvlens.conversion.softmax.settings import MOST_ASKED
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.errors import KVLensError, warn
from kvlens.kv_bias import KVBias, VirtualKeys
from kvlens.ops.landmarks import (
    Chosen,
    Criterion,
    Queries,
    Statistics,
    choose_keys,
    fit_values,
    fit_weights,
    greedy_budgets,
    statistics,
)

LONGEST_PATH = 4
"""A head gets at most so many times the average number of keys, or 64 where that is more and the prompt has as many."""


@checked
@dataclass(frozen=True, kw_only=True)
class Landmark(Approximation):
    """A few of the prompt's keys per key-value head, with fitted weights and values.

    >>> Landmark(n_keys=32, budget="greedy").to_json()["budget"]
    'greedy'
    >>> Landmark(n_kes=32)
    Traceback (most recent call last):
    kvlens.errors.WrongArguments: Landmark: no argument is called 'n_kes'; did you mean 'n_keys'? It takes ...

    ``keys``, ``fitted``, ``layer_by_layer`` and ``objective`` are there for comparisons: their defaults measured best.

    Attributes:
        n_keys: keys per key-value head, at most one per token of the prompt; as shorthand also ``n_features``.
        ratio: the same as a share of the prompt's tokens, in place of ``n_keys``.
        budget: "equal": the same number for every head; "greedy": that number on average, given to the heads where it removes
            most error.
        polish_steps: gradient steps after the fit.
        texts_per_step: how many of the reference texts each of them reads.
        objective: of polishing: "logits", their squared relative error, or "kl", of the next token's distribution.
        keys: by what keys are chosen: the "output" of the head, its "normalizer", or the attention "mass" of a key.
        fitted: False keeps weight 1 and the key's own value (``fit=False`` as shorthand).
        layer_by_layer: fit each layer on the queries that the layers below, already converted, produce.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the fit reads the reference text.

    Source: after Attention Matching (Zweiger et al. 2026); see :mod:`kvlens.ops.landmarks` for what is kvlens' own.
    """

    name: ClassVar[str] = "landmark"
    shorthand: ClassVar[Mapping[str, str]] = {"n_features": "n_keys", "fit": "fitted"}
    fits_on_text: ClassVar[bool] = True

    n_keys: Annotated[int, Within(1, MOST_ASKED)] | None = None
    ratio: Annotated[float, Within(above=0, most=1)] | None = None
    budget: Literal["equal", "greedy"] = "equal"
    polish_steps: Annotated[int, Within(0, MOST_ASKED)] = 0
    texts_per_step: Annotated[int, Within(1, MOST_ASKED)] = 16
    objective: Objective = "logits"
    keys: Criterion = "output"
    fitted: bool = True
    layer_by_layer: bool = False

    def __post_init__(self):
        if (self.n_keys is None) == (self.ratio is None):
            problem = "needs n_keys (or n_features), the keys per key-value head, or ratio, a share of the prompt's keys"
            raise KVLensError(f"Landmark: {problem if self.n_keys is None else 'give n_keys or ratio, not both'}")

    def fit(self, teacher: Teacher) -> KVBias:
        bias = _Landmarks(teacher, self).fit()
        if not self.polish_steps:
            return bias
        with teacher.timed("polish"):
            how = dict(steps=self.polish_steps, texts_per_step=self.texts_per_step)
            return polish(teacher, bias, **how, objective=self.objective)

    def keeps_every_key(self, lengths: Sequence[int]) -> bool:
        """Warns where more keys are asked for than a prompt has."""
        above = [n for n in lengths if self._wanted(n) > n]
        if above:
            warn(
                f"convert_prompt: {self._wanted(above[0])} virtual keys for a prompt of {above[0]} tokens: all {above[0]} are "
                "kept, which is exact"
            )
        return all(self._wanted(n) >= n for n in lengths)

    def keys_kept(self, n_tokens: int) -> int:
        """Keys per key-value head for a prompt of so many tokens, on average; at most one per token."""
        return min(self._wanted(n_tokens), n_tokens)

    def _wanted(self, n_tokens: int) -> int:
        return self.n_keys if self.n_keys is not None else math.ceil(self.ratio * n_tokens)  # type: ignore[operator]


class LayerFit(NamedTuple):
    """The fitted keys of one layer, by prompt and key-value head."""

    keys: Float[Tensor, "batch kv_head r d_head"]
    distance: Int[Tensor, "batch kv_head r"]
    weights: Float[Tensor, "batch kv_head r"]
    values: Float[Tensor, "batch kv_head r d_head"]


class _Landmarks:
    """One conversion: what its steps share."""

    def __init__(self, teacher: Teacher, options: Landmark):
        self.teacher, self.model, self.options = teacher, teacher.model, options
        self.wanted = torch.tensor([options.keys_kept(int(n)) for n in teacher.lengths])
        longest, n_keys = int(self.wanted.max()), teacher.exact.bias.d_phi
        self.path = longest if self.options.budget == "equal" else min(n_keys, max(LONGEST_PATH * longest, 64))

    @torch.no_grad()
    def fit(self) -> KVBias:
        """The fitted bias of this prompt alone, with a batch axis."""
        queries = self.teacher.read(self.teacher.whole, self.teacher.seen)
        sums = [self._statistics(layer, each) for layer, each in enumerate(queries)]
        chosen = [choose_keys(each, self.path, self.options.keys) for each in sums]
        budgets = self._budgets(chosen)
        if self.options.layer_by_layer:
            return self._assembled(self._fit_layer_by_layer(budgets))
        every = zip(range(len(sums)), queries, sums, chosen, budgets, strict=True)
        return self._assembled([self._fit(*each) for each in every])

    def _statistics(self, layer: int, queries: Queries) -> Statistics:
        w_o = self.model.blocks[layer].attn.W_O.to(queries.z.dtype)
        metric = (w_o @ w_o.mT).unflatten(0, (self.model.cfg.n_kv_heads, -1)).mean(dim=1)
        size, axes = torch.linalg.eigh(metric)
        return statistics(queries, self.teacher.keys(layer), axes * size.clamp(min=0).sqrt()[:, None, :])

    def _budgets(self, chosen: list[Chosen]) -> Int[Tensor, "layer batch kv_head"]:
        batch = len(self.wanted)
        gain = torch.stack([rearrange(each.gain, "(b g) r -> b g r", b=batch) for each in chosen])
        wanted = self.wanted.to(gain.device)
        if self.options.budget == "equal":
            return wanted[None, :, None].expand(gain.shape[:3])
        return greedy_budgets(gain, wanted * gain.shape[0] * gain.shape[2])

    def _fit(self, layer: int, queries: Queries, sums: Statistics, chosen: Chosen, budgets: Tensor) -> LayerFit:
        prompt, counts = self.teacher.keys(layer), budgets.flatten()
        r = max(1, int(counts.max()))
        index = chosen.keys[:, :r]
        active = torch.arange(r, device=index.device) < counts[:, None]
        keys, distance, values = prompt.keys.flatten(0, 1), prompt.distance.flatten(0, 1), prompt.values.flatten(0, 1)
        rows = index[..., None].expand(-1, -1, keys.shape[-1])
        if self.options.fitted:
            weights = fit_weights(sums, index, active)
            fitted = fit_values(queries, prompt, index, weights)
        else:
            weights = active.to(sums.gram)
            fitted = weights[..., None] * values.gather(1, rows)
        kept = (keys.gather(1, rows), distance.gather(1, index), weights.to(keys), fitted.to(keys))
        return LayerFit(*(t.unflatten(0, prompt.keys.shape[:2]) for t in kept))

    def _fit_layer_by_layer(self, budgets: Tensor) -> list[LayerFit]:
        """Each layer on the queries that the layers below, already converted, produce."""
        layers: list[LayerFit] = []
        for layer in range(self.model.cfg.n_layers):
            so_far = continued(self.teacher.old, self._assembled(layers))
            queries = self.teacher.read(so_far, self.teacher.seen, range(layer, layer + 1))[0]
            sums = self._statistics(layer, queries)
            layers.append(self._fit(layer, queries, sums, choose_keys(sums, self.path, self.options.keys), budgets[layer]))
        return layers

    def _assembled(self, layers: list[LayerFit]) -> KVBias:
        """The bias of the fitted layers; layers above them keep all their keys."""
        exact = self.teacher.exact.bias
        assert isinstance(exact.features, VirtualKeys)
        r = max([each.weights.shape[-1] for each in layers] + ([exact.d_phi] if len(layers) < exact.n_layers else []))
        keys, distance, weights, values = [], [], [], []
        for layer in range(exact.n_layers):
            if layer < len(layers):
                each = layers[layer]
            else:
                features = exact.features
                each = LayerFit(features.keys[layer], features.distance[layer], exact.b_D[layer], exact.b_KV[layer])
            missing = r - each.weights.shape[-1]
            keys.append(torch.cat([each.keys, each.keys[..., :1, :].expand(-1, -1, missing, -1)], dim=-2))
            distance.append(torch.cat([each.distance, each.distance[..., :1].expand(-1, -1, missing)], dim=-1))
            weights.append(torch.nn.functional.pad(each.weights, (0, missing)))
            values.append(torch.nn.functional.pad(each.values, (0, 0, 0, missing)))
        return replace(
            exact,
            b_KV=torch.stack(values),
            b_D=torch.stack(weights),
            features=VirtualKeys(torch.stack(keys), torch.stack(distance)),
        )
