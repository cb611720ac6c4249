"""What takes gradients through the model: the one loop of descent, the effects of heads on the logits, and polishing.

**Effects.** How much an output matters for the logits is known from gradients of random projections of the relative logits. For
a random direction v ~ N(0, I) at every position, g = d (sum_i v_i . y_i / |y_i|) / dz is the gradient at a head's output z;
y_i are the logits, and the lengths |y_i| are held fixed. Averaged over v, g g^T is J^T J, where J is the derivative of all
relative logits with respect to z: an error e of the output changes them by e^T J^T J e, squared, to first order.

**Polishing** starts from the closed-form fit and trains keys, log-weights and values on the logits. Each step reads some of the
reference texts. The objective is the squared relative error of the logits, or the divergence KL(prompted || converted) of the
next token.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvlens.conversion.method import Teacher
from kvlens.conversion.prompt_pass import continued, rows_at_once, rows_of
from kvlens.conversion.prompt_texts import Texts
from kvlens.kv_bias import KVBias
from kvlens.model import attention_parts
from kvlens.model.protocol import KVModel
from kvlens.ops.landmarks import Queries


def descend(
    free: Sequence[Tensor],
    loss_on: Callable[[Int[Tensor, " row"]], Float[Tensor, ""]],
    *,
    n_rows: int,
    rows_per_step: int,
    steps: int,
    learning_rate: float,
    generator: torch.Generator,
) -> Iterator[Float[Tensor, ""]]:
    """Minimize the loss over ``free``, in place; yields the loss of each step after it is made.

    Args:
        free: leaf tensors that require gradients.
        loss_on: the loss on some rows, given their indices.
        n_rows: total number of rows.
        rows_per_step: number of rows per step, drawn without replacement; all rows if there are fewer.
        steps: number of steps.
        learning_rate: learning rate of the first step.
        generator: random generator for drawing the rows.
    """
    optimizer = torch.optim.Adam(free, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        loss = loss_on(torch.randperm(n_rows, generator=generator)[:rows_per_step])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.detach()


TAKING_GRADIENTS, POLISHING = "effects on logits", "polishing"
TOKENS_PER_PROMPT = 512
"""Tokens on which the metric is measured, shared among the groups of texts by their numbers of tokens; each gives a text."""
TOKENS_AT_ONCE = 256


def logit_metrics(teacher: Teacher) -> list[Float[Tensor, "batch kv_head d_head d_head"]]:
    """The mean of g g^T of each layer over reference texts after the prompt and the heads of a group, in float64."""
    n_layers, (batch, n_kv_heads, _, d_head) = teacher.n_layers, teacher.exact.bias.attention[0].b_kv.shape
    seed, device, texts = teacher.method.seed, teacher.seen[0].device, some_of(teacher.seen)
    sums = torch.zeros(n_layers, batch, n_kv_heads, d_head, d_head, dtype=torch.float64, device=device)
    teacher.tell(TAKING_GRADIENTS)
    with teacher.timed(TAKING_GRADIENTS):
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
    """Whole texts, or the beginnings of long ones, of every group: :data:`TOKENS_PER_PROMPT` tokens of each prompt, and more if
    there are many groups.
    """
    share = TOKENS_PER_PROMPT / max(TOKENS_PER_PROMPT, sum(group[0].numel() for group in texts))
    return [group[:, : math.ceil(share * group.shape[1]), :TOKENS_AT_ONCE] for group in texts]


def effects_on_logits(
    model: KVModel, bias: KVBias, texts: Int[Tensor, "text pos"], seeds: Sequence[int]
) -> list[Float[Tensor, "text pos head d_head"]]:
    """g of every layer, at the heads' outputs before a gate, with ``bias`` attached, for one random direction of each text,
    drawn with its own seed, so that it does not depend on what is read at once.
    """
    parts, added, gates = attention_parts(model), [], {}

    def with_leaf(module: nn.Module, args: object, z: Tensor) -> Tensor:
        added.append(torch.zeros_like(z, requires_grad=True))
        return z + added[-1]

    def see_gate(layer: int, module: nn.Module, args: object, gate: Tensor) -> None:
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
        of_z, of_gate = forms["z"], forms.get("gate")
        by_head = g if of_z is None else of_z(g)
        if layer in gates:
            by_head = by_head * (gates[layer] if of_gate is None else of_gate(gates[layer]))
        found.append(by_head)
    return found


POLISHING_RATE = 6e-2
"""Of the first Adam step, in units of each head's error; see :class:`Changes`."""
Objective = Literal["logits", "kl"]


