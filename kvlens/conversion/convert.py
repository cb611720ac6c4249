"""A conversion in twelve steps: a prompt becomes the KV bias that replaces it. The package is ordered by them.

1. The method is found by its name, with its options, or is given (:func:`method_of`).
2. The prompt becomes one batch of tokens, of which parts may be deleted or replaced (:mod:`kvlens.conversion.prompt`).
3. What is attached, or ``initial``, is what the bias continues from: it must be of this model and of as many prompts.
4. With linear attention one pass over the prompt leaves the bias in the states of the layers, which is exact (ICLCA alg. 1,
   :mod:`kvlens.conversion.linear`), and the next is step 11.
5. With softmax attention it leaves every key and value, which is exact (:mod:`kvlens.conversion.prompt_pass`), and for
   ``method="exact"`` the next is step 10.
6. The prompt repeated, its sentences with blanks, and what the model would write after it become reference text
   (:mod:`kvlens.conversion.reference_queries`, :mod:`~kvlens.conversion.prompt_texts`).
7. The model reads that text with every key of the prompt (``Teacher``, :mod:`kvlens.conversion.method`).
8. The method makes fewer keys, or features, of what it read: :mod:`~kvlens.conversion.few_keys` fits weights and values,
   :mod:`~kvlens.conversion.moved_keys` moves keys, :mod:`~kvlens.conversion.kvzip` keeps keys as they are,
   :mod:`~kvlens.conversion.features` sums or trains features; :mod:`~kvlens.conversion.gradients` has what takes gradients.
9. Errors of heads and answers are measured on texts that no fit has read (:mod:`kvlens.conversion.measured`).
10. If another bias is continued, its keys stay beside the new ones, moved back by as many positions as this prompt has.
11. Every number must be finite; a single prompt loses its batch axis.
12. Recall is measured: which of the prompt's words the model would still say. Then heads are stored as wide as they need to be.
"""

import contextlib
import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from kvlens.arguments import Positions, Span
from kvlens.chat import Chat, as_prompt, prompt_layout
from kvlens.checks import Count, checked, ensure, one_of
from kvlens.conversion.features import EluKernel, Learned, RandomProjections, TaylorPolynomial
from kvlens.conversion.few_keys import AttentionMatching, Landmark
from kvlens.conversion.kvzip import KVzip
from kvlens.conversion.linear import convert_linear_prompt
from kvlens.conversion.measured import recalled
from kvlens.conversion.method import Approximation, ConversionMethod, Exact, Teacher
from kvlens.conversion.prompt import (
    Counterfactuals,
    Prompt,
    PromptBatch,
    Replacement,
    UpTo,
    counterfactuals_of,
    only_row,
    prompt_batch,
)
from kvlens.conversion.prompt_pass import as_batch, continued, convert_exactly
from kvlens.errors import KVLensError, check_known, nearest, nearest_name, warn
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.kv_bias.fit import Recall, of_sum
from kvlens.model import HookedKVTransformer, attention_parts
from kvlens.model.protocol import Hooks, KVModel
from kvlens.terminal import progress_bar
from kvlens.units import layout_of_tokens

SHOWN_AFTER = 1.0
"""Seconds of a fit before its bar shows."""


