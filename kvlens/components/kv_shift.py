"""What every kvlens attention has beside TransformerLens' own: KV-shift parameters, and the hook points of shift and bias.

The hook points are made once, from the configuration. Those of a feature that is off exist and never fire, so that with
everything off a cache holds TransformerLens' keys and no others.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvlens._tl import HookPoint
from kvlens.components.decode_cache import Boundary
from kvlens.components.fast_path import is_hooked
from kvlens.components.layer_bias import LayerBias
from kvlens.ops.kv_shift import coefficients_from_parameter, initial_shift_parameter, kv_shift

KVLENS_HOOKS = (
    *(f"hook_{x}_shift_coef" for x in "kvq"),
    *(f"hook_{x}_shifted" for x in "kvq"),
    *("hook_phi_q", "hook_phi_k", "hook_b_kv", "hook_b_d", "hook_last_k", "hook_last_v", "hook_last_q"),
    *("hook_normalizer", "hook_z_context", "hook_z_bias"),
    *("hook_k_augmented", "hook_v_augmented", "hook_z_own", "hook_z_negative"),
)


if TYPE_CHECKING:  # what it is mixed into; at run time TransformerLens' class comes behind it in the list of bases
    from kvlens._tl import AbstractAttention as _Attention
else:
    _Attention = nn.Module


class KVShiftAndHooks(_Attention):
    """Mixed in before TransformerLens' ``Attention`` or ``GroupedQueryAttention``."""

    cfg: Any
    layer_bias: LayerBias | None = None
    """The attached bias of this layer; set by ``HookedKVTransformer.attach_kv_bias``."""

    def add_hooks_and_shift(self) -> None:
        """Make the hook points and, where the configuration asks for a shift, its parameters (to be initialized later)."""
        for name in KVLENS_HOOKS:
            setattr(self, name, HookPoint())
        for x, n_heads in self.shifted_projections().items():
            parameter = torch.zeros(n_heads, self.cfg.kv_shift.window + 1, dtype=self.cfg.dtype)
            setattr(self, f"{x}_shift_coef", nn.Parameter(parameter))

    def shifted_projections(self) -> dict[str, int]:
        """Of "k", "v", "q" those that are shifted, each with its number of heads."""
        shift, cfg = self.cfg.kv_shift, self.cfg
        if shift is None:
            return {}
        wanted = {
            "k": (shift.keys, cfg.n_kv_heads),
            "v": (shift.values, cfg.n_kv_heads),
            "q": (shift.queries, cfg.n_heads),
        }
        return {x: n_heads for x, (on, n_heads) in wanted.items() if on}

    @torch.no_grad()
    def init_shift(self, generator: torch.Generator | None) -> None:
        """Draw the initial coefficients: keys, values and queries apart (KVSA sec. 2.2)."""
        shift = self.cfg.kv_shift
        for x, n_heads in self.shifted_projections().items():
            initial = initial_shift_parameter(n_heads, shift.window, shift.parametrization, shift.init, generator)
            getattr(self, f"{x}_shift_coef").copy_(initial)

    def shift(
        self, projections: dict[str, Tensor], boundary: Boundary, mask: Tensor | None
    ) -> tuple[dict[str, Tensor], Boundary]:
        """Shift those of q, k, v that are to be shifted.

        Args:
            projections: raw q, k, v by name, each [batch, pos, head, d_head].
            boundary: the raw rows before, where a decode cache has them; empty for the start of a text, where those of
                an attached bias are read (and their hooks fire), or zeros.
            mask: True at real tokens, or None.

        Returns:
            The projections with the shifted ones replaced, and the new boundary.
        """
        after = {}
        for x in self.shifted_projections():
            raw = projections[x]
            before = boundary.get(x)
            if before is None and self.layer_bias is not None:
                before = getattr(self.layer_bias, f"last_{x}").to(raw.device, raw.dtype)
                before = through(getattr(self, f"hook_last_{x}"), before)
            if before is not None and before.shape[2] != raw.shape[2]:  # ungrouped, as below
                before = before.repeat_interleave(raw.shape[2] // before.shape[2], dim=2)
            parameter = getattr(self, f"{x}_shift_coef")
            coef = coefficients_from_parameter(parameter, self.cfg.kv_shift.parametrization)
            coef = through(getattr(self, f"hook_{x}_shift_coef"), coef)
            if raw.shape[2] != coef.shape[0]:  # TransformerLens' ungroup_grouped_query_attention
                coef = coef.repeat_interleave(raw.shape[2] // coef.shape[0], dim=0)
            shifted, after[x] = kv_shift(raw, coef, before, mask)
            projections = {**projections, x: getattr(self, f"hook_{x}_shifted")(shifted)}
        return projections, after


def through(hook: HookPoint, x: Tensor) -> Tensor:
    """``hook(x)``, on a copy where something is hooked: a hook that edits in place must not reach weights or a KVBias.

    A backward hook gets its gradient also where ``x`` asked for none, as the tensors of an attached bias.
    """
    if not is_hooked(hook):
        return x
    x = x.clone()
    if hook.has_hooks("bwd") and torch.is_grad_enabled() and not x.requires_grad:
        x.requires_grad_()
    return hook(x)


def real_tokens(attention_mask: Tensor | None, pos: int, device: torch.device) -> Tensor | None:
    """The mask of the ``pos`` newest places, True at real tokens; None where there is no padding at all."""
    if attention_mask is None:
        return None
    mask = attention_mask[:, -pos:].bool().to(device)
    return None if bool(mask.all()) else mask
