"""The rounding error of a model's own forward pass, which defines "exact to rounding".

A conversion that is exact in real numbers sums the same terms in another order, so it may differ from the unconverted model by
about as much as either of them differs from float64. That error is measured on the same tokens instead of bounded, because a
bound grows with the length of the text and is soon far above the actual rounding error.
"""

import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVModel, KVTransformerBridge

from ..predictions import text_logits

SAMPLE = 1024
"""The number of last tokens of a longer sequence that are run in float64."""
ALLOWED = 4
"""The multiple of the forward pass's error that counts as rounding; two passes differ by sqrt(2) of it, within a factor 2."""
FLOAT64_LIMIT = 1e-12
"""The limit for a float64 model, for which there is no more exact reference."""


def rounding_error(model: KVModel, prompt: Int[Tensor, " prompt_pos"], text: Int[Tensor, " text_pos"]) -> float:
    """||logits - logits in float64|| / ||logits in float64|| of the unconverted model over the text's positions.

    Args:
        model: the model, with whatever is attached to it.
        prompt, text: tokens; only the last :data:`SAMPLE` of them are used.

    Returns:
        The error, at least a quarter of the dtype's precision, since in very small models nothing is rounded.
    """
    precision = torch.finfo(model.cfg.dtype).eps
    if model.cfg.dtype == torch.float64:
        return precision / 4
    text = text[-SAMPLE:]
    prompt = prompt[max(0, len(prompt) + len(text) - SAMPLE) :]
    own = text_logits(model, prompt, text).double()
    exact = text_logits(_in_float64(model), prompt, text).to(own)
    return max(relative_error(own, exact), precision / 4)


def rounding_limit(model: KVModel, error: float) -> float:
    """The largest relative error at which a conversion counts as exact to rounding.

    Args:
        model: its dtype sets the limit.
        error: the result of :func:`rounding_error`.
    """
    return FLOAT64_LIMIT if model.cfg.dtype == torch.float64 else ALLOWED * error


def relative_error(x: Float[Tensor, "pos d_vocab"], reference: Float[Tensor, "pos d_vocab"]) -> float:
    """||x - reference|| / ||reference|| over all entries."""
    return float((x - reference).norm() / reference.norm())


def _in_float64(model: KVModel) -> KVModel:
    """A copy with the same weights, hooks and attached bias; the tokenizer is not copied."""
    attached = model.attached_kv_bias
    with torch.no_grad():
        exact: Any = copy.deepcopy(model, {id(model.tokenizer): model.tokenizer, id(attached): attached})
        exact.cfg.dtype = torch.float64
        if isinstance(model, KVTransformerBridge):
            exact.original_model.set_experts_implementation("eager")  # the fused form of experts has no float64
        torch.nn.Module.to(exact, dtype=torch.float64)
    return exact