@checked
def convert_prompt(
    model: KVModel,
    prompt: Prompt | Counterfactuals,
    *,
    upto: UpTo | None = None,
    without: Sequence[Span] = (),
    replace: Mapping[Span, Replacement] | None = None,
    positions: Positions = "kept",
    initial: KVBias | None = None,
    prepend_bos: bool | None = None,
    fwd_hooks: Hooks = (),
    detach: bool = True,
    segment_length: Count | None = None,
    on_progress: Callable[[float], None] | None = None,
    method: str | ConversionMethod = "exact",
    verbose: bool = True,
    **options: object,
) -> KVBias:
    """Turn a prompt into the bias that replaces it, at the cost of one forward pass over it.

    With the bias attached, the logits of any text equal those of [prompt; text], up to rounding. With softmax attention this
    holds for ``method="exact"``, which keeps every key; the other methods approximate it. Prompt and text round separately, so
    that the converted and the prompted pass differ by about as much as each differs from float64 (3e-7, SmolLM2 1e-6; with
    scores of 100,000 1e-5 and in rare cases 1e-3).

    >>> from kvlens import HookedKVTransformer
    >>> model = HookedKVTransformer.from_zoo("bigram-linear")
    >>> prompt, text = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[9, 2, 6]])
    >>> with model.kv_bias(convert_prompt(model, prompt)):
    ...     converted = model(text)
    >>> torch.allclose(converted, model(torch.cat([prompt, text], dim=1))[:, 5:], atol=1e-4)
    True

    Args:
        model: a HookedKVTransformer, linear or softmax; or a :class:`kvlens.KVTransformerBridge`.
        prompt: a string, a :class:`~kvlens.Chat` or its list of messages, a list of those (their biases form a batch),
            tokens [pos] or [batch, pos], or variants of one prompt (:func:`counterfactuals`, a batch).
        upto: "question": of a chat, only what stands in front of its question; the text that reads it begins with the rest of
            the chat, ``chat.split(model)[1]``.
        without: token ranges (start, stop) of one prompt that are deleted from it.
        replace: token range -> text or tokens that replace it, of the same number of tokens.
        positions: "kept": what follows deleted tokens keeps its position; "closed": it moves up. See
            :mod:`kvlens.conversion.prompt` for what a gap means.
        initial: the bias to continue from; None continues from what the model holds now (nothing, a trained bias, an
            attached one). Continuing equals converting the concatenation of both prompts' tokens.
        prepend_bos: whether to prepend a BOS to strings; None follows the model's default if no bias is attached and
            ``initial`` is None, and prepends none otherwise. Tokens are not changed.
        fwd_hooks: TransformerLens hooks (name, function) that act inside the prompt's own pass. If they change the old
            bias (``hook_b_kv``, ``hook_b_d``, ``hook_b_keys``), the new one continues from the changed one.
        detach: False keeps the graph, so that gradients flow from the bias into weights and activations.
        segment_length: the pass runs in segments of this many tokens per row, each through all layers before the next, so that
            memory does not grow with the prompt. None chooses a length, unless something is hooked or ``detach=False``: then
            the prompt runs as a whole, as hooks expect. If a length is given, hooks fire once per segment and see only that
            segment's tokens: in a tensor with a position axis, position 0 is the segment's first token. ``hook_b_kv`` and
            ``hook_b_d`` fire for every segment, ``hook_last_k``, ``hook_last_v`` and ``hook_last_q`` only for the first, and
            the new bias continues from the last segment's bias.
        on_progress: called with the fraction that is done: after each segment of the prompt with linear attention; with softmax
            attention during a fit, and with 1 when the bias is ready.
        method: for softmax attention, how the prompt's keys are kept: an object such as ``Landmark(n_keys=32)``, whose class
            describes its options, or a name: "exact" (:class:`~kvlens.conversion.Exact`, every key), "landmark"
            (:class:`~kvlens.conversion.Landmark`, few keys with fitted weights). For comparison: "attention_matching"
            (:class:`~kvlens.conversion.AttentionMatching`); "kvzip" (:class:`~kvlens.conversion.KVzip`), some of the keys as
            they are; "random", "taylor", "elu_plus_one" and "learned" features
            (:class:`~kvlens.conversion.RandomProjections`, :class:`~kvlens.conversion.TaylorPolynomial`,
            :class:`~kvlens.conversion.EluKernel`, :class:`~kvlens.conversion.Learned`). Linear attention is always exact.
        verbose: False hides the progress bar of a fit, which shows after a second.
        options: of a method given by name: ``method="landmark", n_features=32`` is
            ``method=Landmark(n_keys=32)``.

    Returns:
        The whole new bias, ``initial`` included; with a batch axis for a list or a [batch, pos] tensor. A warning says where
        the prompt, with what it continues from, is longer than ``n_ctx`` and the positions allow it.

    Raises:
        KVLensError: options that the method does not have, ``upto`` of what is no chat, an empty prompt, tokens outside
            the vocabulary, a prompt beyond ``n_ctx`` where positions are learned, ``initial`` of another model or batch,
            weights or activations that are not finite, a ``segment_length`` below 1, a bidirectional model.

    Source: ICLCA sec. 4, alg. 1; the shift state and padding are kvlens'.
    """
    if isinstance(model, HookedKVTransformer):
        _check_convertible(model)
    is_softmax = model.cfg.attention != "linear"
    way = _checked_method(is_softmax, method, options)
    with contextlib.ExitStack() as stack:
        if isinstance(model, HookedKVTransformer):
            stack.enter_context(model._thread.passes(model.attached_kv_bias is not None))
        if prepend_bos is None:
            prepend_bos = model.prepends_bos and initial is None and model.attached_kv_bias is None
        tokens = _read_prompt(model, prompt, upto, without, replace, positions, prepend_bos)
        stack.enter_context(torch.set_grad_enabled(not detach and torch.is_grad_enabled()))
        if initial is not None:
            stack.enter_context(model.kv_bias(initial))
        old = model.attached_kv_bias
        fingerprint = model.fingerprint() if initial is None else initial.fingerprint  # attaching `initial` compared it
        if old is not None:
            old.fingerprint.check(fingerprint, "convert_prompt: the bias to continue from no longer fits")
        _warn_of_length(model, tokens, old)
        if is_softmax:
            bar = _bar(verbose, on_progress)
            bias, whole = _convert_softmax(model, tokens, old, fingerprint, way, fwd_hooks, bar)
            bias = bias if tokens.has_batch or (old is not None and not old.single) else bias.select_prompt(0)
        else:
            assert isinstance(model, HookedKVTransformer)
            bias = convert_linear_prompt(model, tokens, old, fingerprint, fwd_hooks, segment_length, on_progress)
        bias.check_finite("convert_prompt")
        changed = bool(len(without) or replace or fwd_hooks or isinstance(prompt, Counterfactuals))
        if isinstance(way, Approximation) and way.n_held_out and old is None and not changed:
            bias = _with_recall(model, prompt, tokens, whole, bias)
        bias = bias if bias.fit is None else bias.narrowed()
        if is_softmax and on_progress is not None:
            on_progress(1.0)
    return bias


