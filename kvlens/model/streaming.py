"""A pass over a long text in segments, through all layers before the next one starts, so that memory hardly grows with it.

Of the tokens before a segment, linear attention needs only a state of fixed size, the shift state and the number of tokens.
A segment runs as a decoded token does, and its activations stay in the processor's cache, which on a CPU saves a fifth of the
time. The output equals that of a whole pass up to rounding: each
row goes through the same products, the state through the same sums.

The text runs as a whole if there are hooks, which expect the whole text, or if a backward pass needs all activations. Hooks
that can handle segments, in order to process texts of any length, are passed to :func:`run_in_segments`.

Softmax attention needs all keys. Where torch's kernel does not compute a layer, or needs a mask, a pass over N tokens holds
heads x N x N scores; there a long prompt, or text after one, is read in segments that hold at most
:data:`kvlens.memory.NUMBERS_AT_ONCE` scores.

The logits of a text's last tokens are computed without the others, which would take the most memory.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.utilities import USE_DEFAULT_VALUE, get_attention_mask

from kvlens.base import HookedTransformer, Output
from kvlens.base.model import PASS_RETURNS
from kvlens.checks import Count, checked
from kvlens.components import (
    LinearCacheEntry,
    ShiftedCacheEntry,
    hidden_tokens_keep_positions,
    is_hooked,
    runs_fused,
    upgrade_cache,
)
from kvlens.memory import NUMBERS_AT_ONCE, WIDEST_ELSEWHERE, WIDEST_ON_CPU, by_device
from kvlens.model.config import HookedKVTransformerConfig
from kvlens.model.protocol import KVModel, PromptBatch, PromptReading, QueriesRead

MULTIPLE = 64
"""Segments consist of whole chunks of the chunked form."""


def default_segment_length(model: HookedTransformer, batch: int, most: int = WIDEST_ELSEWHERE) -> int:
    """Tokens per row and segment such that the widest activation has about the size of :mod:`kvlens.memory`, or of ``most``."""
    cfg, numbers = model.cfg, min(most, WIDEST_ON_CPU if model.W_E.device.type == "cpu" else WIDEST_ELSEWHERE)
    widest = max(cfg.d_model, cfg.d_mlp or 0, cfg.n_heads * max(cfg.d_head, cfg.d_phi))
    return max(1, numbers // (widest * max(1, batch) * MULTIPLE)) * MULTIPLE


def streams(
    model: HookedTransformer,
    tokens: object,
    mask: Tensor | None,
    cache: TransformerLensKeyValueCache | None,
    return_type: str | None,
    stop_at_layer: int | None,
) -> bool:
    """Whether a forward pass with these arguments runs in segments automatically: long, linear, no hooks, no gradients."""
    cfg = model.cfg
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] <= MULTIPLE:
        return False
    if not _has_a_state(cfg) or tokens.shape[1] <= default_segment_length(model, tokens.shape[0]):
        return False
    runs_layers = len(range(cfg.n_layers)[:stop_at_layer]) > 0  # the first layer counts the tokens
    has_loss = return_type in ("loss", "both") and (cache is None or not cache.previous_attention_mask.shape[1])
    if (
        not runs_layers
        or not (has_loss or return_type in (None, "logits"))
        or (mask is not None and mask.shape != tokens.shape)
    ):
        return False  # the base's pass handles or refuses these
    return not has_hooks(model) and not wants_gradients(model, cache)


def _has_a_state(cfg: HookedKVTransformerConfig) -> bool:
    """Whether a state of fixed size carries the attention from segment to segment as fast as in a whole pass."""
    if cfg.attention != "linear" or cfg.linear_attention_form == "parallel":
        return False
    return cfg.why_no_kv_bias is None  # ridge attention after a state would run token by token


def has_hooks(model: torch.nn.Module) -> bool:
    """Whether a module has any hooks: TransformerLens', torch's own, or torch's global ones."""
    return bool(torch.nn.modules.module._has_any_global_hook()) or is_hooked(*model.modules())


def wants_gradients(model: HookedTransformer, cache: TransformerLensKeyValueCache | None = None) -> bool:
    """Whether a pass would build a graph: gradients are enabled and required by a weight, the attached bias or the cache."""
    if not torch.is_grad_enabled():
        return False
    bias = model.attached_kv_bias
    entries = [] if cache is None else cache.entries
    states = [entry.state.kv for entry in entries if isinstance(entry, LinearCacheEntry) and entry.state is not None]
    wanted = bias is not None and any(x.requires_grad for x in bias.tensors().values())
    return wanted or any(x.requires_grad for x in (*model.parameters(), *states))


