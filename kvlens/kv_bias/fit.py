"""How an approximate bias was made, the error of its answers, and what was done to it since.

A record holds errors that were measured for exactly the bias that it belongs to: any change to the bias removes them and adds a
line to ``history``. The original fits with their measured errors stay in ``parts``.

The record of an exact bias is None; sums, multiples and selections of exact biases are exact too. Rounding a bias, or replacing
its numbers, makes it approximate with an unknown error.

**Answers.** On texts not used for fitting, with logits p (with the prompt), c (converted) and w (without) at each position:

    logits_error = mean over positions of ||c - p|| / ||p||
    lost_share   = sqrt(sum over positions of ||c - p||^2  /  sum over positions of ||p - w||^2)
    KL           = sum over tokens of softmax(p) (log softmax(p) - log softmax(c)), in nats

``lost_share`` is the fraction of the prompt's effect that is lost: 0 if nothing is lost, 1 if the converted model is as far
from the prompted one as a model that has not read the prompt.

**Recall.** Each sentence of the prompt is read alone, as if the model had said it: with the whole prompt before it, under the
bias, and with neither. A word counts if the prompt matters to it, by more than :data:`MATTERS` nats:

    effect = log p(word | prompt) - log p(word)          loss = log p(word | prompt) - log p(word | bias)

An error on the model's own text says little about facts that this text does not touch; a lost word is such a fact.

How much to make of it, measured on six documents with questions and two models (``tests/benchmarks/results/fewer_keys.md``):
an answer whose words are lost is lost itself in four of five cases, but as many of the lost answers have no lost word, and
conversions at one ratio are not ordered by their recall, presumably since the fit has read the same sentences, repeated and
with blanks, and a question about them is other text. After polishing no lost answer has a lost word. A low recall asks for
more keys; a high one is no reason to trust an answer.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

N = TypeVar("N", int, float)


@dataclass(frozen=True, eq=False)
class AnswerErrors:
    """The errors of a conversion, for one prompt or each prompt of a batch.

    Attributes:
        logits_error: relative error of the logits, mean over positions.
        lost_share: error of the logits relative to the prompt's effect on them.
        kl_median, kl_95, kl_worst: KL divergence of the next-token distribution, in nats: median, 95th percentile and maximum
            over positions.
        n_texts: number of held-out texts per prompt.
        text_length: number of tokens in each.
        without: what comes before the text "without the prompt": "the prompt's BOS", "what was converted before", or
            "nothing".
    """

    logits_error: Float[Tensor, "*batch"]
    lost_share: Float[Tensor, "*batch"]
    kl_median: Float[Tensor, "*batch"]
    kl_95: Float[Tensor, "*batch"]
    kl_worst: Float[Tensor, "*batch"]
    n_texts: int
    text_length: int
    without: str

    @classmethod
    def of_positions(
        cls,
        error: Float[Tensor, "batch text pos"],
        size: Float[Tensor, "batch text pos"],
        effect: Float[Tensor, "batch text pos"],
        kl: Float[Tensor, "batch text pos"],
        without: str,
    ) -> "AnswerErrors":
        """From ||c - p||, ||p||, ||p - w|| and KL at each position."""
        error, size, effect, kl = (x.double() for x in (error, size, effect, kl))
        tiny = torch.finfo(torch.float64).tiny
        sizes = torch.tensor([0.5, 0.95, 1.0], dtype=torch.float64, device=kl.device)
        median, most, worst = kl.flatten(1).quantile(sizes, dim=1)
        return cls(
            logits_error=(error / size.clamp(min=tiny)).mean(dim=(1, 2)),
            lost_share=(error.square().sum(dim=(1, 2)) / effect.square().sum(dim=(1, 2)).clamp(min=tiny)).sqrt(),
            kl_median=median,
            kl_95=most,
            kl_worst=worst,
            n_texts=kl.shape[1],
            text_length=kl.shape[2],
            without=without,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "AnswerErrors":
        """The same with ``change`` applied to every measured value."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.to_tensors().items()}
        return replace(self, **changed)

    def to_tensors(self) -> dict[str, Tensor]:
        """The measured values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}

    def to_json(self) -> dict[str, object]:
        """The fields that describe the texts."""
        return {name: getattr(self, name) for name in ("n_texts", "text_length", "without")}

    def to_dict(self) -> dict[str, object]:
        """All fields; measured values as numbers for one prompt, as lists for a batch."""
        return {**{name: tensor.tolist() for name, tensor in self.to_tensors().items()}, **self.to_json()}

    @classmethod
    def read(cls, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "AnswerErrors":
        """Rebuild from the results of :meth:`to_json` and :meth:`to_tensors`."""
        known = {**plain, **tensors}
        return cls(**{f.name: known[f.name] for f in fields(cls)})

    def summary(self) -> str:
        """A short description of the error of the logits and the share lost; means for a batch."""
        error, lost = float(self.logits_error.mean()), float(self.lost_share.mean())
        prompts = f", mean of {self.logits_error.numel()} prompts" if self.logits_error.dim() else ""
        return f"logits off by {error:.2%}, {lost:.3g} of the prompt's effect lost{prompts}, held out"


MATTERS = 1.0
"""Nats, of an effect that counts, and of a loss that is one."""
N_WORST = 5


class RecalledWord(NamedTuple):
    """A word to which the prompt matters.

    Attributes:
        sentence: its sentence's number, from 0.
        word: as it stands there.
        effect, loss: nats, as defined in the module.
        was_first, is_first: whether each of its tokens is the model's first choice with the prompt, and under the bias.
    """

    sentence: int
    word: str
    effect: float
    loss: float
    was_first: bool
    is_first: bool


@dataclass(frozen=True)
class Recall:
    """What a bias still knows of its prompt.

    Attributes:
        sentences: the prompt's sentences.
        words: those that count, in order.
    """

    sentences: tuple[str, ...]
    words: tuple[RecalledWord, ...]

    @property
    def share(self) -> float:
        """The share of words that lose less than :data:`MATTERS` nats; NaN if no word counts."""
        return sum(word.loss < MATTERS for word in self.words) / len(self.words) if self.words else float("nan")

    @property
    def worst(self) -> list[RecalledWord]:
        """The words that lose most, largest loss first; those alone that lose :data:`MATTERS` nats or more."""
        lost = [word for word in self.words if word.loss >= MATTERS]
        return sorted(lost, key=lambda word: -word.loss)[:N_WORST]

    def table(self) -> Any:
        """One row per sentence: number, text, words that count, the share of those first with the prompt that stay first, the
        largest loss and its word; a DataFrame."""
        import pandas as pd

        rows = []
        for number, text in enumerate(self.sentences):
            words = [word for word in self.words if word.sentence == number]
            first = [word.is_first for word in words if word.was_first]
            worst = max(words, key=lambda word: word.loss, default=None)
            rows.append(
                {
                    "sentence": number,
                    "text": text,
                    "n_words": len(words),
                    "first_share": sum(first) / len(first) if first else float("nan"),
                    "largest_loss": float("nan") if worst is None else worst.loss,
                    "worst_word": "" if worst is None else worst.word,
                }
            )
        return pd.DataFrame(rows)

    def summary(self) -> str:
        """A short description: the share that is kept, and the worst words by name."""
        if not self.words:
            return "recall not known: the prompt matters to no word of it"
        worst = ", ".join(f"{word.word!r} ({word.loss:.1f} nats)" for word in self.worst)
        lost = f"; lost most: {worst}" if worst else ""
        return f"recall {self.share:.0%} of {len(self.words)} words of the prompt{lost}"

    def to_json(self) -> dict[str, object]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Recall":
        """Rebuild from :meth:`to_json`."""
        return cls(tuple(plain["sentences"]), tuple(RecalledWord(*word) for word in plain["words"]))


SEVERAL, UNKNOWN = "several", "unknown"
"""The method of a record with several fits, and of one without any."""


@dataclass(frozen=True, eq=False)
class BiasFit:
    """The record of an approximate bias.

    Attributes:
        method: method of :func:`kvlens.convert_prompt`; "several" if the bias contains several fits, "unknown" if it contains
            none because it was made or changed by hand.
        settings: the method's options as used; empty for several fits.
        n_reference_tokens: queries used for the fit, per layer and query head.
        n_held_out_tokens: queries not used for the fit, on which the heads' errors were measured.
        tokens: how many tokens the model has read for each prompt, by kind: of the "prompt", "sampled" one by one, "read" as
            reference or held-out text, or read "with gradients".
        seconds: wall-clock time by step.
        n_keys: number of virtual keys (or features) with a weight, per layer and key-value head.
        head_output_error: relative root mean square error of each head's output z over the held-out queries, per layer and
            query head. It shows where keys are missing; ``answers`` has the error of the model as a whole.
        mass_error: the same for the prompt's share of the normalizer.
        answers: errors of the logits and the next-token distribution; None if not measured.
        recall: which words of the prompt's own sentences the model would still say under the bias; None if not measured:
            :func:`kvlens.convert_prompt` does for one prompt that is text or a chat, :func:`kvlens.conversion.recall` for any.
        history: what was done to the bias since, each kind of step once. If it is not empty, ``n_keys``, the errors,
            ``answers`` and ``recall`` are None, because they are not known.
        parts: if there is a history, the original fits with their measured errors.
    """

    method: str
    settings: dict[str, object]
    n_reference_tokens: int
    n_held_out_tokens: int
    tokens: dict[str, int]
    seconds: dict[str, float]
    n_keys: Int[Tensor, "layer *batch kv_head"] | None
    head_output_error: Float[Tensor, "layer *batch head"] | None
    mass_error: Float[Tensor, "layer *batch head"] | None
    answers: AnswerErrors | None = None
    recall: Recall | None = None
    history: tuple[str, ...] = ()
    parts: tuple["BiasFit", ...] = ()

    BY_LAYER: ClassVar[tuple[str, ...]] = ("n_keys", "head_output_error", "mass_error")

    @property
    def fits(self) -> tuple["BiasFit", ...]:
        """The fits that the bias contains; this record itself if nothing was done to its bias."""
        return self.parts if self.history else (self,)

    @property
    def passes(self) -> float:
        """Tokens read or sampled beside the prompt, in units of one pass over it."""
        return sum(n for kind, n in self.tokens.items() if kind != "prompt") / max(1, self.tokens.get("prompt", 0))

    @staticmethod
    def of_several(records: Sequence["BiasFit"], step: str) -> "BiasFit":
        """The record of a bias that ``step`` made of biases with ``records``; none of them if it was made of an exact bias."""
        parts = tuple({id(fit): fit for record in records for fit in record.fits}.values())
        steps = dict.fromkeys([*(line for record in records for line in record.history), step])
        only = parts[0] if len(parts) == 1 else None
        return BiasFit(
            method=only.method if only else SEVERAL if parts else UNKNOWN,
            settings=only.settings if only else {},
            n_reference_tokens=sum(fit.n_reference_tokens for fit in parts),
            n_held_out_tokens=sum(fit.n_held_out_tokens for fit in parts),
            tokens=_summed(fit.tokens for fit in parts),
            seconds=_summed(fit.seconds for fit in parts),
            n_keys=None,
            head_output_error=None,
            mass_error=None,
            history=tuple(steps),
            parts=parts,
        )

    def select_prompt(self, index: int) -> "BiasFit":
        """The record of one prompt of a batch."""
        return self._of_prompts(lambda x: x[:, index], lambda x: x[index])

    def repeat(self, n: int) -> "BiasFit":
        """The record of one prompt, repeated for a batch of ``n`` equal prompts."""
        return self._of_prompts(lambda x: x[:, None].expand(-1, n, *x.shape[1:]), lambda x: x[None].expand(n, *x.shape))

    def _of_prompts(self, by_layer: Callable[[Tensor], Tensor], by_prompt: Callable[[Tensor], Tensor]) -> "BiasFit":
        changed: dict[str, Any] = {name: by_layer(tensor) for name, tensor in self._by_layer().items()}
        answers = None if self.answers is None else self.answers.map(by_prompt)
        return replace(
            self, **changed, answers=answers, parts=tuple(fit._of_prompts(by_layer, by_prompt) for fit in self.parts)
        )

    def _by_layer(self) -> dict[str, Tensor]:
        tensors = {name: getattr(self, name) for name in self.BY_LAYER}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def rows(self) -> list[dict[str, float | int]]:
        """One row per layer and query head (and prompt of a batch): ``n_keys``, ``head_output_error``, ``mass_error``; no rows
        if they are not known. Of a hybrid model layers are counted among those with attention.
        """
        if self.n_keys is None or self.head_output_error is None or self.mass_error is None:
            return []
        group = self.head_output_error.shape[-1] // self.n_keys.shape[-1]
        keys = self.n_keys.repeat_interleave(group, dim=-1)
        rows = []
        for index in itertools.product(*map(range, self.head_output_error.shape)):
            layer, *prompt, head = index
            place = {"layer": layer, **({"prompt": prompt[0]} if prompt else {}), "head": head}
            errors = {name: float(getattr(self, name)[index]) for name in ("head_output_error", "mass_error")}
            rows.append({**place, "n_keys": int(keys[index]), **errors})
        return rows

    def to_json(self) -> dict[str, object]:
        """The fields that are not tensors, as JSON types."""
        apart = (*self.BY_LAYER, "answers", "recall", "parts")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        answers, recall = (None if x is None else x.to_json() for x in (self.answers, self.recall))
        parts = [fit.to_json() for fit in self.parts]
        return {**plain, "history": list(self.history), "answers": answers, "recall": recall, "parts": parts}

    def to_tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors."""
        tensors = self._by_layer()
        if self.answers is not None:
            tensors |= {f"answers.{name}": tensor for name, tensor in self.answers.to_tensors().items()}
        for i, fit in enumerate(self.parts):
            tensors |= {f"parts.{i}.{name}": tensor for name, tensor in fit.to_tensors().items()}
        return tensors

    @classmethod
    def read(cls, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "BiasFit":
        """Rebuild from :meth:`to_json` and :meth:`to_tensors`."""
        known = {**dict.fromkeys((*cls.BY_LAYER, "recall")), **plain, **tensors}
        if known["answers"] is not None:
            known["answers"] = AnswerErrors.read(known["answers"], below("answers.", tensors))
        if known["recall"] is not None:
            known["recall"] = Recall.read(known["recall"])
        known["history"] = tuple(known["history"])
        known["parts"] = tuple(cls.read(each, below(f"parts.{i}.", tensors)) for i, each in enumerate(known["parts"]))
        return cls(**{f.name: known[f.name] for f in fields(cls)})

    def __repr__(self) -> str:
        off = "answers not measured" if self.answers is None else self.answers.summary()
        if self.history:
            fits = "" if len(self.parts) < 2 else f" of {len(self.parts)} fits"
            off = f"error unknown{fits}, after: {'; '.join(self.history)}"
        known = "" if self.recall is None else f"; {self.recall.summary()}"
        cost = ", ".join(f"{n:,} {kind}" for kind, n in self.tokens.items() if n)
        return f"BiasFit({self.method}: {off}{known}; {sum(self.seconds.values()):.3g} s, tokens: {cost or 'none'})"


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, with the prefix removed from their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _summed(each: Iterable[Mapping[str, N]]) -> dict[str, N]:
    total: dict[str, N] = {}
    for some in each:
        for name, value in some.items():
            total[name] = value + total.get(name, 0)  # of whole numbers, and of seconds
    return total


FitRecord = BiasFit | None


def since(record: FitRecord, step: str) -> FitRecord:
    """The record after ``step``, an operation that keeps exact biases exact."""
    return None if record is None else edited(record, step)


def edited(record: FitRecord, step: str) -> BiasFit:
    """The record after ``step``, an operation that makes also an exact bias one of unknown errors."""
    return BiasFit.of_several([] if record is None else [record], step)


def of_sum(records: Iterable[FitRecord], step: str) -> FitRecord:
    """The record of a sum."""
    approximate = [record for record in records if record is not None]
    return BiasFit.of_several(approximate, step) if approximate else None
