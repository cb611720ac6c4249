"""In which order heads are tried: by the exact change of a head's output times the gradient of the score.

    dz = z of the head when it reads the other prompt, less its z, the residual stream and everything else unchanged
    g  = gradient of the score at hook_z

At the whole prompt -sum g.dz ranks what exchanging a head costs; at the prompt without the units, where dz goes the other way,
sum g.dz ranks what a head brings alone. Each is one pass over the text in two rows (three, where there are shift states), and a
backward pass.

These numbers are an order and not a measure: where the answer's probability is near 1 they are a few hundredths of the effect.

Source: attribution patching (Nanda 2023), AtP* (Kramar et al. 2024, arXiv 2403.00745). What differs: what is exchanged is the
prompt that a head reads, not an activation of another pass, so that dz is exact, softmax and normalizer included; and only the
order is used.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVModel
from kvlens.model import head_hooks

from ..bias.interventions import Interventions, intervened
from ..bias.parts import CONVOLUTION_PART, HEAD_PART, Part, has_shift_state, most_heads, of_kv_head
from .answers import Read
from .by_head import HeadExchange
from .verdicts import Outcomes

OTHER, OTHER_SHIFT_STATE = 1, 2
"""Rows behind the bias as it is: one with the other prompt's heads, one with its shift state."""


def head_orders(outcomes: Outcomes, exchange: HeadExchange) -> tuple[list[int], list[int]]:
    """The parts of an exchange, by what exchanging them costs, and by what they bring alone; the most promising first."""
    costs = first_order(outcomes, exchange, at_other=False)
    brings = -first_order(outcomes, exchange, at_other=True)
    return tuple(x.argsort(descending=True, stable=True).tolist() for x in (costs, brings))  # type: ignore[return-value]


def first_order(outcomes: Outcomes, exchange: HeadExchange, *, at_other: bool) -> Float[Tensor, " part"]:
    """-sum g.dz of each part, exchanged for that of the other prompt; ``at_other``: at the other prompt, for that of this."""
    own = exchange.own
    n_rows = 3 if has_shift_state(own) else 2
    here = float(not at_other)
    keep_bias, keep_shift_state = torch.full((2, n_rows, own.n_layers, most_heads(own)), here).to(own.b_KV)
    keep_bias[OTHER] = 1 - here
    keep_shift_state[OTHER_SHIFT_STATE:] = 1 - here
    donor = torch.zeros(n_rows, dtype=torch.long, device=keep_bias.device)
    rows = Interventions(keep_bias, keep_shift_state, donor, exchange.donors)
    changes = _products(outcomes, intervened(own, rows), n_rows)
    return torch.stack([_of_part(part, own, changes[part.layer]) for part in exchange.parts])


def _of_part(part: Part, bias: KVBias, changes: Float[Tensor, "row head"]) -> Float[Tensor, ""]:
    """Of a layer's products those that belong to a part."""
    if part.kind == HEAD_PART:
        return -changes[OTHER, part.head]
    if part.kind == CONVOLUTION_PART:
        return -changes[OTHER_SHIFT_STATE, bias.first_state_head(part.layer) :].sum()
    return -changes[OTHER_SHIFT_STATE, of_kv_head(bias, part.layer, part.head)].sum()


def stream_point(model: KVModel, layer: int) -> str:
    """The hook point of the residual stream before a layer."""
    return f"blocks.{layer}.{'hook_resid_pre' if isinstance(model, HookedKVTransformer) else 'hook_in'}"


def _products(outcomes: Outcomes, biases: KVBias, n_rows: int) -> list[Float[Tensor, "row head"]]:
    """g.dz of each layer's heads, summed over the text: rows whose residual stream is everywhere that of the first."""
    model, z = outcomes.question.model, {}
    layers = range(model.cfg.n_layers)

    def alike(x: Tensor, hook: Any) -> Tensor:
        first = x[:1] if x.requires_grad else x[:1].detach().requires_grad_()
        return torch.cat([first, first.detach().expand(n_rows - 1, *x.shape[1:])])

    def keep(x: Tensor, hook: Any, name: str) -> Tensor:
        z[name] = x
        return x  # where a hook is shown heads in a shape of their own, only what it returns is read on

    of_layer = [head_hooks(model, layer, "hook_z") for layer in layers]
    hooks: list[Any] = [(stream_point(model, layer), alike) for layer in layers]
    hooks += [(name, partial(keep, name=name)) for of in of_layer for name in of]
    with torch.enable_grad():
        with model.hooks(fwd_hooks=hooks):
            score = _score(outcomes, outcomes.question.reads_under(biases))
        gradients = dict(zip(z, torch.autograd.grad(score, list(z.values()), allow_unused=True), strict=True))
    found = []
    for of in of_layer:
        parts = [torch.zeros(n_rows, 0, dtype=torch.float64)]
        for name, n_heads in of.items():
            x, g = z[name].detach(), gradients[name]
            if g is None:  # behind the last position that is read
                g = torch.zeros_like(x)
            by_head = ((x - x[:1]) * g[:1]).double().reshape(n_rows, x.shape[1], n_heads, -1)
            parts.append(by_head.sum(dim=(1, 3)).cpu())
        found.append(torch.cat(parts, dim=1))
    return found


def _score(outcomes: Outcomes, read: Read) -> Float[Tensor, ""]:
    """Of the first row: log p of the answer, less that of a reference that is read with it."""
    answer, reference = outcomes.question.answer, outcomes.reference
    log_p = read(torch.cat([outcomes.question.text, answer[:-1]]), len(answer))[0].double().log_softmax(dim=-1)
    score = log_p.gather(-1, answer.to(log_p.device)[:, None]).sum()
    return score if reference is None or len(reference) > 1 else score - log_p[0, int(reference)]