def mask_of(
    model: HookedTransformer,
    tokens: Int[Tensor, "batch pos"],
    prepend_bos: object = USE_DEFAULT_VALUE,
    padding_side: object = USE_DEFAULT_VALUE,
    cached: bool = False,
) -> Int[Tensor, "batch pos"] | None:
    """The mask of real tokens that TransformerLens would use in one pass over all of them; None if it would use none."""
    tokenizer = model.tokenizer
    side = padding_side if tokenizer is None or padding_side in ("left", "right") else tokenizer.padding_side
    if tokenizer is None or (side != "left" and not cached):
        return None
    has_bos = prepend_bos if isinstance(prepend_bos, bool) else model.cfg.default_prepend_bos
    return get_attention_mask(tokenizer, tokens, has_bos, side)


def segments(
    model: HookedTransformer,
    tokens: Int[Tensor, "batch pos"],
    mask: Int[Tensor, "batch offset_pos"] | None = None,
    states: Sequence[object] | None = None,
    *,
    before: int = 0,
    segment_length: int | None = None,
    return_type: PASS_RETURNS = "logits",
    stop_at_layer: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Iterator[Float[Tensor, "batch segment d"] | None]:
    """The output of each segment in turn: logits, nothing, or the residual stream before ``stop_at_layer``.

    Args:
        model: whose pass it is (:meth:`kvlens.HookedKVTransformer.one_pass`).
        tokens: the text.
        mask: 1 at real tokens, those before this text included; None if all of them are.
        states: of each layer, what came before; after the last segment, what one pass would leave in it. None if nothing did,
            and nobody reads it.
        before: how many positions came before.
        segment_length: tokens per row and segment; None for :func:`default_segment_length`.
        return_type: "logits", or None for a pass that only fills ``states``, without unembedding.
        stop_at_layer: as in TransformerLens; at least one layer must run.
        on_progress: called with the fraction done after each segment.
    """
    batch, pos = tokens.shape
    length = default_segment_length(model, batch) if segment_length is None else segment_length
    if states is None and model.cfg.attention == "linear":
        states = [LinearCacheEntry() for _ in model.blocks]
    for start in range(0, pos, length):
        some, so_far = tokens[:, start : start + length], None if mask is None else mask[:, : before + start + length]
        so_far = None if so_far is None or bool(so_far.all()) else so_far
        some = model.hook_tokens(some) if model.cfg.use_hook_tokens else some
        stream, added = model.get_residual(model.hook_embed(model.embed(some)), before + start, attention_mask=so_far)
        yield HookedTransformer.forward(
            model,
            stream,
            return_type,
            start_at_layer=0,
            shortformer_pos_embed=added,
            attention_mask=so_far,
            stop_at_layer=stop_at_layer,
            past_kv_cache=states,
        )
        if on_progress is not None:
            on_progress(min(1.0, (start + length) / pos))


@checked
@torch.no_grad()
def run_in_segments(
    model: HookedTransformer,
    tokens: Int[Tensor, " pos"],
    fwd_hooks: Sequence[tuple[str, Callable[..., object]]],
    *,
    segment_length: Count | None = None,
    stop_at_layer: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> None:
    """Run hooks over one text; with linear attention, segment by segment.

    This way hooks can process a text of any length in memory that does not grow with it. Nothing is unembedded.

    >>> import torch
    >>> from kvlens import HookedKVTransformer, run_in_segments
    >>> model, lengths = HookedKVTransformer.from_zoo("bigram-linear"), []
    >>> look = lambda v, hook: lengths.append(v.shape[1])
    >>> run_in_segments(model, torch.arange(10), [("blocks.0.attn.hook_v", look)], segment_length=4)
    >>> lengths
    [4, 4, 2]

    Args:
        model: a HookedKVTransformer; the text continues any attached bias.
        tokens: [pos], without padding.
        fwd_hooks: TransformerLens hooks (name, function), as for ``run_with_hooks``. Each fires once per segment, in order, and
            sees only that segment: position 0 is the segment's first token. ``hook_last_k``, ``hook_last_v`` and
            ``hook_last_q`` fire only with the first segment.
        segment_length: tokens per segment. None chooses a good length, or the whole text if the model has other hooks, which
            expect it, or if its attention cannot be continued from a state (softmax, the parallel form).
        stop_at_layer: as in TransformerLens.
        on_progress: called with the fraction done after each segment.

    Raises:
        KVLensError: tokens of the wrong shape or outside the vocabulary, more tokens than positions, a segment length below 1.
    """
    model.check_tokens(tokens)
    rows = tokens[None].to(model.W_E.device)
    model.check_length(rows.shape[1], None)
    streamed = _has_a_state(model.cfg) and (segment_length is not None or not has_hooks(model))
    if not streamed:
        mask = torch.ones_like(rows)  # a pad token in the given text is text, not padding
        model.run_with_hooks(
            rows, return_type=None, attention_mask=mask, stop_at_layer=stop_at_layer, fwd_hooks=list(fwd_hooks)
        )
        if on_progress is not None:
            on_progress(1.0)
        return
    length = segment_length or default_segment_length(model, 1, NUMBERS_AT_ONCE)
    with model.hooks(fwd_hooks=list(fwd_hooks)), model.one_pass():
        every = segments(
            model, rows, segment_length=length, return_type=None, stop_at_layer=stop_at_layer, on_progress=on_progress
        )
        for _ in every:
            pass


def forward_in_segments(
    model: HookedTransformer,
    tokens: Int[Tensor, "batch pos"],
    mask: Int[Tensor, "batch pos"] | None,
    cache: TransformerLensKeyValueCache | None,
    *,
    return_type: str | None,
    loss_per_token: bool,
    prepend_bos: object,
    padding_side: object,
    stop_at_layer: int | None,
) -> Any:
    """What ``HookedTransformer.forward`` returns for these arguments.

    Raises:
        KVLensError: tokens outside the vocabulary, or more tokens than positions.
    """
    model.check_tokens(tokens)
    if mask is None:
        mask = mask_of(model, tokens, prepend_bos, padding_side, cached=cache is not None)
    model.check_length(tokens.shape[1], mask)
    tokens, states, whole, before = tokens.to(model.W_E.device), None, mask, 0
    if cache is not None:
        before = model.get_pos_offset(cache, len(tokens))
        states = [dataclasses.replace(entry, frozen=False) for entry in cache.entries]  # an error leaves those as they were
        here = torch.ones_like(tokens) if mask is None else mask
        whole = torch.cat([cache.previous_attention_mask.to(here.device), here], dim=1)
    whole = None if whole is None else whole.to(tokens.device)
    wants_loss = stop_at_layer is None and return_type in ("loss", "both")
    wants_output = stop_at_layer is not None or return_type in ("logits", "both")
    output: Tensor | None = None
    losses: list[Tensor] = []
    last, start = None, 0
    needed: PASS_RETURNS = None if return_type is None else "logits"
    for part in segments(model, tokens, whole, states, before=before, return_type=needed, stop_at_layer=stop_at_layer):
        if part is None:
            continue
        end = start + part.shape[1]
        if wants_output:
            output = part.new_empty(*tokens.shape, part.shape[-1]) if output is None else output
            output[:, start:end] = part
        if wants_loss:
            with_last = part if last is None else torch.cat([last, part], dim=1)
            of_these = tokens[:, end - with_last.shape[1] : end].to(part.device)
            losses.append(model.loss_fn(with_last, of_these, per_token=True))
            last = part[:, -1:].clone()
        start = end
    if cache is not None:
        cache.append_attention_mask(here)
        cache.entries = [old if old.frozen else new for old, new in zip(cache.entries, states or (), strict=True)]
    if not wants_loss:
        return output
    loss = _mean_loss(torch.cat(losses, dim=1), mask, loss_per_token)
    return loss if return_type == "loss" else Output(output, loss)  # type: ignore[arg-type]


def _mean_loss(losses: Tensor, mask: Tensor | None, per_token: bool) -> Tensor:
    """As in TransformerLens: a prediction counts if its token and the next are real."""
    n = losses.numel()
    if mask is not None:
        counts = mask[:, :-1].bool() & mask[:, 1:].bool()
        losses, n = losses.masked_fill(~counts.to(losses.device), 0.0), int(counts.sum())
    return losses if per_token else losses.sum() / n


def asks_for_positions_alone(model: KVModel) -> bool:
    """Whether a softmax model's tokens may stand anywhere with positions of their own, others that are hidden between them: no
    layer asks how far apart two of them are, or how many there are."""
    cfg = model.cfg
    if not isinstance(model, HookedTransformer) or cfg.attention != "softmax" or cfg.attention_variant is not None:
        return False
    by_distance = cfg.positional_embedding_type in ("alibi", "shortformer")
    in_window = any(block.attn.window is not None for block in model.blocks)
    return not (by_distance or in_window or cfg.use_logn_attn or cfg.use_dynamic_ntk_rope)


LONG = 1024
"""Texts of at least this many tokens are read without logits, which would take more memory than everything else."""


def read_before_the_last(
    model: HookedTransformer, new: Tensor, mask: Tensor | None, cache: TransformerLensKeyValueCache | None
) -> tuple[Tensor, Tensor | None]:
    """Read a long text into the state of linear attention without logits; returns what is still to be read, with its mask."""
    n = new.shape[1] - 1
    if cache is None or mask is None or new.is_floating_point() or model.cfg.attention != "linear":
        return new, mask
    if n < LONG or has_hooks(model):  # a hook expects the whole text
        return new, mask
    model(new[:, :n], attention_mask=mask[:, :n], past_kv_cache=cache, return_type=None)
    return new[:, n:], mask[:, n:]


def logits_on(
    model: HookedTransformer,
    text: Int[Tensor, "batch pos"],
    n_last: int,
    *,
    before: Int[Tensor, "batch before_pos"] | None = None,
    kept: Bool[Tensor, "batch before_pos"] | None = None,
    keeps_positions: bool = True,
    residuals: list[Tensor] | None = None,
) -> Float[Tensor, "batch n_last d_vocab"]:
    """See :meth:`kvlens.KVModel.logits_on`.

    With linear attention ``before`` is read into a state, in segments: its length costs no memory. Hooks see one pass over all.
    """
    last, options = model.cfg.n_layers - 1, {}

    def keep(resid: Tensor, hook: object) -> None:
        residuals.append(resid[:, -n_last:].clone())  # type: ignore[union-attr]

    def cut(resid: Tensor, hook: object) -> Tensor:
        return resid[:, -n_last:]

    names = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(last + 1)), f"blocks.{last}.hook_resid_post"]
    hooks: list[tuple[str, Callable[..., Tensor | None]]] = [] if residuals is None else [(name, keep) for name in names]
    hooks.append((f"blocks.{last}.{model.blocks[last].cut_point()}", cut))
    n_before = 0 if before is None else before.shape[1]
    by_state = model.cfg.attention == "linear" and not model.cfg.attention_variant and not has_hooks(model)
    if before is not None and n_before and by_state:
        options["past_kv_cache"] = cache = model.empty_cache(len(text))
        mask = torch.ones_like(before) if kept is None else kept.to(before)
        with hidden_tokens_keep_positions(keeps_positions):
            model(before, return_type=None, attention_mask=mask, past_kv_cache=cache)
        kept = None
    elif before is not None and n_before:
        text = torch.cat([before, text], dim=1)
    mask = torch.ones_like(text)
    if kept is not None:
        mask[:, :n_before] = kept
    with hidden_tokens_keep_positions(keeps_positions):
        logits: Tensor = model.run_with_hooks(text, attention_mask=mask, fwd_hooks=hooks, **options)
    return logits


