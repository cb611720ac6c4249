"""Rotary frequencies: plain, scaled linearly, by parts (Llama 3.1) and by YaRN.

A pair of features turns by position / wavelength, and the wavelengths are base^(2i / rotary_dim). The scaled forms lengthen the
long ones (Peng et al. 2023, YaRN, sec. 3.1 to 3.4). Rounding matters here: each form is computed in the order and the precision
in which checkpoints are run elsewhere.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def sin_cos(
    cfg: Any, attn_type: str, n_ctx: int, base: float | int, dtype: torch.dtype
) -> tuple[Float[Tensor, "n_ctx rotary_dim"], Float[Tensor, "n_ctx rotary_dim"]]:
    """sin and cos of positions 0 .. n_ctx - 1.

    Args:
        cfg: says which form and its parameters.
        attn_type: "global" or "local": some forms scale only global layers.
        n_ctx: number of rows.
        base: of the frequencies.
        dtype: of the result; computed in float32, or in float64 for float64.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    is_local = attn_type == "local"
    yarn = cfg.use_yarn_rope and not (cfg.yarn_global_attn_only and is_local)
    if cfg.use_NTK_by_parts_rope:
        wavelengths = 1 / _by_parts(cfg, base)
    elif yarn:
        wavelengths = 1 / _yarn(cfg, base, wide)
    else:
        wavelengths = base ** (torch.arange(cfg.rotary_dim // 2, dtype=wide) / (cfg.rotary_dim / 2))
        if cfg.rotary_scaling_factor != 1.0 and not is_local:
            wavelengths = wavelengths * cfg.rotary_scaling_factor
    wavelengths = wavelengths.repeat_interleave(2) if cfg.rotary_adjacent_pairs else wavelengths.repeat(2)
    angles = torch.arange(n_ctx, dtype=wide)[:, None] / wavelengths
    sin, cos = angles.sin().to(dtype), angles.cos().to(dtype)
    if yarn and cfg.yarn_attention_factor != 1.0:
        return sin * cfg.yarn_attention_factor, cos * cfg.yarn_attention_factor
    return sin, cos


def _by_parts(cfg: Any, base: float | int) -> Float[Tensor, " pairs"]:
    """Llama 3.1's frequencies: long waves divided by the factor, short ones kept, those between interpolated."""
    frequencies = 1.0 / base ** (torch.arange(0, cfg.rotary_dim, 2).float() / cfg.rotary_dim)
    factor, low, high = cfg.NTK_by_parts_factor, cfg.NTK_by_parts_low_freq_factor, cfg.NTK_by_parts_high_freq_factor
    trained = cfg.NTK_original_ctx_len
    lengths = 2 * math.pi / frequencies
    is_long, is_short = lengths > trained / low, lengths < trained / high
    kept = (trained / lengths - low) / (high - low)
    between = (1 - kept) * frequencies / factor + kept * frequencies
    return torch.where(is_long, frequencies / factor, torch.where(is_short, frequencies, between))


def _yarn(cfg: Any, base: float | int, wide: torch.dtype) -> Float[Tensor, " pairs"]:
    """YaRN's frequencies: pairs that turn more than ``beta_fast`` times in training are kept, others divided."""
    dim, trained = cfg.rotary_dim, cfg.yarn_original_max_position_embeddings
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=wide) / dim)

    def pair_of(turns: float) -> float:
        return (dim * math.log(trained / (turns * 2 * math.pi))) / (2 * math.log(base))

    first, last = pair_of(cfg.yarn_beta_fast), pair_of(cfg.yarn_beta_slow)
    if cfg.yarn_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (float(last) + 0.001 if first == last else float(last)) - first
    divided = ((torch.arange(dim // 2, dtype=wide) - first) / width).clamp(0, 1)
    return frequencies / cfg.yarn_factor * divided + frequencies * (1 - divided)
