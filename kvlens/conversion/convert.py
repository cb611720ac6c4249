"""Exact conversion of a prompt into KV biases (ICLCA alg. 1, eq. 13 and 19, in kvlens' notation).

For each layer, with that layer's own input from the prompt of M tokens:

    b'_KV = gamma^M R_{-M} b_KV + sum_j gamma^{M-1-j} R_{j-M} phi(k'_j) v'_j^T        b'_D = b_D + sum_j phi(k'_j)
    shift state' = the last w rows of [old shift state; the prompt's raw keys, values, queries]

which is the state that one forward pass over the prompt leaves in a decoding cache, expressed from position M. The prompt's own
pass reads the *old* bias and shift state (ICLCA alg. 1 step (d) has the new one, which is off by 16-60 %).

If RoPE follows the feature map, R_{-M} rotates the stored keys so that the text after the prompt starts at position 0.
Otherwise (learned, sinusoidal or no positions, RoPE before the feature map) R drops out and the text starts at
``position_offset'`` = old offset + M.

Prompts of softmax models are converted by :mod:`kvlens.conversion.softmax`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvlens._tl import TransformerLensKeyValueCache
from kvlens.arguments import Span
from kvlens.checks import Count, checked
from kvlens.components import LinearCacheEntry, hidden_tokens_keep_positions
from kvlens.conversion.carry import carry_layer_state, per_query_head
from kvlens.conversion.counterfactual import Counterfactuals, Positions, Replacement, counterfactuals_of
from kvlens.conversion.prompt import Prompt, PromptTokens, length_note, prompt_tokens
from kvlens.conversion.softmax.convert import convert_softmax_prompt
from kvlens.conversion.softmax.method import ConversionMethod, Exact
from kvlens.conversion.softmax.methods import is_option, method_of
from kvlens.errors import KVLensError, warn
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.kv_bias.ragged import padded
from kvlens.model import HookedKVTransformer
from kvlens.model.attention_variant import why_no_kv_bias
from kvlens.model.fingerprint import of_weights
from kvlens.model.protocol import KVModel, ReadsPrompts
from kvlens.model.streaming import has_hooks, segments, wants_gradients
from kvlens.ops.linear_attention import LinearAttentionState


@checked
def convert_prompt(
    model: KVModel,
    prompt: Prompt | Counterfactuals,
    *,
    without: Sequence[Span] = (),
    replace: Mapping[Span, Replacement] | None = None,
    positions: Positions = "kept",
    initial: KVBias | None = None,
    prepend_bos: bool | None = None,
    fwd_hooks: Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]] = (),
    detach: bool = True,
    segment_length: Count | None = None,
    on_progress: Callable[[float], None] | None = None,
    method: str | ConversionMethod = "exact",
    verbose: bool = True,
    **options: Any,
) -> KVBias:
    """Turn a prompt into the bias that replaces it, at the cost of one forward pass over it.

    With the bias attached, the logits of any text equal those of [prompt; text], up to rounding. With softmax attention this
    holds for ``method="exact"``, which keeps every key; the other methods approximate it. In the eager form an exact bias
    rounds like a pass with the prompt in front; the fused form rounds prompt and text separately, so that the two passes
    differ by about as much as each differs from float64 (3e-7; with scores of 100,000, 1e-5 and in rare cases 1e-3).

    >>> from kvlens import HookedKVTransformer
    >>> model = HookedKVTransformer.from_zoo("bigram-linear")
    >>> prompt, text = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[9, 2, 6]])
    >>> with model.kv_bias(convert_prompt(model, prompt)):
    ...     converted = model(text)
    >>> torch.allclose(converted, model(torch.cat([prompt, text], dim=1))[:, 5:], atol=1e-4)
    True

    Args:
        model: a HookedKVTransformer, linear or softmax; or a :class:`kvlens.KVTransformerBridge`.
        prompt: a string, a list of strings (their biases form a batch), tokens [pos] or [batch, pos], or variants of one prompt
            (:func:`counterfactuals`, a batch).
        without: token ranges (start, stop) of one prompt that are deleted from it.
        replace: token range -> text or tokens that replace it, of the same number of tokens.
        positions: "kept": what follows deleted tokens keeps its position; "closed": it moves up. See
            :mod:`kvlens.conversion.counterfactual` for what a gap means.
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
        on_progress: called after each segment with the fraction of the prompt that is done; with softmax attention once, with
            1, when the bias is ready (long fits show their own progress bars).
        method: for softmax attention, how the prompt's keys are kept: an object such as ``Landmark(n_keys=32)``, whose class
            describes its options, or a name: "exact" (:class:`~kvlens.conversion.Exact`, every key), "landmark"
            (:class:`~kvlens.conversion.Landmark`, few keys with fitted weights). For comparison: "attention_matching"
            (:class:`~kvlens.conversion.AttentionMatching`); some of the keys as they are, by "streaming_llm", "h2o", "snapkv",
            "expected_attention" or "kvzip" (:class:`~kvlens.conversion.KeptKeys`); "random", "taylor" and "learned" features
            (:class:`~kvlens.conversion.RandomProjections`, :class:`~kvlens.conversion.Taylor`,
            :class:`~kvlens.conversion.Learned`). Linear attention is always exact.
        verbose: False hides the progress bars of long fits.
        options: of a method given by name: ``method="landmark", n_features=32`` is
            ``method=Landmark(n_keys=32)``.

    Returns:
        The whole new bias, ``initial`` included; with a batch axis for a list or a [batch, pos] tensor. A warning says where
        the prompt, with what it continues from, is longer than ``n_ctx`` and the positions allow it.

    Raises:
        KVLensError: options that the method does not have, an empty prompt, tokens outside the vocabulary, a prompt beyond
            ``n_ctx`` where positions are learned, ``initial`` of another model or batch, weights or activations that are not
            finite, a ``segment_length`` below 1, a bidirectional model.

    Source: ICLCA sec. 4, alg. 1; the shift state and padding are kvlens'.
    """
    hooked = model if isinstance(model, HookedKVTransformer) else None
    if hooked is not None:
        _check_convertible(hooked)
    is_softmax = model.cfg.attention != "linear"
    way = _checked_method(is_softmax, method, options)
    if is_softmax and segment_length is not None:
        raise KVLensError(
            "convert_prompt: segment_length is for linear attention, whose state does not grow; leave it out: all keys of a "
            "softmax prompt are kept until the fit, and its pass is split automatically where it would hold too many scores"
        )
    with contextlib.ExitStack() as stack:
        if hooked is not None:
            stack.enter_context(hooked._thread.passes(hooked._has_bias))
        continued = initial is not None or model.attached_kv_bias is not None
        if prepend_bos is None:
            prepend_bos = model.prepends_bos and not continued
        tokens = _read_prompt(model, prompt, without, replace, positions, prepend_bos)
        stack.enter_context(torch.set_grad_enabled(not detach and torch.is_grad_enabled()))
        if initial is not None:
            stack.enter_context(model.kv_bias(initial))
        old = model.attached_kv_bias
        fingerprint = model.fingerprint() if initial is None else initial.fingerprint  # attaching `initial` compared it
        if old is not None:
            old.fingerprint.check(fingerprint, "convert_prompt: the bias to continue from no longer fits")
        if old is not None and old.batch_size not in (None, 1, tokens.tokens.shape[0]):
            raise KVLensError(
                f"convert_prompt: the bias to continue from holds {old.batch_size} prompts, this prompt "
                f"{tokens.tokens.shape[0]}: give one row per prompt, or continue from one (select_prompt)"
            )
        if hooked is not None:
            _warn_of_length(hooked, tokens, old)
        if is_softmax:
            bias = convert_softmax_prompt(cast(ReadsPrompts, model), tokens, old, fingerprint, way, fwd_hooks, verbose)
        else:
            assert hooked is not None
            bias = _collect(
                hooked, tokens, _run_prompt(hooked, tokens, fwd_hooks, segment_length, on_progress), old, fingerprint
            )
        if hooked is None:
            bias.check_finite(f"convert_prompt: {model.cfg.architecture} in {model.cfg.dtype}")
        else:
            _check_finite(hooked, bias)
        if not tokens.has_batch and (old is None or old.batch_size is None):
            bias = bias.select_prompt(0)
        if is_softmax and on_progress is not None:
            on_progress(1.0)
    return bias


def _read_prompt(
    model: KVModel, prompt: Any, without: Any, replace: Any, positions: Positions, prepend_bos: bool
) -> PromptTokens:
    if isinstance(prompt, Counterfactuals):
        if len(without) or replace:
            raise KVLensError("convert_prompt: counterfactuals say what is deleted and replaced: leave without and replace out")
        model.check_tokens(prompt.tokens)
        return prompt.as_prompt()
    read = prompt_tokens(model, prompt, prepend_bos)
    if not len(without) and not replace:
        return read
    if read.tokens.shape[0] != 1:
        raise KVLensError(
            f"convert_prompt: without and replace take one prompt, got {read.tokens.shape[0]}; kvlens.counterfactuals makes "
            "several variants of one"
        )
    made = counterfactuals_of(model, read.tokens[0], [without], [replace or {}], positions)
    return made.as_prompt()._replace(has_batch=read.has_batch)


def _warn_of_length(model: HookedKVTransformer, prompt: PromptTokens, old: KVBias | None) -> None:
    before = 0 if old is None else torch.as_tensor(old.n_prompt_tokens).cpu()
    note = length_note(model, int((torch.as_tensor(prompt.n_positions()).cpu() + before).max()))
    if note is not None:
        warn(note)


def _check_convertible(model: HookedKVTransformer) -> None:
    """Raise KVLensError if the model's prompts cannot be converted to a bias."""
    reason = why_no_kv_bias(model.cfg.attention_variant)
    if reason is not None:
        raise KVLensError(f"convert_prompt: a prompt of this model has no KV bias: {reason}")
    if model.cfg.attention_dir != "causal":
        raise KVLensError(
            "convert_prompt: with bidirectional attention the prompt's own keys depend on the text after it, so no single "
            "bias can replace the prompt for every text"
        )
    if model.cfg.ungroup_grouped_query_attention:
        raise KVLensError("convert_prompt: call model.set_ungroup_grouped_query_attention(False) first")


