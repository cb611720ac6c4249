"""The prompt's own forward pass through a softmax model: its keys and values as scored, and the exact bias made of them.

The exact bias keeps every key (r = M, weight 1), so attention over it is softmax attention over the prompt. All other methods
approximate it, and it replaces the prompt while reference text is read.

In the eager form a pass over N tokens holds heads x N x N scores. A long prompt is therefore read in segments, each through all
layers before the next, so that at most :data:`NUMBERS_AT_ONCE` scores are held; so are long texts that are read after a prompt.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens._tl import TransformerLensKeyValueCache
from kvlens.components import LayerBias, ShiftedCacheEntry, hidden_tokens_keep_positions
from kvlens.conversion.prompt import PromptTokens
from kvlens.errors import KVLensError
from kvlens.kv_bias import Fingerprint, KVBias, RecurrentStates, VirtualKeys
from kvlens.kv_bias.ragged import padded
from kvlens.memory import NUMBERS_AT_ONCE
from kvlens.model import HookedKVTransformer
from kvlens.model.assembly import spread_bias
from kvlens.model.protocol import KVModel
from kvlens.model.streaming import has_hooks, wants_gradients
from kvlens.ops.landmarks import PromptKeys


class ConvertedExactly(NamedTuple):
    """A prompt with every key kept.

    Attributes:
        bias: the bias of this prompt alone, without the one that it continues; always with a batch axis.
        real: True at real tokens, None if no prompt is padded.
        last_residual: the residual of each prompt's last token, for the logits of the first token after it.
        old: the bias that it continues, as read in the pass: hooks may have changed it.
        queries: queries of the prompt's tokens as scored, [batch, pos, head, d_head] per layer; None unless requested.
    """

    bias: KVBias
    real: Bool[Tensor, "batch key"] | None
    last_residual: Float[Tensor, "batch 1 d_model"]
    old: KVBias | None = None
    queries: list[Tensor] | None = None

    def keys(self, model: HookedKVTransformer, layer: int) -> PromptKeys:
        """One layer's keys, in the form used by the fits."""
        features = self.bias.features
        assert isinstance(features, VirtualKeys)
        rule = model.blocks[layer].attn.score_rule()
        return PromptKeys(features.keys[layer], self.bias.b_KV[layer], features.distance[layer], self.real, rule)


def convert_exactly(
    model: HookedKVTransformer,
    prompt: PromptTokens,
    fwd_hooks: Sequence[Any],
    old: KVBias | None,
    fingerprint: Fingerprint,
    with_queries: bool = False,
) -> ConvertedExactly:
    """One pass over the prompt, with the bias that it continues attached; each layer's keys and values become virtual keys.

    A long prompt is read in segments, unless something is hooked or gradients are required.
    """
    tokens, cfg = prompt.tokens, model.cfg
    batch, n_pos = tokens.shape
    cache = TransformerLensKeyValueCache.init_cache(cfg, cfg.device, batch)
    mask = torch.ones_like(tokens) if prompt.mask is None else prompt.mask.long()
    read: dict[str, Tensor] = {}
    kept = hidden_tokens_keep_positions(prompt.keeps_positions)
    residuals, seen_queries = [], []
    with model.hooks(fwd_hooks=list(fwd_hooks)), kept:
        for here in torch.arange(n_pos).split(_segment_length(model, prompt, old)):
            some = slice(int(here[0]), int(here[-1]) + 1)
            with observed(model) as seen:
                residuals.append(
                    model.run_with_hooks(
                        tokens[:, some],
                        fwd_hooks=readers(model, old, read),
                        attention_mask=mask[:, some],
                        past_kv_cache=cache,
                        stop_at_layer=cfg.n_layers,
                    )
                )
            if with_queries:
                seen_queries.append([q.to(tokens.device) for q, _, _ in seen])
    residual = torch.cat(residuals, dim=1)
    keys = padded([k.transpose(1, 2).to(tokens.device) for _, k, _ in seen])
    values = padded([v.transpose(1, 2).to(tokens.device) for _, _, v in seen])
    bias = every_key_kept(keys, values, prompt, old, fingerprint, {x: _shift_state(model, cache, x, keys) for x in "kvq"})
    positions = torch.arange(n_pos, device=tokens.device)
    read_positions = positions.expand(batch, -1) if prompt.mask is None else positions.where(prompt.mask, 0)
    last = residual[torch.arange(batch, device=residual.device), read_positions.amax(dim=1).to(residual.device)][:, None]
    queries = [torch.cat(parts, dim=1) for parts in zip(*seen_queries, strict=True)] if with_queries else None
    return ConvertedExactly(bias, prompt.mask, last, as_read(old, read), queries)


