"""What a prompt does to the states of a bridge's recurrent layers, token by token."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.bridge.bridge import KVTransformerBridge
from kvlens.bridge.keywords import hidden
from kvlens.bridge.recurrent import RecurrentLayer
from kvlens.errors import KVLensError
from kvlens.mixers import MixerInputs
from kvlens.model import KVModel

WRITTEN = ("k", "v", "log_decay", "write_strength")


class LayerMemory(NamedTuple):
    """One recurrent layer's part in S = P S_old + sum_j kbar_j v_j^T, in float64.

    Attributes:
        layer: its number.
        carried_keys: kbar_j, the key of each token as it stands at the end of the prompt, write strength included.
        survival: |T_{M-1} ... T_{j+1} k_j| / |k_j|, how much of a key the tokens after it leave.
        values: v_j.
        state_map: P, what becomes of the state before the prompt.
        decay: the product of the decays alone, without what is removed; one number a head, or one per key channel.
    """

    layer: int
    carried_keys: Float[Tensor, "pos head d_k"]
    survival: Float[Tensor, "pos head"]
    values: Float[Tensor, "pos head d_v"]
    state_map: Float[Tensor, "head d_k d_k"]
    decay: Float[Tensor, " head #d_k"]


@torch.no_grad()
def read_memory(
    model: KVModel, tokens: Int[Tensor, " pos"], kept: Bool[Tensor, " pos"] | None = None, keeps_positions: bool = True
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
    if not recurrent or not isinstance(model, KVTransformerBridge):
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
        total.exp().reshape(v.shape[2], -1),
    )
