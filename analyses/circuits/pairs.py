"""Pairs of prompts, clean and corrupted, and what is measured on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import Chat, KVLensError, KVModel
from kvlens.chat import as_prompt, one_sequence, prompt_layout
from kvlens.errors import brief
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.units import By, cut, positions_of

from ..attribution.answers import answer_and_rival
from ..sequences import prompt_sequence
from .graph import Graph

CircuitMetric = Callable[[Float[Tensor, "pair pos d_vocab"]], Float[Tensor, " pair"]]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of prompts of one length, each with its text and all but the last token of its answer behind it, and what is
    measured on their logits at the last ``n_last`` positions (None: all).

    With tokens that are ``hidden`` in them, corrupted prompts are the clean ones without these. ``n_prompt`` is the number of
    tokens of the prompts alone; None without texts. ``rivals`` are the same pairs with other answers, whose metric is taken
    away.
    """

    clean: Int[Tensor, "pair pos"]
    corrupted: Int[Tensor, "pair pos"]
    metric: CircuitMetric
    n_last: int | None
    hidden: Bool[Tensor, "pair pos"] | None = None
    n_prompt: int | None = None
    rivals: "Pairs | None" = None

    @property
    def first(self) -> int:
        """The first position at which clean and corrupted prompts differ: before it, every node writes the same."""
        differs = self.clean != self.corrupted if self.hidden is None else self.hidden
        return int(differs.any(dim=0).int().argmax())

    @property
    def n_asked(self) -> int:
        """The number of tokens in front of the answers."""
        return self.clean.shape[1] - self.n_answer

    @property
    def n_answer(self) -> int:
        """The number of tokens of answers that are read: all but the last."""
        return (self.n_last or 1) - 1

    def value(self, logits: Float[Tensor, "pair n_last d_vocab"]) -> Float[Tensor, " pair"]:
        """The metric; raise KVLensError unless it is one finite number for each pair."""
        value = self.metric(logits)
        if not isinstance(value, Tensor) or value.shape != (len(self.clean),) or not value.isfinite().all():
            raise KVLensError(
                f"metric: expected a tensor of one finite number for each of {len(self.clean)} pairs, got {brief(value)}"
            )
        return value


class _Case(NamedTuple):
    """One pair: prompts with their texts, and the tokens of an answer and of its rival."""

    clean: Int[Tensor, " pos"]
    corrupted: Int[Tensor, " pos"]
    hidden: Bool[Tensor, " pos"] | None
    n_prompt: int | None
    answer: Int[Tensor, " answer_pos"] | None
    rival: Int[Tensor, " rival_pos"] | None


