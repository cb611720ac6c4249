"""What single heads do with a prompt: whom the text's queries attend to, which prompt tokens count, what share the bias has."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.bias.outputs import bias_outputs, share_by_size
from analyses.bias.positions import bias_positions
from analyses.heads.rows import attention_rows
from analyses.sequences import PromptTokens, TextTokens, prompt_text_bias, token_texts
from kvlens import HookedKVTransformer, KVBias, KVLensError
from kvlens.signature import checked

MAX_QUERIES, MAX_PROMPT_QUERIES = 128, 64
"""Rows of the pattern that are computed: of the text, evenly spaced, and of the prompt, those that the text attends to most."""


@dataclass(frozen=True)
class HeadDetails:
    """Every head's attention on one prompt and text.

    Attributes:
        prompt, text: their tokens as text.
        queries: positions in prompt + text, ascending: the rows of ``pattern``. The text's are there (128 of a longer one),
            and of the prompt the positions that these attend to most.
        pattern: of the unconverted model, over prompt and text: [layer, head, query, prompt + text].
        prompt_shares: [layer, head, prompt] of each prompt token in the head's output, over the whole text; with the shares of
            the shift boundary and of the text itself they sum to 1.
        bias_shares: [layer, head, text] how much of the head's output comes from the prompt, 0..1; None where it is unknown.
    """

    prompt: list[str]
    text: list[str]
    queries: Int[Tensor, " query"]
    pattern: Float[Tensor, "layer head query pos"]
    prompt_shares: Float[Tensor, "layer head prompt_pos"]
    bias_shares: Float[Tensor, "layer head text_pos"] | None = None


@checked
@torch.no_grad()
def head_details(
    model: HookedKVTransformer,
    prompt_tokens: PromptTokens,
    text_tokens: TextTokens,
    *,
    bias: KVBias | None = None,
) -> HeadDetails:
    """Run the unconverted model on prompt and text, and the converted one on the text.

    Args:
        model: linear or softmax, nothing attached.
        prompt_tokens: a string, or tokens [pos] with BOS where the model wants one.
        text_tokens: a string, or tokens [pos] without BOS.
        bias: the converted prompt, if it is at hand; None converts it here.

    Raises:
        KVLensError: an attached bias, an empty prompt or text, heads that do not write to the residual
            stream directly.
    """
    if model.attached_kv_bias is not None:
        raise KVLensError("head_details: a bias is attached to this model; detach it first (model.detach_kv_bias())")
    prompt, text, bias = prompt_text_bias(model, prompt_tokens, text_tokens, bias)
    n_prompt, n_text = len(prompt), len(text)
    everything = torch.cat([prompt, text])
    queries = n_prompt + torch.linspace(0, n_text - 1, min(n_text, MAX_QUERIES)).round().long()
    pattern = attention_rows(model, everything, queries)
    attended = pattern[..., :n_prompt].abs().sum(dim=(0, 1, 2))
    in_prompt = attended.topk(min(n_prompt, MAX_PROMPT_QUERIES)).indices.sort().values
    return HeadDetails(
        prompt=token_texts(model, prompt),
        text=token_texts(model, text),
        queries=torch.cat([in_prompt, queries]),
        pattern=torch.cat([attention_rows(model, everything, in_prompt), pattern], dim=2),
        prompt_shares=_prompt_shares(model, prompt, text),
        bias_shares=_bias_shares(model, text, bias),
    )


def _prompt_shares(
    model: HookedKVTransformer, prompt: Int[Tensor, " prompt_pos"], text: Int[Tensor, " text_pos"]
) -> Float[Tensor, "layer head prompt_pos"]:
    """The share of each prompt token in each head's output on the text (:func:`analyses.bias.positions.bias_positions`)."""
    frame = bias_positions(model, prompt, text)
    of_prompt = frame.loc[frame["part"] == "prompt", "output_share"]  # by layer, head, position
    shares = torch.tensor(of_prompt.to_numpy(), dtype=torch.float32)
    return shares.view(model.cfg.n_layers, model.cfg.n_heads, len(prompt))


def _bias_shares(
    model: HookedKVTransformer, text: Int[Tensor, " text_pos"], bias: KVBias
) -> Float[Tensor, "layer head text_pos"]:
    """How much of every head's output at every place of the text the bias makes up."""
    outputs = bias_outputs(model, bias, text)
    share = share_by_size(outputs.of_bias.norm(dim=-1), outputs.of_context.norm(dim=-1))
    return share.transpose(1, 2).float().cpu()
