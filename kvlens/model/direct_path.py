"""From the heads of a HookedKVTransformer to its logits: what direct logit attribution freezes and multiplies with."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.model.protocol import DirectPath, Unembedding

FINAL_SCALE = "ln_final.hook_scale"


def unembedding_of(model: Any) -> Unembedding:
    """See :meth:`kvlens.KVModel.unembedding`.

    Whether the norm centers is asked of the module: ``cfg.final_rms`` still says RMSNorm where TransformerLens has folded it
    into a LayerNormPre.
    """
    norm = getattr(model, "ln_final", None)
    centers = type(norm).__name__ in ("LayerNorm", "LayerNormPre")
    return Unembedding(model.W_U, model.b_U, getattr(norm, "w", None), getattr(norm, "b", None), centers)


def direct_path_of(model: Any, text: Int[Tensor, " pos"]) -> DirectPath:
    """See :meth:`kvlens.KVModel.direct_path`."""
    scale: list[Tensor] = []
    hooks: list[Any] = []
    if model.cfg.normalization_type is not None:
        hooks = [(FINAL_SCALE, lambda s, hook: scale.append(s[0].double().to(text.device)))]
    with model.hooks(fwd_hooks=hooks):
        model.logits_on(text[None], len(text))
    found = scale[0] if scale else torch.ones(len(text), 1, dtype=torch.float64, device=text.device)
    return DirectPath(found, [None] * model.cfg.n_layers)
