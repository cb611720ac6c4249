"""A few keys of the prompt per head, with fitted weights and values: method="landmark" and "attention_matching".

For each layer, on the queries of the reference text, "landmark" chooses keys, allots budgets, fits weights and values, with
no forward passes beyond those over the prompt and that text; :mod:`kvlens.ops.pursuit` and :mod:`kvlens.ops.landmarks` have
the mathematics. :class:`FewKeys` is the base of these methods, and of those that keep keys as they are
(:mod:`kvlens.conversion.kvzip`).

Source: choosing a subset of the keys and fitting weights and then values in closed form on reference queries is Attention
Matching (Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284). New in kvlens: the fit of the values accounts for the error that the
weights leave in the normalizer, so that it minimizes the error of the output itself; budgets of heads by the effect of that
error on the logits; keys that move (:mod:`kvlens.conversion.moved_keys`); polishing through the whole model; and the result
is a KV bias that can be added, subtracted and reduced. Fitted weights are never negative; those of a difference of biases
have either sign.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.arguments import MOST_ASKED
from kvlens.checks import Within, checked
from kvlens.conversion.gradients import POLISHING, TAKING_GRADIENTS, Objective, logit_metrics, polish
from kvlens.conversion.method import MEASURING, READING, SAMPLING, Approximation, Teacher
from kvlens.conversion.moved_keys import fitted_layer
from kvlens.conversion.prompt_pass import ConvertedExactly, continued
from kvlens.errors import KVLensError, warn
from kvlens.kv_bias import KVBias, VirtualKeys
from kvlens.model import attention_parts
from kvlens.ops.attention_matching import MatchedBy, match_among, match_mass, match_output
from kvlens.ops.landmarks import LayerKeys, PromptKeys, Queries
from kvlens.ops.pursuit import Chosen, budgets_by_gain, choose_among, layers_at_once, lazy_paths


@dataclass(frozen=True, kw_only=True)
class FewKeys(Approximation):
    """A method that keeps some of the prompt's keys.

    Attributes:
        n_keys: keys per key-value head, at most one per token of the prompt; ``n_features`` is accepted as shorthand.
        ratio: the number of keys as a fraction of the prompt's tokens, instead of ``n_keys``.
    """

    shorthand: ClassVar[Mapping[str, str]] = {"n_features": "n_keys"}

    n_keys: Annotated[int, Within(1, MOST_ASKED)] | None = None
    ratio: Annotated[float, Within(above=0, most=1)] | None = None

    def __post_init__(self):
        if (self.n_keys is None) == (self.ratio is None):
            problem = "needs n_keys (or n_features), the keys per key-value head, or ratio, a fraction of the prompt's keys"
            both = "give n_keys or ratio, not both"
            raise KVLensError(f"{type(self).__name__}: {problem if self.n_keys is None else both}")

    def keeps_every_key(self, lengths: Sequence[int]) -> bool:
        """Whether every prompt has at most as many keys as requested; warns if one has fewer."""
        above = [n for n in lengths if self._wanted(n) > n]
        if above:
            warn(
                f"convert_prompt: {self._wanted(above[0])} virtual keys for a prompt of {above[0]} tokens: all {above[0]} are "
                "kept, which is exact"
            )
        return all(self._wanted(n) >= n for n in lengths)

    def wanted(self, teacher: Teacher) -> Int[Tensor, " batch"]:
        """How many keys each prompt keeps per key-value head, on average; at most one per token."""
        each = [min(self._wanted(n), n) for n in teacher.lengths.tolist()]
        return torch.tensor(each, device=teacher.exact.bias.device)

    def _wanted(self, n_tokens: int) -> int:
        return self.n_keys if self.n_keys is not None else math.ceil(self.ratio * n_tokens)  # type: ignore[operator]


def with_own_values(prompt: PromptKeys, index: Int[Tensor, "cell r"], active: Bool[Tensor, "cell r"]) -> LayerKeys:
    """Keys of the prompt with weight 1 and their own value. A cell is one key-value head of one prompt."""
    values = prompt.values.flatten(0, 1)
    weights = active.to(values)
    own = weights[..., None] * values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))
    return with_values(prompt, index, weights, own)


def with_values(
    prompt: PromptKeys, index: Int[Tensor, "cell r"], weights: Float[Tensor, "cell r"], values: Float[Tensor, "cell r d_head"]
) -> LayerKeys:
    """Keys of the prompt with fitted weights, and values that are already multiplied by them."""
    keys, distance = prompt.keys.flatten(0, 1), prompt.distance.flatten(0, 1)
    rows = index[..., None].expand(-1, -1, keys.shape[-1])
    kept = (keys.gather(1, rows), distance.gather(1, index), weights.to(keys), values.to(keys))
    return LayerKeys(*(t.unflatten(0, prompt.keys.shape[:2]) for t in kept))


def assembled(exact: ConvertedExactly, layers: Sequence[LayerKeys]) -> KVBias:
    """The bias made of the reduced layers; any layers above them keep all their keys."""
    whole = exact.bias.attention
    parts = [
        replace(part, b_kv=each.values, b_d=each.weights, features=VirtualKeys(each.keys, each.distance))
        for part, each in zip(whole, layers, strict=False)
    ]
    return exact.bias.with_attention([*parts, *whole[len(parts) :]])


CHOOSING, MOVING = "choosing keys", "moving keys"


@checked
@dataclass(frozen=True, kw_only=True)
class Landmark(FewKeys):
    """A few keys per key-value head, which begin as keys of the prompt, with fitted weights and values.

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
            which keys are chosen) weighted by their effect on the logits (:mod:`~kvlens.conversion.gradients`; one
            backward pass over 512 to 1,100 tokens of reference text). A head may get every key, or none. "equal": the same
            number for every head, with errors measured after W_O and no backward pass.
        key_steps: number of gradient steps by which each head's keys leave their places (:mod:`~kvlens.conversion.moved_keys`);
            0 keeps keys of the prompt. 100 leave 0.7 to 0.9 times the error of the logits on small models, and Qwen2.5-Coder
            keeps 73 of 120 answers about documents with a tenth of the keys, in place of 57.
        polish_steps: number of gradient steps through the model after the fit. With a twentieth of the keys, 100 of them on
            "kl" keep 31 of SmolLM2's 48 answers, for 26, and take nearly four times as long as a fit; with a tenth 37, for 36.
        texts_per_step: number of reference texts per gradient step.
        objective: objective of polishing: "logits" for the squared relative error of the logits, or "kl" for the KL divergence
            of the next-token distribution.
        fitted: False keeps the key in its place, with weight 1 and its own value (``fit=False`` as shorthand).
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; the fit reads the text.

    Source: based on Attention Matching (Zweiger et al. 2026); see :mod:`kvlens.ops.landmarks` for what kvlens adds.
    """

    name: ClassVar[str] = "landmark"
    fits_on_text: ClassVar[bool] = True
    shorthand: ClassVar[Mapping[str, str]] = {**FewKeys.shorthand, "fit": "fitted"}

    budget: Literal["logits", "equal"] = "logits"
    key_steps: Annotated[int, Within(0, MOST_ASKED)] = 100
    polish_steps: Annotated[int, Within(0, MOST_ASKED)] = 0
    texts_per_step: Annotated[int, Within(1, MOST_ASKED)] = 4
    objective: Objective = "logits"
    fitted: bool = True

    def __post_init__(self):
        super().__post_init__()
        if not self.fitted:
            object.__setattr__(self, "key_steps", 0)  # so that the record tells no steps that are not made

    def steps(self) -> dict[str, float]:
        """See :meth:`Approximation.steps`; measured on SmolLM2, with a prompt of 925 tokens and a tenth of its keys."""
        steps = {MOVING: 0.26 * self.key_steps, POLISHING: 0.7 * self.polish_steps * self.texts_per_step}
        return {SAMPLING: 20.0, READING: 15.0, TAKING_GRADIENTS: 11.0, CHOOSING: 31.0, **steps, MEASURING: 3.0}

    def fit(self, teacher: Teacher) -> KVBias:
        queries = teacher.read(teacher.whole, teacher.seen)
        metrics = output_metrics(teacher) if self.budget == "equal" else logit_metrics(teacher)
        with torch.no_grad():
            with teacher.timed("keys"):
                teacher.tell(CHOOSING)
                n, n_heads, is_equal = self.wanted(teacher), teacher.n_kv_heads, self.budget == "equal"
                paths = paths_of(teacher, queries, metrics, n, is_equal)
                budgets = n[:, None].expand(len(paths), -1, n_heads) if is_equal else budgets_of(paths, n, n_heads)
                every = enumerate(zip(paths, budgets, strict=True))
                layers = [own_keys(teacher.keys(i), path.keys, counts) for i, (path, counts) in every]
            if self.fitted:
                with teacher.timed(MOVING if self.key_steps else "keys"):
                    for i, (own, metric, layer) in enumerate(zip(queries, metrics, layers, strict=True)):
                        if self.key_steps:
                            teacher.tell(MOVING, i / len(layers))
                        layers[i] = fitted_layer(teacher.keys(i), own, layer, root_of(metric), self.key_steps, self.seed)
            bias = assembled(teacher.exact, layers)
        if not self.polish_steps:
            return bias
        with teacher.timed("polish"):
            how = dict(steps=self.polish_steps, texts_per_step=self.texts_per_step)
            return polish(teacher, bias, queries, **how, objective=self.objective)


def paths_of(
    teacher: Teacher, queries: list[Queries], metrics: list[Tensor], wanted: Int[Tensor, " batch"], equal: bool = False
) -> list[Chosen]:
    """The keys of every head in the order in which they are chosen, layer by layer: as many as it may get if heads get
    ``wanted`` keys on average, or if each gets so many.
    """

    def path(
        layers: Sequence[int], r: int, floor: Tensor | None = None, before: Sequence[Chosen] | None = None
    ) -> list[Chosen]:
        return choose_among([(queries[i], teacher.keys(i), root_of(metrics[i])) for i in layers], r, floor, before)

    n_layers, n_kv_heads, n_keys = len(queries), teacher.n_kv_heads, teacher.exact.bias.d_phi
    if equal:
        return [path([layer], int(wanted.max()))[0] for layer in range(n_layers)]
    return lazy_paths(path, n_layers, n_keys, wanted, n_kv_heads, layers_at_once(queries[0], n_kv_heads, n_keys))


def budgets_of(paths: Sequence[Chosen], wanted: Int[Tensor, " batch"], n_kv_heads: int) -> Int[Tensor, "layer batch kv_head"]:
    """How many keys every head gets where that removes most error, ``wanted`` on average."""
    return budgets_by_gain([each.gain for each in paths], wanted * len(paths) * n_kv_heads)


def own_keys(prompt: PromptKeys, index: Int[Tensor, "cell r"], counts: Int[Tensor, "batch kv_head"]) -> LayerKeys:
    """The first keys of each head's path, with weight 1 and their own values."""
    index = index[:, : max(1, int(counts.max()))]
    real = torch.ones_like(prompt.distance[:, 0], dtype=torch.bool) if prompt.real is None else prompt.real
    real = real.repeat_interleave(prompt.keys.shape[1], dim=0)
    active = torch.arange(index.shape[1], device=index.device) < counts.flatten()[:, None]
    return with_own_values(prompt, index, active & real.gather(1, index))


