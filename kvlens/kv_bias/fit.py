"""How an approximate bias was made, the error of its answers, and what was done to it since.

A record holds errors that were measured for exactly the bias that it belongs to: any change to the bias removes them and adds a
line to ``history``. The original fits with their measured errors stay in ``parts``.

The record of an exact bias is None; sums, multiples and selections of exact biases are exact too. Rounding a bias, or replacing
its numbers, makes it approximate with an unknown error.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.kv_bias.answers import AnswerErrors
from kvlens.kv_bias.fingerprint import Fingerprint
from kvlens.kv_bias.recall import Recall

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
        history: what was done to the bias since, each kind of step once. If it is not empty, ``n_keys``, the errors and
            ``answers`` are None, because they are not known.
        parts: if there is a history, the original fits with their measured errors.
    """

    method: str
    settings: dict[str, Any]
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

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer and query head (and prompt of a batch): ``n_keys``, ``head_output_error``, ``mass_error``; no rows
        if they are not known. Of a hybrid model layers are counted as in ``bias.b_KV``, among those with attention.
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

    def to_json(self) -> dict[str, Any]:
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


def _summed(each: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for some in each:
        for name, value in some.items():
            total[name] = total.get(name, 0) + value
    return total


Record = BiasFit | None


def since(record: Record, step: str) -> Record:
    """The record after ``step``, an operation that keeps exact biases exact."""
    return None if record is None else _after(record, step)


def of_sum(records: Iterable[Record], step: str) -> Record:
    """The record of a sum."""
    approximate = [record for record in records if record is not None]
    return BiasFit.of_several(approximate, step) if approximate else None


def replaced(record: Record, before: Mapping[str, Any], now: Mapping[str, Any]) -> Record:
    """The record after dataclasses.replace, given the old and new values of fields by name."""
    names = [name for name, value in before.items() if not _same(value, now[name])]
    return _after(record, f"{', '.join(names)} replaced") if names else record


def rounded(bias: Any, dtype: torch.dtype) -> Record:
    """The record after a change of dtype. Rounding to half precision adds an unmeasured error of at least 0.1 %."""
    lost = torch.finfo(dtype).eps > max(torch.finfo(bias.stored()["b_KV"].dtype).eps, torch.finfo(torch.float32).eps)
    is_softmax = bias.fingerprint.attention != "linear"
    return _after(bias.fit, f"rounded to {str(dtype).removeprefix('torch.')}") if lost and is_softmax else bias.fit


def _after(record: Record, step: str) -> BiasFit:
    return BiasFit.of_several([] if record is None else [record], step)


def _same(a: Any, b: Any) -> bool:
    """Whether a field is unchanged: numbers are compared by value, tensors (and their containers) by identity."""
    return a is b or (type(a) is type(b) and isinstance(a, int | Fingerprint) and a == b)
