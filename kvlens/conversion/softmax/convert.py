"""Converting a prompt to the bias of a softmax model: the prompt's pass, the method, continuing a bias, the fit record."""

from collections.abc import Sequence
from typing import Any

import torch

from kvlens.conversion.prompt import PromptTokens
from kvlens.conversion.softmax.method import Approximation, ConversionMethod
from kvlens.conversion.softmax.prompt_pass import as_batch, attention_parts, continued, convert_exactly
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.errors import KVLensError
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.kv_bias.fit import of_sum
from kvlens.model.protocol import ReadsPrompts


def convert_softmax_prompt(
    model: ReadsPrompts,
    prompt: PromptTokens,
    old: KVBias | None,
    fingerprint: Fingerprint,
    method: ConversionMethod,
    fwd_hooks: Sequence[Any] = (),
    verbose: bool = True,
) -> tuple[KVBias, KVBias]:
    """The bias of :func:`kvlens.convert_prompt`, which checks the prompt and the bias that it continues, and the exact bias of
    this prompt alone, both with a batch axis."""
    method.check_model(model)
    if isinstance(method, Approximation) and fingerprint.layers_differ:
        raise KVLensError(
            f'convert_prompt: method="{method.name}" shares out keys over layers of equal heads, and this model has others: '
            'use method="exact"'
        )
    if isinstance(method, Approximation) and not attention_parts(model):
        raise KVLensError(
            f'convert_prompt: method="{method.name}" reduces the keys of softmax attention, and this model has none: its '
            'states have the same size for every prompt; use method="exact"'
        )
    exact = convert_exactly(model, prompt, fwd_hooks, old, fingerprint, method.needs_queries)
    bias, whole, old = exact.bias, exact.bias, exact.old
    lengths = torch.as_tensor(prompt.lengths()).reshape(-1).tolist()
    if isinstance(method, Approximation) and not method.keeps_every_key(lengths):
        bias.check_finite("convert_prompt")
        wide, dtype = torch.promote_types(bias.b_KV.dtype, torch.float32), bias.b_KV.dtype  # bfloat16 is too coarse for a fit
        exact = exact._replace(bias=bias.to(wide))
        teacher = Teacher(model, prompt, exact, None if old is None else old.to(wide), method, verbose)
        bias = _approximated(teacher, method, dtype)
    return bias if old is None else _on_top_of(old, bias), whole


def _on_top_of(old: KVBias, new: KVBias) -> KVBias:
    """``new`` after ``old``. The errors of ``new``, measured after ``old``, are those of both together if ``old`` is exact."""
    if old.fit is None:
        return continued(old, new)._made(new.fit)
    before = as_batch(old, new.b_KV.shape[1]).fit
    kept = "every key kept" if new.fit is None else "fitted"
    longest = int(torch.as_tensor(new.n_prompt_tokens).max())
    step = f"continued with another prompt of {longest} tokens, {kept}"
    return continued(old, new)._made(of_sum([before, new.fit], step))


def _approximated(teacher: Teacher, method: Approximation, dtype: torch.dtype) -> KVBias:
    with teacher.timed("fit"):
        bias = method.fit(teacher)
    _check_fitted(method, bias, teacher)
    return teacher.with_record(bias, method.name, method.fits_on_text, dtype)


def _check_fitted(method: Approximation, bias: Any, teacher: Teacher) -> None:
    """Raise KVLensError unless ``fit`` returned a finite bias of these prompts."""
    say, whole = f"{type(method).__name__}.fit", teacher.exact.bias
    if bias.batch_size != whole.batch_size:
        came = "none" if bias.batch_size is None else bias.batch_size
        raise KVLensError(f"{say} must return a bias with a batch axis of {whole.batch_size} prompts, got {came}")
    bias.check_finite(say)
