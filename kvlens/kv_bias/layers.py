"""Parts of a bias: the fields of one of its layers, and of a selection of layers and heads."""

from collections.abc import Sequence
from typing import Any

from kvlens.errors import KVLensError
from kvlens.kv_bias.features import VirtualKeys
from kvlens.kv_bias.fit import since
from kvlens.kv_bias.recurrent import NO_STATES


def fields_of_layer(bias: Any, layer: int) -> dict[str, Any]:
    """The fields of one layer, without what fills it up to the size of larger ones."""
    f, tensors = bias.fingerprint.of_layer(layer), dict[str, Any]()
    by_query_head = bias.b_KV.shape[-3] == bias.n_heads
    heads, d_phi = f.n_heads if by_query_head else f.n_kv_heads, f.d_phi or bias.d_phi
    tensors["b_KV"], tensors["b_D"] = bias.b_KV[..., :heads, :d_phi, : f.d_head], bias.b_D[..., :heads, :d_phi]
    tensors["last_q"] = bias.last_q[..., : f.n_heads, : f.d_head]
    tensors |= {name: getattr(bias, name)[..., : f.n_kv_heads, : f.d_head] for name in ("last_k", "last_v")}
    if bias.features is not None:
        tensors["log_scale"] = bias.log_scale[..., : f.n_kv_heads]
    fields = {name: tensor[layer : layer + 1] for name, tensor in tensors.items()}
    if isinstance(bias.features, VirtualKeys):
        keys = bias.features.keys[layer : layer + 1, ..., : f.n_kv_heads, :, : f.d_key or f.d_head]
        fields["features"] = VirtualKeys(keys, bias.features.distance[layer : layer + 1, ..., : f.n_kv_heads, :])
    elif bias.features is not None:
        fields["features"] = bias.features.map(lambda x: x[layer : layer + 1])
    return {**fields, "fingerprint": f, "recurrent": NO_STATES}


def fields_of_selection(bias: Any, layers: Sequence[int], heads: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The fields with b_KV and b_D of the union of layers and (layer, head) pairs, by query head; zeros elsewhere.

    Raises:
        KVLensError: a layer or head that does not exist.
    """
    n_heads = [bias.n_heads_of(layer) for layer in range(bias.n_layers)]
    whole = bias.padded().per_query_head()
    kept = whole.b_KV.new_zeros(bias.n_layers, max(n_heads))
    for layer in layers:
        layer = _index("layer", layer, bias.n_layers)
        kept[layer, : n_heads[layer]] = 1
    for layer, head in heads:
        layer = _index("layer", layer, bias.n_layers)
        kept[layer, _index("head", head, n_heads[layer])] = 1
    n_kept, n_all, n_states = int(kept.count_nonzero()), sum(n_heads), bias.recurrent.n_heads
    of_states = [kept[layer, (first := bias.first_state_head(layer)) : first + n_states] for layer in bias.recurrent.layers]
    keep = kept[list(bias.attention_layers), : bias.n_heads]
    keep = keep if bias.batch_size is None else keep[:, None]
    return {
        "fit": bias.fit if n_kept == n_all else since(bias.fit, f"{n_kept} of {n_all} heads selected"),
        "features": whole.features,
        "b_KV": whole.b_KV * keep[..., None, None],
        "b_D": whole.b_D * keep[..., None],
        "recurrent": bias.recurrent.select(of_states),
    }


def _index(what: str, index: int, n: int) -> int:
    if not -n <= index < n:
        raise KVLensError(f"select: {what} {index} does not exist; there are {n}")
    return index
