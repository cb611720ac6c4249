"""Biases with other numbers, told as one tensor for all layers."""

from kvlens import KVBias


def with_stacked(bias, **stacked) -> KVBias:
    """The bias with other tensors, each as ``bias.stacked(name)`` gives it."""
    given = {name: iter(x[:, None] if bias.single else x) for name, x in stacked.items()}

    def with_own(layer):
        return layer.with_tensors({name: next(rows) for name, rows in given.items() if name in layer.tensors()})

    return bias.map_layers(with_own)


def layers_with_state(bias) -> tuple[int, ...]:
    """The numbers of the layers that hold a recurrence's state."""
    return tuple(number for number, layer in enumerate(bias.layers) if layer.state is not None)
