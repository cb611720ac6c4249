"""Removing parts of a converted prompt: what the text's predictions lose when chosen heads forget it.

Removing a head's bias sets its b_KV and b_D to zero; the shift boundary and the position offset stay. Many removals run in
one forward pass, each as a row of a batch of biases.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analyses._sequences import (
    TextTokens,
    converted_logits,
    kl_divergence,
    log_probabilities,
    next_token_losses,
    one_sequence,
)
from kvlens import HookedKVTransformer, KVBias, KVLensError

MEMORY_A_PASS = 2**28
"""Bytes that one forward pass may roughly take when the batch size is left open."""

Heads = Sequence[tuple[int, int]]


@torch.no_grad()
def bias_ablation(
    model: HookedKVTransformer,
    text_tokens: TextTokens,
    bias: KVBias,
    removals: Sequence[Heads],
    *,
    batch_size: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """Measure what each removal changes against the whole bias.

    Args:
        model: that ``bias`` was converted with.
        text_tokens: [pos], without BOS.
        bias: of one prompt.
        removals: for each, the (layer, head) pairs whose bias is removed; an empty one changes nothing.
        batch_size: removals a forward pass; None takes what :data:`MEMORY_A_PASS` allows.
        on_progress: called with the fraction done after each forward pass.

    Returns:
        One row a removal, in the order given:

        ============= ======= =======================================================================================
        removal       int64   index into ``removals``
        n_heads       int64   how many heads were removed
        kl            float64 mean over the text's places of KL(whole bias || bias without these heads), nats
        loss_change   float64 by how much the mean loss of the text's next tokens rises, nats; NaN for one token
        ============= ======= =======================================================================================

    Raises:
        KVLensError: a head that does not exist, a batch of biases, a bias of another model, tokens that do not fit.
    """
    text = one_sequence(model, "text_tokens", text_tokens)
    if bias.batch_size is not None:
        raise KVLensError(f"bias_ablation: expected the bias of one prompt, got a batch of {bias.batch_size}")
    if batch_size is not None and batch_size < 1:
        raise KVLensError(f"bias_ablation: batch_size must be at least 1, got {batch_size}")
    keep = _kept_heads(bias, removals)
    rows_a_pass = batch_size or max(1, MEMORY_A_PASS // _bytes_a_row(model, bias, len(text)))
    whole = log_probabilities(converted_logits(model, bias, text))
    whole_loss = next_token_losses(whole, text)[:-1].mean()
    kl, loss_change, done = [], [], 0
    for log_p in _ablated(model, text, bias, keep.split(rows_a_pass)):
        kl += kl_divergence(whole, log_p).mean(dim=-1).tolist()
        loss_change += (next_token_losses(log_p, text)[:, :-1].mean(dim=-1) - whole_loss).tolist()
        done += len(log_p)
        if on_progress is not None:
            on_progress(done / len(keep))
    return pd.DataFrame(
        {
            "removal": pd.Series(range(len(removals)), dtype="int64"),
            "n_heads": (1 - keep).sum(dim=(1, 2)).long().cpu().numpy(),
            "kl": pd.Series(kl, dtype="float64"),
            "loss_change": pd.Series(loss_change, dtype="float64"),
        }
    )


def _kept_heads(bias: KVBias, removals: Sequence[Heads]) -> Float[Tensor, "removal layer head"]:
    keep = bias.b_KV.new_ones(len(removals), bias.n_layers, bias.n_heads)
    for row, removal in enumerate(removals):
        for layer, head in removal:
            if not (0 <= layer < bias.n_layers and 0 <= head < bias.n_heads):
                raise KVLensError(
                    f"bias_ablation: removal {row} names layer {layer}, head {head}; there are {bias.n_layers} layers "
                    f"of {bias.n_heads} heads, counted from 0"
                )
            keep[row, layer, head] = 0
    return keep


def _bytes_a_row(model: HookedKVTransformer, bias: KVBias, pos: int) -> int:
    """The bias and its copy in the layers, the logits and their float64 probabilities, the widest activations."""
    widest = max(model.cfg.d_mlp or 0, model.cfg.d_model, bias.n_heads * bias.b_KV.shape[-2])
    return 8 * bias.num_parameters + pos * (28 * model.cfg.d_vocab_out + 16 * widest)


def _ablated(
    model: HookedKVTransformer, text: Tensor, bias: KVBias, parts: Sequence[Tensor]
) -> Iterator[Float[Tensor, "removal pos d_vocab"]]:
    """Log probabilities on the text, for each part of the removals in one forward pass."""
    for keep in parts:
        if not len(keep):
            continue
        keep = keep.transpose(0, 1)  # the batch comes after the layer
        last_k, last_v, last_q = (
            rows[:, None].expand(-1, keep.shape[1], -1, -1, -1) for rows in (bias.last_k, bias.last_v, bias.last_q)
        )
        batch = replace(
            bias,
            b_KV=bias.b_KV[:, None] * keep[..., None, None],
            b_D=bias.b_D[:, None] * keep[..., None],
            last_k=last_k,
            last_v=last_v,
            last_q=last_q,
        )
        with model.kv_bias(batch):
            rows = text[None].expand(keep.shape[1], -1)
            yield log_probabilities(model(rows, attention_mask=torch.ones_like(rows)))
