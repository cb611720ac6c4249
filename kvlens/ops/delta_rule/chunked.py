"""The delta rule in chunks of C tokens: matrix products within a chunk, and one state from chunk to chunk.

Within a chunk, with G the cumulative log decay up to and including each token and S the state before the chunk,

    z = (Q e^G - QK W) S + QK U        S' = Diag(e^{G_C}) S + Kd^T (U - W S)
    (I + L) U = diag(b) V              (I + L) W = diag(b) (K e^G)        L = tril_{-1}(diag(b) KK)

with QK_ij = sum_c q_ic k_jc e^{G_ic - G_jc} for j <= i, KK likewise, and Kd = K e^{G_C - G}. Every exponent is at most 0, so
nothing overflows however strong the decay is. U is what the tokens would write if the state were empty, and W S is what they
remove from it. Hence, for the tokens of a chunk, qbar is a row of Q e^G - QK W, kbar is a column of
Kd^T (I + L)^{-1} diag(b), and P is Diag(e^{G_C}) - Kd^T W; across chunks each is a matrix product (Yang et al. 2412.06464,
sec. 3.3; Kimi Linear 2510.26692, sec. 3.1). The backward pass is autograd through the same products.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.delta_rule.chunk import Chunks, chunks_of
from kvlens.ops.delta_rule.types import CarriedOutput, DeltaRuleOutput, identity_state, starting_state, state_with_map

CHUNK_SIZE = 64


def chunked_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
    chunk_size: int = CHUNK_SIZE,
) -> DeltaRuleOutput:
    """z, and the state after the last real token (arguments in ``types``; ``chunk_size`` changes speed, not the result)."""
    state = starting_state(initial_state, v, k.shape[-1])
    chunks = chunks_of(q, k, log_decay, write_strength, mask, chunk_size, v)
    z, final = _scan(chunks, state)
    return DeltaRuleOutput(chunks.joined(z), final if output_final_state else None)


def carried_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    initial_map: Float[Tensor, "#batch head d_k d_k"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> CarriedOutput:
    """The context's own z and state, and in addition what the tokens do to a bias before them.

    Args:
        initial_state: what the context has written before these tokens.
        initial_map: P of the tokens between the bias and these; None for the identity.
    """
    d_k, d_v = k.shape[-1], v.shape[-1]
    chunks = chunks_of(q, k, log_decay, write_strength, mask, chunk_size, v)
    z, final = _scan(chunks, state_with_map(initial_state, initial_map, v, d_k))
    return CarriedOutput.split(chunks.joined(z), final, d_v)


def carried_queries(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Float[Tensor, "batch pos head d_k"]:
    """qbar_i = (T_i ... T_0)^T q_i: what a query reads of the state before the first token."""
    chunks = chunks_of(q, k, log_decay, write_strength, mask, chunk_size)
    return chunks.joined(_scan(chunks, identity_state(write_strength, k.shape[-1]))[0])


def carried_keys(
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    times_write_strength: bool = True,
    chunk_size: int = CHUNK_SIZE,
) -> Float[Tensor, "batch pos head d_k"]:
    """kbar_j = (T_{M-1} ... T_{j+1}) b_j k_j: sum_j kbar_j v_j^T is what the tokens write.

    Args:
        times_write_strength: False leaves out b_j; the norm of a row is then the token's survival, 0 at padded positions.
    """
    chunks = chunks_of(None, k, log_decay, write_strength, mask, chunk_size)
    local = chunks.local_carried_keys(times_write_strength)
    maps = chunks.maps()
    later = identity_state(write_strength, k.shape[-1])
    carried: list[Tensor] = []
    for keys, one in zip(reversed(local.unbind(2)), reversed(maps.unbind(2)), strict=True):
        carried.append(keys @ later.transpose(-1, -2))
        later = later @ one
    return chunks.joined(torch.stack(carried[::-1], dim=2))


def state_map(
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Float[Tensor, "batch head d_k d_k"]:
    """P = T_{M-1} ... T_0: the tokens make P S + (what they write) of a state S before them. P is not normal."""
    chunks = chunks_of(None, k, log_decay, write_strength, mask, chunk_size)
    product = identity_state(write_strength, k.shape[-1])
    for one in chunks.maps().unbind(2):
        product = one @ product
    return product


def effective_attention(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch head pos pos"]:
    """A = QK (I + L)^{-1} diag(b): z_i = sum_j A_ij v_j, exactly, if there is no earlier state. All tokens form one chunk."""
    chunks = chunks_of(q, k, log_decay, write_strength, mask, max(1, k.shape[1]))
    assert chunks.scores is not None
    solved = torch.linalg.solve_triangular(chunks.system, chunks.scores, upper=False, left=False, unitriangular=True)
    pos = k.shape[1]
    return (solved * chunks.write.transpose(-1, -2)).squeeze(2)[..., :pos, :pos]  # no token makes a chunk of one


def _scan(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """z [batch, head, chunk, size, d] and the last state, which may have more columns than what is written."""
    assert chunks.scores is not None
    assert chunks.q_decayed is not None
    wider = state.shape[-1] - chunks.d_written
    outputs = []
    parts = (chunks.q_decayed, chunks.scores, chunks.k_to_end, chunks.removed, chunks.end_decay)
    written = [None] * chunks.scores.shape[2] if chunks.written is None else chunks.written.unbind(2)
    for one, q, scores, k, removed, decay in zip(written, *(part.unbind(2) for part in parts), strict=True):
        change = -(removed @ state)
        if one is not None:
            change = change + (torch.nn.functional.pad(one, (0, wider)) if wider else one)
        outputs.append(q @ state + scores @ change)
        state = decay * state + k.transpose(-1, -2) @ change
    return torch.stack(outputs, dim=2), state