def logits_of(
    model: HookedTransformer, residual: Float[Tensor, "batch pos d_model"], layer: int | None = None, n_last: int | None = None
) -> Float[Tensor, "batch n_last d_vocab"]:
    """See :meth:`kvlens.KVModel.logits_of`."""
    n_layers, n_last = model.cfg.n_layers, n_last or residual.shape[1]
    hooks: list[tuple[str, Callable[..., Tensor | None]]] = []
    if layer is None or layer == n_layers:
        residual = residual[:, -n_last:]
    elif n_last < residual.shape[1]:
        hooks = [(f"blocks.{n_layers - 1}.hook_resid_post", lambda resid, hook: resid[:, -n_last:])]
    mask = torch.ones(residual.shape[:2], dtype=torch.long, device=residual.device)
    start = n_layers if layer is None else layer
    logits: Tensor = model.run_with_hooks(residual, start_at_layer=start, attention_mask=mask, fwd_hooks=hooks)
    return logits


def read_prompt(model: HookedTransformer, prompt: PromptBatch, with_queries: bool = False) -> PromptReading:
    """See :meth:`kvlens.model.protocol.KVModel.read_prompt`; hooks and gradients see the whole prompt."""
    tokens, mask = prompt.tokens, prompt.mask
    read, scored = None if mask is None else mask.long(), list[tuple[Tensor, Tensor, Tensor]]()
    residuals, queries = list[Any](), []
    changes_with_length = model.cfg.use_dynamic_ntk_rope or prompt.keeps_positions
    holds_no_scores = mask is None and _holds_no_scores(model)
    whole = changes_with_length or holds_no_scores or has_hooks(model) or wants_gradients(model)
    length = tokens.shape[1] if whole else _at_once(model, tokens)
    cache = _entries(model, len(tokens)) if length < tokens.shape[1] or model.cfg.needs_own_cache else None
    with hidden_tokens_keep_positions(prompt.keeps_positions, prompt.places), observed(model) as seen, model.one_pass():
        for stream in segments(model, tokens, read, cache, segment_length=length, stop_at_layer=model.cfg.n_layers):
            residuals.append(stream)
            queries.append([q.to(tokens.device) for q, _, _ in seen] if with_queries else [])
            scored[:] = seen
            seen.clear()
    keys, values = ([x[i].transpose(1, 2).to(tokens.device) for x in scored] for i in (1, 2))
    entries = [entry for entry in cache or () if isinstance(entry, ShiftedCacheEntry)]
    shifted = [x for x in "kvq" if any(x in entry.shift_state for entry in entries)]
    return PromptReading(
        keys,
        values,
        torch.cat(residuals, dim=1),
        [torch.cat(parts, dim=1) for parts in zip(*queries, strict=True)] if with_queries else None,
        {x: [entry.shift_state[x].to(keys[0]) for entry in entries if x in entry.shift_state] for x in shifted},
    )


