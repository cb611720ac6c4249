"""A Hugging Face model's configuration and weights as ours."""

import logging
import math
from typing import Any

import torch
from torch import Tensor
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
from transformers import PreTrainedModel

from kvlens.base import HookedTransformerConfig
from kvlens.base.families import convert, translate
from kvlens.errors import KVLensError
from kvlens.pretrained.names import SHORTER, beginning

logger = logging.getLogger(__name__)


def translate_config(
    hf_config: Any,
    architecture: str,
    official: str | None,
    *,
    first_n_layers: int | None,
    n_ctx: int | None,
    fold_ln: bool = False,
    **options: Any,
) -> HookedTransformerConfig:
    """The configuration of a model, of its first layers, or for another context length; ``options`` are further fields.

    Raises:
        KVLensError: a field that cannot be expressed, or sizes that the model does not have.
    """
    check_first_n_layers_and_n_ctx(first_n_layers, hf_config.num_hidden_layers, n_ctx)
    fields = translate(hf_config, architecture)
    own_n_ctx = min(fields["n_ctx"], beginning(official or "", SHORTER) or fields["n_ctx"])
    if n_ctx is not None and n_ctx > own_n_ctx:
        if fields.get("positional_embedding_type", "standard") == "standard":
            raise KVLensError(f"from_pretrained: the model learned {own_n_ctx} positions, n_ctx={n_ctx} asks for more")
        logger.warning("n_ctx=%d is longer than the model's own %d positions: untrained there", n_ctx, own_n_ctx)
    fields = translate(hf_config, architecture, n_ctx or own_n_ctx)
    if fold_ln and architecture not in POST_NORM_ARCHITECTURES:
        fields["normalization_type"] += "Pre"
    fields |= {name: value for name, value in options.items() if value is not None}
    if first_n_layers is not None:
        fields["n_layers"] = first_n_layers
    return HookedTransformerConfig(**fields, init_weights=False)


def check_first_n_layers_and_n_ctx(first_n_layers: int | None, n_layers: int, n_ctx: int | None) -> None:
    """Raise unless ``first_n_layers`` is one of the model's numbers of layers and ``n_ctx`` a length; None leaves them open."""
    if first_n_layers is not None and not 1 <= first_n_layers <= n_layers:
        raise KVLensError(f"from_pretrained: first_n_layers must be 1 to {n_layers} (the model's layers), got {first_n_layers}")
    if n_ctx is not None and n_ctx < 1:
        raise KVLensError(f"from_pretrained: n_ctx must be at least 1, got {n_ctx}")


@torch.no_grad()
def convert_weights(hf_model: PreTrainedModel, cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    """The weights under our names, detached, in one dtype and on one device; what a model lacks (biases) is left out."""
    devices = {weight.device for weight in hf_model.parameters()}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return {
        name: weight.to(device=device, dtype=cfg.dtype if weight.is_floating_point() else weight.dtype)
        for name, weight in convert(hf_model.state_dict(), cfg).items()
    }


def alibi_slopes(n_heads: int) -> list[float] | None:
    """The slopes of ALiBi where the number of heads is not a power of two, for which TransformerLens has another series.

    Source: Press et al. 2022, the code that comes with the paper: the series of the next lower power of two, then every
    second slope of the series of the next higher one.
    """
    lower = 2 ** int(math.log2(n_heads))
    if lower == n_heads:
        return None
    further = [2.0 ** (-4 * odd / lower) for odd in range(1, 2 * (n_heads - lower), 2)]
    return [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)] + further