@functools.cache
def _own_arguments() -> tuple[str, ...]:
    """The arguments of :func:`convert_prompt` that are not options of a method."""
    return tuple(name for name in inspect.signature(convert_prompt).parameters if name != "options")


def _checked_method(is_softmax: bool, method: str | ConversionMethod, options: Mapping[str, Any]) -> ConversionMethod:
    """The method; linear attention has only the exact one."""
    if is_softmax or not all(map(is_option, options)):
        return method_of(method, options, _own_arguments())
    asked = [*(["method"] if method != "exact" and not isinstance(method, Exact) else []), *options]
    if asked:
        raise KVLensError(
            f"convert_prompt: {', '.join(asked)} is for softmax attention; with linear attention the conversion is always "
            "exact and has no options"
        )
    return Exact()


def _run_prompt(
    model: HookedKVTransformer,
    prompt: PromptTokens,
    fwd_hooks: Sequence[Any],
    segment_length: int | None,
    on_progress: Callable[[float], None] | None,
) -> list[LinearCacheEntry]:
    """Run the prompt's own forward pass without the unembedding, and return the states left in a decoding cache."""
    tokens, cfg = prompt.tokens, model.cfg
    cache = TransformerLensKeyValueCache.init_cache(cfg, cfg.device, tokens.shape[0])
    mask = None if prompt.mask is None else prompt.mask.long()
    with model.hooks(fwd_hooks=list(fwd_hooks)), hidden_tokens_keep_positions(prompt.keeps_positions):
        model.check_length(tokens.shape[1], mask)
        if segment_length is None and (has_hooks(model) or wants_gradients(model)):
            segment_length = tokens.shape[1]
        options: dict[str, Any] = dict(segment_length=segment_length, on_progress=on_progress)
        for _ in segments(model, tokens, mask, cache, stop_at_layer=cfg.n_layers, **options):
            pass
    return cache.entries  # type: ignore[return-value]