def _segment_length(model: HookedKVTransformer, prompt: PromptTokens, old: KVBias | None) -> int:
    """Tokens per row and segment; all of them if the pass must see the prompt as a whole, or holds no scores."""
    batch, n_pos = prompt.tokens.shape
    cfg, before = model.cfg, 0 if old is None else old.d_phi
    changes_with_length = cfg.use_dynamic_ntk_rope or prompt.keeps_positions
    if changes_with_length or cfg.softmax_form == "fused" or has_hooks(model) or wants_gradients(model):
        return n_pos
    return tokens_at_once(model, batch, n_pos, before)


def tokens_at_once(model: HookedKVTransformer, batch: int, n_pos: int, n_keys: int) -> int:
    """How many tokens of each text, of ``n_pos`` tokens, can be read at once after ``n_keys`` keys; at least one."""
    return min(n_pos, max(1, NUMBERS_AT_ONCE // (batch * model.cfg.n_heads * (n_keys + n_pos))))


def rows_at_once(model: HookedKVTransformer, bias: KVBias, n_pos: int, most: int) -> int:
    """How many texts of ``n_pos`` tokens can be read at once after ``bias``, at least one."""
    return min(most, max(1, NUMBERS_AT_ONCE // (model.cfg.n_heads * n_pos * (bias.d_phi + n_pos))))


def every_key_kept(
    keys: Float[Tensor, "layer batch kv_head pos d_key"],
    values: Float[Tensor, "layer batch kv_head pos d_head"],
    prompt: PromptTokens,
    old: KVBias | None,
    fingerprint: Fingerprint,
    last: Mapping[str, Tensor],
    recurrent: RecurrentStates | None = None,
) -> KVBias:
    """The bias of a prompt alone, with a batch axis; states of recurrent layers cover the prompt and everything before it.

    Args:
        keys: keys as scored.
        values: values at the same positions.
        prompt: the prompt; positions that are not read get weight 0.
        old: the bias that the prompt continues; its positions come first.
        fingerprint: fingerprint of the model.
        last: shift states by "k", "v" and "q", each [layer, batch, window, head, d_head].
        recurrent: for a hybrid model, the states after the prompt.
    """
    batch, n_pos = prompt.tokens.shape
    lengths = torch.as_tensor(prompt.n_positions(), device=keys.device).expand(batch)
    distance = lengths[:, None] - torch.arange(n_pos, device=keys.device)
    weight = torch.ones(batch, n_pos, device=keys.device) if prompt.mask is None else prompt.mask
    on = weight[:, None, :].to(keys).expand(*keys.shape[:-1])
    if fingerprint.heads is not None:
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
        recurrent=recurrent,
    )


def readers(model: KVModel, old: KVBias | None, read: dict[str, Tensor]) -> list[tuple[str, Callable]]:
    """Hooks that run last and record the old bias as the pass reads it; none if nothing else is hooked to it."""

    def note(b: Tensor, hook: Any) -> None:
        read[hook.name] = b

    layers = () if old is None else old.attention_layers
    names = [f"blocks.{layer}.attn.hook_{name}" for layer in layers for name in ("b_kv", "b_d", "b_keys")]
    names = [name for name in names if name in model.hook_dict]
    hooked = any(model.hook_dict[name].has_hooks("fwd") for name in names)
    return [(name, note) for name in names] if hooked else []


def as_read(old: KVBias | None, read: dict[str, Tensor]) -> KVBias | None:
    """``old`` as changed by hooks: one row per query head, and a batch axis if a hook added one."""
    if old is None or not read:
        return old
    device = next(iter(read.values())).device
    held = {layer: LayerBias.of(old, layer, device) for layer in old.attention_layers}
    names = [name for name in ("b_kv", "b_d", "b_keys") if f"blocks.{old.attention_layers[0]}.attn.hook_{name}" in read]
    new = {(layer, name): read[f"blocks.{layer}.attn.hook_{name}"] for layer in held for name in names}
    if all(torch.equal(b, held[layer].shown(name, old.first_state_head(layer)).to(b)) for (layer, name), b in new.items()):
        return old
    batch = max(map(len, new.values()))
    whole = old.per_query_head()
    whole = whole if batch == 1 and old.batch_size is None else as_batch(whole, batch)

    def stacked(name: str) -> Tensor:
        layers = padded([new[layer, name].expand(batch, *new[layer, name].shape[1:]) for layer in held]).to(whole.b_KV)
        return layers[:, 0] if whole.batch_size is None else layers

    assert whole.log_scale is not None
    changed: dict[str, Any] = {"b_KV": stacked("b_kv"), "b_D": stacked("b_d"), "log_scale": torch.zeros_like(whole.log_scale)}
    if "b_keys" in names and old.fingerprint.heads is None:
        assert isinstance(whole.features, VirtualKeys)
        changed |= _with_keys_by_query_head(stacked("b_keys"), whole.features.distance, changed["b_KV"], changed["b_D"])
    elif "b_keys" in names and not all(
        torch.equal(new[l, "b_keys"], held[l].shown("b_keys", old.first_state_head(l))) for l in held
    ):
        raise KVLensError(
            "convert_prompt: hook_b_keys was changed, from which a model whose layers differ in heads cannot continue"
        )
    return replace(whole, **changed)


def _with_keys_by_query_head(
    keys: Float[Tensor, "layer *batch head r d_key"],
    distance: Int[Tensor, "layer *batch kv_head r"],
    b_kv: Float[Tensor, "layer *batch head r d_head"],
    b_d: Float[Tensor, "layer *batch head r"],
) -> dict[str, Any]:
    """Features, b_KV and b_D for keys that the query heads of a group need not share: then each has its own, side by side."""
    n_kv_heads = distance.shape[-2]
    by_group = keys.unflatten(-3, (n_kv_heads, -1))
    if torch.equal(by_group, by_group[..., :1, :, :].expand_as(by_group)):
        return {"features": VirtualKeys(by_group[..., 0, :, :], distance)}
    group = by_group.shape[-3]
    own = torch.eye(group).to(b_kv)[:, :, None]  # [query head of the group, whose key, r]
    b_d = (b_d.unflatten(-2, (n_kv_heads, group))[..., None, :] * own).flatten(-2).flatten(-3, -2)
    b_kv = (b_kv.unflatten(-3, (n_kv_heads, group))[..., None, :, :] * own[..., None]).flatten(-3, -2).flatten(-4, -3)
    return {"features": VirtualKeys(by_group.flatten(-3, -2), torch.cat([distance] * group, dim=-1)), "b_KV": b_kv, "b_D": b_d}


def _shift_state(model: HookedKVTransformer, cache: TransformerLensKeyValueCache, name: str, like: Tensor) -> Tensor:
    """The last raw rows of one projection, [layer, batch, window, head, d_head]; window 0 if it is not shifted."""
    n_heads = model.cfg.n_heads if name == "q" else model.cfg.n_kv_heads
    entries = [entry for entry in cache.entries if isinstance(entry, ShiftedCacheEntry) and name in entry.shift_state]
    if not entries:
        return like.new_zeros(like.shape[0], like.shape[1], 0, n_heads, like.shape[-1])
    return padded([entry.shift_state[name].to(like) for entry in entries])


def continued(old: KVBias | None, new: KVBias) -> KVBias:
    """``new`` after ``old``: virtual keys concatenated, the old ones moved away by the positions of the new prompt.

    The states of recurrent layers are ``new``'s, which already include the effect of the old ones.

    Raises:
        KVLensError: the bias to continue from has other features.
    """
    if old is None:
        return new
    if not isinstance(old.features, type(new.features)):
        kinds = f"{old.features.kind} features, this method has {new.features.kind}"  # type: ignore[union-attr]
        raise KVLensError(f"convert_prompt: the bias to continue from has {kinds}: continue with the method that made it")
    old = as_batch(old, new.b_KV.shape[1])
    if isinstance(old.features, VirtualKeys):
        old = old._made(old.fit, features=old.features.further(new.position_offset - old.position_offset))
    both = KVBias.combine(old, new, shift_state="last")
    return both if new.recurrent is None else both._made(both.fit, recurrent=new.recurrent)


def as_batch(bias: KVBias, batch: int) -> KVBias:
    """The bias of one prompt, repeated for a batch of ``batch`` prompts; a batch of that size is returned unchanged."""
    if bias.batch_size == batch:
        return bias
    return (bias if bias.batch_size is None else bias.select_prompt(0)).repeat(batch)


def rows_of(bias: KVBias, index: Int[Tensor, " row"]) -> KVBias:
    """The prompts of a batch by index, repetitions allowed. A single prompt serves any number of rows.

    The result is for immediate use: it carries no fit record.
    """
    if bias.batch_size == 1:
        return bias.select_prompt(0)
    index = index.to(bias.b_KV.device)

    counts = {name: getattr(bias, name) for name in ("n_prompt_tokens", "position_offset")}
    counts = {name: value[index] if isinstance(value, Tensor) else value for name, value in counts.items()}
    return bias._made(None, **bias._changed(lambda tensor: tensor[:, index], per_prompt_only=True), **counts)


@contextlib.contextmanager
def attached(model: HookedKVTransformer, bias: KVBias) -> Iterator[None]:
    """:meth:`HookedKVTransformer.kv_bias` without hashing the weights again, for a bias that was made from this model.

    Raises:
        KVLensError: another thread is using this model.
    """
    with model._thread.changes("convert_prompt", model._has_bias):
        before = model.attached_kv_bias
        model._attached = bias
        spread_bias(model, bias)
        try:
            yield
        finally:
            model._attached = before
            spread_bias(model, before)


@contextlib.contextmanager
def observed(model: HookedKVTransformer) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
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