def output_metrics(teacher: Teacher) -> list[Float[Tensor, "batch kv_head d_head d_head"]]:
    """W_O W_O^T of each layer, averaged over the heads of a group: output errors are measured after W_O."""
    batch, kv_heads = len(teacher.lengths), teacher.n_kv_heads
    of_layers = [part.output_weights().double() for part in attention_parts(teacher.model)]
    return [(w @ w.mT).unflatten(0, (kv_heads, -1)).mean(dim=1).expand(batch, -1, -1, -1) for w in of_layers]


def root_of(metric: Float[Tensor, "*of d d"]) -> Float[Tensor, "*of d d"]:
    """R with R R^T = metric."""
    size, axes = torch.linalg.eigh(metric)
    return axes * size.clamp(min=0).sqrt()[..., None, :]


@checked
@dataclass(frozen=True, kw_only=True)
class AttentionMatching(FewKeys):
    """A few of the prompt's keys, with weights that match the mass of all keys and values that match their output.

    Only attention over the prompt is matched; :class:`Landmark` fits the output over prompt and text.

    Attributes:
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        keys: those with the highest root mean square "attention", or by matching "pursuit" on the mass.
        budget: "equal": the same number for every head; "logits": that number on average, by kvlens' budgets
            (:class:`Landmark`). The authors determine budgets once per model, from the loss as one head's budget changes.
        on_policy: fit each layer on the queries that the layers below, already reduced, produce.
        reference, n_continuations, continuation_length, n_held_out, seed: see :class:`TextOptions`; the fit reads the text
            ("prompt" is the authors' repeat-prefill; the model's own continuations replace their self-study).

    Source: Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284, and its authors' code; weights by exact non-negative least squares.
    """

    name: ClassVar[str] = "attention_matching"
    fits_on_text: ClassVar[bool] = True

    keys: MatchedBy = "pursuit"
    budget: Literal["equal", "logits"] = "equal"
    on_policy: bool = False

    def steps(self) -> dict[str, float]:
        """See :meth:`Approximation.steps`."""
        return {SAMPLING: 20.0, READING: 15.0, TAKING_GRADIENTS: 9.0, CHOOSING: 60.0, MEASURING: 5.0}

    @torch.no_grad()
    def fit(self, teacher: Teacher) -> KVBias:
        queries = teacher.read(teacher.whole, teacher.seen)
        budgets = self._budgets(teacher, queries)
        layers: list[LayerKeys] = []
        for layer in range(teacher.n_layers):
            teacher.tell(CHOOSING, layer / teacher.n_layers)
            own = queries[layer]
            if self.on_policy and layer:
                so_far = continued(teacher.old, assembled(teacher.exact, layers))
                own = teacher.read(so_far, teacher.seen, range(layer, layer + 1))[0]
            layers.append(self.layer(teacher, layer, own, budgets[layer].flatten()))
        return assembled(teacher.exact, layers)

    def layer(self, teacher: Teacher, layer: int, queries: Queries, counts: Int[Tensor, " cell"]) -> LayerKeys:
        """The keys of one layer, given how many each prompt and key-value head keeps."""
        prompt = teacher.keys(layer)
        matched = match_among(queries, prompt, max(1, int(counts.max())), self.keys)
        index = matched.keys
        active = torch.arange(index.shape[1], device=index.device) < counts[:, None]
        weights = match_mass(matched, active)
        return with_values(prompt, index, weights, weights[..., None] * match_output(queries, prompt, index, weights))

    def _budgets(self, teacher: Teacher, queries: list[Queries]) -> Int[Tensor, "layer batch kv_head"]:
        if self.budget == "equal":
            return self.wanted(teacher)[None, :, None].expand(teacher.n_layers, -1, teacher.n_kv_heads)
        paths = paths_of(teacher, queries, logit_metrics(teacher), self.wanted(teacher))
        return budgets_of(paths, self.wanted(teacher), teacher.n_kv_heads)
