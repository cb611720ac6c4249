"""KV shift in a layer: its parameters on the attention module, and the shift itself (KVSA eq. 4-6)."""

from typing import Any

import torch
from torch import Tensor, nn

from kvlens.components.decode_cache import ShiftState
from kvlens.components.hooks import through
from kvlens.ops.kv_shift import coefficients_from_parameter, initial_shift_parameter, kv_shift


def shifted_heads(cfg: Any) -> dict[str, int]:
    """The projections among "k", "v", "q" that are shifted, each with its number of heads."""
    shift = cfg.kv_shift
    if shift is None:
        return {}
    wanted = {"k": (shift.keys, cfg.n_kv_heads), "v": (shift.values, cfg.n_kv_heads), "q": (shift.queries, cfg.n_heads)}
    return {x: n_heads for x, (on, n_heads) in wanted.items() if on}


def add_shift_parameters(attn: nn.Module, cfg: Any) -> None:
    """Create ``k_shift_coef``, ``v_shift_coef``, ``q_shift_coef`` as the configuration requires, to be initialized later."""
    for x, n_heads in shifted_heads(cfg).items():
        parameter = torch.zeros(n_heads, cfg.kv_shift.window + 1, dtype=cfg.dtype)
        setattr(attn, f"{x}_shift_coef", nn.Parameter(parameter))


@torch.no_grad()
def init_shift_parameters(attn: nn.Module, cfg: Any, generator: torch.Generator | None) -> None:
    """Draw the initial coefficients, independently for keys, values and queries (KVSA sec. 2.2)."""
    shift = cfg.kv_shift
    for x, n_heads in shifted_heads(cfg).items():
        initial = initial_shift_parameter(n_heads, shift.window, shift.parametrization, shift.init, generator)
        getattr(attn, f"{x}_shift_coef").copy_(initial)


def shift_projections(
    attn: Any, projections: dict[str, Tensor], state: ShiftState, mask: Tensor | None
) -> tuple[dict[str, Tensor], ShiftState]:
    """Shift q, k and v as configured.

    Args:
        attn: the layer's attention, with its coefficients, hook points and attached bias.
        projections: raw q, k, v by name, each [batch, pos, head, d_head].
        state: the previous raw rows from a decode cache; empty at the start of a text, where those of an attached bias are
            read (and their hooks fire), or zeros.
        mask: True at real tokens, or None.

    Returns:
        The projections with the shifted ones replaced, and the new shift state.
    """
    if attn.cfg.kv_shift is None:
        return projections, {}
    projections, after = dict(projections), {}
    for x in shifted_heads(attn.cfg):
        raw = projections[x]
        before = state.get(x)
        if before is None and attn.layer_bias is not None:
            before = getattr(attn.layer_bias, f"last_{x}").to(raw.device, raw.dtype)
            before = through(getattr(attn, f"hook_last_{x}"), before)
        if before is not None and before.shape[2] != raw.shape[2]:  # ungrouped, as below
            before = before.repeat_interleave(raw.shape[2] // before.shape[2], dim=2)
        parameter = getattr(attn, f"{x}_shift_coef")
        coef = coefficients_from_parameter(parameter, attn.cfg.kv_shift.parametrization)
        coef = through(getattr(attn, f"hook_{x}_shift_coef"), coef)
        if raw.shape[2] != coef.shape[0]:  # ungroup_grouped_query_attention
            coef = coef.repeat_interleave(raw.shape[2] // coef.shape[0], dim=0)
        shifted, after[x] = kv_shift(raw, coef, before, mask)
        projections[x] = getattr(attn, f"hook_{x}_shifted")(shifted)
    return projections, after