@dataclass
class Changes:
    """What is trained: changes of virtual keys, of their values, and of the logarithms of their weights. All begin with 0.

    Adam moves every number by about its rate, however little the number matters. So the unit of each head's changes is the
    relative error of its output after the fit in closed form, times the size of its keys and of its values (the root mean
    square of their entries): heads that are nearly right hardly move, and one that keeps every key does not. Absent keys stay
    absent.

    Attributes:
        start: keys, log-weights and values before.
        units: of each of the three, for each head.
        used: where there is a key.
    """

    keys: Float[Tensor, "layer batch kv_head r d_key"]
    log_weights: Float[Tensor, "layer batch kv_head r"]
    values: Float[Tensor, "layer batch kv_head r d_head"]
    start: tuple[Tensor, Tensor, Tensor]
    units: tuple[Tensor, Tensor, Tensor]
    used: Bool[Tensor, "layer batch kv_head r"]

    @classmethod
    def of(cls, bias: KVBias, errors: Float[Tensor, "layer batch kv_head"] | None = None) -> "Changes":
        """No change of ``bias`` yet, in units of the heads' relative errors; without these, all in units of 1."""
        b_d = bias.stacked("b_d")
        used = b_d > 0
        weights = torch.where(used, b_d, 1.0)
        start = bias.stacked("keys"), weights.log(), bias.stacked("b_kv") / weights[..., None]
        units = (weights.new_ones(()),) * 3
        if errors is not None:
            unit = errors.to(weights)[..., None]
            units = unit[..., None] * _size(start[0], used), unit, unit[..., None] * _size(start[2], used)
        keys, log_weights, values = (torch.zeros_like(x).requires_grad_() for x in start)
        return cls(keys, log_weights, values, start, units, used)

    def free(self) -> list[Tensor]:
        return [self.keys, self.log_weights, self.values]

    def bias(self, like: KVBias) -> KVBias:
        """The changed bias, differentiable in the trained tensors."""
        every = zip(self.start, self.units, self.free(), strict=True)
        keys, log_weights, values = (start + unit * change for start, unit, change in every)
        weights = torch.where(self.used, log_weights.exp(), 0.0)
        tensors = zip(weights, weights[..., None] * values, keys, like.attention, strict=True)
        return like.with_attention(
            [part.widened(keys.shape[3]).with_tensors({"b_d": w, "b_kv": b_kv, "keys": c}) for w, b_kv, c, part in tensors]
        )


def _size(x: Float[Tensor, "*head r d"], used: Bool[Tensor, "*head r"]) -> Float[Tensor, "*head 1 1"]:
    """The root mean square of the entries of each head's used rows."""
    squares = (x.square().mean(dim=-1) * used).sum(dim=-1) / used.sum(dim=-1).clamp(min=1)
    return squares.sqrt()[..., None, None]


def polish(
    teacher: Teacher, bias: KVBias, queries: Sequence[Queries], *, steps: int, texts_per_step: int, objective: Objective
) -> KVBias:
    """``bias`` (of this prompt alone) after ``steps`` gradient steps on the teacher's reference texts for fitting.

    Args:
        queries: of these texts, in each layer.
    """
    model: Any = teacher.model
    requires = [p.requires_grad for p in model.parameters()]
    with torch.inference_mode(False), torch.enable_grad():
        model.requires_grad_(False)
        try:
            texts = [group[:, i] for group in teacher.seen for i in range(group.shape[1])]
            with torch.no_grad():
                target = [_logits(teacher, teacher.whole, text) for text in texts]
                errors = [teacher.head_errors(bias, layer, own).output for layer, own in enumerate(queries)]
            of_heads = torch.stack(errors).unflatten(2, (teacher.n_kv_heads, -1)).mean(dim=-1)
            state = Changes.of(bias, of_heads.clamp(max=1))

            def loss_on(rows: Tensor) -> Tensor:
                return _loss(teacher, state.bias(bias), [(texts[i], target[i]) for i in rows.tolist()], objective)

            losses = descend(
                state.free(),
                loss_on,
                n_rows=len(texts),
                rows_per_step=texts_per_step,
                steps=steps,
                learning_rate=POLISHING_RATE,
                generator=torch.Generator().manual_seed(teacher.method.seed),
            )
            for i, _ in enumerate(losses):
                teacher.tell(POLISHING, i / steps)
        finally:
            for p, wanted in zip(model.parameters(), requires, strict=True):
                p.requires_grad_(wanted)
    with torch.no_grad():
        return state.bias(bias)


def _logits(teacher: Teacher, bias: KVBias, *texts: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch text pos vocab"]:
    """Logits of some reference texts of one length, of every prompt."""
    tokens = torch.stack(texts, dim=1)
    rows = torch.arange(tokens.shape[0]).repeat_interleave(tokens.shape[1])
    flat = tokens.flatten(0, 1)
    teacher.count("with gradients" if torch.is_grad_enabled() else "read", [tokens])
    with teacher.model.holding(rows_of(bias, rows)):
        return teacher.model(flat, attention_mask=torch.ones_like(flat)).unflatten(0, tokens.shape[:2])


def _loss(teacher: Teacher, bias: KVBias, texts: list[tuple[Tensor, Tensor]], objective: Objective) -> Float[Tensor, ""]:
    """The mean over the positions of all texts, given with their target logits; those of one length are read together."""
    converted, by_position = continued(teacher.old, bias), []
    for length in {text.shape[1] for text, _ in texts}:
        some, target = zip(*(one for one in texts if one[0].shape[1] == length), strict=True)
        old, new = torch.cat(target, dim=1), _logits(teacher, converted, *some)
        by_position.append(_divergence(old, new, objective).flatten())
    return torch.cat(by_position).mean()


def _divergence(old: Tensor, new: Tensor, objective: Objective) -> Float[Tensor, "batch text pos"]:
    if objective == "kl":
        old, new = old.log_softmax(dim=-1), new.log_softmax(dim=-1)
        return (old.exp() * (old - new)).sum(dim=-1)
    return (new - old).square().sum(dim=-1) / old.square().sum(dim=-1)
