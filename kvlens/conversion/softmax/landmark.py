"""method="landmark": r of the prompt's keys per head, with fitted weights and values.

For each layer, on the queries of the reference text: choose keys, allot budgets, fit weights, fit values. This takes no
gradients and no forward passes beyond those over the prompt and the reference text; :mod:`kvlens.ops.landmarks` has the
mathematics.

Source: choosing a subset of the keys and fitting weights and then values in closed form on reference queries is Attention
Matching (Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284). New in kvlens: the fit of the values accounts for the error that the
weights leave in the normalizer, so that it minimizes the error of the output itself; budgets of heads by the effect of that
error on the logits; polishing through the whole model; and the result is a KV bias that can be added, subtracted and
reduced. Fitted weights are never negative; those of a difference of biases have either sign.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.softmax.few_keys import FewKeys, LayerKeys, assembled, with_own_values, with_values
from kvlens.conversion.softmax.logit_effects import logit_metrics
from kvlens.conversion.softmax.polish import Objective, polish
from kvlens.conversion.softmax.prompt_pass import attention_parts
from kvlens.conversion.softmax.settings import MOST_ASKED
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.kv_bias import KVBias
from kvlens.ops.landmarks import Chosen, PromptKeys, Queries, budgets_by_gain, choose_among, fit_values, fit_weights, lazy_paths


@checked
@dataclass(frozen=True, kw_only=True)
class Landmark(FewKeys):
    """A few of the prompt's keys per key-value head, with fitted weights and values.

    >>> Landmark(n_keys=32, budget="equal").to_json()["budget"]
    'equal'
    >>> Landmark(n_kes=32)
    Traceback (most recent call last):
    TypeError: Landmark.__init__() got an unexpected keyword argument 'n_kes'

    ``objective`` and ``fitted`` exist for comparisons; their defaults gave the best results.

    Attributes:
        n_keys: keys per key-value head, at most one per token of the prompt; ``n_features`` is accepted as shorthand.
        ratio: the number of keys as a fraction of the prompt's tokens, instead of ``n_keys``.
        budget: "logits": that number on average, given to the heads where it removes most error, with errors (also those by
            which keys are chosen) weighted by their effect on the logits (:mod:`~kvlens.conversion.softmax.logit_effects`; one
            backward pass over about 512 tokens of reference text). A head may get every key, or none. "equal": the same
            number for every head, with errors measured after W_O and no backward pass.
        polish_steps: number of gradient steps after the fit. On docs-gpt2, 200 of them leave 0.63 times the error of
            ``budget="logits"``.
        texts_per_step: number of reference texts per gradient step.
        objective: objective of polishing: "logits" for the squared relative error of the logits, or "kl" for the KL divergence
            of the next-token distribution.
        fitted: False keeps weight 1 and the key's own value (``fit=False`` as shorthand).
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the fit reads the reference text.

    Source: based on Attention Matching (Zweiger et al. 2026); see :mod:`kvlens.ops.landmarks` for what kvlens adds.
    """

    name: ClassVar[str] = "landmark"
    fits_on_text: ClassVar[bool] = True
    shorthand: ClassVar[Mapping[str, str]] = {**FewKeys.shorthand, "fit": "fitted"}

    budget: Literal["logits", "equal"] = "logits"
    polish_steps: Annotated[int, Within(0, MOST_ASKED)] = 0
    texts_per_step: Annotated[int, Within(1, MOST_ASKED)] = 16
    objective: Objective = "logits"
    fitted: bool = True

    def fit(self, teacher: Teacher) -> KVBias:
        queries = teacher.read(teacher.whole, teacher.seen)
        metrics = output_metrics(teacher) if self.budget == "equal" else logit_metrics(teacher)
        wanted = torch.tensor([self.keys_kept(int(n)) for n in teacher.lengths], device=queries[0].q.device)
        with torch.no_grad():
            with teacher.timed("keys"):
                index, budgets = chosen_keys(teacher, queries, metrics, wanted, self.budget == "equal")
            every = zip(map(teacher.keys, range(teacher.n_layers)), queries, index, budgets, strict=True)
            bias = assembled(teacher.exact, [fitted_keys(*each, fitted=self.fitted) for each in every])
        if not self.polish_steps:
            return bias
        with teacher.timed("polish"):
            how = dict(steps=self.polish_steps, texts_per_step=self.texts_per_step)
            return polish(teacher, bias, **how, objective=self.objective)


def chosen_keys(
    teacher: Teacher, queries: list[Queries], metrics: list[Tensor], wanted: Int[Tensor, " batch"], equal: bool
) -> tuple[list[Int[Tensor, "cell r"]], Int[Tensor, "layer batch kv_head"]]:
    """The path of every head, layer by layer, and how many of its keys it gets: ``wanted`` on average, or each."""

    def path(layer: int, r: int, floor: Tensor | None = None) -> Chosen:
        return choose_among(queries[layer], teacher.keys(layer), root_of(metrics[layer]), r, floor)

    if equal:
        paths = [path(layer, int(wanted.max())) for layer in range(len(queries))]
        return [each.keys for each in paths], wanted[None, :, None].expand(len(paths), -1, teacher.n_kv_heads)
    paths = lazy_paths(path, len(queries), teacher.exact.bias.d_phi, wanted, teacher.n_kv_heads)
    total = wanted * len(paths) * teacher.n_kv_heads
    return [each.keys for each in paths], budgets_by_gain([each.gain for each in paths], total)


def fitted_keys(
    prompt: PromptKeys,
    queries: Queries,
    index: Int[Tensor, "cell r"],
    counts: Int[Tensor, "batch kv_head"],
    fitted: bool = True,
) -> LayerKeys:
    """The first keys of each head's path, with fitted weights and values, or their own; a head that has them all keeps them
    as they are.
    """
    index = index[:, : max(1, int(counts.max()))]
    real = torch.ones_like(prompt.distance[:, 0], dtype=torch.bool) if prompt.real is None else prompt.real
    real = real.repeat_interleave(prompt.keys.shape[1], dim=0)
    active = (torch.arange(index.shape[1], device=index.device) < counts.flatten()[:, None]) & real.gather(1, index)
    own = with_own_values(prompt, index, active)
    if not fitted:
        return own
    weights = fit_weights(queries, prompt, index, active)
    found = with_values(prompt, index, weights, fit_values(queries, prompt, index, weights))
    whole = (active.sum(dim=1) == real.sum(dim=1)).view(counts.shape)[..., None]
    return found._replace(
        weights=torch.where(whole, own.weights, found.weights),
        values=torch.where(whole[..., None], own.values, found.values),
    )


def output_metrics(teacher: Teacher) -> list[Float[Tensor, "batch kv_head d_head d_head"]]:
    """W_O W_O^T of each layer, averaged over the heads of a group: output errors are measured after W_O."""
    batch, kv_heads = len(teacher.lengths), teacher.n_kv_heads
    of_layers = [part.output_weights().double() for part in attention_parts(teacher.model)]
    return [(w @ w.mT).unflatten(0, (kv_heads, -1)).mean(dim=1).expand(batch, -1, -1, -1) for w in of_layers]


def root_of(metric: Float[Tensor, "*of d d"]) -> Float[Tensor, "*of d d"]:
    """R with R R^T = metric."""
    size, axes = torch.linalg.eigh(metric)
    return axes * size.clamp(min=0).sqrt()[..., None, :]
