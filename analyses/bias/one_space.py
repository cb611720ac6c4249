"""The biases of several prompts in a common feature space, so that entries of one can replace those of another.

Biases of a linear model share their features already. Those of a softmax model have their own virtual keys. With all keys
concatenated,

    phi(q) = [phi_a(q); phi_b(q); ...]        b_KV of a = [b_KV_a; 0; ...]        b_KV of b = [0; b_KV_b; ...]

and b_D likewise, each bias gives the same outputs as before, and sums, means and patched mixtures of them are biases too.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvlens import KVBias, combine

from .parts import OF_SHIFT_STATE, tensors_of, with_tensors


def in_one_space(*biases: KVBias) -> list[KVBias]:
    """Each of ``biases`` in the features of all of them, per query head; each keeps its shift state, offset and token count.

    Raises:
        KVLensError: biases of different models or with features of different kinds.
    """
    biases = tuple(bias.padded().per_query_head() for bias in biases)  # compact ones would each leave out the others' keys
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
    return own, stacked(others)


def stacked(biases: Sequence[KVBias]) -> KVBias:
    """Biases of single prompts as a batch."""
    tensors = [tensors_of(bias) for bias in biases]
    together = {name: torch.stack([of_one[name] for of_one in tensors], dim=1) for name in tensors[0]}
    return with_tensors(biases[0].repeat(len(biases)), together)


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


def halves(clean: KVBias, corrupted: KVBias) -> dict[str, KVBias]:
    """The clean keys with the corrupted values, and the other way round, of two biases :func:`in_one_space`, in this order."""
    r = clean.d_phi // 2
    kv, d = clean.b_KV[..., :r, :], clean.b_D[..., :r, None]
    other_kv, other_d = corrupted.b_KV[..., r:, :], corrupted.b_D[..., r:, None]
    values, others = ((x / weights).nan_to_num(0.0) for x, weights in ((kv, d), (other_kv, other_d)))  # 0 / 0: no such head
    nothing = torch.zeros_like(values)
    return {
        "keys": replace(clean, b_KV=torch.cat([d * others, nothing], dim=-2)),
        "values": replace(corrupted, b_KV=torch.cat([nothing, other_d * values], dim=-2)),
    }
