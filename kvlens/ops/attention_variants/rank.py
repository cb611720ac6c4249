"""When subtracting alpha from the diagonal makes an attention pattern invertible (DUAL lemma D.1)."""

import torch
from jaxtyping import Float
from torch import Tensor


def full_rank_limit(pattern: Float[Tensor, "*lead pos pos"]) -> Float[Tensor, "*lead"]:
    """alpha' of DUAL lemma D.1: P - alpha I has full rank for every alpha in (0, alpha'), whatever the rank of P.

    det(P - alpha I) is a polynomial of alpha with the eigenvalues of P as its roots, so alpha' is the smallest size of one that
    is not zero. The same holds for negative alpha down to -alpha'. An eigenvalue counts as zero if it is below the rounding of
    n terms; one of several equal zeros without as many eigenvectors may be found as the root of that.
    """
    sizes = torch.linalg.eigvals(pattern).abs()
    rounding = pattern.shape[-1] * torch.finfo(pattern.dtype).eps * sizes.amax(dim=-1, keepdim=True)
    return sizes.masked_fill(sizes <= rounding, torch.inf).amin(dim=-1)
