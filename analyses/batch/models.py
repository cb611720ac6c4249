"""Loading the models that a batch names: shipped models, folders of kvlens, and Hugging Face folders."""

from kvlens import KVModel, bridge, zoo

from .paths import check_model_name


class ModelShelf:
    """Keeps the last requested model loaded; a batch goes model by model, and two might not fit in memory.

    Args:
        names: shipped models or folders.
        device: where they run; None takes TransformerLens' choice.
        dtype: dtype of the weights, e.g. ``float64``; None keeps the stored one.
    """

    def __init__(self, names: tuple[str, ...], *, device: str | None, dtype: str | None):
        self.names, self.device, self.dtype = names, device, dtype
        self._held: tuple[int, KVModel] | None = None

    def __getitem__(self, index: int) -> KVModel:
        if self._held is None or self._held[0] != index:
            self._held = None  # frees the old model before the new one is read
            self._held = (index, load_model(self.names[index], device=self.device, dtype=self.dtype))
        return self._held[1]


def load_model(name: str, *, device: str | None = None, dtype: str | None = None) -> KVModel:
    """Load a shipped model, a folder that ``HookedKVTransformer.save`` wrote, one in Hugging Face's format, or its name.

    Architectures that HookedKVTransformer does not have run on KVTransformerBridge (:func:`kvlens.bridge.load_model`).

    Raises:
        KVLensError: it cannot be read, or the device cannot be used here.
    """
    check_model_name(name)
    return bridge.load_model(zoo.source_of(name), device=device, dtype=dtype)
