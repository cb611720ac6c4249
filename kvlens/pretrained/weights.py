"""From Hugging Face weights to TransformerLens' names, through its own converters."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlens._tl import HookedTransformerConfig, loading
from kvlens.errors import KVLensError
from kvlens.pretrained.translation import neutral_folder


def _attention_biases(hf_model: PreTrainedModel, cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    """The biases of queries, keys, values and output, which the converters of the Llama family write as zeros."""
    if not getattr(hf_config := hf_model.config, "attention_bias", False) or hf_config.model_type == "gpt_neox":
        return {}
    grouped = "_" if cfg.n_key_value_heads is not None else ""  # TransformerLens' mark of weights per key-value head
    names = {"q_proj": "b_Q", "k_proj": f"{grouped}b_K", "v_proj": f"{grouped}b_V", "o_proj": "b_O"}
    biases = {}
    for l, layer in enumerate(hf_model.get_decoder().layers[: cfg.n_layers]):
        for projection, name in names.items():
            bias = getattr(layer.self_attn, projection).bias
            biases[f"blocks.{l}.attn.{name}"] = bias if name == "b_O" else bias.reshape(-1, cfg.d_head)
    return biases


def convert_weights(hf_model: PreTrainedModel, cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    """Convert the weights to ``HookedTransformer``'s names, detached, in one dtype and on one device."""
    architecture = str(cfg.original_architecture)
    try:
        with neutral_folder() as folder, torch.no_grad():
            weights = loading.get_pretrained_state_dict(str(folder), cfg, hf_model, dtype=cfg.dtype)
            weights |= _attention_biases(hf_model, cfg)
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
