"""The parts of a bridge's layers that read a prompt: one in most layers, attention and a state in Falcon-H1's."""

from collections.abc import Sequence

from kvlens.bridge.recurrent import RecurrentLayer
from kvlens.bridge.softmax import SoftmaxLayer
from kvlens.bridge.tokenwise import TokenwiseLayer

Part = SoftmaxLayer | RecurrentLayer | TokenwiseLayer


def by_layer(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts of each layer; where there are two, attention comes first."""
    found: list[list[Part]] = [[] for _ in range(1 + parts[-1].layer)]
    for part in parts:
        found[part.layer].append(part)
    return found