def read_pairs(
    model: KVModel,
    graph: Graph,
    prompt: object,
    corrupted: object = None,
    metric: CircuitMetric | None = None,
    *,
    text: object = None,
    answer: object = None,
    rival: object = None,
    without: By | Sequence[By] | None = None,
) -> list[Pairs]:
    """Pairs of prompts in batches of one length, as many at once as fit.

    Raises:
        KVLensError: as :func:`circuit`.
    """
    if (corrupted is None) == (without is None):
        given = "neither" if without is None else "both"
        raise KVLensError(f"corrupted, without: expected corrupted prompts, or what the clean ones are without, got {given}")
    if metric is not None and not (callable(metric) and answer is None and rival is None):
        got = "both" if callable(metric) else brief(metric)
        raise KVLensError(f"metric: expected a function of logits, or words as answer= and rival=, got {got}")
    cases, many = _cases(model, prompt, corrupted, text, without)
    if metric is not None:
        if len({(len(case.clean), case.n_prompt) for case in cases}) > 1:
            lengths = sorted({len(case.clean) for case in cases})
            raise KVLensError(f"metric: a function takes prompts of one length, got {lengths}; pass answer= and rival=")
        return [_pairs(cases, metric, None)]
    answers, rivals = (_for_each(*of, len(cases), many) for of in (("answer", answer), ("rival", rival)))
    asked = [_asked(model, *each) for each in zip(cases, answers, rivals, strict=True)]
    numbers = (2 * len(graph.writers) + 2 * len(graph.readers)) * model.cfg.d_model
    return _batches(asked, 2 * NUMBERS_PER_PASS // numbers)


def _cases(model: KVModel, prompt: object, corrupted: object, text: object, without: object) -> tuple[list[_Case], bool]:
    """All pairs, and whether several were given, if only by their form."""
    listed, many = _listed(prompt)
    clean = [prompt_sequence(model, "prompt", one) for one in listed]
    others = clean if corrupted is None else [prompt_sequence(model, "corrupted", one) for one in _listed(corrupted)[0]]
    _check_count("corrupted", others, len(clean))
    _check_lengths(clean, others)
    hidden = [None] * len(clean) if without is None else [_hidden(model, *each) for each in _each(listed, clean, without)]
    one_for_all = not many or (isinstance(text, Tensor) and text.dim() == 1)
    each_text = _for_each("text", text, len(clean), not one_for_all)
    texts = [None if one is None else one_sequence(model, "text", one) for one in each_text]
    return [_case(*each) for each in zip(clean, others, hidden, texts, strict=True)], many


def _listed(given: Any) -> tuple[list[Any], bool]:
    """The prompts of an argument, and whether it is several, if only by its form."""
    if isinstance(given, Tensor):
        return (list(given), True) if given.dim() == 2 else ([given], False)
    given = as_prompt(given)
    many = isinstance(given, Sequence) and not isinstance(given, str) and not (given and isinstance(given[0], int))
    return (list(given), True) if many else ([given], False)


def _check_lengths(clean: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for number, (tokens, other) in enumerate(zip(clean, others, strict=True)):
        if len(tokens) != len(other):
            raise KVLensError(
                f"corrupted: prompt {number} has {len(other)} tokens, and its clean one {len(tokens)}; replace words by others "
                "of as many tokens (what both go on with is text=)"
            )


def _each(listed: Sequence[Any], clean: Sequence[Tensor], without: Any) -> list[tuple[Any, Tensor, By]]:
    """Every prompt as it was given and as tokens, and what it is without: the same for all, or one list for each."""
    own = all(isinstance(one, list) for one in without)
    if own:
        _check_count("without", without, len(clean))
    return list(zip(listed, clean, without if own else [without] * len(clean), strict=True))


def _hidden(model: KVModel, prompt: object, tokens: Int[Tensor, " pos"], by: By) -> Bool[Tensor, " pos"]:
    layout = prompt_layout(model, prompt if isinstance(as_prompt(prompt), Chat) else tokens)
    return positions_of(cut(model, layout, by), len(tokens)).any(dim=0).to(tokens.device)


def _case(
    clean: Int[Tensor, " pos"],
    corrupted: Int[Tensor, " pos"],
    hidden: Bool[Tensor, " pos"] | None,
    text: Int[Tensor, " text_pos"] | None,
) -> _Case:
    """A pair with the text behind both prompts."""
    n = len(clean)
    if text is not None:
        clean, corrupted = (torch.cat([of, text]) for of in (clean, corrupted))
        hidden = None if hidden is None else torch.nn.functional.pad(hidden, (0, len(text)))
    if hidden is not None and bool(hidden[-1]):
        raise KVLensError("without: the last token reads the others, and what is measured stands behind it; leave it there")
    return _Case(clean, corrupted, hidden, None if text is None else n, None, None)


def _check_count(name: str, given: Sequence[Any], n: int) -> None:
    if not n or len(given) != n:
        raise KVLensError(f"{name}: expected one for each clean prompt, of which there are {n}, got {len(given)}")


def _for_each(name: str, given: Any, n: int, many: bool) -> list[object]:
    """One value for all pairs, which of several prompts is a word, a token or None, or one for each."""
    one_word = given is None or isinstance(given, str | int) or (isinstance(given, Tensor) and given.dim() == 0)
    if one_word or not many:
        return [given] * n
    _check_count(name, given, n)
    return list(given)


@torch.no_grad()
def _asked(model: KVModel, case: _Case, answer: object, rival: object) -> _Case:
    """The same with the tokens of answer and rival; without an answer with the most probable next one."""
    if answer is None:
        answer = model.logits_on(case.clean[None], 1)[0, -1].argmax()

    own, other = (x[None] if isinstance(x, Tensor) and not x.dim() else x for x in (answer, rival))
    own, other = answer_and_rival(model, own, other)
    return case._replace(answer=own, rival=other)


def _batches(cases: Sequence[_Case], n_tokens: int) -> list[Pairs]:
    """Cases that are alike in their numbers of tokens, of at most so many tokens at once."""
    groups: dict[tuple[int, ...], list[_Case]] = {}
    for case in cases:
        of_answers = (0 if x is None else len(x) for x in (case.answer, case.rival))
        groups.setdefault((len(case.clean), *of_answers, case.n_prompt or 0), []).append(case)
    found = []
    for (n, n_answer, n_rival, _), alike in sorted(groups.items()):
        at_once = max(1, n_tokens // (n + max(n_answer, n_rival) - 1))
        found += [_of_answers(alike[i : i + at_once]) for i in range(0, len(alike), at_once)]
    return found


def _of_answers(cases: Sequence[_Case]) -> Pairs:
    """log p(answer), less log p(rival); of single tokens that is the difference of their logits."""
    answers = torch.stack([case.answer for case in cases if case.answer is not None])
    listed = [case.rival for case in cases if case.rival is not None]
    if not listed:
        return _pairs(cases, log_probability(answers), answers)
    rivals = torch.stack(listed)
    if answers.shape[1] == rivals.shape[1] == 1:
        return _pairs(cases, logit_difference(answers[:, 0], rivals[:, 0]), answers)
    less = _pairs(cases, log_probability(rivals), rivals)
    return replace(_pairs(cases, log_probability(answers), answers), rivals=less)


def _pairs(cases: Sequence[_Case], metric: CircuitMetric, read: Int[Tensor, "pair n_last"] | None) -> Pairs:
    """The pairs, with what is read of their answers behind them."""
    clean, corrupted = (torch.stack(of) for of in zip(*((case.clean, case.corrupted) for case in cases), strict=True))
    gone = [case.hidden for case in cases if case.hidden is not None]
    hidden, n_last = torch.stack(gone) if gone else None, None if read is None else read.shape[1]
    if read is not None:
        clean, corrupted = (torch.cat([of, read[:, :-1]], dim=1) for of in (clean, corrupted))
        hidden = None if hidden is None else torch.nn.functional.pad(hidden, (0, read.shape[1] - 1))
    return Pairs(clean, corrupted, metric, n_last, hidden, cases[0].n_prompt)


def logit_difference(answers: Int[Tensor, " pair"], rivals: Int[Tensor, " pair"]) -> CircuitMetric:
    """The answer's logit at the last position, less the rival's."""

    def measure(logits: Float[Tensor, "pair pos d_vocab"]) -> Float[Tensor, " pair"]:
        both = torch.stack([answers, rivals], dim=1).to(logits.device)
        answer, rival = logits[:, -1].gather(-1, both).unbind(dim=1)
        return answer - rival

    return measure


def log_probability(tokens: Int[Tensor, "pair n_last"]) -> CircuitMetric:
    """log p of a token at each of the last positions, summed, in nats."""

    def measure(logits: Float[Tensor, "pair n_last d_vocab"]) -> Float[Tensor, " pair"]:
        log_p = logits[:, -tokens.shape[1] :].log_softmax(dim=-1)
        return log_p.gather(-1, tokens.to(log_p.device)[..., None]).sum(dim=(1, 2))

    return measure
