"""Polishing: gradient steps on the logits, starting from the closed-form fit. Keys, log-weights and values are trained.

The steps are those of :mod:`~kvlens.conversion.softmax.descent`; each reads some of the reference texts. The objective is the
squared relative error of the logits, or the divergence KL(prompted || converted) of the next token.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from kvlens.conversion.softmax.descent import descend
from kvlens.conversion.softmax.prompt_pass import continued, rows_of
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.kv_bias import KVBias, VirtualKeys

LEARNING_RATE = 2e-2
Objective = Literal["logits", "kl"]


@dataclass
class Polished:
    """The trained tensors: virtual keys, the logarithms of their weights, and their values. Absent keys stay absent."""

    keys: Float[Tensor, "layer *batch kv_head r d_head"]
    log_weights: Float[Tensor, "layer *batch head r"]
    values: Float[Tensor, "layer *batch head r d_head"]
    used: Tensor

    @classmethod
    def of(cls, bias: KVBias) -> "Polished":
        assert isinstance(bias.features, VirtualKeys)
        used = bias.b_D > 0
        weights = torch.where(used, bias.b_D, 1.0)
        keys, log_weights, values = bias.features.keys, weights.log(), bias.b_KV / weights[..., None]
        return cls(_leaf(keys), _leaf(log_weights), _leaf(values), used)

    def free(self) -> list[Tensor]:
        return [self.keys, self.log_weights, self.values]

    def bias(self, like: KVBias) -> KVBias:
        """As a bias, differentiable in the trained tensors."""
        assert isinstance(like.features, VirtualKeys)
        weights = torch.where(self.used, self.log_weights.exp(), 0.0)
        features = VirtualKeys(self.keys, like.features.distance)
        return replace(like, b_D=weights, b_KV=weights[..., None] * self.values, features=features)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def polish(teacher: Teacher, bias: KVBias, *, steps: int, texts_per_step: int, objective: Objective) -> KVBias:
    """``bias`` (of this prompt alone) after ``steps`` gradient steps on the teacher's reference texts for fitting."""
    model: Any = teacher.model
    requires = [p.requires_grad for p in model.parameters()]
    with torch.inference_mode(False), torch.enable_grad():
        model.requires_grad_(False)
        try:
            texts = [group[:, i] for group in teacher.seen for i in range(group.shape[1])]
            with torch.no_grad():
                target = [_logits(teacher, teacher.whole, text) for text in texts]
            state = Polished.of(bias)

            def loss_on(rows: Tensor) -> Tensor:
                return _loss(teacher, state.bias(bias), [(texts[i], target[i]) for i in rows.tolist()], objective)

            losses = descend(
                state.free(),
                loss_on,
                n_rows=len(texts),
                rows_per_step=texts_per_step,
                steps=steps,
                learning_rate=LEARNING_RATE,
                generator=torch.Generator().manual_seed(teacher.options.seed),
            )
            progress = tqdm(losses, desc="polishing", total=steps, disable=not teacher.verbose)
            for loss in progress:
                progress.set_postfix(loss=f"{float(loss):.3g}")
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
