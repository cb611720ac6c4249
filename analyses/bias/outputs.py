"""The parts of every head's output that come from the bias and from the text, in one forward pass over the text.

    z = z_bias + z_context        (both already divided by the normalizer, which includes the bias and the text)

The bias's share is measured in two ways. By size (``bias_share``), ||z_bias|| / (||z_bias|| + ||z_context||) is in [0, 1] and
does not add up. By projection (``output_share``), z_bias . z / ||z||^2 may be outside [0, 1] if the parts oppose each other,
but it is linear: the shares of all parts of z sum to 1, and those of all prompt positions to that of the whole bias.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel
from kvlens.model.protocol import joined_heads

PARTS = ("hook_z_bias", "hook_z_context")


class BiasOutputs(NamedTuple):
    """The two summands of every head's output on a text, layer by layer."""

    of_bias: list[Float[Tensor, "pos _ _"]]
    of_context: list[Float[Tensor, "pos _ _"]]

    def whole(self) -> list[Float[Tensor, "pos _ _"]]:
        """Their sums."""
        return [b + c for b, c in zip(self.of_bias, self.of_context, strict=True)]


def bias_outputs(model: KVModel, bias: KVBias, text: Int[Tensor, " pos"], run: Callable[[], None] | None = None) -> BiasOutputs:
    """Run ``text`` once with ``bias`` attached; in float64, on the device of the text.

    ``run`` reads the text in the place of a pass of its own, where the caller needs one for something else.
    """
    seen: dict[str, Tensor] = {}

    def see(z: Tensor, hook: Any) -> None:
        seen[hook.name] = z[0].double().to(text.device)

    hooks = [(name, see) for layer in range(bias.n_layers) for part in PARTS for name in model.head_hooks(layer, part)]
    with model.kv_bias(bias), model.hooks(fwd_hooks=hooks):
        model.logits_on(text[None], 1) if run is None else run()
    none = torch.zeros(len(text), 0, 1, dtype=torch.float64, device=text.device)

    def of(part: str) -> list[Tensor]:
        names = [model.head_hooks(layer, part) for layer in range(bias.n_layers)]
        return [joined_heads([seen[name] for name in of_layer]) if of_layer else none for of_layer in names]

    return BiasOutputs(*map(of, PARTS))


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
