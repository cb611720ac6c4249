"""method="attention_matching": keys, weights and values that match the prompt's attention (Zweiger et al. 2026)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.checks import checked
from kvlens.conversion.softmax.few_keys import FewKeys, LayerKeys, assembled, with_values
from kvlens.conversion.softmax.landmark import chosen_keys
from kvlens.conversion.softmax.logit_effects import logit_metrics
from kvlens.conversion.softmax.prompt_pass import continued
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.kv_bias import KVBias
from kvlens.ops.key_scores import MatchedBy, match_among, match_mass, match_output
from kvlens.ops.landmarks import Queries


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
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the fit reads the reference text ("prompt" is the
            authors' repeat-prefill; the model's own continuations replace their self-study).

    Source: Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284, and its authors' code; weights by exact non-negative least squares.
    """

    name: ClassVar[str] = "attention_matching"
    fits_on_text: ClassVar[bool] = True

    keys: MatchedBy = "pursuit"
    budget: Literal["equal", "logits"] = "equal"
    on_policy: bool = False

    @torch.no_grad()
    def fit(self, teacher: Teacher) -> KVBias:
        wanted = torch.tensor([self.keys_kept(int(n)) for n in teacher.lengths], device=teacher.exact.bias.b_D.device)
        queries = teacher.read(teacher.whole, teacher.seen)
        budgets = self._budgets(teacher, queries, wanted)
        layers: list[LayerKeys] = []
        for layer in range(teacher.n_layers):
            own = queries[layer]
            if self.on_policy and layer:
                so_far = continued(teacher.old, assembled(teacher.exact, layers))
                own = teacher.read(so_far, teacher.seen, range(layer, layer + 1))[0]
            layers.append(self._layer(teacher, layer, own, budgets[layer].flatten()))
        return assembled(teacher.exact, layers)

    def _layer(self, teacher: Teacher, layer: int, queries: Queries, counts: Int[Tensor, " cell"]) -> LayerKeys:
        prompt = teacher.keys(layer)
        matched = match_among(queries, prompt, max(1, int(counts.max())), self.keys)
        index = matched.keys
        active = torch.arange(index.shape[1], device=index.device) < counts[:, None]
        weights = match_mass(matched, active)
        return with_values(prompt, index, weights, weights[..., None] * match_output(queries, prompt, index, weights))

    def _budgets(
        self, teacher: Teacher, queries: list[Queries], wanted: Int[Tensor, " batch"]
    ) -> Int[Tensor, "layer batch kv_head"]:
        if self.budget == "equal":
            return wanted[None, :, None].expand(teacher.n_layers, -1, teacher.n_kv_heads)
        return chosen_keys(teacher, queries, logit_metrics(teacher), wanted, equal=False)[1]
