"""The parts of a bridge's layers that read a prompt: one in most layers, attention and a state in Falcon-H1's."""

from functools import partial
from itertools import groupby
from typing import Any

from kvlens.bridge.recurrent import RecurrentLayer
from kvlens.bridge.softmax import SoftmaxLayer
from kvlens.bridge.tokenwise import TokenwiseLayer
from kvlens.bridge.weights import norms_around
from kvlens.model.parts import Layer

Part = SoftmaxLayer | RecurrentLayer | TokenwiseLayer


def layers_of(bridge: Any) -> list[Layer]:
    """The layers of a KVTransformerBridge."""
    found = []
    for number, parts in groupby(bridge.__dict__["_parts"], key=lambda part: part.layer):
        block = bridge.blocks[number]
        norms = partial(norms_around, bridge, number)
        found.append(Layer(list(parts), getattr(block, "mlp", None), block.hook_out, norms))
    return found