@contextlib.contextmanager
def _bar(verbose: bool, on_progress: Callable[[float], None] | None) -> Iterator[Callable[[str, float], None]]:
    """What is called with a step of a fit and the fraction of the whole that is done: as a bar, and to ``on_progress``."""
    with progress_bar("convert_prompt", after=SHOWN_AFTER, shown=verbose) as bar:

        def tell(step: str, done: float) -> None:
            bar(step, done)
            if on_progress is not None:
                on_progress(done)

        yield tell


def _check_convertible(model: HookedKVTransformer) -> None:
    """Raise KVLensError if the model's prompts cannot be converted to a bias."""
    if model.cfg.why_no_kv_bias is not None:
        raise KVLensError(f"convert_prompt: a prompt of this model has no KV bias: {model.cfg.why_no_kv_bias}")
    if model.cfg.attention_dir != "causal":
        raise KVLensError(
            "convert_prompt: with bidirectional attention the prompt's own keys depend on the text after it, so no single "
            "bias can replace the prompt for every text"
        )
    if model.cfg.ungroup_grouped_query_attention:
        raise KVLensError("convert_prompt: call model.set_ungroup_grouped_query_attention(False) first")


METHODS: dict[str, type[ConversionMethod]] = {
    "exact": Exact,
    "landmark": Landmark,
    "attention_matching": AttentionMatching,
    "kvzip": KVzip,
    "random": RandomProjections,
    "taylor": TaylorPolynomial,
    "elu_plus_one": EluKernel,
    "learned": Learned,
}
"""The methods by name."""


