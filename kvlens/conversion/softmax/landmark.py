"""method="landmark": r of the prompt's keys per head, with fitted weights and values.

For each layer, on the queries of the reference text: choose keys, allot budgets, fit weights, fit values. This takes no
gradients and no forward passes beyond those over the prompt and the reference text; :mod:`kvlens.ops.landmarks` has the
mathematics.

Source: choosing a subset of the keys and fitting weights and then values in closed form on reference queries is Attention
Matching (Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284). New in kvlens: the fit of the values accounts for the error that the
weights leave in the normalizer, so that it minimizes the error of the output itself; greedy budgets over heads by that error
or by its effect on the logits; polishing through the whole model; and the result is a KV bias that can be added, subtracted and
reduced. Fitted weights are never negative; those of a difference of biases have either sign.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.softmax.few_keys import FewKeys, LayerKeys, assembled, with_own_values, with_values
from kvlens.conversion.softmax.logit_effects import logit_metrics
from kvlens.conversion.softmax.polish import Objective, polish
from kvlens.conversion.softmax.prompt_pass import attention_parts, continued
from kvlens.conversion.softmax.settings import MOST_ASKED
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.kv_bias import KVBias
from kvlens.ops.landmarks import Chosen, Criterion, Queries
from kvlens.ops.landmarks.budgets import greedy_budgets
from kvlens.ops.landmarks.choice import choose_among
from kvlens.ops.landmarks.weights import fit_values, fit_weights

LONGEST_PATH = 4
"""A head gets at most this many times the average number of keys, or up to 64 keys if that is more."""


@checked
@dataclass(frozen=True, kw_only=True)
class Landmark(FewKeys):
    """A few of the prompt's keys per key-value head, with fitted weights and values.

    >>> Landmark(n_keys=32, budget="greedy").to_json()["budget"]
    'greedy'
    >>> Landmark(n_kes=32)
    Traceback (most recent call last):
    kvlens.errors.WrongArguments: Landmark: no argument is called 'n_kes'; did you mean 'n_keys'? It takes ...

    ``keys``, ``fitted``, ``layer_by_layer`` and ``objective`` exist for comparisons; their defaults gave the best results.

    Attributes:
        n_keys: keys per key-value head, at most one per token of the prompt; ``n_features`` is accepted as shorthand.
        ratio: the number of keys as a fraction of the prompt's tokens, instead of ``n_keys``.
        budget: "equal": the same number for every head; "greedy": that number on average, given to the heads where it removes
            most error of their outputs after W_O; "logits": likewise, with errors (also those by which keys are chosen)
            weighted by their effect on the logits (:mod:`~kvlens.conversion.softmax.logit_effects`; one backward pass over at
            most 32 reference texts). The error is 0.30 to 0.42 times that of "greedy" on docs-gpt2, 0.96 to 1 on stories260K.
        polish_steps: number of gradient steps after the fit. On docs-gpt2, 200 of them leave 0.63 times the error of
            ``budget="logits"``, and 0.22 times that of "greedy" without polishing.
        texts_per_step: number of reference texts per gradient step.
        objective: objective of polishing: "logits" for the squared relative error of the logits, or "kl" for the KL divergence
            of the next-token distribution.
        keys: criterion by which keys are chosen: the "output" of the head, its "normalizer", or a key's attention "mass".
        fitted: False keeps weight 1 and the key's own value (``fit=False`` as shorthand).
        layer_by_layer: fit each layer on the queries that the layers below, already converted, produce.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the fit reads the reference text.

    Source: based on Attention Matching (Zweiger et al. 2026); see :mod:`kvlens.ops.landmarks` for what kvlens adds.
    """

    name: ClassVar[str] = "landmark"
    shorthand: ClassVar[Mapping[str, str]] = {**FewKeys.shorthand, "fit": "fitted"}
    fits_on_text: ClassVar[bool] = True

    budget: Literal["equal", "greedy", "logits"] = "equal"
    polish_steps: Annotated[int, Within(0, MOST_ASKED)] = 0
    texts_per_step: Annotated[int, Within(1, MOST_ASKED)] = 16
    objective: Objective = "logits"
    keys: Criterion = "output"
    fitted: bool = True
    layer_by_layer: bool = False

    def fit(self, teacher: Teacher) -> KVBias:
        bias = _Landmarks(teacher, self).fit()
        if not self.polish_steps:
            return bias
        with teacher.timed("polish"):
            how = dict(steps=self.polish_steps, texts_per_step=self.texts_per_step)
            return polish(teacher, bias, **how, objective=self.objective)


class _Landmarks:
    """One conversion, with the data that its steps share."""

    def __init__(self, teacher: Teacher, options: Landmark):
        self.teacher, self.options = teacher, options
        self.wanted = torch.tensor([options.keys_kept(int(n)) for n in teacher.lengths])
        longest = int(self.wanted.max())
        self.path = longest if options.budget == "equal" else longest_path(longest, teacher.exact.bias.d_phi)

    def fit(self) -> KVBias:
        """The fitted bias of this prompt alone, with a batch axis."""
        queries = self.teacher.read(self.teacher.whole, self.teacher.seen)
        metrics = logit_metrics(self.teacher) if self.options.budget == "logits" else output_metrics(self.teacher)
        with torch.no_grad():
            return self._fit_to(queries, metrics)

    def _fit_to(self, queries: list[Queries], metrics: list[Tensor]) -> KVBias:
        chosen = [self._chosen(layer, each, metrics) for layer, each in enumerate(queries)]
        budgets = self._budgets(chosen)
        if self.options.layer_by_layer:
            return assembled(self.teacher.exact, self._fit_layer_by_layer(budgets, metrics))
        every = zip(range(len(queries)), queries, chosen, budgets, strict=True)
        return assembled(self.teacher.exact, [self._fit(*each) for each in every])

    def _chosen(self, layer: int, queries: Queries, metrics: list[Tensor]) -> Chosen:
        prompt = self.teacher.keys(layer)
        return choose_among(queries, prompt, root_of(metrics[layer]), self.path, self.options.keys)

    def _budgets(self, chosen: list[Chosen]) -> Int[Tensor, "layer batch kv_head"]:
        if self.options.budget == "equal":
            return self.wanted[None, :, None].expand(len(chosen), -1, self.teacher.n_kv_heads).to(chosen[0].gain.device)
        return budgets_by_gain([each.gain for each in chosen], self.wanted)

    def _fit(self, layer: int, queries: Queries, chosen: Chosen, budgets: Tensor) -> LayerKeys:
        prompt, counts = self.teacher.keys(layer), budgets.flatten()
        r = max(1, int(counts.max()))
        chosen = chosen.first(r)
        index = chosen.keys
        active = torch.arange(r, device=index.device) < counts[:, None]
        if not self.options.fitted:
            return with_own_values(prompt, index, active)
        weights = fit_weights(chosen, active)
        return with_values(prompt, index, weights, fit_values(queries, prompt, index, weights))

    def _fit_layer_by_layer(self, budgets: Tensor, metrics: list[Tensor]) -> list[LayerKeys]:
        """Each layer on the queries that the layers below, already converted, produce."""
        layers: list[LayerKeys] = []
        for layer in range(self.teacher.n_layers):
            so_far = continued(self.teacher.old, assembled(self.teacher.exact, layers))
            queries = self.teacher.read(so_far, self.teacher.seen, range(layer, layer + 1))[0]
            layers.append(self._fit(layer, queries, self._chosen(layer, queries, metrics), budgets[layer]))
        return layers


def output_metrics(teacher: Teacher) -> list[Float[Tensor, "batch kv_head d_head d_head"]]:
    """W_O W_O^T of each layer, averaged over the heads of a group: output errors are measured after W_O."""
    batch, kv_heads = len(teacher.lengths), teacher.n_kv_heads
    of_layers = [part.output_weights().double() for part in attention_parts(teacher.model)]
    return [(w @ w.mT).unflatten(0, (kv_heads, -1)).mean(dim=1).expand(batch, -1, -1, -1) for w in of_layers]


def root_of(metric: Float[Tensor, "*of d d"]) -> Float[Tensor, "*of d d"]:
    """R with R R^T = metric."""
    size, axes = torch.linalg.eigh(metric)
    return axes * size.clamp(min=0).sqrt()[..., None, :]


def longest_path(longest: int, n_keys: int) -> int:
    """The most keys that a head may get if ``longest`` is the average."""
    return min(n_keys, max(LONGEST_PATH * longest, 64))


def budgets_by_gain(gains: list[Tensor], wanted: Int[Tensor, " batch"]) -> Int[Tensor, "layer batch kv_head"]:
    """Greedy budgets from the output error that each layer's keys remove, [batch x kv_head, key]."""
    gain = torch.stack([rearrange(each, "(b g) r -> b g r", b=len(wanted)) for each in gains])
    return greedy_budgets(gain, wanted.to(gain.device) * gain.shape[0] * gain.shape[2])
