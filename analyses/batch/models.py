"""Loading the models that a batch names."""

from kvlens import KVModel, load


class ModelShelf:
    """Keeps the last requested model loaded; a batch goes model by model, and two might not fit in memory.

    Args:
        names: what :func:`kvlens.load` takes.
        device: where they run; None takes TransformerLens' choice.
        dtype: dtype of the weights, e.g. ``float64``; None keeps the stored one.
    """

    def __init__(self, names: tuple[str, ...], *, device: str | None, dtype: str | None):
        self.names, self.device, self.dtype = names, device, dtype
        self._held: tuple[int, KVModel] | None = None

    def __getitem__(self, index: int) -> KVModel:
        if self._held is None or self._held[0] != index:
            self._held = None  # frees the old model before the new one is read
            self._held = (index, load(self.names[index], device=self.device, dtype=self.dtype))
        return self._held[1]
