"""A recurrent layer of the bridge: computed by kvlens' mixer if needed, otherwise by Transformers' kernel.

    S_0 = b_KV          z_i = z_i(context) + b_KV^T qbar_i

A :class:`~kvlens.mixers.Mixer` computes the layer while a bias is attached or a function is hooked to one of its hook points.
Its state is stored in Transformers' cache, from which it is read at every decoded token. :func:`read_memory` is what a prompt
does to the states, token by token. :class:`ShiftedMLP` is the MLP of RWKV, whose shift a prompt reaches, too.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import Cache

from kvlens.bridge.keywords import cache_among, hidden
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias, Layer, Recurrence
from kvlens.mixers import MIXER_HOOKS, Mixer, MixerInputs, RecurrentState, mixer_for
from kvlens.mixers.layers import row_before
from kvlens.model.protocol import Part, ReadPoint

STATES = "_kvlens_states"
"""The attribute of a Transformers cache in which mixers keep their states, by layer."""
ROWS = "_kvlens_rows"
"""Likewise the last inputs of MLPs with a shift."""


class RecurrentLayer(Part):
    """One recurrent layer.

    Args:
        component: the bridge's component around the Transformers module; its forward pass becomes :meth:`forward`.
        layer: its number.
        name: what its hook points are called after: ``attn``, unless the layer has attention too.
    """

    keeps_state = True

    def __init__(self, component: GeneralizedComponent, layer: int, name: str = "attn"):
        self.component, self.layer, self.name = component, layer, name
        self.mixer: Mixer = mixer_for(component.original_component, layer)
        self._given: OrderedDict[int, RecurrentState] = OrderedDict()
        self.always_by_mixer = False
        self._forward_of_bridge = component.forward
        component.__dict__["forward"] = self.forward  # a component hands attributes that it does not know on to the module

    @property
    def n_heads(self) -> int:
        """Value heads."""
        return self.mixer.n_heads

    def hook_points(self) -> dict[str, HookPoint]:
        """The mixer's hook points by their full names, which are those of an attention layer's if there is no attention."""
        return {f"blocks.{self.layer}.{self.name}.{name}": getattr(self.mixer, name) for name in MIXER_HOOKS}

    def join(self, bias: KVBias, positions: Int[Tensor, "#batch pos"]) -> list[RemovableHandle]:
        """Let the next pass start from ``bias``. Remove the handles after it."""
        layer, device = bias.layers[self.layer], positions.device
        assert layer.state is not None
        handle = RemovableHandle(self._given)
        rows = layer.last["conv"][..., : self.mixer.conv_channels].to(device)
        self._given[handle.id] = RecurrentState(layer.state.b_kv.to(device), conv=rows)
        return [handle]

    def observe(self, seen: dict[tuple[int, str], Tensor]) -> list[RemovableHandle]:
        """Let the next pass store its final state, [batch, head, d_k, d_v], and the convolution's inputs in ``seen``.

        The state continues the bias as changed by hooks.
        """

        def see_bias(module: nn.Module, args: object, b_kv: Tensor) -> None:
            seen[self.layer, "b_kv"] = b_kv

        def see_state(module: nn.Module, args: object, output: tuple[Tensor, RecurrentState]) -> None:
            after, n = output[1], output[0].shape[0]
            total = after._replace(b_kv=seen.pop((self.layer, "b_kv"), None)).total()
            assert total is not None
            seen[self.layer, "state"] = total.expand(n, *total.shape[1:])
            rows = total.new_zeros(n, 0, 0) if after.conv is None else after.conv
            seen[self.layer, "conv"] = rows.expand(n, *rows.shape[1:])

        return [
            self.mixer.hook_b_kv.register_forward_hook(see_bias),
            self.mixer.register_forward_hook(see_state),
        ]

    def kept(self, seen: Mapping[tuple[int, str], Tensor], device: torch.device) -> Layer:
        """What the layer keeps behind a pass that :meth:`observe` saw."""
        return Layer((Recurrence(seen[self.layer, "state"].to(device)),), {"conv": seen[self.layer, "conv"].to(device)})

    def attention_points(self) -> dict[str, ReadPoint]:
        """See :meth:`kvlens.model.Part.attention_points`; the pattern is the effective attention of this pass."""
        points: dict[str, ReadPoint] = {"values": (self.mixer.hook_v, None)}
        return points | {name: (getattr(self.mixer, f"hook_{name}"), None) for name in ("pattern", "z", "z_context", "z_bias")}

    @property
    def output(self) -> nn.Module:
        """The output projection."""
        return getattr(self.mixer.module, getattr(self.mixer, "output_name", "out_proj"))

    @property
    def normed(self) -> nn.Module | None:
        """The output projection, before which stand a norm and a gate; None without heads."""
        return self.output if self.n_heads else None

    @property
    def output_bias(self) -> Tensor | None:
        """b_O; None without one."""
        return getattr(self.output, "bias", None)

    def output_weights(self) -> Float[Tensor, "head d_v d_model"]:
        """W_O of each value head; a norm and a gate stand before it."""
        weights: Any = self.output.weight
        if not self.n_heads:
            return torch.zeros(0, 1, len(weights), dtype=weights.dtype, device=weights.device)
        return rearrange(weights, "model (head d_v) -> head d_v model", head=self.mixer.n_heads)

    def forward(self, *args: object, **kwargs: Any) -> Any:
        """The component's forward pass."""
        cache = cache_among(kwargs)
        states = getattr(cache, STATES, None) or {}
        mixer = self.mixer
        asked = self.always_by_mixer or mixer.replaces_module or self._given or mixer._forward_hooks or mixer.is_hooked()
        if not asked and self.layer not in states:
            is_native = _is_left_to_transformers(self.component, cache)
            return (self.component._native_forward if is_native else self._forward_of_bridge)(*args, **kwargs)
        hidden = self.component.hook_in(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        state = states[self.layer] if self.layer in states else self._first_state(cache)
        output, after = self.mixer(hidden, state, _mask_of(kwargs.get("attention_mask"), hidden))
        if cache is not None:
            setattr(cache, STATES, {**states, self.layer: after})
        return self.mixer.as_module_returns(self.component.hook_out(output))

    def _first_state(self, cache: Cache | None) -> RecurrentState:
        """The state before a pass whose cache has no state of this layer's mixer."""
        given = next(reversed(self._given.values()), RecurrentState())
        if self.mixer.is_in_cache(cache):
            what = "a KV bias" if self._given else "a hook"
            raise KVLensError(
                f"layer {self.layer} ({type(self.mixer.module).__name__}): the cache that this pass continues was filled by "
                f"Transformers' own kernel, and now there is {what}: attach it before the first pass of the text"
            )
        return given


class ShiftedMLP(Part):
    """An MLP that mixes its input with that of the token before: the channel mixing of RWKV.

    A prompt leaves it the input of its last token, which stands behind the recurrent layer's own in the bias's "conv".

    Args:
        component: the bridge's component around the module; its forward pass becomes :meth:`forward`.
        recurrent: the recurrent part of the same layer.
    """

    def __init__(self, component: GeneralizedComponent, recurrent: RecurrentLayer):
        self.component, self.layer, self.name = component, recurrent.layer, "mlp"
        self.first_channel = recurrent.mixer.conv_channels
        self.hook_conv_state = HookPoint()
        self._given: OrderedDict[int, Tensor] = OrderedDict()
        self._seen: OrderedDict[int, dict[tuple[int, str], Tensor]] = OrderedDict()
        component.__dict__["forward"] = self.forward

    def hook_points(self) -> dict[str, HookPoint]:
        """The input before the first token, as read, [batch or 1, 1, d_model]."""
        return {f"blocks.{self.layer}.mlp.hook_conv_state": self.hook_conv_state}

    def join(self, bias: KVBias, positions: Int[Tensor, "#batch pos"]) -> list[RemovableHandle]:
        """Let the next pass start from ``bias``. Remove the handles after it."""
        handle = RemovableHandle(self._given)
        self._given[handle.id] = bias.layers[self.layer].last["conv"][..., self.first_channel :].to(positions.device)
        return [handle]

    def observe(self, seen: dict[tuple[int, str], Tensor]) -> list[RemovableHandle]:
        """Let the next pass put the input of the last token behind the recurrent layer's in ``seen``."""
        handle = RemovableHandle(self._seen)
        self._seen[handle.id] = seen
        return [handle]

    def output_weights(self) -> Float[Tensor, "0 1 d_model"]:
        """There are none, as the MLP has no heads."""
        return torch.zeros(0, 1, self.first_channel)

    def forward(self, hidden_states: Float[Tensor, "batch pos d_model"], **kwargs: Any) -> Tensor:
        """The component's forward pass."""
        x, cache = self.component.hook_in(hidden_states), cache_among(kwargs)
        held = getattr(cache, ROWS, None) or {}
        before = held.get(self.layer, next(reversed(self._given.values()), x.new_zeros(1, 1, x.shape[-1])))
        previous, rows = row_before(x, _mask_of(kwargs.get("attention_mask"), x), self.hook_conv_state(before.to(x)))
        assert rows is not None
        if cache is not None:
            setattr(cache, ROWS, {**held, self.layer: rows})
        for seen in self._seen.values():
            seen[self.layer, "conv"] = torch.cat([seen[self.layer, "conv"], rows], dim=-1)
        output: Tensor = self.component.hook_out(self.component.original_component(x, previous))
        return output


def _is_left_to_transformers(component: GeneralizedComponent, cache: Cache | None) -> bool:
    """Whether a component that can compute a layer step by step must not: with a cache, whose new name it does not know, or
    where it needs a function that Transformers 5 no longer keeps in the module."""
    can = hasattr(type(component), "_native_forward")
    return can and (cache is not None or not hasattr(component.original_component, "causal_conv1d_fn"))


def _mask_of(mask: Tensor | None, hidden: Float[Tensor, "batch pos d_model"]) -> Tensor | None:
    """True at real tokens of this pass; ``mask`` may reach back to the beginning of the text."""
    if mask is None or mask.dim() != 2:
        return None
    mask = mask[:, -hidden.shape[1] :].to(hidden.device, torch.bool)
    return None if bool(mask.all()) else mask


WRITTEN = ("k", "v", "log_decay", "write_strength")


class LayerMemory(NamedTuple):
    """One recurrent layer's part in S = P S_old + sum_j kbar_j v_j^T, in float64.

    Attributes:
        layer: its number.
        carried_keys: kbar_j, the key of each token as it stands at the end of the prompt, write strength included.
        survival: |T_{M-1} ... T_{j+1} k_j| / |k_j|, how much of a key the tokens after it leave.
        values: v_j.
        state_map: P, what becomes of the state before the prompt.
        log_decay: the sum of the log-decays alone, without what is removed; one number a head, or one per key channel.
    """

    layer: int
    carried_keys: Float[Tensor, "pos head d_k"]
    survival: Float[Tensor, "pos head"]
    values: Float[Tensor, "pos head d_v"]
    state_map: Float[Tensor, "head d_k d_k"]
    log_decay: Float[Tensor, " head #d_k"]


@torch.no_grad()
def read_memory(
    model: TransformerBridge,
    tokens: Int[Tensor, " pos"],
    kept: Bool[Tensor, " pos"] | None = None,
    keeps_positions: bool = True,
) -> list[LayerMemory]:
    """What each token of a prompt leaves in the states of the recurrent layers, after any attached bias.

    Args:
        model: a KVTransformerBridge with recurrent layers.
        tokens: of the prompt.
        kept: True at the tokens that are read; None where all are. The others leave nothing.
        keeps_positions: whether the others take positions all the same.

    Raises:
        KVLensError: a model without recurrent layers, or tokens outside the vocabulary.
    """
    recurrent = [part for layer in model.layers() for part in layer.parts if isinstance(part, RecurrentLayer)]
    if not recurrent:
        raise KVLensError(
            "read_memory: this is about the recurrent layers of Transformers' hybrid models, which KVTransformerBridge runs; "
            f"{getattr(model.cfg, 'architecture', None) or 'this model'} has none (with linear attention, every token's term "
            "is in b_KV: bias_positions)"
        )
    model.check_tokens(tokens)
    tokens = tokens.to(model.cfg.device)
    mask = None if kept is None or bool(kept.all()) else kept[None].to(tokens.device)
    seen: dict[tuple[int, str], Tensor] = {}
    handles = [
        getattr(layer.mixer, f"hook_{name}").register_forward_hook(
            lambda module, args, output, at=(layer.layer, name): seen.__setitem__(at, output.double())
        )
        for layer in recurrent
        for name in WRITTEN
    ]
    try:
        model.read(tokens[None], **({} if mask is None else hidden(mask, keeps_positions)))
    finally:
        for handle in handles:
            handle.remove()
    return [_memory(layer, seen, mask) if layer.n_heads else _no_memory(layer, tokens) for layer in recurrent]


def _no_memory(layer: RecurrentLayer, tokens: Int[Tensor, " pos"]) -> LayerMemory:
    """Return the memory of a short convolution alone, which has no heads."""
    none = torch.zeros(len(tokens), 0, 1, dtype=torch.float64, device=tokens.device)
    return LayerMemory(layer.layer, none, none[..., 0], none, none[:0].new_zeros(0, 1, 1), none.new_zeros(0, 1))


def _memory(layer: RecurrentLayer, seen: dict[tuple[int, str], Tensor], mask: Bool[Tensor, "1 pos"] | None) -> LayerMemory:
    k, v, log_decay = (seen[layer.layer, name] for name in WRITTEN[:3])
    write = seen.get((layer.layer, "write_strength"))
    inputs = MixerInputs(k, k, v, log_decay, write, None, None)
    carried = layer.mixer.rule.carried_keys(inputs, mask)[0]
    strength = torch.ones_like(v[0, :, :, 0]) if write is None else write[0]
    lengths = k[0].norm(dim=-1).repeat_interleave(v.shape[2] // k.shape[2], dim=-1)
    tiny = torch.finfo(torch.float64).tiny
    read = torch.ones_like(v[0, :, 0, 0]) if mask is None else mask[0].to(v)
    total = log_decay * read.sum() if log_decay.dim() == 1 else torch.einsum("p,p...->...", read, log_decay[0])
    return LayerMemory(
        layer.layer,
        carried,
        carried.norm(dim=-1) / (strength * lengths).clamp(min=tiny),
        v[0],
        layer.mixer.rule.state_map(inputs, mask)[0],
        total.reshape(v.shape[2], -1),
    )
