"""The rounding error of a model's own forward pass, which defines "exact to rounding".

A conversion that is exact in real numbers sums the same terms in another order, so it may differ from the unconverted model by
about as much as either of them differs from float64. That error is measured on the same tokens instead of bounded, because a
bound grows with the length of the text and is soon far above the actual rounding error.
"""

import copy
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlens import KVModel, KVTransformerBridge

from ..predictions import text_logits

SAMPLE = 1024
"""The number of last tokens of a longer sequence that are run in float64."""
ROWS = 8192
"""Rows of the unembedding that are in float64 at a time."""
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
    """A copy that computes in float64, with the same hooks and attached bias; the tokenizer is not copied.

    It shares the weights. Those of a block are in float64 only while the block is computed, what the embedding looks up is made
    float64 afterwards, and the vocabulary's logits are computed in parts: large models would not fit into memory in float64.
    """
    attached = model.attached_kv_bias
    module: Any = model
    memo: dict[int, Any] = {id(model.tokenizer): model.tokenizer, id(attached): attached}
    memo |= {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in module.parameters()}
    with torch.no_grad():
        exact: Any = copy.deepcopy(module, memo)
        exact.cfg.dtype = torch.float64
        if isinstance(model, KVTransformerBridge):
            exact.original_model.set_experts_implementation("eager")  # the fused form of experts has no float64
        later = set[int]()
        unembed = getattr(exact.unembed, "original_component", None)
        if type(unembed) is nn.Linear:
            unembed.__dict__["forward"] = partial(_in_parts, unembed)
            later |= set(map(id, unembed.parameters()))
        widened = [*exact.blocks]
        if len([*exact.embed.parameters()]) == 1 and not [*exact.embed.buffers()]:
            exact.embed.register_forward_hook(lambda module, args, output: output.double())
            later |= set(map(id, exact.embed.parameters()))
        else:
            widened.append(exact.embed)  # Gemma's scales what it looks up
        for module in widened:
            weights = [weight for weight in module.parameters() if weight.is_floating_point()]
            _widen_during(module, weights)
            later |= set(map(id, weights))
        for tensor in [*exact.parameters(), *exact.buffers()]:
            if tensor.is_floating_point() and id(tensor) not in later:
                tensor.data = tensor.data.double()
    return exact


def _widen_during(module: nn.Module, weights: list[nn.Parameter]) -> None:
    """Let a module's weights be float64 in its forward pass."""
    narrow = [weight.data for weight in weights]

    def widen(*_: Any) -> None:
        for weight in weights:
            weight.data = weight.data.double()

    def restore(*_: Any) -> None:
        for weight, data in zip(weights, narrow, strict=True):
            weight.data = data

    module.register_forward_pre_hook(widen)
    module.register_forward_hook(restore)


def _in_parts(linear: nn.Linear, x: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead d_vocab"]:
    """A linear map in float64, some rows of its weights at a time."""
    parts = [nn.functional.linear(x.double(), rows.double()) for rows in linear.weight.split(ROWS)]
    found = torch.cat(parts, dim=-1)
    return found if linear.bias is None else found + linear.bias.double()
