"""The biases of several prompts in a common feature space, so that entries of one can replace those of another.

Biases of a linear model share their features already. Those of a softmax model have their own virtual keys. With all keys
concatenated,

    phi(q) = [phi_a(q); phi_b(q); ...]        b_KV of a = [b_KV_a; 0; ...]        b_KV of b = [0; b_KV_b; ...]

and b_D likewise, each bias gives the same outputs as before, and sums, means and patched mixtures of them are biases too.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvlens import KVBias, combine

from .parts import OF_SHIFT_STATE, tensors_of, with_tensors


def in_one_space(*biases: KVBias) -> list[KVBias]:
    """Each of ``biases`` in the features of all of them, per query head; each keeps its shift state, offset and token count.

    Raises:
        KVLensError: biases of different models or with features of different kinds.
    """
    biases = tuple(bias.per_query_head() for bias in biases)
    if biases[0].features is None:
        return list(biases)
    alone = torch.eye(len(biases)).tolist()
    return [
        _with_own_shift_state(combine(*biases, weights=w, shift_state="first"), b) for w, b in zip(alone, biases, strict=True)
    ]


def with_references(bias: KVBias, references: KVBias | None) -> tuple[KVBias, KVBias | None]:
    """A bias and a batch of others, in a common feature space."""
    if references is None or bias.features is None:
        return bias, references
    return with_others(bias, singles(references))


def singles(references: KVBias) -> list[KVBias]:
    """The biases of a batch, one by one."""
    return [references.select_prompt(i) for i in range(references.b_KV.shape[1])]


def with_others(bias: KVBias, others: Sequence[KVBias]) -> tuple[KVBias, KVBias]:
    """A bias, and others of single prompts as a batch, in a common feature space."""
    own, *others = in_one_space(bias, *others)
    of_others = [tensors_of(b) for b in others]
    stacked = {name: torch.stack([tensors[name] for tensors in of_others], dim=1) for name in of_others[0]}
    return own, with_tensors(others[0].repeat(len(others)), stacked)


def _with_own_shift_state(bias: KVBias, own: KVBias) -> KVBias:
    kept = (*OF_SHIFT_STATE, "recurrent", "n_prompt_tokens", "position_offset")
    return replace(bias, **{name: getattr(own, name) for name in kept})


def pair_token_by_token(a: KVBias, b: KVBias) -> bool:
    """Whether both have one weighted virtual key per token, and the same number of tokens."""
    return a.d_phi == b.d_phi and all(
        bias.features is not None
        and bias.features.kind == "virtual_keys"
        and bias.fit is None
        and bias.d_phi == bias.n_prompt_tokens
        and all(bool((bias.of_layer(layer).b_D != 0).all()) for layer in bias.attention_layers)
        for bias in (a, b)
    )


def keys_and_values(clean: KVBias, corrupted: KVBias) -> dict[tuple[str, int], Tensor]:
    """The clean keys with the corrupted values, and the other way round, of two biases :func:`in_one_space`, in this order.

    Returns:
        (source of :mod:`kvlens.analyses.bias.patches`, layer) -> b_KV or b_D [1, head, ...].
    """
    if clean.fingerprint.heads is not None:
        layers = [keys_and_values(clean.of_layer(l), corrupted.of_layer(l)) for l in range(clean.n_layers)]
        return {(name, l): tensor for l, of_layer in enumerate(layers) for (name, _), tensor in of_layer.items()}
    r = clean.d_phi // 2
    weights = {"clean": clean.b_D[..., :r, None], "corrupted": corrupted.b_D[..., r:, None]}
    values = {
        "clean": clean.b_KV[..., :r, :] / weights["clean"],
        "corrupted": corrupted.b_KV[..., r:, :] / weights["corrupted"],
    }
    nothing = torch.zeros_like(values["clean"])
    made = {
        "keys.b_kv": torch.cat([weights["clean"] * values["corrupted"], nothing], dim=-2),
        "keys.b_d": clean.b_D,
        "values.b_kv": torch.cat([nothing, weights["corrupted"] * values["clean"]], dim=-2),
    }
    return {(name, layer): tensor[layer][None] for name, tensor in made.items() for layer in range(clean.n_layers)}
