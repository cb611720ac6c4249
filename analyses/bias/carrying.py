"""What becomes of a bias while further tokens pass that write nothing: it decays and, with RoPE after the feature map, turns.

    carried(b_KV) = gamma^M R_{-M} b_KV        carried(b_D) = b_D        (M tokens pass; ICLCA eq. 19 without the new terms)

so that a second prompt's own contribution is what its conversion adds to this. Nothing is derived a second time here: a
prompt whose values are all zero writes nothing, and its conversion is the carried bias.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, convert_prompt


def carried_bias(model: HookedKVTransformer, bias: KVBias, tokens: Tensor) -> KVBias:
    """``bias`` as it stands after as many tokens as ``tokens`` has, none of which wrote anything.

    Args:
        model: that ``bias`` was converted with.
        bias: of one prompt.
        tokens: [pos]; only their number matters.

    Returns:
        b_KV decayed and turned, b_D as it was. Boundary and offset are those of the conversion, which nobody should read.
    """
    shifts_values = model.cfg.kv_shift is not None and model.cfg.kv_shift.values
    values = "hook_v_shifted" if shifts_values else "hook_v"  # the last place where the values can still be silenced

    def silence(v: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(v)

    hooks = [(f"blocks.{layer}.attn.{values}", silence) for layer in range(model.cfg.n_layers)]
    return replace(convert_prompt(model, tokens, initial=bias, fwd_hooks=hooks), b_D=bias.b_D)