def _collect(
    model: HookedKVTransformer,
    prompt: PromptTokens,
    entries: list[LinearCacheEntry],
    old: KVBias | None,
    fingerprint: Fingerprint,
) -> KVBias:
    cfg = model.cfg
    lengths, n_positions = prompt.lengths(), prompt.n_positions()
    old = None if old is None else old.to(prompt.tokens.device)
    layers = [_layer_tensors(model, layer, entry, n_positions) for layer, entry in enumerate(entries)]
    stacked = (padded([t.to(prompt.tokens.device) for t in tensors]) for tensors in zip(*layers, strict=True))
    b_kv, b_d, last_k, last_v, last_q = stacked
    offset = 0 if cfg.rotates_after else n_positions + (0 if old is None else old.position_offset)
    return KVBias(
        b_KV=b_kv,
        b_D=b_d,
        last_k=last_k,
        last_v=last_v,
        last_q=last_q,
        n_prompt_tokens=lengths + (0 if old is None else old.n_prompt_tokens),
        position_offset=offset,
        fingerprint=fingerprint,
    )


def _layer_tensors(
    model: HookedKVTransformer, layer: int, entry: LinearCacheEntry, n_positions: int | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(b_KV, b_D, last_k, last_v, last_q) of one layer, each with a batch axis."""
    attn = model.blocks[layer].attn
    cfg = attn.cfg
    assert entry.state is not None
    written = per_query_head(entry.state, cfg.n_heads)
    old = None if entry.bias is None else LinearAttentionState(*entry.bias)
    new = carry_layer_state(attn, old, n_positions, written)
    b_d = new.kv.new_zeros(new.kv.shape[:3]) if new.k_sum is None else new.k_sum
    rows = [_shift_state(entry, x, new.kv, n) for x, n in (("k", cfg.n_kv_heads), ("v", cfg.n_kv_heads), ("q", cfg.n_heads))]
    return new.kv, b_d, rows[0], rows[1], rows[2]


def _shift_state(entry: LinearCacheEntry, name: str, like: Tensor, n_heads: int) -> Tensor:
    rows = entry.shift_state.get(name)
    return like.new_zeros(like.shape[0], 0, n_heads, like.shape[-1]) if rows is None else rows.to(like)


def _not_finite(model: HookedKVTransformer) -> list[str]:
    suspects = [name for name, p in model.named_parameters() if not bool(p.detach().sum().isfinite())]
    return [name for name in suspects if not bool(model.get_parameter(name).isfinite().all())]  # or the sum overflowed


def _check_finite(model: HookedKVTransformer, bias: KVBias) -> None:
    broken = of_weights(model, "not finite", lambda: _not_finite(model))
    if broken:
        raise KVLensError(f"convert_prompt: these weights are not finite: {', '.join(broken[:5])}")
    bias.check_finite("convert_prompt")
