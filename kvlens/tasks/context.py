"""How much a context helps a model, as tokens before the text and as a bias: a requirement for shipped models."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.conversion import convert_prompt
from kvlens.errors import KVLensError
from kvlens.model import HookedKVTransformer


class ContextEffect(NamedTuple):
    """Mean next-token losses on the text, nats per token, over the same predictions.

    Attributes:
        without: loss after BOS and the text alone.
        with_context: loss with the context before the text.
        converted: loss of the text alone, with the context as a bias.
        relative_error: relative error of the logits with the bias against those with the context, ||new - old|| / ||old||.
    """

    without: float
    with_context: float
    converted: float
    relative_error: float

    @property
    def gain(self) -> float:
        """Nats per token that the converted context saves."""
        return self.without - self.converted


@torch.no_grad()
def context_effect(
    model: HookedKVTransformer, windows: Int[Tensor, "window pos"], n_context: int, *, batch_size: int = 32
) -> ContextEffect:
    """Measure on windows of ``n_context`` tokens of context followed by text.

    Args:
        model: with linear attention and a tokenizer that has a BOS.
        windows: BOS and text, as from :meth:`kvlens.corpus.TokenWindows.consecutive`.
        n_context: tokens of context, BOS included; the rest is the text, of which every token but the first is predicted.

    Raises:
        KVLensError: no windows, or no text after the context.
    """
    if len(windows) == 0 or windows.shape[1] < n_context + 2:
        raise KVLensError(f"context_effect: expected windows of more than {n_context + 1} tokens, got {list(windows.shape)}")
    if model.tokenizer is None:
        raise KVLensError("context_effect: the model has no tokenizer, so there is no BOS for the text alone")
    sums = torch.zeros(3, dtype=torch.float64)
    squares = torch.zeros(2, dtype=torch.float64)
    for batch in windows.split(batch_size):
        batch = batch.to(model.W_E.device)
        text = batch[:, n_context:]
        bos = torch.full_like(text[:, :1], model.tokenizer.bos_token_id)
        alone = model(torch.cat([bos, text], dim=1))[:, 1:]
        original = model(batch)[:, n_context:]
        with model.kv_bias(convert_prompt(model, batch[:, :n_context])):
            converted = model(text)
        sums += torch.stack([_loss(logits, text) for logits in (alone, original, converted)])
        squares += torch.stack([(converted - original).double().square().sum(), original.double().square().sum()]).cpu()
    without, with_context, converted_loss = (sums / len(windows)).tolist()
    return ContextEffect(without, with_context, converted_loss, relative_error=float((squares[0] / squares[1]).sqrt()))


def _loss(logits: Tensor, text: Tensor) -> Tensor:
    """Loss in float64, summed over windows and averaged over their predictions."""
    log_probs = logits[:, :-1].double().log_softmax(dim=-1)
    return -log_probs.gather(-1, text[:, 1:, None]).squeeze(-1).mean(dim=1).sum().cpu()
