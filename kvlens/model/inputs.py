"""Checks of a model's inputs: configuration, tokens and their number, hook names. Errors say what was expected."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from kvlens.arguments import check_characters
from kvlens.errors import KVLensError, brief, nearest
from kvlens.kv_bias import KVBias
from kvlens.model.config import HookedKVTransformerConfig

NOT_TOKENS = (torch.bool, torch.uint8)
"""Integer dtypes that torch treats as masks, not as indices."""


def as_kv_config(cfg: Any) -> HookedKVTransformerConfig:
    """A HookedKVTransformerConfig from one, from a TransformerLens configuration, or from a dict of its fields."""
    if isinstance(cfg, HookedKVTransformerConfig):
        return cfg
    if isinstance(cfg, dict):
        return HookedKVTransformerConfig(**cfg)
    return HookedKVTransformerConfig.from_tl(cfg)


def check_input(model: Any, given: Any, attention_mask: Any, past: Any, *, is_stream: bool) -> None:
    """Raise KVLensError unless a forward pass can start from ``given``, and the mask matches its positions.

    Args:
        model: of either front end.
        given: text, tokens, or the stream where ``is_stream``.
        attention_mask: 1 at real tokens, or None.
        past: a cache of what came before, or None.
        is_stream: whether the pass starts from the residual stream.
    """
    cfg = model.cfg
    if not isinstance(given, Tensor):
        check_text("forward", given)
        if model.tokenizer is None:
            raise KVLensError("forward: this model has no tokenizer: give token ids, a tensor [pos] or [batch, pos]")
    elif given.dim() == 0:
        raise KVLensError("forward: expected token ids [pos] or [batch, pos], got a single number; put it into a list")
    elif is_stream and (given.dim() != 3 or given.shape[-1] != cfg.d_model or not given.is_floating_point()):
        wanted = f"the stream, floating-point numbers [batch, pos, {cfg.d_model}]"
        raise KVLensError(f"forward: expected {wanted}, got {brief(given)} of {given.dtype}")
    if attention_mask is None:
        return
    known = isinstance(given, Tensor) and past is None  # with a cache, the mask covers the whole text
    positions = ([1, *given.shape] if given.dim() == 1 else list(given.shape[:2])) if known else None
    if not isinstance(attention_mask, Tensor) or (positions is not None and list(attention_mask.shape) != positions):
        wanted = "[batch, pos]" if positions is None else str(positions)
        raise KVLensError(f"forward: attention_mask must be a tensor {wanted}, a value per token, got {brief(attention_mask)}")


def check_text(what: str, given: Any) -> None:
    """Raise KVLensError unless ``given`` is a string or a non-empty list of strings, without surrogate characters."""
    several = isinstance(given, list) and len(given) > 0 and all(isinstance(text, str) for text in given)
    if not isinstance(given, str) and not several:
        raise KVLensError(
            f"{what}: expected a string, a list of strings, or token ids as a tensor [pos] or [batch, pos], got {brief(given)}"
        )
    for text in [given] if isinstance(given, str) else given:
        check_characters(what, text)


def check_tokens(cfg: Any, tokens: Tensor) -> None:
    """Raise KVLensError unless ``tokens``, of any shape, is not empty and holds integers in 0..``cfg.d_vocab`` - 1."""
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype in NOT_TOKENS:
        raise KVLensError(f"tokens must be integers (int64 or int32), got {tokens.dtype}")
    if tokens.numel() == 0:
        raise KVLensError("the text is empty: give at least one token (a bias replaces a prompt, not the text)")
    least, largest = map(int, tokens.aminmax())
    if least < 0 or largest >= cfg.d_vocab:
        raise KVLensError(f"token ids must lie in 0..{cfg.d_vocab - 1} (d_vocab={cfg.d_vocab}), got {least}..{largest}")


def check_room(cfg: HookedKVTransformerConfig, bias: KVBias) -> None:
    """Raise KVLensError if a bias replaces so many tokens that no position is left for a text."""
    offset = int(torch.as_tensor(bias.position_offset).max())
    if cfg.has_position_limit and offset >= cfg.n_ctx:
        raise KVLensError(
            f"attach_kv_bias: the text after this bias would start at position {offset}, but the model has positions 0 to "
            f"{cfg.n_ctx - 1} (n_ctx={cfg.n_ctx}); convert a shorter prompt"
        )


def check_hook_names(names: Any, hook_points: Collection[str]) -> None:
    """Raise KVLensError if ``names`` (one name or several) includes no existing hook point; suggests the nearest name."""
    for name in [names] if isinstance(names, str) else names if isinstance(names, (list, tuple)) else ():
        if name not in hook_points:
            raise KVLensError(f"no hook point is called {name!r}{nearest(name, hook_points)}")
