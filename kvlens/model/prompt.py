"""How a softmax HookedKVTransformer reads a prompt that is converted (:class:`kvlens.model.protocol.ReadsPrompts`), and the
exact bias of such a reading, in either front end.

Where torch's kernel does not compute a layer, or needs a mask, a pass over N tokens holds heads x N x N scores. There a long
prompt, or text after one, is read in segments, each through all layers before the next, so that at most
:data:`NUMBERS_AT_ONCE` scores are held.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvlens.components import (
    ShiftedCacheEntry,
    hidden_tokens_keep_positions,
    runs_fused,
)
from kvlens.kv_bias import Fingerprint, KVBias, VirtualKeys
from kvlens.kv_bias.storage import padded
from kvlens.memory import NUMBERS_AT_ONCE, by_device
from kvlens.model.protocol import PromptReading, PromptTokens, QueriesRead
from kvlens.model.streaming import has_hooks, wants_gradients


def read_prompt(model: Any, prompt: PromptTokens, with_queries: bool = False) -> PromptReading:
    """See :meth:`kvlens.model.protocol.ReadsPrompts.read_prompt`; hooks and gradients see the whole prompt."""
    tokens, mask, _, keeps_positions = prompt
    cache = model.empty_cache(len(tokens))
    given = torch.ones_like(tokens) if mask is None else mask.long()
    residuals, queries = [], []
    with hidden_tokens_keep_positions(keeps_positions):
        changes_with_length = model.cfg.use_dynamic_ntk_rope or keeps_positions
        holds_no_scores = mask is None and _holds_no_scores(model)
        whole = changes_with_length or holds_no_scores or has_hooks(model) or wants_gradients(model)
        for some in _segments(model, tokens, whole):
            options = dict(attention_mask=given[:, some], past_kv_cache=cache, stop_at_layer=model.cfg.n_layers)
            with observed(model) as seen:
                residuals.append(model(tokens[:, some], **options))
            queries.append([q.to(tokens.device) for q, _, _ in seen] if with_queries else [])
    keys, values = (padded([x[i].transpose(1, 2).to(tokens.device) for x in seen]) for i in (1, 2))
    entries = [entry for entry in cache.entries if isinstance(entry, ShiftedCacheEntry)]
    shifted = [x for x in "kvq" if any(x in entry.shift_state for entry in entries)]
    return PromptReading(
        keys,
        values,
        torch.cat(residuals, dim=1),
        [torch.cat(parts, dim=1) for parts in zip(*queries, strict=True)] if with_queries else None,
        {x: padded([entry.shift_state[x].to(keys) for entry in entries if x in entry.shift_state]) for x in shifted},
    )


@torch.no_grad()
def read_queries(model: Any, tokens: Tensor, layers: range | None = None) -> list[QueriesRead]:
    """See :meth:`kvlens.model.protocol.ReadsPrompts.read_queries`; in float32 or better."""
    layers = range(model.cfg.n_layers) if layers is None else layers
    segments = list(_segments(model, tokens))
    cache = model.empty_cache(len(tokens)) if len(segments) > 1 else None
    read = []
    for some in segments:
        z, log_n = dict[int, Tensor](), dict[int, Tensor]()
        hooks = [(f"blocks.{i}.attn.hook_z", lambda x, hook: z.__setitem__(hook.layer(), x.detach())) for i in layers]  # noqa: B023
        hooks += [
            (f"blocks.{i}.attn.hook_normalizer", lambda x, hook: log_n.__setitem__(hook.layer(), x.detach()))  # noqa: B023
            for i in layers
        ]
        options = dict(attention_mask=torch.ones_like(tokens[:, some]), past_kv_cache=cache, stop_at_layer=layers[-1] + 1)
        with observed(model) as seen, model.hooks(fwd_hooks=hooks):
            model(tokens[:, some], **options)
        read.append([(seen[i][0].to(log_n[i]), z[i].to(log_n[i]), log_n[i]) for i in layers])
    return [QueriesRead(*map(torch.cat, zip(*parts, strict=True), [1] * 3)) for parts in zip(*read, strict=True)]


def every_key_kept(reading: PromptReading, prompt: PromptTokens, old: KVBias | None, fingerprint: Fingerprint) -> KVBias:
    """The bias of a prompt alone, with a batch axis; states of recurrent layers cover the prompt and everything before it.

    Args:
        reading: of the pass over the prompt.
        prompt: the prompt; positions that are not read get weight 0.
        old: the bias that the prompt continues; its positions come first.
        fingerprint: fingerprint of the model.
    """
    keys, values = reading.keys, reading.values
    n_layers, batch, n_kv_heads, n_pos, d_head = values.shape
    heads = {"k": n_kv_heads, "v": n_kv_heads, "q": fingerprint.n_heads}
    last = {x: reading.shift_state.get(x, values.new_zeros(n_layers, batch, 0, n, d_head)) for x, n in heads.items()}
    lengths = torch.as_tensor(prompt.n_positions(), device=keys.device).expand(batch)
    distance = lengths[:, None] - torch.arange(n_pos, device=keys.device)
    weight = torch.ones(batch, n_pos, device=keys.device) if prompt.mask is None else prompt.mask
    on = weight[:, None, :].to(keys).expand(*keys.shape[:-1])
    if fingerprint.layers_differ:
        alike = fingerprint.n_heads == fingerprint.n_kv_heads  # rows of key-value heads could not be told from query heads'
        sizes = [(n_kv, n // n_kv if alike else 1) for n, n_kv, *_ in fingerprint.heads]
        on, values = (
            padded([x[:, :n].repeat_interleave(group, dim=1) for x, (n, group) in zip(of, sizes, strict=True)])
            for of in (on, values)
        )
    return KVBias(
        b_KV=values * on[..., None],
        b_D=on.clone(),
        last_k=last["k"],
        last_v=last["v"],
        last_q=last["q"],
        n_prompt_tokens=prompt.lengths(),
        position_offset=prompt.n_positions() + (0 if old is None else old.position_offset),
        fingerprint=fingerprint,
        features=VirtualKeys(keys, distance.clamp(min=1)[None, :, None].expand(*keys.shape[:-1]).clone()),
        log_scale=keys.new_zeros(keys.shape[:3]),
        recurrent=reading.recurrent,
    )


def _holds_no_scores(model: Any) -> bool:
    """Whether torch's kernel computes every layer and sees by itself which keys are later."""
    by_kernel = all(runs_fused(block.attn) and block.attn.attn_type == "global" for block in model.blocks)
    return by_kernel and model.cfg.positional_embedding_type != "alibi"


def _segments(model: Any, tokens: Tensor, whole: bool = False) -> Iterator[slice]:
    """The positions of a text that are read at once after what is attached."""
    batch, n_pos = tokens.shape
    n_keys = 0 if model.attached_kv_bias is None else model.attached_kv_bias.d_phi
    length = n_pos if whole else tokens_at_once(model, batch, n_pos, n_keys)
    return (slice(first, first + length) for first in range(0, n_pos, length))


def tokens_at_once(model: Any, batch: int, n_pos: int, n_keys: int) -> int:
    """How many tokens of each text, of ``n_pos`` tokens, can be read at once after ``n_keys`` keys; at least one."""
    return min(
        n_pos,
        max(1, by_device(NUMBERS_AT_ONCE, torch.device(model.cfg.device)) // (batch * model.cfg.n_heads * (n_keys + n_pos))),
    )


@contextlib.contextmanager
def observed(model: Any) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
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