@torch.no_grad()
def read_queries(model: HookedTransformer, tokens: Tensor, layers: range | None = None) -> list[QueriesRead]:
    """See :meth:`kvlens.model.protocol.KVModel.read_queries`; in float32 or better."""
    layers = range(model.cfg.n_layers) if layers is None else layers
    length = _at_once(model, tokens)
    cache = _entries(model, len(tokens)) if length < tokens.shape[1] else None
    read, z, log_n = [], dict[int, Tensor](), dict[int, Tensor]()
    hooks = [(f"blocks.{i}.attn.hook_z", lambda x, hook: z.__setitem__(hook.layer(), x.detach())) for i in layers]
    hooks += [(f"blocks.{i}.attn.hook_normalizer", lambda x, hook: log_n.__setitem__(hook.layer(), x.detach())) for i in layers]
    with observed(model) as seen, model.hooks(fwd_hooks=hooks), model.one_pass():
        for _ in segments(model, tokens, None, cache, segment_length=length, stop_at_layer=layers[-1] + 1):
            read.append([(seen[i][0].to(log_n[i]), z[i].to(log_n[i]), log_n[i]) for i in layers])
            seen.clear()
    return [QueriesRead(*map(torch.cat, zip(*parts, strict=True), [1] * 3)) for parts in zip(*read, strict=True)]


