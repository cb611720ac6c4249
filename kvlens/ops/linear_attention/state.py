"""Operations on a state: reading it with queries, and moving its origin (ICLCA eq. 19 and 23)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import Count
from kvlens.errors import KVLensError
from kvlens.ops.rotary.rotate import rotate


def read_state(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    kv: Float[Tensor, "#batch head_or_kv_head d_phi d_head"],
    decay: Float[Tensor, " head_or_kv_head"] | None = None,
    steps: Int[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_head"]:
    """What queries read from a stored A: phi~(q_i)^T gamma^{steps_i} A.

    Args:
        steps: number of real tokens from the state up to and including the query; required with ``decay``.
    """
    pos, n_heads = phi_q.shape[1:3]
    group = n_heads // kv.shape[1]
    q = phi_q.unflatten(2, (kv.shape[1], group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # b k (g n) f
    read = (q @ kv).unflatten(2, (group, pos)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    if decay is None:
        return read
    if steps is None:
        raise KVLensError("read_state: a decaying state needs `steps`, the number of real tokens since the state")
    factor = decay.repeat_interleave(group).to(read) ** steps[:, :, None].to(read)
    return read * factor[..., None]


def ffn_with_state(
    ffn: Float[Tensor, "batch pos d_model"],
    phi_q: Float[Tensor, "batch pos head d_phi"],
    kv: Float[Tensor, "#batch head_or_kv_head d_phi d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "batch pos d_model"]:
    """FFN(x_i) + sum_h phi~(q_ih)^T A_h W_O,h: the prompt's term in the FFN's output, attention left as it is (ICLCA app. D).

    Exact where attention and FFN read the same stream and add to it side by side, as in GPT-J, and where the normalizer is 1:
    there the two sums only change places. In a block whose FFN reads what attention wrote it is not, and a normalizer would
    divide attention's own part by the prompt's, which the FFN does not see.

    Args:
        ffn: the FFN's output.
        phi_q: queries with their features and rotation (``hook_rot_q``; ``hook_phi_q`` without RoPE), over ``attn_scale``.
        kv: A, as `read_state` reads it: ``b_KV`` of the bias.
        W_O: attention's output projection.
    """
    return ffn + torch.einsum("bphd,hdm->bpm", read_state(phi_q, kv), W_O)


def rebase_state(
    kv: Float[Tensor, "*lead d_phi d_head"],
    cos: Float[Tensor, "*#lead rotary_dim"],
    sin: Float[Tensor, "*#lead rotary_dim"],
    adjacent_pairs: bool = False,
) -> Float[Tensor, "*lead d_phi d_head"]:
    """R_{-M} A: the stored keys expressed from an origin M tokens later. ``cos``, ``sin``: the row of position M."""
    return rotate(kv.transpose(-1, -2), cos.unsqueeze(-2), -sin.unsqueeze(-2), adjacent_pairs).transpose(-1, -2)


def real_steps(mask: Bool[Tensor, "#batch pos"] | None, like: Float[Tensor, "batch pos *rest"]) -> Int[Tensor, "#batch pos"]:
    """The number of real tokens up to and including each position: [batch or 1, pos]."""
    if mask is None:
        return torch.arange(1, like.shape[1] + 1, device=like.device)[None]
    return mask.cumsum(dim=1)


def without_padding(x: Float[Tensor, "batch pos *rest"], mask: Bool[Tensor, "#batch pos"]) -> Float[Tensor, "batch pos *rest"]:
    """``x`` with zeros at padded positions, set rather than multiplied: 0 * inf would be NaN and reach the real tokens."""
    return x.masked_fill(~mask.reshape(*mask.shape, *[1] * (x.dim() - 2)), 0.0)


def retnet_decay(n_heads: Count) -> Float[Tensor, " head"]:
    """gamma_h = 1 - 2^(-5 - h), in float64 (Sun et al. 2023; the RetNet in ICLCA has gamma = 1)."""
    return 1.0 - 2.0 ** (-5.0 - torch.arange(n_heads, dtype=torch.float64))
