"""Thought vectors and matrices: token patches condensed to one change of the MLPs for all tokens (Mazzawi et al. 2025).

From the patches of many tokens t, with x_t, x'_t and r'_t - r_t as in :mod:`~kvlens.conversion.weights.token_patches`:

    thought vectors     c = mean_t (x'_t - x_t)                                        offset = mean_t (r'_t - r_t)
    thought matrices    M = argmin sum_t |x_t M - (x'_t - x_t)|^2 + ridge |M|^2        offset = mean_t (r'_t - r_t)

The matrices and biases that read x become W + M W and b + c W. Unlike token patches they serve any text, but only
approximately.

Source: Mazzawi et al. 2025, arXiv 2510.08734, known from its abstract and summaries: a mean vector and a least-squares
matrix for blocks without norms. Here x comes after the norm, and c exists in addition to the offset for the same reason.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.weights.change import BlockChange
from kvlens.conversion.weights.token_patches import TokenPatches
from kvlens.kv_bias import Fingerprint


@dataclass(frozen=True)
class ThoughtPatches(BlockChange):
    """A change of every layer's MLP that is the same for all tokens.

    Attributes:
        matrices: M; None for thought vectors.
        vectors: c; None for thought matrices.
        offsets: added to the output of each block.
        fingerprint: the model to which they belong.
    """

    matrices: Float[Tensor, "layer d_model d_model"] | None
    vectors: Float[Tensor, "layer d_model"] | None
    offsets: Float[Tensor, "layer d_model"]
    fingerprint: Fingerprint

    @property
    def num_parameters(self) -> int:
        return sum(x.numel() for x in (self.matrices, self.vectors, self.offsets) if x is not None)

    def _patched(self, x: Float[Tensor, "text pos d_model"], layer: int) -> Float[Tensor, "text pos d_model"]:
        changed = x if self.vectors is None else x + self.vectors[layer].to(x)
        return changed if self.matrices is None else changed + x @ self.matrices[layer].to(x)


@checked
@torch.no_grad()
def thought_vectors(patches: TokenPatches) -> ThoughtPatches:
    """The mean change: 2 d_model numbers per layer."""
    mean = patches.changes.mean(dim=(1, 2))
    return ThoughtPatches(None, mean, patches.offsets.mean(dim=(1, 2)), patches.fingerprint)


@checked
@torch.no_grad()
def thought_matrices(patches: TokenPatches, ridge: Annotated[float, Within(above=0, most=1e6)] = 1e-2) -> ThoughtPatches:
    """The least-squares change: d_model^2 + d_model numbers per layer.

    Args:
        patches: for tokens of texts that the prompted model may read.
        ridge: relative to the mean square of an entry of x, times the number of tokens.
    """
    x, change = patches.inputs.flatten(1, 2).double(), patches.changes.flatten(1, 2).double()
    moments = x.mT @ x
    size = moments.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    damped = moments + (ridge * size.clamp(min=torch.finfo(size.dtype).tiny))[:, None, None] * torch.eye(x.shape[-1]).to(x)
    matrices = torch.linalg.solve(damped, x.mT @ change).to(patches.changes)
    return ThoughtPatches(matrices, None, patches.offsets.mean(dim=(1, 2)), patches.fingerprint)
