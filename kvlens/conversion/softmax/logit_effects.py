"""How much the outputs of heads matter for the logits: gradients of random projections of the relative logits.

For a random direction v ~ N(0, I) at every position, g = d (sum_i v_i . y_i / |y_i|) / dz is the gradient at a head's output z;
y_i are the logits, and the lengths |y_i| are held fixed. Averaged over v, g g^T is J^T J, where J is the derivative of all
relative logits with respect to z: an error e of the output changes them by e^T J^T J e, squared, to first order.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.conversion.softmax.prompt_pass import attention_parts, rows_at_once, rows_of
from kvlens.conversion.softmax.reference import Texts
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.kv_bias import KVBias
from kvlens.model.protocol import ReadsPrompts

MOST_TOKENS = 512
"""The most tokens on which the metric is measured, shared among the groups of texts by their numbers of tokens."""
TOKENS_AT_ONCE = 256


def logit_metrics(teacher: Teacher) -> list[Float[Tensor, "batch kv_head d_head d_head"]]:
    """The mean of g g^T of each layer over reference texts after the prompt and the heads of a group, in float64."""
    n_layers, batch, n_kv_heads, _, d_head = teacher.exact.bias.b_KV.shape
    seed, device, texts = teacher.options.seed, teacher.seen[0].device, some_of(teacher.seen)
    sums = torch.zeros(n_layers, batch, n_kv_heads, d_head, d_head, dtype=torch.float64, device=device)
    with teacher.timed("effects on logits"):
        for group in texts:
            _, n_texts, n_pos = group.shape
            most = max(1, TOKENS_AT_ONCE // n_pos)
            for part in torch.arange(batch * n_texts).split(rows_at_once(teacher.model, teacher.whole, n_pos, most)):
                prompts = part // n_texts
                bias = rows_of(teacher.whole, prompts)
                seeds = [(seed + i) % 2**63 for i in (part % n_texts).tolist()]
                found = effects_on_logits(teacher.model, bias, group.flatten(0, 1)[part.to(device)], seeds)
                for layer, g in enumerate(found):
                    by_group = g.double().unflatten(2, (n_kv_heads, -1))
                    products = torch.einsum("tpgsd,tpgse->tgde", by_group, by_group)
                    sums[layer].index_add_(0, prompts.to(device), products.to(device))
            seed += n_texts
    teacher.count("with gradients", texts)
    n_rows = sum(group[0].numel() for group in texts) * teacher.model.cfg.n_heads // n_kv_heads
    return list(sums / n_rows)


def some_of(texts: Texts) -> Texts:
    """Whole texts, or the beginnings of long ones, of every group: about :data:`MOST_TOKENS` tokens of each prompt."""
    share = MOST_TOKENS / max(MOST_TOKENS, sum(group[0].numel() for group in texts))
    return [group[:, : math.ceil(share * group.shape[1]), :TOKENS_AT_ONCE] for group in texts]


def effects_on_logits(
    model: ReadsPrompts, bias: KVBias, texts: Int[Tensor, "text pos"], seeds: Sequence[int]
) -> list[Float[Tensor, "text pos head d_head"]]:
    """g of every layer, at the heads' outputs before a gate, with ``bias`` attached, for one random direction of each text,
    drawn with its own seed, so that it does not depend on what is read at once.
    """
    parts, added, gates = attention_parts(model), [], {}

    def with_leaf(module: Any, args: Any, z: Tensor) -> Tensor:
        added.append(torch.zeros_like(z, requires_grad=True))
        return z + added[-1]

    def see_gate(layer: int, module: Any, args: Any, gate: Tensor) -> None:
        gates[layer] = gate.detach()

    with torch.inference_mode(False), torch.enable_grad(), model.holding(bias), ExitStack() as stack:
        for layer, part in enumerate(parts):
            points = part.attention_points()
            stack.callback(points["z"][0].register_forward_hook(with_leaf).remove)
            if "gate" in points:
                stack.callback(points["gate"][0].register_forward_hook(partial(see_gate, layer)).remove)
        logits = model(texts, attention_mask=torch.ones_like(texts))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        each = [torch.randn(logits.shape[1:], generator=generator, dtype=torch.float32) for generator in generators]
        direction = torch.stack(each).to(logits)
        projected = (direction * logits / logits.detach().norm(dim=-1, keepdim=True)).sum()
        gradients = torch.autograd.grad(projected, added)
    found = []
    for layer, (part, g) in enumerate(zip(parts, gradients, strict=True)):
        forms = {name: form for name, (_, form) in part.attention_points().items()}
        by_head = g if forms["z"] is None else forms["z"](g)
        found.append(by_head * forms["gate"](gates[layer]) if layer in gates else by_head)
    return found
