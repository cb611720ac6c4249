"""What a model does for all its layers: seeding, and each layer's part of an attached bias."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvlens.components import Normalizers, OffsetPosEmbed, SinusoidalPosEmbed, layer_bias_of
from kvlens.kv_bias import KVBias


@contextmanager
def seeded(seed: int | None, *, on_cpu: bool = True) -> Iterator[None]:
    """Seed torch with ``seed`` inside the block (unless None), then restore its state; includes GPUs unless ``on_cpu``."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices, enabled=seed is not None):
        if seed is not None:
            (torch.default_generator if on_cpu else torch).manual_seed(seed)
        yield


@torch.enable_grad()
def spread_bias(model: Any, bias: KVBias | None) -> None:
    """Give each layer its part of the attached bias, with gradients enabled even if it is attached under ``no_grad``.

    The parts are views, which learn of what is written to the bias, but not that it is to have gradients since.
    """
    model._spread_with_gradients = [] if bias is None else bias.requiring_grad()
    model._normalizers = None if bias is None else Normalizers()
    for layer, block in enumerate(model.blocks):
        block.attn.layer_bias = None if bias is None else layer_bias_of(bias, layer, block.attn.W_O.device)
        block.attn.normalizers = model._normalizers
    if isinstance(getattr(model, "pos_embed", None), (OffsetPosEmbed, SinusoidalPosEmbed)):
        model.pos_embed.position_offset = 0 if bias is None else bias.position_offset
