"""The parts of a bridge's layers that read a prompt: one in most layers, attention and a state in Falcon-H1's."""

from functools import partial
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint

from kvlens.bridge.recurrent import RecurrentLayer
from kvlens.bridge.softmax import SoftmaxLayer
from kvlens.bridge.weights import norms_around
from kvlens.kv_bias import KVBias
from kvlens.model.parts import Layer
from kvlens.model.parts import Part as LayerPart


class TokenwiseLayer(LayerPart):
    """A layer that is an MLP or experts alone, as in Nemotron-H: it reads no other token, so a prompt leaves nothing in it.

    Args:
        component: the bridge's component around it.
        layer: its number.
        d_model: of the residual stream.
    """

    def __init__(self, component: nn.Module, layer: int, d_model: int):
        self.component, self.layer, self.d_model = component, layer, d_model

    def hook_points(self) -> dict[str, HookPoint]:
        """None."""
        return {}

    def join(self, bias: KVBias, positions: Int[Tensor, "#batch pos"]) -> list[RemovableHandle]:
        """Nothing to do."""
        return []

    def observe(self, seen: dict[tuple[int, str], Tensor]) -> list[RemovableHandle]:
        """Nothing to see."""
        return []

    def output_weights(self) -> Float[Tensor, "0 1 d_model"]:
        """Of no head."""
        return torch.zeros(0, 1, self.d_model)


Part = SoftmaxLayer | RecurrentLayer | TokenwiseLayer


def layers_of(bridge: Any) -> list[Layer]:
    """The layers of a KVTransformerBridge."""
    found = []
    for number, parts in groupby(bridge.__dict__["_parts"], key=lambda part: part.layer):
        block = bridge.blocks[number]
        norms = partial(norms_around, bridge, number)
        found.append(Layer(list(parts), getattr(block, "mlp", None), block.hook_out, norms))
    return found
