"""The prompt's own forward pass through a softmax model, and the exact bias of it (:func:`kvlens.kv_bias.exact.exact_bias`).

All other methods approximate it, and it replaces the prompt while reference text is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from kvlens.components import shown
from kvlens.errors import KVLensError
from kvlens.kv_bias import Features, Fingerprint, Keys, KVBias, VirtualKeys
from kvlens.kv_bias.exact import exact_bias
from kvlens.memory import NUMBERS_AT_ONCE, by_device
from kvlens.model import attention_parts
from kvlens.model.protocol import Hooks, KVModel, PromptBatch
from kvlens.ops.landmarks import PromptKeys


@dataclass(frozen=True, eq=False)
class ConvertedExactly:
    """A prompt with every key kept.

    Attributes:
        bias: the bias of this prompt alone, without the one that it continues; always with a batch axis.
        real: True at real tokens, None if no prompt is padded.
        last_residual: the residual of each prompt's last token, for the logits of the first token after it.
        old: the bias that it continues, as read in the pass: hooks may have changed it.
    """

    bias: KVBias
    real: Bool[Tensor, "batch key"] | None
    last_residual: Float[Tensor, "batch 1 d_model"]
    old: KVBias | None = None

    def keys(self, model: KVModel, layer: int) -> PromptKeys:
        """One layer's keys, in the form used by the fits."""
        part = self.bias.attention[layer]
        return PromptKeys(part.keys, part.b_kv, part.distance, self.real, attention_parts(model)[layer].score_rule())


def convert_exactly(
    model: KVModel,
    prompt: PromptBatch,
    fwd_hooks: Hooks,
    old: KVBias | None,
    fingerprint: Fingerprint,
) -> ConvertedExactly:
    """One pass over the prompt, with the bias that it continues attached; each layer's keys and values become virtual keys."""
    tokens, read = prompt.tokens, dict[str, Tensor]()
    with model.hooks(fwd_hooks=list(fwd_hooks)), model.hooks(fwd_hooks=[] if old is None else readers(model, old, read)):
        reading = model.read_prompt(prompt)
    positions, device = torch.arange(tokens.shape[1], device=tokens.device), reading.residual.device
    last = positions.expand(tokens.shape) if prompt.mask is None else positions.where(prompt.mask, 0)
    residual = reading.residual[torch.arange(len(tokens), device=device), last.amax(dim=1).to(device)][:, None]
    bias = exact_bias(reading, prompt, old, fingerprint)
    return ConvertedExactly(bias, prompt.mask, residual, as_read(old, read) if old and read else old)


