"""The parts of every head's output that come from the bias and from the text, in one forward pass over the text.

    z = z_bias + z_context        (both already divided by the normalizer, which includes the bias and the text)

The bias's share is measured in two ways. By size (``bias_share``), ||z_bias|| / (||z_bias|| + ||z_context||) is in [0, 1] and
does not add up. By projection (``output_share``), z_bias . z / ||z||^2 may be outside [0, 1] if the parts oppose each other,
but it is linear: the shares of all parts of z sum to 1, and those of all prompt positions to that of the whole bias.
"""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel
from kvlens.model import HeadsRead, visit_heads


class BiasOutputs(NamedTuple):
    """The two summands of every head's output on a text, layer by layer."""

    of_bias: list[Float[Tensor, "pos _ _"]]
    of_context: list[Float[Tensor, "pos _ _"]]

    def whole(self) -> list[Float[Tensor, "pos _ _"]]:
        """Their sums."""
        return [b + c for b, c in zip(self.of_bias, self.of_context, strict=True)]


def bias_outputs(model: KVModel, bias: KVBias, text: Int[Tensor, " pos"]) -> BiasOutputs:
    """Run ``text`` once with ``bias`` attached; in float64, on the device of the text."""
    found = BiasOutputs([], [])

    def keep(layer: int, read: HeadsRead) -> None:
        assert read.z_bias is not None  # a bias is attached
        found.of_bias.append(read.z_bias[0].double().to(text.device))
        found.of_context.append(read.z_context[0].double().to(text.device))

    with model.kv_bias(bias):
        visit_heads(model, text[None], keep, ("z_context", "z_bias"))
    return found


def share_by_size(
    of_bias: Float[Tensor, "*lead pos head"], of_context: Float[Tensor, "*lead pos head"]
) -> Float[Tensor, "*lead pos head"]:
    """||z_bias|| / (||z_bias|| + ||z_context||) from the two norms; 0 for 0 / 0."""
    total = of_bias + of_context
    return of_bias / total.where(total > 0, 1.0)


def share_probes(z: Float[Tensor, "*lead pos head d_head"], pooled: bool) -> Float[Tensor, "*lead pos head d_head"]:
    """The vectors whose product with a part of z is its share by projection: z / ||z||^2.

    Args:
        z: the whole outputs.
        pooled: divide by the sum of ||z||^2 over all positions, so that the shares summed over positions are those of the
            whole text; otherwise divide each position by its own. Zeros where the output is 0.
    """
    energy = z.square().sum(dim=-1, keepdim=True)
    energy = energy.sum(dim=-3, keepdim=True) if pooled else energy
    return z / energy.where(energy > 0, 1.0)
