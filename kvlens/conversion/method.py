"""Converting a softmax model's prompt: exactly with all its keys, or approximately with a known error (ICLCA sec. 5, ICLAA).

**A conversion method.** A conversion method for softmax models is a frozen dataclass: its fields are its options, its docstring
documents them, and `fit` returns the bias. `fit` gets a `Teacher` with the exact conversion (`teacher.exact.bias`: every key
and value of the prompt) and, for methods that need it, reference text. The base class `Approximation` has the options for that
text, and records the fit and its measured errors in `bias.fit`.

```python
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from kvlens.checks import Within, checked
from kvlens.conversion import Approximation, Teacher
from kvlens.kv_bias import Keys, KVBias


@checked
@dataclass(frozen=True, kw_only=True)
class LastKeys(Approximation):
    '''Keep only the prompt's last keys.

    Attributes:
        n_keys: number of keys per head.
    '''

    name: ClassVar[str] = "last"

    n_keys: Annotated[int, Within(1, 4096)] = 8

    def fit(self, teacher: Teacher) -> KVBias:
        def last(keys: Keys) -> Keys:
            near = keys.distance <= self.n_keys  # the last token of each prompt is at distance 1
            return replace(keys, b_d=keys.b_d * near, b_kv=keys.b_kv * near[..., None])

        return teacher.exact.bias.map_layers(lambda layer: layer.of_attention(last))
```

`convert_prompt(model, prompt, method=LastKeys(n_keys=4))` works as it is. A method that keeps a number of keys derives from
`FewKeys` (`kvlens/conversion/few_keys.py`: `n_features`, `ratio` and their refusals; `kvzip.py` beside it keeps keys by a
score); `without=` and padding leave tokens out, whose `b_d` is 0. To add
it to kvlens itself, give it a line in `METHODS` of `kvlens/conversion/convert.py`, which adds the shorthand `method="last",
n_keys=4`; export it beside the others in `kvlens/conversion/__init__.py`, and name it in `convert_prompt`'s docstring.
`SHORTHAND` in `tests/conversion/test_method.py` has every method. One that keeps keys is also in `METHODS` of
`test_prompt_pass.py` beside it and of `kvlens/papers/iclca/compaction.py`, for the table in
`tests/benchmarks/results/fewer_keys.md`; one to test on the bridge, in that of `tests/bridge/test_approximations.py`. Unused
keys are zeroed here, not removed, so the tensors keep their size. Its test compares it with a known result: here, keeping all
12 keys is exact.

```python
import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, convert_prompt

sizes = dict(n_layers=2, d_model=16, d_head=8, n_ctx=64, d_vocab=20, act_fn="gelu", seed=0, device="cpu", dtype=torch.float64)
model = HookedKVTransformer(HookedKVTransformerConfig(**sizes))
prompt = torch.arange(12)
exact = convert_prompt(model, prompt)
texts = dict(n_continuations=4, continuation_length=8)
errors = []
for n in (2, 6, 12):
    bias = convert_prompt(model, prompt, method=LastKeys(n_keys=n, **texts))
    assert (bias.stacked("b_d") != 0).sum(dim=-1).unique().tolist() == [n]
    assert bias.fit.method == "last" and bias.fit.settings["n_keys"] == n
    errors.append(float(bias.fit.answers.logits_error))
assert torch.equal(bias.stacked("b_kv"), exact.stacked("b_kv")) and errors[2] < 1e-11 < min(errors[:2])
```
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from kvlens.conversion.measured import answer_errors, without_prompt
from kvlens.conversion.prompt import PromptBatch
from kvlens.conversion.prompt_pass import ConvertedExactly, continued
from kvlens.conversion.prompt_texts import Texts
from kvlens.conversion.reference_queries import TextOptions, queries_under_bias, reference_text
from kvlens.errors import KVLensError
from kvlens.kv_bias import AnswerErrors, BiasFit, KVBias
from kvlens.model import attention_parts
from kvlens.model.protocol import KVModel
from kvlens.ops.landmarks import Errors, PromptKeys, Queries, joined_queries, output_errors

SAMPLING, READING, MEASURING = "sampling reference text", "reading reference text", "measuring errors"


class Teacher:
    """The exact conversion, the reference texts, and a record of the cost of reading them.

    Attributes:
        prompt: the prompt's tokens.
        exact: all of this prompt's keys.
        old: the bias that the conversion continues.
        whole: the exact bias after ``old``, which replaces the prompt while reference text is read.
        seen: reference texts for the fit, [batch, text, pos] each.
        held_out: continuations by the model that are not used for fitting, for measuring errors.
        lengths: number of real tokens of each prompt.
        method: the method, with its options for the text.
    """

    def __init__(
        self,
        model: KVModel,
        prompt: PromptBatch,
        exact: ConvertedExactly,
        old: KVBias | None,
        method: "Approximation",
        on_progress: Callable[[str, float], None] = lambda step, done: None,
    ):
        self.prompt = prompt
        self.model, self.exact, self.old, self.method, self._on_progress = model, exact, old, method, on_progress
        self.lengths = torch.as_tensor(prompt.lengths()).expand(prompt.tokens.shape[0])
        self.seconds: dict[str, float] = {}
        with self.timed("reference"):
            self.whole = continued(old, exact.bias)
            sampling = partial(self.tell, SAMPLING)
            texts = reference_text(model, prompt, exact, self.whole, method, method.fits_on_text, sampling)
        self.seen, self.held_out, n_sampled = texts
        self.tokens = {"prompt": int(self.lengths.max()), "sampled": n_sampled}
        self.without = without_prompt(model, prompt, exact, old)

    @property
    def n_layers(self) -> int:
        """Layers with attention."""
        return len(self.exact.bias.attention_layers)

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads of a layer."""
        return self.exact.bias.attention[0].n_kv_heads

    def keys(self, layer: int) -> PromptKeys:
        """The prompt's keys of one layer."""
        return self.exact.keys(self.model, layer)

    def read(self, bias: KVBias, texts: Texts, layers: range | None = None) -> list[Queries]:
        """Queries of texts, with ``bias`` replacing the prompt."""
        self.count("read", texts)
        with self.timed("reference"):
            if texts is self.seen and layers is None:
                self.tell(READING)
            groups = [queries_under_bias(self.model, bias, tokens, layers) for tokens in texts]
            return [joined_queries(own) for own in zip(*groups, strict=True)]

    def head_errors(self, bias: KVBias, layer: int, queries: Queries) -> Errors:
        """The relative errors of one layer's heads on its queries if ``bias`` (of this prompt alone) replaces the prompt."""
        part, prompt = bias.attention[layer], self.keys(layer)
        return output_errors(
            queries, prompt, lambda block: part.phi(block.q, prompt.rule, block.positions[None]), part.b_kv, part.b_d
        )

    def tell(self, step: str, done: float = 0.0) -> None:
        """Tell how much of a step of the fit is done, if it is one of those that the method names."""
        shares = self.method.steps()
        if step in shares:
            before = sum(list(shares.values())[: list(shares).index(step)])
            self._on_progress(step, (before + done * shares[step]) / sum(shares.values()))

    def count(self, kind: str, texts: Texts, times: int = 1) -> None:
        """Add to the number of tokens that the model has read for each prompt."""
        self.tokens[kind] = self.tokens.get(kind, 0) + times * sum(tokens[0].numel() for tokens in texts)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Count the time spent inside under ``step``, and not under an enclosing step."""
        start, inner = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            spent = time.perf_counter() - start - (sum(self.seconds.values()) - inner)
            self.seconds[step] = self.seconds.get(step, 0.0) + spent

    @torch.no_grad()
    def with_record(self, fit: KVBias, dtype: torch.dtype) -> KVBias:
        """The bias of this prompt alone in ``dtype``, with the errors of the stored numbers on held-out texts as its record."""
        self.tell(MEASURING)
        stored = fit.to(dtype)
        bias = stored.to(fit.dtype)
        queries = self.read(self.whole, [self.held_out])
        with self.timed("errors"):
            errors = [self.head_errors(bias, layer, each) for layer, each in enumerate(queries)]
        answers = self._answers(bias)
        record = BiasFit(
            method=self.method.name,
            settings=self.method.to_json(),
            n_reference_tokens=sum(tokens[0].numel() for tokens in self.seen) if self.method.fits_on_text else 0,
            n_held_out_tokens=self.held_out[0].numel(),
            tokens=dict(self.tokens),
            seconds=dict(self.seconds),
            n_keys=torch.stack([(part.b_d != 0).sum(dim=-1) for part in bias.attention]),
            head_output_error=torch.stack([output for output, _ in errors]),
            mass_error=torch.stack([mass for _, mass in errors]),
            answers=answers,
        )
        return replace(stored, record=record)

    def _answers(self, bias: KVBias) -> AnswerErrors | None:
        if not self.method.n_held_out:
            return None
        self.count("read", [self.held_out], times=3)
        with self.timed("answers"):
            return answer_errors(self.model, self.whole, continued(self.old, bias), self.without, self.held_out)


class ConversionMethod:
    """How the prompt of a softmax model becomes a bias: :class:`Exact`, or an :class:`Approximation`.

    Attributes:
        name: the method's name in ``method="name"`` and in the record of a bias (``bias.fit.method``).
        shorthand: other names that ``convert_prompt(..., method="name", option=...)`` takes for an option.
    """

    name: ClassVar[str]
    shorthand: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True)
class Exact(ConversionMethod):
    """Keep every key of the prompt unchanged: logits equal those with the prompt in front, up to rounding. No options."""

    name: ClassVar[str] = "exact"


@dataclass(frozen=True, kw_only=True)
class Approximation(ConversionMethod, TextOptions, ABC):
    """A method whose bias is not exact; its errors are measured on reference text (:class:`TextOptions`) and recorded.

    A subclass is a frozen dataclass decorated by :func:`~kvlens.checks.checked`, which checks fields by their annotations.

    Attributes:
        fits_on_text: whether ``fit`` reads the reference text; otherwise it is used only to measure errors.
    """

    fits_on_text: ClassVar[bool] = False

    def check_model(self, model: KVModel) -> None:
        """Raise KVLensError if the method does not support ``model``. Called before the prompt is read."""

    def steps(self) -> dict[str, float]:
        """The steps of a fit, in order, each with its share of the time, in any unit; for progress bars."""
        return {SAMPLING: 20.0, READING: 15.0, MEASURING: 5.0}

    @abstractmethod
    def fit(self, teacher: Teacher) -> KVBias:
        """The bias of the prompt alone, with a batch axis.

        Args:
            teacher: ``exact.bias`` holds all keys and values of the prompt (:class:`~kvlens.kv_bias.VirtualKeys`);
                ``read(whole, seen)`` returns each layer's queries on the reference text, and ``keys(layer)`` the prompt's keys.
        """

    def keeps_every_key(self, lengths: Sequence[int]) -> bool:
        """Whether prompts of these lengths keep all of their keys, which is exact, so that nothing is fitted or recorded."""
        return False


def needs_plain_scores(model: KVModel, method: str) -> None:
    """Raise KVLensError if a model's scores are not plain exp(q.k), the only kind that ``method`` can approximate."""
    for part in attention_parts(model):
        rule = part.score_rule()
        for what, present in (
            ("ALiBi", rule.slopes is not None),
            ("local windows", rule.window is not None),
            ("soft-capping", rule.soft_cap is not None),
        ):
            if present:
                raise KVLensError(
                    f'convert_prompt: method="{method}" approximates exp(q.k), but this model\'s scores also have {what}: '
                    'use method="exact" or "landmark", which score keys in the same way as the model'
                )
