"""The target of every approximation: the prompt with all its keys, and text read after it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvlens.components import LayerBias
from kvlens.conversion.prompt import PromptTokens
from kvlens.conversion.softmax.answers import answer_errors, without_prompt
from kvlens.conversion.softmax.prompt_pass import ConvertedExactly, continued
from kvlens.conversion.softmax.reference import Texts, read_queries, reference_text
from kvlens.conversion.softmax.settings import TextOptions
from kvlens.kv_bias import AnswerErrors, BiasFit, KVBias
from kvlens.model.protocol import ReadsPrompts
from kvlens.ops.landmarks import PromptKeys, Queries, joined, output_errors


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
        verbose: whether slow steps show a progress bar.
    """

    def __init__(
        self,
        model: ReadsPrompts,
        prompt: PromptTokens,
        exact: ConvertedExactly,
        old: KVBias | None,
        options: TextOptions,
        verbose: bool = True,
    ):
        self.prompt = prompt
        self.model, self.exact, self.old, self.options, self.verbose = model, exact, old, options, verbose
        self.lengths = torch.as_tensor(prompt.lengths()).expand(prompt.tokens.shape[0])
        self.seconds: dict[str, float] = {}
        with self.timed("reference"):
            self.whole = continued(old, exact.bias)
            fits = getattr(options, "fits_on_text", True)
            self.seen, self.held_out, n_sampled = reference_text(model, prompt, exact, self.whole, options, fits)
        self.tokens = {"prompt": int(self.lengths.max()), "sampled": n_sampled}
        self.without = without_prompt(model, prompt, exact, old)

    @property
    def n_layers(self) -> int:
        """Layers with attention."""
        return len(self.exact.bias.b_KV)

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads of a layer."""
        return self.exact.bias.b_KV.shape[2]

    def keys(self, layer: int) -> PromptKeys:
        """The prompt's keys of one layer."""
        return self.exact.keys(self.model, layer)

    def read(self, bias: KVBias, texts: Texts, layers: range | None = None) -> list[Queries]:
        """Queries of texts, with ``bias`` replacing the prompt."""
        self.count("read", texts)
        with self.timed("reference"):
            groups = [read_queries(self.model, bias, tokens, layers) for tokens in texts]
            return [joined(own) for own in zip(*groups, strict=True)]

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
    def with_record(self, fit: KVBias, method: str, fits_on_text: bool, dtype: torch.dtype) -> KVBias:
        """The bias of this prompt alone in ``dtype``, with the errors of the stored numbers on held-out texts as its record."""
        stored = fit.to(dtype)
        bias = stored.to(fit.b_KV.dtype)
        queries = self.read(self.whole, [self.held_out])
        with self.timed("errors"):
            errors = [self._errors(bias, layer, each) for layer, each in enumerate(queries)]
        answers = self._answers(bias)
        record = BiasFit(
            method=method,
            settings=self.options.to_json(),
            n_reference_tokens=sum(tokens[0].numel() for tokens in self.seen) if fits_on_text else 0,
            n_held_out_tokens=self.held_out[0].numel(),
            tokens=dict(self.tokens),
            seconds=dict(self.seconds),
            n_keys=(bias.b_D != 0).sum(dim=-1),
            head_output_error=torch.stack([output for output, _ in errors]),
            mass_error=torch.stack([mass for _, mass in errors]),
            answers=answers,
        )
        return stored._made(record)

    def _answers(self, bias: KVBias) -> AnswerErrors | None:
        if not self.options.n_held_out:
            return None
        self.count("read", [self.held_out], times=3)
        with self.timed("answers"):
            return answer_errors(self.model, self.whole, continued(self.old, bias), self.without, self.held_out)

    def _errors(self, bias: KVBias, layer: int, queries: Queries) -> tuple[Tensor, Tensor]:
        part, prompt = LayerBias.of(bias, bias.attention_layers[layer], bias.b_KV.device), self.keys(layer)
        return output_errors(
            queries,
            prompt,
            lambda block: part.phi(block.q, prompt.rule, block.positions[None], part.b_kv, part.b_d),
            part.b_kv,
            part.b_d,
        )