def method_of(method: str | ConversionMethod, options: Mapping[str, Any], others: Collection[str] = ()) -> ConversionMethod:
    """The method given as an object, or by name and options.

    Args:
        method: an object, whose options are its own, or a name in :data:`METHODS`.
        options: options for a method given by name.
        others: the caller's other arguments, for suggesting the nearest name.

    Raises:
        KVLensError: an unknown method, an unknown option (the nearest is suggested), or an invalid value.
    """
    if isinstance(method, ConversionMethod):
        if options:
            near = nearest(next(iter(options)), others)
            raise KVLensError(f"convert_prompt: {', '.join(options)}: options of a method belong into {method}{near}")
        return method
    ensure("convert_prompt: method", one_of(METHODS), method)
    kind = METHODS[method]
    known = option_names(kind)
    check_known(f'convert_prompt: with method="{method}" no argument', options, [*known, *others])
    given = {kind.shorthand.get(name, name): value for name, value in options.items()}
    if len(given) < len(options):
        twice = next(name for name in options if kind.shorthand.get(name) in options)
        raise KVLensError(f"convert_prompt: {twice} and {kind.shorthand[twice]} are the same option: give one of them")
    return kind(**given)


def option_names(kind: type[ConversionMethod]) -> list[str]:
    """The options of a method, with their shorthand."""
    return [*(field.name for field in fields(kind)), *kind.shorthand]  # type: ignore[arg-type]


def _checked_method(is_softmax: bool, method: str | ConversionMethod, options: Mapping[str, Any]) -> ConversionMethod:
    """The method; linear attention has only the exact one."""
    if method == "exact" and not options:
        return Exact()
    if is_softmax:
        return method_of(method, options, _own_arguments())
    asked = [*(["method"] if method != "exact" and not isinstance(method, Exact) else []), *options]
    if asked:
        near = nearest_name(next(iter(options), ""), _own_arguments(), 0.75)
        raise KVLensError(
            f"convert_prompt: {', '.join(asked)}: with linear attention the conversion is always exact and has no options"
            f"{'' if near is None else f'; did you mean {near!r}?'}"
        )
    return Exact()


@functools.cache
def _own_arguments() -> tuple[str, ...]:
    """The arguments of :func:`convert_prompt` that are not options of a method."""
    return tuple(name for name in inspect.signature(convert_prompt).parameters if name != "options")


def _read_prompt(
    model: KVModel, prompt: Any, upto: UpTo | None, without: Any, replace: Any, positions: Positions, prepend_bos: bool
) -> PromptBatch:
    if isinstance(prompt, Counterfactuals):
        if len(without) or replace or upto:
            raise KVLensError(
                "convert_prompt: counterfactuals say what is read, deleted and replaced: leave upto, without and replace out"
            )
        model.check_tokens(prompt.tokens)
        return prompt.as_prompt()
    read = prompt_batch(model, prompt, prepend_bos, upto=upto)
    if not len(without) and not replace:
        return read
    made = counterfactuals_of(model, only_row(read), [without], [replace or {}], positions)
    return dataclasses.replace(made.as_prompt(), has_batch=read.has_batch)


def _warn_of_length(model: KVModel, prompt: PromptBatch, old: KVBias | None) -> None:
    """Warn if the prompt is longer than ``n_ctx`` and the positions allow it; otherwise it is refused elsewhere."""
    before = 0 if old is None else torch.as_tensor(old.n_prompt_tokens).cpu()
    n_tokens = int((torch.as_tensor(prompt.n_positions()).cpu() + before).max())
    if not model.cfg.has_position_limit and n_tokens > model.cfg.n_ctx:
        warn(
            f"The prompt is longer than n_ctx={model.cfg.n_ctx:,}, for which the model was made. Its positions allow more, "
            "but it was not trained on them: such a prompt may raise the loss instead of lowering it."
        )


