"""Replacing TransformerLens' components by kvlens' own, and giving each layer its part of an attached bias.

TransformerLens chooses the class of a block's attention itself. ``block.attn`` and ``model.pos_embed`` must be replaced before
``init_weights`` and ``setup`` run, in that order; otherwise weights stay uninitialized and hooks unnamed, without an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvlens.components import (
    KVBlock,
    KVUnembed,
    LayerBias,
    NoPosEmbed,
    Normalizers,
    OffsetPosEmbed,
    SinusoidalPosEmbed,
    build_attention,
)
from kvlens.kv_bias import KVBias


def replace_components(model: Any) -> None:
    """Install kvlens' attention, blocks, unembedding and positions in a model that TransformerLens has just built."""
    cfg = model.cfg
    for layer, block in enumerate(model.blocks):
        block.attn = build_attention(cfg, block.attn.attn_type, layer)
        model.blocks[layer] = KVBlock.of(block)
    model.unembed = KVUnembed.of(model.unembed)
    tables = [block.attn.rotary_table for block in model.blocks if hasattr(block.attn, "rotary_table")]
    for block in model.blocks[1:] if tables else ():
        block.attn.rotary_table = tables[0]  # one table for all layers
    if cfg.positional_embedding_type == "none":
        model.pos_embed = NoPosEmbed()
    elif cfg.positional_embedding_type == "sinusoidal":
        model.pos_embed = SinusoidalPosEmbed(cfg.d_model)
    elif cfg.positional_embedding_type != "rotary":
        model.pos_embed = OffsetPosEmbed(cfg)
        torch.nn.init.zeros_(model.pos_embed.W_pos)  # checkpoints with ALiBi do not contain it, and it must be set


@contextmanager
def seeded(seed: int | None, *, on_cpu: bool = True) -> Iterator[None]:
    """Seed torch with ``seed`` inside the block (unless None), then restore its state; includes GPUs unless ``on_cpu``."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices, enabled=seed is not None):
        if seed is not None:
            (torch.default_generator if on_cpu else torch).manual_seed(seed)
        yield


def init_kv_parameters(model: Any) -> None:
    """Initialize kvlens' own parameters: shift coefficients and feature maps (b_KV and b_D start at 0)."""
    generator = None if model.cfg.seed is None else torch.Generator().manual_seed(model.cfg.seed)
    for block in model.blocks:
        block.attn.init_kv_parameters(generator)


@torch.enable_grad()
def spread_bias(model: Any, bias: KVBias | None) -> None:
    """Give each layer its part of the attached bias, with gradients enabled even if it is attached under ``no_grad``."""
    model._normalizers = None if bias is None else Normalizers()
    for layer, block in enumerate(model.blocks):
        block.attn.layer_bias = None if bias is None else LayerBias.of(bias, layer, block.attn.W_O.device)
        block.attn.normalizers = model._normalizers
    if isinstance(getattr(model, "pos_embed", None), (OffsetPosEmbed, SinusoidalPosEmbed)):
        model.pos_embed.position_offset = 0 if bias is None else bias.position_offset