def _holds_no_scores(model: HookedTransformer) -> bool:
    """Whether torch's kernel computes every layer and sees by itself which keys are later."""
    by_kernel = all(runs_fused(block.attn) and block.attn.attn_type == "global" for block in model.blocks)
    return by_kernel and model.cfg.positional_embedding_type != "alibi"


def _at_once(model: HookedTransformer, tokens: Tensor) -> int:
    """How many tokens of each text are read at once after what is attached."""
    batch, n_pos = tokens.shape
    return tokens_at_once(model, batch, n_pos, 0 if model.attached_kv_bias is None else model.attached_kv_bias.d_phi)


def _entries(model: HookedTransformer, batch: int) -> Sequence[object]:
    """What softmax layers keep between segments, empty, each of its own sizes."""
    cache = model.empty_cache(batch)
    if model.cfg.needs_own_cache:
        upgrade_cache(cache, linear=False)
    model.get_pos_offset(cache, batch)
    entries: Sequence[object] = cache.entries
    return entries


def tokens_at_once(model: HookedTransformer, batch: int, n_pos: int, n_keys: int) -> int:
    """How many tokens of each text, of ``n_pos`` tokens, can be read at once after ``n_keys`` keys; at least one."""
    return min(
        n_pos,
        max(1, by_device(NUMBERS_AT_ONCE, torch.device(model.cfg.device)) // (batch * model.cfg.n_heads * (n_keys + n_pos))),
    )


@contextlib.contextmanager
def observed(model: HookedTransformer) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """Inside the block, (q, k, v) of every layer, as scored, are appended to the list in the order of the layers.

    Raises:
        KVLensError: another thread is using this model.
    """
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    attentions = [block.attn for block in model.blocks]
    with model._thread.changes("convert_prompt", model._has_bias):
        for attn in attentions:
            attn.observer = lambda q, k, v: seen.append((q, k, v))
        try:
            yield seen
        finally:
            for attn in attentions:
                attn.observer = None
