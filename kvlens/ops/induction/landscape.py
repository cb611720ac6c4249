"""The loss that trains the shift coefficients of one head into an induction head, in closed form (KVSA th. 3, eq. 10).

The text is x_1 .. x_T, all different, followed by x_{T+1} = x_i again (1 < i < T - 1); the answer is x_{i+1}. Embeddings are
orthonormal, all projections and the unembedding are the identity, and there are no positions and no residual connection, so
that only alpha (keys) and beta (values) are trained. With a = alpha, b = beta, index 1 for the current token and 2 for its
predecessor,

    S  = 2 e^{a1} + e^{a2} + (T - 2)       A1 = e^{a1} / S       A2 = e^{a2} / S

is the attention of the last row: A1 on rows i and T + 1, whose own key is x_i; A2 on row i + 1, whose predecessor is x_i; 1/S
on the T - 2 others. The logits follow from which value holds which token:

    x_{i+1}           A2 b1 + b2 / S
    x_i               2 A1 b1 + A2 b2
    x_{i-1} and x_T   b1 / S + A1 b2
    T - 4 others      (b1 + b2) / S

x_{i-1} and x_T get A1 b2 as the predecessors of rows i and T + 1; KVSA table 5 and eq. 10 have e^{alpha_2} there instead. The
loss is the same for every i and every order of the tokens.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.errors import KVLensError

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

    Source: KVSA th. 3, with eq. 10 corrected as described in the module docstring.
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
