"""Pairs of prompts, clean and corrupted, and what is measured on them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.chat import prompt_layout
from kvlens.errors import brief
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.units import By, cut, positions_of

from ..attribution.answers import answer_tokens
from ..sequences import prompt_sequence
from .graph import Graph

CircuitMetric = Callable[[Float[Tensor, "pair pos d_vocab"]], Float[Tensor, " pair"]]
AnswerAndRival = tuple[Any, Any]
"""Answers and rivals, each a token (text or id) for all pairs or a sequence with one for each."""


class Pairs(NamedTuple):
    """Pairs of prompts of one length, and what is measured on their logits at the last ``n_last`` positions (None: all).

    With tokens that are ``hidden`` in them, corrupted prompts are the clean ones without these.
    """

    clean: Int[Tensor, "pair pos"]
    corrupted: Int[Tensor, "pair pos"]
    metric: CircuitMetric
    n_last: int | None
    hidden: Bool[Tensor, "pair pos"] | None = None

    @property
    def first(self) -> int:
        """The first position at which clean and corrupted prompts differ: before it, every node writes the same."""
        differs = self.clean != self.corrupted if self.hidden is None else self.hidden
        return int(differs.any(dim=0).int().argmax())

    def value(self, logits: Float[Tensor, "pair n_last d_vocab"]) -> Float[Tensor, " pair"]:
        """The metric; raise KVLensError unless it is one finite number for each pair."""
        value = self.metric(logits)
        if not isinstance(value, Tensor) or value.shape != (len(self.clean),) or not value.isfinite().all():
            raise KVLensError(
                f"metric: expected a tensor of one finite number for each of {len(self.clean)} pairs, got {brief(value)}"
            )
        return value


def read_pairs(
    model: KVModel, graph: Graph, prompt: Any, corrupted: Any, metric: Any, without: By | Sequence[By] | None = None
) -> list[Pairs]:
    """Pairs of prompts in batches of one length, as many at once as fit.

    Raises:
        KVLensError: as :func:`circuit`.
    """
    if (corrupted is None) == (without is None):
        given = "neither" if without is None else "both"
        raise KVLensError(f"corrupted, without: expected corrupted prompts, or what the clean ones are without, got {given}")
    clean = _prompts(model, "prompt", prompt)
    others = clean if corrupted is None else _prompts(model, "corrupted", corrupted)
    _check_lengths(clean, others)
    hidden = None if without is None else [_hidden(model, tokens, by) for tokens, by in _each(clean, without)]
    lengths = [len(tokens) for tokens in clean]
    if callable(metric):
        if len(set(lengths)) > 1:
            raise KVLensError(
                f"metric: a function takes prompts of one length, got {sorted(set(lengths))}; pass (answers, rivals)"
            )
        return [Pairs(torch.stack(clean), torch.stack(others), metric, None, None if hidden is None else torch.stack(hidden))]
    answers, rivals = _answers(model, metric, len(lengths))
    found = []
    for length in sorted(set(lengths)):
        numbers = (2 * len(graph.writers) + 2 * len(graph.readers)) * length * model.cfg.d_model
        same = torch.tensor([i for i, n in enumerate(lengths) if n == length])
        for rows in same.split(max(1, 2 * NUMBERS_PER_PASS // numbers)):
            measure = logit_difference(answers[rows], rivals[rows])
            both = [torch.stack([of[i] for i in rows.tolist()]) for of in (clean, others)]
            gone = None if hidden is None else torch.stack([hidden[i] for i in rows.tolist()])
            found.append(Pairs(both[0], both[1], measure, 1, gone))
    return found


def _check_lengths(clean: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    if len(clean) != len(others):
        raise KVLensError(f"corrupted: expected a prompt for each of {len(clean)} clean ones, got {len(others)}")
    for number, (tokens, other) in enumerate(zip(clean, others, strict=True)):
        if len(tokens) != len(other):
            raise KVLensError(
                f"corrupted: prompt {number} has {len(other)} tokens, and its clean one {len(tokens)}; replace words by others "
                "of as many tokens"
            )


def _each(clean: Sequence[Tensor], without: Any) -> list[tuple[Tensor, By]]:
    """Every prompt, and what it is without: the same for all, or one list for each."""
    if not all(isinstance(one, list) for one in without):
        return [(tokens, without) for tokens in clean]
    if len(without) != len(clean):
        raise KVLensError(f"without: expected one list for all prompts, or one for each of {len(clean)}, got {len(without)}")
    return list(zip(clean, without, strict=True))


def _hidden(model: KVModel, tokens: Int[Tensor, " pos"], by: By) -> Bool[Tensor, " pos"]:
    hidden = positions_of(cut(model, prompt_layout(model, tokens), by), len(tokens)).any(dim=0)
    if bool(hidden[-1]):
        raise KVLensError("without: the last token reads the others, and what is measured stands behind it; leave it there")
    return hidden


def _prompts(model: KVModel, name: str, given: Any) -> list[Int[Tensor, " pos"]]:
    if isinstance(given, Tensor) and given.dim() == 2:
        given = list(given)
    many = isinstance(given, Sequence) and not isinstance(given, str) and not (given and isinstance(given[0], dict | int))
    found = [prompt_sequence(model, name, prompt) for prompt in (given if many else [given])]
    if not found:
        raise KVLensError(f"{name}: expected at least one prompt, got {brief(given)}")
    return found


def _answers(model: KVModel, metric: Any, n: int) -> list[Int[Tensor, " pair"]]:
    """A token for each pair: of the answers, and of the rivals."""
    if not isinstance(metric, Sequence) or isinstance(metric, str) or len(metric) != 2:
        raise KVLensError(f"metric: expected a function of logits, or (answers, rivals), got {brief(metric)}")
    found = []
    for name, given in zip(("answer", "rival"), metric, strict=True):
        for_all = isinstance(given, str | int) or (isinstance(given, Tensor) and given.dim() == 0)
        listed = [given] * n if for_all else list(given)
        each = [answer_tokens(model, name, one.reshape(-1) if isinstance(one, Tensor) else one) for one in listed]
        if len(each) != n or any(len(tokens) != 1 for tokens in each):
            raise KVLensError(
                f"metric: expected one {name} of a single token for each of {n} pairs, got {len(each)} of "
                f"{sorted({len(tokens) for tokens in each})} tokens"
            )
        found.append(torch.cat(each))
    return found


def logit_difference(answers: Int[Tensor, " pair"], rivals: Int[Tensor, " pair"]) -> CircuitMetric:
    """The answer's logit at the last position, less the rival's."""

    def measure(logits: Float[Tensor, "pair pos d_vocab"]) -> Float[Tensor, " pair"]:
        both = torch.stack([answers, rivals], dim=1).to(logits.device)
        answer, rival = logits[:, -1].gather(-1, both).unbind(dim=1)
        return answer - rival

    return measure
