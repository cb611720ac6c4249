"""Which architectures can be read, and whether a loaded model is one of them with weights that can be converted."""

import torch
from torch import Tensor
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
    """Raise if a weight is packed, quantized, not loaded, not finite, or under an adapter: it would become nonsense."""
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
    check_finite("from_pretrained", hf_model)


@torch.no_grad()
def check_finite(door: str, hf_model: PreTrainedModel) -> None:
    """Raise KVLensError, starting with ``door``, if a weight is no floating-point number, NaN or infinite; it is named."""
    kind = type(hf_model).__name__
    integers = [name for name, weight in hf_model.named_parameters() if not weight.is_floating_point()]
    if integers:
        raise KVLensError(f"{door}: weights of {kind} are integers ({integers[:5]}); use a copy that is not quantized")
    broken = [name for name, weight in hf_model.named_parameters() if weight.numel() and not _is_finite(weight)]
    if broken:
        raise KVLensError(
            f"{door}: {len(broken)} weights of {kind} hold NaN or infinity: {broken[:5]}; use an intact copy of the model"
        )


def _is_finite(weight: Tensor) -> bool:
    return all(bool(end.isfinite()) for end in weight.aminmax())