def _convert_softmax(
    model: KVModel,
    prompt: PromptBatch,
    old: KVBias | None,
    fingerprint: Fingerprint,
    method: ConversionMethod,
    fwd_hooks: Hooks,
    bar: contextlib.AbstractContextManager[Callable[[str, float], None]],
) -> tuple[KVBias, KVBias]:
    """The bias, and the exact bias of this prompt alone, both with a batch axis."""
    if isinstance(method, Approximation):
        _check_approximation(model, fingerprint, method)
    exact = convert_exactly(model, prompt, fwd_hooks, old, fingerprint)
    bias, old = exact.bias, exact.old
    lengths = torch.as_tensor(prompt.lengths()).reshape(-1).tolist()
    if isinstance(method, Approximation) and not method.keeps_every_key(lengths):
        bias.check_finite("convert_prompt")
        wide, dtype = torch.promote_types(bias.dtype, torch.float32), bias.dtype  # bfloat16 is too coarse for a fit
        wider = dataclasses.replace(exact, bias=bias.to(wide))
        with bar as tell:
            bias = _approximated(Teacher(model, prompt, wider, None if old is None else old.to(wide), method, tell), dtype)
    return bias if old is None else _on_top_of(old, bias), exact.bias


def _check_approximation(model: KVModel, fingerprint: Fingerprint, method: Approximation) -> None:
    """Raise KVLensError if the method does not support the model."""
    method.check_model(model)
    if fingerprint.layers_differ or not attention_parts(model):
        raise KVLensError(
            f'convert_prompt: method="{method.name}" shares out keys over layers of equal heads, and this model has '
            f'{"others" if fingerprint.layers_differ else "none"}: use method="exact"'
        )


def _approximated(teacher: Teacher, dtype: torch.dtype) -> KVBias:
    """What the method's ``fit`` returns, if it is a finite bias of these prompts, with its record."""
    with teacher.timed("fit"):
        bias = teacher.method.fit(teacher)
    bias.check_finite(f"{type(teacher.method).__name__}.fit")
    return teacher.with_record(bias, dtype)


def _on_top_of(old: KVBias, new: KVBias) -> KVBias:
    """``new`` after ``old``. The errors of ``new``, measured after ``old``, are those of both together if ``old`` is exact."""
    if old.fit is None:
        return dataclasses.replace(continued(old, new), record=new.fit)
    before = as_batch(old, new.n_rows).fit
    kept = "every key kept" if new.fit is None else "fitted"
    longest = int(torch.as_tensor(new.n_prompt_tokens).max())
    step = f"continued with another prompt of {longest} tokens, {kept}"
    return dataclasses.replace(continued(old, new), record=of_sum([before, new.fit], step))


def _with_recall(model: KVModel, prompt: object, tokens: PromptBatch, whole: KVBias, bias: KVBias) -> KVBias:
    """The bias of one prompt, given as text or as a chat, with its recall in the record."""
    fit, prompt, began = bias.fit, as_prompt(prompt), time.perf_counter()
    if fit is None or bias.batch_size is not None or not isinstance(prompt, str | Chat):
        return bias
    read = tokens.tokens[0]
    layout = prompt.layout(model).first(len(read)) if isinstance(prompt, Chat) else layout_of_tokens(model, read)
    found = recalled(model, layout, whole.select_prompt(0), bias)
    seconds = {**fit.seconds, "recall": time.perf_counter() - began}
    return bias if found is None else dataclasses.replace(bias, record=dataclasses.replace(fit, recall=found, seconds=seconds))


@checked
def recall(model: KVModel, prompt: Prompt, bias: KVBias) -> Recall | None:
    """Which words of a prompt's own sentences the model would still say under a bias (:mod:`kvlens.kv_bias.fit`).

    ``convert_prompt`` measures it for one prompt that is text or a chat, unless ``n_held_out=0``; here it is measured for
    tokens, and for a bias that was changed since.

    Args:
        model: in which nothing is attached.
        prompt: the prompt of the bias, as it was given to :func:`convert_prompt`.
        bias: of this one prompt.

    Returns:
        None if the model has no tokenizer, or the prompt fills its context.

    Raises:
        KVLensError: a bias is attached, or the bias is a batch.
    """
    if model.attached_kv_bias is not None or bias.batch_size is not None:
        raise KVLensError("recall: expected the bias of one prompt (select_prompt), and a model in which none is attached")
    layout = prompt_layout(model, prompt)
    return recalled(model, layout, convert_prompt(model, layout.tokens), bias)
