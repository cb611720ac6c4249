"""The induction head and its training loss, the obvious forms: row by row, with nothing simplified by hand."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.ops.induction.landscape import check_length


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
