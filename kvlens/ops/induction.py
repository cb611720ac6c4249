"""The induction head as a function, and the loss landscape of the one-layer shifted head (KVSA def. 1, th. 1-3).

    IH(x)_L = sum_{s=0..L} p_Ls x_s        p_L = softmax_s( x_L . x_{s-1} / sigma - m |L - s| )        x_{-1} = 0

It finds what followed the current token earlier and copies it. The score compares the current row with the *predecessor* of
each visible row, so that attention falls on the rows that followed an earlier occurrence of the current one; ``m`` is an ALiBi
slope, ``sigma`` a temperature. One attention head whose keys are shifted by one (alpha = (0, 1)), whose values are not shifted
(beta = (1, 0)) and whose projections are the identity computes exactly this function (th. 2). The sum runs over every row that
causal attention sees. KVSA def. 1 omits the first row and the current one, but the heads in its theorems see them; the equality
holds for the sum over all visible rows.

First both naive forms, row by row, with nothing simplified by hand; then the head, then the loss.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import doors
from kvlens.errors import KVLensError


def naive_induction_head(
    x: Float[Tensor, "batch pos d_model"], sigma: float, slope: float
) -> Float[Tensor, "batch pos d_model"]:
    """The reference for :func:`kvlens.ops.induction.induction_head`: same arguments, same result, loops over rows."""
    texts = []
    for text in x:
        rows = []
        for L in range(len(text)):
            before = [text[s - 1] if s > 0 else torch.zeros_like(text[0]) for s in range(L + 1)]
            scores = torch.stack([text[L] @ before[s] / sigma - slope * (L - s) for s in range(L + 1)])
            weights = scores.softmax(dim=0)
            rows.append(sum(weights[s] * text[s] for s in range(L + 1)))
        texts.append(torch.stack(rows))
    return torch.stack(texts)


def naive_landscape_loss(
    alpha: Float[Tensor, "2"],
    beta: Float[Tensor, "2"],
    T: int,
    i: int = 2,
    embeddings: Float[Tensor, "token d"] | None = None,
) -> Float[Tensor, ""]:
    """The loss of :func:`kvlens.ops.induction.landscape_loss`, by running the head over explicit embeddings.

    Args:
        alpha: shift coefficients of the keys, (current, predecessor).
        beta: the same for the values.
        T: number of distinct tokens in the text.
        i: which token is repeated at the end, counted from 1.
        embeddings: orthonormal rows x_1 .. x_T; None for unit vectors.

    Returns:
        -log of the probability of x_{i+1}.

    Raises:
        KVLensError: T too small, or i outside 1 < i < T - 1.
    """
    check_length(T)
    if not 1 < i < T - 1:
        raise KVLensError(f"landscape: expected 1 < i < T - 1 = {T - 1}, got i = {i}")
    tokens = torch.eye(T, dtype=alpha.dtype) if embeddings is None else embeddings
    text = [*tokens, tokens[i - 1]]
    before = [torch.zeros_like(text[0]), *text[:-1]]
    keys = [alpha[0] * row + alpha[1] * previous for row, previous in zip(text, before, strict=True)]
    values = [beta[0] * row + beta[1] * previous for row, previous in zip(text, before, strict=True)]
    weights = torch.stack([text[-1] @ key for key in keys]).softmax(dim=0)
    output = sum(weight * value for weight, value in zip(weights, values, strict=True))
    logits = torch.stack([token @ output for token in tokens])
    return -logits.log_softmax(dim=0)[i]


def induction_head(x: Float[Tensor, "batch pos d_model"], sigma: float, slope: float) -> Float[Tensor, "batch pos d_model"]:
    """IH(x) at every position.

    Args:
        x: rows of a text, before any head.
        sigma: temperature; scores are divided by it (TransformerLens' ``attn_scale``).
        slope: ALiBi slope m, subtracted once for each position of distance.

    Returns:
        The rows that an induction head writes.

    Source: KVSA def. 1, th. 2.
    """
    pos = x.shape[1]
    predecessors = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    positions = torch.arange(pos, device=x.device, dtype=x.dtype)  # an integer distance would make the slope float32
    distance = positions[:, None] - positions
    scores = torch.einsum("bqd,bkd->bqk", x, predecessors) / sigma - slope * distance
    return scores.masked_fill(distance < 0, -torch.inf).softmax(dim=-1) @ x


# The loss that trains the shift coefficients of one head into an induction head, in closed form (KVSA th. 3, eq. 10).
#
# The text is x_1 .. x_T, all different, followed by x_{T+1} = x_i again (1 < i < T - 1); the answer is x_{i+1}. Embeddings are
# orthonormal, all projections and the unembedding are the identity, and there are no positions and no residual connection, so
# that only alpha (keys) and beta (values) are trained. With a = alpha, b = beta, index 1 for the current token and 2 for its
# predecessor,
#
#     S  = 2 e^{a1} + e^{a2} + (T - 2)       A1 = e^{a1} / S       A2 = e^{a2} / S
#
# is the attention of the last row: A1 on rows i and T + 1, whose own key is x_i; A2 on row i + 1, whose predecessor is x_i; 1/S
# on the T - 2 others. The logits follow from which value holds which token:
#
#     x_{i+1}           A2 b1 + b2 / S
#     x_i               2 A1 b1 + A2 b2
#     x_{i-1} and x_T   b1 / S + A1 b2
#     T - 4 others      (b1 + b2) / S
#
# x_{i-1} and x_T get A1 b2 as the predecessors of rows i and T + 1; KVSA table 5 and eq. 10 have e^{alpha_2} there instead. The
# loss is the same for every i and every order of the tokens.

SHORTEST = 4
"""In shorter texts no i satisfies 1 < i < T - 1."""


def landscape_loss(alpha: Float[Tensor, "*lead 2"], beta: Float[Tensor, "*lead 2"], T: int) -> Float[Tensor, "*lead"]:
    """-log of the probability that the head gives to x_{i+1}.

    Args:
        alpha: shift coefficients of the keys: column 0 for the current token (their alpha_1), column 1 for its predecessor.
        beta: the same for the values.
        T: number of distinct tokens in the text; the paper's O(T) is T - 4, the number of tokens that play no part.

    Returns:
        The loss in nats.

    Raises:
        KVLensError: a text too short to hold x_{i-1}, x_i, x_{i+1} and x_T.

    Source: KVSA th. 3, with eq. 10 corrected as described above.
    """
    check_length(T)
    a1, a2 = alpha.unbind(dim=-1)
    b1, b2 = beta.unbind(dim=-1)
    log_total = torch.logaddexp(torch.logaddexp(a1 + math.log(2), a2), torch.full_like(a1, math.log(T - 2)))
    on_token, on_next, on_other = (a1 - log_total).exp(), (a2 - log_total).exp(), (-log_total).exp()
    answer = on_next * b1 + on_other * b2
    wrong = [
        2 * on_token * b1 + on_next * b2,
        on_other * b1 + on_token * b2 + math.log(2),
        on_other * (b1 + b2) + (math.log(T - 4) if T > SHORTEST else -math.inf),
    ]
    return torch.logsumexp(torch.stack([answer, *wrong]), dim=0) - answer


def check_length(T: int) -> None:
    """Raise KVLensError unless a text of T different tokens has an i with 1 < i < T - 1."""
    if T < SHORTEST:
        raise KVLensError(f"landscape: T must be at least {SHORTEST}, so that some i has 1 < i < T - 1; got {T}")


doors(__name__)
