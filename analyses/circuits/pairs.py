"""Pairs of prompts, clean and corrupted, and what is measured on them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.errors import brief
from kvlens.memory import NUMBERS_PER_PASS

from ..attribution.answers import answer_tokens
from ..sequences import prompt_sequence
from .graph import Graph

CircuitMetric = Callable[[Float[Tensor, "pair pos d_vocab"]], Float[Tensor, " pair"]]
AnswerAndRival = tuple[Any, Any]
"""Answers and rivals, each a token (text or id) for all pairs or a sequence with one for each."""


class Pairs(NamedTuple):
    """Pairs of prompts of one length, and what is measured on their logits at the last ``n_last`` positions (None: all)."""

    clean: Int[Tensor, "pair pos"]
    corrupted: Int[Tensor, "pair pos"]
    metric: CircuitMetric
    n_last: int | None

    @property
    def first(self) -> int:
        """The first position at which clean and corrupted prompts differ: before it, every node writes the same."""
        return int((self.clean != self.corrupted).any(dim=0).int().argmax())

    def value(self, logits: Float[Tensor, "pair n_last d_vocab"]) -> Float[Tensor, " pair"]:
        """The metric; raise KVLensError unless it is one finite number for each pair."""
        value = self.metric(logits)
        if not isinstance(value, Tensor) or value.shape != (len(self.clean),) or not value.isfinite().all():
            raise KVLensError(
                f"metric: expected a tensor of one finite number for each of {len(self.clean)} pairs, got {brief(value)}"
            )
        return value


def read_pairs(model: KVModel, graph: Graph, prompt: Any, corrupted: Any, metric: Any) -> list[Pairs]:
    """Pairs of prompts in batches of one length, as many at once as fit.

    Raises:
        KVLensError: as :func:`circuit`.
    """
    prompts = [_prompts(model, name, given) for name, given in (("prompt", prompt), ("corrupted", corrupted))]
    if len(prompts[0]) != len(prompts[1]):
        raise KVLensError(f"corrupted: expected a prompt for each of {len(prompts[0])} clean ones, got {len(prompts[1])}")
    lengths = [len(prompt) for prompt in prompts[0]]
    for number, (n, other) in enumerate(zip(lengths, prompts[1], strict=True)):
        if n != len(other):
            raise KVLensError(
                f"corrupted: prompt {number} has {len(other)} tokens, and its clean one {n}; replace words by others of as "
                "many tokens"
            )
    if callable(metric):
        if len(set(lengths)) > 1:
            raise KVLensError(
                f"metric: a function takes prompts of one length, got {sorted(set(lengths))}; pass (answers, rivals)"
            )
        return [Pairs(torch.stack(prompts[0]), torch.stack(prompts[1]), metric, None)]
    answers, rivals = _answers(model, metric, len(lengths))
    found = []
    for length in sorted(set(lengths)):
        numbers = (2 * len(graph.writers) + 2 * len(graph.readers)) * length * model.cfg.d_model
        same = torch.tensor([i for i, n in enumerate(lengths) if n == length])
        for rows in same.split(max(1, 2 * NUMBERS_PER_PASS // numbers)):
            measure = logit_difference(answers[rows], rivals[rows])
            clean, other = (torch.stack([of[i] for i in rows.tolist()]) for of in prompts)
            found.append(Pairs(clean, other, measure, 1))
    return found


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