def rows_at_once(model: KVModel, bias: KVBias, n_pos: int, most: int) -> int:
    """How many texts of ``n_pos`` tokens can be read at once after ``bias``, at least one."""
    return min(most, max(1, by_device(NUMBERS_AT_ONCE, bias.device) // (model.cfg.n_heads * n_pos * (bias.d_phi + n_pos))))


def readers(model: KVModel, old: KVBias, read: dict[str, Tensor]) -> list[tuple[str, Callable]]:
    """Hooks that run last and record the old bias as the pass reads it; none if nothing else is hooked to it."""

    def note(b: Tensor, hook: HookPoint) -> None:
        read[hook.name] = b

    names = [f"blocks.{layer}.attn.hook_{name}" for layer in old.attention_layers for name in ("b_kv", "b_d", "b_keys")]
    names = [name for name in names if name in model.hook_dict]
    hooked = any(model.hook_dict[name].has_hooks("fwd") for name in names)
    return [(name, note) for name in names] if hooked else []


def as_read(old: KVBias, read: dict[str, Tensor]) -> KVBias:
    """``old`` as changed by hooks: one row per query head, and a batch axis if a hook added one."""
    device = next(iter(read.values())).device
    given: dict[int, dict[str, Tensor]] = {layer: {} for layer in old.attention_layers}
    for name, b in read.items():
        given[int(name.split(".")[1])][name.rpartition("hook_")[2]] = b

    def was_shown(layer: int, name: str) -> Tensor:
        return shown(old.layers[layer].attention, name, old.first_state_head(layer)).to(device)

    if all(torch.equal(was_shown(layer, name).to(b), b) for layer, new in given.items() for name, b in new.items()):
        return old
    batch = max(map(len, read.values()))
    whole = old if batch == 1 and old.batch_size is None else as_batch(old, batch)
    parts = zip(old.attention_layers, whole.attention, strict=True)
    return whole.with_attention([_as_read(part, given[layer], old.first_state_head(layer)) for layer, part in parts])


def _as_read(part: Features, given: Mapping[str, Tensor], n_heads: int) -> Features:
    """The part with numbers as hooks left them, by query head."""
    given = {name: b.expand(len(part.b_d), *b.shape[1:]).to(part.b_kv) for name, b in given.items()}
    changed = replace(part, b_kv=given["b_kv"], b_d=given["b_d"], log_scale=torch.zeros_like(part.log_scale))
    return _with_keys_by_query_head(changed, given["b_keys"]) if isinstance(changed, Keys) else changed


def _with_keys_by_query_head(part: Keys, keys: Float[Tensor, "batch head r d_key"]) -> Keys:
    """The part with keys that the query heads of a group need not share: then each has its own, side by side."""
    by_group = keys.unflatten(1, (part.n_kv_heads, -1))
    if torch.equal(by_group, by_group[:, :, :1].expand_as(by_group)):
        return replace(part, features=VirtualKeys(by_group[:, :, 0], part.distance))
    group = by_group.shape[2]
    own = torch.eye(group).to(part.b_kv)[:, :, None]  # [query head of the group, whose key, r]
    b_d = (part.b_d.unflatten(1, (-1, group))[..., None, :] * own).flatten(-2).flatten(1, 2)
    b_kv = (part.b_kv.unflatten(1, (-1, group))[..., None, :, :] * own[..., None]).flatten(-3, -2).flatten(1, 2)
    features = VirtualKeys(by_group.flatten(2, 3), torch.cat([part.distance] * group, dim=-1))
    return replace(part, b_kv=b_kv, b_d=b_d, features=features)


def continued(old: KVBias | None, new: KVBias) -> KVBias:
    """``new`` after ``old``: virtual keys concatenated, the old ones moved away by the positions of the new prompt.

    The states of recurrent layers are ``new``'s, which already include the effect of the old ones.

    Raises:
        KVLensError: the bias to continue from has other features.
    """
    if old is None:
        return new
    if old.kind != new.kind:
        kinds = f"{old.kind} features, this method has {new.kind}"
        raise KVLensError(f"convert_prompt: the bias to continue from has {kinds}: continue with the method that made it")
    old = as_batch(old, new.n_rows)
    if old.kind == "virtual_keys":
        old = moved_away(old, new.position_offset - old.position_offset)
    both = KVBias.combine(old, new, shift_state="last")
    layers = [layer.with_state_of(own) for layer, own in zip(both.layers, new.layers, strict=True)]
    return replace(both, layers=tuple(layers), record=both.fit)


def moved_away(bias: KVBias, n_tokens: int | Int[Tensor, " batch"]) -> KVBias:
    """The bias with its keys so many positions further away from the text."""
    layers = tuple(layer.of_attention(lambda keys: keys.further(n_tokens)) for layer in bias.layers)
    return replace(bias, layers=layers, record=bias.fit)


def as_batch(bias: KVBias, batch: int) -> KVBias:
    """The bias of one prompt, repeated for a batch of ``batch`` prompts; a batch of that size is returned unchanged."""
    if bias.batch_size == batch:
        return bias
    return (bias if bias.batch_size is None else bias.select_prompt(0)).repeat(batch)


def rows_of(bias: KVBias, index: Int[Tensor, " row"]) -> KVBias:
    """The prompts of a batch by index, as a batch, for immediate use; a single prompt serves any number of rows."""
    return bias.select_prompt(0) if bias.batch_size == 1 else bias.select_prompts(index)
