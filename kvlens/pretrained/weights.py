"""From Hugging Face weights to our names."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlens.base import HookedTransformerConfig
from kvlens.base.families import convert


@torch.no_grad()
def convert_weights(hf_model: PreTrainedModel, cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    """The weights under our names, detached, in one dtype and on one device; what a model lacks (biases) is left out."""
    devices = {weight.device for weight in hf_model.parameters()}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return {
        name: weight.to(device=device, dtype=cfg.dtype if weight.is_floating_point() else weight.dtype)
        for name, weight in convert(hf_model.state_dict(), cfg).items()
    }
