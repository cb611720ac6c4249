"""The naive conversion of ICLCA's slides, as a baseline: a copy of the model is fine-tuned to work without the prompt.

With the prompt fixed, the model writes answers to many queries; on these pairs its weights w are fine-tuned, which is called
context distillation:

    pairs            - mean log p_w(answer | query) -> min
    distributions    mean KL( p(. | prompt, text) || p_w(. | text) ) -> min

The second objective uses the prompted model's whole distribution at every position, and learns more from every text. Every
changed weight must be stored.

As a baseline it is tuned as carefully as the other methods (`distil_best`): the learning rate is chosen on held-out texts, and
reading them counts towards the cost.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.conversion.softmax.descent import descend
from kvlens.errors import KVLensError, nearest
from kvlens.model import HookedKVTransformer

Objective = Literal["pairs", "distributions"]
OBJECTIVES: tuple[Objective, ...] = ("pairs", "distributions")
QUERY = 4
"""The number of tokens of a text that are its query; the rest is the answer."""
TEXTS_PER_STEP = 16
HELD_OUT = 8
"""One in this many texts is held out from the steps, for choosing the learning rate."""


class Distilled(NamedTuple):
    """A copy of the model that has learned a prompt.

    Attributes:
        model: the copy.
        n_changed: number of changed weights, all of which must be stored.
        seconds: time of the steps and of reading the texts with the prompt.
        losses: loss of every step.
        passes: tokens read or written, in units of one pass over the prompt; backward passes are not counted.
    """

    model: HookedKVTransformer
    n_changed: int
    seconds: float
    losses: Float[Tensor, " step"]
    passes: float


def distil(
    model: HookedKVTransformer,
    prompt: Int[Tensor, " prompt_pos"],
    texts: Int[Tensor, "text pos"],
    *,
    steps: int,
    learning_rate: float,
    objective: Objective = "distributions",
    is_free: Callable[[str], bool] = lambda name: True,
    seed: int = 0,
) -> Distilled:
    """Fine-tune a copy of ``model`` so that it reads texts as the model reads them after ``prompt``.

    The steps are those of :mod:`~kvlens.conversion.softmax.descent`; each reads some of the texts.

    Args:
        model: not changed.
        prompt: not seen by the copy.
        texts: texts that the prompted model wrote; the copy reads them alone, from position 0.
        is_free: which parameters change, by name.
        objective: see the module.

    Raises:
        KVLensError: an unknown objective.
    """
    if objective not in OBJECTIVES:
        raise KVLensError(
            f"distil: objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}{nearest(objective, OBJECTIVES)}"
        )
    start = time.perf_counter()
    copy = HookedKVTransformer.from_hooked_transformer(model).train(model.training)
    for name, parameter in copy.named_parameters():
        parameter.requires_grad_(is_free(name))
    free = [parameter for parameter in copy.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in free]
    target = prompted_logits(model, prompt, texts) if objective == "distributions" else None
    descent = descend(
        free,
        lambda rows: _loss(copy, texts[rows], None if target is None else target[rows]),
        n_rows=len(texts),
        rows_per_step=TEXTS_PER_STEP,
        steps=steps,
        learning_rate=learning_rate,
        generator=torch.Generator().manual_seed(seed),
    )
    losses = torch.stack(list(descent))
    copy.requires_grad_(False)
    n_changed = sum(int((new != old).sum()) for new, old in zip(free, before, strict=True))
    n_tokens = texts.numel() * (2 if target is None else 3) + (0 if target is None else len(texts) * len(prompt))
    n_tokens += steps * min(TEXTS_PER_STEP, len(texts)) * texts.shape[1]
    return Distilled(copy, n_changed, time.perf_counter() - start, losses, n_tokens / len(prompt))


def distil_best(
    model: HookedKVTransformer,
    prompt: Int[Tensor, " prompt_pos"],
    texts: Int[Tensor, "text pos"],
    *,
    learning_rates: Sequence[float],
    objective: Objective = "distributions",
    **options: Any,
) -> Distilled:
    """`distil` at each of several learning rates; return the copy that is best, by its objective, on an eighth of the texts.

    No step reads those texts. Seconds and passes are those of all copies.

    Args:
        model, prompt, texts, objective: as for `distil`.
        learning_rates: the rates to try.
        options: the other arguments of `distil`.
    """
    n_heldout = max(1, len(texts) // HELD_OUT)
    seen, heldout = texts[:-n_heldout], texts[-n_heldout:]
    target = prompted_logits(model, prompt, heldout) if objective == "distributions" else None
    found = [distil(model, prompt, seen, objective=objective, learning_rate=rate, **options) for rate in learning_rates]
    with torch.no_grad():
        best = min(found, key=lambda one: float(_loss(one.model, heldout, target)))
    read = heldout.numel() * (2 + len(found)) / len(prompt) + sum(one.passes for one in found)
    return best._replace(seconds=sum(one.seconds for one in found), passes=read)


@torch.no_grad()
def prompted_logits(
    model: HookedKVTransformer, prompt: Int[Tensor, " prompt_pos"], texts: Int[Tensor, "text pos"]
) -> Float[Tensor, "text pos vocab"]:
    """The logits at every position of the texts, after the prompt."""
    whole = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
    parts = [model(part, attention_mask=torch.ones_like(part))[:, len(prompt) :] for part in whole.split(TEXTS_PER_STEP)]
    return torch.cat(parts)


def _loss(copy: HookedKVTransformer, texts: Tensor, target: Tensor | None) -> Float[Tensor, ""]:
    log_new = copy(texts, attention_mask=torch.ones_like(texts)).log_softmax(dim=-1)
    if target is None:
        query = min(QUERY, texts.shape[1] - 1)
        return -log_new[:, query - 1 : -1].gather(2, texts[:, query:, None]).mean()
    log_old = target.log_softmax(dim=-1)
    return (log_old.exp() * (log_old - log_new)).sum(dim=-1).mean()
