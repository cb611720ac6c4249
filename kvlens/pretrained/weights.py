"""From Hugging Face weights to TransformerLens' names, through its own converters."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlens._tl import HookedTransformerConfig, loading
from kvlens.errors import KVLensError
from kvlens.pretrained.architectures import NO_BIAS_ARCHITECTURES
from kvlens.pretrained.translation import neutral_folder


def _check_no_lost_bias(hf_model: PreTrainedModel, architecture: str) -> None:
    """Raise if the model has a non-zero bias that the converter of its architecture does not read."""
    read = ("q_proj.bias", "k_proj.bias", "v_proj.bias") if architecture == "Qwen2ForCausalLM" else ()
    if architecture not in NO_BIAS_ARCHITECTURES and not read:
        return
    for name, weight in hf_model.named_parameters():
        if name.endswith(".bias") and not name.endswith(read or "\0") and bool(weight.any()):
            raise KVLensError(
                f"from_pretrained: {name} is not zero, and TransformerLens reads no such bias from {architecture}"
            )


def convert_weights(hf_model: PreTrainedModel, cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    """Convert the weights to ``HookedTransformer``'s names, detached, in one dtype and on one device."""
    architecture = str(cfg.original_architecture)
    _check_no_lost_bias(hf_model, architecture)
    try:
        with neutral_folder() as folder, torch.no_grad():
            weights = loading.get_pretrained_state_dict(str(folder), cfg, hf_model, dtype=cfg.dtype)
    except KVLensError:
        raise
    except Exception as error:
        raise KVLensError(
            f"from_pretrained: TransformerLens cannot convert the weights of this {architecture}: "
            f"{type(error).__name__}: {error}"
        ) from error
    devices = {weight.device for weight in hf_model.parameters()}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    if "pos_embed.W_pos" in weights:
        weights["pos_embed.W_pos"] = weights["pos_embed.W_pos"][: cfg.n_ctx]
    return {
        name: weight.detach().to(device=device, dtype=cfg.dtype if weight.is_floating_point() else weight.dtype)
        for name, weight in weights.items()
    }
