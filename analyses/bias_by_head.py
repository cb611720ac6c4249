"""Which layers and heads carry a converted prompt: how large each bias is, how much of the head's output it makes up, and
what is lost without it.

Size and share describe; only the removal (:mod:`analyses.bias_ablation`) tells whether the model uses what is there.
"""

from collections.abc import Callable

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analyses._sequences import PromptTokens, TextTokens, prompt_text_bias
from analyses.bias_ablation import bias_ablation
from kvlens import HookedKVTransformer, KVBias


@torch.no_grad()
def bias_by_head(
    model: HookedKVTransformer,
    prompt_tokens: PromptTokens,
    text_tokens: TextTokens,
    *,
    bias: KVBias | None = None,
    batch_size: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Describe the bias of each head, and remove it.

    Args:
        model: with linear attention.
        prompt_tokens: [pos], BOS included where the model wants one.
        text_tokens: [pos], without BOS.
        bias: the converted prompt, if it is at hand; None converts it here.
        batch_size, on_progress: as in :func:`analyses.bias_ablation.bias_ablation`.

    Returns:
        One row a head, by layer, then head:

        =============== ======= ========================================================================================
        layer           int64
        head            int64   query head
        b_kv_norm       float64 Frobenius norm of b_KV
        b_d_norm        float64 norm of b_D
        bias_share      float64 mean over the text's places of ||z_bias|| / (||z_bias|| + ||z_context||), 0 for 0 / 0
        ablation_kl     float64 mean KL(whole bias || bias without this head), nats
        loss_change     float64 by how much the mean loss rises without this head's bias, nats; NaN for one token
        =============== ======= ========================================================================================

    Raises:
        KVLensError: softmax attention, tokens that are empty, misshapen or outside the vocabulary.
    """
    _, text, bias = prompt_text_bias(model, prompt_tokens, text_tokens, bias)
    pairs = [(layer, head) for layer in range(bias.n_layers) for head in range(bias.n_heads)]
    norms_bias, norms_context = _output_norms(model, bias, text)
    effect = bias_ablation(model, text, bias, [[pair] for pair in pairs], batch_size=batch_size, on_progress=on_progress)
    return pd.DataFrame(
        {
            "layer": [layer for layer, _ in pairs],
            "head": [head for _, head in pairs],
            "b_kv_norm": _flat(bias.b_KV.double().norm(dim=(-2, -1))),
            "b_d_norm": _flat(bias.b_D.double().norm(dim=-1)),
            "bias_share": _flat(_share(norms_bias, norms_context)),
            "ablation_kl": effect["kl"],
            "loss_change": effect["loss_change"],
        }
    )


@torch.no_grad()
def bias_by_layer(
    model: HookedKVTransformer,
    prompt_tokens: PromptTokens,
    text_tokens: TextTokens,
    *,
    bias: KVBias | None = None,
    batch_size: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Describe the bias of each layer, its heads' outputs side by side, and remove all of its heads at once.

    Effects do not add up: what one head loses, another may still know.

    Args:
        model, prompt_tokens, text_tokens, bias, batch_size, on_progress: as in :func:`bias_by_head`.

    Returns:
        One row a layer, with the columns of :func:`bias_by_head` but ``head``.

    Raises:
        KVLensError: as :func:`bias_by_head`.
    """
    _, text, bias = prompt_text_bias(model, prompt_tokens, text_tokens, bias)
    norms_bias, norms_context = (norms.norm(dim=-1, keepdim=True) for norms in _output_norms(model, bias, text))
    layers = [[(layer, head) for head in range(bias.n_heads)] for layer in range(bias.n_layers)]
    effect = bias_ablation(model, text, bias, layers, batch_size=batch_size, on_progress=on_progress)
    return pd.DataFrame(
        {
            "layer": range(bias.n_layers),
            "b_kv_norm": _flat(bias.b_KV.double().flatten(1).norm(dim=-1)),
            "b_d_norm": _flat(bias.b_D.double().flatten(1).norm(dim=-1)),
            "bias_share": _flat(_share(norms_bias, norms_context)),
            "ablation_kl": effect["kl"],
            "loss_change": effect["loss_change"],
        }
    )


def _output_norms(
    model: HookedKVTransformer, bias: KVBias, text: Tensor
) -> tuple[Float[Tensor, "layer pos head"], Float[Tensor, "layer pos head"]]:
    """||z_bias|| and ||z_context|| of every head on the text."""
    names = {part: [f"blocks.{layer}.attn.hook_z_{part}" for layer in range(bias.n_layers)] for part in ("bias", "context")}
    with model.kv_bias(bias):
        _, cache = model.run_with_cache(
            text[None],
            attention_mask=torch.ones_like(text[None]),
            names_filter=names["bias"] + names["context"],
            stop_at_layer=model.cfg.n_layers,
        )
    of_bias, of_context = (
        torch.stack([cache[name][0].double().norm(dim=-1).cpu() for name in names[part]]) for part in ("bias", "context")
    )
    return of_bias, of_context


def _share(
    of_bias: Float[Tensor, "layer pos head"], of_context: Float[Tensor, "layer pos head"]
) -> Float[Tensor, "layer head"]:
    total = of_bias + of_context
    return torch.where(total > 0, of_bias / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0).mean(dim=1)


def _flat(values: Tensor) -> list[float]:
    return values.flatten().tolist()
