"""The hook points that kvlens adds to an attention module, and how tensors pass through them.

The hook points are created once, from the configuration. Those of a feature that is off exist but never fire, so that with
everything off a cache has exactly TransformerLens' keys.
"""

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

KVLENS_HOOKS = (
    *(f"hook_{x}_shift_coef" for x in "kvq"),
    *(f"hook_{x}_shifted" for x in "kvq"),
    *("hook_phi_q", "hook_phi_k", "hook_b_kv", "hook_b_d", "hook_b_keys"),
    *("hook_last_k", "hook_last_v", "hook_last_q", "hook_normalizer", "hook_z_context", "hook_z_bias"),
    *("hook_k_augmented", "hook_v_augmented", "hook_z_own", "hook_z_negative"),
)
OF_A_BIAS = ("hook_b_kv", "hook_b_d", "hook_z_context", "hook_z_bias")
"""Fire if there is a KV bias, attached or trained; for a softmax bias those of :data:`OF_A_SOFTMAX_BIAS` too."""
OF_A_SOFTMAX_BIAS = ("hook_b_keys", "hook_phi_q", "hook_normalizer")
"""``hook_b_keys`` fires only if the bias has keys: not with random, learned or Taylor features."""
OF_A_SHIFT_STATE = ("hook_last_k", "hook_last_v", "hook_last_q")
"""Fire if a KV bias is attached."""


def is_hooked(*modules: nn.Module) -> bool:
    """Whether anything is hooked directly to one of ``modules``."""
    for m in modules:  # noqa: SIM110  (each pass asks thousands of times)
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
    return False


def through(hook: HookPoint, x: Tensor) -> Tensor:
    """``hook(x)``, on a copy if anything is hooked, so that in-place edits do not change weights or a KVBias.

    A backward hook gets its gradient even if ``x`` does not require one, as with the tensors of an attached bias.
    """
    if not is_hooked(hook):
        return x
    x = x.clone()
    if hook.has_hooks("bwd") and torch.is_grad_enabled() and not x.requires_grad:
        x.requires_grad_()
    return hook(x)
