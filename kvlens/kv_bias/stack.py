"""The layers of a bias as one stack of tensors for each name, and back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.kv_bias.arithmetic import fields_of_layer
from kvlens.kv_bias.features import VirtualKeys
from kvlens.kv_bias.fields import Fingerprint, RecurrentStates
from kvlens.kv_bias.layers import Features, Keys, Layer, State, padded

SHIFTED = ("k", "v", "q")


def layers_of(bias: Any) -> tuple[Layer, ...]:
    """Every layer of a bias, as views of its tensors where they have the size of the stack."""
    layers = [Layer() for _ in range(bias.n_layers)]
    single = bias.batch_size is None

    def rows(x: Tensor) -> Tensor:
        return x[None] if single else x

    for number, layer in enumerate(bias.attention_layers):
        fields, i = vars(bias), number
        if bias.fingerprint.layers_differ:
            fields, i = {**vars(bias), **fields_of_layer(bias, number)}, 0
        last = {x: rows(fields[f"last_{x}"][i]) for x in SHIFTED}
        b_kv, b_d = (rows(fields[name][i]) for name in ("b_KV", "b_D"))
        part = State(b_kv, b_d)
        if fields["features"] is not None:
            features = fields["features"].of_layer(i)
            kind = Keys if isinstance(features, VirtualKeys) else Features
            part = kind(b_kv, b_d, rows(fields["log_scale"][i]), features)
        layers[layer] = Layer((part,), last)
    for layer, b_kv, conv in zip(bias.recurrent.layers, bias.recurrent.b_KV, bias.recurrent.conv, strict=True):
        layers[layer] = Layer((*layers[layer].parts, State(rows(b_kv), None)), {**layers[layer].last, "conv": rows(conv)})
    return tuple(layers)


def fields_of_layers(f: Fingerprint, layers: Sequence[Layer], single: bool, position_offset: Any) -> dict[str, Any]:
    """The fields of a stack of these layers; ``single`` without an axis of prompts."""
    parts = [layer.attention for layer in layers if layer.attention is not None]

    def rows(x: Tensor) -> Tensor:
        return x[:, 0] if single else x

    fields: dict[str, Any] = {}
    by_query_head = len({part.n_heads == part.n_kv_heads for part in parts if isinstance(part, Features)}) > 1
    if by_query_head or (f.layers_differ and f.n_heads == f.n_kv_heads):
        parts = [part.per_query_head(f.heads[layer][0]) for layer, part in zip(f.attention_layers, parts, strict=True)]
    if parts:
        if isinstance(parts[0], Keys):
            most = max(part.keys.shape[2] for part in parts)
            parts = [part.widened(most) for part in parts]
            heads = torch.arange(max(part.n_kv_heads for part in parts))
            distance = [part.distance[:, heads.clamp(max=part.n_kv_heads - 1).to(part.distance.device)] for part in parts]
            fields["features"] = VirtualKeys(rows(padded([part.keys for part in parts])), rows(padded(distance)))
        elif isinstance(parts[0], Features):
            of = [part.features.tensors() for part in parts]
            fields["features"] = parts[0].features.made_of({name: padded([x[name] for x in of]) for name in of[0]})
        if isinstance(parts[0], Features):
            fields["log_scale"] = rows(padded([part.log_scale for part in parts]))
        fields |= {name: rows(padded([getattr(p, name.lower()) for p in parts])) for name in ("b_KV", "b_D")}
        for x in SHIFTED:
            fields[f"last_{x}"] = rows(padded([layers[layer].last[x] for layer in f.attention_layers]))
    else:
        like = next(x for layer in layers for x in layer.tensors().values())
        lead, n, d = (0, len(like)), f.n_kv_heads, f.d_head
        r = int(torch.as_tensor(position_offset).max())
        sizes = {"b_KV": (n, r, d), "b_D": (n, r), "log_scale": (n,)}
        sizes |= {"last_k": (0, n, d), "last_v": (0, n, d), "last_q": (0, f.n_heads, d)}
        fields |= {name: rows(like.new_zeros(*lead, *size)) for name, size in sizes.items()}
        none = like.new_ones(*lead, n, r).long()
        fields["features"] = VirtualKeys(rows(like.new_zeros(*lead, n, r, f.d_key or d)), rows(none))
    found = {i: layer for i, layer in enumerate(layers) if layer.state is not None}
    if found:
        states = [layer.state.b_kv for layer in found.values() if layer.state is not None]
        conv = padded([layer.last["conv"] for layer in found.values()])
        fields["recurrent"] = RecurrentStates(tuple(found), rows(padded(states)), rows(conv))
    return fields


def stacked(bias: Any, name: str) -> Tensor:
    """See :meth:`kvlens.KVBias.stacked`."""
    layers = bias.layers
    most = max([0, *(layer.attention.keys.shape[2] for layer in layers if isinstance(layer.attention, Keys))])
    found, free = [], []
    for layer in layers:
        part = layer.attention
        wide = layer.of_attention(lambda p: p.widened(most)) if isinstance(part, Keys) else layer
        found += [x for n, x in wide.tensors().items() if n == name]
        if isinstance(part, Features) and not isinstance(part, Keys):
            free += [x for n, x in part.features.tensors().items() if n == name]
    if not found and not free:
        known = dict.fromkeys(n for layer in layers for n in layer.tensors())
        raise KVLensError(f"stacked: this bias has no {name!r}; it has {', '.join(known)}")
    if free:
        return padded(free)
    whole = padded(found)
    return whole[:, 0] if bias.batch_size is None else whole
