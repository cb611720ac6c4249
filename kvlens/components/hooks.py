"""The hook points that kvlens adds to an attention, and how a tensor goes through one.

The hook points are made once, from the configuration. Those of a feature that is off exist and never fire, so that with
everything off a cache holds TransformerLens' keys and no others.
"""

import torch
from torch import Tensor, nn

from kvlens._tl import HookPoint

KVLENS_HOOKS = (
    *(f"hook_{x}_shift_coef" for x in "kvq"),
    *(f"hook_{x}_shifted" for x in "kvq"),
    *("hook_phi_q", "hook_phi_k", "hook_b_kv", "hook_b_d", "hook_last_k", "hook_last_v", "hook_last_q"),
    *("hook_normalizer", "hook_z_context", "hook_z_bias"),
    *("hook_k_augmented", "hook_v_augmented", "hook_z_own", "hook_z_negative"),
)
OF_A_BIAS = ("hook_b_kv", "hook_b_d", "hook_z_context", "hook_z_bias")
"""Fire where there is a KV bias, attached or trained; of a softmax bias also hook_phi_q and hook_normalizer."""
OF_A_SHIFT_STATE = ("hook_last_k", "hook_last_v", "hook_last_q")
"""Fire where a KV bias is attached."""


def is_hooked(*modules: nn.Module) -> bool:
    """Whether anything is hooked to one of ``modules`` themselves."""
    return any(bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks) for m in modules)


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
