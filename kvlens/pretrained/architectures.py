"""Which architectures can be read, and whether a loaded model is one of them with weights that can be converted."""

from transformers import PreTrainedModel

from kvlens.dtypes import DTYPES
from kvlens.errors import KVLensError
from kvlens.pretrained.baichuan import ARCHITECTURE as BAICHUAN_M1
from kvlens.pretrained.fields import HONORED

SUPPORTED_ARCHITECTURES = tuple(HONORED)
"""Architectures whose configurations and weights :mod:`kvlens.base.families` translates."""


def unsupported(architecture: str, where: str) -> KVLensError:
    """Make the error for an architecture that cannot be built from its config."""
    return KVLensError(
        f"from_pretrained: {where} has the architecture {architecture}, which HookedTransformer does "
        "not compute. Supported: "
        f"{', '.join(sorted((*SUPPORTED_ARCHITECTURES, BAICHUAN_M1)))}; "
        "KVTransformerBridge runs others in transformers' own model"
    )


def architecture_of(hf_model: PreTrainedModel) -> str:
    """Name the architecture by the model's class: ``config.architectures`` is None in a model made in memory."""
    for parent in type(hf_model).__mro__:
        if parent.__name__ in SUPPORTED_ARCHITECTURES:
            return parent.__name__
    raise unsupported(type(hf_model).__name__, "the model")


def check_readable(hf_model: PreTrainedModel) -> None:
    """Raise if a weight is packed, quantized, not loaded, or under an adapter: it would be converted to nonsense."""
    for name, weight in hf_model.named_parameters():
        if "lora_" in name:
            raise KVLensError(f"from_pretrained: the model carries an adapter ({name}): merge it first")
        if weight.device.type == "meta":
            raise KVLensError(f"from_pretrained: {name} is on the meta device: load the model with real weights")
        if weight.dtype not in DTYPES.values():
            raise KVLensError(
                f"from_pretrained: {name} is stored as {weight.dtype}: a quantized model cannot be converted. Load it "
                "dequantized."
            )
