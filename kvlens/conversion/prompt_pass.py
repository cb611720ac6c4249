"""The prompt's own forward pass through a softmax model, and the exact bias of it (:func:`kvlens.kv_bias.exact.exact_bias`).

All other methods approximate it, and it replaces the prompt while reference text is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.components import LayerBias
from kvlens.errors import KVLensError
from kvlens.kv_bias import Fingerprint, KVBias, VirtualKeys
from kvlens.kv_bias.exact import exact_bias
from kvlens.kv_bias.storage import padded
from kvlens.memory import NUMBERS_AT_ONCE, by_device
from kvlens.model.protocol import KVModel, PromptBatch, ReadsPrompts
from kvlens.ops.landmarks import PromptKeys


class ConvertedExactly(NamedTuple):
    """A prompt with every key kept.

    Attributes:
        bias: the bias of this prompt alone, without the one that it continues; always with a batch axis.
        real: True at real tokens, None if no prompt is padded.
        last_residual: the residual of each prompt's last token, for the logits of the first token after it.
        old: the bias that it continues, as read in the pass: hooks may have changed it.
        queries: queries of the prompt's tokens as scored, [batch, pos, head, d_key] per layer; None unless requested.
    """

    bias: KVBias
    real: Bool[Tensor, "batch key"] | None
    last_residual: Float[Tensor, "batch 1 d_model"]
    old: KVBias | None = None
    queries: list[Tensor] | None = None

    def keys(self, model: ReadsPrompts, layer: int) -> PromptKeys:
        """One layer's keys, in the form used by the fits."""
        features = self.bias.features
        assert isinstance(features, VirtualKeys)
        rule = attention_parts(model)[layer].score_rule()
        return PromptKeys(features.keys[layer], self.bias.b_KV[layer], features.distance[layer], self.real, rule)


def convert_exactly(
    model: ReadsPrompts,
    prompt: PromptBatch,
    fwd_hooks: Sequence[Any],
    old: KVBias | None,
    fingerprint: Fingerprint,
    with_queries: bool = False,
) -> ConvertedExactly:
    """One pass over the prompt, with the bias that it continues attached; each layer's keys and values become virtual keys."""
    tokens, read = prompt.tokens, dict[str, Tensor]()
    with model.hooks(fwd_hooks=list(fwd_hooks)), model.hooks(fwd_hooks=readers(model, old, read)):
        reading = model.read_prompt(prompt, with_queries)
    positions, device = torch.arange(tokens.shape[1], device=tokens.device), reading.residual.device
    last = positions.expand(tokens.shape) if prompt.mask is None else positions.where(prompt.mask, 0)
    residual = reading.residual[torch.arange(len(tokens), device=device), last.amax(dim=1).to(device)][:, None]
    bias = exact_bias(reading, prompt, old, fingerprint)
    return ConvertedExactly(bias, prompt.mask, residual, as_read(old, read), reading.queries)


def attention_parts(model: ReadsPrompts) -> list[Any]:
    """What scores keys in each layer with softmax attention: its ``score_rule()``, ``sinks`` and ``output_weights()``."""
    return [part for layer in model.layers() for part in layer.parts if hasattr(part, "score_rule")]


def rows_at_once(model: KVModel, bias: KVBias, n_pos: int, most: int) -> int:
    """How many texts of ``n_pos`` tokens can be read at once after ``bias``, at least one."""
    return min(most, max(1, by_device(NUMBERS_AT_ONCE, bias.b_KV.device) // (model.cfg.n_heads * n_pos * (bias.d_phi + n_pos))))


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
    if "b_keys" in names and not old.fingerprint.layers_differ:
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
    return both._made(both.fit, recurrent=new.recurrent)


def as_batch(bias: KVBias, batch: int) -> KVBias:
    """The bias of one prompt, repeated for a batch of ``batch`` prompts; a batch of that size is returned unchanged."""
    if bias.batch_size == batch:
        return bias
    return (bias if bias.batch_size is None else bias.select_prompt(0)).repeat(batch)


def rows_of(bias: KVBias, index: Int[Tensor, " row"]) -> KVBias:
    """The prompts of a batch by index, as a batch, for immediate use; a single prompt serves any number of rows."""
    return bias.select_prompt(0) if bias.batch_size == 1 else bias.select_prompts(index)
